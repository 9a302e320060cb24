/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `bf16dp` on processors with fused multiply-adds and without AVX-512 BF16. With FTZ and DAZ
 * set one of them is ep_bf16dp_fma: tiny is decided after rounding there too. They are set around
 * the dot products alone. Included by files with instruction set flags, which first define VECTOR
 * with its operations:
 *     VECTOR_FLOATS  VECTORS (of a tile)
 *     vector_zero()  vector_load(p)  vector_store(p, v)  vector_fma(a, b, c)
 *     vector_odd_of(v), vector_even_of(v)  the members of pairs, widened
 *     vector_all(p)  the float at p in all lanes
 */
#ifndef EP_KERNELS_X86_FFN_BF16DP_FMA_H
#define EP_KERNELS_X86_FFN_BF16DP_FMA_H

#include <immintrin.h>

#include "kernels/bf16dp.h"
#include "kernels/ffn_activation.h"
#include "kernels/generic/ffn_generic.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE static inline __attribute__((always_inline))
#define LINE_WORDS EP_FFN_PANEL /* pairs of a panel's line */
#define TILE_OUTPUTS (VECTORS * VECTOR_FLOATS)
#define FLUSH_TO_ZERO 0x8040u /* MXCSR: FTZ and DAZ */
#define PREFETCH_BYTES 2048

#define BLOCK_LINES (EP_FFN_K_BLOCK / 2) /* 16 KiB of a panel stay near while all chunks pass */

/* Where several tiles share a row's pairs, their members are widened once into memory, odd and even
 * in turn; one tile widens them in registers. */
#if VECTORS * VECTOR_FLOATS < EP_FFN_PANEL
#define WORDS_OF_PAIR 2
#define all_odd(x, r) vector_all((x) + 2 * (r))
#define all_even(x, r) vector_all((x) + 2 * (r) + 1)
#else
#define WORDS_OF_PAIR 1
#define all_odd(x, r) vector_odd_of(vector_all((x) + (r)))
#define all_even(x, r) vector_even_of(vector_all((x) + (r)))
#endif

/* One register tile over n lines: outputs first..first + TILE_OUTPUTS - 1. x: above. fresh: c is
 * not read. rows is a constant. */
INLINE void tile(const int rows, const float *x, const uint32_t *b, uint32_t n, bool fresh,
                 uint32_t first, float *c)
{
    VECTOR acc[EP_FFN_CHUNK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = fresh ? vector_zero()
                              : vector_load(c + r * EP_FFN_PANEL + first + j * VECTOR_FLOATS);
        }
    }
    for (uint32_t line = 0; line < n; line++, x += WORDS_OF_PAIR * rows, b += LINE_WORDS) {
        VECTOR w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = vector_odd_of(
                vector_load((const float *)(const void *)(b + first + j * VECTOR_FLOATS)));
        }
        _mm_prefetch((const char *)(b + first) + PREFETCH_BYTES, _MM_HINT_T1);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const VECTOR all = all_odd(x, r);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                acc[r][j] = vector_fma(w[j], all, acc[r][j]);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = vector_even_of(
                vector_load((const float *)(const void *)(b + first + j * VECTOR_FLOATS)));
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const VECTOR all = all_even(x, r);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                acc[r][j] = vector_fma(w[j], all, acc[r][j]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            vector_store(c + r * EP_FFN_PANEL + first + j * VECTOR_FLOATS, acc[r][j]);
        }
    }
}

/* What the tiles of a chunk read: a itself, or its pairs widened into room. */
INLINE const float *inputs(const float *a, uint32_t count, float *room)
{
    if (WORDS_OF_PAIR == 1) {
        return a;
    }
    for (uint32_t i = 0; i < count; i++) {
        room[2 * i] = ep_f32_from_bits(ep_f32_bits(a[i]) & 0xffff0000u);
        room[2 * i + 1] = ep_f32_from_bits(ep_f32_bits(a[i]) << 16);
    }
    return room;
}

/* n is at most BLOCK_LINES. Not inlined: no arithmetic may wander out of where MXCSR is set. */
#define TILE(rows)                                                                                 \
    static __attribute__((noinline)) void tile_##rows(const float *a, const uint32_t *b,           \
                                                      uint32_t n, bool fresh, float *c)            \
    {                                                                                              \
        float room[WORDS_OF_PAIR == 1 ? 1 : BLOCK_LINES * 2 * rows];                               \
        const float *x = inputs(a, n * rows, room);                                                \
        for (uint32_t first = 0; first < EP_FFN_PANEL; first += TILE_OUTPUTS) {                    \
            tile(rows, x, b, n, fresh, first, c);                                                  \
        }                                                                                          \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

static void (*const tiles[EP_FFN_CHUNK_ROWS])(const float *a, const uint32_t *b, uint32_t n,
                                              bool fresh, float *c) = {tile_1, tile_2, tile_3,
                                                                       tile_4, tile_5, tile_6};

static void fma_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                      uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    (void)next;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_TO_ZERO);
    for (uint32_t line = 0; line < lines; line += BLOCK_LINES) {
        const uint32_t n = lines - line < BLOCK_LINES ? lines - line : BLOCK_LINES;
        const uint32_t *b = (const uint32_t *)(const void *)panel + (size_t)line * LINE_WORDS;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            tiles[chunk_rows - 1](a + first_row * lines + (size_t)line * chunk_rows, b, n,
                                  line == 0, c + first_row * EP_FFN_PANEL);
        }
    }
    _mm_setcsr(before);
}

/* Chains of a chunk's rows with weights of 1. Not inlined, as the tiles. */
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

/* The scaled chains of one chunk; here denormals are kept. offsets: NULL none. */
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

/* A group's codes as pairs, and what ends its chains. */
typedef struct wide_group {
    _Alignas(64) uint32_t pairs[EP_F8_BLOCK / 2 * LINE_WORDS];
    uint32_t lines;
    bool is_mx; /* pairs have their scales */
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
    tiles[rows - 1](x, group->pairs, group->lines, !group->is_mx || fresh,
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

/* A group's codes become pairs once, for all chunks. */
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

#endif
