/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading one expert: its tensors are found and checked against the config before anything is allocated, then
 * each is read straight into its place and hashed on the way, so that the bytes hashed are the bytes kept.
 */
#include "model/checkpoint_private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "base/numeric.h"

#define READ_PIECE_BYTES ((size_t)1 << 20) /* stays in cache between read and hash */
#define MATRIX_ALIGN 64
#define PARTS_MAX (EP_MATRIX_COUNT + 1)

/* An expert's tensors, found and checked. parts: gate, up, down, shared gate (shared_gate true). */
typedef struct expert_plan {
    const ep_checkpoint_entry *parts[PARTS_MAX];
    size_t parts_count;
    uint32_t inner;
    ep_dtype dtype;
} expert_plan;

static const ep_layer_shape *find_layer(const ep_checkpoint *self, uint32_t layer, uint32_t *out_shared_inner)
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

static ep_err layer_error(const ep_checkpoint *self, uint32_t layer, ep_error *out_error)
{
    const ep_model_info *info = &self->config.info;
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                        "layer %u is not an MoE layer of this model, allowed %u..%u (%u of %u layers)", layer,
                        info->moe_layers[0].layer, info->moe_layers[info->moe_layers_count - 1].layer,
                        info->moe_layers_count, info->layers_count);
}

static bool is_float(ep_dtype dtype)
{
    return dtype == EP_DTYPE_BF16 || dtype == EP_DTYPE_F16 || dtype == EP_DTYPE_F32;
}

/* rows 0: a vector, stored as [columns] or [1,columns]. */
static ep_err check_tensor(const ep_checkpoint_entry *entry, uint64_t rows, uint64_t columns, ep_dtype dtype,
                           ep_error *out_error)
{
    const ep_safetensors_tensor *tensor = entry->tensor;
    const char *file = ep_safetensors_name(entry->shard);
    if (!is_float(tensor->dtype) || (dtype != EP_DTYPE_NONE && tensor->dtype != dtype)) {
        const char *allowed = dtype == EP_DTYPE_NONE ? "BF16, F16, F32" : ep_safetensors_dtype_text(dtype);
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: dtype is %s, allowed %s", file,
                            entry->name, tensor->dtype_text, allowed);
    }
    bool fits = tensor->rank == 2 && tensor->shape[0] == rows && tensor->shape[1] == columns;
    if (rows == 0) {
        fits = (tensor->rank == 1 && tensor->shape[0] == columns) ||
               (tensor->rank == 2 && tensor->shape[0] == 1 && tensor->shape[1] == columns);
    }
    if (!fits) {
        char shape[EP_TENSOR_RANK_MAX * 21 + 3] = "[";
        size_t used = 1;
        for (uint32_t i = 0; i < tensor->rank; i++) {
            used += (size_t)snprintf(shape + used, sizeof(shape) - used, "%s%" PRIu64, i == 0 ? "" : ",",
                                     tensor->shape[i]);
        }
        if (rows == 0) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: tensor %.200s: shape is %s], allowed [%" PRIu64 "] by config.json", file,
                                entry->name, shape, columns);
        }
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: tensor %.200s: shape is %s], allowed [%" PRIu64 ",%" PRIu64
                            "] by config.json",
                            file, entry->name, shape, rows, columns);
    }
    return EP_OK;
}

/* The name of a matrix; for a shared expert in the first spelling that has any matrix, else in the first one.
 */
static void matrix_name(const ep_checkpoint *self, const ep_layer_shape *shape, uint32_t index,
                        ep_matrix matrix, const char *part, char out_name[EP_TENSOR_NAME_BYTES])
{
    if (index < shape->experts) {
        ep_tensor_name_expert(&self->names, shape->layer, index, matrix, part, out_name);
        return;
    }
    for (uint32_t spelling = 0;
         ep_tensor_name_shared(&self->names, spelling, shape->layer, 0, "weight", out_name); spelling++) {
        for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
            ep_tensor_name_shared(&self->names, spelling, shape->layer, m, "weight", out_name);
            if (ep_checkpoint_entry_find(self, out_name) != NULL) {
                ep_tensor_name_shared(&self->names, spelling, shape->layer, matrix, part, out_name);
                return;
            }
        }
    }
    ep_tensor_name_shared(&self->names, 0, shape->layer, matrix, part, out_name);
}

static ep_err plan_shared_gate(const ep_checkpoint *self, const ep_layer_shape *shape, expert_plan *plan,
                               ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    ep_tensor_name_shared_gate(&self->names, shape->layer, name);
    const ep_checkpoint_entry *entry = ep_checkpoint_entry_find(self, name);
    if (entry == NULL) {
        if (self->config.shared_gate_required) {
            return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                                "tensor %s: is missing; a %s model's shared expert has a gate", name,
                                self->config.info.model_type);
        }
        return EP_OK;
    }
    ep_err err = check_tensor(entry, 0, shape->hidden, EP_DTYPE_NONE, out_error);
    if (err == EP_OK) {
        plan->parts[plan->parts_count++] = entry;
    }
    return err;
}

