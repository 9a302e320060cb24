/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert's gated feed-forward block on a group of token rows, numerics family `portable`:
 *     out = (silu(x * gate^T) .* (x * up^T)) * down^T
 *
 * Rules of the family, which every form of it repeats bit for bit:
 *   inputs are widened to f32 first (i8: q * x_scale, rounded; f8e4m3: its value times its block's scale,
 * rounded); weight_on_input: x[i] * input_weight,
 * rounded; each dot product is one f32 chain of fused multiply-adds in ascending index, from +0; silu(g) * u
 * stays f32; a shared expert's own gate multiplies y by sigmoid(dot(shared_gate, x)), rounded; y is rounded
 * once to out_dtype. A NaN is written as the one positive quiet NaN without payload (7fc0, 7e00, 7fc00000):
 *   which of two NaNs an adder passes on differs between compilers and processors, and bits may not.
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

#include "expertd/tensor.h"

#define EP_FFN_F8_BLOCK 128 /* elements of an f8e4m3 row that share a scale */

/* One expert as it stands in a checkpoint: row-major matrices, any alignment. */
typedef struct ep_ffn_source {
    uint32_t hidden;            /* H >= 1 */
    uint32_t inner;             /* I >= 1 */
    ep_dtype dtype;             /* bf16, f16 or f32 */
    const void *gate;           /* [I,H] */
    const void *up;             /* [I,H] */
    const void *down;           /* [H,I] */
    ep_dtype shared_gate_dtype; /* bf16, f16 or f32; looked at when shared_gate is set */
    const void *shared_gate;    /* [H], a shared expert's own gate; NULL none */
} ep_ffn_source;

/* One row: its own addresses, so rows of many callers ride one pass over the weights. */
typedef struct ep_ffn_row {
    const void *x;      /* [H] of x_dtype, any alignment */
    float x_scale;      /* x is i8: x[i] * x_scale; else ignored */
    const float *x_scales; /* x is f8e4m3: x[i] * x_scales[i / EP_FFN_F8_BLOCK], host memory; else ignored */
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

/* Floats of scratch that ep_ffn_reference needs: one widened row and one inner row. */
static inline size_t ep_ffn_reference_scratch_floats(uint32_t hidden, uint32_t inner)
{
    return (size_t)hidden + inner;
}

/* The family in plain loops: the judge of every other form. scratch: see above, not shared with another call.
 */
void ep_ffn_reference(const ep_ffn_source *source, const ep_ffn_batch *batch, float *scratch);

#endif
