/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref_checkpoint.h"

enum { GROUP = 32, BLOCK = 256 };

static float greatest(const float *values, size_t n)
{
    float most = 0.0f;
    for (size_t i = 0; i < n; i++) {
        most = fabsf(values[i]) > most ? fabsf(values[i]) : most;
    }
    return most;
}

/* Returns the exponent of the power of two that divides the values. */
static int norm_of(float most)
{
    int exponent;
    frexpf(most, &exponent);
    return most == 0.0f || exponent - 1 < -126 ? -126 : exponent - 1;
}

static float nearest_int(float value, float scale, float low, float high)
{
    float inverse = 1.0f / scale;
    float q = value * inverse;
    q = q < low ? low : q > high ? high : q;
    q = rintf(q);
    return q == 0.0f ? 0.0f : q;
}

/* Returns the nearest value of e2m1; of two equally near ones that with the even code. */
static float nearest_e2m1(float value)
{
    unsigned best = 0;
    for (unsigned code = 1; code < 8; code++) {
        float now = fabsf(fabsf(value) - ref_e2m1(best));
        float then = fabsf(fabsf(value) - ref_e2m1(code));
        best = then < now || (then == now && code % 2 == 0) ? code : best;
    }
    float magnitude = ref_e2m1(best);
    return value < 0.0f && best != 0 ? -magnitude : magnitude;
}

/* Sums the products of a and b. */
static float sum_of(const float *a, const float *b)
{
    float sums[8] = {0};
    float total = 0.0f;
    for (size_t i = 0; i < GROUP; i++) {
        float product = a[i] * b[i];
        sums[i % 8] += product;
    }
    for (size_t i = 0; i < 8; i++) {
        total += sums[i];
    }
    return total;
}

/* values and scale are divided by the same number. */
static float squared_error(const float *values, const float *codes, float scale, float minimum)
{
    float errors[GROUP];
    for (size_t i = 0; i < GROUP; i++) {
        float product = codes[i] * scale;
        float weight = product - minimum;
        errors[i] = values[i] - weight;
    }
    return sum_of(errors, errors);
}

static void group_int8(const float *values, float *out_scale, float *out_codes)
{
    float most = greatest(values, GROUP);
    uint16_t half;
    ref_store(&half, REF_F16, 0, most / 127.0f);
    float scale = ref_load(&half, REF_F16, 0);
    if (scale * 127.5f < most) {
        half++;
        scale = ref_load(&half, REF_F16, 0);
    }
    for (size_t i = 0; i < GROUP; i++) {
        out_codes[i] = scale == 0.0f ? 0.0f : nearest_int(values[i], scale, -127.0f, 127.0f);
    }
    *out_scale = scale;
}

static void codes_int4(const float *values, float scale, float *out_codes)
{
    for (size_t i = 0; i < GROUP; i++) {
        out_codes[i] = scale == 0.0f ? 0.0f : nearest_int(values[i], scale, -8.0f, 7.0f);
    }
}

static void group_int4(const float *values, float *out_scale, float *out_codes)
{
    static const float divisors[5] = {-7.2f, -7.6f, -8.0f, -8.4f, -8.8f};
    float most = greatest(values, GROUP);
    int norm = norm_of(most);
    float normed[GROUP], codes[GROUP];
    float least = INFINITY;
    size_t first = 0;
    while (fabsf(values[first]) != most) {
        first++;
    }
    for (size_t i = 0; i < GROUP; i++) {
        normed[i] = ldexpf(values[i], -norm);
    }
    for (size_t d = 0; d < 5; d++) {
        uint16_t half;
        ref_store(&half, REF_BF16, 0, values[first] / divisors[d]);
        float scale = ref_load(&half, REF_BF16, 0);
        codes_int4(normed, ldexpf(scale, -norm), codes);
        float error = squared_error(normed, codes, ldexpf(scale, -norm), 0.0f);
        if (error < least) {
            least = error;
            *out_scale = scale;
            memcpy(out_codes, codes, sizeof(codes));
        }
    }
}

