/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a batch, sorts its slots, packs its rows. */
#include "group/group_rows.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/float_env.h"
#include "moe/quantize.h"

#define PART_ALIGN 64
#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

/* ---- checks ---- */

static ep_err check_token_mask(const ep_group_call *call, const ep_batch *batch,
                               bool *out_has_inactive, ep_error *out_error)
{
    bool ended = false;
    for (uint32_t t = 0; t < batch->tokens; t++) {
        uint8_t entry = batch->mask_tokens[t];
        if (entry > 1) {
            return BAD("x_active_mask is %u at token %" PRIu32 ": allowed 0 or 1", entry, t);
        }
        if (entry == 1 && ended && call->profile != EP_GROUP_NATIVE) {
            return BAD("x_active_mask is true at token %" PRIu32
                       " after a false one: allowed all true entries before the false ones",
                       t);
        }
        ended = ended || entry == 0;
    }
    *out_has_inactive = ended;
    return EP_OK;
}

static ep_err check_slot_mask(const ep_batch *batch, bool *out_has_inactive, ep_error *out_error)
{
    for (uint32_t t = 0; t < batch->tokens; t++) {
        const uint8_t *entries = ep_rows_at(&batch->mask_slots, t);
        for (uint32_t k = 0; k < batch->top_k; k++) {
            if (entries[k] > 1) {
                return BAD("x_active_mask is %u at token %" PRIu32 ", slot %" PRIu32
                           ": allowed 0 or 1",
                           entries[k], t, k);
            }
            *out_has_inactive = *out_has_inactive || entries[k] == 0;
        }
    }
    return EP_OK;
}

static bool is_masked(const ep_batch *batch, uint32_t token, uint32_t slot)
{
    return batch->mask_slots.data != NULL &&
           ((const uint8_t *)ep_rows_at(&batch->mask_slots, token))[slot] == 0;
}

/* The vendor's rule: ids of special experts must differ, too. */
static ep_err check_all_differ(const ep_batch *batch, uint32_t token, ep_error *out_error)
{
    for (uint32_t k = 1; k < batch->top_k && ep_batch_token_active(batch, token); k++) {
        int64_t id = ep_batch_id(batch, token, k);
        for (uint32_t j = 0; j < k && !is_masked(batch, token, k); j++) {
            if (ep_batch_id(batch, token, j) == id && !is_masked(batch, token, j)) {
                return BAD("expert_ids is %" PRId64 " at token %" PRIu32 ", slots %" PRIu32
                           " and %" PRIu32 ": a token's experts must differ, special ones too",
                           id, token, j, k);
            }
        }
    }
    return EP_OK;
}

static ep_err check_duplicates(const ep_batch *batch, const ep_layer_shape *shape, uint32_t token,
                               ep_error *out_error)
{
    uint32_t expert;
    uint32_t slots[2];
    if (ep_batch_duplicate(batch, shape, token, &expert, slots)) {
        return BAD("expert_ids is %" PRIu32 " at token %" PRIu32 ", slots %" PRIu32 " and %" PRIu32
                   ": a token's experts must differ unless allow_duplicates is set",
                   expert, token, slots[0], slots[1]);
    }
    return EP_OK;
}

static ep_err check_token_ids(const ep_group_call *call, const ep_batch *batch,
                              const ep_layer_shape *shape, uint32_t token, ep_error *out_error)
{
    int64_t total = ep_batch_ids_total(batch, shape);
    bool sentinels = call->profile == EP_GROUP_NATIVE;
    for (uint32_t k = 0; k < batch->top_k; k++) {
        int64_t id = ep_batch_id(batch, token, k);
        if (id >= shape->experts && id - shape->experts < batch->special.first_gap) {
            return BAD("expert_ids is %" PRId64 " at token %" PRIu32 ", slot %" PRIu32
                       ": elastic_info took away the experts from %" PRIu32 " to %" PRIu32,
                       id, token, k, shape->experts, shape->experts + batch->special.first_gap - 1);
        }
        if (id < 0 ? !(sentinels && id == -1) : id >= total && !(sentinels && id == total)) {
            return BAD("expert_ids is %" PRId64 " at token %" PRIu32 ", slot %" PRIu32
                       ": allowed 0..%" PRId64 "%s",
                       id, token, k, total - 1,
                       sentinels ? ", or -1 or the number of experts for none" : "");
        }
    }
    return EP_OK;
}

