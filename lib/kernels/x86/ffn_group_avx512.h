/* SPDX-License-Identifier: Apache-2.0 */
/* Scales and offsets of a packed group, 16 outputs to a vector. Included by files with instruction
 * set flags. */
#ifndef EP_KERNELS_X86_FFN_GROUP_AVX512_H
#define EP_KERNELS_X86_FFN_GROUP_AVX512_H

#include "kernels/x86/ffn_group.h"

#define EP_GROUP_VECTORS 4 /* of 16 outputs: one panel line */

EP_GROUP_INLINE __m128i ep_group_load_16(const uint8_t *from, int j)
{
    return _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * j));
}

/* e4m3: exponent and mantissa moved to their places, then a power of two for the exponents'
 * biases. */
EP_GROUP_INLINE __m512 ep_group_widen_e4m3(__m128i codes)
{
    const __m512i wide = _mm512_cvtepi8_epi32(codes);
    const __m512i bits =
        _mm512_and_si512(_mm512_slli_epi32(wide, 20), _mm512_set1_epi32((int)0x87f00000u));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}

/* Outputs 16 j.. of an array of scales, or of parts of them. */
EP_GROUP_INLINE __m512 ep_group_load_scale(ep_weight_scales kind, const uint8_t *scales, int j)
{
    if (kind == EP_SCALES_BF16 || kind == EP_SCALES_F16) {
        const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(scales + 32 * j));
        return kind == EP_SCALES_F16
                   ? _mm512_cvtph_ps(half)
                   : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    if (kind == EP_SCALES_E8M0) {
        const __m512i codes = _mm512_cvtepu8_epi32(ep_group_load_16(scales, j));
        const __mmask16 least = _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512());
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_slli_epi32(codes, 23), least,
                                                         _mm512_set1_epi32(0x00400000)));
    }
    if (kind == EP_SCALES_UINT8_PARTS) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(ep_group_load_16(scales, j)));
    }
    if (kind == EP_SCALES_INT8_PARTS) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(ep_group_load_16(scales, j)));
    }
    return kind == EP_SCALES_E4M3_PARTS ? ep_group_widen_e4m3(ep_group_load_16(scales, j))
                                        : _mm512_loadu_ps(scales + 64 * j);
}

/* scales: behind the codes of the group whose first line is this one of the panel. has_offsets is a
 * constant. */
EP_GROUP_INLINE void ep_group_load_end(const bool has_offsets, const ep_group_panel_form *form,
                                       const uint8_t *scales, uint32_t line,
                                       __m512 scale[EP_GROUP_VECTORS],
                                       __m512 offset[EP_GROUP_VECTORS])
{
    const ep_weight_scales kind = ep_weight_format_scales(form->format);
    const ep_weight_offsets offsets = ep_weight_format_offsets(form->format);
    const uint8_t *offset_codes = scales + ep_weight_scale_bytes(kind) * EP_FFN_PANEL;
    const float *factors = ep_group_factors(form, line);
#pragma GCC unroll 4
    for (int j = 0; j < EP_GROUP_VECTORS; j++) {
        scale[j] = ep_group_load_scale(kind, scales, j);
    }
    if (ep_weight_scales_have_levels(kind)) {
#pragma GCC unroll 4
        for (int j = 0; j < EP_GROUP_VECTORS; j++) {
            scale[j] = _mm512_mul_ps(scale[j], _mm512_loadu_ps(factors + 16 * j));
        }
    }
    if (!has_offsets) {
        return;
    }
    if (offsets == EP_OFFSETS_ZERO) {
#pragma GCC unroll 4
        for (int j = 0; j < EP_GROUP_VECTORS; j++) {
            offset[j] = _mm512_mul_ps(scale[j], _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(
                                                    ep_group_load_16(offset_codes, j))));
        }
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < EP_GROUP_VECTORS; j++) {
            offset[j] = _mm512_mul_ps(
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(ep_group_load_16(offset_codes, j))),
                _mm512_loadu_ps(factors + EP_FFN_PANEL + 16 * j));
        }
    }
}

#endif
