/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which experts of a node should be in memory when not all fit: measured heat, which one to evict,
 * and which one to prefetch. Pure.
 *
 * A visit is one request's use of one layer: the set of its distinct experts. For every expert the
 * chance of use in the layer's next visit is estimated by a mean over the visits, with decay. There
 * are several profiles of such means, because loads come back (a caller's kind of text, a time of
 * day), and with them their hot experts in all layers. The present profile is the one that predicts
 * use best; a load that none predicts begins a new one. How often an expert is used in two
 * consecutive visits of its layer is measured too. Heat = chance by the present profile, higher for
 * experts just used.
 *
 * Victim: the resident expert with the least heat per byte. Prefetch: the hottest absent expert of
 * the next layers, if it is hotter by a margin than the expert it would replace. The order in which
 * layers are visited is learned. So a prefetch may replace an expert whose layer is visited much
 * later and which can be loaded again by then. Where visits keep no order (many callers at
 * different layers), heat alone decides.
 *
 * Ownership  none beyond its own memory.
 * Threads    none: the caller orders the calls.
 */
#ifndef EP_MOE_EXPERT_HEAT_H
#define EP_MOE_EXPERT_HEAT_H

#include "base/error.h"

#define EP_HEAT_PROFILES 8

typedef struct ep_expert_heat ep_expert_heat;

/* ABSENT may be prefetched; BARRED may not (not placed here, failed, or being loaded). */
typedef enum ep_heat_place { EP_HEAT_BARRED, EP_HEAT_ABSENT, EP_HEAT_RESIDENT } ep_heat_place;

typedef struct ep_heat_choice {
    uint32_t layer;
    uint32_t expert;
    float heat; /* per byte of the largest expert */
} ep_heat_choice;

/* Errors: NO_MEMORY. */
ep_err ep_expert_heat_create(ep_expert_heat **out_heat);
void ep_expert_heat_destroy(ep_expert_heat *heat); /* NULL allowed */
/* Layers are numbered from 0. All experts begin BARRED. bytes: approximate size of one expert.
 * Errors: NO_MEMORY. */
ep_err ep_expert_heat_add_layer(ep_expert_heat *heat, uint32_t experts, uint64_t bytes);

/* experts: the distinct experts of one visit, ascending. rows: the rows that each of them takes;
 * NULL: one each. */
void ep_expert_heat_visit(ep_expert_heat *heat, uint32_t layer, const uint32_t *experts,
                          const uint32_t *rows, uint32_t count);
void ep_expert_heat_set_place(ep_expert_heat *heat, uint32_t layer, uint32_t expert,
                              ep_heat_place place);
/* Chance of use in the layer's next visit, 0..1. */
float ep_expert_heat_of(const ep_expert_heat *heat, uint32_t layer, uint32_t expert);

/* The resident expert to evict; is_ahead: for a prefetch. may_go says whether an expert can be
 * evicted (NULL: all can). False: none can. */
bool ep_expert_heat_victim(ep_expert_heat *heat, bool is_ahead,
                           bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg,
                           ep_heat_choice *out_victim);
/*
 * The absent expert to prefetch after the last visit. lead: the load ends before this many more
 * visits, at least 1. has_room: no expert must be evicted for it. False: none is worth it.
 */
bool ep_expert_heat_prefetch(ep_expert_heat *heat, uint32_t lead, bool has_room,
                             bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg,
                             ep_heat_choice *out_choice);

#endif
