/* SPDX-License-Identifier: Apache-2.0 */
/* Codes and scales of weight_quant: those of the oracle (tests/reference), which has the rules from
 * the text; errors, and what is refused. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"
#include "kernels/ffn_element.h"
#include "model/weight_quant.h"
#include "moe/convert.h"
#include "ref_quant.h"

static const struct {
    const char *name;
    enum ref_quant oracle;
} quants[] = {{"int8-g32", REF_QUANT_INT8},
              {"int4-g32", REF_QUANT_INT4},
              {"mxfp4", REF_QUANT_MXFP4},
              {"q4_k", REF_QUANT_Q4_K}};
static const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};

#define COLUMNS_MAX 600

/* A matrix and what becomes of it. */
typedef struct made {
    uint32_t rows;
    uint32_t columns;
    ep_dtype dtype;
    uint8_t *values;
    float *wide; /* the same */
    uint8_t *codes;
    uint8_t *scales;
    ep_weight_quant_result result;
} made;

static made make(ep_dtype dtype, uint32_t rows, uint32_t columns)
{
    const size_t count = (size_t)rows * columns;
    return (made){.rows = rows,
                  .columns = columns,
                  .dtype = dtype,
                  .values = calloc(count, ep_dtype_bytes(dtype)),
                  .wide = calloc(count, sizeof(float))};
}

static void drop(made *m)
{
    free(m->values);
    free(m->wide);
    free(m->codes);
    free(m->scales);
}

static void set_value(made *m, size_t i, float value)
{
    ep_row_narrow(&value, 1, m->dtype, m->values + i * ep_dtype_bytes(m->dtype));
    ep_row_widen(m->values + i * ep_dtype_bytes(m->dtype), m->dtype, 1, &m->wide[i]);
}

static ep_err quantize(made *m, const ep_weight_quant *quant)
{
    free(m->codes);
    free(m->scales);
    m->codes = malloc(m->rows * ep_weight_row_bytes(quant->format, m->columns));
    m->scales = malloc(ep_weight_scales_bytes(quant->format, m->rows, m->columns));
    memset(m->codes, 0xa5, m->rows * ep_weight_row_bytes(quant->format, m->columns));
    return ep_weight_quantize(quant, m->dtype, m->values, m->rows, m->columns, m->codes, m->scales,
                              &m->result);
}

static float normal(uint64_t *state)
{
    double sum = 0;
    for (int i = 0; i < 12; i++) {
        sum += (double)(ep_splitmix64(state) >> 11) * 0x1p-53;
    }
    return (float)(sum - 6);
}

/* Groups as they come, and those that are hard: zeros, one value, ties, tiny, huge, any bits. */
static float draw(uint64_t *state, unsigned kind, float size)
{
    const uint64_t z = ep_splitmix64(state);
    switch (kind) {
    case 0:
        return 0.0f;
    case 1:
        return z % 31 == 0 ? size : 0.0f;
    case 2:
        return (float)((int)(z % 33) - 16) * 0.25f * size;
    case 3:
        return z % 29 == 0 ? 40.0f * size * normal(state) : size * normal(state);
    case 4:
        return ldexpf(normal(state), (int)(z % 60) - 30) * size;
    default:
        return size * normal(state);
    }
}

static void fill(made *m, const ep_weight_quant *quant, uint64_t *state)
{
    for (uint32_t r = 0; r < m->rows; r++) {
        for (uint32_t k = 0; k < m->columns; k += EP_MX_GROUP) {
            const unsigned kind = (unsigned)(ep_splitmix64(state) % 7);
            const float size = ldexpf(1.0f, (int)(ep_splitmix64(state) % 276) - 149);
            for (uint32_t i = k; i < m->columns && i < k + EP_MX_GROUP; i++) {
                const size_t at = (size_t)r * m->columns + i;
                set_value(m, at, draw(state, kind, kind == 6 ? 0.02f : size));
                if (!(fabsf(m->wide[at]) <= quant->value_max)) {
                    set_value(m, at, m->wide[at] < 0 ? -3.0f : 3.0f);
                }
            }
        }
    }
}

static bool has_offsets(const ep_weight_quant *quant)
{
    return ep_weight_format_offsets(quant->format) != EP_OFFSETS_NONE;
}

