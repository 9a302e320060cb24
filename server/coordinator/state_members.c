/* SPDX-License-Identifier: Apache-2.0 */
/* The known nodes, models and layers: find, add, forget, and their memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/state_private.h"

ep_err ep_coordinator_state_create(const ep_coordinator_state_config *config,
                                   ep_coordinator_state **out_cluster)
{
    ep_coordinator_state *cluster = calloc(1, sizeof(*cluster));
    if (cluster == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    cluster->config = *config;
    cluster->configured = *config;
    ep_error_clear(&cluster->placement_error);
    ep_error_clear(&cluster->table_error);
    ep_error_clear(&cluster->copy_error);
    ep_error_clear(&cluster->left_out);
    *out_cluster = cluster;
    return EP_OK;
}

static void free_layer(node_layer *layer)
{
    free(layer->assigned);
    free(layer->held);
    free(layer->owned);
    free(layer->failed);
    free(layer->digests);
}

static void free_cluster_layer(cluster_layer *layer)
{
    free(layer->digests);
    free(layer->heat);
    free(layer->counted);
}

void ep_state_node_free(cluster_node *node, uint32_t layers_count)
{
    for (uint32_t i = 0; i < layers_count && node->layers != NULL; i++) {
        free_layer(&node->layers[i]);
    }
    free(node->layers);
    free(node->numerics);
    free(node);
}

void ep_coordinator_state_destroy(ep_coordinator_state *cluster)
{
    if (cluster == NULL) {
        return;
    }
    for (size_t i = 0; i < cluster->nodes_count; i++) {
        ep_state_node_free(cluster->nodes[i], cluster->layers_count);
    }
    free(cluster->nodes);
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        free_cluster_layer(&cluster->layers[l]);
    }
    free(cluster->models);
    free(cluster->layers);
    free(cluster->drained);
    free(cluster->lost);
    free(cluster->former_votes);
    ep_routing_table_unref(cluster->table);
    free(cluster);
}

cluster_node *ep_state_find_node(const ep_coordinator_state *cluster, const char *name)
{
    for (size_t i = 0; i < cluster->nodes_count; i++) {
        if (strcmp(cluster->nodes[i]->name, name) == 0) {
            return cluster->nodes[i];
        }
    }
    return NULL;
}

uint32_t ep_state_find_model(const ep_coordinator_state *cluster, const char *name,
                             const char *version)
{
    for (uint32_t i = 0; i < cluster->models_count; i++) {
        if (strcmp(cluster->models[i].name, name) == 0 &&
            strcmp(cluster->models[i].version, version) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}

uint32_t ep_state_find_layer(ep_coordinator_state *cluster, uint32_t model_index, uint32_t layer)
{
    for (uint32_t n = 0; n < cluster->layers_count; n++) {
        uint32_t i = (cluster->likely_layer + n) % cluster->layers_count;
        if (cluster->layers[i].model_index == model_index &&
            cluster->layers[i].shape.layer == layer) {
            cluster->likely_layer = i + 1;
            return i;
        }
    }
    return UINT32_MAX;
}

static bool node_add_layer(cluster_node *node, uint32_t layers_count, size_t words)
{
    node_layer *layers = realloc(node->layers, layers_count * sizeof(*layers));
    if (layers == NULL) {
        return false;
    }
    node->layers = layers;
    node_layer *added = &layers[layers_count - 1];
    *added = (node_layer){.assigned = calloc(words, sizeof(uint64_t)),
                          .held = calloc(words, sizeof(uint64_t)),
                          .owned = calloc(words, sizeof(uint64_t)),
                          .failed = calloc(words, sizeof(uint64_t))};
    if (added->assigned == NULL || added->held == NULL || added->owned == NULL ||
        added->failed == NULL) {
        free_layer(added);
        return false;
    }
    return true;
}

/* Undoes adding a layer when memory ran out after some nodes. */
static void undo_layer(ep_coordinator_state *cluster, size_t nodes_done)
{
    for (size_t i = 0; i < nodes_done; i++) {
        free_layer(&cluster->nodes[i]->layers[cluster->layers_count]);
    }
}

uint32_t ep_state_add_layer(ep_coordinator_state *cluster, uint32_t model_index,
                            const ep_layer_shape *shape)
{
    cluster_layer *layers = realloc(cluster->layers, (cluster->layers_count + 1) * sizeof(*layers));
    if (layers == NULL) {
        return UINT32_MAX;
    }
    cluster->layers = layers;
    cluster_layer *layer = &layers[cluster->layers_count];
    *layer = (cluster_layer){.model_index = model_index, .shape = *shape};
    layer->digests = calloc(layer_experts(layer), sizeof(uint32_t));
    if (layer->digests == NULL) {
        return UINT32_MAX;
    }
    for (size_t i = 0; i < cluster->nodes_count; i++) {
        if (!node_add_layer(cluster->nodes[i], cluster->layers_count + 1, layer_words(layer))) {
            undo_layer(cluster, i);
            free(layer->digests);
            return UINT32_MAX;
        }
    }
    return cluster->layers_count++;
}

