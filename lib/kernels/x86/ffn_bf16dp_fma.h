/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `bf16dp` on processors with fused multiply-adds and without AVX-512 BF16. With FTZ and DAZ set one of them is
 * ep_bf16dp_fma: tiny is decided after rounding there too. They are set around the dot products alone.
 * Included by files with instruction set flags, which first define VECTOR with its operations:
 *     VECTOR_FLOATS  VECTORS (of a tile)  vector_zero()  vector_load(p)  vector_store(p, v)  vector_fma(a, b, c)
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

/* Where several tiles share a row's pairs, their members are widened once into memory, odd and even in turn; one tile widens
 * them in registers. */
#if VECTORS * VECTOR_FLOATS < EP_FFN_PANEL
#define WORDS_OF_PAIR 2
#define all_odd(x, r) vector_all((x) + 2 * (r))
#define all_even(x, r) vector_all((x) + 2 * (r) + 1)
#else
#define WORDS_OF_PAIR 1
#define all_odd(x, r) vector_odd_of(vector_all((x) + (r)))
#define all_even(x, r) vector_even_of(vector_all((x) + (r)))
#endif

/* One register tile over n lines: outputs first..first + TILE_OUTPUTS - 1. x: above. fresh: c is not read. rows is a constant. */
INLINE void tile(const int rows, const float *x, const uint32_t *b, uint32_t n, bool fresh, uint32_t first, float *c)
{
    VECTOR acc[EP_FFN_CHUNK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = fresh ? vector_zero() : vector_load(c + r * EP_FFN_PANEL + first + j * VECTOR_FLOATS);
        }
    }
    for (uint32_t line = 0; line < n; line++, x += WORDS_OF_PAIR * rows, b += LINE_WORDS) {
        VECTOR w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = vector_odd_of(vector_load((const float *)(const void *)(b + first + j * VECTOR_FLOATS)));
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
            w[j] = vector_even_of(vector_load((const float *)(const void *)(b + first + j * VECTOR_FLOATS)));
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
#define TILE(rows)                                                                                           \
    static __attribute__((noinline)) void tile_##rows(const float *a, const uint32_t *b, uint32_t n, bool fresh, float *c) \
    {                                                                                                        \
        float room[WORDS_OF_PAIR == 1 ? 1 : BLOCK_LINES * 2 * rows];                                         \
        const float *x = inputs(a, n * rows, room);                                                          \
        for (uint32_t first = 0; first < EP_FFN_PANEL; first += TILE_OUTPUTS) {                              \
            tile(rows, x, b, n, fresh, first, c);                                                            \
        }                                                                                                    \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

static void (*const tiles[EP_FFN_CHUNK_ROWS])(const float *a, const uint32_t *b, uint32_t n, bool fresh, float *c) = {
    tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

static void fma_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel, uint32_t lines,
                      const uint8_t *next, float *c)
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
            tiles[chunk_rows - 1](a + first_row * lines + (size_t)line * chunk_rows, b, n, line == 0,
                                  c + first_row * EP_FFN_PANEL);
        }
    }
    _mm_setcsr(before);
}

/* The scaled chains of one chunk; here denormals are kept. */
static void add_group(ep_weight_format format, const uint8_t *scales, const float *chain, uint32_t rows, bool fresh, float *c)
{
    float scale[EP_FFN_PANEL];
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        scale[o] = ep_ffn_generic_scale(format, scales, o);
    }
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            const size_t at = (size_t)r * EP_FFN_PANEL + o;
            c[at] = ep_bf16dp_add_group(fresh ? 0.0f : c[at], chain[at], scale[o]);
        }
    }
}

/* A group's codes become pairs once, for all chunks. */
static void fma_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                            const uint8_t *next, float *c)
{
    enum { GROUP_LINES_MAX = EP_F8_BLOCK / 2 };
    _Alignas(64) uint32_t pairs[GROUP_LINES_MAX * LINE_WORDS];
    _Alignas(64) float chain[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];
    (void)next;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t lines = ep_ffn_lines(EP_FFN_FAMILY_BF16DP, k_count);
    const uint32_t group = ep_weight_group_columns(format);
    const bool is_mx = ep_weight_format_is_mx(format);
    const unsigned before = _mm_getcsr();
    for (uint32_t k = 0; k < k_count; k += group, panel += ep_ffn_group_bytes(format)) {
        const uint32_t n = k_count - k < group ? k_count - k : group;
        const uint32_t group_lines = n / 2 + n % 2;
        for (uint32_t line = 0; line < group_lines; line++) {
            ep_ffn_generic_widen_pairs(format, panel, line, pairs + line * LINE_WORDS);
        }
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + first_row * lines + (size_t)k / 2 * chunk_rows;
            float *sums = c + first_row * EP_FFN_PANEL;
            _mm_setcsr(before | FLUSH_TO_ZERO);
            tiles[chunk_rows - 1](x, pairs, group_lines, !is_mx || k == 0, is_mx ? sums : chain);
            _mm_setcsr(before);
            if (!is_mx) {
                add_group(format, panel + ep_ffn_group_code_bytes(format), chain, chunk_rows, k == 0, sums);
            }
        }
    }
}

/* A plain loop: the compiler makes it vector code of the file's instruction set. */
static void fma_activate(ep_activation activation, const ep_activation_numbers *numbers, const float *c, uint32_t rows,
                         float *h, size_t stride)
{
    ep_act_rows(activation, numbers, __builtin_assume_aligned(c, 64), rows, __builtin_assume_aligned(h, 64), stride);
}

static void fma_exp16(const float *x, float *out)
{
    for (uint32_t i = 0; i < 16; i++) {
        out[i] = ep_act_exp(x[i]);
    }
}

#endif
