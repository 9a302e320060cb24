/* SPDX-License-Identifier: Apache-2.0 */
/* Membership: the nodes, what each offers and owns, and which are silent. */
#include "coordinator/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/printable.h"
#include "coordinator/state_private.h"
#include "rpc/rpc_credentials.h"
#include "wire/placement_codec.h"

static const char *const state_names[] = {"starting", "serving", "draining", "degraded", "suspect"};

static ep_err check_name(const char *what, const char *value, size_t bytes_max, ep_error *out_error)
{
    size_t length = strlen(value);
    if (length == 0 || length >= bytes_max) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%s has %zu characters, allowed 1..%zu", what, length, bytes_max - 1);
    }
    size_t good = ep_text_printable_bytes(value, false);
    if (good < length) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "%s has byte 0x%02x at offset %zu, allowed UTF-8 without blanks and control characters",
            what, (unsigned char)value[good], good);
    }
    return EP_OK;
}

/* so that the sum over all experts of a table stays far below 2^64 */
#define EXPERT_BYTES_MAX (UINT64_C(1) << 40)

/* Uses the check that clients apply to tables, so that no layer is accepted that they refuse. */
static ep_err check_layer(const char *model, const Expertd__V1__LayerInfo *info,
                          ep_error *out_error)
{
    ep_layer_shape shape = ep_layer_shape_of(info);
    ep_err err = ep_layer_shape_check(&shape, out_error);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "model %s", model);
    }
    uint64_t total = (uint64_t)info->experts + info->shared_experts;
    if (info->expert_bytes > EXPERT_BYTES_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "model %s, layer %u: an expert of %llu bytes, allowed 0..%llu", model,
                            info->layer, (unsigned long long)info->expert_bytes,
                            (unsigned long long)EXPERT_BYTES_MAX);
    }
    if (info->n_owned_digests != 0 && info->n_owned_digests != info->n_owned) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "model %s, layer %u: %zu digests of %zu owned experts, allowed 0 or one each", model,
            info->layer, info->n_owned_digests, info->n_owned);
    }
    for (size_t i = 0; i < info->n_owned; i++) {
        if (info->owned[i] >= total) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "model %s, layer %u: owned expert %u, allowed 0..%llu", model,
                                info->layer, info->owned[i], (unsigned long long)total - 1);
        }
    }
    return EP_OK;
}

static bool same_shape(const ep_layer_shape *a, const ep_layer_shape *b)
{
    return a->hidden == b->hidden && a->inner == b->inner && a->experts == b->experts &&
           a->shared_experts == b->shared_experts && a->top_k == b->top_k &&
           a->activation == b->activation;
}

static int compare_numbers(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* Refuses a layer that is described twice, perhaps in two sizes. */
static ep_err check_layers_differ(const Expertd__V1__ModelInfo *model, ep_error *out_error)
{
    ep_err err = EP_OK;
    uint32_t *numbers = calloc(model->n_layers + 1, sizeof(*numbers));
    if (numbers == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory to check %zu layers of model %s", model->n_layers,
                            model->name);
    }
    for (size_t l = 0; l < model->n_layers; l++) {
        numbers[l] = model->layers[l]->layer;
    }
    qsort(numbers, model->n_layers, sizeof(*numbers), compare_numbers);
    for (size_t l = 1; err == EP_OK && l < model->n_layers; l++) {
        if (numbers[l] == numbers[l - 1]) {
            err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                               "model %s, layer %u is given twice", model->name, numbers[l]);
        }
    }
    free(numbers);
    return err;
}

/*
 * The most bytes that a layer takes in a table: its fields, an offset of three bytes per expert,
 * and a node number of two per copy, with one copy more than wanted while experts move.
 */
static uint64_t layer_table_bytes(const ep_coordinator_state_config *config, uint64_t experts)
{
    const uint64_t spare_max = experts * config->nodes_max;
    const uint64_t spare = config->spare_copies < spare_max ? config->spare_copies : spare_max;
    return 128 + experts * (3 + 2 * (config->copies + 1u)) + 2 * spare;
}

uint64_t ep_state_table_bytes(const ep_coordinator_state *cluster,
                              const ep_coordinator_state_config *config)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        bytes += layer_table_bytes(config, layer_experts(&cluster->layers[i]));
    }
    return bytes;
}

