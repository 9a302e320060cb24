/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learns how many rows take as long as reading an expert's weights: fits a straight line (least
 * squares) through the times of jobs of different sizes, newer jobs weighing more. Kernels for
 * packed 4-bit weights, and devices, are far from the default. A slope that may be chance changes
 * nothing. Pure.
 */
#ifndef EP_EXPERTD_PASS_COST_H
#define EP_EXPERTD_PASS_COST_H

#include <stdint.h>

#define EP_PASS_ROWS_MAX 256 /* the most that is learnt; the least is 1 */

typedef struct ep_pass_cost {
    double count; /* jobs, with decay; the sums are over them */
    double rows, time, rows_rows, rows_time, time_time;
    uint32_t pass_rows;
} ep_pass_cost;

void ep_pass_cost_init(ep_pass_cost *cost);
/* Adds a job that was alone on its backend; took: its time in a unit common to all experts. */
void ep_pass_cost_add(ep_pass_cost *cost, uint32_t rows, double took);

#endif
