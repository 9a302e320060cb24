/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Register tiles over the plain lines of a panel: one form for all families and instruction sets.
 * The including file has the vectors and vector_step (ffn_sums.h) and defines before
 *     LINE_PARTS                               in how many parts a line's weights are loaded, 1 or
 *                                              2
 *     LINE_INPUTS                              inputs of a row per line, 1 or LINE_PARTS
 *     line_bytes(dtype)
 *     load_line(dtype, part, line, strip, w)   dtype and part are constants
 * Inputs are [line][LINE_INPUTS][rows].
 */
#ifndef EP_KERNELS_X86_FFN_LINES_H
#define EP_KERNELS_X86_FFN_LINES_H

#include "kernels/x86/ffn_sums.h"

/* One tile over n lines. fetched: cache lines fetched per line of b. fresh: c is not read. rows,
 * dtype and fetched are constants wherever this is inlined. */
INLINE void tile(const int rows, const ep_dtype dtype, const int fetched, prefetch ahead,
                 const float *a, const uint8_t *b, uint32_t n, bool fresh, uint32_t strip, float *c)
{
    vector acc[EP_FFN_CHUNK_ROWS][VECTORS];
    load_sums(rows, fresh, strip, c, acc);
    for (uint32_t line = 0; line < n; line++, a += LINE_INPUTS * rows, b += line_bytes(dtype)) {
#pragma GCC unroll 4
        for (int q = 0; q < fetched; q++) {
            _mm_prefetch((const char *)ahead.next + 64 * q, _MM_HINT_T1);
        }
        ahead.next += ahead.step;
#pragma GCC unroll 2
        for (int part = 0; part < LINE_PARTS; part++) {
            vector w[VECTORS];
            load_line(dtype, part, b, strip, w);
            add_part(rows, part, w, a + part * (LINE_INPUTS - 1) * rows, acc);
        }
    }
    store_sums(rows, strip, acc, c);
}

/* All outputs of a panel for n lines. */
typedef void (*tile_func)(prefetch ahead, const float *a, const uint8_t *b, uint32_t n, bool fresh,
                          float *c);

#define TILE(rows, name, dtype, fetched)                                                           \
    static void name##_##rows(prefetch ahead, const float *a, const uint8_t *b, uint32_t n,        \
                              bool fresh, float *c)                                                \
    {                                                                                              \
        for (uint32_t strip = 0; strip < STRIPS; strip++) {                                        \
            tile(rows, dtype, fetched, ahead, a, b, n, fresh, strip, c);                           \
        }                                                                                          \
    }
#define TILES(name, dtype, fetched) EP_FFN_BY_ROWS(tile_func, name, TILE, dtype, fetched)

#endif
