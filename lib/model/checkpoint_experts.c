/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading one expert: its tensors are found and checked against the config before anything is allocated, then
 * each is read straight into its place and hashed on the way, so that the bytes hashed are the bytes kept.
 */
#include "model/expert_plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "base/large_memory.h"
#include "base/numeric.h"

#define READ_PIECE_BYTES ((size_t)1 << 20) /* stays in cache between read and hash */
#define MATRIX_ALIGN 64

const ep_layer_shape *ep_checkpoint_layer(const ep_checkpoint *self, uint32_t layer, uint32_t *out_shared_inner)
{
    const ep_model_info *info = &self->config.info;
    uint32_t low = 0;
    uint32_t high = info->moe_layers_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (info->moe_layers[middle].layer < layer) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == info->moe_layers_count || info->moe_layers[low].layer != layer) {
        return NULL;
    }
    *out_shared_inner = info->shared_inner[low];
    return &info->moe_layers[low];
}

ep_err ep_checkpoint_layer_error(const ep_checkpoint *self, uint32_t layer, ep_error *out_error)
{
    const ep_model_info *info = &self->config.info;
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                        "layer %u is not an MoE layer of this model, allowed %u..%u (%u of %u layers)", layer,
                        info->moe_layers[0].layer, info->moe_layers[info->moe_layers_count - 1].layer,
                        info->moe_layers_count, info->layers_count);
}

static ep_err read_hashed(const ep_plan_run *run, uint8_t *out, EVP_MD_CTX *hash, ep_error *out_error)
{
    for (size_t at = 0; at < run->bytes;) {
        size_t piece = run->bytes - at < READ_PIECE_BYTES ? run->bytes - at : READ_PIECE_BYTES;
        ep_err err = ep_safetensors_read(run->entry->shard, run->entry->tensor, run->offset + at, out + at, piece,
                                         out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "tensor %.200s", run->entry->name);
        }
        if (EVP_DigestUpdate(hash, out + at, piece) != 1) {
            return ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
        }
        at += piece;
    }
    return EP_OK;
}

static ep_err read_runs(const ep_expert_plan *plan, uint8_t *const *places, uint8_t out_digest[EP_SHA256_BYTES],
                        ep_error *out_error)
{
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    if (hash == NULL || EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(hash);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "SHA-256 is not available from libcrypto");
    }
    ep_err err = EP_OK;
    for (int i = 0; err == EP_OK && i < plan->runs_count; i++) {
        err = read_hashed(&plan->runs[i], places[i], hash, out_error);
    }
    if (err == EP_OK && EVP_DigestFinal_ex(hash, out_digest, NULL) != 1) {
        err = ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
    }
    EVP_MD_CTX_free(hash);
    return err;
}

/* One block for count parts, each on its own cache line. Their sizes are those of tensors inside checked files. */
static ep_err allocate_parts(const size_t *bytes, size_t count, uint8_t **places, size_t *out_bytes,
                             ep_error *out_error)
{
    size_t total = 0;
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        fits = fits && ep_add_size(total, bytes[i], &total) && total <= SIZE_MAX - MATRIX_ALIGN;
        total = fits ? ep_align_up(total, MATRIX_ALIGN) : total;
    }
    uint8_t *block = fits ? ep_large_alloc(total, MATRIX_ALIGN) : NULL;
    if (block == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes", total);
    }
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        places[i] = block + at;
        at = ep_align_up(at + bytes[i], MATRIX_ALIGN);
    }
    *out_bytes = total;
    return EP_OK;
}

static ep_err damaged(const ep_plan_run *run, const char *what, size_t at, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: %s at element %zu",
                        ep_safetensors_name(run->entry->shard), run->entry->name, what, run->offset + at);
}

static float read_scale(const uint8_t *raw, ep_scale_kind kind, size_t i)
{
    uint16_t half = 0;
    float wide = 0.0f;
    if (kind == EP_SCALES_E8M0) {
        return ldexpf(1.0f, (int)raw[i] - 127);
    }
    if (kind == EP_SCALES_F32) {
        memcpy(&wide, raw + 4 * i, sizeof(wide));
        return wide;
    }
    memcpy(&half, raw + 2 * i, sizeof(half));
    return kind == EP_SCALES_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half);
}

