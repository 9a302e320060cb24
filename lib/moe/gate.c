/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One token at a time: selection scores, group limit, top-k, weights. The steps are those of
 * expertd/gate.h, in that order; everything is f32.
 */
#include "expertd/gate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/float_env.h"
#include "base/numeric.h"
#include "base/random.h"
#include "moe/flow.h"
#include "moe/gate_check.h"

#define STACK_EXPERTS 1024

/* The state for one token. */
typedef struct {
    const ep_gate_config *config;
    const float *logits; /* [E] */
    float *scores;       /* [E] exp(l - max) for a softmax, then selection scores */
    float *changed;      /* [E] logits after softcap and noise; NULL without both */
    uint32_t token;
    float max; /* of the logits; for a softmax */
    float sum; /* of exp(l - max) in ascending order */
} gate_token;

/* As torch's softplus: above 20 it is the logit itself. */
static float sqrt_softplus(float logit)
{
    return sqrtf(logit > 20.0f ? logit : log1pf(ep_expf(logit)));
}

/* The score that does not depend on what else is selected. */
static float score_of(const gate_token *g, ep_gate_score kind, uint32_t expert)
{
    switch (kind) {
    case EP_GATE_SOFTMAX:
        return ep_expf(g->logits[expert] - g->max) / g->sum;
    case EP_GATE_SIGMOID:
        return ep_sigmoidf(g->logits[expert]);
    case EP_GATE_SQRT_SOFTPLUS:
        return sqrt_softplus(g->logits[expert]);
    default:
        return g->logits[expert];
    }
}

/* Random number of one (token, expert) in stream 0 (noise) or 1 (dropout), in any order. */
static double uniform_draw(const gate_token *g, uint32_t expert, uint32_t stream)
{
    uint64_t index = (((uint64_t)g->token * g->config->experts) + expert) * 2 + stream;
    uint64_t state = g->config->seed + index * 0x9e3779b97f4a7c15ull;
    return ((double)(ep_splitmix64(&state) >> 12) + 0.5) * 0x1p-52; /* inside (0, 1) */
}

static float gumbel_draw(const gate_token *g, uint32_t expert)
{
    return (float)-log(-log(uniform_draw(g, expert, 0)));
}

static bool is_dropped(const gate_token *g, uint32_t expert)
{
    return g->config->expert_dropout > 0.0f &&
           uniform_draw(g, expert, 1) < (double)g->config->expert_dropout;
}

static void prepare_logits(gate_token *g)
{
    const ep_gate_config *config = g->config;
    for (uint32_t e = 0; g->changed != NULL && e < config->experts; e++) {
        float logit = config->softcap > 0.0f
                          ? tanhf(g->logits[e] / config->softcap) * config->softcap
                          : g->logits[e];
        g->changed[e] = config->noise_temperature > 0.0f
                            ? logit + gumbel_draw(g, e) * config->noise_temperature
                            : logit;
    }
    g->logits = g->changed != NULL ? g->changed : g->logits;
    if (config->select != EP_GATE_SOFTMAX && config->weight != EP_GATE_SOFTMAX) {
        return;
    }
    g->max = g->logits[0];
    for (uint32_t e = 1; e < config->experts; e++) {
        g->max = g->logits[e] > g->max ? g->logits[e] : g->max;
    }
    g->sum = 0.0f;
    for (uint32_t e = 0; e < config->experts; e++) {
        g->scores[e] = ep_expf(g->logits[e] - g->max);
        g->sum = g->sum + g->scores[e];
    }
}

static void make_scores(gate_token *g)
{
    const ep_gate_config *config = g->config;
    for (uint32_t e = 0; e < config->experts; e++) {
        float score = config->select == EP_GATE_SOFTMAX ? g->scores[e] / g->sum
                                                        : score_of(g, config->select, e);
        g->scores[e] = config->bias == NULL ? score : score + config->bias[e];
    }
}

