/* SPDX-License-Identifier: Apache-2.0 */
/* The rows, from the published code of each model: transformers where it has the type, otherwise
 * the model's own repository. */
#include "model/model_types.h"

#include <string.h>

#include "base/check.h"

#define LOGIT EP_GATE_LOGIT
#define SOFTMAX EP_GATE_SOFTMAX
#define SIGMOID EP_GATE_SIGMOID
#define SELECTED EP_GATE_SOFTMAX_SELECTED
/* clang-format off */
#define NOT_COMPUTED(why) {.why_not = (why)}

/* Routers that many types share. */
#define MIXTRAL {.select = LOGIT, .weight = SELECTED}
#define QWEN(how) {.select = SOFTMAX, .weight = SOFTMAX, .renorm = (how)}
#define DEEPSEEK_V2                                                                                \
    {.select = SOFTMAX, .weight = SOFTMAX, .group_best = 1, .renorm = EP_RENORM_KEY_OFF,           \
     .epsilon = 1e-20f, .marks = EP_ROUTER_MASK_ZERO | EP_ROUTER_SCALED_OR_NORMED}
#define DEEPSEEK_V3(how, more)                                                                     \
    {.select = SIGMOID, .weight = SIGMOID, .group_best = 2, .renorm = (how), .epsilon = 1e-20f,    \
     .bias = EP_BIAS_SELECT, .marks = EP_ROUTER_SCALED | (more)}
#define MISTRAL(how)                                                                               \
    {.select = SOFTMAX, .weight = SOFTMAX, .group_best = 2, .renorm = (how), .epsilon = 1e-20f,    \
     .marks = EP_ROUTER_MASK_ZERO | EP_ROUTER_SCALED}
#define MINIMAX_M2(more)                                                                           \
    {.select = SIGMOID, .weight = SIGMOID, .renorm = EP_RENORM_ALWAYS, .bias = EP_BIAS_SELECT,     \
     .marks = (more)}
#define HUNYUAN_3                                                                                  \
    {.select = SIGMOID, .weight = SIGMOID, .renorm = EP_RENORM_ALWAYS, .epsilon = 1e-20f,          \
     .bias = EP_BIAS_SELECT, .marks = EP_ROUTER_SCALED}
#define DEEPSEEK_V4(score, more)                                                                   \
    {.select = (score), .weight = (score), .renorm = EP_RENORM_ALWAYS, .epsilon = 1e-20f,          \
     .bias = EP_BIAS_SELECT, .marks = EP_ROUTER_SCALED | EP_ROUTER_SCORING_KEY | (more)}
#define ERNIE                                                                                      \
    {.select = SOFTMAX, .weight = SOFTMAX, .renorm = EP_RENORM_ALWAYS, .bias = EP_BIAS_SELECT}
#define GEMMA {.select = LOGIT, .weight = SELECTED, .marks = EP_ROUTER_FACTORS}
/* clang-format on */

#define ON EP_RENORM_KEY_ON
#define OFF EP_RENORM_KEY_OFF
#define DENSE EP_TYPE_INNER_IS_DENSE

