/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tracing costs: decode throughput of one MoE layer, served by two real expertd processes,
 * with a client that prepared its call.
 *
 *     off       `tracing: off`; the client does not load the probes
 *     again     the same once more, with processes of its own: what two equal things differ by here
 *     loaded    probes loaded and a session daemon there, but no session
 *     session   all events of expertd are recorded with the contexts of `expertctl trace record`
 *
 * Each has nodes and a client process of its own, as loaded probes stay. Short turns alternate in
 * shuffled order, so that what else the machine does falls on all alike; all processes are started
 * anew several times, as two equal ones may differ in where their memory lies. Throughput is that
 * of a turn's median call, as in bench_layer; the median over all rounds of its ratio to `off` in
 * the same round is reported, with a standard error from how the starts differ. Processor time is
 * that of client and nodes, and of the daemons of LTTng in a row of its own.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "bench/bench_service.h"
#include "observe/trace.h"
#include "support/checkpoint_fixture.h"
#include "support/lttng.h"

#define HIDDEN 1024
#define INNER 512
#define EXPERTS 32
#define TOP_K 4
#define NODES 2
#define TOKENS_MAX 8
#define BATCHES 16 /* with different experts */
#define STARTS 10
#define ROUNDS_EACH 20 /* per start */
#define ROUNDS (STARTS * ROUNDS_EACH)
#define TURN_US 30000.0
#define CALLS_MAX 128

enum { OFF, AGAIN, LOADED, SESSION, PARTIES };
static const char *const party_names[PARTIES] = {"off", "again", "loaded", "session"};

/* ---- the client process: reads "T calls", answers with the median call in microseconds ---- */

static uint16_t x[TOKENS_MAX * HIDDEN], y[TOKENS_MAX * HIDDEN];
static int32_t ids[BATCHES][TOKENS_MAX * TOP_K];
static float scales[TOKENS_MAX * TOP_K];

static void prepare(ep_client *client, uint32_t batch, ep_call **out_call)
{
    ep_error error;
    const bench_tokens of = {TOKENS_MAX, TOP_K, HIDDEN, x, ids[batch], scales};
    ep_moe_args args = bench_args(&of);
    args.mode = EP_MOE_DECODE;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, TOKENS_MAX, HIDDEN);
    if (ep_call_create(client, &args, &out, out_call, &error) != EP_OK) {
        bench_fail("prepare", error.text);
    }
}

static void run_once(ep_call *call, uint32_t tokens)
{
    ep_error error;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    if (ep_call_begin(call, tokens, &error) != EP_OK) {
        bench_fail("begin", error.text);
    }
    if (ep_call_finish(call, &result) != EP_OK) {
        bench_fail("call", result.error.text);
    }
}

static int be_client(int party, const char *const *urls)
{
    ep_call *calls[BATCHES];
    ep_client *client;
    const char *why;
    uint32_t tokens, count;
    uint64_t seed = 5;
    double us[CALLS_MAX];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* it is recorded from its first call, also on a busy machine */
    setenv("LTTNG_UST_REGISTER_TIMEOUT", "10000", 1);
    if (party >= LOADED && !ep_trace_load(&why)) {
        bench_fail("probes", why);
    }
    bench_draw_rows(&seed, TOKENS_MAX * HIDDEN, x);
    client = bench_client_open(urls, NODES, NULL);
    for (uint32_t b = 0; b < BATCHES; b++) {
        bench_draw_routing(&seed, TOKENS_MAX, TOP_K, EXPERTS, ids[b], scales);
        prepare(client, b, &calls[b]);
    }
    while (scanf("%" SCNu32 " %" SCNu32, &tokens, &count) == 2) {
        if (EP_TRACE_SPAN_ON(forward) != (party == SESSION)) {
            bench_fail(party_names[party], "the client is not recorded as it should be");
        }
        run_once(calls[0], tokens); /* wakes everything up */
        for (uint32_t i = 0; i < count && i < CALLS_MAX; i++) {
            double begin = bench_now_us();
            run_once(calls[i % BATCHES], tokens);
            us[i] = bench_now_us() - begin;
        }
        printf("%.3f\n", bench_quantile(us, count, 0.5));
        fflush(stdout);
    }
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_call_destroy(calls[b]);
    }
    ep_client_destroy(client);
    return 0;
}

