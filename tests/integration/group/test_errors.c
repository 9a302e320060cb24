/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes wrong in a group, by name: calls without a plan, stale plans, small buffers, another
 * dispatch's assist info, ranks that disagree, bad values on one rank, ranks that leave or stay
 * away; and that the group goes on wherever it says so.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case_draw.h"
#include "group/group_call.h"
#include "rank_expect.h"
#include "rank_threads.h"

#define RANKS 3

static bool failed;

/* A plain case of three ranks with two or three experts each. */
static void draw(oracle_case *c, uint64_t seed)
{
    uint64_t state = seed;
    memset(c, 0, sizeof(*c));
    c->ranks = RANKS;
    c->experts = 7;
    c->top_k = 3;
    c->hidden = 16;
    c->dtype = ORACLE_BF16;
    for (int r = 0; r < RANKS; r++) {
        case_draw_batch(&state, c, 5 + r, &c->batch[r]);
    }
}

static void expect_works(rank_call *call, uint32_t rank, ep_group *group)
{
    ep_error error = {.text = ""};
    EXPECT(rank_call_round(call, group, &error), "a good round fails: %s", error.text);
}

/* ---- plans, workspaces, buffers ---- */

static void plans(void *arg, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, arg, rank, 0);
    ep_err err = ep_moe_dispatch(group, NULL, &call.dispatch, NULL, 0, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "ep_moe_dispatch_prepare");
    err = ep_moe_combine(group, NULL, &call.combine, NULL, 0, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "ep_moe_combine_prepare");
    expect_works(&call, rank, group);

    err = ep_moe_combine(group, call.dispatch_plan, &call.combine, call.combine_workspace,
                         call.combine_workspace_bytes, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "stale plan", "ep_moe_dispatch");
    ep_moe_dispatch_args changed = call.dispatch;
    changed.expert_token_nums_type = 0;
    err = ep_moe_dispatch(group, call.dispatch_plan, &changed, call.dispatch_workspace,
                          call.dispatch_workspace_bytes, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION,
                 "expert_token_nums_type is 0, the plan was prepared for 1");
    changed = call.dispatch;
    changed.x.shape[0]--;
    changed.expert_ids.shape[0]--;
    changed.expert_scales.shape[0]--;
    if (changed.x_active_mask.rank != 0) {
        changed.x_active_mask.shape[0]--;
    }
    err = ep_moe_dispatch(group, call.dispatch_plan, &changed, call.dispatch_workspace,
                          call.dispatch_workspace_bytes, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "stale plan: BS is");

    char needed[64];
    snprintf(needed, sizeof(needed), "needs %zu = ", call.dispatch_workspace_bytes);
    err = ep_moe_dispatch(group, call.dispatch_plan, &call.dispatch, call.dispatch_workspace,
                          call.dispatch_workspace_bytes - 1, &error);
    EXPECT_ERROR(err, EP_ERR_RESOURCE_EXHAUSTED, needed, "moe_expert_num");
    snprintf(needed, sizeof(needed), "needs %zu = ", call.combine_workspace_bytes);
    err =
        ep_moe_combine(group, call.combine_plan, &call.combine, call.combine_workspace, 0, &error);
    EXPECT_ERROR(err, EP_ERR_RESOURCE_EXHAUSTED, needed, ", each to 64");

    changed = call.dispatch;
    changed.expert_token_nums.shape[0] = 0;
    ep_group_plan *plan;
    size_t bytes;
    err = ep_moe_dispatch_prepare(group, &changed, &bytes, &plan, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "expert_token_nums has 0 entries", "bytes");
    expect_works(&call, rank, group);
    rank_call_free(&call);
}

