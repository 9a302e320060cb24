/* SPDX-License-Identifier: Apache-2.0 */
/* Uniform placement: balance, copies on different nodes, what is owned stays, room runs out, random
 * histories. */
#include <criterion/criterion.h>

#include "unit/placement/problem.h"

static bool holds(const ep_placed_layer *layer, uint32_t expert, uint32_t node)
{
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        if (layer->copies[i] == node) {
            return true;
        }
    }
    return false;
}

static uint32_t load_of(const ep_placed_layer *layer, uint32_t node)
{
    uint32_t load = 0;
    for (uint32_t e = 0; e < layer->experts; e++) {
        load += holds(layer, e, node);
    }
    return load;
}

static void check_distinct(const ep_placement *placement, uint32_t nodes)
{
    for (uint32_t l = 0; l < placement->layers_count; l++) {
        const ep_placed_layer *layer = &placement->layers[l];
        for (uint32_t e = 0; e < layer->experts; e++) {
            for (uint32_t i = layer->offsets[e]; i < layer->offsets[e + 1]; i++) {
                cr_assert_lt(layer->copies[i], nodes);
                for (uint32_t j = layer->offsets[e]; j < i; j++) {
                    cr_assert_neq(layer->copies[i], layer->copies[j],
                                  "two copies of expert %u on one node", e);
                }
            }
        }
    }
}

Test(uniform, spreads_any_number_of_experts_over_any_number_of_nodes)
{
    for (uint32_t nodes = 1; nodes <= 9; nodes++) {
        for (uint32_t experts = 1; experts <= 17; experts++) {
            for (uint32_t copies = 1; copies <= 3; copies++) {
                problem p;
                problem_init(&p, nodes, 2, experts, copies);
                ep_placement *placement = problem_solve(&p, ep_placement_uniform);
                uint32_t made = copies < nodes ? copies : nodes;
                check_distinct(placement, nodes);
                cr_assert_eq(placement->copies_total, 2 * experts * made);
                cr_assert_eq(placement->copies_added, placement->copies_total);
                cr_assert_eq(placement->bytes_added, 100ull * placement->copies_total);
                cr_assert_eq(placement->copies_missing, 0);
                for (uint32_t l = 0; l < 2; l++) {
                    for (uint32_t n = 0; n < nodes; n++) {
                        uint32_t load = load_of(&placement->layers[l], n);
                        cr_assert(load >= experts * made / nodes &&
                                      load <= (experts * made + nodes - 1) / nodes,
                                  "%u of %u on %u: %u", experts, made, nodes, load);
                    }
                }
                cr_assert_leq(placement->node_copies_max - placement->node_copies_min, 1,
                              "remainders of layers even out");
                ep_placement_destroy(placement);
            }
        }
    }
}

Test(uniform, a_first_layer_is_round_robin)
{
    problem p;
    problem_init(&p, 6, 1, 8, 1);
    ep_placement *placement = problem_solve(&p, ep_placement_uniform);
    for (uint32_t e = 0; e < 8; e++) {
        cr_assert_eq(placement->layers[0].copies[e], e % 6);
    }
    ep_placement_destroy(placement);
}

Test(uniform, a_lost_node_costs_only_its_own_copies)
{
    problem p;
    problem_init(&p, 4, 2, 8, 2);
    ep_placement *before = problem_solve(&p, ep_placement_uniform);
    problem_adopt(&p, before);
    uint32_t lost = 0;
    for (uint32_t l = 0; l < 2; l++) { /* node 3 is gone */
        for (uint32_t i = 0; i < before->layers[l].offsets[8]; i++) {
            if (before->layers[l].copies[i] == 3) {
                before->layers[l].copies[i] = EP_PLACEMENT_NODE_GONE;
                lost++;
            }
        }
    }
    p.input.nodes_count = 3;
    ep_placement *after = problem_solve(&p, ep_placement_uniform);
    check_distinct(after, 3);
    cr_assert_eq(after->copies_total, 32);
    cr_assert_eq(after->copies_added, lost);
    cr_assert_eq(after->copies_dropped, 0);
    for (uint32_t l = 0; l < 2; l++) {
        for (uint32_t e = 0; e < 8; e++) {
            for (uint32_t i = before->layers[l].offsets[e]; i < before->layers[l].offsets[e + 1];
                 i++) {
                uint32_t node = before->layers[l].copies[i];
                cr_assert(node == EP_PLACEMENT_NODE_GONE || holds(&after->layers[l], e, node));
            }
        }
    }
    ep_placement_destroy(before);
    ep_placement_destroy(after);
}

