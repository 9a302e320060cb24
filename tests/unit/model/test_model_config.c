/* SPDX-License-Identifier: Apache-2.0 */
/* config.json: the model types we know, which layers are MoE layers, and a message for every wrong
 * value. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "model/model_config.h"
#include "support/expect.h"

static ep_error error; /* of the last call */

static ep_err parse(const char *text, ep_model_config *config, ep_error *out_error)
{
    return ep_model_config_parse("config.json", text, strlen(text), config, out_error);
}

/* A minimal Mixtral, with room for more keys in front: jansson refuses duplicates, so a case
 * replaces the key it is about. */
#define MIXTRAL(more)                                                                              \
    "{" more "\"model_type\":\"mixtral\",\"hidden_size\":64,\"intermediate_size\":32,"             \
    "\"num_hidden_layers\":4,\"num_local_experts\":8,\"num_experts_per_tok\":2}"
#define DEEPSEEK(more)                                                                             \
    "{" more "\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"intermediate_size\":128,"        \
    "\"moe_intermediate_size\":32,\"num_hidden_layers\":4,\"n_routed_experts\":8,"                 \
    "\"num_experts_per_tok\":2}"

/* Its function is not silu where no key says so. */
#define GEMMA(more)                                                                                \
    "{" more "\"model_type\":\"gemma4_text\",\"hidden_size\":64,\"moe_intermediate_size\":32,"     \
    "\"num_hidden_layers\":4,\"num_experts\":8,\"top_k_experts\":2}"

typedef struct good_case {
    const char *text;
    ep_gate_score select; /* 0: the router is not computed */
    bool renormalise;
    float scaling;
    uint32_t groups;
    uint32_t groups_kept;
    uint32_t experts;
    uint32_t top_k;
    uint32_t inner;
    uint32_t shared_inner;
    const char *layers; /* 'm' MoE, 'd' dense */
    bool known;
    bool shared_gate;
} good_case;

