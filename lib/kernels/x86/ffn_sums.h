/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sums of a tile: up to EP_FFN_CHUNK_ROWS rows x VECTORS vectors of outputs, one form for all
 * families and instruction sets. The including file has the vectors (ffn_vector_avx2.h,
 * ffn_vector_avx512.h) and defines before
 *     vector_step(acc, w, x)     adds to acc the products of weights w and the input x in all lanes
 *     vector_input(part, from)   loads such an input, if it is not simply the float at from
 */
#ifndef EP_KERNELS_X86_FFN_SUMS_H
#define EP_KERNELS_X86_FFN_SUMS_H

#ifndef vector_input
#define vector_input(part, from) vector_all(from)
#endif

/* fresh: c is not read. */
INLINE void load_sums(const int rows, bool fresh, uint32_t strip, const float *c,
                      vector acc[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] =
                fresh ? vector_zero() : vector_load(c + r * EP_FFN_PANEL + vector_output(strip, j));
        }
    }
}

INLINE void store_sums(const int rows, uint32_t strip, vector acc[][VECTORS], float *c)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            vector_store(c + r * EP_FFN_PANEL + vector_output(strip, j), acc[r][j]);
        }
    }
}

/* Adds the products of a line's vector j of weights for all rows. */
INLINE void add_vector(const int rows, vector w, const int j, const float *a, vector acc[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        acc[r][j] = vector_step(acc[r][j], w, vector_all(a + r));
    }
}

/* Adds those of a line, or of a part of it, row by row. */
INLINE void add_part(const int rows, const int part, const vector w[VECTORS], const float *a,
                     vector acc[][VECTORS])
{
    (void)part;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const vector x = vector_input(part, a + r);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = vector_step(acc[r][j], w[j], x);
        }
    }
}

INLINE void add_line(const int rows, const vector w[VECTORS], const float *a, vector acc[][VECTORS])
{
    add_part(rows, 0, w, a, acc);
}

#endif
