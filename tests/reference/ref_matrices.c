/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_matrices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_gguf.h"

enum { NAME_BYTES = 256 };

static float *floats(size_t count)
{
    float *values = calloc(count + 1, sizeof(*values));
    if (values == NULL) {
        ref_die("no memory for %zu values", count);
    }
    return values;
}

static bool find(const struct ref_checkpoint *checkpoint, const char *stem, const char *end,
                 struct ref_tensor *out_tensor)
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

/* Returns a number of the weights from quantization_config, from any of its groups; 0: none. */
static size_t stated(const struct ref_checkpoint *checkpoint, const char *key, size_t index)
{
    const char *name;
    json_t *group;
    json_t *config = json_object_get(checkpoint->config, "quantization_config");
    json_t *value = json_object_get(config, key);
    json_object_foreach(json_object_get(config, "config_groups"), name, group)
    {
        value = json_object_get(json_object_get(group, "weights"), key);
    }
    value = json_is_array(value) ? json_array_get(value, index) : value;
    json_int_t number = json_is_integer(value) ? json_integer_value(value) : 0;
    return number > 0 ? (size_t)number : 0;
}

/* The index in a tensor of the number for weight [n,k]: n / rows * row_step + k / columns *
 * column_step. */
struct shared {
    size_t rows, columns;
    size_t row_step, column_step;
};

/* Spreads shared numbers to one for each group of `group` columns of each row. */
static float *spread(const float *read, struct shared shared, size_t rows, size_t columns,
                     size_t group)
{
    size_t groups = groups_of(columns, group);
    float *spread_out = floats(rows * groups);
    for (size_t n = 0; n < rows; n++) {
        for (size_t g = 0; g < groups; g++) {
            spread_out[n * groups + g] = read[n / shared.rows * shared.row_step +
                                              g * group / shared.columns * shared.column_step];
        }
    }
    return spread_out;
}

/* f8: one scale for the matrix, for a row, or for a block, whose size the config may give. */
static enum ref_format f8_scales(const struct ref_checkpoint *checkpoint,
                                 const struct ref_tensor *tensor, size_t rows, size_t columns,
                                 const char *stem, struct ref_matrix *matrix)
{
    size_t block[2] = {128, 128};
    for (size_t i = 0; i < 2; i++) {
        size_t size =
            stated(checkpoint, "weight_block_size", i) + stated(checkpoint, "block_structure", i);
        block[i] = size > 0 ? size : block[i];
    }
    size_t across = groups_of(columns, block[1]);
    bool has_blocks = tensor->count == groups_of(rows, block[0]) * across && tensor->rank == 2;
    struct shared shared = {block[0], block[1], across, 1};
    if (!has_blocks) {
        shared = (struct shared){tensor->count == 1 ? rows : 1, columns, 1, 1};
    }
    bool is_usual = !has_blocks || (block[0] == 128 && block[1] == 128);
    matrix->group = is_usual ? 0 : 32;
    float *read = widened(tensor,
                          has_blocks           ? groups_of(rows, block[0]) * across
                          : tensor->count == 1 ? 1
                                               : rows,
                          stem);
    matrix->scales = spread(read, shared, rows, columns, is_usual ? 128 : 32);
    free(read);
    return is_usual ? REF_FORMAT_F8 : REF_FORMAT_CODES;
}

/* Two codes in a byte, the even column in the low half. */
static float nibble_value(const uint8_t *row, size_t k)
{
    return ref_e2m1(k % 2 == 0 ? row[k / 2] & 15u : row[k / 2] >> 4u);
}

/* Eight codes in a little-endian word, lowest column in the lowest bits; code = value + 8. */
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

static float *e8m0_scales(const struct ref_tensor *tensor, size_t rows, size_t columns,
                          const char *stem)
{
    struct ref_tensor powers = *tensor;
    powers.dtype = REF_E8M0; /* some files declare U8 */
    return widened(&powers, rows * groups_of(columns, 32), stem);
}

/* Four codes in a word; code = value + 128. */
static float int8_value(const uint8_t *row, size_t k)
{
    return (float)((int)row[k] - 128);
}

