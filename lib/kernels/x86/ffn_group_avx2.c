/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups and of w8a8, AVX2 and FMA: four strips of 16 outputs to a panel. */
#include "kernels/ffn_int8.h"
#include "kernels/x86/ffn_group.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_GROUP_INLINE
#define WIDE EP_WEIGHTS_F32 /* in the place of a format: a widened group */
#define STRIPS 4
#define INT8_BLOCK 32 /* quads that stay in the nearest cache while eight outputs after eight pass over them */

/* A strip is outputs first..first+7 and first+16..first+23: of 4-bit codes, nibbles v and v + 1 of eight words. */
INLINE uint32_t strip_first(uint32_t strip)
{
    return (strip >> 1) * 32 + (strip & 1) * 8;
}

/* The codes at `shift` of eight words, widened exactly. */
INLINE __m256 widen_nibbles(ep_weight_format format, __m256i words, int shift)
{
    __m256i low = _mm256_srl_epi32(words, _mm_cvtsi32_si128(shift));
    if (format == EP_WEIGHTS_INT4) {
        __m256i q = _mm256_sub_epi32(_mm256_and_si256(low, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
        return _mm256_cvtepi32_ps(q);
    }
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f); /* looks at three bits */
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(low, 28), _mm256_set1_epi32((int)0x80000000u));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, low), _mm256_castsi256_ps(sign));
}

INLINE __m256 widen_f8(const uint8_t *codes)
{
    __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)codes));
    __m256i bits = _mm256_and_si256(_mm256_slli_epi32(wide, 20), _mm256_set1_epi32((int)0x87f00000u));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

INLINE void load_line(ep_weight_format format, const uint8_t *codes, uint32_t k, uint32_t first, __m256 w[2])
{
    if (format == WIDE) {
        const float *wide = (const float *)(const void *)codes + (size_t)k * EP_FFN_PANEL + first;
        w[0] = _mm256_load_ps(wide);
        w[1] = _mm256_load_ps(wide + 16);
    } else if (format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_INT4) {
        const uint8_t *pair = codes + (size_t)(k / 2) * 64 + 4 * (first & 8u);
        const int shift = (int)(4 * (first / 16) + 16 * (k & 1u));
        __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)pair);
        w[0] = widen_nibbles(format, words, shift);
        w[1] = widen_nibbles(format, words, shift + 4);
    } else {
        w[0] = widen_f8(codes + (size_t)k * EP_FFN_PANEL + first);
        w[1] = widen_f8(codes + (size_t)k * EP_FFN_PANEL + first + 16);
    }
}

INLINE __m256 load_scales(ep_weight_format format, const uint8_t *scales, uint32_t first)
{
    if (format == EP_WEIGHTS_INT4) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(scales + 2 * first));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    if (format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8) {
        __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(scales + first)));
        __m256i least = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
        __m256i bits = _mm256_or_si256(_mm256_slli_epi32(codes, 23),
                                       _mm256_and_si256(least, _mm256_set1_epi32(0x00400000)));
        return _mm256_castsi256_ps(bits);
    }
    return _mm256_loadu_ps((const float *)(const void *)scales + first);
}

/* n lines of a group for one strip of a chunk, then c = fma(scale, chain, c). */
INLINE void strip_tile(const int rows, const ep_weight_format format, const float *a, const uint8_t *group,
                       const uint8_t *scales, uint32_t n, uint32_t first, float *c)
{
    __m256 acc[EP_FFN_CHUNK_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        acc[r][0] = _mm256_setzero_ps();
        acc[r][1] = _mm256_setzero_ps();
    }
    for (uint32_t k = 0; k < n; k++, a += rows) {
        __m256 w[2];
        load_line(format, group, k, first, w);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m256 x = _mm256_broadcast_ss(a + r);
            acc[r][0] = _mm256_fmadd_ps(w[0], x, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(w[1], x, acc[r][1]);
        }
    }
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; half++) {
        const __m256 scale = load_scales(format, scales, first + 16 * half);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            float *to = c + r * EP_FFN_PANEL + first + 16 * half;
            _mm256_store_ps(to, _mm256_fmadd_ps(scale, acc[r][half], _mm256_load_ps(to)));
        }
    }
}

