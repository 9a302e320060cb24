/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups and of w8a8, AVX2 and FMA: four strips of 16 outputs to a panel. */
#include "kernels/ffn_int8.h"
#include "kernels/x86/ffn_group.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE EP_GROUP_INLINE
#define WIDE EP_CODES_NONE /* in the place of codes: a widened group */
#define STRIPS 4
/* quads that stay in the nearest cache while eight outputs after eight pass over them */
#define INT8_BLOCK 32

/* A strip is outputs first..first+7 and first+16..first+23: of 4-bit codes, nibbles v and v + 1 of
 * eight words. */
INLINE uint32_t strip_first(uint32_t strip)
{
    return (strip >> 1) * 32 + (strip & 1) * 8;
}

/* The codes at `shift` of eight words, widened exactly. bias: 8 of int4, 0 of uint4. */
INLINE __m256 widen_nibbles(ep_weight_codes codes, __m256i bias, __m256i words, int shift)
{
    __m256i low = _mm256_srl_epi32(words, _mm_cvtsi32_si128(shift));
    if (codes == EP_CODES_INT4) {
        return _mm256_cvtepi32_ps(
            _mm256_sub_epi32(_mm256_and_si256(low, _mm256_set1_epi32(15)), bias));
    }
    /* looks at three bits */
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    __m256i sign =
        _mm256_and_si256(_mm256_slli_epi32(low, 28), _mm256_set1_epi32((int)0x80000000u));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, low), _mm256_castsi256_ps(sign));
}

INLINE __m256 widen_f8(const uint8_t *codes)
{
    __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)codes));
    __m256i bits =
        _mm256_and_si256(_mm256_slli_epi32(wide, 20), _mm256_set1_epi32((int)0x87f00000u));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

INLINE __m256i load_8_int8(const uint8_t *from)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
}

INLINE __m256i load_8_uint8(const uint8_t *from)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
}

/* codes is a constant wherever this is inlined; int4 stands for uint4 too. */
INLINE void load_line(ep_weight_codes codes, __m256i bias, const uint8_t *group, uint32_t k,
                      uint32_t first, __m256 w[2])
{
    if (codes == WIDE) {
        const float *wide = (const float *)(const void *)group + (size_t)k * EP_FFN_PANEL + first;
        w[0] = _mm256_load_ps(wide);
        w[1] = _mm256_load_ps(wide + 16);
    } else if (ep_weight_codes_are_nibbles(codes)) {
        const uint8_t *pair = group + (size_t)(k / 2) * 64 + 4 * (first & 8u);
        const int shift = (int)(4 * (first / 16) + 16 * (k & 1u));
        __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)pair);
        w[0] = widen_nibbles(codes, bias, words, shift);
        w[1] = widen_nibbles(codes, bias, words, shift + 4);
    } else if (codes == EP_CODES_INT8) {
        w[0] = _mm256_cvtepi32_ps(load_8_int8(group + (size_t)k * EP_FFN_PANEL + first));
        w[1] = _mm256_cvtepi32_ps(load_8_int8(group + (size_t)k * EP_FFN_PANEL + first + 16));
    } else {
        w[0] = widen_f8(group + (size_t)k * EP_FFN_PANEL + first);
        w[1] = widen_f8(group + (size_t)k * EP_FFN_PANEL + first + 16);
    }
}

/* Scales of eight outputs, or parts of them. */
INLINE __m256 load_scale_parts(ep_weight_scales kind, const uint8_t *scales, uint32_t first)
{
    if (kind == EP_SCALES_BF16 || kind == EP_SCALES_F16) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(scales + 2 * first));
        return kind == EP_SCALES_F16
                   ? _mm256_cvtph_ps(half)
                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    if (kind == EP_SCALES_E8M0) {
        __m256i codes = load_8_uint8(scales + first);
        __m256i least = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
        __m256i bits = _mm256_or_si256(_mm256_slli_epi32(codes, 23),
                                       _mm256_and_si256(least, _mm256_set1_epi32(0x00400000)));
        return _mm256_castsi256_ps(bits);
    }
    if (kind == EP_SCALES_UINT8_PARTS) {
        return _mm256_cvtepi32_ps(load_8_uint8(scales + first));
    }
    if (kind == EP_SCALES_INT8_PARTS) {
        return _mm256_cvtepi32_ps(load_8_int8(scales + first));
    }
    return kind == EP_SCALES_E4M3_PARTS
               ? widen_f8(scales + first)
               : _mm256_loadu_ps((const float *)(const void *)scales + first);
}

INLINE __m256 load_scales(const ep_group_panel_form *form, const uint8_t *scales,
                          const float *factors, uint32_t first)
{
    const ep_weight_scales kind = ep_weight_format_scales(form->format);
    const __m256 parts = load_scale_parts(kind, scales, first);
    return ep_weight_scales_have_levels(kind)
               ? _mm256_mul_ps(parts, _mm256_loadu_ps(factors + first))
               : parts;
}

