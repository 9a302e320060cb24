/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arithmetic of the oracle: number formats, exp, dot product, written a second time from the
 * definitions of the numerics families `portable`, `bf16dp` and `bf16odd`. It shares no code with
 * lib/. Compile it with -ffp-contract=off.
 */
#ifndef TESTS_REFERENCE_REF_MATH_H
#define TESTS_REFERENCE_REF_MATH_H

#include <stddef.h>
#include <stdint.h>

#include "ref_family.h"

/* REF_F8 is e4m3, REF_E8M0 a power of two. */
enum ref_dtype { REF_BF16, REF_F16, REF_F32, REF_I8, REF_I32, REF_I64, REF_U8, REF_F8, REF_E8M0 };

size_t ref_dtype_bytes(enum ref_dtype dtype);

/* Round to nearest, ties to even. NaN stays NaN, quiet, with its top payload bits. */
uint16_t ref_bf16_from_float(float value);
uint16_t ref_f16_from_float(float value);
float ref_float_from_bf16(uint16_t bits);
float ref_float_from_f16(uint16_t bits);

/* Returns element index of an array; REF_I8 and REF_U8 give the integer's value. data may be
 * unaligned. Not for REF_I32 and REF_I64. */
float ref_load(const void *data, enum ref_dtype dtype, size_t index);
/* Stores with one rounding to REF_BF16, REF_F16 or REF_F32; only these. */
void ref_store(void *data, enum ref_dtype dtype, size_t index, float value);
/* Rounds value once to dtype and widens it again. */
float ref_round(float value, enum ref_dtype dtype);

float ref_exp(float x);
float ref_sigmoid(float x);
float ref_silu(float x);
/* acc = 0; acc = fma(a[i], b[i], acc) in ascending order. */
float ref_dot(const float *a, const float *b, size_t n);
/* For families of pairs: rounds value to bf16 and widens it; denormals become signed zeros. */
float ref_pair_input(float value);
/*
 * Dot products of families of pairs: acc = 0; pairs in ascending order; denormals are zeros in
 * inputs and results.
 *   bf16dp    the odd member of a pair first, then the even one; each fused
 *   bf16odd   the sum of both products, then its sum with acc, each rounded to odd
 */
float ref_dot_bf16dp(const float *a, const float *b, size_t n);
float ref_dot_bf16odd(const float *a, const float *b, size_t n);
/* Returns the dot product of any family; w4a8 has none over floats and uses portable's. */
float ref_dot_of(enum ref_family family, const float *a, const float *b, size_t n);
/* In place: subtracts the maximum, applies ref_exp, divides by the ascending sum. n >= 1. */
void ref_softmax(float *values, size_t n);

#endif
