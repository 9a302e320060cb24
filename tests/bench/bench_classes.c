/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Callers that share a node, each a process of its own, over real expertd processes on loopback:
 *   merging   16 callers with one token each on the same 8 experts against one caller; and what
 *             merging costs a lone caller. The limit is what the kernels do in this process, with
 *             all cores and nothing else: jobs of 16 rows, and how much that is above jobs of one
 *             row, which read the weights as quickly as memory allows. Callers and the node's I/O
 *             run on the same cores; their processor time per call is printed beside it
 *   classes   p99 of a paced decode caller (it calls a fifth of the time, as between the attention
 *             of its layers) beside prefill that never pauses, and what prefill keeps
 *   tenants   p99 of a paced caller beside eight callers of another tenant, of the same weight,
 *             that send 64 tokens each, without pause
 * Rounds alternate between all forms. In the last two the node computes on one thread, so that
 * callers and I/O have the other core; and beside what the caller sees stands what of it the node
 * itself took (queue and compute).
 */
#include <math.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "bench/bench_service.h"
#include "bench/layer_local.h"
#include "support/checkpoint_fixture.h"

#define EXPERTS 8
#define TOKENS_MAX 512
#define HIDDEN_MAX 7168
#define CALLERS_MAX 16
#define CALLS_MAX 20000
#define MERGED_CALLERS 16
#define ABUSERS 8
#define ROUNDS_MAX 16
#define PAUSE_PARTS 4.0 /* a paced caller pauses so many times as long as a call takes alone */

typedef struct shape {
    uint32_t hidden;
    uint32_t inner;
} shape;

static const shape small = {2048, 768};
static const shape large = {7168, 2048};

/* What one caller does, and what came of it; in memory that its process shares with ours. */
typedef struct caller {
    const char *url;
    const char *tenant;
    ep_moe_mode mode;
    uint32_t tokens;
    uint32_t hidden;
    double pause_us;
    bool may_be_refused;
    uint32_t calls;
    uint32_t refused;
    double busy_us; /* from its first call's begin to its last one's end */
    double cpu_us;  /* its processor time meanwhile */
    double us[CALLS_MAX];
    double node_us[CALLS_MAX]; /* of these: in the node's queues and backend */
} caller;

typedef struct shared {
    sem_t ready;
    sem_t go;
    double end_us;
    caller callers[CALLERS_MAX];
} shared;

static shared *page;
static char dir[EP_TEST_PATH_BYTES];
static uint16_t x[TOKENS_MAX * HIDDEN_MAX], y[TOKENS_MAX * HIDDEN_MAX];
static int32_t ids[TOKENS_MAX * EXPERTS];
static float scales[TOKENS_MAX * EXPERTS];

static void make_inputs(void)
{
    uint64_t seed = 5;
    bench_draw_rows(&seed, (size_t)TOKENS_MAX * HIDDEN_MAX, x);
    for (size_t i = 0; i < TOKENS_MAX * EXPERTS; i++) {
        ids[i] = (int32_t)(i % EXPERTS);
        scales[i] = 1.0f / EXPERTS;
    }
}

/* ---- nodes ---- */

static void start_node(ep_test_process *node, const char *name, const char *checkpoint,
                       const char *keys)
{
    bench_node_start(&(bench_node){.name = name, .checkpoint = checkpoint, .keys = keys}, dir,
                     node);
}

/* ---- callers ---- */

static void sleep_us(double us)
{
    struct timespec t = {.tv_sec = (time_t)(us / 1e6), .tv_nsec = (long)(fmod(us, 1e6) * 1e3)};
    nanosleep(&t, NULL);
}

static bool call_once(ep_client *client, const caller *c, double *out_node_us)
{
    const bench_tokens of = {c->tokens, EXPERTS, c->hidden, x, ids, scales};
    ep_moe_args args = bench_args(&of);
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    args.mode = c->mode;
    args.tenant = c->tenant;
    args.want_timing = c->pause_us > 0;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, c->tokens, c->hidden);
    ep_err err = ep_moe_forward(client, &args, &out, &result);
    if (err != EP_OK && !(c->may_be_refused && err == EP_ERR_RESOURCE_EXHAUSTED)) {
        bench_fail("forward", result.error.text);
    }
    *out_node_us = (double)(result.queue_us + result.compute_us);
    return err == EP_OK;
}

