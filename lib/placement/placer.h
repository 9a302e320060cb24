/* SPDX-License-Identifier: Apache-2.0 */
/* The board the solvers move copies on: who holds what, how full each node is; private to
 * lib/placement. */
#ifndef EP_PLACEMENT_PLACER_H
#define EP_PLACEMENT_PLACER_H

#include "placement/balance.h"
#include "placement/hosts.h"
#include "placement/placement.h"

#define EP_PLACER_NO_NODE UINT32_MAX

typedef struct {
    uint32_t experts; /* E + S */
    uint32_t *counts; /* [experts] */
    uint32_t *copies; /* [experts * width] the first counts[e] of each row are node indexes */
    uint32_t *load;   /* [nodes] experts of this layer */
} ep_placer_layer;

typedef struct {
    const ep_placement_input *input;
    uint32_t width; /* most copies an expert may have */
    ep_placer_layer *layers;
    uint32_t *total;   /* [nodes] experts of all layers */
    uint64_t *bytes;   /* [nodes] */
    uint32_t *host_of; /* [nodes] */
    ep_hosts hosts;    /* of host_of */
    /* at experts to change places with, for the sake of hosts: who solves may hold a lock */
    uint32_t looks_left;
    uint32_t *together; /* [nodes] of ep_placer_count_together */
    uint64_t rows_left; /* to look at for it; then copies go wherever there is room */
    uint32_t copies_missing;
} ep_placer;

/* Checks the input, makes an empty board. Errors: INVALID_ARGUMENT, NO_MEMORY; fini is then still
 * due. */
ep_err ep_placer_init(ep_placer *placer, const ep_placement_input *input, uint32_t width,
                      ep_error *out_error);
void ep_placer_fini(ep_placer *placer);

bool ep_placer_holds(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);
/* Held it before: moving it elsewhere means loading it again. */
bool ep_placer_was_owned(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);
bool ep_placer_has_room(const ep_placer *placer, uint32_t layer, uint32_t node);
void ep_placer_add(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);
void ep_placer_remove(ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t node);

/* As ep_hosts_allow, of the expert's copies. */
bool ep_placer_may_move(const ep_placer *placer, uint32_t layer, uint32_t expert, uint32_t from,
                        uint32_t to);
/* Moves copies of experts that are on fewer hosts than they shall be, as far as there is room, or
 * somebody to change places with. */
void ep_placer_spread(ep_placer *placer, uint32_t layer, uint32_t first);

/* Puts back what nodes hold now, at most `copies` of each expert of [first, experts): surplus goes
 * from the fullest nodes. */
ep_err ep_placer_keep_owned(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copies);
/* Gives experts of [first, experts) that have exactly copy_index copies one more, on the emptiest
 * node with room. Errors: RESOURCE_EXHAUSTED when copy_index is 0 and no node has room. */
ep_err ep_placer_fill(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copy_index,
                      ep_error *out_error);

/*
 * together[n]: experts of the layer that n holds as this node does. When a node is lost, all others
 * shall get a part of its work, and not one of them the whole. The second: its sum over the
 * expert's holders but `from`.
 */
void ep_placer_count_together(ep_placer *placer, uint32_t layer, uint32_t node);
uint32_t ep_placer_in_common(const ep_placer *placer, uint32_t layer, uint32_t expert,
                             uint32_t from);
/* The node with the fewest experts of the layer, then (if expert has copies) with the fewest in
 * common with those that hold it, then with the fewest of all layers, then the lowest index; with
 * room and, unless expert is EP_NO_EXPERT, without that expert, on a host without it while it shall
 * be on more. EP_PLACER_NO_NODE if there is none. */
uint32_t ep_placer_emptiest(ep_placer *placer, uint32_t layer, uint32_t expert);
/* Counts what experts of [first, experts) lack of `copies` copies into copies_missing. */
void ep_placer_count_missing(ep_placer *placer, uint32_t layer, uint32_t first, uint32_t copies);
/* Heat [E+S] of the layer's experts: a shared one takes every token. Without any, all are alike. */
void ep_placer_heat(const ep_placement_layer *layer, double *out_heat);
/* 0 is as the others. */
double ep_placer_speed(const ep_placement_node *node);
/* bound: ep_balance_bound without slots. The sharper one takes a millisecond of a large layer: only
 * where this one leaves a doubt. */
ep_layer_balance ep_placer_certify(const ep_balance_input *problem, double busiest, double bound);
/* The result with its certificate. */
ep_err ep_placer_finish(const ep_placer *placer, ep_placement **out_placement);

#endif
