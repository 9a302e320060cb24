/* SPDX-License-Identifier: Apache-2.0 */
#include "contract/backend/expert_bound.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/ffn_widen.h"

#define F32_ROUNDOFF 0x1p-24

typedef struct type_limits {
    double roundoff;
    double smallest; /* half a step below the normal numbers */
} type_limits;

static type_limits limits_of(ep_dtype dtype)
{
    return dtype == EP_DTYPE_BF16  ? (type_limits){0x1p-8, 0x1p-134}
           : dtype == EP_DTYPE_F16 ? (type_limits){0x1p-11, 0x1p-25}
                                   : (type_limits){F32_ROUNDOFF, 0x1p-150};
}

typedef struct near_value {
    double value;
    double error;
} near_value;

/* value, not further off than error, rounded once more. */
static near_value rounded(near_value v, type_limits type)
{
    v.error += type.roundoff * (fabs(v.value) + v.error) + type.smallest;
    return v;
}

/* Weight i of a row, its scale included. */
static double weight_of(const expert_fixture *f, const void *values, const void *scales, size_t row,
                        uint32_t count, uint32_t i)
{
    if (f->source.format == EP_WEIGHTS_W8A8) {
        return (double)((const int8_t *)values)[row * count + i] *
               (double)ep_ffn_read_float(scales, EP_DTYPE_F32, row);
    }
    return (double)ep_ffn_read_float(values, ep_weight_format_dtype(f->source.format),
                                     row * count + i);
}

static near_value dot(const expert_fixture *f, const void *values, const void *scales, size_t row,
                      uint32_t count, const near_value *x)
{
    /* both sides add in f32, and multiply by scales */
    const double sums = (2 * count + 8) * F32_ROUNDOFF;
    near_value sum = {0.0, 0.0};
    for (uint32_t i = 0; i < count; i++) {
        const double w = weight_of(f, values, scales, row, count, i);
        sum.value += w * x[i].value;
        sum.error += fabs(w) * (x[i].error + sums * (fabs(x[i].value) + x[i].error));
    }
    return sum;
}

/* A bias as the device adds it. */
static near_value biased(const expert_fixture *f, near_value sum, const void *biases, uint32_t i)
{
    if (biases == NULL) {
        return sum;
    }
    const type_limits type = limits_of(f->source.format == EP_WEIGHTS_F16    ? EP_DTYPE_F16
                                       : f->source.format == EP_WEIGHTS_W8A8 ? EP_DTYPE_BF16
                                                                             : EP_DTYPE_F32);
    const double exact = (double)ep_ffn_read_float(biases, f->source.bias_dtype, i);
    const near_value bias = rounded((near_value){exact, 0.0}, type);
    const near_value both = {sum.value + bias.value, sum.error + bias.error};
    return rounded(both, limits_of(EP_DTYPE_F32));
}

/* The function of the gate; no slope is above 1.13. */
static double of_gate(const ep_expert_source *s, double g)
{
    const double limit = s->numbers.limit > 0.0f ? (double)s->numbers.limit : INFINITY;
    switch (s->activation) {
    case EP_ACT_GELU:
        return 0.5 * g * (1.0 + erf(g * M_SQRT1_2));
    case EP_ACT_GELU_TANH:
        return 0.5 * g * (1.0 + tanh(sqrt(2.0 / M_PI) * (g + 0.044715 * g * g * g)));
    case EP_ACT_SWIGLU_OAI:
        g = fmin(g, limit);
        return g / (1.0 + exp(-(double)s->numbers.alpha * g));
    case EP_ACT_SWIGLU_LIMIT:
        g = fmin(g, limit);
        return g / (1.0 + exp(-g));
    default:
        return g / (1.0 + exp(-g));
    }
}

/* That of up; no slope is above 1. */
static double of_up(const ep_expert_source *s, double u)
{
    const double limit = s->numbers.limit > 0.0f ? (double)s->numbers.limit : INFINITY;
    const bool is_clipped =
        s->activation == EP_ACT_SWIGLU_OAI || s->activation == EP_ACT_SWIGLU_LIMIT;
    u = is_clipped ? fmax(fmin(u, limit), -limit) : u;
    return s->activation == EP_ACT_SWIGLU_OAI ? u + (double)s->numbers.beta : u;
}

