/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert's feed-forward block on a group of token rows, numerics family `portable`:
 *     g = x * gate^T + gate_bias;  u = x * up^T + up_bias;  h = activation(g, u);
 *     out = h * down^T + down_bias
 * An activation without a gate has u alone.
 *
 * Rules of the family, which every form of it repeats bit for bit:
 *   inputs are widened to f32 first (i8: q * x_scale, rounded; f8e4m3: its value times its block's
 *   scale, rounded); weight_on_input: x[i] * input_weight, rounded;
 *   dot products
 *     bf16, f16, f32   one f32 chain of fused multiply-adds over the widened weights in ascending
 *                      index, from +0
 *     groups           such a chain, from +0, over the codes' exact values of each group of columns
 *                      (base/expert_form.h); then total = fma(group's scale, chain, total), total
 *                      from +0, groups ascending. With offsets also sum = such a chain over the
 *                      group's x with weights of 1, and total = fma(-offset, sum, total) behind
 *                      each group
 *     w8a8             a row of x (of h) becomes int8: s = max |x| / 127, rounded; q = x / s,
 *                      rounded, then to the nearest integer, ties to even, within +-127; s = 0: all
 *                      q are 0. The integer sum is exact; the result is (sum to f32 * weight scale)
 *                      * s, each rounded. A row that is not finite has s NaN
 *   a bias is added to the dot product, rounded; activations are those of ffn_activation.h, in f32;
 *   a shared expert's own gate multiplies y by sigmoid(dot(shared_gate, x)), rounded, with x before
 *   it became int8; y is rounded once to out_dtype. A NaN is written as the one positive quiet NaN
 *   without payload (7fc0, 7e00, 7fc00000): which of two NaNs an adder passes on differs between
 *   compilers and processors, and bits may not.
 *
 * Shapes     x [rows,H], gate and up [I,H], down [H,I], shared_gate [H], out [rows,H].
 * Ownership  borrows everything for the call, writes out, keeps nothing.
 * Threads    safe for distinct (out, scratch); weights may be shared. Does not block.
 */
#ifndef EP_KERNELS_EXPERT_FFN_H
#define EP_KERNELS_EXPERT_FFN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/expert_form.h"
#include "expertd/tensor.h"

/* The rule that fixes each rounding. With equal families, all kernels give equal bits. */
typedef enum ep_ffn_family {
    EP_FFN_FAMILY_PORTABLE, /* this header */
    EP_FFN_FAMILY_BF16DP,   /* bf16 weights and formats with groups: kernels/bf16dp.h */
    EP_FFN_FAMILY_BF16ODD,  /* bf16 weights only: kernels/bf16odd.h */
    EP_FFN_FAMILY_W4A8,     /* 4-bit codes, groups of 32: kernels/ffn_w4a8.h */
} ep_ffn_family;
#define EP_FFN_FAMILIES 4

/* "portable", "bf16dp", "bf16odd", "w4a8" */
static inline const char *ep_ffn_family_name(ep_ffn_family family)
{
    static const char *const names[EP_FFN_FAMILIES] = {"portable", "bf16dp", "bf16odd", "w4a8"};
    return names[family];
}

/* Whether its dot products are over pairs of bf16. */
static inline bool ep_ffn_family_has_pairs(ep_ffn_family family)
{
    return family == EP_FFN_FAMILY_BF16DP || family == EP_FFN_FAMILY_BF16ODD;
}

/* Whether the family can compute weights of this format; `portable` can compute all. An expert has
 * one family, which must have both of its formats. */
static inline bool ep_ffn_family_has(ep_ffn_family family, ep_weight_format format)
{
    switch (family) {
    case EP_FFN_FAMILY_PORTABLE:
        return true;
    case EP_FFN_FAMILY_BF16DP:
        return format == EP_WEIGHTS_BF16 || ep_weight_format_has_groups(format);
    case EP_FFN_FAMILY_W4A8:
        return format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_INT4 ||
               format == EP_WEIGHTS_INT4_F16 || format == EP_WEIGHTS_Q4_K;
    default:
        return format == EP_WEIGHTS_BF16;
    }
}

#define EP_FFN_F8_BLOCK 128 /* elements of an f8e4m3 row that share a scale */

typedef ep_expert_source ep_ffn_source;

/* One row with its own addresses, so that rows of many callers share one pass over the weights. */
typedef struct ep_ffn_row {
    const void *x; /* [H] of x_dtype, any alignment */
    float x_scale; /* x is i8: x[i] * x_scale; else ignored */
    /* x is f8e4m3: x[i] * x_scales[i / EP_FFN_F8_BLOCK], host memory; else ignored */
    const float *x_scales;
    float input_weight; /* weight_on_input: x[i] * input_weight, rounded in f32; else ignored */
    void *out;          /* [H] of out_dtype, aligned to its element, not overlapping any x */
} ep_ffn_row;

typedef struct ep_ffn_batch {
    const ep_ffn_row *rows;
    uint32_t rows_count; /* >= 1 */
    ep_dtype x_dtype;    /* bf16, f16, f32, i8 or f8e4m3 */
    ep_dtype out_dtype;  /* bf16, f16 or f32 */
    bool weight_on_input;
} ep_ffn_batch;

/* Number of groups of a row in family w4a8. */
static inline uint32_t ep_ffn_w4a8_groups(uint32_t columns)
{
    return (columns + EP_MX_GROUP - 1) / EP_MX_GROUP;
}

/* Floats of scratch for ep_ffn_reference: one widened row, one inner row, and their groups'
 * scales. */
static inline size_t ep_ffn_reference_scratch_floats(uint32_t hidden, uint32_t inner)
{
    return (size_t)hidden + inner + ep_ffn_w4a8_groups(hidden) + ep_ffn_w4a8_groups(inner);
}

/* The family in plain loops; every other form is compared with it. scratch: see above, not shared
 * with another call. */
void ep_ffn_reference(const ep_ffn_source *source, const ep_ffn_batch *batch, float *scratch);
/* The same for any family that supports source->format. */
void ep_ffn_reference_of(ep_ffn_family family, const ep_ffn_source *source,
                         const ep_ffn_batch *batch, float *scratch);

#endif
