/* SPDX-License-Identifier: Apache-2.0 */
/* Reads config.json: keys that all model types spell alike or nearly alike; the type's row gives
 * what no key says. */
#include "model/model_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/expert_form.h"
#include "model/config_reader.h"
#include "model/json_reader.h"
#include "model/router_config.h"

#define KEYS EP_CONFIG_KEYS
#define CONFIG_DEPTH_MAX 32
#define CONFIG_VALUES_MAX 1000000
#define VOCAB_MAX 16777216
#define HEADS_MAX 4096
#define POSITIONS_MAX (1 << 30)
#define HEAD_DIM_MAX 65536
#define SHARED_EXPERTS_MAX 64

/* Values for each layer, as config.json states them. */
typedef struct layer_values {
    uint32_t experts[EP_MODEL_LAYERS_MAX];
    uint32_t top_k[EP_MODEL_LAYERS_MAX];
    uint32_t inner[EP_MODEL_LAYERS_MAX];
    uint32_t shared_count[EP_MODEL_LAYERS_MAX];
    uint32_t shared_inner[EP_MODEL_LAYERS_MAX]; /* if stated separately; otherwise 0 */
} layer_values;

/* The marks of a type's row; 0 without a row. */
static uint32_t type_marks(const ep_model_type *type)
{
    return type == NULL ? 0 : type->marks;
}

/* Multimodal wrappers have the language model's keys one or two levels down. */
static void enter_text_config(ep_config_reader *reader)
{
    static const struct {
        const char *keys[2];
        const char *prefix;
    } nested[] = {{{"text_config", NULL}, "text_config."},
                  {{"llm_config", NULL}, "llm_config."},
                  {{"language_config", NULL}, "language_config."},
                  {{"thinker_config", "text_config"}, "thinker_config.text_config."}};
    if (ep_config_has(reader, KEYS("hidden_size", "d_model"))) {
        return;
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(nested); i++) {
        json_t *object = json_object_get(reader->object, nested[i].keys[0]);
        object = nested[i].keys[1] == NULL ? object : json_object_get(object, nested[i].keys[1]);
        if (json_is_object(object)) {
            reader->object = object;
            reader->prefix = nested[i].prefix;
            return;
        }
    }
}

/* The language model's own type, or else that of the whole model. */
static const ep_model_type *read_type(ep_config_reader *reader, json_t *root, ep_model_info *info)
{
    const char *whole = json_string_value(json_object_get(root, "model_type"));
    const char *name = ep_config_string(reader, KEYS("model_type"));
    const ep_model_type *type = ep_model_type_find(name == NULL ? "" : name);
    type = type == NULL && whole != NULL ? ep_model_type_find(whole) : type;
    name = name == NULL ? whole : name;
    ep_json_printable(name == NULL ? "" : name, info->model_type, sizeof(info->model_type));
    info->model_type_known = type != NULL;
    if (type != NULL && type->refused != NULL) {
        ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                       "model_type is %s, which this build cannot serve: %s", info->model_type,
                       type->refused);
    }
    return type;
}

static ep_activation read_function(ep_config_reader *reader, const ep_model_type *type)
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
    json_t *act = ep_config_find(reader,
                                 KEYS("mlp_hidden_act", "hidden_act", "hidden_activation",
                                      "activation_function", "dense_act_fn"),
                                 &key);
    act = act == NULL ? json_object_get(ep_config_find(reader, KEYS("ffn_act_fn"), &key), "name")
                      : act;
    if (act == NULL && type == NULL) {
        ep_config_fail(
            reader, EP_ERR_UNIMPLEMENTED,
            "hidden_act is missing, and this build does not know the function of its model type");
        return EP_ACT_SILU;
    }
    const char *name = act != NULL              ? json_string_value(act)
                       : type->function != NULL ? type->function
                                                : "silu";
    for (size_t i = 0; name != NULL && i < EP_ARRAY_COUNT(names); i++) {
        if (strcmp(name, names[i].name) == 0) {
            return names[i].activation;
        }
    }
    ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                   "%s is %s, allowed silu, swish, situ, gelu, gelu_pytorch_tanh, gelu_new, "
                   "gelu_tanh, relu, relu2",
                   key, ep_json_describe(act, text));
    return EP_ACT_SILU;
}