static const ep_model_type types[] = {
    {.name = "afmoe", .models = "Trinity", .router = HUNYUAN_3},
    {.name = "aria", .models = "Aria", .router = MIXTRAL, .marks = DENSE},
    {.name = "axk1", .models = "A.X K1", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "axk2", .models = "A.X K2", .router = DEEPSEEK_V3(ON, EP_ROUTER_MASK_ZERO)},
    {.name = "bailing_hybrid", .models = "Ling 2.5", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "bailing_moe", .models = "Ling 1", .router = QWEN(ON)},
    {.name = "bailing_moe_v2", .models = "Ling 2, Ring", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "beam", .models = "Beam", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "cohere2_moe",
     .models = "Cohere 2 MoE",
     .router = {.select = LOGIT, .weight = SELECTED, .renorm = ON, .marks = EP_ROUTER_WEIGHT_KEY},
     .marks = DENSE | EP_TYPE_SHARED_AVERAGED},
    {.name = "dbrx", .models = "DBRX", .router = QWEN(EP_RENORM_ALWAYS)},
    {.name = "deepseek_ocr2", .models = "DeepSeek OCR 2", .router = DEEPSEEK_V2},
    {.name = "deepseek_v2", .models = "DeepSeek V2", .router = DEEPSEEK_V2},
    {.name = "deepseek_v3",
     .aliases = "kimi_k2",
     .models = "DeepSeek V3, R1; Kimi K2",
     .router = DEEPSEEK_V3(ON, 0)},
    {.name = "deepseek_v32", .models = "DeepSeek V3.2", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "deepseek_v4",
     .models = "DeepSeek V4",
     .router = DEEPSEEK_V4(EP_GATE_SQRT_SOFTPLUS, EP_ROUTER_HASH),
     .beside = {"ffn.gate.tid2eid", "ffn.gate.bias_vl"}},
    {.name = "diffusion_gemma",
     .models = "Diffusion Gemma",
     .router = GEMMA,
     .function = "gelu_pytorch_tanh"},
    {.name = "doge",
     .models = "Doge",
     .router = NOT_COMPUTED("its logits are sums of two short lists"),
     .marks = EP_TYPE_INNER_IS_1 | EP_TYPE_SHARED_CALLERS,
     .beside = {"mlp.router_gate", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}},
    {.name = "dots1", .models = "dots.llm1", .router = DEEPSEEK_V3(OFF, 0)},
    {.name = "dots3_note",
     .models = "dots3 note",
     .router = DEEPSEEK_V3(ON, 0),
     .marks = EP_TYPE_SHARED_TIMES},
    {.name = "ernie4_5_moe", .models = "ERNIE 4.5", .router = ERNIE},
    {.name = "ernie4_5_vl_moe",
     .aliases = "ernie4_5_moe_vl",
     .models = "ERNIE 4.5 VL",
     .refused = "each layer has experts of two widths, chosen by whether a token is text or image"},
    {.name = "exaone_moe", .models = "EXAONE MoE", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "flex_olmo", .models = "FlexOlmo", .router = QWEN(OFF), .marks = DENSE},
    {.name = "flint",
     .models = "Flint",
     .router = {.select = SIGMOID, .weight = SIGMOID, .renorm = ON}},
    {.name = "gemma4", .models = "Gemma 4 A4B", .router = GEMMA, .function = "gelu_pytorch_tanh"},
    {.name = "glm4_moe", .models = "GLM 4.5, 4.6, 4.7", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "glm4_moe_lite", .models = "GLM 4.7 Flash", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "glm4v_moe", .models = "GLM 4.5V", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "glm5_next", .models = "GLM 5 Next", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "glm_moe_dsa", .models = "GLM 5", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "gpt_oss",
     .models = "gpt-oss",
     .router = {.select = LOGIT, .weight = SELECTED, .bias = EP_BIAS_LOGIT},
     .marks = DENSE | EP_TYPE_ALTERNATES},
    {.name = "granitemoe",
     .aliases = "granitemoeshared granitemoehybrid granitemoe_swa",
     .models = "Granite MoE 3, 4",
     .router = MIXTRAL,
     .marks = DENSE},
    {.name = "hunyuan_v1_moe",
     .models = "Hunyuan A13B",
     .router = QWEN(EP_RENORM_ALWAYS),
     .marks = DENSE | EP_TYPE_SHARED_ALWAYS},
    {.name = "hy_v3", .models = "Hy3", .router = HUNYUAN_3},
    {.name = "hy_v4",
     .models = "Hy4",
     .router = DEEPSEEK_V3(ON, 0),
     .marks = EP_TYPE_SHARED_UNLIMITED},
    {.name = "inkling",
     .aliases = "inkling_mm_model",
     .models = "Inkling",
     .router = NOT_COMPUTED("it weighs routed and shared experts together"),
     .marks = DENSE | EP_TYPE_SHARED_CALLERS,
     .beside = {"mlp.gate.global_scale", "mlp.shared_experts.shared_w13_weight",
                "mlp.shared_experts.shared_w2_weight"}},
    {.name = "inkling2", .models = "Inkling 2", .router = DEEPSEEK_V4(SIGMOID, 0), .marks = DENSE},
    {.name = "jamba", .models = "Jamba", .router = QWEN(EP_RENORM_NEVER), .marks = DENSE},
    {.name = "jetmoe",
     .models = "JetMoE",
     .router = MIXTRAL,
     .marks = DENSE,
     .beside = {"mlp.bias"}},
    {.name = "kimi_k3",
     .models = "Kimi K3",
     .router = NOT_COMPUTED("its code is not published in full"),
     .beside = {"block_sparse_moe.routed_expert_down_proj",
                "block_sparse_moe.routed_expert_up_proj", "block_sparse_moe.routed_expert_norm"}},
    {.name = "kimi_linear", .models = "Kimi Linear", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "kolibri1",
     .models = "Kolibri 1",
     .router = {.select = LOGIT, .weight = SIGMOID, .renorm = OFF, .bias = EP_BIAS_SELECT}},
    {.name = "laguna", .models = "Laguna", .router = MINIMAX_M2(EP_ROUTER_SCALED)},
    {.name = "lfm2_moe",
     .models = "LFM2 A1B",
     .router = {.select = SIGMOID,
                .weight = SIGMOID,
                .renorm = ON,
                .epsilon = 1e-6f,
                .bias = EP_BIAS_SELECT,
                .marks = EP_ROUTER_SCALED}},
    {.name = "llama4",
     .models = "Llama 4",
     .router = {.select = LOGIT, .weight = SIGMOID, .marks = EP_ROUTER_ON_INPUT},
     .marks = DENSE | EP_TYPE_SHARED_ALWAYS},
    {.name = "longcat_flash",
     .models = "LongCat Flash",
     .router =
         {.select = SOFTMAX, .weight = SOFTMAX, .bias = EP_BIAS_SELECT, .marks = EP_ROUTER_SCALED}},
    {.name = "mellum", .models = "Mellum", .router = QWEN(ON)},
    {.name = "mimo_v2_flash",
     .aliases = "mimo_v2",
     .models = "MiMo V2",
     .router = DEEPSEEK_V3(ON, 0)},
    {.name = "minimax",
     .aliases = "minimax_text_01 minimax_m1",
     .models = "MiniMax 01, M1",
     .router = MIXTRAL,
     .marks = DENSE},
    {.name = "minimax_m2", .models = "MiniMax M2", .router = MINIMAX_M2(0), .marks = DENSE},
    {.name = "minimax_m3_vl",
     .aliases = "minimax_m3",
     .models = "MiniMax M3",
     .router = MINIMAX_M2(EP_ROUTER_SCALED),
     .marks = DENSE},
    {.name = "mistral4", .models = "Mistral 4", .router = MISTRAL(ON)},
    {.name = "mistral_large4", .models = "Mistral Large 4", .router = MISTRAL(EP_RENORM_ALWAYS)},
    {.name = "mixtral", .models = "Mixtral", .router = MIXTRAL, .marks = DENSE},
    {.name = "muse_spark",
     .models = "Muse Spark",
     .refused = "an expert's row is normed before it is weighed"},
    {.name = "nemotron_h",
     .models = "Nemotron 3",
     .router = DEEPSEEK_V3(ON, 0),
     .function = "relu2",
     .beside = {"mixer.fc1_latent_proj", "mixer.fc2_latent_proj"}},
    {.name = "nllb_moe",
     .aliases = "nllb-moe",
     .models = "NLLB MoE",
     .top_k = 2,
     .function = "relu",
     .marks = EP_TYPE_TWO_STACKS,
     .router = NOT_COMPUTED("an expert's capacity decides by the order of tokens")},
    {.name = "olmoe", .models = "OLMoE", .router = QWEN(OFF), .marks = DENSE},
    {.name = "openai_privacy_filter",
     .models = "OpenAI privacy filter",
     .router = {.select = LOGIT, .weight = SELECTED, .bias = EP_BIAS_LOGIT},
     .marks = DENSE},
    {.name = "phimoe",
     .models = "Phi 3.5 MoE",
     .router = {.select = EP_GATE_SPARSEMIXER, .weight = EP_GATE_SPARSEMIXER},
     .marks = DENSE},
    {.name = "qwen2_moe",
     .models = "Qwen 1.5, 2 MoE",
     .router = QWEN(OFF),
     .marks = EP_TYPE_SHARED_GATED},
    {.name = "qwen3_5_moe",
     .models = "Qwen 3.5, 3.6",
     .router = QWEN(EP_RENORM_ALWAYS),
     .marks = EP_TYPE_SHARED_GATED},
    {.name = "qwen3_moe", .models = "Qwen 3", .router = QWEN(OFF)},
    {.name = "qwen3_next",
     .models = "Qwen 3 Next",
     .router = QWEN(ON),
     .marks = EP_TYPE_SHARED_GATED},
    {.name = "qwen3_omni_moe", .models = "Qwen 3 Omni (thinker)", .router = QWEN(ON)},
    {.name = "qwen3_vl_moe", .models = "Qwen 3 VL", .router = QWEN(EP_RENORM_ALWAYS)},
    {.name = "qwen4_exp",
     .models = "Qwen 4 experimental",
     .router = QWEN(ON),
     .marks = EP_TYPE_SHARED_GATED},
    {.name = "solar_open", .models = "Solar Open", .router = DEEPSEEK_V3(ON, 0)},
    {.name = "step3p7",
     .aliases = "step3p5",
     .models = "Step 3.5, 3.7",
     .router = MINIMAX_M2(EP_ROUTER_SCALED)},
    {.name = "switch_transformers",
     .models = "Switch Transformers",
     .top_k = 1,
     .function = "relu",
     .marks = EP_TYPE_TWO_STACKS,
     .router = NOT_COMPUTED("an expert's capacity decides by the order of tokens")},
    {.name = "unlimited_ocr", .models = "Unlimited OCR", .router = DEEPSEEK_V2},
    {.name = "vitpose_backbone", .refused = "an expert is one matrix that gives a part of the row"},
    {.name = "zaya",
     .models = "ZAYA",
     .router = {.select = SOFTMAX,
                .weight = SOFTMAX,
                .bias = EP_BIAS_SELECT,
                .marks = EP_ROUTER_ZERO_LAST},
     .beside = {"mlp.gate.down_proj", "mlp.gate.router_mlp", "mlp.gate.router_states_scale"}},
};

/* Whether word is one of the words of list. */
static bool has_word(const char *list, const char *word, size_t length)
{
    while (list != NULL && *list != '\0') {
        const size_t part = strcspn(list, " ");
        if (part == length && strncmp(list, word, length) == 0) {
            return true;
        }
        list += part + (list[part] == ' ');
    }
    return false;
}

const ep_model_type *ep_model_type_find(const char *name)
{
    static const char ending[] = "_text";
    size_t length = strlen(name);
    if (length > sizeof(ending) - 1 && strcmp(name + length - (sizeof(ending) - 1), ending) == 0) {
        length -= sizeof(ending) - 1;
    }
    for (size_t i = 0; length > 0 && i < EP_ARRAY_COUNT(types); i++) {
        if (has_word(types[i].name, name, length) || has_word(types[i].aliases, name, length)) {
            return &types[i];
        }
    }
    return NULL;
}

const ep_model_type *ep_model_type_at(size_t index)
{
    return index < EP_ARRAY_COUNT(types) ? &types[index] : NULL;
}
