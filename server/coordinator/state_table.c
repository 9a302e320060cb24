/* SPDX-License-Identifier: Apache-2.0 */
/* The routing table that clients see: what is assigned, loaded and alive. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "coordinator/state_private.h"

static int compare_layers(const void *left, const void *right, void *arg)
{
    const ep_coordinator_state *cluster = arg;
    const cluster_layer *a = &cluster->layers[*(const uint32_t *)left], *b = &cluster->layers[*(const uint32_t *)right];
    if (a->model_index != b->model_index) {
        return a->model_index < b->model_index ? -1 : 1;
    }
    return a->shape.layer < b->shape.layer ? -1 : a->shape.layer > b->shape.layer;
}

/* A copy that is to move stays in the table until its new owners have loaded it. */
bool cluster_has_copy(const ep_coordinator_state *cluster, const cluster_node *node, uint32_t layer_index,
                      uint32_t expert)
{
    const node_layer *layer = &node->layers[layer_index];
    bool is_moving = cluster->committed_number < cluster->assignment_number;
    return node_is_listed(node) && bit_get(layer->owned, expert) && (is_moving || bit_get(layer->assigned, expert));
}

uint32_t cluster_copies_of(const ep_coordinator_state *cluster, const cluster_node *node)
{
    uint32_t count = 0;
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        for (uint32_t e = 0; e < layer_experts(&cluster->layers[l]); e++) {
            count += cluster_has_copy(cluster, node, l, e);
        }
    }
    return count;
}

/* All nodes stand in the table, by position in cluster->nodes; a node that fell silent leaves it after restore_ms. */
static ep_err fill_layer(const ep_coordinator_state *cluster, cluster_copy_func has_copy, ep_routing_table *table,
                         uint32_t position, uint32_t layer_index)
{
    const cluster_layer *layer = &cluster->layers[layer_index];
    uint32_t total = 0;
    for (uint32_t e = 0; e < layer_experts(layer); e++) {
        for (size_t n = 0; n < cluster->nodes_count; n++) {
            total += has_copy(cluster, cluster->nodes[n], layer_index, e);
        }
    }
    ep_err err = ep_routing_table_layer_init(table, position, layer->model_index, &layer->shape, total);
    if (err != EP_OK) {
        return err;
    }
    ep_routing_layer *out = &table->layers[position];
    uint32_t used = 0;
    for (uint32_t e = 0; e < layer_experts(layer); e++) {
        out->offsets[e] = used;
        for (uint32_t n = 0; n < cluster->nodes_count; n++) {
            if (has_copy(cluster, cluster->nodes[n], layer_index, e)) {
                out->copies[used++] = n;
            }
        }
    }
    out->offsets[layer_experts(layer)] = used;
    return EP_OK;
}

static ep_err fill_model(const ep_coordinator_state *cluster, ep_routing_table *table, uint32_t m)
{
    ep_routing_model *model = &table->models[m];
    snprintf(model->name, sizeof(model->name), "%s", cluster->models[m].name);
    snprintf(model->version, sizeof(model->version), "%s", cluster->models[m].version);
    model->numerics = calloc(cluster->nodes_count + 1, sizeof(model->numerics[0]));
    model->numerics_of_node = calloc(cluster->nodes_count + 1, sizeof(uint32_t));
    if (model->numerics == NULL || model->numerics_of_node == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const char *id = cluster->nodes[n]->numerics[m];
        uint32_t index = 0;
        if (id[0] == 0) {
            model->numerics_of_node[n] = UINT32_MAX;
            continue;
        }
        while (index < model->numerics_count && strcmp(model->numerics[index], id) != 0) {
            index++;
        }
        if (index == model->numerics_count) {
            snprintf(model->numerics[model->numerics_count++], EP_NUMERICS_BYTES, "%s", id);
        }
        model->numerics_of_node[n] = index;
    }
    return EP_OK;
}

ep_err cluster_build_table(const ep_coordinator_state *cluster, cluster_copy_func has_copy,
                           ep_routing_table **out_table)
{
    ep_routing_table *table;
    uint32_t *order = calloc(cluster->layers_count + 1, sizeof(uint32_t));
    ep_err err = order == NULL ? EP_ERR_NO_MEMORY
                               : ep_routing_table_create((uint32_t)cluster->nodes_count, cluster->models_count,
                                                         cluster->layers_count, &table);
    if (err != EP_OK) {
        free(order);
        return err;
    }
    snprintf(table->policy, sizeof(table->policy), "%s", cluster->config.expert_map != NULL ? "static" : "uniform");
    table->decode_tokens_max = cluster->config.decode_tokens_max;
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        table->nodes[n].node_id = cluster->nodes[n]->node_id;
        snprintf(table->nodes[n].name, sizeof(table->nodes[n].name), "%s", cluster->nodes[n]->name);
        snprintf(table->nodes[n].url, sizeof(table->nodes[n].url), "%s", cluster->nodes[n]->url);
        snprintf(table->nodes[n].host, sizeof(table->nodes[n].host), "%s", cluster->nodes[n]->host);
    }
    for (uint32_t m = 0; err == EP_OK && m < cluster->models_count; m++) {
        err = fill_model(cluster, table, m);
    }
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        order[i] = i;
    }
    qsort_r(order, cluster->layers_count, sizeof(uint32_t), compare_layers, (void *)(uintptr_t)cluster);
    for (uint32_t i = 0; err == EP_OK && i < cluster->layers_count; i++) {
        err = fill_layer(cluster, has_copy, table, i, order[i]);
    }
    free(order);
    if (err != EP_OK) {
        ep_routing_table_unref(table);
        return err;
    }
    *out_table = table;
    return EP_OK;
}