/* A plan of one membership is refused in another of the same name. */
static void old_membership(uint32_t rank, oracle_case *c)
{
    oracle_case alone;
    rank_call call;
    ep_error error;
    char name[64];
    uint64_t state = 5;
    memset(&alone, 0, sizeof(alone));
    alone = *c;
    alone.ranks = 1;
    memset(alone.batch, 0, sizeof(alone.batch));
    case_draw_batch(&state, &alone, 4, &alone.batch[0]);
    rank_group_name(name, sizeof(name));
    ep_group *first = rank_group_create("loopback", name, 1, 0, 1000000);
    ep_group *second = rank_group_create("loopback", name, 1, 0, 1000000);
    rank_call_init(&call, &alone, 0, 0);
    expect_works(&call, rank, first);
    ep_err err = ep_moe_dispatch(second, call.dispatch_plan, &call.dispatch,
                                 call.dispatch_workspace, call.dispatch_workspace_bytes, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "stale plan: it was prepared in membership");
    ep_group_plan_destroy(call.combine_plan);
    call.combine_plan = NULL;
    err = rank_call_combine(&call, second, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "assist_info_for_combine is of membership");
    rank_call_free(&call);
    ep_group_destroy(first);
    ep_group_destroy(second);
    case_free_batch(&alone.batch[0]);
}

static void small_expand_x(void *arg, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, arg, rank, 0);
    if (rank == 1) {
        call.dispatch.expand_x.shape[0]--;
    }
    ep_err err = rank_call_dispatch(&call, group, &error);
    char needed[96];
    snprintf(needed, sizeof(needed), "needs %ld, %ld bytes = rows received * H * element",
             (long)call.rows_max, (long)call.rows_max * 32);
    if (rank == 1) {
        EXPECT_ERROR(err, EP_ERR_RESOURCE_EXHAUSTED, needed, "min(");
        call.dispatch.expand_x.shape[0]++;
    } else {
        EXPECT(err == EP_OK, "%s", error.text);
    }
    expect_works(&call, rank, group);
    rank_call_free(&call);
}

/* ---- pairs of dispatch and combine ---- */

static void pairs(void *arg, uint32_t rank, ep_group *group)
{
    oracle_case *cases = arg;
    rank_call first;
    rank_call second;
    ep_error error;
    rank_call_init(&first, &cases[0], rank, 0);
    rank_call_init(&second, &cases[1], rank, 0);
    EXPECT(rank_call_dispatch(&first, group, &error) == EP_OK, "%s", error.text);
    EXPECT(rank_call_dispatch(&second, group, &error) == EP_OK, "%s", error.text);
    rank_call_experts(&first);
    rank_call_experts(&second);
    /* Two dispatches under way, each with its own combine, in any order. */
    EXPECT(rank_call_combine(&second, group, &error) == EP_OK &&
               rank_call_check_combine(&second, 0),
           "%s", error.text);
    EXPECT(rank_call_combine(&first, group, &error) == EP_OK && rank_call_check_combine(&first, 0),
           "%s", error.text);

    ep_tensor right = first.combine.assist_info_for_combine;
    first.combine.assist_info_for_combine = second.combine.assist_info_for_combine;
    ep_err err = rank_call_combine(&first, group, &error);
    EXPECT_ERROR(err, EP_ERR_FAILED_PRECONDITION, "assist_info_for_combine is of another dispatch");
    first.combine.assist_info_for_combine = right;
    EXPECT(rank_call_combine(&first, group, &error) == EP_OK && rank_call_check_combine(&first, 0),
           "%s", error.text);

    /* One rank alone combines an earlier dispatch of the very same ids. */
    rank_call again;
    rank_call_init(&again, &cases[0], rank, 0);
    EXPECT(rank_call_dispatch(&again, group, &error) == EP_OK, "%s", error.text);
    rank_call_experts(&again);
    err = rank_call_combine(rank == 2 ? &first : &again, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "assist_info_for_combine", "at rank 0-1;",
                 "at rank 2");
    EXPECT(rank_call_combine(&again, group, &error) == EP_OK && rank_call_check_combine(&again, 0),
           "%s", error.text);

    ((int32_t *)again.combine.assist_info_for_combine.data)[1]++;
    err = rank_call_combine(&again, group, &error);
    EXPECT(cases[0].batch[0].tokens == 0 || err == EP_ERR_INVALID_ARGUMENT, "%s", error.text);
    rank_call_free(&first);
    rank_call_free(&second);
    rank_call_free(&again);
}

/* ---- disagreement ---- */

enum {
    CASE_PLAIN,
    CASE_SHARED,
    CASE_SHARED_TWO,
    CASE_NORM,
    CASE_QUANT,
    CASE_A3,
    CASE_THREE,
    CASES
};

typedef struct disagreement {
    const char *name;                /* in the text */
    void (*change)(rank_call *call); /* at rank 1 */
    bool in_combine;
    int base;  /* case of all ranks */
    int other; /* rank 1's when not CASE_PLAIN */
} disagreement;

