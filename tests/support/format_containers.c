/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices in the containers that quantising tools write, each made from the expert's source. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "support/format_fixture.h"

/* One matrix of an expert. */
typedef struct matrix {
    ep_format_model *model;
    const char *stem;
    uint32_t rows;
    uint32_t columns;
    const uint8_t *values;
    const uint8_t *scales;
    ep_scale_arrays arrays;
    size_t groups;                   /* of a row in memory */
    size_t repeat;                   /* groups in memory per group in the file */
    size_t in_file;                  /* groups of a row in the file */
    const uint32_t *columns_in_file; /* the file's column of each source column; NULL: the same */
    const uint32_t *rows_in_file;
} matrix;

static size_t file_column(const matrix *m, size_t k)
{
    return m->columns_in_file == NULL ? k : m->columns_in_file[k];
}

static size_t file_row(const matrix *m, size_t n)
{
    return m->rows_in_file == NULL ? n : m->rows_in_file[n];
}

static uint64_t parts_of(uint64_t count, uint64_t part)
{
    return (count + part - 1) / part;
}

static ep_format_tensor *add(const matrix *m, const char *part, const char *dtype, size_t element,
                             uint64_t d0, uint64_t d1)
{
    char name[192];
    snprintf(name, sizeof(name), "%s.%s", m->stem, part);
    return ep_format_model_add(m->model, name, dtype, element, (const uint64_t[4]){d0, d1, 0, 0});
}

/* Returns the int4 or int8 code of weight [n,k] without a sign: its value plus 8 or 128. */
static uint32_t code_of(const matrix *m, uint32_t bits, size_t n, size_t k)
{
    const uint8_t *row = m->values + n * ep_weight_row_bytes(m->model->form->format, m->columns);
    return bits == 4 ? row[k / 2] >> (k % 2 == 0 ? 0 : 4) & 15u : row[k] ^ 0x80u;
}

static uint32_t bits_of(const matrix *m)
{
    return ep_weight_codes_are_nibbles(ep_weight_format_codes(m->model->form->format)) ? 4 : 8;
}

/* Ors value, shifted, into a word of a tensor of words. */
static void put_packed(ep_format_tensor *t, size_t word, size_t shift, uint32_t value)
{
    uint32_t all;
    memcpy(&all, t->data + 4 * word, sizeof(all));
    all |= value << shift;
    memcpy(t->data + 4 * word, &all, sizeof(all));
}

static float read_scale(const matrix *m, size_t n, size_t g)
{
    const ep_weight_scales kind = ep_weight_format_scales(m->model->form->format);
    const size_t at = n * m->groups + g;
    uint16_t half;
    float wide;
    if (kind == EP_SCALES_F32 || kind == EP_SCALES_NONE) {
        memcpy(&wide, m->scales + 4 * at, sizeof(wide));
        return wide;
    }
    memcpy(&half, m->scales + 2 * at, sizeof(half));
    return kind == EP_SCALES_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half);
}

static int zero_of(const matrix *m, size_t n, size_t g)
{
    return m->arrays.offsets == 0 ? 0
                                  : (int)(int8_t)m->scales[m->arrays.scales + n * m->groups + g];
}

static void put_float(ep_format_tensor *t, ep_dtype dtype, size_t at, float value)
{
    const uint16_t half = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(value) : ep_f32_to_f16(value);
    if (dtype == EP_DTYPE_F32) {
        memcpy(t->data + 4 * at, &value, sizeof(value));
    } else {
        memcpy(t->data + 2 * at, &half, sizeof(half));
    }
}

static const char *type_text(ep_dtype dtype)
{
    return dtype == EP_DTYPE_F32 ? "F32" : dtype == EP_DTYPE_F16 ? "F16" : "BF16";
}

/* Adds scales as [rows,groups] of the file, or transposed. */
static void add_scales(const matrix *m, const char *part, bool transposed)
{
    const ep_dtype dtype = m->model->form->scales;
    ep_format_tensor *t = add(m, part, type_text(dtype), ep_dtype_bytes(dtype),
                              transposed ? m->in_file : m->rows, transposed ? m->rows : m->in_file);
    for (size_t n = 0; n < m->rows; n++) {
        for (size_t g = 0; g < m->in_file; g++) {
            const size_t row = file_row(m, n);
            put_float(t, dtype, transposed ? g * m->rows + row : row * m->in_file + g,
                      read_scale(m, n, g * m->repeat));
        }
    }
}

