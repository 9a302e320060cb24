/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Expert maps in the JSON format of vllm-ascend and MindIE:
 *
 *     {"moe_layer_count": N, "layer_list": [{"layer_id": 0, "device_count": D,
 *      "device_list": [{"device_id": 0, "device_expert": [7, 2, 0]}, ...]}, ...]}
 *
 * layer_id counts MoE layers from 0; an expert listed on several devices has several copies.
 * Parsing is strict: unknown and repeated keys, wrong types and counts that do not match are
 * errors. Whether the map fits a model is checked where it is used (ep_placement_static).
 *
 * Threads    pure, except the two functions for files.
 */
#ifndef EP_PLACEMENT_EXPERT_MAP_H
#define EP_PLACEMENT_EXPERT_MAP_H

#include "base/error.h"

#define EP_EXPERT_MAP_BYTES_MAX ((size_t)64 << 20)
#define EP_EXPERT_MAP_NAME_BYTES 256

typedef struct ep_expert_map_layer {
    uint32_t devices_count;
    uint32_t *offsets; /* [devices_count+1] */
    /* experts of device d: experts[offsets[d] .. offsets[d+1]), in the order of the file */
    uint32_t *experts;
} ep_expert_map_layer;

typedef struct ep_expert_map {
    char file[EP_EXPERT_MAP_NAME_BYTES]; /* for error texts */
    uint32_t layers_count;
    ep_expert_map_layer *layers; /* indexed by layer_id */
} ep_expert_map;

/* file: name used in errors. Errors: BAD_FILE (file, line or place, value, allowed range),
 * NO_MEMORY. */
ep_err ep_expert_map_parse(const char *text, size_t text_bytes, const char *file,
                           ep_expert_map **out_map, ep_error *out_error);
/* Reads the whole file, then parses it. Errors: as above, NOT_FOUND, IO. */
ep_err ep_expert_map_read_file(const char *path, ep_expert_map **out_map, ep_error *out_error);
/* Creates a map for writing, all layers to be set. Errors: INVALID_ARGUMENT (layers), NO_MEMORY. */
ep_err ep_expert_map_create(uint32_t layers_count, ep_expert_map **out_map, ep_error *out_error);
/* Copies of expert e are on devices[offsets[e] .. offsets[e+1]), each below devices_count. Errors:
 * INVALID_ARGUMENT for what reading would refuse (an expert without a copy, more devices or experts
 * than maps may have), NO_MEMORY. */
ep_err ep_expert_map_set_layer(ep_expert_map *map, uint32_t layer_id, uint32_t experts,
                               const uint32_t *offsets, const uint32_t *devices,
                               uint32_t devices_count, ep_error *out_error);
/* All layers must be set. A complete file replaces an existing one. Errors: IO, NO_MEMORY. */
ep_err ep_expert_map_write_file(const ep_expert_map *map, const char *path, ep_error *out_error);
/* The largest number of devices in a layer of the map. */
uint32_t ep_expert_map_devices_max(const ep_expert_map *map);
void ep_expert_map_destroy(ep_expert_map *map);

#endif
