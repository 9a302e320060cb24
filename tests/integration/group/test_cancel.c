/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank cancels, or leaves, at every stage of a begun operation: before and after the others
 * have begun it, while it waits in finish, from a callback's side, between the two exchanges of a
 * tensor-parallel pair, and with all that may be under way. The others end with an error that names
 * it or keep what they had finished; after a cancel the group goes on.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_expect.h"
#include "rank_threads.h"

#define RANKS 3
#define ONE 1u /* the rank that cancels or leaves */
#define DEADLINE_US 20000000u

static bool failed;
static pthread_barrier_t together;

static void meet(void)
{
    pthread_barrier_wait(&together);
}

static bool names(const ep_error *error, const char *text)
{
    return strstr(error->text, text) != NULL;
}

/* ---- the stages of a cancel ---- */

typedef enum stage {
    BEFORE_OTHERS, /* they begin when it is cancelled already */
    AFTER_OTHERS,  /* all have sent their rows; nobody has finished */
    IN_FINISH,     /* it waits for the others, and another thread cancels */
    WITH_CALLBACK, /* it is to be called back */
    FINISHED,      /* too late: nothing happens */
    IN_CHILD,      /* a forked child cancels, finishes and frees it: nothing happens */
    STAGES
} stage;

typedef struct trial {
    const oracle_case *c;
    stage stage;
    bool in_combine;
    bool by_host;
} trial;

static ep_err begin(rank_call *call, const trial *t, ep_group *group, rank_form form,
                    ep_error *error)
{
    return t->in_combine ? rank_call_begin_combine(call, group, form, error)
                         : rank_call_begin_dispatch(call, group, form, error);
}

static void *cancel_soon(void *plan)
{
    usleep(2000); /* most likely it waits by then; before is right, too */
    ep_group_plan_cancel(plan);
    return NULL;
}

static ep_err cancel_in_finish(rank_call *call, ep_error *error)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, cancel_soon, call->under_way) != 0) {
        abort();
    }
    ep_err err = rank_call_finish(call, error);
    pthread_join(thread, NULL);
    return err;
}

/* What was made before fork belongs to the parent. */
static bool child_is_refused(rank_call *call)
{
#ifdef __SANITIZE_THREAD__ /* it does not follow a fork of a process with threads */
    (void)call;
    return true;
#else
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        ep_error error = {.text = ""};
        ep_group_plan_cancel(call->under_way);
        bool good = ep_group_plan_poll(call->under_way) &&
                    ep_group_plan_finish(call->under_way, &error) == EP_ERR_FAILED_PRECONDITION &&
                    names(&error, "made before fork");
        ep_group_plan_destroy(call->under_way);
        _exit(good ? 0 : 1);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
#endif
}

static bool is_without_effect(stage at)
{
    return at == FINISHED || at == IN_CHILD;
}

static void cancel(rank_call *call, const trial *t, uint32_t rank, ep_group *group)
{
    ep_error error = {.text = ""};
    rank_form form = t->stage == WITH_CALLBACK ? RANK_CALLBACK : RANK_FINISH;
    EXPECT(begin(call, t, group, form, &error) == EP_OK, "%s", error.text);
    if (t->stage == AFTER_OTHERS || is_without_effect(t->stage)) {
        meet();
    }
    if (is_without_effect(t->stage)) {
        EXPECT(t->stage != IN_CHILD || child_is_refused(call), "a child got on with it");
        EXPECT(rank_call_finish(call, &error) == EP_OK, "%s", error.text);
        ep_group_plan_cancel(call->under_way);
    } else {
        if (t->stage != IN_FINISH) {
            ep_group_plan_cancel(call->under_way);
            ep_group_plan_cancel(call->under_way);
            EXPECT(t->stage == WITH_CALLBACK || ep_group_plan_poll(call->under_way), "not over");
        }
        ep_err err =
            t->stage == IN_FINISH ? cancel_in_finish(call, &error) : rank_call_finish(call, &error);
        EXPECT(err == EP_ERR_CANCELLED && names(&error, "rank 1 has cancelled its ep_moe_"),
               "stage %d: %s %s", (int)t->stage, ep_err_name(err), error.text);
    }
    EXPECT(ep_group_plan_finish(call->under_way, &error) == EP_ERR_FAILED_PRECONDITION,
           "finished twice");
    meet();
    meet();
}

static uint64_t frames_of(ep_group *group)
{
    ep_group_stats stats = {.struct_bytes = sizeof(stats)};
    ep_group_read_stats(group, &stats);
    return stats.frames_received;
}

