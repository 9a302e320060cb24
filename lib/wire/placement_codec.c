/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing tables as protobuf-c messages. Encoded messages are allocated as the unpacker would, so
 * that protobuf-c's own function frees them. A table refers to nodes by index, the wire by id.
 */
#include "wire/placement_codec.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define NO_NODE UINT32_MAX
#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

typedef Expertd__V1__PlacementSnapshot snapshot_message;
typedef Expertd__V1__ModelTable model_message;
typedef Expertd__V1__LayerTable layer_message;

/* ---- encode ---- */

/* For "" the message's empty default stays, because the freeing function recognises it. */
static bool set_string(char **field, const char *text)
{
    if (text[0] == '\0') {
        return true;
    }
    *field = strdup(text);
    return *field != NULL;
}

static bool copy_u32(const uint32_t *values, size_t count, size_t *out_count, uint32_t **out_values)
{
    if (count == 0) {
        return true;
    }
    uint32_t *copy = malloc(count * sizeof(*copy));
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, values, count * sizeof(*copy));
    *out_values = copy;
    *out_count = count;
    return true;
}

/* Allocates an array of message pointers; the caller's count grows with the messages put in. */
static void *new_pointers(size_t count)
{
    return calloc(count + 1, sizeof(void *));
}

static bool encode_nodes(const ep_routing_table *table, snapshot_message *snapshot)
{
    snapshot->nodes = new_pointers(table->nodes_count);
    for (uint32_t n = 0; snapshot->nodes != NULL && n < table->nodes_count; n++) {
        Expertd__V1__NodeEntry *node = malloc(sizeof(*node));
        if (node == NULL) {
            return false;
        }
        expertd__v1__node_entry__init(node);
        snapshot->nodes[snapshot->n_nodes++] = node;
        node->node_id = table->nodes[n].node_id;
        if (!set_string(&node->name, table->nodes[n].name) ||
            !set_string(&node->url, table->nodes[n].url) ||
            !set_string(&node->host, table->nodes[n].host)) {
            return false;
        }
    }
    return snapshot->nodes != NULL;
}

static bool encode_model(const ep_routing_table *table, const ep_routing_model *model,
                         model_message *message)
{
    message->is_default = model->is_default;
    message->numerics = new_pointers(model->numerics_count);
    message->node_ids = calloc((size_t)table->nodes_count + 1, sizeof(uint32_t));
    message->numerics_of_node = calloc((size_t)table->nodes_count + 1, sizeof(uint32_t));
    if (!set_string(&message->name, model->name) ||
        !set_string(&message->version, model->version) || message->numerics == NULL ||
        message->node_ids == NULL || message->numerics_of_node == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < model->numerics_count; i++) {
        message->numerics[i] = strdup(model->numerics[i]);
        if (message->numerics[i] == NULL) {
            return false;
        }
        message->n_numerics++;
    }
    for (uint32_t n = 0; model->numerics_of_node != NULL && n < table->nodes_count; n++) {
        if (model->numerics_of_node[n] != UINT32_MAX) {
            message->node_ids[message->n_node_ids++] = table->nodes[n].node_id;
            message->numerics_of_node[message->n_numerics_of_node++] = model->numerics_of_node[n];
        }
    }
    return true;
}

static bool encode_models(const ep_routing_table *table, snapshot_message *snapshot)
{
    snapshot->models = new_pointers(table->models_count);
    for (uint32_t m = 0; snapshot->models != NULL && m < table->models_count; m++) {
        model_message *message = malloc(sizeof(*message));
        if (message == NULL) {
            return false;
        }
        expertd__v1__model_table__init(message);
        snapshot->models[snapshot->n_models++] = message;
        if (!encode_model(table, &table->models[m], message)) {
            return false;
        }
    }
    return snapshot->models != NULL;
}

