/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_random SCHEME CASES [SEED]: random worlds, shapes, masks, sentinels, special and shared
 * experts, quantisations; every output of dispatch and combine bit for bit as the oracle's.
 * EP_TEST_LONG=1: twenty times as many.
 */
#include <stdio.h>
#include <stdlib.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

typedef struct world {
    const oracle_case *c;
    uint64_t seed;
    bool failed;
} world;

static bool play(world *w, uint32_t rank, ep_group *group)
{
    rank_call call;
    ep_error error;
    rank_call_init(&call, w->c, rank, (int)(w->seed % 3));
    call.dispatch.expert_token_nums_type = (int64_t)(w->seed & 1);
    bool good = true;
    /* the second one over what the first left in every buffer */
    for (int round = 0; round < 2 && good; round++) {
        if (rank_call_dispatch(&call, group, &error) != EP_OK) {
            fprintf(stderr, "rank %u, dispatch: %s: %s\n", rank, ep_err_name(error.code),
                    error.text);
            good = false;
        }
        good = good && rank_call_check_dispatch(&call);
        if (good) {
            rank_call_experts(&call);
        }
        if (good && rank_call_combine(&call, group, &error) != EP_OK) {
            fprintf(stderr, "rank %u, combine: %s: %s\n", rank, ep_err_name(error.code),
                    error.text);
            good = false;
        }
        good = good && rank_call_check_combine(&call, case_is_approximate(w->c) ? 0.02 : 0);
    }
    rank_call_free(&call);
    return good;
}

static void run_rank(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    if (group == NULL || !play(w, rank, group)) {
        __atomic_store_n(&w->failed, true, __ATOMIC_RELAXED);
    }
}

int main(int argc, char **argv)
{
    const char *scheme = argc > 1 ? argv[1] : "loopback";
    int cases = argc > 2 ? atoi(argv[2]) : 100;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
    case_limits limits = {.ranks_max = 6, .tokens_max = 24, .hidden_max = 70};
    if (getenv("EP_TEST_LONG") != NULL) {
        cases *= 20;
    }
    uint64_t slots = 0;
    for (int i = 0; i < cases; i++) {
        oracle_case c;
        case_draw(seed + (uint64_t)i, &limits, &c);
        world w = {.c = &c, .seed = seed + (uint64_t)i};
        rank_threads_run(scheme, (uint32_t)c.ranks, 20000000, run_rank, &w);
        if (w.failed) {
            fprintf(stderr,
                    "failed with seed %llu: ranks %d shared %d/%d experts %d special %d+%d+%d K %d "
                    "H %d type %d quant %d back %d smooth %d "
                    "norm %d\n",
                    (unsigned long long)w.seed, c.ranks, c.shared_experts, c.shared_ranks,
                    c.experts, c.zero, c.copy, c.constant, c.top_k, c.hidden, (int)c.dtype,
                    c.quantise, c.quantise_back, c.smooth != NULL, c.gamma != NULL);
            return 1;
        }
        for (int r = 0; r < c.ranks; r++) {
            slots += 2 * (uint64_t)c.batch[r].tokens * (uint64_t)c.top_k; /* two rounds */
        }
        case_free(&c);
    }
    printf("seed %llu: %d cases over %s, %llu slots\n", (unsigned long long)seed, cases, scheme,
           (unsigned long long)slots);
    return 0;
}
