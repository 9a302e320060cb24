/* SPDX-License-Identifier: Apache-2.0 */
/* Reading config.json: one table of model types, then the keys all of them spell alike or nearly alike. */
#include "model/model_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/config_reader.h"
#include "model/json_reader.h"

#define KEYS EP_CONFIG_KEYS
#define CONFIG_DEPTH_MAX 32
#define CONFIG_VALUES_MAX 1000000
#define VOCAB_MAX 16777216
#define HEADS_MAX 4096
#define POSITIONS_MAX (1 << 30)
#define HEAD_DIM_MAX 65536
#define SHARED_EXPERTS_MAX 64

typedef struct model_type {
    const char *name;
    ep_router_family router;
    bool renormalise;      /* when norm_topk_prob is absent */
    bool inner_from_dense; /* intermediate_size is the experts' own width */
    bool shared_gate;      /* the shared expert always has a gate */
} model_type;

static const model_type types[] = {
    {"mixtral", EP_ROUTER_R1, true, true, false},
    {"qwen2_moe", EP_ROUTER_R2, false, false, true},
    {"qwen3_moe", EP_ROUTER_R2, false, false, false},
    {"qwen3_next", EP_ROUTER_R2, true, false, true},
    {"olmoe", EP_ROUTER_R2, false, true, false},
    {"minimax", EP_ROUTER_R2, true, true, false},
    {"minimax_text_01", EP_ROUTER_R2, true, true, false},
    {"minimax_m1", EP_ROUTER_R2, true, true, false},
    {"hunyuan_v1_moe", EP_ROUTER_R2, true, true, false},
    {"bailing_moe", EP_ROUTER_R2, true, false, false},
    {"deepseek_v2", EP_ROUTER_R3, false, false, false},
    {"deepseek_v3", EP_ROUTER_R4, true, false, false},
    {"kimi_k2", EP_ROUTER_R4, true, false, false},
    {"glm4_moe", EP_ROUTER_R4, true, false, false},
    {"glm4_moe_lite", EP_ROUTER_R4, true, false, false},
    {"glm_moe_dsa", EP_ROUTER_R4, true, false, false},
    {"dots1", EP_ROUTER_R4, true, false, false},
    {"bailing_moe_v2", EP_ROUTER_R4, true, false, false},
    {"mimo_v2_flash", EP_ROUTER_R4, true, false, false},
    {"minimax_m2", EP_ROUTER_R4, true, true, false},
    {"phimoe", EP_ROUTER_OTHER, true, true, false},        /* sparsemixer */
    {"ernie4_5_moe", EP_ROUTER_OTHER, true, false, false}, /* bias added after the softmax */
    {"longcat_flash", EP_ROUTER_OTHER, false, false, false},
    {"qwen3_vl_moe", EP_ROUTER_R2, true, false, false},
    {"qwen3_vl_moe_text", EP_ROUTER_R2, true, false, false},
    {"qwen3_5_moe", EP_ROUTER_R2, true, false, true},
    {"qwen3_5_moe_text", EP_ROUTER_R2, true, false, true},
    {"minimax_m3", EP_ROUTER_R4, true, true, false},
    {"granitemoe", EP_ROUTER_R1, true, true, false},
    {"granitemoeshared", EP_ROUTER_R1, true, true, false},
    {"granitemoehybrid", EP_ROUTER_R1, true, true, false},
    {"gpt_oss", EP_ROUTER_OTHER, true, true, false},     /* a bias in the logits */
    {"deepseek_v4", EP_ROUTER_OTHER, true, false, false}, /* sqrt of softplus, hash layers */
    {"llama4", EP_ROUTER_OTHER, false, true, false},      /* sigmoid, weight on the input */
    {"llama4_text", EP_ROUTER_OTHER, false, true, false},
    {"gemma4", EP_ROUTER_OTHER, true, false, false},      /* normed router, a scale per expert */
    {"gemma4_text", EP_ROUTER_OTHER, true, false, false},
    {"kimi_k3", EP_ROUTER_OTHER, true, false, false},     /* works on the full width, the experts on a latent one */
    {"step3p5", EP_ROUTER_OTHER, true, false, false},
    {"nemotron_h", EP_ROUTER_R4, true, false, false},
};
static const model_type unknown_type = {"", EP_ROUTER_R2, false, true, false};