static bool encode_layer(const ep_routing_table *table, const ep_routing_layer *layer,
                         layer_message *message)
{
    const ep_layer_shape *shape = &layer->shape;
    const ep_routing_model *model = &table->models[layer->model_index];
    uint32_t experts = shape->experts + shape->shared_experts;
    message->layer = shape->layer;
    message->hidden = shape->hidden;
    message->inner = shape->inner;
    message->experts = shape->experts;
    message->shared_experts = shape->shared_experts;
    message->top_k = shape->top_k;
    message->activation = shape->activation;
    message->form_told = shape->form_told;
    message->shared_inner = shape->shared_inner;
    message->alpha = shape->numbers.alpha;
    message->beta = shape->numbers.beta;
    message->limit = shape->numbers.limit;
    if (!set_string(&message->model, model->name) ||
        !set_string(&message->version, model->version) ||
        !copy_u32(layer->offsets, (size_t)experts + 1, &message->n_offsets, &message->offsets) ||
        !copy_u32(layer->copies, layer->offsets[experts], &message->n_node_ids,
                  &message->node_ids)) {
        return false;
    }
    for (size_t i = 0; i < message->n_node_ids; i++) {
        message->node_ids[i] = table->nodes[message->node_ids[i]].node_id;
    }
    return true;
}

static bool encode_layers(const ep_routing_table *table, snapshot_message *snapshot)
{
    snapshot->layers = new_pointers(table->layers_count);
    for (uint32_t l = 0; snapshot->layers != NULL && l < table->layers_count; l++) {
        layer_message *message = malloc(sizeof(*message));
        if (message == NULL) {
            return false;
        }
        expertd__v1__layer_table__init(message);
        snapshot->layers[snapshot->n_layers++] = message;
        if (!encode_layer(table, &table->layers[l], message)) {
            return false;
        }
    }
    return snapshot->layers != NULL;
}

static bool encode_policy(const ep_routing_table *table, snapshot_message *snapshot)
{
    const ep_caller_policy *policy = &table->caller_policy;
    if (policy->revision == 0) {
        return true;
    }
    Expertd__V1__CallerPolicy *message = malloc(sizeof(*message));
    if (message == NULL) {
        return false;
    }
    expertd__v1__caller_policy__init(message);
    message->revision = policy->revision;
    message->has_hedge_permille = policy->has_hedge_permille;
    message->hedge_permille = policy->hedge_permille;
    message->checksum = ep_routing_table_policy_checksum(table);
    message->decode_nodes_min = policy->decode_nodes_min;
    message->mode_checksum = ep_routing_table_mode_checksum(table);
    snapshot->caller_policy = message;
    return true;
}

ep_err ep_placement_encode(const ep_routing_table *table,
                           Expertd__V1__PlacementSnapshot **out_snapshot)
{
    snapshot_message *snapshot = malloc(sizeof(*snapshot));
    if (snapshot == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    expertd__v1__placement_snapshot__init(snapshot);
    snapshot->epoch = malloc(sizeof(*snapshot->epoch));
    if (snapshot->epoch == NULL) {
        ep_placement_snapshot_free(snapshot);
        return EP_ERR_NO_MEMORY;
    }
    expertd__v1__epoch__init(snapshot->epoch);
    snapshot->epoch->term = table->epoch.term;
    snapshot->epoch->number = table->epoch.number;
    snapshot->decode_tokens_max = table->decode_tokens_max;
    snapshot->checksum = ep_routing_table_checksum(table);
    if (!set_string(&snapshot->policy, table->policy) || !encode_nodes(table, snapshot) ||
        !encode_models(table, snapshot) || !encode_layers(table, snapshot) ||
        !encode_policy(table, snapshot)) {
        ep_placement_snapshot_free(snapshot);
        return EP_ERR_NO_MEMORY;
    }
    *out_snapshot = snapshot;
    return EP_OK;
}

void ep_placement_snapshot_free(Expertd__V1__PlacementSnapshot *snapshot)
{
    if (snapshot != NULL) {
        expertd__v1__placement_snapshot__free_unpacked(snapshot, NULL);
    }
}

/* ---- decode ---- */

/* A node id of the snapshot with its index; sorted by id. */
typedef struct {
    uint32_t node_id;
    uint32_t index;
} id_entry;

static int compare_entries(const void *a, const void *b)
{
    uint32_t x = ((const id_entry *)a)->node_id;
    uint32_t y = ((const id_entry *)b)->node_id;
    return (x > y) - (x < y);
}

/* The index of a node; NO_NODE: it is not listed. */
static uint32_t find_node(const ep_routing_table *table, const id_entry *ids, uint32_t node_id)
{
    const id_entry key = {node_id, 0};
    const id_entry *found = bsearch(&key, ids, table->nodes_count, sizeof(key), compare_entries);
    return found != NULL ? found->index : NO_NODE;
}

static ep_err get_string(const char *what, const char *text, size_t capacity_bytes, char *out,
                         ep_error *out_error)
{
    size_t bytes = strlen(text);
    if (bytes >= capacity_bytes) {
        return BAD("%s of the snapshot has %zu characters: allowed up to %zu", what, bytes,
                   capacity_bytes - 1);
    }
    memcpy(out, text, bytes + 1);
    return EP_OK;
}

static ep_err decode_nodes(const snapshot_message *snapshot, ep_routing_table *table, id_entry *ids,
                           ep_error *out_error)
{
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        const Expertd__V1__NodeEntry *message = snapshot->nodes[n];
        ep_routing_node *node = &table->nodes[n];
        ep_err err;
        if ((err = get_string("a node's name", message->name, sizeof(node->name), node->name,
                              out_error)) != EP_OK ||
            (err = get_string("a node's url", message->url, sizeof(node->url), node->url,
                              out_error)) != EP_OK ||
            (err = get_string("a node's host", message->host, sizeof(node->host), node->host,
                              out_error)) != EP_OK) {
            return err;
        }
        node->node_id = message->node_id;
        ids[n] = (id_entry){message->node_id, n};
    }
    qsort(ids, table->nodes_count, sizeof(*ids), compare_entries);
    return EP_OK;
}

