/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the AVX-512 kernels: the activation, inputs and outputs of a row, and interleaving of
 * rows. Needs only AVX-512F. Included only by files with instruction set flags. */
#ifndef EP_KERNELS_X86_FFN_AVX512_H
#define EP_KERNELS_X86_FFN_AVX512_H

#include <immintrin.h>

#include "kernels/ffn_activation.h"
#include "kernels/ffn_tile.h"
#include "kernels/ffn_widen.h"

#define EP_AVX512_FLOATS 16u

/* func with rows as a constant, 1..EP_FFN_CHUNK_ROWS. */
#define EP_AVX512_FOR_ROWS(rows, func, ...)                                                        \
    switch (rows) {                                                                                \
    case 1:                                                                                        \
        func(1, __VA_ARGS__);                                                                      \
        break;                                                                                     \
    case 2:                                                                                        \
        func(2, __VA_ARGS__);                                                                      \
        break;                                                                                     \
    case 3:                                                                                        \
        func(3, __VA_ARGS__);                                                                      \
        break;                                                                                     \
    case 4:                                                                                        \
        func(4, __VA_ARGS__);                                                                      \
        break;                                                                                     \
    case 5:                                                                                        \
        func(5, __VA_ARGS__);                                                                      \
        break;                                                                                     \
    default:                                                                                       \
        func(6, __VA_ARGS__);                                                                      \
        break;                                                                                     \
    }

/* ep_expf with the same steps. */
INLINE __m512 ep_avx512_exp(__m512 x)
{
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(EP_EXP_LOG2E)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EP_EXP_LN2_HIGH), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EP_EXP_LN2_LOW), r);
    __m512 p = _mm512_set1_ps(EP_EXP_C0);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EP_EXP_C1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EP_EXP_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EP_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EP_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EP_EXP_C5));
    __m512 y = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    /* Scaled in one step. ep_expf's two steps also round once, since the first of them is exact. */
    __m512 result = _mm512_scalef_ps(y, n);

    __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EP_EXP_MAX), _CMP_GT_OQ);
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EP_EXP_MIN), _CMP_LT_OQ);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    result = _mm512_mask_mov_ps(result, above, _mm512_set1_ps(INFINITY));
    result = _mm512_mask_mov_ps(result, below, _mm512_setzero_ps());
    return _mm512_mask_mov_ps(result, nan, x);
}

static inline void ep_avx512_exp16(const float *x, float *out)
{
    _mm512_storeu_ps(out, ep_avx512_exp(_mm512_loadu_ps(x)));
}

/* The usual activation of 16 values, ep_siluf(g) * u. */
INLINE __m512 ep_avx512_silu_mul(__m512 g, __m512 u)
{
    const __m512 negative =
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(g), _mm512_set1_epi32(INT32_MIN)));
    const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), ep_avx512_exp(negative));
    return _mm512_mul_ps(_mm512_div_ps(g, below), u);
}

/* Other activations are plain loops, which the compiler turns into vector code of the file's
 * instruction set, with more steps. */
static inline void ep_avx512_activate(ep_activation activation,
                                      const ep_activation_numbers *numbers, const float *c,
                                      uint32_t rows, float *h, size_t stride)
{
    if (activation != EP_ACT_SILU) {
        ep_act_rows(activation, numbers, c, rows, h, stride);
        return;
    }
    for (uint32_t r = 0; r < rows; r++, c += EP_FFN_PANEL, h += stride) {
#pragma GCC unroll 2
        for (uint32_t i = 0; i < EP_FFN_HALF_PANEL; i += EP_AVX512_FLOATS) {
            _mm512_store_ps(h + i, ep_avx512_silu_mul(_mm512_load_ps(c + i),
                                                      _mm512_load_ps(c + EP_FFN_HALF_PANEL + i)));
        }
    }
}

