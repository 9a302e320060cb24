/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which experts of a node shall be in memory when not all fit: measured heat, who goes, who comes
 * ahead of time. Pure.
 *
 * A visit is one request's use of one layer: the set of its distinct experts. Of every expert the
 * chance to be in the next visit of its layer is kept, as a mean over the visits with decay, in a
 * few profiles: loads come back (a caller's kind of text, a time of day), and with them their hot
 * experts in all layers. Which profile the present load is like is judged by how well each
 * foretells what is used; a load that none foretells begins another one. How often an expert is in
 * two visits of a layer one after the other is measured too. Heat = chance by the present profile,
 * more for those just used.
 *
 * Victim: the resident expert with the least heat per byte. Prefetch: the hottest absent one of the
 * layers that come next, when it is hotter by a margin than the expert that would go. Layers are
 * visited in an order, which is learned: so a prefetch may take the place of an expert whose
 * layer's turn is far off and that can come back before it. In this way the memory of all layers
 * serves, while there is room on the way to it, the ones whose turn is next. Where visits keep no
 * order (many callers at different layers), heat alone decides.
 *
 * Ownership  none beyond its own memory.
 * Threads    none: the caller orders the calls.
 */
#ifndef EP_MOE_EXPERT_HEAT_H
#define EP_MOE_EXPERT_HEAT_H

#include "base/error.h"

#define EP_HEAT_PROFILES 8

typedef struct ep_expert_heat ep_expert_heat;

/* ABSENT may come ahead of time; BARRED may not (not placed here, failed, on its way). */
typedef enum ep_heat_place { EP_HEAT_BARRED, EP_HEAT_ABSENT, EP_HEAT_RESIDENT } ep_heat_place;

typedef struct ep_heat_choice {
    uint32_t layer;
    uint32_t expert;
    float heat; /* per byte of the largest expert */
} ep_heat_choice;

/* Errors: NO_MEMORY. */
ep_err ep_expert_heat_create(ep_expert_heat **out_heat);
void ep_expert_heat_destroy(ep_expert_heat *heat); /* NULL allowed */
/* Layers count up from 0. All experts begin BARRED. bytes: of one expert, about. Errors:
 * NO_MEMORY. */
ep_err ep_expert_heat_add_layer(ep_expert_heat *heat, uint32_t experts, uint64_t bytes);

/* Distinct experts of one visit, ascending; rows: how many of its rows each takes, NULL: one. */
void ep_expert_heat_visit(ep_expert_heat *heat, uint32_t layer, const uint32_t *experts,
                          const uint32_t *rows, uint32_t count);
void ep_expert_heat_set_place(ep_expert_heat *heat, uint32_t layer, uint32_t expert,
                              ep_heat_place place);
/* Chance to be used in the layer's next visit, 0..1. */
float ep_expert_heat_of(const ep_expert_heat *heat, uint32_t layer, uint32_t expert);

/* The resident expert to let go; is_ahead: for a prefetch. may_go says whether it can (NULL: all
 * can). False: none can. */
bool ep_expert_heat_victim(ep_expert_heat *heat, bool is_ahead,
                           bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg,
                           ep_heat_choice *out_victim);
/*
 * The absent expert to load ahead of time after the last visit. lead: the load ends before so many
 * more visits have come, at least 1. has_room: nobody has to go for it. False: none is worth it.
 */
bool ep_expert_heat_prefetch(ep_expert_heat *heat, uint32_t lead, bool has_room,
                             bool (*may_go)(void *arg, uint32_t layer, uint32_t expert), void *arg,
                             ep_heat_choice *out_choice);

#endif
