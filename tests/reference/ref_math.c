/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of the oracle, one plain function per rule. */
#include "ref_math.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ref_format.h"

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

size_t ref_dtype_bytes(enum ref_dtype dtype)
{
    switch (dtype) {
    case REF_BF16:
    case REF_F16:
        return 2;
    case REF_F32:
    case REF_I32:
        return 4;
    case REF_I64:
        return 8;
    case REF_I8:
    case REF_U8:
    case REF_F8:
    case REF_E8M0:
        return 1;
    }
    return 0;
}

uint16_t ref_bf16_from_float(float value)
{
    uint32_t bits = bits_of(value);
    if (isnan(value)) {
        return (uint16_t)((bits >> 16) | 0x0040);
    }
    uint32_t kept = bits >> 16;
    uint32_t rest = bits & 0xffff;
    if (rest > 0x8000 || (rest == 0x8000 && (kept & 1) != 0)) {
        kept++;
    }
    return (uint16_t)kept;
}

float ref_float_from_bf16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

uint16_t ref_f16_from_float(float value)
{
    uint32_t bits = bits_of(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    if (isnan(value)) {
        return (uint16_t)(sign | 0x7e00 | ((bits >> 13) & 0x01ff));
    }
    /* The result counts f16 steps at this magnitude, rounded to the nearest even integer. */
    double magnitude = fabs((double)value);
    if (magnitude >= 65520.0) {
        return (uint16_t)(sign | 0x7c00);
    }
    int exponent = -14;
    if (magnitude >= 0x1p-14) {
        (void)frexp(magnitude, &exponent);
        exponent--;
    }
    unsigned steps = (unsigned)rint(ldexp(magnitude, 10 - exponent)); /* normal: 1024..2048,
                                                                         subnormal: 0..1024 */
    return (uint16_t)(sign | ((unsigned)(exponent + 14) * 1024u + steps));
}

float ref_float_from_f16(uint16_t bits)
{
    unsigned exponent = (bits >> 10) & 0x1f;
    unsigned fraction = bits & 0x3ff;
    float value;
    if (exponent == 0x1f) {
        uint32_t quiet = fraction != 0 ? 0x00400000u : 0;
        return float_of(((uint32_t)(bits & 0x8000) << 16) | 0x7f800000u | quiet |
                        ((uint32_t)fraction << 13));
    }
    if (exponent == 0) {
        value = ldexpf((float)fraction, -24);
    } else {
        value = ldexpf((float)(fraction + 1024), (int)exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -value : value;
}

float ref_load(const void *data, enum ref_dtype dtype, size_t index)
{
    const unsigned char *at = (const unsigned char *)data + index * ref_dtype_bytes(dtype);
    uint16_t half;
    float value;
    switch (dtype) {
    case REF_BF16:
        memcpy(&half, at, sizeof(half));
        return ref_float_from_bf16(half);
    case REF_F16:
        memcpy(&half, at, sizeof(half));
        return ref_float_from_f16(half);
    case REF_F32:
        memcpy(&value, at, sizeof(value));
        return value;
    case REF_I8:
        return (float)(int8_t)*at;
    case REF_U8:
        return (float)*at;
    case REF_F8:
        return ref_e4m3(*at);
    case REF_E8M0:
        return ref_e8m0(*at);
    case REF_I32:
    case REF_I64:
        break;
    }
    abort();
}

void ref_store(void *data, enum ref_dtype dtype, size_t index, float value)
{
    unsigned char *at = (unsigned char *)data + index * ref_dtype_bytes(dtype);
    uint16_t half;
    switch (dtype) {
    case REF_BF16:
        half = ref_bf16_from_float(value);
        memcpy(at, &half, sizeof(half));
        return;
    case REF_F16:
        half = ref_f16_from_float(value);
        memcpy(at, &half, sizeof(half));
        return;
    case REF_F32:
        memcpy(at, &value, sizeof(value));
        return;
    default:
        break;
    }
    abort();
}

float ref_round(float value, enum ref_dtype dtype)
{
    float narrow;
    ref_store(&narrow, dtype, 0, value);
    return ref_load(&narrow, dtype, 0);
}

static float power_of_two(int n)
{
    return float_of((uint32_t)(n + 127) << 23);
}

float ref_exp(float x)
{
    if (isnan(x)) {
        return x;
    }
    if (x > 88.72283172607422f) {
        return INFINITY;
    }
    if (x < -103.97207641601562f) {
        return 0.0f;
    }
    float n = rintf(x * 0x1.715476p+0f);
    float r = fmaf(n, -0x1.62e400p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    float square = r * r;
    float y = fmaf(p, square, r) + 1.0f;
    int whole = (int)n;
    int half = whole >= 0 ? whole / 2
                          : -((1 - whole) / 2); /* floor(whole / 2), as an arithmetic shift gives */
    return (y * power_of_two(half)) * power_of_two(whole - half);
}

float ref_sigmoid(float x)
{
    return 1.0f / (1.0f + ref_exp(-x));
}

float ref_silu(float x)
{
    return x / (1.0f + ref_exp(-x));
}

float ref_dot(const float *a, const float *b, size_t n)
{
    float acc = 0.0f;
    for (size_t i = 0; i < n; i++) {
        acc = fmaf(a[i], b[i], acc);
    }
    return acc;
}

static float without_denormals(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x;
}

/* A result this small comes from values that all stay in range times 2^64 and 2^128. So the step is
 * computed on scaled values, where it rounds as if exponents were unlimited. */
static float fused_pair_step(float a, float b, float acc)
{
    a = without_denormals(a);
    b = without_denormals(b);
    acc = without_denormals(acc);
    float result = fmaf(a, b, acc);
    if (fabsf(result) > 0x1p-126f || isnan(result)) {
        return result;
    }
    float grown = fmaf(a * 0x1p64f, b * 0x1p64f, acc * 0x1p127f * 2.0f);
    return fabsf(grown) < 4.0f ? copysignf(0.0f, result) : result;
}

float ref_pair_input(float value)
{
    return ref_round(without_denormals(value), REF_BF16);
}

float ref_dot_bf16dp(const float *a, const float *b, size_t n)
{
    float acc = 0.0f;
    for (size_t i = 0; i < n; i += 2) {
        bool odd = i + 1 < n;
        acc = fused_pair_step(odd ? a[i + 1] : 0.0f, odd ? b[i + 1] : 0.0f, acc);
        acc = fused_pair_step(a[i], b[i], acc);
    }
    return acc;
}

/* Returns the exact sum if it is a double, else the one of the two doubles around it whose last bit
 * is set. */
static double sum_to_odd(double a, double b)
{
    double sum = a + b;
    double part = sum - a;
    double lost = (a - (sum - part)) + (b - part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof(bits));
    bool is_even = (bits & 1) == 0;
    return lost != 0.0 && is_even && isfinite(sum)
               ? nextafter(sum, lost > 0.0 ? INFINITY : -INFINITY)
               : sum;
}

/* Returns a + b rounded to odd as if exponents had no lower limit; 2^128 and above becomes
 * infinity, and below 2^-126 zero. */
static float odd_sum(float a, float b)
{
    double sum = sum_to_odd((double)a, (double)b);
    if (isnan(sum) || sum == 0.0) {
        return (float)sum;
    }
    if (fabs(sum) < 0x1p-126) {
        return copysignf(0.0f, (float)sum);
    }
    if (fabs(sum) >= 0x1p128) {
        return copysignf(INFINITY, (float)sum);
    }
    float near = (float)sum;
    bool is_even = (bits_of(near) & 1) == 0;
    return (double)near != sum && is_even
               ? nextafterf(near, (double)near < sum ? INFINITY : -INFINITY)
               : near;
}

static float odd_product(float a, float b)
{
    /* exact, or out of range */
    return without_denormals(without_denormals(a) * without_denormals(b));
}

float ref_dot_bf16odd(const float *a, const float *b, size_t n)
{
    float acc = 0.0f;
    for (size_t i = 0; i < n; i += 2) {
        float odd = i + 1 < n ? odd_product(a[i + 1], b[i + 1]) : 0.0f;
        acc = odd_sum(without_denormals(acc), odd_sum(odd_product(a[i], b[i]), odd));
    }
    return acc;
}

float ref_dot_of(enum ref_family family, const float *a, const float *b, size_t n)
{
    switch (family) {
    case REF_BF16DP:
        return ref_dot_bf16dp(a, b, n);
    case REF_BF16ODD:
        return ref_dot_bf16odd(a, b, n);
    case REF_PORTABLE:
    case REF_AUTO_VNNI:
    case REF_W4A8:
        break;
    }
    return ref_dot(a, b, n);
}

void ref_softmax(float *values, size_t n)
{
    float max = values[0];
    float sum = 0.0f;
    for (size_t i = 1; i < n; i++) {
        if (values[i] > max) {
            max = values[i];
        }
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = ref_exp(values[i] - max);
        sum = sum + values[i];
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = values[i] / sum;
    }
}
