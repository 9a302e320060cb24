/* SPDX-License-Identifier: Apache-2.0 */
/* Translates keys of a GGUF file to those of a config.json: tables of architectures and of keys. */
#include "model/gguf.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"
#include "model/model_types.h"

#define KEY_BYTES 192

/* The architecture in GGUF, and model_type in config.json. Others may compute experts
 * differently. */
static const struct {
    const char *architecture;
    const char *type;
    bool is_normed; /* default for dividing weights by their sum, where no key says */
} architectures[] = {
    {"llama", "mixtral", true},
    {"qwen2moe", "qwen2_moe", false},
    {"qwen3moe", "qwen3_moe", true},
    {"qwen3vlmoe", "qwen3_vl_moe", true},
    {"qwen3next", "qwen3_next", true},
    {"qwen35moe", "qwen3_5_moe", true},
    {"olmoe", "olmoe", false},
    {"deepseek2", "deepseek_v3", false},
    {"glm4moe", "glm4_moe", false},
    {"gpt-oss", "gpt_oss", true},
    {"granitemoe", "granitemoe", true},
    {"minimax-m2", "minimax_m2", true},
    {"dots1", "dots1", false},
    {"bailingmoe2", "bailing_moe_v2", false},
    {"hunyuan-moe", "hunyuan_v1_moe", true},
    {"mimo2", "mimo_v2_flash", true},
    {"ernie4_5-moe", "ernie4_5_moe", true},
    {"lfm2moe", "lfm2_moe", true},
};

/* Keys after "<architecture>.". Without a name, the key is ignored: files or type say the same. */
static const struct {
    const char *key;
    const char *name;
} keys[] = {
    {"expert_gating_func", NULL},
    {"moe_every_n_layers", NULL},
    {"interleave_moe_layer_step", NULL},
    {"embedding_length", "hidden_size"},
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"feed_forward_length", "intermediate_size"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"expert_shared_count", "n_shared_experts"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {"expert_weights_norm", "norm_topk_prob"},
    {"expert_weights_scale", "routed_scaling_factor"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.key_length", "head_dim"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"rope.freq_base", "rope_theta"},
    {"context_length", "max_position_embeddings"},
    {"vocab_size", "vocab_size"},
};

/* The keys of one model while they are translated; the first error is kept. */
typedef struct walk {
    const char *file;
    const json_t *all;
    const char *architecture;
    json_t *config;
    ep_err err;
    ep_error *error;
} walk;

static json_t *find(const walk *w, const char *key)
{
    char name[KEY_BYTES];
    snprintf(name, sizeof(name), "%s.%s", w->architecture, key);
    return json_object_get(w->all, name);
}

/* 0 where the key is missing. */
static json_int_t count_of(walk *w, const char *key)
{
    char text[EP_JSON_TEXT_BYTES];
    const json_t *value = find(w, key);
    if (w->err == EP_OK && value != NULL &&
        (!json_is_integer(value) || json_integer_value(value) < 0 ||
         json_integer_value(value) > INT32_MAX)) {
        w->err =
            ep_error_set(w->error, EP_ERR_BAD_FILE, "%s: %s.%s is %s, allowed an integer 0..%d",
                         w->file, w->architecture, key, ep_json_describe(value, text), INT32_MAX);
    }
    return w->err == EP_OK ? json_integer_value(value) : 0;
}

/* Takes the value. */
static void put(walk *w, const char *name, json_t *value)
{
    if (json_object_set_new(w->config, name, value) != 0 && w->err == EP_OK) {
        w->err = ep_error_set(w->error, EP_ERR_NO_MEMORY, "%s: no memory for its keys", w->file);
    }
}

static bool is_zero(const json_t *value)
{
    return json_is_number(value) && json_number_value(value) == 0.0;
}

/* Zero means none. Of a list of heads per layer, the first is used where config.json has one
 * number. */
static void put_known(walk *w, const char *name, json_t *value)
{
    const bool is_list = json_is_array(value) && strstr(name, "heads") != NULL;
    value = is_list ? json_array_get(value, 0) : value;
    if (value != NULL && !is_zero(value)) {
        put(w, name, json_incref(value));
    }
}

/* Keys about experts without a row keep their names with the architecture. No config.json has such
 * keys, so the config's reader refuses them. */
static void put_others(walk *w)
{
    static const char *const parts[] = {"expert", "moe", "swiglu", "rout"};
    const size_t length = strlen(w->architecture);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)w->all, key, value)
    {
        const char *end = strncmp(key, w->architecture, length) == 0 && key[length] == '.'
                              ? key + length + 1
                              : NULL;
        bool is_about_experts = false;
        for (size_t i = 0; end != NULL && i < EP_ARRAY_COUNT(parts); i++) {
            is_about_experts = is_about_experts || strstr(end, parts[i]) != NULL;
        }
        for (size_t i = 0; is_about_experts && i < EP_ARRAY_COUNT(keys); i++) {
            is_about_experts = strcmp(keys[i].key, end) != 0;
        }
        if (is_about_experts) {
            put(w, key, json_incref(value));
        }
    }
}

