/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle's quantised rows, as an expert receives x and as the caller receives an expert's row,
 * written from the contract:
 *   int8 row    x times the channel's smooth scale, rounded; d = 127 / max|x|; q = rint(x * d);
 *               back: q * (1 / d). max 0 or d not finite: zeros. A non-finite element: the whole
 *               row is NaN.
 *   fp8 row     per 128: scale = max|x| / 448; x / scale to the nearest e4m3 number, at most 448;
 *               back: times scale. scale 0: zeros. A non-finite element: its 128 are NaN.
 *   int8 reply  per 8: s = max|y| * (1 / 127); q = rint(f16(y / s)), at most 127 either way; back:
 *               q times s rounded to the wire type, the product rounded to it too. s 0: zeros. A
 *               non-finite element: its 8 are NaN.
 * Mistakes: REF_MUTATE_SCALE does not round the reply's scale; REF_MUTATE_TRUNCATE truncates.
 */
#ifndef TESTS_REFERENCE_REFERENCE_QUANT_H
#define TESTS_REFERENCE_REFERENCE_QUANT_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "ref_math.h"

static inline float ref_quant_round(float x)
{
#ifdef REF_MUTATE_TRUNCATE
    return truncf(x);
#else
    return rintf(x);
#endif
}

/* Returns the greatest magnitude; NaN if an element is not finite. */
static inline float ref_quant_max(const float *x, size_t n)
{
    float max = 0.0f;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            return NAN;
        }
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    }
    return max;
}

static inline void ref_quant_fill(float *x, size_t n, float value)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = value;
    }
}

/* smooth: [n] or NULL. In place. */
static inline void ref_quant_int8_row(float *x, size_t n, const float *smooth)
{
    for (size_t i = 0; smooth != NULL && i < n; i++) {
        x[i] = x[i] * smooth[i];
    }
    float max = ref_quant_max(x, n);
    float d = 127.0f / max;
    if (isnan(max) || max == 0.0f || !isfinite(d)) {
        ref_quant_fill(x, n, isnan(max) ? NAN : 0.0f);
        return;
    }
    float scale = 1.0f / d;
    for (size_t i = 0; i < n; i++) {
        float step = x[i] * d;
        int q = (int)ref_quant_round(step);
        x[i] = (float)q * scale;
    }
}

/* Returns the nearest e4m3 number: a multiple of the step between neighbours at its magnitude. */
static inline float ref_quant_e4m3(float x)
{
    int exponent;
    double magnitude = fabs((double)x);
    (void)frexp(magnitude, &exponent);
    exponent = magnitude < 0x1p-6 ? -6 : exponent - 1;
    double rounded =
        ldexp((double)ref_quant_round((float)ldexp(magnitude, 3 - exponent)), exponent - 3);
    return copysignf(rounded > 448.0 ? 448.0f : (float)rounded, x);
}

static inline void ref_quant_fp8_row(float *x, size_t n)
{
    for (size_t begin = 0; begin < n; begin += 128) {
        size_t count = n - begin < 128 ? n - begin : 128;
        float max = ref_quant_max(x + begin, count);
        float scale = max / 448.0f;
        if (!(scale > 0.0f)) {
            ref_quant_fill(x + begin, count, isnan(max) ? NAN : 0.0f);
            continue;
        }
        for (size_t i = begin; i < begin + count; i++) {
            float quotient = x[i] / scale;
            x[i] = ref_quant_e4m3(quotient) * scale;
        }
    }
}

/* y holds values of wire_dtype. In place. */
static inline void ref_quant_int8_reply(float *y, size_t n, enum ref_dtype wire_dtype)
{
    for (size_t begin = 0; begin < n; begin += 8) {
        size_t count = n - begin < 8 ? n - begin : 8;
        float max = ref_quant_max(y + begin, count);
        float s = max * (1.0f / 127.0f);
        if (!(s > 0.0f)) {
            ref_quant_fill(y + begin, count, isnan(max) ? NAN : 0.0f);
            continue;
        }
#ifdef REF_MUTATE_SCALE
        float sent = s;
#else
        float sent = ref_round(s, wire_dtype);
#endif
        for (size_t i = begin; i < begin + count; i++) {
            float quotient = y[i] / s;
            float q = ref_quant_round(ref_round(quotient, REF_F16));
            q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
            float product = (q + 0.0f) * sent;
            y[i] = ref_round(product, wire_dtype);
        }
    }
}

#endif