static ep_err decode_model(const model_message *message, ep_routing_table *table, uint32_t index,
                           const id_entry *ids, ep_error *out_error)
{
    if (message->n_numerics > table->nodes_count) {
        return BAD("model %s of the snapshot has %zu numerics ids: allowed up to %" PRIu32
                   ", one per node",
                   message->name, message->n_numerics, table->nodes_count);
    }
    if (message->n_node_ids != message->n_numerics_of_node) {
        return BAD("model %s of the snapshot has %zu nodes and %zu numerics of nodes",
                   message->name, message->n_node_ids, message->n_numerics_of_node);
    }
    ep_err err = ep_routing_table_model_init(table, index, message->name, message->version,
                                             (uint32_t)message->n_numerics);
    if (err == EP_ERR_INVALID_ARGUMENT) {
        return BAD("name or version of model %" PRIu32
                   " of the snapshot is too long: allowed up to %d and %d characters",
                   index, EP_MODEL_NAME_BYTES - 1, EP_VERSION_BYTES - 1);
    }
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for model %s of the snapshot",
                            message->name);
    }
    ep_routing_model *model = &table->models[index];
    for (uint32_t m = 0; message->is_default && m < index; m++) {
        if (table->models[m].is_default && strcmp(table->models[m].name, message->name) == 0) {
            return BAD("model %s of the snapshot has two default versions: %s and %s",
                       message->name, table->models[m].version, message->version);
        }
    }
    model->is_default = message->is_default;
    for (size_t i = 0; i < message->n_numerics && err == EP_OK; i++) {
        err = get_string("a numerics id", message->numerics[i], EP_NUMERICS_BYTES,
                         model->numerics[i], out_error);
    }
    for (size_t i = 0; i < message->n_node_ids && err == EP_OK; i++) {
        const uint32_t node = find_node(table, ids, message->node_ids[i]);
        if (node == NO_NODE) {
            return BAD("model %s of the snapshot is served by node id %" PRIu32
                       ", which is not listed",
                       message->name, message->node_ids[i]);
        }
        if (model->numerics_of_node[node] != UINT32_MAX) {
            return BAD("model %s of the snapshot lists node id %" PRIu32 " twice", message->name,
                       message->node_ids[i]);
        }
        model->numerics_of_node[node] = message->numerics_of_node[i];
    }
    return err;
}

