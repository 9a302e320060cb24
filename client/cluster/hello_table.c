/* SPDX-License-Identifier: Apache-2.0 */
/* Three steps: collect models and layers, count copies, fill the table. */
#include "cluster/hello_table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/placement_codec.h"

typedef struct {
    const Expertd__V1__ModelInfo *info; /* from the first node that has it */
    uint32_t source;
} model_entry;

typedef struct {
    uint32_t model_index;
    const Expertd__V1__LayerInfo *info;
    uint32_t source;
} layer_entry;

typedef struct {
    const ep_hello_source *sources;
    uint32_t sources_count;
    model_entry *models;
    uint32_t models_count;
    layer_entry *layers;
    uint32_t layers_count;
    ep_routing_table *table;
    ep_error *error;
} builder;

static const char *node_name(const ep_hello_source *source)
{
    return source->hello->node[0] != 0 ? source->hello->node : source->url;
}

static uint32_t find_model(const builder *b, const Expertd__V1__ModelInfo *info)
{
    uint32_t m = 0;
    while (m < b->models_count && (strcmp(b->models[m].info->name, info->name) != 0 ||
                                   strcmp(b->models[m].info->version, info->version) != 0)) {
        m++;
    }
    return m;
}

static layer_entry *find_layer(const builder *b, uint32_t model_index, uint32_t layer)
{
    for (uint32_t i = 0; i < b->layers_count; i++) {
        if (b->layers[i].model_index == model_index && b->layers[i].info->layer == layer) {
            return &b->layers[i];
        }
    }
    return NULL;
}

static ep_err disagree(const builder *b, uint32_t first, uint32_t second,
                       const Expertd__V1__ModelInfo *model, const char *what)
{
    return ep_error_set(b->error, EP_ERR_FAILED_PRECONDITION,
                        "nodes %s and %s disagree about %s of model %s:%s",
                        node_name(&b->sources[first]), node_name(&b->sources[second]), what,
                        model->name, model->version);
}

static bool same_shape(const Expertd__V1__LayerInfo *a, const Expertd__V1__LayerInfo *b)
{
    return a->hidden == b->hidden && a->inner == b->inner && a->experts == b->experts &&
           a->shared_experts == b->shared_experts && a->top_k == b->top_k &&
           a->activation == b->activation;
}

static ep_err collect_model(builder *b, uint32_t source, const Expertd__V1__ModelInfo *info)
{
    uint32_t m = find_model(b, info);
    if (m == b->models_count) {
        b->models[b->models_count++] = (model_entry){info, source};
    } else if (strcmp(b->models[m].info->config_hash, info->config_hash) != 0) {
        return disagree(b, b->models[m].source, source, info, "the config hash");
    }
    for (size_t i = 0; i < info->n_layers; i++) {
        const Expertd__V1__LayerInfo *layer = info->layers[i];
        layer_entry *known = find_layer(b, m, layer->layer);
        if (known == NULL) {
            b->layers[b->layers_count++] = (layer_entry){m, layer, source};
        } else if (!same_shape(known->info, layer)) {
            char what[64];
            snprintf(what, sizeof(what), "the shape of layer %" PRIu32, layer->layer);
            return disagree(b, known->source, source, info, what);
        }
    }
    return EP_OK;
}

static int by_model_and_layer(const void *left, const void *right)
{
    const layer_entry *a = left;
    const layer_entry *b = right;
    if (a->model_index != b->model_index) {
        return a->model_index < b->model_index ? -1 : 1;
    }
    return a->info->layer < b->info->layer ? -1 : a->info->layer > b->info->layer;
}

static ep_err collect(builder *b)
{
    size_t models = 1;
    size_t layers = 1;
    for (uint32_t s = 0; s < b->sources_count; s++) {
        const Expertd__V1__Hello *hello = b->sources[s].hello;
        models += hello->n_models;
        for (size_t m = 0; m < hello->n_models; m++) {
            layers += hello->models[m]->n_layers;
        }
    }
    b->models = calloc(models, sizeof(*b->models));
    b->layers = calloc(layers, sizeof(*b->layers));
    if (b->models == NULL || b->layers == NULL) {
        return ep_error_set(b->error, EP_ERR_NO_MEMORY, "no memory for %zu layers", layers);
    }
    for (uint32_t s = 0; s < b->sources_count; s++) {
        const Expertd__V1__Hello *hello = b->sources[s].hello;
        for (size_t m = 0; m < hello->n_models; m++) {
            ep_err err = collect_model(b, s, hello->models[m]);
            if (err != EP_OK) {
                return err;
            }
        }
    }
    qsort(b->layers, b->layers_count, sizeof(*b->layers), by_model_and_layer);
    return EP_OK;
}

