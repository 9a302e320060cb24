/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster/numerics_pick.h"

#include <string.h>

/* Copies of the model's experts on one node. */
static uint64_t copies_on(const ep_routing_table *table, uint32_t model_index, uint32_t node)
{
    uint64_t count = 0;
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        const uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
        for (uint32_t i = 0; layer->model_index == model_index && i < layer->offsets[experts];
             i++) {
            count += layer->copies[i] == node;
        }
    }
    return count;
}

const char *ep_numerics_pick(const ep_routing_table *table, uint32_t model_index)
{
    const ep_routing_model *model = &table->models[model_index];
    const char *best = NULL;
    uint32_t best_nodes = 0;
    uint64_t best_copies = 0;
    for (uint32_t id = 0; model->numerics_of_node != NULL && id < model->numerics_count; id++) {
        uint32_t nodes = 0;
        uint64_t copies = 0;
        for (uint32_t n = 0; n < table->nodes_count; n++) {
            const uint64_t held =
                model->numerics_of_node[n] == id ? copies_on(table, model_index, n) : 0;
            nodes += held > 0;
            copies += held;
        }
        if (nodes > best_nodes || (nodes == best_nodes && copies > best_copies)) {
            best = model->numerics[id];
            best_nodes = nodes;
            best_copies = copies;
        }
    }
    return best;
}

static bool has_copy(const ep_routing_model *model, const ep_routing_layer *layer, uint32_t expert,
                     const char *numerics)
{
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        const uint32_t id = model->numerics_of_node[layer->copies[i]];
        if (id < model->numerics_count && strcmp(model->numerics[id], numerics) == 0) {
            return true;
        }
    }
    return false;
}

bool ep_numerics_cover(const ep_routing_table *table, uint32_t model_index, const char *numerics)
{
    const ep_routing_model *model = &table->models[model_index];
    for (uint32_t l = 0; l < table->layers_count; l++) {
        const ep_routing_layer *layer = &table->layers[l];
        const uint32_t experts = layer->shape.experts + layer->shape.shared_experts;
        for (uint32_t e = 0; layer->model_index == model_index && e < experts; e++) {
            if (model->numerics_of_node == NULL || !has_copy(model, layer, e, numerics)) {
                return false;
            }
        }
    }
    return true;
}
