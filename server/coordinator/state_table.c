/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the routing table for clients of copies that are assigned, loaded and alive. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "coordinator/state_private.h"
#include "wire/placement_codec.h"

/* room for epoch and checksum, which a table gets when it is published */
#define EPOCH_BYTES_MAX 64

static int compare_layers(const void *left, const void *right, void *arg)
{
    const ep_coordinator_state *cluster = arg;
    const cluster_layer *a = &cluster->layers[*(const uint32_t *)left],
                        *b = &cluster->layers[*(const uint32_t *)right];
    if (a->model_index != b->model_index) {
        return a->model_index < b->model_index ? -1 : 1;
    }
    return a->shape.layer < b->shape.layer ? -1 : a->shape.layer > b->shape.layer;
}

/* Whether some listed node has loaded the expert that it was assigned. */
static bool is_kept(const ep_coordinator_state *cluster, uint32_t layer_index, uint32_t expert)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const node_layer *layer = &cluster->nodes[n]->layers[layer_index];
        if (node_is_listed(cluster->nodes[n]) && bit_get(layer->assigned, expert) &&
            bit_get(layer->owned, expert)) {
            return true;
        }
    }
    return false;
}

/* Whether the table lists the copy. A moving one stays listed until its new owners have loaded
 * it. */
static bool is_listed(const ep_coordinator_state *cluster, const cluster_node *node,
                      uint32_t layer_index, uint32_t expert)
{
    const node_layer *layer = &node->layers[layer_index];
    bool is_moving = cluster->committed_number < cluster->assignment_number;
    if (!node_is_listed(node) || !bit_get(layer->owned, expert)) {
        return false;
    }
    return bit_get(layer->assigned, expert) ||
           (is_moving && (!node->is_out || !is_kept(cluster, layer_index, expert)));
}

uint32_t ep_state_copies_of(const ep_coordinator_state *cluster, const cluster_node *node)
{
    uint32_t count = 0;
    for (uint32_t l = 0; l < cluster->layers_count; l++) {
        for (uint32_t e = 0; e < layer_experts(&cluster->layers[l]); e++) {
            count += is_listed(cluster, node, l, e);
        }
    }
    return count;
}

/* The table has all nodes, by position in cluster->nodes; a silent one leaves it after
 * restore_ms. */
static ep_err fill_layer(const ep_coordinator_state *cluster, cluster_copy_func has_copy,
                         ep_routing_table *table, uint32_t position, uint32_t layer_index)
{
    const cluster_layer *layer = &cluster->layers[layer_index];
    uint32_t total = 0;
    for (uint32_t e = 0; e < layer_experts(layer); e++) {
        for (size_t n = 0; n < cluster->nodes_count; n++) {
            total += has_copy(cluster, cluster->nodes[n], layer_index, e);
        }
    }
    ep_err err =
        ep_routing_table_layer_init(table, position, layer->model_index, &layer->shape, total);
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
    model->is_default = cluster->models[m].is_default;
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

ep_err ep_state_build_table(const ep_coordinator_state *cluster, cluster_copy_func has_copy,
                            ep_routing_table **out_table)
{
    ep_routing_table *table;
    uint32_t *order = calloc(cluster->layers_count + 1, sizeof(uint32_t));
    ep_err err = order == NULL ? EP_ERR_NO_MEMORY
                               : ep_routing_table_create((uint32_t)cluster->nodes_count,
                                                         cluster->models_count,
                                                         cluster->layers_count, &table);
    if (err != EP_OK) {
        free(order);
        return err;
    }
    snprintf(table->policy, sizeof(table->policy), "%s",
             ep_coordinator_state_policy(&cluster->config));
    table->decode_tokens_max = cluster->config.decode_tokens_max;
    const ep_policy_value *hedge = &cluster->policy.values[EP_POLICY_HEDGE_PERMILLE];
    const ep_policy_value *nodes_min = &cluster->policy.values[EP_POLICY_DECODE_NODES_MIN];
    table->caller_policy = (ep_caller_policy){.revision = cluster->policy.revision,
                                              .has_hedge_permille = hedge->revision != 0,
                                              .hedge_permille = (uint32_t)hedge->number,
                                              .decode_nodes_min = (uint32_t)nodes_min->number};
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
    qsort_r(order, cluster->layers_count, sizeof(uint32_t), compare_layers,
            (void *)(uintptr_t)cluster);
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

/* Whether every listed node has finished its newest assignment. */
static bool settled(const ep_coordinator_state *cluster)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        if (node_is_listed(cluster->nodes[n]) &&
            cluster->nodes[n]->loaded_number < cluster->assignment_number) {
            return false;
        }
    }
    return true;
}

