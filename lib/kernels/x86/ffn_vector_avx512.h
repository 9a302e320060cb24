/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of tiles on AVX-512F: 16 floats, four per tile, which has all outputs of a panel.
 * Included only by files with instruction set flags. */
#ifndef EP_KERNELS_X86_FFN_VECTOR_AVX512_H
#define EP_KERNELS_X86_FFN_VECTOR_AVX512_H

#include <immintrin.h>

#include "kernels/ffn_tile.h"

#define VECTORS 4
#define VECTOR_FLOATS 16
#define STRIPS 1 /* tiles to a panel */

typedef __m512 vector;

/* The first output of a tile's vector j. */
INLINE uint32_t vector_output(uint32_t strip, int j)
{
    return strip + 16 * (uint32_t)j;
}

INLINE vector vector_zero(void)
{
    return _mm512_setzero_ps();
}

INLINE vector vector_load(const void *from)
{
    return _mm512_load_ps(from);
}

INLINE vector vector_load_any(const void *from)
{
    return _mm512_loadu_ps(from);
}

INLINE void vector_store(float *to, vector v)
{
    _mm512_store_ps(to, v);
}

INLINE void vector_store_any(float *to, vector v)
{
    _mm512_storeu_ps(to, v);
}

/* A line of 256 bytes. */
INLINE void vector_load_words(const uint8_t *line, vector w[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        w[j] = vector_load(line + 64 * j);
    }
}

/* A number, or a pair or quad of numbers, copied to all lanes. */
INLINE vector vector_all(const float *from)
{
    return _mm512_set1_ps(*from);
}

INLINE vector vector_mul(vector a, vector b)
{
    return _mm512_mul_ps(a, b);
}

INLINE vector vector_fma(vector a, vector b, vector c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INLINE vector vector_fnma(vector a, vector b, vector c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

/* Widens the bf16 in the low halves of words; the next one, those in the high halves. */
INLINE vector vector_low_halves(vector v)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16));
}

INLINE vector vector_high_halves(vector v)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0xffff0000u)));
}

INLINE vector vector_of_f16(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

INLINE vector vector_of_bf16(const uint8_t *from)
{
    const __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m128i load_bytes(const uint8_t *from)
{
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

INLINE vector vector_of_int8(const uint8_t *from)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(from)));
}

INLINE vector vector_of_uint8(const uint8_t *from)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(from)));
}

/* Moves exponent and mantissa to their places, then multiplies by a power of two for the different
 * exponent biases. */
INLINE vector vector_of_e4m3(const uint8_t *from)
{
    const __m512i wide = _mm512_cvtepi8_epi32(load_bytes(from));
    const __m512i bits =
        _mm512_and_si512(_mm512_slli_epi32(wide, 20), _mm512_set1_epi32((int)0x87f00000u));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}

INLINE vector vector_of_e8m0(const uint8_t *from)
{
    const __m512i codes = _mm512_cvtepu8_epi32(load_bytes(from));
    const __mmask16 least = _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512());
    return _mm512_castsi512_ps(
        _mm512_mask_mov_epi32(_mm512_slli_epi32(codes, 23), least, _mm512_set1_epi32(0x00400000)));
}

/* Adds the inputs of a line's rows to their sums, one lane per row. rows is a constant. */
INLINE vector vector_add_rows(const int rows, vector sums, const float *a)
{
    return _mm512_add_ps(sums, _mm512_maskz_loadu_ps((__mmask16)((1u << rows) - 1u), a));
}

#endif
