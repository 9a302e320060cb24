/* SPDX-License-Identifier: Apache-2.0 */
/* Loops over one group have fixed bounds and no branches, so that they become vector code; sums are
 * kept in lanes for the same reason. */
#include "model/weight_quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "moe/convert.h"

#define GROUP EP_MX_GROUP
#define BLOCK_GROUPS (EP_SCALE_BLOCK / GROUP)
#define LANES 8
#define ROUND_MAGIC 12582912.0f /* 1.5 * 2^23: the adder rounds to an integer */

/* GROUP values, with zeros beyond the end of a row, and what they become. */
typedef struct group {
    float values[GROUP];
    float back[GROUP]; /* the values of the codes */
    uint8_t codes[GROUP];
    float amax;
} group;

static const ep_weight_quant quants[] = {
    {"int8-g32", EP_WEIGHTS_INT8_F16, 65504.0f * 127.0f, 0.02},
    {"int4-g32", EP_WEIGHTS_INT4, 0x1p126f, 0.25},
    {"mxfp4", EP_WEIGHTS_MXFP4, 0x1p126f, 0.25},
    {"q4_k", EP_WEIGHTS_Q4_K, 65504.0f * 63.0f, 0.25},
};

/* Where the next scales go in the arrays of base/expert_form.h. */
typedef struct scale_places {
    uint8_t *scales;
    uint8_t *minima;
    uint8_t *scale_factors;
    uint8_t *minimum_factors;
} scale_places;

const ep_weight_quant *ep_weight_quant_at(size_t index)
{
    return index >= 1 && index <= EP_ARRAY_COUNT(quants) ? &quants[index - 1] : NULL;
}

void ep_weight_quant_version(const char *files_version, const ep_weight_quant *quant,
                             char out_version[EP_MODEL_VERSION_BYTES])
{
    snprintf(out_version, EP_MODEL_VERSION_BYTES, "%s%s%s", files_version, quant != NULL ? "-" : "",
             quant != NULL ? quant->name : "");
}

const ep_weight_quant *ep_weight_quant_find(const char *name)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(quants); i++) {
        if (strcmp(quants[i].name, name) == 0) {
            return &quants[i];
        }
    }
    return NULL;
}

static void set_greatest(group *g)
{
    /* signed, since every instruction set compares signed words, and magnitudes have no sign bit */
    int32_t bits = 0;
    for (int i = 0; i < GROUP; i++) {
        const int32_t magnitude = (int32_t)(ep_f32_bits(g->values[i]) & 0x7fffffffu);
        bits = magnitude > bits ? magnitude : bits;
    }
    g->amax = ep_f32_from_bits((uint32_t)bits);
}

static float lanes_sum(const float lanes[LANES])
{
    float sum = lanes[0];
    for (int l = 1; l < LANES; l++) {
        sum += lanes[l];
    }
    return sum;
}

/* ---- int8 ---- */

static uint16_t int8_scale(float amax)
{
    uint16_t scale = ep_f32_to_f16(amax / 127.0f);
    return (uint16_t)(scale + (ep_f16_to_f32(scale) * 127.5f < amax));
}

static void to_int8(group *g, uint8_t *out_scale)
{
    const uint16_t half = int8_scale(g->amax);
    const float scale = ep_f16_to_f32(half);
    const float inverse = scale > 0 ? 1.0f / scale : 0;
    for (int i = 0; i < GROUP; i++) {
        float q = g->values[i] * inverse;
        q = q > 127.0f ? 127.0f : q;
        q = (q < -127.0f ? -127.0f : q) + ROUND_MAGIC;
        g->codes[i] = (uint8_t)ep_f32_bits(q);
        g->back[i] = (q - ROUND_MAGIC) * scale;
    }
    memcpy(out_scale, &half, sizeof(half));
}

/* ---- 4-bit formats: several scales are tried ---- */

/* floor(log2(amax)), at least -126. */
static int exponent_of(float amax)
{
    const int exponent = (int)(ep_f32_bits(amax) >> 23) - 127;
    return exponent < -126 ? -126 : exponent;
}

static float power_of_two(int exponent)
{
    return ep_f32_from_bits((uint32_t)(exponent + 127) << 23);
}

/* Squared error of values [GROUP] under a scale of any sign. */
static float int4_error(const float *values, float scale)
{
    const float inverse = scale != 0 ? 1.0f / scale : 0;
    float lanes[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            float q = values[i + l] * inverse;
            q = q > 7.0f ? 7.0f : q;
            q = (q < -8.0f ? -8.0f : q) + ROUND_MAGIC;
            const float error = values[i + l] - (q - ROUND_MAGIC) * scale;
            lanes[l] += error * error;
        }
    }
    return lanes_sum(lanes);
}

