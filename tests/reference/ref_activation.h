/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An expert's activation functions, written a second time from the text of the numerics. tanh and
 * erf are a polynomial near 0 and 1 minus an exponential beyond, with the coefficients of the
 * numerics; everything else follows the formulas.
 */
#ifndef TESTS_REFERENCE_REF_ACTIVATION_H
#define TESTS_REFERENCE_REF_ACTIVATION_H

#include <stdbool.h>

enum ref_activation_kind {
    REF_ACT_SILU,
    REF_ACT_GELU,
    REF_ACT_GELU_TANH,
    REF_ACT_RELU,  /* only without a gate */
    REF_ACT_RELU2, /* only without a gate */
    /* g' sigmoid(alpha g') (u' + beta), both clamped first; these four only with a gate */
    REF_ACT_SWIGLU_OAI,
    REF_ACT_SWIGLU_LIMIT, /* silu(g') u', both clamped first */
    REF_ACT_SWIGLU_STEP,  /* silu(g) cut at the limit, times u clamped */
    REF_ACT_SITU          /* alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta) */
};

struct ref_activation {
    enum ref_activation_kind kind;
    float alpha, beta;
    float limit; /* 0 none */
};

float ref_tanh(float x);
float ref_erf(float x);
/* Computes from a gate's and an up row's result, biases added. */
float ref_activate(const struct ref_activation *activation, float g, float u);
/* For experts of two matrices: computes from u alone. */
float ref_activate_alone(const struct ref_activation *activation, float u);

#endif
