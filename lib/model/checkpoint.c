/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a checkpoint: config, index, all headers, and checks between them. */
#include "model/checkpoint_private.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "model/expert_plan.h"
#include "model/gguf.h"
#include "model/mirror.h"
#include "model/shard_index.h"

#define SINGLE_FILE_NAME "model.safetensors"

static int compare_name_with(const void *name, const void *entry)
{
    return strcmp(name, ((const ep_checkpoint_entry *)entry)->name);
}

const ep_checkpoint_entry *ep_checkpoint_entry_find(const ep_checkpoint *checkpoint,
                                                    const char *name)
{
    if (checkpoint->entries_count == 0) {
        return NULL;
    }
    return bsearch(name, checkpoint->entries, checkpoint->entries_count,
                   sizeof(checkpoint->entries[0]), compare_name_with);
}

ep_err ep_checkpoint_missing(const ep_checkpoint *self, const char *name, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                        "tensor %.200s: is in none of the checkpoint's %zu files", name,
                        self->shards_count);
}

ep_err ep_checkpoint_layer(const ep_checkpoint *self, uint32_t layer,
                           const ep_layer_shape **out_shape, ep_error *out_error)
{
    const ep_model_info *info = &self->config.info;
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        if (info->moe_layers[i].layer == layer) {
            *out_shape = &info->moe_layers[i];
            return EP_OK;
        }
    }
    return ep_error_set(
        out_error, EP_ERR_INVALID_ARGUMENT,
        "layer %u is not an MoE layer of this model, allowed %u..%u (%u of %u layers)", layer,
        info->moe_layers[0].layer, info->moe_layers[info->moe_layers_count - 1].layer,
        info->moe_layers_count, info->layers_count);
}

static bool tensor_exists(const char *name, void *arg)
{
    return ep_checkpoint_entry_find(arg, name) != NULL;
}

/* The file stays open, since other nodes may ask for it. */
static ep_err read_text(ep_checkpoint *self, const ep_model_dir *dir, const char *name,
                        size_t bytes_max, char **out_text, size_t *out_count, ep_error *out_error)
{
    ep_model_file file;
    ep_err err = ep_model_file_open(dir, name, &file, out_error);
    if (err != EP_OK) {
        return err;
    }
    EP_ASSERT(self->texts_count < EP_ARRAY_COUNT(self->texts));
    self->texts[self->texts_count++] = file;
    return ep_model_file_read_all(&file, bytes_max, out_text, out_count, out_error);
}

static ep_err sha256(const void *bytes, size_t count, uint8_t out[EP_SHA256_BYTES],
                     ep_error *out_error)
{
    if (EVP_Digest(bytes, count, out, NULL, EVP_sha256(), NULL) != 1) {
        return ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 is not available from libcrypto");
    }
    return EP_OK;
}

static void hex16(const uint8_t *digest, char out[17])
{
    for (size_t i = 0; i < 8; i++) {
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
    }
}

/* Takes the text of the config, which was read from `name`. */
static ep_err take_config(ep_checkpoint *self, const char *name, const char *text, size_t count,
                          uint8_t out_digest[EP_SHA256_BYTES], ep_error *out_error)
{
    ep_err err = ep_model_config_parse(name, text, count, &self->config, out_error);
    err = err == EP_OK ? sha256(text, count, out_digest, out_error) : err;
    if (err == EP_OK) {
        hex16(out_digest, self->config.info.config_hash);
    }
    return err;
}

static ep_err load_config(ep_checkpoint *self, const ep_model_dir *dir,
                          uint8_t out_digest[EP_SHA256_BYTES], ep_error *out_error)
{
    char *text = NULL;
    size_t count = 0;
    ep_err err = read_text(self, dir, EP_MODEL_CONFIG_NAME, EP_MODEL_CONFIG_BYTES_MAX, &text,
                           &count, out_error);
    err = err == EP_OK ? take_config(self, EP_MODEL_CONFIG_NAME, text, count, out_digest, out_error)
                       : err;
    free(text);
    return err;
}

