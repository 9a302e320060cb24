/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Converts codes of packed panels of formats with groups to pairs of bf16, without their scales, by
 * table look-ups and arithmetic on units that dot products leave free. codes is a constant wherever
 * these are inlined, except for the table; one kind of 4-bit codes may stand for all. Included only
 * by files with instruction set flags.
 */
#ifndef EP_KERNELS_X86_FFN_CODES_AVX512BF16_H
#define EP_KERNELS_X86_FFN_CODES_AVX512BF16_H

#include <immintrin.h>

#include "kernels/ffn_tile.h"

/*
 * 4-bit codes: their bf16, twice, because a look-up uses five bits, the last of which belongs to
 * the next code. e4m3: what is added to a code after moving it to the place of bf16's exponent and
 * mantissa: 120 to the exponent; for a small code, what turns its last three bits into the normal
 * number that they mean. int8: none.
 */
INLINE __m512i ep_codes_table(ep_weight_codes codes)
{
    static const uint16_t integers[24] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                          0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
                                          0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110,
                                          0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    static const uint16_t e2m1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                      0xc000, 0xc040, 0xc080, 0xc0c0};
    static const uint16_t small[8] = {0x0000, 0x3af0, 0x3b60, 0x3b90,
                                      0x3bc0, 0x3bd0, 0x3be0, 0x3bf0};
    if (!ep_weight_codes_are_nibbles(codes)) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)small));
    }
    const uint16_t *values = codes == EP_CODES_E2M1   ? e2m1
                             : codes == EP_CODES_INT4 ? integers
                                                      : integers + 8;
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)values));
}

/*
 * Loads vectors j and j + 1 of a line, j 0 or 2. For 4-bit codes both loads are of the same words,
 * the second one byte later: this saves a shift, which would take half the time of a dot product
 * (Zen 4). It reads a byte beyond the line; after a group's last line this is a byte of the scales.
 */
INLINE __m512i ep_codes_load(ep_weight_codes codes, const uint8_t *line, int j)
{
    return _mm512_loadu_si512(line + (ep_weight_codes_are_nibbles(codes) ? j / 2 : 32 * (j & 2)));
}

/* high: codes in the upper halves of 16-bit words; index: the same with the last three bits
 * lowest. */
INLINE __m512i ep_codes_widen_e4m3(__m512i table, __m512i high, __m512i index)
{
    const __mmask32 is_small = _mm512_testn_epi16_mask(high, _mm512_set1_epi16(0x7800));
    const __m512i bits =
        _mm512_and_si512(_mm512_srai_epi16(high, 4), _mm512_set1_epi16((int16_t)0x87f0));
    const __m512i more =
        _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(0x3c00), is_small, index, table);
    return _mm512_add_epi16(bits, more);
}

/* Pairs of int8: byte 0 or 1 of each half of a word. Each has at most 8 bits, so the lower half of
 * its f32 is zero. */
INLINE __m512i ep_codes_widen_int8(__m512i words, int j)
{
    const __m512i low =
        _mm512_srai_epi32(_mm512_slli_epi32(words, (unsigned)(24 - 8 * (j & 1))), 24);
    const __m512i high =
        _mm512_srai_epi32(_mm512_slli_epi32(words, (unsigned)(8 - 8 * (j & 1))), 24);
    const __m512i even = _mm512_castps_si512(_mm512_cvtepi32_ps(low));
    const __m512i odd = _mm512_castps_si512(_mm512_cvtepi32_ps(high));
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
}

/* The pairs of vector j from the load for it. */
INLINE __m512i ep_codes_widen(ep_weight_codes codes, __m512i table, __m512i loaded, int j)
{
    if (ep_weight_codes_are_nibbles(codes)) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(loaded, (unsigned)(4 * (j & 1))), table);
    }
    if (codes == EP_CODES_INT8) {
        return ep_codes_widen_int8(loaded, j);
    }
    return (j & 1) == 0 ? ep_codes_widen_e4m3(table, _mm512_slli_epi16(loaded, 8), loaded)
                        : ep_codes_widen_e4m3(table, loaded, _mm512_srli_epi16(loaded, 8));
}

#endif
