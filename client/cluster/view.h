/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One routing table with the peers behind its node indexes, and which of them this client may use:
 * nodes whose numerics id is the pinned one. Immutable; calls hold one for each round of sending.
 *
 * Threads  read from any; ref and unref are atomic.
 */
#ifndef EP_CLIENT_VIEW_H
#define EP_CLIENT_VIEW_H

#include "moe/routing_table.h"
#include "cluster/peers.h"

/* An expert without a copy, and the node of this table that held it last. */
typedef struct ep_former_owner {
    uint32_t layer_index; /* in the table */
    uint32_t expert;
    uint32_t node;
} ep_former_owner;

typedef struct ep_view {
    uint32_t refs;
    ep_routing_table *table;
    ep_peer **peers;  /* [nodes_count] */
    uint32_t *groups; /* [nodes_count] nodes of one host (moe/host_plan.h) */
    bool has_groups;  /* of more than one node */
    /* [models_count][nodes_count] 1: serves the model with the pinned numerics id */
    uint8_t *allowed;
    /* [models_count] "" any, or none chosen yet: then no node is allowed. The texts live as long as
     * the cluster */
    const char **pins;
    uint32_t former_count;
    ep_former_owner *former;
} ep_view;

/* A layer in a view. */
typedef struct ep_view_layer {
    ep_view *view;
    uint32_t model_index;
    const ep_routing_layer *layer;
} ep_view_layer;

/* Takes table in every case; peers and allowed are empty. Errors: NO_MEMORY. */
ep_err ep_view_create(ep_routing_table *taken_table, ep_view **out_view);
ep_view *ep_view_ref(ep_view *view);
void ep_view_unref(ep_view *view);

/* version "" or NULL: the model's default, or the only one there is. Errors: NOT_FOUND naming what
 * the table has; INVALID_ARGUMENT naming the versions when there are several without a default and
 * none is asked for. */
ep_err ep_view_find(ep_view *view, const char *model, const char *version, uint32_t layer,
                    ep_view_layer *out_found, ep_error *out_error);
/* True when some node serves the model with the pinned id, or nothing is pinned yet. If not,
 * *out_error names the pinned id and those there are. */
bool ep_view_has_numerics(const ep_view *view, uint32_t model_index, ep_error *out_error);

/* Fills former from the view before this one. Before the view is shared. */
void ep_view_note_former(ep_view *view, const ep_view *old);
/* Node index of the last owner of an expert that has no copy now; UINT32_MAX: not known. */
uint32_t ep_view_former_owner(const ep_view *view, uint32_t layer_index, uint32_t expert);

static inline bool ep_view_allows(const ep_view *view, uint32_t model_index, uint32_t node)
{
    return view->allowed[(size_t)model_index * view->table->nodes_count + node] != 0;
}

#endif
