/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The names of an expert's matrices in checkpoints, by family, each after a prefix and "layers."
 * (or "blocks.", "block."):
 *   N1   mlp.experts.E.{gate_proj,up_proj,down_proj}.weight; feed_forward.experts.E....;
 *        mixer.experts.E.{up_proj,down_proj}.weight of two-matrix experts. Also N5, with
 *        .weight_packed and .weight_scale
 *   N2   block_sparse_moe.experts.E.{w1,w3,w2}.weight; feed_forward.experts.E.{w1,w3,w2}.weight.
 *        Also N6
 *   N2m  experts.E.{w1,w3,w2}.weight
 *   N3   mlp.experts.{gate_up_proj,down_proj}: all experts of a layer in one tensor, gate rows
 *        before up rows; also without mlp., under block_sparse_moe., and {fc1,fc2}.weight.
 *        {w13_weight,w2_weight}: gate and up rows alternate
 *   N4   ffn.experts.E.{w1,w3,w2}.{weight,scale}
 *   N7   as N3 with _blocks, _scales and _bias, and the plain form of such a model
 *   N8   feed_forward.experts.{gate_up_proj,down_proj}
 *   N9   block_sparse_moe.{input_linear,output_linear}.weight; mlp.{...}
 *   N10  ffn.experts.mlp.{w1,v1,w2}: experts one after the other, [E I,H]; down is transposed
 *   N11  moe.{gate_proj,up_proj,down_proj}.weight, each with all experts of a layer
 *   N13  {ffn,mlp}.experts.expert_E.{fc1,fc2} and {wi,wo}, of two matrices
 *   N14  mlp.{down_embed,up_embed}.weight: as N10 with I = 1, of two matrices
 *   GGUF ffn_{gate,up,down}_exps.weight or ffn_{gate_up,down}_exps.weight, each with all experts of
 *        a layer, after "blk." instead of "layers."
 * Stacked tensors may be transposed in N3, N7 and N8; their shapes show it (expert_plan.h).
 * Shared experts and routers have several spellings within a family; they are tried in the order of
 * the tables.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_TENSOR_NAMES_H
#define EP_MODEL_TENSOR_NAMES_H

#include "model/model.h"

#define EP_TENSOR_NAME_BYTES 192

typedef enum ep_matrix { EP_MATRIX_GATE, EP_MATRIX_UP, EP_MATRIX_DOWN, EP_MATRIX_COUNT } ep_matrix;

/* Where a layer's tensors are: "<prefix><stem>.<number>.<infix>". */
typedef struct ep_layer_place {
    const char *prefix;
    const char *stem;
    const char *infix;
} ep_layer_place;

typedef struct ep_tensor_names {
    ep_name_family family;
    const char *prefix; /* static storage, like the next two */
    const char *stem;   /* NULL: "layers" */
    const char *infix;  /* NULL: "" */
    /* layers from second_from on are numbered from 0 at this place; NULL: there is one stack */
    const ep_layer_place *second;
    uint32_t second_from;
    uint32_t spelling; /* which of the family's spellings the experts have */
    bool alternates;   /* in a tensor with gate and up, their rows alternate */
} ep_tensor_names;

/* Tells whether the checkpoint has a tensor. */
typedef bool (*ep_tensor_exists_func)(const char *name, void *arg);

/*
 * Finds family and prefix by looking for experts of the model's MoE layers. alternates: whether
 * rows of gate and up alternate in a common tensor, which is unknown for a model type without a
 * row. Errors: UNIMPLEMENTED, naming what was looked for, or the family found instead.
 */
ep_err ep_tensor_names_probe(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                             bool alternates, ep_tensor_names *out_names, ep_error *out_error);

/* all experts of a layer in one tensor */
bool ep_tensor_names_stacked(const ep_tensor_names *names);
bool ep_tensor_names_flat(const ep_tensor_names *names);  /* the same, with rank 2 */
bool ep_tensor_names_fused(const ep_tensor_names *names); /* gate and up in one tensor */
bool ep_tensor_names_may_transpose(const ep_tensor_names *names);

/* part: "weight", "bias", "weight_packed", "scale", ...; for stacked tensors "weight", "bias",
 * "blocks", "scales", and the name is that of the layer's tensor, whatever the expert. */
void ep_tensor_name_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert,
                           ep_matrix matrix, const char *part, char out_name[EP_TENSOR_NAME_BYTES]);
/* spelling: 0, 1, ...; false when there are no more. */
bool ep_tensor_name_shared(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                           ep_matrix matrix, const char *part, char out_name[EP_TENSOR_NAME_BYTES]);
void ep_tensor_name_shared_gate(const ep_tensor_names *names, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES]);
bool ep_tensor_name_router(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                           char out_name[EP_TENSOR_NAME_BYTES]);
bool ep_tensor_name_router_bias(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES]);

/* Full names of tensors; false when the family has no such tensor. */
bool ep_tensor_name_router_factors(const ep_tensor_names *names, uint32_t layer,
                                   char out_name[EP_TENSOR_NAME_BYTES]);
bool ep_tensor_name_router_table(const ep_tensor_names *names, uint32_t layer,
                                 char out_name[EP_TENSOR_NAME_BYTES]);

/*
 * The role of a tensor of the checkpoint. out_layer: its layer, if it belongs to one.
 * ELSEWHERE  not in the block with a layer's experts
 * EXPERT     a part of a routed expert, or of all of them
 * OTHER      of a shared expert or the router
 * UNKNOWN    in that block, but none of these
 */
typedef enum ep_tensor_role {
    EP_TENSOR_ELSEWHERE,
    EP_TENSOR_EXPERT,
    EP_TENSOR_OTHER,
    EP_TENSOR_UNKNOWN
} ep_tensor_role;
ep_tensor_role ep_tensor_name_role(const ep_tensor_names *names, const char *name,
                                   uint32_t *out_layer);
/* Whether tail follows the layer's number in the name of this tensor of the experts' block. */
bool ep_tensor_name_has_tail(const ep_tensor_names *names, const char *name, const char *tail);

#endif