/* Experts of node `lost` whose other copy is on `heir`. */
static uint32_t inherited(const ep_placed_layer *layer, uint32_t lost, uint32_t heir)
{
    uint32_t count = 0;
    for (uint32_t e = 0; e < layer->experts; e++) {
        count += holds(layer, e, lost) && holds(layer, e, heir);
    }
    return count;
}

static void check_heirs(const ep_placement *placement, uint32_t nodes, uint32_t more)
{
    for (uint32_t lost = 0; lost < nodes; lost++) {
        const uint32_t load = load_of(&placement->layers[0], lost),
                       fair = (load + nodes - 2) / (nodes - 1);
        for (uint32_t heir = 0; heir < nodes; heir++) {
            const uint32_t count = heir != lost ? inherited(&placement->layers[0], lost, heir) : 0;
            cr_assert_leq(count, fair + more,
                          "node %u of %u leaves %u of its %u experts to node %u", lost, nodes,
                          count, load, heir);
        }
    }
}

Test(uniform, a_lost_nodes_work_goes_to_all_others)
{
    for (uint32_t nodes = 3; nodes < 9; nodes++) {
        problem p, joined;
        problem_init(&p, nodes, 1, 56, 2);
        ep_placement *placement = problem_solve(&p, ep_placement_uniform);
        check_heirs(placement, nodes, 1);
        problem_init(&joined, nodes + 1, 1, 56, 2);
        joined.input.moves_max = UINT32_MAX;
        problem_adopt(&joined, placement);
        ep_placement *more = problem_solve(&joined, ep_placement_uniform);
        check_heirs(more, nodes + 1, 3);
        ep_placement_destroy(placement);
        ep_placement_destroy(more);
    }
}

Test(uniform, a_new_node_gets_missing_copies_and_moves_only_when_asked)
{
    problem p;
    problem_init(&p, 1, 1, 8, 2);
    ep_placement *alone = problem_solve(&p, ep_placement_uniform);
    cr_assert_eq(alone->copies_total, 8);
    problem_adopt(&p, alone);
    problem two;
    problem_init(&two, 2, 1, 8, 2);
    problem_adopt(&two, alone);
    ep_placement *both = problem_solve(&two, ep_placement_uniform);
    cr_assert_eq(both->copies_total, 16);
    cr_assert_eq(both->copies_added, 8);

    two.input.copies = 1;
    ep_placement *still = problem_solve(&two, ep_placement_uniform);
    cr_assert_eq(load_of(&still->layers[0], 1), 0, "nothing lacks a copy");
    two.input.moves_max = 3;
    ep_placement *some = problem_solve(&two, ep_placement_uniform);
    cr_assert_eq(load_of(&some->layers[0], 1), 3);
    cr_assert(some->copies_added == 3 && some->copies_dropped == 3);
    two.input.moves_max = UINT32_MAX;
    ep_placement *even = problem_solve(&two, ep_placement_uniform);
    cr_assert_eq(load_of(&even->layers[0], 1), 4);
    ep_placement_destroy(alone);
    ep_placement_destroy(both);
    ep_placement_destroy(still);
    ep_placement_destroy(some);
    ep_placement_destroy(even);
}

Test(uniform, surplus_copies_go_from_the_fullest_node)
{
    problem p;
    problem_init(&p, 2, 1, 3, 2);
    ep_placement *two = problem_solve(&p, ep_placement_uniform);
    problem_adopt(&p, two);
    p.input.copies = 1;
    ep_placement *one = problem_solve(&p, ep_placement_uniform);
    cr_assert_eq(one->copies_total, 3);
    cr_assert_eq(one->copies_dropped, 3);
    cr_assert_eq(one->copies_added, 0);
    cr_assert_leq(one->node_copies_max - one->node_copies_min, 1);
    ep_placement_destroy(two);
    ep_placement_destroy(one);
}