#define CHANGE(function, statement)                                                                \
    static void function(rank_call *call)                                                          \
    {                                                                                              \
        statement;                                                                                 \
    }
CHANGE(change_nothing, (void)call)
CHANGE(change_profile, call->params.profile = EP_GROUP_NATIVE)
CHANGE(change_rule, call->params.const_rule = EP_GROUP_CONST_LINEAR)
CHANGE(change_shared, call->params.shared_expert_num = 2)
CHANGE(change_global_bs, call->params.global_bs = 3 * 100)
CHANGE(change_zero, call->params.zero_expert_num = 1)
CHANGE(change_copy, call->params.copy_expert_num = 1)
CHANGE(change_const, call->params.const_expert_num = 1)
CHANGE(change_comm, call->params.comm_alg = "hierarchy")
CHANGE(change_duplicates, call->params.allow_duplicates = true)
CHANGE(change_nums, call->dispatch.expert_token_nums_type = 0)
CHANGE(change_weights, call->dispatch.expert_scales = ep_tensor_none();
       call->dispatch.expand_scales = ep_tensor_none())
CHANGE(change_hidden, call->dispatch.x.shape[1] = 15; call->dispatch.expand_x.shape[1] = 15)
CHANGE(change_dtype, call->dispatch.x.dtype = EP_DTYPE_F16;
       call->dispatch.expand_x.dtype = EP_DTYPE_F16)
CHANGE(change_back, call->combine.comm_quant_mode = 2)
CHANGE(change_shared_x, call->combine.shared_expert_x = call->combine.ori_x)
CHANGE(change_eps, call->norm.eps *= 2)

static void change_experts(rank_call *call)
{
    static int64_t nums[3];
    static int32_t counts[9];
    call->params.moe_expert_num = 8;
    call->dispatch.expert_token_nums = ep_tensor_1d(nums, EP_DTYPE_I64, 3);
    call->dispatch.ep_recv_counts = ep_tensor_1d(counts, EP_DTYPE_I32, 9);
}

static void change_quant(rank_call *call)
{
    ep_tensor *out = &call->dispatch.expand_x;
    call->dispatch.quant_mode = 2;
    *out = ep_tensor_2d(out->data, EP_DTYPE_I8, out->shape[0], out->shape[1]);
}

static void change_top_k(rank_call *call)
{
    call->dispatch.expert_ids.shape[1] = 2;
    call->dispatch.expert_scales.shape[1] = 2;
    call->dispatch.x_active_mask = ep_tensor_none();
}

static void change_ids(rank_call *call)
{
    static int64_t wide[64];
    const ep_tensor *ids = &call->dispatch.expert_ids;
    for (int64_t i = 0; i < ids->shape[0] * ids->shape[1]; i++) {
        wide[i] = ((const int32_t *)ids->data)[i];
    }
    call->dispatch.expert_ids = ep_tensor_2d(wide, EP_DTYPE_I64, ids->shape[0], ids->shape[1]);
}

static void change_scales(rank_call *call)
{
    static float scales[7 * 16];
    call->dispatch.scales = ep_tensor_2d(scales, EP_DTYPE_F32, call->c->experts, call->c->hidden);
}

static void change_elastic(rank_call *call)
{
    static int32_t all[4 + 2 * RANKS] = {1, RANKS, 0, 7, 0, 1, 2, 0, 1, 2};
    call->params.elastic_info = ep_tensor_1d(all, EP_DTYPE_I32, 4 + 2 * RANKS);
}

static char pair_name[64];
static ep_group *pair_of_rank_1;

static void change_tp(rank_call *call)
{
    static int32_t counts[2 * RANKS];
    static int32_t rows[2];
    call->params.group_tp = pair_of_rank_1;
    call->params.tp_world_size = 2;
    call->params.tp_rank_id = 1;
    call->dispatch.ep_recv_counts = ep_tensor_1d(counts, EP_DTYPE_I32, 2 * RANKS);
    call->dispatch.tp_recv_counts = ep_tensor_1d(rows, EP_DTYPE_I32, 2);
}