/* One node must not fill the table that all share: a larger one can neither be made nor sent. */
static ep_err check_room(ep_coordinator_state *cluster, Expertd__V1__ModelInfo **models,
                         size_t count, ep_error *out_error)
{
    size_t models_after = cluster->models_count;
    size_t layers_after = cluster->layers_count;
    uint64_t bytes_after = ep_state_table_bytes(cluster, &cluster->config);
    if (count > EP_MODELS_MAX) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED, "%zu models, allowed up to %d",
                            count, EP_MODELS_MAX);
    }
    for (size_t m = 0; m < count; m++) {
        uint32_t index = ep_state_find_model(cluster, models[m]->name, models[m]->version);
        models_after += index == UINT32_MAX;
        for (size_t l = 0; l < models[m]->n_layers; l++) {
            const Expertd__V1__LayerInfo *info = models[m]->layers[l];
            if (index == UINT32_MAX ||
                ep_state_find_layer(cluster, index, info->layer) == UINT32_MAX) {
                layers_after++;
                bytes_after += layer_table_bytes(&cluster->config,
                                                 (uint64_t)info->experts + info->shared_experts);
            }
        }
        for (size_t before = 0; before < m; before++) {
            if (strcmp(models[before]->name, models[m]->name) == 0 &&
                strcmp(models[before]->version, models[m]->version) == 0) {
                return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                    "model %.100s version %.31s is given twice", models[m]->name,
                                    models[m]->version);
            }
        }
    }
    if (models_after > EP_MODELS_MAX || layers_after > EP_TABLE_LAYERS_MAX) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "with these models all nodes together would have %zu models and %zu "
                            "layers, allowed up to %d and %d",
                            models_after, layers_after, EP_MODELS_MAX, EP_TABLE_LAYERS_MAX);
    }
    if (bytes_after > EP_COORDINATOR_TABLE_BYTES_MAX) {
        return ep_error_set(
            out_error, EP_ERR_RESOURCE_EXHAUSTED,
            "with these %zu models all layers together would make a table of up to %llu bytes with "
            "%u copies and %u spare ones, "
            "clients take up to %llu; serve fewer models, or versions, from one coordinator",
            count, (unsigned long long)bytes_after, cluster->config.copies,
            cluster->config.spare_copies, (unsigned long long)EP_COORDINATOR_TABLE_BYTES_MAX);
    }
    return EP_OK;
}

/* Checks a whole request before anything is changed. */
static ep_err check_models(ep_coordinator_state *cluster, Expertd__V1__ModelInfo **models,
                           size_t count, ep_error *out_error)
{
    ep_err err = check_room(cluster, models, count, out_error);
    if (err != EP_OK) {
        return err;
    }
    for (size_t m = 0; m < count; m++) {
        const Expertd__V1__ModelInfo *model = models[m];
        err = check_name("model name", model->name, EP_MODEL_NAME_BYTES, out_error);
        err = err != EP_OK
                  ? err
                  : check_name("model version", model->version, EP_VERSION_BYTES, out_error);
        err = err != EP_OK
                  ? err
                  : check_name("numerics id", model->numerics, EP_NUMERICS_BYTES, out_error);
        err = err != EP_OK ? err : check_layers_differ(model, out_error);
        if (err != EP_OK) {
            return err;
        }
        uint32_t model_index = ep_state_find_model(cluster, model->name, model->version);
        for (size_t l = 0; l < model->n_layers; l++) {
            const Expertd__V1__LayerInfo *info = model->layers[l];
            err = check_layer(model->name, info, out_error);
            if (err != EP_OK) {
                return err;
            }
            uint32_t index = ep_state_find_layer(cluster, model_index, info->layer);
            if (index == UINT32_MAX) {
                continue;
            }
            const ep_layer_shape *known = &cluster->layers[index].shape;
            ep_layer_shape offered = ep_layer_shape_of(info);
            if (!same_shape(known, &offered)) {
                return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                    "model %s, layer %u has %u experts, %u shared, hidden %u, "
                                    "inner %u, top_k %u, activation %u; other nodes of "
                                    "version %s have %u, %u, %u, %u, %u, %u",
                                    model->name, info->layer, info->experts, info->shared_experts,
                                    info->hidden, info->inner, info->top_k, info->activation,
                                    model->version, known->experts, known->shared_experts,
                                    known->hidden, known->inner, known->top_k,
                                    (unsigned)known->activation);
            }
        }
    }
    return EP_OK;
}

