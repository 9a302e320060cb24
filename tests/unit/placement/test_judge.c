/* SPDX-License-Identifier: Apache-2.0 */
/* The certificate of any placement, against numbers worked out by hand. */
#include <criterion/criterion.h>

#include "placement/placement.h"

#define NEAR(a, b) cr_assert_float_eq(a, b, 1e-6, "%g is not %g", a, b)

static const ep_placement_node nodes[] = {{.name = "a"}, {.name = "b"}};
static const double heat[] = {6, 3, 2, 1};

static ep_layer_balance judge(uint32_t copies_min, uint32_t spare, uint32_t shared,
                              const double *of, const uint32_t *offsets, const uint32_t *copies)
{
    const ep_placement_layer layer = {.shape = {.experts = 4, .shared_experts = shared, .top_k = 2},
                                      .heat = of};
    const ep_placement_input input = {.nodes_count = 2,
                                      .nodes = nodes,
                                      .layers_count = 1,
                                      .layers = &layer,
                                      .copies = copies_min,
                                      .spare_copies = spare};
    ep_layer_balance balance = {-1, -1, -1};
    cr_assert_eq(ep_placement_judge(&input, 0, offsets, copies, &balance), EP_OK);
    return balance;
}

Test(judge, one_copy_each)
{
    static const uint32_t offsets[] = {0, 1, 2, 3, 4}, copies[] = {0, 0, 1, 1};
    const ep_layer_balance balance = judge(1, 0, 0, heat, offsets, copies);
    NEAR(balance.busiest, 9.0); /* 6 + 3 */
    NEAR(balance.mean, 6.0);
    NEAR(balance.bound, 7.0); /* whoever has the first has another, of two slots: 6 + 1 */
}

Test(judge, a_second_copy_halves_the_load)
{
    static const uint32_t offsets[] = {0, 2, 3, 4, 5}, copies[] = {0, 1, 0, 1, 1};
    const ep_layer_balance balance = judge(1, 1, 0, heat, offsets, copies);
    NEAR(balance.busiest, 6.0); /* 3 + 3 on both */
    NEAR(balance.mean, 6.0);
    NEAR(balance.bound, 6.0);
}

Test(judge, without_heat_all_experts_are_alike_and_a_shared_one_takes_every_token)
{
    static const uint32_t offsets[] = {0, 1, 2, 3, 4, 5}, copies[] = {0, 0, 0, 1, 1};
    const ep_layer_balance alike = judge(1, 0, 1, NULL, offsets, copies);
    NEAR(alike.busiest, 3.0);
    NEAR(alike.mean, 2.5);
    const ep_layer_balance heated = judge(1, 0, 1, heat, offsets, copies);
    NEAR(heated.busiest, 11.0); /* 6 + 3 + 2, against 1 + 12 / 2 tokens */
    NEAR(heated.mean, 9.0);
}

/* The bound is that of placements as asked for: two copies of each expert on two nodes is one
 * placement. */
Test(judge, copies_asked_for_count_in_the_bound_where_they_are_there)
{
    static const uint32_t offsets[] = {0, 2, 4, 6, 8}, copies[] = {0, 1, 0, 1, 0, 1, 0, 1};
    const ep_layer_balance balance = judge(2, 0, 0, heat, offsets, copies);
    NEAR(balance.busiest, 6.0);
    NEAR(balance.bound, 6.0);
}

Test(judge, an_expert_without_a_copy_leaves_nothing_to_judge)
{
    static const uint32_t offsets[] = {0, 1, 1, 2, 3}, copies[] = {0, 1, 1};
    const ep_layer_balance balance = judge(1, 0, 0, heat, offsets, copies);
    cr_assert(balance.busiest == 0 && balance.mean == 0 && balance.bound == 0);
}
