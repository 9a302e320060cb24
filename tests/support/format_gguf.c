/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF: blocks made from the experts' sources, and the files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/numeric.h"
#include "support/format_fixture.h"
#include "support/gguf_writer.h"

#define E EP_FORMAT_EXPERTS
#define ALIGNMENT 64

/* Type number, columns and bytes of a block, as in the format's own header. */
static const struct block_type {
    const char *name;
    uint32_t number;
    uint32_t columns;
    uint32_t bytes;
} types[] = {{"F32", 0, 1, 4},       {"F16", 1, 1, 2},       {"BF16", 30, 1, 2},
             {"Q4_0", 2, 32, 18},    {"Q5_0", 6, 32, 22},    {"Q8_0", 8, 32, 34},
             {"MXFP4", 39, 32, 17},  {"Q4_K", 12, 256, 144}, {"Q5_K", 13, 256, 176},
             {"Q6_K", 14, 256, 210}, {"Q4_1", 3, 32, 20}};

static const struct block_type *type_named(const char *name)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(types); i++) {
        if (strcmp(types[i].name, name) == 0) {
            return &types[i];
        }
    }
    return NULL; /* the writer then writes an invalid type number */
}

/* One matrix of an expert. */
typedef struct matrix {
    const char *type;
    ep_weight_format format;
    uint32_t rows;
    uint32_t columns;
    const uint8_t *values;
    const uint8_t *scales;
} matrix;

static bool is(const matrix *m, const char *type)
{
    return strcmp(m->type, type) == 0;
}

/* Returns code k of row n, without a sign. */
static uint32_t code_of(const matrix *m, size_t n, size_t k)
{
    const uint8_t *row = m->values + n * ep_weight_row_bytes(m->format, m->columns);
    if (ep_weight_codes_are_nibbles(ep_weight_format_codes(m->format))) {
        return row[k / 2] >> (k % 2 == 0 ? 0 : 4) & 15u;
    }
    return (uint32_t)(int8_t)row[k] + (is(m, "Q5_0") ? 16u : is(m, "Q6_K") ? 32u : 0u);
}

static void put_half(uint8_t *to, float value)
{
    const uint16_t half = ep_f32_to_f16(value);
    memcpy(to, &half, sizeof(half));
}

/* Writes 32 columns: the first half in lower nibbles, the second in upper ones. */
static void put_small(const matrix *m, size_t n, size_t first, uint8_t *block)
{
    const size_t group = first / 32;
    const size_t groups = m->columns / 32;
    uint8_t *to = block + (is(m, "MXFP4") ? 1 : is(m, "Q5_0") ? 6 : 2);
    memcpy(block, m->scales + (n * groups + group) * (is(m, "MXFP4") ? 1 : 2),
           is(m, "MXFP4") ? 1 : 2);
    for (size_t k = 0; k < 32; k++) {
        const uint32_t code = code_of(m, n, first + k);
        if (is(m, "Q8_0")) {
            to[k] = (uint8_t)code;
            continue;
        }
        to[k % 16] |= (uint8_t)((code & 15u) << (k < 16 ? 0 : 4));
        if (is(m, "Q5_0")) {
            block[2 + k / 8] |= (uint8_t)((code >> 4) << (k % 8));
        }
    }
}

static float factor_of(const matrix *m, const uint8_t *factors, size_t n, size_t first)
{
    float value;
    memcpy(&value, factors + 4 * (n * ((m->columns + 255) / 256) + first / 256), sizeof(value));
    return value;
}

/* Packs eight parts and eight minima of six bits. */
static void put_parts(const uint8_t *parts, const uint8_t *minima, uint8_t *to)
{
    for (size_t j = 0; j < 4; j++) {
        to[j] = (uint8_t)(parts[j] | parts[j + 4] >> 4 << 6);
        to[j + 4] = (uint8_t)(minima[j] | minima[j + 4] >> 4 << 6);
        to[j + 8] = (uint8_t)((parts[j + 4] & 15u) | (minima[j + 4] & 15u) << 4);
    }
}

