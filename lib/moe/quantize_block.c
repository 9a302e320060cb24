/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of 8: the plain form, which the vector forms use for what they leave over. */
#include "moe/quantize_block.h"

#include "moe/quantize_element.h"

#define BLOCK EP_QUANT_BLOCK_I8

static void store_scale(void *scales, ep_dtype dtype, size_t b, float scale)
{
    if (dtype == EP_DTYPE_F32) {
        memcpy((uint8_t *)scales + b * sizeof(scale), &scale, sizeof(scale));
        return;
    }
    uint16_t narrow = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(scale) : ep_f32_to_f16(scale);
    memcpy((uint8_t *)scales + b * sizeof(narrow), &narrow, sizeof(narrow));
}

/* x / s rounded to f16, then to an integer, limited to -127..127. Values below f16's normal numbers
 * become 0 either way. */
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
