/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a table from the wire or a file; each error names the place. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "moe/routing_table.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

ep_err ep_layer_shape_check(const ep_layer_shape *shape, ep_error *out_error)
{
    if (shape->layer > INT32_MAX) {
        return BAD("layer %" PRIu32 ": allowed 0..%d", shape->layer, INT32_MAX);
    }
    if (shape->hidden < 1 || shape->hidden > EP_HIDDEN_MAX) {
        return BAD("layer %" PRIu32 ": hidden %" PRIu32 ": allowed 1..%d", shape->layer,
                   shape->hidden, EP_HIDDEN_MAX);
    }
    if (shape->inner < 1 || shape->inner > EP_INNER_MAX) {
        return BAD("layer %" PRIu32 ": inner %" PRIu32 ": allowed 1..%d", shape->layer,
                   shape->inner, EP_INNER_MAX);
    }
    if (shape->experts < 1 || shape->experts > EP_EXPERTS_MAX) {
        return BAD("layer %" PRIu32 ": %" PRIu32 " experts: allowed 1..%d", shape->layer,
                   shape->experts, EP_EXPERTS_MAX);
    }
    if (shape->shared_experts > EP_EXPERTS_MAX - shape->experts) {
        return BAD("layer %" PRIu32 ": %" PRIu32 " shared experts: allowed 0..%" PRIu32
                   " beside %" PRIu32 " routed ones",
                   shape->layer, shape->shared_experts, EP_EXPERTS_MAX - shape->experts,
                   shape->experts);
    }
    if (shape->top_k < 1 || shape->top_k > EP_TOP_K_MAX) {
        return BAD("layer %" PRIu32 ": top_k %" PRIu32 ": allowed 1..%d", shape->layer,
                   shape->top_k, EP_TOP_K_MAX);
    }
    if ((unsigned)shape->activation >= EP_ACT_COUNT) {
        return BAD("layer %" PRIu32 ": activation %u: allowed 0..%u", shape->layer,
                   (unsigned)shape->activation, (unsigned)EP_ACT_COUNT - 1);
    }
    if (shape->shared_inner > EP_INNER_MAX) {
        return BAD("layer %" PRIu32 ": shared inner %" PRIu32 ": allowed 0..%d", shape->layer,
                   shape->shared_inner, EP_INNER_MAX);
    }
    const ep_activation_numbers *numbers = &shape->numbers;
    if (!isfinite(numbers->alpha) || !isfinite(numbers->beta) || !isfinite(numbers->limit)) {
        return BAD("layer %" PRIu32 ": activation with alpha %g, beta %g, limit %g: allowed are "
                   "finite numbers",
                   shape->layer, (double)numbers->alpha, (double)numbers->beta,
                   (double)numbers->limit);
    }
    return EP_OK;
}

static bool is_terminated(const char *text, size_t capacity_bytes)
{
    return memchr(text, '\0', capacity_bytes) != NULL;
}

static bool is_name(const char *text, size_t capacity_bytes)
{
    return text[0] != '\0' && is_terminated(text, capacity_bytes);
}

static int compare_ids(const void *a, const void *b)
{
    uint32_t x = (*(const ep_routing_node *const *)a)->node_id;
    uint32_t y = (*(const ep_routing_node *const *)b)->node_id;
    return (x > y) - (x < y);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const ep_routing_node *const *)a)->name,
                  (*(const ep_routing_node *const *)b)->name);
}

/* Sorted neighbours that are equal are duplicates. */
static ep_err check_distinct_nodes(const ep_routing_table *table, const ep_routing_node **sorted,
                                   ep_error *out_error)
{
    uint32_t count = table->nodes_count;
    qsort(sorted, count, sizeof(*sorted), compare_ids);
    for (uint32_t n = 1; n < count; n++) {
        if (sorted[n - 1]->node_id == sorted[n]->node_id) {
            return BAD("node id %" PRIu32 " is given twice: to %s and to %s", sorted[n]->node_id,
                       sorted[n - 1]->name, sorted[n]->name);
        }
    }
    qsort(sorted, count, sizeof(*sorted), compare_names);
    for (uint32_t n = 1; n < count; n++) {
        if (strcmp(sorted[n - 1]->name, sorted[n]->name) == 0) {
            return BAD("node name %s is given twice", sorted[n]->name);
        }
    }
    return EP_OK;
}

static ep_err check_nodes(const ep_routing_table *table, ep_error *out_error)
{
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        const ep_routing_node *node = &table->nodes[n];
        if (!is_name(node->name, sizeof(node->name)) ||
            !is_terminated(node->url, sizeof(node->url))) {
            return BAD("node %" PRIu32 " of the routing table has no proper name or url", n);
        }
        if (!is_terminated(node->host, sizeof(node->host))) {
            return BAD("the host of node %s has more than %zu characters", node->name,
                       sizeof(node->host) - 1);
        }
    }
    const ep_routing_node **sorted = calloc((size_t)table->nodes_count + 1, sizeof(*sorted));
    if (sorted == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory to check a routing table of %" PRIu32 " nodes",
                            table->nodes_count);
    }
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        sorted[n] = &table->nodes[n];
    }
    ep_err err = check_distinct_nodes(table, sorted, out_error);
    free(sorted);
    return err;
}

