/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What checkpoints call an expert's matrices. Two families, each with an optional prefix before "layers.":
 *   N1  mlp.experts.E.{gate_proj,up_proj,down_proj}.weight
 *   N2  block_sparse_moe.experts.E.{w1,w3,w2}.weight
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
} ep_tensor_names;

/* Answers whether the checkpoint has a tensor. */
typedef bool (*ep_tensor_exists_func)(const char *name, void *arg);

/*
 * Finds family and prefix by looking for experts of the model's MoE layers.
 * Errors: UNIMPLEMENTED, naming what was looked for, or the family seen instead.
 */
ep_err ep_tensor_names_probe(const ep_model_info *info, ep_tensor_exists_func exists, void *arg,
                             ep_tensor_names *out_names, ep_error *out_error);

/* What part is "weight" or "bias". */
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