/* One layer as config.json states it. */
typedef struct layer_values {
    uint32_t *experts;
    uint32_t *top_k;
    uint32_t *inner;
    uint32_t *shared_count;
    uint32_t *shared_inner; /* stated on its own; 0 not */
    uint32_t *moe_freq;     /* moe_layer_freq as an array: 0 dense */
    bool *dense;            /* mlp_only_layers */
    void *storage;
} layer_values;

static const model_type *find_type(const char *name)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(types); i++) {
        if (strcmp(types[i].name, name) == 0) {
            return &types[i];
        }
    }
    return &unknown_type;
}

/* Multimodal wrappers keep the language model's keys one level down. */
static void enter_text_config(ep_config_reader *reader)
{
    static const struct {
        const char *key;
        const char *prefix;
    } nested[] = {{"text_config", "text_config."},
                  {"llm_config", "llm_config."},
                  {"language_config", "language_config."}};
    if (ep_config_has(reader, KEYS("hidden_size"))) {
        return;
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(nested); i++) {
        json_t *object = json_object_get(reader->object, nested[i].key);
        if (json_is_object(object)) {
            reader->object = object;
            reader->prefix = nested[i].prefix;
            return;
        }
    }
}

static const model_type *read_type(ep_config_reader *reader, json_t *root, ep_model_info *info)
{
    const char *name = ep_config_string(reader, KEYS("model_type"));
    if (name == NULL) {
        name = json_string_value(json_object_get(root, "model_type"));
    }
    if (name == NULL) {
        name = "";
    }
    ep_json_printable(name, info->model_type, sizeof(info->model_type));
    const model_type *type = find_type(name);
    info->model_type_known = type != &unknown_type;
    return type;
}

/* Weights this build has no code for are refused by name, before they could give wrong rows. The formats it has are
 * told by the tensors. */
static void refuse_unsupported(ep_config_reader *reader, json_t *root)
{
    static const char *const methods[] = {"fp8", "mxfp4", "mxfp8", "compressed-tensors", "w8a8", "ascend"};
    char text[EP_JSON_TEXT_BYTES];
    const char *key = "";
    const char *const *quantisation = KEYS("quantization_config", "compression_config");
    ep_config_reader whole = *reader;
    whole.object = root;
    whole.prefix = "";
    json_t *quantised = ep_config_find(reader, quantisation, &key);
    if (quantised == NULL) {
        quantised = ep_config_find(&whole, quantisation, &key);
    }
    if (quantised == NULL) {
        return;
    }
    const char *method = json_string_value(json_object_get(quantised, "quant_method"));
    for (size_t i = 0; method != NULL && i < EP_ARRAY_COUNT(methods); i++) {
        if (strcmp(method, methods[i]) == 0) {
            return;
        }
    }
    ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                   "%s: quant_method is %s, allowed: none, fp8, mxfp4, mxfp8, compressed-tensors, w8a8, ascend", key,
                   method == NULL ? "not given" : ep_json_printable(method, text, sizeof(text)));
}

