/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Profiles a2 and a3 through the calls: a legal configuration of each runs, with expand_x of A rows
 * as a vendor's program allocates it, and gives the oracle's bits; what the vendor does not allow
 * is refused by name on every rank. Every name of comm_alg gives the same bits.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

typedef struct world {
    const oracle_case *c;
    ep_group_profile profile;
    const char *comm_alg;
    int global_bs;
    const char *refused; /* the text that every rank must get; NULL: it must work */
} world;

/* A as the vendor defines it. */
static int64_t capacity(const world *w, uint32_t rank)
{
    const oracle_case *c = w->c;
    int64_t batch = w->global_bs != 0 ? w->global_bs : (int64_t)c->batch[rank].tokens * c->ranks;
    int first;
    int local = oracle_local(c, (int)rank, &first);
    if ((int)rank < c->shared_ranks) {
        return batch * c->shared_experts / c->shared_ranks;
    }
    return batch * (local < c->top_k ? local : c->top_k);
}

/* ep_recv_counts with the room that the vendor's operator sums in. */
static void set_vendor_counts(const world *w, rank_call *call, uint32_t rank)
{
    const oracle_case *c = w->c;
    int64_t tokens = w->global_bs != 0 ? w->global_bs : (int64_t)c->batch[rank].tokens * c->ranks;
    int64_t ints = c->experts + 2 * tokens * c->top_k * (c->ranks / 8);
    int32_t *counts = calloc((size_t)ints, sizeof(*counts));
    call->memory[call->memory_count++] = counts;
    call->dispatch.ep_recv_counts = ep_tensor_1d(counts, EP_DTYPE_I32, ints);
    call->combine.ep_send_counts = call->dispatch.ep_recv_counts;
}

static void set_up(const world *w, rank_call *call, uint32_t rank)
{
    rank_call_init_rows(call, w->c, rank, capacity(w, rank));
    call->params.profile = w->profile;
    call->params.comm_alg = w->comm_alg;
    call->params.global_bs = w->global_bs;
    bool hierarchy = w->comm_alg != NULL && strcmp(w->comm_alg, "hierarchy") == 0;
    if (w->profile == EP_GROUP_A3 && hierarchy) {
        call->dispatch.performance_info = ep_tensor_none();
    } else if (w->profile == EP_GROUP_A3) { /* it sends no weights */
        call->dispatch.expert_scales = ep_tensor_none();
        call->dispatch.expand_scales = ep_tensor_none();
    }
    if (w->profile != EP_GROUP_NATIVE && hierarchy) {
        call->combine.expand_scales = call->dispatch.expand_scales;
    }
    if (w->profile == EP_GROUP_A2 || (w->profile == EP_GROUP_A3 && hierarchy)) {
        set_vendor_counts(w, call, rank);
    }
}

static bool play(void *arg, uint32_t rank, ep_group *group)
{
    const world *w = arg;
    rank_call call;
    ep_error error = {.text = ""};
    set_up(w, &call, rank);
    bool good = w->refused == NULL
                    ? rank_call_round(&call, group, &error)
                    : rank_call_dispatch(&call, group, &error) == EP_ERR_INVALID_ARGUMENT &&
                          strstr(error.text, w->refused) != NULL;
    if (!good) {
        fprintf(stderr, "profile %d, comm_alg %s, rank %u: %s; should be: %s\n", (int)w->profile,
                w->comm_alg, rank, error.text,
                w->refused == NULL ? "the oracle's bits" : w->refused);
    }
    rank_call_free(&call);
    return good;
}

/* A batch as a vendor's program has it: every id an expert, no mask. */
static void draw_batch(uint64_t *state, const oracle_case *c, int tokens, oracle_batch *batch)
{
    case_draw_unmasked(state, c, tokens, batch);
    for (int t = 0; t < tokens; t++) {
        int first = case_random(state, 0, c->experts - 1);
        for (int k = 0; k < c->top_k; k++) {
            /* differ: experts is no multiple of 3 */
            batch->ids[t * c->top_k + k] = (first + k * 3) % c->experts;
        }
    }
}

static void draw(oracle_case *c, uint64_t seed, int tokens, bool uneven)
{
    uint64_t state = seed;
    for (int r = 0; r < c->ranks; r++) {
        draw_batch(&state, c, uneven ? 1 + r % tokens : tokens, &c->batch[r]);
    }
}

