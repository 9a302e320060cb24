/* SPDX-License-Identifier: Apache-2.0 */
/* The families in plain loops. Slow on purpose: they can be checked by reading. */
#include "kernels/expert_ffn.h"

#include "kernels/bf16odd.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_w4a8.h"
#include "kernels/ffn_widen.h"

typedef struct matrix {
    ep_weight_format format;
    const void *values;
    const void *scales;
    const void *bias; /* NULL none */
    uint32_t rows;
    uint32_t columns;
} matrix;

/* A widened row of inputs. In w8a8 x holds integers, and scale belongs to them; in family w4a8 each
 * group has a scale. */
typedef struct inputs {
    float *x;
    float scale;
    float *group_scales;
} inputs;

static float to_int8(float *x, uint32_t n)
{
    uint32_t magnitude = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t m = ep_f32_bits(x[i]) & 0x7fffffffu;
        magnitude = m > magnitude ? m : magnitude;
    }
    const float scale = ep_ffn_int8_scale(magnitude);
    for (uint32_t i = 0; i < n; i++) {
        x[i] = (float)ep_ffn_int8_round(x[i], scale);
    }
    return scale;
}

static void groups_to_int8(inputs *in, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += EP_MX_GROUP) {
        in->group_scales[i / EP_MX_GROUP] =
            to_int8(in->x + i, n - i < EP_MX_GROUP ? n - i : EP_MX_GROUP);
    }
}

static float dot_plain(const void *values, ep_dtype dtype, size_t row, const float *x, uint32_t n)
{
    float acc = 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        acc = fmaf(ep_ffn_read_float(values, dtype, row * n + i), x[i], acc);
    }
    return acc;
}

static float dot_groups(ep_weight_format format, const matrix *m, size_t row, const float *x)
{
    const uint8_t *codes =
        (const uint8_t *)m->values + row * ep_weight_row_bytes(format, m->columns);
    const uint32_t group = ep_weight_group_columns(format);
    const bool has_offsets = ep_weight_format_offsets(format) != EP_OFFSETS_NONE;
    float total = 0.0f;
    for (uint32_t k = 0; k < m->columns; k += group) {
        float acc = 0.0f;
        float sum = 0.0f;
        for (uint32_t i = k; i < m->columns && i < k + group; i++) {
            acc = fmaf(ep_ffn_weight_code(format, codes, i), x[i], acc);
            sum += x[i];
        }
        total = fmaf(ep_ffn_weight_scale(format, m->scales, m->rows, m->columns, row, k / group),
                     acc, total);
        if (has_offsets) {
            total =
                fmaf(-ep_ffn_weight_offset(format, m->scales, m->rows, m->columns, row, k / group),
                     sum, total);
        }
    }
    return total;
}

/* A code's value as bf16; +0 after the row's end. */
static uint32_t code_member(ep_weight_format format, const uint8_t *codes, uint32_t n, uint32_t i)
{
    return i < n ? ep_f32_bits(ep_ffn_weight_code(format, codes, i)) >> 16 : 0;
}

static float dot_int8(const matrix *m, size_t row, const inputs *in)
{
    const int8_t *w = (const int8_t *)m->values + row * m->columns;
    int32_t sum = 0;
    for (uint32_t i = 0; i < m->columns; i++) {
        sum += (int32_t)w[i] * (int32_t)in->x[i];
    }
    return ((float)sum *
            ep_ffn_weight_scale(EP_WEIGHTS_W8A8, m->scales, m->rows, m->columns, row, 0)) *
           in->scale;
}

/* Element i of a row of bf16 values; +0 after the row's end. */
static uint32_t pair_member(const void *values, size_t row, uint32_t n, uint32_t i)
{
    return i < n ? ep_ffn_read_u16(values, row * n + i) : 0;
}

/* The same for f32 values that bf16 can represent. */
static uint32_t input_member(const float *x, uint32_t n, uint32_t i)
{
    return i < n ? ep_f32_bits(x[i]) >> 16 : 0;
}

static float dot_pairs(ep_ffn_family family, const void *values, size_t row, const float *x,
                       uint32_t n)
{
    float acc = 0.0f;
    for (uint32_t i = 0; i < n; i += 2) {
        const uint32_t w = pair_member(values, row, n, i) | pair_member(values, row, n, i + 1)
                                                                << 16;
        const uint32_t both = input_member(x, n, i) | input_member(x, n, i + 1) << 16;
        acc = family == EP_FFN_FAMILY_BF16DP ? ep_bf16dp_step(acc, w, both)
                                             : ep_bf16odd_step(acc, w, both);
    }
    return acc;
}