static ep_activation read_function(ep_config_reader *reader)
{
    static const struct {
        const char *name;
        ep_activation activation;
    } names[] = {{"silu", EP_ACT_SILU},
                 {"swish", EP_ACT_SILU},
                 {"situ", EP_ACT_SITU},
                 {"gelu", EP_ACT_GELU},
                 {"gelu_pytorch_tanh", EP_ACT_GELU_TANH},
                 {"gelu_new", EP_ACT_GELU_TANH},
                 {"gelu_tanh", EP_ACT_GELU_TANH},
                 {"relu", EP_ACT_RELU_NO_GATE},
                 {"relu2", EP_ACT_RELU2_NO_GATE}};
    char text[EP_JSON_TEXT_BYTES];
    const char *key = "hidden_act";
    json_t *act = ep_config_find(reader, KEYS("mlp_hidden_act", "hidden_act", "hidden_activation"), &key);
    const char *name = json_string_value(act);
    if (act == NULL) {
        return EP_ACT_SILU;
    }
    for (size_t i = 0; name != NULL && i < EP_ARRAY_COUNT(names); i++) {
        if (strcmp(name, names[i].name) == 0) {
            return names[i].activation;
        }
    }
    ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                   "%s is %s, allowed silu, swish, situ, gelu, gelu_pytorch_tanh, gelu_new, gelu_tanh, relu, relu2", key,
                   ep_json_describe(act, text));
    return EP_ACT_SILU;
}

/* A list of limits, one for each layer of the model; 0 is none. */
static void read_limits(ep_config_reader *reader, const char *const *keys, uint32_t layers, float *out)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *key = NULL;
    json_t *list = ep_config_find(reader, keys, &key);
    if (list == NULL) {
        return;
    }
    if (!json_is_array(list) || json_array_size(list) < layers) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed an array of at least %u numbers", key,
                       ep_json_describe(list, text), layers);
        return;
    }
    for (uint32_t i = 0; i < layers; i++) {
        json_t *item = json_array_get(list, i);
        double limit = json_is_null(item) ? 0.0 : json_is_number(item) ? json_number_value(item) : -1.0;
        if (!(limit >= 0.0 && limit <= 1e30)) {
            ep_config_fail(reader, EP_ERR_BAD_FILE, "%s[%u] is %s, allowed 0..1e30", key, i, ep_json_describe(item, text));
            return;
        }
        out[i] = (float)limit;
    }
}

/* An absent or zero limit is none; ep_config_f32 wants more than 0. */
static float read_limit(ep_config_reader *reader, const char *const *keys, float fallback)
{
    const char *key = NULL;
    json_t *value = ep_config_find(reader, keys, &key);
    bool is_zero = value != NULL && json_is_number(value) && json_number_value(value) == 0.0;
    return is_zero ? 0.0f : ep_config_f32(reader, keys, 0.0, 1e30, fallback);
}

/* The activation of all MoE layers and its numbers, by which keys there are. */
static void read_activation(ep_config_reader *reader, ep_model_info *info)
{
    float limits[EP_MODEL_LAYERS_MAX] = {0.0f};
    float shared_limits[EP_MODEL_LAYERS_MAX] = {0.0f};
    ep_activation_numbers numbers = {0.0f, 0.0f, 0.0f};
    ep_activation activation = read_function(reader);
    const bool is_oai = strcmp(info->model_type, "gpt_oss") == 0 || ep_config_has(reader, KEYS("swiglu_alpha"));
    if (activation == EP_ACT_SITU || ep_config_has(reader, KEYS("activation_situ_beta"))) {
        activation = EP_ACT_SITU;
        numbers.alpha = ep_config_f32(reader, KEYS("activation_situ_beta"), 0.0, 1e6, 4.0f);
        numbers.beta = ep_config_f32(reader, KEYS("activation_situ_linear_beta"), 0.0, 1e6, 25.0f);
    } else if (activation == EP_ACT_SILU && is_oai) {
        activation = EP_ACT_SWIGLU_OAI;
        numbers.alpha = ep_config_f32(reader, KEYS("swiglu_alpha"), 0.0, 1e6, 1.702f);
        numbers.beta = ep_config_f32(reader, KEYS("swiglu_beta"), -1e6, 1e6, 1.0f);
        numbers.limit = read_limit(reader, KEYS("swiglu_limit"), 7.0f);
    } else if (activation == EP_ACT_SILU && ep_config_has(reader, KEYS("swiglu_limits"))) {
        activation = EP_ACT_SWIGLU_STEP;
        read_limits(reader, KEYS("swiglu_limits"), info->layers_count, limits);
        read_limits(reader, KEYS("swiglu_limits_shared"), info->layers_count, shared_limits);
    } else if (activation == EP_ACT_SILU) {
        numbers.limit = read_limit(reader, KEYS("swiglu_limit"), 0.0f);
        activation = numbers.limit > 0.0f ? EP_ACT_SWIGLU_LIMIT : EP_ACT_SILU;
    }
    for (uint32_t i = 0; reader->err == EP_OK && i < info->moe_layers_count; i++) {
        const uint32_t layer = info->moe_layers[i].layer;
        info->moe_layers[i].activation = activation;
        info->numbers[i] = (ep_layer_numbers){.routed = numbers, .shared = numbers};
        if (activation == EP_ACT_SWIGLU_STEP) {
            info->numbers[i].routed.limit = limits[layer];
            info->numbers[i].shared.limit = shared_limits[layer];
        }
    }
}

