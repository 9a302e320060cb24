/* SPDX-License-Identifier: Apache-2.0 */
/* The board on which solvers move copies: who holds what, and how full nodes are. Private to
 * lib/placement. */
#ifndef EP_PLACEMENT_PLACER_H
#define EP_PLACEMENT_PLACER_H

#include "placement/balance.h"
#include "placement/hosts.h"
#include "placement/placement.h"

#define EP_PLACER_NO_NODE UINT32_MAX

typedef struct {
    uint32_t experts;         /* E + S */
    uint32_t *counts;         /* [experts] */
    uint32_t *copies;         /* [experts * width] row e begins with counts[e] node indexes */
    uint32_t *load;           /* [nodes] experts of this layer */
    ep_layer_balance balance; /* 0: not computed */
} ep_placer_layer;

typedef struct {
    const ep_placement_input *input;
    uint32_t width; /* most copies an expert may have */
    ep_placer_layer *layers;
    uint32_t *total;   /* [nodes] experts of all layers */
    uint64_t *bytes;   /* [nodes] */
    uint32_t *host_of; /* [nodes] */
    ep_hosts hosts;    /* uses host_of */
    /* how many exchange partners may still be examined for hosts' sake, since the caller may hold a
     * lock */
    uint32_t looks_left;
    uint32_t *together; /* [nodes] result of ep_placer_count_together */
    /* how many rows that may still examine; at 0, copies go wherever there is room */
    uint64_t rows_left;
    uint32_t copies_missing;
} ep_placer;

/* Checks the input and makes an empty board. Errors: INVALID_ARGUMENT, NO_MEMORY; fini must be
 * called also then. */
ep_err ep_placer_init(ep_placer *placer, const ep_placement_input *input, uint32_t width,
                      ep_error *out_error);
void ep_placer_fini(ep_placer *placer);

bool ep_placer_holds(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);
/* The node held the expert before, so moving it elsewhere means loading it again. */
bool ep_placer_was_owned(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);
bool ep_placer_has_room(const ep_placer *placer, uint32_t layer, uint32_t node);
void ep_placer_add(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);
void ep_placer_remove(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);

/* ep_hosts_allow for the expert's copies. */
bool ep_placer_may_move(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t from,
                        uint32_t to);
/* Moves copies of experts that are on fewer hosts than wanted, as far as there is room or an
 * exchange partner. */
void ep_placer_spread(ep_placer *placer, uint32_t layer, uint32_t first);

/* Puts back what nodes hold now, at most `copies` of each expert of [first, experts); a surplus is
 * removed from the fullest nodes. */
ep_err ep_placer_keep_owned(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copies);
/* Gives each expert of [first, experts) that has exactly copy_index copies one more, on the
 * emptiest node with room. Errors: RESOURCE_EXHAUSTED when copy_index is 0 and no node has room. */
ep_err ep_placer_fill(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copy_index,
                      ep_error *out_error);

/*
 * together[n]: how many experts of the layer both n and this node hold. When a node is lost, all
 * others should get part of its work, not one of them everything. The second function sums it over
 * the expert's holders except `from`.
 */
void ep_placer_count_together(ep_placer *placer, uint32_t layer, uint32_t node);
uint32_t ep_placer_in_common(const ep_placer *placer, uint32_t layer, uint32_t expert,
                             uint32_t from);
/* The node with the fewest experts of the layer; of equals, the one with the fewest experts in
 * common with the expert's holders (if it has any), then with the fewest of all layers, then the
 * lowest index. It must have room and, unless expert is EP_NO_EXPERT, not hold the expert; while
 * the expert should be on more hosts, it must be on a new one. EP_PLACER_NO_NODE if there is none.
 */
uint32_t ep_placer_emptiest(ep_placer *placer, uint32_t layer, uint32_t expert);
/* Adds to copies_missing how many of `copies` copies the experts of [first, experts) lack. */
void ep_placer_count_missing(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copies);
/* Heat [E+S] of the layer's experts; a shared one takes every token. Without heat, all are
 * equal. */
void ep_placer_heat(const ep_placement_layer *layer, double *out_heat);
/* Speed of the node; 0 counts as 1. */
double ep_placer_speed(const ep_placement_node *node);
/* bound: ep_balance_bound without slots. The tighter bound takes a millisecond for a large layer,
 * so it is computed only where this one leaves a doubt. */
ep_layer_balance ep_placer_certify(const ep_balance_input *problem, double busiest, double bound);
/* The result with figures of its quality. */
ep_err ep_placer_finish(const ep_placer *placer, ep_placement **out_placement);

#endif
