/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numerics family `w4a8`, for mxfp4, int4-g32, int4-g32-f16 and q4_k: inputs are rounded to int8
 * per group of 32 columns, and integer sums are exact. The shapes and calls are those of family
 * `portable` (expert_ffn.h). The differences:
 *
 *   x       is widened, scaled and weighted in f32 as in `portable`. Then each group of 32 columns
 *           of a row (the last may be shorter) becomes int8: s = max |x| / 127, rounded; q = x / s,
 *           rounded, then to the nearest integer, ties to even, within +-127; s = 0: all q are 0.
 *           If a value of the group is not finite, s is NaN and all q are 0.
 *   dot     codes are integers w: int4 -8..7, mxfp4 twice the value of e2m1, -12..12, q4_k 0..15.
 *           Their scale S is the format's; for mxfp4 half of it (also the denormals 2^-127 and
 *           2^-128; code 255: NaN). Groups ascending, total from +0:
 *           total = fma((sum of w q to f32) * s, S, total), the product rounded; the sum is exact.
 *           For q4_k with the offset O:
 *           t = fma((sum of w q to f32), S, (O / 8, rounded) * (-8 sum of q to f32)), the product
 *           rounded; total = fma(t, s, total). Denormals are kept.
 *   h       biases and the activation are computed in f32 as in `portable`, then h becomes int8 in
 *           groups of 32 like x.
 *   shared  the shared expert's own gate is the f32 chain of `portable` over x before it became
 *           int8.
 *   y       is multiplied, rounded once to out_dtype and written as in `portable`, with the same
 *           rule for NaN.
 * Weights of other formats are computed with family `bf16dp` if it supports them, else `portable`.
 *
 * The functions here are these rules for scalars; the plain kernel and the reference use them.
 * Inline, so that each kernel's file compiles them with its own instruction set flags.
 */
#ifndef EP_KERNELS_FFN_W4A8_H
#define EP_KERNELS_FFN_W4A8_H

#include "kernels/ffn_kernel.h"
#include "kernels/ffn_widen.h"

/* the line of a group's scale; it follows a line for each quad */
#define EP_FFN_W4A8_SCALE_LINE 8u
#define EP_FFN_W4A8_START_LINE 9u
/* The codes of 64 outputs and 32 columns: [4 pairs of quads][64][4]. */
#define EP_FFN_W4A8_CODE_BYTES (EP_MX_GROUP * EP_FFN_PANEL / 2u)
#define EP_FFN_W4A8_PAIR_BYTES (EP_FFN_W4A8_CODE_BYTES / 4u)

/* The scale of mxfp4, for codes that are twice as large. */
static inline float ep_ffn_w4a8_e8m0(uint8_t code)
{
    return code == 255 ? NAN : ep_ffn_read_e8m0(code) * 0.5f;
}

/* A 4-bit code as an integer. */
static inline int8_t ep_ffn_w4a8_integer(ep_weight_format format, uint32_t code)
{
    static const int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return format == EP_WEIGHTS_MXFP4  ? e2m1[code & 15u]
           : format == EP_WEIGHTS_Q4_K ? (int8_t)(code & 15u)
                                       : (int8_t)((int)(code & 15u) - 8);
}

/* Scale of output o of a panel's group; scales follow the codes. Not for formats with offsets. */
static inline float ep_ffn_w4a8_scale(ep_weight_format format, const uint8_t *scales, uint32_t o)
{
    return format == EP_WEIGHTS_MXFP4
               ? ep_ffn_w4a8_e8m0(scales[o])
               : ep_ffn_read_scale(ep_weight_format_scales(format), scales, o);
}

/* Adds the sum of a group. */
static inline float ep_ffn_w4a8_add_group(float total, int32_t sum, float input_scale,
                                          float weight_scale)
{
    const float scaled = (float)sum * input_scale;
    return fmaf(scaled, weight_scale, total);
}

/* The same for q4_k. eighth: of the offset; start: -8 times the sum of the group's inputs. */
static inline float ep_ffn_w4a8_add_q4_k(float total, int32_t sum, int32_t start, float input_scale,
                                         float weight_scale, float eighth)
{
    const float less = eighth * (float)start;
    const float scaled = fmaf((float)sum, weight_scale, less);
    return fmaf(scaled, input_scale, total);
}

/* The lines of a group for one row: int8 of x, zeros after n, scale, -8 times their sum. n:
 * 1..32. */
static inline void ep_ffn_w4a8_round(const float *x, uint32_t n, uint32_t words[EP_FFN_W4A8_LINES])
{
    int8_t codes[EP_MX_GROUP] = {0};
    uint32_t magnitude = 0;
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t m = ep_f32_bits(x[i]) & 0x7fffffffu;
        magnitude = m > magnitude ? m : magnitude;
    }
    const float scale = ep_ffn_int8_scale(magnitude);
    for (uint32_t i = 0; i < n; i++) {
        codes[i] = ep_ffn_int8_round(x[i], scale);
        sum += codes[i];
    }
    memcpy(words, codes, sizeof(codes));
    words[EP_FFN_W4A8_SCALE_LINE] = ep_f32_bits(scale);
    words[EP_FFN_W4A8_START_LINE] = (uint32_t)(-8 * sum);
}

/* Writes n inputs of row r of a chunk to the lines of their group, which begin at a. */
static inline void ep_ffn_w4a8_lay_group(const float *x, uint32_t n, uint32_t rows, uint32_t r,
                                         float *a)
{
    uint32_t words[EP_FFN_W4A8_LINES];
    ep_ffn_w4a8_round(x, n, words);
    for (uint32_t i = 0; i < EP_FFN_W4A8_LINES; i++) {
        memcpy(a + (size_t)i * rows + r, &words[i], sizeof(words[i]));
    }
}

/* ep_ffn_kernel.pack_rows. */
static inline void ep_ffn_w4a8_pack_rows(const ep_ffn_batch *batch, uint32_t first_row,
                                         uint32_t rows, uint32_t hidden, float *a)
{
    float wide[EP_MX_GROUP];
    for (uint32_t k = 0; k < hidden; k += EP_MX_GROUP, a += (size_t)EP_FFN_W4A8_LINES * rows) {
        const uint32_t n = hidden - k < EP_MX_GROUP ? hidden - k : EP_MX_GROUP;
        for (uint32_t r = 0; r < rows; r++) {
            ep_ffn_widen(batch, &batch->rows[first_row + r], k, n, wide);
            ep_ffn_w4a8_lay_group(wide, n, rows, r, a);
        }
    }
}

/* ep_ffn_kernel.lay. A panel begins at a multiple of 32 inner values, so its groups are whole
 * groups of the row. */
static inline void ep_ffn_w4a8_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    for (uint32_t k = 0; k < count; k += EP_MX_GROUP, a += (size_t)EP_FFN_W4A8_LINES * rows) {
        const uint32_t n = count - k < EP_MX_GROUP ? count - k : EP_MX_GROUP;
        for (uint32_t r = 0; r < rows; r++) {
            ep_ffn_w4a8_lay_group(h + (size_t)r * EP_FFN_PANEL + k, n, rows, r, a);
        }
    }
}

#endif