/* Of one row, against the oracle; the matrix's own reader gives what the bytes mean. */
static void expect_row(const made *m, const ep_weight_quant *quant, enum ref_quant oracle,
                       uint32_t row, double *io_errors)
{
    float scales[COLUMNS_MAX], offsets[COLUMNS_MAX], codes[COLUMNS_MAX];
    const float *values = m->wide + (size_t)row * m->columns;
    const uint8_t *line = m->codes + row * ep_weight_row_bytes(quant->format, m->columns);
    cr_assert_leq(m->columns, COLUMNS_MAX);
    ref_quant_row(oracle, values, m->columns, scales, offsets, codes);
    for (uint32_t k = 0; k < m->columns; k++) {
        const uint32_t g = k / EP_MX_GROUP;
        const float scale =
            ep_ffn_weight_scale(quant->format, m->scales, m->rows, m->columns, row, g);
        const float offset = has_offsets(quant) ? ep_ffn_weight_offset(quant->format, m->scales,
                                                                       m->rows, m->columns, row, g)
                                                : 0.0f;
        const float code = ep_ffn_weight_code(quant->format, line, k);
        cr_assert_eq(ep_f32_bits(scale + 0.0f), ep_f32_bits(scales[g] + 0.0f),
                     "%s row %u column %u: scale %a, the oracle's %a", quant->name, row, k,
                     (double)scale, (double)scales[g]);
        cr_assert_eq(ep_f32_bits(offset), ep_f32_bits(offsets[g]),
                     "%s row %u column %u: offset %a, the oracle's %a", quant->name, row, k,
                     (double)offset, (double)offsets[g]);
        cr_assert_eq(ep_f32_bits(code), ep_f32_bits(codes[k]),
                     "%s row %u column %u: %a by %a is %a, the oracle's %a", quant->name, row, k,
                     (double)values[k], (double)scale, (double)code, (double)codes[k]);
        const double error = (double)values[k] - (double)(code * scale - offset);
        io_errors[k] += error * error;
    }
}

/* As a block of GGUF could hold them. */
static void expect_parts(const made *m, const ep_weight_quant *quant)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(quant->format, m->rows, m->columns);
    const size_t parts = has_offsets(quant) ? arrays.scales + arrays.offsets : 0;
    for (size_t i = 0; i < parts; i++) {
        cr_assert_leq(m->scales[i], 63);
    }
    for (size_t i = 0; i < arrays.scale_factors + arrays.offset_factors; i += sizeof(float)) {
        float factor;
        memcpy(&factor, m->scales + parts + i, sizeof(factor));
        cr_assert(isfinite(factor) && ep_f16_to_f32(ep_f32_to_f16(factor)) == factor, "%a",
                  (double)factor);
    }
}

static void expect_matrix(const made *m, const ep_weight_quant *quant, enum ref_quant oracle)
{
    double *errors = calloc(m->columns, sizeof(*errors));
    double sum = 0;
    uint32_t count = 0;
    expect_parts(m, quant);
    for (uint32_t r = 0; r < m->rows; r++) {
        expect_row(m, quant, oracle, r, errors);
    }
    for (uint32_t k = 0; k < m->columns; k++) {
        double squares = 0;
        for (uint32_t r = 0; r < m->rows; r++) {
            const double value = (double)m->wide[(size_t)r * m->columns + k];
            squares += value * value;
        }
        sum += squares > 0 ? errors[k] / squares : 0;
        count += squares > 0;
    }
    const double wanted = count > 0 ? sqrt(sum / count) : 0;
    cr_assert(fabs(m->result.error - wanted) <= 1e-6 * wanted, "%s: error %g, wanted %g",
              quant->name, m->result.error, wanted);
    free(errors);
}

Test(weight_quant, every_code_and_scale_is_the_oracles)
{
    static const uint32_t widths[] = {1, 31, 32, 33, 47, 64, 96, 100, 256, 257, 600};
    uint64_t state = 20;
    for (size_t q = 0; q < EP_ARRAY_COUNT(quants); q++) {
        const ep_weight_quant *quant = ep_weight_quant_find(quants[q].name);
        for (size_t d = 0; d < EP_ARRAY_COUNT(dtypes); d++) {
            for (size_t w = 0; w < EP_ARRAY_COUNT(widths); w++) {
                made m = make(dtypes[d], 97, widths[w]);
                fill(&m, quant, &state);
                cr_assert_eq(quantize(&m, quant), EP_OK);
                expect_matrix(&m, quant, quants[q].oracle);
                drop(&m);
            }
        }
    }
}