static void put_q4_or_q5(const matrix *m, size_t n, size_t first, uint8_t *block)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(m->format, m->rows, m->columns);
    const uint8_t *offsets = m->scales + arrays.scales;
    const uint8_t *factors = offsets + arrays.offsets;
    const size_t group = n * (m->columns / 32) + first / 32;
    const bool has_fifth = is(m, "Q5_K");
    uint8_t *lower = block + (has_fifth ? 48 : 16);
    put_half(block, factor_of(m, factors, n, first));
    put_half(block + 2, factor_of(m, factors + arrays.scale_factors, n, first));
    put_parts(m->scales + group, offsets + group, block + 4);
    for (size_t k = 0; k < 256; k++) {
        const uint32_t code = code_of(m, n, first + k);
        lower[32 * (k / 64) + k % 32] |= (uint8_t)((code & 15u) << (k % 64 < 32 ? 0 : 4));
        if (has_fifth) {
            block[16 + k % 32] |= (uint8_t)((code >> 4) << (k / 32));
        }
    }
}

static void put_q6(const matrix *m, size_t n, size_t first, uint8_t *block)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(m->format, m->rows, m->columns);
    memcpy(block + 192, m->scales + n * (m->columns / 16) + first / 16, 16);
    put_half(block + 208, factor_of(m, m->scales + arrays.scales, n, first));
    for (size_t k = 0; k < 256; k++) {
        const uint32_t code = code_of(m, n, first + k);
        const size_t half = k / 128;
        const size_t quarter = k % 128 / 32;
        block[64 * half + 32 * (quarter % 2) + k % 32] |=
            (uint8_t)((code & 15u) << (quarter < 2 ? 0 : 4));
        block[128 + 32 * half + k % 32] |= (uint8_t)(code >> 4 << 2 * quarter);
    }
}

static void put_row(const matrix *m, size_t n, uint8_t *to)
{
    const struct block_type *type = type_named(m->type);
    for (size_t first = 0; first < m->columns; first += type->columns, to += type->bytes) {
        if (type->columns == 1) {
            memcpy(to, m->values + (n * m->columns + first) * type->bytes, type->bytes);
        } else if (type->columns == 32) {
            put_small(m, n, first, to);
        } else if (is(m, "Q6_K")) {
            put_q6(m, n, first, to);
        } else {
            put_q4_or_q5(m, n, first, to);
        }
    }
}

/* Adds matrices first..last of all experts as one tensor [E,rows,columns], and their biases. */
static void add_tensor(ep_format_model *model, const char *word, int first, int last)
{
    char name[192];
    const ep_format_case *form = model->form;
    const char *type = first == 2 && form->down_type != NULL ? form->down_type : form->type;
    matrix m = {.type = type, .format = ep_format_case_of(form, first)};
    m.rows = first == 2 ? form->hidden : form->inner;
    m.columns = first == 2 ? form->inner : form->hidden;
    const size_t row_bytes = m.columns / type_named(type)->columns * type_named(type)->bytes;
    const size_t rows = m.rows * (size_t)(last - first + 1);
    snprintf(name, sizeof(name), "blk.%d.%s.weight", EP_FORMAT_LAYER, word);
    ep_format_tensor *t =
        ep_format_model_add(model, name, type, 1, (const uint64_t[4]){E, rows, row_bytes, 0});
    t->dims[2] = m.columns;
    for (size_t i = 0; i < E * rows; i++) {
        uint8_t **parts = &model->parts[i / rows][3 * (first + (int)(i % rows / m.rows))];
        m.values = parts[0];
        m.scales = parts[1];
        put_row(&m, i % m.rows, t->data + i * row_bytes);
    }
    if (!form->biases) {
        return;
    }
    snprintf(name, sizeof(name), "blk.%d.%s.bias", EP_FORMAT_LAYER, word);
    t = ep_format_model_add(model, name, "F32", 4, (const uint64_t[4]){E, rows, 0, 0});
    for (size_t i = 0; i < E * rows; i++) {
        memcpy(t->data + 4 * i,
               model->parts[i / rows][3 * (first + (int)(i % rows / m.rows)) + 2] +
                   4 * (i % m.rows),
               4);
    }
}

void ep_format_gguf_add(ep_format_model *model)
{
    if (model->form->names == EP_FORMAT_BLK_FUSED) {
        add_tensor(model, "ffn_gate_up_exps", 0, 1);
    } else {
        add_tensor(model, "ffn_gate_exps", 0, 0);
        add_tensor(model, "ffn_up_exps", 1, 1);
    }
    add_tensor(model, "ffn_down_exps", 2, 2);
}

/* ---- the files ---- */

static void put_count(gguf_writer *w, const char *architecture, const char *end, uint32_t value)
{
    char name[128];
    snprintf(name, sizeof(name), "%s%s%s", architecture, architecture[0] == 0 ? "" : ".", end);
    gguf_put_key(w, name, GGUF_U32, 4, value);
}