static const disagreement disagreements[] = {
    {"profile", change_profile, false, CASE_A3, 0},
    {"const_rule", change_rule, false, 0, 0},
    {"moe_expert_num", change_experts, false, 0, 0},
    {"shared_expert_num", change_shared, false, 0, 0},
    {"shared_expert_rank_num", change_nothing, false, CASE_SHARED, CASE_SHARED_TWO},
    {"tp_world_size", change_tp, false, CASE_THREE, 0},
    {"global_bs", change_global_bs, false, 0, 0},
    {"zero_expert_num", change_zero, false, 0, 0},
    {"copy_expert_num", change_copy, false, 0, 0},
    {"const_expert_num", change_const, false, 0, 0},
    {"comm_alg", change_comm, false, 0, 0},
    {"allow_duplicates", change_duplicates, false, 0, 0},
    {"expert_token_nums_type", change_nums, false, 0, 0},
    {"scales", change_scales, false, CASE_QUANT, 0},
    {"expert_scales", change_weights, false, 0, 0},
    {"quant_mode", change_quant, false, 0, 0},
    {"H", change_hidden, false, 0, 0},
    {"K", change_top_k, false, 0, 0},
    {"the type of x", change_dtype, false, 0, 0},
    {"the type of expert_ids", change_ids, false, 0, 0},
    {"comm_quant_mode", change_back, true, 0, 0},
    {"shared_expert_x", change_shared_x, true, 0, 0},
    {"norm eps", change_eps, true, CASE_NORM, 0},
};
/* In a group of its own: no later call of the group succeeds. */
static const disagreement elastic_disagreement = {"elastic_info", change_elastic, false, 0, 0};

/* Compared too, but with one value allowed, or met elsewhere in this file. */
static const char *const others_compared[] = {
    "the operator", "ep_world_size",   "expert_shard_type",
    "out_dtype",    "group_list_type", "assist_info_for_combine (number of its dispatch)",
    "elastic_info"};

/* Whoever adds a parameter that ranks compare adds it to one of the tables. */
static void expect_every_parameter(uint32_t rank)
{
    for (uint32_t i = 0; i < EP_GROUP_CALL_COMPARED; i++) {
        const char *name = ep_group_call_field_name(i);
        bool found = false;
        for (size_t d = 0; d < sizeof(disagreements) / sizeof(disagreements[0]); d++) {
            found = found || strcmp(disagreements[d].name, name) == 0;
        }
        for (size_t d = 0; d < sizeof(others_compared) / sizeof(others_compared[0]); d++) {
            found = found || strcmp(others_compared[d], name) == 0;
        }
        EXPECT(found, "no ranks disagree on %s in this test", name);
    }
}

static void init_disagreeing(rank_call *call, const oracle_case *cases, const disagreement *d,
                             uint32_t rank)
{
    rank_call_init(call, &cases[rank == 1 && d->other != 0 ? d->other : d->base], rank, 64);
    if (d->base == CASE_A3) { /* what the vendor sends no weights for, and does not measure */
        call->params.profile = EP_GROUP_A3;
        call->dispatch.expert_scales = ep_tensor_none();
        call->dispatch.expand_scales = ep_tensor_none();
        call->dispatch.performance_info = ep_tensor_none();
    }
}

static void disagree_on(const oracle_case *cases, const disagreement *d, uint32_t rank,
                        ep_group *group)
{
    rank_call call;
    ep_error error;
    char text[160];
    ep_err err = EP_OK;
    init_disagreeing(&call, cases, d, rank);
    if (d->in_combine) {
        err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_OK, "%s", error.text);
        rank_call_experts(&call);
    }
    if (rank == 1) {
        d->change(&call);
    }
    err = d->in_combine ? rank_call_combine(&call, group, &error)
                        : rank_call_dispatch(&call, group, &error);
    snprintf(text, sizeof(text), "%s differs between ranks: ", d->name);
    EXPECT(err == EP_ERR_INVALID_ARGUMENT && strstr(error.text, text) != NULL &&
               strstr(error.text, "at rank 0, 2") != NULL &&
               strstr(error.text, "at rank 1") != NULL,
           "%s: %s", d->name, err == EP_OK ? "no error" : error.text);
    rank_call_free(&call);
}

