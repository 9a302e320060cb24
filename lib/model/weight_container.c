/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weight_container.h"

#include <string.h>

#include "base/check.h"
#include "model/tensor_check.h"

#define VALUE_TYPES "BF16, F16, F32, F8_E4M3, I8, U8, I32; of GGUF also " EP_BLOCK_TYPES

/* A matrix whose container is being determined. */
typedef struct matrix {
    const ep_quant_config *quant;
    const ep_weight_tensors *t;
    uint32_t rows;
    uint32_t columns;
    ep_error *error;
} matrix;

static uint64_t parts_of(uint64_t count, uint64_t part)
{
    return (count + part - 1) / part;
}

static ep_err refuse(const ep_checkpoint_entry *entry, const char *why, uint32_t value,
                     const char *allowed, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "%s: tensor %.200s: %s %u, allowed %s",
                        ep_safetensors_name(entry->shard), entry->name, why, value, allowed);
}

static ep_err missing_beside(const matrix *m, const char *what)
{
    return ep_error_set(m->error, EP_ERR_NOT_FOUND, "%s: tensor %.200s: %s",
                        ep_safetensors_name(m->t->values->shard), m->t->values->name, what);
}

static ep_weight_scales kind_of(const ep_checkpoint_entry *scales)
{
    static const struct {
        const char *type;
        ep_weight_scales kind;
    } kinds[] = {{"F32", EP_SCALES_F32},      {"BF16", EP_SCALES_BF16},
                 {"F16", EP_SCALES_F16},      {"U8", EP_SCALES_E8M0},
                 {"F8_E8M0", EP_SCALES_E8M0}, {"F8_E4M3", EP_SCALES_E4M3_PARTS}};
    for (size_t i = 0; i < EP_ARRAY_COUNT(kinds); i++) {
        if (ep_tensor_has_type(scales, kinds[i].type)) {
            return kinds[i].kind;
        }
    }
    return EP_SCALES_NONE;
}

static bool is_float(ep_weight_scales kind)
{
    return kind == EP_SCALES_F32 || kind == EP_SCALES_BF16 || kind == EP_SCALES_F16;
}

static bool is_one(const ep_checkpoint_entry *entry)
{
    return ep_tensor_has_shape(entry, EP_DIMS_NONE) || ep_tensor_has_shape(entry, EP_DIMS(1)) ||
           ep_tensor_has_shape(entry, EP_DIMS(1, 1));
}

static bool is_per_row(const ep_checkpoint_entry *entry, uint64_t rows)
{
    return ep_tensor_has_shape(entry, EP_DIMS(rows, 1)) ||
           ep_tensor_has_shape(entry, EP_DIMS(rows));
}

/* [rows,groups], or [groups,rows] if the container is transposed. */
static ep_scale_layout layout_of_groups(const matrix *m, ep_weight_scales kind, uint32_t group,
                                        uint64_t groups, bool transposed)
{
    return (ep_scale_layout){.kind = kind,
                             .rows = 1,
                             .columns = group,
                             .row_step = transposed ? 1 : groups,
                             .column_step = transposed ? m->rows : 1};
}

/*
 * Columns per group where a row has `groups` of them: the size stated by the config that gives this
 * number; if none is stated, 32 or the whole row. 0: no size matches, or several do.
 */
static uint32_t group_of(const matrix *m, uint64_t groups)
{
    const ep_quant_size unstated[] = {{1, EP_MX_GROUP}, {1, 0}};
    const bool is_stated = m->quant->sizes_count > 0;
    const ep_quant_size *sizes = is_stated ? m->quant->sizes : unstated;
    const uint32_t count = is_stated ? m->quant->sizes_count : EP_ARRAY_COUNT(unstated);
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t columns = sizes[i].columns;
        if (sizes[i].rows != 1 || groups != (columns == 0 ? 1 : parts_of(m->columns, columns))) {
            continue;
        }
        if (found != 0 && is_stated) {
            return 0;
        }
        found = found != 0 ? found : columns == 0 ? EP_SHARED_BY_ALL : columns;
    }
    return found;
}

/*
 * The form of integers. Groups of 128 columns, of a multiple of 128, or of a whole row become
 * groups of 128; other multiples of 32 become groups of 32. This does not depend on a matrix's
 * size, so that all matrices of an expert have one form.
 */
