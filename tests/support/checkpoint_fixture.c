/* SPDX-License-Identifier: Apache-2.0 */
/* Random checkpoints: a list of tensors, divided into shards, and the config.json for it. */
#include "support/checkpoint_fixture.h"

#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "model/safetensors_writer.h"
#include "model/tensor_names.h"

typedef struct tensor_list {
    uint64_t seed;
    ep_named_tensor *items;
    size_t count;
    size_t capacity;
    bool failed;
} tensor_list;

ep_fixture_config ep_fixture_default(void)
{
    return (ep_fixture_config){
        .seed = 1,
        .names = EP_NAMES_N2,
        .router = EP_ROUTER_R1,
        .layers = 2,
        .hidden = 32,
        .inner = 16,
        .experts = 8,
        .top_k = 2,
        .dtype = EP_DTYPE_BF16,
        .shards = 1,
    };
}

ep_fixture_config ep_fixture_layer(uint32_t hidden, uint32_t inner, uint32_t experts,
                                   uint32_t top_k)
{
    ep_fixture_config config = ep_fixture_default();
    config.layers = 1;
    config.hidden = hidden;
    config.inner = inner;
    config.experts = experts;
    config.top_k = top_k;
    return config;
}

/* Draws a nearly normal value of width about 0.1: the sum of four uniform ones. Norm weights lie
 * around 1, as in real models. */
static float next_value(uint64_t *state, float centre)
{
    float sum = -2.0f;
    for (int i = 0; i < 4; i++) {
        sum += (float)(ep_splitmix64(state) >> 40) * 0x1p-24f;
    }
    return centre + sum * 0.17f;
}

static uint64_t state_of(uint64_t seed, const char *name)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15ull;
    for (const char *c = name; *c != '\0'; c++) { /* FNV-1a over the name */
        state = (state ^ (unsigned char)*c) * 0x100000001b3ull;
    }
    return state;
}

void ep_fixture_fill(uint64_t seed, const char *name, ep_dtype dtype, size_t count, void *out)
{
    uint64_t state = state_of(seed, name);
    float centre = strstr(name, "norm.weight") != NULL ? 1.0f : 0.0f;
    for (size_t i = 0; i < count; i++) {
        float value = next_value(&state, centre);
        uint16_t half = dtype == EP_DTYPE_F16 ? ep_f32_to_f16(value) : ep_f32_to_bf16(value);
        if (dtype == EP_DTYPE_F32) {
            memcpy((uint8_t *)out + 4 * i, &value, sizeof(value));
        } else {
            memcpy((uint8_t *)out + 2 * i, &half, sizeof(half));
        }
    }
}

/* Fills codes with random bytes. Scales give values about as wide as plain ones: some 2^-5 for
 * codes of mxfp4, 2^-6 for int4; of both signs, and a few of the smallest possible ones. */
static void fill_codes(uint64_t seed, const char *name, ep_dtype dtype, size_t count, uint8_t *out)
{
    const bool is_scales = strstr(name, "_scale") != NULL;
    uint64_t state = state_of(seed, name);
    for (size_t i = 0; i < count * ep_dtype_bytes(dtype); i++) {
        const uint64_t z = ep_splitmix64(&state);
        if (!is_scales) {
            out[i] = (uint8_t)(z >> 56);
        } else if (dtype == EP_DTYPE_U8) {
            out[i] = z % 256 == 0 ? 0 : (uint8_t)(120 + (z >> 62));
        } else if (i % 2 == 0) {
            const float scale = (float)(64 + (z >> 58)) * ((z & 1u) != 0 ? 0x1p-13f : -0x1p-13f);
            const uint16_t half =
                dtype == EP_DTYPE_F16 ? ep_f32_to_f16(scale) : ep_f32_to_bf16(scale);
            memcpy(out + i, &half, sizeof(half));
        }
    }
}

