/* SPDX-License-Identifier: Apache-2.0 */
/* Building, sharing and searching routing tables. The checks are in routing_table_check.c. */
#include "moe/routing_table.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

int ep_epoch_compare(ep_epoch a, ep_epoch b)
{
    if (a.term != b.term) {
        return a.term < b.term ? -1 : 1;
    }
    if (a.number != b.number) {
        return a.number < b.number ? -1 : 1;
    }
    return 0;
}

ep_err ep_routing_table_create(uint32_t nodes_count, uint32_t models_count, uint32_t layers_count,
                               ep_routing_table **out_table)
{
    if (nodes_count > EP_NODES_MAX || models_count > EP_MODELS_MAX ||
        layers_count > EP_TABLE_LAYERS_MAX) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    ep_routing_table *table = calloc(1, sizeof(*table));
    if (table == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    table->refs = 1;
    table->nodes_count = nodes_count;
    table->models_count = models_count;
    table->layers_count = layers_count;
    /* At least one element each, so that NULL always means failure. */
    table->nodes = calloc((size_t)nodes_count + 1, sizeof(*table->nodes));
    table->models = calloc((size_t)models_count + 1, sizeof(*table->models));
    table->layers = calloc((size_t)layers_count + 1, sizeof(*table->layers));
    if (table->nodes == NULL || table->models == NULL || table->layers == NULL) {
        ep_routing_table_unref(table);
        return EP_ERR_NO_MEMORY;
    }
    *out_table = table;
    return EP_OK;
}

ep_err ep_routing_table_model_init(ep_routing_table *table, uint32_t index, const char *name,
                                   const char *version, uint32_t numerics_count)
{
    EP_ASSERT(index < table->models_count);
    ep_routing_model *model = &table->models[index];
    EP_ASSERT(model->numerics == NULL && model->numerics_of_node == NULL);
    if (strlen(name) >= sizeof(model->name) || strlen(version) >= sizeof(model->version) ||
        numerics_count > table->nodes_count) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    model->numerics = calloc((size_t)numerics_count + 1, sizeof(*model->numerics));
    model->numerics_of_node =
        calloc((size_t)table->nodes_count + 1, sizeof(*model->numerics_of_node));
    if (model->numerics == NULL || model->numerics_of_node == NULL) {
        return EP_ERR_NO_MEMORY; /* what was allocated is freed with the table */
    }
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        model->numerics_of_node[n] = UINT32_MAX;
    }
    strcpy(model->name, name);
    strcpy(model->version, version);
    model->numerics_count = numerics_count;
    return EP_OK;
}

ep_err ep_routing_table_layer_init(ep_routing_table *table, uint32_t index, uint32_t model_index,
                                   const ep_layer_shape *shape, uint32_t copies_total)
{
    EP_ASSERT(index < table->layers_count);
    ep_routing_layer *layer = &table->layers[index];
    EP_ASSERT(layer->offsets == NULL && layer->copies == NULL);
    uint64_t experts = (uint64_t)shape->experts + shape->shared_experts;
    if (experts > EP_EXPERTS_MAX || copies_total > experts * table->nodes_count) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    layer->offsets = calloc(experts + 1, sizeof(*layer->offsets));
    layer->copies = calloc((size_t)copies_total + 1, sizeof(*layer->copies));
    if (layer->offsets == NULL || layer->copies == NULL) {
        return EP_ERR_NO_MEMORY; /* what was allocated is freed with the table */
    }
    layer->model_index = model_index;
    layer->shape = *shape;
    return EP_OK;
}

ep_routing_table *ep_routing_table_ref(ep_routing_table *table)
{
    __atomic_fetch_add(&table->refs, 1, __ATOMIC_RELAXED);
    return table;
}

void ep_routing_table_unref(ep_routing_table *table)
{
    if (table == NULL || __atomic_sub_fetch(&table->refs, 1, __ATOMIC_ACQ_REL) != 0) {
        return;
    }
    for (uint32_t m = 0; table->models != NULL && m < table->models_count; m++) {
        free(table->models[m].numerics);
        free(table->models[m].numerics_of_node);
    }
    for (uint32_t l = 0; table->layers != NULL && l < table->layers_count; l++) {
        free(table->layers[l].offsets);
        free(table->layers[l].copies);
    }
    free(table->nodes);
    free(table->models);
    free(table->layers);
    free(table);
}

const ep_routing_model *ep_routing_table_find_model(const ep_routing_table *table, const char *name,
                                                    const char *version, uint32_t *out_index)
{
    bool any = version == NULL || version[0] == '\0';
    const ep_routing_model *found = NULL;
    for (uint32_t m = table->models_count; m-- > 0 && (found == NULL || !found->is_default);) {
        const ep_routing_model *model = &table->models[m];
        bool fits = strcmp(model->name, name) == 0 && (any || strcmp(model->version, version) == 0);
        if (fits && (found == NULL || model->is_default)) {
            found = model;
        }
    }
    if (found != NULL && out_index != NULL) {
        *out_index = (uint32_t)(found - table->models);
    }
    return found;
}