static ep_dtype read_dtype(ep_config_reader *reader, json_t *root)
{
    static const struct {
        const char *text;
        ep_dtype dtype;
    } names[] = {{"bfloat16", EP_DTYPE_BF16}, {"float16", EP_DTYPE_F16}, {"float32", EP_DTYPE_F32}};
    const char *const *keys = KEYS("torch_dtype", "dtype");
    char text[EP_JSON_TEXT_BYTES];
    const char *key = "";
    ep_config_reader whole = *reader;
    whole.object = root;
    json_t *value = ep_config_find(reader, keys, &key);
    if (value == NULL) {
        value = ep_config_find(&whole, keys, &key);
    }
    if (value == NULL) {
        return EP_DTYPE_NONE;
    }
    for (size_t i = 0; json_is_string(value) && i < EP_ARRAY_COUNT(names); i++) {
        if (strcmp(json_string_value(value), names[i].text) == 0) {
            return names[i].dtype;
        }
    }
    ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed bfloat16, float16, float32", key,
                   ep_json_describe(value, text));
    return EP_DTYPE_NONE;
}

static void read_dense_part(ep_config_reader *reader, json_t *root, ep_model_info *info)
{
    info->hidden = ep_config_u32(reader, KEYS("hidden_size"), 1, EP_HIDDEN_MAX, EP_CONFIG_REQUIRED);
    info->layers_count = ep_config_u32(reader, KEYS("num_hidden_layers", "num_layers"), 1,
                                       EP_MODEL_LAYERS_MAX, EP_CONFIG_REQUIRED);
    info->vocab = ep_config_u32(reader, KEYS("vocab_size"), 1, VOCAB_MAX, 0);
    info->heads = ep_config_u32(reader, KEYS("num_attention_heads"), 1, HEADS_MAX, 0);
    info->kv_heads = ep_config_u32(reader, KEYS("num_key_value_heads"), 1, HEADS_MAX, info->heads);
    info->head_dim = ep_config_u32(reader, KEYS("head_dim"), 1, HEAD_DIM_MAX,
                                   info->heads > 0 ? info->hidden / info->heads : 0);
    info->rms_norm_eps = ep_config_f32(reader, KEYS("rms_norm_eps", "layer_norm_epsilon"), 0.0, 1.0, 1e-6f);
    info->tie_embeddings = ep_config_bool(reader, KEYS("tie_word_embeddings"), false);
    info->positions_max = ep_config_u32(reader, KEYS("max_position_embeddings"), 1, POSITIONS_MAX, 0);
    info->dtype = read_dtype(reader, root);

    ep_config_reader rope = *reader; /* newer files keep rope_theta one level down */
    json_t *parameters = json_object_get(reader->object, "rope_parameters");
    if (!ep_config_has(reader, KEYS("rope_theta")) && json_is_object(parameters)) {
        rope.object = parameters;
        rope.prefix = "rope_parameters.";
    }
    info->rope_theta = ep_config_f32(&rope, KEYS("rope_theta"), 0.0, 1e12, 10000.0f);
    reader->err = rope.err;
}