static ep_err fill_nodes(builder *b)
{
    for (uint32_t n = 0; n < b->sources_count; n++) {
        ep_routing_node *node = &b->table->nodes[n];
        const char *name = node_name(&b->sources[n]);
        node->node_id = n + 1;
        /* A URL may be longer than a name; its beginning is enough for messages. */
        snprintf(node->name, sizeof(node->name), "%.*s", (int)sizeof(node->name) - 1, name);
        snprintf(node->url, sizeof(node->url), "%s", b->sources[n].url);
        snprintf(node->host, sizeof(node->host), "%s", b->sources[n].hello->host);
        for (uint32_t i = 0; i < n; i++) {
            if (strcmp(b->table->nodes[i].name, node->name) == 0) {
                return ep_error_set(b->error, EP_ERR_FAILED_PRECONDITION,
                                    "%s and %s both call themselves %s", b->table->nodes[i].url,
                                    node->url, node->name);
            }
        }
    }
    return EP_OK;
}

static uint32_t numerics_index(ep_routing_model *model, const char *numerics)
{
    for (uint32_t i = 0; i < model->numerics_count; i++) {
        if (strcmp(model->numerics[i], numerics) == 0) {
            return i;
        }
    }
    strcpy(model->numerics[model->numerics_count], numerics);
    return model->numerics_count++;
}

static const Expertd__V1__ModelInfo *source_model(const builder *b, uint32_t source,
                                                  uint32_t model_index)
{
    const Expertd__V1__Hello *hello = b->sources[source].hello;
    for (size_t m = 0; m < hello->n_models; m++) {
        if (find_model(b, hello->models[m]) == model_index) {
            return hello->models[m];
        }
    }
    return NULL;
}

static ep_err fill_models(builder *b)
{
    for (uint32_t m = 0; m < b->models_count; m++) {
        const Expertd__V1__ModelInfo *first = b->models[m].info;
        ep_err err =
            ep_routing_table_model_init(b->table, m, first->name, first->version, b->sources_count);
        if (err != EP_OK) {
            return ep_error_set(
                b->error, err, "model '%.150s:%.50s' of node %s cannot be listed: %s", first->name,
                first->version, node_name(&b->sources[b->models[m].source]), ep_err_text(err));
        }
        ep_routing_model *model = &b->table->models[m];
        model->numerics_count = 0;
        for (uint32_t s = 0; s < b->sources_count; s++) {
            const Expertd__V1__ModelInfo *info = source_model(b, s, m);
            if (info == NULL) {
                continue;
            }
            if (strlen(info->numerics) >= EP_NUMERICS_BYTES) {
                return ep_error_set(b->error, EP_ERR_INVALID_ARGUMENT,
                                    "numerics id of node %s has %zu bytes: allowed 0..%d",
                                    node_name(&b->sources[s]), strlen(info->numerics),
                                    EP_NUMERICS_BYTES - 1);
            }
            model->numerics_of_node[s] = numerics_index(model, info->numerics);
        }
    }
    return EP_OK;
}

static const Expertd__V1__LayerInfo *source_layer(const builder *b, uint32_t source,
                                                  const layer_entry *entry)
{
    const Expertd__V1__ModelInfo *info = source_model(b, source, entry->model_index);
    for (size_t i = 0; info != NULL && i < info->n_layers; i++) {
        if (info->layers[i]->layer == entry->info->layer) {
            return info->layers[i];
        }
    }
    return NULL;
}