/* Reads the first file's keys instead of a config.json. */
static ep_err load_gguf_config(ep_checkpoint *self, uint8_t out_digest[EP_SHA256_BYTES],
                               ep_error *out_error)
{
    char *text = NULL;
    const char *name = ep_safetensors_name(self->shards[0]);
    ep_err err = ep_gguf_config(name, ep_safetensors_keys(self->shards[0]), &text, out_error);
    err = err == EP_OK ? take_config(self, name, text, strlen(text), out_digest, out_error) : err;
    free(text);
    return err;
}

static ep_err make_shards(ep_checkpoint *self, size_t count, ep_error *out_error)
{
    self->shards = calloc(count, sizeof(self->shards[0]));
    return self->shards != NULL
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu files", count);
}

static ep_err make_entries(ep_checkpoint *self, size_t count, ep_error *out_error)
{
    self->entries = calloc(count > 0 ? count : 1, sizeof(self->entries[0]));
    return self->entries != NULL
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %zu tensors", count);
}

static ep_err open_shards(ep_checkpoint *self, const ep_model_dir *dir, const ep_shard_index *index,
                          ep_error *out_error)
{
    ep_err err = make_shards(self, index->shards_count, out_error);
    for (size_t i = 0; err == EP_OK && i < index->shards_count; i++) {
        err = ep_safetensors_open(dir, index->shards[i], &self->shards[i], out_error);
        self->shards_count += err == EP_OK ? 1 : 0;
    }
    return err == EP_ERR_NOT_FOUND
               ? ep_error_prefix(out_error, err, "%s names a file that is missing",
                                 EP_SHARD_INDEX_NAME)
               : err;
}

/* Takes the tensors that the index lists; each must be in the header of its file. */
static ep_err collect_indexed(ep_checkpoint *self, const ep_shard_index *index, ep_error *out_error)
{
    const ep_err err = make_entries(self, index->entries_count, out_error);
    for (size_t i = 0; err == EP_OK && i < index->entries_count; i++) {
        const ep_shard_entry *named = &index->entries[i];
        const ep_safetensors *shard = self->shards[named->shard];
        const ep_safetensors_tensor *tensor = ep_safetensors_find(shard, named->tensor);
        if (tensor == NULL) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: tensor %.200s: is not in %s, which the index names for it",
                                EP_SHARD_INDEX_NAME, named->tensor, ep_safetensors_name(shard));
        }
        self->entries[self->entries_count++] = (ep_checkpoint_entry){tensor->name, shard, tensor};
    }
    return err;
}

static ep_err load_sharded(ep_checkpoint *self, const ep_model_dir *dir, ep_error *out_error)
{
    ep_shard_index index = {0};
    char *text = NULL;
    size_t count = 0;
    ep_err err = read_text(self, dir, EP_SHARD_INDEX_NAME, EP_SHARD_INDEX_BYTES_MAX, &text, &count,
                           out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_shard_index_parse(EP_SHARD_INDEX_NAME, text, count, &index, out_error);
    free(text);
    err = err == EP_OK ? open_shards(self, dir, &index, out_error) : err;
    err = err == EP_OK ? collect_indexed(self, &index, out_error) : err;
    ep_shard_index_fini(&index);
    return err;
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const ep_checkpoint_entry *)a)->name, ((const ep_checkpoint_entry *)b)->name);
}

/* Takes all tensors of all files. */
static ep_err collect_all(ep_checkpoint *self, ep_error *out_error)
{
    size_t count = 0;
    for (size_t i = 0; i < self->shards_count; i++) {
        count += ep_safetensors_count(self->shards[i]);
    }
    const ep_err err = make_entries(self, count, out_error);
    if (err != EP_OK) {
        return err;
    }
    for (size_t i = 0; i < self->shards_count; i++) {
        for (size_t t = 0; t < ep_safetensors_count(self->shards[i]); t++) {
            const ep_safetensors_tensor *tensor = ep_safetensors_at(self->shards[i], t);
            self->entries[self->entries_count++] =
                (ep_checkpoint_entry){tensor->name, self->shards[i], tensor};
        }
    }
    qsort(self->entries, self->entries_count, sizeof(self->entries[0]), compare_entries);
    for (size_t i = 1; i < self->entries_count; i++) {
        if (strcmp(self->entries[i - 1].name, self->entries[i].name) == 0) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: tensor %.200s: is in %s too",
                                ep_safetensors_name(self->entries[i].shard), self->entries[i].name,
                                ep_safetensors_name(self->entries[i - 1].shard));
        }
    }
    return EP_OK;
}

