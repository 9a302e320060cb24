/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon whose budget holds a quarter of the model: drawn requests give the oracle's bits,
 * whatever is in memory when they come. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/random.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/forward_call.h"
#include "support/process.h"

#define WAIT_MS 60000
#define LAYERS 3
#define EXPERTS 16
#define HIDDEN 64
#define INNER 64
#define SHARDS 8
#define EXPERT_BYTES (3 * HIDDEN * INNER * 2)
#define ROWS_MAX 12
#define CALLERS 4

static char dir[EP_TEST_PATH_BYTES];
static char model_path[EP_TEST_PATH_BYTES + 16];
static ep_test_process node;
static int calls_each = 60;

static void setup(void)
{
    ep_error e;
    ep_fixture_config config = ep_fixture_default();
    config.layers = LAYERS;
    config.experts = EXPERTS;
    config.hidden = HIDDEN;
    config.inner = INNER;
    config.shards = SHARDS;
    node.pid_fd = -1;
    calls_each = getenv("EP_TEST_LONG") != NULL ? 2000 : 60;
    cr_assert(ep_test_dir_create(dir));
    snprintf(model_path, sizeof(model_path), "%s/model", dir);
    cr_assert_eq(mkdir(model_path, 0700), 0);
    ASSERT_OK(ep_fixture_write(&config, model_path, &e), e);
}

static void teardown(void)
{
    ep_test_process_destroy(&node);
    ep_test_dir_remove(dir);
}

TestSuite(store, .init = setup, .fini = teardown, .timeout = 300);

static void launch(const char *budget, const char *more)
{
    char model[sizeof(model_path) + 16], limit[64];
    snprintf(model, sizeof(model), "--model=demo=%s", model_path);
    snprintf(limit, sizeof(limit), "--weight-bytes-max=%s", budget);
    const char *args[] = {"--listen=tcp://127.0.0.1:0",
                          "--admin-listen=",
                          "--probe-address=127.0.0.1:0",
                          "--node-name=n1",
                          "--threads=2",
                          model,
                          limit,
                          more,
                          NULL};
    cr_assert(ep_test_process_start(&node, dir, "node", EP_EXPERTD_PATH, args, NULL, true));
}

static void start(uint32_t experts, const char *more)
{
    char budget[32];
    snprintf(budget, sizeof(budget), "%u", experts * EXPERT_BYTES);
    launch(budget, more);
    cr_assert(ep_test_process_wait_ports(&node, WAIT_MS));
    while (ep_test_http_get(node.probe_url, "/readyz", NULL) != 200) {
        cr_assert_eq(ep_test_process_wait(&node, 2), -1, "the daemon ended before it was ready");
    }
}

/* A request of a few rows; some experts are drawn far more often than others. */
typedef struct drawn {
    ep_test_forward forward;
    uint16_t x[ROWS_MAX * HIDDEN];
    ep_wire_slot slots[ROWS_MAX * 4];
    uint16_t got[ROWS_MAX * 4 * HIDDEN];
    uint16_t wanted[ROWS_MAX * 4 * HIDDEN];
} drawn;

static void draw(uint64_t *state, drawn *d)
{
    const uint32_t rows = 1 + (uint32_t)(ep_splitmix64(state) % ROWS_MAX);
    uint32_t slots = 0;
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t first = (uint32_t)(ep_splitmix64(state) % EXPERTS);
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t spread = 1 + (uint32_t)(ep_splitmix64(state) % 3);
            const uint32_t expert = (first * first / EXPERTS + k * spread) % EXPERTS;
            d->slots[slots++] = (ep_wire_slot){r, expert};
        }
    }
    ep_test_fill_rows(ep_splitmix64(state), EP_DTYPE_BF16, (size_t)rows * HIDDEN, d->x);
    d->forward = (ep_test_forward){.layer = (uint32_t)(ep_splitmix64(state) % LAYERS),
                                   .rows = rows,
                                   .slots = slots,
                                   .hidden = HIDDEN,
                                   .x_dtype = EP_DTYPE_BF16,
                                   .reply_dtype = EP_DTYPE_BF16,
                                   .prefill = ep_splitmix64(state) % 4 == 0,
                                   .x = d->x,
                                   .wire_slots = d->slots};
}

