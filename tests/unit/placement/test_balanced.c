/* SPDX-License-Identifier: Apache-2.0 */
/* Placement by heat: the hot expert's copies, capacities, what stays and what moves, a node that
 * joins or leaves, room that is short. */
#include <criterion/criterion.h>

#include "unit/placement/problem.h"

static void setup(problem *p, uint32_t nodes, uint32_t layers, uint32_t experts, uint32_t copies,
                  uint64_t seed)
{
    problem_init(p, nodes, layers, experts, copies);
    problem_draw_heat(p, seed, 2);
}

static uint32_t copies_on(const ep_placement *placement, uint32_t layer, uint32_t node)
{
    const ep_placed_layer *placed = &placement->layers[layer];
    uint32_t count = 0;
    for (uint32_t i = 0; i < placed->offsets[placed->experts]; i++) {
        count += placed->copies[i] == node;
    }
    return count;
}

static uint32_t copies_of(const ep_placement *placement, uint32_t layer, uint32_t expert)
{
    return placement->layers[layer].offsets[expert + 1] - placement->layers[layer].offsets[expert];
}

/* The busiest node's time by who holds what. */
static double busiest(const problem *p, const ep_placement *placement, uint32_t layer)
{
    double busy[NODES_MAX] = {0}, most = 0;
    const ep_placed_layer *placed = &placement->layers[layer];
    for (uint32_t e = 0; e < p->layers[layer].shape.experts; e++) {
        double speed = 0;
        for (uint32_t i = placed->offsets[e]; i < placed->offsets[e + 1]; i++) {
            const double s = p->nodes[placed->copies[i]].speed;
            speed += s > 0 ? s : 1;
        }
        for (uint32_t i = placed->offsets[e]; i < placed->offsets[e + 1]; i++) {
            busy[placed->copies[i]] += p->heat[layer][e] / speed;
        }
    }
    for (uint32_t n = 0; n < p->input.nodes_count; n++) {
        most = fmax(most, busy[n]);
    }
    return most;
}

static void check_certificate(const problem *p, const ep_placement *placement)
{
    for (uint32_t l = 0; l < p->input.layers_count; l++) {
        const ep_placed_layer *placed = &placement->layers[l];
        cr_assert_float_eq(placed->busiest, busiest(p, placement, l), 1e-9 * placed->busiest);
        cr_assert_leq(placed->mean, placed->bound * (1 + 1e-6));
        cr_assert_leq(placed->bound, placed->busiest * (1 + 1e-6));
        for (uint32_t e = 0; e < placed->experts; e++) {
            for (uint32_t i = placed->offsets[e]; i < placed->offsets[e + 1]; i++) {
                for (uint32_t j = placed->offsets[e]; j < i; j++) {
                    cr_assert_neq(placed->copies[i], placed->copies[j],
                                  "two copies of an expert on one node");
                }
            }
        }
    }
}

Test(balanced, spare_copies_go_to_hot_experts_and_nodes_are_even)
{
    problem p;
    setup(&p, 6, 3, 48, 1, 1);
    p.heat[1][7] = 400000; /* more than any node's part */
    p.input.spare_copies = 12;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    check_certificate(&p, placement);
    for (uint32_t l = 0; l < 3; l++) {
        cr_assert_leq(placement->layers[l].busiest, 1.01 * placement->layers[l].bound);
        for (uint32_t n = 0; n < 6; n++) {
            cr_assert_leq(copies_on(placement, l, n), 10);
        }
    }
    cr_assert_eq(copies_of(placement, 1, 7), 6);
    cr_assert_leq(placement->copies_total, 3 * 60);
    ep_placement_destroy(placement);
}

Test(balanced, a_fast_node_is_given_more_to_do)
{
    problem p;
    setup(&p, 3, 1, 60, 1, 2);
    p.nodes[1].speed = 3;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    check_certificate(&p, placement);
    cr_assert_leq(placement->layers[0].busiest, 1.1 * placement->layers[0].bound,
                  "busiest %g, bound %g", placement->layers[0].busiest, placement->layers[0].bound);
    ep_placement_destroy(placement);
}

Test(balanced, capacities_hold_and_each_layer_has_its_part)
{
    problem p;
    setup(&p, 4, 3, 16, 1, 3);
    p.input.spare_copies = 16;
    p.nodes[0].capacity_bytes = 700; /* 7 experts of 48 */
    p.nodes[1].capacity_experts = 5;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    check_certificate(&p, placement);
    uint32_t on[2] = {0};
    for (uint32_t l = 0; l < 3; l++) {
        on[0] += copies_on(placement, l, 0);
        on[1] += copies_on(placement, l, 1);
        cr_assert_geq(copies_on(placement, l, 0), 2);
        cr_assert_geq(copies_on(placement, l, 1), 1);
    }
    cr_assert_eq(on[0], 7);
    cr_assert_eq(on[1], 5);
    ep_placement_destroy(placement);
}

