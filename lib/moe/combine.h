/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The canonical combine: acc = 0 in f32; for k = 0..K-1 in order acc = acc + scale[t,k] * row(t,k),
 * multiply and add rounded separately; then shared experts' rows in index order, unweighted; then
 * the caller's shared tensor; one round-to-nearest-even to the output type. Zero, copy and constant
 * experts are evaluated here from x. Source of the rule: the Ascend A3 combine kernel.
 *
 * Rows       rows[slot_number] points at H elements of wire_dtype (any alignment), or is NULL for
 *            slots that need none. A needed row that is NULL counts as missing and contributes
 *            nothing; callers make sure that this happens only with allow_missing. rows itself is
 *            never NULL.
 * Quantised  with EP_COMBINE_INT8 rows[slot_number] points at H int8 and row_scales[slot_number] at
 *            ceil(H/8) scales of wire_dtype (moe/quantize.h); they are widened piece by piece when
 *            they are added.
 * Special    copy and constant experts are added as f32 (w * r, not rounded to the wire type);
 *            uncombined, r is rounded to the wire type like any other row.
 * Node sum   routed and shared rows are the partial sums that ep_partials_place put there, added
 *            without a weight.
 * Input      with EP_WEIGHT_ON_INPUT routed rows are added without a weight; copy and constant rows
 *            are still multiplied by w.
 * NaN, Inf   with rows_policy zero or mean, experts' rows and rows of constant experts are repaired
 *            before they are added, to values of wire_dtype. reject changes nothing here: the
 *            caller checks beforehand (ep_combine_find_nonfinite). Not for node sums.
 * Out        combined, partial: [T,H] of out_dtype. uncombined: [T,K,H] of out_dtype, row(t,k)
 *            converted; inactive slots 0. Inactive tokens give rows of zeros. An uncombined result
 *            has no shared rows and no shared tensor of the caller.
 * Threads    pure; distinct token ranges may run at the same time.
 */
#ifndef EP_MOE_COMBINE_H
#define EP_MOE_COMBINE_H

#include "moe/batch.h"

typedef struct ep_combine_out {
    void *data;
    int64_t token_stride_bytes; /* between tokens */
    int64_t slot_stride_bytes;  /* uncombined: between slots of a token */
} ep_combine_out;

/* scratch: ep_combine_scratch_floats(hidden) floats, 64-byte aligned. */
size_t ep_combine_scratch_floats(uint32_t hidden);
/* row_scales: NULL for plain rows. */
void ep_combine(const ep_batch *batch, const ep_layer_shape *shape, const void *const *rows,
                const void *const *row_scales, uint32_t token_begin, uint32_t token_end,
                float *scratch, const ep_combine_out *out);

/* A NaN or Inf in an expert's row. */
typedef struct ep_nonfinite {
    uint32_t token;
    uint32_t slot;
    uint32_t element;
    float value;
} ep_nonfinite;

/* Finds the first one among the rows that count. rows, row_scales, scratch and the token range as
 * for ep_combine. false: there is none, and out_found is unchanged. */
bool ep_combine_find_nonfinite(const ep_batch *batch, const ep_layer_shape *shape,
                               const void *const *rows, const void *const *row_scales,
                               uint32_t token_begin, uint32_t token_end, float *scratch,
                               ep_nonfinite *out_found);

#endif
