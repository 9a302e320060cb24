/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of a GGUF file to those of a config.json: one table of architectures, one of keys. */
#include "model/gguf.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define KEY_BYTES 192

/* What writers of GGUF call a model type, and what config.json calls it. Others may compute other experts. */
static const struct {
    const char *architecture;
    const char *type;
    bool is_normed; /* the weights of a token's experts, where no key says */
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

/* Behind "<architecture>.". Without a name: what it says, files or the type say too. */
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

static json_t *find(const json_t *all, const char *architecture, const char *key)
{
    char name[KEY_BYTES];
    snprintf(name, sizeof(name), "%s.%s", architecture, key);
    return json_object_get(all, name);
}

static json_int_t integer_of(const json_t *all, const char *architecture, const char *key)
{
    const json_t *value = find(all, architecture, key);
    return json_is_integer(value) ? json_integer_value(value) : 0;
}

static bool is_zero(const json_t *value)
{
    return json_is_number(value) && json_number_value(value) == 0.0;
}

/* Zero stands for none; of a list for layers, as attention's is, the first counts where config.json has one number. */
static void set_key(json_t *config, const char *name, json_t *value)
{
    const bool is_list = json_is_array(value) && strstr(name, "expert") == NULL && strstr(name, "intermediate") == NULL;
    value = is_list ? json_array_get(value, 0) : value;
    if (value != NULL && !is_zero(value)) {
        json_object_set(config, name, value);
    }
}

/* Keys about experts without a row keep their names: the config's reader refuses them. */
static void set_others(const json_t *all, const char *architecture, json_t *config)
{
    static const char *const parts[] = {"expert", "moe", "swiglu", "rout"};
    const size_t length = strlen(architecture);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)all, key, value) {
        const char *end = strncmp(key, architecture, length) == 0 && key[length] == '.' ? key + length + 1 : NULL;
        bool is_about_experts = false;
        for (size_t i = 0; end != NULL && i < EP_ARRAY_COUNT(parts); i++) {
            is_about_experts = is_about_experts || strstr(end, parts[i]) != NULL;
        }
        for (size_t i = 0; is_about_experts && i < EP_ARRAY_COUNT(keys); i++) {
            is_about_experts = strcmp(keys[i].key, end) != 0;
        }
        if (is_about_experts) {
            json_object_set(config, end, value);
        }
    }
}

static void set_numbers(const json_t *all, const char *architecture, json_t *config)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(keys); i++) {
        if (keys[i].name != NULL) {
            set_key(config, keys[i].name, find(all, architecture, keys[i].key));
        }
    }
    const json_int_t blocks = integer_of(all, architecture, "block_count");
    json_object_set_new(config, "num_hidden_layers", json_integer(blocks - integer_of(all, architecture, "nextn_predict_layers")));
}

/* The gate's score; "" where the file does not say, NULL one that no build knows. */
static const char *score_of(json_int_t function)
{
    static const char *const words[] = {"", "softmax", "sigmoid", "softmax", "sqrtsoftplus"};
    return function < 0 || function >= (json_int_t)EP_ARRAY_COUNT(words) ? NULL : words[function];
}

static ep_err set_router(const char *file, const json_t *all, const char *architecture, bool is_normed, json_t *config, ep_error *out_error)
{
    const json_int_t function = integer_of(all, architecture, "expert_gating_func");
    const char *score = score_of(function);
    if (score == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "%s: %s.expert_gating_func is %" JSON_INTEGER_FORMAT ", allowed 1..4", file,
                            architecture, function);
    }
    if (score[0] != '\0') {
        json_object_set_new(config, "scoring_func", json_string(score));
    }
    if (json_object_get(config, "norm_topk_prob") == NULL) {
        json_object_set_new(config, "norm_topk_prob", json_boolean(is_normed));
    }
    return EP_OK;
}

/* DeepSeek's two routers have one architecture's name. */
static const char *type_of(const json_t *all, const char *architecture, const char *type)
{
    const bool is_softmax = integer_of(all, architecture, "expert_gating_func") != 2;
    return strcmp(type, "deepseek_v3") == 0 && is_softmax ? "deepseek_v2" : type;
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
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i == 0 ? "" : ", ", architectures[i].architecture);
    }
    if (type == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "%s: general.architecture is %s, allowed %s", file,
                            architecture == NULL ? "missing" : ep_json_printable(architecture, text, sizeof(text)), list);
    }
    json_t *config = json_object();
    ep_err err = config == NULL ? EP_ERR_NO_MEMORY : EP_OK;
    if (err == EP_OK) {
        json_object_set_new(config, "model_type", json_string(type_of(all, architecture, type)));
        set_numbers(all, architecture, config);
        set_others(all, architecture, config);
        err = set_router(file, all, architecture, is_normed, config, out_error);
    }
    if (err == EP_OK) {
        *out_text = json_dumps(config, JSON_SORT_KEYS);
        err = *out_text == NULL ? EP_ERR_NO_MEMORY : EP_OK;
    }
    json_decref(config);
    return err == EP_ERR_NO_MEMORY ? ep_error_set(out_error, err, "%s: no memory for its keys", file) : err;
}