/* rows 0: a vector. like: the values; NULL: those derived from the name. */
static void add_like(tensor_list *list, const char *name, ep_dtype dtype, uint32_t rows,
                     uint32_t columns, const void *like)
{
    size_t count = (size_t)(rows == 0 ? 1 : rows) * columns;
    if (list->count == list->capacity) {
        size_t capacity = list->capacity == 0 ? 64 : 2 * list->capacity;
        ep_named_tensor *items = realloc(list->items, capacity * sizeof(items[0]));
        if (items == NULL) {
            list->failed = true;
            return;
        }
        list->items = items;
        list->capacity = capacity;
    }
    char *own_name = strdup(name);
    void *data = calloc(count, ep_dtype_bytes(dtype));
    if (own_name == NULL || data == NULL) {
        free(own_name);
        free(data);
        list->failed = true;
        return;
    }
    if (like != NULL) {
        memcpy(data, like, count * ep_dtype_bytes(dtype));
    } else if (strstr(name, ".weight_") != NULL) {
        fill_codes(list->seed, name, dtype, count, data);
    } else {
        ep_fixture_fill(list->seed, name, dtype, count, data);
    }
    list->items[list->count++] = (ep_named_tensor){
        .name = own_name,
        .tensor = rows == 0 ? ep_tensor_1d(data, dtype, columns)
                            : ep_tensor_2d(data, dtype, rows, columns),
    };
}

static void add(tensor_list *list, const char *name, ep_dtype dtype, uint32_t rows,
                uint32_t columns)
{
    add_like(list, name, dtype, rows, columns, NULL);
}

static void add_in_layer(tensor_list *list, const ep_fixture_config *config, uint32_t layer,
                         const char *tail, ep_dtype dtype, uint32_t rows, uint32_t columns)
{
    char name[EP_TENSOR_NAME_BYTES];
    snprintf(name, sizeof(name), "%slayers.%" PRIu32 ".%s", config->prefix, layer, tail);
    add(list, name, dtype, rows, columns);
}

/* The place of a matrix, and the names of its parts. */
typedef struct expert_place {
    const ep_tensor_names *names;
    uint32_t layer;
    uint32_t expert; /* UINT32_MAX: shared */
    uint32_t spelling;
    ep_weight_format format;
} expert_place;

static void add_part(tensor_list *list, const expert_place *place, ep_matrix m, const char *part,
                     ep_dtype dtype, uint32_t rows, uint32_t columns, size_t back)
{
    char name[EP_TENSOR_NAME_BYTES];
    if (place->expert == UINT32_MAX) {
        ep_tensor_name_shared(place->names, place->spelling, place->layer, m, part, name);
    } else {
        ep_tensor_name_expert(place->names, place->layer, place->expert, m, part, name);
    }
    add_like(list, name, dtype, rows, columns,
             back > 0 && !list->failed ? list->items[list->count - back].tensor.data : NULL);
}

/* Adds one expert's matrices. back: distance to an earlier expert with equal values; 0: none. */
static void add_expert(tensor_list *list, const ep_fixture_config *config,
                       const expert_place *place, uint32_t inner, size_t back)
{
    const bool is_plain = place->format == EP_WEIGHTS_NONE;
    const bool is_int4 = ep_weight_format_codes(place->format) == EP_CODES_INT4;
    const ep_dtype scale_dtype = place->format == EP_WEIGHTS_INT4       ? EP_DTYPE_BF16
                                 : place->format == EP_WEIGHTS_INT4_F16 ? EP_DTYPE_F16
                                                                        : EP_DTYPE_U8;
    back *= (size_t)EP_MATRIX_COUNT * (is_plain ? 1 : 2);
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        const uint32_t rows = m == EP_MATRIX_DOWN ? config->hidden : inner;
        const uint32_t columns = m == EP_MATRIX_DOWN ? inner : config->hidden;
        const uint32_t groups = (columns + EP_MX_GROUP - 1) / EP_MX_GROUP;
        if (is_plain) {
            add_part(list, place, m, "weight", config->dtype, rows, columns, back);
            continue;
        }
        add_part(list, place, m, "weight_packed", is_int4 ? EP_DTYPE_I32 : EP_DTYPE_U8, rows,
                 is_int4 ? (columns + 7) / 8 : (columns + 1) / 2, back);
        add_part(list, place, m, "weight_scale", scale_dtype, rows, groups, back);
    }
}

