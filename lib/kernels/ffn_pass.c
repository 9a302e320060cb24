/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of a pass: widening rows, gate and up with the activation, inner rows to int8, down
 * with the one rounding. */
#include "kernels/ffn_pass.h"

#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/path_count.h"
#include "kernels/bf16dp.h"
#include "kernels/ffn_widen.h"

#define WIDEN_BLOCK 64 /* inputs widened at a time */

/* Takes memory for a part of the scratch. Returns its place; without scratch only counts the
 * size. */
static void *take(uint8_t *scratch, size_t *used, size_t bytes)
{
    void *part = scratch == NULL ? NULL : scratch + *used;
    *used += ep_align_up(bytes, EP_FFN_ALIGN);
    return part;
}

/* Gives a pass its parts of the scratch; returns the bytes of all. */
static size_t place(ep_ffn_pass *pass, const ep_ffn_packed *weights, size_t rows, void *scratch)
{
    size_t used = 0;
    pass->share = take(scratch, &used, rows * sizeof(float));
    pass->placed = weights->places == NULL
                       ? NULL
                       : take(scratch, &used, rows * weights->hidden * sizeof(float));
    if (ep_ffn_pass_rounds(weights)) {
        pass->x = NULL;
        pass->x_int8 = take(scratch, &used, 4 * (size_t)ep_ffn_quads(weights->hidden) * rows);
        pass->h_int8 = take(scratch, &used, 4 * (size_t)ep_ffn_quads(weights->inner) * rows);
        pass->x_scales = take(scratch, &used, rows * sizeof(float));
        pass->h_scales = take(scratch, &used, rows * sizeof(float));
        pass->h =
            take(scratch, &used,
                 (size_t)weights->gate_up_panels * weights->gate_up_width * rows * sizeof(float));
    } else {
        pass->x =
            take(scratch, &used,
                 (size_t)ep_ffn_lines(weights->family, weights->hidden) * rows * sizeof(float));
        pass->h =
            take(scratch, &used,
                 (size_t)ep_ffn_lines(weights->family, weights->inner) * rows * sizeof(float));
    }
    return used;
}

size_t ep_ffn_pass_scratch_bytes(const ep_ffn_packed *weights, uint32_t rows)
{
    ep_ffn_pass pass;
    return place(&pass, weights, rows, NULL);
}

void ep_ffn_pass_init(ep_ffn_pass *pass, const ep_ffn_kernel *kernel, const ep_ffn_packed *weights,
                      const ep_ffn_batch *batch, void *scratch)
{
    EP_ASSERT(batch->rows_count >= 1 && batch->rows_count <= EP_FFN_PASS_ROWS);
    EP_ASSERT(kernel->family == weights->family);
    *pass = (ep_ffn_pass){
        .kernel = kernel,
        .weights = weights,
        .batch = *batch,
        .chunks = ep_ffn_chunks_of(batch->rows_count),
    };
    place(pass, weights, batch->rows_count, scratch);
}

/* One chain per row, computed for all rows of the chunk in parallel. */
static void shared_gate_chunk(const ep_ffn_packed *weights, const float *a, uint32_t rows,
                              float *share)
{
    const bool is_pair = ep_ffn_family_has_pairs(weights->family);
    float acc[EP_FFN_CHUNK_ROWS] = {0.0f};
    for (uint32_t k = 0; k < weights->hidden; k++) {
        for (uint32_t r = 0; r < rows; r++) {
            const float *line = a + (size_t)(is_pair ? k / 2 : k) * rows;
            const float x =
                is_pair ? ep_bf16_to_f32(ep_ffn_read_u16(line, 2 * (size_t)r + k % 2)) : line[r];
            acc[r] = fmaf(weights->shared_gate[k], x, acc[r]);
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        share[r] = ep_sigmoidf(acc[r]);
    }
}

/* The same for rows that are rounded to int8, which have no floats in the kernel's layout. */
static void shared_gate_rows(const ep_ffn_pass *pass, const ep_ffn_batch *batch, uint32_t first_row,
                             uint32_t rows, float *share)
{
    const uint32_t hidden = pass->weights->hidden;
    float wide[WIDEN_BLOCK];
    for (uint32_t r = 0; r < rows; r++) {
        float acc = 0.0f;
        for (uint32_t k = 0; k < hidden; k += WIDEN_BLOCK) {
            const uint32_t count = hidden - k < WIDEN_BLOCK ? hidden - k : WIDEN_BLOCK;
            ep_ffn_widen(batch, &batch->rows[first_row + r], k, count, wide);
            for (uint32_t i = 0; i < count; i++) {
                acc = fmaf(pass->weights->shared_gate[k + i], wide[i], acc);
            }
        }
        share[r] = ep_sigmoidf(acc);
    }
}

/* Family `portable`. */
static void pack_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows, uint32_t hidden,
                      float *a)
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

