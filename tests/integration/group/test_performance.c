/* SPDX-License-Identifier: Apache-2.0 */
/*
 * performance_info: one rank begins only when the others have each other's frames. So on them its
 * index alone has waited, and no longer than the call; whatever the machine does meanwhile. For
 * dispatch and combine. It begins some milliseconds later still, so that another index would show.
 *
 * usage: test_performance [MS]     how much later; the times are printed
 */
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "case_draw.h"
#include "rank_call.h"
#include "rank_threads.h"

#define RANKS 4
#define LATE 2

typedef struct world {
    const oracle_case *c;
    long later_ms;
    bool prints;
    pthread_barrier_t step;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int waiting; /* ranks that have all but the late one's frame */
} world;

static uint64_t frames_from(ep_group *group, uint32_t rank)
{
    ep_group_traffic traffic = {.struct_bytes = sizeof(traffic)};
    ep_group_read_traffic(group, rank, &traffic);
    return traffic.frames_received;
}

static void be_late(world *w)
{
    struct timespec pause = {w->later_ms / 1000, w->later_ms % 1000 * 1000000};
    pthread_mutex_lock(&w->lock);
    while (w->waiting < RANKS - 1) {
        pthread_cond_wait(&w->changed, &w->lock);
    }
    w->waiting = 0;
    pthread_mutex_unlock(&w->lock);
    nanosleep(&pause, NULL);
}

static void tell_waiting(world *w, ep_group *group, uint32_t rank, const uint64_t *before)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        while (r != rank && r != LATE && frames_from(group, r) == before[r]) {
            sched_yield();
        }
    }
    pthread_mutex_lock(&w->lock);
    w->waiting++;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static bool check(const world *w, const char *what, uint32_t rank, const int64_t *waited,
                  uint64_t call_ns)
{
    bool good = true;
    for (uint32_t r = 0; r < RANKS; r++) {
        good = good && (r == LATE ? waited[r] >= 0 && waited[r] <= (int64_t)(call_ns / 1000)
                                  : waited[r] == 0);
    }
    if (!good || w->prints) {
        printf("%s, rank %" PRIu32 ": waited %.2f %.2f %.2f %.2f ms; rank %d was %ld ms late\n",
               what, rank, (double)waited[0] / 1e3, (double)waited[1] / 1e3,
               (double)waited[2] / 1e3, (double)waited[3] / 1e3, LATE, w->later_ms);
    }
    return good;
}

/* One operator; begin is of this call. */
static bool play(world *w, rank_call *call, uint32_t rank, ep_group *group,
                 ep_err (*begin)(rank_call *, ep_group *, rank_form, ep_error *), const char *what,
                 int64_t *waited, ep_error *error)
{
    uint64_t before[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
        before[r] = frames_from(group, r);
        waited[r] = 0;
    }
    pthread_barrier_wait(&w->step); /* nobody begins before all have counted */
    if (rank == LATE) {
        be_late(w);
    }
    ep_err err = begin(call, group, RANK_FINISH, error);
    if (rank != LATE && err == EP_OK) {
        tell_waiting(w, group, rank, before);
    }
    uint64_t begin_ns = ep_clock_now_ns();
    err = err == EP_OK ? rank_call_finish(call, error) : err;
    return err == EP_OK &&
           (rank == LATE || check(w, what, rank, waited, ep_clock_now_ns() - begin_ns));
}

static bool play_both(void *arg, uint32_t rank, ep_group *group)
{
    world *w = arg;
    rank_call call;
    int64_t waited[RANKS] = {0};
    ep_error error = {.text = ""};
    rank_call_init(&call, w->c, rank, 0);
    call.dispatch.performance_info = ep_tensor_1d(waited, EP_DTYPE_I64, RANKS);
    call.combine.performance_info = call.dispatch.performance_info;
    bool good = play(w, &call, rank, group, rank_call_begin_dispatch, "dispatch", waited, &error);
    rank_call_experts(&call);
    good = play(w, &call, rank, group, rank_call_begin_combine, "combine", waited, &error) && good;
    if (!good) {
        fprintf(stderr, "rank %" PRIu32 ": %s\n", rank, error.text);
    }
    rank_call_free(&call);
    return good;
}

int main(int argc, char **argv)
{
    uint64_t state = 9;
    oracle_case c = {.ranks = RANKS, .experts = 8, .top_k = 4, .hidden = 64, .dtype = ORACLE_BF16};
    world w = {.c = &c, .later_ms = argc > 1 ? atol(argv[1]) : 20, .prints = argc > 1};
    for (int r = 0; r < RANKS; r++) {
        case_draw_batch(&state, &c, 5, &c.batch[r]);
    }
    pthread_barrier_init(&w.step, NULL, RANKS);
    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.changed, NULL);
    const bool good = rank_threads_play("loopback", NULL, RANKS, 60000000, play_both, &w);
    case_free(&c);
    return good ? 0 : 1;
}
