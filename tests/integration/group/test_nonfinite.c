/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NaN and Inf in x and in the experts' rows of a group, by each policy: repaired ones give the bits
 * that the oracle gives for repaired values; refused ones are named, by the dispatch to all ranks.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define RANKS 3
#define HIDDEN 24
#define TOKENS 6
#define SPOILT 4 /* the token of rank 1 whose x, and the token of rank 2 whose rows are spoilt */

enum { PASS, REJECT, ZERO, MEAN };

typedef struct world {
    const oracle_case *c; /* with what the policy makes of it */
    int policy;
} world;

static float mean_of_others(const oracle_case *c, const float *row)
{
    double sum = 0;
    for (int h = 0; h < c->hidden; h++) {
        sum += h == 5 || h == 9 ? 0 : (double)row[h];
    }
    return oracle_round(c->dtype, (float)(sum / (c->hidden - 2)));
}

/* What stands at elements 5 and 9 in the end. */
static float repaired(const world *w, const float *row)
{
    return w->policy == MEAN ? mean_of_others(w->c, row) : 0.0f;
}

static void spoil(ep_tensor *rows, int64_t row)
{
    float *at = (float *)rows->data + row * rows->shape[1];
    at[5] = NAN;
    at[9] = -INFINITY;
}

/* Rows of this rank's experts for the spoilt token of rank 2. */
static void spoil_rows(rank_call *call)
{
    const int32_t *triples = call->dispatch.assist_info_for_combine.data;
    int32_t rows = rank_call_rows_received(call);
    for (int32_t r = 0; r < rows; r++) {
        if (triples[3 * r] == 2 && triples[3 * r + 1] == SPOILT) {
            spoil(&call->combine.expand_x, r);
        }
    }
}

static bool play(const world *w, rank_call *call, uint32_t rank, ep_group *group, ep_error *error)
{
    call->dispatch.nan_policy = w->policy;
    call->combine.nan_policy = w->policy;
    if (rank == 1) {
        spoil(&call->dispatch.x, SPOILT);
    }
    ep_err err = rank_call_dispatch(call, group, error);
    if (w->policy == REJECT) { /* told to all, named where it is */
        return err == EP_ERR_INVALID_ARGUMENT &&
               strstr(error->text, "x is nan at token 4, element 5") != NULL;
    }
    if (err != EP_OK || !rank_call_check_dispatch(call)) {
        return false;
    }
    rank_call_experts(call);
    spoil_rows(call);
    return rank_call_combine(call, group, error) == EP_OK && rank_call_check_combine(call, 0);
}

/* x is good, rows are not: who has the token finds it. */
static bool play_refused_rows(rank_call *call, uint32_t rank, ep_group *group, ep_error *error)
{
    call->combine.nan_policy = REJECT;
    if (rank_call_dispatch(call, group, error) != EP_OK) {
        return false;
    }
    rank_call_experts(call);
    spoil_rows(call);
    ep_err err = rank_call_combine(call, group, error);
    if (rank != 2) {
        return err == EP_OK && rank_call_check_combine(call, 0);
    }
    return err == EP_ERR_OUT_OF_RANGE &&
           strstr(error->text, "row of token 4, slot 0 is nan at element 5") != NULL;
}

static bool run_rank(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    rank_call call;
    ep_error error = {.text = ""};
    rank_call_init(&call, w->c, rank, 0);
    bool good = w->policy < 0 ? play_refused_rows(&call, rank, group, &error)
                              : play(w, &call, rank, group, &error);
    if (!good) {
        fprintf(stderr, "policy %d, rank %u: %s\n", w->policy, rank, error.text);
    }
    rank_call_free(&call);
    return good;
}

/* Experts return their rows, so that repaired values of x and of rows are the same. */
static void draw(world *w, oracle_case *c, bool quantise)
{
    uint64_t state = 3;
    *c = (oracle_case){.ranks = RANKS,
                       .experts = 7,
                       .top_k = 3,
                       .hidden = HIDDEN,
                       .quantise = quantise,
                       .identity = true,
                       .dtype = ORACLE_F32};
    for (int r = 0; r < RANKS; r++) {
        oracle_batch *b = &c->batch[r];
        case_draw_unmasked(&state, c, TOKENS, b);
        for (int i = 0; i < TOKENS * HIDDEN; i++) {
            b->x[i] = (float)case_random(&state, -100, 100) / 8.0f;
        }
        for (int i = 0; i < TOKENS * c->top_k; i++) {
            b->ids[i] = (i + i / c->top_k) % c->experts;
        }
        float *row = b->x + SPOILT * HIDDEN;
        float value = w->policy >= 0 ? repaired(w, row) : row[5];
        row[5] = value;
        row[9] = value;
    }
}

static bool run(int policy, bool quantise)
{
    oracle_case c;
    world w = {.c = &c, .policy = policy};
    draw(&w, &c, quantise);
    const bool good = rank_threads_play("loopback", NULL, RANKS, 20000000, run_rank, &w);
    case_free(&c);
    return good;
}

int main(void)
{
    bool good = run(REJECT, false);
    good = run(ZERO, false) && good;
    good = run(MEAN, false) && good;
    good = run(-1, false) && good;
    good = run(REJECT, true) && good;
    good = run(ZERO, true) && good;
    return good ? 0 : 1;
}