static void group_mxfp4(const float *values, float *out_scale, float *out_codes)
{
    int norm = norm_of(greatest(values, GROUP));
    float normed[GROUP], codes[2][GROUP], errors[2];
    for (size_t i = 0; i < GROUP; i++) {
        normed[i] = ldexpf(values[i], -norm);
    }
    for (int twice = 0; twice < 2; twice++) {
        for (size_t i = 0; i < GROUP; i++) {
            codes[twice][i] = nearest_e2m1(ldexpf(normed[i], 2 - twice));
        }
        errors[twice] = squared_error(normed, codes[twice], ldexpf(1.0f, twice - 2), 0.0f);
    }
    int chosen = norm - 2 < -127 || errors[1] < errors[0] ? 1 : 0;
    *out_scale = ldexpf(1.0f, norm - 2 + chosen);
    memcpy(out_codes, codes[chosen], sizeof(codes[chosen]));
}

/* q4_k: computes a group's codes for a scale and a minimum. */
static void codes_q4_k(const float *values, float scale, float minimum, float *out_codes)
{
    for (size_t i = 0; i < GROUP; i++) {
        float above = values[i] + minimum;
        out_codes[i] = scale < 0x1p-30f ? 0.0f : nearest_int(above, scale, 0.0f, 15.0f);
    }
}

