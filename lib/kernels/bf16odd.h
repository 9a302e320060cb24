/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numerics family `bf16odd`, for bf16 weights: dot products over pairs of bf16, as 64-bit Arm's
 * BFDOT and BFMMLA compute them while FPCR.EBF is 0, its value after a program's start (they then
 * ignore all other bits of FPCR). It equals family `bf16dp` (bf16dp.h) except for one step of a dot
 * product:
 *   step    both products of the pair, then their sum, then its sum with acc, each rounded to odd:
 *           truncated towards zero, and the lowest bit set when something was lost. (Both products
 *           are exact in f32.) Denormal inputs and a denormal acc become zeros of their sign, and
 *           so does each result below 2^-126 before rounding; 2^128 and above is an infinity.
 * A pair is one step whichever instruction computes it, and steps are in ascending order, so both
 * instructions give equal bits.
 *
 * The functions here are this rule for scalars.
 */
#ifndef EP_KERNELS_BF16ODD_H
#define EP_KERNELS_BF16ODD_H

#include "kernels/bf16dp.h"

/* a + b; neither is denormal. */
static inline float ep_bf16odd_sum(float a, float b)
{
    const double wide_a = (double)a;
    const double wide_b = (double)b;
    /* The sum in 53 bits, and exactly what it lost. */
    const double sum = wide_a + wide_b;
    const double part = sum - wide_a;
    const double lost = (wide_a - (sum - part)) + (wide_b - part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof(bits));
    const uint32_t sign = (uint32_t)(bits >> 63) << 31;
    const bool is_above = lost != 0.0 && (lost < 0.0) != (sum < 0.0);
    const uint64_t magnitude = (bits & 0x7fffffffffffffffu) - (is_above ? 1 : 0);
    const uint32_t odd = (magnitude & 0x1fffffffu) != 0 || lost != 0.0 ? 1 : 0;
    uint32_t result = ((uint32_t)(magnitude >> 29) - ((1023u - 127u) << 23)) | odd;
    result = magnitude < (uint64_t)(1023 - 126) << 52 ? 0 : result;
    /* covers an infinity too */
    result = magnitude >= (uint64_t)(1023 + 128) << 52 ? 0x7f800000u : result;
    return sum != sum ? ep_f32_from_bits(0x7fc00000u) : ep_f32_from_bits(result | sign);
}

/* a * b for bf16 values: the product has 16 bits, so only its exponent can be out of range. */
static inline float ep_bf16odd_product(uint32_t a, uint32_t b)
{
    return ep_bf16dp_flush(ep_bf16dp_flush(ep_f32_from_bits(a)) *
                           ep_bf16dp_flush(ep_f32_from_bits(b)));
}

/* One pair; w and x hold the even member in the low half. */
static inline float ep_bf16odd_step(float acc, uint32_t w, uint32_t x)
{
    const float even = ep_bf16odd_product(w << 16, x << 16);
    const float odd = ep_bf16odd_product(w & 0xffff0000u, x & 0xffff0000u);
    return ep_bf16odd_sum(ep_bf16dp_flush(acc), ep_bf16odd_sum(even, odd));
}

#endif
