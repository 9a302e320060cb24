/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of 8 with AVX2 and F16C, four at a time. Other blocks and the rest go to the plain
 * form. */
#include <immintrin.h>
#include <string.h>

#include "moe/quantize_block.h"

#define INLINE static inline __attribute__((always_inline))
#define BLOCK EP_QUANT_BLOCK_I8
#define GROUP 4u /* blocks at a time */
#define ROUND_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

_Static_assert(BLOCK == 8, "a block is one register");

INLINE __m256 load8(const void *row, ep_dtype dtype, size_t i)
{
    const uint8_t *at =
        (const uint8_t *)row + i * (dtype == EP_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t));
    if (dtype == EP_DTYPE_F32) {
        return _mm256_loadu_ps((const float *)(const void *)at);
    }
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)at);
    return dtype == EP_DTYPE_F16
               ? _mm256_cvtph_ps(halves)
               : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The greatest magnitudes of the four blocks. */
INLINE __m128i amax4(const __m256 value[GROUP])
{
    __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m[GROUP];
    for (unsigned b = 0; b < GROUP; b++) {
        m[b] = _mm256_and_si256(_mm256_castps_si256(value[b]), mask);
    }
    __m256i m01 =
        _mm256_max_epi32(_mm256_unpacklo_epi32(m[0], m[1]), _mm256_unpackhi_epi32(m[0], m[1]));
    __m256i m23 =
        _mm256_max_epi32(_mm256_unpacklo_epi32(m[2], m[3]), _mm256_unpackhi_epi32(m[2], m[3]));
    __m256i all =
        _mm256_max_epi32(_mm256_unpacklo_epi64(m01, m23), _mm256_unpackhi_epi64(m01, m23));
    return _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

/* The scales must be finite and above 0. */
INLINE void store_scales(void *scales, ep_dtype dtype, size_t b, __m128 s)
{
    uint8_t *at =
        (uint8_t *)scales + b * (dtype == EP_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t));
    if (dtype == EP_DTYPE_F32) {
        _mm_storeu_ps((float *)(void *)at, s);
        return;
    }
    __m128i narrow;
    if (dtype == EP_DTYPE_F16) {
        narrow = _mm_cvtps_ph(s, ROUND_NEAREST);
    } else {
        __m128i u = _mm_castps_si128(s);
        __m128i odd = _mm_and_si128(_mm_srli_epi32(u, 16), _mm_set1_epi32(1));
        u = _mm_srli_epi32(_mm_add_epi32(u, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
        narrow = _mm_packus_epi32(u, u);
    }
    _mm_storel_epi64((__m128i *)(void *)at, narrow);
}

INLINE __m256i code8(__m256 value, __m128 s, int block)
{
    __m256 divisor = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(s), _mm256_set1_epi32(block));
    __m256 q = _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_div_ps(value, divisor), ROUND_NEAREST));
    q = _mm256_max_ps(_mm256_min_ps(q, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    return _mm256_cvtps_epi32(q);
}

INLINE void to_blocks(const void *row, ep_dtype dtype, size_t n, int8_t *out, void *scales)
{
    size_t b = 0;
    for (; (b + GROUP) * BLOCK <= n; b += GROUP) {
        __m256 value[GROUP];
        for (unsigned i = 0; i < GROUP; i++) {
            value[i] = load8(row, dtype, (b + i) * BLOCK);
        }
        __m128i amax = amax4(value);
        __m128 s = _mm_mul_ps(_mm_castsi128_ps(amax), _mm_set1_ps(1.0f / 127.0f));
        __m128i is_plain = _mm_and_si128(_mm_cmpgt_epi32(_mm_set1_epi32(0x7f800000), amax),
                                         _mm_cmpgt_epi32(_mm_castps_si128(s), _mm_setzero_si128()));
        if (_mm_movemask_epi8(is_plain) != 0xffff) {
            for (size_t i = b; i < b + GROUP; i++) {
                ep_quant_block_to_i8(row, dtype, n, i, out, scales);
            }
            continue;
        }
        store_scales(scales, dtype, b, s);
        __m256i low = _mm256_packs_epi32(code8(value[0], s, 0), code8(value[1], s, 1));
        __m256i high = _mm256_packs_epi32(code8(value[2], s, 2), code8(value[3], s, 3));
        /* Packing works within register halves, so groups of four codes come out as 0 2 4 6 | 1 3 5
         * 7. */
        __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(void *)(out + b * BLOCK), codes);
    }
    for (; b < ep_quant_blocks(n, BLOCK); b++) {
        ep_quant_block_to_i8(row, dtype, n, b, out, scales);
    }
}

/* Rounded to the type, in f32; every NaN becomes the positive quiet NaN. */
INLINE __m256 round8(__m256 value, ep_dtype dtype)
{
    __m256 rounded = value;
    if (dtype == EP_DTYPE_F16) {
        rounded = _mm256_cvtph_ps(_mm256_cvtps_ph(value, ROUND_NEAREST));
    } else if (dtype == EP_DTYPE_BF16) {
        __m256i u = _mm256_castps_si256(value);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        rounded = _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)));
    }
    __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_ps(rounded, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan);
}

INLINE void from_blocks(const int8_t *row, const void *scales, ep_dtype dtype, size_t n, float *out)
{
    size_t blocks = ep_quant_blocks(n, BLOCK);
    size_t b = 0;
    /* Eight scales are read at a time. */
    for (; b + BLOCK <= blocks && (b + GROUP) * BLOCK <= n; b += GROUP) {
        __m256 s = load8(scales, dtype, b);
        for (unsigned i = 0; i < GROUP; i++) {
            size_t at = (b + i) * BLOCK;
            __m128i codes = _mm_loadl_epi64((const __m128i *)(const void *)(row + at));
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
                                         _mm256_permutevar8x32_ps(s, _mm256_set1_epi32((int)i)));
            _mm256_storeu_ps(out + at, round8(value, dtype));
        }
    }
    for (; b < blocks; b++) {
        ep_quant_block_from_i8(row, scales, dtype, n, b, out);
    }
}

void ep_quant_to_i8_blocks_avx2(const void *row, ep_dtype dtype, size_t n, int8_t *out,
                                void *scales)
{
    if (dtype == EP_DTYPE_BF16) {
        to_blocks(row, EP_DTYPE_BF16, n, out, scales);
    } else if (dtype == EP_DTYPE_F16) {
        to_blocks(row, EP_DTYPE_F16, n, out, scales);
    } else {
        to_blocks(row, EP_DTYPE_F32, n, out, scales);
    }
}

void ep_quant_from_i8_blocks_avx2(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                                  float *out)
{
    if (dtype == EP_DTYPE_BF16) {
        from_blocks(row, scales, EP_DTYPE_BF16, n, out);
    } else if (dtype == EP_DTYPE_F16) {
        from_blocks(row, scales, EP_DTYPE_F16, n, out);
    } else {
        from_blocks(row, scales, EP_DTYPE_F32, n, out);
    }
}
