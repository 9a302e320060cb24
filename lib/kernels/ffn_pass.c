/* SPDX-License-Identifier: Apache-2.0 */
/* The three stages of a pass: widening rows, gate and up with the activation, down with the one rounding. */
#include "kernels/ffn_pass.h"

#include "base/check.h"
#include "base/numeric.h"
#include "base/path_count.h"
#include "kernels/ffn_element.h"

#define WIDEN_BLOCK 64 /* inputs widened at a time */

size_t ep_ffn_pass_scratch_bytes(uint32_t hidden, uint32_t inner, uint32_t rows)
{
    size_t floats = ep_align_up((size_t)hidden * rows, EP_FFN_ALIGN / sizeof(float)) +
                    ep_align_up((size_t)inner * rows, EP_FFN_ALIGN / sizeof(float)) + rows;
    return ep_align_up(floats * sizeof(float), EP_FFN_ALIGN);
}

void ep_ffn_pass_init(ep_ffn_pass *pass, const ep_ffn_kernel *kernel, const ep_ffn_packed *weights,
                      const ep_ffn_batch *batch, void *scratch)
{
    EP_ASSERT(batch->rows_count >= 1 && batch->rows_count <= EP_FFN_PASS_ROWS);
    pass->kernel = kernel;
    pass->weights = weights;
    pass->batch = *batch;
    pass->chunks = ep_ffn_chunks_of(batch->rows_count);
    pass->x = scratch;
    pass->h =
        pass->x + ep_align_up((size_t)weights->hidden * batch->rows_count, EP_FFN_ALIGN / sizeof(float));
    pass->share =
        pass->h + ep_align_up((size_t)weights->inner * batch->rows_count, EP_FFN_ALIGN / sizeof(float));
}

/* Widens count inputs from index first of one row; the type is looked at once per block, not per element. */
static void widen_block(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t first, uint32_t count,
                        float *x)
{
    if (batch->x_dtype == EP_DTYPE_I8) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_i8(row->x, row->x_scale, first + i);
        }
    } else if (batch->x_dtype == EP_DTYPE_F8E4M3) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_f8(row->x, row->x_scales, first + i);
        }
    } else if (batch->x_dtype == EP_DTYPE_BF16) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_float(row->x, EP_DTYPE_BF16, first + i);
        }
    } else if (batch->x_dtype == EP_DTYPE_F16) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_float(row->x, EP_DTYPE_F16, first + i);
        }
    } else {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_float(row->x, EP_DTYPE_F32, first + i);
        }
    }
    if (batch->weight_on_input) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = row->input_weight * x[i];
        }
    }
}

/* One chain per row, all rows of the chunk side by side. */
static void shared_gate_chunk(const float *gate, const float *a, uint32_t rows, uint32_t hidden, float *share)
{
    float acc[EP_FFN_CHUNK_ROWS] = {0.0f};
    for (uint32_t k = 0; k < hidden; k++) {
        for (uint32_t r = 0; r < rows; r++) {
            acc[r] = fmaf(gate[k], a[(size_t)k * rows + r], acc[r]);
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        share[r] = ep_sigmoidf(acc[r]);
    }
}

void ep_ffn_pass_pack_chunk(const ep_ffn_pass *pass, uint32_t chunk)
{
    const uint32_t hidden = pass->weights->hidden;
    const uint32_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
    const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
    float *a = pass->x + (size_t)first_row * hidden;
    float wide[WIDEN_BLOCK];

    ep_path_count(EP_PATH_PANEL, (uint64_t)rows * hidden * ep_dtype_bytes(pass->batch.x_dtype));
    for (uint32_t r = 0; r < rows; r++) {
        const ep_ffn_row *row = &pass->batch.rows[first_row + r];
        for (uint32_t k = 0; k < hidden; k += WIDEN_BLOCK) {
            uint32_t count = hidden - k < WIDEN_BLOCK ? hidden - k : WIDEN_BLOCK;
            widen_block(&pass->batch, row, k, count, wide);
            for (uint32_t i = 0; i < count; i++) {
                a[(size_t)(k + i) * rows + r] = wide[i];
            }
        }
    }
    if (pass->weights->shared_gate != NULL) {
        shared_gate_chunk(pass->weights->shared_gate, a, rows, hidden, pass->share + first_row);
    }
}

const uint8_t *ep_ffn_gate_up_panel(const ep_ffn_packed *weights, uint32_t panel)
{
    return weights->gate_up + (size_t)panel * weights->hidden * EP_FFN_PANEL * ep_dtype_bytes(weights->dtype);
}

const uint8_t *ep_ffn_down_panel(const ep_ffn_packed *weights, uint32_t panel)
{
    return weights->down + (size_t)panel * weights->inner * EP_FFN_PANEL * ep_dtype_bytes(weights->dtype);
}

void ep_ffn_pass_gate_up(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel, float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t first = panel * EP_FFN_HALF_PANEL;
    const uint32_t left = weights->inner - first;
    const uint32_t count = left < EP_FFN_HALF_PANEL ? left : EP_FFN_HALF_PANEL;
    _Alignas(EP_FFN_ALIGN) float h[EP_FFN_HALF_PANEL];

    pass->kernel->panel(weights->dtype, pass->x, pass->batch.rows_count,
                        ep_ffn_gate_up_panel(weights, panel), weights->hidden, next_panel, tile);
    const float *c = tile;
    for (uint32_t chunk = 0; chunk < pass->chunks.count; chunk++) {
        const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
        float *a = pass->h + (size_t)ep_ffn_chunk_first_row(&pass->chunks, chunk) * weights->inner +
                   (size_t)first * rows;
        for (uint32_t r = 0; r < rows; r++, c += EP_FFN_PANEL) {
            pass->kernel->silu_mul(c, h);
            for (uint32_t i = 0; i < count; i++) {
                a[(size_t)i * rows + r] = h[i];
            }
        }
    }
}

static void write_row(const float *y, uint32_t count, ep_dtype dtype, void *out, uint32_t first)
{
    if (dtype == EP_DTYPE_BF16) {
        uint16_t *to = (uint16_t *)out + first;
        for (uint32_t i = 0; i < count; i++) {
            to[i] = ep_ffn_round_bf16(y[i]);
        }
    } else if (dtype == EP_DTYPE_F16) {
        uint16_t *to = (uint16_t *)out + first;
        for (uint32_t i = 0; i < count; i++) {
            to[i] = ep_ffn_round_f16(y[i]);
        }
    } else {
        float *to = (float *)out + first;
        for (uint32_t i = 0; i < count; i++) {
            to[i] = ep_ffn_round_f32(y[i]);
        }
    }
}

void ep_ffn_pass_down(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel, float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t first = panel * EP_FFN_PANEL;
    const uint32_t left = weights->hidden - first;
    const uint32_t count = left < EP_FFN_PANEL ? left : EP_FFN_PANEL;

    pass->kernel->panel(weights->dtype, pass->h, pass->batch.rows_count, ep_ffn_down_panel(weights, panel),
                        weights->inner, next_panel, tile);
    ep_path_count(EP_PATH_RESULT, (uint64_t)pass->batch.rows_count * count * ep_dtype_bytes(pass->batch.out_dtype));
    for (uint32_t r = 0; r < pass->batch.rows_count; r++) {
        float *y = tile + (size_t)r * EP_FFN_PANEL;
        if (weights->shared_gate != NULL) {
            for (uint32_t i = 0; i < count; i++) {
                y[i] = pass->share[r] * y[i];
            }
        }
        write_row(y, count, pass->batch.out_dtype, pass->batch.rows[r].out, first);
    }
}