const ep_routing_layer *ep_routing_table_find_layer(const ep_routing_table *table,
                                                    uint32_t model_index, uint32_t layer)
{
    uint32_t low = 0;
    uint32_t high = table->layers_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const ep_routing_layer *found = &table->layers[middle];
        if (found->model_index == model_index && found->shape.layer == layer) {
            return found;
        }
        if (found->model_index < model_index ||
            (found->model_index == model_index && found->shape.layer < layer)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

/* FNV-1a. Integers enter as 8 little-endian bytes, strings with their terminator, so that different
 * tables give different input. */
static uint64_t digest_bytes(uint64_t digest, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++) {
        digest = (digest ^ p[i]) * 0x100000001b3ull;
    }
    return digest;
}

static uint64_t digest_u64(uint64_t digest, uint64_t value)
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(value >> (8 * i));
    }
    return digest_bytes(digest, bytes, sizeof(bytes));
}

static uint64_t digest_string(uint64_t digest, const char *text)
{
    return digest_bytes(digest, text, strlen(text) + 1);
}

static uint64_t digest_model(uint64_t digest, const ep_routing_model *model, uint32_t nodes_count)
{
    digest = digest_string(digest, model->name);
    digest = digest_string(digest, model->version);
    digest = digest_u64(digest, model->numerics_count);
    for (uint32_t i = 0; i < model->numerics_count; i++) {
        digest = digest_string(digest, model->numerics[i]);
    }
    for (uint32_t n = 0; n < nodes_count; n++) {
        digest = digest_u64(digest, model->numerics_of_node == NULL ? UINT32_MAX
                                                                    : model->numerics_of_node[n]);
    }
    return digest;
}

static uint64_t digest_layer(uint64_t digest, const ep_routing_layer *layer)
{
    const ep_layer_shape *shape = &layer->shape;
    const uint64_t numbers[] = {layer->model_index, shape->layer,     shape->hidden,
                                shape->inner,       shape->experts,   shape->shared_experts,
                                shape->top_k,       shape->activation};
    for (size_t i = 0; i < EP_ARRAY_COUNT(numbers); i++) {
        digest = digest_u64(digest, numbers[i]);
    }
    uint32_t experts = shape->experts + shape->shared_experts;
    for (uint32_t e = 0; e <= experts; e++) {
        digest = digest_u64(digest, layer->offsets[e]);
    }
    for (uint32_t i = 0; i < layer->offsets[experts]; i++) {
        digest = digest_u64(digest, layer->copies[i]);
    }
    return digest;
}

uint64_t ep_routing_table_checksum(const ep_routing_table *table)
{
    uint64_t digest = 0xcbf29ce484222325ull;
    digest = digest_u64(digest, table->epoch.term);
    digest = digest_u64(digest, table->epoch.number);
    digest = digest_string(digest, table->policy);
    digest = digest_u64(digest, table->decode_tokens_max);
    digest = digest_u64(digest, table->nodes_count);
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        digest = digest_u64(digest, table->nodes[n].node_id);
        digest = digest_string(digest, table->nodes[n].name);
        digest = digest_string(digest, table->nodes[n].url);
        /* otherwise the digest is that of builds that know no hosts, so stored tables stay
         * readable */
        if (table->nodes[n].host[0] != '\0') {
            digest = digest_string(digest, table->nodes[n].host);
        }
    }
    digest = digest_u64(digest, table->models_count);
    for (uint32_t m = 0; m < table->models_count; m++) {
        digest = digest_model(digest, &table->models[m], table->nodes_count);
    }
    digest = digest_u64(digest, table->layers_count);
    for (uint32_t l = 0; l < table->layers_count; l++) {
        digest = digest_layer(digest, &table->layers[l]);
    }
    return digest;
}

uint64_t ep_routing_table_policy_checksum(const ep_routing_table *table)
{
    const ep_caller_policy *policy = &table->caller_policy;
    uint64_t digest = digest_u64(ep_routing_table_checksum(table), policy->revision);
    digest = digest_u64(digest, policy->has_hedge_permille);
    return digest_u64(digest, policy->hedge_permille);
}

uint64_t ep_routing_table_mode_checksum(const ep_routing_table *table)
{
    return digest_u64(ep_routing_table_policy_checksum(table),
                      table->caller_policy.decode_nodes_min);
}

uint32_t ep_routing_table_count_nodes(const ep_routing_table *table, uint32_t model_index)
{
    const uint32_t *numerics = table->models[model_index].numerics_of_node;
    uint32_t count = 0;
    for (uint32_t n = 0; numerics != NULL && n < table->nodes_count; n++) {
        count += numerics[n] != UINT32_MAX;
    }
    return count;
}