static ep_err load_single(ep_checkpoint *self, const ep_model_dir *dir, ep_error *out_error)
{
    ep_err err = make_shards(self, 1, out_error);
    if (err == EP_OK) {
        err = ep_safetensors_open(dir, SINGLE_FILE_NAME, &self->shards[0], out_error);
    }
    if (err == EP_ERR_NOT_FOUND) {
        return ep_error_set(out_error, err, "neither %s nor %s is in %.300s", EP_SHARD_INDEX_NAME,
                            SINGLE_FILE_NAME, dir->path);
    }
    self->shards_count = err == EP_OK ? 1 : 0;
    return err == EP_OK ? collect_all(self, out_error) : err;
}

static ep_err load_gguf(ep_checkpoint *self, const ep_model_dir *dir, const ep_gguf_files *files,
                        uint8_t out_digest[EP_SHA256_BYTES], ep_error *out_error)
{
    ep_err err = make_shards(self, files->count, out_error);
    for (uint32_t i = 0; err == EP_OK && i < files->count; i++) {
        char name[EP_MODEL_FILE_NAME_BYTES];
        ep_gguf_files_name(files, i, name);
        err = ep_safetensors_open(dir, name, &self->shards[i], out_error);
        self->shards_count += err == EP_OK ? 1 : 0;
        if (err == EP_OK && ep_safetensors_keys(self->shards[i]) == NULL) {
            err = ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: does not begin with GGUF", name);
        }
        err = err == EP_OK
                  ? ep_gguf_files_check(files, i, ep_safetensors_keys(self->shards[i]), out_error)
                  : err;
    }
    err = err == EP_OK ? load_gguf_config(self, out_digest, out_error) : err;
    return err == EP_OK ? collect_all(self, out_error) : err;
}

static ep_err load_tensors(ep_checkpoint *self, const ep_model_dir *dir, ep_error *out_error)
{
    ep_error index_error;
    ep_error_clear(&index_error);
    ep_err err = load_sharded(self, dir, &index_error);
    if (err == EP_ERR_NOT_FOUND && self->shards == NULL) { /* no index */
        return load_single(self, dir, out_error);
    }
    if (err != EP_OK && out_error != NULL) {
        *out_error = index_error;
    }
    return err;
}

/* The file that contains the config. */
static const char *config_name(const ep_checkpoint *self)
{
    const bool is_gguf = self->shards_count > 0 && ep_safetensors_keys(self->shards[0]) != NULL;
    return is_gguf ? ep_safetensors_name(self->shards[0]) : EP_MODEL_CONFIG_NAME;
}

/* ---- which layers have experts, and what else is beside them ---- */

/* Removes the layers without experts from the model's list. */
static void drop_layers(ep_model_info *info, const bool *has_experts)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        if (has_experts[info->moe_layers[i].layer]) {
            info->moe_layers[kept] = info->moe_layers[i];
            info->shared_inner[kept] = info->shared_inner[i];
            info->numbers[kept] = info->numbers[i];
            kept++;
        }
    }
    info->moe_layers_count = kept;
}

/* Refuses a layer whose experts have other names than those of the others, which would make it a
 * layer without experts. */