static ep_err decode_copies(const layer_message *message, const ep_routing_table *table,
                            const id_entry *ids, ep_routing_layer *layer, ep_error *out_error)
{
    uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
    memcpy(layer->offsets, message->offsets, ((size_t)experts + 1) * sizeof(*layer->offsets));
    if (layer->offsets[experts] != message->n_node_ids) {
        return BAD("model %s, layer %" PRIu32 ": last offset %" PRIu32
                   ": the layer lists %zu copies",
                   message->model, message->layer, layer->offsets[experts], message->n_node_ids);
    }
    for (size_t i = 0; i < message->n_node_ids; i++) {
        layer->copies[i] = find_node(table, ids, message->node_ids[i]);
        if (layer->copies[i] == NO_NODE) {
            return BAD("model %s, layer %" PRIu32 ": a copy is on node id %" PRIu32
                       ", which is not listed",
                       message->model, message->layer, message->node_ids[i]);
        }
    }
    return EP_OK;
}

ep_layer_shape ep_layer_shape_of(const Expertd__V1__LayerInfo *info)
{
    return (ep_layer_shape){.layer = info->layer,
                            .hidden = info->hidden,
                            .inner = info->inner,
                            .experts = info->experts,
                            .shared_experts = info->shared_experts,
                            .top_k = info->top_k,
                            .activation = (ep_activation)info->activation,
                            .form_told = info->form_told,
                            .shared_inner = info->shared_inner,
                            .numbers = {info->alpha, info->beta, info->limit}};
}

static ep_err decode_layer(const layer_message *message, ep_routing_table *table, uint32_t index,
                           const id_entry *ids, ep_error *out_error)
{
    const ep_layer_shape shape = {
        .layer = message->layer,
        .hidden = message->hidden,
        .inner = message->inner,
        .experts = message->experts,
        .shared_experts = message->shared_experts,
        .top_k = message->top_k,
        .activation = (ep_activation)message->activation,
        .form_told = message->form_told,
        .shared_inner = message->shared_inner,
        .numbers = {message->alpha, message->beta, message->limit},
    };
    ep_err err = ep_layer_shape_check(&shape, out_error);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "model %s", message->model);
    }
    uint32_t model_index = 0; /* the exact pair: an empty version does not mean "any" here */
    while (model_index < table->models_count &&
           (strcmp(table->models[model_index].name, message->model) != 0 ||
            strcmp(table->models[model_index].version, message->version) != 0)) {
        model_index++;
    }
    if (model_index == table->models_count) {
        return BAD("layer %" PRIu32
                   " of the snapshot belongs to model %s version '%s', which is not listed",
                   message->layer, message->model, message->version);
    }
    size_t experts = (size_t)shape.experts + shape.shared_experts;
    if (message->n_offsets != experts + 1) {
        return BAD("model %s, layer %" PRIu32 ": %zu offsets: %zu experts need %zu", message->model,
                   message->layer, message->n_offsets, experts, experts + 1);
    }
    if (message->n_node_ids > experts * table->nodes_count) {
        return BAD(
            "model %s, layer %" PRIu32 ": %zu copies: allowed up to %zu, one per expert and node",
            message->model, message->layer, message->n_node_ids, experts * table->nodes_count);
    }
    err = ep_routing_table_layer_init(table, index, model_index, &shape,
                                      (uint32_t)message->n_node_ids);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for layer %" PRIu32 " of the snapshot",
                            message->layer);
    }
    return decode_copies(message, table, ids, &table->layers[index], out_error);
}

/* Comes after the table's own checksum. A damaged policy refuses the table too, since clients would
 * hedge as nobody wants. */