static void add_moe_layer(tensor_list *list, const ep_fixture_config *config, uint32_t layer)
{
    ep_tensor_names names = {.family = config->names, .prefix = config->prefix};
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t e = 0; e < config->experts; e++) {
        const expert_place place = {&names, layer, e, 0, config->expert_format};
        bool repeats = config->distinct_experts > 0 && e >= config->distinct_experts;
        add_expert(list, config, &place, config->inner, repeats ? config->distinct_experts : 0);
    }
    /* Qwen spells a gated shared expert in the singular: the second spelling of N1. */
    uint32_t spelling = config->shared_gate && config->names == EP_NAMES_N1 ? 1 : 0;
    if (config->shared_inner > 0) {
        const expert_place place = {&names, layer, UINT32_MAX, spelling, config->shared_format};
        add_expert(list, config, &place, config->shared_inner, 0);
    }
    if (config->shared_inner > 0 && config->shared_gate) {
        ep_tensor_name_shared_gate(&names, layer, name);
        add(list, name, config->dtype, 1, config->hidden);
    }
    ep_tensor_name_router(&names, 0, layer, name);
    add(list, name, config->dtype, config->experts, config->hidden);
    if (config->router_bias) {
        ep_tensor_name_router_bias(&names, 0, layer, name);
        add(list, name, EP_DTYPE_F32, 0, config->experts);
    }
}

static void add_attention(tensor_list *list, const ep_fixture_config *config, uint32_t layer)
{
    uint32_t q = config->heads * config->head_dim;
    uint32_t kv = config->kv_heads * config->head_dim;
    add_in_layer(list, config, layer, "self_attn.q_proj.weight", config->dtype, q, config->hidden);
    add_in_layer(list, config, layer, "self_attn.k_proj.weight", config->dtype, kv, config->hidden);
    add_in_layer(list, config, layer, "self_attn.v_proj.weight", config->dtype, kv, config->hidden);
    add_in_layer(list, config, layer, "self_attn.o_proj.weight", config->dtype, config->hidden, q);
    add_in_layer(list, config, layer, "input_layernorm.weight", config->dtype, 0, config->hidden);
    add_in_layer(list, config, layer, "post_attention_layernorm.weight", config->dtype, 0,
                 config->hidden);
}

static void add_all(tensor_list *list, const ep_fixture_config *config)
{
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t layer = 0; layer < config->layers; layer++) {
        if (config->vocab > 0) {
            add_attention(list, config, layer);
        }
        if (layer >= config->dense_layers) {
            add_moe_layer(list, config, layer);
            continue;
        }
        add_in_layer(list, config, layer, "mlp.gate_proj.weight", config->dtype, config->inner,
                     config->hidden);
        add_in_layer(list, config, layer, "mlp.up_proj.weight", config->dtype, config->inner,
                     config->hidden);
        add_in_layer(list, config, layer, "mlp.down_proj.weight", config->dtype, config->hidden,
                     config->inner);
    }
    if (config->vocab > 0) {
        snprintf(name, sizeof(name), "%sembed_tokens.weight", config->prefix);
        add(list, name, config->dtype, config->vocab, config->hidden);
        snprintf(name, sizeof(name), "%snorm.weight", config->prefix);
        add(list, name, config->dtype, 0, config->hidden);
        add(list, "lm_head.weight", config->dtype, config->vocab, config->hidden);
    }
}

static const char *type_name(const ep_fixture_config *config)
{
    bool n2 = config->names == EP_NAMES_N2;
    switch (config->router) {
    case EP_ROUTER_R1:
        return "mixtral";
    case EP_ROUTER_R2:
        return n2 ? "minimax" : config->shared_gate ? "qwen2_moe" : "qwen3_moe";
    case EP_ROUTER_R3:
        return "deepseek_v2";
    default:
        return n2 ? "minimax_m2" : "deepseek_v3";
    }
}