static void put_numbers(walk *w)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(keys); i++) {
        if (keys[i].name != NULL) {
            put_known(w, keys[i].name, find(w, keys[i].key));
        }
    }
    const json_int_t blocks = count_of(w, "block_count");
    put(w, "num_hidden_layers", json_integer(blocks - count_of(w, "nextn_predict_layers")));
}

/* Names the score as config.json does. A softmax of only the selected logits is the rule of some
 * types, which also call it softmax. */
static void put_router(walk *w, const char *type, bool is_normed)
{
    static const char *const words[] = {"", "softmax", "sigmoid", "softmax of the selected",
                                        "sqrtsoftplus"};
    const json_int_t function = count_of(w, "expert_gating_func");
    const ep_model_type *row = ep_model_type_find(type);
    const bool is_selected = row != NULL && row->router.weight == EP_GATE_SOFTMAX_SELECTED;
    if (function >= (json_int_t)EP_ARRAY_COUNT(words) && w->err == EP_OK) {
        w->err = ep_error_set(w->error, EP_ERR_UNIMPLEMENTED,
                              "%s: %s.expert_gating_func is %" JSON_INTEGER_FORMAT ", allowed 1..4",
                              w->file, w->architecture, function);
    }
    if (w->err == EP_OK && function != 0) {
        put(w, "scoring_func",
            json_string(function == 3 && is_selected ? "softmax" : words[function]));
    }
    if (json_object_get(w->config, "norm_topk_prob") == NULL) {
        put(w, "norm_topk_prob", json_boolean(is_normed));
    }
}

/* DeepSeek's two routers share an architecture name. */
static const char *type_of(walk *w, const char *type)
{
    const bool is_softmax = count_of(w, "expert_gating_func") != 2;
    return strcmp(type, "deepseek_v3") == 0 && is_softmax ? "deepseek_v2" : type;
}

/* json_dumps of jansson 2.14 leaves out a key where its buffer cannot grow. NULL: no memory. */
static char *dump(const json_t *config)
{
    const size_t bytes = json_dumpb(config, NULL, 0, JSON_SORT_KEYS);
    char *text = bytes > 0 ? malloc(bytes + 1) : NULL;
    if (text != NULL && json_dumpb(config, text, bytes, JSON_SORT_KEYS) != bytes) {
        free(text);
        return NULL;
    }
    if (text != NULL) {
        text[bytes] = 0;
    }
    return text;
}

ep_err ep_gguf_config(const char *file, const json_t *all, char **out_text, ep_error *out_error)
{
    char text[EP_JSON_TEXT_BYTES];
    const char *architecture = json_string_value(json_object_get(all, "general.architecture"));
    const char *type = NULL;
    bool is_normed = false;
    char list[320] = "";
    size_t used = 0;
    for (size_t i = 0; i < EP_ARRAY_COUNT(architectures); i++) {
        if (architecture != NULL && strcmp(architecture, architectures[i].architecture) == 0) {
            type = architectures[i].type;
            is_normed = architectures[i].is_normed;
        }
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i == 0 ? "" : ", ",
                                 architectures[i].architecture);
    }
    if (type == NULL) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED, "%s: general.architecture is %s, allowed %s", file,
            architecture == NULL ? "missing" : ep_json_printable(architecture, text, sizeof(text)),
            list);
    }
    walk w = {.file = file,
              .all = all,
              .architecture = architecture,
              .config = json_object(),
              .err = EP_OK,
              .error = out_error};
    type = type_of(&w, type);
    put(&w, "model_type", json_string(type));
    put_numbers(&w);
    put_others(&w);
    put_router(&w, type, is_normed);
    char *dumped = w.err == EP_OK ? dump(w.config) : NULL;
    json_decref(w.config);
    if (w.err == EP_OK && dumped == NULL) {
        w.err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for its keys", file);
    }
    if (w.err == EP_OK) {
        *out_text = dumped;
    }
    return w.err;
}