/* Weight i of a row of an MX format; +0 after its end. */
static uint32_t mx_member(ep_weight_format format, const matrix *m, size_t row,
                          const uint8_t *codes, uint32_t i)
{
    const uint32_t n = m->columns;
    return i < n ? ep_bf16dp_mx_weight(
                       ep_ffn_weight_code(format, codes, i),
                       ep_ffn_weight_scale(format, m->scales, m->rows, n, row, i / EP_MX_GROUP))
                 : 0;
}

static float dot_mx_pairs(ep_weight_format format, const matrix *m, size_t row, const float *x)
{
    const uint32_t n = m->columns;
    const uint8_t *codes = (const uint8_t *)m->values + row * ep_weight_row_bytes(format, n);
    float acc = 0.0f;
    for (uint32_t i = 0; i < n; i += 2) {
        const uint32_t w =
            mx_member(format, m, row, codes, i) | mx_member(format, m, row, codes, i + 1) << 16;
        acc = ep_bf16dp_step(acc, w, input_member(x, n, i) | input_member(x, n, i + 1) << 16);
    }
    return acc;
}

/* Groups have an even number of columns. */
static float dot_group_pairs(ep_weight_format format, const matrix *m, size_t row, const float *x)
{
    const uint32_t n = m->columns;
    const uint8_t *codes = (const uint8_t *)m->values + row * ep_weight_row_bytes(format, n);
    const uint32_t group = ep_weight_group_columns(format);
    const uint32_t ones = 0x3f803f80u;
    const bool has_offsets = ep_weight_format_offsets(format) != EP_OFFSETS_NONE;
    float total = 0.0f;
    for (uint32_t k = 0; k < n; k += group) {
        float chain = 0.0f;
        float sum = 0.0f;
        for (uint32_t i = k; i < n && i < k + group; i += 2) {
            const uint32_t w =
                code_member(format, codes, n, i) | code_member(format, codes, n, i + 1) << 16;
            const uint32_t both = input_member(x, n, i) | input_member(x, n, i + 1) << 16;
            chain = ep_bf16dp_step(chain, w, both);
            sum = ep_bf16dp_step(sum, ones, both);
        }
        total = ep_bf16dp_add_group(
            total, chain, ep_ffn_weight_scale(format, m->scales, m->rows, n, row, k / group));
        if (has_offsets) {
            total = ep_bf16dp_take_offset(
                total, sum, ep_ffn_weight_offset(format, m->scales, m->rows, n, row, k / group));
        }
    }
    return total;
}

static float dot_w4a8(ep_weight_format format, const matrix *m, size_t row, const inputs *in)
{
    const uint32_t n = m->columns;
    const size_t groups = ep_ffn_w4a8_groups(n);
    const uint8_t *codes = (const uint8_t *)m->values + row * ep_weight_row_bytes(format, n);
    const uint8_t *exponents = (const uint8_t *)m->scales + row * groups;
    float total = 0.0f;
    for (uint32_t g = 0; g < groups; g++) {
        const float scale = format == EP_WEIGHTS_MXFP4
                                ? ep_ffn_w4a8_e8m0(exponents[g])
                                : ep_ffn_weight_scale(format, m->scales, m->rows, n, row, g);
        int32_t sum = 0;
        int32_t inputs_sum = 0;
        for (uint32_t i = g * EP_MX_GROUP; i < n && i < (g + 1) * EP_MX_GROUP; i++) {
            sum += ep_ffn_w4a8_integer(format, (uint32_t)codes[i / 2] >> (4 * (i & 1u))) *
                   (int32_t)in->x[i];
            inputs_sum += (int32_t)in->x[i];
        }
        if (format == EP_WEIGHTS_Q4_K) {
            const float offset = ep_ffn_weight_offset(format, m->scales, m->rows, n, row, g);
            total = ep_ffn_w4a8_add_q4_k(total, sum, -8 * inputs_sum, in->group_scales[g], scale,
                                         offset * 0.125f);
        } else {
            total = ep_ffn_w4a8_add_group(total, sum, in->group_scales[g], scale);
        }
    }
    return total;
}

