/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight formats through the cpu backend: each against bf16 in the same moment, and against what
 * the machine allows it. Between two passes over bf16 experts come the format's own: limit, pass,
 * pass, limit (ffn_meter.h). Bars: w8a8 within 0.55 of bf16's time up to M = 4 and at 90 % of its
 * limit; those of w4a8 within 0.35 up to M = 4 and no slower from M = 64 on, in each numerics
 * family that has them, and in the best of them; the others are shown. Beside w8a8: oneDNN's
 * products of bytes.
 *
 *     bench_formats [JSON] [shape=2048x768] [m=1,4] [format=w8a8] [family=auto-wide,w4a8]
 *                   [seconds=0.3] [threads=N] [rivals=no]            (ffn_options.h)
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
    {EP_WEIGHTS_W8A8, 0.55, NAN, 0.90}, {EP_WEIGHTS_MXFP4, 0.35, 1.00, NAN},
    {EP_WEIGHTS_INT4, 0.35, 1.00, NAN}, {EP_WEIGHTS_INT4_F16, 0.35, 1.00, NAN},
    {EP_WEIGHTS_Q4_K, 0.35, 1.00, NAN},
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

/* A numerics family in which formats are measured. */
typedef struct {
    ep_numerics numerics;
    ep_backend *backend;
    ffn_experts all; /* of the format that is measured */
    bool has_format;
} measured_family;

typedef struct {
    bench_report *report;
    const ffn_options *o;
    ffn_team *team;
    ep_backend *base_backend; /* of bf16 */
    ffn_experts base;
    measured_family families[FFN_OPTIONS_LIST];
} formats_bench;

/*
 * What the arithmetic of a cell takes at the least. w4a8: all products as quads of int8, and for
 * each output and row and each group of 32 columns, 64 operations, a multiply and a multiply-add in
 * f32 in the same units of the CPU; of q4_k one more multiply-add. Not counted: the group's
 * conversion to f32, which other units may do, and widening weights, which many rows share.
 */
static void set_limit(ffn_meter *meter, ep_numerics numerics, ep_weight_format format)
{
    const ep_ffn_family family = ep_numerics_family(numerics, format);
    if (family == EP_FFN_FAMILY_W4A8) {
        const double groups = meter->operations / (2 * EP_MX_GROUP);
        meter->peak = FFN_PEAK_INT8;
        /* instructions counted as multiply-adds */
        meter->f32_operations = 2 * (format == EP_WEIGHTS_Q4_K ? 3 : 2) * groups;
    } else {
        meter->peak = ep_ffn_family_has_pairs(family) ? FFN_PEAK_BF16 : ffn_case_peak(format);
    }
}

static double bar_of(const ffn_case *c)
{
    const format_bars bars = bars_of(c->format);
    return c->rows <= 4 ? bars.few_bar : c->rows >= 64 ? bars.many_bar : NAN;
}

/* Its time and that of bf16 beside it. */
static bench_row run_cell(formats_bench *b, const measured_family *family, const ffn_case *c)
{
    static ffn_cell cell, plain;
    static ffn_rivals rivals;
    static double ratios[FFN_METER_SAMPLES_MAX], bases[FFN_METER_SAMPLES_MAX];
    ffn_case plain_case = *c;
    plain_case.format = EP_WEIGHTS_BF16;
    ffn_cell_open(&cell, &family->all, c, b->team);
    ffn_cell_open(&plain, &b->base, &plain_case, b->team);
    set_limit(&cell.meter, family->numerics, c->format);
    ffn_rivals_open(&rivals, c, b->o);
    double used_us = 0;
    for (int takes = 0; takes < TAKES_MIN || used_us < 1e6 * b->o->seconds; takes++) {
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
        ffn_rivals_take(&rivals, b->o->seconds);
    }
    const size_t n = cell.meter.count;
    const ffn_figures f = ffn_meter_figures(&cell.meter);
    bench_row row = bench_value(f.us, "us/expert", BENCH_LOWER, bar_of(c));
    row.rival = bench_quantile(bases, n, 0.5);
    row.ratio = bench_quantile(ratios, n, 0.5);
    ffn_rows_add(b->report, c, ", time against bf16", row);
    ffn_rows_add_cell(b->report, &cell, &f, bars_of(c->format).limit_bar);
    ffn_rivals_close(&rivals, b->report, c, &cell.meter);
    ffn_cell_close(&plain);
    ffn_cell_close(&cell);
    return row;
}

/* Each family's cell, and which was the quickest. */
static void run_rows(formats_bench *b, ffn_case c, uint32_t families_count)
{
    const char *best_name = NULL;
    bench_row best = {.ratio = INFINITY};
    for (uint32_t i = 0; i < b->o->families_count; i++) {
        const measured_family *family = &b->families[i];
        if (!family->has_format) {
            continue;
        }
        c.family = families_count > 1
                       ? ep_ffn_family_name(ep_numerics_family(family->numerics, c.format))
                       : NULL;
        const bench_row row = run_cell(b, family, &c);
        best_name = row.ratio < best.ratio ? c.family : best_name;
        best = row.ratio < best.ratio ? row : best;
    }
    if (families_count > 1) {
        c.family = NULL;
        ffn_rows_add(b->report, &c, " best family, time against bf16", best);
        printf("    %s\n", best_name);
    }
}

