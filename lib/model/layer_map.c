/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the keys of config.json that say which layers are MoE layers. */
#include "model/layer_map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define KEYS EP_CONFIG_KEYS
#define PATTERN "hybrid_override_pattern"

/* ---- keys that list layers ---- */

typedef enum layer_kind { KIND_DENSE, KIND_MOE, KIND_HASH, KIND_UNKNOWN } layer_kind;

/* Meaning of a word of mlp_layer_types. */
static layer_kind kind_of(const json_t *item)
{
    static const struct {
        const char *word;
        layer_kind kind;
    } kinds[] = {
        {"dense", KIND_DENSE}, {"sparse", KIND_MOE}, {"moe", KIND_MOE}, {"hash_moe", KIND_HASH}};
    const char *word = json_string_value(item);
    for (size_t i = 0; word != NULL && i < EP_ARRAY_COUNT(kinds); i++) {
        if (strcmp(kinds[i].word, word) == 0) {
            return kinds[i].kind;
        }
    }
    return KIND_UNKNOWN;
}

static void read_mlp_types(ep_config_reader *reader, const char *key, json_t *list, uint32_t layers,
                           ep_layer_map *out)
{
    char text[EP_JSON_TEXT_BYTES];
    if (!json_is_array(list) || json_array_size(list) < layers) {
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "%s is %s, allowed an array of %u words: dense, sparse, moe, hash_moe", key,
                       ep_json_describe(list, text), layers);
        return;
    }
    for (uint32_t i = 0; i < layers; i++) {
        const layer_kind kind = kind_of(json_array_get(list, i));
        if (kind == KIND_UNKNOWN) {
            ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                           "%s[%u] is %s, allowed dense, sparse, moe, hash_moe", key, i,
                           ep_json_describe(json_array_get(list, i), text));
        }
        out->moe[i] = kind != KIND_DENSE;
        out->hash[i] = kind == KIND_HASH;
    }
}

/* Whether the list has kinds of whole layers, one of them "moe"; other models list kinds of
 * attention under the same key. */
static bool lists_moe(const json_t *list)
{
    bool any = false;
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)(uintptr_t)list, i, item)
    {
        const char *word = json_string_value(item);
        any = any || (word != NULL && strcmp(word, "moe") == 0);
    }
    return any;
}

static void read_block_types(ep_config_reader *reader, const char *key, json_t *list,
                             uint32_t layers, ep_layer_map *out)
{
    if (json_array_size(list) < layers) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s has %zu values, allowed %u: one for each layer",
                       key, json_array_size(list), layers);
    }
    for (uint32_t i = 0; i < layers; i++) {
        const char *word = json_string_value(json_array_get(list, i));
        out->moe[i] = word != NULL && strcmp(word, "moe") == 0;
    }
}

/* A letter per layer: E experts, M mamba, * attention, - dense. */
static void read_pattern(ep_config_reader *reader, const char *key, json_t *value, uint32_t layers,
                         ep_layer_map *out)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *letters = json_string_value(value);
    if (letters == NULL || strlen(letters) < layers || strspn(letters, "EM*-") < layers) {
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "%s is %s, allowed a letter of E, M, *, - for each of %u layers", key,
                       ep_json_describe(value, text), layers);
        return;
    }
    for (uint32_t i = 0; i < layers; i++) {
        out->moe[i] = letters[i] == 'E';
    }
}

/* Numbers of the MoE layers, as an array or as "3,4,5". */
static void read_numbers(ep_config_reader *reader, const char *key, json_t *value, uint32_t layers,
                         ep_layer_map *out)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *at = json_string_value(value);
    size_t i;
    json_t *item;
    if (at == NULL && !json_is_array(value)) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed an array of layer numbers", key,
                       ep_json_describe(value, text));
        return;
    }
    json_array_foreach(value, i, item)
    {
        if (!json_is_integer(item) || json_integer_value(item) < 0 ||
            json_integer_value(item) >= (json_int_t)layers) {
            ep_config_fail(reader, EP_ERR_BAD_FILE, "%s[%zu] is %s, allowed 0..%u", key, i,
                           ep_json_describe(item, text), layers - 1);
            return;
        }
        out->moe[json_integer_value(item)] = true;
    }
    while (at != NULL && *at != '\0') {
        char *end = NULL;
        const unsigned long layer = strtoul(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || layer >= layers) {
            ep_config_fail(reader, EP_ERR_BAD_FILE,
                           "%s is %s, allowed numbers 0..%u with commas between", key,
                           ep_json_describe(value, text), layers - 1);
            return;
        }
        out->moe[layer] = true;
        at = *end == ',' ? end + 1 : end;
    }
}

