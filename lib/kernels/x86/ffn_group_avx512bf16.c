/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels of formats with groups in family `bf16dp`, AVX-512 BF16: codes become bf16 by table and
 * arithmetic, two k per step. At the end of a group there is one multiplication for 16 dot
 * products. MX formats: ffn_mx_avx512bf16.c.
 */
#include "kernels/x86/ffn_avx512bf16.h"
#include "kernels/x86/ffn_codes_avx512bf16.h"
#include "kernels/x86/ffn_group.h"
#include "kernels/x86/ffn_sums.h"
#include "kernels/x86/ffn_x86.h"

#define HALF_ROWS 3 /* how many rows keep both chains and totals in registers */

/* Bytes of a line of codes. */
INLINE size_t line_bytes_of(ep_weight_codes codes)
{
    return ep_weight_codes_are_nibbles(codes) ? EP_FFN_PANEL : 2 * EP_FFN_PANEL;
}

/* Scales and offsets of a group, and the sums of the rows' inputs, one lane per row. */
typedef struct {
    ep_group_end of;
    __m512 sums;
} group_end;

INLINE __m512 sum_of(const group_end *end, int r)
{
    return _mm512_permutexvar_ps(_mm512_set1_epi32(r), end->sums);
}

/* The scaled chain is rounded, then the sum (bf16dp.h); likewise the offset. */
INLINE __m512 add_scaled(const bool has_offsets, const group_end *end, int j, __m512 total,
                         __m512 chain, __m512 sum)
{
    total = _mm512_add_ps(total, _mm512_mul_ps(chain, end->of.scale[j]));
    return has_offsets ? _mm512_sub_ps(total, _mm512_mul_ps(sum, end->of.offset[j])) : total;
}

/* Adds the scaled chains of one group to total. */
INLINE void add_group(const int rows, const bool has_offsets, const int first_row,
                      const group_end *end, __m512 acc[][VECTORS], __m512 total[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512 sum = has_offsets ? sum_of(end, first_row + r) : _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            total[r][j] = add_scaled(has_offsets, end, j, total[r][j], acc[r][j], sum);
        }
    }
}

/* The same where totals do not fit the registers together with the chains. */
INLINE void add_group_to(const int rows, const bool has_offsets, const group_end *end,
                         __m512 acc[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512 sum = has_offsets ? sum_of(end, r) : _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            _mm512_store_ps(to,
                            add_scaled(has_offsets, end, j, _mm512_load_ps(to), acc[r][j], sum));
        }
    }
}

/* Adds the inputs of a line's rows to their sums, one lane per row. */
INLINE __m512 add_sums(const int rows, const float *a, __m512 sums)
{
    const __m512 x = _mm512_maskz_loadu_ps((__mmask16)((1u << rows) - 1u), a);
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_castps_si512(x),
                            (__m512bh)_mm512_set1_epi32(0x3f803f80));
}

/* n lines of codes; fetches as many from ahead on. */
INLINE void code_lines(const int rows, const ep_weight_codes codes, const bool has_offsets,
                       const __m512i table, const float *a, const uint8_t *b, const uint8_t *ahead,
                       uint32_t n, __m512 acc[][VECTORS], group_end *end)
{
    const size_t line_bytes = line_bytes_of(codes);
    load_sums(rows, true, 0, NULL, acc);
    end->sums = _mm512_setzero_ps();
    for (uint32_t i = 0; i < n; i++, b += line_bytes, ahead += line_bytes, a += rows) {
        __m512i loaded = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (size_t q = 0; q < line_bytes; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
        end->sums = has_offsets ? add_sums(rows, a, end->sums) : end->sums;
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            loaded = j % 2 == 0 ? ep_codes_load(codes, b, j) : loaded;
            const __m512i w = ep_codes_widen(codes, table, loaded, j);
            add_vector(rows, _mm512_castsi512_ps(w), j, a, acc);
        }
    }
}