Test(balanced, where_room_is_too_short_for_parts_each_expert_still_has_a_place)
{
    problem p;
    setup(&p, 2, 3, 3, 1, 4);
    p.nodes[0].capacity_experts = 4;
    p.nodes[1].capacity_experts = 5; /* just enough */
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    cr_assert_eq(placement->copies_total, 9);
    ep_placement_destroy(placement);
    p.nodes[1].capacity_experts = 4;
    ep_error error = {0};
    ASSERT_FAILS(ep_placement_balanced(&p.input, &placement, &error), EP_ERR_RESOURCE_EXHAUSTED,
                 error, "has room for expert");
}

Test(balanced, what_is_held_moves_only_as_far_as_the_budget_goes)
{
    problem p, drifted;
    setup(&p, 8, 2, 64, 1, 5);
    p.input.spare_copies = 8;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    setup(&drifted, 8, 2, 64, 1, 6);
    drifted.input.spare_copies = 8;
    problem_adopt(&drifted, placement);
    double before = 2;
    for (uint32_t moves = 0; moves <= 64; moves += 16) {
        drifted.input.moves_max = moves;
        ep_placement *next = problem_solve(&drifted, ep_placement_balanced);
        check_certificate(&drifted, next);
        cr_assert_leq(next->copies_added, moves);
        const double worst = fmax(next->layers[0].busiest / next->layers[0].bound,
                                  next->layers[1].busiest / next->layers[1].bound);
        cr_assert_leq(worst, before);
        before = worst;
        ep_placement_destroy(next);
    }
    cr_assert_leq(before, 1.0501);
    ep_placement_destroy(placement);
}

/* Looks at the same popularity again and again, each time at a new sample of `slots` a layer (0:
 * the very same heat). Returns the loads. */
static uint32_t look(problem *p, ep_placement **io_placement, uint32_t looks, double slots,
                     uint64_t *random)
{
    static double popularity[LAYERS_MAX][EXPERTS_MAX];
    uint32_t loads = 0;
    for (uint32_t l = 0; l < p->input.layers_count; l++) {
        double sum = 0;
        for (uint32_t e = 0; e < EXPERTS_MAX; e++) {
            sum += p->heat[l][e];
        }
        for (uint32_t e = 0; e < EXPERTS_MAX; e++) {
            popularity[l][e] = p->heat[l][e] / sum;
        }
    }
    for (uint32_t i = 0; i < looks; i++) {
        for (uint32_t at = 0; at < LAYERS_MAX * EXPERTS_MAX && slots > 0; at++) {
            const double mean = slots * popularity[at / EXPERTS_MAX][at % EXPERTS_MAX];
            double noise = -6; /* of a dozen uniform numbers: nearly normal, variance 1 */
            for (int k = 0; k < 12; k++) {
                noise += (double)(ep_splitmix64(random) >> 11) / 9007199254740992.0;
            }
            p->heat[at / EXPERTS_MAX][at % EXPERTS_MAX] = fmax(0, mean + noise * sqrt(mean));
        }
        problem_adopt(p, *io_placement);
        ep_placement *next = problem_solve(p, ep_placement_balanced);
        cr_assert_leq(next->copies_added, p->input.moves_max);
        loads += next->copies_added;
        ep_placement_destroy(*io_placement);
        *io_placement = next;
    }
    return loads;
}

Test(balanced, the_same_load_again_moves_nothing_after_a_while)
{
    uint32_t first = 0, noisy = 0;
    for (uint64_t seed = 20; seed < 60; seed++) {
        problem p, yesterday;
        uint64_t random = seed;
        setup(&yesterday, 8, 3, EXPERTS_MAX, 1, seed + 1000);
        setup(&p, 8, 3, EXPERTS_MAX, 1, seed);
        p.input.spare_copies = yesterday.input.spare_copies = (uint32_t)(seed % 3) * 12;
        p.nodes[0].capacity_bytes = yesterday.nodes[0].capacity_bytes =
            seed % 2 == 0 ? 0 : 1500; /* 15 experts of 192 */
        p.input.moves_max = 64;
        ep_placement *placement = problem_solve(&yesterday, ep_placement_balanced);
        first += look(&p, &placement, 20, 0, &random);
        cr_assert_eq(look(&p, &placement, 10, 0, &random), 0u, "seed %lu: copies go to and fro",
                     (unsigned long)seed);
        noisy += look(&p, &placement, 20, 8 * 2500, &random);
        ep_placement_destroy(placement);
    }
    cr_assert_gt(first, 40 * 10, "%u loads for a change of the load", first);
    cr_assert_leq(noisy, first / 10, "%u loads in 20 looks at noise, %u for a change of the load",
                  noisy, first);
}