/* ---- parties ---- */

typedef struct party {
    ep_test_process nodes[NODES];
    pid_t client;
    FILE *ask;
    FILE *answer;
} party;

static void start_node(party *p, int index, uint32_t n, const char *dir, const char *checkpoint,
                       const char *const *environment)
{
    char name[32], experts[32];
    snprintf(name, sizeof(name), "%s-%" PRIu32, party_names[index], n);
    snprintf(experts, sizeof(experts), "%d-%d", (int)n * (EXPERTS / NODES),
             ((int)n + 1) * (EXPERTS / NODES) - 1);
    bench_node_start(&(bench_node){.name = name,
                                   .checkpoint = checkpoint,
                                   .experts = experts,
                                   .keys = index >= LOADED ? "tracing: auto\n" : "tracing: off\n",
                                   .environment = environment},
                     dir, &p->nodes[n]);
}

static void start_client(party *p, int index, const char *environment)
{
    char number[8];
    int asks[2], answers[2];
    char *argv[] = {"bench_trace",       "--client",          number,
                    p->nodes[0].rpc_url, p->nodes[1].rpc_url, NULL};
    snprintf(number, sizeof(number), "%d", index);
    if (pipe2(asks, O_CLOEXEC) != 0 || pipe2(answers, O_CLOEXEC) != 0) {
        bench_fail("client", "no pipe");
    }
    fflush(NULL);
    p->client = fork();
    if (p->client == 0) {
        dup2(asks[0], STDIN_FILENO);
        dup2(answers[1], STDOUT_FILENO);
        if (environment != NULL) {
            putenv((char *)(uintptr_t)environment);
        }
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    close(asks[0]);
    close(answers[1]);
    p->ask = fdopen(asks[1], "w");
    p->answer = fdopen(answers[0], "r");
    if (p->client < 0 || p->ask == NULL || p->answer == NULL) {
        bench_fail("client", "did not start");
    }
}

static void start(party *p, int index, const char *dir, const char *checkpoint,
                  ep_test_lttng *lttng)
{
    for (uint32_t n = 0; n < NODES; n++) {
        start_node(p, index, n, dir, checkpoint, lttng != NULL ? lttng->environment : NULL);
    }
    start_client(p, index, lttng != NULL ? lttng->home : NULL);
}

static void stop(party *p)
{
    fclose(p->ask);
    fclose(p->answer);
    waitpid(p->client, NULL, 0);
    for (uint32_t n = 0; n < NODES; n++) {
        ep_test_process_stop(&p->nodes[n], SIGTERM, 60000);
        ep_test_process_destroy(&p->nodes[n]);
    }
}

static double turn_us(party *p, uint32_t tokens, uint32_t calls)
{
    double us;
    fprintf(p->ask, "%" PRIu32 " %" PRIu32 "\n", tokens, calls);
    fflush(p->ask);
    if (fscanf(p->answer, "%lf", &us) != 1) {
        bench_fail("client", "ended");
    }
    return us;
}

/* Processor time of a process since it began, all threads. */
static double cpu_us(pid_t pid)
{
    clockid_t clock;
    struct timespec time = {0};
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &time) != 0) {
        bench_fail("processor time", "cannot be read");
    }
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static double party_cpu_us(const party *p)
{
    return cpu_us(p->client) + cpu_us(p->nodes[0].pid) + cpu_us(p->nodes[1].pid);
}

/* ---- rounds ---- */

typedef struct figures {
    uint32_t tokens;
    uint32_t calls; /* of a turn */
    double throughput[PARTIES][ROUNDS];
    double cpu[PARTIES][ROUNDS]; /* microseconds per call */
} figures;

