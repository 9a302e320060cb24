/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Permuting ranks permutes rows: when the batches change places among the ranks, every expert gets
 * the same rows, its runs by source rank in the new order, and each batch's sums are the same bits
 * wherever it is. No oracle: two worlds are compared with each other.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define RANKS 5
#define CASES 8

typedef struct world {
    const oracle_case *c;
    rank_call calls[RANKS];
} world;

static bool play(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    rank_call *call = &w->calls[rank];
    ep_error error = {.text = ""};
    rank_call_init(call, w->c, rank, 0);
    bool good = rank_call_dispatch(call, group, &error) == EP_OK;
    if (good) {
        rank_call_experts(call);
        good = rank_call_combine(call, group, &error) == EP_OK;
    }
    if (!good) {
        fprintf(stderr, "rank %u: %s\n", rank, error.text);
    }
    /* before its group; the rest is compared later */
    ep_group_plan_destroy(call->dispatch_plan);
    ep_group_plan_destroy(call->combine_plan);
    call->dispatch_plan = NULL;
    call->combine_plan = NULL;
    return good;
}

/* First row and count of (local expert, source). */
static int run_of(const rank_call *call, int expert, int source, int *out_begin)
{
    const int32_t *prefix = call->dispatch.ep_recv_counts.data;
    int i = expert * RANKS + source;
    *out_begin = i == 0 ? 0 : prefix[i - 1];
    return prefix[i] - *out_begin;
}

static bool same_run(const rank_call *a, int a_begin, const rank_call *b, int b_begin, int count)
{
    size_t row = (size_t)a->c->hidden * (a->c->quantise ? 1 : ep_dtype_bytes(a->dispatch.x.dtype));
    bool same =
        memcmp((char *)a->dispatch.expand_x.data + (size_t)a_begin * row,
               (char *)b->dispatch.expand_x.data + (size_t)b_begin * row, (size_t)count * row) == 0;
    for (int i = 0; i < count; i++) { /* source differs; token and slot do not */
        const int32_t *at =
            (const int32_t *)a->dispatch.assist_info_for_combine.data + 3 * (a_begin + i);
        const int32_t *bt =
            (const int32_t *)b->dispatch.assist_info_for_combine.data + 3 * (b_begin + i);
        same = same && at[1] == bt[1] && at[2] == bt[2];
    }
    if (a->c->quantise) {
        same = same &&
               memcmp((float *)a->dispatch.dynamic_scales.data + a_begin,
                      (float *)b->dispatch.dynamic_scales.data + b_begin, 4 * (size_t)count) == 0;
    }
    return same &&
           memcmp((float *)a->dispatch.expand_scales.data + a_begin,
                  (float *)b->dispatch.expand_scales.data + b_begin, 4 * (size_t)count) == 0;
}

/* Rank r of b has the batch that rank order[r] of a has. */
static bool compare(const world *a, const world *b, const int *order)
{
    for (int rank = 0; rank < RANKS; rank++) {
        const rank_call *in_a = &a->calls[rank];
        const rank_call *in_b = &b->calls[rank];
        int first;
        int local = oracle_local(a->c, rank, &first);
        for (int e = 0; e < local; e++) {
            for (int source = 0; source < RANKS; source++) {
                int a_begin;
                int b_begin;
                int count = run_of(in_a, e, order[source], &a_begin);
                if (run_of(in_b, e, source, &b_begin) != count ||
                    !same_run(in_a, a_begin, in_b, b_begin, count)) {
                    fprintf(stderr, "rank %d, expert %d: the rows of batch %d differ at rank %d\n",
                            rank, e, order[source], source);
                    return false;
                }
            }
        }
        const rank_call *home = &a->calls[order[rank]];
        size_t bytes = (size_t)home->combine.x_out.shape[0] * (size_t)a->c->hidden *
                       ep_dtype_bytes(home->combine.x_out.dtype);
        if (home->combine.x_out.shape[0] != in_b->combine.x_out.shape[0] ||
            memcmp(home->combine.x_out.data, in_b->combine.x_out.data, bytes) != 0) {
            fprintf(stderr, "batch %d has other sums at rank %d\n", order[rank], rank);
            return false;
        }
    }
    return true;
}

static bool run(uint64_t seed)
{
    static world a;
    static world b;
    oracle_case c = {.ranks = RANKS, .experts = 13, .top_k = 4, .hidden = 33, .zero = 1, .copy = 1};
    uint64_t state = seed;
    int order[RANKS] = {0, 1, 2, 3, 4};
    c.dtype = (oracle_dtype)(seed % 3);
    c.quantise = seed % 2 == 0;
    c.quantise_back = seed % 4 >= 2;
    for (int r = 0; r < RANKS; r++) {
        case_draw_batch(&state, &c, r == 1 ? 0 : case_random(&state, 1, 20), &c.batch[r]);
    }
    oracle_case moved = c;
    for (int r = RANKS - 1; r > 0; r--) {
        int other = case_random(&state, 0, r);
        int kept = order[r];
        order[r] = order[other];
        order[other] = kept;
    }
    for (int r = 0; r < RANKS; r++) {
        moved.batch[r] = c.batch[order[r]];
    }
    a = (world){.c = &c};
    b = (world){.c = &moved};
    bool good = rank_threads_play("loopback", NULL, RANKS, 20000000, play, &a);
    good = rank_threads_play("loopback", NULL, RANKS, 20000000, play, &b) && good &&
           compare(&a, &b, order);
    for (int r = 0; r < RANKS; r++) {
        rank_call_free(&a.calls[r]);
        rank_call_free(&b.calls[r]);
    }
    case_free(&c);
    return good;
}

int main(void)
{
    for (uint64_t seed = 1; seed <= CASES; seed++) {
        if (!run(seed)) {
            fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
            return 1;
        }
    }
    return 0;
}
