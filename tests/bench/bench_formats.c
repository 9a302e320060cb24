/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight formats through the cpu backend: each against bf16 in the same moment, and against what the machine
 * allows it. Between two passes over bf16 experts come the format's own: limit, pass, pass, limit
 * (ffn_meter.h). Bars: w8a8 within 0.55 of bf16's time up to M = 4 and at 90 % of its limit; mxfp4 and int4
 * within 0.35 up to M = 4 and no slower from M = 64 on; the others are shown. Beside w8a8: oneDNN's products
 * of bytes.
 *
 *     bench_formats [JSON] [shape=2048x768] [m=1,4] [format=w8a8] [seconds=0.3] [threads=N] [rivals=no]
 * (ffn_options.h)
 */
#include <math.h>
#include <stdio.h>

#include "backends/host_common.h"
#include "bench/ffn_options.h"
#include "bench/ffn_rivals.h"

enum { PEAK_ROUNDS = 5, TAKES_MIN = 2 };

typedef struct {
    ep_weight_format format;
    double few_bar;   /* time against bf16's, M <= 4 */
    double many_bar;  /* M >= 64 */
    double limit_bar; /* share of its own limit */
} format_bars;

static const format_bars all_bars[] = {
    {EP_WEIGHTS_W8A8, 0.55, NAN, 0.90},
    {EP_WEIGHTS_MXFP4, 0.35, 1.00, NAN},
    {EP_WEIGHTS_INT4, 0.35, 1.00, NAN},
};

static format_bars bars_of(ep_weight_format format)
{
    for (size_t i = 0; i < sizeof(all_bars) / sizeof(all_bars[0]); i++) {
        if (all_bars[i].format == format) {
            return all_bars[i];
        }
    }
    return (format_bars){format, NAN, NAN, NAN};
}

static void run_cell(bench_report *report, const ffn_options *o, const ffn_experts *base,
                     const ffn_experts *all, const ffn_case *c, ffn_team *team)
{
    static ffn_cell cell, plain;
    static ffn_rivals rivals;
    static double ratios[FFN_METER_SAMPLES_MAX], bases[FFN_METER_SAMPLES_MAX];
    const format_bars bars = bars_of(c->format);
    ffn_case plain_case = *c;
    plain_case.format = EP_WEIGHTS_BF16;
    ffn_cell_open(&cell, all, c, team);
    ffn_cell_open(&plain, base, &plain_case, team);
    cell.meter.peak = ep_ffn_family_has_pairs(ep_numerics_family(
                          o->portable ? EP_NUMERICS_PORTABLE : EP_NUMERICS_AUTO, c->format))
                          ? FFN_PEAK_BF16
                          : ffn_case_peak(c->format);
    ffn_rivals_open(&rivals, c, o);
    double used_us = 0;
    for (int takes = 0; takes < TAKES_MIN || used_us < 1e6 * o->seconds; takes++) {
        const double begin_us = bench_now_us();
        const size_t n = cell.meter.count;
        const double before = ffn_cell_run(&plain);
        if (!ffn_meter_take(&cell.meter)) {
            break;
        }
        bases[n] = before;
        bases[n + 1] = ffn_cell_run(&plain);
        ratios[n] = cell.meter.times[n] / bases[n];
        ratios[n + 1] = cell.meter.times[n + 1] / bases[n + 1];
        used_us += bench_now_us() - begin_us;
        ffn_rivals_take(&rivals, o->seconds);
    }
    const size_t n = cell.meter.count;
    const ffn_figures f = ffn_meter_figures(&cell.meter);
    ffn_rows_add(report, c, ", time against bf16",
                 (bench_row){.value = f.us,
                             .unit = "us/expert",
                             .limit = NAN,
                             .rival = bench_quantile(bases, n, 0.5),
                             .ratio = bench_quantile(ratios, n, 0.5),
                             .better = BENCH_LOWER,
                             .bar = c->rows <= 4    ? bars.few_bar
                                    : c->rows >= 64 ? bars.many_bar
                                                    : NAN});
    ffn_rows_add_cell(report, &cell, &f, bars.limit_bar);
    ffn_rivals_close(&rivals, report, c, &cell.meter);
    ffn_cell_close(&plain);
    ffn_cell_close(&cell);
}

