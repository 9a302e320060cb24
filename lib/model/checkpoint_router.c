/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a layer's router from its tensors, and makes a gate of it. */
#include "model/checkpoint_private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/tensor_check.h"
#include "moe/convert.h"

#define HASH_ROWS_MAX 16777216

static ep_err read_widened(const ep_checkpoint_entry *entry, float **out_values,
                           ep_error *out_error)
{
    size_t bytes = ep_safetensors_tensor_bytes(entry->tensor);
    size_t count = bytes / ep_dtype_bytes(entry->tensor->dtype);
    uint8_t *raw = malloc(bytes);
    float *values = calloc(count, sizeof(values[0]));
    ep_err err;
    if (raw == NULL || values == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "tensor %.200s: no memory for %zu bytes",
                           entry->name, bytes);
    } else {
        err = ep_safetensors_read(entry->shard, entry->tensor, 0, raw, bytes, out_error);
    }
    if (err == EP_OK) {
        ep_row_widen(raw, entry->tensor->dtype, count, values);
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

/* Number of logits of the layer: routed experts, then those without weights. */
static uint32_t logits_count(const ep_checkpoint *self, const ep_layer_shape *shape)
{
    return shape->experts + self->config.info.router.zero_experts +
           self->config.info.router.copy_experts;
}

static ep_err missing(const ep_checkpoint *self, spelling_func spell, uint32_t layer,
                      ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES] = "(a router's)";
    (void)spell(&self->names, 0, layer, name);
    return ep_checkpoint_missing(self, name, out_error);
}

/* Reads a vector with one number per logit. */
static ep_err read_vector(const ep_checkpoint_entry *entry, uint32_t count, float **out_values,
                          ep_error *out_error)
{
    const ep_err err = ep_tensor_check_plain(entry, 0, count, EP_DTYPE_NONE, out_error);
    return err == EP_OK ? read_widened(entry, out_values, out_error) : err;
}

ep_err ep_checkpoint_read_router(const ep_checkpoint *checkpoint, uint32_t layer,
                                 float **out_weight, float **out_bias, ep_error *out_error)
{
    float *weight = NULL;
    float *bias = NULL;
    const ep_layer_shape *shape = NULL;
    ep_err err = ep_checkpoint_layer(checkpoint, layer, &shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    const uint32_t count = logits_count(checkpoint, shape);
    const ep_checkpoint_entry *weight_entry =
        find_spelling(checkpoint, ep_tensor_name_router, layer);
    const ep_checkpoint_entry *bias_entry =
        find_spelling(checkpoint, ep_tensor_name_router_bias, layer);
    if (weight_entry == NULL) {
        return missing(checkpoint, ep_tensor_name_router, layer, out_error);
    }
    err = ep_tensor_check_plain(weight_entry, count, checkpoint->config.info.hidden, EP_DTYPE_NONE,
                                out_error);
    if (err == EP_OK) {
        err = read_widened(weight_entry, &weight, out_error);
    }
    if (err == EP_OK && bias_entry != NULL) {
        err = read_vector(bias_entry, count, &bias, out_error);
    }
    if (err != EP_OK) {
        free(weight);
        return err;
    }
    *out_weight = weight;
    *out_bias = bias;
    return EP_OK;
}

/* Reads experts by token id, i64 or i32 [rows,K]. */
static ep_err read_table(const ep_checkpoint_entry *entry, const ep_layer_shape *shape,
                         ep_checkpoint_gate *gate, ep_error *out_error)
{
    const ep_safetensors_tensor *tensor = entry->tensor;
    const bool is_wide = strcmp(tensor->dtype_text, "I64") == 0;
    if ((!is_wide && strcmp(tensor->dtype_text, "I32") != 0) || tensor->rank != 2 ||
        tensor->shape[0] < 1 || tensor->shape[0] > HASH_ROWS_MAX ||
        tensor->shape[1] != shape->top_k) {
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE,
            "%s: tensor %.200s: allowed I64 or I32 [tokens,%" PRIu32 "], tokens 1..%d",
            ep_safetensors_name(entry->shard), entry->name, shape->top_k, HASH_ROWS_MAX);
    }
    const size_t bytes = ep_safetensors_tensor_bytes(tensor);
    const size_t count = bytes / (is_wide ? sizeof(int64_t) : sizeof(int32_t));
    uint8_t *raw = malloc(bytes);
    int32_t *table = calloc(count, sizeof(table[0]));
    ep_err err = raw == NULL || table == NULL
                     ? ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                    "tensor %.200s: no memory for %zu bytes", entry->name, bytes)
                     : ep_safetensors_read(entry->shard, tensor, 0, raw, bytes, out_error);
    for (size_t i = 0; err == EP_OK && i < count; i++) {
        int64_t id = 0;
        int32_t narrow = 0;
        memcpy(is_wide ? (void *)&id : (void *)&narrow,
               raw + i * (is_wide ? sizeof(id) : sizeof(narrow)),
               is_wide ? sizeof(id) : sizeof(narrow));
        id = is_wide ? id : narrow;
        if (id < 0 || id >= (int64_t)shape->experts) {
            err = ep_error_set(out_error, EP_ERR_BAD_FILE,
                               "%s: tensor %.200s: expert %" PRId64
                               " of token %zu, allowed 0..%" PRIu32,
                               ep_safetensors_name(entry->shard), entry->name, id, i / shape->top_k,
                               shape->experts - 1);
        }
        table[i] = (int32_t)id;
    }
    free(raw);
    if (err != EP_OK) {
        free(table);
        return err;
    }
    gate->table = table;
    gate->table_rows = (uint32_t)tensor->shape[0];
    return EP_OK;
}

