/* SPDX-License-Identifier: Apache-2.0 */
/* One element in, one element out: widening to f32 and the one rounding at the end, shared by all forms of
 * the family. */
#ifndef EP_KERNELS_FFN_ELEMENT_H
#define EP_KERNELS_FFN_ELEMENT_H

#include <stdint.h>
#include <string.h>

#include "base/numeric.h"
#include "expertd/tensor.h"
#include "kernels/expert_ffn.h"

#define EP_FFN_NAN_BF16 0x7fc0u
#define EP_FFN_NAN_F16 0x7e00u
#define EP_FFN_NAN_F32 0x7fc00000u

static inline uint16_t ep_ffn_read_u16(const void *base, size_t index)
{
    uint16_t u;
    memcpy(&u, (const uint8_t *)base + index * sizeof(u), sizeof(u));
    return u;
}

/* base[index] of a float type, any alignment. */
static inline float ep_ffn_read_float(const void *base, ep_dtype dtype, size_t index)
{
    if (dtype == EP_DTYPE_BF16) {
        return ep_bf16_to_f32(ep_ffn_read_u16(base, index));
    }
    if (dtype == EP_DTYPE_F16) {
        return ep_f16_to_f32(ep_ffn_read_u16(base, index));
    }
    float x;
    memcpy(&x, (const uint8_t *)base + index * sizeof(x), sizeof(x));
    return x;
}

static inline float ep_ffn_read_i8(const void *base, float scale, size_t index)
{
    return (float)((const int8_t *)base)[index] * scale;
}

static inline float ep_ffn_read_f8(const void *base, const float *scales, size_t index)
{
    return ep_f8e4m3_to_f32(((const uint8_t *)base)[index]) * scales[index / EP_FFN_F8_BLOCK];
}

/* As ep_f32_to_bf16 but for NaN, in a form compilers turn into vector code: every output passes through here.
 */
static inline uint16_t ep_ffn_round_bf16(float y)
{
    uint32_t u = ep_f32_bits(y);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)(y != y ? EP_FFN_NAN_BF16 : rounded);
}

static inline uint16_t ep_ffn_round_f16(float y)
{
    return y != y ? EP_FFN_NAN_F16 : ep_f32_to_f16(y);
}

static inline float ep_ffn_round_f32(float y)
{
    return y != y ? ep_f32_from_bits(EP_FFN_NAN_F32) : y;
}

/* out[index] = y, rounded once; out is aligned to its element. */
static inline void ep_ffn_write(void *out, ep_dtype dtype, size_t index, float y)
{
    if (dtype == EP_DTYPE_BF16) {
        ((uint16_t *)out)[index] = ep_ffn_round_bf16(y);
    } else if (dtype == EP_DTYPE_F16) {
        ((uint16_t *)out)[index] = ep_ffn_round_f16(y);
    } else {
        ((float *)out)[index] = ep_ffn_round_f32(y);
    }
}

#endif
