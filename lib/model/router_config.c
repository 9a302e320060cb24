/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the router's keys, and checks that no key about experts is left over. */
#include "model/router_config.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "model/json_reader.h"

#define KEYS EP_CONFIG_KEYS
#define RENORM_KEYS "norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight"
#define SCALING_KEYS                                                                               \
    "routed_scaling_factor", "route_scale", "router_scaling_factor", "moe_router_scaling_factor",  \
        "moe_routed_scaling_factor"
#define GROUP_KEYS "n_group", "num_expert_group", "num_expert_groups"
#define KEPT_KEYS "topk_group", "num_limited_groups"
#define SCORING_KEYS                                                                               \
    "scoring_func", "score_function", "score_func", "moe_router_activation_func",                  \
        "moe_router_activation", "moe_router_score_func", "expert_selection_fn"
#define BIAS_KEYS                                                                                  \
    "use_expert_bias", "use_routing_bias", "use_moe_router_bias", "moe_router_enable_expert_bias"

/* Keeps the first reason. */
static void __attribute__((format(printf, 2, 3)))
give_up(ep_router_info *router, const char *format, ...)
{
    va_list args;
    if (router->why_not[0] == '\0') {
        va_start(args, format);
        vsnprintf(router->why_not, sizeof(router->why_not), format, args);
        va_end(args);
    }
}

static bool is_selected_softmax(const ep_router_rule *rule)
{
    return rule->weight == EP_GATE_SOFTMAX_SELECTED;
}

/* 0: an unknown word. */
static ep_gate_score score_of(const char *word)
{
    static const struct {
        const char *word;
        ep_gate_score score;
    } words[] = {{"softmax", EP_GATE_SOFTMAX},
                 {"sigmoid", EP_GATE_SIGMOID},
                 {"noaux_tc", EP_GATE_SIGMOID},
                 {"sqrtsoftplus", EP_GATE_SQRT_SOFTPLUS}};
    for (size_t i = 0; i < EP_ARRAY_COUNT(words); i++) {
        if (strcmp(words[i].word, word) == 0) {
            return words[i].score;
        }
    }
    return (ep_gate_score)0;
}

static void read_scores(ep_config_reader *reader, const ep_router_rule *rule,
                        ep_router_info *router)
{
    const char *key = "scoring_func";
    const char *word = ep_config_string(reader, KEYS(SCORING_KEYS));
    (void)ep_config_find(reader, KEYS(SCORING_KEYS), &key);
    if (word == NULL && ep_config_has(reader, KEYS("moe_router_use_sigmoid"))) {
        key = "moe_router_use_sigmoid";
        word =
            ep_config_bool(reader, KEYS("moe_router_use_sigmoid"), false) ? "sigmoid" : "softmax";
    }
    router->select = rule->select;
    router->weight = rule->weight;
    if (word == NULL) {
        return;
    }
    const ep_gate_score score = score_of(word);
    const bool agrees =
        score == rule->select || (score == EP_GATE_SOFTMAX && is_selected_softmax(rule));
    if (score != 0 && (rule->marks & EP_ROUTER_SCORING_KEY)) {
        router->select = score;
        router->weight = score;
    } else if ((rule->marks & EP_ROUTER_WEIGHT_KEY) &&
               (score == EP_GATE_SOFTMAX || score == EP_GATE_SIGMOID)) {
        router->weight = score == EP_GATE_SOFTMAX ? EP_GATE_SOFTMAX_SELECTED : score;
    } else if (!agrees) {
        give_up(router, "%s is %.32s, which is not the rule of its type", key, word);
    }
}

