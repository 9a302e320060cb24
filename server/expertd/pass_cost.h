/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many rows take as long as reading an expert's weights does, from the time of jobs of unlike
 * sizes: the straight line through them (least squares), of which newer jobs count more. An engine
 * with packed 4-bit weights, or a device, is far from what is taken for granted without. A line
 * whose slope may be chance changes nothing. Pure.
 */
#ifndef EP_EXPERTD_PASS_COST_H
#define EP_EXPERTD_PASS_COST_H

#include <stdint.h>

#define EP_PASS_ROWS_MAX 256 /* learnt; the least is 1 */

typedef struct ep_pass_cost {
    double count; /* of jobs; the sums beside it are of these */
    double rows, time, rows_rows, rows_time, time_time;
    uint32_t pass_rows;
} ep_pass_cost;

void ep_pass_cost_init(ep_pass_cost *cost);
/* A job that was alone on its backend and took so long, in any unit that is the same for experts of
 * any size. */
void ep_pass_cost_add(ep_pass_cost *cost, uint32_t rows, double took);

#endif