/* Whether no copy that a commit lets nodes drop is the last one of its expert. */
static bool loses_nothing(const ep_coordinator_state *cluster)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        const cluster_node *node = cluster->nodes[n];
        for (uint32_t l = 0; node_is_listed(node) && l < cluster->layers_count; l++) {
            for (uint32_t e = 0; e < layer_experts(&cluster->layers[l]); e++) {
                bool goes =
                    bit_get(node->layers[l].owned, e) && !bit_get(node->layers[l].assigned, e);
                if (goes && !is_kept(cluster, l, e)) {
                    return false;
                }
            }
        }
    }
    return true;
}

/* Refuses a table that is too large. Nodes may hold more copies than registrations allowed for, and
 * all are listed while experts move. */
static ep_err check_size(const ep_routing_table *table, ep_error *out_error)
{
    Expertd__V1__PlacementSnapshot *snapshot;
    ep_err err = ep_placement_encode(table, &snapshot);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "the new table cannot be measured: %s",
                            ep_err_text(err));
    }
    const size_t bytes =
        expertd__v1__placement_snapshot__get_packed_size(snapshot) + EPOCH_BYTES_MAX;
    ep_placement_snapshot_free(snapshot);
    if (bytes <= EP_COORDINATOR_TABLE_BYTES_MAX) {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                        "the new table of %u nodes, %u models, %u layers has %zu bytes, clients "
                        "take up to %llu: the "
                        "one before is served on; serve fewer models, or versions, from one "
                        "coordinator, or end nodes "
                        "that hold too much",
                        table->nodes_count, table->models_count, table->layers_count, bytes,
                        (unsigned long long)EP_COORDINATOR_TABLE_BYTES_MAX);
}

static uint64_t experts_without_copy(const ep_routing_table *table, uint32_t model_index)
{
    uint64_t without = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        for (uint32_t e = 0; layer->model_index == model_index &&
                             e < layer->shape.experts + layer->shape.shared_experts;
             e++) {
            without += layer->offsets[e] == layer->offsets[e + 1];
        }
    }
    return without;
}

