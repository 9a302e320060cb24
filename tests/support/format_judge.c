/* SPDX-License-Identifier: Apache-2.0 */
#include "support/format_judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"

#define U 0x1p-24       /* half an ulp of f32, relative: one rounding */
#define U_NARROW 0x1p-8 /* of bf16 */

static double plain(const void *base, ep_dtype dtype, size_t i)
{
    uint16_t half;
    float wide;
    memcpy(&half, (const uint8_t *)base + 2 * i, dtype == EP_DTYPE_F32 ? 0 : 2);
    if (dtype == EP_DTYPE_F32) {
        memcpy(&wide, (const uint8_t *)base + 4 * i, 4);
        return (double)wide;
    }
    return (double)(dtype == EP_DTYPE_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half));
}

static double f8(uint8_t code)
{
    double m = code & 7;
    int e = (code >> 3) & 15;
    double value = e == 0 ? ldexp(m / 8.0, -6) : ldexp(1.0 + m / 8.0, e - 7);
    return (code & 0x80) != 0 ? -value : value;
}

typedef struct matrix {
    ep_weight_format format;
    const void *values;
    const void *scales;
    const void *bias;
    size_t rows;
    size_t columns;
} matrix;

/* Returns one part of a two-level scale. */
static double part(ep_weight_scales kind, uint8_t code)
{
    return kind == EP_SCALES_E4M3_PARTS   ? f8(code)
           : kind == EP_SCALES_INT8_PARTS ? (double)(int8_t)code
                                          : (double)code;
}

static double e2m1(unsigned code)
{
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (code >= 8 ? -1.0 : 1.0) * values[code & 7u];
}

/* Returns the value of weight [n,k] without its scale. */
static double code_of(const matrix *m, size_t n, size_t k)
{
    const size_t K = m->columns;
    const uint8_t *bytes = m->values;
    const unsigned shift = k % 2 == 0 ? 0 : 4;
    const ep_weight_codes codes = ep_weight_format_codes(m->format);
    if (codes == EP_CODES_INT8 || m->format == EP_WEIGHTS_W8A8) {
        return (double)(int8_t)bytes[n * K + k];
    }
    switch (codes) {
    case EP_CODES_E4M3:
        return f8(bytes[n * K + k]);
    case EP_CODES_E2M1:
        return e2m1(bytes[n * ((K + 1) / 2) + k / 2] >> shift & 15u);
    case EP_CODES_INT4:
    case EP_CODES_UINT4:
        return (double)(bytes[4 * (n * ((K + 7) / 8)) + k / 2] >> shift & 15u) -
               (codes == EP_CODES_INT4 ? 8.0 : 0.0);
    default:
        return plain(m->values, ep_weight_format_dtype(m->format), n * K + k);
    }
}

/* Returns weight [n,k]. magnitude: the sum of the magnitudes of its terms. */
static double weight(const matrix *m, size_t n, size_t k, double *magnitude)
{
    const ep_weight_format format = m->format;
    const bool is_per_row = format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8;
    const double code = code_of(m, n, k);
    const ep_scale_arrays arrays =
        ep_weight_scale_arrays(format, (uint32_t)m->rows, (uint32_t)m->columns);
    const ep_weight_scales kind = is_per_row ? EP_SCALES_F32 : ep_weight_format_scales(format);
    const size_t group = is_per_row ? m->columns : ep_weight_group_columns(format);
    const size_t line = format == EP_WEIGHTS_F8_BLOCK ? n / 128 : n;
    const size_t factor = n * ((m->columns + 255) / 256) + k / 256;
    const uint8_t *scales = m->scales;
    *magnitude = fabs(code);
    if (kind == EP_SCALES_NONE) {
        return code;
    }
    const size_t at = line * ((m->columns + group - 1) / group) + k / group;
    const uint8_t *offsets = scales + arrays.scales;
    const uint8_t *factors = offsets + arrays.offsets;
    double scale;
    double offset = 0;
    if (ep_weight_scales_have_levels(kind)) {
        scale = part(kind, scales[at]) * plain(factors, EP_DTYPE_F32, factor);
    } else if (kind == EP_SCALES_E8M0) {
        scale = ldexp(1.0, (int)scales[at] - 127);
    } else {
        scale = plain(scales,
                      kind == EP_SCALES_F32   ? EP_DTYPE_F32
                      : kind == EP_SCALES_F16 ? EP_DTYPE_F16
                                              : EP_DTYPE_BF16,
                      at);
    }
    if (ep_weight_format_offsets(format) == EP_OFFSETS_ZERO) {
        offset = scale * (double)(int8_t)offsets[at];
    } else if (ep_weight_format_offsets(format) == EP_OFFSETS_MINIMUM) {
        offset = (double)offsets[at] * plain(factors + arrays.scale_factors, EP_DTYPE_F32, factor);
    }
    *magnitude = fabs(code * scale) + fabs(offset);
    return code * scale - offset;
}

