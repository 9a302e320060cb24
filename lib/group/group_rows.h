/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where rows go, and their layout in frames. A batch here is one rank's tokens for a dispatch or
 * combine: K routed slots per token and, with shared-expert ranks, S more. Slot number = t * slots
 * per token + k.
 *
 * Frame bodies (after header and record; little endian; parts at multiples of 64 bytes; n rows, L
 * local experts of the receiver):
 *     dispatch   counts u32 [L] | tokens u32 [n] | slots u32 [n] | scales f32 [n] if quantised |
 *                weights f32 [n] if sent | rows
 *     combine    n u64 | tokens u32 [n] | slots u32 [n] | rows. With expand_idx, instead of token
 *                and slot: the row's number among those of its source and local expert, and that
 *                expert
 *
 * Threads    pure.
 */
#ifndef EP_GROUP_ROWS_H
#define EP_GROUP_ROWS_H

#include "group/group_layout.h"
#include "moe/batch.h"

/* ---- checks that need data ---- */

/*
 * Checks every id and every mask entry; the batch needs no further check. call: profile,
 * duplicates, special experts. *out_has_inactive: some token or slot is masked. Errors:
 * INVALID_ARGUMENT naming token, slot, value, allowed range.
 */
ep_err ep_group_batch_check(const ep_group_call *call, const ep_batch *batch,
                            const ep_layer_shape *shape, bool *out_has_inactive,
                            ep_error *out_error);

/* ---- sorting ---- */

/*
 * Sorts the slots that travel by bucket, then by slot number. offsets [buckets+1]: bucket b is
 * order[offsets[b] .. offsets[b+1]). order needs room for tokens * slots per token.
 */
void ep_group_sort(const ep_batch *batch, const ep_layer_shape *shape,
                   const ep_group_layout *layout, uint32_t local_rank, uint32_t *offsets,
                   uint32_t *order);

/* Writes expand_idx, i32 [T*K], from the sorted batch: for each routed slot that travels its number
 * within its bucket, for others 0. */
void ep_group_write_index(const ep_batch *batch, const ep_group_layout *layout,
                          uint32_t slots_per_token, const uint32_t *offsets, const uint32_t *order,
                          int32_t *out_index);
/* Compares expand_idx with a batch that is not sorted yet; counts: scratch [buckets]. Errors:
 * INVALID_ARGUMENT naming the first entry with a wrong number. */
ep_err ep_group_check_index(const ep_batch *batch, const ep_layer_shape *shape,
                            const ep_group_layout *layout, const int32_t *index, uint32_t *counts,
                            ep_error *out_error);

/* ---- dispatch frames ---- */

typedef struct ep_group_dispatch_parts {
    size_t tokens; /* byte offsets in the body; counts are at 0 */
    size_t slots;
    size_t scales;
    size_t weights;
    size_t rows;
    size_t bytes;
} ep_group_dispatch_parts;

/* rows <= INT32_MAX, row_bytes <= 2^30. */
ep_group_dispatch_parts ep_group_dispatch_parts_of(uint32_t local_experts, uint32_t rows,
                                                   size_t row_bytes, bool quantised, bool weights);

/* Turns tokens into rows. */
typedef struct ep_group_packer {
    const ep_batch *batch;
    uint32_t slots_per_token;
    uint32_t shared_ranks; /* lower buckets are those of shared experts */
    size_t row_bytes;      /* H elements of x's type, or of i8 */
    bool quantise;         /* as the batch's dispatch_quant says */
} ep_group_packer;

/* The weight that is sent for a slot; 0 for shared experts. */
static inline float ep_group_slot_weight(const ep_batch *batch, uint32_t token, uint32_t slot)
{
    return slot < batch->top_k ? ep_batch_scale(batch, token, slot) : 0.0f;
}

/* Where the rows of a packer go, one entry per row; scales only with quantise; weights may be
 * NULL. */
typedef struct ep_group_row_out {
    uint8_t *rows;
    int64_t stride_bytes;
    float *scales;
    float *weights;
    uint32_t *tokens; /* NULL, like slots: not wanted */
    uint32_t *slots;
} ep_group_row_out;

/* Writes the rows of slots order[0..count), all of one bucket. */
void ep_group_pack(const ep_group_packer *packer, uint32_t bucket, const uint32_t *order,
                   uint32_t count, const ep_group_row_out *out);

/* ---- combine frames ---- */

typedef struct ep_group_combine_parts {
    size_t tokens;
    size_t slots;
    size_t rows;
    size_t bytes;
} ep_group_combine_parts;

/* With comm_quant_mode 2 a row is H int8, padding to a multiple of 4 bytes, ceil(H/8) scales of the
 * rows' type, and padding. */
static inline size_t ep_group_quant_scales_offset(uint32_t hidden)
{
    return ((size_t)hidden + 3) & ~(size_t)3;
}
size_t ep_group_quant_row_bytes(uint32_t hidden, ep_dtype dtype);

ep_group_combine_parts ep_group_combine_parts_of(uint32_t rows, size_t row_bytes);

/* True when slot k of a token travels to this rank (active routed and shared slots). */
bool ep_group_slot_is_from(const ep_batch *batch, const ep_layer_shape *shape,
                           const ep_group_layout *layout, uint32_t local_rank, uint32_t token,
                           uint32_t slot, uint32_t rank);

#endif
