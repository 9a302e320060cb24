/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weight_unpack.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"

static ep_err damaged(const ep_plan_run *run, const char *what, size_t at, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: %s at element %zu",
                        ep_safetensors_name(run->entry->shard), run->entry->name, what,
                        run->offset + at);
}

static float read_f32(const uint8_t *raw, size_t i)
{
    float wide;
    memcpy(&wide, raw + 4 * i, sizeof(wide));
    return wide;
}

static float read_scale(const uint8_t *raw, ep_weight_scales kind, size_t i)
{
    uint16_t half = 0;
    if (kind == EP_SCALES_E8M0) {
        return ldexpf(1.0f, (int)raw[i] - 127);
    }
    if (kind == EP_SCALES_F32) {
        return read_f32(raw, i);
    }
    memcpy(&half, raw + 2 * i, sizeof(half));
    return kind == EP_SCALES_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half);
}

static uint32_t read_word(const uint8_t *raw, size_t i)
{
    uint32_t word;
    memcpy(&word, raw + 4 * i, sizeof(word));
    return word;
}

/* The bit position of element i of eight in a word of AWQ. */
static uint32_t awq_shift(size_t i)
{
    static const uint8_t places[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    return 4u * places[i % 8];
}

/* Code number i in a run of words, the lowest bits first. */
static uint32_t read_packed(const uint8_t *raw, uint32_t bits, size_t i)
{
    const size_t each = 32 / bits;
    return read_word(raw, i / each) >> (bits * (i % each)) & ((1u << bits) - 1u);
}

/* Index of the scale of weight [n,k]. */
static size_t scale_index(const ep_scale_layout *layout, size_t n, size_t k)
{
    return n / layout->rows * layout->row_step + k / layout->columns * layout->column_step;
}

/* The zero point of weight [n,k]. Its tensor has the layout of the scales, except for packing. */
static int32_t read_zero(const ep_plan_matrix *m, const uint8_t *raw, size_t n, size_t k)
{
    const ep_weight_container *c = &m->container;
    const size_t g = k / c->scales.columns;
    const size_t groups =
        m->columns / c->scales.columns + (m->columns % c->scales.columns != 0 ? 1 : 0);
    const size_t each = 32 / (c->bits == 0 ? 8 : c->bits);
    const uint32_t mask = (1u << (32 / each)) - 1u;
    switch (c->zeros) {
    case EP_ZEROS_INT8:
        return (int8_t)raw[n * groups + g];
    case EP_ZEROS_WORDS:
        return (int32_t)(read_word(raw, n / each * groups + g) >> (c->bits * (n % each)) & mask) +
               c->zero_bias;
    case EP_ZEROS_GPTQ:
        return (int32_t)read_packed(raw, c->bits, g * m->rows + n) + c->zero_bias;
    case EP_ZEROS_AWQ:
        return (int32_t)(read_word(raw, (g * m->rows + n) / 8) >> awq_shift(n) & 15u) +
               c->zero_bias;
    default:
        return 0;
    }
}

/* The number of columns that share a number both in file and memory: the smaller of the two
 * groups. */
static size_t common_group(const ep_plan_matrix *m)
{
    const size_t ours = ep_weight_group_columns(m->container.format);
    return ours < m->container.scales.columns ? ours : m->container.scales.columns;
}

static ep_err check_values(const ep_expert_plan *plan, const ep_plan_matrix *m, uint8_t *const *raw,
                           ep_error *out_error)
{
    const ep_plan_run *values = &plan->runs[m->values];
    const bool is_f8 = ep_weight_format_codes(m->container.format) == EP_CODES_E4M3;
    for (size_t i = 0; is_f8 && i < values->bytes; i++) {
        if ((raw[m->values][i] & 0x7fu) == 0x7fu) {
            return damaged(values, "a value is NaN", i, out_error);
        }
    }
    return EP_OK;
}

static ep_err check_scales(const ep_expert_plan *plan, const ep_plan_matrix *m, uint8_t *const *raw,
                           ep_error *out_error)
{
    const ep_weight_scales kind = m->container.scales.kind;
    const ep_plan_run *scales = m->scales < 0 ? NULL : &plan->runs[m->scales];
    for (size_t i = 0; scales != NULL && i < scales->bytes / ep_weight_scale_bytes(kind); i++) {
        if (kind == EP_SCALES_E8M0 && raw[m->scales][i] == 0xff) {
            return damaged(scales, "a scale is 255 (e8m0's NaN), allowed 0..254,", i, out_error);
        }
        if (kind == EP_SCALES_E4M3_PARTS && (raw[m->scales][i] & 0x7fu) == 0x7fu) {
            return damaged(scales, "a scale is NaN", i, out_error);
        }
        if (!ep_weight_scales_have_levels(kind) && !isfinite(read_scale(raw[m->scales], kind, i))) {
            return damaged(scales, "a scale is not finite", i, out_error);
        }
    }
    const float factor = m->factor < 0 ? 1.0f : read_f32(raw[m->factor], 0);
    if (!isfinite(factor) || factor == 0.0f || !isfinite(1.0f / factor)) {
        return damaged(&plan->runs[m->factor],
                       "a scale is zero, not finite or has no finite reciprocal", 0, out_error);
    }
    return EP_OK;
}

/* Checks zero points: there must be none if the form has no offsets; otherwise each fits a byte,
 * and its product with the scale is exact in f32. */
static ep_err check_zeros(const ep_expert_plan *plan, const ep_plan_matrix *m, uint8_t *const *raw,
                          ep_error *out_error)
{
    const ep_weight_container *c = &m->container;
    const size_t step = m->zeros < 0 ? 1 : common_group(m);
    for (size_t n = 0; m->zeros >= 0 && n < m->rows; n++) {
        for (size_t k = 0; k < m->columns; k += step) {
            const int32_t zero = read_zero(m, raw[m->zeros], n, k);
            const size_t at = scale_index(&c->scales, n, k);
            if (zero != 0 && c->zeros_are_none) {
                return damaged(&plan->runs[m->zeros],
                               "a zero point is not the middle of the range, which the config's "
                               "sym says it is,",
                               at, out_error);
            }
            if (zero < -128 || zero > 127) {
                return damaged(&plan->runs[m->zeros], "a zero point is beyond the range of codes",
                               at, out_error);
            }
            if (zero != 0 &&
                (ep_f32_bits(read_scale(raw[m->scales], c->scales.kind, at)) & 0xffu) != 0) {
                return damaged(&plan->runs[m->scales],
                               "a scale beside a zero point has more than 16 significant bits,", at,
                               out_error);
            }
        }
    }
    return EP_OK;
}

ep_err ep_weight_check_numbers(const ep_expert_plan *plan, const ep_plan_matrix *m,
                               uint8_t *const *raw, ep_error *out_error)
{
    if (m->container.packing == EP_PACKING_BLOCKS) {
        return ep_weight_check_blocks(m, &plan->runs[m->values], raw[m->values], out_error);
    }
    ep_err err = check_values(plan, m, raw, out_error);
    for (size_t i = 0; err == EP_OK && m->offset >= 0 && i < plan->runs[m->offset].bytes; i++) {
        if (raw[m->offset][i] != 0) {
            err = damaged(&plan->runs[m->offset], "an offset is not zero, allowed 0: byte", i,
                          out_error);
        }
    }
    err = err != EP_OK ? err : check_scales(plan, m, raw, out_error);
    return err != EP_OK ? err : check_zeros(plan, m, raw, out_error);
}

/* Whether the file's scales already are the block of the form in memory. */
static bool has_scales_in_place(const ep_plan_matrix *m)
{
    const ep_weight_format format = m->container.format;
    const ep_scale_layout *layout = &m->container.scales;
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, m->rows, m->columns);
    const bool is_per_row = format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8;
    const ep_weight_scales kind = is_per_row ? EP_SCALES_F32 : ep_weight_format_scales(format);
    if (m->scales < 0) {
        return true;
    }
    if (layout->kind != kind || arrays.offsets != 0 || arrays.scale_factors != 0 ||
        layout->column_step != 1) {
        return false;
    }
    if (is_per_row) {
        return layout->rows == 1;
    }
    return layout->columns == ep_weight_group_columns(format) &&
           layout->rows == (format == EP_WEIGHTS_F8_BLOCK ? EP_F8_BLOCK : 1);
}

