/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loops of quantised rows, written once without branches and compiled once per instruction set
 * (wider registers than AVX2's gain nothing here: the conversions to bytes are the limit). A
 * rounding to an integer is an addition of 1.5 * 2^23 and the low byte of the sum; maxima are taken
 * over the bits of magnitudes, which are ordered as the values are and put what is not finite on
 * top.
 */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/cpu_features.h"
#include "base/numeric.h"
#include "moe/quantize.h"
#include "moe/quantize_block.h"

#define INLINE static inline __attribute__((always_inline))
/* 1.5 * 2^23: the adder rounds to an integer, held in the low bits */
#define ROUND_MAGIC 12582912.0f
#define INFINITY_BITS 0x7f800000u
#define BLOCK EP_QUANT_BLOCK_I8

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
    /* signed: magnitudes have no sign bit, and every instruction set compares signed words */
    int32_t amax = 0;
    for (size_t i = 0; i < n; i++) {
        float value = element(row, dtype, i);
        value = smooth != NULL ? value * smooth[i] : value;
        int32_t magnitude = (int32_t)(ep_f32_bits(value) & 0x7fffffffu);
        amax = magnitude > amax ? magnitude : amax;
    }
    return (uint32_t)amax;
}

/* amax * d is 127 within one rounding, so the rounded value always fits. */
INLINE void to_i8_of(const void *restrict row, ep_dtype dtype, const float *restrict smooth,
                     size_t n, float d, int8_t *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        float value = element(row, dtype, i);
        value = smooth != NULL ? value * smooth[i] : value;
        out[i] = low_byte(value * d + ROUND_MAGIC);
    }
}

INLINE void from_i8_of(const int8_t *restrict row, float scale, size_t n, float *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = (float)row[i] * scale;
    }
}

/* ---- blocks of 8: the plain form; x86 has its own beside ---- */

static void store_scale(void *scales, ep_dtype dtype, size_t b, float scale)
{
    if (dtype == EP_DTYPE_F32) {
        memcpy((uint8_t *)scales + b * sizeof(scale), &scale, sizeof(scale));
        return;
    }
    uint16_t narrow = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(scale) : ep_f32_to_f16(scale);
    memcpy((uint8_t *)scales + b * sizeof(narrow), &narrow, sizeof(narrow));
}

/* x / s rounded to f16, then to an integer, held in -127..127. What lies below f16's normal numbers
 * rounds to 0 in the end either way. */
INLINE int8_t block_code(float value, float s)
{
    uint32_t u = ep_f32_bits(value / s);
    uint32_t magnitude = u & 0x7fffffffu;
    int32_t rounded = (int32_t)((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & 0xffffe000u);
    rounded = rounded > 0x42fe0000 ? 0x42fe0000 : rounded; /* 127 */
    return low_byte(ep_f32_from_bits((uint32_t)rounded | (u & 0x80000000u)) + ROUND_MAGIC);
}

void ep_quant_block_to_i8(const void *row, ep_dtype dtype, size_t n, size_t b, int8_t *out,
                          void *scales)
{
    size_t begin = b * BLOCK;
    size_t count = n - begin < BLOCK ? n - begin : BLOCK;
    float wide[BLOCK] = {0.0f};
    int8_t codes[BLOCK];
    for (size_t i = 0; i < count; i++) {
        wide[i] = element(row, dtype, begin + i);
    }
    uint32_t amax = amax_of(wide, EP_DTYPE_F32, NULL, BLOCK);
    float s = amax >= INFINITY_BITS ? NAN : ep_f32_from_bits(amax) * (1.0f / 127.0f);
    store_scale(scales, dtype, b, s);
    if (!(s > 0.0f)) {
        memset(out + begin, 0, count);
        return;
    }
    for (size_t i = 0; i < BLOCK; i++) {
        codes[i] = block_code(wide[i], s);
    }
    memcpy(out + begin, codes, count);
}

void ep_quant_block_from_i8(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                            size_t b, float *out)
{
    size_t begin = b * BLOCK;
    size_t end = n - begin < BLOCK ? n : begin + BLOCK;
    float scale = element(scales, dtype, b);
    for (size_t i = begin; i < end; i++) {
        float value = (float)row[i] * scale;
        value = dtype == EP_DTYPE_BF16  ? ep_bf16_to_f32(ep_f32_to_bf16(value))
                : dtype == EP_DTYPE_F16 ? ep_f16_to_f32(ep_f32_to_f16(value))
                                        : value;
        out[i] = isnan(value) ? ep_f32_from_bits(0x7fc00000u) : value;
    }
}

static void to_i8_blocks_plain(const void *row, ep_dtype dtype, size_t n, int8_t *out, void *scales)
{
    for (size_t b = 0; b < ep_quant_blocks(n, BLOCK); b++) {
        ep_quant_block_to_i8(row, dtype, n, b, out, scales);
    }
}

static void from_i8_blocks_plain(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                                 float *out)
{
    for (size_t b = 0; b < ep_quant_blocks(n, BLOCK); b++) {
        ep_quant_block_from_i8(row, scales, dtype, n, b, out);
    }
}

INLINE void to_f8_of(const void *restrict row, ep_dtype dtype, size_t n, float scale,
                     uint8_t *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = ep_f32_to_f8e4m3(element(row, dtype, i) / scale);
    }
}