static const good_case good_cases[] = {
    {MIXTRAL(""), EP_GATE_LOGIT, false, 1, 1, 1, 8, 2, 32, 0, "mmmm", true, false},
    {MIXTRAL("\"num_experts\":8,\"experts_per_token\":2.0,\"moe_topk\":null,"), EP_GATE_LOGIT,
     false, 1, 1, 1, 8, 2, 32, 0, "mmmm", true, false},
    {MIXTRAL("\"hidden_act\":\"silu\",\"sliding_window\":null,\"rope_theta\":1e6,"
             "\"norm_topk_prob\":false,"),
     EP_GATE_LOGIT, false, 1, 1, 1, 8, 2, 32, 0, "mmmm", true, false},
    {"{\"model_type\":\"qwen2_moe\",\"hidden_size\":64,\"intermediate_size\":128,"
     "\"moe_intermediate_size\":32,\"shared_expert_intermediate_size\":96,\"num_hidden_layers\":4,"
     "\"num_experts\":60,\"num_experts_per_tok\":4,\"decoder_sparse_step\":2,"
     "\"mlp_only_layers\":[3],\"norm_topk_prob\":false}",
     EP_GATE_SOFTMAX, false, 1, 1, 1, 60, 4, 32, 96, "dmdd", true, true},
    {"{\"model_type\":\"qwen3_moe\",\"hidden_size\":64,\"intermediate_size\":128,"
     "\"moe_intermediate_size\":32,\"num_hidden_layers\":2,\"num_experts\":128,"
     "\"num_experts_per_tok\":8,\"norm_topk_prob\":true,\"mlp_only_layers\":[]}",
     EP_GATE_SOFTMAX, true, 1, 1, 1, 128, 8, 32, 0, "mm", true, false},
    {"{\"model_type\":\"olmoe\",\"hidden_size\":64,\"intermediate_size\":32,"
     "\"num_hidden_layers\":2,\"num_experts\":64,\"num_experts_per_tok\":8}",
     EP_GATE_SOFTMAX, false, 1, 1, 1, 64, 8, 32, 0, "mm", true, false},
    {"{\"model_type\":\"deepseek_v2\",\"hidden_size\":64,\"intermediate_size\":128,\"moe_"
     "intermediate_size\":32,\"num_hidden_layers\":3,\"n_routed_experts\":64,\"n_shared_experts\":"
     "2,\"num_experts_per_tok\":6,\"n_group\":8,\"topk_group\":3,\"topk_method\":\"group_limited_"
     "greedy\",\"scoring_func\":\"softmax\",\"norm_topk_prob\":false,\"routed_scaling_factor\":16."
     "0,\"first_k_dense_replace\":1,\"moe_layer_freq\":1}",
     EP_GATE_SOFTMAX, false, 16, 8, 3, 64, 6, 32, 64, "dmm", true, false},
    {"{\"model_type\":\"deepseek_v2\",\"hidden_size\":64,\"intermediate_size\":128,"
     "\"moe_intermediate_size\":32,\"num_hidden_layers\":2,\"n_routed_experts\":64,"
     "\"num_experts_per_tok\":6,\"n_group\":8,\"topk_group\":1,\"topk_method\":\"greedy\"}",
     EP_GATE_SOFTMAX, false, 1, 1, 1, 64, 6, 32, 0, "mm", true, false},
    {DEEPSEEK("\"n_group\":4,\"topk_group\":2,\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_"
              "tc\",\"n_shared_experts\":1,\"routed_scaling_factor\":2.5,\"norm_topk_prob\":true,"
              "\"first_k_dense_replace\":3,\"num_nextn_predict_layers\":1,"),
     EP_GATE_SIGMOID, true, 2.5f, 4, 2, 8, 2, 32, 32, "dddm", true, false},
    {"{\"model_type\":\"glm4_moe\",\"hidden_size\":64,\"intermediate_size\":128,\"moe_intermediate_"
     "size\":32,\"num_hidden_layers\":2,\"n_routed_experts\":16,\"n_shared_experts\":1,\"num_"
     "experts_per_tok\":8,\"first_k_dense_replace\":1,\"routed_scaling_factor\":1}",
     EP_GATE_SIGMOID, true, 1, 1, 1, 16, 8, 32, 32, "dm", true, false},
    {"{\"model_type\":\"minimax_m2\",\"hidden_size\":64,\"intermediate_size\":32,"
     "\"num_hidden_layers\":1,\"num_local_experts\":16,\"num_experts_per_tok\":8,"
     "\"scoring_func\":\"sigmoid\",\"shared_intermediate_size\":0}",
     EP_GATE_SIGMOID, true, 1, 1, 1, 16, 8, 32, 0, "m", true, false},
    {"{\"model_type\":\"granitemoehybrid\",\"hidden_size\":64,\"intermediate_size\":32,"
     "\"num_hidden_layers\":1,\"num_local_experts\":16,\"num_experts_per_tok\":8,"
     "\"shared_intermediate_size\":48}",
     EP_GATE_LOGIT, false, 1, 1, 1, 16, 8, 32, 48, "m", true, false},
    {"{\"model_type\":\"dots1\",\"hidden_size\":64,\"intermediate_size\":128,"
     "\"moe_intermediate_size\":32,\"num_hidden_layers\":2,\"n_routed_experts\":16,"
     "\"n_shared_experts\":2,\"num_experts_per_tok\":6,\"first_k_dense_replace\":1,"
     "\"scoring_func\":\"noaux_tc\",\"routed_scaling_factor\":2.5}",
     EP_GATE_SIGMOID, false, 2.5f, 1, 1, 16, 6, 32, 64, "dm", true, false},
    {"{\"model_type\":\"phimoe\",\"hidden_size\":64,\"intermediate_size\":32,"
     "\"num_hidden_layers\":1,\"num_local_experts\":16,\"num_experts_per_tok\":2}",
     EP_GATE_SPARSEMIXER, false, 1, 1, 1, 16, 2, 32, 0, "m", true, false},
    {"{\"model_type\":\"ernie4_5_moe\",\"hidden_size\":64,\"intermediate_size\":128,"
     "\"moe_intermediate_size\":32,\"num_hidden_layers\":4,\"moe_num_experts\":64,\"moe_k\":6,"
     "\"moe_num_shared_experts\":2,\"moe_layer_start_index\":1,\"moe_layer_end_index\":-1,"
     "\"moe_layer_interval\":1}",
     EP_GATE_SOFTMAX, true, 1, 1, 1, 64, 6, 32, 64, "dmmm", true, false},
    {"{\"model_type\":\"hunyuan_v1_moe\",\"hidden_size\":64,\"intermediate_size\":32,"
     "\"moe_intermediate_size\":[32,32],\"num_hidden_layers\":2,\"num_experts\":64,\"moe_topk\":[8,"
     "8],\"num_shared_expert\":[1,1]}",
     EP_GATE_SOFTMAX, true, 1, 1, 1, 64, 8, 32, 32, "mm", true, false},
    {"{\"model_type\":\"mimo_v2_flash\",\"hidden_size\":64,\"intermediate_size\":128,"
     "\"moe_intermediate_size\":32,\"num_hidden_layers\":3,\"n_routed_experts\":16,"
     "\"num_experts_per_tok\":8,\"moe_layer_freq\":[0,1,1],\"routed_scaling_factor\":null,"
     "\"n_group\":1,\"topk_group\":1}",
     EP_GATE_SIGMOID, true, 1, 1, 1, 16, 8, 32, 0, "dmm", true, false},
    {"{\"model_type\":\"kimi_vl\",\"text_config\":" DEEPSEEK("") "}", EP_GATE_SIGMOID, true, 1, 1,
     1, 8, 2, 32, 0, "mmmm", true, false},
    {"{\"model_type\":\"new_moe\",\"hidden_act\":\"silu\",\"hidden_size\":64,\"intermediate_size\":"
     "32,\"num_hidden_layers\":1,\"num_experts\":4,\"num_experts_per_tok\":1}",
     (ep_gate_score)0, false, 1, 1, 1, 4, 1, 32, 0, "m", false, false},
    {"{\"hidden_act\":\"silu\",\"hidden_size\":64,\"moe_intermediate_size\":32,\"num_hidden_"
     "layers\":1,\"n_routed_experts\":4,\"num_experts_per_tok\":1,\"scoring_func\":\"sigmoid\"}",
     (ep_gate_score)0, false, 1, 1, 1, 4, 1, 32, 0, "m", false, false},
    {"{\"model_type\":\"new_moe\",\"hidden_act\":\"silu\",\"hidden_size\":64,"
     "\"moe_intermediate_size\":32,\"num_hidden_layers\":1,\"num_experts\":4,"
     "\"num_experts_per_tok\":1,\"scoring_func\":\"sqrtsoftplus\"}",
     (ep_gate_score)0, false, 1, 1, 1, 4, 1, 32, 0, "m", false, false},
};