static ep_err refuse_other_names(const ep_checkpoint *self, const bool *has_experts,
                                 ep_error *out_error)
{
    for (size_t i = 0; i < self->entries_count; i++) {
        const char *name = self->entries[i].name;
        uint32_t layer = UINT32_MAX;
        const ep_tensor_role role = ep_tensor_name_role(&self->names, name, &layer);
        const bool is_other = role == EP_TENSOR_ELSEWHERE || role == EP_TENSOR_UNKNOWN;
        if (is_other && layer < self->config.info.layers_count && !has_experts[layer] &&
            (strstr(name, ".experts.") != NULL || strstr(name, "_exps.") != NULL)) {
            return ep_error_set(
                out_error, EP_ERR_UNIMPLEMENTED,
                "%s: tensor %.200s: is of an expert, and the experts of other layers are called "
                "otherwise, allowed one way",
                ep_safetensors_name(self->entries[i].shard), name);
        }
    }
    return EP_OK;
}

/* Where no key of the config says which layers have experts, the files decide; else both must
 * agree. */
static ep_err settle_layers(ep_checkpoint *self, ep_error *out_error)
{
    ep_model_info *info = &self->config.info;
    const ep_layer_map *map = &self->config.layer_map;
    bool has_experts[EP_MODEL_LAYERS_MAX] = {false};
    char name[EP_TENSOR_NAME_BYTES];
    for (size_t i = 0; i < self->entries_count; i++) {
        uint32_t layer = 0;
        if (ep_tensor_name_role(&self->names, self->entries[i].name, &layer) == EP_TENSOR_EXPERT &&
            layer < info->layers_count) {
            has_experts[layer] = true;
            if (map->keys[0] != '\0' && !map->moe[layer]) {
                return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                    "%s: layer %u is no MoE layer by %s, but tensor %.200s exists",
                                    config_name(self), layer, map->keys, self->entries[i].name);
            }
        }
    }
    for (uint32_t i = 0; i < info->moe_layers_count && map->keys[0] != '\0'; i++) {
        const uint32_t layer = info->moe_layers[i].layer;
        if (!has_experts[layer]) {
            ep_tensor_name_expert(&self->names, layer, 0, EP_MATRIX_DOWN, "weight", name);
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: layer %u is an MoE layer by %s, but no expert of it is there, "
                                "not even tensor %s",
                                config_name(self), layer, map->keys, name);
        }
    }
    drop_layers(info, has_experts);
    return refuse_other_names(self, has_experts, out_error);
}

static bool is_beside(const ep_checkpoint *self, const char *name)
{
    const ep_model_type *type = self->config.type;
    for (size_t i = 0; type != NULL && i < EP_TYPE_BESIDE_MAX && type->beside[i] != NULL; i++) {
        if (ep_tensor_name_has_tail(&self->names, name, type->beside[i])) {
            return true;
        }
    }
    return false;
}

/* Refuses tensors in the experts' block that nothing here reads: they may change the results. */
static ep_err check_beside(const ep_checkpoint *self, ep_error *out_error)
{
    const ep_model_info *info = &self->config.info;
    bool is_moe[EP_MODEL_LAYERS_MAX] = {false};
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        is_moe[info->moe_layers[i].layer] = true;
    }
    for (size_t i = 0; i < self->entries_count; i++) {
        uint32_t layer = 0;
        const char *name = self->entries[i].name;
        if (ep_tensor_name_role(&self->names, name, &layer) == EP_TENSOR_UNKNOWN &&
            layer < info->layers_count && is_moe[layer] && !is_beside(self, name)) {
            return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                                "tensor %.200s is beside the experts of layer %u, and this build "
                                "does not know what it "
                                "does in model type '%s'",
                                name, layer, info->model_type);
        }
    }
    return EP_OK;
}

