/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_matrices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 256 };

static float *floats(size_t count)
{
    float *values = calloc(count + 1, sizeof(*values));
    if (values == NULL) {
        ref_die("no memory for %zu values", count);
    }
    return values;
}

static bool find(const struct ref_checkpoint *checkpoint, const char *stem, const char *end, struct ref_tensor *out_tensor)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof(name), "%s%s", stem, end);
    return ref_checkpoint_find(checkpoint, name, out_tensor);
}

static float *widened(const struct ref_tensor *tensor, size_t expected, const char *stem)
{
    if (tensor->count != expected) {
        ref_die("%s: a tensor of it has %zu elements, expected %zu", stem, tensor->count, expected);
    }
    float *values = floats(expected);
    for (size_t i = 0; i < expected; i++) {
        values[i] = ref_load(tensor->data, tensor->dtype, i);
    }
    return values;
}

static size_t groups_of(size_t columns, size_t group)
{
    return (columns + group - 1) / group;
}

/* f8: one scale for 128 x 128 weights or for a row, which the shape tells. */
static float *f8_scales(const struct ref_tensor *tensor, size_t rows, size_t columns, const char *stem)
{
    size_t groups = groups_of(columns, 128);
    bool is_block = tensor->rank == 2 && tensor->shape[0] == groups_of(rows, 128) && tensor->shape[1] == groups;
    float *read = widened(tensor, is_block ? groups_of(rows, 128) * groups : rows, stem);
    float *scales = floats(rows * groups);
    for (size_t n = 0; n < rows; n++) {
        for (size_t g = 0; g < groups; g++) {
            scales[n * groups + g] = is_block ? read[n / 128 * groups + g] : read[n];
        }
    }
    free(read);
    return scales;
}

/* Two codes to a byte, the even column in the low half. */
static float nibble_value(const uint8_t *row, size_t k)
{
    return ref_e2m1(k % 2 == 0 ? row[k / 2] & 15u : row[k / 2] >> 4u);
}

/* Eight codes to a little-endian word, the lowest column in the lowest bits, 8 more than they mean. */
static float int4_value(const uint8_t *row, size_t k)
{
    return (float)((int)(row[k / 2] >> (k % 2 == 0 ? 0 : 4) & 15) - 8);
}

static float *unpack(const uint8_t *data, size_t rows, size_t row_bytes, size_t columns,
                     float (*value)(const uint8_t *row, size_t k))
{
    float *values = floats(rows * columns);
    for (size_t n = 0; n < rows; n++) {
        for (size_t k = 0; k < columns; k++) {
            values[n * columns + k] = value(data + n * row_bytes, k);
        }
    }
    return values;
}

static float *e8m0_scales(const struct ref_tensor *tensor, size_t rows, size_t columns, const char *stem)
{
    struct ref_tensor powers = *tensor;
    powers.dtype = REF_E8M0; /* some files call it U8 */
    return widened(&powers, rows * groups_of(columns, 32), stem);
}

static struct ref_tensor find_scales(const struct ref_checkpoint *checkpoint, const char *stem)
{
    static const char *const ends[] = {".weight_scale_inv", ".weight_scale", ".scale"};
    struct ref_tensor scales;
    for (size_t i = 0; i < sizeof(ends) / sizeof(*ends); i++) {
        if (find(checkpoint, stem, ends[i], &scales)) {
            return scales;
        }
    }
    ref_die("%s: no scales", stem);
}

/* Of a tensor that is there: which format it is, with its scales. */
static enum ref_format read_values(const struct ref_checkpoint *checkpoint, const char *stem, const struct ref_tensor *weight,
                                   size_t columns, struct ref_matrix *matrix)
{
    size_t rows = weight->shape[0];
    if (weight->dtype == REF_BF16 || weight->dtype == REF_F16 || weight->dtype == REF_F32) {
        matrix->values = widened(weight, rows * columns, stem);
        return weight->dtype == REF_BF16 ? REF_FORMAT_BF16 : REF_FORMAT_FLOAT;
    }
    struct ref_tensor scales = find_scales(checkpoint, stem);
    bool has_powers = scales.dtype == REF_U8 || scales.dtype == REF_E8M0;
    if (weight->dtype == REF_F8) {
        matrix->values = widened(weight, rows * columns, stem);
        matrix->scales = has_powers ? e8m0_scales(&scales, rows, columns, stem) : f8_scales(&scales, rows, columns, stem);
        return has_powers ? REF_FORMAT_MXFP8 : REF_FORMAT_F8;
    }
    if (weight->dtype == REF_I32) {
        matrix->values = unpack(weight->data, rows, 4 * groups_of(columns, 8), columns, int4_value);
        matrix->scales = widened(&scales, rows * groups_of(columns, 32), stem);
        return REF_FORMAT_INT4;
    }
    if (has_powers) {
        matrix->values = unpack(weight->data, rows, groups_of(columns, 2), columns, nibble_value);
        matrix->scales = e8m0_scales(&scales, rows, columns, stem);
        return REF_FORMAT_MXFP4;
    }
    matrix->values = widened(weight, rows * columns, stem);
    matrix->scales = widened(&scales, rows, stem);
    return REF_FORMAT_W8A8;
}

