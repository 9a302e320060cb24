/* SPDX-License-Identifier: Apache-2.0 */
/* Remembers who held an expert before the table lost its last copy, so that errors can name the
 * node. */
#include <stdlib.h>
#include <string.h>

#include "cluster/view.h"

static const ep_routing_layer *same_layer(const ep_view *old, const ep_view *view,
                                          const ep_routing_layer *layer, uint32_t *out_index)
{
    const ep_routing_model *model = &view->table->models[layer->model_index];
    uint32_t model_index = 0;
    if (ep_routing_table_find_model(old->table, model->name, model->version, &model_index) ==
        NULL) {
        return NULL;
    }
    const ep_routing_layer *found =
        ep_routing_table_find_layer(old->table, model_index, layer->shape.layer);
    if (found != NULL) {
        *out_index = (uint32_t)(found - old->table->layers);
    }
    return found;
}

static uint32_t node_by_name(const ep_routing_table *table, const char *name)
{
    for (uint32_t n = 0; n < table->nodes_count; n++) {
        if (strcmp(table->nodes[n].name, name) == 0) {
            return n;
        }
    }
    return UINT32_MAX;
}

/* Node index in the old table, or UINT32_MAX. */
static uint32_t old_owner(const ep_view *old, const ep_routing_layer *layer, uint32_t layer_index,
                          uint32_t expert)
{
    if (expert >= layer->shape.experts + layer->shape.shared_experts) {
        return UINT32_MAX;
    }
    if (layer->offsets[expert] < layer->offsets[expert + 1]) {
        return layer->copies[layer->offsets[expert]];
    }
    return ep_view_former_owner(old, layer_index, expert);
}

static bool add(ep_view *view, uint32_t layer_index, uint32_t expert, uint32_t node)
{
    if ((view->former_count & (view->former_count - 1)) == 0) { /* grows at powers of two */
        size_t capacity = view->former_count == 0 ? 1 : 2 * (size_t)view->former_count;
        ep_former_owner *grown = realloc(view->former, capacity * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        view->former = grown;
    }
    view->former[view->former_count++] = (ep_former_owner){layer_index, expert, node};
    return true;
}

void ep_view_note_former(ep_view *view, const ep_view *old)
{
    for (uint32_t l = 0; l < view->table->layers_count; l++) {
        const ep_routing_layer *layer = &view->table->layers[l];
        uint32_t old_index = 0;
        const ep_routing_layer *before = same_layer(old, view, layer, &old_index);
        for (uint32_t e = 0;
             before != NULL && e < layer->shape.experts + layer->shape.shared_experts; e++) {
            if (layer->offsets[e] < layer->offsets[e + 1]) {
                continue;
            }
            uint32_t owner = old_owner(old, before, old_index, e);
            uint32_t node = owner == UINT32_MAX
                                ? UINT32_MAX
                                : node_by_name(view->table, old->table->nodes[owner].name);
            if (node != UINT32_MAX && !add(view, l, e, node)) {
                return; /* only a name in an error is lost */
            }
        }
    }
}

uint32_t ep_view_former_owner(const ep_view *view, uint32_t layer_index, uint32_t expert)
{
    for (uint32_t i = 0; i < view->former_count; i++) {
        if (view->former[i].layer_index == layer_index && view->former[i].expert == expert) {
            return view->former[i].node;
        }
    }
    return UINT32_MAX;
}