/* Takes the copies of a layer that the node reports; whether they are used is judged later. */
static bool take_held(const ep_coordinator_state *cluster, cluster_node *node, uint32_t index,
                      const Expertd__V1__LayerInfo *info)
{
    node_layer *layer = &node->layers[index];
    if (info->n_owned_digests > 0 && layer->digests == NULL) {
        layer->digests = calloc(layer_experts(&cluster->layers[index]), sizeof(uint32_t));
        if (layer->digests == NULL) {
            return false;
        }
    }
    layer->offered = true;
    for (size_t i = 0; i < info->n_owned; i++) {
        bit_set(layer->held, info->owned[i]);
        /* 0: not read yet; a later report has it */
        if (info->n_owned_digests > 0 && info->owned_digests[i] != 0) {
            layer->digests[info->owned[i]] = info->owned_digests[i];
        }
    }
    return true;
}

/* Replaces what the node offers and holds by its new report. */
static ep_err apply_models(ep_coordinator_state *cluster, cluster_node *node,
                           Expertd__V1__ModelInfo **models, size_t count)
{
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        node->layers[i].offered = false;
        memset(node->layers[i].held, 0, layer_words(&cluster->layers[i]) * sizeof(uint64_t));
    }
    for (uint32_t i = 0; i < cluster->models_count; i++) {
        node->numerics[i][0] = 0;
    }
    for (size_t m = 0; m < count; m++) {
        uint32_t model_index = ep_state_find_model(cluster, models[m]->name, models[m]->version);
        if (model_index == UINT32_MAX) {
            model_index = ep_state_add_model(cluster, models[m]->name, models[m]->version);
        }
        if (model_index == UINT32_MAX) {
            return EP_ERR_NO_MEMORY;
        }
        snprintf(node->numerics[model_index], EP_NUMERICS_BYTES, "%s", models[m]->numerics);
        for (size_t l = 0; l < models[m]->n_layers; l++) {
            const Expertd__V1__LayerInfo *info = models[m]->layers[l];
            uint32_t index = ep_state_find_layer(cluster, model_index, info->layer);
            ep_layer_shape shape = ep_layer_shape_of(info);
            index = index != UINT32_MAX ? index : ep_state_add_layer(cluster, model_index, &shape);
            if (index == UINT32_MAX || !take_held(cluster, node, index, info)) {
                return EP_ERR_NO_MEMORY;
            }
            if (!cluster->layers[index].shape.form_told) {
                cluster->layers[index].shape = shape; /* an older node has registered first */
            }
            /* nodes may pack experts differently: the largest size counts */
            if (info->expert_bytes > cluster->layers[index].expert_bytes) {
                cluster->layers[index].expert_bytes = info->expert_bytes;
            }
        }
    }
    return EP_OK;
}

static bool is_offered(const ep_coordinator_state *cluster, uint32_t model_index)
{
    for (size_t n = 0; n < cluster->nodes_count; n++) {
        if (cluster->nodes[n]->numerics[model_index][0] != 0) {
            return true;
        }
    }
    return false;
}

/* Forgets versions that no node offers any more. This frees room in the table, and clients do not
 * see models without copies. */
static void forget_unoffered(ep_coordinator_state *cluster)
{
    for (uint32_t m = cluster->models_count; m-- > 0;) {
        if (!is_offered(cluster, m)) {
            ep_state_forget_model(cluster, m);
        }
    }
}

/* Whether this is the same process as before; assumed of an older version, which has no secret. */
static bool knows_secret(const cluster_node *node, const char *secret)
{
    return node->secret[0] == 0 || ep_rpc_token_equal(node->secret, secret);
}

/* A new process of the node may have another checkpoint. */
static void forget_digests(const ep_coordinator_state *cluster, cluster_node *node)
{
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        free(node->layers[i].digests);
        node->layers[i].digests = NULL;
    }
}

/* A process that has ended sends no heartbeats; after this time another one may take its name. */
static uint64_t free_after_ns(const ep_coordinator_state *cluster)
{
    return 2 * (uint64_t)cluster->config.heartbeat_ms * EP_NS_PER_MS;
}