/* rows, codes and has_offsets are constants wherever this is inlined. */
INLINE void code_tile(const int rows, const ep_weight_codes codes, const bool has_offsets,
                      const ep_group_walk *walk, const float *a, float *c)
{
    const ep_group_panel_form *form = walk->form;
    const bool keeps = rows <= HALF_ROWS;
    const __m512i table = ep_codes_table(ep_weight_format_codes(form->format));
    const uint8_t *group = walk->groups;
    const uint8_t *ahead = walk->ahead;
    __m512 total[HALF_ROWS][VECTORS];
    load_sums(keeps ? rows : 0, false, 0, c, total);
    for (uint32_t line = 0; line < walk->lines;
         line += form->group_lines, group += form->group_bytes, ahead += form->group_bytes) {
        const uint32_t left = walk->lines - line;
        const uint32_t n = left < form->group_lines ? left : form->group_lines;
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        group_end end;
        code_lines(rows, codes, has_offsets, table, a, group, ahead, n, acc, &end);
        a += (size_t)n * rows;
        for (size_t q = form->code_bytes; q < form->group_bytes; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
        ep_group_load_end(has_offsets, form, group + form->code_bytes,
                          ep_group_factors(form, walk->first + line), 0, &end.of);
        if (keeps) {
            add_group(rows, has_offsets, 0, &end, acc, total);
        } else {
            add_group_to(rows, has_offsets, &end, acc, c);
        }
    }
    store_sums(keeps ? rows : 0, 0, total, c);
}

/* A line's weights. Read from b or, if widens, from codes, and then stored at b. widens and codes
 * are constants wherever this is inlined. */
INLINE void take_line(const bool widens, const ep_weight_codes codes, __m512i table,
                      const uint8_t *line, uint8_t *b, vector w[VECTORS])
{
    if (!widens) {
        vector_load_words(b, w);
        return;
    }
    __m512i loaded = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        loaded = j % 2 == 0 ? ep_codes_load(codes, line, j) : loaded;
        w[j] = _mm512_castsi512_ps(ep_codes_widen(codes, table, loaded, j));
        vector_store((float *)(void *)b + 16 * j, w[j]);
    }
}

/* A group's scales and offsets, likewise. line: the group's first line in the panel. */
INLINE void load_wide_end(const bool widens, const bool has_offsets,
                          const ep_group_panel_form *form, const uint8_t *scales, uint32_t line,
                          uint8_t *b, group_end *end)
{
    if (widens) {
        ep_group_load_end(has_offsets, form, scales, ep_group_factors(form, line), 0, &end->of);
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        uint8_t *offsets = b + EP_GROUP_LINE_BYTES + 64 * j;
        if (widens) {
            _mm512_store_ps(b + 64 * j, end->of.scale[j]);
            if (has_offsets) {
                _mm512_store_ps(offsets, end->of.offset[j]);
            }
            continue;
        }
        end->of.scale[j] = _mm512_load_ps(b + 64 * j);
        if (has_offsets) {
            end->of.offset[j] = _mm512_load_ps(offsets);
        }
    }
}

/*
 * Some rows of a chunk over widened groups: first_row on, in steps of stride. widens: reads codes
 * and leaves the groups widened. Storing more than some dozen sums after each group would delay the
 * dot products of the next one. rows, first_row, stride, widens, codes and has_offsets are
 * constants wherever this is inlined. The part with row 0 fetches ahead.
 */