static ep_err integer_form(const matrix *m, uint32_t group, bool has_zeros, ep_weight_container *c)
{
    const bool is_wide = group == EP_SHARED_BY_ALL || group % EP_F8_BLOCK == 0;
    const bool is_f16 = c->scales.kind == EP_SCALES_F16;
    if (!is_wide && group % EP_MX_GROUP != 0) {
        return refuse(m->t->scales, "groups of", group, "multiples of 32 columns", m->error);
    }
    if (c->bits == 4) {
        c->format = is_wide && has_zeros                           ? EP_WEIGHTS_INT4_128_ZERO
                    : is_wide                                      ? EP_WEIGHTS_INT4_128
                    : has_zeros || c->scales.kind == EP_SCALES_F32 ? EP_WEIGHTS_INT4_ZERO
                    : is_f16                                       ? EP_WEIGHTS_INT4_F16
                                                                   : EP_WEIGHTS_INT4;
    } else {
        c->format = is_wide && has_zeros   ? EP_WEIGHTS_INT8_128_ZERO
                    : is_wide              ? EP_WEIGHTS_INT8_128
                    : has_zeros || !is_f16 ? EP_WEIGHTS_INT8_ZERO
                                           : EP_WEIGHTS_INT8_F16;
    }
    return EP_OK;
}

/* Scales of rows, or of groups of their columns; out_groups: groups per row. */
static ep_err integer_scales(const matrix *m, ep_scale_layout *out_layout, uint32_t *out_group,
                             uint64_t *out_groups)
{
    const ep_checkpoint_entry *scales = m->t->scales;
    const ep_weight_scales kind = kind_of(scales);
    if (!is_float(kind)) {
        return ep_tensor_type_error(scales, "F32, BF16, F16", m->error);
    }
    const bool is_row = is_per_row(scales, m->rows);
    const uint64_t groups = is_row ? 1
                            : scales->tensor->rank == 2 && scales->tensor->shape[0] == m->rows
                                ? scales->tensor->shape[1]
                                : 0;
    const uint32_t group = group_of(m, groups);
    if (group == 0) {
        const uint32_t wanted =
            m->quant->sizes_count > 0 ? m->quant->sizes[0].columns : EP_MX_GROUP;
        return ep_tensor_shape_error(
            scales, EP_DIMS(m->rows, wanted == 0 ? 1 : parts_of(m->columns, wanted)), m->error);
    }
    if (m->quant->asymmetric && m->t->zeros == NULL) {
        return missing_beside(
            m, "has no zero points, which the config says it has: weight_zero_point is missing");
    }
    *out_layout = layout_of_groups(m, kind, group, groups, false);
    *out_group = group;
    *out_groups = groups;
    return EP_OK;
}

/* Packed values of compressed-tensors: words of 4-bit or 8-bit codes. */
static ep_err make_packed(const matrix *m, ep_weight_container *c)
{
    const ep_checkpoint_entry *values = m->t->values;
    const ep_checkpoint_entry *zeros = m->t->zeros;
    const bool is_nibbles = ep_tensor_has_shape(values, EP_DIMS(m->rows, parts_of(m->columns, 8)));
    const bool is_bytes = ep_tensor_has_shape(values, EP_DIMS(m->rows, parts_of(m->columns, 4)));
    uint32_t group = 0;
    uint64_t groups = 0;
    if (is_nibbles == is_bytes) { /* matches neither, or a row is a single word and matches both */
        return ep_tensor_shape_error(values, EP_DIMS(m->rows, parts_of(m->columns, 8)), m->error);
    }
    c->bits = is_nibbles ? 4 : 8;
    c->packing = is_nibbles ? EP_PACKING_ROWS : EP_PACKING_WORDS;
    ep_err err = integer_scales(m, &c->scales, &group, &groups);
    if (err == EP_OK && zeros != NULL) {
        c->zeros = EP_ZEROS_WORDS;
        c->zero_bias = is_nibbles ? -8 : -128;
        err =
            !ep_tensor_has_type(zeros, "I32")
                ? ep_tensor_type_error(zeros, "I32", m->error)
                : ep_tensor_check_shape(
                      zeros, EP_DIMS(parts_of((uint64_t)m->rows * c->bits, 32), groups), m->error);
    }
    return err != EP_OK ? err : integer_form(m, group, zeros != NULL, c);
}

