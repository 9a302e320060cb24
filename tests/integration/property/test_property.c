/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random layers through the whole service against the oracle, bit for bit: 0 differences, the same
 * refusals, nothing written beside the result, nothing at all on failure. And the proof that a
 * wrong result would be seen: mutants.h.
 *
 *     integration_property [--seed S] [--cases N] [--slots N] [--case NUMBER] [--local FAMILY]
 *     [--daemons FAMILY]
 *
 * A case is a pure function of (seed, number); --case runs one alone and describes it. --slots:
 * after the cases, others of many slots until so many were compared. FAMILY: portable, bf16dp,
 * bf16odd, w4a8; auto, what nodes take on this CPU when nobody says, is that of the nodes in this
 * process, bf16dp that of the daemons. EP_TEST_LONG=1: ten times as many cases, and SLOTS_LONG
 * slots.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_run.h"
#include "clusters.h"
#include "coverage.h"
#include "mutants.h"
#include "support/process.h"
#include "transport/transport.h"

#ifndef PROPERTY_CASES
#define PROPERTY_CASES 5040
#endif

/* SHM_BYTES_MIN: more than the coordinator's Hello and pings, which go over shared memory too. */
enum {
    DAEMON_MUTANTS_CASES_MIN = 5000,
    CALLERS = 4,
    LONG_FACTOR = 10,
    SLOTS_LONG = 10000000,
    SHM_BYTES_MIN = 1 << 15
};

typedef struct arguments {
    uint64_t seed;
    uint64_t cases;
    uint64_t first;
    uint64_t slots_min; /* to be compared */
    bool single;
    enum ref_family families[PLACES_COUNT];
} arguments;

typedef struct totals {
    uint64_t layers;
    uint64_t over_daemons;
    uint64_t refused;
    uint64_t rows;
    uint64_t slots; /* in accepted batches */
    uint64_t differing_elements;
    uint64_t failed_cases;
} totals;

typedef struct property_run {
    arguments args;
    char dir[EP_TEST_PATH_BYTES];
    test_model models[MODELS_COUNT];
    local_cluster *local;
    daemon_cluster *daemons;
    mutant_board mutants;
    _Atomic uint64_t next;
    _Atomic uint64_t slots; /* as totals.slots */
    _Atomic bool stop;
    pthread_mutex_t lock; /* totals, coverage, and what is printed */
    totals totals;
    case_coverage covered;
} property_run;

static bool parse_number(const char *text, uint64_t *out)
{
    char *end;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == 0;
}

static bool parse_arguments(int argc, char **argv, arguments *out)
{
    const char *length = getenv("EP_TEST_LONG");
    *out = (arguments){
        .seed = 1, .cases = PROPERTY_CASES, .families = {ref_family_default(), REF_BF16DP}};
    if (length != NULL && strcmp(length, "1") == 0) {
        out->cases *= LONG_FACTOR;
        out->slots_min = SLOTS_LONG;
    }
    for (int i = 1; i < argc; i += 2) {
        enum ref_family *family = strcmp(argv[i], "--local") == 0 ? &out->families[PLACE_LOCAL]
                                  : strcmp(argv[i], "--daemons") == 0
                                      ? &out->families[PLACE_DAEMONS]
                                      : NULL;
        if (family != NULL && i + 1 < argc && ref_family_parse(argv[i + 1], family)) {
            continue;
        }
        uint64_t *number = strcmp(argv[i], "--seed") == 0    ? &out->seed
                           : strcmp(argv[i], "--cases") == 0 ? &out->cases
                           : strcmp(argv[i], "--slots") == 0 ? &out->slots_min
                           : strcmp(argv[i], "--case") == 0  ? &out->first
                                                             : NULL;
        if (number == NULL || i + 1 == argc || !parse_number(argv[i + 1], number)) {
            fprintf(stderr,
                    "usage: %s [--seed S] [--cases N] [--slots N] [--case NUMBER] [--local FAMILY] "
                    "[--daemons FAMILY]\n",
                    argv[0]);
            return false;
        }
        out->single = out->single || number == &out->first;
    }
    out->cases = out->single ? 1 : out->cases;
    out->slots_min = out->single ? 0 : out->slots_min;
    return true;
}

static void report_failure(property_run *run, const layer_case *c, const test_client *client,
                           const case_result *result)
{
    printf("FAILED case %" PRIu64 " by client '%s'\n  %s\n", c->number, client->name, result->text);
    case_describe(c, stdout);
    printf("  again: integration_property --seed %" PRIu64 " --case %" PRIu64
           " --local %s --daemons %s\n",
           run->args.seed, c->number, ref_family_name(run->args.families[PLACE_LOCAL]),
           ref_family_name(run->args.families[PLACE_DAEMONS]));
    fflush(stdout);
}

