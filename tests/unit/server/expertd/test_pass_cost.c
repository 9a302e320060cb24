/* SPDX-License-Identifier: Apache-2.0 */
/* What a pass over an expert's weights is worth in rows, learnt from times. */
#include <criterion/criterion.h>
#include <math.h>

#include "base/random.h"
#include "expertd/batch_policy.h"
#include "expertd/pass_cost.h"

/* Jobs of 1 to 32 rows, of which each takes half a row's time more or less by chance. */
static void add_jobs(ep_pass_cost *cost, uint32_t count, double pass_rows)
{
    uint64_t state = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t draw = ep_splitmix64(&state);
        const uint32_t rows = 1 + (uint32_t)(draw % 32);
        ep_pass_cost_add(cost, rows,
                         3 * (pass_rows + rows + (double)(draw >> 32) / 4294967296.0 - 0.5));
    }
}

Test(pass_cost, is_learnt_whatever_the_engine)
{
    static const uint32_t truths[] = {1, 4, 16, 60, 200};
    for (size_t i = 0; i < sizeof(truths) / sizeof(truths[0]); i++) {
        ep_pass_cost cost;
        ep_pass_cost_init(&cost);
        add_jobs(&cost, 2000, truths[i]);
        cr_expect_leq(cost.pass_rows, truths[i] + 1 + truths[i] / 20, "%u is taken for %u",
                      truths[i], cost.pass_rows);
        cr_expect_geq(cost.pass_rows + 1 + truths[i] / 20, truths[i], "%u is taken for %u",
                      truths[i], cost.pass_rows);
    }
}

Test(pass_cost, goes_with_the_engine)
{
    ep_pass_cost cost;
    ep_pass_cost_init(&cost);
    add_jobs(&cost, 10000, 4);
    add_jobs(&cost, 40000, 60);
    cr_expect_geq(cost.pass_rows, 55u);
    cr_expect_leq(cost.pass_rows, 65u);
}

Test(pass_cost, keeps_what_is_known_where_jobs_say_nothing)
{
    ep_pass_cost cost;
    ep_pass_cost_init(&cost);
    add_jobs(&cost, 60, 100);
    cr_expect_eq(cost.pass_rows, EP_BATCH_WEIGHT_ROWS, "they are few");
    ep_pass_cost_init(&cost);
    for (uint32_t i = 0; i < 1000; i++) {
        ep_pass_cost_add(&cost, 8 + i % 2, 5 + i % 3);
    }
    cr_expect_eq(cost.pass_rows, EP_BATCH_WEIGHT_ROWS, "they are of one size");
    ep_pass_cost_init(&cost);
    for (uint32_t i = 0; i < 1000; i++) {
        ep_pass_cost_add(&cost, 1 + i % 32, 40 - i % 32);
    }
    cr_expect_eq(cost.pass_rows, EP_BATCH_WEIGHT_ROWS, "the larger, the quicker");
}

Test(pass_cost, has_limits)
{
    ep_pass_cost cost;
    ep_pass_cost_init(&cost);
    add_jobs(&cost, 2000, 0);
    cr_expect_eq(cost.pass_rows, 1u);
    ep_pass_cost_init(&cost);
    add_jobs(&cost, 4000, 5000);
    cr_expect_eq(cost.pass_rows, (uint32_t)EP_PASS_ROWS_MAX);
}

/* Times that have nothing to do with rows: of jobs that ran side by side, or of a machine that does
 * something else. */
Test(pass_cost, is_not_learnt_from_noise)
{
    for (uint64_t run = 0; run < 50; run++) {
        ep_pass_cost cost;
        ep_pass_cost_init(&cost);
        uint64_t state = run;
        for (uint32_t i = 0; i < 20000; i++) {
            const uint32_t rows = 1 + (uint32_t)(ep_splitmix64(&state) % 32);
            const double draw = ((double)(ep_splitmix64(&state) >> 12) + 0.5) * 0x1p-52;
            ep_pass_cost_add(&cost, rows, run % 2 == 0 ? 1 + draw : -log(draw));
            cr_assert_eq(cost.pass_rows, EP_BATCH_WEIGHT_ROWS, "run %lu: %u after %u jobs",
                         (unsigned long)run, cost.pass_rows, i);
        }
    }
}

Test(pass_cost, outlives_jobs_that_were_held_up)
{
    static const uint32_t stalled[] = {1, 32};
    for (size_t i = 0; i < 2; i++) {
        ep_pass_cost cost;
        ep_pass_cost_init(&cost);
        add_jobs(&cost, 50, EP_BATCH_WEIGHT_ROWS);
        ep_pass_cost_add(&cost, stalled[i], 1e9);
        for (uint32_t n = 0; n < 20; n++) {
            add_jobs(&cost, 50, EP_BATCH_WEIGHT_ROWS);
            cr_expect(cost.pass_rows >= 4 && cost.pass_rows <= 64, "%u rows held up: it is %u",
                      stalled[i], cost.pass_rows);
        }
        add_jobs(&cost, 1000, 60);
        add_jobs(&cost, 10000, 60);
        cr_expect(cost.pass_rows >= 50 && cost.pass_rows <= 70, "%u rows held up: it is %u",
                  stalled[i], cost.pass_rows);
    }
}
