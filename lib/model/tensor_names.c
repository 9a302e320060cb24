/* SPDX-License-Identifier: Apache-2.0 */
/* The name tables of all families, and the search for the one a checkpoint uses. */
#include "model/tensor_names.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"

static const char *const prefixes[] = {"", "model.", "language_model.model.", "model.language_model.",
                                       "language_model.", "backbone."};

typedef const char *const matrix_words[EP_MATRIX_COUNT];
static matrix_words projections = {"gate_proj", "up_proj", "down_proj"};
static matrix_words numbered = {"w1", "w3", "w2"};
static matrix_words fused_linears = {"input_linear", "input_linear", "output_linear"}; /* gate's rows, then up's */

typedef struct shared_spelling {
    const char *stem;
    const char *const *words;
} shared_spelling;

typedef struct family_names {
    ep_name_family family;
    const char *blocks[3]; /* "<block>.E.<word>.<part>"; ends at NULL */
    const char *const *words;
    const char *stacked[EP_MATRIX_COUNT]; /* instead: tensors of a layer; gate and up may be the same */
    const char *stacked_end;              /* behind the name of plain values, in place of a part */
    bool interleaved;
    bool may_transpose;
    shared_spelling shared[5]; /* ends at a NULL stem */
    const char *shared_gate;
    const char *routers[6];       /* ends at NULL */
    const char *router_biases[6]; /* ends at NULL */
} family_names;

static const family_names families[] = {
    {
        .family = EP_NAMES_N1,
        .blocks = {"mlp.experts", "mixer.experts"},
        .words = projections,
        .shared = {{"mlp.shared_experts", projections},
                   {"mlp.shared_expert", projections},
                   {"mlp.shared_mlp", projections},
                   {"mixer.shared_experts", projections}},
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.gate.weight", "mlp.gate.wg.weight", "mlp.router.classifier.weight", "mixer.gate.weight"},
        .router_biases = {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias",
                          "mlp.moe_statics.e_score_correction_bias", "mlp.router.e_score_correction_bias",
                          "mixer.gate.e_score_correction_bias"},
    },
    {
        .family = EP_NAMES_N2,
        .blocks = {"block_sparse_moe.experts", "feed_forward.experts"},
        .words = numbered,
        .shared = {{"block_sparse_moe.shared_experts", numbered},
                   {"block_sparse_moe.shared_experts", projections},
                   {"shared_mlp", projections}},
        .shared_gate = "block_sparse_moe.shared_expert_gate.weight",
        .routers = {"block_sparse_moe.gate.weight", "feed_forward.gate.weight"},
        .router_biases = {"block_sparse_moe.e_score_correction_bias",
                          "block_sparse_moe.gate.e_score_correction_bias", "feed_forward.expert_bias"},
    },
    {
        .family = EP_NAMES_N4,
        .blocks = {"ffn.experts"},
        .words = numbered,
        .shared = {{"ffn.shared_experts", numbered}},
        .shared_gate = "ffn.shared_expert_gate.weight",
        .routers = {"ffn.gate.weight"},
        .router_biases = {"ffn.gate.bias"},
    },
    {
        .family = EP_NAMES_N2M,
        .blocks = {"experts"},
        .words = numbered,
        .shared = {{"shared_experts", numbered}},
        .shared_gate = "shared_expert_gate.weight",
        .routers = {"gate.weight"},
        .router_biases = {"gate.e_score_correction_bias"},
    },
    {
        .family = EP_NAMES_N3,
        .stacked = {"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
        .stacked_end = "",
        .may_transpose = true,
        .shared = {{"mlp.shared_experts", projections}, {"mlp.shared_expert", projections}},
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.gate.weight"},
        .router_biases = {"mlp.gate.e_score_correction_bias"},
    },
    {
        .family = EP_NAMES_N7, /* told from N3 by its blocks or biases */
        .stacked = {"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
        .stacked_end = "",
        .interleaved = true,
        .may_transpose = true,
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.router.weight"},
        .router_biases = {"mlp.router.bias"},
    },
    {
        .family = EP_NAMES_N8,
        .stacked = {"feed_forward.experts.gate_up_proj", "feed_forward.experts.gate_up_proj",
                    "feed_forward.experts.down_proj"},
        .stacked_end = "",
        .may_transpose = true,
        .shared = {{"feed_forward.shared_expert", projections}},
        .shared_gate = "feed_forward.shared_expert_gate.weight",
        .routers = {"feed_forward.router.weight"},
    },
    {
        .family = EP_NAMES_N9,
        .stacked = {"block_sparse_moe.input_linear", "block_sparse_moe.input_linear",
                    "block_sparse_moe.output_linear"},
        .stacked_end = ".weight",
        .shared = {{"block_sparse_moe.shared_experts", projections}, {"shared_mlp", fused_linears}},
        .shared_gate = "block_sparse_moe.shared_expert_gate.weight",
        .routers = {"block_sparse_moe.router.layer.weight"},
    },
    {
        .family = EP_NAMES_N11,
        .stacked = {"moe.gate_proj", "moe.up_proj", "moe.down_proj"},
        .stacked_end = ".weight",
        .shared = {{"share_expert", projections}},
        .shared_gate = "moe.shared_expert_gate.weight",
        .routers = {"moe.gate.weight"},
        .router_biases = {"moe.router_bias"},
    },
};

/* Names this build cannot read, so that the message can say what was found instead. */
static const struct {
    const char *tail;
    const char *text;
} foreign[] = {
    {"mlp.experts.0.gate_proj.qweight", "GPTQ or AWQ quantised experts"},
    {"block_sparse_moe.experts.0.w1.qweight", "GPTQ or AWQ quantised experts"},
};

static const family_names *table(const ep_tensor_names *names)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(families); i++) {
        if (families[i].family == names->family) {
            return &families[i];
        }
    }
    EP_ASSERT(false);
    return NULL;
}