/* Numbers that would spoil every result they touch: a NaN code among f8 values, a scale that is not finite. */
static ep_err check_numbers(const ep_expert_plan *plan, const ep_plan_matrix *m, uint8_t *const *raw,
                            ep_error *out_error)
{
    static const size_t scale_bytes[] = {1, 4, 2, 2, 1};
    const bool is_f8 = plan->format == EP_WEIGHTS_F8_BLOCK || plan->format == EP_WEIGHTS_F8_CHANNEL ||
                       plan->format == EP_WEIGHTS_MXFP8;
    const ep_plan_run *values = &plan->runs[m->values];
    for (size_t i = 0; is_f8 && i < values->bytes; i++) {
        if ((raw[m->values][i] & 0x7fu) == 0x7fu) {
            return damaged(values, "a value is NaN", i, out_error);
        }
    }
    for (size_t i = 0; m->offset >= 0 && i < plan->runs[m->offset].bytes; i++) {
        if (raw[m->offset][i] != 0) {
            return damaged(&plan->runs[m->offset], "an offset is not zero, allowed 0: byte", i, out_error);
        }
    }
    const ep_plan_run *scales = m->scales < 0 ? NULL : &plan->runs[m->scales];
    for (size_t i = 0; scales != NULL && i < scales->bytes / scale_bytes[m->scale_kind]; i++) {
        if (m->scale_kind == EP_SCALES_E8M0 && raw[m->scales][i] == 0xff) {
            return damaged(scales, "a scale is 255 (e8m0's NaN), allowed 0..254,", i, out_error);
        }
        if (m->scale_kind != EP_SCALES_E8M0 && !isfinite(read_scale(raw[m->scales], m->scale_kind, i))) {
            return damaged(scales, "a scale is not finite", i, out_error);
        }
    }
    return EP_OK;
}

/* Whether a matrix can be used where its run was read, and its scales too. */
static bool is_direct(ep_weight_format format, const ep_plan_matrix *m)
{
    bool wants_f32 = format == EP_WEIGHTS_F8_BLOCK || format == EP_WEIGHTS_F8_CHANNEL || format == EP_WEIGHTS_W8A8;
    bool converts = wants_f32 && m->scale_kind != EP_SCALES_F32;
    return !m->present || (m->step == 1 && !m->transposed && !converts && m->scale_rows == 1);
}

/* to[n] = row first + n * step of from, for all rows of the matrix. */
static void take_rows(const ep_plan_matrix *m, const uint8_t *from, size_t row_bytes, uint8_t *to)
{
    for (size_t n = 0; n < m->rows; n++) {
        memcpy(to + n * row_bytes, from + (m->first + n * m->step) * row_bytes, row_bytes);
    }
}

/* to[n][k] = from[k][first + n * step]; in squares that stay in cache. */
static void take_columns(const ep_plan_matrix *m, const uint8_t *from, size_t element, uint8_t *to)
{
    enum { SQUARE = 64 };
    for (size_t n0 = 0; n0 < m->rows; n0 += SQUARE) {
        for (size_t k0 = 0; k0 < m->columns; k0 += SQUARE) {
            for (size_t n = n0; n < n0 + SQUARE && n < m->rows; n++) {
                for (size_t k = k0; k < k0 + SQUARE && k < m->columns; k++) {
                    memcpy(to + (n * m->columns + k) * element,
                           from + (k * m->run_rows + m->first + n * m->step) * element, element);
                }
            }
        }
    }
}

static void take_scales(ep_weight_format format, const ep_plan_matrix *m, const uint8_t *from, uint8_t *to)
{
    const size_t bytes = ep_weight_scales_bytes(format, m->rows, m->columns);
    const size_t row_bytes = bytes / m->rows;
    for (size_t n = 0; m->scale_rows > 1 && n < m->rows; n++) { /* of a tensor of its own: from row 0 */
        memcpy(to + n * row_bytes, from + n / m->scale_rows * row_bytes, row_bytes);
    }
    if (m->scale_rows > 1) {
        return;
    }
    if (format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8 || format == EP_WEIGHTS_INT4) {
        take_rows(m, from, row_bytes, to);
        return;
    }
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        float scale = read_scale(from, m->scale_kind, i);
        memcpy(to + i * sizeof(scale), &scale, sizeof(scale));
    }
}

/* A shared gate that is 1/2 for every x, since sigmoid(0) is: of shared experts that are averaged with the routed ones. */
static const uint16_t half[EP_HIDDEN_MAX]; /* bf16 zeros */

static void halve(const ep_checkpoint *self, bool is_shared, ep_expert_source *source)
{
    if (is_shared && self->config.shared_halved) {
        source->shared_gate = half;
        source->shared_gate_dtype = EP_DTYPE_BF16;
    }
}

typedef struct matrix_place {
    const void *values;
    const void *scales;
    const void *bias;
} matrix_place;

