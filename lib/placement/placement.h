/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which node holds which expert: one model's layers on the nodes that can load it. Every solver
 * takes the same input and gives the same kind of result; the caller turns it into a routing table.
 * Pure, like lib/moe.
 *
 * Experts    table indexes: [0,E) routed, [E,E+S) shared. Nodes are indexes into input->nodes.
 * Promise    never two copies of an expert on one node; any number of nodes and experts; a node may
 *            get none. Unless a map says otherwise, an expert's copies are on as many hosts as
 *            there are, up to `copies`, where these have room: this comes before equal counts.
 * Ownership  the input is borrowed for the call; a result is freed with ep_placement_destroy.
 * Threads    pure; any thread.
 */
#ifndef EP_PLACEMENT_PLACEMENT_H
#define EP_PLACEMENT_PLACEMENT_H

#include "moe/routing_table.h"
#include "placement/expert_map.h"

#define EP_PLACEMENT_NODE_GONE UINT32_MAX
/* The most that ep_placement_balanced handles: experts of all layers x nodes. 61 layers of 512
 * experts on 1024 nodes are less. */
#define EP_PLACEMENT_CELLS_MAX (UINT64_C(1) << 25)

typedef struct ep_placement_node {
    uint32_t node_id;
    const char *name;
    uint32_t capacity_experts; /* copies of experts, all layers together; 0: no limit */
    uint64_t capacity_bytes;   /* bytes of their weights; 0: no limit */
    /* relative to the other nodes; 0 counts as 1. ep_placement_balanced only */
    double speed;
    const char *host; /* nodes of one host fail together; NULL or "": a host of its own */
} ep_placement_node;

typedef struct ep_placement_layer {
    ep_layer_shape shape;
    uint64_t expert_bytes; /* weights of one expert; 0: not counted */
    /* [E+S+1] what nodes hold now, in the form of a routing table; NULL: nothing */
    const uint32_t *owned_offsets;
    const uint32_t *owned; /* node indexes of this input; EP_PLACEMENT_NODE_GONE is skipped */
    /* [E] load of each routed expert, any unit; NULL: all equal. ep_placement_balanced only */
    const double *heat;
} ep_placement_layer;

typedef struct ep_placement_input {
    uint32_t nodes_count;
    const ep_placement_node *nodes;
    uint32_t layers_count;
    const ep_placement_layer *layers; /* ascending shape.layer */
    uint32_t copies;                  /* wanted per expert, >= 1; at most one per node is placed */
    /* further copies for the hottest experts of each layer. ep_placement_balanced only */
    uint32_t spare_copies;
    /* how many copies may move only for balance; moves to other hosts are not limited */
    uint32_t moves_max;
} ep_placement_input;

typedef struct ep_placed_layer {
    uint32_t layer;
    uint32_t experts;  /* E + S */
    uint32_t *offsets; /* [experts+1] */
    uint32_t *copies;  /* node indexes; copies that existed before come first within an expert */
    /* Only from ep_placement_balanced, in heat per speed: the busiest node's time; the time if all
     * nodes were equally busy; the time that no placement beats. */
    double busiest;
    double mean;
    double bound;
} ep_placed_layer;

/* The result with figures of its quality. */
typedef struct ep_placement {
    uint32_t layers_count;
    ep_placed_layer *layers;
    uint32_t copies_total;
    uint32_t copies_added;   /* not owned before: to be loaded */
    uint32_t copies_dropped; /* owned before by a node that still exists, no longer wanted */
    uint32_t copies_missing; /* wanted, but no node had room */
    uint64_t bytes_added;
    /* ep_placement_balanced reached its limit of work: helpful exchanges may be left */
    bool is_cut;
    uint32_t node_copies_max; /* copies on the fullest node, all layers */
    uint32_t node_copies_min;
} ep_placement;

/*
 * Equal counts. What nodes hold stays; a surplus is removed from the fullest nodes first. An expert
 * that lacks copies goes to the node with the fewest experts of that layer; of equals, the one with
 * the fewest experts in common with the expert's other holders (so that a lost node's work goes to
 * all others); then with the fewest experts of all layers; then the lowest index. First copies are
 * placed before second ones. With moves_max > 0, copies then move from the fullest to the emptiest
 * node of a layer until they differ by at most one.
 * Errors: INVALID_ARGUMENT (names the field), RESOURCE_EXHAUSTED naming layer and expert when a
 * first copy fits nowhere, NO_MEMORY.
 */
ep_err ep_placement_uniform(const ep_placement_input *input, ep_placement **out_placement,
                            ep_error *out_error);

/*
 * Places routed experts as an expert map says. Shared experts, which maps do not list, are placed
 * as by ep_placement_uniform. Layer i of the map is the i-th layer of the input (the i-th MoE layer
 * of the model). Device d is node node_of_device[d] or, when that is NULL, the d-th node by name;
 * node_of_device has ep_expert_map_devices_max(map) entries. owned is used for the result's figures
 * and for shared experts.
 * Errors: INVALID_ARGUMENT naming file, layer, device, value, allowed range; RESOURCE_EXHAUSTED
 * naming a node without room; NO_MEMORY.
 */
ep_err ep_placement_static(const ep_placement_input *input, const ep_expert_map *map,
                           const uint32_t *node_of_device, ep_placement **out_placement,
                           ep_error *out_error);

/*
 * Makes the busiest node of each layer as little busy as possible, where copies of an expert share
 * its load by their nodes' speeds. Every expert gets `copies`, the hottest ones also the spare
 * copies. Nodes get copies as evenly as their capacity allows. A layer of which nothing is held yet
 * is placed within 1.001 of the bound where such a placement is found. What nodes hold stays,
 * except up to moves_max copies of all layers together, which are loaded elsewhere until the
 * busiest node is within 1.05 of the bound, the most helpful first (balance.h). With moves_max
 * below UINT32_MAX this begins only above 1.10, so that the same heat, or heat with a little noise,
 * moves nothing. Where a layer cannot get its part of the room, or layers x experts x nodes exceed
 * EP_PLACEMENT_CELLS_MAX, ep_placement_uniform decides.
 * Errors: as ep_placement_uniform.
 */
ep_err ep_placement_balanced(const ep_placement_input *input, ep_placement **out_placement,
                             ep_error *out_error);

void ep_placement_destroy(ep_placement *placement);

/* As in ep_placed_layer. */
typedef struct ep_layer_balance {
    double busiest;
    double mean;
    double bound;
} ep_layer_balance;

/*
 * The figures of any placement of input->layers[layer]: offsets [E+S+1] and copies, which are nodes
 * of the input, each once per expert. The bound assumes at least the copies that input asks for,
 * and ignores how much room nodes have. All 0 when an expert has no copy. Errors: NO_MEMORY.
 */
ep_err ep_placement_judge(const ep_placement_input *input, uint32_t layer, const uint32_t *offsets,
                          const uint32_t *copies, ep_layer_balance *out_balance);

#endif
