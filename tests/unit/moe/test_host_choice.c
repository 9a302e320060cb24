/* SPDX-License-Identifier: Apache-2.0 */
/* Which way rows go to a host, by figures that are only told. */
#include "moe/host_choice.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#include "moe/host_plan.h"
#include "unit/moe/random_batch.h"
#include "support/plan_whole.h"

#define NODES 7

/* 512 tokens, top-8, four nodes; rows of 1024 bf16; no turn at which the other way is tried. */
static ep_host_question question(void)
{
    return (ep_host_question){
        .load = {.node_rows = 1390, .host_rows = 511, .slots = 2048, .nodes = 4},
        .row_bytes = 2048,
        .slot_bytes = 8,
        .reply_row_bytes = 2048,
        .is_sums = true,
        .straight = {.round_trip_us = 500, .us_per_byte = 0.02, .samples = 8},
        .by_host = {.round_trip_us = 900, .us_per_byte = 0.03, .samples = 8},
        .turn = 3};
}

static ep_host_choice choose(const ep_host_question *q)
{
    ep_host_choice choice;
    ep_host_choose(q, &choice);
    return choice;
}

static void expect(const ep_host_question *q, bool by_host, ep_host_why why)
{
    const ep_host_choice choice = choose(q);
    cr_assert_eq(choice.by_host, by_host, "reason %d", (int)choice.why);
    cr_assert_eq(choice.why, why, "reason %d", (int)choice.why);
}

Test(host_choice, counts_the_bytes_that_cross)
{
    ep_host_question q = question();
    ep_host_choice choice = choose(&q);
    cr_assert_eq(choice.straight_bytes, 1390 * 2048 + 2048 * 8 + 1390 * 2048);
    cr_assert_eq(choice.by_host_bytes, 511 * 2048 + 2048 * 8 + 511 * 2048);
    q.is_sums = false;
    choice = choose(&q);
    cr_assert_eq(choice.straight_bytes, 1390 * 2048 + 2048 * 8 + 2048 * 2048);
    cr_assert_eq(choice.by_host_bytes, 511 * 2048 + 2048 * 8 + 2048 * 2048);
    cr_assert_float_eq(choice.straight_us, 500 + 0.02 * (double)choice.straight_bytes, 1e-6);
    cr_assert_float_eq(choice.by_host_us, 900 + 0.03 * (double)choice.by_host_bytes, 1e-6);
}

Test(host_choice, takes_the_quicker_way)
{
    ep_host_question q = question();
    expect(&q, true, EP_HOST_MEASURED);
    q.by_host.us_per_byte = 0.06; /* the hop inside the host is slow */
    expect(&q, false, EP_HOST_MEASURED);
    q = question();
    q.load = (ep_host_load){.node_rows = 5, .host_rows = 2, .slots = 8, .nodes = 4};
    expect(&q, false, EP_HOST_MEASURED); /* round trips decide */
    q.by_host.round_trip_us = 300;
    expect(&q, true, EP_HOST_MEASURED);
}

/* Whatever the figures: what is taken by them is never the slower one by more than the gain that is
 * asked for. */
Test(host_choice, is_never_far_from_the_better)
{
    uint64_t state = 7;
    for (int i = 0; i < 20000; i++) {
        ep_host_question q = question();
        q.is_sums = random_below(&state, 2) != 0;
        q.load.slots = 2 + random_below(&state, 5000);
        q.load.node_rows = 1 + random_below(&state, (uint32_t)q.load.slots);
        q.load.host_rows = 1 + random_below(&state, (uint32_t)q.load.node_rows);
        q.straight.round_trip_us = 1 + random_below(&state, 3000);
        q.by_host.round_trip_us = 1 + random_below(&state, 3000);
        q.straight.us_per_byte = (1 + random_below(&state, 100)) * 1e-3;
        q.by_host.us_per_byte = (1 + random_below(&state, 100)) * 1e-3;
        q.turn = random_below(&state, 100000);
        const ep_host_choice c = choose(&q);
        if (c.why == EP_HOST_MEASURED) {
            const double chosen = c.by_host ? c.by_host_us : c.straight_us;
            const double other = c.by_host ? c.straight_us : c.by_host_us;
            cr_assert_leq(chosen, other * 1.05, "%g against %g", chosen, other);
        }
    }
}

Test(host_choice, stays_straight_where_nothing_can_be_gained)
{
    ep_host_question q = question();
    q.load.nodes = 1;
    expect(&q, false, EP_HOST_ALONE);
    q = question();
    q.is_local = true;
    expect(&q, false, EP_HOST_ALONE);
    q = question();
    q.load.host_rows = q.load.node_rows;
    expect(&q, false, EP_HOST_NO_BYTES);
    q = question();
    q.is_refused = true;
    expect(&q, false, EP_HOST_REFUSED);
}

static uint32_t count_by_host(ep_host_question q, uint32_t turns)
{
    uint32_t count = 0;
    for (q.turn = 0; q.turn < turns; q.turn++) {
        count += choose(&q).by_host;
    }
    return count;
}