uint32_t ep_state_add_model(ep_coordinator_state *cluster, const char *name, const char *version)
{
    uint32_t count = cluster->models_count + 1;
    for (size_t i = 0; i < cluster->nodes_count; i++) {
        void *numerics =
            realloc(cluster->nodes[i]->numerics, count * sizeof(cluster->nodes[i]->numerics[0]));
        if (numerics == NULL) {
            return UINT32_MAX;
        }
        cluster->nodes[i]->numerics = numerics;
        cluster->nodes[i]->numerics[count - 1][0] = 0;
    }
    cluster_model *models = realloc(cluster->models, count * sizeof(*models));
    if (models == NULL) {
        return UINT32_MAX;
    }
    cluster->models = models;
    models[count - 1] = (cluster_model){0};
    snprintf(models[count - 1].name, sizeof(models[0].name), "%s", name);
    snprintf(models[count - 1].version, sizeof(models[0].version), "%s", version);
    cluster->models_count = count;
    return count - 1;
}

static size_t find_drained(const ep_coordinator_state *cluster, const char *name)
{
    size_t i = 0;
    while (i < cluster->drained_count && strcmp(cluster->drained[i], name) != 0) {
        i++;
    }
    return i;
}

bool ep_state_is_drained(const ep_coordinator_state *cluster, const char *name)
{
    return find_drained(cluster, name) < cluster->drained_count;
}

bool ep_state_drained_add(ep_coordinator_state *cluster, const char *name)
{
    if (ep_state_is_drained(cluster, name)) {
        return true;
    }
    void *grown =
        realloc(cluster->drained, (cluster->drained_count + 1) * sizeof(cluster->drained[0]));
    if (grown == NULL) {
        return false;
    }
    cluster->drained = grown;
    snprintf(cluster->drained[cluster->drained_count++], EP_NODE_NAME_BYTES, "%s", name);
    return true;
}

void ep_state_drained_remove(ep_coordinator_state *cluster, const char *name)
{
    size_t i = find_drained(cluster, name);
    if (i < cluster->drained_count) {
        size_t last = --cluster->drained_count;
        memmove(cluster->drained[i], cluster->drained[last], sizeof(cluster->drained[0]));
    }
}

cluster_node *ep_state_add_node(ep_coordinator_state *cluster, const char *name)
{
    cluster_node **nodes =
        realloc(cluster->nodes, (cluster->nodes_count + 1) * sizeof(cluster_node *));
    if (nodes == NULL) {
        return NULL;
    }
    cluster->nodes = nodes;
    cluster_node *node = calloc(1, sizeof(*node));
    if (node == NULL) {
        return NULL;
    }
    node->numerics = calloc(cluster->models_count + 1, sizeof(node->numerics[0]));
    bool good = node->numerics != NULL;
    uint32_t done = 0;
    while (good && done < cluster->layers_count) {
        good = node_add_layer(node, done + 1, layer_words(&cluster->layers[done]));
        done += good;
    }
    if (!good) {
        ep_state_node_free(node, done);
        return NULL;
    }
    expertd__v1__node_entry__init(&node->told);
    node->node_id = cluster->next_node_id++;
    snprintf(node->name, sizeof(node->name), "%s", name);
    node->is_drained = ep_state_is_drained(cluster, name);
    nodes[cluster->nodes_count++] = node;
    return node;
}

/* Forgotten with its layers. */
void ep_state_forget_model(ep_coordinator_state *cluster, uint32_t model_index)
{
    for (uint32_t l = cluster->layers_count; l-- > 0;) {
        if (cluster->layers[l].model_index > model_index) {
            cluster->layers[l].model_index--;
        } else if (cluster->layers[l].model_index == model_index) {
            free_cluster_layer(&cluster->layers[l]);
            uint32_t after = --cluster->layers_count - l;
            memmove(&cluster->layers[l], &cluster->layers[l + 1],
                    after * sizeof(cluster->layers[0]));
            for (size_t n = 0; n < cluster->nodes_count; n++) {
                node_layer *layers = cluster->nodes[n]->layers;
                free_layer(&layers[l]);
                memmove(&layers[l], &layers[l + 1], after * sizeof(layers[0]));
            }
        }
    }
    uint32_t after = --cluster->models_count - model_index;
    memmove(&cluster->models[model_index], &cluster->models[model_index + 1],
            after * sizeof(cluster->models[0]));
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        char(*numerics)[EP_NUMERICS_BYTES] = cluster->nodes[n]->numerics;
        memmove(&numerics[model_index], &numerics[model_index + 1], after * sizeof(numerics[0]));
    }
}

const char *ep_coordinator_state_policy(const ep_coordinator_state_config *config)
{
    return config->expert_map != NULL ? "static" : config->is_balanced ? "balanced" : "uniform";
}