/* Codes of columns behind the end mean 0, so that a digest over all bytes says what they are. */
Test(weight_quant, bytes_behind_a_row_are_set)
{
    const ep_weight_quant *quant = ep_weight_quant_find("int4-g32");
    made m = make(EP_DTYPE_F32, 1, 33);
    for (size_t i = 0; i < 33; i++) {
        set_value(&m, i, 1.0f);
    }
    cr_assert_eq(quantize(&m, quant), EP_OK);
    cr_assert_eq(ep_weight_row_bytes(quant->format, 33), 20);
    cr_expect_eq(m.codes[16] >> 4, 8);
    cr_expect_eq(m.codes[17], 0x88);
    cr_expect_eq(m.codes[19], 0x88);
    drop(&m);
}

static void set_line(made *m, size_t group, float step, float minimum)
{
    for (size_t i = 0; i < EP_MX_GROUP; i++) {
        set_value(m, group * EP_MX_GROUP + i, (float)(i % 16) * step - minimum);
    }
}

static void set_equal(made *m, size_t group, float value)
{
    for (size_t i = 0; i < EP_MX_GROUP; i++) {
        set_value(m, group * EP_MX_GROUP + i, value);
    }
}

/* Lines whose parts of 6 bits are whole numbers are kept as they are. */
Test(weight_quant, q4_k_of_groups_made_by_hand)
{
    enum { STEP, THIRD, ZEROS, ABOVE, BELOW, OUTLIER, LAST, GROUPS = 10 };
    const ep_weight_quant *quant = ep_weight_quant_find("q4_k");
    static const uint8_t parts[GROUPS] = {63, 21, 0, 21, 0, 63, 1, 0, 63, 63};
    static const uint8_t minima[GROUPS] = {63, 7, 0, 0, 14, 0, 0, 0, 0, 63};
    static const float factors[4] = {0x1p-8f, 0x1p-3f, 0x1p-7f, 0x1p-5f};
    made m = make(EP_DTYPE_F32, 1, GROUPS * EP_MX_GROUP);
    set_line(&m, STEP, 63 * 0x1p-8f, 63 * 0x1p-7f);
    set_line(&m, THIRD, 21 * 0x1p-8f, 7 * 0x1p-7f);
    set_equal(&m, ZEROS, 0);
    set_equal(&m, ABOVE, 15 * 21 * 0x1p-8f);
    set_equal(&m, BELOW, -14 * 0x1p-7f);
    set_value(&m, OUTLIER * EP_MX_GROUP + 9, 15 * 63 * 0x1p-8f);
    set_line(&m, LAST, 0x1p-8f, 0);
    set_line(&m, 8, 63 * 0x1p-3f, 0); /* of the second block, which has two groups */
    set_line(&m, 9, 63 * 0x1p-3f, 63 * 0x1p-5f);
    cr_assert_eq(quantize(&m, quant), EP_OK);
    cr_expect_eq(m.result.error, 0);
    cr_expect_arr_eq(m.scales, parts, sizeof(parts));
    cr_expect_arr_eq(m.scales + GROUPS, minima, sizeof(minima));
    cr_expect_arr_eq(m.scales + 2 * sizeof(parts), factors, sizeof(factors));
    for (size_t k = 0; k < GROUPS * EP_MX_GROUP; k++) {
        const size_t group = k / EP_MX_GROUP;
        const unsigned code = m.codes[k / 2] >> (k % 2 * 4) & 15u;
        const unsigned wanted = group == ZEROS || group == BELOW || group == 7 ? 0
                                : group == ABOVE                               ? 15
                                : group == OUTLIER ? (k % EP_MX_GROUP == 9 ? 15 : 0)
                                                   : k % 16;
        cr_expect_eq(code, wanted, "column %zu: %u, wanted %u", k, code, wanted);
    }
    drop(&m);
}

