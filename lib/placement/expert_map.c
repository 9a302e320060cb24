/* SPDX-License-Identifier: Apache-2.0 */
/* Reads expert maps strictly: every error names the place in the file. */
#include "placement/expert_map.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "moe/routing_table.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_BAD_FILE, __VA_ARGS__)
#define PLACE_BYTES 96

typedef struct {
    const char *file;
    ep_error *error;
} reader;

static const char *type_name(const json_t *value)
{
    static const char *const names[] = {"an object",     "an array", "a string", "an integer",
                                        "a real number", "true",     "false",    "null"};
    return names[json_typeof(value)];
}

/* An object must have exactly these keys. */
static ep_err check_keys(const reader *r, const char *place, json_t *object,
                         const char *const *keys, size_t keys_count)
{
    ep_error *out_error = r->error;
    if (!json_is_object(object)) {
        return BAD("%s: %s: expected an object, found %s", r->file, place, type_name(object));
    }
    for (size_t i = 0; i < keys_count; i++) {
        if (json_object_get(object, keys[i]) == NULL) {
            return BAD("%s: %s: key \"%s\" is missing", r->file, place, keys[i]);
        }
    }
    for (void *it = json_object_iter(object); it != NULL; it = json_object_iter_next(object, it)) {
        size_t i = 0;
        while (i < keys_count && strcmp(json_object_iter_key(it), keys[i]) != 0) {
            i++;
        }
        if (i == keys_count) {
            return BAD("%s: %s: unknown key \"%.64s\"", r->file, place, json_object_iter_key(it));
        }
    }
    return EP_OK;
}

static ep_err get_number(const reader *r, const char *place, const json_t *value, json_int_t min,
                         json_int_t max, uint32_t *out)
{
    ep_error *out_error = r->error;
    if (!json_is_integer(value)) {
        return BAD("%s: %s: expected an integer, found %s", r->file, place, type_name(value));
    }
    json_int_t number = json_integer_value(value);
    if (number < min || number > max) {
        return BAD("%s: %s is %" JSON_INTEGER_FORMAT ": allowed %" JSON_INTEGER_FORMAT
                   "..%" JSON_INTEGER_FORMAT,
                   r->file, place, number, min, max);
    }
    *out = (uint32_t)number;
    return EP_OK;
}

/* Checks an array whose length is stated by another number. */
static ep_err check_array(const reader *r, const char *place, const json_t *array,
                          const char *count_name, uint32_t count)
{
    ep_error *out_error = r->error;
    if (!json_is_array(array)) {
        return BAD("%s: %s: expected an array, found %s", r->file, place, type_name(array));
    }
    if (json_array_size(array) != count) {
        return BAD("%s: %s has %zu entries, %s says %" PRIu32, r->file, place,
                   json_array_size(array), count_name, count);
    }
    return EP_OK;
}

/* Reads one device's experts and appends them to experts. seen [EP_EXPERTS_MAX]: the last device,
 * plus one, that listed the expert. */
static ep_err read_experts(const reader *r, uint32_t layer, uint32_t device, const json_t *list,
                           uint32_t *seen, uint32_t *experts)
{
    ep_error *out_error = r->error;
    char place[PLACE_BYTES];
    for (size_t i = 0; i < json_array_size(list); i++) {
        snprintf(place, sizeof(place),
                 "layer_id %" PRIu32 ", device_id %" PRIu32 ", device_expert %zu", layer, device,
                 i);
        ep_err err =
            get_number(r, place, json_array_get(list, i), 0, EP_EXPERTS_MAX - 1, &experts[i]);
        if (err != EP_OK) {
            return err;
        }
        if (seen[experts[i]] == device + 1) {
            return BAD("%s: layer_id %" PRIu32 ", device_id %" PRIu32 ": expert %" PRIu32
                       " is listed twice",
                       r->file, layer, device, experts[i]);
        }
        seen[experts[i]] = device + 1;
    }
    return EP_OK;
}