Test(uniform, first_copies_come_before_second_ones_when_room_is_short)
{
    problem p;
    problem_init(&p, 2, 2, 4, 2);
    p.nodes[0].capacity_experts = 6;
    p.nodes[1].capacity_bytes = 450; /* 4 experts of 100 bytes */
    ep_placement *placement = problem_solve(&p, ep_placement_uniform);
    check_distinct(placement, 2);
    cr_assert_eq(placement->copies_total, 10);
    cr_assert_eq(placement->copies_missing, 6);
    for (uint32_t l = 0; l < 2; l++) {
        for (uint32_t e = 0; e < 4; e++) {
            cr_assert_lt(placement->layers[l].offsets[e], placement->layers[l].offsets[e + 1]);
        }
    }
    ep_placement_destroy(placement);
}

Test(uniform, gives_up_spare_copies_for_an_expert_without_any)
{
    problem p;
    const uint32_t offsets[] = {0, 2, 4, 4, 4};
    const uint32_t owned[] = {0, 1, 0, 1};
    problem_init(&p, 2, 1, 4, 2);
    p.nodes[0].capacity_experts = p.nodes[1].capacity_experts = 2;
    p.layers[0].owned_offsets = offsets;
    p.layers[0].owned = owned;
    ep_placement *placement = problem_solve(&p, ep_placement_uniform);
    for (uint32_t e = 0; e < 4; e++) {
        cr_assert_eq(placement->layers[0].offsets[e + 1] - placement->layers[0].offsets[e], 1);
    }
    cr_assert_eq(placement->copies_missing, 4);
    ep_placement_destroy(placement);
}

Test(uniform, names_the_expert_that_fits_nowhere)
{
    problem p;
    ep_placement *placement = NULL;
    ep_error error;
    problem_init(&p, 2, 2, 4, 1);
    p.nodes[0].capacity_experts = 3;
    p.nodes[1].capacity_experts = 4;
    cr_assert_eq(ep_placement_uniform(&p.input, &placement, &error), EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_str_eq(
        error.text,
        "none of 2 nodes has room for expert 3 of layer 1: add nodes or raise their weight budget");
    cr_assert(error.layer == 1 && error.expert == 3);
    cr_assert_null(placement);
}

Test(uniform, no_nodes_give_experts_without_copies)
{
    problem p;
    problem_init(&p, 0, 1, 4, 2);
    ep_placement *placement = problem_solve(&p, ep_placement_uniform);
    cr_assert_eq(placement->copies_total, 0);
    cr_assert_eq(placement->layers[0].offsets[4], 0);
    ep_placement_destroy(placement);
}

Test(uniform, refuses_wrong_input)
{
    problem p;
    ep_placement *placement = NULL;
    ep_error error;
    problem_init(&p, 2, 2, 4, 0);
    cr_assert_eq(ep_placement_uniform(&p.input, &placement, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "placement with 0 copies of each expert: allowed 1 or more");
    problem_init(&p, 2, 2, 4, 1);
    p.layers[1].shape.layer = 0;
    cr_assert_eq(ep_placement_uniform(&p.input, &placement, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "layer 0 follows layer 0: layers must ascend");
    problem_init(&p, 2, 1, 0, 1);
    cr_assert_eq(ep_placement_uniform(&p.input, &placement, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_null(placement);
}

Test(uniform, keeps_its_promises_over_random_histories)
{
    uint64_t state = 3;
    for (int history = 0; history < 200; history++) {
        ep_placement *current = NULL;
        uint32_t experts = 1 + (uint32_t)(ep_splitmix64(&state) % 16);
        for (int step = 0; step < 8; step++) {
            problem p;
            uint32_t nodes = 1 + (uint32_t)(ep_splitmix64(&state) % 9);
            uint32_t copies = 1 + (uint32_t)(ep_splitmix64(&state) % 3);
            problem_init(&p, nodes, 3, experts, copies);
            p.input.moves_max = ep_splitmix64(&state) % 2 ? UINT32_MAX : 0;
            if (current != NULL) {
                problem_adopt(&p, current); /* indexes above the new count are nodes that left */
            }
            ep_placement *next = problem_solve(&p, ep_placement_uniform);
            uint32_t made = copies < nodes ? copies : nodes;
            check_distinct(next, nodes);
            cr_assert_eq(next->copies_total, 3 * experts * made);
            for (uint32_t l = 0; l < 3 && p.input.moves_max != 0; l++) {
                for (uint32_t n = 0; n < nodes; n++) {
                    cr_assert_leq(load_of(&next->layers[l], n),
                                  (experts * made + nodes - 1) / nodes);
                }
            }
            ep_placement_destroy(current);
            current = next;
        }
        ep_placement_destroy(current);
    }
}
