/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `bf16dp` on processors with fused multiply-adds but without AVX-512 BF16. With FTZ and DAZ
 * set, one multiply-add equals ep_bf16dp_fma, since the hardware also decides after rounding what
 * is tiny. They are set only around dot products. Included after the vectors of an instruction set.
 */
#ifndef EP_KERNELS_X86_FFN_BF16DP_FMA_H
#define EP_KERNELS_X86_FFN_BF16DP_FMA_H

#include "kernels/bf16dp.h"
#include "kernels/ffn_activation.h"
#include "kernels/generic/ffn_generic.h"
#include "kernels/x86/ffn_x86.h"

#define LINE_WORDS EP_FFN_PANEL /* pairs of a panel's line */
#define LINE_PARTS 2            /* the odd members of pairs, then the even ones */
#define line_bytes(dtype) (4 * LINE_WORDS)
#define vector_member(part, pairs)                                                                 \
    ((part) == 0 ? vector_high_halves(pairs) : vector_low_halves(pairs))
#define vector_step(acc, w, x) vector_fma(w, x, acc)

/* If several tiles share a row's pairs, the members are widened to memory once; a single tile
 * widens them in registers. */
#if STRIPS > 1
#define LINE_INPUTS 2
#else
#define LINE_INPUTS 1
#define vector_input(part, from) vector_member(part, vector_all(from))
#endif

#define FLUSH_TO_ZERO 0x8040u /* MXCSR: FTZ and DAZ */

/* 16 KiB of a panel stay in a near cache while all chunks use them */
#define BLOCK_LINES (EP_FFN_K_BLOCK / 2)

INLINE void load_line(ep_dtype dtype, int part, const uint8_t *line, uint32_t strip,
                      vector w[VECTORS])
{
    (void)dtype;
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        w[j] = vector_member(part, vector_load(line + 4 * vector_output(strip, j)));
    }
}

#include "kernels/x86/ffn_lines.h"
#include "kernels/x86/ffn_near_blocks.h"

/* What the tiles of a chunk read for n lines: a itself, or its pairs widened into room. */
INLINE const float *inputs(const float *a, const uint32_t n, const uint32_t rows, float *room)
{
    float *to = room;
    if (LINE_INPUTS == 1) {
        return a;
    }
    for (uint32_t line = 0; line < n; line++, a += rows, to += 2 * rows) {
        for (uint32_t r = 0; r < rows; r++) {
            to[r] = ep_f32_from_bits(ep_f32_bits(a[r]) & 0xffff0000u);
            to[rows + r] = ep_f32_from_bits(ep_f32_bits(a[r]) << 16);
        }
    }
    return room;
}

/* n is at most BLOCK_LINES. Not inlined, so that no arithmetic moves out of where MXCSR is set. */
#define FMA_TILE(rows, name)                                                                       \
    static __attribute__((noinline)) void name##_##rows(                                           \
        prefetch ahead, const float *a, const uint8_t *b, uint32_t n, bool fresh, float *c)        \
    {                                                                                              \
        float room[LINE_INPUTS == 1 ? 1 : BLOCK_LINES * LINE_INPUTS * rows];                       \
        const float *x = inputs(a, n, rows, room);                                                 \
        for (uint32_t strip = 0; strip < STRIPS; strip++) {                                        \
            tile(rows, EP_DTYPE_BF16, 1, ahead, x, b, n, fresh, strip, c);                         \
        }                                                                                          \
    }
EP_FFN_BY_ROWS(tile_func, tiles, FMA_TILE)

static void fma_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                      uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    (void)next;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_TO_ZERO);
    near_blocks(tiles, 4 * LINE_WORDS, BLOCK_LINES, a, rows, panel, lines, c);
    _mm_setcsr(before);
}

