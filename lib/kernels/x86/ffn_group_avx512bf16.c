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
#define HALF_ROWS 3 /* whose chains and totals both stay in registers */

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
INLINE __m512 add_scaled(const bool exponents, __m512 total, __m512 chain, __m512 scale)
{
    return _mm512_add_ps(total, exponents ? _mm512_scalef_ps(chain, scale) : _mm512_mul_ps(chain, scale));
}

INLINE __m512bh pair_of(const float *a)
{
    return (__m512bh)_mm512_castps_si512(_mm512_set1_ps(*a));
}

INLINE void load_rows(const int rows, const float *c, __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            total[r][j] = _mm512_load_ps(c + r * EP_FFN_PANEL + 16 * j);
        }
    }
}

INLINE void store_rows(const int rows, __m512 total[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            _mm512_store_ps(c + r * EP_FFN_PANEL + 16 * j, total[r][j]);
        }
    }
}

/* total += chains of one group, scaled. */
INLINE void add_group(const int rows, const bool exponents, const __m512 scale[VECTORS], __m512 acc[][VECTORS],
                      __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            total[r][j] = add_scaled(exponents, total[r][j], acc[r][j], scale[j]);
        }
    }
}

/* The same where totals do not fit the registers beside the chains. */
INLINE void add_group_to(const int rows, const bool exponents, const __m512 scale[VECTORS], __m512 acc[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            _mm512_store_ps(to, add_scaled(exponents, _mm512_load_ps(to), acc[r][j], scale[j]));
        }
    }
}

/* n lines of codes, whose like from ahead on are fetched. */
INLINE void code_lines(const int rows, const ep_weight_format format, const __m512i table, const float *a, const uint8_t *b,
                       const uint8_t *ahead, uint32_t n, __m512 acc[][VECTORS])
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / group_lines(format);
    clear(rows, acc);
    for (uint32_t i = 0; i < n; i++, b += line_bytes, ahead += line_bytes, a += rows) {
        __m512i codes = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (size_t q = 0; q < line_bytes; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            codes = j == 0 || (j == 2 && !ep_group_is_nibbles(format)) ? load_codes(format, b, j) : codes;
            const __m512bh w = (__m512bh)widen(format, table, codes, j);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                acc[r][j] = _mm512_dpbf16_ps(acc[r][j], pair_of(a + r), w);
            }
        }
    }
}

/* rows and format are constants wherever this is inlined. */
INLINE void code_tile(const int rows, const ep_weight_format format, const ep_group_walk *walk, const float *a, float *c)
{
    const bool keeps = rows <= HALF_ROWS;
    const bool exponents = has_exponents(format);
    const size_t code_bytes = ep_ffn_group_code_bytes(format);
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const __m512i table = table_of(format);
    const uint8_t *group = walk->groups;
    const uint8_t *ahead = walk->ahead;
    __m512 total[HALF_ROWS][VECTORS];
    load_rows(keeps ? rows : 0, c, total);
    for (uint32_t line = 0; line < walk->lines; line += group_lines(format), group += group_bytes, ahead += group_bytes) {
        const uint32_t left = walk->lines - line;
        const uint32_t n = left < group_lines(format) ? left : group_lines(format);
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        __m512 scale[VECTORS];
        code_lines(rows, format, table, a, group, ahead, n, acc);
        a += (size_t)n * rows;
#pragma GCC unroll 4
        for (size_t q = code_bytes; q < group_bytes; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            scale[j] = load_scales(format, group + code_bytes, j);
        }
        if (keeps) {
            add_group(rows, exponents, scale, acc, total);
        } else {
            add_group_to(rows, exponents, scale, acc, c);
        }
    }
    store_rows(keeps ? rows : 0, total, c);
}

/*
 * Some rows of a chunk over widened groups. Stores of more than some dozen sums after each group would hold up the dot
 * products of the next. rows and exponents are constants wherever this is inlined.
 */
INLINE void wide_part(const int rows, const bool exponents, const bool fetches, const ep_group_walk *walk, const float *a,
                      const size_t stride, float *c)
{
    const uint8_t *b = walk->groups;
    const uint8_t *ahead = walk->ahead;
    const uint32_t group = walk->group_lines;
    const size_t step = walk->step;
    __m512 total[HALF_ROWS][VECTORS];
    load_rows(rows, c, total);
    for (uint32_t left = walk->lines; left > 0;) {
        const uint32_t n = left < group ? left : group;
        const uint8_t *scales = b + (size_t)group * EP_GROUP_LINE_BYTES;
        const uint8_t *end = b + (size_t)n * EP_GROUP_LINE_BYTES;
        __m512 acc[HALF_ROWS][VECTORS];
        __m512 scale[VECTORS];
        clear(rows, acc);
        for (; b != end; b += EP_GROUP_LINE_BYTES, a += stride) {
            __m512bh w[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                w[j] = (__m512bh)_mm512_load_si512(b + 64 * j);
            }
            if (fetches) {
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
                ahead += step;
            }
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) {
                const __m512bh x = pair_of(a + r);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x, w[j]);
                }
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            scale[j] = _mm512_load_ps(scales + 64 * j);
        }
        add_group(rows, exponents, scale, acc, total);
        left -= n;
        b = scales + EP_GROUP_LINE_BYTES;
    }
    store_rows(rows, total, c);
}

/* rows and exponents are constants wherever this is inlined. */
INLINE void wide_tile(const int rows, const bool exponents, const ep_group_walk *walk, const float *a, float *c)
{
    const int first = (rows + 1) / 2;
    wide_part(first, exponents, true, walk, a, (size_t)rows, c);
    if (rows > 1) {
        wide_part(rows - first, exponents, false, walk, a + first, (size_t)rows, c + first * EP_FFN_PANEL);
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

EP_GROUP_FORM(f8, EP_WEIGHTS_F8_BLOCK, code_tile, widen_group, wide_scales)
EP_GROUP_FORM(mxfp4, EP_WEIGHTS_MXFP4, code_tile, widen_group, wide_exponents)
EP_GROUP_FORM(mxfp8, EP_WEIGHTS_MXFP8, code_tile, widen_group, wide_exponents)
EP_GROUP_FORM(int4, EP_WEIGHTS_INT4, code_tile, widen_group, wide_scales)

void ep_ffn_avx512bf16_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                                   uint32_t k_count, const uint8_t *next, float *c)
{
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    ep_group_panel(EP_GROUP_FORM_OF(format), format, group_lines(format), a, rows, panel, lines, next, c);
}