static float plain_int8_value(const uint8_t *row, size_t k)
{
    return (float)(int8_t)row[k];
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

/* Returns the columns per group in the file: the config's, else 32; 0: one group for all. */
static size_t group_in_file(const struct ref_checkpoint *checkpoint, size_t groups, size_t columns)
{
    size_t size = stated(checkpoint, "group_size", 0);
    if (size > 0 && groups_of(columns, size) == groups) {
        return size;
    }
    return size == 0 && groups_of(columns, 32) == groups ? 32 : groups == 1 ? 0 : columns / groups;
}

/* Returns 128 columns per group if the file has a multiple of 128 or whole rows, else 32. */
static size_t group_of_chains(size_t in_file)
{
    return in_file % 128 == 0 ? 128 : 32;
}

/* Reads zero points: int8 [rows,groups], or codes of `bits` packed down the columns. */
static float *zero_points(const struct ref_tensor *zeros, size_t rows, size_t groups, size_t bits)
{
    float *points = floats(rows * groups);
    size_t each = 32 / bits;
    for (size_t n = 0; n < rows; n++) {
        for (size_t g = 0; g < groups; g++) {
            uint32_t word;
            memcpy(&word,
                   (const uint8_t *)zeros->data +
                       (zeros->dtype == REF_I32 ? 4 * (n / each * groups + g) : 0),
                   sizeof(word));
            long packed =
                (long)(word >> (bits * (n % each)) & ((1u << bits) - 1u)) - (1l << (bits - 1));
            points[n * groups + g] = zeros->dtype == REF_I32
                                         ? (float)packed
                                         : ref_load(zeros->data, REF_I8, n * groups + g);
        }
    }
    return points;
}

/* Returns the column at each place of the order by groups; NULL: the file has no order. */
static size_t *read_order(const struct ref_checkpoint *checkpoint, const char *stem, size_t columns,
                          size_t groups)
{
    struct ref_tensor index;
    if (!find(checkpoint, stem, ".weight_g_idx", &index) &&
        !find(checkpoint, stem, ".g_idx", &index)) {
        return NULL;
    }
    size_t *order = calloc(columns + 1, sizeof(*order));
    size_t count = 0;
    for (size_t g = 0; order != NULL && g < groups; g++) {
        for (size_t k = 0; k < columns; k++) {
            int32_t its_group;
            memcpy(&its_group, (const uint8_t *)index.data + 4 * k, sizeof(its_group));
            if (its_group == (int32_t)g) {
                order[count++] = k;
            }
        }
    }
    return order;
}

/* Moves the values from the file's order of columns to the groups' order. */
static void order_values(struct ref_matrix *matrix, size_t rows, size_t columns)
{
    float *values = floats(rows * columns);
    for (size_t n = 0; n < rows; n++) {
        for (size_t k = 0; k < columns; k++) {
            values[n * columns + k] = matrix->values[n * columns + matrix->order[k]];
        }
    }
    free((void *)matrix->values);
    matrix->values = values;
}

/* Returns a read matrix's format: w4a8 needs 4-bit integers with a 16-bit scale per 32 columns. */
static enum ref_format integers_format(size_t bits, const struct ref_tensor *scales,
                                       const struct ref_matrix *matrix)
{
    const bool is_int4 = bits == 4 && matrix->group == 32 && matrix->offsets == NULL;
    return is_int4 && scales->dtype != REF_F32 ? REF_FORMAT_INT4 : REF_FORMAT_CODES;
}

/* Reads integers whose scales and zero points are [rows,groups]. */
static enum ref_format read_integers(const struct ref_checkpoint *checkpoint, const char *stem,
                                     const struct ref_tensor *scales, size_t rows, size_t columns,
                                     size_t bits, struct ref_matrix *matrix)
{
    struct ref_tensor zeros;
    bool has_zeros = find(checkpoint, stem, ".weight_zero_point", &zeros);
    size_t groups = scales->count / rows;
    size_t in_file = group_in_file(checkpoint, groups, columns);
    size_t group = group_of_chains(in_file);
    struct shared shared = {1, in_file == 0 ? columns : in_file, groups, 1};
    matrix->order = read_order(checkpoint, stem, columns, groups);
    if (matrix->order != NULL) {
        order_values(matrix, rows, columns);
    }
    float *read = widened(scales, rows * groups, stem);
    matrix->scales = spread(read, shared, rows, columns, group);
    free(read);
    matrix->group = group;
    if (has_zeros) {
        float *points = zero_points(&zeros, rows, groups, bits);
        float *offsets = spread(points, shared, rows, columns, group);
        for (size_t i = 0; i < rows * groups_of(columns, group); i++) {
            offsets[i] *= matrix->scales[i];
        }
        matrix->offsets = offsets;
        free(points);
    }
    return integers_format(bits, scales, matrix);
}

/* Whether inputs are rounded to int8 too: yes, unless a config with groups says otherwise. */
static bool rounds_inputs(const struct ref_checkpoint *checkpoint)
{
    const char *name;
    json_t *group;
    json_t *groups = json_object_get(json_object_get(checkpoint->config, "quantization_config"),
                                     "config_groups");
    bool has_any = json_object_size(groups) == 0;
    json_object_foreach(groups, name, group)
    {
        json_t *inputs = json_object_get(group, "input_activations");
        const char *type = json_string_value(json_object_get(inputs, "type"));
        json_t *bits = json_object_get(inputs, "num_bits");
        bool is_int8 = json_is_object(inputs) && (type == NULL || strcmp(type, "int") == 0) &&
                       (bits == NULL || json_integer_value(bits) == 8);
        has_any = has_any || (is_int8 && stated(checkpoint, "group_size", 0) == 0);
    }
    return has_any;
}

/* Reads two codes of e2m1 per byte. With scales of e4m3 there is one more for the whole matrix. */
static enum ref_format read_e2m1(const struct ref_checkpoint *checkpoint, const char *stem,
                                 const struct ref_tensor *weight, struct ref_tensor *scales,
                                 size_t rows, size_t columns, struct ref_matrix *matrix)
{
    struct ref_tensor whole;
    matrix->values = unpack(weight->data, rows, groups_of(columns, 2), columns, nibble_value);
    if (scales->dtype != REF_F8) {
        matrix->scales = e8m0_scales(scales, rows, columns, stem);
        return REF_FORMAT_MXFP4;
    }
    bool divides = find(checkpoint, stem, ".weight_global_scale", &whole);
    if (!divides && !find(checkpoint, stem, ".weight_scale_2", &whole)) {
        ref_die("%s: no scale of the whole matrix", stem);
    }
    float factor = ref_load(whole.data, REF_F32, 0);
    factor = divides ? 1.0f / factor : factor;
    float *read = widened(scales, rows * groups_of(columns, 16), stem);
    for (size_t i = 0; i < rows * groups_of(columns, 16); i++) {
        read[i] *= factor;
    }
    matrix->scales = read;
    matrix->group = 16;
    return REF_FORMAT_CODES;
}

/* Detects the format of an existing tensor, and reads its scales. */
static enum ref_format read_values(const struct ref_checkpoint *checkpoint, const char *stem,
                                   const struct ref_tensor *weight, size_t columns,
                                   struct ref_matrix *matrix)
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
        if (has_powers && scales.count == rows * groups_of(columns, 32)) {
            matrix->scales = e8m0_scales(&scales, rows, columns, stem);
            return REF_FORMAT_MXFP8;
        }
        scales.dtype = has_powers ? REF_E8M0 : scales.dtype;
        return f8_scales(checkpoint, &scales, rows, columns, stem, matrix);
    }
    if (weight->dtype == REF_I32) {
        bool is_nibbles = weight->shape[1] == groups_of(columns, 8);
        matrix->values =
            is_nibbles ? unpack(weight->data, rows, 4 * groups_of(columns, 8), columns, int4_value)
                       : unpack(weight->data, rows, 4 * groups_of(columns, 4), columns, int8_value);
        return read_integers(checkpoint, stem, &scales, rows, columns, is_nibbles ? 4 : 8, matrix);
    }
    if (weight->shape[1] != columns) {
        return read_e2m1(checkpoint, stem, weight, &scales, rows, columns, matrix);
    }
    matrix->values = unpack(weight->data, rows, columns, columns, plain_int8_value);
    struct ref_tensor zeros;
    if (scales.count > rows || find(checkpoint, stem, ".weight_zero_point", &zeros) ||
        !rounds_inputs(checkpoint)) {
        return read_integers(checkpoint, stem, &scales, rows, columns, 8, matrix);
    }
    matrix->scales = widened(&scales, rows, stem);
    return REF_FORMAT_W8A8;
}

