/* SPDX-License-Identifier: Apache-2.0 */
/* Opened models, look-up, and their description for peers. */
#include "expertd/node_models.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/log.h"

enum { LOG_TEXT_BYTES = 320 };

/* Element types of x that a request may use. */
static const uint32_t accepted_dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8,
                                           EP_DTYPE_F8E4M3};

static ep_err open_layers(ep_node_model *model, ep_weight_store *store, ep_error *out_error)
{
    const ep_model_info *info = model->info;
    model->layers =
        calloc(info->moe_layers_count > 0 ? info->moe_layers_count : 1, sizeof(*model->layers));
    if (model->layers == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for model %s",
                            model->config->name);
    }
    uint8_t identity[EP_SHA256_BYTES];
    ep_err err = ep_checkpoint_identity(model->checkpoint, identity, out_error);
    for (uint32_t i = 0; err == EP_OK && i < info->moe_layers_count; i++) {
        ep_node_layer *layer = &model->layers[i];
        ep_weight_layer weights = {.model = model->config->name,
                                   .checkpoint = model->checkpoint,
                                   .format = info->layer_formats[i].format,
                                   .down_format = info->layer_formats[i].down_format,
                                   .file_format = info->layer_formats[i].file_format,
                                   .file_down_format = info->layer_formats[i].file_down_format,
                                   .formats = info->formats,
                                   .shape = info->moe_layers[i]};
        memcpy(weights.numerics, model->numerics, sizeof(weights.numerics));
        memcpy(weights.identity, identity, sizeof(weights.identity));
        layer->shape = info->moe_layers[i];
        layer->shape.form_told = true;
        layer->shape.shared_inner = info->shared_inner[i];
        layer->shape.numbers = info->numbers[i].routed;
        layer->experts_total = layer->shape.experts + layer->shape.shared_experts;
        layer->queues = calloc(layer->experts_total, sizeof(*layer->queues));
        layer->slots = calloc(layer->shape.experts, sizeof(*layer->slots));
        model->layers_count++;
        if (layer->queues == NULL || layer->slots == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for model %s",
                                model->config->name);
        }
        err = ep_weight_store_add_layer(store, &weights, &layer->store_slot, out_error);
    }
    return err;
}

/* Bits of the formats that experts are in; all bits when a shared expert's cannot be read, whose
 * error is reported elsewhere. */
static uint32_t formats_beside(const ep_checkpoint *checkpoint)
{
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    uint32_t formats = info->formats;
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_shape *shape = &info->moe_layers[i];
        for (uint32_t s = 0; s < shape->shared_experts; s++) {
            ep_expert_source outline;
            ep_error error;
            const ep_err err = ep_checkpoint_outline_expert(checkpoint, shape->layer,
                                                            shape->experts + s, &outline, &error);
            formats |= err == EP_OK ? 1u << outline.format | 1u << ep_expert_down_format(&outline)
                                    : UINT32_MAX;
        }
    }
    return formats;
}

/* Formats of the first layer whose routed experts w4a8 computes; NULL: there is none. */
static const ep_layer_formats *rounded_formats(const ep_model_info *info, ep_numerics numerics)
{
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        const ep_layer_formats *formats = &info->layer_formats[i];
        if (ep_numerics_expert_family(numerics, formats->format, formats->down_format) ==
            EP_FFN_FAMILY_W4A8) {
            return formats;
        }
    }
    return NULL;
}

/* Texts for the log: why experts of this format are computed in w4a8, and what that changes: speed
 * against the family that auto would take otherwise, error with and without rounded inputs. */
