/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads one expert. Its tensors are found and checked against the config before anything is
 * allocated. Then each is read straight to its place and hashed in pieces, so that the hashed bytes
 * are the bytes kept.
 */
#include "model/expert_quant.h"
#include "model/tensor_check.h"
#include "model/weight_order.h"
#include "model/weight_unpack.h"

#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "base/numeric.h"

#define READ_PIECE_BYTES ((size_t)1 << 20) /* stays in cache from read to hash */

static ep_err read_hashed(const ep_plan_run *run, uint8_t *out, EVP_MD_CTX *hash,
                          ep_error *out_error)
{
    ep_err needed = ep_safetensors_need(run->entry->shard, run->entry->tensor, run->offset,
                                        run->bytes, out_error);
    if (needed != EP_OK) {
        return ep_error_prefix(out_error, needed, "tensor %.200s", run->entry->name);
    }
    for (size_t at = 0; at < run->bytes;) {
        size_t piece = run->bytes - at < READ_PIECE_BYTES ? run->bytes - at : READ_PIECE_BYTES;
        ep_err err = ep_safetensors_read(run->entry->shard, run->entry->tensor, run->offset + at,
                                         out + at, piece, out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "tensor %.200s", run->entry->name);
        }
        if (hash != NULL && EVP_DigestUpdate(hash, out + at, piece) != 1) {
            return ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
        }
        at += piece;
    }
    return EP_OK;
}

/* out_digest NULL: not wanted. */
static ep_err read_runs(const ep_expert_plan *plan, uint8_t *const *places, uint8_t *out_digest,
                        ep_error *out_error)
{
    ep_err err = EP_OK;
    EVP_MD_CTX *hash = out_digest == NULL ? NULL : EVP_MD_CTX_new();
    if (out_digest != NULL && (hash == NULL || EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1)) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "SHA-256 is not available from libcrypto");
    }
    for (int i = 0; err == EP_OK && i < plan->runs_count; i++) {
        err = read_hashed(&plan->runs[i], places[i], hash, out_error);
    }
    if (err == EP_OK && hash != NULL && EVP_DigestFinal_ex(hash, out_digest, NULL) != 1) {
        err = ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
    }
    EVP_MD_CTX_free(hash);
    return err;
}

/* For shared experts that are averaged with the routed ones: a shared gate of zeros, since
 * sigmoid(0) is 1/2 for every x. */
static const uint16_t half[EP_HIDDEN_MAX]; /* bf16 zeros */

/* Sets what the config says about all experts, and about shared ones. */
static void give_config(const ep_checkpoint *self, bool is_shared, ep_expert_source *source)
{
    source->wide_inputs = self->config.info.wide_inputs;
    if (is_shared && self->config.shared_halved) {
        source->shared_gate = half;
        source->shared_gate_dtype = EP_DTYPE_BF16;
    }
}

ep_source_matrix ep_source_matrix_of(ep_expert_source *source, ep_matrix which)
{
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    switch (which) {
    case EP_MATRIX_GATE:
        return (ep_source_matrix){
            inner, hidden, source->format, &source->gate, &source->gate_scales, &source->gate_bias};
    case EP_MATRIX_UP:
        return (ep_source_matrix){
            inner, hidden, source->format, &source->up, &source->up_scales, &source->up_bias};
    default:
        return (ep_source_matrix){hidden,
                                  inner,
                                  ep_expert_down_format(source),
                                  &source->down,
                                  &source->down_scales,
                                  &source->down_bias};
    }
}

/* Sets what the plan says beside the matrices. */
static void give_types(const ep_expert_plan *plan, const void *shared_gate,
                       ep_expert_source *source)
{
    source->down_format = plan->down_format;
    source->bias_dtype = plan->bias_dtype;
    source->shared_gate = shared_gate;
    source->shared_gate_dtype = plan->shared_gate_dtype;
}

/* Everything is already in the form of the source; only the pointers are missing. */
static void use_in_place(const ep_expert_plan *plan, uint8_t *const *raw, ep_expert_data *expert)
{
    const size_t bias_bytes = ep_dtype_bytes(plan->bias_dtype);
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        if (m->present) {
            const ep_weight_format format = m->container.format;
            const ep_source_matrix to = ep_source_matrix_of(&expert->source, i);
            *to.values = raw[m->values] + m->first * ep_weight_row_bytes(format, m->columns);
            *to.scales = m->scales < 0
                             ? NULL
                             : raw[m->scales] +
                                   m->first * (ep_weight_scales_bytes(format, m->rows, m->columns) /
                                               m->rows);
            *to.bias = m->bias < 0 ? NULL : raw[m->bias] + m->first * bias_bytes;
        }
    }
    give_types(plan, plan->shared_gate < 0 ? NULL : raw[plan->shared_gate], &expert->source);
}