/* Parameters with one value: another one is refused where it is given, before anything is sent. */
static void expect_refused_alone(const oracle_case *c, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, c, rank, 4);
    call.params.ep_world_size = RANKS + 1;
    ep_err err = rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "ep_world_size is 4: allowed 3");
    call.params.ep_world_size = RANKS;
    call.params.expert_shard_type = 1;
    err = rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "expert_shard_type is 1: allowed 0");
    call.params.expert_shard_type = 0;
    call.combine.out_dtype = 1;
    err = rank_call_combine(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "out_dtype is 1: allowed 0");
    call.combine.out_dtype = 0;
    call.combine.group_list_type = 1;
    err = rank_call_combine(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "group_list_type is 1: allowed 0");
    rank_call_free(&call);
}

static pthread_barrier_t all_know;

static void disagree_on_members(void *arg, uint32_t rank, ep_group *group)
{
    disagree_on(arg, &elastic_disagreement, rank, group);
    pthread_barrier_wait(&all_know); /* a rank that leaves would be an error of its own */
}

static void disagree(void *arg, uint32_t rank, ep_group *group)
{
    const oracle_case *cases = arg;
    ep_error error;
    ep_group *pair = rank < 2 ? rank_group_create("loopback", pair_name, 2, rank, 20000000) : NULL;
    if (rank == 1) {
        pair_of_rank_1 = pair;
    }
    expect_every_parameter(rank);
    expect_refused_alone(&cases[CASE_PLAIN], rank, group);
    for (size_t i = 0; i < sizeof(disagreements) / sizeof(disagreements[0]); i++) {
        disagree_on(cases, &disagreements[i], rank, group);
    }
    rank_call call;
    rank_call_init(&call, &cases[CASE_PLAIN], rank, 4);
    expect_works(&call, rank, group);
    /* Not the same operator at all. */
    ep_err err = rank == 1 ? rank_call_combine(&call, group, &error)
                           : rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "the operator differs", "ep_moe_combine at rank 1");
    expect_works(&call, rank, group);
    rank_call_free(&call);
    ep_group_destroy(pair);
}

/* ---- ranks that disagree on who takes part ---- */

/*
 * Rank 0 finds out and tells ranks 1 and 3; rank 2 is not among its members, yet waits for it. So
 * rank 1 must tell rank 2, whether rank 1 has all its frames and only looks for the reason (then
 * rank 3 calls with it), or still waits for one.
 */
enum { CHAIN = 4, ALONE = CHAIN };

typedef struct chain {
    oracle_case cases[CHAIN + 1]; /* by number of members */
    bool with_1;                  /* rank 3's call */
} chain;

static int32_t chain_members[][4 + 2 * CHAIN] = {
    {1, 3, 0, 8, 0, 1, -1, 2, 0, 1, 3, -1},
    {1, 4, 0, 8, 0, 1, 2, 3, 0, 1, 2, 3},
    {1, 3, 0, 8, 0, 1, 2, -1, 0, 1, 2, -1},
    {1, 2, 0, 8, 0, -1, -1, 1, 0, 3, -1, -1},
    [ALONE] = {1, 1, 0, 8, -1, -1, -1, 0, 3, -1, -1, -1},
};

static void wait_frames(ep_group *group, uint64_t count)
{
    ep_group_stats stats = {.struct_bytes = sizeof(stats)};
    for (ep_group_read_stats(group, &stats); stats.frames_received < count;
         ep_group_read_stats(group, &stats)) {
        usleep(1000);
    }
}

static ep_err chain_dispatch(const chain *c, int32_t *members, uint32_t rank, ep_group *group,
                             uint64_t deadline_us, ep_error *error)
{
    rank_call call;
    rank_call_init(&call, &c->cases[members[1]], (uint32_t)members[4 + rank], 0);
    call.params.elastic_info = ep_tensor_1d(members, EP_DTYPE_I32, 4 + 2 * CHAIN);
    call.dispatch.performance_info = ep_tensor_none();
    call.dispatch.deadline_us = deadline_us;
    ep_err err = rank_call_dispatch(&call, group, error);
    rank_call_free(&call);
    return err;
}

