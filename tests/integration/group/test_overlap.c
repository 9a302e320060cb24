/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_overlap SCHEME DRAWS [SEED]: several micro-batches of a group under way at once, each of a
 * case of its own (shapes, types, quantisation, experts), some by hierarchy. All ranks begin in one
 * drawn order; each finishes in an order and a form of its own, with delays of its own. Every
 * output is the blocking form's bit for bit, and the oracle's. EP_TEST_LONG=1: four times as many.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define BATCHES_MAX 6
#define RANKS_MAX 5
#define DEADLINE_US 30000000u

/* One drawn order of beginning: batch b's dispatch is its first entry, its combine the second. */
typedef struct world {
    oracle_case cases[BATCHES_MAX];
    int batches;
    int ranks;
    int order[2 * BATCHES_MAX];
    const char *hosts[RANKS_MAX];
    bool by_host[BATCHES_MAX];
    uint64_t seed;
} world;

/* What a rank has of a batch. */
typedef struct batch {
    rank_call blocking;
    rank_call call;
    int begun; /* operations of it: 0..2 */
    bool under_way;
} batch;

typedef struct player {
    const world *w;
    ep_group *group;
    uint32_t rank;
    uint64_t state;
    batch batches[BATCHES_MAX];
    int under_way;
    ep_error error;
} player;

static bool is_good(player *p, ep_err err, const char *what, int b)
{
    if (err != EP_OK) {
        fprintf(stderr, "rank %u, batch %d, %s: %s: %s\n", p->rank, b, what, ep_err_name(err),
                p->error.text);
    }
    return err == EP_OK;
}

static void init_call(const player *p, int b, rank_call *call)
{
    rank_call_init(call, &p->w->cases[b], p->rank, 0);
    call->dispatch.expert_token_nums_type = (int64_t)(p->w->seed & 1);
    call->params.comm_alg = p->w->by_host[b] ? "hierarchy" : "";
}

static bool play_blocking(player *p, int b)
{
    rank_call *call = &p->batches[b].blocking;
    if (!is_good(p, rank_call_dispatch(call, p->group, &p->error), "blocking dispatch", b)) {
        return false;
    }
    rank_call_experts(call);
    return is_good(p, rank_call_combine(call, p->group, &p->error), "blocking combine", b);
}

static void delay(player *p)
{
    if (case_random(&p->state, 0, 3) == 0) {
        usleep((useconds_t)case_random(&p->state, 0, 400));
    }
}

static bool finish(player *p, int b)
{
    batch *at = &p->batches[b];
    bool is_dispatch = at->begun == 1;
    delay(p);
    if (!is_good(p, rank_call_finish(&at->call, &p->error), is_dispatch ? "dispatch" : "combine",
                 b)) {
        return false;
    }
    at->under_way = false;
    p->under_way--;
    if (is_dispatch) {
        delay(p);
        rank_call_experts(&at->call);
        return rank_call_check_dispatch(&at->call);
    }
    return rank_call_check_combine(&at->call, case_is_approximate(at->call.c) ? 0.02 : 0) &&
           rank_call_same(&at->blocking, &at->call, "blocking, and begun and finished");
}

/* One that is under way. */
static int pick(player *p)
{
    int skip = case_random(&p->state, 0, p->under_way - 1);
    int b = 0;
    for (;; b++) {
        if (p->batches[b].under_way && skip-- == 0) {
            return b;
        }
    }
}

static bool begin(player *p, int b)
{
    batch *at = &p->batches[b];
    rank_form form = (rank_form)case_random(&p->state, 0, RANK_FORMS - 1);
    ep_err err = at->begun == 0 ? rank_call_begin_dispatch(&at->call, p->group, form, &p->error)
                                : rank_call_begin_combine(&at->call, p->group, form, &p->error);
    at->begun++;
    at->under_way = true;
    p->under_way++;
    return is_good(p, err, "begin", b);
}

static bool play(player *p)
{
    const world *w = p->w;
    bool good = true;
    for (int b = 0; b < w->batches && good; b++) {
        init_call(p, b, &p->batches[b].blocking);
        init_call(p, b, &p->batches[b].call);
        good = play_blocking(p, b);
    }
    for (int i = 0; i < 2 * w->batches && good; i++) {
        int b = w->order[i];
        if (p->batches[b].under_way) { /* its dispatch */
            good = finish(p, b);
        }
        while (good && (p->under_way == EP_GROUP_OPERATIONS_MAX ||
                        (p->under_way > 0 && case_random(&p->state, 0, 3) == 0))) {
            good = finish(p, pick(p));
        }
        delay(p);
        good = good && begin(p, b);
    }
    while (good && p->under_way > 0) {
        good = finish(p, pick(p));
    }
    return good;
}

static bool run_rank(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    player *p = calloc(1, sizeof(*p));
    p->w = w;
    p->group = group;
    p->rank = rank;
    p->state = w->seed * 64 + rank;
    const bool good = play(p);
    for (int b = 0; b < w->batches; b++) {
        rank_call_free(&p->batches[b].blocking);
        rank_call_free(&p->batches[b].call);
    }
    free(p);
    return good;
}

static void draw(world *w, uint64_t seed)
{
    static const char *const names[] = {"a", "b", "c"};
    uint64_t state = seed;
    memset(w, 0, sizeof(*w));
    w->seed = seed;
    w->batches = case_random(&state, 2, BATCHES_MAX);
    w->ranks = case_random(&state, 1, RANKS_MAX);
    int hosts = case_random(&state, 1, 3);
    for (int r = 0; r < w->ranks; r++) {
        w->hosts[r] = names[case_random(&state, 0, hosts - 1)];
    }
    case_limits limits = {
        .ranks_max = w->ranks, .ranks = w->ranks, .tokens_max = 12, .hidden_max = 40};
    for (int b = 0; b < w->batches; b++) {
        case_draw(seed * BATCHES_MAX + (uint64_t)b, &limits, &w->cases[b]);
        w->by_host[b] = w->cases[b].smooth == NULL && case_random(&state, 0, 1) == 0;
        w->order[2 * b] = b;
        w->order[2 * b + 1] = b;
    }
    for (int i = 2 * w->batches - 1; i > 0; i--) {
        int j = case_random(&state, 0, i);
        int b = w->order[i];
        w->order[i] = w->order[j];
        w->order[j] = b;
    }
}

int main(int argc, char **argv)
{
    const char *scheme = argc > 1 ? argv[1] : "loopback";
    int draws = argc > 2 ? atoi(argv[2]) : 100;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
    int operations = 0;
    if (getenv("EP_TEST_LONG") != NULL) {
        draws *= 4;
    }
    world *w = malloc(sizeof(*w));
    for (int i = 0; i < draws; i++) {
        draw(w, seed + (uint64_t)i);
        if (!rank_threads_play(scheme, w->hosts, (uint32_t)w->ranks, DEADLINE_US, run_rank, w)) {
            fprintf(stderr, "failed with seed %llu: %d ranks, %d batches\n",
                    (unsigned long long)w->seed, w->ranks, w->batches);
            return 1;
        }
        operations += 2 * w->batches * w->ranks;
        for (int b = 0; b < w->batches; b++) {
            case_free(&w->cases[b]);
        }
    }
    free(w);
    printf("seed %llu: %d draws over %s, %d operations begun\n", (unsigned long long)seed, draws,
           scheme, operations);
    return 0;
}
