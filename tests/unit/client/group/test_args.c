/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every parameter, input and output of dispatch and combine in the vendor's profiles, through
 * prepare: the smallest and largest legal value pass, the first ones outside and each forbidden
 * combination are refused by name. Prepare looks at no data, so tensors have none here, and the
 * group is one that never met its ranks.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "group/group_args.h"
#include "group/group_core.h"

static ep_error error; /* of the last call */

#define MOST INT32_MAX

enum { A2 = 1, A3 = 2, BOTH = 3 };            /* profiles, 1 << (number - 1) */
enum { DISPATCH = 1, COMBINE = 2, EACH = 3 }; /* operators */

/* The numbers of a call, each with its name. GROUP_TP is a group of so many ranks, 0 none; COMM is
 * an index in comm_names; INDEX is expand_idx: 1 instead of assist_info_for_combine, 2 beside it.
 * From ELASTIC on they are tensors: 0 absent, 1 given; the mask: its rank. */
#define KNOBS_MAP(X)                                                                               \
    X(NOTHING, "")                                                                                 \
    X(WORLD, "ranks")                                                                              \
    X(EP_WORLD, "ep_world_size")                                                                   \
    X(EP_RANK, "ep_rank_id")                                                                       \
    X(MOE, "moe_expert_num")                                                                       \
    X(SHARED, "shared_expert_num")                                                                 \
    X(SHARED_RANKS, "shared_expert_rank_num")                                                      \
    X(TP, "tp_world_size")                                                                         \
    X(TP_RANK, "tp_rank_id")                                                                       \
    X(GROUP_TP, "group_tp")                                                                        \
    X(SHARD, "expert_shard_type")                                                                  \
    X(GLOBAL_BS, "global_bs")                                                                      \
    X(ZERO, "zero_expert_num")                                                                     \
    X(COPY, "copy_expert_num")                                                                     \
    X(CONST, "const_expert_num")                                                                   \
    X(COMM, "comm_alg")                                                                            \
    X(DUPLICATES, "allow_duplicates")                                                              \
    X(CONST_RULE, "const_rule")                                                                    \
    X(QUANT, "quant_mode")                                                                         \
    X(NUMS_TYPE, "expert_token_nums_type")                                                         \
    X(COMM_QUANT, "comm_quant_mode")                                                               \
    X(OUT_DTYPE, "out_dtype")                                                                      \
    X(LIST_TYPE, "group_list_type")                                                                \
    X(NAN_POLICY, "nan_policy")                                                                    \
    X(X_ABS_MAX, "x_abs_max")                                                                      \
    X(BS, "BS")                                                                                    \
    X(K, "K")                                                                                      \
    X(H, "H")                                                                                      \
    X(DTYPE, "dtype")                                                                              \
    X(IDS_DTYPE, "ids' dtype")                                                                     \
    X(ELASTIC, "elastic_info")                                                                     \
    X(SCALES, "scales")                                                                            \
    X(MASK, "x_active_mask")                                                                       \
    X(EXPERT_SCALES, "expert_scales")                                                              \
    X(PERFORMANCE, "performance_info")                                                             \
    X(DYNAMIC_SCALES, "dynamic_scales")                                                            \
    X(TP_COUNTS, "tp counts")                                                                      \
    X(EXPAND_SCALES, "expand_scales")                                                              \
    X(ACTIVATION_SCALE, "activation_scale")                                                        \
    X(WEIGHT_SCALE, "weight_scale")                                                                \
    X(GROUP_LIST, "group_list")                                                                    \
    X(SHARED_X, "shared_expert_x")                                                                 \
    X(ORI_X, "ori_x")                                                                              \
    X(ALPHA_1, "const_expert_alpha_1")                                                             \
    X(ALPHA_2, "const_expert_alpha_2")                                                             \
    X(CONST_V, "const_expert_v")                                                                   \
    X(INDEX, "expand_idx")

typedef enum knob {
#define X(knob, name) knob,
    KNOBS_MAP(X)
#undef X
        KNOBS
} knob;

static const char *const knob_names[KNOBS] = {
#define X(knob, name) name,
    KNOBS_MAP(X)
#undef X
};

enum { NAMELESS, FULLMESH, FULLMESH_V1, FULLMESH_V2, HIERARCHY, RING };
static const char *const comm_names[] = {NULL,          "fullmesh",  "fullmesh_v1",
                                         "fullmesh_v2", "hierarchy", "ring"};

typedef struct change {
    knob knob;
    int64_t value;
} change;

typedef struct scene {
    int64_t v[KNOBS];
    ep_group group;
    ep_group pair;
    ep_group_params params;
    ep_moe_dispatch_args dispatch;
    ep_moe_combine_args combine;
} scene;

/* ---- a usual program, changed ---- */

static bool by_host(const scene *s)
{
    return s->v[COMM] == HIERARCHY;
}

/* What a program brings for the numbers it has chosen; -1 in what a row leaves open. */
static void choose_tensors(scene *s, unsigned profile, unsigned op)
{
    int64_t *v = s->v;
    const change usual[] = {{EXPERT_SCALES, op == COMBINE || profile == A2 || by_host(s)},
                            {DYNAMIC_SCALES, v[QUANT] == 2},
                            {TP_COUNTS, v[TP] == 2},
                            {ORI_X, v[COPY] > 0 || v[CONST] > 0},
                            {ALPHA_1, v[CONST] > 0},
                            {ALPHA_2, v[CONST] > 0},
                            {CONST_V, v[CONST] > 0}};
    for (size_t i = 0; i < sizeof(usual) / sizeof(usual[0]); i++) {
        if (v[usual[i].knob] < 0) {
            v[usual[i].knob] = usual[i].value;
        }
    }
    if (v[EXPAND_SCALES] < 0) {
        v[EXPAND_SCALES] = v[EXPERT_SCALES] != 0 && (profile == A2 || by_host(s));
    }
}

static ep_tensor tensor(bool given, ep_dtype dtype, uint32_t rank, int64_t d0, int64_t d1)
{
    static char nowhere;
    if (!given) {
        return (ep_tensor){.rank = 0}; /* as a zeroed struct has it */
    }
    return rank == 1 ? ep_tensor_1d(&nowhere, dtype, d0) : ep_tensor_2d(&nowhere, dtype, d0, d1);
}

static void set_params(scene *s, unsigned profile)
{
    const int64_t *v = s->v;
    s->group.world = (uint32_t)v[WORLD];
    s->group.rank = s->group.world - 1;
    s->group.frame_bytes_max = (size_t)1 << 30;
    s->pair.world = (uint32_t)v[GROUP_TP];
    strcpy(s->group.name, "ep");
    strcpy(s->pair.name, "tp");
    ep_group_params_init(&s->params);
    s->params.profile = profile == A2 ? EP_GROUP_A2 : EP_GROUP_A3;
    s->params.const_rule = (ep_group_const_rule)v[CONST_RULE];
    s->params.ep_world_size = v[EP_WORLD];
    s->params.ep_rank_id = v[EP_RANK];
    s->params.moe_expert_num = v[MOE];
    s->params.group_tp = v[GROUP_TP] > 0 ? &s->pair : NULL;
    s->params.tp_world_size = v[TP];
    s->params.tp_rank_id = v[TP_RANK];
    s->params.expert_shard_type = v[SHARD];
    s->params.shared_expert_num = v[SHARED];
    s->params.shared_expert_rank_num = v[SHARED_RANKS];
    s->params.global_bs = v[GLOBAL_BS];
    s->params.zero_expert_num = v[ZERO];
    s->params.copy_expert_num = v[COPY];
    s->params.const_expert_num = v[CONST];
    s->params.comm_alg = comm_names[v[COMM]];
    s->params.allow_duplicates = v[DUPLICATES] != 0;
    static int32_t elastic[4 + 2 * EP_GROUP_WORLD_MAX];
    if (v[ELASTIC] != 0) {
        s->params.elastic_info = ep_tensor_1d(elastic, EP_DTYPE_I32, 4 + 2 * v[WORLD]);
    }
}

