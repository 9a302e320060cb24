/* SPDX-License-Identifier: Apache-2.0 */
/* Order, cancel and re-arm. Real time is asserted only as "not before". */
#include <criterion/criterion.h>
#include <semaphore.h>
#include <signal.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/timer.h"

#define COUNT 500

typedef struct {
    ep_timer timer;
    uint64_t due_ns;
} item;

static item items[COUNT];
static uint64_t fired_due[COUNT];
static int fired;
static int early;
static sem_t all_done;
static sem_t all_armed;

/* Else one that is due early could be armed after a later one has fired. */
static void wait_until_armed(ep_timer *timer, void *arg)
{
    (void)timer, (void)arg;
    sem_wait(&all_armed);
}

static void on_fire(ep_timer *timer, void *arg)
{
    item *it = arg;
    early += ep_clock_now_ns() < it->due_ns;
    cr_assert_eq(timer, &it->timer);
    fired_due[fired++] = it->due_ns;
    if (fired == COUNT) {
        sem_post(&all_done);
    }
}

Test(timer, fires_in_order_and_never_early)
{
    ep_timer_service *service;
    ep_timer gate;
    uint64_t seed = 42, start = ep_clock_now_ns() + 50 * EP_NS_PER_MS;
    sem_init(&all_done, 0, 0);
    sem_init(&all_armed, 0, 0);
    cr_assert_eq(ep_timer_service_create("test-timer", &service), EP_OK);
    ep_timer_init(&gate, wait_until_armed, NULL);
    cr_assert_eq(ep_timer_arm(service, &gate, 0), EP_OK);
    for (int i = 0; i < COUNT; i++) {
        items[i].due_ns = start + ep_splitmix64(&seed) % (20 * EP_NS_PER_MS);
        ep_timer_init(&items[i].timer, on_fire, &items[i]);
        cr_assert_eq(ep_timer_arm(service, &items[i].timer, EP_TIME_NEVER - 1), EP_OK);
        cr_assert_eq(ep_timer_arm(service, &items[i].timer, items[i].due_ns), EP_OK);
    }
    sem_post(&all_armed);
    sem_wait(&all_done);
    ep_timer_service_destroy(service);
    cr_assert_eq(early, 0);
    for (int i = 1; i < COUNT; i++) {
        cr_assert_leq(fired_due[i - 1], fired_due[i]);
    }
}

Test(timer, cancelled_timer_never_fires)
{
    ep_timer_service *service;
    cr_assert_eq(ep_timer_service_create("test-timer", &service), EP_OK);
    for (int i = 0; i < COUNT; i++) {
        items[i].due_ns = ep_clock_now_ns() + 3600 * EP_NS_PER_S;
        ep_timer_init(&items[i].timer, on_fire, &items[i]);
        ep_timer_arm(service, &items[i].timer, items[i].due_ns);
    }
    for (int i = COUNT - 1; i >= 0; i -= 2) {
        cr_assert(ep_timer_cancel(service, &items[i].timer));
        cr_assert_not(ep_timer_cancel_wait(service, &items[i].timer));
    }
    ep_timer_service_destroy(service);
    cr_assert_eq(fired, 0);
}

static void on_rearm(ep_timer *timer, void *arg)
{
    if (++fired == 5) {
        sem_post(&all_done);
    } else {
        ep_timer_arm(arg, timer, ep_clock_now_ns());
    }
}

Test(timer, may_arm_itself_again)
{
    ep_timer_service *service;
    ep_timer timer;
    sem_init(&all_done, 0, 0);
    cr_assert_eq(ep_timer_service_create("test-timer", &service), EP_OK);
    ep_timer_init(&timer, on_rearm, service);
    ep_timer_arm(service, &timer, 0);
    sem_wait(&all_done);
    ep_timer_cancel_wait(service, &timer);
    ep_timer_service_destroy(service);
    cr_assert_eq(fired, 5);
}

static void read_mask(ep_timer *timer, void *arg)
{
    (void)timer;
    pthread_sigmask(SIG_SETMASK, NULL, arg);
    sem_post(&all_done);
}

Test(timer, leaves_signals_to_the_programs_own_threads)
{
    ep_timer_service *service;
    ep_timer timer;
    sigset_t mask;
    sem_init(&all_done, 0, 0);
    cr_assert_eq(ep_timer_service_create("test-timer", &service), EP_OK);
    ep_timer_init(&timer, read_mask, &mask);
    ep_timer_arm(service, &timer, 0);
    sem_wait(&all_done);
    ep_timer_service_destroy(service);
    cr_assert_eq(sigismember(&mask, SIGTERM), 1);
    cr_assert_eq(sigismember(&mask, SIGUSR1), 1);
}
