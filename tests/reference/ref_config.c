/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_config.h"

#include <string.h>

#include "ref_checkpoint.h"

static const struct {
    const char *name;
    enum ref_activation_kind kind;
} functions[] = {{"silu", REF_ACT_SILU},          {"swish", REF_ACT_SILU},
                 {"gelu", REF_ACT_GELU},          {"gelu_pytorch_tanh", REF_ACT_GELU_TANH},
                 {"gelu_new", REF_ACT_GELU_TANH}, {"gelu_tanh", REF_ACT_GELU_TANH},
                 {"relu", REF_ACT_RELU},          {"relu2", REF_ACT_RELU2},
                 {"situ", REF_ACT_SITU}};

static float number(const json_t *config, const char *key, double otherwise)
{
    const json_t *value = json_object_get(config, key);
    return (float)(json_is_number(value) ? json_number_value(value) : otherwise);
}

static enum ref_activation_kind function_of(const json_t *config)
{
    static const char *const keys[] = {"mlp_hidden_act", "hidden_act", "hidden_activation"};
    const char *name = NULL;
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys) && name == NULL; i++) {
        name = json_string_value(json_object_get(config, keys[i]));
    }
    for (size_t i = 0; name != NULL && i < sizeof(functions) / sizeof(*functions); i++) {
        if (strcmp(functions[i].name, name) == 0) {
            return functions[i].kind;
        }
    }
    if (name != NULL) {
        ref_die("config.json: activation %s is not known here", name);
    }
    return REF_ACT_SILU;
}

struct ref_activation ref_config_activation(const json_t *config, size_t layer, bool shared)
{
    const char *type = json_string_value(json_object_get(config, "model_type"));
    const json_t *limits =
        json_object_get(config, shared ? "swiglu_limits_shared" : "swiglu_limits");
    struct ref_activation a = {.kind = function_of(config)};
    if (a.kind == REF_ACT_SITU || json_object_get(config, "activation_situ_beta") != NULL) {
        a.kind = REF_ACT_SITU;
        a.alpha = number(config, "activation_situ_beta", 4.0);
        a.beta = number(config, "activation_situ_linear_beta", 25.0);
    } else if (a.kind != REF_ACT_SILU) {
        return a;
    } else if ((type != NULL && strcmp(type, "gpt_oss") == 0) ||
               json_object_get(config, "swiglu_alpha") != NULL) {
        a.kind = REF_ACT_SWIGLU_OAI;
        a.alpha = number(config, "swiglu_alpha", 1.702);
        a.beta = number(config, "swiglu_beta", 1.0);
        a.limit = number(config, "swiglu_limit", 7.0);
    } else if (json_object_get(config, "swiglu_limits") != NULL) {
        a.kind = REF_ACT_SWIGLU_STEP;
        a.limit = (float)json_number_value(json_array_get(limits, layer));
    } else if (number(config, "swiglu_limit", 0.0) > 0.0f) {
        a.kind = REF_ACT_SWIGLU_LIMIT;
        a.limit = number(config, "swiglu_limit", 0.0);
    }
    return a;
}
