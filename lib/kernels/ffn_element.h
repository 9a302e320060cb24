/* SPDX-License-Identifier: Apache-2.0 */
/* Widens an element to f32, and rounds a result once; shared by all families and kernels. */
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

/* e8m0: 2^(code - 127); 0 is the denormal 2^-127. */
static inline float ep_ffn_read_e8m0(uint8_t code)
{
    return ep_f32_from_bits(code == 0 ? 0x00400000u : (uint32_t)code << 23);
}

/* The exact value of an f8e4m3 code of a weight. NaN codes do not occur (they would be 480). */
static inline float ep_ffn_weight_f8(uint8_t code)
{
    uint32_t bits = ((uint32_t)(int32_t)(int8_t)code << 20) & 0x87f00000u;
    return ep_f32_from_bits(bits) * 0x1p120f;
}

/* The exact value of an e2m1 code: 0 .5 1 1.5 2 3 4 6, the top bit is the sign. */
static inline float ep_ffn_weight_e2m1(uint32_t code)
{
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return values[code & 15u];
}

/* The exact value of code number i of an array of codes. */
static inline float ep_ffn_read_code(ep_weight_codes codes, const uint8_t *from, size_t i)
{
    const uint32_t nibble =
        ep_weight_codes_are_nibbles(codes) ? ((uint32_t)from[i / 2] >> (4 * (i & 1u))) & 15u : 0;
    switch (codes) {
    case EP_CODES_E2M1:
        return ep_ffn_weight_e2m1(nibble);
    case EP_CODES_INT4:
        return (float)((int)nibble - 8);
    case EP_CODES_UINT4:
        return (float)nibble;
    case EP_CODES_INT8:
        return (float)(int8_t)from[i];
    default:
        return ep_ffn_weight_f8(from[i]);
    }
}

/* The exact value of column k's code in a row of values of a format with groups. */
static inline float ep_ffn_weight_code(ep_weight_format format, const uint8_t *row, uint32_t k)
{
    return ep_ffn_read_code(ep_weight_format_codes(format), row, k);
}

/* Scale number i of an array, or part of one. */
static inline float ep_ffn_read_scale(ep_weight_scales scales, const void *from, size_t i)
{
    const uint8_t *bytes = (const uint8_t *)from;
    switch (scales) {
    case EP_SCALES_F32:
        return ep_ffn_read_float(from, EP_DTYPE_F32, i);
    case EP_SCALES_BF16:
        return ep_ffn_read_float(from, EP_DTYPE_BF16, i);
    case EP_SCALES_F16:
        return ep_ffn_read_float(from, EP_DTYPE_F16, i);
    case EP_SCALES_UINT8_PARTS:
        return (float)bytes[i];
    case EP_SCALES_INT8_PARTS:
        return (float)(int8_t)bytes[i];
    case EP_SCALES_E4M3_PARTS:
        return ep_ffn_weight_f8(bytes[i]);
    default:
        return ep_ffn_read_e8m0(bytes[i]);
    }
}

/* A two-level scale, and an offset, from their parts (base/expert_form.h). */
static inline float ep_ffn_join_offset(ep_weight_offsets offsets, float scale, uint8_t code,
                                       float factor)
{
    return offsets == EP_OFFSETS_ZERO ? scale * (float)(int8_t)code : (float)code * factor;
}

/* The scale of a row's group of columns. scales: the block of the matrix [rows,columns]. */
static inline float ep_ffn_weight_scale(ep_weight_format format, const void *scales, uint32_t rows,
                                        uint32_t columns, size_t row, uint32_t group)
{
    const uint32_t group_columns = ep_weight_group_columns(format);
    const ep_weight_scales kind = ep_weight_format_scales(format);
    if (format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8) {
        return ep_ffn_read_float(scales, EP_DTYPE_F32, row);
    }
    const size_t groups = ((size_t)columns + group_columns - 1) / group_columns;
    const size_t line = format == EP_WEIGHTS_F8_BLOCK ? row / EP_F8_BLOCK : row;
    const float scale = ep_ffn_read_scale(kind, scales, line * groups + group);
    if (!ep_weight_scales_have_levels(kind)) {
        return scale;
    }
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    const size_t blocks = ((size_t)columns + EP_SCALE_BLOCK - 1) / EP_SCALE_BLOCK;
    const uint8_t *factors = (const uint8_t *)scales + arrays.scales + arrays.offsets;
    return scale * ep_ffn_read_float(factors, EP_DTYPE_F32,
                                     row * blocks + group * group_columns / EP_SCALE_BLOCK);
}

/* The offset, likewise; only for formats with offsets. */
static inline float ep_ffn_weight_offset(ep_weight_format format, const void *scales, uint32_t rows,
                                         uint32_t columns, size_t row, uint32_t group)
{
    const uint32_t group_columns = ep_weight_group_columns(format);
    const ep_weight_offsets kind = ep_weight_format_offsets(format);
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    const size_t groups = ((size_t)columns + group_columns - 1) / group_columns;
    const size_t blocks = ((size_t)columns + EP_SCALE_BLOCK - 1) / EP_SCALE_BLOCK;
    const uint8_t *at = (const uint8_t *)scales + arrays.scales;
    const uint8_t *factors = at + arrays.offsets + arrays.scale_factors;
    const float scale = ep_ffn_weight_scale(format, scales, rows, columns, row, group);
    const float factor =
        kind == EP_OFFSETS_MINIMUM
            ? ep_ffn_read_float(factors, EP_DTYPE_F32,
                                row * blocks + group * group_columns / EP_SCALE_BLOCK)
            : 0.0f;
    return ep_ffn_join_offset(kind, scale, at[row * groups + group], factor);
}

/* The scale of a row of x in w8a8. magnitude: bits of the greatest |x|, which order like the
 * values. */
static inline float ep_ffn_int8_scale(uint32_t magnitude)
{
    return magnitude >= 0x7f800000u ? NAN : ep_f32_from_bits(magnitude) / 127.0f;
}

static inline int8_t ep_ffn_int8_round(float x, float scale)
{
    float q = scale > 0.0f ? rintf(x / scale) : 0.0f;
    q = q > 127.0f ? 127.0f : q;
    q = q < -127.0f ? -127.0f : q;
    return (int8_t)q;
}

/* As ep_f32_to_bf16 except for NaN, in a form that compilers turn into vector code: every output
 * passes through here. */
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
