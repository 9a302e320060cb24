/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/pass_cost.h"

#include <math.h>

#include "expertd/batch_policy.h"

#define JOBS_MIN 64
#define JOBS_KEPT 4096
/* Jobs of nearly one size say nothing about other sizes, so pass_rows stays as it is. */
#define SPREAD_MIN 0.25 /* least standard deviation of the rows, relative to their mean */
/* A slope counts when it is above so many of its standard errors. It is tested with every job:
 * noise would reach 3 within some thousand. */
#define ERRORS_MIN 5
#define USUAL_MAX 8

void ep_pass_cost_init(ep_pass_cost *cost)
{
    *cost = (ep_pass_cost){.pass_rows = EP_BATCH_WEIGHT_ROWS};
}

/* Solves time = pass + row * rows for pass / row, if the slope is significant. */
static void solve(ep_pass_cost *cost)
{
    const double mean = cost->rows / cost->count, mean_time = cost->time / cost->count;
    const double variance = cost->rows_rows / cost->count - mean * mean;
    const double product = cost->rows_time / cost->count - mean * mean_time;
    if (variance < SPREAD_MIN * SPREAD_MIN * mean * mean) {
        return;
    }
    const double row = product / variance;
    const double pass = mean_time - row * mean;
    const double rest = cost->time_time / cost->count - mean_time * mean_time - row * product;
    const double error = sqrt(fmax(rest, 0) / ((cost->count - 2) * variance));
    if (row <= ERRORS_MIN * error) {
        return;
    }
    const double rows = pass / row;
    cost->pass_rows = rows < 1                  ? 1
                      : rows > EP_PASS_ROWS_MAX ? EP_PASS_ROWS_MAX
                                                : (uint32_t)(rows + 0.5);
}

/* Caps a time at USUAL_MAX times the usual, or one job that was held up would outweigh all
 * others. */
static double bounded(const ep_pass_cost *cost, uint32_t rows, double time)
{
    const double pass = cost->pass_rows;
    const double usual = cost->time * (rows + pass) / (cost->rows + cost->count * pass);
    return cost->time > 0 ? fmin(time, USUAL_MAX * usual) : time;
}

void ep_pass_cost_add(ep_pass_cost *cost, uint32_t rows, double took)
{
    const double time = bounded(cost, rows, took);
    cost->count++;
    cost->rows += rows;
    cost->time += time;
    cost->rows_rows += (double)rows * rows;
    cost->rows_time += rows * time;
    cost->time_time += time * time;
    if (cost->count >= JOBS_MIN) {
        solve(cost);
    }
    if (cost->count >= JOBS_KEPT) {
        cost->count /= 2;
        cost->rows /= 2;
        cost->time /= 2;
        cost->rows_rows /= 2;
        cost->rows_time /= 2;
        cost->time_time /= 2;
    }
}