static void run_shape(bench_report *report, const ffn_options *o, const uint32_t shape[2],
                      ep_backend *backend, ffn_team *team)
{
    const ffn_case most = ffn_case_make(shape[0], shape[1], 1, EP_WEIGHTS_BF16);
    ffn_experts base;
    ffn_experts_load(&base, backend, &most);
    for (uint32_t f = 0; f < o->formats_count; f++) {
        ffn_case c = most;
        char id[EP_NUMERICS_ID_BYTES];
        ffn_experts all;
        c.format = o->formats[f];
        ffn_backend_id(backend, c.format, id);
        ffn_experts_load(&all, backend, &c);
        printf("%s, read by %s\n", id, ffn_limit_choose_read(team, all.segments, all.count, NULL));
        for (uint32_t i = 0; i < o->rows_count; i++) {
            c = ffn_case_make(shape[0], shape[1], o->rows[i], o->formats[f]);
            run_cell(report, o, &base, &all, &c, team);
        }
        ffn_experts_unload(&all);
    }
    ffn_experts_unload(&base);
}

static void print_peaks(ffn_team *team)
{
    static const struct {
        ffn_peak peak;
        const char *name;
    } peaks[] = {
        {FFN_PEAK_F32, "f32 multiply-adds"}, {FFN_PEAK_BF16, "bf16 pairs"}, {FFN_PEAK_INT8, "int8 quads"}};
    double clocks[PEAK_ROUNDS], values[PEAK_ROUNDS];
    for (int i = 0; i < PEAK_ROUNDS; i++) {
        clocks[i] = ffn_limit_clock(team);
    }
    const double clock = bench_quantile(clocks, PEAK_ROUNDS, 0.5);
    for (size_t i = 0; i < sizeof(peaks) / sizeof(peaks[0]); i++) {
        for (int k = 0; k < PEAK_ROUNDS; k++) {
            values[k] = ffn_limit_peak(team, peaks[i].peak);
        }
        const double peak = bench_quantile(values, PEAK_ROUNDS, 0.5);
        printf("    peak of %-18s %6.0f GOP/s, %.0f operations a cycle of each thread at %.2f GHz\n",
               peaks[i].name, peak * 1e-3, clock > 0 ? peak / clock / team->threads : 0, clock * 1e-3);
    }
}

int main(int argc, char **argv)
{
    ffn_options o = {.rows_count = 7,
                     .rows = {1, 2, 4, 16, 64, 256, 1024},
                     .formats_count = 6,
                     .formats = {EP_WEIGHTS_W8A8, EP_WEIGHTS_MXFP4, EP_WEIGHTS_INT4, EP_WEIGHTS_MXFP8,
                                 EP_WEIGHTS_F8_BLOCK, EP_WEIGHTS_F8_CHANNEL},
                     .seconds = 0.3,
                     .rivals = true};
    ffn_team team;
    char id[EP_NUMERICS_ID_BYTES];
    if (!ffn_options_read(argc, argv, &o)) {
        return 2;
    }
    ep_backend *backend = ffn_backend_open(o.portable, o.threads);
    ffn_team_start(&team, o.threads);
    bench_report *report =
        bench_report_create("weight formats through the cpu backend, against bf16 and the paired limit");
    ffn_backend_id(backend, EP_WEIGHTS_BF16, id);
    printf("against %s, %u threads\n", id, o.threads);
    print_peaks(&team);
    for (uint32_t s = 0; s < o.shapes_count; s++) {
        run_shape(report, &o, o.shapes[s], backend, &team);
    }
    ffn_team_stop(&team);
    backend->ops->close(backend);
    return bench_report_finish(report, o.json);
}