bool ep_weight_is_in_place(const ep_plan_matrix *m)
{
    return m->step == 1 && !m->transposed && m->container.packing == EP_PACKING_ROWS &&
           has_scales_in_place(m);
}

/* to[n] = row first + n * step of from, for all rows of the matrix. */
static void take_rows(const ep_plan_matrix *m, const uint8_t *from, size_t row_bytes, uint8_t *to)
{
    for (size_t n = 0; n < m->rows; n++) {
        memcpy(to + n * row_bytes, from + (m->first + n * m->step) * row_bytes, row_bytes);
    }
}

/* to[n][k] = from[k][first + n * step]; in squares that stay in cache. */
static void take_columns(const ep_plan_matrix *m, const uint8_t *from, size_t element, uint8_t *to)
{
    enum { SQUARE = 64 };
    for (size_t n0 = 0; n0 < m->rows; n0 += SQUARE) {
        for (size_t k0 = 0; k0 < m->columns; k0 += SQUARE) {
            for (size_t n = n0; n < n0 + SQUARE && n < m->rows; n++) {
                for (size_t k = k0; k < k0 + SQUARE && k < m->columns; k++) {
                    memcpy(to + (n * m->columns + k) * element,
                           from + (k * m->run_rows + m->first + n * m->step) * element, element);
                }
            }
        }
    }
}

