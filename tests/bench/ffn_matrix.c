/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_matrix.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ffn_element.h"

float ffn_matrix_draw(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu;
    z ^= z >> 29;
    z *= 0xbf58476d1ce4e5b9u;
    z ^= z >> 32;
    return ((float)(z & 0xffff) - 32768.0f) / 32768.0f;
}

/* The greatest magnitude of a format's codes. */
static float code_max(ep_weight_format format)
{
    const bool is_nibbles = ep_weight_codes_are_nibbles(ep_weight_format_codes(format));
    return format == EP_WEIGHTS_MXFP4  ? 6.0f
           : format == EP_WEIGHTS_W8A8 ? 127.0f
           : is_nibbles                ? 7.0f /* of q4_k beside a minimum of 8 */
                                       : 448.0f;
}

/* Columns that share a scale. */
static uint32_t group_columns(const ffn_matrix *m)
{
    const bool is_per_row = m->format == EP_WEIGHTS_F8_CHANNEL || m->format == EP_WEIGHTS_W8A8;
    return is_per_row ? m->columns : ep_weight_group_columns(m->format);
}

/* What the row's group is multiplied by: one of two values, so that scales that changed places
 * show. Blocks lie over rows of all periods. */
static float scale_of(const ffn_matrix *m, uint32_t row, uint32_t group)
{
    const uint32_t drawn_row = m->format == EP_WEIGHTS_F8_BLOCK ? 0 : row % FFN_MATRIX_PERIOD;
    float scale = 1.7f / sqrtf((float)m->columns) / code_max(m->format);
    if (m->format == EP_WEIGHTS_MXFP4 || m->format == EP_WEIGHTS_MXFP8) {
        scale = exp2f(ceilf(log2f(scale)));
    }
    scale *= ffn_matrix_draw(11, drawn_row, group) < 0 ? 1.0f : 2.0f;
    return m->format == EP_WEIGHTS_INT4       ? ep_bf16_to_f32(ep_f32_to_bf16(scale))
           : m->format == EP_WEIGHTS_INT4_F16 ? ep_f16_to_f32(ep_f32_to_f16(scale))
                                              : scale;
}

/* Parts of 31 or 62, and minima that are eight scales. */
static void put_parts(const ffn_matrix *m, uint32_t row, uint32_t group, size_t at)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(m->format, m->rows, m->columns);
    const size_t blocks = ((size_t)m->columns + EP_SCALE_BLOCK - 1) / EP_SCALE_BLOCK;
    const uint8_t part = ffn_matrix_draw(11, row % FFN_MATRIX_PERIOD, group) < 0 ? 31 : 62;
    const size_t block = row * blocks + group * group_columns(m) / EP_SCALE_BLOCK;
    uint8_t *scales = m->scales;
    float *factors = (float *)(void *)(scales + arrays.scales + arrays.offsets);
    scales[at] = scales[arrays.scales + at] = part;
    factors[block] = scale_of(m, row, group) / (float)part;
    factors[arrays.scale_factors / sizeof(float) + block] = 8.0f * factors[block];
}

static void put_scale(const ffn_matrix *m, uint32_t row, uint32_t group, size_t at)
{
    const float scale = scale_of(m, row, group);
    if (m->format == EP_WEIGHTS_Q4_K) {
        put_parts(m, row, group, at);
    } else if (m->format == EP_WEIGHTS_INT4) {
        ((uint16_t *)m->scales)[at] = ep_f32_to_bf16(scale);
    } else if (m->format == EP_WEIGHTS_INT4_F16) {
        ((uint16_t *)m->scales)[at] = ep_f32_to_f16(scale);
    } else if (m->format == EP_WEIGHTS_MXFP4 || m->format == EP_WEIGHTS_MXFP8) {
        ((uint8_t *)m->scales)[at] = (uint8_t)(ep_f32_bits(scale) >> 23);
    } else {
        ((float *)m->scales)[at] = scale;
    }
}

static void fill_scales(const ffn_matrix *m)
{
    const uint32_t groups = (m->columns + group_columns(m) - 1) / group_columns(m);
    const uint32_t rows_each = m->format == EP_WEIGHTS_F8_BLOCK ? EP_F8_BLOCK : 1;
    size_t at = 0;
    for (uint32_t r = 0; r < m->rows; r += rows_each) {
        for (uint32_t g = 0; g < groups; g++, at++) {
            put_scale(m, r, g, at);
        }
    }
}

