/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Building blocks for the loops of quantised rows, without branches. Rounding to an integer is an
 * addition of 1.5 * 2^23, of which the low byte is taken. Maxima are taken of the bits of
 * magnitudes: they order like the values, and non-finite values come out largest.
 */
#ifndef EP_MOE_QUANTIZE_ELEMENT_H
#define EP_MOE_QUANTIZE_ELEMENT_H

#include <math.h>
#include <string.h>

#include "base/numeric.h"
#include "expertd/tensor.h"

#define INLINE static inline __attribute__((always_inline))
/* 1.5 * 2^23: the adder rounds to an integer, held in the low bits */
#define ROUND_MAGIC 12582912.0f
#define INFINITY_BITS 0x7f800000u

INLINE float f16_value(uint16_t h)
{
    uint32_t magnitude = h & 0x7fffu;
    float subnormal = (float)(int32_t)magnitude * 0x1p-24f;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t u = magnitude < 0x400u ? ep_f32_bits(subnormal) : normal;
    u = magnitude >= 0x7c00u ? normal + (112u << 23) : u;
    return ep_f32_from_bits(u | (uint32_t)(h & 0x8000u) << 16);
}

INLINE float element(const void *row, ep_dtype dtype, size_t i)
{
    uint16_t half;
    float value;
    if (dtype == EP_DTYPE_F32) {
        memcpy(&value, (const uint8_t *)row + sizeof(value) * i, sizeof(value));
        return value;
    }
    memcpy(&half, (const uint8_t *)row + sizeof(half) * i, sizeof(half));
    return dtype == EP_DTYPE_BF16 ? ep_bf16_to_f32(half) : f16_value(half);
}

INLINE int8_t low_byte(float rounded)
{
    return (int8_t)(uint8_t)ep_f32_bits(rounded);
}

INLINE uint32_t amax_of(const void *row, ep_dtype dtype, const float *smooth, size_t n)
{
    /* signed, since every instruction set compares signed words, and magnitudes have no sign bit */
    int32_t amax = 0;
    for (size_t i = 0; i < n; i++) {
        float value = element(row, dtype, i);
        value = smooth != NULL ? value * smooth[i] : value;
        int32_t magnitude = (int32_t)(ep_f32_bits(value) & 0x7fffffffu);
        amax = magnitude > amax ? magnitude : amax;
    }
    return (uint32_t)amax;
}

#endif
