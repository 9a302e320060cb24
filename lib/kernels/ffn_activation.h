/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations of family `portable`, between gate, up and down: one value at a time, without
 * branches. In a plain loop the compiler turns them into vector code with the same bits: every step
 * is one IEEE operation, and contraction is off.
 *
 * exp is base/numeric.h's. erf and tanh are ours: a polynomial near 0, and 1 minus an exponential
 * beyond. The coefficients are Chebyshev interpolants of the functions in double precision; the
 * error of each is less than 4 ulp of its value.
 */
#ifndef EP_KERNELS_FFN_ACTIVATION_H
#define EP_KERNELS_FFN_ACTIVATION_H

#include "base/expert_form.h"
#include "base/numeric.h"
#include "kernels/ffn_kernel.h"

static inline float ep_act_tanh(float x)
{
    float a = fabsf(x);
    float z = x * x;
    float p = -0x1.8f8de4p-8f;
    p = fmaf(p, z, 0x1.58048ep-6f);
    p = fmaf(p, z, -0x1.b9258ap-5f);
    p = fmaf(p, z, 0x1.110e1cp-3f);
    p = fmaf(p, z, -0x1.555552p-2f);
    float near = fmaf(x * z, p, x);
    float far = copysignf(1.0f - 2.0f / (ep_expf(2.0f * a) + 1.0f), x);
    return a < 0.625f ? near : far;
}

/* Beyond 4 the distance to 1 is below half an ulp. */
static inline float ep_act_erf(float x)
{
    float a = fabsf(x);
    float z = x * x;
    float p = 0x1.4a5690p-14f;
    p = fmaf(p, z, -0x1.a45088p-11f);
    p = fmaf(p, z, 0x1.541270p-8f);
    p = fmaf(p, z, -0x1.b7fabap-6f);
    p = fmaf(p, z, 0x1.ce2d10p-4f);
    p = fmaf(p, z, -0x1.81273ep-2f);
    p = fmaf(p, z, 0x1.06eba8p-3f);
    float near = fmaf(x, p, x);
    float t = a < 4.0f ? a : 4.0f;
    float q = -0x1.119fdep-16f;
    q = fmaf(q, t, 0x1.831846p-12f);
    q = fmaf(q, t, -0x1.f2bfbep-9f);
    q = fmaf(q, t, 0x1.89c008p-6f);
    q = fmaf(q, t, -0x1.b3fbaep-4f);
    q = fmaf(q, t, -0x1.452d0ep-1f);
    q = fmaf(q, t, -0x1.20ee3cp+0f);
    float far = copysignf(1.0f - ep_expf(t * q), x);
    float y = a < 1.0f ? near : far;
    return x != x ? x : y;
}

static inline float ep_act_gelu(float x)
{
    return 0.5f * x * (1.0f + ep_act_erf(x * 0x1.6a09e6p-1f)); /* 1 / sqrt(2) */
}

static inline float ep_act_gelu_tanh(float x)
{
    float inner = fmaf(0.044715f * x, x * x, x);
    return 0.5f * x * (1.0f + ep_act_tanh(inner * 0x1.988454p-1f)); /* sqrt(2 / pi) */
}

/* NaN is passed on. */
static inline float ep_act_min(float x, float limit)
{
    return x > limit ? limit : x;
}

static inline float ep_act_clamp(float x, float limit)
{
    float y = x > limit ? limit : x;
    return y < -limit ? -limit : y;
}

/* The limit for ep_act_one. */
static inline float ep_act_limit(const ep_activation_numbers *numbers)
{
    return numbers->limit > 0.0f ? numbers->limit : INFINITY;
}

/* kind is a constant in loops. limit: INFINITY for none. Without a gate, g is ignored. */
static inline __attribute__((always_inline)) float
ep_act_one(ep_activation kind, float alpha, float beta, float limit, float g, float u)
{
    switch (kind) {
    case EP_ACT_GELU:
        return ep_act_gelu(g) * u;
    case EP_ACT_GELU_TANH:
        return ep_act_gelu_tanh(g) * u;
    case EP_ACT_SWIGLU_OAI:
        g = ep_act_min(g, limit);
        return g * ep_sigmoidf(alpha * g) * (ep_act_clamp(u, limit) + beta);
    case EP_ACT_SWIGLU_LIMIT:
        return ep_siluf(ep_act_min(g, limit)) * ep_act_clamp(u, limit);
    case EP_ACT_SWIGLU_STEP:
        return ep_act_min(ep_siluf(g), limit) * ep_act_clamp(u, limit);
    case EP_ACT_SITU:
        return alpha * ep_act_tanh(g / alpha) * ep_sigmoidf(g) * (beta * ep_act_tanh(u / beta));
    case EP_ACT_SILU_NO_GATE:
        return ep_siluf(u);
    case EP_ACT_GELU_NO_GATE:
        return ep_act_gelu(u);
    case EP_ACT_GELU_TANH_NO_GATE:
        return ep_act_gelu_tanh(u);
    case EP_ACT_RELU_NO_GATE:
        return u < 0.0f ? 0.0f : u;
    case EP_ACT_RELU2_NO_GATE:
        u = u < 0.0f ? 0.0f : u;
        return u * u;
    default:
        return ep_siluf(g) * u;
    }
}

/*
 * ep_ffn_kernel.activate: a loop for each kind, so that each becomes vector code of the including
 * file's instruction set, over many rows, so that the steps of several rows overlap. The gate is
 * not read where there is none.
 */
static inline void ep_act_rows(ep_activation activation, const ep_activation_numbers *numbers,
                               const float *restrict c, uint32_t rows, float *restrict h,
                               size_t stride)
{
    c = __builtin_assume_aligned(c, 64);
    h = __builtin_assume_aligned(h, 64);
    const float alpha = numbers->alpha;
    const float beta = numbers->beta;
    const float limit = ep_act_limit(numbers);
#define EP_ACT_CASE(name, number, text)                                                            \
    case EP_ACT_##name: {                                                                          \
        const uint32_t width =                                                                     \
            ep_activation_has_gate(EP_ACT_##name) ? EP_FFN_HALF_PANEL : EP_FFN_PANEL;              \
        for (uint32_t r = 0; r < rows; r++) {                                                      \
            const float *g = c + (size_t)r * EP_FFN_PANEL;                                         \
            const float *u = g + EP_FFN_PANEL - width;                                             \
            for (uint32_t i = 0; i < width; i++) {                                                 \
                h[r * stride + i] =                                                                \
                    ep_act_one(EP_ACT_##name, alpha, beta, limit,                                  \
                               ep_activation_has_gate(EP_ACT_##name) ? g[i] : 0.0f, u[i]);         \
            }                                                                                      \
        }                                                                                          \
        break;                                                                                     \
    }
    switch (activation) {
        EP_ACTIVATION_MAP(EP_ACT_CASE)
    default:
        break;
    }
#undef EP_ACT_CASE
}

/* ep_ffn_kernel.exp16. */
static inline void ep_act_exp16(const float *x, float *out)
{
    for (uint32_t i = 0; i < 16; i++) {
        out[i] = ep_expf(x[i]);
    }
}

#endif