static float first_of_greatest(const group *g)
{
    int i = 0;
    while (g->values[i] != g->amax && g->values[i] != -g->amax) {
        i++;
    }
    return g->values[i];
}

static void to_int4(group *g, uint8_t *out_scale)
{
    static const float divisors[] = {-7.2f, -7.6f, -8.0f, -8.4f, -8.8f};
    const int exponent = exponent_of(g->amax);
    const float back = power_of_two(exponent);
    const float forth = power_of_two(-exponent);
    const float most = first_of_greatest(g);
    float scaled[GROUP];
    float least = INFINITY;
    uint16_t half = 0;
    for (int i = 0; i < GROUP; i++) {
        scaled[i] = g->values[i] * forth;
    }
    for (size_t d = 0; d < EP_ARRAY_COUNT(divisors); d++) {
        const uint16_t tried = ep_f32_to_bf16(most / divisors[d] + 0.0f);
        const float error = int4_error(scaled, ep_bf16_to_f32(tried) * forth);
        half = error < least ? tried : half;
        least = error < least ? error : least;
    }
    const float scale = ep_bf16_to_f32(half) * forth;
    const float inverse = scale != 0 ? 1.0f / scale : 0;
    for (int i = 0; i < GROUP; i++) {
        float q = scaled[i] * inverse;
        q = q > 7.0f ? 7.0f : q;
        q = (q < -8.0f ? -8.0f : q) + ROUND_MAGIC;
        g->codes[i] = (uint8_t)(ep_f32_bits(q) + 8) & 15u;
        g->back[i] = (q - ROUND_MAGIC) * scale * back;
    }
    memcpy(out_scale, &half, sizeof(half));
}

/* The code of a magnitude; codes mean 0 .5 1 1.5 2 3 4 6. */
static inline int e2m1_of(float magnitude)
{
    return (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
           (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
}

/* The value of a code: code 2 e + m means (1 + m / 2) 2^(e - 1), without the 1 where e is 0. */
static inline float e2m1_value(int code)
{
    const float normal = ep_f32_from_bits((uint32_t)(code + 252) << 22);
    return code < 2 ? 0.5f * (float)code : normal;
}

static float e2m1_error(const float *values, float inverse)
{
    float lanes[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            const float magnitude = fabsf(values[i + l] * inverse);
            const float error = magnitude - e2m1_value(e2m1_of(magnitude));
            lanes[l] += error * error;
        }
    }
    return lanes_sum(lanes) / (inverse * inverse);
}

static void to_mxfp4(group *g, uint8_t *out_scale)
{
    const int exponent = exponent_of(g->amax);
    const float forth = power_of_two(-exponent);
    const float back = power_of_two(exponent);
    float scaled[GROUP];
    for (int i = 0; i < GROUP; i++) {
        scaled[i] = g->values[i] * forth;
    }
    /* the least e8m0 scale is 2^-127 */
    const bool is_twice = exponent < -125 || e2m1_error(scaled, 2.0f) < e2m1_error(scaled, 4.0f);
    const float inverse = is_twice ? 2.0f : 4.0f;
    for (int i = 0; i < GROUP; i++) {
        const float x = scaled[i] * inverse;
        const int code = e2m1_of(fabsf(x));
        const float value = e2m1_value(code) / inverse * back;
        g->codes[i] = (uint8_t)(code | (x < 0 && code != 0 ? 8 : 0));
        g->back[i] = x < 0 ? -value : value;
    }
    *out_scale = (uint8_t)(exponent + (is_twice ? 126 : 125));
}

/* ---- q4_k: a line of 16 steps, found by least squares ---- */

/* weight = code * scale - minimum */
typedef struct line {
    float scale;
    float minimum;
} line;

#define LINE_STEPS 2
/* below this a part is 0 anyway, and above it 1 / scale is finite */
#define LINE_SCALE_MIN 0x1p-30f

/* Writes the codes [GROUP] for the line and returns their squared error. */
static float line_codes(const float *values, line by, float *codes)
{
    const float inverse = by.scale >= LINE_SCALE_MIN ? 1.0f / by.scale : 0;
    float lanes[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            float q = (values[i + l] + by.minimum) * inverse;
            q = q > 15.0f ? 15.0f : q;
            q = (q < 0 ? 0 : q) + ROUND_MAGIC;
            q -= ROUND_MAGIC;
            const float error = values[i + l] - (q * by.scale - by.minimum);
            codes[i + l] = q;
            lanes[l] += error * error;
        }
    }
    return lanes_sum(lanes);
}

/* The line with the least squared error for these codes and a minimum of 0 or more. False: all
 * codes are equal. */