Test(balanced, a_full_node_changes_places_to_take_a_copy)
{
    static const uint32_t offsets[] = {0, 1, 3, 4, 6, 7, 8, 9, 10},
                          owned[] = {0, 3, 1, 0, 3, 1, 0, 2, 3, 1};
    problem p;
    setup(&p, 4, 1, 8, 1, 1);
    p.input.spare_copies = 4;
    p.input.moves_max = 64;
    p.layers[0].owned_offsets = offsets;
    p.layers[0].owned = owned;
    for (uint32_t e = 0; e < 8; e++) {
        p.heat[0][e] = e == 3 || e == 5 ? 420 : 27; /* node 2 has room, all it holds is one copy of
                                                       5, and node 0 is full */
    }
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    cr_assert_geq(copies_of(placement, 0, 5), 2u);
    cr_assert_leq(placement->layers[0].busiest, 1.05 * placement->layers[0].bound);
    ep_placement_destroy(placement);
}

Test(balanced, a_node_without_room_does_not_keep_others_from_their_experts)
{
    problem p;
    setup(&p, 1, 1, 16, 2, 9);
    ep_placement *alone = problem_solve(&p, ep_placement_balanced);
    cr_assert_eq(alone->copies_total, 16);
    setup(&p, 2, 1, 16, 2, 9);
    problem_adopt(&p, alone);
    p.nodes[1].capacity_bytes = 1;
    p.input.moves_max = UINT32_MAX;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    cr_assert_eq(copies_on(placement, 0, 0), 16);
    cr_assert_eq(copies_on(placement, 0, 1), 0);
    cr_assert_eq(placement->copies_missing, 16);
    ep_placement_destroy(placement);
    ep_placement_destroy(alone);
}

Test(balanced, a_layer_too_large_to_be_searched_is_spread_evenly)
{
    enum { NODES = 600 };
    static ep_placement_node nodes[NODES];
    for (uint32_t n = 0; n < NODES; n++) {
        nodes[n] = (ep_placement_node){.node_id = n, .name = "n"};
    }
    const ep_placement_layer layer = {
        .shape = {.hidden = 4, .inner = 4, .experts = EP_EXPERTS_MAX, .top_k = 2}};
    const problem p = {.input = {.nodes_count = NODES,
                                 .nodes = nodes,
                                 .layers_count = 1,
                                 .layers = &layer,
                                 .copies = 1}};
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    cr_assert_eq(placement->copies_total, EP_EXPERTS_MAX);
    cr_assert_eq(placement->layers[0].bound, 0, "nobody has searched");
    cr_assert_leq(placement->node_copies_max - placement->node_copies_min, 1u);
    ep_placement_destroy(placement);
}

/* Two nodes of two experts each: 9 + 8 against 2 + 1, where an exchange is two loads. */
Test(balanced, the_last_layer_has_all_that_is_left_of_moves_without_limit)
{
    static const uint32_t offsets[] = {0, 1, 2, 3, 4}, owned[] = {0, 0, 1, 1};
    static const double heat[] = {9, 8, 2, 1};
    problem p;
    setup(&p, 2, 1, 4, 1, 1);
    p.layers[0].heat = heat;
    p.layers[0].owned_offsets = offsets;
    p.layers[0].owned = owned;
    p.input.moves_max = UINT32_MAX;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    cr_assert_float_eq(placement->layers[0].busiest, 10, 1e-9);
    cr_assert_eq(placement->copies_added, 2);
    ep_placement_destroy(placement);
}

Test(balanced, it_says_when_its_work_ended_before_all_was_looked_at)
{
    enum { NODES = 512, EXPERTS = 2048, LAYERS = 8 };
    static ep_placement_node nodes[NODES];
    static double heat[EXPERTS];
    static uint32_t offsets[EXPERTS + 1], owned[EXPERTS];
    uint64_t random = 1;
    for (uint32_t n = 0; n < NODES; n++) {
        nodes[n] = (ep_placement_node){.node_id = n, .name = "n"};
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        heat[e] = pow(1.0 + (double)(ep_splitmix64(&random) % 100), 2);
        owned[e] = e % NODES;
        offsets[e + 1] = e + 1;
    }
    ep_placement_layer layers[LAYERS];
    for (uint32_t l = 0; l < LAYERS; l++) {
        layers[l] = (ep_placement_layer){.shape = {.layer = l, .experts = EXPERTS, .top_k = 2},
                                         .heat = heat,
                                         .owned_offsets = offsets,
                                         .owned = owned};
    }
    problem p = {.input = {.nodes_count = NODES,
                           .nodes = nodes,
                           .layers_count = LAYERS,
                           .layers = layers,
                           .copies = 1,
                           .moves_max = UINT32_MAX}};
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    cr_assert(placement->is_cut);
    cr_assert_gt(placement->layers[LAYERS - 1].busiest, 1.1 * placement->layers[LAYERS - 1].bound);
    ep_placement_destroy(placement);
    p.input.moves_max = 10;
    placement = problem_solve(&p, ep_placement_balanced);
    cr_assert_not(placement->is_cut, "ten moves took all work");
    ep_placement_destroy(placement);
}