Test(host_choice, learns_a_way_without_figures)
{
    ep_host_question q = question();
    q.by_host.samples = EP_HOST_SAMPLES_MIN - 1;
    cr_assert_eq(count_by_host(q, 70 * EP_HOST_LEARN_OF), 70u);
    q.turn = 1;
    expect(&q, false, EP_HOST_LEARNING);
    q.by_host.samples = 0;
    cr_assert_eq(choose(&q).by_host_us, 0);
    q = question();
    q.straight.samples = EP_HOST_SAMPLES_MIN - 1;
    cr_assert_eq(count_by_host(q, 100), 0u, "straight is not learnt by going by host");
}

Test(host_choice, tries_the_other_way_the_less_the_more_it_costs)
{
    const uint32_t turns = 200 * EP_HOST_TRY_OF;
    ep_host_question q = question();
    const uint32_t straight = turns - count_by_host(q, turns);
    const ep_host_choice c = choose(&q);
    const double share = straight / (double)turns;
    cr_assert_gt(straight, 0u);
    cr_assert_lt(share * (c.straight_us / c.by_host_us - 1), 0.01);
    q.by_host.us_per_byte = 3; /* a hundred times as slow */
    const uint32_t by_host = count_by_host(q, turns);
    cr_assert(by_host > 0 && by_host < 10, "%u", by_host);
}

/* Against a count slot by slot of a plan for nodes and one for hosts. */
Test(host_choice, loads_are_those_of_the_plans)
{
    static const uint32_t groups[NODES] = {0, 0, 2, 2, 2, 5, 5};
    for (uint64_t seed = 1; seed <= 200; seed++) {
        random_batch rb;
        uint32_t chosen[64], grouped[64], scratch[2 * NODES];
        uint64_t rows[2][NODES] = {0};
        ep_host_load loads[NODES];
        random_batch_init(&rb, seed);
        if (ep_batch_row_per_slot(&rb.batch)) { /* no hierarchy with them */
            random_batch_fini(&rb);
            continue;
        }
        const uint32_t experts = rb.shape.experts + rb.shape.shared_experts;
        cr_assert_leq(experts, 64u);
        for (uint32_t e = 0; e < experts; e++) {
            chosen[e] = random_below(&rb.state, NODES);
            grouped[e] = groups[chosen[e]];
        }
        const ep_routing_layer layer = {.shape = rb.shape};
        for (int i = 0; i < 2; i++) {
            ep_routing_plan plan;
            ep_routing_plan_init(&plan);
            cr_assert_eq(plan_whole(&plan, &rb.batch, &layer, NODES, i == 0 ? chosen : grouped,
                                    NULL, 0, rb.batch.tokens, NULL, 0, NULL),
                         EP_OK);
            for (uint32_t c = 0; c < plan.chunks_count; c++) {
                rows[i][groups[plan.chunks[c].node]] += plan.chunks[c].rows_count;
            }
            ep_routing_plan_fini(&plan);
        }
        ep_host_count_loads(&rb.batch, &rb.shape, chosen, groups, NODES, 0, rb.batch.tokens,
                            rb.batch.tokens, scratch, loads);
        for (uint32_t n = 0; n < NODES; n++) {
            cr_assert_eq(loads[n].node_rows, rows[0][n], "seed %lu", seed);
            cr_assert_eq(loads[n].host_rows, rows[1][n], "seed %lu", seed);
        }
        random_batch_fini(&rb);
    }
}

/* A part of many tokens stands for all. */
Test(host_choice, loads_of_many_tokens_are_scaled)
{
    enum { T = 3000, K = 2 };
    static int32_t ids[T * K];
    uint32_t chosen[4] = {0, 1, 2, 2}, scratch[6];
    const uint32_t groups[3] = {0, 0, 2};
    ep_host_load loads[3];
    for (uint32_t t = 0; t < T; t++) { /* both nodes of the first host, or its second alone */
        ids[t * K] = t % 2 == 0 ? 0 : 1;
        ids[t * K + 1] = t % 2 == 0 ? 1 : 2;
    }
    const ep_batch batch = {
        .tokens = T,
        .top_k = K,
        .ids = {.data = ids, .dtype = EP_DTYPE_I32, .stride_bytes = K * sizeof(int32_t)}};
    const ep_layer_shape shape = {.experts = 4, .top_k = K};
    ep_host_count_loads(&batch, &shape, chosen, groups, 3, 0, T, 2 * T, scratch, loads);
    cr_assert_eq(loads[0].nodes, 2u);
    cr_assert_eq(loads[0].host_rows, 2u * T);
    cr_assert(abs((int)loads[0].slots - 3 * T) <= T / 5, "%lu", loads[0].slots);
    cr_assert(abs((int)loads[2].slots - T) <= T / 5, "%lu", loads[2].slots);
    ep_host_count_loads(&batch, &shape, chosen, groups, 3, 7, 7, T, scratch, loads);
    cr_assert_eq(loads[0].slots, 0u, "no token");
}