static near_value activated(const ep_expert_source *s, near_value gate, near_value up)
{
    const double g = of_gate(s, gate.value);
    const double u = of_up(s, up.value);
    const double g_error = 1.13 * gate.error + 16 * F32_ROUNDOFF * (fabs(g) + fabs(gate.value));
    const double u_error = up.error + 2 * F32_ROUNDOFF * fabs(u);
    return (near_value){g * u, g_error * (fabs(u) + u_error) + fabs(g) * u_error};
}

static double factor_of(const expert_fixture *f, const float *x)
{
    double sum = 0.0;
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        sum += (double)ep_ffn_read_float(f->source.shared_gate, f->source.shared_gate_dtype, h) *
               (double)x[h];
    }
    return 1.0 / (1.0 + exp(-sum));
}

/* x as both sides multiply it, or as the device rounds it. */
static void bound_x(const expert_fixture *f, uint32_t row, type_limits type, float *wide,
                    near_value *x)
{
    const ep_ffn_batch batch = {.x_dtype = f->x_dtype, .weight_on_input = f->weight_on_input};
    float greatest = 0.0f;
    ep_ffn_widen(&batch, &f->rows[row], 0, f->source.hidden, wide);
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        greatest = fmaxf(greatest, fabsf(wide[h]));
    }
    const float scale = ep_ffn_int8_scale(ep_f32_bits(greatest));
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        x[h] = f->source.format == EP_WEIGHTS_W8A8
                   ? (near_value){(double)ep_ffn_int8_round(wide[h], scale) * (double)scale, 0.0}
                   : rounded((near_value){(double)wide[h], 0.0}, type);
    }
}

static void bound_inner(const expert_fixture *f, type_limits type, const near_value *x,
                        near_value *inner)
{
    const ep_expert_source *s = &f->source;
    double greatest = 0.0;
    for (uint32_t i = 0; i < s->inner; i++) {
        const near_value gate =
            biased(f, dot(f, s->gate, s->gate_scales, i, s->hidden, x), s->gate_bias, i);
        const near_value up =
            biased(f, dot(f, s->up, s->up_scales, i, s->hidden, x), s->up_bias, i);
        inner[i] = rounded(activated(s, rounded(gate, type), rounded(up, type)), type);
        greatest = fmax(greatest, fabs(inner[i].value) + inner[i].error);
    }
    for (uint32_t i = 0; s->format == EP_WEIGHTS_W8A8 && i < s->inner; i++) {
        inner[i].error += 1.01 * greatest / 127.0;
    }
}

static void bound_row(const expert_fixture *f, uint32_t row, float *wide, near_value *x,
                      near_value *inner, double *out)
{
    const ep_expert_source *s = &f->source;
    const type_limits type = limits_of(s->format == EP_WEIGHTS_F16 ? EP_DTYPE_F16 : EP_DTYPE_BF16);
    const type_limits result = limits_of(f->out_dtype);
    bound_x(f, row, type, wide, x);
    bound_inner(f, type, x, inner);
    const double factor = s->shared_gate != NULL ? factor_of(f, wide) : 1.0;
    for (uint32_t h = 0; h < s->hidden; h++) {
        near_value y = rounded(
            biased(f, dot(f, s->down, s->down_scales, h, s->inner, inner), s->down_bias, h), type);
        y.value *= factor;
        y.error =
            y.error * factor +
            1e-4 * fabs(y.value) * (s->shared_gate != NULL); /* the gate's own sum is in f32 */
        y = rounded(rounded(y, result), result);
        out[h] = y.error;
    }
}

double *expert_bound_make(const expert_fixture *f)
{
    double *bounds = malloc((size_t)f->rows_count * f->source.hidden * sizeof(*bounds));
    float *wide = malloc(f->source.hidden * sizeof(*wide));
    near_value *x = malloc(f->source.hidden * sizeof(*x));
    near_value *inner = malloc(f->source.inner * sizeof(*inner));
    for (uint32_t r = 0; r < f->rows_count; r++) {
        bound_row(f, r, wide, x, inner, bounds + (size_t)r * f->source.hidden);
    }
    free(wide);
    free(x);
    free(inner);
    return bounds;
}