static atomic_int served, wrong, failed;

static void *call_node(void *arg)
{
    uint64_t state = *(const uint64_t *)arg;
    ep_test_peer peer;
    ep_error e;
    drawn *d = malloc(sizeof(*d));
    if (ep_test_peer_open(&peer, node.rpc_url, &e) != EP_OK) {
        atomic_fetch_add(&failed, 1);
        free(d);
        return NULL;
    }
    for (int i = 0; i < calls_each; i++) {
        draw(&state, d);
        if (ep_test_forward_run(&peer, &d->forward, d->got, &e) != EP_OK ||
            ep_test_expected_rows(model_path, &d->forward, d->wanted, &e) != EP_OK) {
            fprintf(stderr, "call %d: %s\n", i, e.text);
            atomic_fetch_add(&failed, 1);
            continue;
        }
        atomic_fetch_add(&served, 1);
        atomic_fetch_add(&wrong,
                         memcmp(d->got, d->wanted, (size_t)d->forward.slots * HIDDEN * 2) != 0);
    }
    ep_test_peer_close(&peer);
    free(d);
    return NULL;
}

static void call_from_many(void)
{
    pthread_t threads[CALLERS];
    uint64_t seeds[CALLERS];
    for (uint64_t i = 0; i < CALLERS; i++) {
        seeds[i] = 100 + i;
        pthread_create(&threads[i], NULL, call_node, &seeds[i]);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* A metric's value; aborts the test when it is not there. */
static double metric(const char *name)
{
    const double value = ep_test_metric(&node, name);
    cr_assert_geq(value, 0, "no %s", name);
    return value;
}

static void expect_right_bits(uint32_t experts)
{
    start(experts, NULL);
    call_from_many();
    cr_expect_eq(atomic_load(&failed), 0);
    cr_expect_eq(atomic_load(&wrong), 0);
    cr_expect_eq(atomic_load(&served), CALLERS * calls_each);
    cr_expect_gt(metric("expertd_expert_uses_total{result=\"hit\"}"), 0);
    cr_expect_gt(metric("expertd_expert_uses_total{result=\"miss\"}"), 0);
    cr_expect_gt(metric("expertd_expert_evictions_total"), 0);
    cr_expect_leq(metric("expertd_weights_bytes"), experts * EXPERT_BYTES);
    cr_expect_eq(metric("expertd_experts_owned"), LAYERS * EXPERTS);
    cr_expect_eq(metric("expertd_expert_waits"), 0);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}

Test(store, a_quarter_of_the_model_in_memory_gives_the_bits_of_all_of_it)
{
    expect_right_bits(LAYERS * EXPERTS / 4);
}

Test(store, one_expert_in_memory_is_enough)
{
    expect_right_bits(1);
}

Test(store, a_budget_below_one_expert_is_refused_at_start)
{
    launch("1000", NULL);
    cr_expect_neq(ep_test_process_wait(&node, WAIT_MS), 0);
    char *output = ep_test_process_output(&node);
    cr_expect_not_null(
        strstr(output,
               "weight_bytes_max is 1000, one expert of layer 0 of model demo needs 24576 bytes"),
        "%s", output);
    free(output);
}

/* Calls for one expert alone. */
static ep_err call_one(ep_test_peer *peer, uint32_t expert, ep_error *out_error)
{
    static uint16_t x[HIDDEN], got[HIDDEN];
    const ep_wire_slot slot = {0, expert};
    ep_test_fill_rows(5, EP_DTYPE_BF16, HIDDEN, x);
    const ep_test_forward f = {.layer = LAYERS - 1,
                               .rows = 1,
                               .slots = 1,
                               .hidden = HIDDEN,
                               .x_dtype = EP_DTYPE_BF16,
                               .reply_dtype = EP_DTYPE_BF16,
                               .x = x,
                               .wire_slots = &slot};
    return ep_test_forward_run(peer, &f, got, out_error);
}

/* One of the files is not what it was: the experts of the others are served, its own are refused by
 * name. */
Test(store, a_truncated_file_takes_down_its_own_experts_only)
{
    char path[sizeof(model_path) + 64];
    struct stat st;
    ep_test_peer peer;
    ep_error e;
    uint32_t good = 0, bad = 0;
    start(2, "--weight-prefetch=false");
    snprintf(path, sizeof(path), "%s/model-%05d-of-%05d.safetensors", model_path, SHARDS, SHARDS);
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(truncate(path, st.st_size / 2), 0);
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    for (int round = 0; round < 2; round++) {
        for (uint32_t expert = 0; expert < EXPERTS; expert++) {
            const ep_err err = call_one(&peer, expert, &e);
            good += err == EP_OK;
            bad += err == EP_ERR_NOT_OWNER;
            cr_expect(err == EP_OK || err == EP_ERR_NOT_OWNER, "%s", e.text);
            cr_expect(err == EP_OK || e.expert == (int32_t)expert);
        }
    }
    cr_expect_gt(bad, 0);
    cr_expect_gt(good, 0);
    cr_expect_eq(good + bad, 2 * EXPERTS);
    cr_expect_eq(metric("expertd_experts_failed"), bad / 2);
    ep_test_peer_close(&peer);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}

/* One file holds all of them: those whose bytes are still there are served, right to the bit. */
Test(store, of_a_file_that_lost_its_end_the_rest_is_served)
{
    char path[sizeof(model_path) + 64], whole[sizeof(model_path) + 64];
    struct stat st;
    ep_test_peer peer;
    ep_error e;
    ep_fixture_config config = ep_fixture_default();
    uint32_t good = 0, bad = 0;
    config.layers = LAYERS;
    config.experts = EXPERTS;
    config.hidden = HIDDEN;
    config.inner = INNER;
    snprintf(whole, sizeof(whole), "%s/whole", dir); /* what the oracle reads */
    cr_assert_eq(mkdir(whole, 0700), 0);
    ASSERT_OK(ep_fixture_write(&config, whole, &e), e);
    ep_test_dir_remove(model_path);
    cr_assert_eq(mkdir(model_path, 0700), 0);
    ASSERT_OK(ep_fixture_write(&config, model_path, &e), e);
    start(2, "--weight-prefetch=false");
    snprintf(path, sizeof(path), "%s/model.safetensors", model_path);
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(truncate(path, st.st_size * 3 / 4), 0);
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    for (uint32_t i = 0; i < LAYERS * EXPERTS; i++) {
        uint16_t x[HIDDEN], got[HIDDEN], wanted[HIDDEN];
        const ep_wire_slot slot = {0, i % EXPERTS};
        const ep_test_forward f = {.layer = i / EXPERTS,
                                   .rows = 1,
                                   .slots = 1,
                                   .hidden = HIDDEN,
                                   .x_dtype = EP_DTYPE_BF16,
                                   .reply_dtype = EP_DTYPE_BF16,
                                   .x = x,
                                   .wire_slots = &slot};
        ep_test_fill_rows(i, EP_DTYPE_BF16, HIDDEN, x);
        const ep_err err = ep_test_forward_run(&peer, &f, got, &e);
        cr_expect(err == EP_OK || err == EP_ERR_NOT_OWNER, "%s", e.text);
        good += err == EP_OK;
        bad += err == EP_ERR_NOT_OWNER;
        if (err == EP_OK) {
            ASSERT_OK(ep_test_expected_rows(whole, &f, wanted, &e), e);
            cr_expect_arr_eq(got, wanted, sizeof(got));
        }
    }
    cr_expect_gt(good, LAYERS * EXPERTS / 2);
    cr_expect_gt(bad, 0);
    cr_expect_eq(metric("expertd_experts_failed"), bad);
    ep_test_peer_close(&peer);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
    char *output = ep_test_process_output(&node);
    cr_expect_not_null(strstr(output, "model.safetensors: has "), "%s", output);
    cr_expect_not_null(strstr(output, "tensor model.layers."), "%s", output);
    free(output);
}

static void wait_for_metric(const char *name, double least)
{
    while (metric(name) < least) {
        cr_assert_eq(ep_test_process_wait(&node, 10), -1, "the daemon ended");
    }
}

static void expect_right_calls(void)
{
    atomic_store(&served, 0);
    call_from_many();
    cr_expect_eq(atomic_load(&failed), 0);
    cr_expect_eq(atomic_load(&wrong), 0);
    cr_expect_eq(atomic_load(&served), CALLERS * calls_each);
}

/* Changes one byte in the middle of the n-th file of the directory. */
static void damage_file(const char *cache, uint32_t n)
{
    char command[2 * EP_TEST_PATH_BYTES];
    snprintf(command, sizeof(command),
             "f=$(ls '%s'/*.pack | sed -n %up) && printf '\\377\\000\\377' | dd of=\"$f\" bs=1 "
             "seek=9000 conv=notrunc 2>/dev/null",
             cache, n);
    cr_assert_eq(system(command), 0);
}

#define READ_METRIC "expertd_weight_cache_files_total{op=\"read\"}"
#define WRITTEN_METRIC "expertd_weight_cache_files_total{op=\"written\"}"
#define DROPPED_METRIC "expertd_weight_cache_files_total{op=\"dropped\"}"

Test(store, a_restart_reads_packed_experts_and_packs_damaged_ones_anew)
{
    char cache[EP_TEST_PATH_BYTES + 16], option[EP_TEST_PATH_BYTES + 48];
    const double all = LAYERS * EXPERTS;
    snprintf(cache, sizeof(cache), "%s/packed", dir);
    snprintf(option, sizeof(option), "--weight-cache-dir=%s", cache);
    calls_each /= 4;
    for (int run = 0; run < 4; run++) {
        start(2 * LAYERS * EXPERTS, option);
        wait_for_metric(WRITTEN_METRIC, run == 0 ? all : run == 2 ? 1 : 0);
        cr_expect_eq(metric(READ_METRIC), run == 0 ? 0 : run == 2 ? all - 1 : all, "run %d", run);
        cr_expect_eq(metric(WRITTEN_METRIC), run == 0 ? all : run == 2 ? 1 : 0, "run %d", run);
        cr_expect_eq(metric(DROPPED_METRIC), run == 2, "run %d", run);
        expect_right_calls();
        cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
        char *output = ep_test_process_output(&node);
        cr_expect_eq(
            strstr(output,
                   "has a damaged body\" removed=true effect=\"the expert is packed anew\"") !=
                NULL,
            run == 2, "run %d: %s", run, output);
        free(output);
        ep_test_process_destroy(&node);
        node.pid_fd = -1;
        if (run == 1) {
            damage_file(cache, 7);
        }
    }
}

/* Loading is so slow that no call lives to see it. */
Test(store, a_call_that_waits_too_long_is_told_for_what)
{
    ep_test_peer peer;
    ep_error e;
    ep_err err = EP_OK;
    start(1, "--weight-load-rate=1000");
    ASSERT_OK(ep_test_peer_open(&peer, node.rpc_url, &e), e);
    static uint16_t x[HIDDEN], got[HIDDEN];
    /* on a busy machine the node's answer may come after the deadline */
    for (uint32_t i = 0; i < 30 && err != EP_ERR_UNAVAILABLE; i++) {
        const ep_wire_slot slot = {0, 1 + i % (EXPERTS - 1)};
        ep_test_forward f = {.layer = 1,
                             .rows = 1,
                             .slots = 1,
                             .hidden = HIDDEN,
                             .x_dtype = EP_DTYPE_BF16,
                             .reply_dtype = EP_DTYPE_BF16,
                             .x = x,
                             .wire_slots = &slot,
                             .timeout_ms = 900};
        err = ep_test_forward_run(&peer, &f, got, &e);
        cr_expect(err == EP_OK || err == EP_ERR_UNAVAILABLE || err == EP_ERR_DEADLINE_EXCEEDED,
                  "%s", e.text);
    }
    cr_expect_eq(err, EP_ERR_UNAVAILABLE, "%s", e.text);
    EXPECT_TEXT(e, "model demo layer 1 expert ");
    EXPECT_TEXT(e, " queued for loading: waited ");
    cr_expect_eq(e.layer, 1);
    ep_test_peer_close(&peer);
    cr_expect_eq(ep_test_process_stop(&node, SIGTERM, WAIT_MS), 0);
}