/* Layout of qweight and qzeros: GPTQ packs down the columns, AWQ along eight shuffled rows. */
struct words {
    size_t bits;
    bool is_awq;
    bool is_v2;
};

static unsigned word_code(const struct ref_tensor *t, const struct words *words, size_t place,
                          size_t in_word)
{
    static const size_t awq_places[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    uint32_t word;
    memcpy(&word, (const uint8_t *)t->data + 4 * place, sizeof(word));
    size_t shift = words->bits * (words->is_awq ? awq_places[in_word] : in_word);
    return word >> shift & ((1u << words->bits) - 1u);
}

/* Spreads scales and offsets of [groups,rows] tensors. */
static void spread_words(const struct ref_tensor *scales, const struct ref_tensor *zeros,
                         const struct words *words, size_t rows, size_t columns, size_t in_file,
                         bool has_zeros, struct ref_matrix *matrix, const char *stem)
{
    size_t groups = scales->shape[0];
    size_t each = 32 / words->bits;
    struct shared shared = {1, in_file == 0 ? columns : in_file, 1, rows};
    float *read = widened(scales, rows * groups, stem);
    float *points = floats(rows * groups);
    for (size_t i = 0; i < rows * groups; i++) {
        long zero = (long)word_code(zeros, words, i / each, i % each) +
                    (words->is_awq || words->is_v2 ? 0 : 1);
        points[i] = (float)(zero - (1l << (words->bits - 1)));
    }
    matrix->scales = spread(read, shared, rows, columns, matrix->group);
    float *offsets = spread(points, shared, rows, columns, matrix->group);
    for (size_t i = 0; i < rows * groups_of(columns, matrix->group); i++) {
        offsets[i] *= matrix->scales[i];
    }
    if (has_zeros) {
        matrix->offsets = offsets;
    } else {
        free(offsets);
    }
    free(points);
    free(read);
}

/* Loads a GPTQ or AWQ matrix. */
static bool load_words(const struct ref_checkpoint *checkpoint, const char *stem, size_t columns,
                       struct ref_matrix *matrix, size_t *out_rows, enum ref_format *out_format)
{
    struct ref_tensor values, scales, zeros;
    if (!find(checkpoint, stem, ".qweight", &values) ||
        !find(checkpoint, stem, ".scales", &scales) || !find(checkpoint, stem, ".qzeros", &zeros)) {
        return false;
    }
    json_t *config = json_object_get(checkpoint->config, "quantization_config");
    const char *method = json_string_value(json_object_get(config, "quant_method"));
    const char *layout = json_string_value(json_object_get(config, "checkpoint_format"));
    struct words words = {.bits = stated(checkpoint, "bits", 0),
                          .is_awq = strcmp(method, "awq") == 0};
    words.is_v2 = layout != NULL && strcmp(layout, "gptq_v2") == 0;
    bool has_zeros = words.is_awq || !json_is_true(json_object_get(config, "sym"));
    size_t rows = scales.shape[1];
    size_t each = 32 / words.bits;
    size_t in_file = group_in_file(checkpoint, scales.shape[0], columns);
    in_file = stated(checkpoint, "group_size", 0) == 0 ? 0 : in_file;
    float *codes = floats(rows * columns);
    for (size_t n = 0; n < rows; n++) {
        for (size_t k = 0; k < columns; k++) {
            unsigned code = words.is_awq
                                ? word_code(&values, &words, (k * rows + n) / 8, n % 8)
                                : word_code(&values, &words, k / each * rows + n, k % each);
            codes[n * columns + k] = (float)((long)code - (1l << (words.bits - 1)));
        }
    }
    *matrix = (struct ref_matrix){.values = codes, .group = group_of_chains(in_file)};
    matrix->order = words.is_awq ? NULL : read_order(checkpoint, stem, columns, scales.shape[0]);
    if (matrix->order != NULL) {
        order_values(matrix, rows, columns);
    }
    spread_words(&scales, &zeros, &words, rows, columns, in_file, has_zeros, matrix, stem);
    *out_rows = rows;
    *out_format = integers_format(words.bits, &scales, matrix);
    return true;
}

bool ref_matrix_load(const struct ref_checkpoint *checkpoint, const char *stem, size_t columns,
                     struct ref_matrix *out_matrix, size_t *out_rows, enum ref_format *out_format)
{
    struct ref_tensor weight, bias;
    if (load_words(checkpoint, stem, columns, out_matrix, out_rows, out_format)) {
        return true;
    }
    if (!find(checkpoint, stem, ".weight", &weight) &&
        !find(checkpoint, stem, ".weight_packed", &weight)) {
        return false;
    }
    *out_matrix = (struct ref_matrix){.values = NULL};
    *out_format = read_values(checkpoint, stem, &weight, columns, out_matrix);
    *out_rows = weight.shape[0];
    if (find(checkpoint, stem, ".bias", &bias)) {
        out_matrix->bias = widened(&bias, *out_rows, stem);
    }
    return true;
}

/* Returns the tensor's row for row n of the matrix, counted over all experts. */
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

/* Reads [E,all,groups,16] codes with [E,all,groups] powers. */
static void stacked_blocks(const struct ref_tensor *blocks, const struct ref_tensor *powers,
                           const struct ref_slab *slab, struct ref_matrix *matrix)
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
            scales[n * groups + g] =
                ref_load(powers->data, REF_E8M0, place_of(slab, n) * groups + g);
        }
    }
    matrix->values = values;
    matrix->scales = scales;
}

