/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Uneven load: of E experts the busiest 3 of 16 take 60 % of the tokens and the idlest 5 of 16 take 10 %, as jobs in any order. Beside each
 * repetition the same number of tokens spread evenly. Printed: the share of their time that the compute threads are in tasks, and the time against
 * even load.
 *
 *     bench_skew [JSON] [experts=32] [m=64] [seconds=1] [threads=N]        m: tokens per expert on average
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "bench/ffn_experts.h"

enum { HIDDEN = 2048, INNER = 768, EXPERTS_MAX = 128, REPETITIONS_MIN = 5, REPETITIONS_MAX = 500 };

static const uint32_t counts[] = {8, 32, 128};
static const uint32_t means[] = {4, 64};

typedef struct {
    const char *json;
    uint32_t experts; /* 0: all of counts */
    uint32_t mean;    /* 0: all of means */
    double seconds;
    uint32_t threads;
} options;

/* tokens over the experts order[first] .. order[first + count - 1]. */
static void share_out(uint32_t *rows, const uint32_t *order, uint32_t first, uint32_t count, uint32_t tokens)
{
    for (uint32_t i = 0; i < count; i++) {
        rows[order[first + i]] = tokens / count + (i < tokens % count ? 1 : 0);
    }
}

static void skew(uint32_t *rows, uint32_t experts, uint32_t tokens)
{
    uint32_t order[EXPERTS_MAX];
    uint64_t state = 16;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t at = (uint32_t)(ep_splitmix64(&state) % (e + 1));
        order[e] = order[at];
        order[at] = e;
    }
    const uint32_t hot = (3 * experts + 8) / 16;
    const uint32_t cold = (5 * experts + 8) / 16;
    const uint32_t hot_tokens = (tokens * 60 + 50) / 100;
    const uint32_t cold_tokens = (tokens * 10 + 50) / 100;
    share_out(rows, order, 0, hot, hot_tokens);
    share_out(rows, order, hot, cold, cold_tokens);
    share_out(rows, order, hot + cold, experts - hot - cold, tokens - hot_tokens - cold_tokens);
}

static void measure(bench_report *report, const ffn_experts *all, uint32_t experts, uint32_t mean, uint32_t threads, double seconds)
{
    static double busy[REPETITIONS_MAX], times[REPETITIONS_MAX], evens[REPETITIONS_MAX], ratios[REPETITIONS_MAX];
    uint32_t rows[EXPERTS_MAX], even_rows[EXPERTS_MAX];
    ffn_pass skewed, even;
    size_t n = 0;
    char name[48];
    double idle_us;
    skew(rows, experts, mean * experts);
    for (uint32_t e = 0; e < experts; e++) {
        even_rows[e] = mean;
    }
    ffn_pass_open(&skewed, all, HIDDEN, rows, experts);
    ffn_pass_open(&even, all, HIDDEN, even_rows, experts);
    ffn_pass_run(&even, NULL);
    ffn_pass_run(&skewed, NULL);
    const double end_us = bench_now_us() + 1e6 * seconds;
    for (; n < REPETITIONS_MAX && (n < REPETITIONS_MIN || bench_now_us() < end_us); n++) {
        evens[n] = ffn_pass_run(&even, NULL);
        times[n] = ffn_pass_run(&skewed, &idle_us);
        busy[n] = 1 - idle_us / (times[n] * threads);
        ratios[n] = times[n] / evens[n];
    }
    ffn_pass_close(&skewed);
    ffn_pass_close(&even);
    const double busy_share = bench_quantile(busy, n, 0.5);
    const double ratio = bench_quantile(ratios, n, 0.5);
    const double time_us = bench_quantile(times, n, 0.5);
    const double even_us = bench_quantile(evens, n, 0.5);
    printf("E=%-4u M=%-3u %10.0f us  even load %10.0f us  ratio %.3f  busy share %.3f\n", experts, mean, time_us, even_us, ratio, busy_share);
    fflush(stdout);
    snprintf(name, sizeof(name), "E=%u, %u tokens each on average", experts, mean);
    bench_row row = {.value = time_us, .unit = "us", .limit = NAN, .rival = even_us, .ratio = ratio, .better = BENCH_LOWER, .bar = 1.10};
    snprintf(row.name, sizeof(row.name), "%s, against even load", name);
    bench_report_add(report, &row);
    row = (bench_row){.value = busy_share, .unit = "of time", .limit = NAN, .rival = NAN, .ratio = NAN, .better = BENCH_HIGHER, .bar = 0.90};
    snprintf(row.name, sizeof(row.name), "%s, threads busy", name);
    bench_report_add(report, &row);
}

static bool read_options(int argc, char **argv, options *o)
{
    *o = (options){.seconds = 1.0};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strncmp(a, "experts=", 8) == 0) {
            o->experts = (uint32_t)atoi(a + 8);
            if (o->experts < 8 || o->experts > EXPERTS_MAX) {
                return false;
            }
        } else if (strncmp(a, "m=", 2) == 0) {
            o->mean = (uint32_t)atoi(a + 2);
            if (o->mean < 1 || o->mean > 256) {
                return false;
            }
        } else if (strncmp(a, "seconds=", 8) == 0) {
            o->seconds = atof(a + 8);
        } else if (strncmp(a, "threads=", 8) == 0) {
            o->threads = (uint32_t)atoi(a + 8);
        } else if (strchr(a, '=') == NULL && o->json == NULL) {
            o->json = a;
        } else {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    options o;
    ep_error error;
    ep_backend *backend;
    ffn_experts all;
    if (!read_options(argc, argv, &o)) {
        fprintf(stderr, "usage: bench_skew [JSON] [experts=8..%d] [m=1..256] [seconds=S] [threads=N]\n", EXPERTS_MAX);
        return 2;
    }
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO, .threads = o.threads > 0 ? o.threads : ep_host_cpus_count()};
    if (ep_backend_cpu_ops.open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "bench_skew: %s\n", error.text);
        return 1;
    }
    const ffn_case c = {
        .hidden = HIDDEN, .inner = INNER, .experts = o.experts > 0 ? o.experts : EXPERTS_MAX, .rows = 1, .dtype = EP_DTYPE_BF16};
    ffn_experts_load(&all, backend, &c);
    bench_report *report = bench_report_create("uneven load over the experts, 2048x768 bf16");
    for (size_t m = 0; m < (o.mean > 0 ? 1 : sizeof(means) / sizeof(means[0])); m++) {
        for (size_t e = 0; e < (o.experts > 0 ? 1 : sizeof(counts) / sizeof(counts[0])); e++) {
            measure(report, &all, o.experts > 0 ? o.experts : counts[e], o.mean > 0 ? o.mean : means[m], config.threads, o.seconds);
        }
    }
    ffn_experts_unload(&all);
    backend->ops->close(backend);
    return bench_report_finish(report, o.json);
}
