/* SPDX-License-Identifier: Apache-2.0 */
/* A model of the cluster as a placement problem. Private to the state (state_private.h). */
#ifndef EP_COORDINATOR_STATE_PROBLEM_H
#define EP_COORDINATOR_STATE_PROBLEM_H

#include "coordinator/state_private.h"
#include "placement/placement.h"

/* The solver's input, and the cluster's layer and node for each of its indexes. */
typedef struct cluster_problem {
    uint32_t nodes_count;
    ep_placement_node *nodes;
    uint32_t *node_of;        /* solver node -> cluster node */
    uint32_t *solver_node_of; /* cluster node -> solver node, or EP_PLACEMENT_NODE_GONE */
    uint32_t layers_count;
    ep_placement_layer *layers;
    uint32_t *layer_of;   /* solver layer -> cluster layer */
    const char *numerics; /* of all nodes; borrowed from a cluster node; NULL: any */
} cluster_problem;

/* False: no memory; call fini even then. */
bool ep_state_problem_init(const ep_coordinator_state *cluster, uint32_t model_index,
                           cluster_problem *out_problem);
void ep_state_problem_fini(cluster_problem *problem);
/* Input that borrows the problem and allows no moves for balance. */
ep_placement_input ep_state_problem_input(const ep_coordinator_state *cluster,
                                          const cluster_problem *problem);

/* The planned copies of a layer: [cluster->nodes_count] rows of words, a bit for each expert. */
typedef struct cluster_rows {
    const uint64_t *wanted;
    size_t words;
} cluster_rows;

/* An observer of a placement, layer by layer, before it takes effect. */
typedef struct cluster_place_watch {
    bool is_dry;     /* it will not take effect */
    bool is_cut;     /* a solver reached its limit of work */
    bool has_failed; /* see has returned false: it is not called again, but placement goes on */
    bool (*see)(void *arg, const cluster_problem *problem, uint32_t layer,
                const cluster_rows *rows); /* layer: of the problem */
    void *arg;
} cluster_place_watch;

/* After the first placement: places anew, with as many moves for balance as help. *out_note: why a
 * model or an expert could not be placed as wanted; code EP_OK: all were. */
void ep_state_place_seen(ep_coordinator_state *cluster, cluster_place_watch *watch,
                         ep_error *out_note);

#endif