Test(model_config, reads_the_model_types)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(good_cases); i++) {
        const good_case *c = &good_cases[i];
        ep_model_config config = {0};
        cr_assert_eq(parse(c->text, &config, &error), EP_OK, "%s: %s", c->text, error.text);
        const ep_model_info *info = &config.info;
        cr_expect_eq(info->router.why_not[0] == '\0', c->select != 0, "%s: %s", c->text,
                     info->router.why_not);
        cr_expect(c->select == 0 || info->router.select == c->select, "%s: %d", c->text,
                  (int)info->router.select);
        cr_expect_eq(info->router.renormalise, c->renormalise, "%s", c->text);
        cr_expect_eq(info->router.scaling_factor, c->scaling, "%s", c->text);
        cr_expect_eq(info->router.groups, c->groups, "%s", c->text);
        cr_expect_eq(info->router.groups_kept, c->groups_kept, "%s", c->text);
        cr_expect_eq(info->model_type_known, c->known, "%s", c->text);
        cr_expect_eq(config.shared_gate_required, c->shared_gate, "%s", c->text);
        cr_expect_eq(info->hidden, 64);
        cr_expect_eq(info->layers_count, strlen(c->layers), "%s", c->text);
        uint32_t moe = 0;
        for (uint32_t layer = 0; c->layers[layer] != '\0'; layer++) {
            if (c->layers[layer] != 'm') {
                continue;
            }
            cr_assert_lt(moe, info->moe_layers_count, "%s", c->text);
            const ep_layer_shape *shape = &info->moe_layers[moe];
            cr_expect_eq(shape->layer, layer, "%s", c->text);
            cr_expect_eq(shape->hidden, 64);
            cr_expect_eq(shape->experts, c->experts);
            cr_expect_eq(shape->top_k, c->top_k);
            cr_expect_eq(shape->inner, c->inner);
            cr_expect_eq(shape->shared_experts, c->shared_inner > 0 ? 1 : 0);
            cr_expect_eq(info->shared_inner[moe], c->shared_inner, "%s: %u", c->text,
                         info->shared_inner[moe]);
            moe++;
        }
        cr_expect_eq(info->moe_layers_count, moe, "%s", c->text);
        ep_model_config_fini(&config);
    }
}