static double own_cpu_us(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* A child process. Exit code 0, or a message. */
static void run_caller(caller *c)
{
    ep_client *client = bench_client_open(&c->url, 1, NULL);
    double node_us;
    /* a large one warms up all it touches at once */
    for (int i = 0; i < (c->tokens > 1 ? 1 : 2); i++) {
        call_once(client, c, &node_us);
    }
    sem_post(&page->ready);
    sem_wait(&page->go);
    double first_us = bench_now_us();
    double first_cpu_us = own_cpu_us();
    while (bench_now_us() < page->end_us && c->calls < CALLS_MAX) {
        double begin_us = bench_now_us();
        bool is_done = call_once(client, c, &node_us);
        double end_us = bench_now_us();
        if (is_done) {
            c->node_us[c->calls] = node_us;
            c->us[c->calls++] = end_us - begin_us;
            c->busy_us = end_us - first_us;
        } else {
            c->refused++;
        }
        if (c->pause_us > 0) {
            sleep_us(c->pause_us);
        }
    }
    c->cpu_us = own_cpu_us() - first_cpu_us;
    _exit(0); /* not the parent's clean-up */
}

/* Runs page->callers[0..count) side by side. */
static void run_callers(uint32_t count, double seconds)
{
    pid_t children[CALLERS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        page->callers[i].calls = page->callers[i].refused = 0;
        page->callers[i].busy_us = page->callers[i].cpu_us = 0;
        children[i] = fork();
        if (children[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run_caller(&page->callers[i]);
        }
        if (children[i] < 0) {
            bench_fail("fork", "no process");
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        sem_wait(&page->ready);
    }
    page->end_us = bench_now_us() + seconds * 1e6;
    for (uint32_t i = 0; i < count; i++) {
        sem_post(&page->go);
    }
    for (uint32_t i = 0; i < count; i++) {
        int status;
        if (waitpid(children[i], &status, 0) < 0 || status != 0) {
            bench_fail("a caller", "it failed");
        }
    }
}

static double tokens_per_s(uint32_t first, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = first; i < first + count; i++) {
        const caller *c = &page->callers[i];
        sum += c->calls > 0 ? c->calls * (double)c->tokens / c->busy_us * 1e6 : 0;
    }
    return sum;
}

static double median_us(caller *c)
{
    return c->calls > 0 ? bench_quantile(c->us, c->calls, 0.5) : NAN;
}

/* Latencies of several rounds. */
typedef struct pool {
    double us[CALLS_MAX];
    double node_us[CALLS_MAX];
    size_t count;
} pool;

static void pool_add(pool *p, const caller *c)
{
    for (uint32_t i = 0; i < c->calls && p->count < CALLS_MAX; i++) {
        p->us[p->count] = c->us[i];
        p->node_us[p->count++] = c->node_us[i];
    }
}

/* A quantile beside what it is alone. */
static void add_quantile(bench_report *report, const char *what, double p, pool *beside,
                         pool *alone, double bar)
{
    bench_report_rival(report, bench_quantile(beside->us, beside->count, p), "us",
                       bench_quantile(alone->us, alone->count, p), NAN, BENCH_LOWER, bar,
                       "%s p%.0f, %zu calls", what, p * 100, beside->count);
    bench_report_rival(report, bench_quantile(beside->node_us, beside->count, p), "us",
                       bench_quantile(alone->node_us, alone->count, p), NAN, BENCH_LOWER, NAN,
                       "%s p%.0f, in the node", what, p * 100);
}

/* ---- what the node says ---- */

/* Processor time so far, seconds. */
static double cpu_s(pid_t pid)
{
    struct timespec t = {0};
    clockid_t clock;
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) != 0) {
        return NAN;
    }
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- the three parts ---- */

/* Kernels alone: a pass of `rows` rows for each expert, over and over; microseconds of one. */
static double kernels_us(layer_local *local, const shape *s, uint32_t rows, double seconds)
{
    static double us[CALLS_MAX];
    uint32_t counts[EXPERTS];
    size_t n = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        counts[e] = rows;
    }
    EP_ASSERT((size_t)EXPERTS * rows <= TOKENS_MAX && s->hidden <= HIDDEN_MAX);
    for (double end_us = bench_now_us() + seconds * 1e6; bench_now_us() < end_us && n < CALLS_MAX;
         n++) {
        double begin_us = bench_now_us();
        if (layer_local_rows(local, counts, x, y) != EP_OK) {
            bench_fail("kernels", "no memory");
        }
        us[n] = bench_now_us() - begin_us;
    }
    return bench_quantile(us, n, 0.5);
}