static ep_err plan_expert(const ep_checkpoint *self, const ep_layer_shape *shape, uint32_t shared_inner,
                          uint32_t index, expert_plan *plan, ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    bool shared = index >= shape->experts;
    plan->inner = shared ? shared_inner : shape->inner;
    plan->dtype = self->config.info.dtype;
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        matrix_name(self, shape, index, m, "bias", name);
        if (ep_checkpoint_entry_find(self, name) != NULL) {
            return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                                "tensor %s: experts with a bias, allowed: without", name);
        }
        matrix_name(self, shape, index, m, "weight", name);
        const ep_checkpoint_entry *entry = ep_checkpoint_entry_find(self, name);
        if (entry == NULL) {
            return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                                "tensor %s: is in none of the checkpoint's %zu files", name,
                                self->shards_count);
        }
        uint64_t rows = m == EP_MATRIX_DOWN ? shape->hidden : plan->inner;
        uint64_t columns = m == EP_MATRIX_DOWN ? plan->inner : shape->hidden;
        ep_err err = check_tensor(entry, rows, columns, plan->dtype, out_error);
        if (err != EP_OK) {
            return err;
        }
        plan->dtype = entry->tensor->dtype; /* one type within an expert, also when the config states none */
        plan->parts[plan->parts_count++] = entry;
    }
    return shared ? plan_shared_gate(self, shape, plan, out_error) : EP_OK;
}

static ep_err read_hashed(const ep_checkpoint_entry *entry, uint8_t *out, EVP_MD_CTX *hash,
                          ep_error *out_error)
{
    size_t bytes = ep_safetensors_tensor_bytes(entry->tensor);
    for (size_t at = 0; at < bytes;) {
        size_t piece = bytes - at < READ_PIECE_BYTES ? bytes - at : READ_PIECE_BYTES;
        ep_err err = ep_safetensors_read(entry->shard, entry->tensor, at, out + at, piece, out_error);
        if (err != EP_OK) {
            return ep_error_prefix(out_error, err, "tensor %.200s", entry->name);
        }
        if (EVP_DigestUpdate(hash, out + at, piece) != 1) {
            return ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
        }
        at += piece;
    }
    return EP_OK;
}

static ep_err read_parts(const expert_plan *plan, uint8_t *const *places, uint8_t out_digest[EP_SHA256_BYTES],
                         ep_error *out_error)
{
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    if (hash == NULL || EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(hash);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "SHA-256 is not available from libcrypto");
    }
    ep_err err = EP_OK;
    for (size_t i = 0; err == EP_OK && i < plan->parts_count; i++) {
        err = read_hashed(plan->parts[i], places[i], hash, out_error);
    }
    if (err == EP_OK && EVP_DigestFinal_ex(hash, out_digest, NULL) != 1) {
        err = ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
    }
    EVP_MD_CTX_free(hash);
    return err;
}

/* One block for all parts, each on its own cache line. Their sizes are those of tensors inside checked files.
 */
static ep_err allocate_parts(const expert_plan *plan, uint8_t *places[PARTS_MAX], size_t *out_bytes,
                             ep_error *out_error)
{
    size_t offsets[PARTS_MAX] = {0};
    size_t total = 0;
    bool fits = true;
    for (size_t i = 0; i < plan->parts_count; i++) {
        offsets[i] = total;
        fits = fits && ep_add_size(total, ep_safetensors_tensor_bytes(plan->parts[i]->tensor), &total) &&
               total <= SIZE_MAX - MATRIX_ALIGN;
        total = fits ? ep_align_up(total, MATRIX_ALIGN) : total;
    }
    uint8_t *block = fits ? aligned_alloc(MATRIX_ALIGN, total) : NULL;
    if (block == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes", total);
    }
    for (size_t i = 0; i < plan->parts_count; i++) {
        places[i] = block + offsets[i];
    }
    *out_bytes = total;
    return EP_OK;
}