Test(model_config, reads_the_dense_part)
{
    ep_model_config config = {0};
    ASSERT_OK(parse(MIXTRAL("\"vocab_size\":256,\"num_attention_heads\":8,\"num_key_value_heads\":"
                            "2,\"rms_norm_eps\":1e-05,\"rope_theta\":1000000.0,\"tie_word_"
                            "embeddings\":true,\"torch_dtype\":\"float16\","),
                    &config, &error),
              error);
    cr_expect_eq(config.info.vocab, 256);
    cr_expect_eq(config.info.heads, 8);
    cr_expect_eq(config.info.kv_heads, 2);
    cr_expect_eq(config.info.head_dim, 8, "hidden_size / num_attention_heads when not given");
    cr_expect_eq(config.info.rms_norm_eps, 1e-05f);
    cr_expect_eq(config.info.rope_theta, 1e6f);
    cr_expect(config.info.tie_embeddings);
    cr_expect_eq(config.info.dtype, EP_DTYPE_F16);
    cr_expect_str_eq(config.info.model_type, "mixtral");
    ep_model_config_fini(&config);

    ASSERT_OK(parse(MIXTRAL("\"dtype\":\"bfloat16\",\"rope_parameters\":{\"rope_theta\":5e5},"
                            "\"head_dim\":128,"),
                    &config, &error),
              error);
    cr_expect_eq(config.info.dtype, EP_DTYPE_BF16);
    cr_expect_eq(config.info.rope_theta, 5e5f);
    cr_expect_eq(config.info.head_dim, 128);
    ep_model_config_fini(&config);
}

typedef struct bad_case {
    const char *text;
    ep_err err;
    const char *message; /* the whole message, or its beginning */
} bad_case;

#define PLAIN(hidden, layers, experts, top_k, inner)                                               \
    "{\"hidden_size\":" hidden ",\"num_hidden_layers\":" layers ",\"num_local_experts\":" experts  \
    ",\"num_experts_per_tok\":" top_k ",\"intermediate_size\":" inner "}"