/* Inputs k..k + count - 1 of a row, widened; zeros after them. count 1..16. */
INLINE __m512 ep_avx512_widen(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t k,
                              uint32_t count)
{
    const ep_dtype dtype = batch->x_dtype;
    const uint8_t *x = row->x;
    __m512 wide;
    if (count < EP_AVX512_FLOATS || dtype == EP_DTYPE_F8E4M3) {
        float values[EP_AVX512_FLOATS] = {0.0f};
        ep_ffn_widen(batch, row, k, count, values);
        return _mm512_loadu_ps(values);
    }
    if (dtype == EP_DTYPE_BF16) {
        __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)(x + 2 * (size_t)k));
        wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    } else if (dtype == EP_DTYPE_F16) {
        wide =
            _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(x + 2 * (size_t)k)));
    } else if (dtype == EP_DTYPE_I8) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(x + k));
        wide = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)),
                             _mm512_set1_ps(row->x_scale));
    } else {
        wide = _mm512_loadu_ps(x + 4 * (size_t)k);
    }
    return batch->weight_on_input ? _mm512_mul_ps(_mm512_set1_ps(row->input_weight), wide) : wide;
}

/* Fetches byte `at` of the rows from first on, as far as they exist. Each row is a stream of its
 * own that is too short for hardware prefetch. */
INLINE void ep_avx512_fetch_rows(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first,
                                 size_t at)
{
#pragma GCC unroll 6
    for (uint32_t r = 0; r < rows; r++) {
        if (first + r < batch->rows_count) {
            _mm_prefetch((const char *)batch->rows[first + r].x + at, _MM_HINT_T0);
        }
    }
}

/* Fetches the memory where rows' outputs first..first + count - 1 will be written: each row has its
 * own cache lines, which a store would wait for. */
INLINE void ep_avx512_fetch_outputs(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                                    uint32_t first, uint32_t count)
{
    const size_t value_bytes = ep_dtype_bytes(batch->out_dtype);
    for (uint32_t r = first_row; r < first_row + rows; r++) {
        const char *out = (const char *)batch->rows[r].out + first * value_bytes;
        for (size_t at = 0; at < count * value_bytes; at += 64) {
            _mm_prefetch(out + at, _MM_HINT_T0);
        }
    }
}

/* The lanes l of output vector j that belong to row r; such a lane is element (16 j + l) / rows. */
INLINE __mmask16 ep_avx512_lanes_of(const uint32_t rows, uint32_t j, uint32_t r)
{
    uint32_t mask = 0;
#pragma GCC unroll 16
    for (uint32_t l = 0; l < EP_AVX512_FLOATS; l++) {
        mask |= (16 * j + l) % rows == r ? 1u << l : 0u;
    }
    return (__mmask16)mask;
}

/* Stores out, without words from number `words` on. */
INLINE void ep_avx512_store_words(float *to, uint32_t at, uint32_t words, __m512i out)
{
    if (words >= at + 16) {
        _mm512_storeu_si512(to + at, out);
    } else if (words > at) {
        _mm512_mask_storeu_epi32(to + at, (__mmask16)((1u << (words - at)) - 1u), out);
    }
}

/* ep_avx512_interleave for 6 rows: makes pairs of rows, then combines three pairs; half as many
 * steps as row by row. */
INLINE void ep_avx512_interleave6(const __m512i *lanes, uint32_t words, float *to)
{
    const __m512i first_half =
        _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second_half =
        _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    /* Pair p of output vector v is element (8 v + p) / 3 of stream (8 v + p) % 3; 0 marks the third
     * stream's places. */
    const __m512i two[3] = {_mm512_set_epi64(10, 2, 0, 9, 1, 0, 8, 0),
                            _mm512_set_epi64(5, 0, 12, 4, 0, 11, 3, 0),
                            _mm512_set_epi64(0, 15, 7, 0, 14, 6, 0, 13)};
    const __m512i third[3] = {_mm512_set_epi64(0, 0, 1, 0, 0, 0, 0, 0),
                              _mm512_set_epi64(0, 4, 0, 0, 3, 0, 0, 2),
                              _mm512_set_epi64(7, 0, 0, 6, 0, 0, 5, 0)};
    const __mmask8 is_third[3] = {0x24, 0x49, 0x92};
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; half++) {
        __m512i pairs[3];
#pragma GCC unroll 3
        for (uint32_t s = 0; s < 3; s++) {
            pairs[s] = _mm512_permutex2var_epi32(lanes[2 * s], half == 0 ? first_half : second_half,
                                                 lanes[2 * s + 1]);
        }
#pragma GCC unroll 3
        for (uint32_t v = 0; v < 3; v++) {
            const __m512i out = _mm512_permutex2var_epi64(pairs[0], two[v], pairs[1]);
            ep_avx512_store_words(
                to, 16 * (3 * half + v), words,
                _mm512_mask_permutexvar_epi64(out, is_third[v], third[v], pairs[2]));
        }
    }
}

