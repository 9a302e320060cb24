/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The example in the vendor's documentation of dispatch_v2 and combine_v2, with its arguments: 16
 * ranks, a warm-up of one token, then 8 tokens of 7168 elements, top-8 of 32 experts, int8 with
 * smooth scales, one zero, copy and constant expert; its "expert" takes the integers for bf16. Each
 * output equals the oracle's. An older edition leaves out six ranks by elastic_info and gives a
 * group_tp of one rank with tp_world_size 1; it runs, too. Random numbers are ours.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define RANKS 16
#define LEFT 10 /* of them, after elastic_info */
#define BS 8
#define K 8
#define EXPERTS 32

static const int32_t expert_ids[BS * K] = {
    5,  7,  17, 4,  2,  6,  11, 16, /**/ 10, 12, 13, 15, 19, 4,  18, 1,
    19, 33, 1,  17, 9,  5,  0,  32, /**/ 19, 11, 17, 0,  10, 5,  7,  9,
    10, 16, 11, 17, 33, 8,  9,  3,  /**/ 12, 19, 5,  7,  1,  3,  18, 16,
    11, 9,  13, 16, 12, 33, 17, 14, /**/ 16, 4,  9,  5,  0,  10, 11, 17};
static int32_t elastic_info[4 + 2 * RANKS] = {1,  10, 0,  20, -1, 0,  1,  2,  -1, 3,  -1, 4,
                                              -1, 5,  6,  7,  -1, 8,  9,  -1, 1,  2,  3,  5,
                                              7,  9,  10, 11, 13, 14, -1, -1, -1, -1, -1, -1};

typedef struct example {
    oracle_case warm_up;
    oracle_case whole;
    oracle_case left; /* after elastic_info: the ids as the oracle counts them */
    ep_group_profile profile;
    bool older;
    pthread_barrier_t over;
} example;

/* A, since global_bs says how many rows may come. */
static int64_t capacity(const oracle_case *c, int64_t global_bs)
{
    int64_t local = c->experts / c->ranks;
    return global_bs * (local < K ? local : K);
}

static void init(const example *e, rank_call *call, const oracle_case *c, uint32_t rank,
                 int64_t global_bs)
{
    rank_call_init_rows(call, c, rank, capacity(c, global_bs));
    call->params.profile = e->profile;
    call->params.global_bs = global_bs;
    call->dispatch.expert_scales = ep_tensor_none();
    call->dispatch.expand_scales = ep_tensor_none();
    call->dispatch.performance_info = ep_tensor_none();
    call->combine.performance_info = ep_tensor_none();
}

static bool warm_up(const example *e, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error = {.text = ""};
    init(e, &call, &e->warm_up, rank, 16);
    call.params.shared_expert_num = 0;
    bool good =
        rank_call_dispatch(&call, group, &error) == EP_OK && rank_call_check_dispatch(&call);
    if (!good) {
        fprintf(stderr, "rank %u: warm-up: %s\n", rank, error.text);
    }
    rank_call_free(&call);
    return good;
}

/* rank: among those of the case. */
static bool run_example(const example *e, const oracle_case *c, uint32_t rank, ep_group *group,
                        ep_group *alone)
{
    rank_call call;
    ep_error error = {.text = ""};
    int32_t *tp_counts = malloc(sizeof(*tp_counts));
    init(e, &call, c, rank, BS * RANKS);
    call.memory[call.memory_count++] = tp_counts;
    call.params.shared_expert_num = 1; /* the default */
    memcpy(call.dispatch.expert_ids.data, expert_ids, sizeof(expert_ids));
    if (e->older) {
        call.params.moe_expert_num = EXPERTS;
        call.params.tp_world_size = 1;
        call.params.group_tp = alone;
        call.params.elastic_info = ep_tensor_1d(elastic_info, EP_DTYPE_I32, 4 + 2 * RANKS);
        call.dispatch.scales = ep_tensor_2d(c->smooth, EP_DTYPE_F32, EXPERTS, c->hidden);
        call.dispatch.tp_recv_counts = ep_tensor_1d(tp_counts, EP_DTYPE_I32, 1);
        call.combine.tp_send_counts = call.dispatch.tp_recv_counts;
    }
    bool good = rank_call_round(&call, group, &error);
    rank_call_free(&call);
    return good;
}

