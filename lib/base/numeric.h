/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scalar number formats and functions that fix results bit for bit: bf16, f16, fp8 e4m3, and our
 * own exp. Vector kernels repeat these operations in the same order, and so give the same bits. All
 * conversions round to nearest even. A NaN remains a quiet NaN with its upper payload bits and
 * never becomes infinite.
 */
#ifndef EP_BASE_NUMERIC_H
#define EP_BASE_NUMERIC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t ep_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

static inline float ep_f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

static inline float ep_bf16_to_f32(uint16_t b)
{
    return ep_f32_from_bits((uint32_t)b << 16);
}

static inline uint16_t ep_f32_to_bf16(float x)
{
    uint32_t u = ep_f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 16) | 0x0040u);
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float ep_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0) { /* zero and denormals: mantissa * 2^-24 is exact */
        float magnitude = (float)mantissa * 0x1p-24f;
        return ep_f32_from_bits(ep_f32_bits(magnitude) | sign);
    }
    if (exponent == 31) {
        return ep_f32_from_bits(sign | 0x7f800000u | (mantissa << 13) |
                                (mantissa != 0 ? 0x00400000u : 0));
    }
    return ep_f32_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

static inline uint16_t ep_f32_to_f16(float x)
{
    uint32_t u = ep_f32_bits(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    }
    if (magnitude >= 0x477ff000u) { /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) { /* below 2^-14: the f32 adder rounds at 2^-24 */
        float shifted = ep_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (ep_f32_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

/*
 * fp8 e4m3 without infinities: bias 7, subnormals in steps of 2^-9, greatest value 448, one NaN per
 * sign (0x7f, 0xff). Narrowing rounds to nearest even and saturates: infinities and everything
 * above 448 become 448. No branches, so that loops become vector code.
 */
#define EP_F8E4M3_MAX 448.0f

static inline float ep_f8e4m3_to_f32(uint8_t code)
{
    uint32_t magnitude = code & 0x7fu;
    float subnormal = (float)(int32_t)magnitude * 0x1p-9f;
    uint32_t u = magnitude < 8 ? ep_f32_bits(subnormal) : (magnitude << 20) + (120u << 23);
    u = magnitude == 0x7f ? 0x7fc00000u : u;
    return ep_f32_from_bits(u | (uint32_t)(code & 0x80u) << 24);
}

static inline uint8_t ep_f32_to_f8e4m3(float x)
{
    uint32_t u = ep_f32_bits(x);
    /* signed, since every instruction set compares signed words */
    int32_t magnitude = (int32_t)(u & 0x7fffffffu);
    /* below 2^-6: the f32 adder rounds at 2^-9 */
    float shifted = ep_f32_from_bits((uint32_t)magnitude) + 0x1p14f;
    int32_t subnormal = (int32_t)(ep_f32_bits(shifted) - 0x46800000u);
    uint32_t rounded = (uint32_t)magnitude + 0x7ffffu + (((uint32_t)magnitude >> 20) & 1u);
    int32_t normal = (int32_t)(rounded >> 20) - (120 << 3);
    int32_t code = magnitude < 0x3c800000 ? subnormal : normal;
    code = code > 0x7e ? 0x7e : code;
    code = magnitude > 0x7f800000 ? 0x7f : code;
    return (uint8_t)((uint32_t)code | ((u >> 24) & 0x80u));
}

/*
 * exp in f32, family `portable`: Cody-Waite reduction and a degree-6 polynomial (the classic
 * single-precision coefficients), fused multiply-add where written, about 1 ulp. Inputs above
 * EP_EXP_MAX give +inf, below EP_EXP_MIN give 0.
 */
#define EP_EXP_MAX 88.72283172607422f
#define EP_EXP_MIN (-103.97207641601562f)
#define EP_EXP_LOG2E 0x1.715476p+0f
#define EP_EXP_LN2_HIGH 0x1.62e400p-1f
#define EP_EXP_LN2_LOW 0x1.7f7d1cp-20f
#define EP_EXP_C0 1.9875691500e-4f
#define EP_EXP_C1 1.3981999507e-3f
#define EP_EXP_C2 8.3334519073e-3f
#define EP_EXP_C3 4.1665795894e-2f
#define EP_EXP_C4 1.6666665459e-1f
#define EP_EXP_C5 5.0000001201e-1f

/* Without branches, so that plain loops over it become vector code with the same bits. NaN gives
 * NaN. */
static inline float ep_expf(float x)
{
    float inside = x > EP_EXP_MIN ? x : EP_EXP_MIN; /* also replaces NaN */
    inside = inside < EP_EXP_MAX ? inside : EP_EXP_MAX;
    float n = rintf(inside * EP_EXP_LOG2E);
    float r = fmaf(n, -EP_EXP_LN2_HIGH, inside);
    r = fmaf(n, -EP_EXP_LN2_LOW, r);
    float p = EP_EXP_C0;
    p = fmaf(p, r, EP_EXP_C1);
    p = fmaf(p, r, EP_EXP_C2);
    p = fmaf(p, r, EP_EXP_C3);
    p = fmaf(p, r, EP_EXP_C4);
    p = fmaf(p, r, EP_EXP_C5);
    float y = fmaf(p, r * r, r) + 1.0f;
    int32_t whole = (int32_t)n;
    /* two exact powers of two: only the last product may round, for denormals */
    int32_t half = whole >> 1;
    float first = ep_f32_from_bits((uint32_t)(half + 127) << 23);
    float second = ep_f32_from_bits((uint32_t)(whole - half + 127) << 23);
    float result = (y * first) * second;
    result = x > EP_EXP_MAX ? INFINITY : result;
    result = x < EP_EXP_MIN ? 0.0f : result;
    return x != x ? x : result;
}

static inline float ep_sigmoidf(float x)
{
    return 1.0f / (1.0f + ep_expf(-x));
}

static inline float ep_siluf(float x)
{
    return x / (1.0f + ep_expf(-x));
}

/* One f32 chain of fused multiply-adds in ascending index: the dot product of family `portable`. */
static inline float ep_dotf(const float *a, const float *b, size_t n)
{
    float acc = 0.0f;
    for (size_t i = 0; i < n; i++) {
        acc = fmaf(a[i], b[i], acc);
    }
    return acc;
}

#endif