/* Reads a list of limits, one per layer of the model; 0 is none. */
static void read_limits(ep_config_reader *reader, const char *const *keys, uint32_t layers,
                        float *out)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *key = NULL;
    json_t *list = ep_config_find(reader, keys, &key);
    if (list == NULL) {
        return;
    }
    if (!json_is_array(list) || json_array_size(list) < layers) {
        ep_config_fail(reader, EP_ERR_BAD_FILE, "%s is %s, allowed an array of at least %u numbers",
                       key, ep_json_describe(list, text), layers);
        return;
    }
    for (uint32_t i = 0; i < layers; i++) {
        json_t *item = json_array_get(list, i);
        double limit = json_is_null(item)     ? 0.0
                       : json_is_number(item) ? json_number_value(item)
                                              : -1.0;
        if (!(limit >= 0.0 && limit <= 1e30)) {
            ep_config_fail(reader, EP_ERR_BAD_FILE, "%s[%u] is %s, allowed 0..1e30", key, i,
                           ep_json_describe(item, text));
            return;
        }
        out[i] = (float)limit;
    }
}

/* Whether the key has a number, or a list of them, that is not 0. */
static bool says_number(const ep_config_reader *reader, const char *name)
{
    const char *key = NULL;
    const json_t *value = ep_config_find(reader, KEYS(name), &key);
    return value != NULL && !(json_is_number(value) && json_number_value(value) == 0.0);
}

/* Refuses numbers that belong to other formulas. */
static void refuse_numbers(ep_config_reader *reader, ep_activation formula)
{
    static const struct {
        const char *key;
        ep_activation formulas[2]; /* the formulas that have it */
    } numbers[] = {{"activation_situ_beta", {EP_ACT_SITU, EP_ACT_SITU}},
                   {"mlp_gate_softcap", {EP_ACT_SITU, EP_ACT_SITU}},
                   {"swiglu_alpha", {EP_ACT_SWIGLU_OAI, EP_ACT_SWIGLU_OAI}},
                   {"swiglu_limit", {EP_ACT_SWIGLU_OAI, EP_ACT_SWIGLU_LIMIT}},
                   {"swiglu_limits", {EP_ACT_SWIGLU_STEP, EP_ACT_SWIGLU_STEP}},
                   {"swiglu_limits_shared", {EP_ACT_SWIGLU_STEP, EP_ACT_SWIGLU_STEP}}};
    for (size_t i = 0; i < EP_ARRAY_COUNT(numbers); i++) {
        if (formula != numbers[i].formulas[0] && formula != numbers[i].formulas[1] &&
            says_number(reader, numbers[i].key)) {
            ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                           "%s is a number of another formula than %s, which other keys say",
                           numbers[i].key, ep_activation_name(formula));
        }
    }
}

/* Chooses the formula by the keys present and reads its numbers, except limits of single layers. */
static ep_activation read_formula(ep_config_reader *reader, const ep_model_type *type,
                                  ep_activation_numbers *numbers)
{
    const ep_activation function = read_function(reader, type);
    if (function == EP_ACT_SITU ||
        (function == EP_ACT_SILU &&
         ep_config_has(reader, KEYS("activation_situ_beta", "mlp_gate_softcap")))) {
        numbers->alpha =
            ep_config_f32(reader, KEYS("activation_situ_beta", "mlp_gate_softcap"), 0.0, 1e6, 4.0f);
        numbers->beta = ep_config_f32(reader, KEYS("activation_situ_linear_beta", "mlp_up_softcap"),
                                      0.0, 1e6, 25.0f);
        return EP_ACT_SITU;
    }
    if (function != EP_ACT_SILU) {
        return function;
    }
    if ((type_marks(type) & EP_TYPE_ALTERNATES) || ep_config_has(reader, KEYS("swiglu_alpha"))) {
        numbers->alpha = ep_config_f32(reader, KEYS("swiglu_alpha"), 0.0, 1e6, 1.702f);
        numbers->beta = ep_config_f32(reader, KEYS("swiglu_beta"), -1e6, 1e6, 1.0f);
        numbers->limit = ep_config_limit(reader, KEYS("swiglu_limit"), 7.0f);
        return EP_ACT_SWIGLU_OAI;
    }
    if (ep_config_has(reader, KEYS("swiglu_limits", "swiglu_limits_shared"))) {
        return EP_ACT_SWIGLU_STEP;
    }
    numbers->limit = ep_config_limit(reader, KEYS("swiglu_limit"), 0.0f);
    return numbers->limit > 0.0f ? EP_ACT_SWIGLU_LIMIT : EP_ACT_SILU;
}

