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

static near_value dot(const void *weights, ep_dtype type, size_t row, uint32_t count, const near_value *x)
{
    const double sums = 2 * count * F32_ROUNDOFF; /* both sides add in f32 */
    near_value sum = {0.0, 0.0};
    for (uint32_t i = 0; i < count; i++) {
        const double w = (double)ep_ffn_read_float(weights, type, row * count + i);
        sum.value += w * x[i].value;
        sum.error += fabs(w) * (x[i].error + sums * (fabs(x[i].value) + x[i].error));
    }
    return sum;
}

static near_value activated(near_value gate, near_value up)
{
    const double silu = gate.value / (1.0 + exp(-gate.value));
    const double silu_error = 1.1 * gate.error + 8 * F32_ROUNDOFF * fabs(silu);
    return (near_value){silu * up.value, silu_error * (fabs(up.value) + up.error) + fabs(silu) * up.error};
}

static double factor_of(const expert_fixture *f, const float *x)
{
    double sum = 0.0;
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        sum += (double)ep_ffn_read_float(f->source.shared_gate, f->source.shared_gate_dtype, h) * (double)x[h];
    }
    return 1.0 / (1.0 + exp(-sum));
}

static void bound_row(const expert_fixture *f, uint32_t row, float *wide, near_value *x, near_value *inner, double *out)
{
    const ep_dtype dtype = ep_weight_format_dtype(f->source.format);
    const type_limits type = limits_of(dtype);
    const type_limits result = limits_of(f->out_dtype);
    const ep_ffn_batch batch = {.x_dtype = f->x_dtype, .weight_on_input = f->weight_on_input};
    ep_ffn_widen(&batch, &f->rows[row], 0, f->source.hidden, wide);
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        x[h] = rounded((near_value){(double)wide[h], 0.0}, type);
    }
    for (uint32_t i = 0; i < f->source.inner; i++) {
        const near_value gate = rounded(dot(f->source.gate, dtype, i, f->source.hidden, x), type);
        const near_value up = rounded(dot(f->source.up, dtype, i, f->source.hidden, x), type);
        inner[i] = rounded(activated(gate, up), type);
    }
    const double factor = f->source.shared_gate != NULL ? factor_of(f, wide) : 1.0;
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        near_value y = rounded(dot(f->source.down, dtype, h, f->source.inner, inner), type);
        y.value *= factor;
        y.error = y.error * factor + 1e-4 * fabs(y.value) * (f->source.shared_gate != NULL); /* the gate's own sum is in f32 */
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