static void tell_on(void *arg, uint32_t rank, ep_group *group)
{
    const chain *c = arg;
    ep_error error = {.text = ""};
    ep_group_stats stats = {.struct_bytes = sizeof(stats)};
    int32_t *members = chain_members[rank == 3 && c->with_1 ? 0 : rank];
    pthread_barrier_wait(&all_know);
    ep_group_read_stats(group, &stats);
    pthread_barrier_wait(&all_know);
    if (rank == 3) { /* a generation ahead of the others */
        ep_err err = chain_dispatch(c, chain_members[ALONE], rank, group, 0, &error);
        EXPECT(err == EP_OK, "%s", error.text);
    } else if (rank == 1) { /* after ranks 2 and, perhaps, 3 */
        wait_frames(group, stats.frames_received + (c->with_1 ? 2 : 1));
    } else if (rank == 0) { /* the last: it is the first that looks no longer */
        wait_frames(group, stats.frames_received + 3);
    }
    ep_err err = chain_dispatch(c, members, rank, group, rank == 0 ? 300000 : 0, &error);
    EXPECT(err == EP_ERR_INVALID_ARGUMENT && strstr(error.text, "elastic_info") != NULL, "%s",
           err == EP_OK ? "no error" : error.text);
    pthread_barrier_wait(&all_know);
}

static void test_tell_on(void)
{
    chain c = {.with_1 = false};
    for (int ranks = 1; ranks <= CHAIN; ranks++) {
        uint64_t state = 70;
        c.cases[ranks] = (oracle_case){
            .ranks = ranks, .experts = 8, .top_k = 3, .hidden = 16, .dtype = ORACLE_BF16};
        for (int r = 0; r < ranks; r++) {
            case_draw_batch(&state, &c.cases[ranks], 5 + r, &c.cases[ranks].batch[r]);
        }
    }
    pthread_barrier_init(&all_know, NULL, CHAIN);
    rank_threads_run("loopback", CHAIN, 20000000, tell_on, &c);
    c.with_1 = true;
    rank_threads_run("loopback", CHAIN, 20000000, tell_on, &c);
    pthread_barrier_destroy(&all_know);
    for (int ranks = 1; ranks <= CHAIN; ranks++) {
        case_free(&c.cases[ranks]);
    }
}

/* ---- disagreement about the group itself ---- */

typedef struct joining {
    ep_group_config config;
    const char *urls[1];
    ep_err expected;
    const char *text;
    pthread_t thread;
} joining;

static void *join(void *arg)
{
    joining *j = arg;
    uint32_t rank = j->config.rank;
    ep_group *group = NULL;
    ep_error error = {.text = ""};
    ep_err err = ep_group_create(&j->config, &group, &error);
    EXPECT(err == j->expected && strstr(error.text, j->text) != NULL, "%s: %s", ep_err_name(err),
           error.text);
    if (err == EP_OK) {
        ep_group_destroy(group);
    }
    return NULL;
}

/* Rank 1 is refused at once; rank 0 waits for a right one until its deadline, and then says who
 * came. */
static void disagree_on_groups(void)
{
    static const struct {
        const char *url[2];
        const char *name[2];
        uint32_t world[2];
        const char *text;
    } cases[] = {
        {{"loopback://named-0", "loopback://named-1"},
         {"left", "right"},
         {2, 2},
         "name differs between ranks: \"left\" at rank 0; \"right\" at rank 1"},
        {{"loopback://sized-0", "loopback://sized-1"},
         {"sized", "sized"},
         {2, 3},
         "world_size differs between ranks: 2 at rank 0; 3 at rank 1"},
    };
    joining joinings[4];
    for (uint32_t i = 0; i < 4; i++) {
        joining *j = &joinings[i];
        uint32_t c = i / 2;
        uint32_t rank = i % 2;
        ep_group_config_init(&j->config);
        j->urls[0] = cases[c].url[0];
        j->config.name = cases[c].name[rank];
        j->config.world_size = cases[c].world[rank];
        j->config.rank = rank;
        j->config.urls = j->urls;
        j->config.urls_count = 1;
        j->config.listen_url = cases[c].url[rank];
        j->config.deadline_us = 20000000; /* rank 1 has to come while rank 0 still waits */
        j->expected = rank == 0 ? EP_ERR_DEADLINE_EXCEEDED : EP_ERR_INVALID_ARGUMENT;
        j->text = cases[c].text;
        if (pthread_create(&j->thread, NULL, join, j) != 0) {
            abort();
        }
    }
    for (uint32_t i = 0; i < 4; i++) {
        pthread_join(joinings[i].thread, NULL);
    }
}