typedef struct sizes {
    int64_t a, tp, local, counts;
} sizes;

static sizes sizes_of(const scene *s, unsigned profile, knob weights)
{
    const int64_t *v = s->v;
    int64_t holders = v[WORLD] - v[SHARED_RANKS] > 0 ? v[WORLD] - v[SHARED_RANKS] : 1;
    int64_t batch = v[GLOBAL_BS] > 0 ? v[GLOBAL_BS] : v[BS] * v[WORLD];
    sizes z = {.tp = v[TP] == 2 ? 2 : 1, .local = v[MOE] / holders};
    z.a = batch * (z.local < v[K] ? z.local : v[K]);
    z.counts = v[WORLD] * z.tp * z.local;
    if (v[weights] != 0 && (profile == A2 || by_host(s))) {
        z.counts += 2 * batch * v[K] * (v[WORLD] / 8);
    }
    return z;
}

static void set_dispatch(scene *s, sizes z)
{
    const int64_t *v = s->v;
    const ep_dtype dtype = (ep_dtype)v[DTYPE];
    ep_moe_dispatch_args *d = &s->dispatch;
    ep_moe_dispatch_args_init(d);
    int64_t shared = v[SHARED_RANKS] > 0 ? v[SHARED] : 0;
    d->params = &s->params;
    d->quant_mode = v[QUANT];
    d->expert_token_nums_type = v[NUMS_TYPE];
    d->nan_policy = v[NAN_POLICY];
    d->x_abs_max = (float)v[X_ABS_MAX];
    d->x = tensor(true, dtype, 2, v[BS], v[H]);
    d->expert_ids = tensor(true, (ep_dtype)v[IDS_DTYPE], 2, v[BS], v[K]);
    d->scales = tensor(v[SCALES], EP_DTYPE_F32, 2, shared + v[MOE], v[H]);
    d->x_active_mask = tensor(v[MASK], EP_DTYPE_BOOL, (uint32_t)v[MASK], v[BS], v[K]);
    d->expert_scales = tensor(v[EXPERT_SCALES], EP_DTYPE_F32, 2, v[BS], v[K]);
    d->performance_info = tensor(v[PERFORMANCE], EP_DTYPE_I64, 1, v[WORLD], 0);
    d->expand_x = tensor(true, v[QUANT] == 2 ? EP_DTYPE_I8 : dtype, 2, z.tp * z.a, v[H]);
    d->dynamic_scales = tensor(v[DYNAMIC_SCALES], EP_DTYPE_F32, 1, z.tp * z.a, 0);
    d->assist_info_for_combine =
        tensor(v[INDEX] != 1, EP_DTYPE_I32, 1, 128 * (z.a > 0 ? z.a : 1), 0);
    d->expert_token_nums = tensor(true, EP_DTYPE_I64, 1, z.local, 0);
    d->ep_recv_counts = tensor(true, EP_DTYPE_I32, 1, z.counts, 0);
    d->tp_recv_counts = tensor(v[TP_COUNTS], EP_DTYPE_I32, 1, z.tp, 0);
    d->expand_scales = tensor(v[EXPAND_SCALES], EP_DTYPE_F32, 1, z.a, 0);
    d->expand_idx = tensor(v[INDEX], EP_DTYPE_I32, 1, v[BS] * v[K], 0);
}

static void set_combine(scene *s, sizes z)
{
    const int64_t *v = s->v;
    const ep_dtype dtype = (ep_dtype)v[DTYPE];
    ep_moe_combine_args *m = &s->combine;
    ep_moe_combine_args_init(m);
    m->params = &s->params;
    m->comm_quant_mode = v[COMM_QUANT];
    m->out_dtype = v[OUT_DTYPE];
    m->group_list_type = v[LIST_TYPE];
    m->nan_policy = v[NAN_POLICY];
    m->expand_x = tensor(true, dtype, 2, z.tp * z.a, v[H]);
    m->expert_ids = tensor(true, (ep_dtype)v[IDS_DTYPE], 2, v[BS], v[K]);
    m->assist_info_for_combine =
        tensor(v[INDEX] != 1, EP_DTYPE_I32, 1, 128 * (z.a > 0 ? z.a : 1), 0);
    m->ep_send_counts = tensor(true, EP_DTYPE_I32, 1, z.counts, 0);
    m->expert_scales = tensor(v[EXPERT_SCALES], EP_DTYPE_F32, 2, v[BS], v[K]);
    m->tp_send_counts = tensor(v[TP_COUNTS], EP_DTYPE_I32, 1, z.tp, 0);
    m->x_active_mask = tensor(v[MASK], EP_DTYPE_BOOL, (uint32_t)v[MASK], v[BS], v[K]);
    m->activation_scale = tensor(v[ACTIVATION_SCALE], EP_DTYPE_F32, 1, v[BS], 0);
    m->weight_scale = tensor(v[WEIGHT_SCALE], EP_DTYPE_F32, 1, v[BS], 0);
    m->group_list = tensor(v[GROUP_LIST], EP_DTYPE_I64, 1, z.local, 0);
    m->expand_scales = tensor(v[EXPAND_SCALES], EP_DTYPE_F32, 1, z.a, 0);
    m->shared_expert_x = tensor(v[SHARED_X], dtype, 2, v[BS], v[H]);
    m->ori_x = tensor(v[ORI_X], dtype, 2, v[BS], v[H]);
    m->const_expert_alpha_1 = tensor(v[ALPHA_1], dtype, 2, v[CONST], v[H]);
    m->const_expert_alpha_2 = tensor(v[ALPHA_2], dtype, 2, v[CONST], v[H]);
    m->const_expert_v = tensor(v[CONST_V], dtype, 2, v[CONST], v[H]);
    m->performance_info = tensor(v[PERFORMANCE], EP_DTYPE_I64, 1, v[WORLD], 0);
    m->expand_idx = tensor(v[INDEX], EP_DTYPE_I32, 1, v[BS] * v[K], 0);
    m->x_out = tensor(true, dtype, 2, v[BS], v[H]);
}