/* Medians over rounds of one form. */
typedef struct merging {
    double alone_us[ROUNDS_MAX], alone_on_us[ROUNDS_MAX], alone_rate[ROUNDS_MAX];
    double rate[ROUNDS_MAX], gain[ROUNDS_MAX], cost[ROUNDS_MAX];
    double carried[ROUNDS_MAX], node_us[ROUNDS_MAX], caller_us[ROUNDS_MAX];
    double limit_rate[ROUNDS_MAX], limit_gain[ROUNDS_MAX], shared_gain[ROUNDS_MAX];
} merging;

static caller one_token(const char *url, const shape *s)
{
    return (caller){.url = url, .mode = EP_MOE_DECODE, .tokens = 1, .hidden = s->hidden};
}

static void run_merged(merging *m, int r, const ep_test_process *on, const shape *s, double seconds)
{
    for (uint32_t i = 0; i < MERGED_CALLERS; i++) {
        page->callers[i] = one_token(on->rpc_url, s);
    }
    double jobs = bench_metric(on, "expertd_jobs_total{class=\"decode\"}");
    double works = bench_metric(on, "expertd_job_works_total{class=\"decode\"}");
    double cpu = cpu_s(on->pid);
    run_callers(MERGED_CALLERS, seconds);
    cpu = cpu_s(on->pid) - cpu;
    works = bench_metric(on, "expertd_job_works_total{class=\"decode\"}") - works;
    m->carried[r] = works / (bench_metric(on, "expertd_jobs_total{class=\"decode\"}") - jobs);
    m->node_us[r] = cpu / (works / EXPERTS) * 1e6;
    double calls = 0, callers_us = 0;
    for (uint32_t i = 0; i < MERGED_CALLERS; i++) {
        calls += page->callers[i].calls;
        callers_us += page->callers[i].cpu_us;
    }
    m->caller_us[r] = callers_us / calls;
    m->rate[r] = tokens_per_s(0, MERGED_CALLERS);
}

static void run_round(merging *m, int r, const ep_test_process *off, const ep_test_process *on,
                      layer_local *local, const shape *s, double seconds)
{
    const double cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
    double one_us = kernels_us(local, s, 1, seconds / 4);
    for (int i = 0; i < 2; i++) { /* in turns: memory's speed drifts within a round */
        bool is_on = (i == 0) == (r % 2 != 0);
        page->callers[0] = one_token(is_on ? on->rpc_url : off->rpc_url, s);
        run_callers(1, seconds);
        if (is_on) {
            m->alone_on_us[r] = median_us(&page->callers[0]);
        } else {
            m->alone_us[r] = median_us(&page->callers[0]);
            m->alone_rate[r] = tokens_per_s(0, 1);
        }
    }
    run_merged(m, r, on, s, seconds);
    double all_us = kernels_us(local, s, MERGED_CALLERS, seconds / 4) / MERGED_CALLERS;
    m->gain[r] = m->rate[r] / m->alone_rate[r];
    m->cost[r] = m->alone_on_us[r] / m->alone_us[r];
    m->limit_rate[r] = 1e6 / all_us;
    m->limit_gain[r] = one_us / all_us;
    m->shared_gain[r] = 1e6 / (all_us + m->caller_us[r] / cores) / m->alone_rate[r];
}