/* Adds the group of each column. */
static void add_groups(const matrix *m, const char *part)
{
    const size_t group = m->model->form->group == 0 ? m->columns : m->model->form->group;
    ep_format_tensor *t = add(m, part, "I32", 4, m->columns, 0);
    for (size_t k = 0; k < m->columns; k++) {
        const uint32_t its_group = (uint32_t)(k / group);
        memcpy(t->data + 4 * file_column(m, k), &its_group, sizeof(its_group));
    }
}

static void add_packed(const matrix *m)
{
    const uint32_t bits = bits_of(m);
    const size_t each = 32 / bits;
    const uint32_t half = 1u << (bits - 1);
    ep_format_tensor *t = add(m, "weight_shape", "I64", 8, 2, 0);
    t = add(m, "weight_packed", "I32", 4, m->rows, parts_of(m->columns, each));
    for (size_t n = 0; n < m->rows; n++) {
        for (size_t k = 0; k < parts_of(m->columns, each) * each && (k < m->columns || bits == 4);
             k++) {
            const size_t column = k < m->columns ? file_column(m, k) : k;
            put_packed(t, file_row(m, n) * parts_of(m->columns, each) + column / each,
                       bits * (column % each), code_of(m, bits, n, k));
        }
    }
    if (ep_format_case_has_order(m->model->form)) {
        add_groups(m, "weight_g_idx");
    }
    add_scales(m, "weight_scale", false);
    if (ep_format_case_has_zeros(m->model->form)) {
        t = add(m, "weight_zero_point", "I32", 4, parts_of(m->rows, each), m->in_file);
        for (size_t n = 0; n < m->rows; n++) {
            for (size_t g = 0; g < m->in_file; g++) {
                const uint32_t zero = (uint32_t)(zero_of(m, n, g * m->repeat) + (int)half);
                put_packed(t, file_row(m, n) / each * m->in_file + g,
                           bits * (file_row(m, n) % each), zero);
            }
        }
    }
}

static void add_int8(const matrix *m)
{
    ep_format_tensor *t = add(m, "weight", "I8", 1, m->rows, m->columns);
    memcpy(t->data, m->values, t->bytes);
    add_scales(m, "weight_scale", false);
    if (ep_format_case_has_zeros(m->model->form)) {
        t = add(m, "weight_zero_point", "I8", 1, m->rows, m->in_file);
        for (size_t i = 0; i < t->bytes; i++) {
            t->data[i] = (uint8_t)zero_of(m, i / m->in_file, i % m->in_file * m->repeat);
        }
    }
}

/* Adds one scale for the matrix, or one for each block of `group` rows and columns. */
static void add_f8(const matrix *m)
{
    const ep_format_case *form = m->model->form;
    const uint64_t down = form->group == 0 ? 1 : parts_of(m->rows, form->group);
    const bool is_bf16 = form->scales == EP_DTYPE_BF16;
    ep_format_tensor *t = add(m, "weight", "F8_E4M3", 1, m->rows, m->columns);
    memcpy(t->data, m->values, t->bytes);
    t = add(m, is_bf16 ? "weight_scale" : "weight_scale_inv", type_text(form->scales),
            ep_dtype_bytes(form->scales), down, form->group == 0 && is_bf16 ? 0 : m->in_file);
    for (size_t n = 0; n < down; n++) {
        for (size_t g = 0; g < m->in_file; g++) {
            put_float(t, form->scales, n * m->in_file + g,
                      read_scale(m, n * form->group, g * m->repeat));
        }
    }
}

/* Returns AWQ's place of one of eight rows in a word. */
static size_t awq_place(size_t row)
{
    /* rows from the lowest bits on */
    static const size_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    size_t place = 0;
    while (order[place] != row % 8) {
        place++;
    }
    return place;
}

