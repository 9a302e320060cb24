/* SPDX-License-Identifier: Apache-2.0 */
#include "case_draw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

int case_random(uint64_t *state, int low, int high)
{
    return low + (int)(next(state) % (uint64_t)(high - low + 1));
}

static float random_value(uint64_t *state)
{
    return (float)(case_random(state, -4096, 4096)) / 1024.0f;
}

static float *values(uint64_t *state, const oracle_case *c, size_t n)
{
    float *data = malloc(sizeof(float) * (n + 1));
    for (size_t i = 0; i < n; i++) {
        data[i] = oracle_round(c->dtype, random_value(state) + random_value(state) * 0.001f);
    }
    return data;
}

/* A zero row now and then, and one with an infinity where rows are quantised. */
static void odd_rows(uint64_t *state, const oracle_case *c, oracle_batch *batch)
{
    for (int t = 0; t < batch->tokens; t++) {
        int kind = case_random(state, 0, 19);
        if (kind == 0) {
            memset(batch->x + t * c->hidden, 0, sizeof(float) * (size_t)c->hidden);
        } else if (kind == 1 && (c->quantise || c->quantise_back)) {
            batch->x[t * c->hidden + case_random(state, 0, c->hidden - 1)] = INFINITY;
        }
    }
}

static void draw_ids(uint64_t *state, const oracle_case *c, oracle_batch *batch)
{
    int total = c->experts + c->zero + c->copy + c->constant;
    for (int t = 0; t < batch->tokens; t++) {
        int32_t *ids = batch->ids + t * c->top_k;
        for (int k = 0; k < c->top_k; k++) {
            bool again = true;
            while (again) {
                ids[k] = case_random(state, 0, 9) == 0 ? (case_random(state, 0, 1) ? -1 : total)
                                                       : case_random(state, 0, total - 1);
                again = false;
                for (int j = 0; j < k; j++) {
                    again = again || (ids[j] == ids[k] && ids[k] >= 0 && ids[k] < c->experts);
                }
            }
        }
    }
}

void case_draw_batch(uint64_t *state, const oracle_case *c, int tokens, oracle_batch *batch)
{
    size_t slots = (size_t)tokens * (size_t)c->top_k;
    size_t rows = (size_t)tokens * (size_t)c->hidden;
    memset(batch, 0, sizeof(*batch));
    batch->tokens = tokens;
    batch->x = values(state, c, rows);
    batch->ids = malloc(sizeof(int32_t) * (slots + 1));
    batch->weights = malloc(sizeof(float) * (slots + 1));
    for (size_t i = 0; i < slots; i++) {
        batch->weights[i] = random_value(state);
    }
    draw_ids(state, c, batch);
    odd_rows(state, c, batch);
    int mask = case_random(state, 0, 3);
    if (mask == 1) {
        batch->mask_tokens = malloc((size_t)tokens + 1);
        for (int t = 0; t < tokens; t++) {
            batch->mask_tokens[t] = case_random(state, 0, 3) > 0;
        }
    } else if (mask == 2) {
        batch->mask_slots = malloc(slots + 1);
        for (size_t i = 0; i < slots; i++) {
            batch->mask_slots[i] = case_random(state, 0, 2) > 0;
        }
    }
    if (c->gamma != NULL) {
        batch->residual = values(state, c, rows);
    }
}

static void draw_shape(uint64_t *state, const case_limits *limits, oracle_case *c)
{
    int drawn = case_random(state, 1, limits->ranks_max);
    c->ranks = limits->ranks > 0 ? limits->ranks : drawn;
    c->shared_ranks = case_random(state, 0, 2) == 0 ? case_random(state, 0, c->ranks - 1) : 0;
    c->shared_experts = c->shared_ranks > 0 ? case_random(state, 1, c->shared_ranks) : 0;
    c->experts = case_random(state, 1, 20);
    c->hidden = case_random(state, 1, limits->hidden_max);
    if (case_random(state, 0, 2) == 0) {
        c->zero = case_random(state, 0, 3);
        c->copy = case_random(state, 0, 3);
        c->constant = case_random(state, 0, 2);
    }
    c->linear = case_random(state, 0, 1);
    int most = c->experts < 10 ? c->experts : 10;
    c->top_k = case_random(state, 1, most);
    c->dtype = (oracle_dtype)case_random(state, 0, 2);
    c->quantise = case_random(state, 0, 2) == 0;
    c->quantise_back = case_random(state, 0, 2) == 0;
    c->identity = case_random(state, 0, 2) == 0;
}

void case_draw(uint64_t seed, const case_limits *limits, oracle_case *c)
{
    uint64_t state = seed;
    memset(c, 0, sizeof(*c));
    draw_shape(&state, limits, c);
    size_t hidden = (size_t)c->hidden;
    if (c->quantise && case_random(&state, 0, 1)) {
        size_t n = (size_t)(c->experts + c->shared_experts) * hidden;
        c->smooth = malloc(sizeof(float) * n);
        for (size_t i = 0; i < n; i++) {
            c->smooth[i] = random_value(&state);
        }
    }
    c->alpha1 = values(&state, c, (size_t)c->constant * hidden);
    c->alpha2 = values(&state, c, (size_t)c->constant * hidden);
    c->v = values(&state, c, (size_t)c->constant * hidden);
    if (case_random(&state, 0, 3) == 0) {
        c->gamma = values(&state, c, hidden);
        c->eps = 1e-5f;
    }
    bool shared_x = c->shared_ranks == 0 && case_random(&state, 0, 2) == 0;
    for (int r = 0; r < c->ranks; r++) {
        int tokens =
            case_random(&state, 0, 4) == 0 ? 0 : case_random(&state, 0, limits->tokens_max);
        case_draw_batch(&state, c, tokens, &c->batch[r]);
        if (shared_x) {
            c->batch[r].shared_x = values(&state, c, (size_t)tokens * hidden);
        }
    }
}

bool case_is_approximate(const oracle_case *c)
{
    return c->constant > 0 && !c->linear;
}

void case_draw_unmasked(uint64_t *state, const oracle_case *c, int tokens, oracle_batch *out_batch)
{
    case_draw_batch(state, c, tokens, out_batch);
    free(out_batch->mask_tokens);
    free(out_batch->mask_slots);
    out_batch->mask_tokens = NULL;
    out_batch->mask_slots = NULL;
}

void case_free_batch(oracle_batch *batch)
{
    free(batch->x);
    free(batch->ids);
    free(batch->weights);
    free(batch->mask_tokens);
    free(batch->mask_slots);
    free(batch->shared_x);
    free(batch->residual);
    memset(batch, 0, sizeof(*batch));
}

void case_free(oracle_case *c)
{
    for (int r = 0; r < c->ranks; r++) {
        case_free_batch(&c->batch[r]);
    }
    free(c->smooth);
    free(c->alpha1);
    free(c->alpha2);
    free(c->v);
    free(c->gamma);
}
