/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two micro-batches under way, thousands of times on the same plans: begin, callback and finish
 * allocate nothing and start no thread. Ranks are threads of this process and every allocation of
 * it is counted, whoever makes it. What may be left is the pool's: another frame or two that wait
 * when a rank is late. Sanitizers bring their own allocator: skipped there.
 */
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"
#include "support/alloc_count.h"

#define RANKS 3
#define WARM 200
#define ROUNDS 2000
#define ALLOCATIONS_MAX (ROUNDS / 20) /* of 4 * RANKS * ROUNDS operations */

#if !EP_TEST_ALLOC_COUNTED
int main(void)
{
    return 0;
}
#else

static bool failed;
static pthread_barrier_t together;

static uint32_t count_threads(void)
{
    uint32_t threads = 0;
    DIR *dir = opendir("/proc/self/task");
    while (dir != NULL && readdir(dir) != NULL) {
        threads++;
    }
    closedir(dir);
    return threads;
}

static void check(ep_err err, const ep_error *error)
{
    if (err != EP_OK) {
        fprintf(stderr, "%s: %s\n", ep_err_name(err), error->text);
        exit(1);
    }
}

static void on_done(void *arg, ep_group_plan *plan)
{
    (void)plan;
    sem_post(arg);
}

static void begin(rank_call *call, ep_group *group, bool combine)
{
    ep_error error;
    if (combine) {
        check(ep_moe_combine_begin(group, call->combine_plan, &call->combine,
                                   call->combine_workspace, call->combine_workspace_bytes, on_done,
                                   &call->done, &error),
              &error);
    } else {
        check(ep_moe_dispatch_begin(group, call->dispatch_plan, &call->dispatch,
                                    call->dispatch_workspace, call->dispatch_workspace_bytes,
                                    on_done, &call->done, &error),
              &error);
    }
}

static void finish(rank_call *call, ep_group_plan *plan)
{
    ep_error error;
    while (sem_wait(&call->done) != 0) {
    }
    check(ep_group_plan_finish(plan, &error), &error);
}

/* The experts' results are those of the first round: the rows are the same. */
static void run_round(rank_call calls[2], ep_group *group)
{
    begin(&calls[0], group, false);
    begin(&calls[1], group, false);
    finish(&calls[0], calls[0].dispatch_plan);
    begin(&calls[0], group, true);
    finish(&calls[1], calls[1].dispatch_plan);
    begin(&calls[1], group, true);
    finish(&calls[0], calls[0].combine_plan);
    finish(&calls[1], calls[1].combine_plan);
}

static void run_rank(void *arg, uint32_t rank, ep_group *group)
{
    rank_call calls[2];
    ep_error error;
    for (int i = 0; i < 2; i++) {
        rank_call_init(&calls[i], arg, rank, 0);
        check(rank_call_dispatch(&calls[i], group, &error), &error);
        rank_call_experts(&calls[i]);
        check(rank_call_combine(&calls[i], group, &error), &error);
        sem_init(&calls[i].done, 0, 0);
    }
    for (int round = 0; round < WARM; round++) {
        run_round(calls, group);
    }
    uint32_t threads = count_threads();
    pthread_barrier_wait(&together);
    if (rank == 0) {
        ep_test_alloc_count_begin();
    }
    pthread_barrier_wait(&together);
    for (int round = 0; round < ROUNDS; round++) {
        run_round(calls, group);
    }
    pthread_barrier_wait(&together);
    if (rank == 0) {
        uint64_t allocations = ep_test_alloc_count_end();
        printf("%d operations, %llu allocations, threads %u then %u\n", 4 * RANKS * ROUNDS,
               (unsigned long long)allocations, threads, count_threads());
        failed = failed || allocations > ALLOCATIONS_MAX || count_threads() != threads;
    }
    pthread_barrier_wait(&together);
    for (int i = 0; i < 2; i++) {
        if (!rank_call_check_combine(&calls[i], 0)) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
        rank_call_free(&calls[i]);
    }
}

int main(void)
{
    oracle_case c = {.ranks = RANKS, .experts = 6, .top_k = 3, .hidden = 32, .dtype = ORACLE_BF16};
    uint64_t state = 21;
    for (int r = 0; r < RANKS; r++) {
        case_draw_batch(&state, &c, 6 + r, &c.batch[r]);
    }
    pthread_barrier_init(&together, NULL, RANKS);
    rank_threads_run("shm", RANKS, 60000000, run_rank, &c);
    pthread_barrier_destroy(&together);
    case_free(&c);
    return failed ? 1 : 0;
}
#endif
