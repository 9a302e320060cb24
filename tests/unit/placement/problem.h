/* SPDX-License-Identifier: Apache-2.0 */
/* A layer or a few to be placed on some nodes: what the tests of the solvers begin with. */
#ifndef EP_TEST_PLACEMENT_PROBLEM_H
#define EP_TEST_PLACEMENT_PROBLEM_H

#include "placement/placement.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "support/expect.h"

enum { NODES_MAX = 12, LAYERS_MAX = 4, EXPERTS_MAX = 64 };

typedef ep_err (*solver)(const ep_placement_input *, ep_placement **, ep_error *);

typedef struct {
    ep_placement_node nodes[NODES_MAX];
    char names[NODES_MAX][8];
    ep_placement_layer layers[LAYERS_MAX];
    double heat[LAYERS_MAX][EXPERTS_MAX];
    ep_placement_input input;
} problem;

/* Nodes "n0", "n1".., each a host of its own, with all the room they want; nothing is known of
 * heat. */
static inline void problem_init(problem *p, uint32_t nodes, uint32_t layers, uint32_t experts,
                                uint32_t copies)
{
    memset(p, 0, sizeof(*p));
    for (uint32_t n = 0; n < nodes; n++) {
        snprintf(p->names[n], sizeof(p->names[n]), "n%u", n);
        p->nodes[n] = (ep_placement_node){.node_id = n, .name = p->names[n]};
    }
    for (uint32_t l = 0; l < layers; l++) {
        p->layers[l].shape =
            (ep_layer_shape){.layer = l, .hidden = 4, .inner = 4, .experts = experts, .top_k = 2};
        p->layers[l].expert_bytes = 100;
    }
    p->input = (ep_placement_input){.nodes_count = nodes,
                                    .nodes = p->nodes,
                                    .layers_count = layers,
                                    .layers = p->layers,
                                    .copies = copies};
}

/* 1..100 for each expert, to the power. */
static inline void problem_draw_heat(problem *p, uint64_t seed, double power)
{
    for (uint32_t l = 0; l < p->input.layers_count; l++) {
        p->layers[l].heat = p->heat[l];
        for (uint32_t e = 0; e < p->layers[l].shape.experts; e++) {
            p->heat[l][e] = pow(1.0 + (double)(ep_splitmix64(&seed) % 100), power);
        }
    }
}

static inline ep_placement *problem_solve(const problem *p, solver by)
{
    ep_placement *placement = NULL;
    ep_error error = {0};
    ASSERT_OK(by(&p->input, &placement, &error), error);
    return placement;
}

/* What was placed is what nodes hold now; the arrays stay valid while it lives. */
static inline void problem_adopt(problem *p, const ep_placement *placement)
{
    for (uint32_t l = 0; l < p->input.layers_count; l++) {
        p->layers[l].owned_offsets = placement->layers[l].offsets;
        p->layers[l].owned = placement->layers[l].copies;
    }
}

#endif