static bool run(const oracle_case *c, ep_group_profile profile, const char *comm_alg, int global_bs,
                const char *refused)
{
    world w = {.c = c,
               .profile = profile,
               .comm_alg = comm_alg,
               .global_bs = global_bs,
               .refused = refused};
    return rank_threads_play("loopback", NULL, (uint32_t)c->ranks, 20000000, play, &w);
}

static bool test_a2(void)
{
    oracle_case c = {.ranks = 16, .experts = 32, .top_k = 4, .hidden = 64, .dtype = ORACLE_BF16};
    draw(&c, 1, 3, false);
    bool good = run(&c, EP_GROUP_A2, "", 0, NULL) && run(&c, EP_GROUP_A2, "fullmesh", 0, NULL) &&
                run(&c, EP_GROUP_A2, "hierarchy", 0, NULL);
    good = run(&c, EP_GROUP_A2, "fullmesh_v2", 0, "comm_alg is fullmesh_v2: allowed") && good;
    c.quantise_back = true; /* only where the vendor has it */
    good = run(&c, EP_GROUP_A2, "hierarchy", 0, NULL) && good;
    case_free(&c);
    return good;
}

static bool test_a3(void)
{
    oracle_case c = {.ranks = 4,
                     .shared_ranks = 2,
                     .shared_experts = 1,
                     .experts = 10,
                     .top_k = 3,
                     .hidden = 1024,
                     .dtype = ORACLE_F16};
    draw(&c, 2, 5, false);
    bool good = run(&c, EP_GROUP_A3, "", 0, NULL) && run(&c, EP_GROUP_A3, "fullmesh_v1", 0, NULL) &&
                run(&c, EP_GROUP_A3, "fullmesh_v2", 4 * 5, NULL);
    good = run(&c, EP_GROUP_A3, "fullmesh", 0, "comm_alg is fullmesh: allowed") && good;
    good = run(&c, EP_GROUP_A3, "hierarchy", 0, "multiples of 16 in 16..256") && good;
    c.quantise = true;
    c.quantise_back = true;
    good = run(&c, EP_GROUP_A3, "", 0, NULL) && good;
    case_free(&c);

    oracle_case uneven = {
        .ranks = 2, .experts = 4, .top_k = 4, .hidden = 1024, .dtype = ORACLE_BF16};
    draw(&uneven, 3, 7, true);
    good = run(&uneven, EP_GROUP_A3, "", 2 * 2, NULL) && good;
    good = run(&uneven, EP_GROUP_A3, "", 0, "BS differs between ranks") && good;
    /* the batches have 1 and 2 tokens */
    good = run(&uneven, EP_GROUP_A3, "fullmesh_v2", 2 * 2, NULL) && good;
    good = run(&uneven, EP_GROUP_A3, "", 2 * 7, "ep_world_size * largest BS = 2 * 2") && good;
    case_free(&uneven);

    oracle_case many = {
        .ranks = 16, .experts = 32, .top_k = 4, .hidden = 1024, .dtype = ORACLE_BF16};
    draw(&many, 5, 3, false);
    good = run(&many, EP_GROUP_A3, "hierarchy", 0, NULL) && good;
    case_free(&many);
    return good;
}

/* On one host, where hierarchy is a fullmesh; test_hierarchy.c has several. */
static bool test_comm_alg(void)
{
    static const char *const names[] = {NULL,          "",         "fullmesh", "fullmesh_v1",
                                        "fullmesh_v2", "hierarchy"};
    oracle_case c = {.ranks = 5,
                     .experts = 11,
                     .top_k = 6,
                     .hidden = 40,
                     .zero = 1,
                     .copy = 1,
                     .dtype = ORACLE_BF16};
    uint64_t state = 4;
    bool good = true;
    for (int r = 0; r < c.ranks; r++) {
        case_draw_batch(&state, &c, 9 + r, &c.batch[r]);
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        good = run(&c, EP_GROUP_NATIVE, names[i], c.ranks * 13, NULL) && good;
    }
    good = run(&c, EP_GROUP_NATIVE, "ring", 0, "comm_alg is \"ring\": allowed") && good;
    case_free(&c);
    return good;
}

int main(void)
{
    bool good = test_a2();
    good = test_a3() && good;
    good = test_comm_alg() && good;
    return good ? 0 : 1;
}