static float output(const ep_ffn_source *source, ep_ffn_family family, const matrix *m, size_t row,
                    const inputs *in)
{
    float y;
    if (family == EP_FFN_FAMILY_W4A8) {
        y = dot_w4a8(m->format, m, row, in);
    } else if (ep_ffn_family_has_pairs(family) && ep_weight_format_is_mx(m->format)) {
        y = dot_mx_pairs(m->format, m, row, in->x);
    } else if (ep_ffn_family_has_pairs(family) && ep_weight_format_has_groups(m->format)) {
        y = dot_group_pairs(m->format, m, row, in->x);
    } else if (ep_ffn_family_has_pairs(family)) {
        y = dot_pairs(family, m->values, row, in->x, m->columns);
    } else if (m->format == EP_WEIGHTS_W8A8) {
        y = dot_int8(m, row, in);
    } else if (ep_weight_format_is_float(m->format)) {
        y = dot_plain(m->values, ep_weight_format_dtype(m->format), row, in->x, m->columns);
    } else {
        y = dot_groups(m->format, m, row, in->x);
    }
    return m->bias == NULL ? y : y + ep_ffn_read_float(m->bias, source->bias_dtype, row);
}

/* The widened inputs of a row, each in its place. */
static void widen_row(const ep_ffn_source *source, const ep_ffn_batch *batch, const ep_ffn_row *row,
                      float *x)
{
    if (source->places == NULL) {
        ep_ffn_widen(batch, row, 0, source->hidden, x);
        return;
    }
    for (uint32_t i = 0; i < source->hidden; i++) {
        uint32_t place;
        memcpy(&place, (const uint8_t *)source->places + sizeof(place) * i, sizeof(place));
        ep_ffn_widen(batch, row, i, 1, x + place);
    }
}

static void narrow_row(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = ep_bf16_to_f32(ep_bf16dp_narrow(x[i]));
    }
}

/* Rounds a row to int8, if the format or family does that. */
static void round_row(ep_weight_format format, ep_ffn_family family, inputs *in, uint32_t n)
{
    if (format == EP_WEIGHTS_W8A8) {
        in->scale = to_int8(in->x, n);
    } else if (family == EP_FFN_FAMILY_W4A8) {
        groups_to_int8(in, n);
    }
}

void ep_ffn_reference_of(ep_ffn_family family, const ep_ffn_source *source,
                         const ep_ffn_batch *batch, float *scratch)
{
    const bool has_pairs = ep_ffn_family_has_pairs(family);
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    const bool has_gate = ep_activation_has_gate(source->activation);
    const matrix gate = {source->format,    source->gate, source->gate_scales,
                         source->gate_bias, inner,        hidden};
    const matrix up = {source->format,  source->up, source->up_scales,
                       source->up_bias, inner,      hidden};
    const matrix down = {ep_expert_down_format(source),
                         source->down,
                         source->down_scales,
                         source->down_bias,
                         hidden,
                         inner};
    inputs x = {.x = scratch, .group_scales = scratch + hidden + inner};
    inputs h = {.x = scratch + hidden, .group_scales = x.group_scales + ep_ffn_w4a8_groups(hidden)};

    for (uint32_t r = 0; r < batch->rows_count; r++) {
        const ep_ffn_row *row = &batch->rows[r];
        widen_row(source, batch, row, x.x);
        if (has_pairs) {
            narrow_row(x.x, hidden);
        }
        float share = 1.0f;
        if (source->shared_gate != NULL) {
            share = ep_sigmoidf(
                dot_plain(source->shared_gate, source->shared_gate_dtype, 0, x.x, hidden));
        }
        round_row(source->format, family, &x, hidden);
        for (uint32_t i = 0; i < inner; i++) {
            float g = has_gate ? output(source, family, &gate, i, &x) : 0.0f;
            float u = output(source, family, &up, i, &x);
            h.x[i] = ep_act_one(source->activation, source->numbers.alpha, source->numbers.beta,
                                ep_act_limit(&source->numbers), g, u);
        }
        if (has_pairs) {
            narrow_row(h.x, inner);
        }
        round_row(source->format, family, &h, inner);
        for (uint32_t i = 0; i < hidden; i++) {
            float y = output(source, family, &down, i, &h);
            if (source->shared_gate != NULL) {
                y = share * y;
            }
            ep_ffn_write(row->out, batch->out_dtype, i, y);
        }
    }
}

void ep_ffn_reference(const ep_ffn_source *source, const ep_ffn_batch *batch, float *scratch)
{
    ep_ffn_reference_of(EP_FFN_FAMILY_PORTABLE, source, batch, scratch);
}
