/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router: from logits to the top-k experts and their weights. Pure code in f32; ties: the lower id wins; a NaN logit is an error.
 *
 * Families (formulas: the models' published reference code)
 *   R1  top-k of the logits; softmax over the k selected (Mixtral, gpt-oss, Granite)
 *   R2  softmax over all; top-k; optionally divided by the sum of the selected (Qwen, OLMoE)
 *   R3  softmax over all; groups limited by their maximum; top-k; scaled (DeepSeek-V2)
 *   R4  sigmoid; selection by score + bias, groups limited by the sum of their best two; weights from the unbiased score,
 *       divided by (sum + epsilon) if asked; scaled (DeepSeek-V3, Kimi-K2, GLM-4.5)
 *
 * Shapes     logits [T,E] f32; bias [E] f32 or NULL; out_ids [T,K] i32; out_weights [T,K] f32; all contiguous.
 *            Slot order: descending selection score.
 * Threads    pure; any thread, in any float environment.
 */
#ifndef EXPERTD_GATE_H
#define EXPERTD_GATE_H

#include "expertd/error.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_GATE_GROUPS_MAX 256

typedef enum ep_gate_family { EP_GATE_R1 = 1, EP_GATE_R2 = 2, EP_GATE_R3 = 3, EP_GATE_R4 = 4 } ep_gate_family;

typedef enum ep_group_mask { EP_GROUP_MASK_ZERO, EP_GROUP_MASK_MINUS_INF } ep_group_mask;

typedef struct ep_gate_config {
    uint32_t struct_bytes;       /* sizeof(ep_gate_config) */
    ep_gate_family family;
    uint32_t experts;            /* E, 1..65535 */
    uint32_t top_k;              /* K, 1..min(64, E) */
    bool renormalise;
    float epsilon;               /* R4, R3 with renormalise: added to the sum; 1e-20 in the reference code */
    float scaling_factor;        /* R4, R3 without renormalise; 1 = none */
    uint32_t groups;             /* R3, R4: divides E, at most EP_GATE_GROUPS_MAX; 1 = no groups */
    uint32_t groups_kept;        /* 1..groups */
    ep_group_mask group_mask;    /* score of experts outside the kept groups: 0 (Hugging Face) or -inf (DeepSeek) */
    const float *bias;           /* [E] selection bias, R4 only; NULL: as a bias of zeros */
    /* Optional, off by default. */
    float noise_temperature;     /* 0 off; 0.1..10: Gumbel noise times this is added to the selection score */
    float expert_dropout;        /* 0 off; 0..0.5: chance that an expert is left out for a token (unless fewer than K are left) */
    uint64_t seed;               /* of noise and dropout; equal seeds, equal choices */
    /* NULL, or called with each selected slot after the weights are made: returns the weight to use. */
    float (*weight_func)(void *arg, uint32_t token, uint32_t slot, uint32_t expert, float weight);
    void *weight_func_arg;
} ep_gate_config;

/* Errors: INVALID_ARGUMENT naming the field or token, the value and the allowed range; outputs are then untouched. A softmax family also
 * needs a finite largest logit in every row. Fields a family does not use are 0 or 1.
 * Allocates at most E floats on the heap per call, none up to 1024 experts; NO_MEMORY. */
EP_API ep_err ep_gate(const ep_gate_config *config, uint32_t tokens, const float *logits, int32_t *out_ids, float *out_weights,
                      ep_error *out_error);

#ifdef __cplusplus
}
#endif
#endif