/* Reorders a shared expert's gate like the columns of its matrices. */
static void place_shared_gate(const ep_expert_plan *plan, const uint8_t *from,
                              const uint8_t *places, size_t hidden, uint8_t *to)
{
    const size_t element = ep_dtype_bytes(plan->shared_gate_dtype);
    for (size_t i = 0; i < hidden; i++) {
        uint32_t place = (uint32_t)i;
        if (places != NULL) {
            memcpy(&place, places + sizeof(place) * i, sizeof(place));
        }
        memcpy(to + place * element, from + i * element, element);
    }
}

/* Writes every part to the second block in the form of the source. */
static ep_err rearrange(const ep_expert_plan *plan, const ep_weight_orders *orders,
                        uint8_t *const *raw, ep_expert_room *room, ep_expert_data *expert,
                        ep_error *out_error)
{
    enum { GATE = 3 * EP_MATRIX_COUNT, PLACES, PARTS };
    const uint32_t hidden = expert->source.hidden;
    const size_t bias_bytes = ep_dtype_bytes(plan->bias_dtype);
    size_t bytes[PARTS] = {0};
    uint8_t *to[PARTS];
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        const ep_weight_format format = m->container.format;
        bytes[3 * i] = m->present ? m->rows * ep_weight_row_bytes(format, m->columns) : 0;
        bytes[3 * i + 1] = m->present ? ep_weight_scales_bytes(format, m->rows, m->columns) : 0;
        bytes[3 * i + 2] = m->bias < 0 ? 0 : m->rows * bias_bytes;
    }
    bytes[GATE] = plan->shared_gate < 0 ? 0 : plan->runs[plan->shared_gate].bytes;
    bytes[PLACES] = plan->has_places ? hidden * sizeof(uint32_t) : 0;
    expert->block = 1;
    ep_err err = ep_expert_parts_place(room, expert->block, bytes, PARTS, to, out_error);
    if (err != EP_OK) {
        return err;
    }
    for (ep_matrix i = 0; err == EP_OK && i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan->matrices[i];
        if (!m->present) {
            continue;
        }
        const ep_source_matrix matrix = ep_source_matrix_of(&expert->source, i);
        *matrix.values = to[3 * i];
        if (m->container.packing == EP_PACKING_BLOCKS) {
            ep_weight_unpack_blocks(m, raw[m->values], to[3 * i], to[3 * i + 1]);
            *matrix.scales = to[3 * i + 1];
        } else {
            ep_weight_unpack_values(m, raw[m->values], to[3 * i]);
        }
        if (m->scales >= 0) {
            ep_weight_unpack_scales(m, raw, to[3 * i + 1]);
            *matrix.scales = to[3 * i + 1];
        }
        if (m->bias >= 0) {
            ep_weight_unpack_bias(plan, m, raw[m->bias], to[3 * i + 2]);
            *matrix.bias = to[3 * i + 2];
        }
        err =
            ep_weight_orders_apply(orders, plan, i, to[3 * i], m->scales < 0 ? NULL : to[3 * i + 1],
                                   m->bias < 0 ? NULL : to[3 * i + 2], out_error);
    }
    if (plan->has_places) {
        ep_weight_orders_places(orders, hidden, to[PLACES]);
        expert->source.places = to[PLACES];
    }
    if (plan->shared_gate >= 0) {
        place_shared_gate(plan, raw[plan->shared_gate], expert->source.places, hidden, to[GATE]);
    }
    give_types(plan, plan->shared_gate < 0 ? NULL : to[GATE], &expert->source);
    return err;
}

static ep_err read_planned(const ep_checkpoint *self, const ep_expert_plan *plan,
                           const ep_layer_shape *shape, bool is_shared, ep_expert_room *room,
                           ep_expert_data *out_expert, ep_error *out_error)
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
    ep_err err =
        ep_expert_parts_place(room, expert.block, bytes, (size_t)plan->runs_count, raw, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = read_runs(plan, raw, self->config.info.quant == NULL ? expert.sha256 : NULL, out_error);
    for (ep_matrix m = 0; err == EP_OK && m < EP_MATRIX_COUNT; m++) {
        if (plan->matrices[m].present) {
            err = ep_weight_check_numbers(plan, &plan->matrices[m], raw, out_error);
            direct = direct && ep_weight_is_in_place(&plan->matrices[m]);
        }
    }
    ep_weight_orders orders = {{NULL}};
    if (err == EP_OK) {
        err = ep_weight_orders_init(&orders, plan, raw, out_error);
    }
    if (err == EP_OK && direct && !plan->has_places && orders.columns[EP_MATRIX_DOWN] == NULL) {
        use_in_place(plan, raw, &expert);
    } else if (err == EP_OK) {
        err = rearrange(plan, &orders, raw, room, &expert, out_error);
    }
    ep_weight_orders_fini(&orders);
    if (err == EP_OK) {
        give_config(self, is_shared, &expert.source);
        *out_expert = expert;
    }
    return err;
}

