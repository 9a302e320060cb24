/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref_checkpoint.h"

enum { GROUP = 32 };

static float greatest(const float *values, size_t n)
{
    float most = 0.0f;
    for (size_t i = 0; i < n; i++) {
        most = fabsf(values[i]) > most ? fabsf(values[i]) : most;
    }
    return most;
}

/* Exponent of the power of two that values are divided by. */
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

/* Of all values of e2m1 the nearest, of two the one whose code is even. */
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

/* Values and scale divided alike. */
static float squared_error(const float *values, const float *codes, float scale)
{
    float sums[8] = {0};
    float total = 0.0f;
    for (size_t i = 0; i < GROUP; i++) {
        float product = codes[i] * scale;
        float error = values[i] - product;
        float square = error * error;
        sums[i % 8] += square;
    }
    for (size_t i = 0; i < 8; i++) {
        total += sums[i];
    }
    return total;
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
        float error = squared_error(normed, codes, ldexpf(scale, -norm));
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
        errors[twice] = squared_error(normed, codes[twice], ldexpf(1.0f, twice - 2));
    }
    int chosen = norm - 2 < -127 || errors[1] < errors[0] ? 1 : 0;
    *out_scale = ldexpf(1.0f, norm - 2 + chosen);
    memcpy(out_codes, codes[chosen], sizeof(codes[chosen]));
}

void ref_quant_group(enum ref_quant quant, const float *values, size_t n, float *out_scale,
                     float *out_codes)
{
    float all[GROUP] = {0}, codes[GROUP];
    memcpy(all, values, n * sizeof(*values));
    switch (quant) {
    case REF_QUANT_INT8:
        group_int8(all, out_scale, codes);
        break;
    case REF_QUANT_INT4:
        group_int4(all, out_scale, codes);
        break;
    default:
        group_mxfp4(all, out_scale, codes);
        break;
    }
    memcpy(out_codes, codes, n * sizeof(*codes));
}

static void quantize_matrix(struct ref_matrix *matrix, size_t rows, size_t columns,
                            enum ref_quant quant)
{
    size_t groups = (columns + GROUP - 1) / GROUP;
    float *scales = malloc(rows * groups * sizeof(*scales));
    float *codes = malloc(rows * columns * sizeof(*codes));
    if (scales == NULL || codes == NULL || matrix->scales != NULL) {
        ref_die("no memory, or a matrix that has scales");
    }
    for (size_t r = 0; r < rows; r++) {
        for (size_t g = 0; g < groups; g++) {
            size_t at = r * columns + g * GROUP;
            size_t n = columns - g * GROUP < GROUP ? columns - g * GROUP : GROUP;
            ref_quant_group(quant, matrix->values + at, n, &scales[r * groups + g], codes + at);
        }
    }
    free((void *)matrix->values);
    matrix->values = codes;
    matrix->scales = scales;
    matrix->group = quant == REF_QUANT_INT8 ? GROUP : 0; /* the others' formats say so */
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