INLINE __m256 load_offsets(const ep_group_panel_form *form, const uint8_t *scales,
                           const float *factors, uint32_t first, __m256 scale)
{
    const uint8_t *codes =
        scales + ep_weight_scale_bytes(ep_weight_format_scales(form->format)) * EP_FFN_PANEL +
        first;
    return ep_weight_format_offsets(form->format) == EP_OFFSETS_ZERO
               ? _mm256_mul_ps(scale, _mm256_cvtepi32_ps(load_8_int8(codes)))
               : _mm256_mul_ps(_mm256_cvtepi32_ps(load_8_uint8(codes)),
                               _mm256_loadu_ps(factors + EP_FFN_PANEL + first));
}

INLINE __m256i bias_of(const ep_group_panel_form *form)
{
    return _mm256_set1_epi32(ep_weight_format_codes(form->format) == EP_CODES_UINT4 ? 0 : 8);
}

/* A group that a tile passes over, and its end. */
typedef struct {
    const uint8_t *codes;
    const uint8_t *scales;
    const float *factors;
    uint32_t n;    /* lines */
    float sums[8]; /* of the rows, where there are offsets */
} tile_group;

/* c = fma(scale, chain, c), then c = fma(-offset, sum, c), of eight outputs of all rows. */
INLINE void add_group(const int rows, const bool is_wide, const bool has_offsets,
                      const ep_group_panel_form *form, const tile_group *group, uint32_t first,
                      __m256 acc[][2], const uint32_t half, float *c)
{
    const float *wide = (const float *)(const void *)group->scales;
    const uint32_t o = first + 16 * half;
    const __m256 scale =
        is_wide ? _mm256_load_ps(wide + o) : load_scales(form, group->scales, group->factors, o);
    const __m256 offset = !has_offsets ? _mm256_setzero_ps()
                          : is_wide    ? _mm256_load_ps(wide + EP_FFN_PANEL + o)
                                    : load_offsets(form, group->scales, group->factors, o, scale);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        float *to = c + r * EP_FFN_PANEL + o;
        const __m256 total = _mm256_fmadd_ps(scale, acc[r][half], _mm256_load_ps(to));
        _mm256_store_ps(
            to, has_offsets ? _mm256_fnmadd_ps(offset, _mm256_broadcast_ss(group->sums + r), total)
                            : total);
    }
}

/* The lines of a group for one strip of a chunk, then its end. */
INLINE void strip_tile(const int rows, const ep_weight_codes codes, const bool has_offsets,
                       const ep_group_panel_form *form, const tile_group *group, const float *a,
                       uint32_t first, float *c)
{
    const __m256i bias = bias_of(form);
    __m256 acc[EP_FFN_CHUNK_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        acc[r][0] = _mm256_setzero_ps();
        acc[r][1] = _mm256_setzero_ps();
    }
    for (uint32_t k = 0; k < group->n; k++, a += rows) {
        __m256 w[2];
        load_line(codes, bias, group->codes, k, first, w);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m256 x = _mm256_broadcast_ss(a + r);
            acc[r][0] = _mm256_fmadd_ps(w[0], x, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(w[1], x, acc[r][1]);
        }
    }
    add_group(rows, codes == WIDE, has_offsets, form, group, first, acc, 0, c);
    add_group(rows, codes == WIDE, has_offsets, form, group, first, acc, 1, c);
}

/* Sums of the rows' inputs, a row to a lane. */
INLINE void sum_rows(const int rows, const float *a, tile_group *group)
{
    const __m256i lanes =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(rows), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256 sums = _mm256_setzero_ps();
    for (uint32_t k = 0; k < group->n; k++, a += rows) {
        sums = _mm256_add_ps(sums, _mm256_maskload_ps(a, lanes));
    }
    _mm256_storeu_ps(group->sums, sums);
}

/* rows, codes (WIDE: over widened groups) and has_offsets are constants wherever this is
 * inlined. */
INLINE void tile(const int rows, const ep_weight_codes codes, const bool has_offsets,
                 const ep_group_walk *walk, const float *a, float *c)
{
    const ep_group_panel_form *form = walk->form;
    const size_t code_bytes =
        codes == WIDE ? (size_t)form->group_lines * EP_GROUP_LINE_BYTES : form->code_bytes;
    const size_t group_bytes = codes == WIDE ? ep_group_wide_bytes(form) : form->group_bytes;
    const uint8_t *block = walk->groups;
    const uint8_t *ahead = walk->ahead;
    for (uint32_t line = 0; line < walk->lines; line += form->group_lines, block += group_bytes) {
        const uint32_t left = walk->lines - line;
        tile_group group = {.codes = block,
                            .scales = block + code_bytes,
                            .factors = ep_group_factors(form, walk->first + line),
                            .n = left < form->group_lines ? left : form->group_lines};
        const size_t fetched = codes == WIDE ? group.n * walk->step : group_bytes;
        for (size_t q = 0; q < fetched; q += 64) {
            _mm_prefetch((const char *)ahead + q, _MM_HINT_T1);
        }
        ahead += fetched;
        if (has_offsets) {
            sum_rows(rows, a, &group);
        }
        for (uint32_t strip = 0; strip < STRIPS; strip++) {
            strip_tile(rows, codes, has_offsets, form, &group, a, strip_first(strip), c);
        }
        a += (size_t)group.n * rows;
    }
}