/* As the header has them. */
Test(weight_quant, errors_of_normal_weights_are_as_stated)
{
    static const double wanted[] = {0.0053, 0.0815, 0.1115, 0.0743};
    uint64_t state = 3;
    for (size_t q = 0; q < EP_ARRAY_COUNT(quants); q++) {
        const ep_weight_quant *quant = ep_weight_quant_find(quants[q].name);
        made m = make(EP_DTYPE_BF16, 256, 512);
        for (size_t i = 0; i < (size_t)256 * 512; i++) {
            set_value(&m, i, 0.02f * normal(&state));
        }
        cr_assert_eq(quantize(&m, quant), EP_OK);
        cr_expect(fabs(m.result.error / wanted[q] - 1) < 0.03, "%s: %g", quant->name,
                  m.result.error);
        cr_expect_lt(m.result.error, quant->error_max / 2);
        drop(&m);
    }
}

/* Its neighbours lose their digits, and all inputs count alike. */
Test(weight_quant, a_column_of_outliers_is_beyond_the_bound)
{
    uint64_t state = 4;
    for (size_t q = 0; q < EP_ARRAY_COUNT(quants); q++) {
        const ep_weight_quant *quant = ep_weight_quant_find(quants[q].name);
        made m = make(EP_DTYPE_F32, 64, 64);
        for (size_t i = 0; i < (size_t)64 * 64; i++) {
            set_value(&m, i, normal(&state) * (i % 32 == 5 ? 1000.0f : 1.0f));
        }
        cr_assert_eq(quantize(&m, quant), EP_OK);
        cr_expect_gt(m.result.error, quant->error_max, "%s: %g", quant->name, m.result.error);
        drop(&m);
    }
}

/* Scales in f16 end at 2^-24: what is lost must show. */
Test(weight_quant, weights_too_small_for_their_scales_are_beyond_the_bound)
{
    static const char *const names[] = {"int8-g32", "q4_k"};
    uint64_t state = 5;
    for (size_t q = 0; q < EP_ARRAY_COUNT(names); q++) {
        made m = make(EP_DTYPE_F32, 16, 64);
        for (size_t i = 0; i < (size_t)16 * 64; i++) {
            set_value(&m, i, 1e-9f * normal(&state));
        }
        cr_assert_eq(quantize(&m, ep_weight_quant_find(names[q])), EP_OK);
        cr_expect_gt(m.result.error, 0.9);
        drop(&m);
    }
}

Test(weight_quant, what_is_not_finite_or_too_large_is_named)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY, 0x1p127f, -0x1.8p126f};
    for (size_t q = 0; q < EP_ARRAY_COUNT(quants); q++) {
        const ep_weight_quant *quant = ep_weight_quant_find(quants[q].name);
        for (size_t b = 0; b < EP_ARRAY_COUNT(bad); b++) {
            made m = make(EP_DTYPE_F32, 3, 40);
            set_value(&m, 2 * 40 + 35, bad[b]);
            cr_expect_eq(quantize(&m, quant), EP_ERR_BAD_FILE);
            cr_expect_eq(m.result.row, 2);
            cr_expect_eq(m.result.column, 35);
            cr_expect(isnan(bad[b]) ? isnan(m.result.value) : m.result.value == bad[b]);
            drop(&m);
        }
        made m = make(EP_DTYPE_F32, 1, 1);
        set_value(&m, 0, quant->value_max);
        cr_expect_eq(quantize(&m, quant), EP_OK);
        cr_expect_lt(m.result.error, quant->error_max);
        set_value(&m, 0, nextafterf(quant->value_max, INFINITY));
        cr_expect_eq(quantize(&m, quant), EP_ERR_BAD_FILE);
        drop(&m);
    }
}

Test(weight_quant, words_are_found)
{
    cr_expect_null(ep_weight_quant_find(EP_WEIGHT_QUANT_NONE));
    for (size_t q = 0; q < EP_ARRAY_COUNT(quants); q++) {
        const ep_weight_quant *quant = ep_weight_quant_find(quants[q].name);
        cr_assert_not_null(quant);
        cr_expect_str_eq(quant->name, quants[q].name);
        cr_expect_not_null(strstr(EP_WEIGHT_QUANT_WORDS, quant->name));
    }
}
