/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels of formats with groups in family `portable`: codes are widened in registers, with a chain
 * and one scaled add per group. The including file has the vectors of its instruction set and
 * defines before
 *     code_lookup, code_lookup_of(format)   what 4-bit codes are widened by
 *     load_nibbles(codes, lookup, group, k, strip, w)
 */
#ifndef EP_KERNELS_X86_FFN_GROUP_PORTABLE_H
#define EP_KERNELS_X86_FFN_GROUP_PORTABLE_H

#include "kernels/x86/ffn_group.h"

#define vector_step(acc, w, x) vector_fma(w, x, acc)

#include "kernels/x86/ffn_sums.h"

#define WIDE EP_CODES_NONE /* passed as codes: stands for a widened group */

/* Column k of a group. codes is a constant wherever this is inlined; int4 stands for uint4 too. */
INLINE void load_line(ep_weight_codes codes, code_lookup lookup, const uint8_t *group, uint32_t k,
                      uint32_t strip, vector w[VECTORS])
{
    if (ep_weight_codes_are_nibbles(codes)) {
        load_nibbles(codes, lookup, group, k, strip, w);
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        const uint8_t *code = group + (size_t)k * EP_FFN_PANEL + vector_output(strip, j);
        w[j] =
            codes == WIDE
                ? vector_load(group + (size_t)k * EP_GROUP_LINE_BYTES + 4 * vector_output(strip, j))
            : codes == EP_CODES_INT8 ? vector_of_int8(code)
                                     : vector_of_e4m3(code);
    }
}

/* The group that a tile processes, and its scales and offsets. */
typedef struct {
    const uint8_t *codes;
    const uint8_t *scales;
    const float *factors;
    uint32_t n;           /* lines */
    const uint8_t *ahead; /* fetched meanwhile */
    size_t step;          /* for each load of codes */
} tile_group;

/* c = fma(scale, chain, c), then c = fma(-offset, sum, c). sums: of the rows' inputs, for
 * offsets. */
INLINE void add_group(const int rows, const bool has_offsets, const ep_group_end *end,
                      uint32_t strip, const float *sums, vector acc[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + vector_output(strip, j);
            const vector total = vector_fma(end->scale[j], acc[r][j], vector_load(to));
            vector_store(to, has_offsets ? vector_fnma(end->offset[j], vector_all(sums + r), total)
                                         : total);
        }
    }
}

/* Scales and offsets of a group, or of a widened one. */
INLINE void load_end(const bool is_wide, const bool has_offsets, const ep_group_panel_form *form,
                     const tile_group *group, uint32_t strip, ep_group_end *end)
{
    if (!is_wide) {
        ep_group_load_end(has_offsets, form, group->scales, group->factors, strip, end);
        return;
    }
    const float *scales = (const float *)(const void *)group->scales;
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        const uint32_t o = vector_output(strip, j);
        end->scale[j] = vector_load(scales + o);
        end->offset[j] = has_offsets ? vector_load(scales + EP_FFN_PANEL + o) : vector_zero();
    }
}

/*
 * The lines of a group for one strip of a chunk, then its scales and offsets. 4-bit codes of two
 * columns are adjacent and are loaded once for both. If one strip is the whole panel, it also
 * fetches ahead and computes the rows' sums.
 */
INLINE void strip_tile(const int rows, const ep_weight_codes codes, const bool has_offsets,
                       const ep_group_panel_form *form, const tile_group *group, const float *a,
                       uint32_t strip, float *sums, float *c)
{
    const uint32_t columns = ep_weight_codes_are_nibbles(codes) ? 2 : 1;
    const bool sums_lines = has_offsets && STRIPS == 1;
    const code_lookup lookup = code_lookup_of(form->format);
    vector acc[EP_FFN_CHUNK_ROWS][VECTORS];
    vector w[VECTORS];
    vector sum = vector_zero();
    ep_group_end end;
    load_sums(rows, true, strip, c, acc);
    uint32_t k = 0;
    for (uint32_t load = 0; k + columns <= group->n; load++) {
        if (STRIPS == 1) {
            _mm_prefetch((const char *)group->ahead + load * group->step, _MM_HINT_T1);
        }
#pragma GCC unroll 2
        for (uint32_t q = 0; q < columns; q++, k++, a += rows) {
            load_line(codes, lookup, group->codes, columns == 2 ? 2 * load + q : k, strip, w);
            add_line(rows, w, a, acc);
            sum = sums_lines ? vector_add_rows(rows, sum, a) : sum;
        }
    }
    if (k < group->n) {
        load_line(codes, lookup, group->codes, k, strip, w);
        add_line(rows, w, a, acc);
        sum = sums_lines ? vector_add_rows(rows, sum, a) : sum;
    }
    if (sums_lines) {
        vector_store_any(sums, sum);
    }
    load_end(codes == WIDE, has_offsets, form, group, strip, &end);
    add_group(rows, has_offsets, &end, strip, sums, acc, c);
}

/* Sums of the rows' inputs; each row has a lane. */
INLINE void sum_rows(const int rows, const float *a, uint32_t n, float sums[VECTOR_FLOATS])
{
    vector sum = vector_zero();
    for (uint32_t k = 0; k < n; k++, a += rows) {
        sum = vector_add_rows(rows, sum, a);
    }
    vector_store_any(sums, sum);
}

