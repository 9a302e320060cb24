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
} world;

static bool play(void *arg, uint32_t rank, ep_group *group)
{
    const world *w = arg;
    rank_call call;
    ep_error error;
    rank_call_init(&call, w->c, rank, (int)(w->seed % 3));
    call.dispatch.expert_token_nums_type = (int64_t)(w->seed & 1);
    /* the second one over what the first left in every buffer */
    bool good = rank_call_round(&call, group, &error) && rank_call_round(&call, group, &error);
    rank_call_free(&call);
    return good;
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
        if (!rank_threads_play(scheme, NULL, (uint32_t)c.ranks, 20000000, play, &w)) {
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