/* One case for each way of calling that a disagreement needs; batches of their own. */
static void draw_disagreeing(oracle_case cases[CASES])
{
    static float gamma[16];
    for (int i = 0; i < CASES; i++) {
        oracle_case *c = &cases[i];
        uint64_t state = 40;
        *c = (oracle_case){.ranks = RANKS,
                           .experts = 7,
                           .top_k = 3,
                           .hidden = 16,
                           .dtype = ORACLE_BF16,
                           .quantise = i == CASE_QUANT};
        c->shared_ranks = i == CASE_SHARED ? 1 : i == CASE_SHARED_TWO ? 2 : 0;
        c->shared_experts = c->shared_ranks > 0;
        if (i == CASE_NORM) {
            c->gamma = gamma;
            c->eps = 1e-5f;
        } else if (i == CASE_A3) {
            c->hidden = 1024;
            c->experts = 6;
        } else if (i == CASE_THREE) {
            c->experts = RANKS;
        }
        for (int r = 0; r < RANKS; r++) {
            oracle_batch *batch = &c->batch[r];
            /* the vendor's a3 wants all tokens active, and nothing here is about masks */
            case_draw_unmasked(&state, c, i == CASE_A3 ? 5 : 5 + r, batch);
            for (int s = 0; i == CASE_A3 && s < 5 * c->top_k; s++) {
                batch->ids[s] = s % c->experts;
            }
        }
    }
}

static void test_disagree(void)
{
    static oracle_case cases[CASES];
    draw_disagreeing(cases);
    rank_group_name(pair_name, sizeof(pair_name));
    rank_threads_run("loopback", RANKS, 20000000, disagree, cases);
    pthread_barrier_init(&all_know, NULL, RANKS);
    rank_threads_run("loopback", RANKS, 20000000, disagree_on_members, cases);
    pthread_barrier_destroy(&all_know);
    for (int i = 0; i < CASES; i++) {
        cases[i].gamma = NULL; /* not of the heap */
        case_free(&cases[i]);
    }
}

/* ---- bad values on one rank ---- */

static void bad_values(void *arg, uint32_t rank, ep_group *group)
{
    oracle_case *c = arg;
    rank_call call;
    ep_error error;
    rank_call_init(&call, c, rank, 0);
    int32_t *ids = call.dispatch.expert_ids.data;
    int32_t good = ids[4];
    if (rank == 2) {
        ids[4] = 99;
    }
    ep_err err = rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "expert_ids is 99 at token 1, slot 1: allowed 0..6");
    EXPECT(rank == 2 || strstr(error.text, "rank 2: ") != NULL, "%s", error.text);
    if (rank == 2) {
        ids[4] = good;
        /* At once again: the group must not mix up its calls. */
        ids[4] = -2;
    }
    err = rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_INVALID_ARGUMENT, "expert_ids is -2");
    if (rank == 2) {
        ids[4] = good;
    }
    expect_works(&call, rank, group);
    rank_call_free(&call);
}

/* ---- ranks that leave or stay away ---- */

static void one_leaves(void *arg, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, arg, rank, 0);
    expect_works(&call, rank, group);
    if (rank == 1) {
        rank_call_free(&call);
        return; /* and its group is destroyed */
    }
    ep_err err = rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_UNAVAILABLE, "rank 1 is gone (it left the group)");
    err = rank_call_dispatch(&call, group, &error);
    EXPECT_ERROR(err, EP_ERR_UNAVAILABLE, "rank 1");
    rank_call_free(&call);
}

static void one_leaves_between(void *arg, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, arg, rank, 0);
    ep_err err = rank_call_dispatch(&call, group, &error);
    /* its rows are there although it may be gone already */
    EXPECT(err == EP_OK && rank_call_check_dispatch(&call), "%s", error.text);
    if (rank != 1) {
        rank_call_experts(&call);
        err = rank_call_combine(&call, group, &error);
        EXPECT_ERROR(err, EP_ERR_UNAVAILABLE, "rank 1 is gone (it left the group)");
    }
    rank_call_free(&call);
}

static pthread_barrier_t late;

