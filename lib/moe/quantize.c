/* SPDX-License-Identifier: Apache-2.0 */
/* int8 rows: one function for the wire and for compute, so both give the same bits. */
#include "moe/quantize.h"

#include <math.h>
#include <string.h>

/* The element as it is quantised. */
static inline float smoothed(const float *row, const float *smooth, size_t i)
{
    return smooth == NULL ? row[i] : row[i] * smooth[i];
}

float ep_row_quantize_i8(const float *row, const float *smooth, size_t n, int8_t *out)
{
    float amax = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float magnitude = fabsf(smoothed(row, smooth, i));
        if (!(magnitude < INFINITY)) { /* also true for NaN */
            memset(out, 0, n);
            return NAN;
        }
        if (magnitude > amax) {
            amax = magnitude;
        }
    }
    float d = 127.0f / amax;
    if (amax == 0.0f || !isfinite(d)) {
        if (n > 0) {
            memset(out, 0, n);
        }
        return 0.0f;
    }
    for (size_t i = 0; i < n; i++) {
        /* amax * d is 127 within one rounding, so the rounded value always fits. */
        out[i] = (int8_t)rintf(smoothed(row, smooth, i) * d);
    }
    return 1.0f / d;
}

void ep_row_dequantize_i8(const int8_t *row, float scale, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = (float)row[i] * scale;
    }
}