static void explain_rounding(ep_weight_format format, char reason[LOG_TEXT_BYTES],
                             char effect[LOG_TEXT_BYTES])
{
    static const struct {
        ep_weight_format format;
        const char *speed;
        const char *error;
    } figures[] = {
        {EP_WEIGHTS_MXFP4,
         "1.5 to 1.7 times as fast as bf16dp with AVX-512, a panel 2.2 times as fast as portable "
         "with AVX2",
         ".204 for .204"},
        {EP_WEIGHTS_INT4,
         "1.5 to 1.7 times as fast as bf16dp with AVX-512, a panel 2.7 times as fast as portable "
         "with AVX2",
         ".172 for .171"},
        {EP_WEIGHTS_INT4_F16,
         "a panel 2.7 times as fast as portable with AVX2 (not timed with AVX-512)",
         ".151 for .151"},
        {EP_WEIGHTS_Q4_K,
         "an estimated 1.3 times (not timed) as fast as bf16dp with AVX-512, a panel 2.6 times "
         "as fast as portable with AVX2",
         ".129 for .128"},
    };
    size_t i = 0;
    while (figures[i].format != format) {
        i++;
        EP_ASSERT(i < EP_ARRAY_COUNT(figures));
    }
    snprintf(reason, LOG_TEXT_BYTES,
             "auto takes w4a8 where gate, up and down all are MXFP4, int4 g32 or q4_K: from 64 "
             "rows on %s",
             figures[i].speed);
    snprintf(effect, LOG_TEXT_BYTES,
             "inputs of such experts are rounded to int8: against the unrounded weights an error "
             "of %s; numerics: %s does not",
             figures[i].error,
             ep_ffn_family_name(ep_numerics_family(EP_NUMERICS_AUTO_WIDE, format)));
}

/* Logs choices that no error or result would show: a family asked for by name that is not
 * available, the one that auto chose of two, an id with w4a8 where no expert is computed in it.
 * Says nothing about a device with rounding rules of its own: its ids name none of the families. */
static void log_family(const ep_node_model *model, ep_numerics numerics)
{
    const ep_model_info *info = model->info;
    const bool is_auto = numerics == EP_NUMERICS_AUTO;
    const ep_layer_formats *rounded = rounded_formats(info, numerics);
    const ep_layer_formats *formats = rounded != NULL ? rounded : &info->layer_formats[0];
    const bool is_in_id = is_auto && !info->wide_inputs &&
                          ep_numerics_family(numerics, info->format) == EP_FFN_FAMILY_W4A8;
    const bool lacks = rounded == NULL && (numerics == EP_NUMERICS_W4A8 || is_in_id);
    const bool is_mixed = formats->down_format != formats->format;
    const char *family = ep_ffn_family_name(
        ep_numerics_family(ep_numerics_of(numerics, info->wide_inputs), info->format));
    const bool is_ours = strncmp(model->numerics, family, strlen(family)) == 0;
    char reason[LOG_TEXT_BYTES], effect[LOG_TEXT_BYTES];
    if (!is_ours || (!lacks && !(is_auto && rounded != NULL))) {
        return;
    }
    if (lacks) {
        const ep_ffn_family other = ep_numerics_family(EP_NUMERICS_AUTO_WIDE, formats->format);
        snprintf(reason, sizeof(reason),
                 "w4a8 is for experts of which both gate/up and down are MXFP4, int4 g32 or q4_K");
        snprintf(effect, sizeof(effect), "the model's experts are computed as with %s",
                 is_auto ? ep_ffn_family_name(other) : "bf16dp");
    } else if (info->wide_inputs) {
        snprintf(reason, sizeof(reason), "the checkpoint names activations of 16 bits");
        snprintf(effect, sizeof(effect), "inputs are not rounded to int8; numerics: w4a8 does");
    } else {
        explain_rounding(formats->format, reason, effect);
    }
    ep_log(lacks && !is_auto ? EP_LOG_WARN : EP_LOG_INFO, "numerics",
           EP_KV(model, model->config->name),
           EP_KV(weight_format, ep_weight_format_name(formats->format)),
           EP_KV(down_format, is_mixed ? ep_weight_format_name(formats->down_format) : NULL),
           EP_KV(numerics, model->numerics), EP_KV(reason, reason), EP_KV(effect, effect));
}

