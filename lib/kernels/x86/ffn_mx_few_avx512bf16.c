/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels of MX formats for one chunk of rows in family `bf16dp`, AVX-512 BF16. A power of two
 * commutes with rounding, so codes are not scaled here. Sums are kept in units of their group's
 * scale and change units between groups, on execution units that dot products leave free. The bits
 * equal those of scaled weights unless a sum, with either method, leaves the range of normal
 * numbers on the way. Whether that is excluded is checked afterwards:
 *   Every product, and so every sum, is a multiple of the product of the lowest bits of inputs,
 *   codes and scales. If that, also in the largest units, is a normal number, no sum but zero is
 *   below the normal numbers.
 *   No scale may make a code's weight smaller than a normal number, since it would be +0 (bf16dp.h)
 *   however large the inputs are. No unit is above 1, so what overflows with scaled weights
 *   overflows here too, and remains an infinity or NaN.
 */
#include "kernels/x86/ffn_avx512bf16.h"
#include "kernels/x86/ffn_codes_avx512bf16.h"
#include "kernels/x86/ffn_sums.h"
#include "kernels/x86/ffn_x86.h"

#define GROUP_LINES (EP_MX_GROUP / 2u)
#define GROUPS_AHEAD 8u /* how far ahead to fetch; with fewer, memory's latency shows */
#define UNIT 127        /* the scale 1.0 */

/* What the panel's sums were made of. */
typedef struct seen {
    __m512i inputs; /* the least of 2 |x| - 1 in 16 bits, which is the greatest for a zero */
    __m512i least;  /* the least of the scales, in bytes */
    __m512i most;
} seen;

INLINE __m512i lesser_inputs(__m512i least, __m512i pairs)
{
    return _mm512_min_epu16(least,
                            _mm512_sub_epi16(_mm512_add_epi16(pairs, pairs), _mm512_set1_epi16(1)));
}

/* rows is a constant wherever this is inlined. */
INLINE void see(const int rows, const float *a, uint32_t n, const uint8_t *scales, seen *all)
{
    const __m512i e = _mm512_loadu_si512(scales);
    all->least = _mm512_min_epu8(all->least, e);
    all->most = _mm512_max_epu8(all->most, e);
    if (n == GROUP_LINES) {
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            all->inputs = lesser_inputs(all->inputs, _mm512_loadu_si512(a + 16 * i));
        }
        return;
    }
    for (uint32_t i = 0; i < n * (uint32_t)rows; i++) {
        all->inputs = lesser_inputs(all->inputs, _mm512_castps_si512(_mm512_set1_ps(a[i])));
    }
}

/* Whether the sums certainly equal those of scaled weights. */
INLINE bool is_sure(const int rows, ep_weight_format format, const seen *all, __m512 acc[][VECTORS])
{
    enum { ENDLESS_OR_NAN = 0x99, LEAST_NORMAL = 1, INPUT_BITS = 7 };
    const int code_bits = format == EP_WEIGHTS_MXFP4 ? 1 : 9; /* below 1 */
    uint16_t inputs[32];
    uint8_t least[64];
    uint8_t most[64];
    _mm512_storeu_si512(inputs, all->inputs);
    _mm512_storeu_si512(least, all->least);
    _mm512_storeu_si512(most, all->most);
    uint32_t input = UINT16_MAX;
    for (int i = 0; i < 32; i++) {
        input = inputs[i] < input ? inputs[i] : input;
    }
    int scale = UINT8_MAX;
    int unit = 0;
    for (int i = 0; i < 64; i++) {
        scale = least[i] < scale ? least[i] : scale;
        unit = most[i] > unit ? most[i] : unit;
    }
    __mmask16 overflown = 0;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            overflown |= _mm512_fpclass_ps_mask(acc[r][j], ENDLESS_OR_NAN);
        }
    }
    const int exponent = (int)((input + 1) >> 8);    /* exponent field of the least input */
    const bool is_weight_normal = scale > code_bits; /* of the smallest code */
    return overflown == 0 && is_weight_normal && unit <= UNIT &&
           exponent - INPUT_BITS - code_bits + scale - UNIT >= LEAST_NORMAL;
}

INLINE __m512i load_scales(const uint8_t *scales, int j)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(scales + 16 * j)));
}