static ep_err check_register(ep_coordinator_state *cluster,
                             const Expertd__V1__RegisterRequest *request, ep_error *out_error)
{
    ep_err err = check_name("node name", request->node, EP_NODE_NAME_BYTES, out_error);
    err = err != EP_OK ? err : check_name("node url", request->url, EP_URL_BYTES, out_error);
    if (err == EP_OK && request->host[0] != 0) {
        char what[EP_NODE_NAME_BYTES + 16];
        snprintf(what, sizeof(what), "host of node %.63s", request->node);
        err = check_name(what, request->host, EP_HOST_BYTES, out_error);
    }
    if (err == EP_OK && strlen(request->secret) >= EP_NODE_SECRET_BYTES) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                           "secret of node %s has %zu characters, allowed up to %d", request->node,
                           strlen(request->secret), EP_NODE_SECRET_BYTES - 1);
    }
    return err != EP_OK ? err
                        : check_models(cluster, request->models, request->n_models, out_error);
}

/* Checks whether the name may be taken. node: its present holder; NULL: none. */
static ep_err check_place(const ep_coordinator_state *cluster, const cluster_node *node,
                          uint64_t now_ns, const Expertd__V1__RegisterRequest *request,
                          ep_error *out_error)
{
    bool is_live = node != NULL && node_is_listed(node) && !node->is_restored;
    if (is_live && !knows_secret(node, request->secret) &&
        now_ns - node->last_seen_ns <= free_after_ns(cluster)) {
        return ep_error_set(out_error, EP_ERR_ALREADY_EXISTS,
                            "node name %s is in use by a live node at %s, and this is another "
                            "process; after a restart the name is free once the "
                            "process before has been silent for %llu ms",
                            node->name, node->url,
                            (unsigned long long)(free_after_ns(cluster) / EP_NS_PER_MS));
    }
    if (is_live && node->incarnation != request->incarnation &&
        strcmp(node->url, request->url) != 0) {
        return ep_error_set(out_error, EP_ERR_ALREADY_EXISTS,
                            "node name %s is in use by a live node at %s", request->node,
                            node->url);
    }
    if (node == NULL && cluster->nodes_count >= cluster->config.nodes_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "node %s: %zu nodes are known, nodes_max is %u", request->node,
                            cluster->nodes_count, cluster->config.nodes_max);
    }
    return EP_OK;
}

ep_err ep_coordinator_state_register(ep_coordinator_state *cluster, uint64_t now_ns,
                                     const Expertd__V1__RegisterRequest *request,
                                     uint32_t *out_node_id, ep_error *out_error)
{
    ep_err err = check_register(cluster, request, out_error);
    if (err != EP_OK) {
        return err;
    }
    cluster_node *node = ep_state_find_node(cluster, request->node);
    err = check_place(cluster, node, now_ns, request, out_error);
    if (err != EP_OK) {
        return err;
    }
    const bool is_same = node != NULL && node->incarnation == request->incarnation;
    if (node != NULL && !is_same) {
        forget_digests(cluster, node);
    }
    cluster->rebalance |= node == NULL; /* a new node gets a part of the others' copies */
    node = node != NULL ? node : ep_state_add_node(cluster, request->node);
    if (node == NULL || apply_models(cluster, node, request->models, request->n_models) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to register node %s",
                            request->node);
    }
    ep_state_votes_drop(cluster, node->name);
    ep_state_lost_remove(cluster, node->name);
    forget_unoffered(cluster);
    snprintf(node->url, sizeof(node->url), "%s", request->url);
    snprintf(node->host, sizeof(node->host), "%s", request->host);
    snprintf(node->secret, sizeof(node->secret), "%s", request->secret);
    node->incarnation = request->incarnation;
    node->state = NODE_STARTING;
    node->is_restored = false;
    node->is_leaving = false;
    node->last_seen_ns = now_ns;
    node->current_ns = now_ns;
    /* a new registration tries failed experts again */
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        memset(node->layers[i].failed, 0, layer_words(&cluster->layers[i]) * sizeof(uint64_t));
    }
    cluster->revision++;
    node->loaded_number = 0;
    node->turn_ns = 0;
    node->speed = is_same ? node->speed : (node_speed){0};
    node->capacity_bytes = request->capacity_bytes;
    /* restarted with devices: it can compute again */
    cluster->rebalance |= node_has_no_device(node) && !is_same;
    expertd__v1__node_entry__init(&node->told);
    node->tls_error[0] = '\0';
    *out_node_id = node->node_id;
    (void)ep_state_judge_copies(cluster);
    ep_move_pace_tick(&cluster->pace, cluster->config.move_rate, now_ns);
    ep_state_place(cluster);
    ep_state_publish(cluster);
    return EP_OK;
}