/* Adds GPTQ words, packed down the columns. */
static void add_gptq(const matrix *m)
{
    const ep_format_case *form = m->model->form;
    const uint32_t bits = bits_of(m);
    const size_t each = 32 / bits;
    const bool is_v2 = strstr(form->quantised, "gptq_v2") != NULL;
    const uint32_t middle = 1u << (bits - 1);
    add_groups(m, "g_idx");
    ep_format_tensor *t = add(m, "qweight", "I32", 4, m->columns / each, m->rows);
    for (size_t k = 0; k < m->columns; k++) {
        const size_t column = file_column(m, k);
        for (size_t n = 0; n < m->rows; n++) {
            put_packed(t, column / each * m->rows + file_row(m, n), bits * (column % each),
                       code_of(m, bits, n, k));
        }
    }
    add_scales(m, "scales", true);
    t = add(m, "qzeros", "I32", 4, m->in_file, m->rows / each);
    for (size_t g = 0; g < m->in_file; g++) {
        for (size_t n = 0; n < m->rows; n++) {
            const uint32_t zero =
                (uint32_t)(zero_of(m, n, g * m->repeat) + (int)middle - (is_v2 ? 0 : 1));
            const size_t row = file_row(m, n);
            put_packed(t, (g * m->rows + row) / each, bits * (row % each), zero);
        }
    }
}

static void add_awq(const matrix *m)
{
    ep_format_tensor *t = add(m, "qweight", "I32", 4, m->columns, m->rows / 8);
    for (size_t k = 0; k < m->columns; k++) {
        for (size_t n = 0; n < m->rows; n++) {
            put_packed(t, (k * m->rows + n) / 8, 4 * awq_place(n), code_of(m, 4, n, k));
        }
    }
    add_scales(m, "scales", true);
    t = add(m, "qzeros", "I32", 4, m->in_file, m->rows / 8);
    for (size_t g = 0; g < m->in_file; g++) {
        for (size_t n = 0; n < m->rows; n++) {
            put_packed(t, (g * m->rows + n) / 8, 4 * awq_place(n),
                       (uint32_t)(zero_of(m, n, g * m->repeat) + 8));
        }
    }
}

static void add_nvfp4(const matrix *m, float factor)
{
    const bool is_ct = m->model->form->container == EP_FORMAT_NVFP4;
    ep_format_tensor *t =
        add(m, is_ct ? "weight_packed" : "weight", "U8", 1, m->rows, parts_of(m->columns, 2));
    memcpy(t->data, m->values, t->bytes);
    t = add(m, "weight_scale", "F8_E4M3", 1, m->rows, m->groups);
    memcpy(t->data, m->scales, t->bytes);
    t = add(m, is_ct ? "weight_global_scale" : "weight_scale_2", "F32", 4, 1, 0);
    memcpy(t->data, &factor, sizeof(factor));
    if (!is_ct) {
        t->rank = 0;
    }
    (void)add(m, is_ct ? "input_global_scale" : "input_scale", "F32", 4, 1, 0); /* of activations */
}

void ep_format_model_contain(ep_format_model *model, const char *stem, uint32_t e, int which)
{
    const ep_format_case *form = model->form;
    const bool is_row = form->format == EP_WEIGHTS_F8_CHANNEL || form->format == EP_WEIGHTS_W8A8;
    matrix m = {.model = model,
                .stem = stem,
                .values = model->parts[e][3 * which],
                .scales = model->parts[e][3 * which + 1]};
    m.rows = which == 2 ? form->hidden : form->inner;
    m.columns = which == 2 ? form->inner : form->hidden;
    m.arrays = ep_weight_scale_arrays(form->format, m.rows, m.columns);
    m.groups = is_row ? 1 : parts_of(m.columns, ep_weight_group_columns(form->format));
    m.in_file = form->group == 0 ? 1 : parts_of(m.columns, form->group);
    m.repeat = is_row || form->group == 0 ? 1 : form->group / ep_weight_group_columns(form->format);
    m.columns_in_file = which == 2 ? model->down_order[e] : model->up_order[e];
    m.rows_in_file = which == 2 ? NULL : model->down_order[e];
    switch (form->container) {
    case EP_FORMAT_PACKED:
        add_packed(&m);
        break;
    case EP_FORMAT_INT8:
        add_int8(&m);
        break;
    case EP_FORMAT_F8:
        add_f8(&m);
        break;
    case EP_FORMAT_GPTQ:
        add_gptq(&m);
        break;
    case EP_FORMAT_AWQ:
        add_awq(&m);
        break;
    default:
        add_nvfp4(&m, model->factors[e][which]);
        break;
    }
}