static void print_config(FILE *file, const ep_fixture_config *config)
{
    const char *dtype = config->dtype == EP_DTYPE_F32   ? "float32"
                        : config->dtype == EP_DTYPE_F16 ? "float16"
                                                        : "bfloat16";
    bool routed_name =
        config->router == EP_ROUTER_R3 || strcmp(type_name(config), "deepseek_v3") == 0;
    const char *experts = routed_name                    ? "n_routed_experts"
                          : config->names == EP_NAMES_N2 ? "num_local_experts"
                                                         : "num_experts";

    fprintf(
        file,
        "{\n  \"model_type\": \"%s\",\n  \"hidden_act\": \"silu\",\n  \"torch_dtype\": \"%s\",\n",
        type_name(config), dtype);
    fprintf(file,
            "  \"hidden_size\": %" PRIu32 ",\n  \"intermediate_size\": %" PRIu32
            ",\n  \"moe_intermediate_size\": %" PRIu32 ",\n",
            config->hidden, config->inner, config->inner);
    fprintf(file,
            "  \"num_hidden_layers\": %" PRIu32 ",\n  \"first_k_dense_replace\": %" PRIu32 ",\n",
            config->layers, config->dense_layers);
    fprintf(file, "  \"%s\": %" PRIu32 ",\n  \"num_experts_per_tok\": %" PRIu32 ",\n", experts,
            config->experts, config->top_k);
    if (config->shared_inner > 0) {
        bool fused = !config->shared_gate && config->shared_inner % config->inner == 0;
        fprintf(file, "  \"%s\": %" PRIu32 ",\n",
                fused ? "n_shared_experts" : "shared_expert_intermediate_size",
                fused ? config->shared_inner / config->inner : config->shared_inner);
    }
    if (config->scaling_factor > 0.0f) {
        fprintf(file, "  \"routed_scaling_factor\": %.9g,\n", (double)config->scaling_factor);
    }
    if (config->groups > 0) {
        fprintf(file, "  \"n_group\": %" PRIu32 ",\n  \"topk_group\": %" PRIu32 ",\n",
                config->groups, config->groups_kept);
    }
    if (config->vocab > 0) {
        fprintf(file,
                "  \"vocab_size\": %" PRIu32 ",\n  \"num_attention_heads\": %" PRIu32
                ",\n  \"num_key_value_heads\": %" PRIu32 ",\n  \"head_dim\": %" PRIu32 ",\n",
                config->vocab, config->heads, config->kv_heads, config->head_dim);
    }
    /* its router always divides by the sum */
    const bool always = strcmp(type_name(config), "minimax_m2") == 0;
    fprintf(file,
            "  \"rms_norm_eps\": 1e-05,\n  \"rope_theta\": 10000.0,\n  \"norm_topk_prob\": %s\n}\n",
            config->renormalise || always ? "true" : "false");
}

static ep_err open_text(const char *dir, const char *name, FILE **out_file, ep_error *out_error)
{
    char path[EP_FIXTURE_PATH_BYTES + 64];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    *out_file = fopen(path, "we");
    return *out_file != NULL ? EP_OK
                             : ep_error_set(out_error, EP_ERR_IO, "%s: cannot write: %m", path);
}

static void shard_name(const ep_fixture_config *config, uint32_t shard, char *out, size_t out_bytes)
{
    snprintf(out, out_bytes, "model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", shard + 1,
             config->shards);
}

