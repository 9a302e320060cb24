/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The w8a8 part of the AVX-512 VNNI kernel: register tiles of up to 6 rows x 64 outputs, four k per
 * step. The instruction multiplies unsigned by signed. So rows are stored as q + 128, and -128
 * times the sum of an output's weights is added. It is added last, because these numbers are at the
 * end of a panel and come from memory while its lines are used. All of this is modulo 2^32, and the
 * true sum fits (EP_W8A8_COLUMNS_MAX), so sums are exact and the bits equal those of every other
 * kernel.
 */
#include "kernels/ffn_int8.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_vector_avx512.h"
#include "kernels/x86/ffn_x86.h"

#define LINE_BYTES 256u /* of a panel: a quad of 64 outputs */
#define LINE_PARTS 1
#define LINE_INPUTS 1
#define ROUNDED 64u /* inputs rounded at a time: 16 quads */
#define line_bytes(dtype) LINE_BYTES
#define load_line(dtype, part, line, strip, w) ((void)(dtype), vector_load_words(line, w))

/* acc are integers, w and x quads. */
INLINE vector vector_step(vector acc, vector w, vector x)
{
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(acc), _mm512_castps_si512(x),
                                                   _mm512_castps_si512(w)));
}

#include "kernels/x86/ffn_lines.h"
#include "kernels/x86/ffn_panel_avx512.h"

TILES(tiles_one, EP_DTYPE_I8, 1)
TILES(tiles_two, EP_DTYPE_I8, 2)
TILES(tiles_whole, EP_DTYPE_I8, 4)

static const panel_tiles tiles = {tiles_one, tiles_two, tiles_whole, LINE_BYTES};

static void end_row(const destination *to, uint32_t r, float *y)
{
    const __m512 row_scale = _mm512_set1_ps(to->row_scales[r]);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        const __m512i sum = _mm512_add_epi32(_mm512_load_si512(y + 16 * j),
                                             _mm512_load_si512(to->offsets + 16 * j));
        const __m512 scaled =
            _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_load_ps(to->weight_scales + 16 * j));
        _mm512_store_ps(y + 16 * j, _mm512_mul_ps(scaled, row_scale));
    }
    if (to->batch != NULL) {
        ep_avx512_write_row(y, to->count, to->batch->out_dtype, to->batch->rows[r].out, to->first);
    }
}

static void int8_panel(destination to, const int8_t *a, uint32_t rows, const uint8_t *panel,
                       uint32_t k_count, const float *row_scales, const uint8_t *next, float *c)
{
    to.offsets = ep_ffn_int8_offsets(panel, k_count);
    to.weight_scales = ep_ffn_int8_weight_scales(panel, k_count);
    to.row_scales = row_scales;
    for (uint32_t i = 0; i < 8; i++) {
        _mm_prefetch((const char *)to.weight_scales + 64 * (size_t)i, _MM_HINT_T1);
    }
    panel_to(&tiles, &to, (const float *)(const void *)a, rows, panel, ep_ffn_quads(k_count), next,
             c);
}

void ep_ffn_avx512vnni_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel,
                                  uint32_t k_count, const float *row_scales, const uint8_t *next,
                                  float *c)
{
    int8_panel((destination){.batch = NULL}, a, rows, panel, k_count, row_scales, next, c);
}

void ep_ffn_avx512vnni_int8_panel_to_rows(const int8_t *a, const ep_ffn_batch *batch,
                                          const uint8_t *panel, uint32_t k_count,
                                          const float *row_scales, const uint8_t *next,
                                          uint32_t first, uint32_t count, float *c)
{
    int8_panel((destination){.batch = batch, .first = first, .count = count}, a, batch->rows_count,
               panel, k_count, row_scales, next, c);
}

/* ---- rows to int8 ---- */

/* How whole vectors of inputs are read; the common forms have code of their own. */
typedef enum { INPUTS_ANY, INPUTS_BF16, INPUTS_F32 } inputs;

INLINE inputs inputs_of(const ep_ffn_batch *batch)
{
    return batch->weight_on_input            ? INPUTS_ANY
           : batch->x_dtype == EP_DTYPE_BF16 ? INPUTS_BF16
           : batch->x_dtype == EP_DTYPE_F32  ? INPUTS_F32
                                             : INPUTS_ANY;
}

/* next: a row that is needed soon, fetched meanwhile, since callers' rows come from memory. */
INLINE float row_scale(const inputs form, const ep_ffn_batch *batch, const ep_ffn_row *row,
                       const ep_ffn_row *next, uint32_t k_count)
{
    const uint8_t *x = row->x;
    const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
    __m512i greatest = _mm512_setzero_si512();
    uint32_t k = 0;
    if (form == INPUTS_BF16) {
        __m512i halves = greatest;
        for (; k + 32 <= k_count; k += 32) {
            const __m512i both = _mm512_loadu_si512(x + 2 * (size_t)k);
            halves = _mm512_max_epu16(halves, _mm512_and_si512(both, _mm512_set1_epi16(0x7fff)));
            _mm_prefetch((const char *)next->x + 2 * (size_t)k, _MM_HINT_T0);
        }
        greatest = _mm512_max_epu32(_mm512_and_si512(halves, _mm512_set1_epi32(0x7fff0000)),
                                    _mm512_slli_epi32(halves, 16));
    }
    for (; form == INPUTS_F32 && k + EP_AVX512_FLOATS <= k_count; k += EP_AVX512_FLOATS) {
        greatest = _mm512_max_epu32(
            greatest, _mm512_and_si512(_mm512_loadu_si512(x + 4 * (size_t)k), sign_off));
    }
    for (; k < k_count; k += EP_AVX512_FLOATS) {
        const uint32_t count = k_count - k < EP_AVX512_FLOATS ? k_count - k : EP_AVX512_FLOATS;
        const __m512i bits = _mm512_castps_si512(ep_avx512_widen(batch, row, k, count));
        greatest = _mm512_max_epu32(greatest, _mm512_and_si512(bits, sign_off));
    }
    return ep_ffn_int8_scale((uint32_t)_mm512_reduce_max_epu32(greatest));
}

