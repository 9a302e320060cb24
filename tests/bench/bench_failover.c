/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a node costs the calls in flight when it is killed, or stopped, while every expert has a
 * copy on another node: the 99th percentile of their extra latency, that is of what they took
 * beyond the median before the fault. Only calls that were in flight at the fault count. And what a
 * node costs that lives, ten times as slow as before: stopped for nine milliseconds of ten. Of 4
 * nodes, every expert on 2, the 99th percentile of calls from two seconds after on, against the one
 * before. Each round has nodes of its own.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "bench/bench_service.h"
#include "support/checkpoint_fixture.h"

#define HIDDEN 64
#define INNER 64
#define EXPERTS 8
#define TOP_K 2
#define TOKENS 16
#define NODES 3
#define NODES_MAX 4
#define CALLS 64     /* in flight all the time */
#define SLOW_CALLS 8 /* the same, for the slow node */
#define BEFORE 2000
#define AFTER 1000
#define ROUNDS 5
#define TIMED 5000 /* calls of one percentile */

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
static double timed[TIMED];
static uint64_t timed_count = TIMED; /* of those that began from timed_us on; TIMED: enough */
static double timed_us;
static uint64_t failed;

static void on_done(void *arg, const ep_moe_result *result);

static void begin(caller *c)
{
    const bench_tokens of = {TOKENS, TOP_K, HIDDEN, x, ids, scales};
    ep_moe_args args = bench_args(&of);
    args.deadline_us = 30000000;
    ep_error error;
    ep_tensor out = ep_tensor_2d(c->out, EP_DTYPE_BF16, TOKENS, HIDDEN);
    c->began_us = bench_now_us();
    if (ep_moe_forward_async(client, &args, &out, on_done, c, NULL, &error) != EP_OK) {
        bench_fail("begin", error.text);
    }
}