static void one_stays_away(void *arg, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, arg, rank, 0);
    call.dispatch.deadline_us = 200000;
    if (rank == 1) {
        pthread_barrier_wait(&late);
    } else {
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT_ERROR(err, EP_ERR_DEADLINE_EXCEEDED, "rank 1");
        pthread_barrier_wait(&late);
    }
    /* What was given up stays so, on the late rank too: at the latest in the call after the one
     * whose frames it still found. */
    ep_err err = rank_call_dispatch(&call, group, &error);
    if (rank == 1 && err == EP_OK) {
        err = rank_call_dispatch(&call, group, &error);
    }
    EXPECT(err == EP_ERR_DEADLINE_EXCEEDED, "%s", error.text);
    rank_call_free(&call);
}

/* ---- elastic_info: the others go on ---- */

static void others_go_on(void *arg, uint32_t rank, ep_group *group)
{
    oracle_case *cases = arg; /* [0]: three ranks; [1]: those that stay, 0 and 2 */
    rank_call call;
    ep_error error;
    rank_call_init(&call, &cases[0], rank, 0);
    expect_works(&call, rank, group);
    if (rank == 1) {
        rank_call_free(&call);
        return;
    }
    ep_err err = rank_call_dispatch(&call, group, &error);
    EXPECT(err == EP_ERR_UNAVAILABLE, "%s", error.text);
    rank_call less;
    uint32_t local = rank == 0 ? 0 : 1;
    int32_t elastic[10] = {1, 2, 0, cases[1].experts, 0, -1, 1, 0, 2, -1};
    rank_call_init(&less, &cases[1], local, 2);
    less.params.elastic_info = ep_tensor_1d(elastic, EP_DTYPE_I32, 10);
    int64_t waited[RANKS] = {0};
    less.dispatch.performance_info = ep_tensor_1d(waited, EP_DTYPE_I64, RANKS);
    expect_works(&less, rank, group);
    expect_works(&less, rank, group);
    ep_group_plan *plan = less.dispatch_plan;
    less.params.elastic_info = ep_tensor_none();
    err = ep_moe_dispatch(group, plan, &less.dispatch, less.dispatch_workspace,
                          less.dispatch_workspace_bytes, &error);
    EXPECT(err != EP_OK, "a plan of another elastic_info is stale");
    rank_call_free(&less);
    rank_call_free(&call);
}

/* A deadline that no clock reaches. */
static void for_ever(void *arg, uint32_t rank, ep_group *group)
{
    rank_call call;
    rank_call_init(&call, arg, rank, 0);
    expect_works(&call, rank, group);
    rank_call_free(&call);
}

int main(void)
{
    oracle_case cases[2];
    draw(&cases[0], 1);
    draw(&cases[1], 2);
    rank_threads_run("loopback", RANKS, 20000000, plans, &cases[0]);
    rank_threads_run("loopback", RANKS, UINT64_MAX, for_ever, &cases[0]);
    old_membership(0, &cases[0]);
    rank_threads_run("loopback", RANKS, 20000000, small_expand_x, &cases[0]);
    rank_threads_run("loopback", RANKS, 20000000, pairs, cases);
    test_disagree();
    test_tell_on();
    disagree_on_groups();
    rank_threads_run("loopback", RANKS, 20000000, bad_values, &cases[1]);
    rank_threads_run("loopback", RANKS, 20000000, one_leaves, &cases[0]);
    rank_threads_run("loopback", RANKS, 20000000, one_leaves_between, &cases[0]);
    pthread_barrier_init(&late, NULL, RANKS);
    rank_threads_run("loopback", RANKS, 20000000, one_stays_away, &cases[0]);
    pthread_barrier_destroy(&late);
    oracle_case elastic[2] = {cases[0], cases[0]};
    elastic[1].ranks = 2;
    elastic[1].experts = 5;
    elastic[1].batch[0] = cases[0].batch[0];
    uint64_t state = 9;
    case_draw_batch(&state, &elastic[1], 6, &elastic[1].batch[0]);
    case_draw_batch(&state, &elastic[1], 3, &elastic[1].batch[1]);
    rank_threads_run("loopback", RANKS, 20000000, others_go_on, elastic);
    case_free_batch(&elastic[1].batch[0]);
    case_free_batch(&elastic[1].batch[1]);
    case_free(&cases[0]);
    case_free(&cases[1]);
    return failed ? 1 : 0;
}
