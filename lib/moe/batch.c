/* SPDX-License-Identifier: Apache-2.0 */
/* What each slot of a checked batch is: masks, marks, sentinels and the ranges of special experts,
 * in one place. */
#include "moe/batch.h"

#include <string.h>

#include "base/numeric.h"
#include "moe/batch_ids.h"

static bool rows_flag(const ep_rows *rows, uint32_t token, uint32_t slot)
{
    return ((const uint8_t *)ep_rows_at(rows, token))[slot] != 0;
}

static bool slots_all_masked(const ep_batch *batch, uint32_t token)
{
    if (batch->mask_slots.data == NULL || batch->top_k == 0) {
        return false;
    }
    for (uint32_t k = 0; k < batch->top_k; k++) {
        if (rows_flag(&batch->mask_slots, token, k)) {
            return false;
        }
    }
    return true;
}

bool ep_batch_token_active(const ep_batch *batch, uint32_t token)
{
    if (batch->mask_tokens != NULL && batch->mask_tokens[token] == 0) {
        return false;
    }
    return !slots_all_masked(batch, token);
}

ep_slot_kind ep_batch_slot(const ep_batch *batch, const ep_layer_shape *shape, uint32_t token,
                           uint32_t slot, uint32_t *out_expert)
{
    *out_expert = EP_NO_EXPERT;
    if (batch->mask_tokens != NULL && batch->mask_tokens[token] == 0) {
        return EP_SLOT_INACTIVE;
    }
    if (slot >= batch->top_k) {
        /* An uncombined result has no place for shared rows, so they are not asked for. */
        if (batch->form == EP_RESULT_UNCOMBINED || slots_all_masked(batch, token)) {
            return EP_SLOT_INACTIVE;
        }
        *out_expert = shape->experts + (slot - batch->top_k);
        return EP_SLOT_SHARED;
    }
    if (batch->mask_slots.data != NULL && !rows_flag(&batch->mask_slots, token, slot)) {
        return EP_SLOT_INACTIVE;
    }
    if (batch->form == EP_RESULT_PARTIAL && !rows_flag(&batch->partial_slots, token, slot)) {
        return EP_SLOT_INACTIVE;
    }
    const int64_t id = ep_batch_id(batch, token, slot);
    const int64_t copies =
        (int64_t)shape->experts + batch->special.first_gap + batch->special.zero_count;
    const int64_t consts = copies + batch->special.copy_count;
    if (id >= 0 && id < shape->experts) {
        *out_expert = (uint32_t)id;
        return EP_SLOT_ROUTED;
    }
    if (id >= copies && id < consts) {
        *out_expert = (uint32_t)(id - copies);
        return EP_SLOT_COPY;
    }
    if (id >= consts && id < consts + batch->special.const_count) {
        *out_expert = (uint32_t)(id - consts);
        return EP_SLOT_CONST;
    }
    /* Zero experts and sentinels contribute nothing: inactive like any other. */
    return EP_SLOT_INACTIVE;
}

float ep_batch_scale(const ep_batch *batch, uint32_t token, uint32_t slot)
{
    const uint8_t *row = ep_rows_at(&batch->scales, token);
    if (batch->scales.dtype == EP_DTYPE_BF16) {
        uint16_t b;
        memcpy(&b, row + (size_t)slot * sizeof(b), sizeof(b));
        return ep_bf16_to_f32(b);
    }
    float scale;
    memcpy(&scale, row + (size_t)slot * sizeof(scale), sizeof(scale));
    return scale;
}

bool ep_batch_duplicate(const ep_batch *batch, const ep_layer_shape *shape, uint32_t token,
                        uint32_t *out_expert, uint32_t out_slots[2])
{
    uint32_t experts[EP_TOP_K_MAX];
    for (uint32_t k = 0; k < batch->top_k; k++) {
        if (ep_batch_slot(batch, shape, token, k, &experts[k]) != EP_SLOT_ROUTED) {
            experts[k] = EP_NO_EXPERT;
            continue;
        }
        for (uint32_t j = 0; j < k; j++) {
            if (experts[j] == experts[k]) {
                *out_expert = experts[k];
                out_slots[0] = j;
                out_slots[1] = k;
                return true;
            }
        }
    }
    return false;
}