static void shuffle(int order[PARTIES], uint64_t *seed)
{
    for (int i = 0; i < PARTIES; i++) {
        order[i] = i;
    }
    for (int i = PARTIES - 1; i > 0; i--) {
        int j = (int)(ep_splitmix64(seed) % (uint64_t)(i + 1)), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

/* How far the starts' medians lie apart: rounds of one start are not independent. */
static double ratio_error(const double ratio[ROUNDS])
{
    double one[ROUNDS_EACH], sum = 0, squares = 0;
    for (int i = 0; i < STARTS; i++) {
        memcpy(one, &ratio[i * ROUNDS_EACH], sizeof(one));
        double median = bench_quantile(one, ROUNDS_EACH, 0.5);
        sum += median;
        squares += median * median;
    }
    return sqrt((squares - sum * sum / STARTS) / (STARTS - 1) / STARTS);
}

static void run_rounds(figures *f, party parties[PARTIES], int first)
{
    uint64_t seed = f->tokens + (uint64_t)first;
    for (int p = 0; p < PARTIES; p++) {
        turn_us(&parties[p], f->tokens, CALLS_MAX / 4); /* memory is touched, threads have run */
    }
    if (f->calls == 0) {
        double calls = TURN_US / turn_us(&parties[OFF], f->tokens, CALLS_MAX / 4);
        f->calls = calls < 5 ? 5 : calls > CALLS_MAX ? CALLS_MAX : (uint32_t)calls;
    }
    for (int r = first; r < first + ROUNDS_EACH; r++) {
        int order[PARTIES];
        shuffle(order, &seed);
        for (int i = 0; i < PARTIES; i++) {
            int p = order[i];
            double cpu = party_cpu_us(&parties[p]);
            f->throughput[p][r] = f->tokens / turn_us(&parties[p], f->tokens, f->calls) * 1e6;
            f->cpu[p][r] = (party_cpu_us(&parties[p]) - cpu) / (f->calls + 1);
        }
    }
}

static void add_row(bench_report *report, const figures *f, int which, const char *what,
                    const char *unit, const double figure[PARTIES][ROUNDS], bench_better better,
                    double bar)
{
    static const char *const words[PARTIES] = {"", "off once more (the noise)",
                                               "loaded, no session", "session records all"};
    static double ratio[ROUNDS], value[ROUNDS], off[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        value[r] = figure[which][r];
        off[r] = figure[OFF][r];
        ratio[r] = value[r] / off[r];
    }
    const double error = ratio_error(ratio); /* before quantiles sort */
    bench_report_rival(report, bench_quantile(value, ROUNDS, 0.5), unit,
                       bench_quantile(off, ROUNDS, 0.5), bench_quantile(ratio, ROUNDS, 0.5), better,
                       bar, "T = %" PRIu32 ", %s, %s", f->tokens, words[which], what);
    bench_report_value(report, error, "", BENCH_LOWER, NAN,
                       "T = %" PRIu32 ", %s, %s: standard error of the ratio", f->tokens,
                       words[which], what);
}

static void add_rows(bench_report *report, const figures *f)
{
    static const double bars[PARTIES] = {NAN, NAN, 0.99, 0.97};
    for (int p = AGAIN; p < PARTIES; p++) {
        add_row(report, f, p, "decode", "tokens/s", f->throughput, BENCH_HIGHER, bars[p]);
    }
    for (int p = AGAIN; p < PARTIES; p++) {
        add_row(report, f, p, "processor time", "us", f->cpu, BENCH_LOWER, NAN);
    }
}

/* ---- the recording ---- */

static const char *text_between(const char *text, const char *label)
{
    const char *at = text != NULL ? strstr(text, label) : NULL;
    return at != NULL ? at + strlen(label) : NULL;
}

/* All there, and something there. */
static void check_recording(bench_report *report, ep_test_lttng *lttng, uint64_t calls,
                            const char *recording)
{
    static const char *const list[] = {"list", "test", NULL};
    static const char *const stop_args[] = {"stop", NULL};
    char *text = NULL;
    if (!ep_test_lttng_run(lttng, stop_args, NULL) || !ep_test_lttng_run(lttng, list, &text)) {
        bench_fail("lttng", "failed");
    }
    const char *discarded = text_between(text, "Discarded events:");
    bench_report_value(report, discarded != NULL ? strtod(discarded, NULL) : NAN, "", BENCH_LOWER,
                       0, "events discarded");
    free(text);
    if (ep_test_process_run_line(lttng->dir, "/usr/bin/du", NULL, 60000, &text, "-sb %s",
                                 recording) != 0) {
        bench_fail("du", text);
    }
    bench_report_value(report, strtod(text, NULL) / (double)calls, "bytes", BENCH_LOWER, NAN,
                       "bytes recorded per layer call");
    free(text);
}

/* Of the daemons that write the recording: children of the session daemon. */
static double daemons_cpu_us(const ep_test_lttng *lttng)
{
    char path[64];
    int pid;
    double us = cpu_us(lttng->daemon.pid);
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)lttng->daemon.pid,
             (int)lttng->daemon.pid);
    FILE *children = fopen(path, "r");
    while (children != NULL && fscanf(children, "%d", &pid) == 1) {
        us += cpu_us(pid);
    }
    if (children != NULL) {
        fclose(children);
    }
    return us;
}

