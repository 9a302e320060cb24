/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routers R1..R4, one token at a time: selection scores, group limit, top-k, weights. Steps and their order
 * are those of expertd/gate.h; everything is f32.
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

/* What one token needs beside its logits. */
typedef struct {
    const ep_gate_config *config;
    const float *logits; /* [E] */
    float *scores;       /* [E] selection scores */
    uint32_t token;
    float max; /* of the logits; softmax families */
    float sum; /* of exp(l - max), ascending; R2 and R3 */
} gate_token;

/* R2 and R3. */
static float probability(const gate_token *g, uint32_t expert)
{
    return ep_expf(g->logits[expert] - g->max) / g->sum;
}

/* Draw number `stream` (0 noise, 1 dropout) of one (token, expert): independent of every other draw and of
 * their order. */
static double uniform_draw(const gate_token *g, uint32_t expert, uint32_t stream)
{
    uint64_t index = (((uint64_t)g->token * g->config->experts) + expert) * 2 + stream;
    uint64_t state = g->config->seed + index * 0x9e3779b97f4a7c15ull;
    return ((double)(ep_splitmix64(&state) >> 12) + 0.5) * 0x1p-52; /* inside (0, 1) */
}

static bool is_dropped(const gate_token *g, uint32_t expert)
{
    return g->config->expert_dropout > 0.0f && uniform_draw(g, expert, 1) < (double)g->config->expert_dropout;
}

static void prepare_softmax(gate_token *g)
{
    g->max = g->logits[0];
    for (uint32_t e = 1; e < g->config->experts; e++) {
        g->max = g->logits[e] > g->max ? g->logits[e] : g->max;
    }
    g->sum = 0.0f;
    for (uint32_t e = 0; e < g->config->experts; e++) {
        g->scores[e] = ep_expf(g->logits[e] - g->max);
        g->sum = g->sum + g->scores[e];
    }
    for (uint32_t e = 0; e < g->config->experts; e++) {
        g->scores[e] = g->scores[e] / g->sum;
    }
}

static void make_scores(gate_token *g)
{
    const ep_gate_config *config = g->config;
    switch (config->family) {
    case EP_GATE_R1:
        memcpy(g->scores, g->logits, config->experts * sizeof(float));
        break;
    case EP_GATE_R2:
    case EP_GATE_R3:
        prepare_softmax(g);
        break;
    case EP_GATE_R4:
        for (uint32_t e = 0; e < config->experts; e++) {
            float score = ep_sigmoidf(g->logits[e]);
            g->scores[e] = config->bias == NULL ? score : score + config->bias[e];
        }
        break;
    }
    if (config->noise_temperature > 0.0f) {
        for (uint32_t e = 0; e < config->experts; e++) {
            float gumbel = (float)-log(-log(uniform_draw(g, e, 0)));
            g->scores[e] = g->scores[e] + gumbel * config->noise_temperature;
        }
    }
}

/* R3: the group's best score; R4: the sum of its best two. */
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
    return g->config->family == EP_GATE_R3 || size == 1 ? best : best + second;
}

static void mask_groups(gate_token *g)
{
    const ep_gate_config *config = g->config;
    float group_scores[EP_GATE_GROUPS_MAX];
    uint32_t size = config->experts / config->groups;
    float masked = config->group_mask == EP_GROUP_MASK_ZERO ? 0.0f : -INFINITY;

    for (uint32_t i = 0; i < config->groups; i++) {
        group_scores[i] = group_score(g, i, size);
    }
    for (uint32_t i = 0; i < config->groups; i++) {
        uint32_t better = 0;
        for (uint32_t j = 0; j < config->groups; j++) {
            better += group_scores[j] > group_scores[i] || (group_scores[j] == group_scores[i] && j < i);
        }
        for (uint32_t e = i * size; better >= config->groups_kept && e < (i + 1) * size; e++) {
            g->scores[e] = masked;
        }
    }
}

/* Keeps the best K in descending order while experts come in ascending id, so that of equals the lower id
 * stays ahead. Dropped experts come after all others: they are taken only when fewer than K are left. */