/* Chains of a chunk's rows with weights of 1. Not inlined, like the tiles. */
static __attribute__((noinline)) void row_sums(const float *a, uint32_t rows, uint32_t n,
                                               float *sums)
{
    for (uint32_t r = 0; r < rows; r++) {
        float sum = 0.0f;
        for (uint32_t line = 0; line < n; line++) {
            const uint32_t pair = ep_f32_bits(a[(size_t)line * rows + r]);
            sum += ep_f32_from_bits(pair & 0xffff0000u);
            sum += ep_f32_from_bits(pair << 16);
        }
        sums[r] = sum;
    }
}

/* Adds the scaled chains of one chunk; denormals are kept here. offsets: NULL none. */
static void add_group(const float *scales, const float *offsets, const float *chain,
                      const float *sums, uint32_t rows, bool fresh, float *c)
{
    for (uint32_t r = 0; r < rows; r++, c += EP_FFN_PANEL, chain += EP_FFN_PANEL) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            c[o] = ep_bf16dp_add_group(fresh ? 0.0f : c[o], chain[o], scales[o]);
        }
        for (uint32_t o = 0; offsets != NULL && o < EP_FFN_PANEL; o++) {
            c[o] = ep_bf16dp_take_offset(c[o], sums[r], offsets[o]);
        }
    }
}

/* A group's codes as pairs, and the scales and offsets for the end of its chains. */
typedef struct wide_group {
    _Alignas(64) uint32_t pairs[EP_F8_BLOCK / 2 * LINE_WORDS];
    uint32_t lines;
    bool is_mx; /* the scales are part of the pairs */
    float scales[EP_FFN_PANEL];
    float offsets[EP_FFN_PANEL];
    bool has_offsets;
} wide_group;

static void widen_group(ep_weight_format format, const uint8_t *block, const float *factors,
                        uint32_t n, wide_group *to)
{
    to->lines = n / 2 + n % 2;
    to->is_mx = ep_weight_format_is_mx(format);
    to->has_offsets = ep_weight_format_offsets(format) != EP_OFFSETS_NONE;
    for (uint32_t line = 0; line < to->lines; line++) {
        ep_ffn_generic_widen_pairs(format, block, line, to->pairs + line * LINE_WORDS);
    }
    ep_ffn_generic_scales(format, block, factors, to->scales, to->offsets);
}

static void group_chunk(const wide_group *group, const float *x, uint32_t rows, bool fresh,
                        float *c)
{
    _Alignas(64) float chain[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];
    float sums[EP_FFN_CHUNK_ROWS];
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_TO_ZERO);
    const uint8_t *pairs = (const uint8_t *)group->pairs;
    tiles[rows - 1]((prefetch){.next = pairs}, x, pairs, group->lines, !group->is_mx || fresh,
                    group->is_mx ? c : chain);
    if (group->has_offsets) {
        row_sums(x, rows, group->lines, sums);
    }
    _mm_setcsr(before);
    if (!group->is_mx) {
        add_group(group->scales, group->has_offsets ? group->offsets : NULL, chain, sums, rows,
                  fresh, c);
    }
}

/* A group's codes are converted to pairs once, for all chunks. */
static void fma_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                            const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    wide_group group;
    (void)next;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    const uint32_t columns = ep_weight_group_columns(format);
    const uint32_t groups = ep_ffn_groups(format, k_count);
    const uint8_t *block = panel;
    for (uint32_t k = 0; k < k_count; k += columns, block += ep_ffn_group_bytes(format)) {
        widen_group(format, block, ep_ffn_factors_of(format, panel, groups, k),
                    k_count - k < columns ? k_count - k : columns, &group);
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            group_chunk(&group, a + first_row * lines + (size_t)k / 2 * chunk_rows, chunk_rows,
                        k == 0, c + first_row * EP_FFN_PANEL);
        }
    }
}

/* The members of ep_ffn_kernel that are defined here. */
#define FMA_PARTS                                                                                  \
    .family = EP_FFN_FAMILY_BF16DP, .panel = fma_panel, .group_panel = fma_group_panel,            \
    .activate = ep_act_rows, .exp16 = ep_act_exp16, .pack_rows = ep_ffn_generic_pack_pairs,        \
    .lay = ep_ffn_generic_lay_pairs

#endif
