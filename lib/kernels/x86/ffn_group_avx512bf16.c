/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels of formats with groups in family `bf16dp`, AVX-512 BF16: codes become bf16 by table and arithmetic, two k per step.
 * The scaled chains are added by instructions that other units run than those of the dot products, where scales are
 * powers of two; else one multiplication stands beside 16 dot products.
 */
#include "kernels/x86/ffn_group.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_GROUP_INLINE
#define VECTORS 4 /* of 16 outputs: one panel line */

/* Whether scales are powers of two, kept as exponents. */
INLINE bool has_exponents(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8;
}

/* Of 64 outputs; exponents as floats where there are such. */
INLINE __m512 load_scales(ep_weight_format format, const uint8_t *scales, int j)
{
    if (format == EP_WEIGHTS_INT4) {
        __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(scales + 32 * j)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
    }
    if (has_exponents(format)) {
        __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(scales + 16 * j)));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(127)));
    }
    return _mm512_loadu_ps(scales + 64 * j);
}

/* bf16 values of the 4-bit codes, twice: a look-up sees five bits, of which the last is the next code's. */
INLINE __m512i nibble_table(ep_weight_format format)
{
    static const uint16_t e2m1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                      0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    static const uint16_t integers[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const uint16_t *values = format == EP_WEIGHTS_INT4 ? integers : e2m1;
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)values));
}

/* What is added to a code of f8e4m3 moved to the place of bf16's exponent and mantissa: 120 to the exponent, else what
 * makes a small code's last three bits the normal number they are. */
INLINE __m512i small_table(void)
{
    static const uint16_t small[8] = {0x0000, 0x3af0, 0x3b60, 0x3b90, 0x3bc0, 0x3bd0, 0x3be0, 0x3bf0};
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)small));
}

/* high: codes in the upper halves of 16-bit words; index: the same with the last three bits lowest. */
INLINE __m512i widen_e4m3(__m512i table, __m512i high, __m512i index)
{
    const __mmask32 is_small = _mm512_testn_epi16_mask(high, _mm512_set1_epi16(0x7800));
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi16(high, 4), _mm512_set1_epi16((int16_t)0x87f0));
    const __m512i more = _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(0x3c00), is_small, index, table);
    return _mm512_add_epi16(bits, more);
}

/* Vectors j, and for f8 j + 1, of a line. Of 4-bit codes one load serves all four. */
INLINE __m512i load_codes(ep_weight_format format, const uint8_t *line, int j)
{
    return _mm512_loadu_si512(line + (ep_group_is_nibbles(format) ? 0 : 32 * (j & 2)));
}

INLINE __m512i widen(ep_weight_format format, __m512i table, __m512i codes, int j)
{
    if (ep_group_is_nibbles(format)) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, (unsigned)(4 * j)), table);
    }
    return (j & 1) == 0 ? widen_e4m3(table, _mm512_slli_epi16(codes, 8), codes)
                        : widen_e4m3(table, codes, _mm512_srli_epi16(codes, 8));
}

INLINE __m512i table_of(ep_weight_format format)
{
    return ep_group_is_nibbles(format) ? nibble_table(format) : small_table();
}

INLINE uint32_t group_lines(ep_weight_format format)
{
    return ep_weight_group_columns(format) / 2;
}

INLINE void clear(const int rows, __m512 acc[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = _mm512_setzero_ps();
        }
    }
}

/* The scaled chain is rounded, then the sum (bf16dp.h): by way of the exponent that is the same product. */
INLINE void add_scaled(const int rows, const bool exponents, const __m512 scale, const int j, __m512 acc[][VECTORS],
                       float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512 scaled = exponents ? _mm512_scalef_ps(acc[r][j], scale) : _mm512_mul_ps(acc[r][j], scale);
        float *to = c + r * EP_FFN_PANEL + 16 * j;
        _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), scaled));
    }
}