static void read_renormalise(ep_config_reader *reader, const ep_router_rule *rule,
                             ep_router_info *router)
{
    /* exponent of a norm; null: none */
    const json_t *exponent = json_object_get(reader->object, "moe_normalize_expert_weights");
    const bool by_key = rule->renorm == EP_RENORM_KEY_ON || rule->renorm == EP_RENORM_KEY_OFF;
    const bool otherwise = rule->renorm == EP_RENORM_KEY_ON || rule->renorm == EP_RENORM_ALWAYS;
    const bool wanted = ep_config_bool(reader, KEYS(RENORM_KEYS), otherwise);
    router->renormalise = (by_key ? wanted : otherwise) &&
                          router->weight != EP_GATE_SOFTMAX_SELECTED && !json_is_null(exponent);
    router->epsilon = router->renormalise ? rule->epsilon : 0.0f;
    if (exponent != NULL && !json_is_null(exponent) &&
        !(json_is_number(exponent) && json_number_value(exponent) == 1.0)) {
        give_up(router, "moe_normalize_expert_weights is not 1");
    }
    if (!by_key && wanted != otherwise && !is_selected_softmax(rule)) {
        give_up(router, "norm_topk_prob is %s, which is not the rule of its type",
                wanted ? "true" : "false");
    }
    router->sum_min =
        router->renormalise ? ep_config_f32(reader, KEYS("moe_norm_min"), 0.0, 1.0, 0.0f) : 0.0f;
}

static void read_scaling(ep_config_reader *reader, const ep_router_rule *rule,
                         ep_router_info *router)
{
    const float factor = ep_config_f32(reader, KEYS(SCALING_KEYS), 0.0, 1e6, 1.0f);
    const bool scales = (rule->marks & EP_ROUTER_SCALED) ||
                        ((rule->marks & EP_ROUTER_SCALED_OR_NORMED) && !router->renormalise);
    router->scaling_factor = scales ? factor : 1.0f;
    if (factor != 1.0f && !(rule->marks & (EP_ROUTER_SCALED | EP_ROUTER_SCALED_OR_NORMED))) {
        give_up(router, "routed_scaling_factor is %g, which is not the rule of its type",
                (double)factor);
    }
}

/* Groups must divide the experts and leave enough experts to choose from. */
static void check_groups(ep_config_reader *reader, const ep_model_info *info)
{
    const ep_router_info *router = &info->router;
    for (uint32_t i = 0; i < info->moe_layers_count && router->groups > 1; i++) {
        const ep_layer_shape *shape = &info->moe_layers[i];
        uint32_t group = shape->experts / router->groups;
        if (shape->experts % router->groups != 0) {
            ep_config_fail(reader, EP_ERR_BAD_FILE,
                           "n_group is %u, allowed a divisor of the %u experts of layer %u",
                           router->groups, shape->experts, shape->layer);
        } else if (shape->top_k > group * router->groups_kept) {
            ep_config_fail(
                reader, EP_ERR_BAD_FILE,
                "topk_group is %u: %u groups of %u hold %u experts, allowed at least the %u "
                "chosen per token",
                router->groups_kept, router->groups_kept, group, group * router->groups_kept,
                shape->top_k);
        }
    }
}

static void read_groups(ep_config_reader *reader, const ep_router_rule *rule, ep_model_info *info)
{
    ep_router_info *router = &info->router;
    const char *method = ep_config_string(reader, KEYS("topk_method"));
    router->groups = ep_config_u32(reader, KEYS(GROUP_KEYS), 1, EP_EXPERTS_MAX, 1);
    router->groups_kept = ep_config_u32(reader, KEYS(KEPT_KEYS), 1, router->groups, router->groups);
    router->group_best = rule->group_best;
    router->group_mask =
        rule->marks & EP_ROUTER_MASK_ZERO ? EP_GROUP_MASK_ZERO : EP_GROUP_MASK_MINUS_INF;
    if (method != NULL && strcmp(method, "greedy") == 0) {
        router->groups = 1;
        router->groups_kept = 1;
    } else if (method != NULL && strcmp(method, "group_limited_greedy") != 0 &&
               strcmp(method, "noaux_tc") != 0) {
        give_up(router, "topk_method is %.32s, which this build does not know", method);
    }
    if (router->groups > 1 && rule->group_best == 0) {
        give_up(router, "n_group is %u, and its type has no groups", router->groups);
    }
    check_groups(reader, info);
}