static void be_with_it(rank_call *call, const trial *t, uint32_t rank, ep_group *group,
                       uint64_t frames)
{
    ep_error error = {.text = ""};
    rank_form form = (rank_form)((rank + (uint32_t)t->stage) % RANK_FORMS);
    bool before = t->stage == AFTER_OTHERS || is_without_effect(t->stage);
    if (before) {
        EXPECT(begin(call, t, group, RANK_FINISH, &error) == EP_OK, "%s", error.text);
        meet();
    }
    meet(); /* it has ended its own */
    /* its rows and what takes them back, and the rows of the third rank */
    while (!is_without_effect(t->stage) && frames_of(group) < frames + (before ? 3 : 2)) {
        usleep(100);
    }
    meet();
    if (!before) {
        EXPECT(begin(call, t, group, form, &error) == EP_OK, "%s", error.text);
    }
    ep_err err = rank_call_finish(call, &error);
    if (is_without_effect(t->stage)) {
        EXPECT(err == EP_OK, "%s", error.text);
    } else {
        EXPECT(err == EP_ERR_CANCELLED && names(&error, "rank 1: ") &&
                   names(&error, "rank 1 has cancelled its ep_moe_"),
               "stage %d: %s %s", (int)t->stage, ep_err_name(err), error.text);
    }
}

static void try_all(void *arg, uint32_t rank, ep_group *group)
{
    trial t = *(const trial *)arg;
    ep_error error = {.text = ""};
    for (int round = 0; round < 2 * STAGES; round++) {
        rank_call call;
        t.stage = (stage)(round % STAGES);
        t.in_combine = round >= STAGES;
        rank_call_init(&call, t.c, rank, 0);
        call.params.comm_alg = t.by_host ? "hierarchy" : "";
        if (t.in_combine) {
            EXPECT(rank_call_dispatch(&call, group, &error) == EP_OK, "%s", error.text);
            rank_call_experts(&call);
        }
        meet();
        uint64_t frames = frames_of(group);
        meet();
        if (rank == ONE) {
            cancel(&call, &t, rank, group);
        } else {
            be_with_it(&call, &t, rank, group, frames);
        }
        meet();
        EXPECT(rank_call_round(&call, group, &error), "stage %d: not usable: %s", (int)t.stage,
               error.text);
        meet(); /* so that frames can be counted */
        rank_call_free(&call);
    }
}

/* ---- as many as are allowed ---- */

static void try_many(void *arg, uint32_t rank, ep_group *group)
{
    enum { MANY = EP_GROUP_OPERATIONS_MAX };
    const trial *t = arg;
    rank_call calls[MANY + 1];
    ep_error error = {.text = ""};
    for (int i = 0; i <= MANY; i++) {
        rank_call_init(&calls[i], t->c, rank, 0);
    }
    for (int i = 0; i < MANY; i++) {
        ep_err err = rank_call_begin_dispatch(&calls[i], group, RANK_FINISH, &error);
        EXPECT(err == EP_OK, "%s", error.text);
    }
    ep_err err = rank_call_begin_dispatch(&calls[MANY], group, RANK_CALLBACK, &error);
    EXPECT(err == EP_ERR_FAILED_PRECONDITION && names(&error, "4 operations are under way"), "%s",
           error.text);
    err = ep_moe_dispatch_begin(group, calls[0].dispatch_plan, &calls[0].dispatch,
                                calls[0].dispatch_workspace, calls[0].dispatch_workspace_bytes,
                                NULL, NULL, &error);
    EXPECT(err == EP_ERR_FAILED_PRECONDITION && names(&error, "of this plan is under way"), "%s",
           error.text);
    int32_t all[4 + 2 * RANKS] = {1, RANKS, 0, 7, 0, 1, 2, 0, 1, 2};
    calls[MANY].params.elastic_info = ep_tensor_1d(all, EP_DTYPE_I32, 4 + 2 * RANKS);
    err = rank_call_begin_dispatch(&calls[MANY], group, RANK_FINISH, &error);
    EXPECT(err == EP_ERR_FAILED_PRECONDITION && names(&error, "elastic_info"), "%s", error.text);
    for (int i = MANY - 1; i >= 1; i--) {
        EXPECT(rank_call_finish(&calls[i], &error) == EP_OK && rank_call_check_dispatch(&calls[i]),
               "%s", error.text);
    }
    meet();
    rank_call_free(&calls[0]); /* cancels it: no rank has finished it */
    for (int i = 1; i <= MANY; i++) {
        rank_call_free(&calls[i]);
    }
    rank_call_init(&calls[0], t->c, rank, 0);
    EXPECT(rank_call_round(&calls[0], group, &error), "%s", error.text);
    rank_call_free(&calls[0]);
}