/* Writes a vocabulary and its scores, which a reader must skip. */
static void put_vocabulary(gguf_writer *w)
{
    enum { TOKENS = 2000 };
    gguf_put_array(w, "tokenizer.ggml.tokens", GGUF_TEXT, TOKENS);
    for (int i = 0; i < TOKENS; i++) {
        gguf_put_text(w, i % 3 == 0 ? "" : "token \xff");
    }
    gguf_put_array(w, "tokenizer.ggml.scores", GGUF_F32, TOKENS);
    for (int i = 0; i < TOKENS; i++) {
        gguf_put(w, 4, 0x7fc00000);
    }
}

enum { KEYS = 10 };

static void put_keys(gguf_writer *w, const ep_format_case *form)
{
    const char *architecture = form->config;
    gguf_put_text(w, "general.architecture");
    gguf_put(w, 4, GGUF_TEXT);
    gguf_put_text(w, architecture);
    put_vocabulary(w);
    put_count(w, "", "general.alignment", ALIGNMENT);
    put_count(w, architecture, "embedding_length", form->hidden);
    put_count(w, architecture, "expert_feed_forward_length", form->inner);
    put_count(w, architecture, "block_count", 2);
    put_count(w, architecture, "leading_dense_block_count", 1);
    put_count(w, architecture, "expert_count", E);
    put_count(w, architecture, "expert_used_count", 2);
}

static void put_tensor(gguf_writer *w, const ep_format_tensor *t, uint64_t at)
{
    const struct block_type *type = type_named(t->dtype);
    uint64_t dims[8];
    for (uint32_t d = 0; d < t->rank; d++) {
        dims[d] = t->dims[t->rank - 1 - d];
    }
    gguf_put_tensor(w, t->name, t->rank, dims, type == NULL ? 99 : type->number, at);
}

static void pad(FILE *file)
{
    while (ftell(file) % ALIGNMENT != 0) {
        fputc(0, file);
    }
}

/* Writes every step-th tensor from `first` on. */
static bool write_file(const ep_format_model *model, size_t first, size_t step, const char *path)
{
    static gguf_writer w;
    FILE *file = fopen(path, "we");
    uint64_t count = 0;
    uint64_t at = 0;
    if (file == NULL) {
        return false;
    }
    for (size_t i = first; i < model->tensors_count; i += step) {
        count += model->tensors[i].name[0] != 0;
    }
    w.count = 0;
    gguf_put_head(&w, 3, count, (first == 0 ? KEYS : 1) + (step > 1 ? 2 : 0));
    if (first == 0) {
        put_keys(&w, model->form);
    } else {
        put_count(&w, "", "general.alignment", ALIGNMENT);
    }
    if (step > 1) {
        put_count(&w, "", "split.no", (uint32_t)first);
        put_count(&w, "", "split.count", (uint32_t)step);
    }
    for (size_t i = first; i < model->tensors_count; i += step) {
        if (model->tensors[i].name[0] != 0) {
            put_tensor(&w, &model->tensors[i], at);
            at += (model->tensors[i].bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        }
    }
    fwrite(w.bytes, 1, w.count, file);
    for (size_t i = first; i < model->tensors_count; i += step) {
        if (model->tensors[i].name[0] != 0) {
            pad(file);
            fwrite(model->tensors[i].data, 1, model->tensors[i].bytes, file);
        }
    }
    const bool good = ferror(file) == 0;
    return fclose(file) == 0 && good;
}

ep_err ep_format_gguf_write(const ep_format_model *model, const char *dir, ep_error *out_error)
{
    static const char *const names[] = {"config.json", "model.gguf", "model-00001-of-00002.gguf",
                                        "model-00002-of-00002.gguf"};
    char paths[EP_ARRAY_COUNT(names)][4096];
    const bool is_split = model->form->names == EP_FORMAT_BLK_FUSED;
    for (size_t i = 0; i < EP_ARRAY_COUNT(names); i++) { /* removes files of an earlier write */
        snprintf(paths[i], sizeof(paths[i]), "%s/%s", dir, names[i]);
        (void)unlink(paths[i]);
    }
    const bool good = is_split
                          ? write_file(model, 0, 2, paths[2]) && write_file(model, 1, 2, paths[3])
                          : write_file(model, 0, 1, paths[1]);
    return good ? EP_OK : ep_error_set(out_error, EP_ERR_IO, "%s: cannot write", dir);
}
