/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor-parallel pairs: two groups of four ranks each, and a group for each pair of ranks that
 * share an expert's weights. A dispatch gives both ranks of a pair the rows of both; a combine adds
 * the two halves of each row before it goes home. Values are small integers, so that halves and
 * their sum are exact and the oracle of the undivided expert applies. Also with each group on two
 * hosts, by hierarchy; with two micro-batches under way, each rank in forms of its own; and with
 * one rank that cancels between the two exchanges.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define WORLD 4

typedef struct pair_rank {
    const oracle_case *cases; /* [2], one for each EP group */
    uint32_t tp;
    uint32_t rank;
    const char *ep_names[2];
    const char *tp_names[WORLD];
    bool bad_ids;
    bool by_host;
    bool by_index;
    bool failed;
    pthread_t thread;
} pair_rank;

#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: tp %u rank %u: ", __FILE__, __LINE__, p->tp, p->rank);         \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            p->failed = true;                                                                      \
        }                                                                                          \
    } while (0)

static void draw(oracle_case *c, uint64_t seed, bool quantise)
{
    uint64_t state = seed;
    memset(c, 0, sizeof(*c));
    c->ranks = WORLD;
    c->experts = WORLD;
    c->top_k = 2;
    c->hidden = 24;
    c->dtype = ORACLE_BF16;
    c->quantise = quantise;
    for (int r = 0; r < WORLD; r++) {
        int tokens = 3 + (int)(seed % 5) + r;
        case_draw_batch(&state, c, tokens, &c->batch[r]);
        for (int i = 0; i < tokens * c->hidden; i++) {
            c->batch[r].x[i] = (float)case_random(&state, -31, 31);
        }
    }
}

/* This rank's half of the expert: 0.5 * row, and the rest. */
static void half_experts(rank_call *call, uint32_t tp, int rows)
{
    const oracle_case *c = call->c;
    float factor = tp == 0 ? 0.5f : 0.5f + 0.25f * (float)(call->rank % 5);
    for (int i = 0; i < rows * c->hidden; i++) {
        uint16_t *in = call->dispatch.expand_x.data;
        uint16_t *out = call->combine.expand_x.data;
        out[i] = (uint16_t)oracle_bits(ORACLE_BF16, oracle_value(ORACLE_BF16, in[i]) * factor);
    }
}

static void check_partner_rows(pair_rank *p, rank_call *call, int own)
{
    const oracle_case *other = &p->cases[1 - p->tp];
    oracle_row *rows;
    float *values;
    int n = oracle_dispatch(other, (int)p->rank, &rows, &values);
    const int32_t *tp_counts = call->dispatch.tp_recv_counts.data;
    EXPECT(tp_counts[p->tp] == own && tp_counts[1 - p->tp] == n,
           "tp_recv_counts %d %d, should be %d %d", tp_counts[p->tp], tp_counts[1 - p->tp], own, n);
    int64_t *nums = call->dispatch.expert_token_nums.data;
    EXPECT(nums[0] == own + n, "expert_token_nums is %ld, should be %d", (long)nums[0], own + n);
    nums[0] = own; /* as the oracle of one group has it */
    const int32_t *counts = call->dispatch.ep_recv_counts.data;
    EXPECT(counts[2 * WORLD - 1] == n, "the partner's counts end with %d, should be %d",
           counts[2 * WORLD - 1], n);
    for (int i = 0; i < n * other->hidden; i++) {
        size_t at = (size_t)(own * other->hidden + i);
        float is = other->quantise
                       ? (float)((int8_t *)call->dispatch.expand_x.data)[at]
                       : oracle_value(ORACLE_BF16, ((uint16_t *)call->dispatch.expand_x.data)[at]);
        EXPECT(is == values[i], "row %d element %d of the partner is %g, should be %g",
               i / other->hidden, i % other->hidden, (double)is, (double)values[i]);
    }
    for (int i = 0; i < n && other->quantise; i++) {
        float scale = ((float *)call->dispatch.dynamic_scales.data)[own + i];
        EXPECT(scale == rows[i].scale, "scale %d of the partner is %g", i, (double)scale);
    }
    free(rows);
    free(values);
}