/* Refuses tensors that the config does not mention: results would silently lack them. */
static ep_err check_against_tensors(const ep_checkpoint *self, ep_error *out_error)
{
    const ep_model_info *info = &self->config.info;
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_shape *shape = &info->moe_layers[i];
        ep_tensor_name_expert(&self->names, shape->layer, shape->experts, EP_MATRIX_DOWN, "weight",
                              name);
        if (!ep_tensor_names_stacked(&self->names) &&
            ep_checkpoint_entry_find(self, name) != NULL) {
            return ep_error_set(out_error, EP_ERR_BAD_FILE,
                                "%s: layer %u has %u experts by its config, but tensor %s exists; "
                                "allowed experts 0..%u",
                                config_name(self), shape->layer, shape->experts, name,
                                shape->experts - 1);
        }
        if (shape->shared_experts > 0 &&
            !ep_tensor_name_shared(&self->names, 0, shape->layer, EP_MATRIX_DOWN, "weight", name)) {
            ep_tensor_name_expert(&self->names, shape->layer, 0, EP_MATRIX_DOWN, "weight", name);
            return ep_error_set(
                out_error, EP_ERR_UNIMPLEMENTED,
                "%s: layer %u has %u shared experts by its config (n_shared_experts, "
                "shared_expert_intermediate_size), but checkpoints whose experts are tensors %s "
                "have no known names for those; allowed 0",
                config_name(self), shape->layer, shape->shared_experts, name);
        }
        const bool is_callers =
            shape->hidden != info->hidden || /* the shared expert works on the full width */
            (self->config.type != NULL && (self->config.type->marks & EP_TYPE_SHARED_CALLERS));
        for (uint32_t s = 0; shape->shared_experts == 0 && !is_callers; s++) {
            if (!ep_tensor_name_shared(&self->names, s, shape->layer, EP_MATRIX_DOWN, "weight",
                                       name)) {
                break;
            }
            if (ep_checkpoint_entry_find(self, name) != NULL) {
                return ep_error_set(
                    out_error, EP_ERR_BAD_FILE,
                    "%s: layer %u has no shared expert by its config (n_shared_experts, "
                    "shared_expert_intermediate_size), but tensor %s exists",
                    config_name(self), shape->layer, name);
            }
        }
    }
    return EP_OK;
}

/*
 * For experts of a latent width, takes the width from the tensor of the projection down to it. The
 * projections to and from it, and the shared expert, stay with the caller.
 */
static ep_err apply_latent_width(ep_checkpoint *self, ep_error *out_error)
{
    static const char *const down[] = {"block_sparse_moe.routed_expert_down_proj.weight",
                                       "mixer.fc1_latent_proj.weight"};
    ep_model_info *info = &self->config.info;
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        ep_layer_shape *shape = &info->moe_layers[i];
        const ep_checkpoint_entry *entry = NULL;
        for (size_t d = 0; d < EP_ARRAY_COUNT(down) && entry == NULL; d++) {
            snprintf(name, sizeof(name), "%slayers.%u.%s", self->names.prefix, shape->layer,
                     down[d]);
            entry = ep_checkpoint_entry_find(self, name);
        }
        if (entry == NULL) {
            continue;
        }
        const uint64_t width = entry->tensor->rank == 2 ? entry->tensor->shape[0] : 0;
        if (width < 1 || width > EP_HIDDEN_MAX || entry->tensor->shape[1] != info->hidden) {
            return ep_error_set(
                out_error, EP_ERR_BAD_FILE, "%s: tensor %s: shape is not [latent,%u], latent 1..%u",
                ep_safetensors_name(entry->shard), name, info->hidden, EP_HIDDEN_MAX);
        }
        shape->hidden = (uint32_t)width;
        shape->shared_experts = 0;
        info->shared_inner[i] = 0;
    }
    return EP_OK;
}

/* Whether any expert of the first MoE layer has the matrix, in any form. */
static bool any_expert_has(const ep_checkpoint *self, ep_matrix matrix)
{
    static const char *const parts[] = {"weight", "weight_packed", "qweight", "blocks"};
    const ep_layer_shape *shape = &self->config.info.moe_layers[0];
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t e = 0; e < shape->experts; e++) {
        for (size_t p = 0; p < EP_ARRAY_COUNT(parts); p++) {
            ep_tensor_name_expert(&self->names, shape->layer, e, matrix, parts[p], name);
            if (ep_checkpoint_entry_find(self, name) != NULL) {
                return true;
            }
        }
    }
    return false;
}