/* Reads the counts of zero and copy experts, whose ids follow the routed ones. */
static void read_other_experts(ep_config_reader *reader, const ep_router_rule *rule,
                               ep_router_info *router)
{
    const char *kind = ep_config_string(reader, KEYS("zero_expert_type"));
    const uint32_t count = ep_config_u32(reader, KEYS("zero_expert_num"), 0, EP_EXPERTS_MAX, 0);
    router->copy_experts = count;
    router->zero_experts = rule->marks & EP_ROUTER_ZERO_LAST ? 1 : 0;
    if (count > 0 && kind != NULL && strcmp(kind, "identity") != 0) {
        ep_config_fail(reader, EP_ERR_UNIMPLEMENTED, "zero_expert_type is %.32s, allowed identity",
                       kind);
    }
}

static void read_averaging(ep_config_reader *reader, ep_model_config *config)
{
    const ep_model_info *info = &config->info;
    const bool otherwise = config->type != NULL && (config->type->marks & EP_TYPE_SHARED_AVERAGED);
    const char *how = ep_config_string(reader, KEYS("shared_expert_combination_strategy"));
    how = how != NULL ? how : otherwise ? "average" : "sum";
    if (strcmp(how, "average") != 0 && strcmp(how, "sum") != 0) {
        ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                       "shared_expert_combination_strategy is %.32s, allowed average, sum", how);
    }
    config->shared_halved = strcmp(how, "average") == 0 && info->shared_inner[0] > 0;
    if (config->shared_halved) {
        config->info.router.scaling_factor *= 0.5f;
    }
}

void ep_router_config_read(ep_config_reader *reader, ep_model_config *config)
{
    static const ep_router_rule none = {.why_not =
                                            "its model type has no row in this build's table"};
    const ep_router_rule *rule = config->type == NULL ? &none : &config->type->router;
    ep_model_info *info = &config->info;
    ep_router_info *router = &info->router;
    if (rule->why_not != NULL) {
        give_up(router, "%s", rule->why_not);
    }
    ep_config_refuse_unlike(reader, KEYS(RENORM_KEYS));
    ep_config_refuse_unlike(reader, KEYS(SCALING_KEYS));
    ep_config_refuse_unlike(reader, KEYS(GROUP_KEYS));
    ep_config_refuse_unlike(reader, KEYS(KEPT_KEYS));
    ep_config_refuse_unlike(reader, KEYS(BIAS_KEYS));
    read_scores(reader, rule, router);
    read_renormalise(reader, rule, router);
    read_scaling(reader, rule, router);
    read_groups(reader, rule, info);
    read_other_experts(reader, rule, router);
    read_averaging(reader, config);
    router->softcap = ep_config_has(reader, KEYS("moe_router_logit_softcapping"))
                          ? ep_config_limit(reader, KEYS("moe_router_logit_softcapping"), 0.0f)
                          : 0.0f;
    router->jitter = rule->select == EP_GATE_SPARSEMIXER
                         ? ep_config_f32(reader, KEYS("router_jitter_noise"), 0.0, 1.0, 0.01f)
                         : 0.0f;
    router->has_bias =
        rule->bias == EP_BIAS_SELECT && ep_config_bool(reader, KEYS(BIAS_KEYS), true);
    router->has_factors = (rule->marks & EP_ROUTER_FACTORS) != 0;
    router->weight_on_input = ep_config_bool(reader, KEYS("moe_apply_router_weight_on_input"),
                                             (rule->marks & EP_ROUTER_ON_INPUT) != 0);
}

/* ---- keys left over ---- */

/* Every key that contains one of these words is about experts or router. */
static const char *const parts[] = {"expert", "moe", "rout", "swiglu", "scoring", "score_func"};