/* to[i][r] = word i of lanes[r], i < count (1..16). rows is a constant wherever this is inlined. */
INLINE void ep_avx512_interleave(const uint32_t rows, const __m512i *lanes, uint32_t count,
                                 float *to)
{
    if (rows == 6) {
        ep_avx512_interleave6(lanes, count * rows, to);
        return;
    }
#pragma GCC unroll 6
    for (uint32_t j = 0; j < rows; j++) {
        const uint32_t at = 16 * j;
#define EP_AVX512_WORD(l) (int)((at + (l)) / rows)
        const __m512i index = _mm512_set_epi32(
            EP_AVX512_WORD(15), EP_AVX512_WORD(14), EP_AVX512_WORD(13), EP_AVX512_WORD(12),
            EP_AVX512_WORD(11), EP_AVX512_WORD(10), EP_AVX512_WORD(9), EP_AVX512_WORD(8),
            EP_AVX512_WORD(7), EP_AVX512_WORD(6), EP_AVX512_WORD(5), EP_AVX512_WORD(4),
            EP_AVX512_WORD(3), EP_AVX512_WORD(2), EP_AVX512_WORD(1), EP_AVX512_WORD(0));
#undef EP_AVX512_WORD
        __m512i out = _mm512_permutexvar_epi32(index, lanes[0]);
#pragma GCC unroll 6
        for (uint32_t r = 1; r < rows; r++) {
            out =
                _mm512_mask_permutexvar_epi32(out, ep_avx512_lanes_of(rows, j, r), index, lanes[r]);
        }
        ep_avx512_store_words(to, at, count * rows, out);
    }
}

/* ep_ffn_round_bf16 on 16 values. */
INLINE __m256i ep_avx512_round_bf16(__m512 y)
{
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q),
                                    _mm512_set1_epi32(EP_FFN_NAN_BF16));
    return _mm512_cvtepi32_epi16(rounded);
}

static inline void ep_avx512_write_row(const float *y, uint32_t count, ep_dtype dtype, void *out,
                                       uint32_t first)
{
    uint32_t i = 0;
    for (; i + EP_AVX512_FLOATS <= count; i += EP_AVX512_FLOATS) {
        const __m512 wide = _mm512_load_ps(y + i);
        uint16_t *halves = (uint16_t *)out + first + i;
        if (dtype == EP_DTYPE_BF16) {
            _mm256_storeu_si256((__m256i *)(void *)halves, ep_avx512_round_bf16(wide));
        } else {
            const __mmask16 nan = _mm512_cmp_ps_mask(wide, wide, _CMP_UNORD_Q);
            const __m512 clean = _mm512_mask_mov_ps(
                wide, nan, _mm512_castsi512_ps(_mm512_set1_epi32(EP_FFN_NAN_F32)));
            if (dtype == EP_DTYPE_F16) {
                _mm256_storeu_si256(
                    (__m256i *)(void *)halves,
                    _mm512_cvtps_ph(clean, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            } else {
                _mm512_storeu_ps((float *)out + first + i, clean);
            }
        }
    }
    for (; i < count; i++) {
        ep_ffn_write(out, dtype, first + i, y[i]);
    }
}

#endif
