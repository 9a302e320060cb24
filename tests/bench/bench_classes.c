/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Callers that share a node, each a process of its own, over real expertd processes on loopback:
 *   merging   16 callers with one token each on the same 8 experts against one caller; and what merging costs a
 *             lone caller
 *   classes   p99 of a paced decode caller (it calls a fifth of the time, as between the attention of its layers)
 *             beside prefill that never pauses, and what prefill keeps
 *   tenants   p99 of a paced caller beside eight callers of another tenant that send 64 tokens each, without pause
 * Rounds alternate between all forms. In the last two the node computes on one thread, so that callers and I/O have
 * the other core.
 */
#include <math.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "expertd/client.h"
#include "support/checkpoint_fixture.h"
#include "support/process.h"

#define EXPERTS 8
#define TOKENS_MAX 512
#define HIDDEN_MAX 7168
#define CALLERS_MAX 16
#define CALLS_MAX 20000
#define MERGED_CALLERS 16
#define ABUSERS 8
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
    double us[CALLS_MAX];
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

static void fail(const char *what, const char *text)
{
    fprintf(stderr, "bench_classes: %s: %s\n", what, text);
    exit(1);
}

static void make_inputs(void)
{
    uint64_t seed = 5;
    for (size_t i = 0; i < (size_t)TOKENS_MAX * HIDDEN_MAX; i++) {
        x[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(&seed) * 0x1p-31f);
    }
    for (size_t i = 0; i < TOKENS_MAX * EXPERTS; i++) {
        ids[i] = (int32_t)(i % EXPERTS);
        scales[i] = 1.0f / EXPERTS;
    }
}

/* ---- nodes ---- */

static void start_node(ep_test_process *node, const char *name, const char *checkpoint, const char *keys)
{
    char path[EP_TEST_PATH_BYTES + 32], flag[EP_TEST_PATH_BYTES + 64], config[2048];
    snprintf(path, sizeof(path), "%s/%s.yaml", dir, name);
    snprintf(flag, sizeof(flag), "--config=%s", path);
    snprintf(config, sizeof(config),
             "node_name: %s\nlisten:\n  - tcp://127.0.0.1:0\nprobe_address: 127.0.0.1:0\nadmin_listen: ''\n"
             "door_listen: ''\nmodels:\n  - name: bench\n    path: %s\n%s",
             name, checkpoint, keys);
    const char *args[] = {flag, NULL};
    if (!ep_test_write_file(path, config, 0600) ||
        !ep_test_process_start(node, dir, name, EP_EXPERTD_PROGRAM, args, NULL, true) ||
        !ep_test_process_wait_ports(node, 120000)) {
        fail("expertd did not start", name);
    }
}

/* ---- callers ---- */

static void sleep_us(double us)
{
    struct timespec t = {.tv_sec = (time_t)(us / 1e6), .tv_nsec = (long)(fmod(us, 1e6) * 1e3)};
    nanosleep(&t, NULL);
}

static bool call_once(ep_client *client, caller *c)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_moe_args_init(&args);
    args.model = "bench";
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, c->tokens, c->hidden);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, c->tokens, EXPERTS);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, c->tokens, EXPERTS);
    args.mode = c->mode;
    args.tenant = c->tenant;
    args.deadline_us = 60000000;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, c->tokens, c->hidden);
    ep_err err = ep_moe_forward(client, &args, &out, &result);
    if (err != EP_OK && !(c->may_be_refused && err == EP_ERR_RESOURCE_EXHAUSTED)) {
        fail("forward", result.error.text);
    }
    return err == EP_OK;
}

/* A child process. Exit code 0, or a message. */
static void run_caller(caller *c)
{
    ep_client_config config;
    ep_client *client;
    ep_error error;
    ep_client_config_init(&config);
    config.node_urls = &c->url;
    config.node_urls_count = 1;
    if (ep_client_create(&config, &client, &error) != EP_OK ||
        ep_client_wait_ready(client, 120000000, &error) != EP_OK) {
        fail("client", error.text);
    }
    for (int i = 0; i < 2; i++) {
        call_once(client, c);
    }
    sem_post(&page->ready);
    sem_wait(&page->go);
    double first_us = bench_now_us();
    while (bench_now_us() < page->end_us && c->calls < CALLS_MAX) {
        double begin_us = bench_now_us();
        bool is_done = call_once(client, c);
        double end_us = bench_now_us();
        if (is_done) {
            c->us[c->calls++] = end_us - begin_us;
            c->busy_us = end_us - first_us;
        } else {
            c->refused++;
        }
        if (c->pause_us > 0) {
            sleep_us(c->pause_us);
        }
    }
    _exit(0); /* not the parent's clean-up */
}