INLINE void from_f8_of(const uint8_t *restrict row, float scale, size_t n, float *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = ep_f8e4m3_to_f32(row[i]) * scale;
    }
}

/* A call with the type as a constant, so that no loop asks for it. */
#define FOR_DTYPE(dtype, call)                                                                     \
    do {                                                                                           \
        if ((dtype) == EP_DTYPE_BF16) {                                                            \
            call(EP_DTYPE_BF16);                                                                   \
        } else if ((dtype) == EP_DTYPE_F16) {                                                      \
            call(EP_DTYPE_F16);                                                                    \
        } else {                                                                                   \
            call(EP_DTYPE_F32);                                                                    \
        }                                                                                          \
    } while (0)

#define AMAX(type)                                                                                 \
    amax = smooth != NULL ? amax_of(row, type, smooth, n) : amax_of(row, type, NULL, n)
#define TO_I8(type)                                                                                \
    smooth != NULL ? to_i8_of(row, type, smooth, n, d, out) : to_i8_of(row, type, NULL, n, d, out)
#define TO_F8(type) to_f8_of(row, type, n, scale, out)

#define DEFINE_KERNEL(id, text, TARGET, TO_BLOCKS, FROM_BLOCKS)                                    \
    TARGET static uint32_t amax_##id(const void *row, ep_dtype dtype, const float *smooth,         \
                                     size_t n)                                                     \
    {                                                                                              \
        uint32_t amax;                                                                             \
        FOR_DTYPE(dtype, AMAX);                                                                    \
        return amax;                                                                               \
    }                                                                                              \
    TARGET static void to_i8_##id(const void *row, ep_dtype dtype, const float *smooth, size_t n,  \
                                  float d, int8_t *out)                                            \
    {                                                                                              \
        FOR_DTYPE(dtype, TO_I8);                                                                   \
    }                                                                                              \
    TARGET static void from_i8_##id(const int8_t *row, float scale, size_t n, float *out)          \
    {                                                                                              \
        from_i8_of(row, scale, n, out);                                                            \
    }                                                                                              \
    TARGET static void to_f8_##id(const void *row, ep_dtype dtype, size_t n, float scale,          \
                                  uint8_t *out)                                                    \
    {                                                                                              \
        FOR_DTYPE(dtype, TO_F8);                                                                   \
    }                                                                                              \
    TARGET static void from_f8_##id(const uint8_t *row, float scale, size_t n, float *out)         \
    {                                                                                              \
        from_f8_of(row, scale, n, out);                                                            \
    }                                                                                              \
    static const ep_quant_kernel kernel_##id = {text,      amax_##id,   to_i8_##id, from_i8_##id,  \
                                                TO_BLOCKS, FROM_BLOCKS, to_f8_##id, from_f8_##id};

#define BASELINE
DEFINE_KERNEL(generic, "generic", BASELINE, to_i8_blocks_plain, from_i8_blocks_plain)
#if defined(__x86_64__)
DEFINE_KERNEL(avx2, "avx2", __attribute__((target("avx2"))), ep_quant_to_i8_blocks_avx2,
              ep_quant_from_i8_blocks_avx2)
#endif

const ep_quant_kernel *ep_quant_kernel_at(size_t index)
{
    const ep_quant_kernel *usable[2];
    size_t count = 0;
#if defined(__x86_64__)
    if (ep_cpu_features_read().avx2_fma_f16c) {
        usable[count++] = &kernel_avx2;
    }
#endif
    usable[count++] = &kernel_generic;
    return index < count ? usable[index] : NULL;
}

/* Kept: asking the CPU takes longer than a short row. */
const ep_quant_kernel *ep_quant_kernel_best(void)
{
    static const ep_quant_kernel *_Atomic best;
    const ep_quant_kernel *kernel = atomic_load_explicit(&best, memory_order_relaxed);
    if (kernel == NULL) {
        kernel = ep_quant_kernel_at(0);
        atomic_store_explicit(&best, kernel, memory_order_relaxed);
    }
    return kernel;
}
