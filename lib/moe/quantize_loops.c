/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of quantised rows, written once without branches and compiled for each instruction set.
 * Registers wider than AVX2's gain nothing, because the conversions to bytes limit the speed. */
#include <stdatomic.h>

#include "base/cpu_features.h"
#include "moe/quantize.h"
#include "moe/quantize_block.h"
#include "moe/quantize_element.h"

/* amax * d is 127 within one rounding, so the rounded value always fits a byte. */
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

static void to_i8_blocks_plain(const void *row, ep_dtype dtype, size_t n, int8_t *out, void *scales)
{
    for (size_t b = 0; b < ep_quant_blocks(n, EP_QUANT_BLOCK_I8); b++) {
        ep_quant_block_to_i8(row, dtype, n, b, out, scales);
    }
}

static void from_i8_blocks_plain(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                                 float *out)
{
    for (size_t b = 0; b < ep_quant_blocks(n, EP_QUANT_BLOCK_I8); b++) {
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
    static const ep_quant_kernel kernel_##id = {text,      amax_##id,   to_i8_##id, from_i8_##id,  \
                                                TO_BLOCKS, FROM_BLOCKS, to_f8_##id};

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

/* Cached, because asking the CPU takes longer than a short row. */
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