static void bench_merging(bench_report *report, const shape *s, const char *checkpoint,
                          double seconds, int rounds)
{
    static merging m;
    ep_test_process off = {0}, on = {0};
    layer_local *local;
    ep_error error;
    char shape_name[32];
    const size_t n = (size_t)rounds;
    start_node(&off, "merge-off", checkpoint, "merge_callers: false\n");
    start_node(&on, "merge-on", checkpoint, "merge_callers: true\n");
    if (layer_local_open(checkpoint, 0, 0, &local, &error) != EP_OK) {
        bench_fail("kernels", error.text);
    }
    for (int r = 0; r < rounds; r++) {
        run_round(&m, r, &off, &on, local, s, seconds);
    }
    snprintf(shape_name, sizeof(shape_name), "%u x %u", s->hidden, s->inner);
    bench_row row = bench_value(bench_quantile(m.rate, n, 0.5), "tokens/s", BENCH_HIGHER, 8.0);
    row.limit = bench_quantile(m.limit_rate, n, 0.5);
    row.rival = bench_quantile(m.alone_rate, n, 0.5);
    row.ratio = bench_quantile(m.gain, n, 0.5);
    bench_report_add(report, &row, "%s: 16 callers against one, tokens/s", shape_name);
    bench_report_value(report, bench_quantile(m.limit_gain, n, 0.5), "x", BENCH_HIGHER, NAN,
                       "%s: kernels alone, 16 rows a job against one", shape_name);
    bench_report_value(report, bench_quantile(m.shared_gain, n, 0.5), "x", BENCH_HIGHER, NAN,
                       "%s: the most with the callers on the same cores", shape_name);
    bench_report_value(report, bench_quantile(m.carried, n, 0.5), "calls", BENCH_HIGHER, NAN,
                       "%s: 16 callers: calls a job carried", shape_name);
    bench_report_value(report, bench_quantile(m.node_us, n, 0.5), "us", BENCH_LOWER, NAN,
                       "%s: 16 callers: the node's processor time a call", shape_name);
    bench_report_value(report, bench_quantile(m.caller_us, n, 0.5), "us", BENCH_LOWER, NAN,
                       "%s: 16 callers: their own processor time a call", shape_name);
    bench_report_rival(report, bench_quantile(m.alone_on_us, n, 0.5), "us",
                       bench_quantile(m.alone_us, n, 0.5), bench_quantile(m.cost, n, 0.5),
                       BENCH_LOWER, 1.1, "%s: one caller, p50, merging on against off", shape_name);
    layer_local_close(local);
    ep_test_process_destroy(&off);
    ep_test_process_destroy(&on);
}

/* What a call takes when nothing else runs. */
static double call_alone_us(const char *url, uint32_t hidden)
{
    page->callers[0] = (caller){.url = url, .mode = EP_MOE_DECODE, .tokens = 1, .hidden = hidden};
    run_callers(1, 0.5);
    return median_us(&page->callers[0]);
}

static void bench_classes(bench_report *report, const char *checkpoint, double seconds, int rounds)
{
    static pool alone, beside;
    ep_test_process node = {0};
    double prefill_alone[ROUNDS_MAX], prefill_beside[ROUNDS_MAX], kept[ROUNDS_MAX],
        node_us[ROUNDS_MAX];
    start_node(&node, "classes", checkpoint, "threads: 1\n");
    const double pause_us = PAUSE_PARTS * call_alone_us(node.rpc_url, small.hidden);
    const caller decode = {.url = node.rpc_url,
                           .mode = EP_MOE_DECODE,
                           .tokens = 1,
                           .hidden = small.hidden,
                           .pause_us = pause_us};
    const caller prefill = {
        .url = node.rpc_url, .mode = EP_MOE_PREFILL, .tokens = TOKENS_MAX, .hidden = small.hidden};
    alone.count = beside.count = 0;
    for (int r = 0; r < rounds; r++) {
        page->callers[0] = decode;
        run_callers(1, seconds);
        pool_add(&alone, &page->callers[0]);
        page->callers[0] = page->callers[1] = prefill;
        double cpu = cpu_s(node.pid);
        run_callers(2, seconds / 2);
        cpu = cpu_s(node.pid) - cpu;
        node_us[r] =
            cpu * 1e6 / ((page->callers[0].calls + page->callers[1].calls + 2) * prefill.tokens);
        prefill_alone[r] = tokens_per_s(0, 2);
        page->callers[0] = decode;
        page->callers[1] = page->callers[2] = prefill;
        run_callers(3, seconds);
        pool_add(&beside, &page->callers[0]);
        prefill_beside[r] = tokens_per_s(1, 2);
        kept[r] = prefill_beside[r] / prefill_alone[r];
    }
    size_t n = (size_t)rounds;
    add_quantile(report, "decode beside prefill,", 0.5, &beside, &alone, NAN);
    add_quantile(report, "decode beside prefill,", 0.99, &beside, &alone, 1.5);
    bench_report_value(report, bench_quantile(node_us, n, 0.5), "us", BENCH_LOWER, NAN,
                       "prefill alone: the node's processor time per token");
    bench_report_rival(report, bench_quantile(prefill_beside, n, 0.5), "tokens/s",
                       bench_quantile(prefill_alone, n, 0.5), bench_quantile(kept, n, 0.5),
                       BENCH_HIGHER, 0.7, "prefill beside decode");
    ep_test_process_destroy(&node);
}