static ep_router_family apply_scoring(const char *scoring, ep_router_family family, uint32_t groups)
{
    if (strcmp(scoring, "sigmoid") == 0 || strcmp(scoring, "noaux_tc") == 0) {
        return EP_ROUTER_R4;
    }
    if (strcmp(scoring, "softmax") == 0) {
        if (family == EP_ROUTER_R4 || (family == EP_ROUTER_R2 && groups > 1)) {
            return groups > 1 ? EP_ROUTER_R3 : EP_ROUTER_R2;
        }
        return family;
    }
    return EP_ROUTER_OTHER;
}

static void read_router(ep_config_reader *reader, const model_type *type, ep_router_info *router)
{
    router->family = type->router;
    router->renormalise =
        ep_config_bool(reader, KEYS("norm_topk_prob"), type->renormalise) || type->router == EP_ROUTER_R1;
    router->scaling_factor = ep_config_f32(reader, KEYS("routed_scaling_factor"), 0.0, 1e6, 1.0f);
    router->groups = ep_config_u32(reader, KEYS("n_group"), 1, EP_EXPERTS_MAX, 1);
    router->groups_kept = ep_config_u32(reader, KEYS("topk_group"), 1, router->groups, 1);

    const char *method = ep_config_string(reader, KEYS("topk_method"));
    if (method != NULL && strcmp(method, "greedy") == 0) {
        router->groups = 1;
        router->groups_kept = 1;
    } else if (method != NULL && strcmp(method, "group_limited_greedy") != 0 &&
               strcmp(method, "noaux_tc") != 0) {
        router->family = EP_ROUTER_OTHER;
    }
    const char *scoring = ep_config_string(reader, KEYS("scoring_func", "score_function"));
    if (scoring != NULL && router->family != EP_ROUTER_OTHER) {
        router->family = apply_scoring(scoring, router->family, router->groups);
    }
}

/* After the layers are known: groups must divide the experts and leave enough to choose from. */
static void check_groups(ep_config_reader *reader, const ep_model_info *info)
{
    const ep_router_info *router = &info->router;
    for (uint32_t i = 0; i < info->moe_layers_count && router->groups > 1; i++) {
        const ep_layer_shape *shape = &info->moe_layers[i];
        uint32_t group = shape->experts / router->groups;
        if (shape->experts % router->groups != 0) {
            ep_config_fail(reader, EP_ERR_BAD_FILE,
                           "n_group is %u, allowed a divisor of the %u experts of layer %u", router->groups,
                           shape->experts, shape->layer);
        } else if (shape->top_k > group * router->groups_kept) {
            ep_config_fail(reader, EP_ERR_BAD_FILE,
                           "topk_group is %u: %u groups of %u hold %u experts, allowed at least the %u "
                           "chosen per token",
                           router->groups_kept, router->groups_kept, group, group * router->groups_kept,
                           shape->top_k);
        }
    }
}

static ep_err allocate_values(uint32_t layers, layer_values *values)
{
    uint32_t *words = calloc(layers, 6 * sizeof(uint32_t) + sizeof(bool));
    if (words == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    values->storage = words;
    values->experts = words;
    values->top_k = words + layers;
    values->inner = words + 2 * (size_t)layers;
    values->shared_count = words + 3 * (size_t)layers;
    values->shared_inner = words + 4 * (size_t)layers;
    values->moe_freq = words + 5 * (size_t)layers;
    values->dense = (bool *)(words + 6 * (size_t)layers);
    return EP_OK;
}

static void read_dense_layers(ep_config_reader *reader, uint32_t layers, layer_values *values)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *key = NULL;
    size_t index;
    json_t *item;
    json_t *list = ep_config_find(reader, KEYS("mlp_only_layers"), &key);
    if (list != NULL && !json_is_array(list)) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed an array of layer numbers", key,
                       ep_json_describe(list, text));
    }
    json_array_foreach(list, index, item)
    {
        json_int_t layer = json_is_integer(item) ? json_integer_value(item) : -1;
        if (layer < 0 || layer >= (json_int_t)layers) {
            ep_config_fail(reader, EP_ERR_BAD_FILE, "%s[%zu] is %s, allowed 0..%u", key, index,
                           ep_json_describe(item, text), layers - 1);
            return;
        }
        values->dense[layer] = true;
    }
}