/* Errors name layer and expert, unless these do not exist. */
static ep_err plan_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                          const ep_layer_shape **out_shape, ep_expert_plan *out_plan,
                          ep_error *out_error)
{
    const ep_err err = ep_checkpoint_layer(checkpoint, layer, out_shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    const ep_layer_shape *shape = *out_shape;
    if (index >= shape->experts + shape->shared_experts) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "expert %u of layer %u, allowed 0..%u", index, layer,
                            shape->experts + shape->shared_experts - 1);
    }
    return ep_expert_plan_make(checkpoint, shape, index, out_plan, out_error);
}

static ep_err name_expert(ep_err err, uint32_t layer, uint32_t index, ep_error *out_error)
{
    if (err != EP_OK && err != EP_ERR_INVALID_ARGUMENT && out_error != NULL) {
        out_error->layer = (int32_t)layer;
        out_error->expert = (int32_t)index;
    }
    return err;
}

/* quant NULL: keep the file's format. An expert's format may differ from its layer's. */
static ep_err check_quant(const ep_weight_quant *quant, const ep_expert_plan *plan,
                          ep_error *out_error)
{
    const ep_weight_format down =
        plan->down_format == EP_WEIGHTS_NONE ? plan->format : plan->down_format;
    const bool is_good = quant == NULL || (ep_weight_format_is_float(plan->format) &&
                                           ep_weight_format_is_float(down));
    return is_good ? EP_OK
                   : ep_error_set(out_error, EP_ERR_BAD_FILE,
                                  "is %s, down %s; weight_quant %s is for bf16, f16 and f32: take "
                                  "it out",
                                  ep_weight_format_name(plan->format), ep_weight_format_name(down),
                                  quant->name);
}

static ep_err read_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                          const ep_weight_quant *quant, ep_expert_room *room,
                          ep_expert_data *out_expert, ep_error *out_error)
{
    ep_expert_plan plan;
    ep_expert_data expert;
    const ep_layer_shape *shape = NULL;
    ep_err err = plan_expert(checkpoint, layer, index, &shape, &plan, out_error);
    err = err == EP_OK ? check_quant(quant, &plan, out_error) : err;
    if (err == EP_OK) {
        err = read_planned(checkpoint, &plan, shape, index >= shape->experts, room, &expert,
                           out_error);
    }
    if (err == EP_OK && quant != NULL) {
        err = ep_expert_quantize(quant, &plan, room, &expert, out_error);
    }
    if (err == EP_OK) {
        *out_expert = expert;
    }
    return name_expert(err, layer, index, out_error);
}

/* Reads into memory of its own. */
static ep_err read_alone(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                         const ep_weight_quant *quant, ep_expert_data *out_expert,
                         ep_error *out_error)
{
    ep_expert_room room = {0};
    ep_err err = read_expert(checkpoint, layer, index, quant, &room, out_expert, out_error);
    if (err == EP_OK) {
        out_expert->allocation = room.blocks[out_expert->block].memory;
        out_expert->bytes = room.blocks[out_expert->block].bytes;
        room.blocks[out_expert->block].memory = NULL;
    }
    ep_expert_room_free(&room);
    return err;
}

ep_err ep_checkpoint_read_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                 ep_expert_data *out_expert, ep_error *out_error)
{
    return read_alone(checkpoint, layer, index, checkpoint->config.info.quant, out_expert,
                      out_error);
}

ep_err ep_checkpoint_read_expert_in(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                    ep_expert_room *room, ep_expert_data *out_expert,
                                    ep_error *out_error)
{
    return read_expert(checkpoint, layer, index, checkpoint->config.info.quant, room, out_expert,
                       out_error);
}

ep_err ep_checkpoint_read_expert_as_filed(const ep_checkpoint *checkpoint, uint32_t layer,
                                          uint32_t index, ep_expert_data *out_expert,
                                          ep_error *out_error)
{
    return read_alone(checkpoint, layer, index, NULL, out_expert, out_error);
}