static void run_start(int start_number, ep_test_lttng lttng[2], const char *dir,
                      const char *checkpoint, figures cases[2])
{
    party parties[PARTIES] = {0};
    int order[PARTIES];
    uint64_t seed = (uint64_t)start_number;
    shuffle(order, &seed);
    for (int i = 0; i < PARTIES; i++) {
        int p = order[i];
        start(&parties[p], p, dir, checkpoint,
              p == LOADED    ? &lttng[0]
              : p == SESSION ? &lttng[1]
                             : NULL);
    }
    for (int c = 0; c < 2; c++) {
        run_rounds(&cases[c], parties, start_number * ROUNDS_EACH);
    }
    for (int p = 0; p < PARTIES; p++) {
        stop(&parties[p]);
    }
}

static void run_all(bench_report *report, const char *dir, const char *checkpoint)
{
    static figures cases[2] = {{.tokens = 1}, {.tokens = TOKENS_MAX}};
    char homes[2][EP_TEST_PATH_BYTES + 16], recording[EP_TEST_PATH_BYTES + 16];
    ep_test_lttng lttng[2];
    snprintf(recording, sizeof(recording), "%s/recording", dir);
    for (int i = 0; i < 2; i++) {
        snprintf(homes[i], sizeof(homes[i]), "%s/lttng-%d", dir, i);
        if (mkdir(homes[i], 0700) != 0 || !ep_test_lttng_start(&lttng[i], homes[i])) {
            bench_fail("lttng-sessiond", "did not start");
        }
    }
    if (!ep_test_lttng_record(&lttng[1], recording)) {
        bench_fail("lttng", "cannot record");
    }
    double daemons = daemons_cpu_us(&lttng[1]);
    for (int i = 0; i < STARTS; i++) {
        run_start(i, lttng, dir, checkpoint, cases);
    }
    daemons = daemons_cpu_us(&lttng[1]) - daemons;
    uint64_t calls = 0;
    for (int c = 0; c < 2; c++) {
        add_rows(report, &cases[c]);
        calls += (uint64_t)ROUNDS * (cases[c].calls + 1) + (uint64_t)STARTS * (CALLS_MAX / 4 + 1);
    }
    bench_report_value(report, daemons / (double)calls, "us", BENCH_LOWER, NAN,
                       "processor time of LTTng's daemons per layer call");
    check_recording(report, &lttng[1], calls, recording);
    for (int i = 0; i < 2; i++) {
        ep_test_lttng_stop(&lttng[i]);
    }
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES], title[200];
    if (argc == 5 && strcmp(argv[1], "--client") == 0) {
        return be_client(atoi(argv[2]), (const char *const *)(uintptr_t)&argv[3]);
    }
    if (!ep_test_lttng_prepare()) {
        bench_fail("LTTng", "lttng-tools is not installed, or root without user namespaces");
    }
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, TOP_K);
    ep_fixture_new(&fixture, checkpoint);
    if (!ep_test_dir_create(dir)) {
        bench_fail("no directory", NULL);
    }
    snprintf(title, sizeof(title),
             "One MoE layer, H = %d, I = %d, top-%d of %d, bf16, %d nodes: tracing against tracing "
             "off (rival), same run",
             HIDDEN, INNER, TOP_K, EXPERTS, NODES);
    bench_report *report = bench_report_create(title);
    run_all(report, dir, checkpoint);
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
