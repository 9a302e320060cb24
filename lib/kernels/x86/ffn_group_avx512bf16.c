/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels of formats with groups in family `bf16dp`, AVX-512 BF16: codes become bf16 by table and arithmetic, two k per step.
 * At the end of a group one multiplication stands beside 16 dot products. MX formats: ffn_mx_avx512bf16.c.
 */
#include "kernels/x86/ffn_codes_avx512bf16.h"
#include "kernels/x86/ffn_group.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_GROUP_INLINE
#define VECTORS 4 /* of 16 outputs: one panel line */
#define HALF_ROWS 3 /* whose chains and totals both stay in registers */

/* Of 64 outputs. */
INLINE __m512 load_scales(ep_weight_format format, const uint8_t *scales, int j)
{
    if (format == EP_WEIGHTS_INT4) {
        __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(scales + 32 * j)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
    }
    return _mm512_loadu_ps(scales + 64 * j);
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

/* The scaled chain is rounded, then the sum (bf16dp.h). */
INLINE __m512 add_scaled(__m512 total, __m512 chain, __m512 scale)
{
    return _mm512_add_ps(total, _mm512_mul_ps(chain, scale));
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
INLINE void add_group(const int rows, const __m512 scale[VECTORS], __m512 acc[][VECTORS], __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            total[r][j] = add_scaled(total[r][j], acc[r][j], scale[j]);
        }
    }
}

/* The same where totals do not fit the registers beside the chains. */
INLINE void add_group_to(const int rows, const __m512 scale[VECTORS], __m512 acc[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            _mm512_store_ps(to, add_scaled(_mm512_load_ps(to), acc[r][j], scale[j]));
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
            codes = j % 2 == 0 ? ep_codes_load(format, b, j) : codes;
            const __m512bh w = (__m512bh)ep_codes_widen(format, table, codes, j);
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
    const size_t code_bytes = ep_ffn_group_code_bytes(format);
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const __m512i table = ep_codes_table(format);
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
            add_group(rows, scale, acc, total);
        } else {
            add_group_to(rows, scale, acc, c);
        }
    }
    store_rows(keeps ? rows : 0, total, c);
}

/* A line's weights, from b; widens: from codes, and left at b. widens and format are constants wherever this is inlined. */
INLINE void load_line(const bool widens, const ep_weight_format format, __m512i table, const uint8_t *line, uint8_t *b,
                      __m512i w[VECTORS])
{
    __m512i codes = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        if (!widens) {
            w[j] = _mm512_load_si512(b + 64 * j);
            continue;
        }
        codes = j % 2 == 0 ? ep_codes_load(format, line, j) : codes;
        w[j] = ep_codes_widen(format, table, codes, j);
        _mm512_store_si512(b + 64 * j, w[j]);
    }
}

/* A group's scales, likewise. */
INLINE void load_wide_scales(const bool widens, const ep_weight_format format, const uint8_t *scales, uint8_t *b,
                             __m512 scale[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        scale[j] = widens ? load_scales(format, scales, j) : _mm512_load_ps(b + 64 * j);
        if (widens) {
            _mm512_store_ps(b + 64 * j, scale[j]);
        }
    }
}

/*
 * Some rows of a chunk over widened groups; widens: over codes, whose groups are left widened. Stores of more than
 * some dozen sums after each group would hold up the dot products of the next. rows, widens, fetches and format are
 * constants wherever this is inlined.
 */
INLINE void wide_part(const int rows, const bool widens, const bool fetches, const ep_weight_format format,
                      const ep_group_walk *walk, const float *a, size_t stride, float *c)
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / group_lines(format);
    const __m512i table = ep_codes_table(format);
    const uint8_t *codes = walk->groups;
    uint8_t *b = walk->wide;
    const uint8_t *ahead = walk->ahead;
    const uint32_t group = walk->group_lines;
    const size_t step = walk->step;
    __m512 total[HALF_ROWS][VECTORS];
    load_rows(rows, c, total);
    for (uint32_t left = walk->lines; left > 0; codes += ep_ffn_group_bytes(format)) {
        const uint32_t n = left < group ? left : group;
        uint8_t *scales = b + (size_t)group * EP_GROUP_LINE_BYTES;
        const uint8_t *end = b + (size_t)n * EP_GROUP_LINE_BYTES;
        const uint8_t *line = codes;
        __m512 acc[HALF_ROWS][VECTORS];
        __m512 scale[VECTORS];
        clear(rows, acc);
        for (; b != end; b += EP_GROUP_LINE_BYTES, line += line_bytes, a += stride) {
            __m512i w[VECTORS];
            load_line(widens, format, table, line, b, w);
            if (fetches) {
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
                ahead += step;
            }
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) {
                const __m512bh x = pair_of(a + r);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x, (__m512bh)w[j]);
                }
            }
        }
        load_wide_scales(widens, format, codes + ep_ffn_group_code_bytes(format), scales, scale);
        add_group(rows, scale, acc, total);
        left -= n;
        b = scales + EP_GROUP_LINE_BYTES;
    }
    store_rows(rows, total, c);
}

/* A chunk; its first half fetches and, if it is to, widens. rows, widens and format are constants wherever this is inlined. */
INLINE void wide_tile(const int rows, const bool widens, const ep_weight_format format, const ep_group_walk *walk,
                      const float *a, float *c)
{
    const int first = (rows + 1) / 2;
    wide_part(first, widens, true, format, walk, a, (size_t)rows, c);
    if (rows > 1) {
        wide_part(rows - first, false, false, format, walk, a + first, (size_t)rows, c + first * EP_FFN_PANEL);
    }
}

#define FORM(name, format)                                                                                   \
    EP_GROUP_TILES(name, code_tile, format)                                                                  \
    EP_GROUP_TILES(name##_first, wide_tile, true, format)                                                    \
    static const ep_group_form form_##name = {.tiles = name, .wide = wide, .first = name##_first};

EP_GROUP_TILES(wide, wide_tile, false, EP_WEIGHTS_INT4) /* widened, all are alike */
FORM(f8, EP_WEIGHTS_F8_BLOCK)
FORM(int4, EP_WEIGHTS_INT4)

void ep_ffn_avx512bf16_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                                   uint32_t k_count, const uint8_t *next, float *c)
{
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    if (ep_weight_format_is_mx(format)) {
        ep_ffn_avx512bf16_mx_panel(format, a, rows, panel, k_count, next, c);
        return;
    }
    ep_group_panel(format == EP_WEIGHTS_INT4 ? &form_int4 : &form_f8, format, group_lines(format), a, rows, panel, lines, next, c);
}
