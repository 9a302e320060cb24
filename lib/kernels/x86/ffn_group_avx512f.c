/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups, AVX-512F: codes widened in registers, a chain per group, one scaled add per group. */
#include "kernels/x86/ffn_group.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_GROUP_INLINE
#define VECTORS 4 /* of 16 floats: one panel line */

/* Exact values of 4-bit codes, by code. */
INLINE __m512 nibble_table(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4
               ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
                                -4.0f, -6.0f)
               : _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f,
                                6.0f, 7.0f);
}

/* One line of f8e4m3: exponent and mantissa moved to their places, then a power of two for the exponents' biases. */
INLINE void load_f8(const uint8_t *line, __m512 w[VECTORS])
{
    const __m512i keep = _mm512_set1_epi32((int)0x87f00000u);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(line + 16 * j)));
        __m512i bits = _mm512_and_si512(_mm512_slli_epi32(codes, 20), keep);
        w[j] = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
    }
}

INLINE void load_scales(ep_weight_format format, const uint8_t *scales, __m512 s[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        if (format == EP_WEIGHTS_INT4) {
            __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(scales + 32 * j)));
            s[j] = _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
        } else if (format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8) {
            __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(scales + 16 * j)));
            __mmask16 least = _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512());
            __m512i bits = _mm512_slli_epi32(codes, 23);
            s[j] = _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, least, _mm512_set1_epi32(0x00400000)));
        } else {
            s[j] = _mm512_loadu_ps(scales + 64 * j);
        }
    }
}

INLINE void add_line(const int rows, const __m512 w[VECTORS], const float *a, __m512 acc[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        __m512 x = _mm512_set1_ps(a[r]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = _mm512_fmadd_ps(w[j], x, acc[r][j]);
        }
    }
}

/* Line 0 or 1 of a pair of lines of 4-bit codes. */
INLINE void load_nibbles(__m512 table, __m512i codes, const int line, __m512 w[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        w[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, (unsigned)(16 * line + 4 * j)), table);
    }
}

/* A line of a group: codes of 4 bits lie in pairs of lines. format is a constant wherever this is inlined. */
INLINE void load_line(ep_weight_format format, __m512 table, const uint8_t *group, uint32_t k, __m512 w[VECTORS])
{
    if (ep_group_is_nibbles(format)) {
        const __m512i codes = _mm512_loadu_si512(group + (size_t)(k / 2) * 64);
        if ((k & 1u) == 0) {
            load_nibbles(table, codes, 0, w);
        } else {
            load_nibbles(table, codes, 1, w);
        }
    } else {
        load_f8(group + (size_t)k * EP_FFN_PANEL, w);
    }
}

INLINE __m512 table_of(ep_weight_format format)
{
    return ep_group_is_nibbles(format) ? nibble_table(format) : _mm512_setzero_ps();
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

/* c = fma(scale, chain, c) */
INLINE void add_group(const int rows, const __m512 scale[VECTORS], __m512 acc[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            _mm512_store_ps(to, _mm512_fmadd_ps(scale[j], acc[r][j], _mm512_load_ps(to)));
        }
    }
}

/* rows and format are constants wherever this is inlined. */
INLINE void code_tile(const int rows, const ep_weight_format format, const ep_group_walk *walk, const float *a, float *c)
{
    const uint32_t group_lines = ep_weight_group_columns(format);
    const uint32_t pair = ep_group_is_nibbles(format) ? 2 : 1; /* lines in 64 bytes */
    const __m512 table = table_of(format);
    const uint8_t *group = walk->groups;
    const uint8_t *ahead = walk->ahead;
    for (uint32_t line = 0; line < walk->lines; line += group_lines) {
        const uint32_t n = walk->lines - line < group_lines ? walk->lines - line : group_lines;
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        __m512 w[VECTORS];
        clear(rows, acc);
        uint32_t k = 0;
        for (; k + pair <= n; k += pair) {
            _mm_prefetch((const char *)ahead + (size_t)(k / pair) * 64, _MM_HINT_T1);
#pragma GCC unroll 2
            for (uint32_t q = 0; q < pair; q++, a += rows) {
                load_line(format, table, group, pair == 2 ? (k & ~1u) + q : k, w);
                add_line(rows, w, a, acc);
            }
        }
        if (k < n) {
            load_line(format, table, group, k, w);
            add_line(rows, w, a, acc);
            a += rows;
        }
        load_scales(format, group + ep_ffn_group_code_bytes(format), w);
        add_group(rows, w, acc, c);
        group += ep_ffn_group_bytes(format);
        ahead += ep_ffn_group_bytes(format);
    }
}

/* The same over widened groups. rows is a constant wherever this is inlined. */
INLINE void wide_tile(const int rows, const int unused, const ep_group_walk *walk, const float *a, float *c)
{
    const uint8_t *b = walk->groups;
    const uint8_t *ahead = walk->ahead;
    (void)unused;
    for (uint32_t left = walk->lines; left > 0;) {
        const uint32_t n = left < walk->group_lines ? left : walk->group_lines;
        const float *scales = (const float *)(const void *)(b + (size_t)walk->group_lines * EP_GROUP_LINE_BYTES);
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        __m512 w[VECTORS];
        clear(rows, acc);
        for (uint32_t i = 0; i < n; i++, b += EP_GROUP_LINE_BYTES, a += rows, ahead += walk->step) {
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                w[j] = _mm512_load_ps((const float *)(const void *)b + 16 * j);
            }
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            add_line(rows, w, a, acc);
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = _mm512_load_ps(scales + 16 * j);
        }
        add_group(rows, w, acc, c);
        left -= n;
        b = (const uint8_t *)scales + EP_GROUP_LINE_BYTES;
    }
}

/* format is a constant wherever this is inlined. */
INLINE void widen_group(const ep_weight_format format, const uint8_t *group, uint32_t lines, uint8_t *to)
{
    const __m512 table = table_of(format);
    float *out = (float *)(void *)to;
    __m512 w[VECTORS];
    for (uint32_t k = 0; k < lines; k++) {
        load_line(format, table, group, k, w);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            _mm512_store_ps(out + (size_t)k * EP_FFN_PANEL + 16 * j, w[j]);
        }
    }
    load_scales(format, group + ep_ffn_group_code_bytes(format), w);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        _mm512_store_ps(out + (size_t)ep_weight_group_columns(format) * EP_FFN_PANEL + 16 * j, w[j]);
    }
}

EP_GROUP_TILES(wide, wide_tile, 0)
EP_GROUP_FORM(f8, EP_WEIGHTS_F8_BLOCK, code_tile, widen_group, wide)
EP_GROUP_FORM(mxfp4, EP_WEIGHTS_MXFP4, code_tile, widen_group, wide)
EP_GROUP_FORM(mxfp8, EP_WEIGHTS_MXFP8, code_tile, widen_group, wide)
EP_GROUP_FORM(int4, EP_WEIGHTS_INT4, code_tile, widen_group, wide)

void ep_ffn_avx512f_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                                uint32_t k_count, const uint8_t *next, float *c)
{
    ep_group_panel(EP_GROUP_FORM_OF(format), format, ep_weight_group_columns(format), a, rows, panel, k_count, next, c);
}
