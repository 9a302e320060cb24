/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of tiles on AVX2, FMA and F16C: 8 floats, two per tile, four tiles per panel.
 * ffn_vector_avx512.h says what each function does. Included only by files with instruction set
 * flags. */
#ifndef EP_KERNELS_X86_FFN_VECTOR_AVX2_H
#define EP_KERNELS_X86_FFN_VECTOR_AVX2_H

#include <immintrin.h>

#include "kernels/ffn_tile.h"

#define VECTORS 2
#define VECTOR_FLOATS 8
#define STRIPS 4

typedef __m256 vector;

/* A tile has outputs first..first+7 and first+16..first+23: these are what eight 32-bit lanes of a
 * bf16 panel widen to, and nibbles v and v + 1 of eight words of 4-bit codes. */
INLINE uint32_t vector_output(uint32_t strip, int j)
{
    return (strip >> 1) * 32 + (strip & 1) * 8 + 16 * (uint32_t)j;
}

INLINE vector vector_zero(void)
{
    return _mm256_setzero_ps();
}

INLINE vector vector_load(const void *from)
{
    return _mm256_load_ps(from);
}

INLINE vector vector_load_any(const void *from)
{
    return _mm256_loadu_ps(from);
}

INLINE void vector_store(float *to, vector v)
{
    _mm256_store_ps(to, v);
}

INLINE void vector_store_any(float *to, vector v)
{
    _mm256_storeu_ps(to, v);
}

INLINE vector vector_all(const float *from)
{
    return _mm256_broadcast_ss(from);
}

INLINE vector vector_mul(vector a, vector b)
{
    return _mm256_mul_ps(a, b);
}

INLINE vector vector_fma(vector a, vector b, vector c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE vector vector_fnma(vector a, vector b, vector c)
{
    return _mm256_fnmadd_ps(a, b, c);
}

INLINE vector vector_low_halves(vector v)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16));
}

INLINE vector vector_high_halves(vector v)
{
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32((int)0xffff0000u)));
}

INLINE vector vector_of_f16(const uint8_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

INLINE vector vector_of_bf16(const uint8_t *from)
{
    const __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

INLINE __m128i load_bytes(const uint8_t *from)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)from);
}

INLINE vector vector_of_int8(const uint8_t *from)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(from)));
}

INLINE vector vector_of_uint8(const uint8_t *from)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_bytes(from)));
}

INLINE vector vector_of_e4m3(const uint8_t *from)
{
    const __m256i wide = _mm256_cvtepi8_epi32(load_bytes(from));
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi32(wide, 20), _mm256_set1_epi32((int)0x87f00000u));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

INLINE vector vector_of_e8m0(const uint8_t *from)
{
    const __m256i codes = _mm256_cvtepu8_epi32(load_bytes(from));
    const __m256i least = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_or_si256(
        _mm256_slli_epi32(codes, 23), _mm256_and_si256(least, _mm256_set1_epi32(0x00400000))));
}

INLINE vector vector_add_rows(const int rows, vector sums, const float *a)
{
    const __m256i lanes =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(rows), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_add_ps(sums, _mm256_maskload_ps(a, lanes));
}

#endif
