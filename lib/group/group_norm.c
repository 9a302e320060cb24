/* SPDX-License-Identifier: Apache-2.0 */
/* Each step is rounded in f32 as written; squares are summed in ascending order. */
#include "group/group_norm.h"

#include <math.h>

#include "moe/convert.h"

float ep_group_add_rms_norm(float *sum, const float *residual, const float *gamma, float eps,
                            size_t hidden, ep_dtype dtype, void *out_y, void *out_x)
{
    float factor = 1.0f / (float)hidden;
    float mean = 0.0f;
    for (size_t i = 0; i < hidden; i++) {
        sum[i] = sum[i] + residual[i];
    }
    if (out_x != NULL) {
        ep_row_narrow(sum, hidden, dtype, out_x);
    }
    for (size_t i = 0; i < hidden; i++) {
        float square = sum[i] * sum[i];
        mean = mean + square * factor;
    }
    float rstd = 1.0f / sqrtf(mean + eps);
    for (size_t i = 0; i < hidden; i++) {
        sum[i] = sum[i] * rstd;
    }
    /* rounded once here, as the vendor does before gamma */
    ep_row_narrow(sum, hidden, dtype, out_y);
    ep_row_widen(out_y, dtype, hidden, sum);
    for (size_t i = 0; i < hidden; i++) {
        sum[i] = sum[i] * gamma[i];
    }
    ep_row_narrow(sum, hidden, dtype, out_y);
    return rstd;
}
