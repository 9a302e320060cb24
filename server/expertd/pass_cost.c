/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/pass_cost.h"

#include "expertd/batch_policy.h"

#define JOBS_MIN 64
#define JOBS_KEPT 4096
/* Jobs of nearly one size say nothing about another: what is known stays. */
#define SPREAD_MIN 0.25 /* standard deviation of their rows, against the mean */

void ep_pass_cost_init(ep_pass_cost *cost)
{
    *cost = (ep_pass_cost){.pass_rows = EP_BATCH_WEIGHT_ROWS};
}

/* time = pass + row * rows: how many rows the pass is worth. */
static void solve(ep_pass_cost *cost)
{
    const double mean = cost->rows / cost->count;
    const double variance = cost->rows_rows / cost->count - mean * mean;
    const double row = (cost->rows_time / cost->count - mean * cost->time / cost->count) / variance;
    const double pass = cost->time / cost->count - row * mean;
    if (variance < SPREAD_MIN * SPREAD_MIN * mean * mean || row <= 0) {
        return;
    }
    const double rows = pass / row;
    cost->pass_rows = rows < 1                  ? 1
                      : rows > EP_PASS_ROWS_MAX ? EP_PASS_ROWS_MAX
                                                : (uint32_t)(rows + 0.5);
}

void ep_pass_cost_add(ep_pass_cost *cost, uint32_t rows, double time)
{
    cost->count++;
    cost->rows += rows;
    cost->time += time;
    cost->rows_rows += (double)rows * rows;
    cost->rows_time += rows * time;
    if (cost->count >= JOBS_MIN) {
        solve(cost);
    }
    if (cost->count >= JOBS_KEPT) {
        cost->count /= 2;
        cost->rows /= 2;
        cost->time /= 2;
        cost->rows_rows /= 2;
        cost->rows_time /= 2;
    }
}