/* Plain int8. With one scale per row, and nothing in the config against it, inputs are int8 too. */
static ep_err make_int8(const matrix *m, ep_weight_container *c)
{
    const ep_checkpoint_entry *zeros = m->t->zeros;
    uint32_t group = 0;
    uint64_t groups = 0;
    c->bits = 8;
    ep_err err = integer_scales(m, &c->scales, &group, &groups);
    if (err == EP_OK && zeros != NULL) {
        c->zeros = EP_ZEROS_INT8;
        err = !ep_tensor_has_type(zeros, "I8") ? ep_tensor_type_error(zeros, "I8", m->error)
              : groups == 1 && is_per_row(zeros, m->rows)
                  ? EP_OK
                  : ep_tensor_check_shape(zeros, EP_DIMS(m->rows, groups), m->error);
    }
    if (err == EP_OK && zeros == NULL && groups == 1 && !m->quant->weights_only) {
        c->format = EP_WEIGHTS_W8A8;
        return EP_OK;
    }
    return err != EP_OK ? err : integer_form(m, group, zeros != NULL, c);
}

/* Block of f8: the stated size, or else 128 x 128. False: other shape of scales, or several sizes
 * match. */
static bool block_of(const matrix *m, uint32_t *rows, uint32_t *columns)
{
    int found = 0;
    *rows = EP_F8_BLOCK;
    *columns = EP_F8_BLOCK;
    bool is_stated = false;
    for (uint32_t i = m->quant->sizes_count; i-- > 0;) {
        const ep_quant_size size = m->quant->sizes[i];
        if (size.columns == 0) {
            continue;
        }
        is_stated = true;
        const bool fits =
            ep_tensor_has_shape(m->t->scales, EP_DIMS(parts_of(m->rows, size.rows),
                                                      parts_of(m->columns, size.columns)));
        found += fits ? 1 : 0;
        if (fits || found == 0) {
            *rows = size.rows;
            *columns = size.columns;
        }
    }
    return is_stated ? found == 1
                     : ep_tensor_has_shape(m->t->scales, EP_DIMS(parts_of(m->rows, *rows),
                                                                 parts_of(m->columns, *columns)));
}

/* Whether the config states, or leaves open, that a row or the whole matrix has one scale. */
static bool may_share_rows(const matrix *m)
{
    bool is_stated = m->quant->sizes_count == 0;
    for (uint32_t i = 0; i < m->quant->sizes_count; i++) {
        is_stated = is_stated || m->quant->sizes[i].columns == 0;
    }
    return is_stated;
}

static ep_err make_f8_blocks(const matrix *m, uint32_t rows, uint32_t columns,
                             ep_weight_container *c)
{
    const bool is_square = rows == EP_F8_BLOCK && columns == EP_F8_BLOCK;
    if (columns != EP_SHARED_BY_ALL && columns % EP_MX_GROUP != 0) {
        return refuse(m->t->scales, "blocks with columns", columns, "multiples of 32", m->error);
    }
    c->scales.rows = rows;
    c->scales.columns = columns;
    c->scales.row_step = parts_of(m->columns, columns);
    c->scales.column_step = 1;
    c->format = is_square                     ? EP_WEIGHTS_F8_BLOCK
                : columns == EP_SHARED_BY_ALL ? EP_WEIGHTS_F8_CHANNEL
                                              : EP_WEIGHTS_F8_32;
    return EP_OK;
}

/* mxfp8: a scale for 32 columns of a row, or for 32 rows and columns, so that rows share scales. */
static bool make_mxfp8(const matrix *m, ep_weight_container *c)
{
    const uint64_t groups = parts_of(m->columns, EP_MX_GROUP);
    const bool is_square =
        ep_tensor_has_shape(m->t->scales, EP_DIMS(parts_of(m->rows, EP_MX_GROUP), groups));
    if (c->scales.kind != EP_SCALES_E8M0 ||
        (!is_square && !ep_tensor_has_shape(m->t->scales, EP_DIMS(m->rows, groups)))) {
        return false;
    }
    c->format = EP_WEIGHTS_MXFP8;
    c->scales = layout_of_groups(m, EP_SCALES_E8M0, EP_MX_GROUP, groups, false);
    c->scales.rows = is_square ? EP_MX_GROUP : 1;
    return true;
}