/* Configs name the activation function but not whether there is a gate; the tensors show that. */
static ep_err settle_gate(ep_checkpoint *self, ep_error *out_error)
{
    static const ep_activation without[][2] = {{EP_ACT_SILU, EP_ACT_SILU_NO_GATE},
                                               {EP_ACT_GELU, EP_ACT_GELU_NO_GATE},
                                               {EP_ACT_GELU_TANH, EP_ACT_GELU_TANH_NO_GATE}};
    ep_model_info *info = &self->config.info;
    const ep_activation stated = info->moe_layers[0].activation;
    ep_activation activation = stated;
    bool has_gate =
        self->names.family == EP_NAMES_GGUF || /* true of all its architectures that can be read */
        any_expert_has(self, EP_MATRIX_GATE) || !any_expert_has(self, EP_MATRIX_UP);
    for (size_t i = 0; !has_gate && i < EP_ARRAY_COUNT(without); i++) {
        activation = stated == without[i][0] ? without[i][1] : activation;
    }
    if (has_gate && !ep_activation_has_gate(stated) && !ep_tensor_names_fused(&self->names)) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "%s: hidden_act stands for %s, but layer %u has experts with a gate matrix",
            config_name(self), ep_activation_name(stated), info->moe_layers[0].layer);
    }
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        info->moe_layers[i].activation = activation;
    }
    return EP_OK;
}

/* The formats of a layer, by its first readable expert, so that a bad one does not hide them. */
static ep_layer_formats formats_of(const ep_checkpoint *self, const ep_layer_shape *shape,
                                   ep_layer_formats unknown)
{
    ep_expert_plan plan;
    for (uint32_t e = 0; e < shape->experts; e++) {
        if (ep_expert_plan_make(self, shape, e, &plan, NULL) == EP_OK) {
            return (ep_layer_formats){
                plan.format, plan.down_format == EP_WEIGHTS_NONE ? plan.format : plan.down_format,
                EP_WEIGHTS_NONE, EP_WEIGHTS_NONE};
        }
    }
    return unknown;
}

static ep_err infer_formats(ep_checkpoint *self, ep_error *out_error)
{
    ep_model_info *info = &self->config.info;
    const ep_weight_format stated = ep_weight_format_of(info->dtype);
    info->layer_formats = calloc(info->moe_layers_count, sizeof(info->layer_formats[0]));
    if (info->layer_formats == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %u layers",
                            info->moe_layers_count);
    }
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_formats unknown =
            i == 0 ? (ep_layer_formats){stated, stated, EP_WEIGHTS_NONE, EP_WEIGHTS_NONE}
                   : info->layer_formats[i - 1];
        info->layer_formats[i] = formats_of(self, &info->moe_layers[i], unknown);
        info->formats |=
            1u << info->layer_formats[i].format | 1u << info->layer_formats[i].down_format;
    }
    info->format = info->layer_formats[0].format;
    if (info->dtype == EP_DTYPE_NONE) {
        info->dtype = ep_weight_format_dtype(info->format);
    }
    return EP_OK;
}

/* SHA-256 over the config's digest, then each file's size and identity digest, ordered by name. */
static ep_err hash_version(ep_checkpoint *self, const uint8_t *config_digest, ep_error *out_error)
{
    size_t record = sizeof(uint64_t) + EP_SAFETENSORS_DIGEST_BYTES;
    size_t count = EP_SHA256_BYTES + self->shards_count * record;
    uint8_t digest[EP_SHA256_BYTES];
    uint8_t *bytes = malloc(count);
    if (bytes == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "allocation failed");
    }
    memcpy(bytes, config_digest, EP_SHA256_BYTES);
    for (size_t i = 0; i < self->shards_count; i++) {
        uint8_t *at = bytes + EP_SHA256_BYTES + i * record;
        uint64_t size = ep_safetensors_bytes(self->shards[i]);
        for (size_t b = 0; b < sizeof(size); b++) {
            at[b] = (uint8_t)(size >> (8 * b));
        }
        memcpy(at + sizeof(size), ep_safetensors_identity_digest(self->shards[i]),
               EP_SAFETENSORS_DIGEST_BYTES);
    }
    ep_err err = sha256(bytes, count, digest, out_error);
    free(bytes);
    if (err == EP_OK) {
        hex16(digest, self->config.info.files_version);
        strcpy(self->config.info.version, self->config.info.files_version);
    }
    return err;
}