/* Converts sums from units of the scales `from` to units of `to`. */
INLINE void change_units(const int rows, const uint8_t *from, const uint8_t *to,
                         __m512 acc[][VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        const __m512 step =
            _mm512_cvtepi32_ps(_mm512_sub_epi32(load_scales(from, j), load_scales(to, j)));
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            acc[r][j] = _mm512_scalef_ps(acc[r][j], step);
        }
    }
}

/* n lines of a group; fetches as many from ahead on. rows and format are constants. */
INLINE void code_lines(const int rows, const ep_weight_format format, __m512i table, const float *a,
                       const uint8_t *b, const uint8_t *ahead, uint32_t n, __m512 acc[][VECTORS])
{
    const size_t line_bytes = ep_ffn_group_code_bytes(format) / GROUP_LINES;
    for (uint32_t i = 0; i < n; i++, b += line_bytes, ahead += line_bytes, a += rows) {
        __m512i codes = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (size_t q = 0; q < line_bytes; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            codes = j % 2 == 0 ? ep_codes_load(ep_weight_format_codes(format), b, j) : codes;
            const __m512i w = ep_codes_widen(ep_weight_format_codes(format), table, codes, j);
            add_vector(rows, _mm512_castsi512_ps(w), j, a, acc);
        }
    }
}

/* The last groups fetch the first groups of the next panel. rows and format are constants wherever
 * this is inlined. */
INLINE bool few_rows(const int rows, const ep_weight_format format, const float *a,
                     const uint8_t *panel, uint32_t lines, const uint8_t *next, float *c)
{
    const size_t code_bytes = ep_ffn_group_code_bytes(format);
    const size_t group_bytes = ep_ffn_group_bytes(format);
    const uint32_t groups = (lines + GROUP_LINES - 1) / GROUP_LINES;
    const uint8_t *end = panel + groups * group_bytes;
    const uint8_t *ahead = groups > GROUPS_AHEAD ? panel + GROUPS_AHEAD * group_bytes : end;
    const uint8_t *scales = panel + code_bytes;
    const __m512i table = ep_codes_table(ep_weight_format_codes(format));
    uint8_t one[EP_FFN_PANEL];
    seen all = {_mm512_set1_epi16(-1), _mm512_set1_epi8(-1), _mm512_setzero_si512()};
    __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
    load_sums(rows, true, 0, c, acc);
    for (; panel != end; panel += group_bytes, ahead += group_bytes) {
        const uint32_t n = lines < GROUP_LINES ? lines : GROUP_LINES;
        if (ahead == end) {
            ahead = next == NULL ? panel : next;
        }
        _mm_prefetch((const char *)ahead + code_bytes, _MM_HINT_T1);
        change_units(rows, scales, panel + code_bytes, acc);
        scales = panel + code_bytes;
        see(rows, a, n, scales, &all);
        code_lines(rows, format, table, a, panel, ahead, n, acc);
        a += (size_t)n * rows;
        lines -= n;
    }
    _mm512_storeu_si512(one, _mm512_set1_epi8(UNIT));
    change_units(rows, scales, one, acc);
    store_sums(rows, 0, acc, c);
    return is_sure(rows, format, &all, acc);
}

typedef bool (*few_func)(const float *a, const uint8_t *panel, uint32_t lines, const uint8_t *next,
                         float *c);

#define FEW(rows, name, format)                                                                    \
    static bool name##_##rows(const float *a, const uint8_t *panel, uint32_t lines,                \
                              const uint8_t *next, float *c)                                       \
    {                                                                                              \
        return few_rows(rows, format, a, panel, lines, next, c);                                   \
    }

EP_FFN_BY_ROWS(few_func, mxfp4, FEW, EP_WEIGHTS_MXFP4)
EP_FFN_BY_ROWS(few_func, mxfp8, FEW, EP_WEIGHTS_MXFP8)

bool ep_ffn_avx512bf16_mx_few(ep_weight_format format, const float *a, uint32_t rows,
                              const uint8_t *panel, uint32_t lines, const uint8_t *next, float *c)
{
    return (format == EP_WEIGHTS_MXFP4 ? mxfp4 : mxfp8)[rows - 1](a, panel, lines, next, c);
}