static void give_places(const ep_expert_plan *plan, const matrix_place places[EP_MATRIX_COUNT],
                        const void *shared_gate, ep_expert_source *source)
{
    source->gate = places[EP_MATRIX_GATE].values;
    source->up = places[EP_MATRIX_UP].values;
    source->down = places[EP_MATRIX_DOWN].values;
    source->gate_scales = places[EP_MATRIX_GATE].scales;
    source->up_scales = places[EP_MATRIX_UP].scales;
    source->down_scales = places[EP_MATRIX_DOWN].scales;
    source->gate_bias = places[EP_MATRIX_GATE].bias;
    source->up_bias = places[EP_MATRIX_UP].bias;
    source->down_bias = places[EP_MATRIX_DOWN].bias;
    source->bias_dtype = plan->bias_dtype;
    source->shared_gate = shared_gate;
    source->shared_gate_dtype = plan->shared_gate_dtype;
}

/* Everything stands as the source wants it: only addresses are missing. */
static void use_in_place(const ep_expert_plan *plan, uint8_t *const *raw, ep_expert_data *expert)
{
    const size_t bias_bytes = ep_dtype_bytes(plan->bias_dtype);
    matrix_place places[EP_MATRIX_COUNT] = {{NULL, NULL, NULL}};
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        if (m->present) {
            places[i].values = raw[m->values] + m->first * ep_weight_row_bytes(plan->format, m->columns);
            places[i].scales = m->scales < 0 ? NULL : raw[m->scales] + m->first * (ep_weight_scales_bytes(
                                                          plan->format, m->rows, m->columns) / m->rows);
            places[i].bias = m->bias < 0 ? NULL : raw[m->bias] + m->first * bias_bytes;
        }
    }
    give_places(plan, places, plan->shared_gate < 0 ? NULL : raw[plan->shared_gate], &expert->source);
}

/* A second block with every part as the source wants it. */
static ep_err rearrange(const ep_expert_plan *plan, uint8_t *const *raw, ep_expert_data *expert, ep_error *out_error)
{
    enum { PARTS = 3 * EP_MATRIX_COUNT + 1 };
    const size_t bias_bytes = ep_dtype_bytes(plan->bias_dtype);
    size_t bytes[PARTS] = {0};
    uint8_t *to[PARTS];
    matrix_place places[EP_MATRIX_COUNT] = {{NULL, NULL, NULL}};
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        bytes[3 * i] = m->present ? m->rows * ep_weight_row_bytes(plan->format, m->columns) : 0;
        bytes[3 * i + 1] = m->present ? ep_weight_scales_bytes(plan->format, m->rows, m->columns) : 0;
        bytes[3 * i + 2] = m->bias < 0 ? 0 : m->rows * bias_bytes;
    }
    bytes[PARTS - 1] = plan->shared_gate < 0 ? 0 : plan->runs[plan->shared_gate].bytes;
    ep_err err = allocate_parts(bytes, PARTS, to, &expert->bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    expert->allocation = to[0];
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        if (!m->present) {
            continue;
        }
        if (m->transposed) {
            take_columns(m, raw[m->values], ep_dtype_bytes(ep_weight_format_dtype(plan->format)), to[3 * i]);
        } else {
            take_rows(m, raw[m->values], ep_weight_row_bytes(plan->format, m->columns), to[3 * i]);
        }
        places[i].values = to[3 * i];
        if (m->scales >= 0) {
            take_scales(plan->format, m, raw[m->scales], to[3 * i + 1]);
            places[i].scales = to[3 * i + 1];
        }
        if (m->bias >= 0) {
            bool is_fused = plan->runs[m->bias].bytes != m->rows * bias_bytes;
            ep_plan_matrix bias = *m;
            bias.first = is_fused ? m->first : 0;
            bias.step = is_fused ? m->step : 1;
            take_rows(&bias, raw[m->bias], bias_bytes, to[3 * i + 2]);
            places[i].bias = to[3 * i + 2];
        }
    }
    if (plan->shared_gate >= 0) {
        memcpy(to[PARTS - 1], raw[plan->shared_gate], bytes[PARTS - 1]);
    }
    give_places(plan, places, plan->shared_gate < 0 ? NULL : to[PARTS - 1], &expert->source);
    return EP_OK;
}