/* Every listed node has loaded what it was given last. */
static bool settled(const ep_coordinator_state *cluster)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        if (node_is_listed(cluster->nodes[n]) && cluster->nodes[n]->loaded_number < cluster->assignment_number) {
            return false;
        }
    }
    return true;
}

/* Some listed node has loaded the copy it was given. */
static bool is_kept(const ep_coordinator_state *cluster, uint32_t layer_index, uint32_t expert)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const node_layer *layer = &cluster->nodes[n]->layers[layer_index];
        if (node_is_listed(cluster->nodes[n]) && bit_get(layer->assigned, expert) && bit_get(layer->owned, expert)) {
            return true;
        }
    }
    return false;
}

/* No copy that nodes may drop after the commit is the last one of its expert. */
static bool loses_nothing(const ep_coordinator_state *cluster)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        for (uint32_t l = 0; node_is_listed(node) && l < cluster->layers_count; l++) {
            for (uint32_t e = 0; e < layer_experts(&cluster->layers[l]); e++) {
                bool goes = bit_get(node->layers[l].owned, e) && !bit_get(node->layers[l].assigned, e);
                if (goes && !is_kept(cluster, l, e)) {
                    return false;
                }
            }
        }
    }
    return true;
}

void cluster_republish(ep_coordinator_state *cluster)
{
    ep_routing_table *table;
    ep_err err = cluster_build_table(cluster, cluster_has_copy, &table);
    cluster->is_stale = err != EP_OK;
    if (err != EP_OK) { /* the old table stays; the next heartbeat tries again */
        ep_error_set(&cluster->placement_error, err, "no routing table can be made of %zu nodes, %u models, %u layers: %s",
                     cluster->nodes_count, cluster->models_count, cluster->layers_count, ep_err_text(err));
        return;
    }
    uint64_t checksum = ep_routing_table_checksum(table); /* epoch still 0: content only */
    if (cluster->table != NULL && checksum == cluster->table_checksum) {
        ep_routing_table_unref(table);
        return;
    }
    table->epoch = (ep_epoch){.term = cluster->config.term, .number = ++cluster->counter};
    ep_routing_table_unref(cluster->table);
    cluster->table = table;
    cluster->table_checksum = checksum;
    cluster->revision++;
}

void cluster_publish(ep_coordinator_state *cluster)
{
    bool is_settled = cluster->placed_once && settled(cluster) &&
                      (cluster->committed_number == cluster->assignment_number || loses_nothing(cluster));
    if (!cluster->placed_once || (cluster->table == NULL && !is_settled)) {
        return;
    }
    if (is_settled && cluster->committed_number != cluster->assignment_number) {
        cluster->committed_number = cluster->assignment_number;
        cluster->revision++; /* whoever keeps the state learns when its table stands for this assignment */
    }
    cluster_republish(cluster);
}

static bool is_neighbour(const cluster_node *node, const ep_routing_node *other)
{
    return node->host[0] != 0 && strcmp(other->host, node->host) == 0 && strcmp(other->name, node->name) != 0;
}

ep_err ep_coordinator_state_neighbours(const ep_coordinator_state *cluster, const char *node, Expertd__V1__Neighbour ***out_list,
                                       size_t *out_count)
{
    const ep_routing_table *table = cluster->table;
    const cluster_node *self = cluster_find_node(cluster, node);
    uint32_t count = 0;
    for (uint32_t n = 0; self != NULL && table != NULL && n < table->nodes_count; n++) {
        count += is_neighbour(self, &table->nodes[n]);
    }
    Expertd__V1__Neighbour **list = calloc(count + 1, sizeof(*list) + sizeof(**list));
    if (list == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    Expertd__V1__Neighbour *messages = (Expertd__V1__Neighbour *)(void *)(list + count + 1);
    size_t used = 0;
    for (uint32_t n = 0; used < count; n++) {
        if (is_neighbour(self, &table->nodes[n])) {
            expertd__v1__neighbour__init(&messages[used]);
            messages[used].node = table->nodes[n].name;
            messages[used].url = table->nodes[n].url;
            list[used] = &messages[used];
            used++;
        }
    }
    *out_list = list;
    *out_count = used;
    return EP_OK;
}