bool ref_matrix_load(const struct ref_checkpoint *checkpoint, const char *stem, size_t columns, struct ref_matrix *out_matrix,
                     size_t *out_rows, enum ref_format *out_format)
{
    struct ref_tensor weight, bias;
    if (!find(checkpoint, stem, ".weight", &weight) && !find(checkpoint, stem, ".weight_packed", &weight)) {
        return false;
    }
    *out_matrix = (struct ref_matrix){NULL, NULL, NULL};
    *out_format = read_values(checkpoint, stem, &weight, columns, out_matrix);
    *out_rows = weight.shape[0];
    if (find(checkpoint, stem, ".bias", &bias)) {
        out_matrix->bias = widened(&bias, *out_rows, stem);
    }
    return true;
}

/* The tensor's row for row n of the matrix, counted over all experts. */
static size_t place_of(const struct ref_slab *slab, size_t n)
{
    return slab->expert * slab->all + slab->first + n * slab->step;
}

static float *stacked_values(const struct ref_tensor *tensor, const struct ref_slab *slab)
{
    float *values = floats(slab->rows * slab->columns);
    size_t begin = slab->expert * slab->all * slab->columns;
    for (size_t n = 0; n < slab->rows; n++) {
        for (size_t k = 0; k < slab->columns; k++) {
            size_t at = slab->transposed ? begin + k * slab->all + slab->first + n * slab->step
                                         : place_of(slab, n) * slab->columns + k;
            values[n * slab->columns + k] = ref_load(tensor->data, tensor->dtype, at);
        }
    }
    return values;
}

/* [E,all,groups,16] codes with [E,all,groups] powers. */
static void stacked_blocks(const struct ref_tensor *blocks, const struct ref_tensor *powers, const struct ref_slab *slab,
                           struct ref_matrix *matrix)
{
    size_t groups = groups_of(slab->columns, 32);
    float *values = floats(slab->rows * slab->columns);
    float *scales = floats(slab->rows * groups);
    for (size_t n = 0; n < slab->rows; n++) {
        const uint8_t *row = (const uint8_t *)blocks->data + place_of(slab, n) * groups * 16;
        for (size_t k = 0; k < slab->columns; k++) {
            values[n * slab->columns + k] = nibble_value(row, k);
        }
        for (size_t g = 0; g < groups; g++) {
            scales[n * groups + g] = ref_load(powers->data, REF_E8M0, place_of(slab, n) * groups + g);
        }
    }
    matrix->values = values;
    matrix->scales = scales;
}

bool ref_matrix_load_stacked(const struct ref_checkpoint *checkpoint, const char *stem, const char *end,
                             const struct ref_slab *slab, struct ref_matrix *out_matrix, enum ref_format *out_format)
{
    struct ref_tensor values, scales, bias;
    *out_matrix = (struct ref_matrix){NULL, NULL, NULL};
    if (find(checkpoint, stem, end, &values)) {
        out_matrix->values = stacked_values(&values, slab);
        *out_format = values.dtype == REF_BF16 ? REF_FORMAT_BF16 : REF_FORMAT_FLOAT;
    } else if (find(checkpoint, stem, "_blocks", &values) && find(checkpoint, stem, "_scales", &scales)) {
        stacked_blocks(&values, &scales, slab, out_matrix);
        *out_format = REF_FORMAT_MXFP4;
    } else {
        return false;
    }
    if (find(checkpoint, stem, "_bias", &bias)) {
        float *read = floats(slab->rows);
        for (size_t n = 0; n < slab->rows; n++) {
            read[n] = ref_load(bias.data, bias.dtype, place_of(slab, n));
        }
        out_matrix->bias = read;
    }
    return true;
}

void ref_matrix_free(struct ref_matrix *matrix)
{
    free((void *)matrix->values);
    free((void *)matrix->scales);
    free((void *)matrix->bias);
    *matrix = (struct ref_matrix){NULL, NULL, NULL};
}
