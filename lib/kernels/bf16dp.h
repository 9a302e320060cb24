/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numerics family `bf16dp`, for bf16 weights and codes with groups: dot products over pairs of
 * bf16, as the vector instructions for bf16 compute them (x86: vdpbf16ps). The shapes and calls are
 * those of family `portable` (expert_ffn.h). The differences:
 *
 *   x       is widened, scaled and weighted in f32 as in `portable`, then narrowed to bf16 (below).
 *   dot     one f32 chain from +0 over k in ascending pairs: acc = step(acc, pair of weights, pair
 *           of inputs). A step is two fused multiply-adds, first the odd member of the pair, then
 *           the even one. Before each, denormal inputs and a denormal acc become zeros of their
 *           sign. A result that rounds to less than 2^-126 (rounded as if there were no smallest
 *           exponent) becomes a zero of its sign. Rounding is to nearest even. For an odd length,
 *           the last pair gets a member of +0 on both sides.
 *   mx      a weight is code times scale as a bf16: an infinity beyond bf16's range, +0 below its
 *           normal numbers and for both codes of zero. So an expert has the bits of the same expert
 *           widened to bf16.
 *   groups  in all other formats: such a chain, from +0, over the codes' exact values (all are
 *           normal numbers of bf16) for each group of columns; then total = total + chain * scale,
 *           the product rounded and the sum rounded, total from +0, groups ascending. With offsets
 *           also sum = such a chain with weights of 1, and after each group total = total - sum *
 *           offset, rounded likewise. These steps keep denormal scales, products and sums; a chain
 *           is never denormal.
 *   h       biases and the activation are computed in f32 as in `portable`, then h is narrowed to
 *           bf16.
 *   shared  the shared expert's own gate is the f32 chain of `portable` over the narrowed x.
 *   y       is multiplied, rounded once to out_dtype and written as in `portable`, with the same
 *           rule for NaN.
 * Narrowing to bf16 first turns a denormal into a zero of its sign, then rounds to nearest even.
 * Weights of other formats are computed with family `portable`.
 *
 * The functions here are these rules for scalars; the plain kernel and the reference use them.
 */
#ifndef EP_KERNELS_BF16DP_H
#define EP_KERNELS_BF16DP_H

#include <float.h>

#include "base/numeric.h"
#include "kernels/expert_ffn.h"

/* Results below this, before rounding, round to less than 2^-126 with 24 bits of precision. */
#define EP_BF16DP_TINY (0x1p-126 * (1.0 - 0x1p-25))

/* A denormal becomes a zero of its sign. */
static inline float ep_bf16dp_flush(float x)
{
    uint32_t u = ep_f32_bits(x);
    return (u & 0x7f800000u) == 0 ? ep_f32_from_bits(u & 0x80000000u) : x;
}

static inline uint16_t ep_bf16dp_narrow(float x)
{
    return ep_f32_to_bf16(ep_bf16dp_flush(x));
}

/*
 * One of the two fused multiply-adds. The sum in double shows whether the exact result is tiny: the
 * product is exact in double, and near 2^-126 so is the sum, because c is not denormal and a
 * product has 16 bits.
 */
static inline float ep_bf16dp_fma(float a, float b, float c)
{
    const float flushed = ep_bf16dp_flush(c);
    const float result = fmaf(ep_bf16dp_flush(a), ep_bf16dp_flush(b), flushed);
    if (!(fabsf(result) <= FLT_MIN)) {
        return result;
    }
    const double exact = (double)ep_bf16dp_flush(a) * (double)ep_bf16dp_flush(b) + (double)flushed;
    return fabs(exact) < EP_BF16DP_TINY ? copysignf(0.0f, result) : result;
}

/* One pair; w and x hold the even member in the low half. */
static inline float ep_bf16dp_step(float acc, uint32_t w, uint32_t x)
{
    acc = ep_bf16dp_fma(ep_f32_from_bits(w & 0xffff0000u), ep_f32_from_bits(x & 0xffff0000u), acc);
    return ep_bf16dp_fma(ep_f32_from_bits(w << 16), ep_f32_from_bits(x << 16), acc);
}

/* A weight of an MX format from its code's value and its scale. The product is exact except at the
 * ends of the range. */
static inline uint16_t ep_bf16dp_mx_weight(float code, float scale)
{
    const uint16_t weight = ep_bf16dp_narrow(code * scale);
    return (weight & 0x7fffu) == 0 ? 0 : weight;
}

/* Adds the chain of a group. */
static inline float ep_bf16dp_add_group(float total, float chain, float scale)
{
    const float scaled = chain * scale;
    return total + scaled;
}

/* Subtracts the offset of a group. */
static inline float ep_bf16dp_take_offset(float total, float sum, float offset)
{
    const float scaled = sum * offset;
    return total - scaled;
}

#endif