/* A call and what it has beside that of a group without pairs. */
typedef struct pair_call {
    rank_call call;
    int own; /* rows of the own group */
    int32_t counts[2 * WORLD];
    int32_t tp_counts[2];
} pair_call;

static void init_call(const pair_rank *p, ep_group *tp, pair_call *out)
{
    rank_call *call = &out->call;
    rank_call_init(call, &p->cases[p->tp], p->rank, 64);
    out->own = (int)call->rows_max - 64;
    call->params.comm_alg = p->by_host ? "hierarchy" : "";
    call->params.group_tp = tp;
    call->params.tp_world_size = 2;
    call->params.tp_rank_id = p->tp;
    call->dispatch.ep_recv_counts = ep_tensor_1d(out->counts, EP_DTYPE_I32, 2 * WORLD);
    call->dispatch.tp_recv_counts = ep_tensor_1d(out->tp_counts, EP_DTYPE_I32, 2);
    call->combine.ep_send_counts = call->dispatch.ep_recv_counts;
    call->combine.tp_send_counts = call->dispatch.tp_recv_counts;
    if (p->by_index) {
        rank_call_use_index(call);
    }
}

/* One rank's mistake ends the call on all four. */
static void play_bad_ids(pair_rank *p, pair_call *c, ep_group *ep)
{
    ep_error error = {.text = ""};
    int32_t *ids = c->call.dispatch.expert_ids.data;
    int32_t good = ids[0];
    bool mine = p->tp == 0 && p->rank == 1;
    ids[0] = mine ? 77 : good;
    ep_err err = rank_call_dispatch(&c->call, ep, &error);
    EXPECT(err == EP_ERR_INVALID_ARGUMENT && strstr(error.text, "expert_ids is 77") != NULL, "%s",
           error.text);
    EXPECT(p->tp == 1 || err != EP_OK, "no error");
    ids[0] = good;
}

static void check_rows(pair_rank *p, pair_call *c)
{
    check_partner_rows(p, &c->call, c->own);
    EXPECT(rank_call_check_dispatch(&c->call), "rows of the own group");
}

static void play_blocking(pair_rank *p, pair_call *c, ep_group *ep)
{
    ep_error error = {.text = ""};
    EXPECT(rank_call_dispatch(&c->call, ep, &error) == EP_OK, "%s", error.text);
    if (p->failed) {
        return;
    }
    check_rows(p, c);
    if (c->call.c->quantise) {
        return; /* halves of dequantised rows are not exact; the way back is the same */
    }
    half_experts(&c->call, p->tp, c->own + c->tp_counts[1 - p->tp]);
    EXPECT(rank_call_combine(&c->call, ep, &error) == EP_OK, "%s", error.text);
    EXPECT(p->failed || rank_call_check_combine(&c->call, 0), "sums");
}

static void play_overlapped(pair_rank *p, pair_call calls[2], ep_group *ep)
{
    ep_error error = {.text = ""};
    uint32_t form = p->rank + p->tp + (uint32_t)p->cases[0].batch[0].tokens;
    bool back = !calls[0].call.c->quantise;
    for (int i = 0; i < 2; i++) {
        EXPECT(rank_call_begin_dispatch(&calls[i].call, ep, (rank_form)(form++ % RANK_FORMS),
                                        &error) == EP_OK,
               "%s", error.text);
    }
    for (int i = 0; i < 2 && !p->failed; i++) {
        EXPECT(rank_call_finish(&calls[i].call, &error) == EP_OK, "%s", error.text);
        if (p->failed) {
            return;
        }
        check_rows(p, &calls[i]);
        if (back) {
            half_experts(&calls[i].call, p->tp, calls[i].own + calls[i].tp_counts[1 - p->tp]);
            EXPECT(rank_call_begin_combine(&calls[i].call, ep, (rank_form)(form++ % RANK_FORMS),
                                           &error) == EP_OK,
                   "%s", error.text);
        }
    }
    for (int i = 0; i < 2 && back && !p->failed; i++) {
        EXPECT(rank_call_finish(&calls[i].call, &error) == EP_OK, "%s", error.text);
        EXPECT(p->failed || rank_call_check_combine(&calls[i].call, 0), "sums");
    }
}