/* rows and format (WIDE: over widened groups) are constants wherever this is inlined. */
INLINE void tile(const int rows, const ep_weight_format format, const ep_group_walk *walk, const float *a, float *c)
{
    const size_t code_bytes = format == WIDE ? (size_t)walk->group_lines * EP_GROUP_LINE_BYTES : ep_ffn_group_code_bytes(format);
    const size_t group_bytes = format == WIDE ? code_bytes + EP_GROUP_LINE_BYTES : ep_ffn_group_bytes(format);
    const uint8_t *group = walk->groups;
    const uint8_t *ahead = walk->ahead;
    for (uint32_t line = 0; line < walk->lines; line += walk->group_lines, group += group_bytes) {
        const uint32_t left = walk->lines - line;
        const uint32_t n = left < walk->group_lines ? left : walk->group_lines;
        const size_t fetched = format == WIDE ? n * walk->step : group_bytes;
        for (size_t q = 0; q < fetched; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
        ahead += fetched;
        for (uint32_t strip = 0; strip < STRIPS; strip++) {
            strip_tile(rows, format, a, group, group + code_bytes, n, strip_first(strip), c);
        }
        a += (size_t)n * rows;
    }
}

/* format is a constant wherever this is inlined. */
INLINE void widen_group(const ep_weight_format format, const uint8_t *group, uint32_t lines, uint8_t *to)
{
    float *out = (float *)(void *)to;
    float *scales = out + (size_t)ep_weight_group_columns(format) * EP_FFN_PANEL;
    for (uint32_t strip = 0; strip < STRIPS; strip++) {
        const uint32_t first = strip_first(strip);
        for (uint32_t k = 0; k < lines; k++) {
            __m256 w[2];
            load_line(format, group, k, first, w);
            _mm256_store_ps(out + (size_t)k * EP_FFN_PANEL + first, w[0]);
            _mm256_store_ps(out + (size_t)k * EP_FFN_PANEL + first + 16, w[1]);
        }
        for (uint32_t half = 0; half < 32; half += 16) {
            _mm256_store_ps(scales + first + half, load_scales(format, group + ep_ffn_group_code_bytes(format), first + half));
        }
    }
}

EP_GROUP_TILES(wide, tile, WIDE)
EP_GROUP_FORM(f8, EP_WEIGHTS_F8_BLOCK, tile, widen_group, wide)
EP_GROUP_FORM(mxfp4, EP_WEIGHTS_MXFP4, tile, widen_group, wide)
EP_GROUP_FORM(mxfp8, EP_WEIGHTS_MXFP8, tile, widen_group, wide)
EP_GROUP_FORM(int4, EP_WEIGHTS_INT4, tile, widen_group, wide)

void ep_ffn_avx2_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                             uint32_t k_count, const uint8_t *next, float *c)
{
    ep_group_panel(EP_GROUP_FORM_OF(format), format, ep_weight_group_columns(format), a, rows, panel, k_count, next, c);
}

/*
 * Eight outputs over n quads. |w| as unsigned times a with w's sign: a pair of products is at most 2 * 128 * 127, which
 * 16 bits hold, since rows never have -128.
 */
INLINE void int8_eight(const int rows, const int8_t *a, const uint8_t *b, uint32_t n, bool first, int32_t *sums)
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
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t four;
            __builtin_memcpy(&four, a + 4 * r, sizeof(four));
            __m256i signed_a = _mm256_sign_epi8(_mm256_set1_epi32(four), w);
            acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_a), ones));
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        _mm256_storeu_si256((__m256i *)(void *)(sums + r * EP_FFN_PANEL), acc[r]);
    }
}

#define EIGHT(rows)                                                                                          \
    static void int8_eight_##rows(const int8_t *a, const uint8_t *b, uint32_t n, bool first, int32_t *sums)  \
    {                                                                                                        \
        int8_eight(rows, a, b, n, first, sums);                                                              \
    }
EIGHT(1)
EIGHT(2)
EIGHT(3)
EIGHT(4)
EIGHT(5)
EIGHT(6)
static void (*const eights[EP_FFN_CHUNK_ROWS])(const int8_t *a, const uint8_t *b, uint32_t n, bool first,
                                               int32_t *sums) = {int8_eight_1, int8_eight_2, int8_eight_3,
                                                                 int8_eight_4, int8_eight_5, int8_eight_6};

static void int8_sums(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t quads, int32_t *sums)
{
    for (uint32_t q = 0; q < quads; q += INT8_BLOCK) {
        const uint32_t n = quads - q < INT8_BLOCK ? quads - q : INT8_BLOCK;
        for (uint32_t o = 0; o < EP_FFN_PANEL; o += 8) {
            eights[rows - 1](a + (size_t)q * 4 * rows, panel + (size_t)q * 4 * EP_FFN_PANEL + 4 * (size_t)o, n,
                             q == 0, sums + o);
        }
    }
}

void ep_ffn_avx2_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                            const float *row_scales, const uint8_t *next, float *c)
{
    (void)next;
    ep_ffn_int8_panel_of(int8_sums, a, rows, panel, k_count, row_scales, c);
}

void ep_ffn_avx2_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows, uint32_t k_count, int8_t *a,
                           float *scales)
{
    ep_ffn_int8_rows(batch, first_row, rows, k_count, a, scales);
}
