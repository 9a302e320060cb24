/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_expand_idx CASES [SEED]: the operators with expand_idx, over drawn cases, some by hierarchy
 * on two hosts: every output bit for bit as with assist_info_for_combine, and as the oracle's; two
 * of them under way at once. The vendor's example of these operators with its arguments. Then what
 * does not belong together, by name, with a group that goes on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_expect.h"
#include "rank_threads.h"

#define RANKS_MAX 6
#define RANKS 3

static bool failed;

/* Every slot an expert's: each gets as many rows of a batch, where that goes. */
static void draw_plain(uint64_t *state, const oracle_case *c, int tokens, oracle_batch *b)
{
    case_draw_unmasked(state, c, tokens, b);
    for (int i = 0; i < tokens * c->top_k; i++) {
        b->ids[i] = (i / c->top_k + i % c->top_k * 5) % c->experts;
    }
}

/* ---- the same bits ---- */

typedef struct world {
    const oracle_case *c;
    uint64_t seed;
    bool by_host;
} world;

static bool begin_and_finish(rank_call calls[2], ep_group *group, ep_error *error)
{
    return rank_call_begin_dispatch(&calls[0], group, RANK_FINISH, error) == EP_OK &&
           rank_call_begin_dispatch(&calls[1], group, RANK_POLL, error) == EP_OK &&
           rank_call_finish(&calls[0], error) == EP_OK &&
           rank_call_finish(&calls[1], error) == EP_OK;
}

static bool play(void *arg, uint32_t rank, ep_group *group)
{
    const world *w = arg;
    const double tolerance = case_is_approximate(w->c) ? 0.02 : 0;
    rank_call calls[3]; /* with assist_info_for_combine, and two with expand_idx */
    ep_error error = {.text = ""};
    for (int i = 0; i < 3; i++) {
        rank_call_init(&calls[i], w->c, rank, 0);
        calls[i].params.comm_alg = w->by_host ? "hierarchy" : "";
        if (i > 0) {
            rank_call_use_index(&calls[i]);
        }
    }
    bool good = rank_call_round(&calls[0], group, &error) &&
                begin_and_finish(&calls[1], group, &error) && rank_call_check_dispatch(&calls[1]) &&
                rank_call_check_dispatch(&calls[2]);
    for (int i = 2; i >= 1 && good; i--) { /* not in the order of the dispatches */
        rank_call_experts(&calls[i]);
        good = rank_call_combine(&calls[i], group, &error) == EP_OK &&
               rank_call_check_combine(&calls[i], tolerance) &&
               rank_call_same(&calls[0], &calls[i], "assist_info_for_combine, expand_idx");
    }
    if (!good) {
        fprintf(stderr, "rank %u, seed %llu: %s\n", rank, (unsigned long long)w->seed, error.text);
    }
    for (int i = 0; i < 3; i++) {
        rank_call_free(&calls[i]);
    }
    return good;
}

static bool test_same_bits(int cases, uint64_t seed)
{
    static const char *const hosts[RANKS_MAX] = {"a", "b", "a", "b", "b", "a"};
    const case_limits limits = {.ranks_max = RANKS_MAX, .tokens_max = 24, .hidden_max = 70};
    bool good = true;
    for (int i = 0; i < cases && good; i++) {
        oracle_case c;
        case_draw(seed + (uint64_t)i, &limits, &c);
        world w = {.c = &c, .seed = seed + (uint64_t)i, .by_host = i % 3 == 0 && c.smooth == NULL};
        good = rank_threads_play("loopback", w.by_host ? hosts : NULL, (uint32_t)c.ranks, 20000000,
                                 play, &w);
        case_free(&c);
    }
    return good;
}

/* ---- the vendor's example: 16 ranks, two of them for the shared expert, int8 with scales ---- */

#define EXAMPLE_BS 8
#define EXAMPLE_RANKS 16
#define EXAMPLE_SHARED_RANKS 2

static bool run_example(void *arg, uint32_t rank, ep_group *group)
{
    const int64_t global_bs = EXAMPLE_BS * EXAMPLE_RANKS;
    rank_call call;
    ep_error error;
    rank_call_init_rows(&call, arg, rank,
                        rank < EXAMPLE_SHARED_RANKS ? global_bs / EXAMPLE_SHARED_RANKS : global_bs);
    rank_call_use_index(&call);
    call.params.profile = EP_GROUP_A3;
    call.params.global_bs = global_bs;
    call.params.tp_world_size = 1;
    call.dispatch.expert_scales = ep_tensor_none();
    call.dispatch.expand_scales = ep_tensor_none();
    call.dispatch.performance_info = ep_tensor_none();
    bool good = rank_call_round(&call, group, &error);
    rank_call_free(&call);
    return good;
}

static bool test_example(uint64_t seed)
{
    oracle_case c = {.ranks = EXAMPLE_RANKS,
                     .shared_ranks = EXAMPLE_SHARED_RANKS,
                     .shared_experts = 1,
                     .experts = EXAMPLE_RANKS - EXAMPLE_SHARED_RANKS,
                     .top_k = 8,
                     .hidden = 7168,
                     .quantise = true,
                     .identity = true,
                     .undescaled = true,
                     .dtype = ORACLE_BF16};
    const int scales = (1 + c.experts) * c.hidden;
    c.smooth = malloc(sizeof(float) * (size_t)scales);
    for (int i = 0; i < scales; i++) {
        c.smooth[i] = (float)case_random(&seed, -2048, 2048) / 1024.0f;
    }
    for (int r = 0; r < c.ranks; r++) {
        draw_plain(&seed, &c, EXAMPLE_BS, &c.batch[r]);
    }
    bool good = rank_threads_play("loopback", NULL, EXAMPLE_RANKS, 60000000, run_example, &c);
    case_free(&c);
    return good;
}