static float group_score(const gate_token *g, uint32_t group, uint32_t size)
{
    const float *scores = g->scores + (size_t)group * size;
    float best = scores[0];
    float second = -INFINITY;
    for (uint32_t i = 1; i < size; i++) {
        if (scores[i] > best) {
            second = best;
            best = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return g->config->group_best == 1 || size == 1 ? best : best + second;
}

static void mask_groups(gate_token *g)
{
    const ep_gate_config *config = g->config;
    float group_scores[EP_GATE_GROUPS_MAX];
    uint32_t size = config->experts / config->groups;
    /* NaN stands for -inf: never selected */
    float masked = config->group_mask == EP_GROUP_MASK_ZERO ? 0.0f : NAN;

    for (uint32_t i = 0; i < config->groups; i++) {
        group_scores[i] = group_score(g, i, size);
    }
    for (uint32_t i = 0; i < config->groups; i++) {
        uint32_t better = 0;
        for (uint32_t j = 0; j < config->groups; j++) {
            better +=
                group_scores[j] > group_scores[i] || (group_scores[j] == group_scores[i] && j < i);
        }
        for (uint32_t e = i * size; better >= config->groups_kept && e < (i + 1) * size; e++) {
            g->scores[e] = masked;
        }
    }
}

/* Keeps the best K in descending order. Experts come in ascending id, so of equals the lower id
 * stays ahead. Dropped experts come after all others: they are selected only when fewer than K are
 * left. NaN marks experts of groups that are not kept; the others are at least K. */
static void select_top_k(const gate_token *g, int32_t *out_ids)
{
    const ep_gate_config *config = g->config;
    bool dropped[EP_TOP_K_MAX];
    uint32_t count = 0;
    for (uint32_t e = 0; e < config->experts; e++) {
        if (isnan(g->scores[e])) {
            continue;
        }
        bool drop = is_dropped(g, e);
        uint32_t place = count;
        while (
            place > 0 &&
            (dropped[place - 1] == drop ? g->scores[e] > g->scores[out_ids[place - 1]] : !drop)) {
            place--;
        }
        if (place == config->top_k) {
            continue;
        }
        uint32_t last = count < config->top_k ? count++ : count - 1;
        for (uint32_t i = last; i > place; i--) {
            out_ids[i] = out_ids[i - 1];
            dropped[i] = dropped[i - 1];
        }
        out_ids[place] = (int32_t)e;
        dropped[place] = drop;
    }
}

/* Softmax over the selected logits, in slot order. */
static void softmax_selected(const gate_token *g, const int32_t *ids, float *out_weights)
{
    uint32_t top_k = g->config->top_k;
    float max = g->logits[ids[0]];
    for (uint32_t k = 1; k < top_k; k++) { /* the largest logit need not be in the first slot */
        max = g->logits[ids[k]] > max ? g->logits[ids[k]] : max;
    }
    float sum = 0.0f;
    for (uint32_t k = 0; k < top_k; k++) {
        out_weights[k] = ep_expf(g->logits[ids[k]] - max);
        sum = sum + out_weights[k];
    }
    for (uint32_t k = 0; k < top_k; k++) {
        out_weights[k] = out_weights[k] / sum;
    }
}

/* For each slot: the best of the remaining experts, weighted by its share among those near it. */
static void mix_sparsely(const gate_token *g, int32_t *out_ids, float *out_weights)
{
    const ep_gate_config *config = g->config;
    memset(g->scores, 0, config->experts * sizeof(*g->scores)); /* 1: taken */
    for (uint32_t k = 0; k < config->top_k; k++) {
        uint32_t best = config->experts;
        for (uint32_t e = 0; e < config->experts; e++) {
            if (g->scores[e] == 0.0f &&
                (best == config->experts || g->logits[e] > g->logits[best])) {
                best = e;
            }
        }
        const float max = g->logits[best];
        float sum = 0.0f;
        for (uint32_t e = 0; e < config->experts; e++) {
            const float size = fabsf(g->logits[e]) > max ? fabsf(g->logits[e]) : max;
            const bool is_far = (max - g->logits[e]) / size > 2.0f * config->jitter;
            sum = sum + (is_far || g->scores[e] != 0.0f ? 0.0f : ep_expf(g->logits[e] - max));
        }
        g->scores[best] = 1.0f;
        out_ids[k] = (int32_t)best;
        out_weights[k] = 1.0f / sum;
    }
}

static void weigh_selected(const gate_token *g, const int32_t *ids, float *out_weights)
{
    const ep_gate_config *config = g->config;
    if (config->weight == EP_GATE_SOFTMAX_SELECTED) {
        softmax_selected(g, ids, out_weights);
        return;
    }
    for (uint32_t k = 0; k < config->top_k; k++) {
        out_weights[k] = score_of(g, config->weight, (uint32_t)ids[k]);
    }
}

static void finish_weights(const gate_token *g, const int32_t *ids, float *weights)
{
    const ep_gate_config *config = g->config;
    float sum = 0.0f;
    for (uint32_t k = 0; k < config->top_k; k++) {
        sum = sum + weights[k];
    }
    sum = sum + config->epsilon;
    sum = sum < config->sum_min ? config->sum_min : sum;
    for (uint32_t k = 0; k < config->top_k; k++) {
        weights[k] = config->renormalise ? weights[k] / sum : weights[k];
        weights[k] =
            config->scaling_factor != 0.0f ? weights[k] * config->scaling_factor : weights[k];
        weights[k] = config->expert_factors != NULL ? weights[k] * config->expert_factors[ids[k]]
                                                    : weights[k];
        if (config->weight_func != NULL) {
            weights[k] = config->weight_func(config->weight_func_arg, g->token, k, (uint32_t)ids[k],
                                             weights[k]);
        }
    }
}

static void route_token(gate_token *g, int32_t *out_ids, float *out_weights)
{
    const ep_gate_config *config = g->config;
    prepare_logits(g);
    if (config->select == EP_GATE_SPARSEMIXER) {
        mix_sparsely(g, out_ids, out_weights);
        finish_weights(g, out_ids, out_weights);
        return;
    }
    if (config->chosen != NULL) {
        memcpy(out_ids, config->chosen + (size_t)g->token * config->top_k,
               config->top_k * sizeof(*out_ids));
    } else {
        make_scores(g);
        if (config->groups > 1 && config->groups_kept < config->groups) {
            mask_groups(g);
        }
        select_top_k(g, out_ids);
    }
    weigh_selected(g, out_ids, out_weights);
    finish_weights(g, out_ids, out_weights);
}

static EP_FLOAT_WORK void route(const ep_gate_config *config, uint32_t tokens, const float *logits,
                                float *scores, float *changed, int32_t *out_ids, float *out_weights)
{
    for (uint32_t t = 0; t < tokens; t++) {
        gate_token g = {.config = config,
                        .logits = logits + (size_t)t * config->experts,
                        .scores = scores,
                        .changed = changed,
                        .token = t};
        route_token(&g, out_ids + (size_t)t * config->top_k,
                    out_weights + (size_t)t * config->top_k);
    }
}

ep_err ep_gate(const ep_gate_config *given, uint32_t tokens, const float *logits, int32_t *out_ids,
               float *out_weights, ep_error *out_error)
{
    ep_gate_config taken;
    const ep_gate_config *config = &taken;
    ep_err err = ep_gate_take_config(given, &taken, out_error);
    if (err == EP_OK) {
        err = ep_gate_check_logits(config, tokens, logits, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    float on_stack[2 * STACK_EXPERTS];
    const bool is_large = config->experts > STACK_EXPERTS;
    float *scores = is_large ? calloc(config->experts, 2 * sizeof(*scores)) : on_stack;
    if (scores == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to route over %u experts",
                            config->experts);
    }
    const ep_float_env env = ep_float_env_begin();
    const bool changes = config->softcap > 0.0f || config->noise_temperature > 0.0f;
    route(config, tokens, logits, scores, changes ? scores + config->experts : NULL, out_ids,
          out_weights);
    ep_float_env_end(env);
    if (is_large) {
        free(scores);
    }
    return config->load == NULL ? EP_OK
                                : ep_gate_load_compute(config, tokens, logits, out_ids, NULL,
                                                       config->load, out_error);
}