/* Widens a chunk's rows and puts each input in its place; out_rows and out_batch refer to them. */
static void place_rows(const ep_ffn_pass *pass, size_t first_row, uint32_t rows,
                       ep_ffn_row out_rows[EP_FFN_CHUNK_ROWS], ep_ffn_batch *out_batch)
{
    const uint32_t hidden = pass->weights->hidden;
    float wide[WIDEN_BLOCK];
    for (uint32_t r = 0; r < rows; r++) {
        float *to = pass->placed + (first_row + r) * hidden;
        for (uint32_t k = 0; k < hidden; k += WIDEN_BLOCK) {
            const uint32_t count = hidden - k < WIDEN_BLOCK ? hidden - k : WIDEN_BLOCK;
            ep_ffn_widen(&pass->batch, &pass->batch.rows[first_row + r], k, count, wide);
            for (uint32_t i = 0; i < count; i++) {
                to[pass->weights->places[k + i]] = wide[i];
            }
        }
        out_rows[r] = (ep_ffn_row){.x = to};
    }
    *out_batch = (ep_ffn_batch){.rows = out_rows, .rows_count = rows, .x_dtype = EP_DTYPE_F32};
}

void ep_ffn_pass_pack_chunk(const ep_ffn_pass *pass, uint32_t chunk)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t hidden = weights->hidden;
    const size_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
    const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
    ep_ffn_row placed_rows[EP_FFN_CHUNK_ROWS];
    ep_ffn_batch batch = pass->batch;
    uint32_t first = (uint32_t)first_row; /* first row of the chunk in the batch */
    if (weights->places != NULL) {
        place_rows(pass, first_row, rows, placed_rows, &batch);
        first = 0;
    }

    ep_path_count(EP_PATH_PANEL, (uint64_t)rows * hidden * ep_dtype_bytes(pass->batch.x_dtype));
    if (ep_ffn_pass_rounds(weights)) {
        pass->kernel->int8_rows(&batch, first, rows, hidden,
                                pass->x_int8 + first_row * 4 * ep_ffn_quads(hidden),
                                pass->x_scales + first_row);
        if (weights->shared_gate != NULL) {
            shared_gate_rows(pass, &batch, first, rows, pass->share + first_row);
        }
        return;
    }
    float *a = pass->x + first_row * ep_ffn_lines(weights->family, hidden);
    (pass->kernel->pack_rows != NULL ? pass->kernel->pack_rows : pack_rows)(&batch, first, rows,
                                                                            hidden, a);
    if (weights->shared_gate != NULL && weights->family == EP_FFN_FAMILY_W4A8) {
        shared_gate_rows(pass, &batch, first, rows, pass->share + first_row);
    } else if (weights->shared_gate != NULL) {
        shared_gate_chunk(weights, a, rows, pass->share + first_row);
    }
}

static size_t h_stride(const ep_ffn_packed *weights)
{
    return (size_t)weights->gate_up_panels * weights->gate_up_width;
}

void ep_ffn_pass_round_chunk(const ep_ffn_pass *pass, uint32_t chunk)
{
    const ep_ffn_packed *weights = pass->weights;
    const size_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
    const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
    ep_ffn_row inner_rows[EP_FFN_CHUNK_ROWS];
    for (uint32_t r = 0; r < rows; r++) {
        inner_rows[r] = (ep_ffn_row){.x = pass->h + (first_row + r) * h_stride(weights)};
    }
    const ep_ffn_batch inner = {.rows = inner_rows, .rows_count = rows, .x_dtype = EP_DTYPE_F32};
    pass->kernel->int8_rows(&inner, 0, rows, weights->inner,
                            pass->h_int8 + first_row * 4 * ep_ffn_quads(weights->inner),
                            pass->h_scales + first_row);
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
    return weights->gate_up +
           panel * ep_ffn_panel_bytes(weights->family, weights->format, weights->hidden);
}

const uint8_t *ep_ffn_down_panel(const ep_ffn_packed *weights, uint32_t panel)
{
    return weights->down +
           panel * ep_ffn_panel_bytes(weights->family, weights->down_format, weights->inner);
}

