/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes wrong on several hosts: ranks that disagree, bad values, ranks that leave, stay away,
 * or are left out. All as in a fullmesh, whoever it is: a gateway, a source behind it, or a
 * neighbour.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_expect.h"
#include "rank_threads.h"

#define RANKS 5
#define DEADLINE_US 20000000

static const char *const hosts[RANKS] = {"left", "right", "left", "right", "right"};

typedef struct scene {
    oracle_case *cases; /* [0]: all ranks; [1]: all but one */
    uint32_t odd;
    bool other_way;
    pthread_barrier_t all;
    pthread_barrier_t others; /* without the odd one */
} scene;

static bool failed;

static bool says(const ep_error *error, const char *text)
{
    return strstr(error->text, text) != NULL;
}

static bool names(const ep_error *error, const char *before, uint32_t rank, const char *after)
{
    char text[128];
    snprintf(text, sizeof(text), "%s%u%s", before, rank, after);
    return says(error, text);
}

static void init(rank_call *call, const oracle_case *c, uint32_t rank)
{
    rank_call_init(call, c, rank, 2);
    call->params.comm_alg = "hierarchy";
}

static void expect_works(rank_call *call, uint32_t rank, ep_group *group)
{
    ep_error error = {.text = ""};
    EXPECT(rank_call_round(call, group, &error), "a good round fails: %s", error.text);
}

/* ---- nobody leaves ---- */

/* The odd one calls for hierarchy and the others do not, or the other way round: frames go two
 * ways, and all learn why. */
static void disagree(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    rank_call call;
    ep_error error = {.text = ""};
    init(&call, s->cases, rank);
    for (int round = 0; round < 3; round++) {
        call.params.comm_alg = (rank == s->odd) != s->other_way ? "hierarchy" : "fullmesh";
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_ERR_INVALID_ARGUMENT && says(&error, "comm_alg differs between ranks: ") &&
                   says(&error, "hierarchy at rank ") && says(&error, "fullmesh at rank ") &&
                   names(&error, s->other_way ? "fullmesh at rank " : "hierarchy at rank ", s->odd,
                         ""),
               "%s", error.text);
        call.params.comm_alg = "hierarchy";
        expect_works(&call, rank, group);
    }
    rank_call_free(&call);
}

/* One rank gives up its call without waiting, and calls again at once: its neighbours need what
 * still comes through it. */
static void bad_values(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    rank_call call;
    ep_error error = {.text = ""};
    init(&call, s->cases, rank);
    int32_t *ids = call.dispatch.expert_ids.data;
    int32_t good = ids[0];
    for (int round = 0; round < 4; round++) {
        if (rank == s->odd) {
            ids[0] = 99;
        }
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_ERR_INVALID_ARGUMENT && says(&error, "expert_ids is 99 at token 0") &&
                   (rank == s->odd || names(&error, "rank ", s->odd, ": ")),
               "%s", error.text);
        ids[0] = good;
        if (round % 2 == 1) {
            expect_works(&call, rank, group);
        }
    }
    rank_call_free(&call);
}

static void refused(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    static float smooth[64 * 64];
    rank_call call;
    ep_error error = {.text = ""};
    oracle_case c = *s->cases;
    c.quantise = true;
    init(&call, &c, rank);
    call.dispatch.scales = ep_tensor_2d(smooth, EP_DTYPE_F32, c.experts, c.hidden);
    ep_err err = rank_call_dispatch(&call, group, &error);
    EXPECT(err == EP_ERR_INVALID_ARGUMENT &&
               says(&error, "scales is given: allowed only absent (comm_alg is hierarchy"),
           "%s", error.text);
    rank_call_free(&call);
}

/* ---- somebody does ---- */

static void one_leaves(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    rank_call call;
    ep_error error = {.text = ""};
    init(&call, s->cases, rank);
    expect_works(&call, rank, group);
    for (int i = 0; i < 2 && rank != s->odd; i++) {
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_ERR_UNAVAILABLE && names(&error, "rank ", s->odd, " is gone"), "%s",
               error.text);
    }
    rank_call_free(&call);
}

/* What it had sent, and what had to come through it, is there; only then is it missed. */
static void one_leaves_between(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    rank_call call;
    ep_error error = {.text = ""};
    init(&call, s->cases, rank);
    ep_err err = rank_call_dispatch(&call, group, &error);
    EXPECT(err == EP_OK && rank_call_check_dispatch(&call), "%s", error.text);
    if (rank != s->odd && err == EP_OK) {
        rank_call_experts(&call);
        err = rank_call_combine(&call, group, &error);
        EXPECT(err == EP_ERR_UNAVAILABLE && names(&error, "rank ", s->odd, " is gone"), "%s",
               error.text);
    }
    rank_call_free(&call);
}

/* Nobody but one rank calls: what it waits for comes through a rank that is elsewhere, and must
 * tell it all the same. */