/* Keys that this folder reads, and keys that do not change the result of experts or router: about
 * losses, training, precision, parallel layout, and attention. */
static const char *const known[] = {
    RENORM_KEYS, SCALING_KEYS, GROUP_KEYS, SCORING_KEYS, BIAS_KEYS, "moe_router_use_sigmoid",
    "moe_normalize_expert_weights", "moe_norm_min", "zero_expert_num", "zero_expert_type",
    "shared_expert_combination_strategy", "moe_router_logit_softcapping", "router_jitter_noise",
    "moe_apply_router_weight_on_input",
    /* layers and shapes */
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
    "moe_top_k", "top_k_experts", "moe_intermediate_size", "expert_ffn_hidden_size",
    "expert_hidden_dim", "n_shared_experts", "num_shared_experts", "num_shared_expert",
    "moe_num_shared_experts", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "share_expert_dim",
    "share_expert_dims", "moe_layer_num_skipped", "moe_layer_interval", "moe_layer_start_index",
    "moe_layer_end_index", "moe_layer_freq", "moe_layers", "moe_layers_enum",
    "interleave_moe_layer_step", "moe_every_n_layer", "expert_layer_period", "expert_layer_offset",
    "moe_latent_size", "is_moe", "use_moe", "use_mixed_mlp_moe", "enable_moe_block", "swiglu_alpha",
    "swiglu_beta", "swiglu_limit", "swiglu_limits", "swiglu_limits_shared",
    /* keys that do not matter here */
    "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "router_dtype",
    "router_bias", "router_hidden_size", "router_ignore_padding_tokens",
    "router_load_balancing_type", "moe_router_load_balancing_type", "moe_router_dtype",
    "moe_aux_loss_coef", "moe_z_loss_coeff", "moe_loss_weight", "moe_jitter_eps", "moe_capacity",
    "moe_capacity_factor", "expert_capacity", "moe_use_aux_free", "moe_drop_tokens",
    "moe_token_dropout", "moe_eval_capacity_token_fraction", "moe_random_routing_dropped_token",
    "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_shared_expert_overlap",
    "enable_moe_fp32_combine", "add_router_probs", "second_expert_policy",
    "normalize_router_prob_before_dropping", "batch_prioritized_routing", "num_sparse_experts",
    "rms_norm_eps_moe_gate", "shared_expert_sink", "mtp_moe", "moe_gate", "moe_dropout_prob",
    "moe_multimodal_dispatch_use_allgather"};

static bool is_about_experts(const char *key)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(parts); i++) {
        if (strstr(key, parts[i]) != NULL) {
            return true;
        }
    }
    return false;
}

static bool is_known(const char *key)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(known); i++) {
        if (strcmp(key, known[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* null, false, 0, "" and [] switch off something that is off anyway. */
static bool says_nothing(const json_t *value)
{
    return json_is_null(value) || json_is_false(value) ||
           (json_is_number(value) && json_number_value(value) == 0.0) ||
           (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

static void refuse_unused(ep_config_reader *reader)
{
    char name[EP_JSON_TEXT_BYTES];
    char text[EP_JSON_TEXT_BYTES];
    const char *key;
    json_t *value;
    json_object_foreach(reader->object, key, value)
    {
        if (is_about_experts(key) && !is_known(key) && !json_is_object(value) &&
            !says_nothing(value)) {
            ep_config_fail(reader, EP_ERR_UNIMPLEMENTED,
                           "%s is %s, a key about experts or router that this build does not use",
                           ep_json_printable(key, name, sizeof(name)),
                           ep_json_describe(value, text));
        }
    }
}

void ep_config_refuse_unused(ep_config_reader *reader, json_t *root)
{
    ep_config_reader whole = *reader;
    refuse_unused(reader);
    if (reader->object != root && reader->err == EP_OK) {
        whole.object = root;
        whole.prefix = "";
        refuse_unused(&whole);
        reader->err = whole.err;
    }
}