INLINE void wide_part(const int rows, const int first_row, const int stride, const bool widens,
                      const ep_weight_codes codes, const bool has_offsets,
                      const ep_group_walk *walk, const float *a, float *c)
{
    const size_t line_bytes = line_bytes_of(codes);
    const ep_group_panel_form *form = walk->form;
    const __m512i table = ep_codes_table(ep_weight_format_codes(form->format));
    const uint8_t *group_codes = walk->groups;
    uint8_t *b = walk->wide;
    const uint8_t *ahead = walk->ahead;
    const uint32_t group = form->group_lines;
    const size_t step = walk->step;
    __m512 total[HALF_ROWS][VECTORS];
    load_sums(rows, false, 0, c, total);
    for (uint32_t line = 0; line < walk->lines; line += group, group_codes += form->group_bytes) {
        const uint32_t n = walk->lines - line < group ? walk->lines - line : group;
        uint8_t *scales = b + (size_t)group * EP_GROUP_LINE_BYTES;
        const uint8_t *stop = b + (size_t)n * EP_GROUP_LINE_BYTES;
        const uint8_t *from = group_codes;
        __m512 acc[HALF_ROWS][VECTORS];
        group_end end = {.sums = _mm512_setzero_ps()};
        load_sums(rows, true, 0, NULL, acc);
        for (; b != stop; b += EP_GROUP_LINE_BYTES, from += line_bytes, a += stride) {
            vector w[VECTORS];
            take_line(widens, codes, table, from, b, w);
            end.sums = has_offsets ? add_sums(stride, a, end.sums) : end.sums;
            if (first_row == 0) {
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
                ahead += step;
            }
            add_line(rows, w, a + first_row, acc);
        }
        load_wide_end(widens, has_offsets, form, group_codes + form->code_bytes, walk->first + line,
                      scales, &end);
        add_group(rows, has_offsets, first_row, &end, acc, total);
        b = scales + (has_offsets ? 2 : 1) * EP_GROUP_LINE_BYTES;
    }
    store_sums(rows, 0, total, c);
}

/* A chunk in two halves; the first one fetches ahead and, if asked for, widens. rows, widens, codes
 * and has_offsets are constants wherever this is inlined. */
INLINE void wide_tile(const int rows, const bool widens, const ep_weight_codes codes,
                      const bool has_offsets, const ep_group_walk *walk, const float *a, float *c)
{
    const int first = (rows + 1) / 2;
    wide_part(first, 0, rows, widens, codes, has_offsets, walk, a, c);
    if (rows > 1) {
        wide_part(rows - first, first, rows, false, codes, has_offsets, walk, a,
                  c + first * EP_FFN_PANEL);
    }
}

#define FORM(name, codes, has_offsets, wide_tiles)                                                 \
    EP_GROUP_TILES(name, code_tile, codes, has_offsets)                                            \
    EP_GROUP_TILES(name##_first, wide_tile, true, codes, has_offsets)                              \
    static const ep_group_form form_##name = {                                                     \
        .tiles = name, .wide = wide_tiles, .first = name##_first};

/* once widened, all formats are alike */
EP_GROUP_TILES(wide, wide_tile, false, EP_CODES_INT4, false)
EP_GROUP_TILES(wide_offsets, wide_tile, false, EP_CODES_INT4, true)
FORM(e4m3, EP_CODES_E4M3, false, wide)
FORM(int8, EP_CODES_INT8, false, wide)
FORM(nibbles, EP_CODES_INT4, false, wide)
FORM(int8_offsets, EP_CODES_INT8, true, wide_offsets)
FORM(nibbles_offsets, EP_CODES_INT4, true, wide_offsets)

void ep_ffn_avx512bf16_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                   const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                   float *c)
{
    const ep_weight_codes codes = ep_weight_format_codes(format);
    const bool has_offsets = ep_group_has_offsets(format);
    if (ep_weight_format_is_mx(format)) {
        ep_ffn_avx512bf16_mx_panel(format, a, rows, panel, k_count, next, c);
        return;
    }
    const ep_group_form *form =
        ep_weight_codes_are_nibbles(codes) ? (has_offsets ? &form_nibbles_offsets : &form_nibbles)
        : codes == EP_CODES_INT8           ? (has_offsets ? &form_int8_offsets : &form_int8)
                                           : &form_e4m3;
    ep_group_panel(form, format, 2, a, rows, panel, k_count, next, c);
}