static void layer_name(const ep_tensor_names *names, uint32_t layer, const char *tail, char *out_name)
{
    int n = snprintf(out_name, EP_TENSOR_NAME_BYTES, "%slayers.%u.%s", names->prefix, layer, tail);
    EP_ASSERT(n > 0 && n < EP_TENSOR_NAME_BYTES);
}

bool ep_tensor_names_stacked(const ep_tensor_names *names)
{
    return table(names)->stacked[0] != NULL;
}

bool ep_tensor_names_fused(const ep_tensor_names *names)
{
    const family_names *t = table(names);
    return t->stacked[0] != NULL && strcmp(t->stacked[EP_MATRIX_GATE], t->stacked[EP_MATRIX_UP]) == 0;
}

bool ep_tensor_names_interleaved(const ep_tensor_names *names)
{
    return table(names)->interleaved;
}

bool ep_tensor_names_may_transpose(const ep_tensor_names *names)
{
    return table(names)->may_transpose;
}

void ep_tensor_name_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert, ep_matrix matrix,
                           const char *part, char out_name[EP_TENSOR_NAME_BYTES])
{
    const family_names *t = table(names);
    char tail[EP_TENSOR_NAME_BYTES];
    if (t->stacked[0] == NULL) {
        snprintf(tail, sizeof(tail), "%s.%u.%s.%s", t->blocks[names->spelling], expert, t->words[matrix], part);
    } else if (strcmp(part, "weight") == 0) {
        snprintf(tail, sizeof(tail), "%s%s", t->stacked[matrix], t->stacked_end);
    } else {
        snprintf(tail, sizeof(tail), "%s_%s", t->stacked[matrix], part);
    }
    layer_name(names, layer, tail, out_name);
}

bool ep_tensor_name_shared(const ep_tensor_names *names, uint32_t spelling, uint32_t layer, ep_matrix matrix,
                           const char *part, char out_name[EP_TENSOR_NAME_BYTES])
{
    const family_names *t = table(names);
    char tail[EP_TENSOR_NAME_BYTES];
    if (spelling >= EP_ARRAY_COUNT(t->shared) || t->shared[spelling].stem == NULL) {
        return false;
    }
    snprintf(tail, sizeof(tail), "%s.%s.%s", t->shared[spelling].stem, t->shared[spelling].words[matrix],
             part);
    layer_name(names, layer, tail, out_name);
    return true;
}

void ep_tensor_name_shared_gate(const ep_tensor_names *names, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES])
{
    layer_name(names, layer, table(names)->shared_gate, out_name);
}

bool ep_tensor_name_router(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                           char out_name[EP_TENSOR_NAME_BYTES])
{
    const family_names *t = table(names);
    if (spelling >= EP_ARRAY_COUNT(t->routers) || t->routers[spelling] == NULL) {
        return false;
    }
    layer_name(names, layer, t->routers[spelling], out_name);
    return true;
}