/* rows, codes (WIDE: over widened groups) and has_offsets are constants wherever this is
 * inlined. */
INLINE void group_tile(const int rows, const ep_weight_codes codes, const bool has_offsets,
                       const ep_group_walk *walk, const float *a, float *c)
{
    const ep_group_panel_form *form = walk->form;
    const size_t code_bytes =
        codes == WIDE ? (size_t)form->group_lines * EP_GROUP_LINE_BYTES : form->code_bytes;
    const size_t group_bytes = codes == WIDE ? ep_group_wide_bytes(form) : form->group_bytes;
    size_t fetched = form->group_bytes;
    tile_group group = {.codes = walk->groups,
                        .ahead = walk->ahead,
                        .step = codes == WIDE ? walk->step : EP_FFN_PANEL};
    for (uint32_t line = 0; line < walk->lines; line += form->group_lines) {
        const uint32_t left = walk->lines - line;
        float sums[VECTOR_FLOATS];
        group.scales = group.codes + code_bytes;
        group.factors = ep_group_factors(form, walk->first + line);
        group.n = left < form->group_lines ? left : form->group_lines;
        if (codes == WIDE) {
            fetched = group.n * walk->step;
        }
        for (size_t q = 0; STRIPS > 1 && q < fetched; q += 64) {
            _mm_prefetch((const char *)group.ahead + q, _MM_HINT_T1);
        }
        if (STRIPS > 1 && has_offsets) {
            sum_rows(rows, a, group.n, sums);
        }
        for (uint32_t strip = 0; strip < STRIPS; strip++) {
            strip_tile(rows, codes, has_offsets, form, &group, a, strip, sums, c);
        }
        a += (size_t)group.n * rows;
        group.codes += group_bytes;
        group.ahead += fetched;
    }
}

/* codes and has_offsets are constants wherever this is inlined. */
INLINE void widen_group(const ep_weight_codes codes, const bool has_offsets,
                        const ep_group_panel_form *form, const uint8_t *group, uint32_t first_line,
                        uint32_t lines, uint8_t *to)
{
    const code_lookup lookup = code_lookup_of(form->format);
    const float *factors = ep_group_factors(form, first_line);
    const uint8_t *from = group + form->code_bytes;
    float *out = (float *)(void *)to;
    float *scales = out + (size_t)form->group_lines * EP_FFN_PANEL;
    for (uint32_t strip = 0; strip < STRIPS; strip++) {
        ep_group_end end;
        for (uint32_t k = 0; k < lines; k++) {
            vector w[VECTORS];
            load_line(codes, lookup, group, k, strip, w);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                vector_store(out + (size_t)k * EP_FFN_PANEL + vector_output(strip, j), w[j]);
            }
        }
        ep_group_load_end(has_offsets, form, from, factors, strip, &end);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            vector_store(scales + vector_output(strip, j), end.scale[j]);
            if (has_offsets) {
                vector_store(scales + EP_FFN_PANEL + vector_output(strip, j), end.offset[j]);
            }
        }
    }
}

/*
 * The form of formats with such codes, with or without offsets: tiles over codes, and a function
 * that widens a group. At the end of each group they read the exact format from the panel's form.
 */
#define FORM(name, codes, has_offsets, wide_tiles)                                                 \
    EP_GROUP_TILES(name, group_tile, codes, has_offsets)                                           \
    static void widen_group_##name(const ep_group_panel_form *form, const uint8_t *group,          \
                                   uint32_t first, uint32_t lines, uint8_t *to)                    \
    {                                                                                              \
        widen_group(codes, has_offsets, form, group, first, lines, to);                            \
    }                                                                                              \
    static const ep_group_form form_##name = {                                                     \
        .tiles = name, .wide = wide_tiles, .widen = widen_group_##name};

EP_GROUP_TILES(wide, group_tile, WIDE, false)
EP_GROUP_TILES(wide_offsets, group_tile, WIDE, true)
FORM(e4m3, EP_CODES_E4M3, false, wide)
FORM(e2m1, EP_CODES_E2M1, false, wide)
FORM(int4, EP_CODES_INT4, false, wide)
FORM(int8, EP_CODES_INT8, false, wide)
FORM(int4_offsets, EP_CODES_INT4, true, wide_offsets)
FORM(int8_offsets, EP_CODES_INT8, true, wide_offsets)

INLINE void portable_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                 const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                 float *c)
{
    const bool has_offsets = ep_group_has_offsets(format);
    const ep_group_form *form = &form_e4m3;
    switch (ep_weight_format_codes(format)) {
    case EP_CODES_E2M1:
        form = &form_e2m1;
        break;
    case EP_CODES_INT4:
    case EP_CODES_UINT4:
        form = has_offsets ? &form_int4_offsets : &form_int4;
        break;
    case EP_CODES_INT8:
        form = has_offsets ? &form_int8_offsets : &form_int8;
        break;
    default:
        break;
    }
    ep_group_panel(form, format, 1, a, rows, panel, k_count, next, c);
}

#endif
