/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_format.h"

#include <math.h>
#include <stdlib.h>

#include "ref_math.h"

enum ref_family ref_format_family(enum ref_format format, enum ref_family told)
{
    if (told == REF_W4A8 || told == REF_AUTO_VNNI) {
        bool has_nibbles =
            format == REF_FORMAT_MXFP4 || format == REF_FORMAT_INT4 || format == REF_FORMAT_Q4_K;
        return has_nibbles        ? REF_W4A8
               : told == REF_W4A8 ? ref_format_family(format, REF_BF16DP)
                                  : REF_PORTABLE;
    }
    bool is_bf16 = format == REF_FORMAT_BF16;
    bool has_groups =
        format == REF_FORMAT_CODES || format == REF_FORMAT_Q4_K || ref_format_group(format) > 0;
    bool has_format = told == REF_BF16DP ? is_bf16 || has_groups : is_bf16;
    return has_format ? told : REF_PORTABLE;
}

size_t ref_format_group(enum ref_format format)
{
    switch (format) {
    case REF_FORMAT_F8:
        return 128;
    case REF_FORMAT_MXFP4:
    case REF_FORMAT_MXFP8:
    case REF_FORMAT_INT4:
        return 32;
    default:
        return 0;
    }
}

/* Decodes a sign, `exponents` bits of exponent with this bias and `fractions` bits of fraction;
 * exponent 0 has no leading one. */
static float small_float(unsigned code, int exponents, int fractions, int bias)
{
    int exponent = (int)(code >> fractions) & ((1 << exponents) - 1);
    int fraction = (int)code & ((1 << fractions) - 1);
    float value = exponent == 0
                      ? ldexpf((float)fraction, 1 - bias - fractions)
                      : ldexpf((float)(fraction + (1 << fractions)), exponent - bias - fractions);
    return (code >> (exponents + fractions) & 1) != 0 ? -value : value;
}

float ref_e2m1(unsigned code)
{
    return small_float(code, 2, 1, 1);
}

float ref_e4m3(uint8_t code)
{
    return (code & 0x7f) == 0x7f ? NAN : small_float(code, 4, 3, 7);
}

float ref_e8m0(uint8_t code)
{
    return code == 0xff ? NAN : ldexpf(1.0f, (int)code - 127);
}

/* Adds a group to the total: portable by a fused step, families of pairs with two roundings. */
static float add_group(enum ref_family family, float total, float chain, float scale)
{
    if (family == REF_PORTABLE) {
        return fmaf(scale, chain, total);
    }
    float scaled = chain * scale;
    return total + scaled;
}

/* Whether the family computes the format as the bf16 matrix of codes times scales, instead of group
 * by group: bf16dp does so with MX formats. */
static bool is_widened(enum ref_format format, enum ref_family family)
{
    return family == REF_BF16DP && (format == REF_FORMAT_MXFP4 || format == REF_FORMAT_MXFP8);
}

/* Returns a widened weight: never denormal, and zero is positive. */
static float widened_weight(float code, float scale)
{
    float weight = ref_pair_input(code * scale);
    return weight == 0.0f ? 0.0f : weight;
}

static float dot_widened(enum ref_family family, const float *values, const float *scales,
                         size_t group, const float *x, size_t n)
{
    float *weights = malloc((n + 1) * sizeof(*weights));
    if (weights == NULL) {
        return NAN;
    }
    for (size_t i = 0; i < n; i++) {
        weights[i] = widened_weight(values[i], scales[i / group]);
    }
    float sum = ref_dot_of(family, weights, x, n);
    free(weights);
    return sum;
}

float ref_dot_codes(enum ref_family family, const float *values, const float *scales,
                    const float *offsets, size_t group, const float *x, size_t n)
{
    float total = 0.0f;
    float *ones = malloc((group + 1) * sizeof(*ones));
    for (size_t i = 0; ones != NULL && i < group; i++) {
        ones[i] = 1.0f;
    }
    for (size_t begin = 0; ones != NULL && begin < n; begin += group) {
        size_t count = n - begin < group ? n - begin : group;
        float chain = ref_dot_of(family, values + begin, x + begin, count);
        total = add_group(family, total, chain, scales[begin / group]);
        if (offsets != NULL) {
            float sum = ref_dot_of(family, ones, x + begin, count);
            total = add_group(family, total, sum, -offsets[begin / group]);
        }
    }
    free(ones);
    return ones == NULL ? NAN : total;
}

float ref_dot_groups(enum ref_format format, enum ref_family family, const float *values,
                     const float *scales, const float *x, size_t n)
{
    size_t group = ref_format_group(format);
    return is_widened(format, family) ? dot_widened(family, values, scales, group, x, n)
                                      : ref_dot_codes(family, values, scales, NULL, group, x, n);
}

void ref_round_int8(const float *x, size_t n, float *out_q, float *out_scale)
{
    float greatest = 0.0f;
    bool finite = true;
    for (size_t i = 0; i < n; i++) {
        finite = finite && isfinite(x[i]);
        greatest = fabsf(x[i]) > greatest ? fabsf(x[i]) : greatest;
    }
    float scale = finite ? greatest / 127.0f : NAN;
    for (size_t i = 0; i < n; i++) {
        float q = scale > 0.0f ? rintf(x[i] / scale) : 0.0f;
        out_q[i] = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
    }
    *out_scale = scale;
}

float ref_dot_int8(const float *values, float scale, const float *q, float q_scale, size_t n)
{
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (int64_t)values[i] * (int64_t)q[i];
    }
    float scaled = (float)sum * scale;
    return scaled * q_scale;
}