/* Finds the model's numerics id. Any device may compute a row, so all must give equal bits. */
static ep_err find_numerics(ep_node_model *model, ep_backend *const *backends,
                            uint32_t backends_count, ep_error *out_error)
{
    const uint32_t others = formats_beside(model->checkpoint);
    for (uint32_t b = 0; b < backends_count; b++) {
        ep_backend *backend = backends[b];
        char numerics[EP_NUMERICS_ID_BYTES];
        const ep_err err = backend->ops->numerics_id(backend, model->info->format,
                                                     model->info->wide_inputs, others, numerics);
        if (err != EP_OK) {
            const ep_weight_quant *quant = model->info->quant;
            return ep_error_set(
                out_error, err, "model %s: backend %s cannot compute with %s weights: %s%s%s",
                model->config->name, backend->ops->name, ep_weight_format_name(model->info->format),
                quant != NULL ? "take weight_quant " : "", quant != NULL ? quant->name : "",
                quant != NULL ? " out, or set backend: cpu" : "set backend: cpu");
        }
        if (b > 0 && strcmp(numerics, model->numerics) != 0) {
            return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                                "model %s: the devices of this node compute different bits (%s and "
                                "%s); give each kind a "
                                "node of its own by ASCEND_RT_VISIBLE_DEVICES",
                                model->config->name, model->numerics, numerics);
        }
        memcpy(model->numerics, numerics, sizeof(model->numerics));
    }
    return EP_OK;
}

static ep_err open_files(ep_node_model *model, ep_weight_fetch *fetch, ep_error *out_error)
{
    const ep_node_model_config *config = model->config;
    const char *version = config->version != NULL ? config->version : "";
    ep_err err;
    if (config->is_mirrored) {
        err = ep_weight_fetch_open(fetch, config, &model->mirror, out_error);
        err = err == EP_OK ? ep_checkpoint_open_mirror(model->mirror, &model->checkpoint, out_error)
                           : err;
    } else {
        err = ep_checkpoint_open(config->path, &model->checkpoint, out_error);
    }
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "model %s in %.200s", config->name, config->path);
    }
    model->info = ep_checkpoint_info(model->checkpoint);
    if (version[0] != 0 && strcmp(version, model->info->files_version) != 0) {
        return ep_error_set(
            out_error, EP_ERR_BAD_CONFIG,
            "model %s in %.200s: the files are version %s, models asks for version %s",
            config->name, config->path, model->info->files_version, version);
    }
    err = ep_checkpoint_quantize(model->checkpoint, config->quant, out_error);
    return err == EP_OK
               ? EP_OK
               : ep_error_prefix(out_error, err, "model %s in %.200s", config->name, config->path);
}

static ep_err open_model(ep_node_model *model, const ep_node_config *config,
                         ep_backend *const *backends, uint32_t backends_count,
                         ep_weight_store *store, ep_weight_fetch *fetch, ep_error *out_error)
{
    ep_err err = open_files(model, fetch, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (model->info->moe_layers_count == 0) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "model %s (%s) has no MoE layer",
                            model->config->name, model->config->path);
    }
    err = find_numerics(model, backends, backends_count, out_error);
    if (err != EP_OK) {
        return err;
    }
    log_family(model, config->numerics);
    return open_layers(model, store, out_error);
}

ep_err ep_node_models_open(ep_node_models *models, const ep_node_config *config,
                           ep_backend *const *backends, uint32_t backends_count,
                           ep_weight_store *store, ep_weight_fetch *fetch, ep_error *out_error)
{
    *models = (ep_node_models){.store = store};
    models->models = calloc(config->models_count, sizeof(*models->models));
    if (models->models == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the models");
    }
    for (uint32_t i = 0; i < config->models_count; i++) {
        ep_node_model *model = &models->models[models->count++];
        model->config = &config->models[i];
        ep_err err = open_model(model, config, backends, backends_count, store, fetch, out_error);
        if (err != EP_OK) {
            return err;
        }
        for (uint32_t j = 0; j < i; j++) {
            const ep_node_model *other = &models->models[j];
            if (strcmp(other->config->name, model->config->name) == 0 &&
                strcmp(other->info->version, model->info->version) == 0) {
                return ep_error_set(out_error, EP_ERR_BAD_CONFIG,
                                    "model %s version %s is configured twice in models: with path "
                                    "%s and %s; take one "
                                    "out",
                                    model->config->name, model->info->version, other->config->path,
                                    model->config->path);
            }
        }
    }
    return EP_OK;
}

void ep_node_models_close(ep_node_models *models)
{
    for (uint32_t i = 0; i < models->count; i++) {
        ep_node_model *model = &models->models[i];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            free(model->layers[l].queues);
            free(model->layers[l].slots);
        }
        free(model->layers);
        ep_checkpoint_close(model->checkpoint);
        ep_mirror_close(model->mirror);
    }
    free(models->models);
    *models = (ep_node_models){0};
}