/* Tensor i goes to shard i * shards / count: an expert's matrices may end up in two files. */
static ep_err write_shards(const ep_fixture_config *config, const char *dir,
                           const tensor_list *list, ep_error *out_error)
{
    char path[EP_FIXTURE_PATH_BYTES + 64];
    char name[64] = "model.safetensors";
    ep_metadata_pair metadata = {"format", "pt"};
    size_t first = 0;
    for (uint32_t s = 0; s < config->shards; s++) {
        size_t end = list->count * (s + 1) / config->shards;
        if (config->shards > 1) {
            shard_name(config, s, name, sizeof(name));
        }
        snprintf(path, sizeof(path), "%s/%s", dir, name);
        ep_err err =
            ep_safetensors_write(path, list->items + first, end - first, &metadata, 1, out_error);
        if (err != EP_OK) {
            return err;
        }
        first = end;
    }
    return EP_OK;
}

static void print_index(FILE *file, const ep_fixture_config *config, const tensor_list *list)
{
    char name[64];
    size_t at = 0;
    fprintf(file, "{\n  \"metadata\": {\"total_size\": 0},\n  \"weight_map\": {\n");
    for (uint32_t s = 0; s < config->shards; s++) {
        shard_name(config, s, name, sizeof(name));
        for (; at < list->count * (s + 1) / config->shards; at++) {
            fprintf(file, "    \"%s\": \"%s\"%s\n", list->items[at].name, name,
                    at + 1 < list->count ? "," : "");
        }
    }
    fprintf(file, "  }\n}\n");
}

static ep_err close_text(FILE *file, const char *name, ep_error *out_error)
{
    bool bad = ferror(file) != 0;
    return fclose(file) != 0 || bad ? ep_error_set(out_error, EP_ERR_IO, "%s: cannot write", name)
                                    : EP_OK;
}

static ep_err write_files(const ep_fixture_config *config, const char *dir, const tensor_list *list,
                          ep_error *out_error)
{
    FILE *file = NULL;
    ep_err err = open_text(dir, "config.json", &file, out_error);
    if (err == EP_OK) {
        print_config(file, config);
        err = close_text(file, "config.json", out_error);
    }
    if (err == EP_OK && config->shards > 1) {
        err = open_text(dir, "model.safetensors.index.json", &file, out_error);
        if (err == EP_OK) {
            print_index(file, config, list);
            err = close_text(file, "model.safetensors.index.json", out_error);
        }
    }
    return err == EP_OK ? write_shards(config, dir, list, out_error) : err;
}

ep_err ep_fixture_write(const ep_fixture_config *config, const char *dir, ep_error *out_error)
{
    ep_fixture_config full = *config;
    tensor_list list = {.seed = config->seed};
    if (full.prefix == NULL) {
        full.prefix = "model.";
    }
    if (full.shards == 0 || full.dense_layers >= full.layers ||
        (full.names != EP_NAMES_N1 && full.names != EP_NAMES_N2)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "fixture: shards %" PRIu32 ", %" PRIu32 " of %" PRIu32
                            " layers dense, names %d",
                            full.shards, full.dense_layers, full.layers, (int)full.names);
    }
    add_all(&list, &full);
    ep_err err = list.failed
                     ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "fixture: allocation failed")
                     : write_files(&full, dir, &list, out_error);
    for (size_t i = 0; i < list.count; i++) {
        free((void *)(uintptr_t)list.items[i].name);
        free(list.items[i].tensor.data);
    }
    free(list.items);
    return err;
}

void ep_fixture_temp_dir(char out_path[EP_FIXTURE_PATH_BYTES])
{
    const char *base = getenv("TMPDIR");
    snprintf(out_path, EP_FIXTURE_PATH_BYTES, "%s/expertd-test-XXXXXX",
             base != NULL && base[0] != '\0' ? base : "/tmp");
    if (mkdtemp(out_path) == NULL) {
        perror(out_path);
        abort();
    }
}

void ep_fixture_new(const ep_fixture_config *config, char out_path[EP_FIXTURE_PATH_BYTES])
{
    ep_error error;
    ep_fixture_temp_dir(out_path);
    if (ep_fixture_write(config, out_path, &error) != EP_OK) {
        fprintf(stderr, "%s: %s\n", out_path, error.text);
        abort();
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *place)
{
    (void)st;
    (void)type;
    (void)place;
    return remove(path);
}

void ep_fixture_remove(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