/* f8e4m3 with any scales; types and shapes show which. */
static ep_err make_f8(const matrix *m, ep_weight_container *c)
{
    const ep_checkpoint_entry *scales = m->t->scales;
    uint32_t rows, columns;
    c->scales.kind = kind_of(scales);
    if (c->scales.kind == EP_SCALES_NONE || c->scales.kind == EP_SCALES_E4M3_PARTS) {
        return ep_tensor_type_error(scales, "F32, BF16, F16, U8, F8_E8M0", m->error);
    }
    const bool has_blocks = block_of(m, &rows, &columns);
    const bool is_mx = columns == EP_MX_GROUP && c->scales.kind == EP_SCALES_E8M0;
    if (has_blocks && !is_mx) {
        return make_f8_blocks(m, rows, columns, c);
    }
    if (may_share_rows(m) && is_per_row(scales, m->rows) && c->scales.kind != EP_SCALES_E8M0) {
        return make_f8_blocks(m, 1, EP_SHARED_BY_ALL, c);
    }
    if (may_share_rows(m) && is_one(scales)) {
        return make_f8_blocks(m, EP_SHARED_BY_ALL, EP_SHARED_BY_ALL, c);
    }
    if ((m->quant->sizes_count == 0 || is_mx) && make_mxfp8(m, c)) {
        return EP_OK;
    }
    const bool wants_mx = c->scales.kind == EP_SCALES_E8M0 && m->quant->sizes_count == 0;
    return ep_tensor_shape_error(scales,
                                 EP_DIMS(wants_mx ? m->rows : parts_of(m->rows, rows),
                                         parts_of(m->columns, wants_mx ? EP_MX_GROUP : columns)),
                                 m->error);
}

/* Two codes of e2m1 per byte: mxfp4 or nvfp4, by the type of the scales. */
static ep_err make_e2m1(const matrix *m, ep_weight_container *c)
{
    const ep_checkpoint_entry *scales = m->t->scales;
    const ep_weight_scales kind = kind_of(scales);
    const bool is_nv = kind == EP_SCALES_E4M3_PARTS;
    const uint32_t group = is_nv ? 16 : EP_MX_GROUP;
    const uint64_t groups = parts_of(m->columns, group);
    ep_err err =
        ep_tensor_check_shape(m->t->values, EP_DIMS(m->rows, parts_of(m->columns, 2)), m->error);
    if (err == EP_OK && !is_nv && kind != EP_SCALES_E8M0) {
        err = ep_tensor_type_error(scales, "U8, F8_E8M0, F8_E4M3", m->error);
    }
    err = err != EP_OK ? err : ep_tensor_check_shape(scales, EP_DIMS(m->rows, groups), m->error);
    if (err == EP_OK && is_nv && m->t->factor == NULL) {
        err = missing_beside(m, "has no scale of the whole matrix: neither weight_global_scale nor "
                                "weight_scale_2 is there");
    }
    if (err == EP_OK && is_nv && !ep_tensor_has_type(m->t->factor, "F32")) {
        err = ep_tensor_type_error(m->t->factor, "F32", m->error);
    } else if (err == EP_OK && is_nv && !is_one(m->t->factor)) {
        err = ep_tensor_shape_error(m->t->factor, EP_DIMS(1), m->error);
    }
    c->format = is_nv ? EP_WEIGHTS_NVFP4 : EP_WEIGHTS_MXFP4;
    c->scales = layout_of_groups(m, kind, group, groups, false);
    c->factor_divides = m->t->factor_divides;
    return err;
}

/* Words of codes: packed down columns (GPTQ), or along rows (AWQ). Scales are [groups, rows], and
 * so are zero points. */
static ep_err make_words(const matrix *m, ep_weight_container *c)
{
    const ep_checkpoint_entry *values = m->t->values;
    const ep_checkpoint_entry *zeros = m->t->zeros;
    const ep_quant_words words = m->quant->words;
    const bool is_awq = words == EP_QUANT_WORDS_AWQ;
    if (words == EP_QUANT_WORDS_NONE) {
        return ep_error_set(
            m->error, EP_ERR_UNIMPLEMENTED,
            "%s: tensor %.200s: only with quant_method gptq or awq in the config is it read",
            ep_safetensors_name(values->shard), values->name);
    }
    const bool is_bytes =
        !is_awq && ep_tensor_has_shape(values, EP_DIMS(parts_of(m->columns, 4), m->rows));
    c->bits = is_bytes ? 8 : 4;
    c->packing = is_awq ? EP_PACKING_AWQ : EP_PACKING_GPTQ;
    const uint64_t each = 32 / c->bits;
    ep_err err = !ep_tensor_has_type(values, "I32")
                     ? ep_tensor_type_error(values, "I32", m->error)
                     : ep_tensor_check_shape(values,
                                             EP_DIMS(is_awq ? m->columns : m->columns / each,
                                                     is_awq ? m->rows / each : m->rows),
                                             m->error);
    if (err == EP_OK && (m->rows % each != 0 || m->columns % each != 0)) {
        return refuse(values, "a matrix with rows or columns that no whole words hold, of bits",
                      c->bits, "multiples of 32 bits", m->error);
    }
    if (err != EP_OK) {
        return err;
    }
    const ep_checkpoint_entry *scales = m->t->scales;
    const ep_weight_scales kind = kind_of(scales);
    const uint64_t groups = scales->tensor->rank == 2 && scales->tensor->shape[1] == m->rows
                                ? scales->tensor->shape[0]
                                : 0;
    const uint32_t group = group_of(m, groups);
    if (!is_float(kind)) {
        return ep_tensor_type_error(scales, "F16, BF16, F32", m->error);
    }
    if (group == 0) {
        const uint32_t wanted =
            m->quant->sizes_count > 0 ? m->quant->sizes[0].columns : EP_MX_GROUP;
        return ep_tensor_shape_error(
            scales, EP_DIMS(wanted == 0 ? 1 : parts_of(m->columns, wanted), m->rows), m->error);
    }
    c->scales = layout_of_groups(m, kind, group, groups, true);
    if (zeros == NULL) {
        return missing_beside(m, "has no zero points: qzeros is missing");
    }
    c->zeros = is_awq ? EP_ZEROS_AWQ : EP_ZEROS_GPTQ;
    c->zero_bias = (words == EP_QUANT_WORDS_GPTQ ? 1 : 0) - (1 << (c->bits - 1));
    c->zeros_are_none = m->quant->symmetric;
    err = !ep_tensor_has_type(zeros, "I32")
              ? ep_tensor_type_error(zeros, "I32", m->error)
              : ep_tensor_check_shape(zeros, EP_DIMS(groups, m->rows / each), m->error);
    return err != EP_OK ? err : integer_form(m, group, !m->quant->symmetric, c);
}

