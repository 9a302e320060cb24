/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts through the cpu backend: jobs of many experts at once, weights far beyond the caches, all
 * workers. Every pass is paired with a read of the same weights and with the peak of the weight
 * type's instruction on the same number of threads (ffn_meter.h, ffn_limit.h).
 *
 *     bench_ffn [JSON] [shape=2048x768] [m=16] [format=bf16] [seconds=1] [threads=N] [rivals=no]
 *                                                                    (ffn_options.h)
 *
 * names one cell, or one row or column of cells, for tuning.
 */
#include <math.h>
#include <stdio.h>

#include "bench/ffn_options.h"
#include "bench/ffn_rivals.h"

enum { SIZES = 6, TAKES_MIN = 2 };

static const uint32_t sizes[SIZES] = {1, 4, 16, 64, 256, 1024};

/* Share of the limit that oneDNN (3.14, its own best layouts) was measured to reach for bf16; on a
 * Zen 5, whose limits are other ones. */
static const double recorded[FFN_OPTIONS_SHAPES][SIZES] = {{.95, .97, .69, .79, .92, .93},
                                                           {1.00, .98, .73, .84, .96, .96},
                                                           {.98, .95, .74, .84, .95, .94}};

/* NAN: not recorded. */
static double recorded_share(const ffn_case *c)
{
    for (uint32_t s = 0; s < FFN_OPTIONS_SHAPES; s++) {
        for (uint32_t m = 0; m < SIZES; m++) {
            if (ffn_shapes[s][0] == c->hidden && ffn_shapes[s][1] == c->inner &&
                sizes[m] == c->rows && c->format == EP_WEIGHTS_BF16) {
                return recorded[s][m];
            }
        }
    }
    return NAN;
}

static void run_cell(bench_report *report, const ffn_options *o, const ffn_experts *all,
                     const ffn_case *c, ffn_team *team)
{
    static ffn_cell cell;
    static ffn_rivals rivals;
    ffn_cell_open(&cell, all, c, team);
    ffn_rivals_open(&rivals, c, o);
    double used_us = 0;
    for (int takes = 0; takes < TAKES_MIN || used_us < 1e6 * o->seconds; takes++) {
        const double begin_us = bench_now_us();
        if (!ffn_meter_take(&cell.meter)) {
            break;
        }
        used_us += bench_now_us() - begin_us;
        ffn_rivals_take(&rivals, o->seconds);
    }
    const ffn_figures f = ffn_meter_figures(&cell.meter);
    /* M = 16: memory and arithmetic are both needed all the time. */
    const double bar = c->format != EP_WEIGHTS_BF16 ? NAN : c->rows == 16 ? 0.88 : 0.95;
    ffn_rows_add_cell(report, &cell, &f, bar);
    const double known = recorded_share(c);
    if (!isnan(known)) {
        ffn_rows_add(report, c, ", share beside oneDNN's on a Zen 5",
                     (bench_row){.value = f.share,
                                 .unit = "of limit",
                                 .limit = NAN,
                                 .rival = known,
                                 .ratio = NAN,
                                 .better = BENCH_HIGHER,
                                 .bar = 1.0});
    }
    ffn_rivals_close(&rivals, report, c, &cell.meter);
    ffn_cell_close(&cell);
}

static void run_shape(bench_report *report, const ffn_options *o, ep_weight_format format,
                      const uint32_t shape[2], ep_backend *backend, ffn_team *team)
{
    const ffn_case most = ffn_case_make(shape[0], shape[1], 1, format);
    ffn_experts all;
    ffn_experts_load(&all, backend, &most);
    printf("read by %s\n", ffn_limit_choose_read(team, all.segments, all.count, stdout));
    for (uint32_t i = 0; i < o->rows_count; i++) {
        const ffn_case c = ffn_case_make(shape[0], shape[1], o->rows[i], format);
        run_cell(report, o, &all, &c, team);
    }
    ffn_experts_unload(&all);
}

int main(int argc, char **argv)
{
    ffn_options o = {.rows_count = SIZES,
                     .rows = {1, 4, 16, 64, 256, 1024},
                     .formats_count = 1,
                     .formats = {EP_WEIGHTS_BF16},
                     .seconds = 0.6,
                     .rivals = true};
    ffn_team team;
    if (!ffn_options_read(argc, argv, &o)) {
        return 2;
    }
    ep_backend *backend = ffn_backend_open(ffn_options_numerics(&o), o.threads);
    ffn_team_start(&team, o.threads);
    bench_report *report =
        bench_report_create("experts through the cpu backend, against the paired limit");
    for (uint32_t f = 0; f < o.formats_count; f++) {
        char id[EP_NUMERICS_ID_BYTES];
        ffn_backend_id(backend, o.formats[f], id);
        printf("%s, %u threads\n", id, o.threads);
        for (uint32_t s = 0; s < o.shapes_count; s++) {
            run_shape(report, &o, o.formats[f], o.shapes[s], backend, &team);
        }
    }
    ffn_team_stop(&team);
    backend->ops->close(backend);
    return bench_report_finish(report, o.json);
}