static ep_err decode_policy(const Expertd__V1__CallerPolicy *message, ep_routing_table *table,
                            ep_error *out_error)
{
    if (message == NULL) {
        return EP_OK;
    }
    table->caller_policy = (ep_caller_policy){.revision = message->revision,
                                              .has_hedge_permille = message->has_hedge_permille,
                                              .hedge_permille = message->hedge_permille,
                                              .decode_nodes_min = message->decode_nodes_min};
    if (message->checksum != ep_routing_table_policy_checksum(table)) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                            "checksum of the snapshot's policy is %016" PRIx64
                            ", its content gives %016" PRIx64,
                            message->checksum, ep_routing_table_policy_checksum(table));
    }
    const bool has_mode = message->decode_nodes_min != 0 || message->mode_checksum != 0;
    if (has_mode && message->mode_checksum != ep_routing_table_mode_checksum(table)) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                            "checksum of the mode in the snapshot's policy is %016" PRIx64
                            ", its content gives %016" PRIx64,
                            message->mode_checksum, ep_routing_table_mode_checksum(table));
    }
    if (message->decode_nodes_min > EP_NODES_MAX) {
        return BAD("the snapshot's policy has decode_nodes_min %" PRIu32 ": allowed 0..%d",
                   message->decode_nodes_min, EP_NODES_MAX);
    }
    if (message->revision == 0) {
        return BAD("the snapshot's policy has revision 0: allowed 1 or more");
    }
    if (message->hedge_permille > (message->has_hedge_permille ? EP_HEDGE_PERMILLE_MAX : 0)) {
        return BAD("the snapshot's policy has hedge_permille %" PRIu32 ": allowed 0..%d",
                   message->hedge_permille,
                   message->has_hedge_permille ? EP_HEDGE_PERMILLE_MAX : 0);
    }
    return EP_OK;
}

static ep_err decode_parts(const snapshot_message *snapshot, ep_routing_table *table, id_entry *ids,
                           ep_error *out_error)
{
    ep_err err =
        get_string("the policy", snapshot->policy, sizeof(table->policy), table->policy, out_error);
    if (err == EP_OK) {
        err = decode_nodes(snapshot, table, ids, out_error);
    }
    for (uint32_t m = 0; m < table->models_count && err == EP_OK; m++) {
        err = decode_model(snapshot->models[m], table, m, ids, out_error);
    }
    for (uint32_t l = 0; l < table->layers_count && err == EP_OK; l++) {
        err = decode_layer(snapshot->layers[l], table, l, ids, out_error);
    }
    if (err == EP_OK) {
        err = ep_routing_table_check(table, out_error);
    }
    if (err == EP_OK && snapshot->checksum != ep_routing_table_checksum(table)) {
        err = ep_error_set(out_error, EP_ERR_DATA_LOSS,
                           "checksum of the snapshot is %016" PRIx64
                           ", its content gives %016" PRIx64,
                           snapshot->checksum, ep_routing_table_checksum(table));
    }
    return err != EP_OK ? err : decode_policy(snapshot->caller_policy, table, out_error);
}

ep_err ep_placement_decode(const Expertd__V1__PlacementSnapshot *snapshot,
                           ep_routing_table **out_table, ep_error *out_error)
{
    if (snapshot->epoch == NULL) {
        return BAD("the snapshot has no epoch");
    }
    if (snapshot->n_nodes > EP_NODES_MAX || snapshot->n_models > EP_MODELS_MAX ||
        snapshot->n_layers > EP_TABLE_LAYERS_MAX) {
        return BAD("the snapshot has %zu nodes, %zu models, %zu layers: allowed up to %d, %d, %d",
                   snapshot->n_nodes, snapshot->n_models, snapshot->n_layers, EP_NODES_MAX,
                   EP_MODELS_MAX, EP_TABLE_LAYERS_MAX);
    }
    ep_routing_table *table = NULL;
    id_entry *ids = calloc(snapshot->n_nodes + 1, sizeof(*ids));
    ep_err err = ids == NULL ? EP_ERR_NO_MEMORY
                             : ep_routing_table_create((uint32_t)snapshot->n_nodes,
                                                       (uint32_t)snapshot->n_models,
                                                       (uint32_t)snapshot->n_layers, &table);
    if (err != EP_OK) {
        free(ids);
        return ep_error_set(out_error, err, "no memory for a routing table");
    }
    table->epoch = (ep_epoch){snapshot->epoch->term, snapshot->epoch->number};
    table->decode_tokens_max = snapshot->decode_tokens_max;
    err = decode_parts(snapshot, table, ids, out_error);
    free(ids);
    if (err != EP_OK) {
        ep_routing_table_unref(table);
        return err;
    }
    *out_table = table;
    return EP_OK;
}