#define STATE_LEAVING "leaving" /* not a state of its own: the node serves */

static node_state state_from_name(const char *name)
{
    if (strcmp(name, STATE_LEAVING) == 0) {
        return NODE_SERVING;
    }
    for (int i = NODE_STARTING; i <= NODE_DEGRADED; i++) {
        if (strcmp(state_names[i], name) == 0) {
            return (node_state)i;
        }
    }
    return NODE_DEGRADED;
}

/*
 * Marks assigned experts as failed that the node has not loaded from a finished assignment, or all
 * if it has no device. True: there are new ones. Only for a report with the list of owned experts.
 */
static bool note_failures(const ep_coordinator_state *cluster, const cluster_node *node)
{
    bool is_news = false;
    for (uint32_t i = 0; i < cluster->layers_count; i++) {
        node_layer *layer = &node->layers[i];
        for (size_t w = 0; w < layer_words(&cluster->layers[i]); w++) {
            uint64_t failed =
                (node_has_no_device(node) ? UINT64_MAX : layer->assigned[w]) & ~layer->owned[w];
            is_news |= (failed & ~layer->failed[w]) != 0;
            layer->failed[w] = (layer->failed[w] & ~layer->owned[w]) | failed;
        }
    }
    return is_news;
}

ep_err ep_coordinator_state_heartbeat(ep_coordinator_state *cluster, uint64_t now_ns,
                                      const Expertd__V1__HeartbeatRequest *request,
                                      bool *out_reregister, ep_error *out_error)
{
    cluster_node *node = ep_state_find_node(cluster, request->node);
    *out_reregister =
        node == NULL || node->incarnation != request->incarnation || node->is_restored;
    if (*out_reregister) {
        return EP_OK;
    }
    if (!knows_secret(node, request->secret)) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "heartbeat of node %s without the secret it registered with",
                            node->name);
    }
    if (request->n_models > 0) {
        ep_err err = check_models(cluster, request->models, request->n_models, out_error);
        if (err != EP_OK) {
            return err;
        }
        if (apply_models(cluster, node, request->models, request->n_models) != EP_OK) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                "no memory for the heartbeat of node %s", request->node);
        }
        forget_unoffered(cluster);
    }
    node_state before = node->state;
    uint64_t loaded_before = node->loaded_number;
    node->last_seen_ns = now_ns;
    node->told.rows_served = request->rows_served;
    node->told.requests_failed = request->requests_failed;
    node->told.requests_hedged = request->requests_hedged;
    node->told.requests_refused = request->requests_refused;
    node->told.weight_bytes = request->weight_bytes;
    node->told.weight_quant_error = request->weight_quant_error;
    node->told.weight_quant_output_error = request->weight_quant_output_error;
    node->told.tls_expiry = request->tls_expiry;
    node->told.devices = request->devices;
    node->told.devices_lost = request->devices_lost;
    snprintf(node->tls_error, sizeof(node->tls_error), "%s", request->tls_error);
    ep_state_take_speed(node, request);
    ep_state_take_progress(node, now_ns, request->experts_to_load);
    node->state = state_from_name(request->state);
    if (request->epoch != NULL && request->epoch->term == cluster->config.term) {
        node->loaded_number = request->epoch->number;
    }
    bool is_judged_anew =
        (request->n_models > 0 || before != node->state) && ep_state_judge_copies(cluster);
    bool is_loaded = cluster->placed_once && node->loaded_number >= cluster->assignment_number;
    node->current_ns = is_loaded || !cluster->placed_once ? now_ns : node->current_ns;
    node->turn_ns = is_loaded ? 0 : node->turn_ns;
    bool has_failed = is_loaded && request->n_models > 0 && note_failures(cluster, node);
    bool was_leaving = node->is_leaving;
    node->is_leaving = strcmp(request->state, STATE_LEAVING) == 0;
    bool came_back = was_leaving && !node->is_leaving && node->state != NODE_DRAINING;
    cluster->rebalance |= came_back;
    if (is_judged_anew || has_failed || was_leaving != node->is_leaving ||
        (before == NODE_DRAINING) != (node->state == NODE_DRAINING)) {
        ep_state_place(cluster);
    }
    /* Making a table takes nodes x experts x layers steps, and most heartbeats do not change it. */
    if (before != node->state || loaded_before != node->loaded_number ||
        was_leaving != node->is_leaving || request->n_models > 0 || cluster->is_stale) {
        ep_state_publish(cluster);
    }
    return EP_OK;
}