/* One panel's products for all rows, with biases added. */
static void multiply(const ep_ffn_pass *pass, bool is_down, uint32_t index, const uint8_t *next,
                     float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const ep_weight_format format = is_down ? weights->down_format : weights->format;
    const uint32_t k_count = is_down ? weights->inner : weights->hidden;
    const uint32_t rows = pass->batch.rows_count;
    const uint8_t *panel = (is_down ? ep_ffn_down_panel : ep_ffn_gate_up_panel)(weights, index);
    const float *a = is_down ? pass->h : pass->x;
    const float *bias = is_down ? weights->down_bias : weights->gate_up_bias;

    if (format == EP_WEIGHTS_W8A8) {
        pass->kernel->int8_panel(is_down ? pass->h_int8 : pass->x_int8, rows, panel, k_count,
                                 is_down ? pass->h_scales : pass->x_scales, next, tile);
    } else if (ep_weight_format_is_float(format)) {
        pass->kernel->panel(ep_weight_format_dtype(format), a, rows, panel,
                            ep_ffn_lines(weights->family, k_count), next, tile);
    } else {
        pass->kernel->group_panel(format, a, rows, panel, k_count, next, tile);
    }
    if (bias != NULL) {
        add_bias(bias + (size_t)index * EP_FFN_PANEL, rows, tile);
    }
}

void ep_ffn_pass_gate_up(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel,
                         float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t width = weights->gate_up_width;
    const uint32_t first = panel * width;
    const uint32_t left = weights->inner - first;
    const uint32_t count = left < width ? left : width;

    multiply(pass, false, panel, next_panel, tile);
    if (ep_ffn_pass_rounds(weights)) {
        pass->kernel->activate(weights->activation, &weights->numbers, tile, pass->batch.rows_count,
                               pass->h + first, h_stride(weights));
        return;
    }
    const size_t lines = ep_ffn_lines(weights->family, weights->inner);
    _Alignas(EP_FFN_ALIGN) float h[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL];
    for (uint32_t chunk = 0; chunk < pass->chunks.count; chunk++) {
        const uint32_t rows = ep_ffn_chunk_rows(&pass->chunks, chunk);
        const uint32_t first_row = ep_ffn_chunk_first_row(&pass->chunks, chunk);
        float *a =
            pass->h + first_row * lines + (size_t)ep_ffn_lines(weights->family, first) * rows;
        pass->kernel->activate(weights->activation, &weights->numbers,
                               tile + (size_t)first_row * EP_FFN_PANEL, rows, h, EP_FFN_PANEL);
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

/* A down panel without additions, by a kernel that writes complete rows at once. False: this kernel
 * cannot. */
static bool write_at_once(const ep_ffn_pass *pass, uint32_t index, const uint8_t *next,
                          uint32_t first, uint32_t count, float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const ep_ffn_kernel *kernel = pass->kernel;
    const uint8_t *panel = ep_ffn_down_panel(weights, index);
    if (ep_weight_format_is_float(weights->down_format) && kernel->panel_to_rows != NULL) {
        kernel->panel_to_rows(ep_weight_format_dtype(weights->down_format), pass->h, &pass->batch,
                              panel, ep_ffn_lines(weights->family, weights->inner), next, first,
                              count, tile);
        return true;
    }
    if (weights->down_format == EP_WEIGHTS_W8A8 && kernel->int8_panel_to_rows != NULL) {
        kernel->int8_panel_to_rows(pass->h_int8, &pass->batch, panel, weights->inner,
                                   pass->h_scales, next, first, count, tile);
        return true;
    }
    return false;
}

void ep_ffn_pass_down(const ep_ffn_pass *pass, uint32_t panel, const uint8_t *next_panel,
                      float *tile)
{
    const ep_ffn_packed *weights = pass->weights;
    const uint32_t first = panel * EP_FFN_PANEL;
    const uint32_t left = weights->hidden - first;
    const uint32_t count = left < EP_FFN_PANEL ? left : EP_FFN_PANEL;

    ep_path_count(EP_PATH_RESULT,
                  (uint64_t)pass->batch.rows_count * count * ep_dtype_bytes(pass->batch.out_dtype));
    if (weights->down_bias == NULL && weights->shared_gate == NULL &&
        write_at_once(pass, panel, next_panel, first, count, tile)) {
        return;
    }
    multiply(pass, true, panel, next_panel, tile);
    for (uint32_t r = 0; r < pass->batch.rows_count; r++) {
        float *y = tile + (size_t)r * EP_FFN_PANEL;
        if (weights->shared_gate != NULL) {
            for (uint32_t i = 0; i < count; i++) {
                y[i] = pass->share[r] * y[i];
            }
        }
        (pass->kernel->write_row != NULL ? pass->kernel->write_row : write_row)(
            y, count, pass->batch.out_dtype, pass->batch.rows[r].out, first);
    }
}
