/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only owner of some experts is killed, or stopped (SIGSTOP), under load. Calls that need these
 * experts end at their deadline, not before it, with an error that names node, layer, expert, the
 * time waited and the last report. All other calls go on. A stopped owner that goes on again is
 * used again.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "fault_fixture.h"

/* Two deadlines: before and after a node that answers no ping is given up (about 2 s). */
#define DEADLINE_SHORT_US 1000000ull
#define DEADLINE_LONG_US 3000000ull

typedef struct expectation {
    _Atomic bool fault_begun;
    uint64_t deadline_us;
    pthread_mutex_t lock;
    uint64_t lateness_us_max;
    uint64_t early; /* calls that ran out of time before the fault: the machine is slow */
    ep_error example;
} expectation;

static void expect_named(const ep_test_batch *batch, const ep_error *error, uint64_t deadline_us)
{
    char layer[32];
    char expert[32];
    EP_TEST_CHECK(error->code == EP_ERR_UNAVAILABLE || error->code == EP_ERR_DEADLINE_EXCEEDED,
                  "%s: %s", ep_err_name(error->code), error->text);
    EP_TEST_CHECK(error->layer == (int32_t)batch->layer, "layer is %d: %s", error->layer,
                  error->text);
    EP_TEST_CHECK(error->expert >= FAULT_VICTIM_EXPERT_FIRST &&
                      error->expert <= FAULT_VICTIM_EXPERT_LAST,
                  "expert is %d: %s", error->expert, error->text);
    EP_TEST_CHECK(error->waited_us >= (int64_t)deadline_us, "waited_us is %lld: %s",
                  (long long)error->waited_us, error->text);
    snprintf(layer, sizeof(layer), "layer %d", error->layer);
    snprintf(expert, sizeof(expert), "expert %d", error->expert);
    EP_TEST_CHECK(strstr(error->text, layer) != NULL && strstr(error->text, expert) != NULL, "%s",
                  error->text);
    /* Once the coordinator has taken the node out of the table, nothing tells who it was. */
    bool unlisted = strstr(error->text, "the table lists no copy") != NULL;
    EP_TEST_CHECK(unlisted ||
                      (strcmp(error->node, "node1") == 0 && strstr(error->text, "node1") != NULL),
                  "node is '%s': %s", error->node, error->text);
    bool reported =
        strstr(error->text, "last report") != NULL || strstr(error->text, "last heard") != NULL;
    EP_TEST_CHECK(unlisted || reported, "no last report: %s", error->text);
}

static void on_failure(void *arg, const ep_test_batch *batch, const ep_moe_result *result,
                       uint64_t began_ns, uint64_t ended_ns)
{
    expectation *e = arg;
    uint64_t took_us = (ended_ns - began_ns) / EP_NS_PER_US;
    EP_TEST_CHECK(
        took_us >= e->deadline_us, "a call failed after %llu us, its deadline is %llu us: %s",
        (unsigned long long)took_us, (unsigned long long)e->deadline_us, result->error.text);
    expect_named(batch, &result->error, e->deadline_us);
    pthread_mutex_lock(&e->lock);
    e->early += !atomic_load(&e->fault_begun);
    e->lateness_us_max = took_us - e->deadline_us > e->lateness_us_max ? took_us - e->deadline_us
                                                                       : e->lateness_us_max;
    /* the first: of a call that was at the victim */
    if (e->example.code == EP_OK && atomic_load(&e->fault_begun)) {
        e->example = result->error;
    }
    pthread_mutex_unlock(&e->lock);
}

static void expectation_init(expectation *e, uint64_t deadline_us)
{
    memset(e, 0, sizeof(*e));
    pthread_mutex_init(&e->lock, NULL);
    e->deadline_us = ep_test_sanitized
                         ? 2 * deadline_us
                         : deadline_us; /* mostly met before the fault on a slow machine too */
}

static void report_failures(const char *which, const expectation *e,
                            const ep_test_load_counts *counts)
{
    printf("%s deadline, %llu us: %llu calls failed, %llu of them before the fault, the latest "
           "%llu us after it, for example: %s: %s\n",
           which, (unsigned long long)e->deadline_us, (unsigned long long)counts->failed,
           (unsigned long long)e->early, (unsigned long long)e->lateness_us_max,
           ep_err_name(e->example.code), e->example.text);
}

static void expect_back(fault_fixture *f)
{
    ep_test_load_counts counts;
    EP_TEST_CHECK(ep_test_process_signal(&f->cluster.nodes[FAULT_VICTIM], SIGCONT), "SIGCONT");
    ep_test_load *load = fault_load(f, f->victims, 16, 0, NULL, NULL);
    ep_test_load_wait_succeeded(load, 100);
    ep_test_load_stop(load, &counts);
    printf("after SIGCONT %llu calls to the same experts, %llu failed\n",
           (unsigned long long)counts.succeeded, (unsigned long long)counts.failed);
}

int main(int argc, char **argv)
{
    static fault_fixture f;
    static expectation short_one;
    static expectation long_one;
    ep_test_load_counts before[3];
    ep_test_load_counts after[3];
    bool stop = argc == 2 && strcmp(argv[1], "stop") == 0;
    EP_TEST_CHECK(stop || (argc == 2 && strcmp(argv[1], "kill") == 0), "usage: %s kill|stop",
                  argv[0]);
    fault_fixture_init(&f, fault_map, 1);
    expectation_init(&short_one, DEADLINE_SHORT_US);
    expectation_init(&long_one, DEADLINE_LONG_US);
    ep_test_load *loads[3] = {
        fault_load(&f, f.victims, 16, short_one.deadline_us, on_failure, &short_one),
        fault_load(&f, f.victims, 16, long_one.deadline_us, on_failure, &long_one),
        fault_load(&f, f.others, 16, 0, NULL, NULL),
    };
    ep_test_load_wait_succeeded(loads[2], 100);
    ep_test_load_wait_succeeded(loads[1], 1); /* the client may connect to the victim last */

    uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f.cluster, FAULT_VICTIM);
    for (int i = 0; i < 3; i++) {
        ep_test_load_read(loads[i], &before[i]);
    }
    atomic_store(&short_one.fault_begun, true);
    atomic_store(&long_one.fault_begun, true);
    EP_TEST_CHECK(ep_test_process_signal(&f.cluster.nodes[FAULT_VICTIM], stop ? SIGSTOP : SIGKILL),
                  "no signal");
    EP_TEST_CHECK(stop || ep_test_process_wait(&f.cluster.nodes[FAULT_VICTIM],
                                               EP_TEST_PATIENCE_MS) == 128 + SIGKILL,
                  "the victim lives");
    /* Twice what is in flight: calls that were at the victim, and calls begun after it went. */
    ep_test_load_wait_failed(loads[0], 32);
    ep_test_load_wait_failed(loads[1], 32);
    ep_test_load_wait_succeeded(loads[2], FAULT_FINISHED_AFTER_MIN);

    uint32_t in_flight = 0;
    for (int i = 0; i < 3; i++) {
        in_flight += before[i].in_flight;
        ep_test_load_stop(loads[i], &after[i]);
    }
    fault_report(stop ? "SIGSTOP of a sole owner" : "SIGKILL of a sole owner", in_flight,
                 victim_in_flight, after[2].succeeded - before[2].succeeded);
    report_failures("short", &short_one, &after[0]);
    report_failures("long", &long_one, &after[1]);
    if (stop) {
        expect_back(&f);
    }
    fault_fixture_fini(&f);
    return 0;
}