/* codes and has_offsets are constants wherever this is inlined. */
INLINE void widen_group(const ep_weight_codes codes, const bool has_offsets,
                        const ep_group_panel_form *form, const uint8_t *group, uint32_t first_line,
                        uint32_t lines, uint8_t *to)
{
    const __m256i bias = bias_of(form);
    const float *factors = ep_group_factors(form, first_line);
    const uint8_t *from = group + form->code_bytes;
    float *out = (float *)(void *)to;
    float *scales = out + (size_t)form->group_lines * EP_FFN_PANEL;
    for (uint32_t strip = 0; strip < STRIPS; strip++) {
        const uint32_t first = strip_first(strip);
        for (uint32_t k = 0; k < lines; k++) {
            __m256 w[2];
            load_line(codes, bias, group, k, first, w);
            _mm256_store_ps(out + (size_t)k * EP_FFN_PANEL + first, w[0]);
            _mm256_store_ps(out + (size_t)k * EP_FFN_PANEL + first + 16, w[1]);
        }
        for (uint32_t o = first; o < first + 32; o += 16) {
            const __m256 scale = load_scales(form, from, factors, o);
            _mm256_store_ps(scales + o, scale);
            if (has_offsets) {
                _mm256_store_ps(scales + EP_FFN_PANEL + o,
                                load_offsets(form, from, factors, o, scale));
            }
        }
    }
}

EP_GROUP_TILES(wide, tile, WIDE, false)
EP_GROUP_TILES(wide_offsets, tile, WIDE, true)
EP_GROUP_FORM(e4m3, EP_CODES_E4M3, false, tile, widen_group, wide)
EP_GROUP_FORM(e2m1, EP_CODES_E2M1, false, tile, widen_group, wide)
EP_GROUP_FORM(int4, EP_CODES_INT4, false, tile, widen_group, wide)
EP_GROUP_FORM(int8, EP_CODES_INT8, false, tile, widen_group, wide)
EP_GROUP_FORM(int4_offsets, EP_CODES_INT4, true, tile, widen_group, wide_offsets)
EP_GROUP_FORM(int8_offsets, EP_CODES_INT8, true, tile, widen_group, wide_offsets)

void ep_ffn_avx2_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    const bool has_offsets = ep_group_has_offsets(format);
    const ep_group_form *form = &form_e4m3;
    switch (ep_weight_format_codes(format)) {
    case EP_CODES_E2M1:
        form = &form_e2m1;
        break;
    case EP_CODES_INT4:
    case EP_CODES_UINT4:
        form = has_offsets ? &form_int4_offsets : &form_int4;
        break;
    case EP_CODES_INT8:
        form = has_offsets ? &form_int8_offsets : &form_int8;
        break;
    default:
        break;
    }
    ep_group_panel(form, format, 1, a, rows, panel, k_count, next, c);
}

/*
 * Eight outputs over n quads. |w| as unsigned times a with w's sign: a pair of products is at most
 * 2 * 128 * 127, which 16 bits hold, since rows never have -128.
 */
INLINE void int8_eight(const int rows, const int8_t *a, const uint8_t *b, uint32_t n, bool first,
                       int32_t *sums)
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
            acc[r] = _mm256_add_epi32(
                acc[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_a), ones));
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        _mm256_storeu_si256((__m256i *)(void *)(sums + r * EP_FFN_PANEL), acc[r]);
    }
}

#define EIGHT(rows)                                                                                \
    static void int8_eight_##rows(const int8_t *a, const uint8_t *b, uint32_t n, bool first,       \
                                  int32_t *sums)                                                   \
    {                                                                                              \
        int8_eight(rows, a, b, n, first, sums);                                                    \
    }
EIGHT(1)
EIGHT(2)
EIGHT(3)
EIGHT(4)
EIGHT(5)
EIGHT(6)
static void (*const eights[EP_FFN_CHUNK_ROWS])(const int8_t *a, const uint8_t *b, uint32_t n,
                                               bool first, int32_t *sums) = {
    int8_eight_1, int8_eight_2, int8_eight_3, int8_eight_4, int8_eight_5, int8_eight_6};

static void int8_sums(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t quads,
                      int32_t *sums)
{
    for (uint32_t q = 0; q < quads; q += INT8_BLOCK) {
        const uint32_t n = quads - q < INT8_BLOCK ? quads - q : INT8_BLOCK;
        for (uint32_t o = 0; o < EP_FFN_PANEL; o += 8) {
            eights[rows - 1](a + (size_t)q * 4 * rows,
                             panel + (size_t)q * 4 * EP_FFN_PANEL + 4 * (size_t)o, n, q == 0,
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