static uint8_t nearest_e2m1(float x)
{
    uint8_t best = 0;
    for (uint8_t code = 1; code < 8; code++) {
        if (fabsf(ep_ffn_weight_e2m1(code) - fabsf(x)) <
            fabsf(ep_ffn_weight_e2m1(best) - fabsf(x))) {
            best = code;
        }
    }
    return (uint8_t)(best | (x < 0 ? 8 : 0));
}

/* x: the value over its scale. The row was zeroed. */
static void put_code(ep_weight_format format, uint8_t *row, uint32_t column, float x)
{
    const uint32_t shift = 4 * (column & 1u);
    switch (format) {
    case EP_WEIGHTS_MXFP4:
        row[column / 2] |= (uint8_t)(nearest_e2m1(x) << shift);
        break;
    case EP_WEIGHTS_INT4:
    case EP_WEIGHTS_INT4_F16:
    case EP_WEIGHTS_Q4_K:
        row[column / 2] |= (uint8_t)((int)(rintf(x) + 8) << shift);
        break;
    case EP_WEIGHTS_W8A8:
        ((int8_t *)row)[column] = (int8_t)rintf(x);
        break;
    default:
        row[column] = ep_f32_to_f8e4m3(x);
    }
}

static void put_float(ep_dtype dtype, uint8_t *row, uint32_t column, float x)
{
    if (dtype == EP_DTYPE_BF16) {
        ((uint16_t *)(void *)row)[column] = ep_f32_to_bf16(x);
    } else if (dtype == EP_DTYPE_F16) {
        ((uint16_t *)(void *)row)[column] = ep_f32_to_f16(x);
    } else {
        ((float *)(void *)row)[column] = x;
    }
}

static void fill_row(const ffn_matrix *m, int which, uint32_t row, uint8_t *out)
{
    const bool is_float = ep_weight_format_is_float(m->format);
    const uint32_t columns_each = is_float ? m->columns : group_columns(m);
    for (uint32_t first = 0; first < m->columns; first += columns_each) {
        const uint32_t end = first + columns_each < m->columns ? first + columns_each : m->columns;
        const float scale = is_float ? 1.0f : scale_of(m, row, first / columns_each);
        for (uint32_t k = first; k < end; k++) {
            const float drawn =
                ffn_matrix_draw((uint64_t)which + 1, row, k) * 1.7f / sqrtf((float)m->columns);
            const float value = ep_bf16_to_f32(ep_f32_to_bf16(drawn));
            if (is_float) {
                put_float(ep_weight_format_dtype(m->format), out, k, value);
            } else {
                put_code(m->format, out, k, value / scale);
            }
        }
    }
}

void ffn_matrix_make(ffn_matrix *m, int which, uint32_t rows, uint32_t columns,
                     ep_weight_format format)
{
    const size_t row_bytes = ep_weight_row_bytes(format, columns);
    const size_t scales_bytes = ep_weight_scales_bytes(format, rows, columns);
    *m = (ffn_matrix){
        .format = format, .rows = rows, .columns = columns, .values_bytes = rows * row_bytes};
    m->values = calloc(rows, row_bytes);
    m->scales = scales_bytes > 0 ? calloc(1, scales_bytes) : NULL;
    if (m->values == NULL || (scales_bytes > 0 && m->scales == NULL)) {
        abort();
    }
    for (uint32_t r = 0; r < rows; r++) {
        if (r < FFN_MATRIX_PERIOD) {
            fill_row(m, which, r, m->values + r * row_bytes);
        } else {
            memcpy(m->values + r * row_bytes, m->values + (r - FFN_MATRIX_PERIOD) * row_bytes,
                   row_bytes);
        }
    }
    if (m->scales != NULL) {
        fill_scales(m);
    }
}

void ffn_matrix_free(ffn_matrix *m)
{
    free(m->values);
    free(m->scales);
}

double ffn_matrix_value(const ffn_matrix *m, uint32_t row, uint32_t column)
{
    const uint8_t *values = m->values + row * (m->values_bytes / m->rows);
    if (ep_weight_format_is_float(m->format)) {
        return (double)ep_ffn_read_float(values, ep_weight_format_dtype(m->format), column);
    }
    const float code = m->format == EP_WEIGHTS_W8A8 ? (float)((const int8_t *)values)[column]
                                                    : ep_ffn_weight_code(m->format, values, column);
    const uint32_t group = column / group_columns(m);
    const double scaled = (double)code * (double)ep_ffn_weight_scale(m->format, m->scales, m->rows,
                                                                     m->columns, row, group);
    return m->format == EP_WEIGHTS_Q4_K
               ? scaled - (double)ep_ffn_weight_offset(m->format, m->scales, m->rows, m->columns,
                                                       row, group)
               : scaled;
}