static void set_scene(scene *s, unsigned profile, unsigned op, const change *changes, size_t count)
{
    static const change usual[] = {{WORLD, 16},
                                   {EP_RANK, -1},
                                   {MOE, 32},
                                   {SHARED, 1},
                                   {QUANT, 0},
                                   {NUMS_TYPE, 1},
                                   {BS, 32},
                                   {K, 8},
                                   {H, 4096},
                                   {DTYPE, EP_DTYPE_BF16},
                                   {IDS_DTYPE, EP_DTYPE_I32},
                                   {EXPERT_SCALES, -1},
                                   {DYNAMIC_SCALES, -1},
                                   {TP_COUNTS, -1},
                                   {EXPAND_SCALES, -1},
                                   {ORI_X, -1},
                                   {ALPHA_1, -1},
                                   {ALPHA_2, -1},
                                   {CONST_V, -1}};
    memset(s, 0, sizeof(*s));
    for (size_t i = 0; i < sizeof(usual) / sizeof(usual[0]); i++) {
        s->v[usual[i].knob] = usual[i].value;
    }
    for (size_t i = 0; i < count; i++) {
        s->v[changes[i].knob] = changes[i].value;
    }
    choose_tensors(s, profile, op);
    set_params(s, profile);
    set_dispatch(s, sizes_of(s, profile, EXPERT_SCALES));
    set_combine(s, sizes_of(s, profile, EXPAND_SCALES));
}

static ep_err prepare(scene *s, unsigned op, ep_error *out_error)
{
    size_t bytes;
    ep_group_plan *plan = NULL;
    ep_error_clear(out_error);
    ep_fork_guard_init(&s->group.fork);
    ep_err err =
        op == DISPATCH
            ? ep_moe_dispatch_prepare(&s->group, &s->dispatch, &bytes, &plan, out_error)
            : ep_moe_combine_prepare(&s->group, &s->combine, NULL, &bytes, &plan, out_error);
    ep_group_plan_destroy(plan);
    ep_fork_guard_fini(&s->group.fork);
    return err;
}

/* ---- rows ---- */

#define CHANGES_MAX 6
typedef struct row {
    unsigned profiles;
    unsigned operators;
    change changes[CHANGES_MAX];
    const char *says; /* the text begins with it; NULL: passes */
} row;

static void describe(const row *r, unsigned profile, unsigned op, char *out, size_t bytes)
{
    int used = snprintf(out, bytes, "%s %s:", profile == A2 ? "a2" : "a3",
                        op == DISPATCH ? "dispatch" : "combine");
    for (int i = 0; i < CHANGES_MAX && r->changes[i].knob != NOTHING; i++) {
        used += snprintf(out + used, bytes - (size_t)used, " %s %lld",
                         knob_names[r->changes[i].knob], (long long)r->changes[i].value);
    }
}

static void check(const row *r, unsigned profile, unsigned op)
{
    static scene s;
    char claim[300];
    size_t count = 0;
    while (count < CHANGES_MAX && r->changes[count].knob != NOTHING) {
        count++;
    }
    describe(r, profile, op, claim, sizeof(claim));
    set_scene(&s, profile, op, r->changes, count);
    ep_err err = prepare(&s, op, &error);
    if (r->says == NULL) {
        cr_expect_eq(err, EP_OK, "%s passes: %s", claim, error.text);
    } else {
        cr_expect(err != EP_OK && strncmp(error.text, r->says, strlen(r->says)) == 0,
                  "%s says \"%s\", not \"%s\"", claim, r->says, error.text);
    }
}

static void check_all(const row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        for (unsigned profile = A2; profile <= A3; profile++) {
            for (unsigned op = DISPATCH; op <= COMBINE; op++) {
                if ((rows[i].profiles & profile) != 0 && (rows[i].operators & op) != 0) {
                    check(&rows[i], profile, op);
                }
            }
        }
    }
}
#define CHECK_ALL(rows) check_all(rows, sizeof(rows) / sizeof((rows)[0]))

static const row ranks_and_experts_rows[] = {
    {BOTH, EACH, {{NOTHING, 0}}, NULL},
    {A2, EACH, {{WORLD, 2}}, NULL},
    {A2, EACH, {{WORLD, 1}}, "ep_world_size is 1: allowed 2..8, 16"},
    {A2, EACH, {{WORLD, 8}, {MOE, 256}}, NULL},
    {A2, EACH, {{WORLD, 32}}, NULL},
    {A2, EACH, {{WORLD, 64}, {MOE, 64}}, NULL},
    {A2, EACH, {{WORLD, 128}, {MOE, 128}}, NULL},
    {A2, EACH, {{WORLD, 192}, {MOE, 192}}, NULL},
    {A2, EACH, {{WORLD, 256}, {MOE, 256}}, NULL},
    {A2, EACH, {{WORLD, 384}, {MOE, 384}}, NULL},
    {A2,
     EACH,
     {{WORLD, 48}, {MOE, 48}},
     "ep_world_size is 48: allowed 2..8, 16, 32, 64, 128, 192, 256, 384 (profile a2)"},
    {A2, EACH, {{WORLD, 385}, {MOE, 385}}, "ep_world_size is 385"},
    {A2, EACH, {{WORLD, 9}, {MOE, 9}}, "ep_world_size is 9: allowed 2..8, 16"},
    {A2, EACH, {{WORLD, 32}, {COMM, HIERARCHY}}, NULL},
    {A2, EACH, {{WORLD, 64}, {MOE, 64}, {COMM, HIERARCHY}}, NULL},
    {A2, EACH, {{WORLD, 8}, {COMM, HIERARCHY}}, "ep_world_size is 8: allowed 16, 32, 64"},
    {A2,
     EACH,
     {{WORLD, 128}, {MOE, 128}, {COMM, HIERARCHY}},
     "ep_world_size is 128: allowed 16, 32, 64 (2, 4, 8 servers"},
    {A3, EACH, {{WORLD, 2}}, NULL},
    {A3, EACH, {{WORLD, 1}}, "ep_world_size is 1: allowed 2..768"},
    {A3, EACH, {{WORLD, 768}, {MOE, 768}}, NULL},
    {A3, EACH, {{WORLD, 2}, {MOE, 1024}}, NULL},
    {A3, EACH, {{WORLD, 256}, {MOE, 256}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{WORLD, 8}, {COMM, HIERARCHY}}, "ep_world_size is 8: allowed multiples of 16"},
    {A3, EACH, {{WORLD, 24}, {MOE, 48}, {COMM, HIERARCHY}}, "ep_world_size is 24: allowed mult"},
    {A3, EACH, {{WORLD, 272}, {MOE, 272}, {COMM, HIERARCHY}}, "ep_world_size is 272: allowed mul"},
    {BOTH, EACH, {{EP_WORLD, 16}}, NULL},
    {BOTH, EACH, {{EP_WORLD, 15}}, "ep_world_size is 15: allowed 16"},
    {BOTH, EACH, {{EP_WORLD, 17}}, "ep_world_size is 17: allowed 16"},
    {BOTH, EACH, {{EP_RANK, 15}}, NULL},
    {BOTH, EACH, {{EP_RANK, 14}}, "ep_rank_id is 14: allowed 15"},
    {BOTH, EACH, {{EP_RANK, 16}}, "ep_rank_id is 16: allowed 15"},
    {BOTH, EACH, {{MOE, 16}}, NULL},
    {BOTH, EACH, {{MOE, 0}}, "moe_expert_num is 0: allowed 1.."},
    {BOTH,
     EACH,
     {{MOE, 17}},
     "moe_expert_num is 17: allowed multiples of ep_world_size - shared_expert_rank_num = 16"},
    {BOTH, EACH, {{MOE, 1024}}, NULL},
    {BOTH, EACH, {{MOE, 1040}}, "moe_expert_num is 1040: allowed 1..1024"},
    {A2, EACH, {{MOE, 512}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{MOE, 384}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{MOE, 400}, {COMM, HIERARCHY}}, "experts per rank is 25: allowed 1..24"},
    {BOTH, EACH, {{MOE, 528}, {COMM, HIERARCHY}}, "moe_expert_num is 528: allowed 1..512 (comm"},
    {A3,
     EACH,
     {{WORLD, 96}, {SHARED_RANKS, 64}, {MOE, 704}},
     "experts per rank * ep_world_size is 22 * 96: allowed up to 2048"},
    {BOTH, EACH, {{SHARED, 0}}, NULL},
    {A2, EACH, {{SHARED, 2}}, "shared_expert_num is 2: allowed 0"},
    {A3, EACH, {{SHARED, 2}}, "shared_expert_num is 2: allowed 0..0, or 1"},
    {BOTH, EACH, {{SHARED, -1}}, "shared_expert_num is -1"},
    {A2, EACH, {{SHARED_RANKS, 8}}, "shared_expert_rank_num is 8: allowed 0"},
    {A3, EACH, {{SHARED_RANKS, 8}}, NULL},
    {A3, EACH, {{SHARED_RANKS, 15}}, NULL},
    {BOTH, EACH, {{SHARED_RANKS, -1}}, "shared_expert_rank_num is -1: allowed 0..15"},
    {BOTH, EACH, {{SHARED_RANKS, 16}}, "shared_expert_rank_num is 16: allowed 0..15"},
    {A3, EACH, {{SHARED_RANKS, 8}, {SHARED, 4}}, NULL},
    {A3, EACH, {{SHARED_RANKS, 8}, {SHARED, 5}}, "shared_expert_num is 5: allowed 0..4"},
    {A3,
     EACH,
     {{SHARED_RANKS, 8}, {SHARED, 3}},
     "shared_expert_rank_num is 8: allowed multiples of shared_expert_num 3"},
    {A3, EACH, {{SHARED_RANKS, 8}, {COMM, HIERARCHY}}, "shared_expert_rank_num is 8: allowed 0"},
    {A3, EACH, {{SHARED_RANKS, 8}, {SHARED, 0}}, "shared_expert_num is 0: allowed 1..8"},
    {BOTH, EACH, {{SHARD, 1}}, "expert_shard_type is 1: allowed 0"},
    {BOTH, EACH, {{SHARD, -1}}, "expert_shard_type is -1: allowed 0"},
    {BOTH, EACH, {{DUPLICATES, 1}}, "allow_duplicates is 1: allowed 0"},
    {BOTH, EACH, {{CONST_RULE, 1}}, NULL},
    {BOTH, EACH, {{CONST_RULE, 2}}, "const_rule is 2: allowed 0 or 1"},
    {BOTH, EACH, {{ELASTIC, 1}}, "elastic_info is given: allowed only absent"},
};