static bool fit_line(const float *values, const float *codes, line *out_line)
{
    float lanes[4][LANES] = {{0}};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            const float x = values[i + l];
            const float q = codes[i + l];
            lanes[0][l] += x;
            lanes[1][l] += q;
            lanes[2][l] += q * x;
            lanes[3][l] += q * q;
        }
    }
    const float x = lanes_sum(lanes[0]);
    const float q = lanes_sum(lanes[1]);
    const float qx = lanes_sum(lanes[2]);
    const float qq = lanes_sum(lanes[3]);
    const float determinant = (float)GROUP * qq - q * q; /* whole numbers, so it is exact */
    if (determinant == 0) {
        return false;
    }
    *out_line = (line){((float)GROUP * qx - q * x) / determinant, (q * qx - qq * x) / determinant};
    if (out_line->minimum < 0) {
        *out_line = (line){qx / qq, 0};
    }
    return true;
}

static line first_line(const float *values)
{
    float least[LANES] = {0};
    float most[LANES];
    memcpy(most, values, sizeof(most));
    for (int i = 0; i < GROUP; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            least[l] = values[i + l] < least[l] ? values[i + l] : least[l];
            most[l] = values[i + l] > most[l] ? values[i + l] : most[l];
        }
    }
    for (int l = 1; l < LANES; l++) {
        least[0] = least[l] < least[0] ? least[l] : least[0];
        most[0] = most[l] > most[0] ? most[l] : most[0];
    }
    return (line){(most[0] - least[0]) / 15.0f, 0.0f - least[0]};
}

static line best_line(const float *values)
{
    line tried = first_line(values);
    line best = tried;
    float codes[GROUP];
    float least = line_codes(values, tried, codes);
    for (int step = 0; step < LINE_STEPS && fit_line(values, codes, &tried); step++) {
        const float error = line_codes(values, tried, codes);
        best = error < least ? tried : best;
        least = error < least ? error : least;
    }
    return best;
}

/* The factor of parts up to 63: an f16, as in a GGUF file. */
static float factor_of(float greatest)
{
    const float factor = greatest / 63.0f;
    return ep_f16_to_f32(ep_f32_to_f16(factor > 65504.0f ? 65504.0f : factor));
}

static uint8_t nearest_part(float value, float inverse)
{
    float part = value * inverse;
    part = part > 63.0f ? 63.0f : part;
    return (uint8_t)((part < 0 ? 0 : part) + ROUND_MAGIC - ROUND_MAGIC);
}

static float sum(const float *values)
{
    float lanes[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lanes[l] += values[i + l];
        }
    }
    return lanes_sum(lanes);
}

/* Writes codes [GROUP] for the line as it is stored; returns the part of its minimum. The stored
 * scale differs from the one found, so another minimum may be better: where a few groups have large
 * scales, those of others become 0. */
static uint8_t settle_minimum(const float *values, line found, line factor, line inverse,
                              line *stored, float *codes)
{
    float again[GROUP];
    uint8_t part = nearest_part(found.minimum, inverse.minimum);
    stored->minimum = (float)part * factor.minimum;
    const float error = line_codes(values, *stored, codes);
    const float suits = (sum(codes) * stored->scale - sum(values)) / (float)GROUP;
    const uint8_t other = nearest_part(suits, inverse.minimum);
    const line moved = {stored->scale, (float)other * factor.minimum};
    if (other != part && line_codes(values, moved, again) < error) {
        memcpy(codes, again, sizeof(again));
        *stored = moved;
        part = other;
    }
    return part;
}

/* Quantises the groups [count] of one block. */
static void to_q4_k(group *groups, uint32_t count, scale_places *to)
{
    line lines[BLOCK_GROUPS];
    line most = {0, 0};
    for (uint32_t n = 0; n < count; n++) {
        lines[n] = best_line(groups[n].values);
        most.scale = lines[n].scale > most.scale ? lines[n].scale : most.scale;
        most.minimum = lines[n].minimum > most.minimum ? lines[n].minimum : most.minimum;
    }
    const line factor = {factor_of(most.scale), factor_of(most.minimum)};
    const line inverse = {factor.scale > 0 ? 1.0f / factor.scale : 0,
                          factor.minimum > 0 ? 1.0f / factor.minimum : 0};
    for (uint32_t n = 0; n < count; n++) {
        group *g = &groups[n];
        float codes[GROUP];
        const uint8_t part = nearest_part(lines[n].scale, inverse.scale);
        line stored = {(float)part * factor.scale, 0};
        const uint8_t minimum =
            settle_minimum(g->values, lines[n], factor, inverse, &stored, codes);
        for (int i = 0; i < GROUP; i++) {
            g->codes[i] = (uint8_t)codes[i];
            g->back[i] = codes[i] * stored.scale - stored.minimum;
        }
        *to->scales++ = part;
        *to->minima++ = minimum;
    }
    memcpy(to->scale_factors, &factor.scale, sizeof(float));
    memcpy(to->minimum_factors, &factor.minimum, sizeof(float));
    to->scale_factors += sizeof(float);
    to->minimum_factors += sizeof(float);
}

