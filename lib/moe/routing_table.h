/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A routing table says which nodes hold which expert. It is immutable: built once, shared by
 * reference count, replaced as a whole by a newer epoch. Its arrays are dense, so a look-up is one
 * index.
 *
 * Threads    read from any thread; ref and unref are atomic. Building is single-threaded.
 */
#ifndef EP_MOE_ROUTING_TABLE_H
#define EP_MOE_ROUTING_TABLE_H

#include "base/host.h"
#include "moe/flow.h"

#define EP_MODEL_NAME_BYTES 128
#define EP_VERSION_BYTES 32
#define EP_URL_BYTES 256
#define EP_NUMERICS_BYTES 96
#define EP_NODES_MAX 4096
#define EP_MODELS_MAX 256         /* (model, version) pairs in one table */
#define EP_TABLE_LAYERS_MAX 65536 /* layers of all models in one table */
#define EP_POLICY_BYTES 32

typedef struct ep_epoch {
    uint64_t term;
    uint64_t number;
} ep_epoch;

/* <0, 0, >0 as a is older than, equal to, newer than b. */
int ep_epoch_compare(ep_epoch a, ep_epoch b);

typedef struct ep_routing_node {
    uint32_t node_id; /* given by the coordinator; a name keeps its id */
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    /* nodes with equal names share a machine; "": unknown, shares with none */
    char host[EP_HOST_BYTES];
} ep_routing_node;

typedef struct ep_routing_model {
    char name[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
    /* calls that name no version get this one; at most one per name. Not in the checksum */
    bool is_default;
    uint32_t numerics_count;
    char (*numerics)[EP_NUMERICS_BYTES]; /* [numerics_count] distinct ids in use */
    /* [nodes_count] index into numerics; UINT32_MAX: node does not serve this model */
    uint32_t *numerics_of_node;
} ep_routing_model;

typedef struct ep_routing_layer {
    uint32_t model_index;
    ep_layer_shape shape;
    uint32_t *offsets; /* [E+S+1] */
    uint32_t *copies;  /* node indexes of expert i: copies[offsets[i] .. offsets[i+1]) */
} ep_routing_layer;

/* What operators set for all callers. */
typedef struct ep_caller_policy {
    uint64_t revision; /* grows with each change; 0: nothing was ever set */
    bool has_hedge_permille;
    uint32_t hedge_permille;
    /* mode auto: with fewer nodes that serve the model, every batch is prefill; 0: not set */
    uint32_t decode_nodes_min;
} ep_caller_policy;

#define EP_HEDGE_PERMILLE_MAX 1000

typedef struct ep_routing_table {
    uint32_t refs; /* private */
    ep_epoch epoch;
    char policy[EP_POLICY_BYTES];
    uint32_t decode_tokens_max; /* mode auto: T up to this is decode */
    /* not in the checksum, so that builds which do not know this field get the same one */
    ep_caller_policy caller_policy;
    uint32_t nodes_count;
    ep_routing_node *nodes;
    uint32_t models_count;
    ep_routing_model *models;
    uint32_t layers_count;
    ep_routing_layer *layers; /* ascending (model_index, shape.layer) */
} ep_routing_table;

/* An empty table with room for these counts; every nested array is NULL. Errors: NO_MEMORY,
 * INVALID_ARGUMENT (limits). */
ep_err ep_routing_table_create(uint32_t nodes_count, uint32_t models_count, uint32_t layers_count,
                               ep_routing_table **out_table);
/* Gives model `index` its name, its version and room for numerics ids; allocates numerics_of_node,
 * which says "not served" everywhere. Errors: INVALID_ARGUMENT (a name too long), NO_MEMORY. */
ep_err ep_routing_table_model_init(ep_routing_table *table, uint32_t index, const char *name,
                                   const char *version, uint32_t numerics_count);
/* Gives layer `index` its shape, and allocates offsets and copies_total copies. */
ep_err ep_routing_table_layer_init(ep_routing_table *table, uint32_t index, uint32_t model_index,
                                   const ep_layer_shape *shape, uint32_t copies_total);
/* Checks every number of a layer's shape. Errors: INVALID_ARGUMENT naming the field, value and
 * allowed range. */
ep_err ep_layer_shape_check(const ep_layer_shape *shape, ep_error *out_error);
/* Checks everything that a table from the wire or a file may have wrong: names, ranges, ascending
 * offsets, node indexes, duplicate copies on one node, copies on a node that does not serve the
 * model, order of layers. An expert without copies is valid. Every nested array must be present
 * (numerics_of_node may be NULL). Errors: INVALID_ARGUMENT naming model, layer, expert, value;
 * NO_MEMORY. */
ep_err ep_routing_table_check(const ep_routing_table *table, ep_error *out_error);
ep_routing_table *ep_routing_table_ref(ep_routing_table *table);
void ep_routing_table_unref(ep_routing_table *table);

/* version NULL or "": the last version listed under that name. The order is that of registration
 * and says nothing of age, so callers that act for somebody refuse an unnamed version when there
 * are several. NULL when absent; out_index may be NULL. */
const ep_routing_model *ep_routing_table_find_model(const ep_routing_table *table, const char *name,
                                                    const char *version, uint32_t *out_index);
const ep_routing_layer *ep_routing_table_find_layer(const ep_routing_table *table,
                                                    uint32_t model_index, uint32_t layer);
/* 64-bit digest of the content (FNV-1a in a canonical order); equal tables have equal checksums.
 * Detects damage, not manipulation. */
uint64_t ep_routing_table_checksum(const ep_routing_table *table);
/* Digest of caller_policy and of the table's checksum, so another table's policy does not match. */
uint64_t ep_routing_table_policy_checksum(const ep_routing_table *table);
/* Digest of decode_nodes_min and of the policy's checksum; separate, so that builds which do not
 * know this field can check the policy. */
uint64_t ep_routing_table_mode_checksum(const ep_routing_table *table);
/* Number of nodes that serve the model. */
uint32_t ep_routing_table_count_nodes(const ep_routing_table *table, uint32_t model_index);

#endif