/* Reads the activation of all MoE layers and its numbers. */
static void read_activation(ep_config_reader *reader, const ep_model_type *type,
                            ep_model_info *info)
{
    static const char *const formulas[] = {"swiglu_alpha", "swiglu_limit", "swiglu_limits",
                                           "activation_situ_beta", "mlp_gate_softcap"};
    float limits[EP_MODEL_LAYERS_MAX] = {0.0f};
    float shared_limits[EP_MODEL_LAYERS_MAX] = {0.0f};
    ep_activation_numbers numbers = {0.0f, 0.0f, 0.0f};
    for (size_t i = 0; type == NULL && i < EP_ARRAY_COUNT(formulas); i++) {
        /* models differ in what they clamp, and when */
        if (ep_config_has(reader, KEYS(formulas[i]))) {
            ep_config_fail(
                reader, EP_ERR_UNIMPLEMENTED,
                "%s is a number of a formula that this build does not know for model type %s",
                formulas[i], info->model_type);
        }
    }
    const ep_activation activation = read_formula(reader, type, &numbers);
    refuse_numbers(reader, activation);
    if (activation == EP_ACT_SWIGLU_STEP) {
        read_limits(reader, KEYS("swiglu_limits"), info->layers_count, limits);
        read_limits(reader, KEYS("swiglu_limits_shared"), info->layers_count, shared_limits);
    }
    for (uint32_t i = 0; reader->err == EP_OK && i < info->moe_layers_count; i++) {
        const uint32_t layer = info->moe_layers[i].layer;
        info->moe_layers[i].activation = activation;
        info->numbers[i] = (ep_layer_numbers){.routed = numbers, .shared = numbers};
        if (type_marks(type) & EP_TYPE_SHARED_UNLIMITED) {
            info->numbers[i].shared.limit = 0.0f;
        }
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

static void read_dense_part(ep_config_reader *reader, json_t *root, const ep_model_type *type,
                            ep_model_info *info)
{
    const uint32_t listed = ep_layer_map_count(reader);
    info->hidden =
        ep_config_u32(reader, KEYS("hidden_size", "d_model"), 1, EP_HIDDEN_MAX, EP_CONFIG_REQUIRED);
    info->layers_count =
        ep_config_u32(reader, KEYS("num_hidden_layers", "num_layers", "n_layers", "encoder_layers"),
                      1, EP_MODEL_LAYERS_MAX, listed > 0 ? listed : EP_CONFIG_REQUIRED);
    if (type_marks(type) & EP_TYPE_TWO_STACKS) {
        info->first_stack_layers = info->layers_count;
        info->layers_count += ep_config_u32(reader, KEYS("num_decoder_layers", "decoder_layers"), 0,
                                            EP_MODEL_LAYERS_MAX - info->layers_count, 0);
    }
    info->vocab = ep_config_u32(reader, KEYS("vocab_size"), 1, VOCAB_MAX, 0);
    info->heads = ep_config_u32(reader, KEYS("num_attention_heads"), 1, HEADS_MAX, 0);
    info->kv_heads = ep_config_u32(reader, KEYS("num_key_value_heads"), 1, HEADS_MAX, info->heads);
    /* 0 where attention has no such width */
    info->head_dim = ep_config_u32(reader, KEYS("head_dim"), 0, HEAD_DIM_MAX, 0);
    info->head_dim =
        info->head_dim == 0 && info->heads > 0 ? info->hidden / info->heads : info->head_dim;
    info->rms_norm_eps =
        ep_config_f32(reader, KEYS("rms_norm_eps", "layer_norm_epsilon"), 0.0, 1.0, 1e-6f);
    info->tie_embeddings = ep_config_bool(reader, KEYS("tie_word_embeddings"), false);
    info->positions_max =
        ep_config_u32(reader, KEYS("max_position_embeddings"), 1, POSITIONS_MAX, 0);
    info->dtype = read_dtype(reader, root);

    ep_config_reader rope = *reader; /* newer files have rope_theta one level down */
    json_t *parameters = json_object_get(reader->object, "rope_parameters");
    if (!ep_config_has(reader, KEYS("rope_theta")) && json_is_object(parameters)) {
        rope.object = parameters;
        rope.prefix = "rope_parameters.";
    }
    info->rope_theta = ep_config_f32(&rope, KEYS("rope_theta"), 0.0, 1e12, 10000.0f);
    reader->err = rope.err;
}

/* Widths of shared experts by the type's marks, where no key states them. */
static void settle_shared(const ep_config_reader *reader, const char *const *count_keys,
                          uint32_t marks, uint32_t layers, layer_values *values)
{
    const bool has_count = ep_config_has(reader, count_keys);
    for (uint32_t i = 0; i < layers; i++) {
        if (marks & EP_TYPE_SHARED_CALLERS) {
            values->shared_count[i] = 0;
            values->shared_inner[i] = 0;
        } else if (values->shared_count[i] == 0 && has_count) {
            values->shared_inner[i] = 0;
        } else if ((marks & EP_TYPE_SHARED_TIMES) &&
                   values->shared_count[i] <= SHARED_EXPERTS_MAX) {
            values->shared_inner[i] *= values->shared_count[i];
        }
    }
}

static void read_layer_values(ep_config_reader *reader, const ep_model_type *type, uint32_t layers,
                              layer_values *values)
{
    const uint32_t marks = type_marks(type);
    const char *const *expert_keys =
        KEYS("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts");
    const char *const *top_k_keys =
        KEYS("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k",
             "top_k_experts", "experts_per_token");
    ep_config_refuse_unlike(reader, expert_keys);
    ep_config_refuse_unlike(reader, top_k_keys);
    ep_config_u32_per_layer(reader, expert_keys, 1, EP_EXPERTS_MAX, EP_CONFIG_REQUIRED,
                            values->experts, layers);
    ep_config_u32_per_layer(reader, top_k_keys, 1, EP_TOP_K_MAX,
                            type != NULL && type->top_k > 0 ? type->top_k : EP_CONFIG_REQUIRED,
                            values->top_k, layers);
    const char *const *inner_keys =
        type == NULL || (marks & EP_TYPE_INNER_IS_DENSE)
            ? KEYS("moe_intermediate_size", "intermediate_size")
            : KEYS("moe_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_dim",
                   "ffn_hidden_size", "encoder_ffn_dim", "d_ff");
    if (marks & EP_TYPE_INNER_IS_1) {
        for (uint32_t i = 0; i < layers; i++) {
            values->inner[i] = 1;
        }
    } else {
        ep_config_u32_per_layer(reader, inner_keys, 1, EP_INNER_MAX, EP_CONFIG_REQUIRED,
                                values->inner, layers);
    }
    const char *const *count_keys = KEYS("n_shared_experts", "num_shared_experts",
                                         "num_shared_expert", "moe_num_shared_experts");
    ep_config_refuse_unlike(reader, count_keys);
    ep_config_u32_per_layer(reader, count_keys, 0, SHARED_EXPERTS_MAX,
                            marks & EP_TYPE_SHARED_ALWAYS ? 1 : 0, values->shared_count, layers);
    ep_config_u32_per_layer(reader,
                            KEYS("shared_expert_intermediate_size",
                                 "moe_shared_expert_intermediate_size", "shared_intermediate_size",
                                 "shared_experts_intermediate_size", "share_expert_dim",
                                 "share_expert_dims"),
                            0, EP_INNER_MAX, 0, values->shared_inner, layers);
    settle_shared(reader, count_keys, marks, layers, values);
}

static void fill_layer(ep_config_reader *reader, const layer_values *values, uint32_t layer,
                       uint32_t hidden, ep_layer_shape *out_shape, uint32_t *out_shared_inner)
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
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "n_shared_experts is %u: its width %llu, allowed 1..%d",
                       values->shared_count[layer], (unsigned long long)shared_inner, EP_INNER_MAX);
    }
    uint32_t shared = shared_inner > 0 ? 1 : 0;
    if (values->experts[layer] + shared > EP_EXPERTS_MAX) {
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "num_experts is %u, allowed 1..%u beside a shared expert",
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

static void read_layers(ep_config_reader *reader, const ep_model_type *type,
                        ep_model_config *config)
{
    layer_values values;
    ep_model_info *info = &config->info;
    uint32_t layers = info->layers_count;

    info->moe_layers = calloc(layers, sizeof(info->moe_layers[0]));
    info->shared_inner = calloc(layers, sizeof(info->shared_inner[0]));
    info->numbers = calloc(layers, sizeof(info->numbers[0]));
    if (info->moe_layers == NULL || info->shared_inner == NULL || info->numbers == NULL) {
        ep_config_fail(reader, EP_ERR_NO_MEMORY, "no memory for %u layers", layers);
        return;
    }
    read_layer_values(reader, type, layers, &values);
    ep_layer_map_read(reader, layers, &config->layer_map);
    for (uint32_t i = 0; i < layers; i++) {
        if (config->layer_map.moe[i]) {
            fill_layer(reader, &values, i, info->hidden, &info->moe_layers[info->moe_layers_count],
                       &info->shared_inner[info->moe_layers_count]);
            info->moe_layers_count++;
        }
    }
    if (info->moe_layers_count == 0) {
        ep_config_fail(reader, EP_ERR_BAD_FILE,
                       "num_hidden_layers is %u and none is an MoE layer (%s), allowed at least 1",
                       layers, config->layer_map.keys);
    }
}

ep_err ep_model_config_parse(const char *file, const char *bytes, size_t count,
                             ep_model_config *out_config, ep_error *out_error)
{
    static const ep_json_limits limits = {CONFIG_DEPTH_MAX, CONFIG_VALUES_MAX};
    ep_model_config config = {0};
    json_t *root = NULL;
    ep_err err = ep_json_parse(file, bytes, count, &limits, &root, out_error);
    if (err != EP_OK) {
        return err;
    }

    ep_config_reader reader = {
        .file = file, .prefix = "", .object = root, .error = out_error, .err = EP_OK};
    /* DBRX has its experts' keys there */
    (void)json_object_update_missing(root, json_object_get(root, "ffn_config"));
    enter_text_config(&reader);
    config.type = read_type(&reader, root, &config.info);
    config.shared_gate_required = (type_marks(config.type) & EP_TYPE_SHARED_GATED) != 0;
    config.is_quantised = ep_quant_config_read(&reader, root, &config.quant);
    config.info.wide_inputs = config.quant.wide_inputs;
    read_dense_part(&reader, root, config.type, &config.info);
    if (reader.err == EP_OK) {
        read_layers(&reader, config.type, &config);
    }
    if (reader.err == EP_OK) {
        ep_router_config_read(&reader, &config);
        read_activation(&reader, config.type, &config.info);
        ep_config_refuse_unused(&reader, root);
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
    free(config->info.layer_formats);
    *config = (ep_model_config){0};
}
