/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups, AVX-512F: codes widened in registers, a chain per group, one
 * scaled add per group. */
#include "kernels/x86/ffn_group_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_GROUP_INLINE
#define VECTORS EP_GROUP_VECTORS

/* Exact values of 4-bit codes, by code. */
INLINE __m512 nibble_table(ep_weight_codes codes)
{
    const __m512 unsigned_values =
        _mm512_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f,
                       12.0f, 13.0f, 14.0f, 15.0f);
    return codes == EP_CODES_E2M1
               ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                -1.5f, -2.0f, -3.0f, -4.0f, -6.0f)
           : codes == EP_CODES_INT4 ? _mm512_sub_ps(unsigned_values, _mm512_set1_ps(8.0f))
                                    : unsigned_values;
}

INLINE void load_f8(const uint8_t *line, __m512 w[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        w[j] = ep_group_widen_e4m3(ep_group_load_16(line, j));
    }
}

INLINE void load_int8(const uint8_t *line, __m512 w[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        w[j] = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(line + 16 * j))));
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
        w[j] =
            _mm512_permutexvar_ps(_mm512_srli_epi32(codes, (unsigned)(16 * line + 4 * j)), table);
    }
}

/* A line of a group: codes of 4 bits lie in pairs of lines. codes is a constant wherever this is
 * inlined; one of 4 bits stands for all. */
INLINE void load_line(ep_weight_codes codes, __m512 table, const uint8_t *group, uint32_t k,
                      __m512 w[VECTORS])
{
    if (ep_weight_codes_are_nibbles(codes)) {
        const __m512i nibbles = _mm512_loadu_si512(group + (size_t)(k / 2) * 64);
        if ((k & 1u) == 0) {
            load_nibbles(table, nibbles, 0, w);
        } else {
            load_nibbles(table, nibbles, 1, w);
        }
    } else if (codes == EP_CODES_INT8) {
        load_int8(group + (size_t)k * EP_FFN_PANEL, w);
    } else {
        load_f8(group + (size_t)k * EP_FFN_PANEL, w);
    }
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

/* What ends a group. offset: looked at where there are offsets. */
typedef struct {
    __m512 scale[VECTORS];
    __m512 offset[VECTORS];
} group_end;

/* c = fma(scale, chain, c), then c = fma(-offset, sum, c). sums: a row to a lane. */
INLINE void add_group(const int rows, const bool has_offsets, const group_end *end,
                      __m512 acc[][VECTORS], __m512 sums, float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m512 sum = _mm512_permutexvar_ps(_mm512_set1_epi32(r), sums);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            const __m512 total = _mm512_fmadd_ps(end->scale[j], acc[r][j], _mm512_load_ps(to));
            _mm512_store_ps(to, has_offsets ? _mm512_fnmadd_ps(end->offset[j], sum, total) : total);
        }
    }
}

/* The rows of a line, a lane each; 0 behind them. */
INLINE __m512 load_rows(const int rows, const float *a)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << rows) - 1u), a);
}

/* rows, codes and has_offsets are constants wherever this is inlined. */
INLINE void code_tile(const int rows, const ep_weight_codes codes, const bool has_offsets,
                      const ep_group_walk *walk, const float *a, float *c)
{
    const ep_group_panel_form *form = walk->form;
    const uint32_t group_lines = form->group_lines;
    const uint32_t pair = ep_weight_codes_are_nibbles(codes) ? 2 : 1; /* lines in 64 bytes */
    const __m512 table = nibble_table(ep_weight_format_codes(form->format));
    const uint8_t *group = walk->groups;
    const uint8_t *ahead = walk->ahead;
    for (uint32_t line = 0; line < walk->lines; line += group_lines) {
        const uint32_t n = walk->lines - line < group_lines ? walk->lines - line : group_lines;
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        __m512 w[VECTORS];
        __m512 sums = _mm512_setzero_ps();
        group_end end;
        clear(rows, acc);
        uint32_t k = 0;
        for (; k + pair <= n; k += pair) {
            _mm_prefetch((const char *)ahead + (size_t)(k / pair) * 64, _MM_HINT_T1);
#pragma GCC unroll 2
            for (uint32_t q = 0; q < pair; q++, a += rows) {
                load_line(codes, table, group, pair == 2 ? (k & ~1u) + q : k, w);
                add_line(rows, w, a, acc);
                sums = has_offsets ? _mm512_add_ps(sums, load_rows(rows, a)) : sums;
            }
        }
        if (k < n) {
            load_line(codes, table, group, k, w);
            add_line(rows, w, a, acc);
            sums = has_offsets ? _mm512_add_ps(sums, load_rows(rows, a)) : sums;
            a += rows;
        }
        ep_group_load_end(has_offsets, form, group + form->code_bytes, walk->first + line,
                          end.scale, end.offset);
        add_group(rows, has_offsets, &end, acc, sums, c);
        group += form->group_bytes;
        ahead += form->group_bytes;
    }
}

