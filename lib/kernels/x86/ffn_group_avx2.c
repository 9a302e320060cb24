/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups and of w8a8, for AVX2 and FMA. */
#include "kernels/ffn_int8.h"
#include "kernels/x86/ffn_vector_avx2.h"
#include "kernels/x86/ffn_x86.h"

/* how many quads stay in the nearest cache while the outputs, eight at a time, use them */
#define INT8_BLOCK 32
#define INT8_BLOCK_BYTES (INT8_BLOCK * 4 * EP_FFN_PANEL)

/* What is subtracted from codes as integers: 8 for int4, 0 for uint4. */
typedef __m256i code_lookup;

INLINE code_lookup code_lookup_of(ep_weight_format format)
{
    return _mm256_set1_epi32(ep_weight_format_codes(format) == EP_CODES_UINT4 ? 0 : 8);
}

/* The lowest codes of eight words, exactly widened. */
INLINE vector widen_nibbles(ep_weight_codes codes, code_lookup bias, __m256i words)
{
    if (codes == EP_CODES_INT4) {
        return _mm256_cvtepi32_ps(
            _mm256_sub_epi32(_mm256_and_si256(words, _mm256_set1_epi32(15)), bias));
    }
    /* the instruction uses three bits */
    const vector table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i sign =
        _mm256_and_si256(_mm256_slli_epi32(words, 28), _mm256_set1_epi32((int)0x80000000u));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, words), _mm256_castsi256_ps(sign));
}

INLINE void load_nibbles(ep_weight_codes codes, code_lookup bias, const uint8_t *group, uint32_t k,
                         uint32_t strip, vector w[VECTORS])
{
    const uint32_t first = vector_output(strip, 0);
    const uint8_t *pair = group + (size_t)(k / 2) * 64 + 4 * (first & 8u);
    const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)pair);
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
        const int shift = (int)(4 * (first / 16) + 16 * (k & 1u)) + 4 * j;
        w[j] = widen_nibbles(codes, bias, _mm256_srl_epi32(words, _mm_cvtsi32_si128(shift)));
    }
}

#include "kernels/x86/ffn_group_portable.h"

void ep_ffn_avx2_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    portable_group_panel(format, a, rows, panel, k_count, next, c);
}

/*
 * Eight outputs over n quads; fetches as many bytes from ahead on. Multiplies |w| as unsigned by a
 * with w's sign. The sum of two products is at most 2 * 128 * 127, which fits 16 bits, since rows
 * never contain -128.
 */
INLINE void int8_eight(const int rows, const int8_t *a, const uint8_t *b, uint32_t n, bool first,
                       const uint8_t *ahead, int32_t *sums)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m256i *from = (const __m256i *)(const void *)(sums + r * EP_FFN_PANEL);
        acc[r] = first ? _mm256_setzero_si256() : _mm256_loadu_si256(from);
    }
    for (uint32_t q = 0; q < n; q++, b += 4 * EP_FFN_PANEL, a += 4 * rows) {
        const __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)b);
        const __m256i magnitude = _mm256_abs_epi8(w);
        if (q % 2 == 0) {
            _mm_prefetch((const char *)ahead + 32 * (size_t)q, _MM_HINT_T0);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t four;
            __builtin_memcpy(&four, a + 4 * r, sizeof(four));
            __m256i signed_a = _mm256_sign_epi8(_mm256_set1_epi32(four), w);
            acc[r] = _mm256_add_epi32(
                acc[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_a), ones));
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        _mm256_storeu_si256((__m256i *)(void *)(sums + r * EP_FFN_PANEL), acc[r]);
    }
}

typedef void (*eight_func)(const int8_t *a, const uint8_t *b, uint32_t n, bool first,
                           const uint8_t *ahead, int32_t *sums);

#define EIGHT(rows, name)                                                                          \
    static void name##_##rows(const int8_t *a, const uint8_t *b, uint32_t n, bool first,           \
                              const uint8_t *ahead, int32_t *sums)                                 \
    {                                                                                              \
        int8_eight(rows, a, b, n, first, ahead, sums);                                             \
    }
EP_FFN_BY_ROWS(eight_func, eights, EIGHT)

static void int8_sums(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t quads,
                      int32_t *sums)
{
    for (uint32_t q = 0; q < quads; q += INT8_BLOCK) {
        const uint32_t n = quads - q < INT8_BLOCK ? quads - q : INT8_BLOCK;
        for (uint32_t o = 0; o < EP_FFN_PANEL; o += 8) {
            const uint8_t *block = panel + (size_t)q * 4 * EP_FFN_PANEL;
            eights[rows - 1](a + (size_t)q * 4 * rows, block + 4 * (size_t)o, n, q == 0,
                             block + INT8_BLOCK_BYTES + o * (INT8_BLOCK_BYTES / EP_FFN_PANEL),
                             sums + o);
        }
    }
}

void ep_ffn_avx2_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                            const float *row_scales, const uint8_t *next, float *c)
{
    (void)next;
    ep_ffn_int8_panel_of(int8_sums, a, rows, panel, k_count, row_scales, c);
}

void ep_ffn_avx2_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                           uint32_t k_count, int8_t *a, float *scales)
{
    ep_ffn_int8_rows(batch, first_row, rows, k_count, a, scales);
}
