/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A routing table with the peers of its nodes, and the nodes that this client may use: those with
 * the pinned numerics id. Immutable; a call holds one during a round of sending.
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
    uint32_t *groups; /* [nodes_count] first node of the same host (moe/host_plan.h) */
    bool has_groups;  /* some host has more than one node */
    /* [models_count][nodes_count] 1: serves the model with the pinned numerics id */
    uint8_t *allowed;
    /* [models_count] "": any id, or none chosen yet, and then no node is allowed. The texts live as
     * long as the cluster */
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

/* Takes ownership of the table in any case; peers and allowed are empty. Errors: NO_MEMORY. */
ep_err ep_view_create(ep_routing_table *taken_table, ep_view **out_view);
ep_view *ep_view_ref(ep_view *view);
void ep_view_unref(ep_view *view);

/* version "" or NULL: the model's default or only version. Errors: NOT_FOUND, listing what the
 * table has; INVALID_ARGUMENT, listing the versions, when one must be named. */
ep_err ep_view_find(ep_view *view, const char *model, const char *version, uint32_t layer,
                    ep_view_layer *out_found, ep_error *out_error);
/* Whether a node serves the model with the pinned id, or nothing is pinned yet. If not, *out_error
 * names the pinned and the existing ids. */
bool ep_view_has_numerics(const ep_view *view, uint32_t model_index, ep_error *out_error);

/* Fills former from the view before this one, before this one is shared. */
void ep_view_note_former(ep_view *view, const ep_view *old);
/* Node index of the last owner of an expert that has no copy now; UINT32_MAX: not known. */
uint32_t ep_view_former_owner(const ep_view *view, uint32_t layer_index, uint32_t expert);

static inline bool ep_view_allows(const ep_view *view, uint32_t model_index, uint32_t node)
{
    return view->allowed[(size_t)model_index * view->table->nodes_count + node] != 0;
}

#endif