static void one_leaves_alone(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    rank_call call;
    ep_error error = {.text = ""};
    /* on the other host, and not the gateway */
    static const uint32_t callers[RANKS] = {3, 0, 4, 2, 0};
    init(&call, s->cases, rank);
    expect_works(&call, rank, group);
    if (rank == callers[s->odd]) {
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_ERR_UNAVAILABLE && names(&error, "rank ", s->odd, " is gone"), "%s",
               error.text);
    }
    if (rank != s->odd) {
        pthread_barrier_wait(&s->others);
    }
    rank_call_free(&call);
}

static void one_stays_away(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    rank_call call;
    ep_error error = {.text = ""};
    init(&call, s->cases, rank);
    expect_works(&call, rank, group);
    call.dispatch.deadline_us = 2000000;
    pthread_barrier_wait(&s->all); /* all begin in time for each other's frames */
    /* it passes on what comes through it although it is elsewhere: nobody else is missing */
    if (rank != s->odd) {
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_ERR_DEADLINE_EXCEEDED &&
                   names(&error, " us for rank ", s->odd, " in ep_moe_dispatch"),
               "%s", error.text);
    }
    pthread_barrier_wait(&s->all); /* who leaves earlier would be another error */
    rank_call_free(&call);
}

static void others_go_on(void *arg, uint32_t rank, ep_group *group)
{
    scene *s = arg;
    int32_t elastic[4 + 2 * RANKS] = {1, RANKS - 1, 0, s->cases[1].experts};
    rank_call call;
    rank_call less;
    ep_error error = {.text = ""};
    int64_t waited[RANKS] = {0};
    init(&call, s->cases, rank);
    expect_works(&call, rank, group);
    if (rank != s->odd) {
        ep_err err = rank_call_dispatch(&call, group, &error);
        EXPECT(err == EP_ERR_UNAVAILABLE, "%s", error.text);
        for (uint32_t r = 0, local = 0; r < RANKS; r++) {
            elastic[4 + r] = r == s->odd ? -1 : (int32_t)local;
            if (r != s->odd) {
                elastic[4 + RANKS + local++] = (int32_t)r;
            }
        }
        elastic[4 + 2 * RANKS - 1] = -1;
        init(&less, &s->cases[1], (uint32_t)elastic[4 + rank]);
        less.params.elastic_info = ep_tensor_1d(elastic, EP_DTYPE_I32, 4 + 2 * RANKS);
        less.dispatch.performance_info = ep_tensor_1d(waited, EP_DTYPE_I64, RANKS);
        for (int i = 0; i < 3; i++) {
            expect_works(&less, rank, group);
        }
        rank_call_free(&less);
    }
    rank_call_free(&call);
}

/* A host's name that does not fit is refused before anything else. */
static void long_host(void)
{
    char host[65];
    const char *urls[] = {"loopback://long-host"};
    ep_group_config config;
    ep_group *group;
    ep_error error;
    memset(host, 'h', 64);
    host[64] = 0;
    ep_group_config_init(&config);
    config.name = "long-host";
    config.world_size = 1;
    config.urls = urls;
    config.urls_count = 1;
    config.host = host;
    if (ep_group_create(&config, &group, &error) != EP_ERR_INVALID_ARGUMENT ||
        !says(&error, "with 64 characters: allowed up to 63")) {
        fprintf(stderr, "a host of 64 characters: %s\n", error.text);
        failed = true;
    }
}

int main(void)
{
    static const struct {
        rank_func func;
        bool both_ways;
    } parts[] = {{disagree, true},        {bad_values, false},         {refused, false},
                 {one_leaves, false},     {one_leaves_between, false}, {one_leaves_alone, false},
                 {one_stays_away, false}, {others_go_on, false}};
    oracle_case cases[2] = {
        {.ranks = RANKS, .experts = 11, .top_k = 4, .hidden = 24, .dtype = ORACLE_BF16},
        {.ranks = RANKS - 1, .experts = 9, .top_k = 3, .hidden = 16, .dtype = ORACLE_F32}};
    uint64_t state = 21;
    for (int i = 0; i < 2; i++) {
        for (int r = 0; r < cases[i].ranks; r++) {
            case_draw_batch(&state, &cases[i], 4 + r, &cases[i].batch[r]);
        }
    }
    long_host();
    for (size_t p = 0; p < sizeof(parts) / sizeof(parts[0]) && !failed; p++) {
        for (uint32_t i = 0; i < (parts[p].both_ways ? 2 * RANKS : RANKS); i++) {
            scene s = {.cases = cases, .odd = i % RANKS, .other_way = i >= RANKS};
            pthread_barrier_init(&s.all, NULL, RANKS);
            pthread_barrier_init(&s.others, NULL, RANKS - 1);
            rank_threads_run_on("loopback", hosts, RANKS, DEADLINE_US, parts[p].func, &s);
            pthread_barrier_destroy(&s.all);
            pthread_barrier_destroy(&s.others);
        }
    }
    case_free(&cases[0]);
    case_free(&cases[1]);
    return failed ? 1 : 0;
}
