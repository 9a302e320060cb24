/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups a request's slots by expert. Clients send them sorted, and then nothing is copied.
 * Unsorted slots are sorted here, stably, so that no peer can cause a job per slot. Pure.
 */
#ifndef EP_EXPERTD_SLOT_GROUPS_H
#define EP_EXPERTD_SLOT_GROUPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire/forward_codec.h"

typedef struct ep_slot_shape {
    bool is_sorted;
    uint32_t experts_max; /* upper bound of distinct experts; exact when sorted */
    uint32_t works_max;   /* upper bound of groups of at most rows_max slots; exact when sorted */
} ep_slot_shape;

/* One pass over the slots. */
void ep_slot_shape_of(const ep_wire_slot *slots, uint32_t count, uint32_t experts_total,
                      uint32_t rows_max, ep_slot_shape *out_shape);
/* out_order[count]: slot numbers by ascending expert, slots of one expert in their order. counts:
 * scratch [experts_total + 1]. */
void ep_slot_order(const ep_wire_slot *slots, uint32_t count, uint32_t experts_total,
                   uint32_t *counts, uint32_t *out_order);

#endif
