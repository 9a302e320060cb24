/* SPDX-License-Identifier: Apache-2.0 */
/* Static placement: applies an expert map to a model and its nodes. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "placement/placement.h"
#include "placement/placer.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

/* How many devices list each expert of a layer, and the range of the experts' numbers. */
typedef struct {
    uint32_t *counts; /* [EP_EXPERTS_MAX] */
    uint32_t span;    /* highest expert + 1 */
    uint32_t distinct;
    uint32_t copies_max;
} coverage;

static void cover(const ep_expert_map_layer *layer, coverage *c)
{
    memset(c->counts, 0, EP_EXPERTS_MAX * sizeof(*c->counts));
    c->span = 0;
    c->distinct = 0;
    for (uint32_t i = 0; i < layer->offsets[layer->devices_count]; i++) {
        uint32_t expert = layer->experts[i];
        uint32_t count = ++c->counts[expert];
        c->distinct += count == 1;
        c->span = expert >= c->span ? expert + 1 : c->span;
        c->copies_max = count > c->copies_max ? count : c->copies_max;
    }
}

static ep_err find_out_of_range(const ep_expert_map *map, uint32_t index, uint32_t experts,
                                ep_error *out_error)
{
    const ep_expert_map_layer *layer = &map->layers[index];
    for (uint32_t d = 0; d < layer->devices_count; d++) {
        for (uint32_t i = layer->offsets[d]; i < layer->offsets[d + 1]; i++) {
            if (layer->experts[i] >= experts) {
                return BAD("%s: layer_id %" PRIu32 ", device_id %" PRIu32 ": expert %" PRIu32
                           ": allowed 0..%" PRIu32,
                           map->file, index, d, layer->experts[i], experts - 1);
            }
        }
    }
    return EP_OK;
}

static ep_err check_layer(const ep_placement_input *input, const ep_expert_map *map, uint32_t index,
                          coverage *c, ep_error *out_error)
{
    const ep_expert_map_layer *layer = &map->layers[index];
    uint32_t experts = input->layers[index].shape.experts;
    if (layer->devices_count > input->nodes_count) {
        return BAD("%s: layer_id %" PRIu32 ": device_count %" PRIu32 ": the cluster has %" PRIu32
                   " nodes",
                   map->file, index, layer->devices_count, input->nodes_count);
    }
    cover(layer, c);
    /* no gaps: this is a map of another model, not a typing error */
    if (c->distinct == c->span && c->span != experts) {
        return BAD("%s: layer_id %" PRIu32 ": routing table has %" PRIu32
                   " experts, model has %" PRIu32,
                   map->file, index, c->span, experts);
    }
    ep_err err = find_out_of_range(map, index, experts, out_error);
    for (uint32_t e = 0; e < experts && err == EP_OK; e++) {
        if (c->counts[e] == 0) {
            err = BAD("%s: layer_id %" PRIu32 ": expert %" PRIu32
                      " is on no device: every expert of 0..%" PRIu32 " needs one",
                      map->file, index, e, experts - 1);
        }
    }
    return err;
}

/* *out_copies_max: the most devices that list one expert. */
static ep_err check_map(const ep_placement_input *input, const ep_expert_map *map,
                        uint32_t *out_copies_max, ep_error *out_error)
{
    if (map->layers_count != input->layers_count) {
        return BAD("%s: moe_layer_count %" PRIu32 ": the model has %" PRIu32 " MoE layers",
                   map->file, map->layers_count, input->layers_count);
    }
    coverage c = {.counts = calloc(EP_EXPERTS_MAX, sizeof(*c.counts))};
    if (c.counts == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    ep_err err = EP_OK;
    for (uint32_t l = 0; l < map->layers_count && err == EP_OK; l++) {
        err = check_layer(input, map, l, &c, out_error);
    }
    free(c.counts);
    *out_copies_max = c.copies_max;
    return err;
}

typedef struct {
    const char *name;
    uint32_t index;
} named_node;

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const named_node *)a)->name, ((const named_node *)b)->name);
}

static ep_err order_by_name(const ep_placement_input *input, uint32_t *out_nodes)
{
    named_node *sorted = calloc((size_t)input->nodes_count + 1, sizeof(*sorted));
    if (sorted == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t n = 0; n < input->nodes_count; n++) {
        sorted[n] = (named_node){input->nodes[n].name, n};
    }
    qsort(sorted, input->nodes_count, sizeof(*sorted), compare_names);
    for (uint32_t n = 0; n < input->nodes_count; n++) {
        out_nodes[n] = sorted[n].index;
    }
    free(sorted);
    return EP_OK;
}