Test(group_args, ranks_and_experts)
{
    CHECK_ALL(ranks_and_experts_rows);
}

static const row pairs_rows[] = {
    {BOTH, EACH, {{TP, 1}}, NULL},
    {BOTH, EACH, {{TP, 1}, {GROUP_TP, 1}}, NULL}, /* a published example */
    {BOTH, EACH, {{TP, 1}, {GROUP_TP, 1}, {TP_COUNTS, 1}}, NULL},
    {BOTH, EACH, {{TP, 0}, {GROUP_TP, 1}}, "tp_world_size is 0 and group_tp is given"},
    {BOTH, EACH, {{TP, 2}}, "tp_world_size is 2 and group_tp is not given"},
    {A3, EACH, {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}}, NULL},
    {A3, EACH, {{TP, 2}, {GROUP_TP, 3}, {MOE, 16}}, "group_tp has 3 ranks"},
    {A3, EACH, {{TP, 2}, {GROUP_TP, 2}, {MOE, 32}}, "tp_world_size is 2 with 2 local experts"},
    {A3, EACH, {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}, {TP_RANK, 1}}, "group_tp has 2 ranks"},
    {A3, EACH, {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}, {COMM, FULLMESH_V2}}, "tp_world_size is 2"},
    {A3, EACH, {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}, {COMM, HIERARCHY}}, "tp_world_size is 2"},
    {A2, EACH, {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}}, "tp_world_size is 2: allowed 0..1"},
    {BOTH, EACH, {{TP, 3}, {GROUP_TP, 2}, {MOE, 16}}, "tp_world_size is 3"},
    {BOTH, EACH, {{TP, -1}}, "tp_world_size is -1"},
    {BOTH, EACH, {{TP, 1}, {TP_RANK, 1}}, "tp_rank_id is 1: allowed 0..0"},
    {BOTH, EACH, {{TP_RANK, -1}}, "tp_rank_id is -1: allowed 0..0"},
    {A3,
     DISPATCH,
     {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}, {TP_COUNTS, 0}},
     "tp_recv_counts is missing: it is required with tp_world_size 2"},
    {A3,
     COMBINE,
     {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}, {TP_COUNTS, 0}},
     "tp_send_counts is missing: it is required with tp_world_size 2"},
    {A3,
     COMBINE,
     {{TP, 2}, {GROUP_TP, 2}, {MOE, 16}, {COMM_QUANT, 2}},
     "comm_quant_mode is 2: allowed 0"},
};

Test(group_args, pairs)
{
    CHECK_ALL(pairs_rows);
}