static void take_result(property_run *run, const layer_case *c, const test_client *client,
                        const case_result *result)
{
    pthread_mutex_lock(&run->lock);
    totals *t = &run->totals;
    t->layers++;
    t->over_daemons += case_uses_daemons(c->number);
    t->refused += result->refused;
    t->rows += result->refused ? 0 : case_rows(c);
    t->slots += result->refused ? 0 : c->batch.tokens * c->batch.top_k;
    atomic_store(&run->slots, t->slots);
    t->differing_elements += result->differing_elements;
    t->failed_cases += !result->same;
    coverage_add(&run->covered, c, result);
    if (run->args.single) {
        printf("case %" PRIu64 " by client '%s': %s\n", c->number, client->name,
               result->refused ? "to be refused" : "to be accepted");
        case_describe(c, stdout);
    }
    if (!result->same && !atomic_exchange(&run->stop, true)) {
        report_failure(run, c, client, result);
    }
    pthread_mutex_unlock(&run->lock);
}

static void run_case(property_run *run, uint64_t number)
{
    layer_case c;
    case_result result;
    layer_case_make(&c, run->args.seed, number, run->models);
    const test_client *client = case_uses_daemons(number)
                                    ? daemon_cluster_client(run->daemons, c.client_choice)
                                    : local_cluster_client(run->local, c.client_choice, c.node_sum);
    case_run(&c, client->client, client->versions[c.model - run->models], &result);
    take_result(run, &c, client, &result);
    bool is_judged = number % MUTANT_CASE_EVERY == 0 || case_uses_daemons(number);
    if (result.same && !result.refused && is_judged) {
        mutants_judge(&run->mutants, &c, result.got);
    }
    case_result_free(&result);
    layer_case_free(&c);
}

static void *call_until_done(void *arg)
{
    property_run *run = arg;
    uint64_t n;
    while (!atomic_load(&run->stop) && (n = atomic_fetch_add(&run->next, 1)) < run->args.cases) {
        run_case(run, run->args.first + n);
    }
    while (!atomic_load(&run->stop) && atomic_load(&run->slots) < run->args.slots_min) {
        run_case(run, CASES_MANY_SLOTS + atomic_fetch_add(&run->next, 1));
    }
    return NULL;
}

static bool start(property_run *run)
{
    const enum ref_family *families = run->args.families;
    bool needs_daemons = !run->args.single || case_uses_daemons(run->args.first);
    bool needs_local = !run->args.single || !needs_daemons;
    return ep_test_dir_create(run->dir) &&
           test_models_create(run->args.seed, run->dir, families, run->models) &&
           (!needs_daemons ||
            daemon_cluster_create(run->dir, run->models, families[PLACE_DAEMONS], &run->daemons)) &&
           (!needs_local || local_cluster_create(run->dir, run->args.seed, run->models,
                                                 families[PLACE_LOCAL], &run->local));
}

static bool finish(property_run *run)
{
    local_cluster_destroy(run->local);
    bool ok = daemon_cluster_destroy(run->daemons);
    test_models_destroy(run->models);
    ep_test_dir_remove(run->dir);
    ep_transport_fini();
    return ok;
}

static bool call_all(property_run *run)
{
    pthread_t threads[CALLERS];
    uint32_t count = 0;
    while (count < CALLERS && pthread_create(&threads[count], NULL, call_until_done, run) == 0) {
        count++;
    }
    for (uint32_t i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
    const totals *t = &run->totals;
    printf("layers %" PRIu64 ", over daemons %" PRIu64 ", refused by both %" PRIu64
           ", rows %" PRIu64 ", slots %" PRIu64 ", bit differences %" PRIu64 ", failed %" PRIu64
           "\n",
           t->layers, t->over_daemons, t->refused, t->rows, t->slots, t->differing_elements,
           t->failed_cases);
    return count > 0 && t->failed_cases == 0 && t->layers >= run->args.cases &&
           t->slots >= run->args.slots_min;
}

int main(int argc, char **argv)
{
    static property_run run = {.lock = PTHREAD_MUTEX_INITIALIZER};
    if (!parse_arguments(argc, argv, &run.args)) {
        return 2;
    }
    printf("seed %" PRIu64 " cases %" PRIu64 ", nodes here %s, daemons %s\n", run.args.seed,
           run.args.cases, ref_family_name(run.args.families[PLACE_LOCAL]),
           ref_family_name(run.args.families[PLACE_DAEMONS]));
    fflush(stdout);
    mutant_board_init(&run.mutants);
    bool ok = start(&run) && call_all(&run);
    if (ok && !run.args.single) {
        bool due[REF_FAMILIES] = {[REF_PORTABLE] = true}; /* f16 and f32 always */
        for (int p = 0; p < PLACES_COUNT; p++) {
            bool is_due = p == PLACE_LOCAL || run.args.cases >= DAEMON_MUTANTS_CASES_MIN;
            due[ref_format_family(REF_FORMAT_BF16, run.args.families[p])] |= is_due;
            due[ref_format_family(REF_FORMAT_INT4, run.args.families[p])] |= is_due;
        }
        ok = mutants_report(&run.mutants, due);
        double shm_bytes = daemon_cluster_shm_bytes(run.daemons);
        printf("over shared memory %.0f bytes\n", shm_bytes);
        bool covered = coverage_report(&run.covered) && shm_bytes > SHM_BYTES_MIN;
        ok = (covered || run.args.cases < COVERAGE_CASES_MIN) && ok;
    }
    ok = finish(&run) && ok;
    return ok ? 0 : 1;
}