static void forget_node(ep_coordinator_state *cluster, size_t index, uint64_t now_ns)
{
    cluster_node *node = cluster->nodes[index];
    ep_state_votes_keep(cluster, node,
                        now_ns + (uint64_t)cluster->config.restore_ms * EP_NS_PER_MS);
    memmove(&cluster->nodes[index], &cluster->nodes[index + 1],
            (--cluster->nodes_count - index) * sizeof(cluster->nodes[0]));
    ep_state_node_free(node, cluster->layers_count);
    cluster->revision++;
}

static uint64_t later(uint64_t time_ns, uint64_t by_ns, uint64_t now_ns)
{
    return time_ns + by_ns < now_ns ? time_ns + by_ns : now_ns;
}

void ep_coordinator_state_excuse(ep_coordinator_state *cluster, uint64_t now_ns, uint64_t blind_ns)
{
    for (size_t i = 0; i < cluster->nodes_count; i++) {
        cluster_node *node = cluster->nodes[i];
        node->last_seen_ns = later(node->last_seen_ns, blind_ns, now_ns);
        node->current_ns = later(node->current_ns, blind_ns, now_ns);
        node->turn_ns = node->turn_ns != 0 ? later(node->turn_ns, blind_ns, now_ns) : 0;
    }
    for (size_t i = 0; i < cluster->former_votes_count; i++) {
        cluster->former_votes[i].until_ns += blind_ns;
    }
}

void ep_coordinator_state_tick(ep_coordinator_state *cluster, uint64_t now_ns)
{
    uint64_t dead_ns = (uint64_t)cluster->config.heartbeat_ms *
                       cluster->config.heartbeat_dead_count * EP_NS_PER_MS;
    uint64_t restore_ns = dead_ns + (uint64_t)cluster->config.restore_ms * EP_NS_PER_MS;
    bool removed = ep_state_votes_expire(cluster, now_ns);
    /* a placement that failed for want of memory is tried again */
    bool changed = cluster->placement_error.code == EP_ERR_NO_MEMORY;
    for (size_t i = cluster->nodes_count; i-- > 0;) {
        cluster_node *node = cluster->nodes[i];
        uint64_t silent_ns = now_ns - node->last_seen_ns;
        /* a draining node does not come back */
        if (silent_ns > restore_ns || (silent_ns > dead_ns && node->state == NODE_DRAINING)) {
            if (node->state != NODE_DRAINING && !node_is_emptied(node)) {
                ep_state_lost_add(cluster, node);
            }
            forget_node(cluster, i, now_ns);
            removed = true;
        } else if (node->state != NODE_SUSPECT && silent_ns > dead_ns) {
            /* a restored node too has until restore_ns to come back */
            node->state = NODE_SUSPECT;
            changed = true;
        }
    }
    if (removed) {
        forget_unoffered(cluster);
    }
    bool is_judged_anew = (removed || changed) && ep_state_judge_copies(cluster);
    ep_move_pace_tick(&cluster->pace, cluster->config.move_rate, now_ns);
    if (removed || is_judged_anew || cluster->placement_error.code == EP_ERR_NO_MEMORY) {
        ep_state_place(cluster);
    }
    if (removed || changed) {
        ep_state_publish(cluster);
    }
    ep_state_place_waiting(cluster);
    ep_state_compare_speeds(cluster, now_ns);
}

ep_epoch ep_coordinator_state_assignment_epoch(const ep_coordinator_state *cluster)
{
    return (ep_epoch){.term = cluster->config.term, .number = cluster->assignment_number};
}

ep_epoch ep_coordinator_state_committed_epoch(const ep_coordinator_state *cluster)
{
    return (ep_epoch){.term = cluster->config.term, .number = cluster->committed_number};
}

ep_routing_table *ep_coordinator_state_table(const ep_coordinator_state *cluster)
{
    return cluster->table;
}

const ep_error *ep_coordinator_state_placement_error(const ep_coordinator_state *cluster)
{
    return cluster->table_error.code != EP_OK ? &cluster->table_error : &cluster->placement_error;
}

uint64_t ep_coordinator_state_revision(const ep_coordinator_state *cluster)
{
    return cluster->revision;
}

