/* SPDX-License-Identifier: Apache-2.0 */
/* Lifetime of views, and look-ups with errors that a person can act on. A view remembers who held
 * an expert before the table lost its last copy, so that errors can name the node. */
#include "cluster/view.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe/host_plan.h"
#include "wire/relay_codec.h"

ep_err ep_view_create(ep_routing_table *taken_table, ep_view **out_view)
{
    ep_view *view = calloc(1, sizeof(*view));
    if (view == NULL) {
        ep_routing_table_unref(taken_table);
        return EP_ERR_NO_MEMORY;
    }
    view->refs = 1;
    view->table = taken_table;
    view->peers = calloc((size_t)taken_table->nodes_count + 1, sizeof(*view->peers));
    view->allowed = calloc((size_t)taken_table->nodes_count * taken_table->models_count + 1, 1);
    view->pins = calloc((size_t)taken_table->models_count + 1, sizeof(*view->pins));
    view->groups = calloc((size_t)taken_table->nodes_count + 1, sizeof(*view->groups));
    if (view->peers == NULL || view->allowed == NULL || view->pins == NULL ||
        view->groups == NULL ||
        ep_host_groups(taken_table, EP_RELAY_PARTS_MAX, view->groups) != EP_OK) {
        ep_view_unref(view);
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t n = 0; n < taken_table->nodes_count; n++) {
        view->has_groups |= view->groups[n] != n;
    }
    for (uint32_t m = 0; m < taken_table->models_count; m++) {
        view->pins[m] = "";
    }
    *out_view = view;
    return EP_OK;
}

ep_view *ep_view_ref(ep_view *view)
{
    __atomic_fetch_add(&view->refs, 1, __ATOMIC_RELAXED);
    return view;
}

void ep_view_unref(ep_view *view)
{
    if (view == NULL || __atomic_fetch_sub(&view->refs, 1, __ATOMIC_ACQ_REL) != 1) {
        return;
    }
    for (uint32_t n = 0; view->peers != NULL && n < view->table->nodes_count; n++) {
        ep_peer_unref(view->peers[n]);
    }
    ep_routing_table_unref(view->table);
    free(view->peers);
    free(view->groups);
    free(view->allowed);
    free((void *)(uintptr_t)view->pins);
    free(view->former);
    free(view);
}

static void list_models(const ep_routing_table *table, char *out_text, size_t bytes)
{
    size_t used = 0;
    out_text[0] = 0;
    for (uint32_t m = 0; m < table->models_count && used + 1 < bytes; m++) {
        int n = snprintf(out_text + used, bytes - used, "%s%s:%s", m == 0 ? "" : ", ",
                         table->models[m].name, table->models[m].version);
        used += n > 0 ? (size_t)n : 0;
    }
}

/* Without a default no version is chosen, because the order of versions is one of registration. */
static ep_err check_one_version(const ep_routing_table *table, const char *model,
                                ep_error *out_error)
{
    char have[256] = "";
    size_t used = 0;
    uint32_t count = 0;
    for (uint32_t m = 0; m < table->models_count; m++) {
        if (strcmp(table->models[m].name, model) != 0) {
            continue;
        }
        if (used + 1 < sizeof(have)) {
            int n = snprintf(have + used, sizeof(have) - used, "%s%s", count == 0 ? "" : ", ",
                             table->models[m].version);
            used += n > 0 ? (size_t)n : 0;
        }
        count++;
    }
    if (count > 1) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "model %s has several versions, none of them whole yet: %s%s; name "
                            "one, or set the default: expertctl "
                            "model default %s VERSION",
                            model, have, used < sizeof(have) ? "" : "...", model);
    }
    return EP_OK;
}

static ep_err no_layer(const ep_routing_table *table, uint32_t model_index, uint32_t layer,
                       ep_error *out_error)
{
    const ep_routing_model *model = &table->models[model_index];
    const ep_routing_layer *first = NULL;
    const ep_routing_layer *last = NULL;
    for (uint32_t l = 0; l < table->layers_count; l++) { /* ascending */
        last = table->layers[l].model_index == model_index ? &table->layers[l] : last;
        first = first == NULL ? last : first;
    }
    return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                        "model %s:%s has no MoE layer %" PRIu32 "; those it has are within %" PRIu32
                        "..%" PRIu32,
                        model->name, model->version, layer, first != NULL ? first->shape.layer : 0,
                        last != NULL ? last->shape.layer : 0);
}

ep_err ep_view_find(ep_view *view, const char *model, const char *version, uint32_t layer,
                    ep_view_layer *out_found, ep_error *out_error)
{
    uint32_t model_index = 0;
    bool has_version = version != NULL && version[0] != 0;
    const ep_routing_model *found =
        ep_routing_table_find_model(view->table, model, version, &model_index);
    if (found == NULL) {
        char have[256];
        list_models(view->table, have, sizeof(have));
        return ep_error_set(
            out_error, EP_ERR_NOT_FOUND, "no model %s%s%s in the routing table; it has: %s", model,
            has_version ? ":" : "", has_version ? version : "", have[0] != 0 ? have : "none");
    }
    if (!has_version && !found->is_default && view->table->models_count > 1) {
        ep_err err = check_one_version(view->table, model, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    const ep_routing_layer *l = ep_routing_table_find_layer(view->table, model_index, layer);
    if (l == NULL) {
        return no_layer(view->table, model_index, layer, out_error);
    }
    *out_found = (ep_view_layer){view, model_index, l};
    return EP_OK;
}

bool ep_view_has_numerics(const ep_view *view, uint32_t model_index, ep_error *out_error)
{
    const ep_routing_model *model = &view->table->models[model_index];
    const uint32_t nodes = view->table->nodes_count;
    const uint8_t *allowed = &view->allowed[(size_t)model_index * nodes];
    if (memchr(allowed, 1, nodes) != NULL) {
        return true;
    }
    if (model->numerics_count == 0 || view->pins[model_index][0] == 0) {
        /* no node, or no copy to choose an id by: calls wait, and numerics are not the cause */
        return true;
    }
    char have[256] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < model->numerics_count && used + 1 < sizeof(have); i++) {
        int n = snprintf(have + used, sizeof(have) - used, "%s%s", i == 0 ? "" : ", ",
                         model->numerics[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                 "model %s:%s is pinned to numerics '%s', but its nodes offer only: %s",
                 model->name, model->version, view->pins[model_index], have);
    return false;
}

/* ---- former owners ---- */

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