/* ---- rows ---- */

static void quantize_groups(ep_weight_format format, group *groups, uint32_t count,
                            scale_places *to)
{
    if (format == EP_WEIGHTS_Q4_K) {
        to_q4_k(groups, count, to);
        return;
    }
    void (*const quantize)(group *, uint8_t *) = format == EP_WEIGHTS_INT8_F16 ? to_int8
                                                 : format == EP_WEIGHTS_INT4   ? to_int4
                                                                               : to_mxfp4;
    for (uint32_t n = 0; n < count; n++) {
        quantize(&groups[n], to->scales);
        to->scales += ep_weight_scale_bytes(ep_weight_format_scales(format));
    }
}

static void put_codes(const group *g, bool are_nibbles, size_t bytes, uint8_t *out)
{
    if (!are_nibbles) {
        memcpy(out, g->codes, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(g->codes[2 * i] | g->codes[2 * i + 1] << 4);
    }
}

/* errors, squares: for `count` columns. */
static void add_errors(const group *g, uint32_t count, double *errors, double *squares)
{
    for (uint32_t i = 0; i < count; i++) {
        const double value = (double)g->values[i];
        const double error = value - (double)g->back[i];
        errors[i] += error * error;
        squares[i] += value * value;
    }
}

static double error_of_columns(const double *errors, const double *squares, uint32_t columns)
{
    double sum = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < columns; i++) {
        sum += squares[i] > 0 ? errors[i] / squares[i] : 0;
        count += squares[i] > 0;
    }
    return count > 0 ? sqrt(sum / count) : 0;
}

static void find_refused(const ep_weight_quant *quant, const group *g, uint32_t column,
                         ep_weight_quant_result *out_result)
{
    int i = 0;
    while (fabsf(g->values[i]) <= quant->value_max) { /* false for NaN */
        i++;
    }
    *out_result = (ep_weight_quant_result){.column = column + (uint32_t)i, .value = g->values[i]};
}

/* errors: those of the columns, then their squares. False: a value is refused. */
static bool quantize_row(const ep_weight_quant *quant, ep_dtype dtype, const uint8_t *values,
                         uint32_t columns, uint8_t *codes, scale_places *scales, double *errors,
                         ep_weight_quant_result *out_refused)
{
    const bool are_nibbles = quant->format != EP_WEIGHTS_INT8_F16;
    const size_t element = ep_dtype_bytes(dtype);
    for (uint32_t first = 0; first < columns; first += EP_SCALE_BLOCK) {
        group groups[BLOCK_GROUPS];
        const uint32_t end = columns - first < EP_SCALE_BLOCK ? columns : first + EP_SCALE_BLOCK;
        uint32_t count = 0;
        for (uint32_t k = first; k < end; k += GROUP) {
            group *g = &groups[count++];
            memset(g->values, 0, sizeof(g->values));
            ep_row_widen(values + k * element, dtype, end - k < GROUP ? end - k : GROUP, g->values);
            set_greatest(g);
            if (!(g->amax <= quant->value_max)) {
                find_refused(quant, g, k, out_refused);
                return false;
            }
        }
        quantize_groups(quant->format, groups, count, scales);
        for (uint32_t k = first, n = 0; n < count; k += GROUP, n++) {
            const uint32_t width = end - k < GROUP ? end - k : GROUP;
            put_codes(&groups[n], are_nibbles, ep_weight_row_bytes(quant->format, width),
                      codes + (are_nibbles ? k / 2 : k));
            add_errors(&groups[n], width, errors + k, errors + columns + k);
        }
    }
    return true;
}

ep_err ep_weight_quantize(const ep_weight_quant *quant, ep_dtype dtype, const void *values,
                          uint32_t rows, uint32_t columns, uint8_t *codes, uint8_t *scales,
                          ep_weight_quant_result *out_result)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(quant->format, rows, columns);
    const size_t row_bytes = ep_weight_row_bytes(quant->format, columns);
    const size_t value_bytes = columns * ep_dtype_bytes(dtype);
    scale_places places = {.scales = scales,
                           .minima = scales + arrays.scales,
                           .scale_factors = scales + arrays.scales + arrays.offsets,
                           .minimum_factors =
                               scales + arrays.scales + arrays.offsets + arrays.scale_factors};
    double *errors = calloc(2 * (size_t)columns, sizeof(*errors));
    if (errors == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t r = 0; r < rows; r++) {
        if (!quantize_row(quant, dtype, (const uint8_t *)values + r * value_bytes, columns,
                          codes + r * row_bytes, &places, errors, out_result)) {
            out_result->row = r;
            free(errors);
            return EP_ERR_BAD_FILE;
        }
    }
    *out_result =
        (ep_weight_quant_result){.error = error_of_columns(errors, errors + columns, columns)};
    free(errors);
    return EP_OK;
}
