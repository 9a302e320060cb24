/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router: from logits to the top-k experts and their weights. Pure code in f32. Of equal scores the
 * lower id wins. A NaN logit is an error.
 *
 * A rule has these steps, set by fields of ep_gate_config; 0 in a field leaves its step out:
 *   1  l = softcap * tanh(l / softcap), plus noise; every later step uses this l
 *   2  selection score: `select` of l, plus bias. Groups of experts are ranked by their best
 *      group_best scores; experts outside the kept groups get group_mask
 *   3  the K best scores are selected, or the experts that `chosen` names
 *   4  weight of each selected expert: `weight` of its l, without bias
 *   5  renormalise: divided by max(sum of the K + epsilon, sum_min)
 *   6  times scaling_factor, times the expert's own expert_factors
 * Mixtral and gpt-oss: logit, softmax_selected. Qwen and OLMoE: softmax for both. DeepSeek-V2:
 * softmax for both, groups by their best. DeepSeek-V3, Kimi-K2, GLM-4.5: sigmoid for both with a
 * bias, groups by their best two. lib/model/model_types.c has the rule of every model type.
 *
 * Shapes     logits [T,E] f32; bias, expert_factors [E] f32 or NULL; out_ids [T,K] i32; out_weights
 *            [T,K] f32; all contiguous. Slots are in the order of descending selection score, or
 *            of chosen.
 * Threads    pure; any thread, in any float environment.
 */
#ifndef EXPERTD_GATE_H
#define EXPERTD_GATE_H

#include "expertd/error.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_GATE_GROUPS_MAX 256
#define EP_GATE_NOISE_MIN 0.1f
#define EP_GATE_NOISE_MAX 10.0f
#define EP_GATE_DROPOUT_MAX 0.5f

typedef enum ep_gate_score {
    EP_GATE_LOGIT = 1,   /* the logit itself */
    EP_GATE_SOFTMAX = 2, /* over all experts */
    EP_GATE_SIGMOID = 3,
    EP_GATE_SQRT_SOFTPLUS = 4,    /* sqrt(log(1 + exp(l))) */
    EP_GATE_SOFTMAX_SELECTED = 5, /* weight only: over the K selected */
    /* select and weight both, or neither (PhiMoE): experts are chosen one after the other, each
     * with the weight of a softmax over the remaining experts that are near the best */
    EP_GATE_SPARSEMIXER = 6,
} ep_gate_score;

typedef enum ep_group_mask { EP_GROUP_MASK_ZERO, EP_GROUP_MASK_MINUS_INF } ep_group_mask;

/* How evenly the choices of one batch are spread over the experts. C is the number of chosen slots;
 * c_e of them name expert e. */
typedef struct ep_gate_load {
    uint32_t struct_bytes;      /* set by the caller: sizeof(ep_gate_load) */
    double *fractions;          /* [E] of the caller, or NULL: f_e = c_e / C */
    double *mean_probabilities; /* [E] of the caller, or NULL: p_e, mean over tokens of
                                 * softmax(logits)_e; for a sigmoid router of s_e / sum_j s_j
                                 * (DeepSeek-V3 technical report, sequence-wise balance loss) */
    uint64_t slots;             /* C */
    double max_over_mean;       /* max_e c_e / (C / E); 0 without slots, like the next two */
    /* E * sum_e f_e * p_e, without the factor alpha (Switch Transformer, arXiv 2101.03961,
     * equations 4-6) */
    double auxiliary_loss;
    /* mean over tokens of log(sum_e exp(l_e))^2 (ST-MoE, arXiv 2202.08906, equation 5) */
    double z_loss;
} ep_gate_load;

typedef struct ep_gate_config {
    uint32_t struct_bytes; /* sizeof(ep_gate_config) */
    /* E, 1..65535: the number of logits, including those of zero and copy experts */
    uint32_t experts;
    uint32_t top_k;       /* K, 1..min(64, E) */
    ep_gate_score select; /* any but softmax_selected */
    ep_gate_score weight;
    float softcap;        /* 0 none */
    const float *bias;    /* [E], added to the selection score; NULL none */
    uint32_t groups;      /* divides E, at most EP_GATE_GROUPS_MAX; 0 and 1: no groups */
    uint32_t groups_kept; /* 1..groups */
    /* with groups, a group's score is 1: its best score, 2: the sum of its best two */
    uint32_t group_best;
    /* score of experts outside the kept groups: 0 (axk2, Mistral), or -inf (DeepSeek), so that they
     * are never selected */
    ep_group_mask group_mask;
    bool renormalise;
    float epsilon;
    float sum_min;
    float scaling_factor;        /* 0 and 1 none */
    const float *expert_factors; /* [E]; NULL none */
    /* sparsemixer: an expert is near the best if the difference is at most 2 * jitter, relative to
     * the larger of the best and |l| */
    float jitter;
    /* [T,K] ids for a layer that does not select by score (a table by token id); NULL otherwise */
    const int32_t *chosen;
    /* Optional, off by default. Noise and dropout not with chosen; dropout not with sparsemixer. */
    /* 0 off; 0.1..10: Gumbel noise times this is added to each logit. With K = 1, no bias and no
     * groups, e is then selected with probability softmax(l / temperature)_e */
    float noise_temperature;
    /* 0 off; 0..0.5: chance that an expert is left out for a token (as long as K are left) */
    float expert_dropout;
    uint64_t seed; /* of noise and dropout; equal seeds give equal choices */
    /* Optional: called per selected slot after the weights are computed; returns the weight to
     * use. */
    float (*weight_func)(void *arg, uint32_t token, uint32_t slot, uint32_t expert, float weight);
    void *weight_func_arg;
    /* Optional: receives the load of the batch; from ep_moe_forward_logits of its active tokens */
    ep_gate_load *load;
} ep_gate_config;

/* Errors: INVALID_ARGUMENT naming the field or token, the value and the allowed range; outputs are
 * then untouched. A softmax also needs a finite largest logit in every row.
 * Allocates at most 2 E floats on the heap per call, none up to 1024 experts; NO_MEMORY. With load,
 * always 24 E bytes more. If only these cannot be had, the result is NO_MEMORY, load is untouched,
 * and ids and weights are written. */
EP_API ep_err ep_gate(const ep_gate_config *config, uint32_t tokens, const float *logits,
                      int32_t *out_ids, float *out_weights, ep_error *out_error);

/* Computes the load of a choice ids [T,K]. logits [T,E] are used as given, without softcap and
 * noise. active [T]: 0 leaves a token out; NULL: all count. Errors: INVALID_ARGUMENT (struct_bytes,
 * a logit that the gate refuses, an id that is no expert), NO_MEMORY; out_load and its arrays are
 * then untouched. */
EP_API ep_err ep_gate_load_compute(const ep_gate_config *config, uint32_t tokens,
                                   const float *logits, const int32_t *ids, const uint8_t *active,
                                   ep_gate_load *out_load, ep_error *out_error);

#ifdef __cplusplus
}
#endif
#endif
