/* SPDX-License-Identifier: Apache-2.0 */
#include "support/format_judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"

#define U 0x1p-24        /* half an ulp of f32, relative: one rounding */
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

/* Weight [n,k] of a matrix of K columns. */
static double weight(ep_weight_format format, const void *values, const void *scales, size_t K, size_t n, size_t k)
{
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const uint8_t *bytes = values;
    const size_t groups = (K + 31) / 32;
    const size_t blocks = (K + 127) / 128;
    uint32_t word;
    unsigned code;
    switch (format) {
    case EP_WEIGHTS_F8_BLOCK:
        return f8(bytes[n * K + k]) * plain(scales, EP_DTYPE_F32, n / 128 * blocks + k / 128);
    case EP_WEIGHTS_F8_CHANNEL:
        return f8(bytes[n * K + k]) * plain(scales, EP_DTYPE_F32, n);
    case EP_WEIGHTS_W8A8:
        return (double)(int8_t)bytes[n * K + k] * plain(scales, EP_DTYPE_F32, n);
    case EP_WEIGHTS_MXFP8:
        return f8(bytes[n * K + k]) * ldexp(1.0, (int)((const uint8_t *)scales)[n * groups + k / 32] - 127);
    case EP_WEIGHTS_MXFP4:
        code = bytes[n * ((K + 1) / 2) + k / 2] >> (k % 2 == 0 ? 0 : 4) & 15u;
        return (code >= 8 ? -1.0 : 1.0) * e2m1[code & 7u] *
               ldexp(1.0, (int)((const uint8_t *)scales)[n * groups + k / 32] - 127);
    case EP_WEIGHTS_INT4:
        memcpy(&word, bytes + 4 * (n * ((K + 7) / 8) + k / 8), 4);
        return ((double)(word >> (4 * (k % 8)) & 15u) - 8.0) * plain(scales, EP_DTYPE_BF16, n * groups + k / 32);
    default:
        return plain(values, ep_weight_format_dtype(format), n * K + k);
    }
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
        return fmin(g, limit) * sigmoid(alpha * fmin(g, limit)) * (fmax(fmin(u, limit), -limit) + beta);
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
 * A dot product and its error. Chains of fused multiply-adds with one more per group of columns, or a product and a sum:
 * every product passes through at most n + groups + 2 roundings, so the error is at most (n + groups + 3) units of
 * sum |w x|, and the bias adds one of u. Of w4a8 the sums of a group are exact: a product passes through one rounding with
 * the scale of x and one in its group and each after it, groups + 1. x may itself be off by x_error.
 */
static double dot(const ep_expert_source *s, ep_ffn_family family, const void *values, const void *scales, const void *bias,
                  size_t columns, size_t row, const double *x, const double *x_error, double *error)
{
    const double unit = family == EP_FFN_FAMILY_BF16ODD ? 2 * U : U; /* rounding to odd errs by up to a whole ulp */
    double sum = 0;
    double magnitude = 0;
    double moved = 0;
    for (size_t k = 0; k < columns; k++) {
        double w = weight(s->format, values, scales, columns, row, k);
        sum += w * x[k];
        magnitude += fabs(w * x[k]);
        moved += fabs(w) * x_error[k];
    }
    double b = bias == NULL ? 0.0 : plain(bias, s->bias_dtype, row);
    double roundings = (family == EP_FFN_FAMILY_W4A8 ? 0.0 : (double)columns) + (double)(columns / 32) + 4;
    *error = moved + roundings * unit * (magnitude + moved) + U * (fabs(sum) + fabs(b));
    return sum + b;
}

/*
 * Rounds a row, or a group of one, to int8 as w8a8 and w4a8 say. An inner row is known up to error only: its scale then to
 * worst / 127, and an integer that lies so near halfway may be the next one.
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
        double from_half = fabs(fabs((double)steps) - floor(fabs((double)steps)) - 0.5) * (double)scale;
        double moved = error[i] + fabs((double)q) * worst / 127 + 4 * U * 128 * (double)scale;
        bool may_be_next = from_half <= moved;
        error[i] = is_exact ? 0.0 : moved + (may_be_next ? (double)scale : 0.0);
        x[i] = (double)q * (double)scale;
    }
}

/* The same for what is rounded at once: all of a row of w8a8, groups of w4a8, nothing of others. */
static void round_row(const ep_expert_source *s, ep_ffn_family family, double *x, double *error, size_t n, bool is_exact)
{
    const size_t step = family == EP_FFN_FAMILY_W4A8 ? EP_MX_GROUP : n;
    const bool has_integers = family == EP_FFN_FAMILY_W4A8 || s->format == EP_WEIGHTS_W8A8;
    for (size_t i = 0; has_integers && i < n; i += step) {
        to_int8(x + i, error + i, n - i < step ? n - i : step, is_exact);
    }
}

void ep_format_judge(const ep_expert_source *s, ep_ffn_family family, const float *x, double *y, double *bound)
{
    const bool has_gate = ep_activation_has_gate(s->activation);
    const bool narrows = ep_ffn_family_has_pairs(family);
    double *row = calloc(s->hidden, sizeof(double));
    double *row_error = calloc(s->hidden, sizeof(double));
    double *h = calloc(s->inner, sizeof(double));
    double *h_error = calloc(s->inner, sizeof(double));
    for (size_t i = 0; i < s->hidden; i++) {
        row[i] = (double)x[i];
    }
    round_row(s, family, row, row_error, s->hidden, true);
    for (size_t i = 0; i < s->inner; i++) {
        double g_error = 0;
        double u_error = 0;
        double g = has_gate ? dot(s, family, s->gate, s->gate_scales, s->gate_bias, s->hidden, i, row, row_error, &g_error) : 0.0;
        double u = dot(s, family, s->up, s->up_scales, s->up_bias, s->hidden, i, row, row_error, &u_error);
        h[i] = activate(s, g, u);
        for (int corner = 0; corner < 4; corner++) {
            double moved = activate(s, g + (corner & 1 ? g_error : -g_error), u + (corner & 2 ? u_error : -u_error));
            h_error[i] = fmax(h_error[i], 1.1 * fabs(moved - h[i]));
        }
        /* exp, erf and tanh within 4 ulp of values up to 1, a few products: absolute where 1 + erf(x) cancels */
        h_error[i] += 16 * U * (fabs(h[i]) + (has_gate ? fabs(g) * (fabs(u) + fabs((double)s->numbers.beta)) : fabs(u)));
        h_error[i] += narrows ? U_NARROW * (fabs(h[i]) + h_error[i]) : 0.0;
    }
    round_row(s, family, h, h_error, s->inner, false);
    for (size_t i = 0; i < s->hidden; i++) {
        y[i] = dot(s, family, s->down, s->down_scales, s->down_bias, s->inner, i, h, h_error, &bound[i]);
    }
    free(row);
    free(row_error);
    free(h);
    free(h_error);
}
