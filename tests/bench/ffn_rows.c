/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static double run_pass(void *arg)
{
    return ffn_pass_run(arg, NULL);
}

void ffn_cell_open(ffn_cell *cell, const ffn_experts *experts, const ffn_case *c, ffn_team *team)
{
    uint32_t *rows = calloc(c->experts, sizeof(*rows));
    if (rows == NULL) {
        abort();
    }
    for (uint32_t e = 0; e < c->experts; e++) {
        rows[e] = c->rows;
    }
    cell->c = *c;
    ffn_pass_open(&cell->pass, experts, c->hidden, rows, c->experts);
    free(rows);
    cell->meter.team = team;
    cell->meter.segments = experts->segments;
    cell->meter.segments_count = c->experts;
    cell->meter.experts = c->experts;
    cell->meter.operations = ffn_case_operations(c);
    cell->meter.peak = ffn_case_peak(c->format);
    cell->meter.f32_operations = 0;
    cell->meter.run = run_pass;
    cell->meter.arg = &cell->pass;
    cell->meter.count = 0;
    ffn_pass_run(&cell->pass, NULL);
}

void ffn_cell_close(ffn_cell *cell)
{
    ffn_pass_close(&cell->pass);
}

double ffn_cell_run(ffn_cell *cell)
{
    return ffn_pass_run(&cell->pass, NULL) / cell->c.experts;
}

double ffn_cell_error(const ffn_cell *cell)
{
    const size_t last = (size_t)(cell->c.experts - 1) * cell->c.rows * cell->c.hidden;
    return ffn_case_error(&cell->pass.experts->probe, cell->pass.y + last, EP_DTYPE_BF16);
}

void ffn_rows_add(bench_report *report, const ffn_case *c, const char *what, bench_row row)
{
    bench_report_add(report, &row, "%s %ux%u M=%u%s%s%s", ep_weight_format_name(c->format),
                     c->hidden, c->inner, c->rows, c->family != NULL ? " " : "",
                     c->family != NULL ? c->family : "", what);
}

void ffn_rows_add_cell(bench_report *report, const ffn_cell *cell, const ffn_figures *f, double bar)
{
    ffn_rows_add(report, &cell->c, "",
                 (bench_row){.value = f->us,
                             .unit = "us/expert",
                             .limit = f->limit_us,
                             .rival = NAN,
                             .ratio = f->share,
                             .better = BENCH_HIGHER,
                             .bar = bar});
    printf("    %s binds: read %.1f GB/s, peak %.0f GOP/s; share of both one after the other %.3f; "
           "error "
           "%.1e; %zu passes\n",
           f->memory_binds ? "memory" : "compute", f->read_gbs, f->peak_gops, f->sum_share,
           ffn_cell_error(cell), cell->meter.count);
    fflush(stdout);
}