ep_err ep_group_batch_check(const ep_group_call *call, const ep_batch *batch,
                            const ep_layer_shape *shape, bool *out_has_inactive,
                            ep_error *out_error)
{
    ep_err err = EP_OK;
    *out_has_inactive = false;
    if (batch->mask_tokens != NULL) {
        err = check_token_mask(call, batch, out_has_inactive, out_error);
    } else if (batch->mask_slots.data != NULL) {
        err = check_slot_mask(batch, out_has_inactive, out_error);
    }
    for (uint32_t t = 0; t < batch->tokens && err == EP_OK; t++) {
        err = check_token_ids(call, batch, shape, t, out_error);
        if (err == EP_OK && call->profile != EP_GROUP_NATIVE) {
            err = check_all_differ(batch, t, out_error);
        } else if (err == EP_OK && call->allow_duplicates == 0) {
            err = check_duplicates(batch, shape, t, out_error);
        }
    }
    return err;
}

/* ---- sorting ---- */

/* Bucket of a slot; EP_NO_EXPERT: it does not travel. */
static uint32_t slot_bucket(const ep_batch *batch, const ep_layer_shape *shape,
                            const ep_group_layout *layout, uint32_t local_rank, uint32_t token,
                            uint32_t slot)
{
    uint32_t expert;
    ep_slot_kind kind = ep_batch_slot(batch, shape, token, slot, &expert);
    if (kind == EP_SLOT_ROUTED) {
        return layout->shared_ranks + expert;
    }
    return kind == EP_SLOT_SHARED
               ? ep_group_shared_rank(layout, expert - shape->experts, local_rank)
               : EP_NO_EXPERT;
}

void ep_group_sort(const ep_batch *batch, const ep_layer_shape *shape,
                   const ep_group_layout *layout, uint32_t local_rank, uint32_t *offsets,
                   uint32_t *order)
{
    uint32_t buckets = ep_group_buckets(layout);
    uint32_t slots = ep_batch_slots_per_token(batch, shape);
    memset(offsets, 0, (size_t)(buckets + 1) * sizeof(*offsets));
    for (uint32_t t = 0; t < batch->tokens; t++) {
        for (uint32_t k = 0; k < slots; k++) {
            uint32_t bucket = slot_bucket(batch, shape, layout, local_rank, t, k);
            if (bucket != EP_NO_EXPERT) {
                offsets[bucket]++;
            }
        }
    }
    uint32_t end = 0;
    /* ends of the buckets; filling from the end turns them into begins */
    for (uint32_t b = 0; b <= buckets; b++) {
        end += offsets[b];
        offsets[b] = end;
    }
    for (uint32_t t = batch->tokens; t-- > 0;) {
        for (uint32_t k = slots; k-- > 0;) {
            uint32_t bucket = slot_bucket(batch, shape, layout, local_rank, t, k);
            if (bucket != EP_NO_EXPERT) {
                order[--offsets[bucket]] = t * slots + k;
            }
        }
    }
}

/* ---- expand_idx ---- */

/* Index of a sorted slot's entry; shared experts' slots have none. */
static size_t index_at(const ep_batch *batch, uint32_t slots_per_token, uint32_t number)
{
    return (size_t)(number / slots_per_token) * batch->top_k + number % slots_per_token;
}

void ep_group_write_index(const ep_batch *batch, const ep_group_layout *layout,
                          uint32_t slots_per_token, const uint32_t *offsets, const uint32_t *order,
                          int32_t *out_index)
{
    for (size_t i = 0; i < (size_t)batch->tokens * batch->top_k; i++) {
        out_index[i] = 0;
    }
    for (uint32_t b = layout->shared_ranks; b < ep_group_buckets(layout); b++) {
        for (uint32_t i = offsets[b]; i < offsets[b + 1]; i++) {
            out_index[index_at(batch, slots_per_token, order[i])] = (int32_t)(i - offsets[b]);
        }
    }
}