static void list_models(const ep_node_models *models, char *out, size_t bytes)
{
    size_t n = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < models->count && n < bytes; i++) {
        const ep_node_model *model = &models->models[i];
        n += (size_t)snprintf(out + n, bytes - n, "%s%s version %s", i > 0 ? ", " : "",
                              model->config->name, model->info->version);
    }
}

/* of_files: version is that of the files, which several models may share in different formats; one
 * whose files are all local is preferred to a mirror. */
static ep_err find_model(const ep_node_models *models, const char *name, const char *version,
                         bool of_files, ep_node_model **out_model, ep_error *out_error)
{
    ep_node_model *found = NULL;
    uint32_t matches = 0;
    for (uint32_t i = 0; i < models->count; i++) {
        ep_node_model *model = &models->models[i];
        const char *own = of_files ? model->info->files_version : model->info->version;
        const bool same = strcmp(model->config->name, name) == 0 &&
                          (version[0] == 0 || strcmp(own, version) == 0);
        const bool is_again =
            same && of_files && found != NULL && strcmp(own, found->info->files_version) == 0;
        matches += same && !is_again;
        found = same && !(is_again && model->config->is_mirrored) ? model : found;
    }
    if (matches != 1) {
        char served[256];
        list_models(models, served, sizeof(served));
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "%s model '%.100s' version '%.40s'; served: %s",
                            matches == 0 ? "no" : "more than one", name, version, served);
    }
    *out_model = found;
    return EP_OK;
}

ep_err ep_node_models_find_files(const ep_node_models *models, const char *name,
                                 const char *version, ep_node_model **out_model,
                                 ep_error *out_error)
{
    return find_model(models, name, version, true, out_model, out_error);
}

ep_err ep_node_models_find(const ep_node_models *models, const char *name, const char *version,
                           uint32_t layer, ep_node_model **out_model, ep_node_layer **out_layer,
                           ep_error *out_error)
{
    ep_node_model *found = NULL;
    const ep_err err = find_model(models, name, version, false, &found, out_error);
    if (err != EP_OK) {
        return err;
    }
    uint32_t low = 0, high = found->layers_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (found->layers[middle].shape.layer < layer) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == found->layers_count || found->layers[low].shape.layer != layer) {
        ep_error_set(out_error, EP_ERR_NOT_FOUND,
                     "model %s version %s has no MoE layer %u; its %u MoE layers are within %u..%u",
                     name, found->info->version, layer, found->layers_count,
                     found->layers[0].shape.layer,
                     found->layers[found->layers_count - 1].shape.layer);
        if (out_error != NULL) {
            out_error->layer = layer <= INT32_MAX ? (int32_t)layer : -1;
        }
        return EP_ERR_NOT_FOUND;
    }
    *out_model = found;
    *out_layer = &found->layers[low];
    return EP_OK;
}

void ep_node_model_configured(const ep_node_model *model, const ep_node_layer *layer,
                              uint8_t *out_wanted)
{
    const ep_node_model_config *config = model->config;
    memset(out_wanted, config->choice == EP_EXPERTS_ALL, layer->experts_total);
    if (config->choice == EP_EXPERTS_LISTED) {
        for (uint32_t r = 0; r < config->ranges_count; r++) {
            for (uint32_t e = config->ranges[r].first;
                 e <= config->ranges[r].last && e < layer->experts_total; e++) {
                out_wanted[e] = 1;
            }
        }
    }
}

uint64_t ep_node_models_file_bytes(const ep_node_models *models)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < models->count; i++) {
        const ep_node_model *model = &models->models[i];
        for (uint32_t l = 0; l < model->layers_count; l++) {
            const ep_layer_shape *shape = &model->layers[l].shape;
            const ep_weight_format format = model->info->layer_formats[l].format;
            const ep_weight_format down_format = model->info->layer_formats[l].down_format;
            bytes += ((ep_activation_has_gate(shape->activation) ? 2ull : 1ull) *
                          ep_weight_matrix_bytes(format, shape->inner, shape->hidden) +
                      ep_weight_matrix_bytes(down_format, shape->hidden, shape->inner)) *
                     model->layers[l].experts_total;
        }
    }
    return bytes;
}