const ep_error *ep_coordinator_state_left_out(const ep_coordinator_state *cluster)
{
    return &cluster->left_out;
}

const ep_error *ep_coordinator_state_copy_error(const ep_coordinator_state *cluster)
{
    return &cluster->copy_error;
}

const char *ep_state_shown(const ep_coordinator_state *cluster, const cluster_node *node)
{
    /* if a drained node is away, its own state says more */
    if (!node_is_emptied(node) || !node_is_listed(node) || node->is_restored) {
        return state_names[node->state];
    }
    return ep_state_copies_of(cluster, node) > 0 ? state_names[NODE_DRAINING] : "drained";
}

bool ep_coordinator_state_node(const ep_coordinator_state *cluster, size_t index, uint64_t now_ns,
                               Expertd__V1__NodeEntry *out_entry)
{
    if (index >= cluster->nodes_count) {
        return false;
    }
    cluster_node *node = cluster->nodes[index];
    const node_speed *speed = &node->speed;
    const uint64_t slow_ns =
        speed->slow_since_ns != 0 ? cluster->compared_ns - speed->slow_since_ns : 0;
    *out_entry = node->told;
    out_entry->node_id = node->node_id;
    out_entry->name = node->name;
    out_entry->url = node->url;
    out_entry->host = node->host;
    out_entry->state = (char *)(uintptr_t)ep_state_shown(cluster, node);
    out_entry->incarnation = node->incarnation;
    out_entry->last_seen_ms = (now_ns - node->last_seen_ns) / EP_NS_PER_MS;
    out_entry->behind_ms = (node->last_seen_ns - node->current_ns) / EP_NS_PER_MS;
    out_entry->waits_to_load = node->waits_turn;
    out_entry->tls_error = node->tls_error;
    out_entry->speed = speed->against_median;
    out_entry->slow_ms = slow_ns / EP_NS_PER_MS;
    return true;
}

void ep_coordinator_state_assignments_free(Expertd__V1__NodeAssignment **list, size_t count)
{
    for (size_t i = 0; i < count && list != NULL; i++) {
        if (list[i] != NULL) {
            free(list[i]->experts);
            free(list[i]);
        }
    }
    free(list);
}

static Expertd__V1__NodeAssignment *make_assignment(const ep_coordinator_state *cluster,
                                                    const cluster_node *node, uint32_t index)
{
    const cluster_layer *layer = &cluster->layers[index];
    Expertd__V1__NodeAssignment *a = malloc(sizeof(*a));
    if (a == NULL) {
        return NULL;
    }
    expertd__v1__node_assignment__init(a);
    a->model = cluster->models[layer->model_index].name;
    a->version = cluster->models[layer->model_index].version;
    a->layer = layer->shape.layer;
    a->experts = calloc(layer_experts(layer), sizeof(uint32_t));
    if (a->experts == NULL) {
        free(a);
        return NULL;
    }
    for (uint32_t e = 0; e < layer_experts(layer); e++) {
        if (bit_get(node->layers[index].assigned, e)) {
            a->experts[a->n_experts++] = e;
        }
    }
    return a;
}

ep_err ep_coordinator_state_assignments(const ep_coordinator_state *cluster, const char *name,
                                        Expertd__V1__NodeAssignment ***out_list, size_t *out_count)
{
    const cluster_node *node = ep_state_find_node(cluster, name);
    if (node == NULL) {
        return EP_ERR_NOT_FOUND;
    }
    Expertd__V1__NodeAssignment **list = calloc(cluster->layers_count + 1, sizeof(*list));
    size_t count = 0;
    for (uint32_t i = 0; list != NULL && i < cluster->layers_count; i++) {
        if (!node->layers[i].offered) {
            continue;
        }
        list[count] = make_assignment(cluster, node, i);
        if (list[count] == NULL) {
            ep_coordinator_state_assignments_free(list, count);
            return EP_ERR_NO_MEMORY;
        }
        count++;
    }
    if (list == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    *out_list = list;
    *out_count = count;
    return EP_OK;
}

uint32_t ep_coordinator_state_layer_experts(void *cluster_arg, const char *model,
                                            const char *version, uint32_t layer)
{
    ep_coordinator_state *cluster = cluster_arg;
    uint32_t index =
        ep_state_find_layer(cluster, ep_state_find_model(cluster, model, version), layer);
    return index != UINT32_MAX ? cluster->layers[index].shape.experts : 0;
}