static ep_err load(ep_checkpoint *self, const ep_model_dir *dir, const ep_gguf_files *gguf,
                   ep_error *out_error)
{
    uint8_t config_digest[EP_SHA256_BYTES];
    ep_err err;
    if (gguf->count > 0) {
        err = load_gguf(self, dir, gguf, config_digest, out_error);
    } else {
        err = load_config(self, dir, config_digest, out_error);
        err = err == EP_OK ? load_tensors(self, dir, out_error) : err;
    }
    if (err == EP_OK) {
        const bool alternates =
            self->config.type != NULL && (self->config.type->marks & EP_TYPE_ALTERNATES);
        err = ep_tensor_names_probe(&self->config.info, tensor_exists, self, alternates,
                                    &self->names, out_error);
        self->config.info.names = self->names.family;
    }
    err = err == EP_OK ? settle_layers(self, out_error) : err;
    err = err == EP_OK ? check_beside(self, out_error) : err;
    err = err == EP_OK ? apply_latent_width(self, out_error) : err;
    err = err == EP_OK ? settle_gate(self, out_error) : err;
    err = err == EP_OK ? check_against_tensors(self, out_error) : err;
    err = err == EP_OK ? infer_formats(self, out_error) : err;
    err = err == EP_OK ? hash_version(self, config_digest, out_error) : err;
    return err;
}

/* Takes dir, which is closed. */
static ep_err open_in(const char *path, ep_model_dir *dir, const ep_gguf_files *gguf,
                      ep_checkpoint **out_checkpoint, ep_error *out_error)
{
    ep_err err;
    ep_checkpoint *self = calloc(1, sizeof(*self));
    if (self == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: allocation failed", path);
    } else {
        err = load(self, dir, gguf, out_error);
    }
    ep_model_dir_close(dir);
    if (err != EP_OK) {
        ep_checkpoint_close(self);
        return err;
    }
    *out_checkpoint = self;
    return EP_OK;
}

ep_err ep_checkpoint_open(const char *path, ep_checkpoint **out_checkpoint, ep_error *out_error)
{
    ep_model_dir dir;
    ep_gguf_files gguf;
    const ep_err err = ep_gguf_files_find(path, &dir, &gguf, out_error);
    return err == EP_OK ? open_in(path, &dir, &gguf, out_checkpoint, out_error) : err;
}

ep_err ep_checkpoint_open_mirror(ep_mirror *mirror, ep_checkpoint **out_checkpoint,
                                 ep_error *out_error)
{
    const char *path = ep_mirror_path(mirror);
    ep_model_dir dir;
    ep_gguf_files gguf = {.count = 0};
    ep_checkpoint *checkpoint = NULL;
    ep_err err = ep_model_dir_open(path, &dir, out_error);
    if (err != EP_OK) {
        return err;
    }
    dir.mirror = mirror;
    err = ep_gguf_files_find_in(&dir, &gguf, out_error);
    if (err != EP_OK) {
        ep_model_dir_close(&dir);
        return err;
    }
    err = open_in(path, &dir, &gguf, &checkpoint, out_error);
    if (err == EP_OK && strcmp(checkpoint->config.info.version, ep_mirror_version(mirror)) != 0) {
        err = ep_error_set(out_error, EP_ERR_BAD_FILE,
                           "%s: its files are version %s, and were said to be %s; empty it, and "
                           "all is fetched again",
                           path, checkpoint->config.info.version, ep_mirror_version(mirror));
        ep_checkpoint_close(checkpoint);
    }
    if (err == EP_OK) {
        *out_checkpoint = checkpoint;
    }
    return err;
}

