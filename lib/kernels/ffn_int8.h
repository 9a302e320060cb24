/* SPDX-License-Identifier: Apache-2.0 */
/* The two loops of w8a8 in plain C, for kernels without better ones. Inline, so that each kernel's
 * file compiles them with its own instruction set flags. */
#ifndef EP_KERNELS_FFN_INT8_H
#define EP_KERNELS_FFN_INT8_H

#include "kernels/ffn_kernel.h"
#include "kernels/ffn_widen.h"

#define EP_FFN_INT8_BLOCK 64u /* inputs widened at a time */

static inline const float *ep_ffn_int8_weight_scales(const uint8_t *panel, uint32_t k_count)
{
    return (const float *)(const void *)(panel + (size_t)ep_ffn_quads(k_count) * 4 * EP_FFN_PANEL);
}

static inline const int32_t *ep_ffn_int8_offsets(const uint8_t *panel, uint32_t k_count)
{
    return (const int32_t *)(const void *)(ep_ffn_int8_weight_scales(panel, k_count) +
                                           EP_FFN_PANEL);
}

static inline float ep_ffn_int8_row_scale(const ep_ffn_batch *batch, const ep_ffn_row *row,
                                          uint32_t k_count)
{
    float wide[EP_FFN_INT8_BLOCK];
    uint32_t magnitude = 0;
    for (uint32_t k = 0; k < k_count; k += EP_FFN_INT8_BLOCK) {
        const uint32_t count = k_count - k < EP_FFN_INT8_BLOCK ? k_count - k : EP_FFN_INT8_BLOCK;
        ep_ffn_widen(batch, row, k, count, wide);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t m = ep_f32_bits(wide[i]) & 0x7fffffffu;
            magnitude = m > magnitude ? m : magnitude;
        }
    }
    return ep_ffn_int8_scale(magnitude);
}

/* ep_ffn_kernel.int8_rows. */
static inline void ep_ffn_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                                    uint32_t k_count, int8_t *a, float *scales)
{
    float wide[EP_FFN_INT8_BLOCK];
    int8_t codes[EP_FFN_INT8_BLOCK];
    for (uint32_t r = 0; r < rows; r++) {
        const ep_ffn_row *row = &batch->rows[first_row + r];
        const float scale = ep_ffn_int8_row_scale(batch, row, k_count);
        scales[r] = scale;
        for (uint32_t k = 0; k < k_count; k += EP_FFN_INT8_BLOCK) {
            const uint32_t count =
                k_count - k < EP_FFN_INT8_BLOCK ? k_count - k : EP_FFN_INT8_BLOCK;
            ep_ffn_widen(batch, row, k, count, wide);
            for (uint32_t i = 0; i < count; i++) {
                codes[i] = ep_ffn_int8_round(wide[i], scale);
            }
            memset(codes + count, 0, EP_FFN_INT8_BLOCK - count);
            for (uint32_t i = 0; i < count; i += 4) {
                memcpy(a + (size_t)(k + i) * rows + 4 * (size_t)r, codes + i, 4);
            }
        }
    }
}

/* ep_ffn_kernel.int8_panel from a function that makes the sums of one chunk: sums
 * [rows][EP_FFN_PANEL], 64-byte aligned, is only written. */
static inline __attribute__((always_inline)) void
ep_ffn_int8_panel_of(void (*chunk_sums)(const int8_t *a, uint32_t rows, const uint8_t *panel,
                                        uint32_t quads, int32_t *sums),
                     const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                     const float *row_scales, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t quads = ep_ffn_quads(k_count);
    const float *weight_scales = ep_ffn_int8_weight_scales(panel, k_count);
    _Alignas(64) int32_t sums[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];
    for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
        const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
        chunk_sums(a, chunk_rows, panel, quads, sums);
        for (uint32_t r = 0; r < chunk_rows; r++, c += EP_FFN_PANEL, row_scales++) {
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                c[o] = ((float)sums[r * EP_FFN_PANEL + o] * weight_scales[o]) * *row_scales;
            }
        }
        a += (size_t)4 * quads * chunk_rows;
    }
}

#endif