static const bad_case bad_cases[] = {
    {"", EP_ERR_BAD_FILE, "config.json: line 1 column 0: '[' or '{' expected near end of file"},
    {"[]", EP_ERR_BAD_FILE, "config.json: is a JSON array, allowed: an object"},
    {"{\"a\":1,\"a\":2}", EP_ERR_BAD_FILE,
     "config.json: line 1 column 10: duplicate object key near '\"a\"'"},
    {"{\n\"hidden_size\": 64,,\n}", EP_ERR_BAD_FILE,
     "config.json: line 2 column 19: string or '}' expected near ','"},
    {"{}", EP_ERR_BAD_FILE, "config.json: hidden_size (or d_model) is missing, allowed 1..65536"},
    {PLAIN("64", "2", "0", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts is 0, allowed 1..65535"},
    {PLAIN("64", "2", "65536", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts is 65536, allowed 1..65535"},
    {PLAIN("64", "2", "-8", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts is -8, allowed 1..65535"},
    {PLAIN("64", "2", "\"8\"", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts is \"8\", allowed an integer 1..65535"},
    {PLAIN("64", "2", "8.0", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts is 8.0, allowed an integer 1..65535"},
    {PLAIN("64", "2", "[8,0]", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts[1] is 0, allowed 1..65535"},
    {PLAIN("64", "2", "[8]", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts has 1 values, allowed 2: one for each layer"},
    {PLAIN("64", "2", "null", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts (or num_experts, n_routed_experts, moe_num_experts) is "
     "missing, allowed 1..65535"},
    {PLAIN("0", "2", "8", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: hidden_size is 0, allowed 1..65536"},
    {PLAIN("65537", "2", "8", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: hidden_size is 65537, allowed 1..65536"},
    {PLAIN("true", "2", "8", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: hidden_size is true, allowed an integer 1..65536"},
    {PLAIN("64", "0", "8", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_hidden_layers is 0, allowed 1..1024"},
    {PLAIN("64", "1025", "8", "1", "32"), EP_ERR_BAD_FILE,
     "config.json: num_hidden_layers is 1025, allowed 1..1024"},
    {PLAIN("64", "2", "8", "0", "32"), EP_ERR_BAD_FILE,
     "config.json: num_experts_per_tok is 0, allowed 1..64"},
    {PLAIN("64", "2", "80", "65", "32"), EP_ERR_BAD_FILE,
     "config.json: num_experts_per_tok is 65, allowed 1..64"},
    {PLAIN("64", "2", "8", "9", "32"), EP_ERR_BAD_FILE,
     "config.json: num_experts_per_tok is 9, allowed 1..8 (the experts of layer 0)"},
    {PLAIN("64", "2", "8", "1", "0"), EP_ERR_BAD_FILE,
     "config.json: intermediate_size is 0, allowed 1..1048576"},
    {PLAIN("64", "2", "8", "1", "1048577"), EP_ERR_BAD_FILE,
     "config.json: intermediate_size is 1048577, allowed 1..1048576"},
    {PLAIN("64", "2", "8", "1", "{}"), EP_ERR_BAD_FILE,
     "config.json: intermediate_size is an object, allowed an integer 1..1048576"},
    {"{\"text_config\":" PLAIN("64", "2", "0", "1", "32") "}", EP_ERR_BAD_FILE,
     "config.json: text_config.num_local_experts is 0, allowed 1..65535"},
    {"{\"model_type\":\"qwen3_moe\",\"hidden_size\":64,\"num_hidden_layers\":1,\"num_experts\":8,"
     "\"num_experts_per_tok\":2,\"intermediate_size\":8}",
     EP_ERR_BAD_FILE,
     "config.json: moe_intermediate_size (or expert_ffn_hidden_size, expert_hidden_dim, "
     "ffn_hidden_size, encoder_ffn_dim, d_ff) is missing, allowed 1..1048576"},
    {MIXTRAL("\"norm_topk_prob\":1,"), EP_ERR_BAD_FILE,
     "config.json: norm_topk_prob is 1, allowed true or false"},
    {MIXTRAL("\"routed_scaling_factor\":0,"), EP_ERR_BAD_FILE,
     "config.json: routed_scaling_factor is 0, allowed a number above 0 and up to 1e+06"},
    {MIXTRAL("\"routed_scaling_factor\":-2.5,"), EP_ERR_BAD_FILE,
     "config.json: routed_scaling_factor is -2.5, allowed"},
    {MIXTRAL("\"routed_scaling_factor\":\"2.5\","), EP_ERR_BAD_FILE,
     "config.json: routed_scaling_factor is \"2.5\", allowed"},
    {MIXTRAL("\"rms_norm_eps\":0.0,"), EP_ERR_BAD_FILE,
     "config.json: rms_norm_eps is 0.0, allowed a number above 0 and up to 1"},
    {MIXTRAL("\"rope_theta\":-1,"), EP_ERR_BAD_FILE,
     "config.json: rope_theta is -1, allowed a number above 0 and up to 1e+12"},
    {MIXTRAL("\"rope_parameters\":{\"rope_theta\":0},"), EP_ERR_BAD_FILE,
     "config.json: rope_parameters.rope_theta is 0, allowed"},
    {MIXTRAL("\"vocab_size\":0,"), EP_ERR_BAD_FILE,
     "config.json: vocab_size is 0, allowed 1..16777216"},
    {MIXTRAL("\"num_attention_heads\":5000,"), EP_ERR_BAD_FILE,
     "config.json: num_attention_heads is 5000, allowed 1..4096"},
    {MIXTRAL("\"tie_word_embeddings\":\"yes\","), EP_ERR_BAD_FILE,
     "config.json: tie_word_embeddings is \"yes\", allowed true or false"},
    {MIXTRAL("\"torch_dtype\":\"float8\","), EP_ERR_BAD_FILE,
     "config.json: torch_dtype is \"float8\", allowed bfloat16, float16, float32"},
    {MIXTRAL("\"hidden_act\":\"mish\","), EP_ERR_UNIMPLEMENTED,
     "config.json: hidden_act is \"mish\", allowed silu, swish, situ, gelu"},
    {"{\"model_type\":\"new_moe\",\"hidden_size\":64,\"moe_intermediate_size\":32,"
     "\"num_hidden_layers\":1,\"num_experts\":4,\"num_experts_per_tok\":1}",
     EP_ERR_UNIMPLEMENTED,
     "config.json: hidden_act is missing, and this build does not know the function of its model "
     "type"},
    {MIXTRAL("\"num_experts\":4,"), EP_ERR_BAD_FILE,
     "config.json: num_local_experts is 8 and num_experts is 4, allowed the same"},
    {MIXTRAL("\"experts_per_token\":1,"), EP_ERR_BAD_FILE,
     "config.json: num_experts_per_tok is 2 and experts_per_token is 1, allowed the same"},
    {DEEPSEEK("\"norm_topk_prob\":true,\"route_norm\":false,"), EP_ERR_BAD_FILE,
     "config.json: norm_topk_prob is true and route_norm is false, allowed the same"},
    {DEEPSEEK("\"routed_scaling_factor\":2.5,\"route_scale\":1,"), EP_ERR_BAD_FILE,
     "config.json: routed_scaling_factor is 2.5 and route_scale is 1, allowed the same"},
    {MIXTRAL("\"hidden_act\":\"gelu\",\"swiglu_limit\":7.0,"), EP_ERR_UNIMPLEMENTED,
     "config.json: swiglu_limit is a number of another formula than gelu"},
    {MIXTRAL("\"hidden_act\":\"gelu\",\"activation_situ_beta\":7.0,"), EP_ERR_UNIMPLEMENTED,
     "config.json: activation_situ_beta is a number of another formula than gelu"},
    {MIXTRAL("\"activation_situ_beta\":4.0,\"swiglu_alpha\":1.7,"), EP_ERR_UNIMPLEMENTED,
     "config.json: swiglu_alpha is a number of another formula than situ"},
    {MIXTRAL("\"swiglu_alpha\":1.7,\"swiglu_limits\":[0,1,2,3],"), EP_ERR_UNIMPLEMENTED,
     "config.json: swiglu_limits is a number of another formula than swiglu_oai"},
    {MIXTRAL("\"hidden_act\":3,"), EP_ERR_UNIMPLEMENTED,
     "config.json: hidden_act is 3, allowed silu"},
    {MIXTRAL("\"swiglu_limit\":-1.0,"), EP_ERR_BAD_FILE,
     "config.json: swiglu_limit is -1.0, allowed"},
    {MIXTRAL("\"swiglu_limits\":[1,2],"), EP_ERR_BAD_FILE, "config.json: swiglu_limits is"},
    {MIXTRAL("\"swiglu_limits\":[1,2,-3,4],"), EP_ERR_BAD_FILE,
     "config.json: swiglu_limits[2] is -3, allowed 0..1e30"},
    {MIXTRAL("\"activation_situ_beta\":0,"), EP_ERR_BAD_FILE,
     "config.json: activation_situ_beta is 0, allowed"},
    {MIXTRAL("\"quantization_config\":{\"quant_method\":\"hqq\"},"), EP_ERR_UNIMPLEMENTED,
     "config.json: quantization_config: quant_method is hqq, allowed: none, fp8, mxfp4"},
    {MIXTRAL("\"quantization_config\":{},"), EP_ERR_UNIMPLEMENTED,
     "config.json: quantization_config: quant_method is not given"},
    {MIXTRAL("\"first_k_dense_replace\":5,"), EP_ERR_BAD_FILE,
     "config.json: first_k_dense_replace is 5, allowed 0..4"},
    {MIXTRAL("\"first_k_dense_replace\":4,"), EP_ERR_BAD_FILE,
     "config.json: num_hidden_layers is 4 and none is an MoE layer"},
    {MIXTRAL("\"moe_layer_freq\":0,"), EP_ERR_BAD_FILE,
     "config.json: moe_layer_freq is 0, allowed 1..1024"},
    {MIXTRAL("\"moe_layer_freq\":[1,1],"), EP_ERR_BAD_FILE,
     "config.json: moe_layer_freq has 2 values, allowed 4: one for each layer"},
    {MIXTRAL("\"moe_layer_freq\":[1,2,1,1],"), EP_ERR_BAD_FILE,
     "config.json: moe_layer_freq[1] is 2, allowed 0..1"},
    {MIXTRAL("\"decoder_sparse_step\":0,"), EP_ERR_BAD_FILE,
     "config.json: decoder_sparse_step is 0, allowed 1..1024"},
    {MIXTRAL("\"mlp_only_layers\":[0,4],"), EP_ERR_BAD_FILE,
     "config.json: mlp_only_layers[1] is 4, allowed 0..3"},
    {MIXTRAL("\"mlp_only_layers\":2,"), EP_ERR_BAD_FILE,
     "config.json: mlp_only_layers is 2, allowed an array of layer numbers"},
    {MIXTRAL("\"n_shared_experts\":65,"), EP_ERR_BAD_FILE,
     "config.json: n_shared_experts is 65, allowed 0..64"},
    {MIXTRAL("\"shared_expert_intermediate_size\":-1,"), EP_ERR_BAD_FILE,
     "config.json: shared_expert_intermediate_size is -1, allowed 0..1048576"},
    {DEEPSEEK("\"n_group\":0,"), EP_ERR_BAD_FILE, "config.json: n_group is 0, allowed 1..65535"},
    {DEEPSEEK("\"n_group\":3,"), EP_ERR_BAD_FILE,
     "config.json: n_group is 3, allowed a divisor of the 8 experts of layer 0"},
    {DEEPSEEK("\"n_group\":4,\"topk_group\":5,"), EP_ERR_BAD_FILE,
     "config.json: topk_group is 5, allowed 1..4"},
    {DEEPSEEK("\"n_group\":8,\"topk_group\":1,"), EP_ERR_BAD_FILE,
     "config.json: topk_group is 1: 1 groups of 1 hold 1 experts, allowed at least the 2 chosen "
     "per token"},
    {DEEPSEEK("\"topk_method\":7,"), EP_ERR_BAD_FILE,
     "config.json: topk_method is 7, allowed a string"},
    /* both stacks together have at most 1024 layers */
    {"{\"model_type\":\"switch_transformers\",\"d_model\":64,\"num_layers\":1024,"
     "\"num_decoder_layers\":512,\"num_experts\":4,\"d_ff\":32}",
     EP_ERR_BAD_FILE, "config.json: num_decoder_layers is 512, allowed 0..0"},
    {"{\"model_type\":[],\"hidden_size\":1}", EP_ERR_BAD_FILE,
     "config.json: model_type is an array of 0, allowed a string"},
};

Test(model_config, every_wrong_value_is_named_with_its_range)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(bad_cases); i++) {
        ep_model_config config = {0};
        ep_err err = parse(bad_cases[i].text, &config, &error);
        cr_expect_eq(err, bad_cases[i].err, "%s: code %d", bad_cases[i].text, (int)err);
        cr_expect(err == EP_OK ||
                      strncmp(error.text, bad_cases[i].message, strlen(bad_cases[i].message)) == 0,
                  "%s\n expected %s\n got      %s", bad_cases[i].text, bad_cases[i].message,
                  error.text);
        cr_expect_null(config.info.moe_layers, "output written on failure");
        ep_model_config_fini(&config);
    }
}

Test(model_config, deep_nesting_is_refused)
{
    char text[256] = "{\"a\":";
    ep_model_config config = {0};
    memset(text + 5, '[', 100);
    ASSERT_FAILS(parse(text, &config, &error), EP_ERR_BAD_FILE, error,
                 "nesting depth 33, allowed 1..32");
}

Test(model_config, a_flipped_bit_never_crashes)
{
    char text[2048];
    snprintf(text, sizeof(text), "%s", good_cases[5].text);
    size_t count = strlen(text);
    for (size_t i = 0; i < count * 8; i++) {
        ep_model_config config = {0};
        text[i / 8] ^= (char)(1 << (i % 8));
        if (ep_model_config_parse("config.json", text, count, &config, NULL) == EP_OK) {
            ep_model_config_fini(&config);
        }
        text[i / 8] ^= (char)(1 << (i % 8));
    }
}

Test(model_config, the_activation_and_its_numbers_by_layer)
{
    static const struct {
        const char *text;
        ep_activation activation;
        ep_activation_numbers routed; /* of the last layer */
        float shared_limit;
    } cases[] = {
        {MIXTRAL(""), EP_ACT_SILU, {0, 0, 0}, 0},
        {MIXTRAL("\"hidden_act\":\"gelu\","), EP_ACT_GELU, {0, 0, 0}, 0},
        {MIXTRAL("\"hidden_activation\":\"gelu_pytorch_tanh\","), EP_ACT_GELU_TANH, {0, 0, 0}, 0},
        {MIXTRAL("\"hidden_act\":\"relu2\","), EP_ACT_RELU2_NO_GATE, {0, 0, 0}, 0},
        {GEMMA(""), EP_ACT_GELU_TANH, {0, 0, 0}, 0},
        {GEMMA("\"hidden_activation\":\"silu\","), EP_ACT_SILU, {0, 0, 0}, 0},
        {MIXTRAL("\"hidden_act\":\"gelu\",\"swiglu_limit\":0,\"swiglu_alpha\":null,"),
         EP_ACT_GELU,
         {0, 0, 0},
         0},
        {MIXTRAL("\"swiglu_limit\":10.0,"), EP_ACT_SWIGLU_LIMIT, {0, 0, 10}, 10},
        {MIXTRAL("\"swiglu_limit\":0,"), EP_ACT_SILU, {0, 0, 0}, 0},
        {MIXTRAL("\"swiglu_limit\":7.0,\"swiglu_alpha\":1.5,"), EP_ACT_SWIGLU_OAI, {1.5f, 1, 7}, 7},
        {MIXTRAL("\"swiglu_limits\":[0,1,2,3],\"swiglu_limits_shared\":[0,0,0,5],"),
         EP_ACT_SWIGLU_STEP,
         {0, 0, 3},
         5},
        {MIXTRAL("\"activation_situ_beta\":4.0,"), EP_ACT_SITU, {4, 25, 0}, 0},
        {MIXTRAL("\"quantization_config\":{\"quant_method\":\"fp8\"},"), EP_ACT_SILU, {0, 0, 0}, 0},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        ep_model_config config = {0};
        ep_err err = ep_model_config_parse("config.json", cases[i].text, strlen(cases[i].text),
                                           &config, &error);
        cr_assert_eq(err, EP_OK, "case %zu: %s", i, error.text);
        const uint32_t last = config.info.moe_layers_count - 1;
        const ep_layer_numbers *numbers = &config.info.numbers[last];
        cr_expect_eq(config.info.moe_layers[last].activation, cases[i].activation, "case %zu", i);
        cr_expect_eq(numbers->routed.alpha, cases[i].routed.alpha, "case %zu", i);
        cr_expect_eq(numbers->routed.beta, cases[i].routed.beta, "case %zu", i);
        cr_expect_eq(numbers->routed.limit, cases[i].routed.limit, "case %zu", i);
        cr_expect_eq(numbers->shared.limit, cases[i].shared_limit, "case %zu", i);
        ep_model_config_fini(&config);
    }
}