/* Its partner waits for the second exchange, which it will not begin. */
static void play_cancelled(pair_rank *p, pair_call *c, ep_group *ep)
{
    ep_error error = {.text = ""};
    bool mine = p->tp == 0 && p->rank == 1;
    bool partner = p->tp == 1 && p->rank == 1;
    EXPECT(rank_call_begin_dispatch(&c->call, ep, RANK_FINISH, &error) == EP_OK, "%s", error.text);
    if (mine) {
        ep_group_plan_cancel(c->call.under_way);
    }
    ep_err err = rank_call_finish(&c->call, &error);
    EXPECT(err == EP_ERR_CANCELLED || (err == EP_OK && !mine && !partner), "%s",
           err == EP_OK ? "no error" : error.text);
    EXPECT(err == EP_OK || strstr(error.text, "rank 1 has cancelled its ep_moe_dispatch") != NULL,
           "%s", error.text);
}

static void play(pair_rank *p, ep_group *ep, ep_group *tp)
{
    pair_call *calls = calloc(2, sizeof(*calls));
    init_call(p, tp, &calls[0]);
    init_call(p, tp, &calls[1]);
    if (p->bad_ids) {
        play_bad_ids(p, &calls[0], ep);
        play_cancelled(p, &calls[1], ep);
    }
    for (int round = 0; round < 3 && !p->failed; round++) {
        play_blocking(p, &calls[0], ep);
        play_overlapped(p, calls, ep);
    }
    rank_call_free(&calls[0].call);
    rank_call_free(&calls[1].call);
    free(calls);
}

static void *run_rank(void *arg)
{
    pair_rank *p = arg;
    const char *host = !p->by_host ? NULL : p->rank % 2 == 0 ? "even" : "odd";
    ep_group *ep =
        rank_group_create_on("loopback", host, p->ep_names[p->tp], WORLD, p->rank, 20000000);
    ep_group *tp = rank_group_create_on("loopback", host, p->tp_names[p->rank], 2, p->tp, 20000000);
    if (ep == NULL || tp == NULL) {
        p->failed = true;
    } else {
        play(p, ep, tp);
    }
    ep_group_destroy(ep);
    ep_group_destroy(tp);
    return NULL;
}

static bool run(uint64_t seed, bool quantise, bool bad_ids, bool by_host)
{
    oracle_case cases[2];
    pair_rank ranks[2 * WORLD];
    char names[2 + WORLD][64];
    bool good = true;
    draw(&cases[0], seed, quantise);
    draw(&cases[1], seed + 1, quantise);
    for (int i = 0; i < 2 + WORLD; i++) {
        rank_group_name(names[i], sizeof(names[i]));
    }
    for (uint32_t i = 0; i < 2 * WORLD; i++) {
        ranks[i] = (pair_rank){.cases = cases,
                               .tp = i / WORLD,
                               .rank = i % WORLD,
                               .ep_names = {names[0], names[1]},
                               .bad_ids = bad_ids,
                               .by_host = by_host,
                               .by_index = seed % 5 < 2};
        for (int r = 0; r < WORLD; r++) {
            ranks[i].tp_names[r] = names[2 + r];
        }
        if (pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]) != 0) {
            abort();
        }
    }
    for (int i = 0; i < 2 * WORLD; i++) {
        pthread_join(ranks[i].thread, NULL);
        good = good && !ranks[i].failed;
    }
    case_free(&cases[0]);
    case_free(&cases[1]);
    return good;
}

int main(void)
{
    for (uint64_t seed = 1; seed <= 12; seed++) {
        if (!run(seed, seed % 3 == 0, seed % 4 == 1, false) ||
            !run(seed, seed % 3 == 0, seed % 4 == 1, true)) {
            fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
            return 1;
        }
    }
    return 0;
}