static ep_err read_planned(const expert_plan *plan, const ep_layer_shape *shape, ep_expert_data *out_expert,
                           ep_error *out_error)
{
    uint8_t *places[PARTS_MAX] = {NULL};
    ep_expert_data expert = {.source = {.hidden = shape->hidden,
                                        .inner = plan->inner,
                                        .format = ep_weight_format_of(plan->dtype),
                                        .activation = shape->activation}};
    ep_err err = allocate_parts(plan, places, &expert.bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = read_parts(plan, places, expert.sha256, out_error);
    if (err != EP_OK) {
        free(places[0]);
        return err;
    }
    expert.allocation = places[0];
    expert.source.gate = places[EP_MATRIX_GATE];
    expert.source.up = places[EP_MATRIX_UP];
    expert.source.down = places[EP_MATRIX_DOWN];
    if (plan->parts_count > EP_MATRIX_COUNT) {
        expert.source.shared_gate = places[EP_MATRIX_COUNT];
        expert.source.shared_gate_dtype = plan->parts[EP_MATRIX_COUNT]->tensor->dtype;
    }
    *out_expert = expert;
    return EP_OK;
}

ep_err ep_checkpoint_read_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t index,
                                 ep_expert_data *out_expert, ep_error *out_error)
{
    expert_plan plan = {0};
    uint32_t shared_inner = 0;
    const ep_layer_shape *shape = find_layer(checkpoint, layer, &shared_inner);
    if (shape == NULL) {
        return layer_error(checkpoint, layer, out_error);
    }
    if (index >= shape->experts + shape->shared_experts) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "expert %u of layer %u, allowed 0..%u", index,
                            layer, shape->experts + shape->shared_experts - 1);
    }
    ep_err err = plan_expert(checkpoint, shape, shared_inner, index, &plan, out_error);
    if (err == EP_OK) {
        err = read_planned(&plan, shape, out_expert, out_error);
    }
    if (err != EP_OK && out_error != NULL) {
        out_error->layer = (int32_t)layer;
        out_error->expert = (int32_t)index;
    }
    return err;
}

void ep_expert_data_free(ep_expert_data *expert)
{
    if (expert != NULL) {
        free(expert->allocation);
        *expert = (ep_expert_data){0};
    }
}

static void widen(const uint8_t *raw, ep_dtype dtype, size_t count, float *out)
{
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        if (dtype == EP_DTYPE_F32) {
            memcpy(&out[i], raw + 4 * i, sizeof(out[i]));
            continue;
        }
        memcpy(&half, raw + 2 * i, sizeof(half));
        out[i] = dtype == EP_DTYPE_BF16 ? ep_bf16_to_f32(half) : ep_f16_to_f32(half);
    }
}

static ep_err read_widened(const ep_checkpoint_entry *entry, float **out_values, ep_error *out_error)
{
    size_t bytes = ep_safetensors_tensor_bytes(entry->tensor);
    size_t count = bytes / ep_dtype_bytes(entry->tensor->dtype);
    uint8_t *raw = malloc(bytes);
    float *values = calloc(count, sizeof(values[0]));
    ep_err err;
    if (raw == NULL || values == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "tensor %.200s: no memory for %zu bytes", entry->name,
                           bytes);
    } else {
        err = ep_safetensors_read(entry->shard, entry->tensor, 0, raw, bytes, out_error);
    }
    if (err == EP_OK) {
        widen(raw, entry->tensor->dtype, count, values);
        *out_values = values;
        values = NULL;
    }
    free(raw);
    free(values);
    return err;
}

typedef bool (*spelling_func)(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                              char out_name[EP_TENSOR_NAME_BYTES]);

static const ep_checkpoint_entry *find_spelling(const ep_checkpoint *self, spelling_func spell,
                                                uint32_t layer)
{
    char name[EP_TENSOR_NAME_BYTES];
    const ep_checkpoint_entry *entry = NULL;
    for (uint32_t s = 0; entry == NULL && spell(&self->names, s, layer, name); s++) {
        entry = ep_checkpoint_entry_find(self, name);
    }
    return entry;
}

ep_err ep_checkpoint_read_router(const ep_checkpoint *checkpoint, uint32_t layer, float **out_weight,
                                 float **out_bias, ep_error *out_error)
{
    uint32_t shared_inner = 0;
    float *weight = NULL;
    float *bias = NULL;
    const ep_layer_shape *shape = find_layer(checkpoint, layer, &shared_inner);
    if (shape == NULL) {
        return layer_error(checkpoint, layer, out_error);
    }
    const ep_checkpoint_entry *weight_entry = find_spelling(checkpoint, ep_tensor_name_router, layer);
    const ep_checkpoint_entry *bias_entry = find_spelling(checkpoint, ep_tensor_name_router_bias, layer);
    if (weight_entry == NULL) {
        char name[EP_TENSOR_NAME_BYTES];
        ep_tensor_name_router(&checkpoint->names, 0, layer, name);
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "tensor %s: is in none of the checkpoint's %zu files", name,
                            checkpoint->shards_count);
    }
    ep_err err = check_tensor(weight_entry, shape->experts, shape->hidden, EP_DTYPE_NONE, out_error);
    if (err == EP_OK && bias_entry != NULL) {
        err = check_tensor(bias_entry, 0, shape->experts, EP_DTYPE_NONE, out_error);
    }
    if (err == EP_OK) {
        err = read_widened(weight_entry, &weight, out_error);
    }
    if (err == EP_OK && bias_entry != NULL) {
        err = read_widened(bias_entry, &bias, out_error);
    }
    if (err != EP_OK) {
        free(weight);
        return err;
    }
    *out_weight = weight;
    *out_bias = bias;
    return EP_OK;
}