static ep_err read_planned(const ep_checkpoint *self, const ep_expert_plan *plan, const ep_layer_shape *shape,
                           bool is_shared, ep_expert_data *out_expert, ep_error *out_error)
{
    const size_t layer_place = (size_t)(shape - self->config.info.moe_layers);
    const ep_layer_numbers *numbers = &self->config.info.numbers[layer_place];
    uint8_t *raw[EP_PLAN_RUNS_MAX] = {NULL};
    size_t bytes[EP_PLAN_RUNS_MAX] = {0};
    bool direct = true;
    ep_expert_data expert = {.source = {.hidden = shape->hidden,
                                        .inner = plan->inner,
                                        .format = plan->format,
                                        .activation = shape->activation,
                                        .numbers = is_shared ? numbers->shared : numbers->routed}};
    for (int i = 0; i < plan->runs_count; i++) {
        bytes[i] = plan->runs[i].bytes;
    }
    size_t raw_bytes = 0;
    ep_err err = allocate_parts(bytes, (size_t)plan->runs_count, raw, &raw_bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    expert.allocation = raw[0];
    expert.bytes = raw_bytes;
    err = read_runs(plan, raw, expert.sha256, out_error);
    for (ep_matrix m = 0; err == EP_OK && m < EP_MATRIX_COUNT; m++) {
        if (plan->matrices[m].present) {
            err = check_numbers(plan, &plan->matrices[m], raw, out_error);
            direct = direct && is_direct(plan->format, &plan->matrices[m]);
        }
    }
    if (err == EP_OK && direct) {
        use_in_place(plan, raw, &expert);
    } else if (err == EP_OK) {
        err = rearrange(plan, raw, &expert, out_error);
        ep_large_free(raw[0], raw_bytes);
        raw[0] = NULL;
    }
    if (err != EP_OK) {
        ep_large_free(raw[0], raw_bytes);
        return err;
    }
    halve(self, is_shared, &expert.source);
    *out_expert = expert;
    return EP_OK;
}

/* Errors name layer and expert, but for those that they are not there. */
static ep_err plan_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index, const ep_layer_shape **out_shape,
                          ep_expert_plan *out_plan, ep_error *out_error)
{
    uint32_t shared_inner = 0;
    const ep_layer_shape *shape = ep_checkpoint_layer(checkpoint, layer, &shared_inner);
    if (shape == NULL) {
        return ep_checkpoint_layer_error(checkpoint, layer, out_error);
    }
    if (index >= shape->experts + shape->shared_experts) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "expert %u of layer %u, allowed 0..%u", index,
                            layer, shape->experts + shape->shared_experts - 1);
    }
    *out_shape = shape;
    return ep_expert_plan_make(checkpoint, shape, shared_inner, index, out_plan, out_error);
}

static ep_err name_expert(ep_err err, uint32_t layer, uint32_t index, ep_error *out_error)
{
    if (err != EP_OK && err != EP_ERR_INVALID_ARGUMENT && out_error != NULL) {
        out_error->layer = (int32_t)layer;
        out_error->expert = (int32_t)index;
    }
    return err;
}

ep_err ep_checkpoint_read_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                 ep_expert_data *out_expert, ep_error *out_error)
{
    ep_expert_plan plan;
    const ep_layer_shape *shape = NULL;
    ep_err err = plan_expert(checkpoint, layer, index, &shape, &plan, out_error);
    if (err == EP_OK) {
        err = read_planned(checkpoint, &plan, shape, index >= shape->experts, out_expert, out_error);
    }
    return name_expert(err, layer, index, out_error);
}

ep_err ep_checkpoint_outline_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index, ep_expert_source *out_outline,
                                    ep_error *out_error)
{
    static const uint8_t there;
    ep_expert_plan plan;
    const ep_layer_shape *shape = NULL;
    matrix_place places[EP_MATRIX_COUNT] = {{NULL, NULL, NULL}};
    const ep_err err = plan_expert(checkpoint, layer, index, &shape, &plan, out_error);
    if (err != EP_OK) {
        return name_expert(err, layer, index, out_error);
    }
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan.matrices[i];
        places[i].values = m->present ? &there : NULL;
        places[i].scales = m->present && m->scales >= 0 ? &there : NULL;
        places[i].bias = m->present && m->bias >= 0 ? &there : NULL;
    }
    *out_outline = (ep_expert_source){
        .hidden = shape->hidden, .inner = plan.inner, .format = plan.format, .activation = shape->activation};
    give_places(&plan, places, plan.shared_gate < 0 ? NULL : &there, out_outline);
    halve(checkpoint, index >= shape->experts, out_outline);
    return EP_OK;
}

void ep_checkpoint_survey_experts(const ep_checkpoint *checkpoint, ep_checkpoint_survey *out_survey)
{
    const ep_model_info *info = &checkpoint->config.info;
    ep_checkpoint_survey survey = {.experts = 0};
    ep_error_clear(&survey.first);
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_shape *shape = &info->moe_layers[i];
        for (uint32_t e = 0; e < shape->experts + shape->shared_experts; e++) {
            ep_expert_source outline;
            ep_error error;
            survey.experts++;
            if (ep_checkpoint_outline_expert(checkpoint, shape->layer, e, &outline, &error) != EP_OK) {
                survey.first = survey.unreadable == 0 ? error : survey.first;
                survey.unreadable++;
            }
        }
    }
    *out_survey = survey;
}

void ep_expert_data_free(ep_expert_data *expert)
{
    if (expert != NULL) {
        ep_large_free(expert->allocation, expert->bytes);
        *expert = (ep_expert_data){0};
    }
}
