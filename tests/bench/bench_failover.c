/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a node costs the calls in flight when it is killed, or stopped, while every expert has a copy on another node: the 99th percentile
 * of their extra latency, that is of what they took beyond the median before the fault. Only calls that were in flight at the fault count.
 * Each round has nodes of its own.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "expertd/client.h"
#include "support/checkpoint_fixture.h"
#include "support/process.h"

#define HIDDEN 64
#define INNER 64
#define EXPERTS 8
#define TOP_K 2
#define TOKENS 16
#define NODES 3
#define CALLS 64 /* in flight all the time */
#define BEFORE 2000
#define AFTER 1000
#define ROUNDS 5

typedef struct caller {
    double began_us;
    uint16_t out[TOKENS * HIDDEN];
} caller;

static uint16_t x[TOKENS * HIDDEN];
static int32_t ids[TOKENS * TOP_K];
static float scales[TOKENS * TOP_K];
static ep_client *client;
static caller callers[CALLS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint32_t in_flight;
static uint64_t ended;
static bool stopping;
static double fault_us; /* 0: not yet */
static double before[BEFORE];
static uint64_t before_count;
static double hit[CALLS]; /* calls in flight at the fault */
static uint32_t hit_count;

static void fail(const char *what, const ep_error *error)
{
    fprintf(stderr, "bench_failover: %s: %s\n", what, error != NULL ? error->text : "");
    exit(1);
}

static void on_done(void *arg, const ep_moe_result *result);

static void begin(caller *c)
{
    ep_moe_args args;
    ep_error error;
    ep_moe_args_init(&args);
    args.model = "bench";
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, TOKENS, HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, TOKENS, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, TOKENS, TOP_K);
    args.deadline_us = 30000000;
    ep_tensor out = ep_tensor_2d(c->out, EP_DTYPE_BF16, TOKENS, HIDDEN);
    c->began_us = bench_now_us();
    if (ep_moe_forward_async(client, &args, &out, on_done, c, NULL, &error) != EP_OK) {
        fail("begin", &error);
    }
}

static void on_done(void *arg, const ep_moe_result *result)
{
    caller *c = arg;
    double now_us = bench_now_us();
    if (result->error.code != EP_OK) {
        fail("a call failed", &result->error);
    }
    pthread_mutex_lock(&lock);
    if (fault_us == 0) {
        before[before_count++ % BEFORE] = now_us - c->began_us;
    } else if (c->began_us < fault_us && hit_count < CALLS) {
        hit[hit_count++] = now_us - c->began_us;
    }
    ended++;
    bool again = !stopping;
    in_flight -= !again;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    if (again) {
        begin(c);
    }
}

static void wait_ended(uint64_t more)
{
    pthread_mutex_lock(&lock);
    for (uint64_t until = ended + more; ended < until;) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

static void start(ep_test_process *nodes, const char *dir, const char *checkpoint)
{
    const char *urls[NODES];
    ep_client_config config;
    ep_error error;
    for (uint32_t n = 0; n < NODES; n++) {
        char name[32], path[EP_TEST_PATH_BYTES + 32], text[1024], flag[EP_TEST_PATH_BYTES + 64];
        snprintf(name, sizeof(name), "node-%u", n);
        snprintf(path, sizeof(path), "%s/%s.yaml", dir, name);
        snprintf(text, sizeof(text),
                 "node_name: %s\nlisten:\n  - tcp://127.0.0.1:0\nprobe_address: ''\nadmin_listen: ''\ndoor_listen: ''\nthreads: 1\nmodels:\n"
                 "  - name: bench\n    path: %s\n    experts: 0-%d\n",
                 name, checkpoint, EXPERTS - 1);
        snprintf(flag, sizeof(flag), "--config=%s", path);
        const char *args[] = {flag, NULL};
        if (!ep_test_write_file(path, text, 0600) ||
            !ep_test_process_start(&nodes[n], dir, name, EP_EXPERTD_PROGRAM, args, NULL, true) ||
            !ep_test_process_wait_ports(&nodes[n], 60000)) {
            fail("expertd did not start", NULL);
        }
        urls[n] = nodes[n].rpc_url;
    }
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = NODES;
    if (ep_client_create(&config, &client, &error) != EP_OK || ep_client_wait_ready(client, 60000000, &error) != EP_OK) {
        fail("client", &error);
    }
}

/* One fault; extra latencies are added to out_extra. */
static void run_round(const char *dir, const char *checkpoint, int signal_number, double *out_extra, size_t *out_count)
{
    ep_test_process nodes[NODES] = {0};
    start(nodes, dir, checkpoint);
    fault_us = 0;
    before_count = 0;
    hit_count = 0;
    stopping = false;
    in_flight = CALLS;
    for (uint32_t i = 0; i < CALLS; i++) {
        begin(&callers[i]);
    }
    wait_ended(BEFORE);
    pthread_mutex_lock(&lock);
    fault_us = bench_now_us();
    pthread_mutex_unlock(&lock);
    if (!ep_test_process_signal(&nodes[1], signal_number)) {
        fail("signal", NULL);
    }
    wait_ended(AFTER);
    pthread_mutex_lock(&lock);
    stopping = true;
    while (in_flight > 0) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    double median = bench_quantile(before, BEFORE, 0.5);
    for (uint32_t i = 0; i < hit_count; i++) {
        out_extra[(*out_count)++] = hit[i] > median ? hit[i] - median : 0;
    }
    ep_client_destroy(client);
    for (uint32_t n = 0; n < NODES; n++) {
        ep_test_process_destroy(&nodes[n]);
    }
}

static void bench_fault(bench_report *report, const char *dir, const char *checkpoint, const char *name, int signal_number,
                        double bar_ms)
{
    static double extra[ROUNDS * CALLS];
    size_t count = 0;
    for (int r = 0; r < ROUNDS; r++) {
        run_round(dir, checkpoint, signal_number, extra, &count);
    }
    bench_row row = {.unit = "ms", .value = bench_quantile(extra, count, 0.99) / 1000, .limit = NAN, .rival = NAN, .ratio = NAN,
                     .better = BENCH_LOWER, .bar = bar_ms};
    snprintf(row.name, sizeof(row.name), "%s, extra latency p99 of %zu calls in flight", name, count);
    bench_report_add(report, &row);
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES];
    ep_error error;
    uint64_t seed = 7;
    ep_fixture_config fixture = ep_fixture_default();
    fixture.layers = 1;
    fixture.hidden = HIDDEN;
    fixture.inner = INNER;
    fixture.experts = EXPERTS;
    fixture.top_k = TOP_K;
    ep_fixture_temp_dir(checkpoint);
    if (!ep_test_dir_create(dir) || ep_fixture_write(&fixture, checkpoint, &error) != EP_OK) {
        fail("checkpoint", &error);
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(x); i++) {
        x[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(&seed) * 0x1p-31f);
    }
    for (size_t t = 0; t < TOKENS; t++) {
        ids[t * TOP_K] = (int32_t)(ep_splitmix64(&seed) % EXPERTS);
        ids[t * TOP_K + 1] = (ids[t * TOP_K] + 1) % EXPERTS;
        scales[t * TOP_K] = scales[t * TOP_K + 1] = 0.5f;
    }
    bench_report *report = bench_report_create("A node of three fails under load, every expert has copies on the others");
    bench_fault(report, dir, checkpoint, "SIGKILL", SIGKILL, 50);
    bench_fault(report, dir, checkpoint, "SIGSTOP", SIGSTOP, 500);
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