/* rows and format are constants wherever this is inlined. */
INLINE void code_tile(const int rows, const ep_weight_format format, const ep_group_walk *walk, const float *a, float *c)
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / group_lines(format);
    const size_t scale_bytes = ep_ffn_group_bytes(format) - ep_ffn_group_code_bytes(format);
    const __m512i table = table_of(format);
    const uint8_t *group = walk->groups;
    const uint8_t *ahead = walk->ahead;
    for (uint32_t line = 0; line < walk->lines; line += group_lines(format)) {
        const uint32_t left = walk->lines - line;
        const uint32_t n = left < group_lines(format) ? left : group_lines(format);
        const uint8_t *b = group;
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        clear(rows, acc);
        for (uint32_t i = 0; i < n; i++, b += line_bytes, a += rows) {
            __m512i codes = _mm512_setzero_si512();
#pragma GCC unroll 2
            for (size_t q = 0; q < line_bytes; q += 64) {
                _mm_prefetch((const char *)ahead + (b - group) + q, _MM_HINT_T1);
            }
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                codes = j == 0 || (j == 2 && !ep_group_is_nibbles(format)) ? load_codes(format, b, j) : codes;
                const __m512bh w = (__m512bh)widen(format, table, codes, j);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    acc[r][j] = _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_castps_si512(_mm512_set1_ps(a[r])), w);
                }
            }
        }
        const uint8_t *scales = group + ep_ffn_group_code_bytes(format);
#pragma GCC unroll 4
        for (size_t q = 0; q < scale_bytes; q += 64) {
            _mm_prefetch((const char *)ahead + ep_ffn_group_code_bytes(format) + q, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            add_scaled(rows, has_exponents(format), load_scales(format, scales, j), j, acc, c);
        }
        group += ep_ffn_group_bytes(format);
        ahead += ep_ffn_group_bytes(format);
    }
}

/* The same over widened groups. rows and exponents are constants wherever this is inlined. */
INLINE void wide_tile(const int rows, const bool exponents, const ep_group_walk *walk, const float *a, float *c)
{
    const uint8_t *b = walk->groups;
    const uint8_t *ahead = walk->ahead;
    for (uint32_t line = 0; line < walk->lines; line += walk->group_lines) {
        const uint32_t left = walk->lines - line;
        const uint32_t n = left < walk->group_lines ? left : walk->group_lines;
        const uint8_t *scales = b + (size_t)walk->group_lines * EP_GROUP_LINE_BYTES;
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        clear(rows, acc);
        for (uint32_t i = 0; i < n; i++, b += EP_GROUP_LINE_BYTES, a += rows) {
            __m512i w[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                w[j] = _mm512_load_si512(b + 64 * j);
            }
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            ahead += walk->step;
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512bh x = (__m512bh)_mm512_castps_si512(_mm512_set1_ps(a[r]));
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x, (__m512bh)w[j]);
                }
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            add_scaled(rows, exponents, _mm512_load_ps(scales + 64 * j), j, acc, c);
        }
        b = scales + EP_GROUP_LINE_BYTES;
    }
}

/* format is a constant wherever this is inlined. */
INLINE void widen_group(const ep_weight_format format, const uint8_t *group, uint32_t lines, uint8_t *to)
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / group_lines(format);
    const __m512i table = table_of(format);
    const uint8_t *scales = group + ep_ffn_group_code_bytes(format);
    uint8_t *wide_scales = to + (size_t)group_lines(format) * EP_GROUP_LINE_BYTES;
    for (uint32_t i = 0; i < lines; i++, group += line_bytes, to += EP_GROUP_LINE_BYTES) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            _mm512_store_si512(to + 64 * j, widen(format, table, load_codes(format, group, j), j));
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        _mm512_store_ps(wide_scales + 64 * j, load_scales(format, scales, j));
    }
}

EP_GROUP_TILES(wide_exponents, wide_tile, true)
EP_GROUP_TILES(wide_scales, wide_tile, false)

#define FORM(name, format, wide_tiles)                                                                       \
    EP_GROUP_TILES(name, code_tile, format)                                                                  \
    static void widen_##name(const uint8_t *group, uint32_t lines, uint8_t *to)                              \
    {                                                                                                        \
        widen_group(format, group, lines, to);                                                               \
    }                                                                                                        \
    static const ep_group_form form_##name = {.tiles = name, .wide = wide_tiles, .widen = widen_##name};

FORM(f8, EP_WEIGHTS_F8_BLOCK, wide_scales)
FORM(mxfp4, EP_WEIGHTS_MXFP4, wide_exponents)
FORM(mxfp8, EP_WEIGHTS_MXFP8, wide_exponents)
FORM(int4, EP_WEIGHTS_INT4, wide_scales)

void ep_ffn_avx512bf16_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                                   uint32_t k_count, const uint8_t *next, float *c)
{
    const ep_group_form *form = format == EP_WEIGHTS_MXFP4   ? &form_mxfp4
                                : format == EP_WEIGHTS_MXFP8 ? &form_mxfp8
                                : format == EP_WEIGHTS_INT4  ? &form_int4
                                                             : &form_f8;
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    ep_group_panel(form, format, group_lines(format), a, rows, panel, lines, next, c);
}