/* The same over widened groups. rows and has_offsets are constants wherever this is inlined. */
INLINE void wide_tile(const int rows, const bool has_offsets, const ep_group_walk *walk,
                      const float *a, float *c)
{
    const uint8_t *b = walk->groups;
    const uint8_t *ahead = walk->ahead;
    const uint32_t group_lines = walk->form->group_lines;
    for (uint32_t left = walk->lines; left > 0;) {
        const uint32_t n = left < group_lines ? left : group_lines;
        const uint8_t *scales = b + (size_t)group_lines * EP_GROUP_LINE_BYTES;
        __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
        __m512 w[VECTORS];
        __m512 sums = _mm512_setzero_ps();
        group_end end;
        clear(rows, acc);
        for (uint32_t i = 0; i < n; i++, b += EP_GROUP_LINE_BYTES, a += rows, ahead += walk->step) {
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                w[j] = _mm512_load_ps((const float *)(const void *)b + 16 * j);
            }
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            add_line(rows, w, a, acc);
            sums = has_offsets ? _mm512_add_ps(sums, load_rows(rows, a)) : sums;
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            end.scale[j] = _mm512_load_ps((const float *)(const void *)scales + 16 * j);
            end.offset[j] =
                has_offsets
                    ? _mm512_load_ps((const float *)(const void *)(scales + EP_GROUP_LINE_BYTES) +
                                     16 * j)
                    : _mm512_setzero_ps();
        }
        add_group(rows, has_offsets, &end, acc, sums, c);
        left -= n;
        b = scales + (has_offsets ? 2 : 1) * EP_GROUP_LINE_BYTES;
    }
}

/* codes and has_offsets are constants wherever this is inlined. */
INLINE void widen_group(const ep_weight_codes codes, const bool has_offsets,
                        const ep_group_panel_form *form, const uint8_t *group, uint32_t first,
                        uint32_t lines, uint8_t *to)
{
    const __m512 table = nibble_table(ep_weight_format_codes(form->format));
    float *out = (float *)(void *)to;
    float *scales = out + (size_t)form->group_lines * EP_FFN_PANEL;
    group_end end;
    __m512 w[VECTORS];
    for (uint32_t k = 0; k < lines; k++) {
        load_line(codes, table, group, k, w);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            _mm512_store_ps(out + (size_t)k * EP_FFN_PANEL + 16 * j, w[j]);
        }
    }
    ep_group_load_end(has_offsets, form, group + form->code_bytes, first, end.scale, end.offset);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        _mm512_store_ps(scales + 16 * j, end.scale[j]);
        if (has_offsets) {
            _mm512_store_ps(scales + EP_FFN_PANEL + 16 * j, end.offset[j]);
        }
    }
}

EP_GROUP_TILES(wide, wide_tile, false)
EP_GROUP_TILES(wide_offsets, wide_tile, true)
EP_GROUP_FORM(e4m3, EP_CODES_E4M3, false, code_tile, widen_group, wide)
EP_GROUP_FORM(int8, EP_CODES_INT8, false, code_tile, widen_group, wide)
EP_GROUP_FORM(nibbles, EP_CODES_INT4, false, code_tile, widen_group, wide)
EP_GROUP_FORM(int8_offsets, EP_CODES_INT8, true, code_tile, widen_group, wide_offsets)
EP_GROUP_FORM(nibbles_offsets, EP_CODES_INT4, true, code_tile, widen_group, wide_offsets)

void ep_ffn_avx512f_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c)
{
    const ep_weight_codes codes = ep_weight_format_codes(format);
    const bool has_offsets = ep_group_has_offsets(format);
    const ep_group_form *form =
        ep_weight_codes_are_nibbles(codes) ? (has_offsets ? &form_nibbles_offsets : &form_nibbles)
        : codes == EP_CODES_INT8           ? (has_offsets ? &form_int8_offsets : &form_int8)
                                           : &form_e4m3;
    ep_group_panel(form, format, 1, a, rows, panel, k_count, next, c);
}
