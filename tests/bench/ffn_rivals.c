/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_rivals.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    const char *name;
    const char *program; /* NULL: not in this build */
    bool int8;           /* also w8a8 */
} rival_program;

#ifdef EP_FFN_RIVALS
#define PROGRAM(name) EP_FFN_RIVALS "/" name
#else
#define PROGRAM(name) NULL
#endif

static const rival_program programs[FFN_RIVALS] = {
    {"oneDNN", PROGRAM("ffn_rival_onednn"), true},
    {"OpenBLAS", PROGRAM("ffn_rival_openblas"), false}};

static bool knows(const rival_program *program, ep_weight_format format)
{
    return format == EP_WEIGHTS_W8A8 ? program->int8
                                     : format == EP_WEIGHTS_BF16 || format == EP_WEIGHTS_F32;
}

static void set_number(const char *name, uint32_t value)
{
    char text[16];
    snprintf(text, sizeof(text), "%u", value);
    setenv(name, text, 1);
}

static _Noreturn void become(const char *program, const ffn_case *c, const ffn_options *o, int end)
{
    char numbers[3][16];
    const uint32_t values[3] = {c->hidden, c->inner, c->rows};
    for (int i = 0; i < 3; i++) {
        snprintf(numbers[i], sizeof(numbers[i]), "%u", values[i]);
    }
    set_number("OMP_NUM_THREADS", o->threads);
    setenv("OMP_PROC_BIND", "true", 1);
    setenv("GOMP_SPINCOUNT", "20000", 1); /* some hundred microseconds: beyond its own pauses, not
                                             into our takes */
#if defined(__x86_64__)
    /* OpenBLAS takes CPUs that are younger than itself for some without AVX-512. */
    if (__builtin_cpu_supports("avx512f")) {
        setenv("OPENBLAS_CORETYPE", "SkylakeX", 1);
    }
#endif
    if (dup2(end, STDIN_FILENO) >= 0 && dup2(end, STDOUT_FILENO) >= 0) {
        execl(program, program, numbers[0], numbers[1], numbers[2],
              ep_weight_format_name(c->format), (char *)NULL);
    }
    _exit(127);
}

static void end_process(ffn_rival_process *p)
{
    if (p->pid > 0) {
        fclose(p->to);
        fclose(p->from);
        waitpid(p->pid, NULL, 0);
        p->pid = 0;
    }
}

static void start(ffn_rival_process *p, const rival_program *program, const ffn_case *c,
                  const ffn_options *o)
{
    int ends[2];
    *p = (ffn_rival_process){.name = program->name};
    if (program->program == NULL || access(program->program, X_OK) != 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return;
    }
    fflush(NULL);
    p->pid = fork();
    if (p->pid == 0) {
        become(program->program, c, o, ends[1]);
    }
    close(ends[1]);
    p->to = fdopen(ends[0], "w");
    p->from = fdopen(fcntl(ends[0], F_DUPFD_CLOEXEC, 0), "r");
    if (p->pid < 0 || p->to == NULL || p->from == NULL) {
        abort();
    }
    if (fscanf(p->from, " ready %lf", &p->error) != 1) {
        end_process(p);
    }
}

/* Threads of OpenMP spin for some time before they sleep. */
static void settle(void)
{
    const struct timespec time = {.tv_nsec = 20000000};
    nanosleep(&time, NULL);
}

void ffn_rivals_open(ffn_rivals *r, const ffn_case *c, const ffn_options *o)
{
    r->count = 0;
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; o->rivals && i < FFN_RIVALS; i++) {
        if (knows(&programs[i], c->format)) {
            start(&r->process[r->count++], &programs[i], c, o);
        }
    }
    settle();
}

static void take(ffn_rival_process *p)
{
    const double begin_us = bench_now_us();
    const size_t n = p->count;
    fputs("take\n", p->to);
    fflush(p->to);
    if (fscanf(p->from, "%lf", &p->times[n]) != 1) {
        end_process(p);
        return;
    }
    p->count++;
    p->used_us += bench_now_us() - begin_us;
}

void ffn_rivals_take(ffn_rivals *r, double seconds)
{
    for (uint32_t i = 0; i < r->count; i++) {
        ffn_rival_process *p = &r->process[i];
        if (p->pid > 0 && p->used_us <= 1e6 * seconds && p->count < FFN_METER_SAMPLES_MAX) {
            take(p);
            settle();
        }
    }
}

static void add_rival(bench_report *report, const ffn_case *c, const ffn_meter *ours,
                      ffn_rival_process *p)
{
    static double ratios[FFN_METER_SAMPLES_MAX], shares[FFN_METER_SAMPLES_MAX];
    static double our_shares[FFN_METER_SAMPLES_MAX];
    char what[64];
    snprintf(what, sizeof(what), ", share beside %s", p->name);
    if (p->pid <= 0 || p->count == 0) {
        ffn_rows_add(report, c, what, bench_value(NAN, "of limit", BENCH_HIGHER, 1.0));
        printf("    %s is missing or failed; tests/bench/run --rivals builds it, rivals=no "
               "measures without\n",
               p->name);
        return;
    }
    for (size_t i = 0; i < p->count; i++) {
        const double us = (ours->times[2 * i] + ours->times[2 * i + 1]) / 2;
        our_shares[i] = (ffn_meter_share(ours, 2 * i) + ffn_meter_share(ours, 2 * i + 1)) / 2;
        ratios[i] = p->times[i] / us;
        shares[i] = our_shares[i] / ratios[i];
    }
    ffn_rows_add(report, c, what,
                 (bench_row){.value = bench_quantile(our_shares, p->count, 0.5),
                             .unit = "of limit",
                             .limit = NAN,
                             .rival = bench_quantile(shares, p->count, 0.5),
                             .ratio = bench_quantile(ratios, p->count, 0.5),
                             .better = BENCH_HIGHER,
                             .bar = 1.0});
    printf("    %s: %.1f us/expert; error %.1e; %zu takes\n", p->name,
           bench_quantile(p->times, p->count, 0.5), p->error, p->count);
}

void ffn_rivals_close(ffn_rivals *r, bench_report *report, const ffn_case *c, const ffn_meter *ours)
{
    for (uint32_t i = 0; i < r->count; i++) {
        add_rival(report, c, ours, &r->process[i]);
        end_process(&r->process[i]);
    }
    fflush(stdout);
}