bool ep_tensor_name_router_bias(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES])
{
    const family_names *t = table(names);
    if (spelling >= EP_ARRAY_COUNT(t->router_biases) || t->router_biases[spelling] == NULL) {
        return false;
    }
    layer_name(names, layer, t->router_biases[spelling], out_name);
    return true;
}

static bool has_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert,
                       ep_tensor_exists_func exists, void *arg)
{
    static const char *const parts[] = {"weight", "weight_packed", "blocks"};
    char name[EP_TENSOR_NAME_BYTES];
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        for (size_t p = 0; p < EP_ARRAY_COUNT(parts); p++) {
            ep_tensor_name_expert(names, layer, expert, m, parts[p], name);
            if (exists(name, arg)) {
                return true;
            }
        }
    }
    return false;
}

/* One missing expert must not hide the family: every expert of the first MoE layer counts, and expert 0 of
 * the others. */
static bool has_any_expert(const ep_tensor_names *names, const ep_model_info *info,
                           ep_tensor_exists_func exists, void *arg)
{
    for (uint32_t e = 0; e < info->moe_layers[0].experts; e++) {
        if (has_expert(names, info->moe_layers[0].layer, e, exists, arg)) {
            return true;
        }
    }
    for (uint32_t i = 1; i < info->moe_layers_count; i++) {
        if (has_expert(names, info->moe_layers[i].layer, 0, exists, arg)) {
            return true;
        }
    }
    return false;
}

static ep_err nothing_found(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                            ep_error *out_error)
{
    char name[EP_TENSOR_NAME_BYTES];
    uint32_t layer = info->moe_layers[0].layer;
    for (size_t p = 0; p < EP_ARRAY_COUNT(prefixes); p++) {
        ep_tensor_names names = {.prefix = prefixes[p]};
        for (size_t i = 0; i < EP_ARRAY_COUNT(foreign); i++) {
            layer_name(&names, layer, foreign[i].tail, name);
            if (exists(name, arg)) {
                return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                                    "tensor %s: %s, allowed: bf16, f16, f32, f8e4m3, mxfp4, mxfp8, int4 "
                                    "(compressed-tensors), w8a8",
                                    name, foreign[i].text);
            }
        }
    }
    return ep_error_set(
        out_error, EP_ERR_UNIMPLEMENTED,
        "no expert tensors found: neither layers.%u.mlp.experts.0.gate_proj.weight nor "
        "layers.%u.block_sparse_moe.experts.0.w1.weight, nor any other known name, with prefix none, model., "
        "language_model.model., model.language_model., language_model. or backbone.",
        layer, layer);
}

/* N3 and N7 share their names: blocks, biases or the model's type tell. */
static bool is_interleaved(const ep_tensor_names *names, const ep_model_info *info, ep_tensor_exists_func exists,
                           void *arg)
{
    static const char *const marks[] = {"blocks", "bias"};
    char name[EP_TENSOR_NAME_BYTES];
    for (uint32_t i = 0; i < info->moe_layers_count; i++) {
        for (size_t p = 0; p < EP_ARRAY_COUNT(marks); p++) {
            ep_tensor_name_expert(names, info->moe_layers[i].layer, 0, EP_MATRIX_GATE, marks[p], name);
            if (exists(name, arg)) {
                return true;
            }
        }
    }
    return strcmp(info->model_type, "gpt_oss") == 0;
}

ep_err ep_tensor_names_probe(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                             ep_tensor_names *out_names, ep_error *out_error)
{
    for (size_t p = 0; p < EP_ARRAY_COUNT(prefixes); p++) {
        for (size_t f = 0; f < EP_ARRAY_COUNT(families); f++) {
            ep_tensor_names names = {.family = families[f].family, .prefix = prefixes[p]};
            for (; names.spelling == 0 || (families[f].stacked[0] == NULL && families[f].blocks[names.spelling] != NULL);
                 names.spelling++) {
                if (!has_any_expert(&names, info, exists, arg)) {
                    continue;
                }
                if (names.family == EP_NAMES_N3 && is_interleaved(&names, info, exists, arg)) {
                    names.family = EP_NAMES_N7;
                }
                *out_names = names;
                return EP_OK;
            }
        }
    }
    return nothing_found(info, exists, arg, out_error);
}