/* ---- what does not belong together ---- */

static void draw(oracle_case *c, uint64_t seed)
{
    uint64_t state = seed;
    memset(c, 0, sizeof(*c));
    c->ranks = RANKS;
    c->experts = 2 * RANKS;
    c->top_k = 3;
    c->hidden = 16;
    c->dtype = ORACLE_BF16;
    for (int r = 0; r < RANKS; r++) {
        draw_plain(&state, c, 6, &c->batch[r]); /* each expert has three rows of each rank */
    }
}

static void expect_round(rank_call *call, uint32_t rank, ep_group *group)
{
    ep_error error = {.text = ""};
    EXPECT(rank_call_round(call, group, &error), "a good round fails: %s", error.text);
}

/* Both dispatches send the same frames, so each rank has what it asked for. */
static void mix_forms(rank_call *sealed, rank_call *indexed, uint32_t rank, ep_group *group)
{
    ep_error error = {.text = ""};
    rank_call *call = rank == 1 ? sealed : indexed;
    EXPECT(rank_call_dispatch(call, group, &error) == EP_OK, "%s", error.text);
    EXPECT(rank_call_check_dispatch(call), "each its own form");
    rank_call_experts(call);
    ep_err err = rank_call_combine(call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT,
                 "assist_info_for_combine (number of its dispatch) differs between ranks",
                 "absent (expand_idx) at rank 0, 2");
}

/* A plan is for one of the forms. */
static void change_form(const rank_call *sealed, const rank_call *indexed, uint32_t rank,
                        ep_group *group)
{
    ep_error error = {.text = ""};
    ep_err err =
        ep_moe_dispatch(group, sealed->dispatch_plan, &indexed->dispatch,
                        sealed->dispatch_workspace, sealed->dispatch_workspace_bytes, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "stale plan: expand_idx is not what the plan");
    err = ep_moe_combine(group, indexed->combine_plan, &sealed->combine, indexed->combine_workspace,
                         indexed->combine_workspace_bytes, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "stale plan: expand_idx is not what the plan");
}

/* One rank's tensors are altered between the two operators; all hear of it. */
static void alter(rank_call *call, uint32_t rank, ep_group *group, int32_t *at, int32_t by,
                  const char *says)
{
    ep_error error = {.text = ""};
    EXPECT(rank_call_dispatch(call, group, &error) == EP_OK, "%s", error.text);
    rank_call_experts(call);
    *at += rank == 1 ? by : 0;
    ep_err err = rank_call_combine(call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, says, rank == 1 ? "allowed" : "rank 1");
    *at -= rank == 1 ? by : 0;
    expect_round(call, rank, group);
}

/* Rank 1 says that one row of rank 0 was rank 2's, or the other way round: those two find out. */
static void alter_others(rank_call *call, uint32_t rank, ep_group *group)
{
    ep_error error = {.text = ""};
    int32_t *counts = call->dispatch.ep_recv_counts.data;
    EXPECT(rank_call_dispatch(call, group, &error) == EP_OK, "%s", error.text);
    rank_call_experts(call);
    if (rank == 1) { /* [local expert][source]: its own run only moves */
        counts[0]--;
        counts[1]--;
    }
    ep_err err = rank_call_combine(call, group, &error);
    if (rank == 0) {
        EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "no rank sent the row of token",
                     "ep_send_counts");
    } else if (rank == 2) {
        EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "rank 1 sent row 3 of its local expert 0",
                     "ep_send_counts");
    } else {
        EXPECT(err == EP_OK, "%s", error.text);
    }
    if (rank == 1) {
        counts[0]++;
        counts[1]++;
    }
    expect_round(call, rank, group);
}

static void meet_trouble(void *arg, uint32_t rank, ep_group *group)
{
    rank_call sealed;
    rank_call indexed;
    rank_call_init(&sealed, arg, rank, 0);
    rank_call_init(&indexed, arg, rank, 0);
    rank_call_use_index(&indexed);
    expect_round(&sealed, rank, group);
    expect_round(&indexed, rank, group);
    mix_forms(&sealed, &indexed, rank, group);
    expect_round(&sealed, rank, group);
    expect_round(&indexed, rank, group);
    change_form(&sealed, &indexed, rank, group);
    int32_t *index = indexed.dispatch.expand_idx.data;
    int32_t *ids = indexed.dispatch.expert_ids.data;
    int32_t *counts = indexed.dispatch.ep_recv_counts.data;
    alter(&indexed, rank, group, &index[4], 1, "expand_idx[4] is ");
    alter(&indexed, rank, group, &index[0], -1, "expand_idx[0] is -1: allowed 0");
    alter(&indexed, rank, group, &ids[0], 1, "expand_idx[");
    alter(&indexed, rank, group, &counts[1], 1, "ep_send_counts has 4 rows of this rank");
    alter(&indexed, rank, group, &counts[0], 99, "ep_send_counts[1] is");
    alter_others(&indexed, rank, group);
    rank_call_free(&sealed);
    rank_call_free(&indexed);
}

int main(int argc, char **argv)
{
    int cases = argc > 1 ? atoi(argv[1]) : 60;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    bool good = test_same_bits(cases, seed) && test_example(seed);
    oracle_case c;
    draw(&c, seed);
    rank_threads_run("loopback", RANKS, 20000000, meet_trouble, &c);
    case_free(&c);
    return good && !failed ? 0 : 1;
}