static ep_err read_gate_tensors(const ep_checkpoint *self, const ep_layer_shape *shape,
                                ep_checkpoint_gate *gate, ep_error *out_error)
{
    const ep_router_info *router = &self->config.info.router;
    const uint32_t count = logits_count(self, shape);
    char name[EP_TENSOR_NAME_BYTES];
    ep_err err = EP_OK;
    const ep_checkpoint_entry *table = ep_tensor_name_router_table(&self->names, shape->layer, name)
                                           ? ep_checkpoint_entry_find(self, name)
                                           : NULL;
    if (self->config.layer_map.hash[shape->layer] && table == NULL) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "tensor %s: is missing; layer %" PRIu32 " takes its experts from it",
                            name, shape->layer);
    }
    if (table != NULL) {
        return read_table(table, shape, gate, out_error);
    }
    if (router->has_bias) {
        const ep_checkpoint_entry *bias =
            find_spelling(self, ep_tensor_name_router_bias, shape->layer);
        err = bias == NULL ? missing(self, ep_tensor_name_router_bias, shape->layer, out_error)
                           : read_vector(bias, count, &gate->bias, out_error);
    }
    if (err == EP_OK && router->has_factors) {
        const bool has_name = ep_tensor_name_router_factors(&self->names, shape->layer, name);
        const ep_checkpoint_entry *factors = has_name ? ep_checkpoint_entry_find(self, name) : NULL;
        err = factors == NULL ? ep_error_set(out_error, EP_ERR_NOT_FOUND,
                                             "tensor %s: is missing; it has the router's factors",
                                             has_name ? name : "")
                              : read_vector(factors, count, &gate->factors, out_error);
    }
    return err;
}

ep_err ep_checkpoint_read_gate(const ep_checkpoint *checkpoint, uint32_t layer,
                               ep_checkpoint_gate *out_gate, ep_error *out_error)
{
    const ep_router_info *router = &checkpoint->config.info.router;
    const ep_layer_shape *shape = NULL;
    ep_err err = ep_checkpoint_layer(checkpoint, layer, &shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (router->why_not[0] != '\0') {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "this build does not compute the router of model type '%s': %s",
                            checkpoint->config.info.model_type, router->why_not);
    }
    ep_checkpoint_gate gate = {.table = NULL};
    err = read_gate_tensors(checkpoint, shape, &gate, out_error);
    if (err != EP_OK) {
        ep_checkpoint_gate_fini(&gate);
        return err;
    }
    gate.config = (ep_gate_config){
        .struct_bytes = sizeof(gate.config),
        .experts = logits_count(checkpoint, shape),
        .top_k = shape->top_k,
        .select = router->select,
        .weight = router->weight,
        .softcap = router->softcap,
        .bias = gate.bias,
        .groups = router->groups,
        .groups_kept = router->groups_kept,
        .group_best = router->group_best,
        .group_mask = router->group_mask,
        .renormalise = router->renormalise,
        .epsilon = router->epsilon,
        .sum_min = router->sum_min,
        .scaling_factor = router->scaling_factor,
        .expert_factors = gate.factors,
        .jitter = router->jitter,
    };
    *out_gate = gate;
    return EP_OK;
}

void ep_checkpoint_gate_fini(ep_checkpoint_gate *gate)
{
    free(gate->bias);
    free(gate->factors);
    free(gate->table);
    *gate = (ep_checkpoint_gate){.table = NULL};
}