static double gelu_tanh(double g)
{
    return 0.5 * g * (1.0 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
}

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double activate(const ep_expert_source *s, double g, double u)
{
    const double alpha = (double)s->numbers.alpha;
    const double beta = (double)s->numbers.beta;
    const double limit = s->numbers.limit > 0 ? (double)s->numbers.limit : INFINITY;
    switch (s->activation) {
    case EP_ACT_GELU:
        return 0.5 * g * (1.0 + erf(g / sqrt(2.0))) * u;
    case EP_ACT_GELU_TANH:
        return gelu_tanh(g) * u;
    case EP_ACT_SWIGLU_OAI:
        return fmin(g, limit) * sigmoid(alpha * fmin(g, limit)) *
               (fmax(fmin(u, limit), -limit) + beta);
    case EP_ACT_SWIGLU_LIMIT:
        return fmin(g, limit) * sigmoid(fmin(g, limit)) * fmax(fmin(u, limit), -limit);
    case EP_ACT_SWIGLU_STEP:
        return fmin(g * sigmoid(g), limit) * fmax(fmin(u, limit), -limit);
    case EP_ACT_SITU:
        return alpha * tanh(g / alpha) * sigmoid(g) * beta * tanh(u / beta);
    case EP_ACT_SILU_NO_GATE:
        return u * sigmoid(u);
    case EP_ACT_GELU_NO_GATE:
        return 0.5 * u * (1.0 + erf(u / sqrt(2.0)));
    case EP_ACT_GELU_TANH_NO_GATE:
        return gelu_tanh(u);
    case EP_ACT_RELU_NO_GATE:
        return fmax(u, 0.0);
    case EP_ACT_RELU2_NO_GATE:
        return fmax(u, 0.0) * fmax(u, 0.0);
    default:
        return g * sigmoid(g) * u;
    }
}

/*
 * Returns a dot product and the bound of its error. A result is computed by chains of fused
 * multiply-adds with one more per group of columns for the scale and one for the offset, or by a
 * product and a sum for each. So a product passes at most n + 2 groups + 4 roundings, that of a
 * two-level scale included, and the error is at most (n + 2 groups + 5) units of sum (|code scale|
 * + |offset|) |x|; the bias adds one of u. w4a8 adds exactly within a group: a product is rounded
 * with the scale of x, in its group and in each group after it, groups + 1 times. x may itself be
 * off by x_error.
 */
static double dot(const ep_expert_source *s, ep_ffn_family family, const matrix *m, size_t row,
                  const double *x, const double *x_error, double *error)
{
    /* rounding to odd has an error of up to a whole ulp */
    const double unit = family == EP_FFN_FAMILY_BF16ODD ? 2 * U : U;
    const uint32_t group = ep_weight_group_columns(m->format);
    double sum = 0;
    double magnitude = 0;
    double moved = 0;
    for (size_t k = 0; k < m->columns; k++) {
        double size = 0;
        double w = weight(m, row, k, &size);
        sum += w * x[k];
        magnitude += size * fabs(x[k]);
        moved += fabs(w) * x_error[k];
    }
    double b = m->bias == NULL ? 0.0 : plain(m->bias, s->bias_dtype, row);
    const bool has_offsets = ep_weight_format_offsets(m->format) != EP_OFFSETS_NONE;
    const bool has_products =
        has_offsets || ep_weight_scales_have_levels(ep_weight_format_scales(m->format));
    double ends = (has_offsets ? 2.0 : 1.0) * (double)(group == 0 ? 0 : m->columns / group);
    double roundings =
        (family == EP_FFN_FAMILY_W4A8 ? 0.0 : (double)m->columns) + ends + (has_products ? 5 : 4);
    *error = moved + roundings * unit * (magnitude + moved) + U * (fabs(sum) + fabs(b));
    return sum + b;
}

/*
 * Rounds a row, or one group of it, to int8 as w8a8 and w4a8 define. An inner row is known only up
 * to error, so its scale is known up to worst / 127, and a value that near halfway may round to
 * either integer.
 */
static void to_int8(double *x, double *error, size_t n, bool is_exact)
{
    float greatest = 0;
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        greatest = fmaxf(greatest, fabsf((float)x[i]));
        worst = fmax(worst, error[i]);
    }
    float scale = greatest / 127.0f;
    for (size_t i = 0; i < n; i++) {
        float steps = scale > 0 ? (float)x[i] / scale : 0.0f;
        float q = fmaxf(fminf(rintf(steps), 127.0f), -127.0f);
        double from_half =
            fabs(fabs((double)steps) - floor(fabs((double)steps)) - 0.5) * (double)scale;
        double moved = error[i] + fabs((double)q) * worst / 127 + 4 * U * 128 * (double)scale;
        bool may_be_next = from_half <= moved;
        error[i] = is_exact ? 0.0 : moved + (may_be_next ? (double)scale : 0.0);
        x[i] = (double)q * (double)scale;
    }
}