/* Adds count 1 for each owned expert of each node to counts[expert + 1]. */
static ep_err count_copies(const builder *b, const layer_entry *entry, uint32_t experts,
                           uint32_t *counts, size_t *out_total)
{
    *out_total = 0;
    for (uint32_t s = 0; s < b->sources_count; s++) {
        const Expertd__V1__LayerInfo *info = source_layer(b, s, entry);
        for (size_t i = 0; info != NULL && i < info->n_owned; i++) {
            if (info->owned[i] >= experts) {
                return ep_error_set(b->error, EP_ERR_INVALID_ARGUMENT,
                                    "node %s says it owns expert %" PRIu32 " of layer %" PRIu32
                                    ": allowed 0..%" PRIu32,
                                    node_name(&b->sources[s]), info->owned[i], info->layer,
                                    experts - 1);
            }
            counts[info->owned[i] + 1]++;
            ++*out_total;
        }
    }
    return EP_OK;
}

static void place_copies(const builder *b, const layer_entry *entry, ep_routing_layer *layer,
                         uint32_t experts, uint32_t *counts)
{
    for (uint32_t e = 0; e < experts; e++) {
        counts[e + 1] += counts[e];
    }
    memcpy(layer->offsets, counts, ((size_t)experts + 1) * sizeof(*counts));
    for (uint32_t s = 0; s < b->sources_count; s++) {
        const Expertd__V1__LayerInfo *info = source_layer(b, s, entry);
        for (size_t i = 0; info != NULL && i < info->n_owned; i++) {
            layer->copies[counts[info->owned[i]]++] = s;
        }
    }
}

static ep_err fill_layer(builder *b, uint32_t index)
{
    const layer_entry *entry = &b->layers[index];
    const Expertd__V1__LayerInfo *info = entry->info;
    const ep_layer_shape shape = ep_layer_shape_of(info);
    ep_err err = ep_layer_shape_check(&shape, b->error);
    if (err != EP_OK) {
        return ep_error_prefix(b->error, err, "node %s", node_name(&b->sources[entry->source]));
    }
    uint32_t experts = shape.experts + shape.shared_experts;
    uint32_t *counts = calloc((size_t)experts + 1, sizeof(*counts));
    size_t total = 0;
    if (counts == NULL) {
        return ep_error_set(b->error, EP_ERR_NO_MEMORY, "no memory for %" PRIu32 " experts",
                            experts);
    }
    err = count_copies(b, entry, experts, counts, &total);
    if (err == EP_OK && total > UINT32_MAX) {
        err = ep_error_set(b->error, EP_ERR_INVALID_ARGUMENT,
                           "layer %" PRIu32 " has %zu copies: too many", info->layer, total);
    }
    if (err == EP_OK) {
        err = ep_routing_table_layer_init(b->table, index, entry->model_index, &shape,
                                          (uint32_t)total);
        if (err != EP_OK) {
            ep_error_set(b->error, err, "layer %" PRIu32 " cannot be listed: %s", info->layer,
                         ep_err_text(err));
        }
    }
    if (err == EP_OK) {
        place_copies(b, entry, &b->table->layers[index], experts, counts);
    }
    free(counts);
    return err;
}

static ep_err build(builder *b, ep_epoch epoch)
{
    ep_err err = collect(b);
    if (err != EP_OK) {
        return err;
    }
    err = ep_routing_table_create(b->sources_count, b->models_count, b->layers_count, &b->table);
    if (err != EP_OK) {
        return ep_error_set(b->error, err,
                            "a table of %" PRIu32 " nodes, %" PRIu32 " models, %" PRIu32
                            " layers: %s",
                            b->sources_count, b->models_count, b->layers_count, ep_err_text(err));
    }
    b->table->epoch = epoch;
    snprintf(b->table->policy, sizeof(b->table->policy), "nodes");
    err = fill_nodes(b);
    if (err == EP_OK) {
        err = fill_models(b);
    }
    for (uint32_t i = 0; i < b->layers_count && err == EP_OK; i++) {
        err = fill_layer(b, i);
    }
    return err == EP_OK ? ep_routing_table_check(b->table, b->error) : err;
}

ep_err ep_hello_table_build(const ep_hello_source *sources, uint32_t sources_count, ep_epoch epoch,
                            ep_routing_table **out_table, ep_error *out_error)
{
    ep_error scratch;
    builder b = {.sources = sources,
                 .sources_count = sources_count,
                 .error = out_error != NULL ? out_error : &scratch};
    ep_err err = build(&b, epoch);
    if (err == EP_OK) {
        *out_table = b.table;
    } else {
        ep_routing_table_unref(b.table);
    }
    free(b.models);
    free(b.layers);
    return err;
}