static bool run_rank(void *arg, uint32_t rank, ep_group *group)
{
    example *e = arg;
    ep_group *alone = NULL;
    bool good = true;
    if (e->older) {
        char name[64];
        rank_group_name(name, sizeof(name));
        alone = rank_group_create("loopback", name, 1, 0, 20000000);
        good = alone != NULL;
    }
    good = good && warm_up(e, rank, group);
    const int32_t local = e->older ? elastic_info[4 + rank] : (int32_t)rank;
    if (good && local >= 0) {
        good = run_example(e, e->older ? &e->left : &e->whole, (uint32_t)local, group, alone);
    }
    pthread_barrier_wait(&e->over); /* who was left out stays to the end */
    ep_group_destroy(alone);
    return good;
}

static void draw_batches(uint64_t *state, oracle_case *c, int tokens, const int32_t *ids)
{
    for (int r = 0; r < c->ranks; r++) {
        oracle_batch *b = &c->batch[r];
        case_draw_unmasked(state, c, tokens, b);
        for (int i = 0; i < tokens * K; i++) { /* special experts follow the case's own */
            b->ids[i] = ids == NULL         ? i
                        : ids[i] >= EXPERTS ? ids[i] - EXPERTS + c->experts
                                            : ids[i];
        }
    }
}

static oracle_case example_case(uint64_t *state, int ranks, int experts)
{
    oracle_case c = {.ranks = ranks,
                     .experts = experts,
                     .top_k = K,
                     .hidden = 7168,
                     .zero = 1,
                     .copy = 1,
                     .constant = 1,
                     .quantise = true,
                     .identity = true,
                     .undescaled = true,
                     .dtype = ORACLE_BF16};
    float **rows[] = {&c.alpha1, &c.alpha2, &c.v};
    c.smooth = malloc(sizeof(float) * EXPERTS * (size_t)c.hidden);
    for (int i = 0; i < EXPERTS * c.hidden; i++) {
        c.smooth[i] = (float)case_random(state, -2048, 2048) / 1024.0f;
    }
    for (size_t r = 0; r < 3; r++) {
        *rows[r] = malloc(sizeof(float) * (size_t)c.hidden);
        for (int h = 0; h < c.hidden; h++) {
            (*rows[r])[h] = oracle_round(c.dtype, (float)case_random(state, -1024, 1024) / 1024.0f);
        }
    }
    draw_batches(state, &c, BS, expert_ids);
    return c;
}

static bool run(ep_group_profile profile, bool older)
{
    uint64_t state = 11;
    example e = {.profile = profile, .older = older};
    e.warm_up = (oracle_case){.ranks = RANKS,
                              .experts = EXPERTS,
                              .top_k = K,
                              .hidden = 7168,
                              .quantise = true,
                              .dtype = ORACLE_BF16};
    draw_batches(&state, &e.warm_up, 1, NULL);
    e.whole = example_case(&state, RANKS, EXPERTS);
    e.left = example_case(&state, LEFT, elastic_info[3]);
    pthread_barrier_init(&e.over, NULL, RANKS);
    const bool good = rank_threads_play("loopback", NULL, RANKS, 60000000, run_rank, &e);
    pthread_barrier_destroy(&e.over);
    case_free(&e.warm_up);
    case_free(&e.whole);
    case_free(&e.left);
    return good;
}

int main(void)
{
    bool good = run(EP_GROUP_A3, false);
    good = run(EP_GROUP_NATIVE, false) && good;
    good = run(EP_GROUP_NATIVE, true) && good;
    return good ? 0 : 1;
}