/* Rounds a row in its units: w8a8 the whole row, w4a8 each group, others not at all. */
static void round_row(const ep_expert_source *s, ep_ffn_family family, double *x, double *error,
                      size_t n, bool is_exact)
{
    const size_t step = family == EP_FFN_FAMILY_W4A8 ? EP_MX_GROUP : n;
    const bool has_integers = family == EP_FFN_FAMILY_W4A8 || s->format == EP_WEIGHTS_W8A8;
    for (size_t i = 0; has_integers && i < n; i += step) {
        to_int8(x + i, error + i, n - i < step ? n - i : step, is_exact);
    }
}

void ep_format_judge(const ep_expert_source *s, ep_ffn_family family, const float *x, double *y,
                     double *bound)
{
    const bool has_gate = ep_activation_has_gate(s->activation);
    const bool narrows = ep_ffn_family_has_pairs(family);
    const matrix gate = {s->format, s->gate, s->gate_scales, s->gate_bias, s->inner, s->hidden};
    const matrix up = {s->format, s->up, s->up_scales, s->up_bias, s->inner, s->hidden};
    const matrix down = {
        ep_expert_down_format(s), s->down, s->down_scales, s->down_bias, s->hidden, s->inner};
    double *row = calloc(s->hidden, sizeof(double));
    double *row_error = calloc(s->hidden, sizeof(double));
    double *h = calloc(s->inner, sizeof(double));
    double *h_error = calloc(s->inner, sizeof(double));
    for (size_t i = 0; i < s->hidden; i++) {
        uint32_t place = (uint32_t)i;
        if (s->places != NULL) {
            memcpy(&place, (const uint8_t *)s->places + 4 * i, sizeof(place));
        }
        row[place] = (double)x[i];
    }
    round_row(s, family, row, row_error, s->hidden, true);
    for (size_t i = 0; i < s->inner; i++) {
        double g_error = 0;
        double u_error = 0;
        double g = has_gate ? dot(s, family, &gate, i, row, row_error, &g_error) : 0.0;
        double u = dot(s, family, &up, i, row, row_error, &u_error);
        h[i] = activate(s, g, u);
        for (int corner = 0; corner < 4; corner++) {
            double moved = activate(s, g + (corner & 1 ? g_error : -g_error),
                                    u + (corner & 2 ? u_error : -u_error));
            h_error[i] = fmax(h_error[i], 1.1 * fabs(moved - h[i]));
        }
        /* exp, erf and tanh within 4 ulp of values up to 1, a few products: absolute where 1 +
         * erf(x) cancels */
        h_error[i] += 16 * U *
                      (fabs(h[i]) +
                       (has_gate ? fabs(g) * (fabs(u) + fabs((double)s->numbers.beta)) : fabs(u)));
        h_error[i] += narrows ? U_NARROW * (fabs(h[i]) + h_error[i]) : 0.0;
    }
    round_row(s, family, h, h_error, s->inner, false);
    for (size_t i = 0; i < s->hidden; i++) {
        y[i] = dot(s, family, &down, i, h, h_error, &bound[i]);
    }
    free(row);
    free(row_error);
    free(h);
    free(h_error);
}