ep_err ep_group_check_index(const ep_batch *batch, const ep_layer_shape *shape,
                            const ep_group_layout *layout, const int32_t *index, uint32_t *counts,
                            ep_error *out_error)
{
    memset(counts, 0, (size_t)ep_group_buckets(layout) * sizeof(*counts));
    for (uint32_t t = 0; t < batch->tokens; t++) {
        for (uint32_t k = 0; k < batch->top_k; k++) {
            uint32_t expert;
            const size_t at = (size_t)t * batch->top_k + k;
            const bool travels = ep_batch_slot(batch, shape, t, k, &expert) == EP_SLOT_ROUTED;
            const uint32_t wanted = travels ? counts[layout->shared_ranks + expert]++ : 0;
            if (index[at] != (int32_t)wanted) {
                return BAD("expand_idx[%zu] is %" PRId32 ": allowed %" PRIu32
                           ", as a dispatch writes it for these expert_ids and x_active_mask",
                           at, index[at], wanted);
            }
        }
    }
    return EP_OK;
}

/* ---- dispatch ---- */

static size_t part_after(size_t offset, size_t bytes)
{
    return ep_align_up(offset + bytes, PART_ALIGN);
}

ep_group_dispatch_parts ep_group_dispatch_parts_of(uint32_t local_experts, uint32_t rows,
                                                   size_t row_bytes, bool quantised, bool weights)
{
    size_t array = (size_t)rows * sizeof(uint32_t);
    ep_group_dispatch_parts parts;
    parts.tokens = part_after(0, (size_t)local_experts * sizeof(uint32_t));
    parts.slots = part_after(parts.tokens, array);
    parts.scales = part_after(parts.slots, array);
    parts.weights = part_after(parts.scales, quantised ? array : 0);
    parts.rows = part_after(parts.weights, weights ? array : 0);
    parts.bytes = parts.rows + (size_t)rows * row_bytes;
    return parts;
}

static EP_FLOAT_WORK void pack_rows(const ep_group_packer *packer, uint32_t bucket,
                                    const uint32_t *order, uint32_t count,
                                    const ep_group_row_out *out)
{
    const ep_batch *batch = packer->batch;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t token = order[i] / packer->slots_per_token;
        uint32_t slot = order[i] % packer->slots_per_token;
        uint8_t *row = out->rows + (int64_t)i * out->stride_bytes;
        /* applies the batch's quantisation and NaN policy */
        ep_batch_send_row(batch, token, slot, bucket - packer->shared_ranks, row,
                          packer->quantise ? &out->scales[i] : NULL);
        if (out->weights != NULL) {
            out->weights[i] = ep_group_slot_weight(batch, token, slot);
        }
        if (out->tokens != NULL) {
            out->tokens[i] = token;
            out->slots[i] = slot;
        }
    }
}

void ep_group_pack(const ep_group_packer *packer, uint32_t bucket, const uint32_t *order,
                   uint32_t count, const ep_group_row_out *out)
{
    EP_ASSERT(packer->quantise == (packer->batch->dispatch_quant == EP_DISPATCH_INT8));
    const ep_float_env env = ep_float_env_begin();
    pack_rows(packer, bucket, order, count, out);
    ep_float_env_end(env);
}

/* ---- combine ---- */

size_t ep_group_quant_row_bytes(uint32_t hidden, ep_dtype dtype)
{
    return ep_group_quant_scales_offset(hidden) +
           ep_align_up(ep_quant_blocks(hidden, EP_QUANT_BLOCK_I8) * ep_dtype_bytes(dtype), 4);
}

ep_group_combine_parts ep_group_combine_parts_of(uint32_t rows, size_t row_bytes)
{
    size_t array = (size_t)rows * sizeof(uint32_t);
    ep_group_combine_parts parts;
    parts.tokens = part_after(0, sizeof(uint64_t));
    parts.slots = part_after(parts.tokens, array);
    parts.rows = part_after(parts.slots, array);
    parts.bytes = parts.rows + (size_t)rows * row_bytes;
    return parts;
}

bool ep_group_slot_is_from(const ep_batch *batch, const ep_layer_shape *shape,
                           const ep_group_layout *layout, uint32_t local_rank, uint32_t token,
                           uint32_t slot, uint32_t rank)
{
    uint32_t bucket = slot_bucket(batch, shape, layout, local_rank, token, slot);
    return bucket != EP_NO_EXPERT && ep_group_bucket_rank(layout, bucket) == rank;
}