static void gguf_blocks(const struct ref_tensor *tensor, const struct ref_slab *slab,
                        struct ref_matrix *matrix)
{
    const struct ref_block *type = tensor->block;
    size_t groups = slab->columns / type->group;
    size_t row_bytes = slab->columns / type->columns * type->bytes;
    float *values = floats(slab->rows * slab->columns);
    float *scales = floats(slab->rows * groups);
    float *offsets = type->offset != NULL ? floats(slab->rows * groups) : NULL;
    for (size_t n = 0; n < slab->rows; n++) {
        const uint8_t *row = (const uint8_t *)tensor->data + place_of(slab, n) * row_bytes;
        for (size_t k = 0; k < slab->columns; k++) {
            values[n * slab->columns + k] =
                type->value(row + k / type->columns * type->bytes, k % type->columns);
        }
        for (size_t g = 0; g < groups; g++) {
            const uint8_t *block = row + g * type->group / type->columns * type->bytes;
            size_t in_block = g % (type->columns / type->group);
            scales[n * groups + g] = type->scale(block, in_block);
            if (offsets != NULL) {
                offsets[n * groups + g] = type->offset(block, in_block);
            }
        }
    }
    *matrix = (struct ref_matrix){.values = values,
                                  .scales = scales,
                                  .offsets = offsets,
                                  .group = type->format == REF_FORMAT_MXFP4 ? 0 : type->group};
}

