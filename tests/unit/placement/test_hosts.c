/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of an expert on different hosts, by both solvers: from nothing, as nodes and hosts come
 * and go, where room is short. */
#include <criterion/criterion.h>

#include "unit/placement/problem.h"

enum { LAYERS = 2, EXPERTS = 24 };

static const solver solvers[] = {ep_placement_uniform, ep_placement_balanced};

static const char *const host_names[] = {"h0", "h1", "h2", "h3", "h4",  "h5",
                                         "h6", "h7", "h8", "h9", "h10", "h11"};

/* Node n is on host n % hosts; "" (every node its own) when hosts is 0. */
static void setup(problem *p, uint32_t nodes, uint32_t hosts, uint32_t experts, uint32_t copies,
                  uint64_t seed)
{
    problem_init(p, nodes, LAYERS, experts, copies);
    problem_draw_heat(p, seed, 1);
    p->input.moves_max = UINT32_MAX;
    for (uint32_t n = 0; n < nodes; n++) {
        p->nodes[n].host = hosts == 0 ? "" : host_names[n % hosts];
    }
}

static uint32_t hosts_of(const problem *p, const ep_placed_layer *layer, uint32_t expert)
{
    uint32_t count = 0;
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        bool is_new = true;
        for (uint32_t j = layer->offsets[expert]; j < i; j++) {
            cr_assert_neq(layer->copies[i], layer->copies[j], "two copies on one node");
            is_new = is_new && (p->nodes[layer->copies[i]].host[0] == 0 ||
                                strcmp(p->nodes[layer->copies[i]].host,
                                       p->nodes[layer->copies[j]].host) != 0);
        }
        count += is_new;
    }
    return count;
}

static void check_hosts(const problem *p, const ep_placement *placement, uint32_t wanted)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t e = 0; e < placement->layers[l].experts; e++) {
            cr_assert_geq(hosts_of(p, &placement->layers[l], e), wanted,
                          "layer %u, expert %u is on %u hosts of %u", l, e,
                          hosts_of(p, &placement->layers[l], e), wanted);
        }
    }
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

Test(hosts, copies_are_on_different_hosts_through_all_histories)
{
    for (uint32_t s = 0; s < 2; s++) {
        uint64_t state = 11 + s;
        for (int history = 0; history < 150; history++) {
            const uint32_t experts = 1 + (uint32_t)(ep_splitmix64(&state) % EXPERTS);
            ep_placement *current = NULL;
            for (int step = 0; step < 6; step++) {
                problem p;
                const uint32_t nodes = 1 + (uint32_t)(ep_splitmix64(&state) % NODES_MAX);
                const uint32_t hosts = (uint32_t)(ep_splitmix64(&state) % 5);
                const uint32_t copies = 1 + (uint32_t)(ep_splitmix64(&state) % 3);
                setup(&p, nodes, hosts, experts, copies, ep_splitmix64(&state));
                p.input.spare_copies = (uint32_t)(ep_splitmix64(&state) % 3) * experts / 4;
                p.input.moves_max = ep_splitmix64(&state) % 2 ? UINT32_MAX : 0;
                if (current != NULL) {
                    problem_adopt(&p, current);
                }
                ep_placement *next = problem_solve(&p, solvers[s]);
                check_hosts(&p, next, least(copies, hosts == 0 ? nodes : least(hosts, nodes)));
                problem_adopt(&p, next);
                p.input.moves_max = 0;
                ep_placement *again = problem_solve(&p, solvers[s]);
                cr_assert_eq(again->copies_added, 0u, "what is well placed stays");
                ep_placement_destroy(again);
                ep_placement_destroy(current);
                current = next;
            }
            ep_placement_destroy(current);
        }
    }
}

Test(hosts, nodes_stay_even_where_hosts_are)
{
    for (uint32_t s = 0; s < 2; s++) {
        for (uint32_t hosts = 2; hosts <= 4; hosts++) {
            problem one, p;
            setup(&one, 12 / hosts, 1, EXPERTS, 2, hosts);
            ep_placement *alone = problem_solve(&one, solvers[s]); /* all copies are on one host */
            for (int is_joining = 0; is_joining < 2; is_joining++) {
                setup(&p, 12, hosts, EXPERTS, 2, hosts);
                if (is_joining) { /* nodes 0..12/hosts-1 are the first host's */
                    for (uint32_t n = 0; n < 12; n++) {
                        p.nodes[n].host = host_names[n / (12 / hosts)];
                    }
                    problem_adopt(&p, alone);
                }
                ep_placement *placement = problem_solve(&p, solvers[s]);
                check_hosts(&p, placement, 2);
                /* By heat it is time that is even, not counts. */
                cr_assert_leq(placement->node_copies_max - placement->node_copies_min,
                              s == 0 ? 2u : 8u, "%u..%u copies on a node",
                              placement->node_copies_min, placement->node_copies_max);
                ep_placement_destroy(placement);
            }
            ep_placement_destroy(alone);
        }
    }
}

Test(hosts, a_lost_host_leaves_a_copy_of_each)
{
    for (uint32_t s = 0; s < 2; s++) {
        problem p;
        setup(&p, 8, 2, EXPERTS, 2, 5);
        p.input.spare_copies = 6;
        ep_placement *placement = problem_solve(&p, solvers[s]);
        for (uint32_t l = 0; l < LAYERS; l++) {
            for (uint32_t e = 0; e < EXPERTS; e++) {
                uint32_t left = 0;
                for (uint32_t i = placement->layers[l].offsets[e];
                     i < placement->layers[l].offsets[e + 1]; i++) {
                    left += placement->layers[l].copies[i] % 2 == 0;
                }
                cr_assert_geq(left, 1u);
            }
        }
        ep_placement_destroy(placement);
    }
}

Test(hosts, room_that_is_short_comes_first)
{
    for (uint32_t s = 0; s < 2; s++) {
        problem p;
        setup(&p, 3, 0, 8, 2, 9);
        p.nodes[0].host = "a";
        p.nodes[1].host = "a";
        p.nodes[2].host = "b";
        /* of 8 experts on the other host, two of each layer */
        p.nodes[2].capacity_experts = LAYERS * 2;
        ep_placement *placement = problem_solve(&p, solvers[s]);
        cr_assert_eq(placement->copies_missing, 0u);
        cr_assert_eq(placement->copies_total, LAYERS * 16u);
        uint32_t apart = 0;
        for (uint32_t l = 0; l < LAYERS; l++) {
            for (uint32_t e = 0; e < 8; e++) {
                apart += hosts_of(&p, &placement->layers[l], e) == 2;
            }
        }
        cr_assert_eq(apart, LAYERS * 2u);
        ep_placement_destroy(placement);
    }
}
