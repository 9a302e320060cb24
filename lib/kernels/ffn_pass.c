/* SPDX-License-Identifier: Apache-2.0 */
/* The three stages of a pass: widening rows, gate and up with the activation, down with the one rounding. */
#include "kernels/ffn_pass.h"

#include <stdatomic.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/path_count.h"
#include "kernels/bf16dp.h"
#include "kernels/ffn_widen.h"

#define WIDEN_BLOCK 64 /* inputs widened at a time */
#define INT8_BLOCK 128 /* inner values rounded to int8 at a time */

size_t ep_ffn_pass_scratch_bytes(uint32_t hidden, uint32_t inner, uint32_t rows)
{
    size_t floats = ep_align_up(4 * (size_t)ep_ffn_quads(hidden) * rows, EP_FFN_ALIGN / sizeof(float)) +
                    ep_align_up((size_t)inner * rows, EP_FFN_ALIGN / sizeof(float)) + 3 * (size_t)rows;
    return ep_align_up(floats * sizeof(float), EP_FFN_ALIGN);
}

void ep_ffn_pass_init(ep_ffn_pass *pass, const ep_ffn_kernel *kernel, const ep_ffn_packed *weights,
                      const ep_ffn_batch *batch, void *scratch)
{
    EP_ASSERT(batch->rows_count >= 1 && batch->rows_count <= EP_FFN_PASS_ROWS);
    EP_ASSERT(kernel->family == weights->family);
    pass->kernel = kernel;
    pass->weights = weights;
    pass->batch = *batch;
    pass->chunks = ep_ffn_chunks_of(batch->rows_count);
    pass->x = scratch;
    pass->h =
        pass->x + ep_align_up(4 * (size_t)ep_ffn_quads(weights->hidden) * batch->rows_count, EP_FFN_ALIGN / sizeof(float));
    pass->share =
        pass->h + ep_align_up((size_t)weights->inner * batch->rows_count, EP_FFN_ALIGN / sizeof(float));
    pass->x_scale = pass->share + batch->rows_count;
    pass->h_magnitude = (_Atomic uint32_t *)(void *)(pass->x_scale + batch->rows_count);
}

/* One chain per row, all rows of the chunk side by side. */
static void shared_gate_chunk(const ep_ffn_packed *weights, const float *a, uint32_t rows, float *share)
{
    const bool is_pair = ep_ffn_family_has_pairs(weights->family);
    float acc[EP_FFN_CHUNK_ROWS] = {0.0f};
    for (uint32_t k = 0; k < weights->hidden; k++) {
        for (uint32_t r = 0; r < rows; r++) {
            const float *line = a + (size_t)(is_pair ? k / 2 : k) * rows;
            const float x = is_pair ? ep_bf16_to_f32(ep_ffn_read_u16(line, 2 * (size_t)r + k % 2)) : line[r];
            acc[r] = fmaf(weights->shared_gate[k], x, acc[r]);
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        share[r] = ep_sigmoidf(acc[r]);
    }
}

/* Rounds the floats of a chunk to int8 in place: a byte of quad k / 4 lies before any float of line k that is still
 * to be read. */
static void round_chunk_to_int8(const ep_ffn_pass *pass, uint32_t first_row, uint32_t rows)
{
    const uint32_t hidden = pass->weights->hidden;
    float *from = pass->x + (size_t)first_row * 4 * ep_ffn_quads(hidden);
    int8_t *to = (int8_t *)from;
    float scale[EP_FFN_CHUNK_ROWS];
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t magnitude = 0;
        for (size_t k = 0; k < hidden; k++) {
            uint32_t m = ep_f32_bits(from[k * rows + r]) & 0x7fffffffu;
            magnitude = m > magnitude ? m : magnitude;
        }
        scale[r] = ep_ffn_int8_scale(magnitude);
        pass->x_scale[first_row + r] = scale[r];
        atomic_store_explicit(&pass->h_magnitude[first_row + r], 0, memory_order_relaxed);
    }
    for (size_t k = 0; k < hidden; k += 4) {
        int8_t quad[EP_FFN_CHUNK_ROWS * 4] = {0};
        for (uint32_t j = 0; j < 4 && k + j < hidden; j++) {
            for (uint32_t r = 0; r < rows; r++) {
                quad[4 * r + j] = ep_ffn_int8_round(from[(k + j) * rows + r], scale[r]);
            }
        }
        memcpy(to + k * rows, quad, 4 * (size_t)rows);
    }
}

