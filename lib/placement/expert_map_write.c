/* SPDX-License-Identifier: Apache-2.0 */
/* Makes and writes expert maps. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "moe/routing_table.h"
#include "placement/expert_map.h"

ep_err ep_expert_map_create(uint32_t layers_count, ep_expert_map **out_map, ep_error *out_error)
{
    if (layers_count < 1 || layers_count > EP_TABLE_LAYERS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "an expert map of %" PRIu32 " MoE layers: allowed 1..%d", layers_count,
                            EP_TABLE_LAYERS_MAX);
    }
    ep_expert_map *map = calloc(1, sizeof(*map));
    ep_expert_map_layer *layers = calloc(layers_count, sizeof(*layers));
    if (map == NULL || layers == NULL) {
        free(map);
        free(layers);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory for an expert map of %" PRIu32 " layers", layers_count);
    }
    map->layers_count = layers_count;
    map->layers = layers;
    *out_map = map;
    return EP_OK;
}

static ep_err check_copies(uint32_t layer_id, uint32_t experts, const uint32_t *offsets,
                           uint32_t devices_count, ep_error *out_error)
{
    if (devices_count < 1 || devices_count > EP_NODES_MAX || experts > EP_EXPERTS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "layer_id %" PRIu32 ": %" PRIu32 " experts on %" PRIu32
                            " devices: an expert map has up to %d on 1..%d",
                            layer_id, experts, devices_count, EP_EXPERTS_MAX, EP_NODES_MAX);
    }
    for (uint32_t e = 0; e < experts; e++) {
        if (offsets[e] == offsets[e + 1]) {
            return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                "layer_id %" PRIu32 ": expert %" PRIu32
                                " has no copy, and an expert map needs one of each",
                                layer_id, e);
        }
    }
    return EP_OK;
}

ep_err ep_expert_map_set_layer(ep_expert_map *map, uint32_t layer_id, uint32_t experts,
                               const uint32_t *offsets, const uint32_t *devices,
                               uint32_t devices_count, ep_error *out_error)
{
    ep_err err = check_copies(layer_id, experts, offsets, devices_count, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_expert_map_layer *layer = &map->layers[layer_id];
    /* ends[d + 1]: where the next expert of device d is stored */
    uint32_t *ends = calloc(devices_count + 1u, sizeof(*ends));
    uint32_t *listed = calloc(offsets[experts] + 1u, sizeof(*listed));
    if (ends == NULL || listed == NULL) {
        free(ends);
        free(listed);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "no memory for layer_id %" PRIu32 " of an expert map", layer_id);
    }
    for (uint32_t i = 0; i < offsets[experts]; i++) {
        EP_ASSERT(devices[i] < devices_count);
        ends[devices[i] + 1]++;
    }
    for (uint32_t d = 0, begin = 0; d < devices_count; d++) {
        const uint32_t count = ends[d + 1];
        ends[d + 1] = begin;
        begin += count;
    }
    for (uint32_t e = 0; e < experts; e++) {
        for (uint32_t i = offsets[e]; i < offsets[e + 1]; i++) {
            listed[ends[devices[i] + 1]++] = e;
        }
    }
    *layer =
        (ep_expert_map_layer){.devices_count = devices_count, .offsets = ends, .experts = listed};
    return EP_OK;
}

/* NULL when out of memory. */
static json_t *layer_json(const ep_expert_map_layer *layer, uint32_t layer_id)
{
    json_t *list = json_array();
    bool good = list != NULL;
    for (uint32_t d = 0; good && d < layer->devices_count; d++) {
        json_t *experts = json_array();
        for (uint32_t i = layer->offsets[d]; i < layer->offsets[d + 1]; i++) {
            good = json_array_append_new(experts, json_integer(layer->experts[i])) == 0 && good;
        }
        json_t *device =
            json_pack("{s:I, s:o}", "device_id", (json_int_t)d, "device_expert", experts);
        good = json_array_append_new(list, device) == 0 && good;
    }
    json_t *whole = json_pack("{s:I, s:I, s:o}", "layer_id", (json_int_t)layer_id, "device_count",
                              (json_int_t)layer->devices_count, "device_list", list);
    if (!good) {
        json_decref(whole);
        return NULL;
    }
    return whole;
}

/* NULL when out of memory; json_pack then releases its arguments. */
static json_t *map_json(const ep_expert_map *map)
{
    json_t *list = json_array();
    bool good = list != NULL;
    for (uint32_t l = 0; good && l < map->layers_count; l++) {
        good = json_array_append_new(list, layer_json(&map->layers[l], l)) == 0;
    }
    json_t *root = json_pack("{s:I, s:o}", "moe_layer_count", (json_int_t)map->layers_count,
                             "layer_list", list);
    if (!good) {
        json_decref(root);
        return NULL;
    }
    return root;
}

ep_err ep_expert_map_write_file(const ep_expert_map *map, const char *path, ep_error *out_error)
{
    json_t *root = map_json(map);
    char *part = NULL;
    if (root == NULL || asprintf(&part, "%s.part", path) < 0) {
        json_decref(root);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to write the expert map %s",
                            path);
    }
    ep_err err = EP_OK;
    FILE *out = fopen(part, "we");
    /* jansson 2.14 does not tell that a key could not be written: the stream does */
    bool good = out != NULL && json_dumpf(root, out, JSON_COMPACT) == 0 &&
                fputc('\n', out) != EOF && ferror(out) == 0;
    good = out != NULL && fclose(out) == 0 && good && rename(part, path) == 0;
    if (!good) {
        err = ep_error_set(out_error, EP_ERR_IO, "cannot write the expert map %s: %s", path,
                           strerror(errno));
        if (out != NULL) {
            unlink(part);
        }
    }
    free(part);
    json_decref(root);
    return err;
}
