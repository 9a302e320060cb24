/* SPDX-License-Identifier: Apache-2.0 */
/* Random scales and offsets of every weight format. */
#ifndef EP_TESTS_SUPPORT_RANDOM_SCALES_H
#define EP_TESTS_SUPPORT_RANDOM_SCALES_H

#include <string.h>

#include "base/expert_form.h"
#include "base/numeric.h"
#include "base/random.h"

/* Writes a number within +-1. wild: one of 16 has random bits (NaN, infinity, denormal). */
static inline void ep_test_random_float(uint64_t *state, ep_dtype dtype, bool wild, uint8_t *to)
{
    const uint64_t z = ep_splitmix64(state);
    const bool any_bits = wild && (z >> 60) == 0;
    const float v = (float)(int32_t)z * 0x1p-31f;
    const uint32_t bits = any_bits ? (uint32_t)(z >> 20) : ep_f32_bits(v);
    const uint16_t half = any_bits                 ? (uint16_t)bits
                          : dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(v)
                                                   : ep_f32_to_f16(v);
    if (dtype == EP_DTYPE_F32) {
        memcpy(to, &bits, sizeof(bits));
    } else {
        memcpy(to, &half, sizeof(half));
    }
}

/* Fills a matrix's block of scales, of any alignment. Codes that mean NaN do not occur. */
static inline void ep_test_random_scales(uint64_t *state, ep_weight_format format, uint32_t rows,
                                         uint32_t columns, bool wild, uint8_t *to)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    const ep_weight_scales kind = ep_weight_format_scales(format);
    const ep_dtype dtype = kind == EP_SCALES_BF16  ? EP_DTYPE_BF16
                           : kind == EP_SCALES_F16 ? EP_DTYPE_F16
                                                   : EP_DTYPE_F32;
    const bool has_bytes = kind == EP_SCALES_E8M0 || ep_weight_scales_have_levels(kind);
    const size_t element = has_bytes ? 1 : ep_dtype_bytes(dtype);
    for (size_t i = 0; i < arrays.scales; i += element, to += element) {
        if (!has_bytes) {
            ep_test_random_float(state, dtype, wild, to);
            continue;
        }
        const uint64_t z = ep_splitmix64(state);
        /* e8m0 0 is the denormal one */
        *to = (uint8_t)(kind != EP_SCALES_E8M0 ? z >> 56 : wild ? z % 255 : 118 + z % 12);
        *to = kind == EP_SCALES_E4M3_PARTS && (*to & 0x7fu) == 0x7fu ? 0x38 : *to;
    }
    for (size_t i = 0; i < arrays.offsets; i++, to++) {
        *to = (uint8_t)(ep_splitmix64(state) >> 56);
    }
    for (size_t i = 0; i < arrays.scale_factors + arrays.offset_factors;
         i += sizeof(float), to += sizeof(float)) {
        ep_test_random_float(state, EP_DTYPE_F32, wild, to);
    }
}

#endif