/* What a family computes as one before it does is not measured again. */
static bool is_new(const formats_bench *b, uint32_t index, ep_weight_format format)
{
    const ep_ffn_family family = ep_numerics_family(b->families[index].numerics, format);
    for (uint32_t i = 0; i < index; i++) {
        if (ep_numerics_family(b->families[i].numerics, format) == family) {
            return false;
        }
    }
    return true;
}

static void run_format(formats_bench *b, const uint32_t shape[2], ep_weight_format format)
{
    const ffn_case most = ffn_case_make(shape[0], shape[1], 1, format);
    uint32_t count = 0;
    for (uint32_t i = 0; i < b->o->families_count; i++) {
        measured_family *family = &b->families[i];
        family->has_format = is_new(b, i, format);
        if (family->has_format) {
            char id[EP_NUMERICS_ID_BYTES];
            ffn_backend_id(family->backend, format, id);
            ffn_experts_load(&family->all, family->backend, &most);
            printf("%s, read by %s\n", id,
                   ffn_limit_choose_read(b->team, family->all.segments, family->all.count, NULL));
            count++;
        }
    }
    for (uint32_t i = 0; i < b->o->rows_count; i++) {
        run_rows(b, ffn_case_make(shape[0], shape[1], b->o->rows[i], format), count);
    }
    for (uint32_t i = 0; i < b->o->families_count; i++) {
        if (b->families[i].has_format) {
            ffn_experts_unload(&b->families[i].all);
        }
    }
}

static void run_shape(formats_bench *b, const uint32_t shape[2])
{
    const ffn_case most = ffn_case_make(shape[0], shape[1], 1, EP_WEIGHTS_BF16);
    ffn_experts_load(&b->base, b->base_backend, &most);
    for (uint32_t f = 0; f < b->o->formats_count; f++) {
        run_format(b, shape, b->o->formats[f]);
    }
    ffn_experts_unload(&b->base);
}

static void print_peaks(ffn_team *team)
{
    static const struct {
        ffn_peak peak;
        const char *name;
    } peaks[] = {{FFN_PEAK_F32, "f32 multiply-adds"},
                 {FFN_PEAK_BF16, "bf16 pairs"},
                 {FFN_PEAK_INT8, "int8 quads"}};
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
        printf(
            "    peak of %-18s %6.0f GOP/s, %.0f operations a cycle of each thread at %.2f GHz\n",
            peaks[i].name, peak * 1e-3, clock > 0 ? peak / clock / team->threads : 0, clock * 1e-3);
    }
}

int main(int argc, char **argv)
{
    ffn_options o = {.rows_count = 7,
                     .rows = {1, 2, 4, 16, 64, 256, 1024},
                     .formats_count = 7,
                     .formats = {EP_WEIGHTS_W8A8, EP_WEIGHTS_MXFP4, EP_WEIGHTS_INT4,
                                 EP_WEIGHTS_Q4_K, EP_WEIGHTS_MXFP8, EP_WEIGHTS_F8_BLOCK,
                                 EP_WEIGHTS_F8_CHANNEL},
                     .seconds = 0.3,
                     .rivals = true};
    static formats_bench b;
    ffn_team team;
    char id[EP_NUMERICS_ID_BYTES];
    if (!ffn_options_read(argc, argv, &o)) {
        return 2;
    }
    if (o.families_count == 0) {
        o.families_count = 2;
        o.families[0] = o.portable ? EP_NUMERICS_PORTABLE : EP_NUMERICS_AUTO_WIDE;
        o.families[1] = EP_NUMERICS_W4A8;
    }
    b.o = &o;
    b.team = &team;
    b.base_backend = ffn_backend_open(ffn_options_numerics(&o), o.threads);
    for (uint32_t i = 0; i < o.families_count; i++) {
        const bool is_base = o.families[i] == ffn_options_numerics(&o);
        b.families[i].numerics = o.families[i];
        b.families[i].backend =
            is_base ? b.base_backend : ffn_backend_open(o.families[i], o.threads);
    }
    ffn_team_start(&team, o.threads);
    b.report = bench_report_create(
        "weight formats through the cpu backend, against bf16 and the paired limit");
    ffn_backend_id(b.base_backend, EP_WEIGHTS_BF16, id);
    printf("against %s, %u threads\n", id, o.threads);
    print_peaks(&team);
    for (uint32_t s = 0; s < o.shapes_count; s++) {
        run_shape(&b, o.shapes[s]);
    }
    ffn_team_stop(&team);
    for (uint32_t i = 0; i < o.families_count; i++) {
        if (b.families[i].backend != b.base_backend) {
            b.families[i].backend->ops->close(b.families[i].backend);
        }
    }
    b.base_backend->ops->close(b.base_backend);
    return bench_report_finish(b.report, o.json);
}