/*
 * Division takes longer than everything else here. low and high are slightly less and slightly more
 * than 1 / scale, by more than all rounding errors. So x / scale, rounded, lies between the two
 * products; if both have the same nearest integer, it is that of the quotient.
 */
typedef struct {
    float scale;
    float low; /* 0: the scale is too near the ends of the range of floats */
    float high;
} divisor;

INLINE divisor divisor_of(float scale)
{
    const bool is_usual = scale > 0x1p-100f;
    const float inverse = is_usual ? 1.0f / scale : 0.0f;
    return (divisor){
        .scale = scale, .low = inverse * (1.0f - 0x1p-22f), .high = inverse * (1.0f + 0x1p-22f)};
}

/* 16 inputs from k on, zeros after k_count. In forms other than INPUTS_ANY there are always 16. */
INLINE __m512 inputs16(const inputs form, const ep_ffn_batch *batch, const ep_ffn_row *row,
                       uint32_t k, uint32_t k_count)
{
    const uint8_t *x = row->x;
    if (form == INPUTS_BF16) {
        const __m256i halves =
            _mm256_loadu_si256((const __m256i *)(const void *)(x + 2 * (size_t)k));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    if (form == INPUTS_F32) {
        return _mm512_loadu_ps(x + 4 * (size_t)k);
    }
    const uint32_t left = k < k_count ? k_count - k : 0;
    return left == 0
               ? _mm512_setzero_ps()
               : ep_avx512_widen(batch, row, k, left < EP_AVX512_FLOATS ? left : EP_AVX512_FLOATS);
}

/* ep_ffn_int8_round of inputs k..k + 63, plus 128. */
INLINE __m512i round64(const inputs form, const ep_ffn_batch *batch, const ep_ffn_row *row,
                       uint32_t k, uint32_t k_count, const divisor *d)
{
    const __m512i plus = _mm512_set1_epi8((char)0x80);
    if (!(d->scale > 0.0f)) {
        return plus;
    }
    __m512 x[4];
    __m512i q[4];
    __mmask16 unsure = d->low > 0.0f ? 0 : 0xffff;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        x[i] = inputs16(form, batch, row, k + 16 * i, k_count);
        q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(d->low)));
        const __m512i above = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(d->high)));
        unsure |= _mm512_cmpneq_epi32_mask(q[i], above);
    }
    if (__builtin_expect(unsure != 0, 0)) {
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            q[i] = _mm512_cvtps_epi32(_mm512_div_ps(x[i], _mm512_set1_ps(d->scale)));
        }
    }
    __m512i codes =
        _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
    codes = _mm512_max_epi8(codes, _mm512_set1_epi8(-127));
    /* Packing works in 128-bit lanes, so quad 4 j + l is word 4 l + j. */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_xor_si512(_mm512_permutexvar_epi32(order, codes), plus);
}

/* A chunk of rows; form is a constant wherever this is inlined. */
INLINE void round_chunk(const inputs form, const ep_ffn_batch *batch, uint32_t first_row,
                        uint32_t rows, uint32_t k_count, int8_t *a, float *scales)
{
    const ep_ffn_row *from = batch->rows + first_row;
    divisor by[EP_FFN_CHUNK_ROWS];
    __m512i quads[EP_FFN_CHUNK_ROWS];
    for (uint32_t r = 0; r < rows; r++) {
        scales[r] = row_scale(form, batch, &from[r],
                              &from[first_row + r + 1 < batch->rows_count ? r + 1 : r], k_count);
        by[r] = divisor_of(scales[r]);
    }
    for (uint32_t k = 0; k < k_count; k += ROUNDED) {
        const uint32_t left = k_count - k;
        for (uint32_t r = 0; r < rows; r++) {
            quads[r] = left >= ROUNDED ? round64(form, batch, &from[r], k, k_count, &by[r])
                                       : round64(INPUTS_ANY, batch, &from[r], k, k_count, &by[r]);
        }
        float *to = (float *)(void *)(a + (size_t)k * rows);
        EP_AVX512_FOR_ROWS(rows, ep_avx512_interleave, quads,
                           ep_ffn_quads(left < ROUNDED ? left : ROUNDED), to)
    }
}

void ep_ffn_avx512vnni_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                                 uint32_t k_count, int8_t *a, float *scales)
{
    const inputs form = inputs_of(batch);
    if (form == INPUTS_BF16) {
        round_chunk(INPUTS_BF16, batch, first_row, rows, k_count, a, scales);
    } else if (form == INPUTS_F32) {
        round_chunk(INPUTS_F32, batch, first_row, rows, k_count, a, scales);
    } else {
        round_chunk(INPUTS_ANY, batch, first_row, rows, k_count, a, scales);
    }
}