/* Where the rows of a chunk begin in x; int8 rows are padded to whole quads. */
static size_t x_offset(const ep_ffn_packed *weights, uint32_t first_row)
{
    const uint32_t hidden = weights->hidden;
    return (size_t)first_row *
           (weights->format == EP_WEIGHTS_W8A8 ? 4 * ep_ffn_quads(hidden) : ep_ffn_lines(weights->family, hidden));
}

/* Family `portable`. */
static void pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows, uint32_t hidden, float *a)
{
    float wide[WIDEN_BLOCK];
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t k = 0; k < hidden; k += WIDEN_BLOCK) {
            uint32_t count = hidden - k < WIDEN_BLOCK ? hidden - k : WIDEN_BLOCK;
            ep_ffn_widen(batch, &batch->rows[first_row + r], k, count, wide);
            for (uint32_t i = 0; i < count; i++) {
                a[(size_t)(k + i) * rows + r] = wide[i];
            }
        }
    }
}

/* Family `portable`. */
static void lay(const float *h, uint32_t rows, uint32_t count, float *a)
{
    for (uint32_t r = 0; r < rows; r++, h += EP_FFN_PANEL) {
        for (uint32_t i = 0; i < count; i++) {
            a[(size_t)i * rows + r] = h[i];
        }
    }
}

void ep_ffn_pass_pack_chunk(const ep_ffn_pass *pass, uint32_t chunk)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
    const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
    float *a = pass->x + x_offset(weights, first_row);

    ep_path_count(EP_PATH_PANEL, (uint64_t)rows * weights->hidden * ep_dtype_bytes(pass->batch.x_dtype));
    (pass->kernel->pack_rows != NULL ? pass->kernel->pack_rows : pack_rows)(&pass->batch, first_row, rows,
                                                                            weights->hidden, a);
    if (weights->shared_gate != NULL) {
        shared_gate_chunk(weights, a, rows, pass->share + first_row);
    }
    if (weights->format == EP_WEIGHTS_W8A8) {
        round_chunk_to_int8(pass, first_row, rows);
    }
}

/* c[r][o] = (sum to f32 * weight scale) * scale of the row */
static void scale_sums(const int32_t *sums, uint32_t rows, const float *weight_scales, const float *row_scales,
                       float *c)
{
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            c[r * EP_FFN_PANEL + o] = ((float)sums[r * EP_FFN_PANEL + o] * weight_scales[o]) * row_scales[r];
        }
    }
}

static const float *int8_scales(const uint8_t *panel, uint32_t k_count)
{
    return (const float *)(const void *)(panel + (size_t)ep_ffn_quads(k_count) * 4 * EP_FFN_PANEL);
}

static void int8_gate_up(const ep_ffn_pass *pass, const uint8_t *panel, float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    _Alignas(EP_FFN_ALIGN) int32_t sums[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];
    for (uint32_t chunk = 0; chunk < pass->chunks.count; chunk++) {
        const uint32_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
        const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
        const int8_t *a = (const int8_t *)(pass->x + x_offset(weights, first_row));
        pass->kernel->int8_panel(a, rows, panel, ep_ffn_quads(weights->hidden), true, sums);
        scale_sums(sums, rows, int8_scales(panel, weights->hidden), pass->x_scale + first_row,
                   tile + (size_t)first_row * EP_FFN_PANEL);
    }
}

/* The inner rows are complete only when stage 2 has ended, so each panel rounds them again, block by block. */
static void int8_down(const ep_ffn_pass *pass, const uint8_t *panel, float *tile)
{
    const uint32_t inner = pass->weights->inner;
    _Alignas(EP_FFN_ALIGN) int32_t sums[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];
    _Alignas(EP_FFN_ALIGN) int8_t a[INT8_BLOCK * EP_FFN_CHUNK_ROWS];
    for (uint32_t chunk = 0; chunk < pass->chunks.count; chunk++) {
        const uint32_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
        const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
        const float *h = pass->h + (size_t)first_row * inner;
        float scale[EP_FFN_CHUNK_ROWS];
        for (uint32_t r = 0; r < rows; r++) {
            scale[r] = ep_ffn_int8_scale(
                atomic_load_explicit(&pass->h_magnitude[first_row + r], memory_order_relaxed));
        }
        for (uint32_t k = 0; k < inner; k += INT8_BLOCK) {
            const uint32_t n = inner - k < INT8_BLOCK ? inner - k : INT8_BLOCK;
            memset(a + (size_t)(n & ~3u) * rows, 0, (n & 3u) != 0 ? 4 * (size_t)rows : 0);
            for (uint32_t i = 0; i < n; i++) {
                for (uint32_t r = 0; r < rows; r++) {
                    a[((size_t)(i / 4) * rows + r) * 4 + i % 4] =
                        ep_ffn_int8_round(h[(size_t)(k + i) * rows + r], scale[r]);
                }
            }
            pass->kernel->int8_panel(a, rows, panel + (size_t)k * EP_FFN_PANEL, ep_ffn_quads(n), k == 0, sums);
        }
        scale_sums(sums, rows, int8_scales(panel, inner), scale, tile + (size_t)first_row * EP_FFN_PANEL);
    }
}