void ep_checkpoint_close(ep_checkpoint *checkpoint)
{
    if (checkpoint == NULL) {
        return;
    }
    for (size_t i = 0; i < checkpoint->shards_count; i++) {
        ep_safetensors_close(checkpoint->shards[i]);
    }
    for (size_t i = 0; i < checkpoint->texts_count; i++) {
        ep_model_file_close(&checkpoint->texts[i]);
    }
    free(checkpoint->shards);
    free(checkpoint->entries);
    ep_model_config_fini(&checkpoint->config);
    free(checkpoint);
}

const ep_model_info *ep_checkpoint_info(const ep_checkpoint *checkpoint)
{
    return &checkpoint->config.info;
}

ep_err ep_checkpoint_find(const ep_checkpoint *checkpoint, const char *name,
                          ep_tensor_info *out_info, ep_error *out_error)
{
    const ep_checkpoint_entry *entry = ep_checkpoint_entry_find(checkpoint, name);
    if (entry == NULL) {
        return ep_checkpoint_missing(checkpoint, name, out_error);
    }
    ep_tensor_info info = {
        .name = entry->name,
        .dtype = entry->tensor->dtype,
        .rank = entry->tensor->rank,
        .bytes = ep_safetensors_tensor_bytes(entry->tensor),
    };
    for (uint32_t i = 0; i < info.rank; i++) {
        info.shape[i] = (int64_t)entry->tensor->shape[i]; /* was checked to be 0..2^63-1 */
    }
    *out_info = info;
    return EP_OK;
}

ep_err ep_checkpoint_read(const ep_checkpoint *checkpoint, const char *name, void *out,
                          size_t bytes, ep_error *out_error)
{
    const ep_checkpoint_entry *entry = ep_checkpoint_entry_find(checkpoint, name);
    if (entry == NULL) {
        return ep_checkpoint_missing(checkpoint, name, out_error);
    }
    if (bytes != ep_safetensors_tensor_bytes(entry->tensor)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "tensor %.200s: %zu bytes of room, allowed exactly %zu", name, bytes,
                            ep_safetensors_tensor_bytes(entry->tensor));
    }
    ep_err err = ep_safetensors_read(entry->shard, entry->tensor, 0, out, bytes, out_error);
    return err == EP_OK ? EP_OK : ep_error_prefix(out_error, err, "tensor %.200s", name);
}

size_t ep_checkpoint_files_count(const ep_checkpoint *checkpoint)
{
    return checkpoint->texts_count + checkpoint->shards_count;
}

void ep_checkpoint_file(const ep_checkpoint *checkpoint, size_t index, const char **out_name,
                        uint64_t *out_bytes)
{
    EP_ASSERT(index < ep_checkpoint_files_count(checkpoint));
    if (index < checkpoint->texts_count) {
        *out_name = checkpoint->texts[index].name;
        *out_bytes = checkpoint->texts[index].bytes;
    } else {
        const ep_safetensors *shard = checkpoint->shards[index - checkpoint->texts_count];
        *out_name = ep_safetensors_name(shard);
        *out_bytes = ep_safetensors_bytes(shard);
    }
}

ep_err ep_checkpoint_read_file(const ep_checkpoint *checkpoint, size_t index, uint64_t offset,
                               void *out, size_t bytes, ep_error *out_error)
{
    EP_ASSERT(index < ep_checkpoint_files_count(checkpoint));
    const bool is_text = index < checkpoint->texts_count;
    const ep_model_file *file = is_text ? &checkpoint->texts[index] : NULL;
    const ep_safetensors *shard =
        is_text ? NULL : checkpoint->shards[index - checkpoint->texts_count];
    if (is_text ? !ep_model_file_has(file, offset, bytes)
                : !ep_safetensors_has_raw(shard, offset, bytes)) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "%s: bytes from %" PRIu64 " are not here yet",
                            is_text ? file->name : ep_safetensors_name(shard), offset);
    }
    if (!is_text) {
        return ep_safetensors_read_raw(shard, offset, out, bytes, out_error);
    }
    ep_err err = ep_model_file_read(file, offset, out, bytes, out_error);
    return err == EP_OK ? ep_model_file_check_unchanged(file, out_error) : err;
}