static void read_layer_values(ep_config_reader *reader, const model_type *type, uint32_t layers,
                              layer_values *values)
{
    ep_config_u32_per_layer(reader,
                            KEYS("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
                            1, EP_EXPERTS_MAX, EP_CONFIG_REQUIRED, values->experts, layers);
    ep_config_u32_per_layer(reader, KEYS("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
                            1, EP_TOP_K_MAX, EP_CONFIG_REQUIRED, values->top_k, layers);
    const char *const *inner_keys = type->inner_from_dense
                                        ? KEYS("moe_intermediate_size", "intermediate_size")
                                        : KEYS("moe_intermediate_size", "expert_ffn_hidden_size");
    ep_config_u32_per_layer(reader, inner_keys, 1, EP_INNER_MAX, EP_CONFIG_REQUIRED, values->inner, layers);
    ep_config_u32_per_layer(
        reader, KEYS("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
        0, SHARED_EXPERTS_MAX, 0, values->shared_count, layers);
    ep_config_u32_per_layer(reader,
                            KEYS("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                                 "shared_intermediate_size"),
                            0, EP_INNER_MAX, 0, values->shared_inner, layers);
    read_dense_layers(reader, layers, values);
}

/* Which layers are MoE layers: all the rules a config states must agree. */
static void choose_moe_layers(ep_config_reader *reader, uint32_t layers, layer_values *values, bool *moe)
{
    const char *key = NULL;
    uint32_t freq = 1;
    uint32_t first = ep_config_u32(reader, KEYS("first_k_dense_replace"), 0, layers, 0);
    uint32_t step =
        ep_config_u32(reader, KEYS("decoder_sparse_step", "moe_layer_interval"), 1, EP_MODEL_LAYERS_MAX, 1);
    uint32_t start = ep_config_u32(reader, KEYS("moe_layer_start_index"), 0, layers - 1, 0);
    uint32_t end = layers - 1;
    json_t *end_value = ep_config_find(reader, KEYS("moe_layer_end_index"), &key);
    if (end_value != NULL &&
        !(json_is_integer(end_value) && json_integer_value(end_value) == -1)) { /* -1: the last one */
        end = ep_config_u32(reader, KEYS("moe_layer_end_index"), 0, layers - 1, end);
    }
    bool freq_per_layer = json_is_array(ep_config_find(reader, KEYS("moe_layer_freq"), &key));
    if (freq_per_layer) {
        ep_config_u32_per_layer(reader, KEYS("moe_layer_freq"), 0, 1, 1, values->moe_freq, layers);
    } else {
        freq = ep_config_u32(reader, KEYS("moe_layer_freq"), 1, EP_MODEL_LAYERS_MAX, 1);
    }
    for (uint32_t i = 0; i < layers; i++) {
        bool by_freq = freq_per_layer ? values->moe_freq[i] != 0 : i % freq == 0;
        moe[i] = by_freq && i >= first && (i + 1) % step == 0 && i >= start && i <= end && !values->dense[i];
    }
}

static void fill_layer(ep_config_reader *reader, const layer_values *values, uint32_t layer, uint32_t hidden,
                       ep_layer_shape *out_shape, uint32_t *out_shared_inner)
{
    uint64_t shared_inner = values->shared_inner[layer];
    if (values->top_k[layer] > values->experts[layer]) {
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "num_experts_per_tok is %u, allowed 1..%u (the experts of layer %u)",
                       values->top_k[layer], values->experts[layer], layer);
    }
    if (shared_inner == 0) { /* several shared experts are stored as one wide expert */
        shared_inner = (uint64_t)values->shared_count[layer] * values->inner[layer];
    }
    if (shared_inner > EP_INNER_MAX) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "n_shared_experts is %u: its width %llu, allowed 1..%d",
                       values->shared_count[layer], (unsigned long long)shared_inner, EP_INNER_MAX);
    }
    uint32_t shared = shared_inner > 0 ? 1 : 0;
    if (values->experts[layer] + shared > EP_EXPERTS_MAX) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "num_experts is %u, allowed 1..%u beside a shared expert",
                       values->experts[layer], EP_EXPERTS_MAX - shared);
    }
    *out_shape = (ep_layer_shape){
        .layer = layer,
        .hidden = hidden,
        .inner = values->inner[layer],
        .experts = values->experts[layer],
        .shared_experts = shared,
        .top_k = values->top_k[layer],
    };
    *out_shared_inner = (uint32_t)shared_inner;
}

