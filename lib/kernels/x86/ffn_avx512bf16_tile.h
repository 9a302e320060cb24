/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Register tiles over lines of pairs of bf16, for AVX-512 BF16: up to 6 rows x 64 outputs, two k
 * per step. Included by files with instruction set flags.
 */
#ifndef EP_KERNELS_X86_FFN_AVX512BF16_TILE_H
#define EP_KERNELS_X86_FFN_AVX512BF16_TILE_H

#include <immintrin.h>

#include "kernels/ffn_kernel.h"

#define VECTORS 4       /* of 16 outputs: one panel line */
#define LINE_BYTES 256u /* of a panel */

/* What a tile fetches into the second level cache while it computes: cache lines from next on, per
 * line of b. */
typedef struct {
    const uint8_t *next;
    size_t step;
} prefetch;

static inline __attribute__((always_inline)) void load_sums(const int rows, bool first,
                                                            const float *c, __m512 acc[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(c + r * EP_FFN_PANEL + 16 * j);
        }
    }
}

static inline __attribute__((always_inline)) void store_sums(const int rows, __m512 acc[][VECTORS],
                                                             float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            _mm512_store_ps(c + r * EP_FFN_PANEL + 16 * j, acc[r][j]);
        }
    }
}

/* One register tile over n lines. first: c is not read. rows and fetched are constants wherever
 * this is inlined. */
static inline __attribute__((always_inline)) void tile(const int rows, const int fetched,
                                                       prefetch ahead, const float *a,
                                                       const uint8_t *b, uint32_t n, bool first,
                                                       float *c)
{
    __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
    load_sums(rows, first, c, acc);
    for (uint32_t line = 0; line < n; line++) {
        __m512i w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            w[j] = _mm512_load_si512(b + 64 * j);
        }
#pragma GCC unroll 4
        for (int q = 0; q < fetched; q++) {
            _mm_prefetch((const char *)ahead.next + 64 * q, _MM_HINT_T1);
        }
        ahead.next += ahead.step;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512bh x = (__m512bh)_mm512_castps_si512(_mm512_set1_ps(a[r]));
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x, (__m512bh)w[j]);
            }
        }
        a += rows;
        b += LINE_BYTES;
    }
    store_sums(rows, acc, c);
}

typedef void (*tile_func)(prefetch ahead, const float *a, const uint8_t *b, uint32_t n, bool first,
                          float *c);

/* tiles_NAME[rows - 1]: tiles that fetch so many cache lines per line of b. */
#define TILE(rows, name, fetched)                                                                  \
    static void tile_##name##_##rows(prefetch ahead, const float *a, const uint8_t *b, uint32_t n, \
                                     bool first, float *c)                                         \
    {                                                                                              \
        tile(rows, fetched, ahead, a, b, n, first, c);                                             \
    }
#define TILES(name, fetched)                                                                       \
    TILE(1, name, fetched)                                                                         \
    TILE(2, name, fetched)                                                                         \
    TILE(3, name, fetched)                                                                         \
    TILE(4, name, fetched)                                                                         \
    TILE(5, name, fetched)                                                                         \
    TILE(6, name, fetched)                                                                         \
    static const tile_func tiles_##name[EP_FFN_CHUNK_ROWS] = {tile_##name##_1, tile_##name##_2,    \
                                                              tile_##name##_3, tile_##name##_4,    \
                                                              tile_##name##_5, tile_##name##_6};

#endif
