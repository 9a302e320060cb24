/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512F kernel: register tiles of up to 6 rows x 64 outputs, weights widened in registers. */
#include "kernels/x86/ffn_avx512.h"
#include "kernels/x86/ffn_vector_avx512.h"
#include "kernels/x86/ffn_portable.h"
#include "kernels/x86/ffn_panel_avx512.h"
#include "kernels/x86/ffn_x86.h"

TILES(bf16_one, EP_DTYPE_BF16, 1)
TILES(bf16_whole, EP_DTYPE_BF16, 2)
TILES(f16_one, EP_DTYPE_F16, 1)
TILES(f16_whole, EP_DTYPE_F16, 2)
TILES(f32_one, EP_DTYPE_F32, 1)
TILES(f32_two, EP_DTYPE_F32, 2)
TILES(f32_whole, EP_DTYPE_F32, 4)

static void end_row(const destination *to, uint32_t r, float *y)
{
    if (to->batch != NULL) {
        ep_avx512_write_row(y, to->count, to->batch->out_dtype, to->batch->rows[r].out, to->first);
    }
}

static void portable_panel(ep_dtype dtype, const destination *to, const float *a, uint32_t rows,
                           const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    static const panel_tiles bf16 = {bf16_one, bf16_whole, bf16_whole, 2 * EP_FFN_PANEL};
    static const panel_tiles f16 = {f16_one, f16_whole, f16_whole, 2 * EP_FFN_PANEL};
    static const panel_tiles f32 = {f32_one, f32_two, f32_whole, 4 * EP_FFN_PANEL};
    const panel_tiles *tiles = dtype == EP_DTYPE_BF16 ? &bf16 : dtype == EP_DTYPE_F16 ? &f16 : &f32;
    panel_to(tiles, to, a, rows, panel, k_count, next, c);
}

static void avx512f_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                          uint32_t k_count, const uint8_t *next, float *c)
{
    portable_panel(dtype, &(destination){.batch = NULL}, a, rows, panel, k_count, next, c);
}

static void avx512f_panel_to_rows(ep_dtype dtype, const float *a, const ep_ffn_batch *batch,
                                  const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                  uint32_t first, uint32_t count, float *c)
{
    const destination to = {.batch = batch, .first = first, .count = count};
    portable_panel(dtype, &to, a, batch->rows_count, panel, k_count, next, c);
}

/* rows is a constant wherever this is inlined. */
INLINE void pack_chunk(const uint32_t rows, const ep_ffn_batch *batch, uint32_t first_row,
                       uint32_t hidden, float *a)
{
    const size_t input_bytes = ep_dtype_bytes(batch->x_dtype);
    for (uint32_t k = 0; k < hidden; k += EP_AVX512_FLOATS) {
        const uint32_t count = hidden - k < EP_AVX512_FLOATS ? hidden - k : EP_AVX512_FLOATS;
        __m512i lanes[EP_FFN_CHUNK_ROWS];
        ep_avx512_fetch_rows(rows, batch, first_row + rows, k * input_bytes);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            lanes[r] =
                _mm512_castps_si512(ep_avx512_widen(batch, &batch->rows[first_row + r], k, count));
        }
        ep_avx512_interleave(rows, lanes, count, a + (size_t)k * rows);
    }
}

/* rows is a constant wherever this is inlined. */
INLINE void lay_chunk(const uint32_t rows, const float *h, uint32_t count, float *a)
{
    for (uint32_t i = 0; i < count; i += EP_AVX512_FLOATS) {
        __m512i lanes[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            lanes[r] = _mm512_load_si512(h + r * EP_FFN_PANEL + i);
        }
        const uint32_t left = count - i;
        ep_avx512_interleave(rows, lanes, left < EP_AVX512_FLOATS ? left : EP_AVX512_FLOATS,
                             a + (size_t)i * rows);
    }
}

static void avx512f_pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                              uint32_t hidden, float *a)
{
    EP_AVX512_FOR_ROWS(rows, pack_chunk, batch, first_row, hidden, a)
}

static void avx512f_lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    EP_AVX512_FOR_ROWS(rows, lay_chunk, h, count, a)
}

#define COMMON_PARTS                                                                               \
    .panel = avx512f_panel, .group_panel = ep_ffn_avx512f_group_panel,                             \
    .activate = ep_avx512_activate, .exp16 = ep_avx512_exp16, .pack_rows = avx512f_pack_rows,      \
    .lay = avx512f_lay, .write_row = ep_avx512_write_row, .panel_to_rows = avx512f_panel_to_rows

const ep_ffn_kernel ep_ffn_kernel_avx512f = {
    .name = "avx512f",
    COMMON_PARTS,
    .int8_rows = ep_ffn_avx2_int8_rows,
    .int8_panel = ep_ffn_avx2_int8_panel,
};

const ep_ffn_kernel ep_ffn_kernel_avx512vnni = {
    .name = "avx512vnni",
    COMMON_PARTS,
    .int8_rows = ep_ffn_avx512vnni_int8_rows,
    .int8_panel = ep_ffn_avx512vnni_int8_panel,
    .int8_panel_to_rows = ep_ffn_avx512vnni_int8_panel_to_rows,
};