Test(balanced, a_node_that_joins_gets_its_part_and_one_that_leaves_is_replaced)
{
    problem p, more;
    setup(&p, 3, 2, 60, 2, 7);
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    setup(&more, 4, 2, 60, 2, 7);
    problem_adopt(&more, placement);
    more.input.moves_max = UINT32_MAX;
    ep_placement *joined = problem_solve(&more, ep_placement_balanced);
    check_certificate(&more, joined);
    for (uint32_t l = 0; l < 2; l++) {
        cr_assert_leq(joined->layers[l].busiest, 1.06 * joined->layers[l].bound,
                      "%g of %g, %u copies on it, %u loads", joined->layers[l].busiest,
                      joined->layers[l].bound, copies_on(joined, l, 3), joined->copies_added);
        cr_assert_geq(copies_on(joined, l, 3), 1);
    }
    cr_assert_leq(joined->copies_added, 2 * 60, "%u loads for 60 of 240 copies",
                  joined->copies_added);
    /* Node 0 is gone: its copies, and none else, are loaded anew. */
    uint32_t gone = 0, kept[LAYERS_MAX][4 * EXPERTS_MAX];
    problem fewer;
    setup(&fewer, 4, 2, 60, 2, 7);
    problem_adopt(&fewer, joined);
    for (uint32_t l = 0; l < 2; l++) {
        for (uint32_t i = 0; i < joined->layers[l].offsets[60]; i++) {
            kept[l][i] = joined->layers[l].copies[i] == 0 ? EP_PLACEMENT_NODE_GONE
                                                          : joined->layers[l].copies[i] - 1;
            gone += joined->layers[l].copies[i] == 0;
        }
        fewer.layers[l].owned = kept[l];
    }
    fewer.input.nodes = fewer.nodes + 1;
    fewer.input.nodes_count = 3;
    ep_placement *left = problem_solve(&fewer, ep_placement_balanced);
    cr_assert_eq(left->copies_total, 240);
    cr_assert_eq(left->copies_added, gone);
    ep_placement_destroy(left);
    ep_placement_destroy(joined);
    ep_placement_destroy(placement);
}

Test(balanced, without_heat_it_is_even_and_bad_numbers_are_refused)
{
    problem p;
    setup(&p, 4, 1, 16, 1, 8);
    p.layers[0].heat = NULL;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    for (uint32_t n = 0; n < 4; n++) {
        cr_assert_eq(copies_on(placement, 0, n), 4);
    }
    ep_placement_destroy(placement);
    ep_error error = {0};
    p.layers[0].heat = p.heat[0];
    p.heat[0][3] = -1;
    ASSERT_FAILS(ep_placement_balanced(&p.input, &placement, &error), EP_ERR_INVALID_ARGUMENT,
                 error, "layer 0, expert 3: heat -1");
    p.heat[0][3] = 1;
    p.nodes[2].speed = (double)INFINITY;
    ASSERT_FAILS(ep_placement_balanced(&p.input, &placement, &error), EP_ERR_INVALID_ARGUMENT,
                 error, "node n2 has speed inf");
}

static uint32_t inherited(const ep_placed_layer *layer, uint32_t lost, uint32_t heir)
{
    uint32_t count = 0;
    for (uint32_t e = 0; e < layer->experts; e++) {
        uint32_t here = 0;
        for (uint32_t i = layer->offsets[e]; i < layer->offsets[e + 1]; i++) {
            here += layer->copies[i] == lost || layer->copies[i] == heir;
        }
        count += here == 2;
    }
    return count;
}

Test(balanced, without_heat_a_lost_nodes_work_goes_to_all_others)
{
    problem p;
    setup(&p, 8, 1, 56, 2, 1);
    p.layers[0].heat = NULL;
    ep_placement *placement = problem_solve(&p, ep_placement_balanced);
    for (uint32_t lost = 0; lost < 8; lost++) {
        for (uint32_t heir = 0; heir < 8; heir++) {
            cr_assert(heir == lost || inherited(&placement->layers[0], lost, heir) <= 4,
                      "node %u leaves %u of its 14 experts to node %u", lost,
                      inherited(&placement->layers[0], lost, heir), heir);
        }
    }
    ep_placement_destroy(placement);
}