static ep_err check_model(const ep_routing_table *table, uint32_t index, ep_error *out_error)
{
    const ep_routing_model *model = &table->models[index];
    if (!is_name(model->name, sizeof(model->name)) ||
        !is_terminated(model->version, sizeof(model->version))) {
        return BAD("model %" PRIu32 " of the routing table has no proper name or version", index);
    }
    for (uint32_t m = 0; m < index; m++) {
        if (strcmp(table->models[m].name, model->name) == 0 &&
            strcmp(table->models[m].version, model->version) == 0) {
            return BAD("model %s version %s is given twice", model->name, model->version);
        }
    }
    for (uint32_t i = 0; i < model->numerics_count; i++) {
        if (!is_name(model->numerics[i], sizeof(model->numerics[i]))) {
            return BAD("model %s: numerics id %" PRIu32 " is empty or too long", model->name, i);
        }
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(model->numerics[i], model->numerics[j]) == 0) {
                return BAD("model %s: numerics id %s is given twice", model->name,
                           model->numerics[i]);
            }
        }
    }
    for (uint32_t n = 0; model->numerics_of_node != NULL && n < table->nodes_count; n++) {
        uint32_t numerics = model->numerics_of_node[n];
        if (numerics != UINT32_MAX && numerics >= model->numerics_count) {
            return BAD("model %s, node %s: numerics index %" PRIu32 ": the model has %" PRIu32,
                       model->name, table->nodes[n].name, numerics, model->numerics_count);
        }
    }
    return EP_OK;
}

/* seen[n] holds the last expert (plus one) with a copy on node n. */
static ep_err check_expert(const ep_routing_table *table, const ep_routing_layer *layer,
                           uint32_t expert, uint32_t *seen, ep_error *out_error)
{
    const ep_routing_model *model = &table->models[layer->model_index];
    uint32_t number = layer->shape.layer;
    if (layer->offsets[expert + 1] - layer->offsets[expert] > table->nodes_count) {
        return BAD("model %s, layer %" PRIu32 ", expert %" PRIu32 ": %" PRIu32
                   " copies: allowed 0..%" PRIu32 ", one per node",
                   model->name, number, expert, layer->offsets[expert + 1] - layer->offsets[expert],
                   table->nodes_count);
    }
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        uint32_t node = layer->copies[i];
        if (node >= table->nodes_count) {
            return BAD("model %s, layer %" PRIu32 ", expert %" PRIu32 ": node index %" PRIu32
                       ": the table has %" PRIu32 " nodes",
                       model->name, number, expert, node, table->nodes_count);
        }
        if (seen[node] == expert + 1) {
            return BAD("model %s, layer %" PRIu32 ": expert %" PRIu32 " has two copies on node %s",
                       model->name, number, expert, table->nodes[node].name);
        }
        if (model->numerics_of_node != NULL && model->numerics_of_node[node] == UINT32_MAX) {
            return BAD("model %s, layer %" PRIu32 ": expert %" PRIu32
                       " has a copy on node %s, which does not serve the model",
                       model->name, number, expert, table->nodes[node].name);
        }
        seen[node] = expert + 1;
    }
    return EP_OK;
}

/* Checks all offsets before any copy is read: they are the bounds of the copies. */
static ep_err check_offsets(const char *model, const ep_routing_layer *layer, ep_error *out_error)
{
    if (layer->offsets == NULL || layer->copies == NULL || layer->offsets[0] != 0) {
        return BAD("model %s, layer %" PRIu32 ": its copies do not begin at offset 0", model,
                   layer->shape.layer);
    }
    for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
        if (layer->offsets[e] > layer->offsets[e + 1]) {
            return BAD("model %s, layer %" PRIu32 ", expert %" PRIu32 ": offset %" PRIu32
                       " is above the next one, %" PRIu32,
                       model, layer->shape.layer, e, layer->offsets[e], layer->offsets[e + 1]);
        }
    }
    return EP_OK;
}

static ep_err check_layer(const ep_routing_table *table, uint32_t index, uint32_t *seen,
                          ep_error *out_error)
{
    const ep_routing_layer *layer = &table->layers[index];
    if (layer->model_index >= table->models_count) {
        return BAD("layer entry %" PRIu32 ": model index %" PRIu32 ": the table has %" PRIu32
                   " models",
                   index, layer->model_index, table->models_count);
    }
    const char *model = table->models[layer->model_index].name;
    ep_err err = ep_layer_shape_check(&layer->shape, out_error);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "model %s", model);
    }
    if (index > 0) {
        const ep_routing_layer *before = &table->layers[index - 1];
        if (before->model_index > layer->model_index ||
            (before->model_index == layer->model_index &&
             before->shape.layer >= layer->shape.layer)) {
            return BAD("model %s, layer %" PRIu32 " follows model %s, layer %" PRIu32
                       ": layers must ascend",
                       model, layer->shape.layer, table->models[before->model_index].name,
                       before->shape.layer);
        }
    }
    err = check_offsets(model, layer, out_error);
    if (err != EP_OK) {
        return err;
    }
    memset(seen, 0, table->nodes_count * sizeof(*seen));
    for (uint32_t e = 0; e < layer->shape.experts + layer->shape.shared_experts; e++) {
        err = check_expert(table, layer, e, seen, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

ep_err ep_routing_table_check(const ep_routing_table *table, ep_error *out_error)
{
    if (!is_terminated(table->policy, sizeof(table->policy))) {
        return BAD("the routing table's policy has no end");
    }
    ep_err err = check_nodes(table, out_error);
    for (uint32_t m = 0; m < table->models_count && err == EP_OK; m++) {
        err = check_model(table, m, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    uint32_t *seen = calloc((size_t)table->nodes_count + 1, sizeof(*seen));
    if (seen == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory to check a routing table of %" PRIu32 " nodes",
                            table->nodes_count);
    }
    for (uint32_t l = 0; l < table->layers_count && err == EP_OK; l++) {
        err = check_layer(table, l, seen, out_error);
    }
    free(seen);
    return err;
}
