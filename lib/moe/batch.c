/* SPDX-License-Identifier: Apache-2.0 */
/* The kind of each slot of a checked batch: masks, marks, sentinels and the ranges of special
 * experts. And the only place where a batch's values are checked; everything below trusts it. */
#include "moe/batch.h"

#include <inttypes.h>
#include <math.h>

#include "base/numeric.h"
#include "moe/convert.h"

#define CHUNK 256

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static bool rows_flag(const ep_rows *rows, uint32_t token, uint32_t slot)
{
    return ((const uint8_t *)ep_rows_at(rows, token))[slot] != 0;
}

bool ep_batch_token_active(const ep_batch *batch, uint32_t token)
{
    if (batch->mask_tokens != NULL && batch->mask_tokens[token] == 0) {
        return false;
    }
    bool is_active = batch->mask_slots.data == NULL || batch->top_k == 0;
    for (uint32_t k = 0; !is_active && k < batch->top_k; k++) {
        is_active = rows_flag(&batch->mask_slots, token, k);
    }
    return is_active;
}

ep_slot_kind ep_batch_slot(const ep_batch *batch, const ep_layer_shape *shape, uint32_t token,
                           uint32_t slot, uint32_t *out_expert)
{
    *out_expert = EP_NO_EXPERT;
    if (slot >= batch->top_k) {
        /* An uncombined result has no place for shared rows. */
        if (batch->form == EP_RESULT_UNCOMBINED || !ep_batch_token_active(batch, token)) {
            return EP_SLOT_INACTIVE;
        }
        *out_expert = shape->experts + (slot - batch->top_k);
        return EP_SLOT_SHARED;
    }
    if (batch->mask_tokens != NULL && batch->mask_tokens[token] == 0) {
        return EP_SLOT_INACTIVE;
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
    /* Zero experts and sentinels contribute nothing, so they are inactive too. */
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

/* ---- checks ---- */

static ep_err check_counts(const ep_batch *batch, const ep_layer_shape *shape, ep_error *out_error)
{
    uint32_t per_token = ep_batch_slots_per_token(batch, shape);
    if (per_token == 0) {
        return BAD("batch has 0 slots per token: allowed 1..%d", EP_TOP_K_MAX);
    }
    /* a prepared batch may meet a newer routing table */
    if (batch->hidden != shape->hidden) {
        return BAD("batch has rows of %" PRIu32 " elements, layer %" PRIu32 " has %" PRIu32,
                   batch->hidden, shape->layer, shape->hidden);
    }
    if ((uint64_t)batch->tokens * per_token > UINT32_MAX) {
        return BAD("batch has %" PRIu32 " tokens of %" PRIu32 " slots: allowed up to %" PRIu32
                   " slots in all",
                   batch->tokens, per_token, UINT32_MAX);
    }
    if (ep_batch_ids_total(batch, shape) > INT32_MAX) {
        return BAD("layer %" PRIu32 " has %" PRId64
                   " experts with the special ones: allowed up to %d",
                   shape->layer, ep_batch_ids_total(batch, shape), INT32_MAX);
    }
    return EP_OK;
}

static ep_err check_slot_flags(const char *what, const ep_batch *batch, const ep_rows *rows,
                               ep_error *out_error)
{
    for (uint32_t t = 0; t < batch->tokens; t++) {
        const uint8_t *flags = ep_rows_at(rows, t);
        for (uint32_t k = 0; k < batch->top_k; k++) {
            if (flags[k] > 1) {
                return BAD("%s is %u at token %" PRIu32 ", slot %" PRIu32 ": allowed 0 or 1", what,
                           flags[k], t, k);
            }
        }
    }
    return EP_OK;
}

static ep_err check_masks(const ep_batch *batch, ep_error *out_error)
{
    ep_err err = EP_OK;
    if (batch->mask_tokens != NULL) {
        for (uint32_t t = 0; t < batch->tokens; t++) {
            if (batch->mask_tokens[t] > 1) {
                return BAD("token mask is %u at token %" PRIu32 ": allowed 0 or 1",
                           batch->mask_tokens[t], t);
            }
        }
    }
    if (batch->mask_slots.data != NULL) {
        err = check_slot_flags("slot mask", batch, &batch->mask_slots, out_error);
    }
    if (err == EP_OK && batch->form == EP_RESULT_PARTIAL && batch->partial_slots.data != NULL) {
        err = check_slot_flags("mark of a partial result", batch, &batch->partial_slots, out_error);
    }
    return err;
}

static ep_err check_ids(const ep_batch *batch, const ep_layer_shape *shape, ep_error *out_error)
{
    const int64_t total = ep_batch_ids_total(batch, shape);
    uint32_t expert;
    uint32_t slots[2];
    for (uint32_t t = 0; t < batch->tokens; t++) {
        for (uint32_t k = 0; k < batch->top_k; k++) {
            int64_t id = ep_batch_id(batch, t, k);
            if (id < -1 || id > total) {
                return BAD("expert id %" PRId64 " at token %" PRIu32 ", slot %" PRIu32
                           ": allowed 0..%" PRId64 ", or -1 or %" PRId64 " for an inactive slot",
                           id, t, k, total - 1, total);
            }
        }
        if (!batch->allow_duplicates && ep_batch_duplicate(batch, shape, t, &expert, slots)) {
            return BAD("expert id %" PRIu32 " at token %" PRIu32 ", slot %" PRIu32
                       " is already in slot %" PRIu32
                       ": a token's experts must differ, unless allow_duplicates "
                       "(--allow-duplicates) is set",
                       expert, t, slots[1], slots[0]);
        }
    }
    return EP_OK;
}

/* Checks one element after the policy: a replaced one is finite and no larger than the row's
 * others. */
static ep_err check_element(const ep_batch *batch, uint32_t token, size_t element, float value,
                            ep_error *out_error)
{
    if (!isfinite(value)) {
        if (batch->nan_policy == EP_NAN_REJECT) {
            return BAD("x is %g at token %" PRIu32 ", element %zu: only finite values are allowed",
                       (double)value, token, element);
        }
        if (batch->nan_policy != EP_NAN_PASS) {
            return EP_OK;
        }
    }
    if (batch->x_abs_max > 0.0f && fabsf(value) > batch->x_abs_max) {
        return BAD("x is %g at token %" PRIu32 ", element %zu: allowed %g..%g", (double)value,
                   token, element, -(double)batch->x_abs_max, (double)batch->x_abs_max);
    }
    return EP_OK;
}

static ep_err check_row(const ep_batch *batch, uint32_t token, ep_error *out_error)
{
    const uint8_t *row = ep_rows_at(&batch->x, token);
    bool is_i8 = batch->x.dtype == EP_DTYPE_I8;
    size_t element = ep_dtype_bytes(batch->x.dtype);
    float wide[CHUNK];

    if (is_i8 && !isfinite(batch->x_scales[token]) && batch->nan_policy == EP_NAN_REJECT) {
        return BAD("row scale of x is %g at token %" PRIu32 ": only finite values are allowed",
                   (double)batch->x_scales[token], token);
    }
    for (size_t done = 0; done < batch->hidden; done += CHUNK) {
        size_t n = batch->hidden - done < CHUNK ? batch->hidden - done : CHUNK;
        if (!is_i8) {
            ep_row_widen(row + done * element, batch->x.dtype, n, wide);
        }
        for (size_t i = 0; i < n; i++) {
            float value =
                is_i8 ? (float)((const int8_t *)row)[done + i] * batch->x_scales[token] : wide[i];
            ep_err err = check_element(batch, token, done + i, value, out_error);
            if (err != EP_OK) {
                return err;
            }
        }
    }
    return EP_OK;
}

/* Rows of inactive tokens are never read, so they may hold anything. */
ep_err ep_batch_check_x(const ep_batch *batch, ep_error *out_error)
{
    if (batch->nan_policy != EP_NAN_REJECT && !(batch->x_abs_max > 0.0f)) {
        return EP_OK;
    }
    for (uint32_t t = 0; t < batch->tokens; t++) {
        if (ep_batch_token_active(batch, t)) {
            ep_err err = check_row(batch, t, out_error);
            if (err != EP_OK) {
                return err;
            }
        }
    }
    return EP_OK;
}

ep_err ep_batch_check(const ep_batch *batch, const ep_layer_shape *shape, ep_error *out_error)
{
    ep_err err;
    if ((err = check_counts(batch, shape, out_error)) != EP_OK ||
        (err = check_masks(batch, out_error)) != EP_OK ||
        (err = check_ids(batch, shape, out_error)) != EP_OK) {
        return err;
    }
    return ep_batch_check_x(batch, out_error);
}