static bool has_default(const ep_coordinator_state *cluster, const char *name)
{
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        if (cluster->models[m].is_default && strcmp(cluster->models[m].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* A model without a default gets its first version whose experts all have copies. */
static void choose_defaults(ep_coordinator_state *cluster, ep_routing_table *table)
{
    for (uint32_t m = 0; m < table->models_count; m++) {
        if (!has_default(cluster, table->models[m].name) && experts_without_copy(table, m) == 0) {
            cluster->models[m].is_default = true;
            table->models[m].is_default = true;
        }
    }
}

/* Compares what the checksum does not cover. */
static bool same_choices(const ep_routing_table *a, const ep_routing_table *b)
{
    if (a->caller_policy.revision != b->caller_policy.revision) {
        return false;
    }
    for (uint32_t m = 0; m < a->models_count && m < b->models_count; m++) {
        if (a->models[m].is_default != b->models[m].is_default) {
            return false;
        }
    }
    for (uint32_t l = 0; l < a->layers_count && l < b->layers_count; l++) {
        if (a->layers[l].shape.form_told != b->layers[l].shape.form_told) {
            return false;
        }
    }
    return true;
}

bool ep_state_republish(ep_coordinator_state *cluster)
{
    ep_routing_table *table;
    ep_err err = ep_state_build_table(cluster, is_listed, &table);
    cluster->is_stale = err != EP_OK;
    if (err != EP_OK) { /* the old table stays; the next heartbeat tries again */
        ep_error_set(&cluster->placement_error, err,
                     "no routing table can be made of %zu nodes, %u models, %u layers: %s",
                     cluster->nodes_count, cluster->models_count, cluster->layers_count,
                     ep_err_text(err));
        return false;
    }
    choose_defaults(cluster, table);
    /* the epoch is still 0, so it covers the content only */
    uint64_t checksum = ep_routing_table_checksum(table);
    if (cluster->table != NULL && checksum == cluster->table_checksum &&
        same_choices(table, cluster->table)) {
        ep_error_clear(&cluster->table_error);
        ep_routing_table_unref(table);
        return true;
    }
    ep_error_clear(&cluster->table_error);
    err = check_size(table, &cluster->table_error);
    if (err != EP_OK) { /* too large: tried again only after a change */
        cluster->is_stale = err == EP_ERR_NO_MEMORY;
        ep_routing_table_unref(table);
        return false;
    }
    table->epoch = (ep_epoch){.term = cluster->config.term, .number = ++cluster->counter};
    ep_routing_table_unref(cluster->table);
    cluster->table = table;
    cluster->table_checksum = checksum;
    cluster->revision++;
    return true;
}

void ep_state_publish(ep_coordinator_state *cluster)
{
    bool is_settled =
        cluster->placed_once && settled(cluster) &&
        (cluster->committed_number == cluster->assignment_number || loses_nothing(cluster));
    if (!cluster->placed_once || (cluster->table == NULL && !is_settled)) {
        return;
    }
    const uint64_t committed_before = cluster->committed_number;
    cluster->committed_number = is_settled ? cluster->assignment_number : committed_before;
    for (size_t n = 0; is_settled && n < cluster->nodes_count; n++) {
        cluster->nodes[n]->is_out = node_is_emptied(cluster->nodes[n]);
    }
    if (!ep_state_republish(cluster)) {
        /* nodes must keep copies that the former table, still served, needs */
        cluster->committed_number = committed_before;
    } else if (cluster->committed_number != committed_before) {
        /* a store must learn that the table is of this assignment */
        cluster->revision++;
    }
}

ep_err ep_coordinator_state_set_default(ep_coordinator_state *cluster, const char *name,
                                        const char *version, char *out_before, ep_error *out_error)
{
    char have[EP_ERROR_TEXT_BYTES / 2] = "none";
    size_t used = 0;
    const uint32_t index = ep_state_find_model(cluster, name, version);
    out_before[0] = '\0';
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        const cluster_model *model = &cluster->models[m];
        if (model->is_default && strcmp(model->name, name) == 0) {
            strcpy(out_before, model->version);
        }
        if (used < sizeof(have)) {
            used += (size_t)snprintf(have + used, sizeof(have) - used, "%s%s %s", m > 0 ? ", " : "",
                                     model->name, model->version);
        }
    }
    if (index == UINT32_MAX) {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "no model %.100s in version '%.40s'; known: %s", name, version, have);
    }
    uint32_t served = 0;
    const ep_routing_model *model =
        cluster->table != NULL ? ep_routing_table_find_model(cluster->table, name, version, &served)
                               : NULL;
    if (model == NULL) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "version %.40s of model %.100s is not in the routing table yet; wait "
                            "until its nodes have loaded",
                            version, name);
    }
    const uint64_t without = experts_without_copy(cluster->table, served);
    if (without > 0) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "version %.40s of model %.100s is not whole: %llu of its experts have "
                            "no copy; wait until its nodes have loaded",
                            version, name, (unsigned long long)without);
    }
    for (uint32_t m = 0; m < cluster->models_count; m++) {
        if (strcmp(cluster->models[m].name, name) == 0) {
            cluster->models[m].is_default = m == index;
        }
    }
    cluster->is_stale |= !ep_state_republish(cluster);
    return EP_OK;
}

static bool is_neighbour(const cluster_node *node, const ep_routing_node *other)
{
    return node->host[0] != 0 && strcmp(other->host, node->host) == 0 &&
           strcmp(other->name, node->name) != 0;
}

ep_err ep_coordinator_state_neighbours(const ep_coordinator_state *cluster, const char *node,
                                       Expertd__V1__Neighbour ***out_list, size_t *out_count)
{
    const ep_routing_table *table = cluster->table;
    const cluster_node *self = ep_state_find_node(cluster, node);
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
