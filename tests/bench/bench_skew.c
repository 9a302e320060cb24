/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Uneven load: of E experts the busiest 3 of 16 take 60 % of the tokens and the idlest 5 of 16 take
 * 10 %, as jobs in any order. Beside each repetition the same number of tokens spread evenly.
 * Printed: the share of their time that the compute threads are in tasks, and the time against even
 * load.
 *
 *     bench_skew [JSON] [experts=32] [m=64] [format=bf16] [seconds=1] [threads=N]
 *
 * m: tokens per expert on average (ffn_options.h)
 */
#include <math.h>
#include <stdio.h>

#include "base/random.h"
#include "bench/bench_report.h"
#include "bench/ffn_experts.h"
#include "bench/ffn_options.h"

enum { EXPERTS_MAX = 128, SAMPLES_MIN = 6, SAMPLES_MAX = 1000 };

static const uint32_t counts[] = {8, 32, 128};

/* tokens over the experts order[first] .. order[first + count - 1]. */
static void share_out(uint32_t *rows, const uint32_t *order, uint32_t first, uint32_t count,
                      uint32_t tokens)
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

static void add_row(bench_report *report, const ffn_case *c, const char *what, bench_row row)
{
    bench_report_add(report, &row, "%s E=%u, %u tokens each on average, %s",
                     ep_weight_format_name(c->format), c->experts, c->rows, what);
}

static double run_skewed(ffn_pass *pass, uint32_t threads, double *out_busy)
{
    double idle_us;
    const double us = ffn_pass_run(pass, &idle_us);
    *out_busy = 1 - idle_us / (us * threads);
    return us;
}

/* c->rows: tokens per expert on average. */
static void measure(bench_report *report, const ffn_options *o, const ffn_experts *all,
                    const ffn_case *c)
{
    static double busy[SAMPLES_MAX], times[SAMPLES_MAX], evens[SAMPLES_MAX], ratios[SAMPLES_MAX];
    uint32_t rows[EXPERTS_MAX], even_rows[EXPERTS_MAX];
    ffn_pass skewed, even;
    size_t n = 0;
    skew(rows, c->experts, c->rows * c->experts);
    for (uint32_t e = 0; e < c->experts; e++) {
        even_rows[e] = c->rows;
    }
    ffn_pass_open(&skewed, all, c->hidden, rows, c->experts);
    ffn_pass_open(&even, all, c->hidden, even_rows, c->experts);
    ffn_pass_run(&even, NULL);
    ffn_pass_run(&skewed, NULL);
    const double end_us = bench_now_us() + 1e6 * o->seconds;
    for (; n < SAMPLES_MAX && (n < SAMPLES_MIN || bench_now_us() < end_us); n += 2) {
        evens[n] = ffn_pass_run(&even, NULL);
        times[n] = run_skewed(&skewed, o->threads, &busy[n]);
        times[n + 1] = run_skewed(&skewed, o->threads, &busy[n + 1]);
        evens[n + 1] = ffn_pass_run(&even, NULL);
        ratios[n] = times[n] / evens[n];
        ratios[n + 1] = times[n + 1] / evens[n + 1];
    }
    ffn_pass_close(&skewed);
    ffn_pass_close(&even);
    add_row(report, c, "against even load",
            (bench_row){.value = bench_quantile(times, n, 0.5),
                        .unit = "us",
                        .limit = NAN,
                        .rival = bench_quantile(evens, n, 0.5),
                        .ratio = bench_quantile(ratios, n, 0.5),
                        .better = BENCH_LOWER,
                        .bar = 1.10});
    add_row(report, c, "threads busy",
            bench_value(bench_quantile(busy, n, 0.5), "of time", BENCH_HIGHER, 0.90));
}

int main(int argc, char **argv)
{
    ffn_options o = {.shapes_count = 1,
                     .shapes = {{2048, 768}},
                     .rows_count = 2,
                     .rows = {4, 64},
                     .formats_count = 2,
                     .formats = {EP_WEIGHTS_BF16, EP_WEIGHTS_W8A8},
                     .seconds = 1.0};
    if (!ffn_options_read(argc, argv, &o)) {
        return 2;
    }
    if (o.experts > EXPERTS_MAX) {
        fprintf(stderr, "bench_skew: experts=%u, allowed 1..%d\n", o.experts, EXPERTS_MAX);
        return 2;
    }
    ep_backend *backend = ffn_backend_open(ffn_options_numerics(&o), o.threads);
    bench_report *report = bench_report_create("uneven load over the experts");
    for (uint32_t f = 0; f < o.formats_count; f++) {
        ffn_case c = {.hidden = o.shapes[0][0],
                      .inner = o.shapes[0][1],
                      .experts = EXPERTS_MAX,
                      .format = o.formats[f]};
        ffn_experts all;
        ffn_experts_load(&all, backend, &c);
        for (uint32_t m = 0; m < o.rows_count; m++) {
            for (size_t e = 0; e < (o.experts > 0 ? 1 : sizeof(counts) / sizeof(counts[0])); e++) {
                c.experts = o.experts > 0 ? o.experts : counts[e];
                c.rows = o.rows[m];
                measure(report, &o, &all, &c);
            }
        }
        ffn_experts_unload(&all);
    }
    backend->ops->close(backend);
    return bench_report_finish(report, o.json);
}