typedef void (*read_list_func)(ep_config_reader *reader, const char *key, json_t *value,
                               uint32_t layers, ep_layer_map *out);

static const struct {
    const char *key;
    read_list_func read;
} lists[] = {{"mlp_layer_types", read_mlp_types},
             {"layers_block_type", read_block_types},
             {PATTERN, read_pattern},
             {"moe_layers", read_numbers},
             {"moe_layers_enum", read_numbers}};

/* Whether the key's value really lists MoE layers: not empty, not about something else. */
static bool says_something(read_list_func read, const json_t *value)
{
    return read == read_block_types ? lists_moe(value)
                                    : !(json_is_array(value) && json_array_size(value) == 0);
}

static void read_lists(ep_config_reader *reader, uint32_t layers, ep_layer_map *out_map)
{
    for (size_t k = 0; k < EP_ARRAY_COUNT(lists) && reader->err == EP_OK; k++) {
        const char *key = NULL;
        ep_layer_map map = {.keys = ""};
        json_t *value = ep_config_find(reader, KEYS(lists[k].key), &key);
        if (value == NULL || !says_something(lists[k].read, value)) {
            continue;
        }
        lists[k].read(reader, key, value, layers, &map);
        for (uint32_t i = 0; i < layers && out_map->keys[0] != '\0'; i++) {
            if (map.moe[i] != out_map->moe[i]) {
                ep_config_fail(reader, EP_ERR_BAD_FILE,
                               "layer %u is %s by %s and %s by %s, allowed the same", i,
                               out_map->moe[i] ? "an MoE layer" : "none", out_map->keys,
                               map.moe[i] ? "an MoE layer" : "none", key);
            }
        }
        if (out_map->keys[0] == '\0') {
            *out_map = map;
            snprintf(out_map->keys, sizeof(out_map->keys), "%s", key);
        }
    }
}

/* ---- keys that state a rule ---- */

/* Whether the key exists; then adds it to those that decided. */
static bool has_rule(const ep_config_reader *reader, const char *key, ep_layer_map *map)
{
    const size_t used = strlen(map->keys);
    if (!ep_config_has(reader, KEYS(key))) {
        return false;
    }
    snprintf(map->keys + used, sizeof(map->keys) - used, "%s%s", used > 0 ? ", " : "", key);
    return true;
}

static void keep_from(ep_config_reader *reader, const char *key, uint32_t layers, ep_layer_map *map)
{
    const uint32_t first =
        has_rule(reader, key, map) ? ep_config_u32(reader, KEYS(key), 0, layers, 0) : 0;
    for (uint32_t i = 0; i < first; i++) {
        map->moe[i] = false;
    }
}

/* Keeps the layers i with (i + after) % step == 0. */
static void keep_every(ep_config_reader *reader, const char *key, uint32_t after, uint32_t layers,
                       ep_layer_map *map)
{
    const uint32_t step = has_rule(reader, key, map)
                              ? ep_config_u32(reader, KEYS(key), 1, EP_MODEL_LAYERS_MAX, 1)
                              : 1;
    for (uint32_t i = 0; i < layers; i++) {
        map->moe[i] = map->moe[i] && (i + after) % step == 0;
    }
}

static void keep_frequency(ep_config_reader *reader, uint32_t layers, ep_layer_map *map)
{
    const char *key = NULL;
    uint32_t frequency[EP_MODEL_LAYERS_MAX];
    if (!json_is_array(ep_config_find(reader, KEYS("moe_layer_freq"), &key))) {
        keep_every(reader, "moe_layer_freq", 0, layers, map);
        return;
    }
    (void)has_rule(reader, key, map);
    ep_config_u32_per_layer(reader, KEYS("moe_layer_freq"), 0, 1, 1, frequency, layers);
    for (uint32_t i = 0; i < layers; i++) {
        map->moe[i] = map->moe[i] && frequency[i] != 0;
    }
}