static void read_layers(ep_config_reader *reader, const model_type *type, ep_model_info *info)
{
    layer_values values = {0};
    uint32_t layers = info->layers_count;
    bool moe[EP_MODEL_LAYERS_MAX] = {false};

    info->moe_layers = calloc(layers, sizeof(info->moe_layers[0]));
    info->shared_inner = calloc(layers, sizeof(info->shared_inner[0]));
    info->numbers = calloc(layers, sizeof(info->numbers[0]));
    if (info->moe_layers == NULL || info->shared_inner == NULL || info->numbers == NULL || allocate_values(layers, &values) != EP_OK) {
        ep_config_fail(reader, EP_ERR_NO_MEMORY, "no memory for %u layers", layers);
        return;
    }
    read_layer_values(reader, type, layers, &values);
    choose_moe_layers(reader, layers, &values, moe);
    for (uint32_t i = 0; i < layers; i++) {
        if (moe[i]) {
            fill_layer(reader, &values, i, info->hidden, &info->moe_layers[info->moe_layers_count],
                       &info->shared_inner[info->moe_layers_count]);
            info->moe_layers_count++;
        }
    }
    free(values.storage);
    if (info->moe_layers_count == 0) {
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "num_hidden_layers is %u and none is an MoE layer (first_k_dense_replace, "
                       "moe_layer_freq, decoder_sparse_step, mlp_only_layers), allowed at least 1",
                       layers);
    }
}

ep_err ep_model_config_parse(const char *file, const char *bytes, size_t count, ep_model_config *out_config,
                             ep_error *out_error)
{
    static const ep_json_limits limits = {CONFIG_DEPTH_MAX, CONFIG_VALUES_MAX};
    ep_model_config config = {0};
    json_t *root = NULL;
    ep_err err = ep_json_parse(file, bytes, count, &limits, &root, out_error);
    if (err != EP_OK) {
        return err;
    }

    ep_config_reader reader = {.file = file, .prefix = "", .object = root, .error = out_error, .err = EP_OK};
    enter_text_config(&reader);
    const model_type *type = read_type(&reader, root, &config.info);
    config.shared_gate_required = type->shared_gate;
    refuse_unsupported(&reader, root);
    read_dense_part(&reader, root, &config.info);
    read_router(&reader, type, &config.info.router);
    if (reader.err == EP_OK) {
        read_layers(&reader, type, &config.info);
    }
    if (reader.err == EP_OK) {
        check_groups(&reader, &config.info);
        read_activation(&reader, &config.info);
    }
    json_decref(root);
    if (reader.err != EP_OK) {
        ep_model_config_fini(&config);
        return reader.err;
    }
    *out_config = config;
    return EP_OK;
}

void ep_model_config_fini(ep_model_config *config)
{
    free(config->info.moe_layers);
    free(config->info.shared_inner);
    free(config->info.numbers);
    *config = (ep_model_config){0};
}