static void select_top_k(const gate_token *g, int32_t *out_ids)
{
    const ep_gate_config *config = g->config;
    bool dropped[EP_TOP_K_MAX];
    uint32_t count = 0;
    for (uint32_t e = 0; e < config->experts; e++) {
        bool drop = is_dropped(g, e);
        uint32_t place = count;
        while (place > 0 &&
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

/* R1: softmax over the selected logits, in slot order. */
static void softmax_selected(const gate_token *g, const int32_t *ids, float *out_weights)
{
    uint32_t top_k = g->config->top_k;
    float max = g->logits[ids[0]];
    for (uint32_t k = 1; k < top_k; k++) { /* with noise the first slot need not hold the largest logit */
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

/* R2..R4: the unbiased score of each selected expert, then the family's normalisation and scaling. */
static void score_weights(const gate_token *g, const int32_t *ids, float *out_weights)
{
    const ep_gate_config *config = g->config;
    float sum = 0.0f;
    for (uint32_t k = 0; k < config->top_k; k++) {
        uint32_t e = (uint32_t)ids[k];
        out_weights[k] = config->family == EP_GATE_R4 ? ep_sigmoidf(g->logits[e]) : probability(g, e);
        sum = sum + out_weights[k];
    }
    if (config->renormalise) {
        float divisor = config->family == EP_GATE_R2 ? sum : sum + config->epsilon;
        for (uint32_t k = 0; k < config->top_k; k++) {
            out_weights[k] = out_weights[k] / divisor;
        }
    }
    /* The R3 reference code scales only what it has not normalised. */
    if (config->family == EP_GATE_R4 || (config->family == EP_GATE_R3 && !config->renormalise)) {
        for (uint32_t k = 0; k < config->top_k; k++) {
            out_weights[k] = out_weights[k] * config->scaling_factor;
        }
    }
}

static void route_token(gate_token *g, int32_t *out_ids, float *out_weights)
{
    const ep_gate_config *config = g->config;
    make_scores(g);
    if ((config->family == EP_GATE_R3 || config->family == EP_GATE_R4) &&
        config->groups_kept < config->groups) {
        mask_groups(g);
    }
    select_top_k(g, out_ids);
    if (config->family == EP_GATE_R1) {
        softmax_selected(g, out_ids, out_weights);
    } else {
        score_weights(g, out_ids, out_weights);
    }
    for (uint32_t k = 0; config->weight_func != NULL && k < config->top_k; k++) {
        out_weights[k] =
            config->weight_func(config->weight_func_arg, g->token, k, (uint32_t)out_ids[k], out_weights[k]);
    }
}

static EP_FLOAT_WORK void route(const ep_gate_config *config, uint32_t tokens, const float *logits, float *scores, int32_t *out_ids,
                                float *out_weights)
{
    for (uint32_t t = 0; t < tokens; t++) {
        gate_token g = {
            .config = config, .logits = logits + (size_t)t * config->experts, .scores = scores, .token = t};
        route_token(&g, out_ids + (size_t)t * config->top_k, out_weights + (size_t)t * config->top_k);
    }
}

ep_err ep_gate(const ep_gate_config *config, uint32_t tokens, const float *logits, int32_t *out_ids,
               float *out_weights, ep_error *out_error)
{
    ep_err err = ep_gate_check_config(config, out_error);
    if (err == EP_OK) {
        err = ep_gate_check_logits(config, tokens, logits, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    float on_stack[STACK_EXPERTS];
    float *scores = on_stack;
    if (config->experts > STACK_EXPERTS) {
        scores = malloc(config->experts * sizeof(*scores));
        if (scores == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to route over %u experts",
                                config->experts);
        }
    }
    const ep_float_env env = ep_float_env_begin();
    route(config, tokens, logits, scores, out_ids, out_weights);
    ep_float_env_end(env);
    if (scores != on_stack) {
        free(scores);
    }
    return EP_OK;
}
