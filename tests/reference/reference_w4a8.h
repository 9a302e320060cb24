/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle's family w4a8, written from the contract:
 *   rows      of x and of the inner values become integers, group by group of 32 columns (the
 *             last may be short): s = max|x| / 127, rounded; q = x / s, rounded, then to the
 *             nearest integer, ties to even, within +-127. s 0: all q are 0. An element that is not
 *             finite: s is NaN, all q are 0.
 *   weights   w and scale S. int4: the code's value and its scale. mxfp4: twice the code's value,
 *             and half its scale. q4_k: the code, its scale and its offset O.
 *   dot       groups ascending, total from +0: sum of w * q, exact; t = sum * s, rounded; total =
 *             fma(t, S, total). q4_k: t = fma(sum, S, -(O / 8 * (8 * sum of q))), that product
 *             rounded; total = fma(t, s, total).
 * Mistakes: REF_MUTATE_GROUP takes one s for the whole row, _TIES rounds ties away from zero,
 * _CHAIN adds the groups in descending order, _UNFUSED rounds a product before it is added, _BIAS
 * takes the weights of a short last group as the unsigned codes of a kernel.
 */
#ifndef TESTS_REFERENCE_REFERENCE_W4A8_H
#define TESTS_REFERENCE_REFERENCE_W4A8_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "ref_format.h"

enum { REF_W4A8_GROUP = 32 };

static inline size_t ref_w4a8_groups(size_t n)
{
    return (n + REF_W4A8_GROUP - 1) / REF_W4A8_GROUP;
}

static inline float ref_w4a8_nearest(float x)
{
#ifdef REF_MUTATE_TIES
    return roundf(x);
#else
    return rintf(x);
#endif
}

/* Returns a group's s; NaN if an element is not finite. */
static inline float ref_w4a8_scale(const float *x, size_t n)
{
    float greatest = 0.0f;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            return NAN;
        }
        greatest = fabsf(x[i]) > greatest ? fabsf(x[i]) : greatest;
    }
    return greatest / 127.0f;
}

/* q: [n], may be x; scales: [groups]. */
static inline void ref_w4a8_round_row(const float *x, size_t n, float *q, float *scales)
{
    for (size_t g = 0; g < ref_w4a8_groups(n); g++) {
#ifdef REF_MUTATE_GROUP
        scales[g] = ref_w4a8_scale(x, n);
#else
        size_t begin = g * REF_W4A8_GROUP;
        scales[g] =
            ref_w4a8_scale(x + begin, n - begin < REF_W4A8_GROUP ? n - begin : REF_W4A8_GROUP);
#endif
    }
    for (size_t i = 0; i < n; i++) {
        float s = scales[i / REF_W4A8_GROUP];
        float quotient = s > 0.0f ? x[i] / s : 0.0f;
        float nearest = ref_w4a8_nearest(quotient);
        q[i] = nearest > 127.0f ? 127.0f : nearest < -127.0f ? -127.0f : nearest;
    }
}

/* values, scales, offsets: of a matrix's row as ref_matrix has them; only q4_k has offsets. */
static inline float ref_w4a8_dot(enum ref_format format, const float *values, const float *scales,
                                 const float *offsets, const float *q, const float *q_scales,
                                 size_t n)
{
    float factor = format == REF_FORMAT_MXFP4 ? 2.0f : 1.0f;
    float total = 0.0f;
    size_t groups = ref_w4a8_groups(n);
    for (size_t i = 0; i < groups; i++) {
#ifdef REF_MUTATE_CHAIN
        size_t g = groups - 1 - i;
#else
        size_t g = i;
#endif
        size_t end = (g + 1) * REF_W4A8_GROUP < n ? (g + 1) * REF_W4A8_GROUP : n;
        int32_t sum = 0;
        int32_t inputs = 0;
        for (size_t k = g * REF_W4A8_GROUP; k < end; k++) {
            int32_t w = (int32_t)(factor * values[k]);
#ifdef REF_MUTATE_BIAS
            w += end - g * REF_W4A8_GROUP == REF_W4A8_GROUP ? 0
                 : format == REF_FORMAT_Q4_K                ? 0
                 : format == REF_FORMAT_MXFP4               ? 12
                                                            : 8;
#endif
            sum += w * (int32_t)q[k];
            inputs += (int32_t)q[k];
        }
        float t = (float)sum * q_scales[g];
        float scale = scales[g] / factor;
        if (format == REF_FORMAT_Q4_K) {
            float less = offsets[g] / 8.0f * (float)(8 * inputs);
            t = fmaf((float)sum, scale, -less);
            scale = q_scales[g];
        }
#ifdef REF_MUTATE_UNFUSED
        float term = t * scale;
        total = total + term;
#else
        total = fmaf(t, scale, total);
#endif
    }
    return total;
}

#endif