ep_err ep_checkpoint_outline_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                    ep_expert_source *out_outline, ep_error *out_error)
{
    static const uint8_t there;
    ep_expert_plan plan;
    const ep_layer_shape *shape = NULL;
    const ep_weight_quant *quant = checkpoint->config.info.quant;
    ep_err err = plan_expert(checkpoint, layer, index, &shape, &plan, out_error);
    err = err == EP_OK ? check_quant(quant, &plan, out_error) : err;
    if (err != EP_OK) {
        return name_expert(err, layer, index, out_error);
    }
    *out_outline = (ep_expert_source){.hidden = shape->hidden,
                                      .inner = plan.inner,
                                      .format = plan.format,
                                      .activation = shape->activation,
                                      .places = plan.has_places ? &there : NULL};
    for (ep_matrix i = 0; i < EP_MATRIX_COUNT; i++) {
        const ep_plan_matrix *m = &plan.matrices[i];
        const ep_source_matrix matrix = ep_source_matrix_of(out_outline, i);
        const bool has_scales = quant != NULL || !ep_weight_format_is_float(m->container.format);
        *matrix.values = m->present ? &there : NULL;
        *matrix.scales = m->present && has_scales ? &there : NULL;
        *matrix.bias = m->present && m->bias >= 0 ? &there : NULL;
    }
    give_types(&plan, plan.shared_gate < 0 ? NULL : &there, out_outline);
    if (quant != NULL) {
        out_outline->format = quant->format;
        out_outline->down_format = EP_WEIGHTS_NONE;
    }
    give_config(checkpoint, index >= shape->experts, out_outline);
    return EP_OK;
}

/* ---- quantised experts ---- */

_Static_assert(EP_ARRAY_COUNT(((ep_model_info *)NULL)->files_version) + sizeof("-int8-g32") <=
                   EP_MODEL_VERSION_BYTES,
               "a version and the word of a format");

static bool is_float(ep_weight_format format)
{
    return format == EP_WEIGHTS_NONE || ep_weight_format_is_float(format);
}

static ep_err refuse(const ep_weight_quant *quant, uint32_t layer, bool is_shared,
                     ep_weight_format format, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                        "weight_quant %s is for experts in bf16, f16 or f32, and the %s ones of "
                        "layer %u are in %s already: take weight_quant out",
                        quant->name, is_shared ? "shared" : "routed", layer,
                        ep_weight_format_name(format));
}

/* Experts with invalid tensors are refused when they are read. */
static ep_err check_layer(const ep_checkpoint *self, const ep_weight_quant *quant, uint32_t place,
                          ep_error *out_error)
{
    const ep_layer_shape *shape = &self->config.info.moe_layers[place];
    const ep_layer_formats *formats = &self->config.info.layer_formats[place];
    if (!is_float(formats->format) || !is_float(formats->down_format)) {
        return refuse(quant, shape->layer, false,
                      is_float(formats->format) ? formats->down_format : formats->format,
                      out_error);
    }
    for (uint32_t s = 0; s < shape->shared_experts; s++) {
        ep_expert_source outline;
        ep_error error;
        if (ep_checkpoint_outline_expert(self, shape->layer, shape->experts + s, &outline,
                                         &error) == EP_OK &&
            (!is_float(outline.format) || !is_float(outline.down_format))) {
            return refuse(quant, shape->layer, true,
                          is_float(outline.format) ? outline.down_format : outline.format,
                          out_error);
        }
    }
    return EP_OK;
}

ep_err ep_checkpoint_quantize(ep_checkpoint *checkpoint, const ep_weight_quant *quant,
                              ep_error *out_error)
{
    ep_model_info *info = &checkpoint->config.info;
    EP_ASSERT(info->quant == NULL);
    for (uint32_t i = 0; quant != NULL && i < info->moe_layers_count; i++) {
        const ep_err err = check_layer(checkpoint, quant, i, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    if (quant != NULL) {
        info->quant = quant;
        info->format = quant->format;
        info->formats = 1u << quant->format;
        for (uint32_t i = 0; i < info->moe_layers_count; i++) {
            const ep_layer_formats file = info->layer_formats[i];
            info->layer_formats[i] =
                (ep_layer_formats){quant->format, quant->format, file.format, file.down_format};
        }
        ep_weight_quant_version(info->files_version, quant, info->version);
    }
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
            if (ep_checkpoint_outline_expert(checkpoint, shape->layer, e, &outline, &error) !=
                EP_OK) {
                survey.first = survey.unreadable == 0 ? error : survey.first;
                survey.unreadable++;
            }
        }
    }
    *out_survey = survey;
}
