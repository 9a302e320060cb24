/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmarks ffn and formats do with a cell alike: the pass of its experts, the rows of
 * the table, the library beside it. */
#ifndef EP_BENCH_FFN_ROWS_H
#define EP_BENCH_FFN_ROWS_H

#include "bench/bench_report.h"
#include "bench/ffn_experts.h"
#include "bench/ffn_meter.h"

/* Experts of a case, the same number of rows for each, under a meter. */
typedef struct ffn_cell {
    ffn_case c;
    ffn_pass pass;
    ffn_meter meter;
} ffn_cell;

/* Also runs a first pass. cell is large. */
void ffn_cell_open(ffn_cell *cell, const ffn_experts *experts, const ffn_case *c, ffn_team *team);
void ffn_cell_close(ffn_cell *cell);
double ffn_cell_run(ffn_cell *cell);
/* Of the last expert, against a calculation in double. */
double ffn_cell_error(const ffn_cell *cell);

/* Adds the row "FORMAT HxI M=N" + what. */
void ffn_rows_add(bench_report *report, const ffn_case *c, const char *what, bench_row row);
/* Adds the cell's row: its time, its limit, its share of the limit under bar; and prints what the
 * limit is made of. */
void ffn_rows_add_cell(bench_report *report, const ffn_cell *cell, const ffn_figures *figures,
                       double bar);
#endif