static void line_q4_k(const float *values, float *out_scale, float *out_minimum)
{
    float ones[GROUP], codes[GROUP];
    float low = 0.0f, high = values[0], least = INFINITY;
    for (size_t i = 0; i < GROUP; i++) {
        ones[i] = 1.0f;
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
    float minimum = low == 0.0f ? 0.0f : -low;
    float scale = (high + minimum) / 15.0f;
    for (int tries = 0; tries < 3; tries++) {
        codes_q4_k(values, scale, minimum, codes);
        float error = squared_error(values, codes, scale, minimum);
        if (error < least) {
            least = error;
            *out_scale = scale;
            *out_minimum = minimum;
        }
        float x = sum_of(values, ones), q = sum_of(codes, ones);
        float qx = sum_of(codes, values), qq = sum_of(codes, codes);
        float below = 32.0f * qq - q * q;
        if (below == 0.0f) {
            return;
        }
        float over = 32.0f * qx, less = q * x;
        scale = (over - less) / below;
        over = q * qx;
        less = qq * x;
        minimum = (over - less) / below;
        if (minimum < 0.0f) {
            minimum = 0.0f;
            scale = qx / qq;
        }
    }
}

static float factor_q4_k(const float *numbers, size_t count)
{
    float most = 0.0f;
    uint16_t half;
    for (size_t g = 0; g < count; g++) {
        most = numbers[g] > most ? numbers[g] : most;
    }
    most /= 63.0f;
    ref_store(&half, REF_F16, 0, most > 65504.0f ? 65504.0f : most);
    return ref_load(&half, REF_F16, 0);
}

/* Rounds numbers [count] of a block to parts of 6 bits times their factor. */
static void share_q4_k(float *numbers, size_t count)
{
    float factor = factor_q4_k(numbers, count);
    for (size_t g = 0; g < count; g++) {
        numbers[g] = factor == 0.0f ? 0.0f : factor * nearest_int(numbers[g], factor, 0.0f, 63.0f);
    }
}

/* Computes codes for a shared scale, and takes the minimum that fits them best, as a part of
 * factor, if the error gets smaller. */
static void settle_q4_k(const float *values, float scale, float factor, float *minimum,
                        float *out_codes)
{
    float ones[GROUP], codes[GROUP];
    for (size_t i = 0; i < GROUP; i++) {
        ones[i] = 1.0f;
    }
    codes_q4_k(values, scale, *minimum, out_codes);
    float steps = sum_of(out_codes, ones) * scale;
    float other = (steps - sum_of(values, ones)) / 32.0f;
    other = factor == 0.0f ? 0.0f : factor * nearest_int(other, factor, 0.0f, 63.0f);
    codes_q4_k(values, scale, other, codes);
    if (squared_error(values, codes, scale, other) <
        squared_error(values, out_codes, scale, *minimum)) {
        *minimum = other;
        memcpy(out_codes, codes, sizeof(codes));
    }
}

void ref_quant_row(enum ref_quant quant, const float *values, size_t n, float *out_scales,
                   float *out_offsets, float *out_codes)
{
    size_t groups = (n + GROUP - 1) / GROUP;
    float all[GROUP], codes[GROUP], factor = 0.0f;
    for (size_t g = 0; g < groups; g++) {
        size_t count = n - g * GROUP < GROUP ? n - g * GROUP : GROUP;
        memset(all, 0, sizeof(all));
        memcpy(all, values + g * GROUP, count * sizeof(*values));
        out_offsets[g] = 0.0f;
        if (quant == REF_QUANT_Q4_K) {
            line_q4_k(all, &out_scales[g], &out_offsets[g]);
            continue;
        }
        if (quant == REF_QUANT_INT8) {
            group_int8(all, &out_scales[g], codes);
        } else if (quant == REF_QUANT_INT4) {
            group_int4(all, &out_scales[g], codes);
        } else {
            group_mxfp4(all, &out_scales[g], codes);
        }
        memcpy(out_codes + g * GROUP, codes, count * sizeof(*codes));
    }
    for (size_t g = 0; quant == REF_QUANT_Q4_K && g < groups; g++) {
        size_t count = n - g * GROUP < GROUP ? n - g * GROUP : GROUP;
        if (g % (BLOCK / GROUP) == 0) {
            size_t rest = groups - g < BLOCK / GROUP ? groups - g : BLOCK / GROUP;
            factor = factor_q4_k(out_offsets + g, rest);
            share_q4_k(out_scales + g, rest);
            share_q4_k(out_offsets + g, rest);
        }
        memset(all, 0, sizeof(all));
        memcpy(all, values + g * GROUP, count * sizeof(*values));
        settle_q4_k(all, out_scales[g], factor, &out_offsets[g], codes);
        memcpy(out_codes + g * GROUP, codes, count * sizeof(*codes));
    }
}

static void quantize_matrix(struct ref_matrix *matrix, size_t rows, size_t columns,
                            enum ref_quant quant)
{
    size_t groups = (columns + GROUP - 1) / GROUP;
    float *scales = malloc(rows * groups * sizeof(*scales));
    float *offsets = malloc(rows * groups * sizeof(*offsets));
    float *codes = malloc(rows * columns * sizeof(*codes));
    if (scales == NULL || offsets == NULL || codes == NULL || matrix->scales != NULL) {
        ref_die("no memory, or a matrix that has scales");
    }
    for (size_t r = 0; r < rows; r++) {
        ref_quant_row(quant, matrix->values + r * columns, columns, scales + r * groups,
                      offsets + r * groups, codes + r * columns);
    }
    free((void *)matrix->values);
    matrix->values = codes;
    matrix->scales = scales;
    if (quant == REF_QUANT_Q4_K) {
        matrix->offsets = offsets;
    } else {
        free(offsets);
    }
    /* the other formats define the group */
    matrix->group = quant == REF_QUANT_INT8 || quant == REF_QUANT_Q4_K ? GROUP : 0;
}

static void quantize_experts(const struct ref_expert *experts, size_t count, size_t hidden,
                             enum ref_quant quant)
{
    for (size_t i = 0; i < count; i++) {
        struct ref_expert *expert = (struct ref_expert *)&experts[i];
        if (expert->gate.values != NULL) {
            quantize_matrix(&expert->gate, expert->inner, hidden, quant);
        }
        quantize_matrix(&expert->up, expert->inner, hidden, quant);
        quantize_matrix(&expert->down, hidden, expert->inner, quant);
        expert->down_differs = false;
        expert->format = quant == REF_QUANT_INT8   ? REF_FORMAT_CODES
                         : quant == REF_QUANT_INT4 ? REF_FORMAT_INT4
                         : quant == REF_QUANT_Q4_K ? REF_FORMAT_Q4_K
                                                   : REF_FORMAT_MXFP4;
    }
}

void ref_layer_quantize(struct ref_layer *layer, enum ref_quant quant, enum ref_family family)
{
    if (quant != REF_QUANT_NONE) {
        quantize_experts(layer->experts, layer->expert_count, layer->hidden, quant);
        quantize_experts(layer->shared, layer->shared_count, layer->hidden, quant);
        ref_layer_set_family(layer, family);
    }
}