static const row batches_rows[] = {
    {BOTH, EACH, {{BS, 1}}, NULL},
    {BOTH, EACH, {{BS, 0}}, "BS is 0: allowed 1.."},
    {A2, EACH, {{BS, 256}}, NULL},
    {A2, EACH, {{BS, 257}}, "BS is 257: allowed 1..256"},
    {A2, EACH, {{BS, 512}, {COMM, HIERARCHY}}, NULL},
    {A2, EACH, {{BS, 513}, {COMM, HIERARCHY}}, "BS is 513: allowed 1..512"},
    {A3, EACH, {{BS, 512}}, NULL},
    {A3, EACH, {{BS, 513}}, "BS is 513: allowed 1..512"},
    {A3, EACH, {{BS, 256}, {COMM, FULLMESH_V2}}, NULL},
    {A3, EACH, {{BS, 257}, {COMM, FULLMESH_V2}}, "BS is 257: allowed 1..256"},
    {A3, EACH, {{BS, 256}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{BS, 257}, {COMM, HIERARCHY}}, "BS is 257: allowed 1..256"},
    {BOTH, EACH, {{K, 1}}, NULL},
    {BOTH, EACH, {{K, 0}}, "K is 0: allowed 1.."},
    {BOTH, EACH, {{K, 16}}, NULL},
    {BOTH, EACH, {{K, 17}}, "K is 17: allowed 1..16"},
    {BOTH, EACH, {{WORLD, 2}, {MOE, 4}, {ZERO, 1}, {K, 5}}, NULL},
    {BOTH, EACH, {{WORLD, 2}, {MOE, 4}, {ZERO, 1}, {K, 6}}, "K is 6: allowed 1..5"},
    {A3, EACH, {{K, 12}, {COMM, FULLMESH_V2}}, NULL},
    {A3, EACH, {{K, 13}, {COMM, FULLMESH_V2}}, "K is 13: allowed 1..12"},
    {A2, EACH, {{H, 32}}, NULL},
    {A2, EACH, {{H, 31}}, "H is 31: allowed multiples of 32 up to 7168"},
    {A2, EACH, {{H, 7168}}, NULL},
    {A2, EACH, {{H, 7200}}, "H is 7200: allowed multiples of 32 up to 7168"},
    {A2, EACH, {{H, 10240}, {COMM, HIERARCHY}}, NULL},
    {A2, EACH, {{H, 10272}, {COMM, HIERARCHY}}, "H is 10272: allowed multiples of 32 up to 10240"},
    {A3, EACH, {{H, 1024}}, NULL},
    {A3, EACH, {{H, 1023}}, "H is 1023: allowed 1024..8192"},
    {A3, EACH, {{H, 8192}}, NULL},
    {A3, EACH, {{H, 8193}}, "H is 8193: allowed 1024..8192"},
    {A3, EACH, {{H, 1024}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{H, 1040}, {COMM, HIERARCHY}}, "H is 1040: allowed multiples of 32 in 1024..7168"},
    {A3, EACH, {{H, 7168}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{H, 7200}, {COMM, HIERARCHY}}, "H is 7200: allowed multiples of 32 in 1024..7168"},
    {BOTH, EACH, {{DTYPE, EP_DTYPE_F16}}, NULL},
    {BOTH, EACH, {{DTYPE, EP_DTYPE_F32}}, "x has type f32: allowed bf16, f16"},
    {BOTH, EACH, {{IDS_DTYPE, EP_DTYPE_I64}}, "expert_ids have type i64: allowed i32"},
    {BOTH, EACH, {{GLOBAL_BS, 32 * 16}}, NULL},
    {BOTH, EACH, {{GLOBAL_BS, 33 * 16}}, NULL}, /* another rank may have 33 */
    {BOTH, EACH, {{GLOBAL_BS, 31 * 16}}, "global_bs is 496: allowed 0, or at least"},
    {BOTH, EACH, {{GLOBAL_BS, 32 * 16 + 1}}, "global_bs is 513: allowed 0 or a multiple"},
    {BOTH, EACH, {{GLOBAL_BS, -16}}, "global_bs is -16"},
};

Test(group_args, batches)
{
    CHECK_ALL(batches_rows);
}

static const row modes_rows[] = {
    {BOTH, DISPATCH, {{QUANT, 2}}, NULL},
    {BOTH, DISPATCH, {{QUANT, 1}}, "quant_mode is 1: allowed 0 or 2"},
    {BOTH, DISPATCH, {{QUANT, 3}}, "quant_mode is 3: allowed 0 or 2"},
    {BOTH, DISPATCH, {{QUANT, -1}}, "quant_mode is -1: allowed 0 or 2"},
    {BOTH, DISPATCH, {{NUMS_TYPE, 0}}, NULL},
    {BOTH, DISPATCH, {{NUMS_TYPE, -1}}, "expert_token_nums_type is -1: allowed 0 or 1"},
    {BOTH, DISPATCH, {{NUMS_TYPE, 2}}, "expert_token_nums_type is 2: allowed 0 or 1"},
    {A2, COMBINE, {{COMM_QUANT, 2}}, "comm_quant_mode is 2: allowed 0"},
    {BOTH, COMBINE, {{COMM_QUANT, 2}, {COMM, HIERARCHY}}, NULL},
    {A3, COMBINE, {{COMM_QUANT, 2}}, NULL},
    {BOTH, COMBINE, {{COMM_QUANT, 1}}, "comm_quant_mode is 1: allowed 0 or 2"},
    {BOTH, COMBINE, {{COMM_QUANT, 3}}, "comm_quant_mode is 3: allowed 0 or 2"},
    {BOTH, COMBINE, {{OUT_DTYPE, 1}}, "out_dtype is 1: allowed 0"},
    {BOTH, COMBINE, {{LIST_TYPE, 1}}, "group_list_type is 1: allowed 0"},
    {BOTH, EACH, {{NAN_POLICY, 3}}, NULL},
    {BOTH, EACH, {{NAN_POLICY, 4}}, "nan_policy is 4: allowed 0 (pass), 1 (reject)"},
    {BOTH, EACH, {{NAN_POLICY, -1}}, "nan_policy is -1: allowed 0 (pass)"},
    {BOTH, DISPATCH, {{X_ABS_MAX, 100}}, NULL},
    {BOTH, DISPATCH, {{X_ABS_MAX, -1}}, "x_abs_max is -1: allowed 0 (off) or more"},
    {A2, EACH, {{COMM, FULLMESH}}, NULL},
    {A2, EACH, {{COMM, FULLMESH_V1}}, "comm_alg is fullmesh_v1: allowed \"\", fullmesh, hier"},
    {A2, EACH, {{COMM, FULLMESH_V2}}, "comm_alg is fullmesh_v2: allowed \"\", fullmesh,"},
    {A3,
     EACH,
     {{COMM, FULLMESH}},
     "comm_alg is fullmesh: allowed \"\", fullmesh_v1, fullmesh_v2, hier"},
    {A3, EACH, {{COMM, FULLMESH_V1}}, NULL},
    {A3, EACH, {{COMM, FULLMESH_V2}}, NULL},
    {BOTH, EACH, {{COMM, HIERARCHY}}, NULL},
    {BOTH, EACH, {{COMM, RING}}, "comm_alg is \"ring\": allowed"},
    {BOTH, EACH, {{ZERO, MOST - 33}}, NULL},
    {BOTH,
     EACH,
     {{ZERO, MOST - 32}},
     "moe_expert_num + zero_expert_num + copy_expert_num + const_expert_num is 2147483647: "
     "allowed below 2147483647"},
    {BOTH, EACH, {{ZERO, -1}}, "zero_expert_num is -1: allowed 0.."},
    {BOTH, EACH, {{COPY, MOST - 33}}, NULL},
    {BOTH, EACH, {{COPY, MOST - 32}}, "moe_expert_num + zero_expert_num"},
    {BOTH, EACH, {{COPY, -1}}, "copy_expert_num is -1: allowed 0.."},
    {A3, EACH, {{CONST, 1}}, NULL},
    {A3, EACH, {{CONST, MOST - 33}}, NULL},
    {A3, EACH, {{CONST, MOST - 32}}, "moe_expert_num + zero_expert_num"},
    {BOTH, EACH, {{CONST, -1}}, "const_expert_num is -1: allowed 0.."},
    {A2, EACH, {{CONST, 1}}, "const_expert_num is 1: allowed 0"},
    {A3, EACH, {{ZERO, 1}, {COPY, 1}, {CONST, 1}, {COMM, FULLMESH_V2}}, NULL},
    {BOTH, EACH, {{ZERO, 1}, {COMM, HIERARCHY}}, "zero_expert_num is 1: allowed 0"},
    {BOTH, EACH, {{COPY, 1}, {COMM, HIERARCHY}}, "copy_expert_num is 1: allowed 0"},
    {BOTH, EACH, {{CONST, 1}, {COMM, HIERARCHY}}, "const_expert_num is 1: allowed 0"},
};

