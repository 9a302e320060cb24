/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_activation.h"

#include <math.h>
#include <stdlib.h>

#include "ref_math.h"

/* Computes c[0] x^(n-1) + .. + c[n-1], each step fused. */
static float polynomial(const float *c, int n, float x)
{
    float p = c[0];
    for (int i = 1; i < n; i++) {
        p = fmaf(p, x, c[i]);
    }
    return p;
}

float ref_tanh(float x)
{
    static const float c[5] = {-0x1.8f8de4p-8f, 0x1.58048ep-6f, -0x1.b9258ap-5f, 0x1.110e1cp-3f,
                               -0x1.555552p-2f};
    float square = x * x;
    if (fabsf(x) < 0.625f) {
        return fmaf(x * square, polynomial(c, 5, square), x);
    }
    float away = 2.0f / (ref_exp(2.0f * fabsf(x)) + 1.0f);
    return copysignf(1.0f - away, x);
}

float ref_erf(float x)
{
    static const float near[7] = {0x1.4a5690p-14f, -0x1.a45088p-11f, 0x1.541270p-8f,
                                  -0x1.b7fabap-6f, 0x1.ce2d10p-4f,   -0x1.81273ep-2f,
                                  0x1.06eba8p-3f};
    static const float far[7] = {-0x1.119fdep-16f, 0x1.831846p-12f, -0x1.f2bfbep-9f, 0x1.89c008p-6f,
                                 -0x1.b3fbaep-4f,  -0x1.452d0ep-1f, -0x1.20ee3cp+0f};
    if (isnan(x)) {
        return x;
    }
    float a = fabsf(x);
    if (a < 1.0f) {
        return fmaf(x, polynomial(near, 7, x * x), x);
    }
    a = a < 4.0f ? a : 4.0f;
    return copysignf(1.0f - ref_exp(a * polynomial(far, 7, a)), x);
}

static float gelu(float x)
{
    float root_half = 0x1.6a09e6p-1f;
    return (0.5f * x) * (1.0f + ref_erf(x * root_half));
}

static float gelu_tanh(float x)
{
    float root_two_over_pi = 0x1.988454p-1f;
    float inner = fmaf(0.044715f * x, x * x, x);
    return (0.5f * x) * (1.0f + ref_tanh(inner * root_two_over_pi));
}

static float relu(float x)
{
    return x < 0.0f ? 0.0f : x;
}

static float cut_above(const struct ref_activation *a, float x)
{
    return a->limit > 0.0f && x > a->limit ? a->limit : x;
}

static float cut_both(const struct ref_activation *a, float x)
{
    x = cut_above(a, x);
    return a->limit > 0.0f && x < -a->limit ? -a->limit : x;
}

float ref_activate_alone(const struct ref_activation *activation, float u)
{
    switch (activation->kind) {
    case REF_ACT_SILU:
        return ref_silu(u);
    case REF_ACT_GELU:
        return gelu(u);
    case REF_ACT_GELU_TANH:
        return gelu_tanh(u);
    case REF_ACT_RELU:
        return relu(u);
    case REF_ACT_RELU2:
        return relu(u) * relu(u);
    default:
        abort();
    }
}

float ref_activate(const struct ref_activation *activation, float g, float u)
{
    const struct ref_activation *a = activation;
    switch (a->kind) {
    case REF_ACT_SILU:
    case REF_ACT_GELU:
    case REF_ACT_GELU_TANH:
        return ref_activate_alone(a, g) * u;
    case REF_ACT_SWIGLU_OAI:
        g = cut_above(a, g);
        return (g * ref_sigmoid(a->alpha * g)) * (cut_both(a, u) + a->beta);
    case REF_ACT_SWIGLU_LIMIT:
        return ref_silu(cut_above(a, g)) * cut_both(a, u);
    case REF_ACT_SWIGLU_STEP:
        return cut_above(a, ref_silu(g)) * cut_both(a, u);
    case REF_ACT_SITU: {
        float left = (a->alpha * ref_tanh(g / a->alpha)) * ref_sigmoid(g);
        float right = a->beta * ref_tanh(u / a->beta);
        return left * right;
    }
    default:
        abort();
    }
}