static void add_bias(const float *bias, uint32_t rows, float *c)
{
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            c[(size_t)r * EP_FFN_PANEL + o] += bias[o];
        }
    }
}

const uint8_t *ep_ffn_gate_up_panel(const ep_ffn_packed *weights, uint32_t panel)
{
    return weights->gate_up + panel * ep_ffn_panel_bytes(weights->family, weights->format, weights->hidden);
}

const uint8_t *ep_ffn_down_panel(const ep_ffn_packed *weights, uint32_t panel)
{
    return weights->down + panel * ep_ffn_panel_bytes(weights->family, weights->format, weights->inner);
}

/* One panel's products for all rows, biases added. */
static void multiply(const ep_ffn_pass *pass, bool is_down, uint32_t index, const uint8_t *next, float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const ep_weight_format format = weights->format;
    const uint32_t k_count = is_down ? weights->inner : weights->hidden;
    const uint32_t rows = pass->batch.rows_count;
    const uint8_t *panel = (is_down ? ep_ffn_down_panel : ep_ffn_gate_up_panel)(weights, index);
    const float *a = is_down ? pass->h : pass->x;
    const float *bias = is_down ? weights->down_bias : weights->gate_up_bias;

    if (format == EP_WEIGHTS_W8A8) {
        (is_down ? int8_down : int8_gate_up)(pass, panel, tile);
    } else if (ep_weight_format_is_float(format)) {
        pass->kernel->panel(ep_weight_format_dtype(format), a, rows, panel, ep_ffn_lines(weights->family, k_count), next,
                            tile);
    } else {
        pass->kernel->group_panel(format, a, rows, panel, k_count, next, tile);
    }
    if (bias != NULL) {
        add_bias(bias + (size_t)index * EP_FFN_PANEL, rows, tile);
    }
}

/* Raises the row's greatest |h|; panels of the same row may do so at the same time. */
static void note_magnitude(_Atomic uint32_t *greatest, const float *h, uint32_t count)
{
    uint32_t magnitude = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t m = ep_f32_bits(h[i]) & 0x7fffffffu;
        magnitude = m > magnitude ? m : magnitude;
    }
    uint32_t seen = atomic_load_explicit(greatest, memory_order_relaxed);
    while (seen < magnitude && !atomic_compare_exchange_weak_explicit(greatest, &seen, magnitude,
                                                                      memory_order_relaxed, memory_order_relaxed)) {
    }
}

void ep_ffn_pass_gate_up(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel, float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t width = weights->gate_up_width;
    const uint32_t first = panel * width;
    const uint32_t left = weights->inner - first;
    const uint32_t count = left < width ? left : width;
    const size_t lines = ep_ffn_lines(weights->family, weights->inner);
    _Alignas(EP_FFN_ALIGN) float h[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];

    multiply(pass, false, panel, next_panel, tile);
    const float *c = tile;
    for (uint32_t chunk = 0; chunk < pass->chunks.count; chunk++) {
        const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
        const uint32_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
        float *a = pass->h + first_row * lines + (size_t)ep_ffn_lines(weights->family, first) * rows;
        for (uint32_t r = 0; r < rows; r++, c += EP_FFN_PANEL) {
            float *to = h + (size_t)r * EP_FFN_PANEL;
            pass->kernel->activate(weights->activation, &weights->numbers, c, c + EP_FFN_PANEL - width, width, to);
            if (weights->format == EP_WEIGHTS_W8A8) {
                note_magnitude(&pass->h_magnitude[first_row + r], to, count);
            }
        }
        (pass->kernel->lay != NULL ? pass->kernel->lay : lay)(h, rows, count, a);
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

    multiply(pass, true, panel, next_panel, tile);
    ep_path_count(EP_PATH_RESULT, (uint64_t)pass->batch.rows_count * count * ep_dtype_bytes(pass->batch.out_dtype));
    for (uint32_t r = 0; r < pass->batch.rows_count; r++) {
        float *y = tile + (size_t)r * EP_FFN_PANEL;
        if (weights->shared_gate != NULL) {
            for (uint32_t i = 0; i < count; i++) {
                y[i] = pass->share[r] * y[i];
            }
        }
        (pass->kernel->write_row != NULL ? pass->kernel->write_row : write_row)(y, count, pass->batch.out_dtype,
                                                                                pass->batch.rows[r].out, first);
    }
}
