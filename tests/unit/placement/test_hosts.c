/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of an expert on different hosts, by both solvers: from nothing, as nodes and hosts come
 * and go, where room is short. */
#include "placement/placement.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"

enum { NODES_MAX = 12, LAYERS = 2, EXPERTS_MAX = 24 };

typedef ep_err (*solver)(const ep_placement_input *, ep_placement **, ep_error *);
static const solver solvers[] = {ep_placement_uniform, ep_placement_balanced};

typedef struct {
    ep_placement_node nodes[NODES_MAX];
    char hosts[NODES_MAX][8];
    ep_placement_layer layers[LAYERS];
    double heat[LAYERS][EXPERTS_MAX];
    ep_placement_input input;
} problem;

/* Node n is on host n % hosts; "" (every node its own) when hosts is 0. */
static void setup(problem *p, uint32_t nodes, uint32_t hosts, uint32_t experts, uint32_t copies,
                  uint64_t seed)
{
    memset(p, 0, sizeof(*p));
    for (uint32_t n = 0; n < nodes; n++) {
        snprintf(p->hosts[n], sizeof(p->hosts[n]), hosts == 0 ? "" : "h%u",
                 hosts == 0 ? 0 : n % hosts);
        p->nodes[n] = (ep_placement_node){.node_id = n, .name = "n", .host = p->hosts[n]};
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        p->layers[l].shape =
            (ep_layer_shape){.layer = l, .hidden = 4, .inner = 4, .experts = experts, .top_k = 2};
        p->layers[l].expert_bytes = 100;
        p->layers[l].heat = p->heat[l];
        for (uint32_t e = 0; e < experts; e++) {
            p->heat[l][e] = 1.0 + (double)(ep_splitmix64(&seed) % 100);
        }
    }
    p->input = (ep_placement_input){.nodes_count = nodes,
                                    .nodes = p->nodes,
                                    .layers_count = LAYERS,
                                    .layers = p->layers,
                                    .copies = copies,
                                    .moves_max = UINT32_MAX};
}

static ep_placement *solve(const problem *p, solver by)
{
    ep_placement *placement = NULL;
    ep_error error = {0};
    cr_assert_eq(by(&p->input, &placement, &error), EP_OK, "%s", error.text);
    return placement;
}

static void adopt(problem *p, const ep_placement *placement)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        p->layers[l].owned_offsets = placement->layers[l].offsets;
        p->layers[l].owned = placement->layers[l].copies;
    }
}

static uint32_t hosts_of(const problem *p, const ep_placed_layer *layer, uint32_t expert)
{
    uint32_t count = 0;
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        bool is_new = true;
        for (uint32_t j = layer->offsets[expert]; j < i; j++) {
            cr_assert_neq(layer->copies[i], layer->copies[j], "two copies on one node");
            is_new =
                is_new && (p->hosts[layer->copies[i]][0] == 0 ||
                           strcmp(p->hosts[layer->copies[i]], p->hosts[layer->copies[j]]) != 0);
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
            const uint32_t experts = 1 + (uint32_t)(ep_splitmix64(&state) % EXPERTS_MAX);
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
                    adopt(&p, current);
                }
                ep_placement *next = solve(&p, solvers[s]);
                check_hosts(&p, next, least(copies, hosts == 0 ? nodes : least(hosts, nodes)));
                adopt(&p, next);
                p.input.moves_max = 0;
                ep_placement *again = solve(&p, solvers[s]);
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
            setup(&one, 12 / hosts, 1, EXPERTS_MAX, 2, hosts);
            ep_placement *alone = solve(&one, solvers[s]); /* all copies are on one host */
            for (int is_joining = 0; is_joining < 2; is_joining++) {
                setup(&p, 12, hosts, EXPERTS_MAX, 2, hosts);
                if (is_joining) { /* nodes 0..12/hosts-1 are the first host's */
                    for (uint32_t n = 0; n < 12; n++) {
                        snprintf(p.hosts[n], sizeof(p.hosts[n]), "h%u", n / (12 / hosts));
                    }
                    adopt(&p, alone);
                }
                ep_placement *placement = solve(&p, solvers[s]);
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
        setup(&p, 8, 2, EXPERTS_MAX, 2, 5);
        p.input.spare_copies = 6;
        ep_placement *placement = solve(&p, solvers[s]);
        for (uint32_t l = 0; l < LAYERS; l++) {
            for (uint32_t e = 0; e < EXPERTS_MAX; e++) {
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
        strcpy(p.hosts[0], "a");
        strcpy(p.hosts[1], "a");
        strcpy(p.hosts[2], "b");
        /* of 8 experts on the other host, two of each layer */
        p.nodes[2].capacity_experts = LAYERS * 2;
        ep_placement *placement = solve(&p, solvers[s]);
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