/* Entries may be in any order: by_device [devices_count] gets each device's list of experts. */
static ep_err sort_devices(const reader *r, uint32_t layer, uint32_t devices_count,
                           const json_t *list, const json_t **by_device, size_t *out_experts)
{
    static const char *const keys[] = {"device_id", "device_expert"};
    ep_error *out_error = r->error;
    char place[PLACE_BYTES];
    size_t total = 0;
    for (uint32_t i = 0; i < devices_count; i++) {
        uint32_t device;
        json_t *entry = json_array_get(list, i);
        snprintf(place, sizeof(place), "layer_id %" PRIu32 ", device_list entry %" PRIu32, layer,
                 i);
        ep_err err = check_keys(r, place, entry, keys, EP_ARRAY_COUNT(keys));
        if (err != EP_OK) {
            return err;
        }
        snprintf(place, sizeof(place),
                 "layer_id %" PRIu32 ", device_list entry %" PRIu32 ": device_id", layer, i);
        err = get_number(r, place, json_object_get(entry, "device_id"), 0,
                         (json_int_t)devices_count - 1, &device);
        if (err != EP_OK) {
            return err;
        }
        if (by_device[device] != NULL) {
            return BAD("%s: layer_id %" PRIu32 ": device_id %" PRIu32 " is listed twice", r->file,
                       layer, device);
        }
        const json_t *experts = json_object_get(entry, "device_expert");
        if (!json_is_array(experts)) {
            return BAD("%s: layer_id %" PRIu32 ", device_id %" PRIu32
                       ": device_expert: expected an array, found %s",
                       r->file, layer, device, type_name(experts));
        }
        by_device[device] = experts;
        total += json_array_size(experts);
    }
    *out_experts = total;
    return EP_OK;
}

static ep_err read_devices(const reader *r, uint32_t layer_id, const json_t *list,
                           const json_t **by_device, uint32_t *seen, ep_expert_map_layer *layer)
{
    size_t total;
    ep_err err = sort_devices(r, layer_id, layer->devices_count, list, by_device, &total);
    if (err != EP_OK) {
        return err;
    }
    /* Each element has at least two bytes of text, so the file's length bounds the total. */
    layer->offsets = calloc((size_t)layer->devices_count + 1, sizeof(*layer->offsets));
    layer->experts = calloc(total + 1, sizeof(*layer->experts));
    if (layer->offsets == NULL || layer->experts == NULL) {
        return ep_error_set(r->error, EP_ERR_NO_MEMORY, "no memory for expert map %s", r->file);
    }
    for (uint32_t d = 0; d < layer->devices_count && err == EP_OK; d++) {
        err = read_experts(r, layer_id, d, by_device[d], seen, layer->experts + layer->offsets[d]);
        layer->offsets[d + 1] = layer->offsets[d] + (uint32_t)json_array_size(by_device[d]);
    }
    return err;
}

static ep_err read_layer(const reader *r, json_t *entry, uint32_t index, ep_expert_map *map)
{
    static const char *const keys[] = {"layer_id", "device_count", "device_list"};
    ep_error *out_error = r->error;
    char place[PLACE_BYTES];
    uint32_t layer_id;
    uint32_t devices_count;

    snprintf(place, sizeof(place), "layer_list entry %" PRIu32, index);
    ep_err err = check_keys(r, place, entry, keys, EP_ARRAY_COUNT(keys));
    if (err == EP_OK) {
        snprintf(place, sizeof(place), "layer_list entry %" PRIu32 ": layer_id", index);
        err = get_number(r, place, json_object_get(entry, "layer_id"), 0,
                         (json_int_t)map->layers_count - 1, &layer_id);
    }
    if (err != EP_OK) {
        return err;
    }
    ep_expert_map_layer *layer = &map->layers[layer_id];
    if (layer->devices_count != 0) {
        return BAD("%s: layer_id %" PRIu32 " is listed twice", r->file, layer_id);
    }
    snprintf(place, sizeof(place), "layer_id %" PRIu32 ": device_count", layer_id);
    err = get_number(r, place, json_object_get(entry, "device_count"), 1, EP_NODES_MAX,
                     &devices_count);
    if (err == EP_OK) {
        snprintf(place, sizeof(place), "layer_id %" PRIu32 ": device_list", layer_id);
        err = check_array(r, place, json_object_get(entry, "device_list"), "device_count",
                          devices_count);
    }
    if (err != EP_OK) {
        return err;
    }
    layer->devices_count = devices_count;
    const json_t **by_device = calloc(devices_count, sizeof(*by_device));
    uint32_t *seen = calloc(EP_EXPERTS_MAX, sizeof(*seen));
    if (by_device == NULL || seen == NULL) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for expert map %s", r->file);
    } else {
        err = read_devices(r, layer_id, json_object_get(entry, "device_list"), by_device, seen,
                           layer);
    }
    free(by_device);
    free(seen);
    return err;
}