bool ep_weight_container_of_blocks(const ep_checkpoint_entry *values,
                                   ep_weight_container *out_container)
{
    static const struct {
        const char *type;
        ep_block_type block;
        ep_weight_format format;
    } blocks[] = {
        {"Q4_0", EP_BLOCK_Q4_0, EP_WEIGHTS_INT4_F16}, {"Q5_0", EP_BLOCK_Q5_0, EP_WEIGHTS_INT8_F16},
        {"Q8_0", EP_BLOCK_Q8_0, EP_WEIGHTS_INT8_F16}, {"Q4_K", EP_BLOCK_Q4_K, EP_WEIGHTS_Q4_K},
        {"Q5_K", EP_BLOCK_Q5_K, EP_WEIGHTS_Q5_K},     {"Q6_K", EP_BLOCK_Q6_K, EP_WEIGHTS_Q6_K},
        {"MXFP4", EP_BLOCK_MXFP4, EP_WEIGHTS_MXFP4}};
    for (size_t i = 0; i < EP_ARRAY_COUNT(blocks); i++) {
        if (ep_tensor_has_type(values, blocks[i].type)) {
            *out_container = (ep_weight_container){
                .format = blocks[i].format, .packing = EP_PACKING_BLOCKS, .block = blocks[i].block};
            return true;
        }
    }
    return false;
}

ep_err ep_weight_container_make(const ep_quant_config *quant, const ep_weight_tensors *tensors,
                                uint32_t rows, uint32_t columns, ep_weight_container *out_container,
                                ep_error *out_error)
{
    const matrix m = {quant, tensors, rows, columns, out_error};
    const ep_checkpoint_entry *values = tensors->values;
    const bool is_f8 = ep_tensor_has_type(values, "F8_E4M3");
    const bool is_int8 = ep_tensor_has_type(values, "I8");
    const bool is_int32 = ep_tensor_has_type(values, "I32");
    if (ep_weight_container_of_blocks(values, out_container)) {
        return ep_tensor_check_shape(values, EP_DIMS(rows, columns), out_error);
    }
    *out_container = (ep_weight_container){.packing = EP_PACKING_ROWS};
    if (tensors->scales != NULL && tensors->are_words) {
        return make_words(&m, out_container);
    }
    if (!is_f8 && !is_int8 && !is_int32 && !ep_tensor_has_type(values, "U8")) {
        return ep_tensor_type_error(values, VALUE_TYPES, out_error);
    }
    if (tensors->scales == NULL) {
        return missing_beside(
            &m, "has no scales: none of weight_scale_inv, weight_scale, scale, scales is there");
    }
    if (is_f8) {
        const ep_err err = ep_tensor_check_shape(values, EP_DIMS(rows, columns), out_error);
        return err == EP_OK ? make_f8(&m, out_container) : err;
    }
    if (is_int8 && ep_tensor_has_shape(values, EP_DIMS(rows, columns))) {
        return make_int8(&m, out_container);
    }
    return is_int32 ? make_packed(&m, out_container) : make_e2m1(&m, out_container);
}