Test(group_args, modes)
{
    CHECK_ALL(modes_rows);
}

static const row optional_tensors_rows[] = {
    {BOTH, DISPATCH, {{SCALES, 1}, {QUANT, 2}}, NULL},
    {BOTH, DISPATCH, {{SCALES, 1}}, "scales is given: allowed only absent (quant_mode is 0)"},
    {BOTH, DISPATCH, {{SCALES, 1}, {QUANT, 2}, {COMM, HIERARCHY}}, "scales is given"},
    {A3, DISPATCH, {{SCALES, 1}, {QUANT, 2}, {SHARED_RANKS, 8}, {SHARED, 2}}, NULL},
    {BOTH, EACH, {{MASK, 1}}, NULL},
    {BOTH, EACH, {{MASK, 2}}, NULL},
    {A2, EACH, {{MASK, 1}, {COMM, HIERARCHY}}, "x_active_mask is given"},
    {A3, EACH, {{MASK, 1}, {COMM, HIERARCHY}}, NULL},
    {A2, EACH, {{MASK, 2}, {COMM, HIERARCHY}}, "x_active_mask is given"},
    {A3, EACH, {{MASK, 2}, {COMM, HIERARCHY}}, "x_active_mask is [BS, K]"},
    {A3, EACH, {{MASK, 2}, {COMM, FULLMESH_V2}}, NULL},
    {A2, DISPATCH, {{EXPERT_SCALES, 0}}, NULL},
    {A3, DISPATCH, {{EXPERT_SCALES, 1}}, "expert_scales is given: allowed only absent"},
    {BOTH, DISPATCH, {{EXPERT_SCALES, 0}, {COMM, HIERARCHY}}, "expert_scales is missing"},
    {BOTH, COMBINE, {{EXPERT_SCALES, 0}}, "expert_scales is missing"},
    {BOTH, EACH, {{PERFORMANCE, 1}}, NULL},
    {A2, EACH, {{PERFORMANCE, 1}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {{PERFORMANCE, 1}, {COMM, HIERARCHY}}, "performance_info is given"},
    {BOTH, DISPATCH, {{DYNAMIC_SCALES, 1}}, NULL},
    {BOTH,
     DISPATCH,
     {{DYNAMIC_SCALES, 0}, {QUANT, 2}},
     "dynamic_scales is missing: it is required with quant_mode 2"},
    {BOTH, EACH, {{TP_COUNTS, 1}}, NULL},
    {A2, EACH, {{EXPAND_SCALES, 0}}, NULL},
    {A2,
     DISPATCH,
     {{EXPAND_SCALES, 1}, {EXPERT_SCALES, 0}},
     "expert_scales is missing: it is required with expand_scales"},
    {A3,
     DISPATCH,
     {{EXPAND_SCALES, 1}},
     "expert_scales is missing: it is required with expand_scales"},
    {A3, COMBINE, {{EXPAND_SCALES, 1}}, "expand_scales is given: allowed only absent"},
    {BOTH,
     EACH,
     {{EXPAND_SCALES, 0}, {COMM, HIERARCHY}},
     "expand_scales is missing: it is required with comm_alg hierarchy"},
    {BOTH, COMBINE, {{ACTIVATION_SCALE, 1}}, "activation_scale is given: allowed only absent"},
    {BOTH, COMBINE, {{WEIGHT_SCALE, 1}}, "weight_scale is given: allowed only absent"},
    {BOTH, COMBINE, {{GROUP_LIST, 1}}, "group_list is given: allowed only absent"},
    {A3, COMBINE, {{SHARED_X, 1}}, NULL},
    {A2, COMBINE, {{SHARED_X, 1}}, "shared_expert_x is given: allowed only absent"},
    {A3, COMBINE, {{SHARED_X, 1}, {SHARED_RANKS, 8}}, "shared_expert_x is given"},
    {BOTH, COMBINE, {{ORI_X, 1}}, NULL},
    {BOTH,
     COMBINE,
     {{COPY, 1}, {ORI_X, 0}},
     "ori_x is missing: it is required with copy_expert_num 1"},
    {A3,
     COMBINE,
     {{CONST, 3}, {ORI_X, 0}},
     "ori_x is missing: it is required with const_expert_num 3"},
    {A3,
     COMBINE,
     {{CONST, 3}, {ALPHA_1, 0}},
     "const_expert_alpha_1 is missing: it is required with const_expert_num 3"},
    {A3,
     COMBINE,
     {{CONST, 3}, {ALPHA_2, 0}},
     "const_expert_alpha_2 is missing: it is required with const_expert_num 3"},
    {A3,
     COMBINE,
     {{CONST, 3}, {CONST_V, 0}},
     "const_expert_v is missing: it is required with const_expert_num 3"},
    {BOTH, COMBINE, {{ALPHA_1, 1}}, "const_expert_alpha_1 is given: allowed only absent"},
    {BOTH, COMBINE, {{ALPHA_2, 1}}, "const_expert_alpha_2 is given: allowed only absent"},
    {BOTH, COMBINE, {{CONST_V, 1}}, "const_expert_v is given: allowed only absent"},
};

Test(group_args, optional_tensors)
{
    CHECK_ALL(optional_tensors_rows);
}

/* The operators without _v2. In a3 H is 7168 alone, so each row names it. */
#define I                                                                                          \
    {INDEX, 1},                                                                                    \
    {                                                                                              \
        H, 7168                                                                                    \
    }
static const row with_index_rows[] = {
    {BOTH, EACH, {I}, NULL},
    {BOTH, EACH, {I, {INDEX, 2}}, "assist_info_for_combine is given: allowed only absent"},
    {A2, EACH, {I, {WORLD, 32}}, NULL},
    {A2, EACH, {I, {WORLD, 64}, {MOE, 64}}, NULL},
    {A2, EACH, {I, {WORLD, 8}}, "ep_world_size is 8: allowed 16, 32, 64 (profile a2, with expand"},
    {A2, EACH, {I, {WORLD, 128}, {MOE, 128}}, "ep_world_size is 128: allowed 16, 32, 64"},
    {A3, EACH, {I, {WORLD, 8}}, NULL},
    {A3, EACH, {I, {WORLD, 144}, {MOE, 144}}, NULL},
    {A3, EACH, {I, {WORLD, 288}, {MOE, 288}}, NULL},
    {A3, EACH, {I, {WORLD, 4}}, "ep_world_size is 4: allowed 8, 16, 32, 64, 128, 144, 256, 288"},
    {A3, EACH, {I, {WORLD, 384}, {MOE, 384}}, "ep_world_size is 384: allowed 8, 16, 32"},
    {A3, EACH, {I, {MOE, 512}}, NULL},
    {BOTH, EACH, {I, {MOE, 528}}, "moe_expert_num is 528: allowed 1..512 (with expand_idx)"},
    {A2, EACH, {I, {MOE, 384}}, NULL},
    {A2, EACH, {I, {MOE, 400}}, "experts per rank is 25: allowed 1..24"},
    {A2, EACH, {I, {MOE, 512}, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {I, {MOE, 16}, {TP, 2}, {GROUP_TP, 2}}, NULL},
    {A3, EACH, {I, {SHARED_RANKS, 8}}, NULL},
    {A3, EACH, {I, {SHARED_RANKS, 8}, {SHARED, 2}}, "shared_expert_num is 2: allowed 0..1"},
    {A3, EACH, {I, {SHARED_RANKS, 6}, {MOE, 30}}, "shared_expert_rank_num is 6: allowed divisors"},
    {A2, EACH, {{INDEX, 1}, {H, 32}}, NULL},
    {A2,
     EACH,
     {{INDEX, 1}, {H, 7200}, {COMM, HIERARCHY}},
     "H is 7200: allowed 1..7168 (profile a2 with expand_idx, comm_alg hierarchy)"},
    {A3, EACH, {{INDEX, 1}, {H, 7167}}, "H is 7167: allowed 7168..7168"},
    {A3, EACH, {{INDEX, 1}, {H, 7169}}, "H is 7169: allowed 7168..7168"},
    {BOTH, EACH, {I, {BS, 1}}, NULL},
    {A2, EACH, {I, {BS, 256}, {COMM, HIERARCHY}}, NULL},
    {A2,
     EACH,
     {I, {BS, 257}, {COMM, HIERARCHY}},
     "BS is 257: allowed 1..256 (profile a2 with expand_idx, comm_alg hierarchy)"},
    {A3, EACH, {I, {BS, 512}}, NULL},
    {BOTH, EACH, {I, {K, 1}}, NULL},
    {A2, EACH, {I, {K, 16}}, NULL},
    {A3, EACH, {I, {K, 9}}, "K is 9: allowed 1..8 (profile a3 with expand_idx)"},
    {A3, EACH, {I, {K, 20}}, "K is 20: allowed 1..8 (profile a3 with expand_idx)"},
    {A2, EACH, {I, {K, 17}}, "K is 17: allowed 1..16"},
    {BOTH, EACH, {I, {MOE, 1040}}, "moe_expert_num is 1040: allowed 1..512 (with expand_idx)"},
    {BOTH, DISPATCH, {I, {QUANT, 2}, {SCALES, 1}}, NULL},
    {BOTH, DISPATCH, {I, {NUMS_TYPE, 0}}, NULL},
    {A3, COMBINE, {I, {COMM_QUANT, 2}}, NULL},
    {A2, COMBINE, {I, {COMM_QUANT, 2}, {COMM, HIERARCHY}}, NULL},
    {A2, EACH, {I, {COMM, FULLMESH}}, NULL},
    {A2, EACH, {I, {COMM, HIERARCHY}}, NULL},
    {A3, EACH, {I, {COMM, FULLMESH_V1}}, "comm_alg is fullmesh_v1: allowed \"\" (profile a3 with"},
    {A3, EACH, {I, {COMM, HIERARCHY}}, "comm_alg is hierarchy: allowed \"\" (profile a3 with"},
    {BOTH, EACH, {I, {ZERO, 1}}, "zero_expert_num is 1: allowed 0 (expand_idx is given)"},
    {BOTH, EACH, {I, {COPY, 1}}, "copy_expert_num is 1: allowed 0 (expand_idx is given)"},
    {BOTH, EACH, {I, {CONST, 1}}, "const_expert_num is 1: allowed 0 (expand_idx is given)"},
    {BOTH, EACH, {I, {MASK, 1}}, "x_active_mask is given: allowed only absent (expand_idx"},
    {BOTH, EACH, {I, {MASK, 2}}, "x_active_mask is given: allowed only absent (expand_idx"},
    {BOTH, EACH, {I, {PERFORMANCE, 1}}, "performance_info is given: allowed only absent (expand"},
    {BOTH, COMBINE, {I, {SHARED_X, 1}}, "shared_expert_x is given: allowed only absent (expand"},
};
#undef I

/* The combine of s becomes one with a norm behind it. */
static void move_out_to_norm(scene *s, ep_moe_add_rms_norm *out_norm)
{
    ep_moe_add_rms_norm_init(out_norm);
    out_norm->residual_x = s->combine.x_out;
    out_norm->y = s->combine.x_out;
    out_norm->gamma = tensor(true, EP_DTYPE_BF16, 1, s->v[H], 0);
    memset(&s->combine.x_out, 0, sizeof(s->combine.x_out));
}

Test(group_args, with_index)
{
    CHECK_ALL(with_index_rows);
    static scene s;
    const change changes[] = {{INDEX, 1}, {H, 7168}};
    size_t bytes;
    ep_group_plan *plan;
    ep_moe_add_rms_norm norm;
    set_scene(&s, A3, COMBINE, changes, 2);
    move_out_to_norm(&s, &norm);
    cr_expect_eq(ep_moe_combine_prepare(&s.group, &s.combine, &norm, &bytes, &plan, &error),
                 EP_ERR_INVALID_ARGUMENT);
    cr_expect_str_eq(error.text, "expand_idx is given: allowed only absent (the vendor has no "
                                 "ep_moe_combine_add_rms_norm with it)");
}

/* ---- the form of each tensor ---- */

#define D(field) #field, DISPATCH, offsetof(scene, dispatch.field)
#define M(field) #field, COMBINE, offsetof(scene, combine.field)
typedef struct form_row {
    const char *name;
    unsigned op;
    size_t offset;
    bool required; /* refused when forgotten */
    bool is_sized; /* its first dimension is checked against the others' */
} form_row;

static const form_row forms[] = {
    {D(x), true, true},
    {D(expert_ids), true, true},
    {D(scales), false, true},
    {D(x_active_mask), false, true},
    {D(performance_info), false, true},
    {D(expand_x), true, true},
    {D(dynamic_scales), true, true},
    {D(assist_info_for_combine), true, true},
    {D(expert_token_nums), true, true},
    {D(ep_recv_counts), true, true},
    {D(tp_recv_counts), false, false},
    {M(expand_x), true, true},
    {M(expert_ids), true, true},
    {M(assist_info_for_combine), true, true},
    {M(ep_send_counts), true, true},
    {M(expert_scales), true, true},
    {M(tp_send_counts), false, false},
    {M(x_active_mask), false, true},
    {M(ori_x), true, true},
    {M(performance_info), false, true},
    {M(x_out), true, true},
};
/* Those that one profile has alone. */
static const form_row forms_a2[] = {{D(expert_scales), true, true},
                                    {D(expand_scales), false, true},
                                    {M(expand_scales), false, true}};
static const form_row forms_a3[] = {{M(shared_expert_x), false, true},
                                    {M(const_expert_alpha_1), true, true},
                                    {M(const_expert_alpha_2), true, true},
                                    {M(const_expert_v), true, true}};
/* In a call with expand_idx. */
static const form_row forms_index[] = {{D(expand_idx), true, true}, {M(expand_idx), true, true}};

typedef enum { FORGOTTEN, OTHER_TYPE, OTHER_RANK, SHORT, SHORT_ROWS, NO_DATA, FORMS } form;
static const char *const form_names[FORMS] = {"forgotten", "of another type", "of another rank",
                                              "short",     "with short rows", "without data"};

static void spoil(ep_tensor *t, form f)
{
    switch (f) {
    case FORGOTTEN:
        memset(t, 0, sizeof(*t));
        break;
    case OTHER_TYPE:
        t->dtype = t->dtype == EP_DTYPE_I64 ? EP_DTYPE_I32 : EP_DTYPE_I64;
        break;
    case OTHER_RANK:
        t->rank = 4;
        break;
    case SHORT:
        t->shape[0]--;
        break;
    case SHORT_ROWS:
        t->shape[1]--;
        break;
    default:
        t->data = NULL;
        break;
    }
}

/* It is this tensor that says T, K or H: in that form the others are the wrong ones. */
static bool is_number(const form_row *r, form f)
{
    bool is_ids = strcmp(r->name, "expert_ids") == 0;
    bool is_x = strcmp(r->name, r->op == COMBINE ? "expand_x" : "x") == 0;
    return (f == SHORT_ROWS && (is_ids || is_x)) || (f == SHORT && is_ids && r->op == COMBINE);
}

static void set_all(scene *s, const form_row *r, unsigned profile)
{
    const change index[] = {{INDEX, 1}, {H, 7168}, {QUANT, 2}};
    const change all[] = {{QUANT, 2},
                          {COPY, 2},
                          {CONST, profile == A3 ? 3 : 0},
                          {SCALES, 1},
                          {MASK, 2},
                          {PERFORMANCE, 1},
                          {ORI_X, 1},
                          {TP_COUNTS, 1},
                          {SHARED_X, profile == A3},
                          {H, 4096},
                          {EXPAND_SCALES, profile == A2}};
    if (strcmp(r->name, "expand_idx") == 0) {
        set_scene(s, profile, r->op, index, sizeof(index) / sizeof(index[0]));
    } else {
        set_scene(s, profile, r->op, all, sizeof(all) / sizeof(all[0]));
    }
}

static void check_form(const form_row *r, unsigned profile, form f)
{
    static scene s;
    set_all(&s, r, profile);
    ep_tensor *t = (ep_tensor *)(void *)((char *)&s + r->offset);
    cr_assert_neq(t->rank, 0, "%s is in the scene", r->name);
    if ((f == SHORT_ROWS && t->rank == 1) || (f == SHORT && !r->is_sized) || is_number(r, f)) {
        return;
    }
    spoil(t, f);
    ep_err err = prepare(&s, r->op, &error);
    if (f == FORGOTTEN && !r->required) {
        cr_expect_eq(err, EP_OK, "profile %u, %s %s: %s", profile, r->name, form_names[f],
                     error.text);
        return;
    }
    cr_expect(err == EP_ERR_INVALID_ARGUMENT && strstr(error.text, r->name) != NULL,
              "profile %u, operator %u, %s %s is refused by name, not \"%s\"", profile, r->op,
              r->name, form_names[f], error.text);
    cr_expect(f != FORGOTTEN || strstr(error.text, " is missing") != NULL, "%s", error.text);
}

static void check_forms(const form_row *rows, size_t count, unsigned profile)
{
    for (size_t i = 0; i < count; i++) {
        for (form f = FORGOTTEN; f < FORMS; f++) {
            check_form(&rows[i], profile, f);
        }
    }
}

Test(group_args, form_of_each_tensor)
{
    const size_t both = sizeof(forms) / sizeof(forms[0]);
    check_forms(forms, both, A2);
    check_forms(forms_a2, sizeof(forms_a2) / sizeof(forms_a2[0]), A2);
    check_forms(forms, both, A3);
    check_forms(forms_a3, sizeof(forms_a3) / sizeof(forms_a3[0]), A3);
    check_forms(forms_index, sizeof(forms_index) / sizeof(forms_index[0]), A2);
    check_forms(forms_index, sizeof(forms_index) / sizeof(forms_index[0]), A3);
}

/* ---- buffers ---- */

Test(group_args, frames_must_fit)
{
    static scene s;
    ep_group_buffers buffers = {.struct_bytes = sizeof(buffers)};
    set_scene(&s, A3, DISPATCH, NULL, 0);
    cr_expect_eq(ep_group_buffer_sizes(&s.params, 32, 4096, 8, EP_DTYPE_BF16, &buffers, &error),
                 EP_ERR_INVALID_ARGUMENT, "without ep_world_size");
    s.params.ep_world_size = 16;
    cr_assert_eq(ep_group_buffer_sizes(&s.params, 32, 4096, 8, EP_DTYPE_BF16, &buffers, &error),
                 EP_OK, "%s", error.text);
    /* 2 experts per rank: 64 rows of 8 KiB, and what says whose they are */
    cr_expect(buffers.frame_bytes > 64 * 8192 && buffers.frame_bytes < 64 * 8192 + 4096);
    for (unsigned op = DISPATCH; op <= COMBINE; op++) {
        set_scene(&s, A3, op, NULL, 0);
        s.group.frame_bytes_max = (size_t)buffers.frame_bytes;
        cr_expect_eq(prepare(&s, op, &error), EP_OK, "%s", error.text);
        s.group.frame_bytes_max = (size_t)buffers.frame_bytes - 1;
        cr_expect_eq(prepare(&s, op, &error), EP_ERR_RESOURCE_EXHAUSTED);
        cr_expect(strstr(error.text, "frame_bytes_max of ep_group_config") != NULL, "%s",
                  error.text);
        s.params.profile = EP_GROUP_NATIVE; /* there tokens may choose so that it fits */
        cr_expect_eq(prepare(&s, op, &error), EP_OK, "%s", error.text);
        s.group.frame_bytes_max = 8192;
        cr_expect_eq(prepare(&s, op, &error), EP_ERR_RESOURCE_EXHAUSTED);
    }
}

/* ---- what the workspace is made of, for an error ---- */

Test(group_args, a_workspace_formula_has_its_end_and_the_parts_of_its_call)
{
    static scene s;
    const change changes[] = {{INDEX, 1}, {H, 7168}, {COMM_QUANT, 2}, {SHARED_RANKS, 8}};
    ep_moe_add_rms_norm norm;
    for (size_t count = 0; count <= sizeof(changes) / sizeof(changes[0]); count++) {
        for (int with_norm = 0; with_norm <= 1; with_norm++) {
            size_t bytes;
            ep_group_plan *plan = NULL;
            set_scene(&s, A3, COMBINE, changes, count);
            s.params.profile = EP_GROUP_NATIVE; /* which takes all of them together */
            if (with_norm) {
                move_out_to_norm(&s, &norm);
            }
            ep_fork_guard_init(&s.group.fork);
            const ep_err err = ep_moe_combine_prepare(
                &s.group, &s.combine, with_norm ? &norm : NULL, &bytes, &plan, &error);
            cr_assert_eq(err, EP_OK, "%s", error.text);
            const char *says = plan->workspace_formula;
            cr_expect(strlen(says) > 12 && strcmp(says + strlen(says) - 12, ", each to 64") == 0,
                      "%s", says);
            cr_expect_eq(strstr(says, "moe_expert_num") != NULL, count >= 1, "%s", says);
            cr_expect_eq(strstr(says, "expand_x's type") != NULL, count >= 3, "%s", says);
            cr_expect(strstr(says, count >= 4 ? "S 1, H" : "S 0, H") != NULL, "%s", says);
            ep_group_plan_destroy(plan);
            ep_fork_guard_fini(&s.group.fork);
        }
    }
}
