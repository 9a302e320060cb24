/* SPDX-License-Identifier: Apache-2.0 */
/* The name tables of families N1 and N2, and the search for the one a checkpoint uses. */
#include "model/tensor_names.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"

static const char *const prefixes[] = {"", "model.", "language_model.model.", "model.language_model.",
                                       "language_model."};

typedef const char *const matrix_words[EP_MATRIX_COUNT];
static matrix_words projections = {"gate_proj", "up_proj", "down_proj"};
static matrix_words numbered = {"w1", "w3", "w2"};

typedef struct shared_spelling {
    const char *stem;
    const char *const *words;
} shared_spelling;

typedef struct family_names {
    ep_name_family family;
    const char *block;
    const char *const *words;
    shared_spelling shared[4]; /* ends at a NULL stem */
    const char *shared_gate;
    const char *routers[5];       /* ends at NULL */
    const char *router_biases[5]; /* ends at NULL */
} family_names;

static const family_names families[] = {
    {
        .family = EP_NAMES_N1,
        .block = "mlp",
        .words = projections,
        .shared = {{"mlp.shared_experts", projections},
                   {"mlp.shared_expert", projections},
                   {"mlp.shared_mlp", projections}},
        .shared_gate = "mlp.shared_expert_gate.weight",
        .routers = {"mlp.gate.weight", "mlp.gate.wg.weight", "mlp.router.classifier.weight"},
        .router_biases = {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias",
                          "mlp.moe_statics.e_score_correction_bias", "mlp.router.e_score_correction_bias"},
    },
    {
        .family = EP_NAMES_N2,
        .block = "block_sparse_moe",
        .words = numbered,
        .shared = {{"block_sparse_moe.shared_experts", numbered},
                   {"block_sparse_moe.shared_experts", projections},
                   {"shared_mlp", projections}},
        .shared_gate = "block_sparse_moe.shared_expert_gate.weight",
        .routers = {"block_sparse_moe.gate.weight"},
        .router_biases = {"block_sparse_moe.e_score_correction_bias",
                          "block_sparse_moe.gate.e_score_correction_bias"},
    },
};

/* Names of other families, so that the message can say what was found instead. */
static const struct {
    const char *tail;
    const char *text;
} foreign[] = {
    {"mlp.experts.gate_up_proj", "packed experts (one tensor for all experts of a layer)"},
    {"mlp.experts.gate_up_proj_blocks", "MXFP4 experts"},
    {"mlp.experts.0.gate_proj.qweight", "GPTQ or AWQ quantised experts"},
    {"mlp.experts.0.gate_proj.weight_packed", "compressed-tensors quantised experts"},
    {"block_sparse_moe.experts.0.w1.weight_packed", "compressed-tensors quantised experts"},
    {"block_sparse_moe.input_linear.weight", "packed experts (one tensor for all experts of a layer)"},
    {"feed_forward.experts.gate_up_proj", "packed, transposed experts"},
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

void ep_tensor_name_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert, ep_matrix matrix,
                           const char *part, char out_name[EP_TENSOR_NAME_BYTES])
{
    const family_names *t = table(names);
    char tail[EP_TENSOR_NAME_BYTES];
    snprintf(tail, sizeof(tail), "%s.experts.%u.%s.%s", t->block, expert, t->words[matrix], part);
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
    char name[EP_TENSOR_NAME_BYTES];
    for (ep_matrix m = 0; m < EP_MATRIX_COUNT; m++) {
        ep_tensor_name_expert(names, layer, expert, m, "weight", name);
        if (exists(name, arg)) {
            return true;
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
                                    "tensor %s: %s, allowed: one matrix per expert (gate_proj, up_proj, "
                                    "down_proj or w1, w3, w2)",
                                    name, foreign[i].text);
            }
        }
    }
    return ep_error_set(
        out_error, EP_ERR_UNIMPLEMENTED,
        "no expert tensors found: neither layers.%u.mlp.experts.0.gate_proj.weight nor "
        "layers.%u.block_sparse_moe.experts.0.w1.weight, with prefix none, model., language_model.model., "
        "model.language_model. or language_model.",
        layer, layer);
}

ep_err ep_tensor_names_probe(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                             ep_tensor_names *out_names, ep_error *out_error)
{
    for (size_t p = 0; p < EP_ARRAY_COUNT(prefixes); p++) {
        for (size_t f = 0; f < EP_ARRAY_COUNT(families); f++) {
            ep_tensor_names names = {.family = families[f].family, .prefix = prefixes[p]};
            if (has_any_expert(&names, info, exists, arg)) {
                *out_names = names;
                return EP_OK;
            }
        }
    }
    return nothing_found(info, exists, arg, out_error);
}