bool ref_matrix_load_stacked(const struct ref_checkpoint *checkpoint, const char *stem,
                             const char *end, const struct ref_slab *slab,
                             struct ref_matrix *out_matrix, enum ref_format *out_format)
{
    struct ref_tensor values, scales, bias;
    *out_matrix = (struct ref_matrix){.values = NULL};
    if (find(checkpoint, stem, end, &values) && values.block != NULL) {
        gguf_blocks(&values, slab, out_matrix);
        *out_format = values.block->format;
    } else if (find(checkpoint, stem, end, &values)) {
        out_matrix->values = stacked_values(&values, slab);
        *out_format = values.dtype == REF_BF16 ? REF_FORMAT_BF16 : REF_FORMAT_FLOAT;
    } else if (find(checkpoint, stem, "_blocks", &values) &&
               find(checkpoint, stem, "_scales", &scales)) {
        stacked_blocks(&values, &scales, slab, out_matrix);
        *out_format = REF_FORMAT_MXFP4;
    } else {
        return false;
    }
    if (find(checkpoint, stem, "_bias", &bias) || find(checkpoint, stem, ".bias", &bias)) {
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
    free((void *)matrix->offsets);
    free((void *)matrix->order);
    free((void *)matrix->bias);
    *matrix = (struct ref_matrix){.values = NULL};
}