static void bench_tenants(bench_report *report, const char *checkpoint, double seconds, int rounds)
{
    static pool alone, beside;
    ep_test_process node = {0};
    double abusers_rate[ROUNDS_MAX];
    start_node(
        &node, "tenants", checkpoint,
        "threads: 1\ntenants:\n  - name: good\n    weight: 1\n  - name: abusive\n    weight: 1\n");
    const double pause_us = PAUSE_PARTS * call_alone_us(node.rpc_url, small.hidden);
    const caller good = {.url = node.rpc_url,
                         .tenant = "good",
                         .mode = EP_MOE_DECODE,
                         .tokens = 1,
                         .hidden = small.hidden,
                         .pause_us = pause_us};
    const caller abuser = {.url = node.rpc_url,
                           .tenant = "abusive",
                           .mode = EP_MOE_DECODE,
                           .tokens = 64,
                           .hidden = small.hidden,
                           .may_be_refused = true};
    alone.count = beside.count = 0;
    for (int r = 0; r < rounds; r++) {
        page->callers[0] = good;
        run_callers(1, seconds);
        pool_add(&alone, &page->callers[0]);
        for (uint32_t i = 1; i <= ABUSERS; i++) {
            page->callers[i] = abuser;
        }
        run_callers(1 + ABUSERS, seconds);
        pool_add(&beside, &page->callers[0]);
        abusers_rate[r] = tokens_per_s(1, ABUSERS);
    }
    size_t n = (size_t)rounds;
    add_quantile(report, "a tenant beside an abusive one,", 0.5, &beside, &alone, NAN);
    add_quantile(report, "a tenant beside an abusive one,", 0.99, &beside, &alone, 1.2);
    bench_report_value(report, bench_quantile(abusers_rate, n, 0.5), "tokens/s", BENCH_HIGHER, NAN,
                       "what the abusive one gets meanwhile");
    ep_test_process_destroy(&node);
}

static void make_checkpoint(const shape *s, char out_path[EP_FIXTURE_PATH_BYTES])
{
    const ep_fixture_config fixture = ep_fixture_layer(s->hidden, s->inner, EXPERTS, EXPERTS);
    ep_fixture_new(&fixture, out_path);
}

int main(int argc, char **argv)
{
    /* Of "merging classes tenants large"; for those who work on one. */
    const char *parts = getenv("EP_BENCH_CLASSES");
    char checkpoint[EP_FIXTURE_PATH_BYTES];
    page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED || !ep_test_dir_create(dir) || sem_init(&page->ready, 1, 0) != 0 ||
        sem_init(&page->go, 1, 0) != 0) {
        bench_fail("start", "no memory or no directory");
    }
    make_inputs();
    bench_report *report = bench_report_create(
        "Callers that share a node: merging, classes, tenants; bf16, top-8 of 8");
    make_checkpoint(&small, checkpoint);
    if (parts == NULL || strstr(parts, "merging") != NULL) {
        bench_merging(report, &small, checkpoint, 1.0, 5);
    }
    if (parts == NULL || strstr(parts, "classes") != NULL) {
        bench_classes(report, checkpoint, 3.0, 5);
    }
    if (parts == NULL || strstr(parts, "tenants") != NULL) {
        bench_tenants(report, checkpoint, 3.0, 5);
    }
    ep_fixture_remove(checkpoint);
    if (parts == NULL || strstr(parts, "large") != NULL) {
        make_checkpoint(&large, checkpoint);
        bench_merging(report, &large, checkpoint, 1.5, 3);
        ep_fixture_remove(checkpoint);
    }
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
