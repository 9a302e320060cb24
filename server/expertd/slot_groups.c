/* SPDX-License-Identifier: Apache-2.0 */
/* Groups slots by expert: one pass shows whether they are sorted; else a counting sort follows. */
#include "expertd/slot_groups.h"

#include <string.h>

void ep_slot_shape_of(const ep_wire_slot *slots, uint32_t count, uint32_t experts_total,
                      uint32_t rows_max, ep_slot_shape *out_shape)
{
    uint32_t experts = 0;
    uint32_t works = 0;
    uint32_t run = 0;
    bool is_sorted = true;
    for (uint32_t i = 0; i < count && is_sorted; i++) {
        bool is_new = i == 0 || slots[i].expert != slots[i - 1].expert;
        is_sorted = i == 0 || slots[i].expert >= slots[i - 1].expert;
        experts += is_new;
        works += is_new || run == rows_max;
        run = is_new || run == rows_max ? 1 : run + 1;
    }
    if (!is_sorted) {
        experts = count < experts_total ? count : experts_total;
        works = experts + count / rows_max;
    }
    *out_shape =
        (ep_slot_shape){.is_sorted = is_sorted, .experts_max = experts, .works_max = works};
}

void ep_slot_order(const ep_wire_slot *slots, uint32_t count, uint32_t experts_total,
                   uint32_t *counts, uint32_t *out_order)
{
    memset(counts, 0, ((size_t)experts_total + 1) * sizeof(*counts));
    for (uint32_t i = 0; i < count; i++) {
        counts[slots[i].expert + 1]++;
    }
    for (uint32_t e = 0; e < experts_total; e++) {
        counts[e + 1] += counts[e];
    }
    for (uint32_t i = 0; i < count; i++) {
        out_order[counts[slots[i].expert]++] = i;
    }
}
