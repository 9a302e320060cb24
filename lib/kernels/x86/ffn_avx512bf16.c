/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 BF16 kernel of family `bf16dp`: register tiles of up to 6 rows x 64 outputs, two k per
 * step. */
#include "kernels/bf16dp.h"
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_avx512bf16.h"
#include "kernels/x86/ffn_lines.h"
#include "kernels/x86/ffn_panel_avx512.h"
#include "kernels/x86/ffn_x86.h"

TILES(tiles_one, EP_DTYPE_BF16, 1)
TILES(tiles_two, EP_DTYPE_BF16, 2)
TILES(tiles_whole, EP_DTYPE_BF16, 4)

static const panel_tiles tiles = {tiles_one, tiles_two, tiles_whole, LINE_BYTES};

/* Converts 32 floats to 16 pairs; the instruction equals ep_bf16dp_narrow. */
INLINE __m512i narrow(__m512 first, __m512 second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* Whether narrow differs from ep_ffn_round_bf16 here: it flushes denormals, keeps NaN bits. */
INLINE bool is_hard(__m512 y)
{
    enum { NAN_OR_DENORMAL = 0xa1 };
    return _mm512_fpclass_ps_mask(y, NAN_OR_DENORMAL) != 0;
}

static void bf16dp_write_row(const float *y, uint32_t count, ep_dtype dtype, void *out,
                             uint32_t first)
{
    uint32_t i = 0;
    if (dtype == EP_DTYPE_BF16) {
        for (; i + 2 * EP_AVX512_FLOATS <= count; i += 2 * EP_AVX512_FLOATS) {
            const __m512 low = _mm512_load_ps(y + i);
            const __m512 high = _mm512_load_ps(y + i + EP_AVX512_FLOATS);
            if (is_hard(low) || is_hard(high)) {
                break;
            }
            _mm512_storeu_si512((uint16_t *)out + first + i, narrow(low, high));
        }
    }
    ep_avx512_write_row(y + i, count - i, dtype, out, first + i);
}

static void end_row(const destination *to, uint32_t r, float *y)
{
    if (to->batch != NULL) {
        bf16dp_write_row(y, to->count, to->batch->out_dtype, to->batch->rows[r].out, to->first);
    }
}

static void bf16dp_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                         uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    panel_to(&tiles, &(destination){.batch = NULL}, a, rows, panel, lines, next, c);
}

static void bf16dp_panel_to_rows(ep_dtype dtype, const float *a, const ep_ffn_batch *batch,
                                 const uint8_t *panel, uint32_t lines, const uint8_t *next,
                                 uint32_t first, uint32_t count, float *c)
{
    (void)dtype;
    panel_to(&tiles, &(destination){.batch = batch, .first = first, .count = count}, a,
             batch->rows_count, panel, lines, next, c);
}

/* Inputs k..k + count - 1 of a row, narrowed; zeros after them. count 1..32. */
INLINE __m512i load_pairs(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t k,
                          uint32_t count)
{
    if (count == 32 && batch->x_dtype == EP_DTYPE_BF16 && !batch->weight_on_input) {
        const __m512i pairs = _mm512_loadu_si512((const uint8_t *)row->x + 2 * (size_t)k);
        const __mmask32 normal = _mm512_test_epi16_mask(pairs, _mm512_set1_epi16(0x7f80));
        return _mm512_mask_mov_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16((int16_t)0x8000)),
                                     normal, pairs);
    }
    const uint32_t first = count < EP_AVX512_FLOATS ? count : EP_AVX512_FLOATS;
    const __m512 second =
        count > first ? ep_avx512_widen(batch, row, k + first, count - first) : _mm512_setzero_ps();
    return narrow(ep_avx512_widen(batch, row, k, first), second);
}

/* rows is a constant wherever this is inlined. */
INLINE void pack_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row,
                       uint32_t hidden, float *a)
{
    const size_t input_bytes = ep_dtype_bytes(batch->x_dtype);
    for (uint32_t k = 0; k < hidden; k += 2 * EP_AVX512_FLOATS) {
        const uint32_t count =
            hidden - k < 2 * EP_AVX512_FLOATS ? hidden - k : 2 * EP_AVX512_FLOATS;
        __m512i pairs[EP_FFN_CHUNK_ROWS];
        ep_avx512_fetch_rows(rows, batch, first_row + rows, k * input_bytes);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            pairs[r] = load_pairs(batch, &batch->rows[first_row + r], k, count);
        }
        ep_avx512_interleave(rows, pairs, (count + 1) / 2, a + (size_t)k / 2 * rows);
    }
}

/* rows is a constant wherever this is inlined. */
INLINE void lay_chunk(const uint32_t rows, const float *h, uint32_t count, float *a)
{
    for (uint32_t i = 0; i < count; i += 2 * EP_AVX512_FLOATS) {
        /* Values after count may be NaN, but the other member of the last pair must be +0. */
        const uint32_t left = count - i < 2 * EP_AVX512_FLOATS ? count - i : 2 * EP_AVX512_FLOATS;
        const __mmask32 valid = (__mmask32)(((uint64_t)1 << left) - 1u);
        __m512i pairs[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            const float *from = h + r * EP_FFN_PANEL + i;
            pairs[r] = _mm512_maskz_mov_epi16(
                valid, narrow(_mm512_load_ps(from), _mm512_load_ps(from + 16)));
        }
        ep_avx512_interleave(rows, pairs, (left + 1) / 2, a + (size_t)i / 2 * rows);
    }
}

static void bf16dp_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                             uint32_t hidden, float *a)
{
    EP_AVX512_FOR_ROWS(rows, pack_chunk, batch, first_row, hidden, a)
}

static void bf16dp_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    EP_AVX512_FOR_ROWS(rows, lay_chunk, h, count, a)
}

const ep_ffn_kernel ep_ffn_kernel_avx512bf16 = {
    .name = "avx512bf16",
    .family = EP_FFN_FAMILY_BF16DP,
    .panel = bf16dp_panel,
    .group_panel = ep_ffn_avx512bf16_group_panel,
    .activate = ep_avx512_activate,
    .exp16 = ep_avx512_exp16,
    .pack_rows = bf16dp_pack_rows,
    .lay = bf16dp_lay,
    .write_row = bf16dp_write_row,
    .panel_to_rows = bf16dp_panel_to_rows,
};
