/* SPDX-License-Identifier: Apache-2.0 */
/* What counts as hanging: jobs that do not end, timers that do not fire; and what does not. */
#include <criterion/criterion.h>
#include <pthread.h>

#include "base/clock.h"
#include "expertd/liveness.h"

#define STALL_MS 1000
#define S EP_NS_PER_S

static ep_timer_service *timers;
static ep_liveness liveness;
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static void setup(void)
{
    cr_assert_eq(ep_timer_service_create("test-timers", &timers), EP_OK);
    ep_liveness_init(&liveness, timers, S);
}

static void teardown(void)
{
    ep_liveness_fini(&liveness);
    ep_timer_service_destroy(timers);
}

TestSuite(liveness, .init = setup, .fini = teardown);

/* The timers' own thread has done everything that was due. */
static void on_fence(ep_timer *timer, void *arg)
{
    (void)timer;
    pthread_mutex_unlock(arg);
}

static void wait_for_timers(void)
{
    pthread_mutex_t done = PTHREAD_MUTEX_INITIALIZER;
    ep_timer fence;
    pthread_mutex_lock(&done);
    ep_timer_init(&fence, on_fence, &done);
    cr_assert_eq(ep_timer_arm(timers, &fence, ep_clock_now_ns()), EP_OK);
    pthread_mutex_lock(&done);
    pthread_mutex_unlock(&done);
    ep_timer_cancel_wait(timers, &fence);
}

static ep_liveness_state check(uint64_t at_s, uint64_t done, uint64_t in_flight)
{
    ep_liveness_state state = ep_liveness_check(&liveness, at_s * S, done, in_flight, STALL_MS);
    wait_for_timers();
    return state;
}

Test(liveness, a_node_without_work_is_alive_however_long)
{
    for (uint64_t t = 1; t < 1000; t += 100) {
        cr_expect_eq(check(t, 7, 0), EP_LIVENESS_OK, "second %d", (int)t);
    }
}

Test(liveness, jobs_that_do_not_end_are_a_hang_and_an_ended_one_is_not)
{
    uint64_t stuck_ms;
    cr_expect_eq(check(1, 5, 3), EP_LIVENESS_OK);
    cr_expect_eq(check(2, 6, 3), EP_LIVENESS_OK, "one was finished");
    cr_expect_eq(check(3, 6, 4), EP_LIVENESS_COMPUTE_STUCK);
    cr_expect_eq(ep_liveness_read(&liveness, &stuck_ms), EP_LIVENESS_COMPUTE_STUCK);
    cr_expect_eq(stuck_ms, 1000);
    cr_expect_eq(check(4, 7, 4), EP_LIVENESS_OK, "it went on");
    cr_expect_eq(ep_liveness_read(&liveness, &stuck_ms), EP_LIVENESS_OK);
    cr_expect_eq(stuck_ms, 0);
}

Test(liveness, time_without_jobs_does_not_count)
{
    cr_expect_eq(check(1, 5, 0), EP_LIVENESS_OK);
    cr_expect_eq(check(9, 5, 0), EP_LIVENESS_OK);
    cr_expect_eq(ep_liveness_check(&liveness, 9 * S + S / 2, 5, 1, STALL_MS), EP_LIVENESS_OK,
                 "it began to work half a second ago");
}

Test(liveness, a_limit_of_0_judges_no_jobs)
{
    check(1, 5, 1);
    cr_expect_eq(ep_liveness_check(&liveness, 5000 * S, 5, 1, 0), EP_LIVENESS_OK);
}

static void on_blocking(ep_timer *timer, void *arg)
{
    (void)timer;
    pthread_mutex_lock(arg);
    pthread_mutex_unlock(arg);
}

Test(liveness, timers_that_do_not_fire_are_a_hang)
{
    ep_timer blocker;
    pthread_mutex_lock(&gate);
    ep_timer_init(&blocker, on_blocking, &gate);
    cr_assert_eq(ep_timer_arm(timers, &blocker, 0), EP_OK);
    ep_liveness_check(&liveness, 1 * S, 0, 0, STALL_MS);
    cr_expect_eq(ep_liveness_check(&liveness, 2 * S, 0, 0, STALL_MS), EP_LIVENESS_OK);
    cr_expect_eq(ep_liveness_check(&liveness, 12 * S, 0, 0, STALL_MS), EP_LIVENESS_TIMERS_STUCK);
    pthread_mutex_unlock(&gate);
    ep_timer_cancel_wait(timers, &blocker);
    wait_for_timers();
    cr_expect_eq(ep_liveness_check(&liveness, 13 * S, 0, 0, STALL_MS), EP_LIVENESS_OK,
                 "the thread goes on");
}