/* Cancelled again and again, with nobody else there: what may wait at the others is bounded. */
static void try_ahead(void *arg, uint32_t rank, ep_group *group)
{
    const trial *t = arg;
    rank_call call;
    ep_error error = {.text = ""};
    rank_call_init(&call, t->c, rank, 0);
    for (int i = 0; i < 3 * EP_GROUP_OPERATIONS_MAX; i++) {
        EXPECT(rank_call_begin_dispatch(&call, group, RANK_FINISH, &error) == EP_OK, "%s",
               error.text);
        if (rank == ONE) {
            ep_group_plan_cancel(call.under_way);
        }
        ep_err err = rank_call_finish(&call, &error);
        EXPECT(err == EP_ERR_CANCELLED || (rank != ONE && err == EP_OK), "%s", error.text);
        EXPECT(err == EP_OK || names(&error, "rank 1 has cancelled"), "%s", error.text);
    }
    EXPECT(rank_call_round(&call, group, &error), "%s", error.text);
    rank_call_free(&call);
}

/* ---- a rank leaves with something under way ---- */

static void leave(void *arg, uint32_t rank, ep_group *group)
{
    const trial *t = arg;
    rank_call calls[2];
    ep_error error = {.text = ""};
    for (int i = 0; i < 2; i++) {
        rank_call_init(&calls[i], t->c, rank, 0);
        EXPECT(rank_call_begin_dispatch(&calls[i], group, RANK_CALLBACK, &error) == EP_OK, "%s",
               error.text);
    }
    for (int i = 0; i < 2 && rank != ONE; i++) {
        ep_err err = rank_call_finish(&calls[i], &error);
        EXPECT(err == EP_OK || (err == EP_ERR_CANCELLED && names(&error, "rank 1")), "%s",
               error.text);
    }
    if (rank != ONE) { /* it never begins this one; they are called back all the same */
        ep_err err = rank_call_begin_dispatch(&calls[0], group, RANK_INSIDE, &error);
        err = err == EP_OK ? rank_call_finish(&calls[0], &error) : err;
        EXPECT(err == EP_ERR_UNAVAILABLE && names(&error, "rank 1 is gone"), "%s", error.text);
    }
    for (int i = 0; i < 2; i++) {
        rank_call_free(&calls[i]);
    }
}

/* Nobody else comes: the deadline calls back. */
static void stay_away(void *arg, uint32_t rank, ep_group *group)
{
    const trial *t = arg;
    rank_call call;
    ep_error error = {.text = ""};
    rank_call_init(&call, t->c, rank, 0);
    call.dispatch.deadline_us = 50000;
    if (rank == 0) {
        EXPECT(rank_call_begin_dispatch(&call, group, RANK_CALLBACK, &error) == EP_OK, "%s",
               error.text);
        ep_err err = rank_call_finish(&call, &error);
        EXPECT(err == EP_ERR_DEADLINE_EXCEEDED && names(&error, "for rank 1-2"), "%s", error.text);
    }
    meet();
    rank_call_free(&call);
}

int main(void)
{
    static const char *const apart[RANKS] = {"a", "b", "a"};
    oracle_case c = {.ranks = RANKS, .experts = 7, .top_k = 3, .hidden = 16, .dtype = ORACLE_BF16};
    uint64_t state = 11;
    for (int r = 0; r < RANKS; r++) {
        case_draw_batch(&state, &c, 5 + r, &c.batch[r]);
    }
    trial t = {.c = &c};
    pthread_barrier_init(&together, NULL, RANKS);
    rank_threads_run("loopback", RANKS, DEADLINE_US, try_all, &t);
    t.by_host = true;
    rank_threads_run_on("loopback", apart, RANKS, DEADLINE_US, try_all, &t);
    rank_threads_run("loopback", RANKS, DEADLINE_US, try_many, &t);
    rank_threads_run("loopback", RANKS, DEADLINE_US, try_ahead, &t);
    rank_threads_run("loopback", RANKS, DEADLINE_US, leave, &t);
    rank_threads_run("loopback", RANKS, DEADLINE_US, stay_away, &t);
    pthread_barrier_destroy(&together);
    case_free(&c);
    return failed ? 1 : 0;
}
