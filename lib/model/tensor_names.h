/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What checkpoints call an expert's matrices, each family with an optional prefix before "layers.":
 *   N1   mlp.experts.E.{gate_proj,up_proj,down_proj}.weight     also N5, with .weight_packed and .weight_scale;
 *        mixer.experts.E.{up_proj,down_proj}.weight of two-matrix experts
 *   N2   block_sparse_moe.experts.E.{w1,w3,w2}.weight           also N6; feed_forward.experts.E.{w1,w3,w2}.weight
 *   N2m  experts.E.{w1,w3,w2}.weight
 *   N3   mlp.experts.{gate_up_proj,down_proj}: all experts of a layer in one tensor, gate rows before up rows
 *   N4   ffn.experts.E.{w1,w3,w2}.{weight,scale}
 *   N7   as N3 with _blocks, _scales and _bias, and the plain form of such a model: gate and up rows alternate
 *   N8   feed_forward.experts.{gate_up_proj,down_proj}
 *   N9   block_sparse_moe.{input_linear,output_linear}.weight
 *   N11  moe.{gate_proj,up_proj,down_proj}.weight, each with all experts of a layer
 * Stacked tensors may be transposed in N3, N7 and N8; their shapes tell (expert_plan.h).
 * Shared experts and routers have several spellings within a family; they are tried in the order of the
 * tables.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_TENSOR_NAMES_H
#define EP_MODEL_TENSOR_NAMES_H

#include "model/model.h"

#define EP_TENSOR_NAME_BYTES 192

typedef enum ep_matrix { EP_MATRIX_GATE, EP_MATRIX_UP, EP_MATRIX_DOWN, EP_MATRIX_COUNT } ep_matrix;

typedef struct ep_tensor_names {
    ep_name_family family;
    const char *prefix; /* static storage */
    uint32_t spelling;  /* of the family's experts */
} ep_tensor_names;

/* Answers whether the checkpoint has a tensor. */
typedef bool (*ep_tensor_exists_func)(const char *name, void *arg);

/*
 * Finds family and prefix by looking for experts of the model's MoE layers.
 * Errors: UNIMPLEMENTED, naming what was looked for, or the family seen instead.
 */
ep_err ep_tensor_names_probe(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                             ep_tensor_names *out_names, ep_error *out_error);

bool ep_tensor_names_stacked(const ep_tensor_names *names);       /* all experts of a layer in one tensor */
bool ep_tensor_names_fused(const ep_tensor_names *names);         /* gate and up in one tensor */
bool ep_tensor_names_interleaved(const ep_tensor_names *names);   /* gate and up rows alternate */
bool ep_tensor_names_may_transpose(const ep_tensor_names *names);

/* part: "weight", "bias", "weight_packed", "scale", ...; of stacked tensors "weight", "bias", "blocks", "scales".
 * Stacked: the tensor of the layer, whatever the expert. */
void ep_tensor_name_expert(const ep_tensor_names *names, uint32_t layer, uint32_t expert, ep_matrix matrix,
                           const char *part, char out_name[EP_TENSOR_NAME_BYTES]);
/* spelling counts from 0; false when there are no more. */
bool ep_tensor_name_shared(const ep_tensor_names *names, uint32_t spelling, uint32_t layer, ep_matrix matrix,
                           const char *part, char out_name[EP_TENSOR_NAME_BYTES]);
void ep_tensor_name_shared_gate(const ep_tensor_names *names, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES]);
bool ep_tensor_name_router(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                           char out_name[EP_TENSOR_NAME_BYTES]);
bool ep_tensor_name_router_bias(const ep_tensor_names *names, uint32_t spelling, uint32_t layer,
                                char out_name[EP_TENSOR_NAME_BYTES]);

#endif
