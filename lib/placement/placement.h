/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which node holds which expert: one model's layers spread over the nodes that can load it. Every
 * solver takes the same input and gives the same result; the caller turns it into a routing table.
 * Pure, like lib/moe.
 *
 * Experts    table indexes: [0,E) routed, [E,E+S) shared. Nodes are indexes into input->nodes.
 * Promise    never two copies of an expert on one node; any number of nodes and experts; a node may
 *            end up with none. Unless a map says otherwise, an expert's copies are on as many hosts
 *            as there are, up to `copies`, where these have room: this comes before equal counts.
 * Ownership  the input is borrowed for the call; a result is freed with ep_placement_destroy.
 * Threads    pure; any thread.
 */
#ifndef EP_PLACEMENT_PLACEMENT_H
#define EP_PLACEMENT_PLACEMENT_H

#include "moe/routing_table.h"
#include "placement/expert_map.h"

#define EP_PLACEMENT_NODE_GONE UINT32_MAX
/* Experts of all layers x nodes that ep_placement_balanced takes on: 61 layers of 512 experts on
 * 1024 nodes are less.
 */
#define EP_PLACEMENT_CELLS_MAX (UINT64_C(1) << 25)

typedef struct ep_placement_node {
    uint32_t node_id;
    const char *name;
    uint32_t capacity_experts; /* copies of experts, all layers together; 0: no limit */
    uint64_t capacity_bytes;   /* their weights; 0: no limit */
    double speed;              /* against the others; 0: 1. ep_placement_balanced only */
    const char *host;          /* nodes of one host end together; NULL or "": a host of its own */
} ep_placement_node;

typedef struct ep_placement_layer {
    ep_layer_shape shape;
    uint64_t expert_bytes; /* weights of one expert; 0: not counted */
    /* [E+S+1] what nodes hold now, as in a routing table; NULL: nothing */
    const uint32_t *owned_offsets;
    const uint32_t *owned; /* node indexes of this input; EP_PLACEMENT_NODE_GONE is skipped */
    /* [E] load of each routed expert, any unit; NULL: all alike. ep_placement_balanced only */
    const double *heat;
} ep_placement_layer;

typedef struct ep_placement_input {
    uint32_t nodes_count;
    const ep_placement_node *nodes;
    uint32_t layers_count;
    const ep_placement_layer *layers; /* ascending shape.layer */
    uint32_t copies;                  /* wanted per expert, >= 1; at most one per node is made */
    /* of each layer, beyond these, for its hottest experts. ep_placement_balanced only */
    uint32_t spare_copies;
    /* copies that may move for balance alone; to be on different hosts they move whatever it is */
    uint32_t moves_max;
} ep_placement_input;

typedef struct ep_placed_layer {
    uint32_t layer;
    uint32_t experts;  /* E + S */
    uint32_t *offsets; /* [experts+1] */
    uint32_t *copies;  /* node indexes; an expert's first copies are those that were there before */
    /* ep_placement_balanced only, in heat per speed: time of the busiest node; of all nodes, were
     * they equal; what no placement beats. */
    double busiest;
    double mean;
    double bound;
} ep_placed_layer;

/* The result with its certificate. */
typedef struct ep_placement {
    uint32_t layers_count;
    ep_placed_layer *layers;
    uint32_t copies_total;
    uint32_t copies_added;   /* not owned before: to be loaded */
    uint32_t copies_dropped; /* owned before (by a node still there), no longer wanted */
    uint32_t copies_missing; /* wanted, but no node had room */
    uint64_t bytes_added;
    /* ep_placement_balanced ended with its limit of work: exchanges that help may be left */
    bool is_cut;
    uint32_t node_copies_max; /* load of the fullest node, all layers */
    uint32_t node_copies_min;
} ep_placement;

/*
 * Equal counts: what nodes hold stays (the surplus goes, from the fullest nodes first); experts
 * that lack copies go to the node with the fewest experts of that layer, then with the fewest in
 * common with the nodes that hold the same expert (so that a lost node's work goes to all others),
 * then of all layers, then the lowest index. First copies are placed before second ones. With
 * moves_max > 0 copies then move from the fullest to the emptiest node of a layer until they differ
 * by at most one.
 * Errors: INVALID_ARGUMENT (names the field), RESOURCE_EXHAUSTED naming layer and expert when a
 * first copy fits nowhere, NO_MEMORY.
 */
ep_err ep_placement_uniform(const ep_placement_input *input, ep_placement **out_placement,
                            ep_error *out_error);

/*
 * Routed experts as an expert map says; shared experts, which maps do not list, are spread as
 * ep_placement_uniform does. Layer i of the map is the i-th layer of the input (the i-th MoE layer
 * of the model). Device d is node node_of_device[d] or, when that is NULL, the d-th node in order
 * of name; node_of_device has ep_expert_map_devices_max(map) entries. owned is used for the
 * certificate and for shared experts.
 * Errors: INVALID_ARGUMENT naming file, layer, device, value, allowed range; RESOURCE_EXHAUSTED
 * naming a node without room; NO_MEMORY.
 */
ep_err ep_placement_static(const ep_placement_input *input, const ep_expert_map *map,
                           const uint32_t *node_of_device, ep_placement **out_placement,
                           ep_error *out_error);

/*
 * So that the busiest node of each layer has as little to do as can be, when copies of an expert
 * share its load by their nodes' speeds: every expert gets `copies`, the hottest ones the spare
 * ones too. Nodes get copies as evenly as their capacity allows. A layer of which nothing is held
 * yet is placed within 1.001 of the bound where that can be found; what nodes hold stays, but up to
 * moves_max copies, all layers together, are loaded elsewhere until the busiest node is within 1.05
 * of the bound, those first that help most (balance.h). With moves_max below UINT32_MAX that begins
 * beyond 1.10 only: the same heat again, or with a little noise, moves nothing. Where room is too
 * short for every layer's part, or layers x experts x nodes are beyond EP_PLACEMENT_CELLS_MAX,
 * ep_placement_uniform decides.
 * Errors: as ep_placement_uniform.
 */
ep_err ep_placement_balanced(const ep_placement_input *input, ep_placement **out_placement,
                             ep_error *out_error);

void ep_placement_destroy(ep_placement *placement);

/* As of ep_placed_layer. */
typedef struct ep_layer_balance {
    double busiest;
    double mean;
    double bound;
} ep_layer_balance;

/*
 * The certificate of any placement of input->layers[layer]: offsets [E+S+1] and copies, nodes of
 * the input, each once. The bound counts the copies that input asks for where there are fewer, and
 * not what nodes have room for. All 0 when an expert has no copy. Errors: NO_MEMORY.
 */
ep_err ep_placement_judge(const ep_placement_input *input, uint32_t layer, const uint32_t *offsets,
                          const uint32_t *copies, ep_layer_balance *out_balance);

#endif