static void on_done(void *arg, const ep_moe_result *result)
{
    caller *c = arg;
    double now_us = bench_now_us();
    pthread_mutex_lock(&lock);
    failed += result->error.code != EP_OK;
    if (c->began_us >= timed_us && timed_count < TIMED) {
        timed[timed_count++] = now_us - c->began_us;
    }
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

/* experts: [count] of each node. */
static void start(ep_test_process *nodes, uint32_t count, const char *const *experts,
                  const char *dir, const char *checkpoint)
{
    for (uint32_t n = 0; n < count; n++) {
        char name[32];
        snprintf(name, sizeof(name), "node-%u", n);
        bench_node_start(&(bench_node){.name = name,
                                       .checkpoint = checkpoint,
                                       .experts = experts[n],
                                       .keys = "threads: 1\n"},
                         dir, &nodes[n]);
    }
    client = bench_client_of(nodes, count, NULL);
}

static void begin_all(uint32_t calls)
{
    fault_us = 0;
    before_count = 0;
    hit_count = 0;
    failed = 0;
    stopping = false;
    in_flight = calls;
    for (uint32_t i = 0; i < calls; i++) {
        begin(&callers[i]);
    }
}

static void end_all(ep_test_process *nodes, uint32_t count)
{
    pthread_mutex_lock(&lock);
    stopping = true;
    while (in_flight > 0) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    ep_client_destroy(client);
    for (uint32_t n = 0; n < count; n++) {
        ep_test_process_destroy(&nodes[n]);
    }
}

/* One fault; extra latencies are added to out_extra. */
static void run_round(const char *dir, const char *checkpoint, int signal_number, double *out_extra,
                      size_t *out_count)
{
    static const char *const experts[NODES] = {"0-7", "0-7", "0-7"};
    ep_test_process nodes[NODES] = {0};
    start(nodes, NODES, experts, dir, checkpoint);
    begin_all(CALLS);
    wait_ended(BEFORE);
    pthread_mutex_lock(&lock);
    fault_us = bench_now_us();
    pthread_mutex_unlock(&lock);
    if (!ep_test_process_signal(&nodes[1], signal_number)) {
        bench_fail("signal", NULL);
    }
    wait_ended(AFTER);
    end_all(nodes, NODES);
    if (failed > 0) {
        bench_fail("calls failed", NULL);
    }
    double median = bench_quantile(before, BEFORE, 0.5);
    for (uint32_t i = 0; i < hit_count; i++) {
        out_extra[(*out_count)++] = hit[i] > median ? hit[i] - median : 0;
    }
}

static void bench_fault(bench_report *report, const char *dir, const char *checkpoint,
                        const char *name, int signal_number, double bar_ms)
{
    static double extra[ROUNDS * CALLS];
    size_t count = 0;
    for (int r = 0; r < ROUNDS; r++) {
        run_round(dir, checkpoint, signal_number, extra, &count);
    }
    bench_report_value(report, bench_quantile(extra, count, 0.99) / 1000, "ms", BENCH_LOWER, bar_ms,
                       "%s, extra latency p99 of %zu calls in flight", name, count);
}

/* ---- a slow node ---- */

typedef struct slow_node {
    const ep_test_process *process;
    bool stopping;
} slow_node;

static void *slow_down(void *arg)
{
    slow_node *slow = arg;
    while (!__atomic_load_n(&slow->stopping, __ATOMIC_RELAXED)) {
        if (!ep_test_process_signal(slow->process, SIGSTOP)) {
            bench_fail("SIGSTOP", NULL);
        }
        usleep(9000);
        if (!ep_test_process_signal(slow->process, SIGCONT)) {
            bench_fail("SIGCONT", NULL);
        }
        usleep(1000);
    }
    return NULL;
}

/* Of calls that begin from now on. */
static double time_p99(void)
{
    pthread_mutex_lock(&lock);
    timed_us = bench_now_us();
    timed_count = 0;
    while (timed_count < TIMED) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return bench_quantile(timed, TIMED, 0.99) / 1000;
}

typedef struct slow_result {
    double healthy_ms;
    double slow_ms;
    double hedged_share;
} slow_result;

static slow_result run_slow_round(const char *dir, const char *checkpoint)
{
    static const char *const experts[NODES_MAX] = {"0-3", "2-5", "4-7", "0-1,6-7"};
    ep_test_process nodes[NODES_MAX] = {0};
    ep_client_stats before_slow = {.struct_bytes = sizeof(before_slow)}, after = before_slow;
    slow_result result;
    slow_node slow = {.process = &nodes[1]};
    pthread_t thread;
    start(nodes, NODES_MAX, experts, dir, checkpoint);
    begin_all(SLOW_CALLS);
    wait_ended(BEFORE);
    result.healthy_ms = time_p99();
    ep_client_read_stats(client, &before_slow);
    if (pthread_create(&thread, NULL, slow_down, &slow) != 0) {
        bench_fail("no thread", NULL);
    }
    sleep(2);
    result.slow_ms = time_p99();
    ep_client_read_stats(client, &after);
    uint64_t hedged = after.hedged_frames - before_slow.hedged_frames;
    result.hedged_share = (double)hedged / (double)(after.frames_sent - before_slow.frames_sent);
    __atomic_store_n(&slow.stopping, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    end_all(nodes, NODES_MAX);
    return result;
}

/* Failed calls are summed over the rounds, times are the median round's. */
static void bench_slow(bench_report *report, const char *dir, const char *checkpoint)
{
    double healthy[ROUNDS], slow[ROUNDS], ratio[ROUNDS], hedged[ROUNDS];
    uint64_t failed_calls = 0;
    for (int r = 0; r < ROUNDS; r++) {
        slow_result result = run_slow_round(dir, checkpoint);
        healthy[r] = result.healthy_ms;
        slow[r] = result.slow_ms;
        ratio[r] = result.slow_ms / result.healthy_ms;
        hedged[r] = result.hedged_share;
        failed_calls += failed;
    }
    bench_report_rival(report, bench_quantile(slow, ROUNDS, 0.5), "ms",
                       bench_quantile(healthy, ROUNDS, 0.5), bench_quantile(ratio, ROUNDS, 0.5),
                       BENCH_LOWER, 1.5, "10 x slow, p99 after 2 s, against healthy");
    bench_report_value(report, bench_quantile(hedged, ROUNDS, 1), "", BENCH_LOWER, 0.1,
                       "10 x slow, frames hedged, share");
    bench_report_value(report, (double)failed_calls, "calls", BENCH_LOWER, 0,
                       "10 x slow, failed calls");
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES];
    uint64_t seed = 7;
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, TOP_K);
    ep_fixture_new(&fixture, checkpoint);
    if (!ep_test_dir_create(dir)) {
        bench_fail("no directory", NULL);
    }
    bench_draw_rows(&seed, EP_ARRAY_COUNT(x), x);
    bench_draw_routing(&seed, TOKENS, TOP_K, EXPERTS, ids, scales);
    bench_report *report = bench_report_create(
        "A node fails, or is slow, under load, and every expert has copies on others");
    bench_fault(report, dir, checkpoint, "SIGKILL", SIGKILL, 50);
    bench_fault(report, dir, checkpoint, "SIGSTOP", SIGSTOP, 500);
    bench_slow(report, dir, checkpoint);
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