static ep_err read_root(const reader *r, json_t *root, ep_expert_map *map)
{
    static const char *const keys[] = {"moe_layer_count", "layer_list"};
    ep_err err = check_keys(r, "the top level", root, keys, EP_ARRAY_COUNT(keys));
    if (err == EP_OK) {
        err = get_number(r, "moe_layer_count", json_object_get(root, "moe_layer_count"), 1,
                         EP_TABLE_LAYERS_MAX, &map->layers_count);
    }
    const json_t *list = json_object_get(root, "layer_list");
    if (err == EP_OK) {
        err = check_array(r, "layer_list", list, "moe_layer_count", map->layers_count);
    }
    if (err != EP_OK) {
        map->layers_count = 0;
        return err;
    }
    map->layers = calloc(map->layers_count, sizeof(*map->layers));
    if (map->layers == NULL) {
        map->layers_count = 0;
        return ep_error_set(r->error, EP_ERR_NO_MEMORY, "no memory for expert map %s", r->file);
    }
    for (uint32_t i = 0; i < map->layers_count && err == EP_OK; i++) {
        err = read_layer(r, json_array_get(list, i), i, map);
    }
    return err;
}

ep_err ep_expert_map_parse(const char *text, size_t text_bytes, const char *file,
                           ep_expert_map **out_map, ep_error *out_error)
{
    if (text_bytes > EP_EXPERT_MAP_BYTES_MAX) {
        return BAD("%s: %zu bytes: an expert map has at most %zu", file, text_bytes,
                   EP_EXPERT_MAP_BYTES_MAX);
    }
    json_error_t json_error;
    json_t *root = json_loadb(text, text_bytes, JSON_REJECT_DUPLICATES, &json_error);
    if (root == NULL) {
        /* Out of memory, jansson fails with a code or without a text. */
        if (json_error_code(&json_error) == json_error_out_of_memory || json_error.text[0] == 0) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory to parse it", file);
        }
        return BAD("%s:%d:%d: %s", file, json_error.line, json_error.column, json_error.text);
    }
    ep_expert_map *map = calloc(1, sizeof(*map));
    if (map == NULL) {
        json_decref(root);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for expert map %s", file);
    }
    snprintf(map->file, sizeof(map->file), "%s", file);
    reader r = {map->file, out_error};
    ep_err err = read_root(&r, root, map);
    json_decref(root);
    if (err != EP_OK) {
        ep_expert_map_destroy(map);
        return err;
    }
    *out_map = map;
    return EP_OK;
}

/* Reads the whole stream, at most one byte above the limit, which the parser then notices. */
static ep_err read_stream(FILE *stream, const char *path, char **out_text, size_t *out_bytes,
                          ep_error *out_error)
{
    size_t capacity = 0;
    size_t bytes = 0;
    char *text = NULL;
    do {
        capacity = capacity == 0 ? 65536 : capacity * 2;
        char *grown = realloc(text, capacity);
        if (grown == NULL) {
            free(text);
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to read %s", path);
        }
        text = grown;
        bytes += fread(text + bytes, 1, capacity - bytes, stream);
    } while (bytes == capacity && bytes <= EP_EXPERT_MAP_BYTES_MAX);
    if (ferror(stream)) {
        free(text);
        return ep_error_set(out_error, EP_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
    }
    *out_text = text;
    *out_bytes = bytes;
    return EP_OK;
}

ep_err ep_expert_map_read_file(const char *path, ep_expert_map **out_map, ep_error *out_error)
{
    FILE *stream = fopen(path, "rbe");
    if (stream == NULL) {
        return ep_error_set(out_error, errno == ENOENT ? EP_ERR_NOT_FOUND : EP_ERR_IO,
                            "%s: cannot open: %s", path, strerror(errno));
    }
    char *text;
    size_t bytes;
    ep_err err = read_stream(stream, path, &text, &bytes, out_error);
    fclose(stream);
    if (err != EP_OK) {
        return err;
    }
    err = ep_expert_map_parse(text, bytes, path, out_map, out_error);
    free(text);
    return err;
}

uint32_t ep_expert_map_devices_max(const ep_expert_map *map)
{
    uint32_t devices = 0;
    for (uint32_t l = 0; l < map->layers_count; l++) {
        devices = map->layers[l].devices_count > devices ? map->layers[l].devices_count : devices;
    }
    return devices;
}

void ep_expert_map_destroy(ep_expert_map *map)
{
    if (map == NULL) {
        return;
    }
    for (uint32_t l = 0; map->layers != NULL && l < map->layers_count; l++) {
        free(map->layers[l].offsets);
        free(map->layers[l].experts);
    }
    free(map->layers);
    free(map);
}