/* Keeps the layers that have experts in each period. */
static void keep_period(ep_config_reader *reader, uint32_t layers, ep_layer_map *map)
{
    if (!has_rule(reader, "expert_layer_period", map)) {
        return;
    }
    const uint32_t period =
        ep_config_u32(reader, KEYS("expert_layer_period"), 1, EP_MODEL_LAYERS_MAX, 1);
    const uint32_t offset = ep_config_u32(reader, KEYS("expert_layer_offset"), 0, period - 1, 0);
    for (uint32_t i = 0; i < layers; i++) {
        map->moe[i] = map->moe[i] && i % period == offset;
    }
}

static void keep_range(ep_config_reader *reader, uint32_t layers, ep_layer_map *map)
{
    const char *key = NULL;
    const json_t *end_value = ep_config_find(reader, KEYS("moe_layer_end_index"), &key);
    const bool to_last =
        end_value == NULL || (json_is_integer(end_value) && json_integer_value(end_value) == -1);
    const bool has_start = has_rule(reader, "moe_layer_start_index", map);
    (void)has_rule(reader, "moe_layer_end_index", map);
    const uint32_t start =
        has_start ? ep_config_u32(reader, KEYS("moe_layer_start_index"), 0, layers - 1, 0) : 0;
    const uint32_t end =
        to_last ? layers - 1
                : ep_config_u32(reader, KEYS("moe_layer_end_index"), 0, layers - 1, layers - 1);
    for (uint32_t i = 0; i < layers; i++) {
        map->moe[i] = map->moe[i] && i >= start && i <= end;
    }
}

static void drop_dense(ep_config_reader *reader, uint32_t layers, ep_layer_map *map)
{
    ep_layer_map dense = {.keys = ""};
    const char *key = NULL;
    json_t *list = ep_config_find(reader, KEYS("mlp_only_layers"), &key);
    if (list == NULL) {
        return;
    }
    (void)has_rule(reader, key, map);
    read_numbers(reader, key, list, layers, &dense);
    for (uint32_t i = 0; i < layers; i++) {
        map->moe[i] = map->moe[i] && !dense.moe[i];
    }
}

uint32_t ep_layer_map_count(const ep_config_reader *reader)
{
    const char *key = NULL;
    const json_t *types = ep_config_find(reader, KEYS("layers_block_type"), &key);
    const char *letters = json_string_value(ep_config_find(reader, KEYS(PATTERN), &key));
    const size_t count = types != NULL     ? json_array_size(types)
                         : letters != NULL ? strlen(letters)
                                           : 0;
    return count <= EP_MODEL_LAYERS_MAX ? (uint32_t)count : 0;
}

void ep_layer_map_read(ep_config_reader *reader, uint32_t layers, ep_layer_map *out_map)
{
    ep_layer_map map = {.keys = ""};
    read_lists(reader, layers, &map);
    if (map.keys[0] == '\0') {
        for (uint32_t i = 0; i < layers; i++) {
            map.moe[i] = true;
        }
        keep_from(reader, "first_k_dense_replace", layers, &map);
        keep_from(reader, "num_dense_layers", layers, &map);
        keep_from(reader, "moe_layer_num_skipped", layers, &map);
        /* with two stacks, each counts its own layers */
        if (!ep_config_has(reader, KEYS("encoder_sparse_step"))) {
            keep_every(reader, "decoder_sparse_step", 1, layers, &map);
        }
        keep_every(reader, "moe_layer_interval", 1, layers, &map);
        keep_every(reader, "interleave_moe_layer_step", 1, layers, &map);
        keep_every(reader, "moe_every_n_layer", 0, layers, &map);
        keep_frequency(reader, layers, &map);
        keep_period(reader, layers, &map);
        keep_range(reader, layers, &map);
        drop_dense(reader, layers, &map);
    }
    *out_map = map;
}