static void layer_info_free(Expertd__V1__LayerInfo *info)
{
    if (info != NULL) {
        free(info->owned);
        free(info->owned_digests);
        free(info);
    }
}

static Expertd__V1__LayerInfo *layer_info_make(const ep_node_models *models,
                                               const ep_node_layer *layer, bool for_placement)
{
    Expertd__V1__LayerInfo *info = malloc(sizeof(*info));
    uint32_t *owned = malloc(sizeof(*owned) * (layer->experts_total + 1));
    uint32_t *digests = malloc(sizeof(*digests) * (layer->experts_total + 1));
    if (info == NULL || owned == NULL || digests == NULL) {
        free(info);
        free(owned);
        free(digests);
        return NULL;
    }
    expertd__v1__layer_info__init(info);
    info->layer = layer->shape.layer;
    info->hidden = layer->shape.hidden;
    info->inner = layer->shape.inner;
    info->experts = layer->shape.experts;
    info->shared_experts = layer->shape.shared_experts;
    info->top_k = layer->shape.top_k;
    info->activation = (uint32_t)layer->shape.activation;
    info->form_told = layer->shape.form_told;
    info->shared_inner = layer->shape.shared_inner;
    info->alpha = layer->shape.numbers.alpha;
    info->beta = layer->shape.numbers.beta;
    info->limit = layer->shape.numbers.limit;
    info->owned = owned;
    info->owned_digests = digests;
    info->n_owned = ep_weight_store_owned(models->store, layer->store_slot, owned, digests);
    if (for_placement) {
        info->n_owned_digests = info->n_owned;
        info->expert_bytes = ep_weight_store_expert_bytes(models->store, layer->store_slot);
    }
    return info;
}

static void model_info_free(Expertd__V1__ModelInfo *info)
{
    if (info != NULL) {
        for (size_t l = 0; info->layers != NULL && l < info->n_layers; l++) {
            layer_info_free(info->layers[l]);
        }
        free(info->layers);
        free(info);
    }
}

/* Texts and dtypes are borrowed from the model and this file. */
static Expertd__V1__ModelInfo *model_info_make(const ep_node_models *models,
                                               const ep_node_model *model, bool for_placement)
{
    Expertd__V1__ModelInfo *info = malloc(sizeof(*info));
    if (info == NULL) {
        return NULL;
    }
    expertd__v1__model_info__init(info);
    info->name = (char *)(uintptr_t)model->config->name;
    info->version = (char *)(uintptr_t)model->info->version;
    info->config_hash = (char *)(uintptr_t)model->info->config_hash;
    info->numerics = (char *)(uintptr_t)model->numerics;
    info->dtypes = (uint32_t *)(uintptr_t)accepted_dtypes;
    info->n_dtypes = EP_ARRAY_COUNT(accepted_dtypes);
    info->layers = calloc(model->layers_count, sizeof(*info->layers));
    for (uint32_t l = 0; info->layers != NULL && l < model->layers_count; l++) {
        info->layers[l] = layer_info_make(models, &model->layers[l], for_placement);
        if (info->layers[l] == NULL) {
            break;
        }
        info->n_layers++;
    }
    if (info->n_layers != model->layers_count) {
        model_info_free(info);
        return NULL;
    }
    return info;
}

ep_err ep_node_models_describe(const ep_node_models *models, bool for_placement,
                               Expertd__V1__ModelInfo ***out_infos, size_t *out_count)
{
    Expertd__V1__ModelInfo **infos = calloc(models->count > 0 ? models->count : 1, sizeof(*infos));
    if (infos == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < models->count; i++) {
        infos[i] = model_info_make(models, &models->models[i], for_placement);
        if (infos[i] == NULL) {
            ep_node_models_infos_free(infos, i);
            return EP_ERR_NO_MEMORY;
        }
    }
    *out_infos = infos;
    *out_count = models->count;
    return EP_OK;
}

void ep_node_models_infos_free(Expertd__V1__ModelInfo **infos, size_t count)
{
    for (size_t i = 0; infos != NULL && i < count; i++) {
        model_info_free(infos[i]);
    }
    free(infos);
}
