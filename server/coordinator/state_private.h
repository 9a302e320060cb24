/* SPDX-License-Identifier: Apache-2.0 */
/* Data shared by state.c (membership), state_placement.c (who shall own what) and state_table.c (what clients see). */
#ifndef EP_COORDINATOR_STATE_PRIVATE_H
#define EP_COORDINATOR_STATE_PRIVATE_H

#include "coordinator/state.h"

typedef enum node_state { NODE_STARTING, NODE_SERVING, NODE_DRAINING, NODE_DEGRADED, NODE_SUSPECT } node_state;

/* Experts of one layer, a bit each. */
typedef struct node_layer {
    uint64_t *assigned;
    uint64_t *owned;
    bool offered;                /* the node can load this layer */
} node_layer;

typedef struct cluster_node {
    uint32_t node_id;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    node_state state;
    uint64_t incarnation;
    uint64_t last_seen_ns;
    uint64_t loaded_number;      /* assignment it has worked through; owned says what loaded */
    uint64_t rows_served;
    node_layer *layers;          /* [cluster->layers_count] */
    char (*numerics)[EP_NUMERICS_BYTES]; /* [cluster->models_count]; "" not served */
} cluster_node;

typedef struct cluster_model {
    char name[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
} cluster_model;

typedef struct cluster_layer {
    uint32_t model_index;
    ep_layer_shape shape;
    uint64_t *digests;           /* [experts] 1 << 32 | digest of the first copy seen; 0: none yet */
} cluster_layer;

struct ep_coordinator_state {
    ep_coordinator_state_config config;
    uint32_t next_node_id;
    size_t nodes_count;
    cluster_node **nodes;
    uint32_t models_count;
    cluster_model *models;
    uint32_t layers_count;
    cluster_layer *layers;       /* in order of first sight; the table sorts */
    uint64_t counter;            /* last number given, to assignments and tables alike */
    uint64_t assignment_number;
    uint64_t committed_number;   /* newest assignment that every listed node had loaded */
    bool placed_once;
    ep_routing_table *table;
    uint64_t table_checksum;
    ep_error placement_error;
    ep_error copy_error;         /* newest copy that differed from the others; code EP_OK: none */
};

static inline uint32_t layer_experts(const cluster_layer *layer)
{
    return layer->shape.experts + layer->shape.shared_experts;
}

static inline size_t layer_words(const cluster_layer *layer)
{
    return (layer_experts(layer) + 63u) / 64u;
}

static inline bool bit_get(const uint64_t *bits, uint32_t index)
{
    return (bits[index / 64] >> (index % 64)) & 1u;
}

static inline void bit_set(uint64_t *bits, uint32_t index)
{
    bits[index / 64] |= 1ull << (index % 64);
}

/* Takes part in placement: everything but draining. */
static inline bool node_can_own(const cluster_node *node)
{
    return node->state != NODE_DRAINING;
}

/* Stands in the table. */
static inline bool node_is_listed(const cluster_node *node)
{
    return node->state == NODE_STARTING || node->state == NODE_SERVING || node->state == NODE_DEGRADED;
}

/* Recomputes assignments after a change of membership; raises assignment_number when they differ. */
void cluster_place(ep_coordinator_state *cluster);
/* Rebuilds the table from what nodes own; replaces it, with a new number, when its content differs. */
void cluster_publish(ep_coordinator_state *cluster);

#endif