/* Checks the given order: every device must be a different node. */
static ep_err order_as_given(const ep_placement_input *input, uint32_t devices,
                             const uint32_t *node_of_device, uint32_t *out_nodes,
                             ep_error *out_error)
{
    for (uint32_t d = 0; d < devices; d++) {
        if (node_of_device[d] >= input->nodes_count) {
            return BAD("device_id %" PRIu32 " is node %" PRIu32 ": allowed 0..%" PRIu32, d,
                       node_of_device[d], input->nodes_count - 1);
        }
        for (uint32_t other = 0; other < d; other++) {
            if (node_of_device[other] == node_of_device[d]) {
                return BAD("device_id %" PRIu32 " and %" PRIu32 " are both node %s", other, d,
                           input->nodes[node_of_device[d]].name);
            }
        }
        out_nodes[d] = node_of_device[d];
    }
    return EP_OK;
}

static ep_err place_layer(ep_placer *placer, const ep_expert_map *map, uint32_t index,
                          const uint32_t *nodes, ep_error *out_error)
{
    const ep_expert_map_layer *layer = &map->layers[index];
    for (uint32_t d = 0; d < layer->devices_count; d++) {
        uint32_t node = nodes[d];
        for (uint32_t i = layer->offsets[d]; i < layer->offsets[d + 1]; i++) {
            if (!ep_placer_has_room(placer, index, node)) {
                return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                    "%s: layer_id %" PRIu32 ", device_id %" PRIu32
                                    ": node %s has no room for expert %" PRIu32
                                    ": it holds %" PRIu32 " experts of %" PRIu64 " bytes",
                                    map->file, index, d, placer->input->nodes[node].name,
                                    layer->experts[i], placer->total[node], placer->bytes[node]);
            }
            ep_placer_add(placer, index, layer->experts[i], node);
        }
    }
    return EP_OK;
}

static ep_err place_map(ep_placer *placer, const ep_expert_map *map, const uint32_t *nodes,
                        ep_error *out_error)
{
    const ep_placement_input *input = placer->input;
    uint32_t shared_copies =
        input->copies < input->nodes_count ? input->copies : input->nodes_count;
    ep_err err = EP_OK;
    for (uint32_t l = 0; l < input->layers_count && err == EP_OK; l++) {
        err = place_layer(placer, map, l, nodes, out_error);
    }
    for (uint32_t l = 0; l < input->layers_count && err == EP_OK; l++) {
        err = ep_placer_keep_owned(placer, l, input->layers[l].shape.experts, shared_copies);
        for (uint32_t copy = 0; copy < shared_copies && err == EP_OK; copy++) {
            err = ep_placer_fill(placer, l, input->layers[l].shape.experts, copy, out_error);
        }
        ep_placer_count_missing(placer, l, input->layers[l].shape.experts, shared_copies);
    }
    return err;
}

static ep_err solve(const ep_placement_input *input, const ep_expert_map *map,
                    const uint32_t *node_of_device, uint32_t width, uint32_t *nodes,
                    ep_placement **out_placement, ep_error *out_error)
{
    ep_err err = node_of_device == NULL ? order_by_name(input, nodes)
                                        : order_as_given(input, ep_expert_map_devices_max(map),
                                                         node_of_device, nodes, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_placer placer;
    err = ep_placer_init(&placer, input, width, out_error);
    if (err == EP_OK) {
        err = place_map(&placer, map, nodes, out_error);
    }
    if (err == EP_OK) {
        err = ep_placer_finish(&placer, out_placement);
    }
    ep_placer_fini(&placer);
    return err;
}

ep_err ep_placement_static(const ep_placement_input *input, const ep_expert_map *map,
                           const uint32_t *node_of_device, ep_placement **out_placement,
                           ep_error *out_error)
{
    uint32_t copies_max = 0;
    ep_err err = check_map(input, map, &copies_max, out_error);
    uint32_t *nodes = calloc((size_t)input->nodes_count + 1, sizeof(*nodes));
    if (err == EP_OK && nodes == NULL) {
        err = EP_ERR_NO_MEMORY;
    }
    if (err == EP_OK) {
        uint32_t width = copies_max > input->copies ? copies_max : input->copies;
        err = solve(input, map, node_of_device, width, nodes, out_placement, out_error);
    }
    if (err == EP_ERR_NO_MEMORY) {
        ep_error_set(out_error, err, "no memory to place %" PRIu32 " layers", input->layers_count);
    }
    free(nodes);
    return err;
}