/* Runs page->callers[0..count) side by side. */
static void run_callers(uint32_t count, double seconds)
{
    pid_t children[CALLERS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        page->callers[i].calls = page->callers[i].refused = 0;
        page->callers[i].busy_us = 0;
        children[i] = fork();
        if (children[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run_caller(&page->callers[i]);
        }
        if (children[i] < 0) {
            fail("fork", "no process");
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
            fail("a caller", "it failed");
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
    size_t count;
} pool;

static void pool_add(pool *p, const caller *c)
{
    for (uint32_t i = 0; i < c->calls && p->count < CALLS_MAX; i++) {
        p->us[p->count++] = c->us[i];
    }
}

static void add_row(bench_report *report, const char *name, const char *unit, double value, double rival,
                    double ratio, bench_better better, double bar)
{
    bench_row row = {.unit = unit,
                     .value = value,
                     .limit = NAN,
                     .rival = rival,
                     .ratio = ratio,
                     .better = better,
                     .bar = bar};
    snprintf(row.name, sizeof(row.name), "%s", name);
    bench_report_add(report, &row);
}

/* ---- what the node says ---- */

static double metric(const ep_test_process *node, const char *series)
{
    char *body = NULL;
    double value = NAN;
    if (ep_test_http_get(node->probe_url, "/metrics", &body) == 200) {
        const char *at = strstr(body, series);
        value = at != NULL ? strtod(at + strlen(series), NULL) : NAN;
    }
    free(body);
    return value;
}

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

static void bench_merging(bench_report *report, const shape *s, const char *checkpoint, double seconds, int rounds)
{
    ep_test_process off = {0}, on = {0};
    double alone_us[16], alone_on_us[16], alone_rate[16], rate[16], gain[16], cost[16];
    double carried[16], node_us[16];
    char name[96];
    start_node(&off, "merge-off", checkpoint, "merge_callers: false\n");
    start_node(&on, "merge-on", checkpoint, "merge_callers: true\n");
    for (int r = 0; r < rounds; r++) {
        page->callers[0] = (caller){.url = off.rpc_url, .mode = EP_MOE_DECODE, .tokens = 1, .hidden = s->hidden};
        run_callers(1, seconds);
        alone_rate[r] = tokens_per_s(0, 1);
        alone_us[r] = median_us(&page->callers[0]);
        page->callers[0].url = on.rpc_url;
        run_callers(1, seconds);
        alone_on_us[r] = median_us(&page->callers[0]);
        for (uint32_t i = 0; i < MERGED_CALLERS; i++) {
            page->callers[i] = (caller){.url = on.rpc_url, .mode = EP_MOE_DECODE, .tokens = 1, .hidden = s->hidden};
        }
        double jobs = metric(&on, "expertd_jobs_total{class=\"decode\"} ");
        double works = metric(&on, "expertd_job_works_total{class=\"decode\"} ");
        double cpu = cpu_s(on.pid);
        run_callers(MERGED_CALLERS, seconds);
        cpu = cpu_s(on.pid) - cpu;
        works = metric(&on, "expertd_job_works_total{class=\"decode\"} ") - works;
        carried[r] = works / (metric(&on, "expertd_jobs_total{class=\"decode\"} ") - jobs);
        node_us[r] = cpu / (works / EXPERTS) * 1e6;
        rate[r] = tokens_per_s(0, MERGED_CALLERS);
        gain[r] = rate[r] / alone_rate[r];
        cost[r] = alone_on_us[r] / alone_us[r];
    }
    size_t n = (size_t)rounds;
    snprintf(name, sizeof(name), "%u x %u: 16 callers against one, tokens/s", s->hidden, s->inner);
    add_row(report, name, "tokens/s", bench_quantile(rate, n, 0.5), bench_quantile(alone_rate, n, 0.5),
            bench_quantile(gain, n, 0.5), BENCH_HIGHER, 8.0);
    snprintf(name, sizeof(name), "%u x %u: 16 callers: calls a job carried", s->hidden, s->inner);
    add_row(report, name, "calls", bench_quantile(carried, n, 0.5), NAN, NAN, BENCH_HIGHER, NAN);
    snprintf(name, sizeof(name), "%u x %u: 16 callers: the node's processor time per call", s->hidden, s->inner);
    add_row(report, name, "us", bench_quantile(node_us, n, 0.5), NAN, NAN, BENCH_LOWER, NAN);
    snprintf(name, sizeof(name), "%u x %u: one caller, p50, merging on against off", s->hidden, s->inner);
    add_row(report, name, "us", bench_quantile(alone_on_us, n, 0.5), bench_quantile(alone_us, n, 0.5),
            bench_quantile(cost, n, 0.5), BENCH_LOWER, 1.1);
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
    double prefill_alone[16], prefill_beside[16], kept[16], node_us[16];
    start_node(&node, "classes", checkpoint, "threads: 1\n");
    const double pause_us = PAUSE_PARTS * call_alone_us(node.rpc_url, small.hidden);
    const caller decode = {
        .url = node.rpc_url, .mode = EP_MOE_DECODE, .tokens = 1, .hidden = small.hidden, .pause_us = pause_us};
    const caller prefill = {
        .url = node.rpc_url, .mode = EP_MOE_PREFILL, .tokens = TOKENS_MAX, .hidden = small.hidden};
    alone.count = beside.count = 0;
    for (int r = 0; r < rounds; r++) {
        page->callers[0] = decode;
        run_callers(1, seconds);
        pool_add(&alone, &page->callers[0]);
        page->callers[0] = page->callers[1] = prefill;
        double cpu = cpu_s(node.pid);
        run_callers(2, seconds);
        node_us[r] = (cpu_s(node.pid) - cpu) * 1e6 / ((page->callers[0].calls + page->callers[1].calls + 4) * prefill.tokens);
        prefill_alone[r] = tokens_per_s(0, 2);
        page->callers[0] = decode;
        page->callers[1] = page->callers[2] = prefill;
        run_callers(3, seconds);
        pool_add(&beside, &page->callers[0]);
        prefill_beside[r] = tokens_per_s(1, 2);
        kept[r] = prefill_beside[r] / prefill_alone[r];
    }
    size_t n = (size_t)rounds;
    add_row(report, "decode p50 beside prefill", "us", bench_quantile(beside.us, beside.count, 0.5),
            bench_quantile(alone.us, alone.count, 0.5), NAN, BENCH_LOWER, NAN);
    add_row(report, "decode p99 beside prefill", "us", bench_quantile(beside.us, beside.count, 0.99),
            bench_quantile(alone.us, alone.count, 0.99), NAN, BENCH_LOWER, 1.5);
    add_row(report, "prefill alone: the node's processor time per token", "us", bench_quantile(node_us, n, 0.5), NAN, NAN,
            BENCH_LOWER, NAN);
    add_row(report, "prefill beside decode", "tokens/s", bench_quantile(prefill_beside, n, 0.5),
            bench_quantile(prefill_alone, n, 0.5), bench_quantile(kept, n, 0.5), BENCH_HIGHER, 0.7);
    ep_test_process_destroy(&node);
}

static void bench_tenants(bench_report *report, const char *checkpoint, double seconds, int rounds)
{
    static pool alone, beside;
    ep_test_process node = {0};
    double abusers_rate[16];
    start_node(&node, "tenants", checkpoint,
               "threads: 1\ntenants:\n  - name: good\n    weight: 16\n  - name: abusive\n    weight: 1\n");
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
    add_row(report, "a tenant's p50 beside an abusive one", "us", bench_quantile(beside.us, beside.count, 0.5),
            bench_quantile(alone.us, alone.count, 0.5), NAN, BENCH_LOWER, NAN);
    add_row(report, "a tenant's p99 beside an abusive one", "us", bench_quantile(beside.us, beside.count, 0.99),
            bench_quantile(alone.us, alone.count, 0.99), NAN, BENCH_LOWER, 1.2);
    add_row(report, "what the abusive one gets meanwhile", "tokens/s", bench_quantile(abusers_rate, n, 0.5), NAN,
            NAN, BENCH_HIGHER, NAN);
    ep_test_process_destroy(&node);
}

static void make_checkpoint(const shape *s, char out_path[EP_FIXTURE_PATH_BYTES])
{
    ep_error error;
    ep_fixture_config fixture = ep_fixture_default();
    fixture.layers = 1;
    fixture.hidden = s->hidden;
    fixture.inner = s->inner;
    fixture.experts = EXPERTS;
    fixture.top_k = EXPERTS;
    ep_fixture_temp_dir(out_path);
    if (ep_fixture_write(&fixture, out_path, &error) != EP_OK) {
        fail("checkpoint", error.text);
    }
}

int main(int argc, char **argv)
{
    const char *parts = getenv("EP_BENCH_CLASSES"); /* of "merging classes tenants large"; for those who work on one */
    char checkpoint[EP_FIXTURE_PATH_BYTES];
    page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED || !ep_test_dir_create(dir) || sem_init(&page->ready, 1, 0) != 0 ||
        sem_init(&page->go, 1, 0) != 0) {
        fail("start", "no memory or no directory");
    }
    make_inputs();
    bench_report *report = bench_report_create("Callers that share a node: merging, classes, tenants; bf16, top-8 of 8");
    make_checkpoint(&small, checkpoint);
    if (parts == NULL || strstr(parts, "merging") != NULL) {
        bench_merging(report, &small, checkpoint, 1.0, 5);
    }
    if (parts == NULL || strstr(parts, "classes") != NULL) {
        bench_classes(report, checkpoint, 2.0, 4);
    }
    if (parts == NULL || strstr(parts, "tenants") != NULL) {
        bench_tenants(report, checkpoint, 2.0, 4);
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