/* Unpacks words of int8 plus 128. */
static void take_bytes(const ep_plan_matrix *m, const uint8_t *from, uint8_t *to)
{
    const size_t row_bytes = 4 * (((size_t)m->columns + 3) / 4);
    for (size_t n = 0; n < m->rows; n++) {
        for (size_t k = 0; k < m->columns; k++) {
            to[n * m->columns + k] = from[n * row_bytes + k] ^ 0x80u;
        }
    }
}

/* Unpacks codes from words down the columns, or along rows as in AWQ, to rows. */
static void take_words(const ep_plan_matrix *m, const uint8_t *from, uint8_t *to)
{
    enum { SQUARE = 64 };
    const ep_weight_container *c = &m->container;
    const size_t row_bytes = ep_weight_row_bytes(c->format, m->columns);
    const size_t each = 32 / c->bits;
    const uint32_t mask = (1u << c->bits) - 1u;
    const bool is_awq = c->packing == EP_PACKING_AWQ;
    memset(to, c->bits == 4 ? 0x88 : 0, m->rows * row_bytes);
    for (size_t n0 = 0; n0 < m->rows; n0 += SQUARE) {
        for (size_t k = 0; k < m->columns; k++) {
            for (size_t n = n0; n < n0 + SQUARE && n < m->rows; n++) {
                const uint32_t word = is_awq ? read_word(from, (k * m->rows + n) / 8)
                                             : read_word(from, k / each * m->rows + n);
                const uint32_t code = word >> (is_awq ? awq_shift(n) : c->bits * (k % each)) & mask;
                uint8_t *at = to + n * row_bytes + (c->bits == 4 ? k / 2 : k);
                *at = (uint8_t)(c->bits == 8 ? code ^ 0x80u
                                : k % 2 == 0 ? (*at & 0xf0u) | code
                                             : (*at & 0x0fu) | code << 4);
            }
        }
    }
}

void ep_weight_unpack_values(const ep_plan_matrix *m, const uint8_t *from, uint8_t *to)
{
    const ep_weight_container *c = &m->container;
    if (c->packing == EP_PACKING_WORDS) {
        take_bytes(m, from, to);
    } else if (c->packing != EP_PACKING_ROWS) {
        take_words(m, from, to);
    } else if (m->transposed) {
        take_columns(m, from, ep_dtype_bytes(ep_weight_format_dtype(c->format)), to);
    } else {
        take_rows(m, from, ep_weight_row_bytes(c->format, m->columns), to);
    }
}

/* Writes a scale in the width of the form in memory. */
static void put_scale(ep_weight_scales ours, ep_weight_scales theirs, const uint8_t *from, size_t i,
                      uint8_t *to)
{
    const size_t bytes = ep_weight_scale_bytes(ours);
    if (ours == theirs) {
        memcpy(to, from + i * bytes, bytes);
        return;
    }
    EP_ASSERT(ours == EP_SCALES_F32);
    const float scale = read_scale(from, theirs, i);
    memcpy(to, &scale, sizeof(scale));
}

static void take_factors(const ep_plan_matrix *m, uint8_t *const *raw, size_t bytes, uint8_t *to)
{
    const float stored = read_f32(raw[m->factor], 0);
    const float factor = m->container.factor_divides ? 1.0f / stored : stored;
    for (size_t i = 0; i < bytes; i += sizeof(factor)) {
        memcpy(to + i, &factor, sizeof(factor));
    }
}

void ep_weight_unpack_scales(const ep_plan_matrix *m, uint8_t *const *raw, uint8_t *to)
{
    const ep_weight_format format = m->container.format;
    const ep_scale_layout *layout = &m->container.scales;
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, m->rows, m->columns);
    const bool is_per_row = format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8;
    const ep_weight_scales kind = is_per_row ? EP_SCALES_F32 : ep_weight_format_scales(format);
    const size_t rows_each = format == EP_WEIGHTS_F8_BLOCK ? EP_F8_BLOCK : 1;
    const size_t columns_each = is_per_row ? m->columns : ep_weight_group_columns(format);
    uint8_t *offsets = to + arrays.scales;
    for (size_t n = 0; n < m->rows; n += rows_each) {
        for (size_t k = 0; k < m->columns; k += columns_each, to += ep_weight_scale_bytes(kind)) {
            put_scale(kind, layout->kind, raw[m->scales],
                      scale_index(layout, m->first + n * m->step, k), to);
            if (arrays.offsets != 0) {
                *offsets++ = (uint8_t)(m->zeros < 0 ? 0 : read_zero(m, raw[m->zeros], n, k));
            }
        }
    }
    if (arrays.scale_factors != 0) {
        take_factors(m, raw, arrays.scale_factors, offsets);
    }
}

void ep_weight_unpack_bias(const ep_expert_plan *plan, const ep_plan_matrix *m, const uint8_t *from,
                           uint8_t *to)
{
    const size_t element = ep_dtype_bytes(plan->bias_dtype);
    ep_plan_matrix rows = *m;
    if (plan->runs[m->bias].bytes == m->rows * element) { /* only for this matrix */
        rows.first = 0;
        rows.step = 1;
    }
    take_rows(&rows, from, element, to);
}
