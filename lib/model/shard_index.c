/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the shard index. The JSON tree is kept, because it owns the names. */
#include "model/shard_index.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define INDEX_DEPTH_MAX 8
static const char suffix[] = ".safetensors";

static ep_err check_shard_name(const char *file, const char *tensor, const json_t *value,
                               ep_error *out_error)
{
    char text[EP_JSON_TEXT_BYTES];
    char name[EP_JSON_TEXT_BYTES * 2];
    if (json_is_string(value)) {
        const char *shard = json_string_value(value);
        size_t length = strlen(shard);
        size_t suffix_length = sizeof(suffix) - 1;
        if (ep_model_file_name_ok(shard) && length > suffix_length &&
            strcmp(shard + length - suffix_length, suffix) == 0) {
            return EP_OK;
        }
    }
    return ep_error_set(
        out_error, EP_ERR_BAD_FILE,
        "%s: tensor %s: its file is %s, allowed a plain file name of 1..%d bytes ending in %s",
        file, ep_json_printable(tensor, name, sizeof(name)), ep_json_describe(value, text),
        EP_MODEL_FILE_NAME_BYTES - 1, suffix);
}

static int compare_strings(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int compare_shard(const void *name, const void *shard)
{
    return strcmp(name, shard);
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const ep_shard_entry *)a)->tensor, ((const ep_shard_entry *)b)->tensor);
}

/* Fills index->shards with the distinct file names. */
static ep_err collect_shards(const char *file, json_t *map, ep_shard_index *index,
                             ep_error *out_error)
{
    size_t count = json_object_size(map);
    const char **names = malloc(count * sizeof(names[0]));
    size_t used = 0;
    const char *key;
    json_t *value;
    if (names == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu tensors", file,
                            count);
    }
    json_object_foreach(map, key, value)
    {
        names[used++] = json_string_value(value);
    }
    qsort(names, count, sizeof(names[0]), compare_strings);
    size_t distinct = 0;
    for (size_t i = 0; i < count; i++) {
        if (distinct == 0 || strcmp(names[i], names[distinct - 1]) != 0) {
            names[distinct++] = names[i];
        }
    }
    ep_err err = EP_OK;
    if (distinct > EP_MODEL_SHARDS_MAX) {
        err = ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: names %zu files, allowed 1..%d", file,
                           distinct, EP_MODEL_SHARDS_MAX);
    } else {
        index->shards = calloc(distinct, sizeof(index->shards[0]));
        if (index->shards == NULL) {
            err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu file names",
                               file, distinct);
        }
    }
    for (size_t i = 0; err == EP_OK && i < distinct; i++) {
        snprintf(index->shards[i], sizeof(index->shards[i]), "%s", names[i]);
        index->shards_count++;
    }
    free(names);
    return err;
}

static ep_err collect_entries(const char *file, json_t *map, ep_shard_index *index,
                              ep_error *out_error)
{
    const char *key;
    json_t *value;
    index->entries = calloc(json_object_size(map), sizeof(index->entries[0]));
    if (index->entries == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %zu tensors", file,
                            json_object_size(map));
    }
    json_object_foreach(map, key, value)
    {
        const char(*shard)[EP_MODEL_FILE_NAME_BYTES] =
            bsearch(json_string_value(value), index->shards, index->shards_count,
                    sizeof(index->shards[0]), compare_shard);
        EP_ASSERT(shard != NULL);
        index->entries[index->entries_count++] = (ep_shard_entry){
            .tensor = key,
            .shard = (uint32_t)(shard - (const char(*)[EP_MODEL_FILE_NAME_BYTES])index->shards),
        };
    }
    qsort(index->entries, index->entries_count, sizeof(index->entries[0]), compare_entries);
    return EP_OK;
}

static ep_err check_map(const char *file, const json_t *root, json_t **out_map, ep_error *out_error)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *key;
    json_t *value;
    json_t *map = json_object_get(root, "weight_map");
    if (map == NULL) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: weight_map is missing, allowed an object: tensor -> file", file);
    }
    if (!json_is_object(map)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: weight_map is %s, allowed an object: tensor -> file", file,
                            ep_json_describe(map, text));
    }
    if (json_object_size(map) == 0 || json_object_size(map) > EP_MODEL_TENSORS_MAX) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: weight_map has %zu tensors, allowed 1..%zu", file,
                            json_object_size(map), EP_MODEL_TENSORS_MAX);
    }
    json_object_foreach(map, key, value)
    {
        ep_err err = check_shard_name(file, key, value, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    *out_map = map;
    return EP_OK;
}

ep_err ep_shard_index_parse(const char *file, const char *bytes, size_t count,
                            ep_shard_index *out_index, ep_error *out_error)
{
    static const ep_json_limits limits = {INDEX_DEPTH_MAX, 2 * EP_MODEL_TENSORS_MAX + 1024};
    ep_shard_index index = {0};
    json_t *root = NULL;
    json_t *map = NULL;

    ep_err err = ep_json_parse(file, bytes, count, &limits, &root, out_error);
    if (err != EP_OK) {
        return err;
    }
    index.root = root;
    err = check_map(file, root, &map, out_error);
    if (err == EP_OK) {
        err = collect_shards(file, map, &index, out_error);
    }
    if (err == EP_OK) {
        err = collect_entries(file, map, &index, out_error);
    }
    if (err != EP_OK) {
        ep_shard_index_fini(&index);
        return err;
    }
    *out_index = index;
    return EP_OK;
}

void ep_shard_index_fini(ep_shard_index *index)
{
    json_decref(index->root);
    free(index->shards);
    free(index->entries);
    *index = (ep_shard_index){0};
}
