/* SPDX-License-Identifier: Apache-2.0 */
/* Order, classes, limits and endings of the batcher, against a backend that does only what the test
 * says. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "expertd/batcher.h"
#include "hand_backend.h"

#define WORKS 64

/* The clock stands where a test sets it. */
uint64_t __real_ep_clock_now_ns(void);
uint64_t __wrap_ep_clock_now_ns(void);
static uint64_t set_ns;

uint64_t __wrap_ep_clock_now_ns(void)
{
    return set_ns != 0 ? set_ns : __real_ep_clock_now_ns();
}

static hand_backend hand;
static ep_batcher *batcher;
static ep_work works[WORKS];
static ep_work_queue queues[WORKS];
static ep_job_row rows[WORKS];
static ep_backend_weights weights = {.hidden = 64, .inner = 2048};
static char log_text[1024]; /* work numbers in the order of done() */
static bool dropped[WORKS];
static ep_err results[WORKS];

static void on_done(ep_work *work, ep_err result)
{
    size_t n = strlen(log_text);
    ptrdiff_t index = work - works;
    results[index] = result;
    snprintf(log_text + n, sizeof(log_text) - n, "%td ", index);
}

static bool is_dropped(const ep_work *work)
{
    return dropped[work - works];
}

static void on_submit(const ep_job *job);

static void start_batcher(const ep_batch_policy_config *policy, ep_timer_service *timers)
{
    hand_backend_init(&hand);
    hand.on_submit = on_submit;
    cr_assert_eq(ep_batcher_create(policy, timers, &batcher), EP_OK);
    for (int i = 0; i < WORKS; i++) {
        rows[i].x = &works[i];
        works[i] = (ep_work){.backend = &hand.base,
                             .job = {.weights = &weights, .rows = &rows[i], .rows_count = 1},
                             .place = {.queue = &queues[i]},
                             .done = on_done,
                             .is_dropped = is_dropped};
        results[i] = EP_ERR_UNKNOWN;
    }
}

static void setup(void)
{
    start_batcher(&(ep_batch_policy_config){.jobs_max = 2, .tenants_count = 1}, NULL);
}

static void teardown(void)
{
    hand_backend_complete_all(&hand);
    ep_batcher_destroy(batcher);
}

static char submitted_text[1024];

/* A row's x is its work. Rows of one job are joined by "+". */
static void on_submit(const ep_job *job)
{
    size_t n = strlen(submitted_text);
    for (uint32_t r = 0; r < job->rows_count; r++) {
        n += (size_t)snprintf(submitted_text + n, sizeof(submitted_text) - n, "%s%td",
                              r == 0 ? "" : "+", (const ep_work *)job->rows[r].x - works);
    }
    snprintf(submitted_text + n, sizeof(submitted_text) - n, " ");
}

/* Numbers of the works given to the backend so far. */
static const char *submitted(void)
{
    return submitted_text;
}

TestSuite(batcher, .init = setup, .fini = teardown);

Test(batcher, at_most_in_flight_max_jobs_are_on_the_backend)
{
    ep_batcher_submit(batcher, works, 5, NULL);
    cr_expect_str_eq(submitted(), "0 1 ");
    ep_batcher_stats stats;
    ep_batcher_read_stats(batcher, &stats);
    cr_expect_eq(stats.in_flight, 2);
    cr_expect_eq(stats.waiting[EP_WORK_DECODE], 3);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1 2 ");
    hand_backend_complete_all(&hand);
    cr_expect_str_eq(log_text, "0 1 2 3 4 ");
}

Test(batcher, one_experts_works_ride_one_job_and_each_is_told_its_end)
{
    for (int i = 1; i < 6; i++) {
        works[i].place.queue = &queues[i < 5 ? 1 : 0]; /* 1 2 3 4 for expert 1; 0 5 for expert 0 */
    }
    ep_batcher_submit(batcher, works, 1, NULL);
    ep_batcher_submit(batcher, works + 1, 1, NULL);
    ep_batcher_submit(batcher, works + 2, 4, NULL);
    cr_expect_str_eq(submitted(), "0 1 ");
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1 2+3+4 ");
    hand_backend_complete(&hand, EP_OK);
    hand_backend_complete(&hand, EP_ERR_DATA_LOSS);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(log_text, "0 1 2 3 4 5 ");
    cr_expect_eq(results[3], EP_ERR_DATA_LOSS);
    cr_expect_eq(results[5], EP_OK);
    ep_batcher_stats stats;
    ep_batcher_read_stats(batcher, &stats);
    cr_expect_eq(stats.jobs_total[EP_WORK_DECODE], 4);
    cr_expect_eq(atomic_load(&queues[0].passes), 2);
    cr_expect_eq(atomic_load(&queues[1].passes), 2, "works that ride one job are one pass");
    cr_expect_eq(stats.works_total[EP_WORK_DECODE], 6);
    cr_expect_eq(stats.rows_total[EP_WORK_DECODE], 6);
}

Test(batcher, busy_time_runs_while_jobs_are_on_the_backend)
{
    ep_batcher_stats stats, later;
    ep_batcher_submit(batcher, works, 2, NULL);
    hand_backend_complete(&hand, EP_OK);
    ep_batcher_read_stats(batcher, &stats);
    const uint64_t work = stats.busy_work;
    cr_expect_gt(work, 0);
    uint64_t begin_ns = ep_clock_now_ns();
    while (ep_clock_now_ns() == begin_ns) {
    }
    ep_batcher_read_stats(batcher, &later);
    cr_expect_gt(later.busy_ns, stats.busy_ns, "one is still there");
    hand_backend_complete(&hand, EP_OK);
    ep_batcher_read_stats(batcher, &stats);
    cr_expect_eq(stats.busy_work, 2 * work);
    begin_ns = ep_clock_now_ns();
    while (ep_clock_now_ns() == begin_ns) {
    }
    ep_batcher_read_stats(batcher, &later);
    cr_expect_eq(later.busy_ns, stats.busy_ns, "none is");
}

static uint64_t drawn;

/* Jobs of 1 or 32 rows at once; they end with the last of them, after its rows and 60 for a pass.
 */
static void run_jobs(uint32_t jobs, ep_err last)
{
    static ep_job_row job_rows[32];
    uint32_t took = 0;
    for (uint32_t i = 0; i < jobs; i++) {
        const uint32_t count = ep_splitmix64(&drawn) % 2 == 0 ? 1 : 32;
        works[i].job.rows = job_rows;
        works[i].job.rows_count = count;
        took = 60 + count;
    }
    ep_batcher_submit(batcher, works, jobs, NULL);
    set_ns += (uint64_t)took * weights.hidden * weights.inner;
    for (uint32_t i = 0; i < jobs; i++) {
        hand_backend_complete(&hand, i + 1 < jobs ? EP_OK : last);
    }
}

Test(batcher, what_a_pass_is_worth_is_learnt_from_jobs_that_are_alone_and_end_well)
{
    hand.on_submit = NULL;
    set_ns = 1;
    for (uint32_t i = 0; i < 500; i++) {
        run_jobs(2, EP_OK);
        run_jobs(1, EP_ERR_DATA_LOSS);
    }
    cr_expect_eq(ep_batcher_pass_rows(batcher), EP_BATCH_WEIGHT_ROWS, "it is %u",
                 ep_batcher_pass_rows(batcher));
    for (uint32_t i = 0; i < 500; i++) {
        run_jobs(1, EP_OK);
    }
    cr_expect_eq(ep_batcher_pass_rows(batcher), 60u, "it is %u", ep_batcher_pass_rows(batcher));
}

Test(batcher, decode_goes_first)
{
    for (int i = 0; i < 6; i++) {
        works[i].place.work_class = i < 3 ? EP_WORK_PREFILL : EP_WORK_DECODE;
    }
    ep_batcher_submit(batcher, works, 3, NULL); /* 0 starts, 1 and 2 may still grow */
    ep_batcher_submit(batcher, works + 3, 3, NULL);
    cr_expect_str_eq(submitted(), "0 3 4 ", "each class has its own room");
    hand_backend_complete_all(&hand);
    cr_expect_str_eq(submitted(), "0 3 4 5 1 2 ");
}

Test(batcher, a_work_dropped_among_others_is_left_out_of_their_job)
{
    for (int i = 2; i < 6; i++) {
        works[i].place.queue = &queues[2];
    }
    ep_batcher_submit(batcher, works, 2, NULL);
    ep_batcher_submit(batcher, works + 2, 4, NULL);
    dropped[3] = true;
    hand_backend_complete_all(&hand);
    cr_expect_str_eq(submitted(), "0 1 2+4+5 ");
    cr_expect_eq(results[3], EP_ERR_CANCELLED);
    cr_expect_eq(results[4], EP_OK);
}

/* Tenant 1 is not behind tenant 0 for works that nobody computed. */
Test(batcher_tenants, dropped_work_costs_its_tenant_nothing, .fini = teardown)
{
    start_batcher(&(ep_batch_policy_config){.jobs_max = 2, .tenants_count = 2}, NULL);
    for (int i = 2; i < 9; i++) {
        works[i].place.tenant = 1;
        dropped[i] = i < 7;
    }
    works[1].place.row_cost = 3;
    ep_batcher_submit(batcher, works, 2, NULL);
    ep_batcher_submit(batcher, works + 2, 5, NULL);
    cr_expect_str_eq(log_text, "2 3 4 5 6 ");
    ep_batcher_submit(batcher, works + 9, 1, NULL);
    ep_batcher_submit(batcher, works + 7, 2, NULL); /* 7 begins beside the room of the others */
    cr_expect_str_eq(submitted(), "0 1 7 ");
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1 7 ");
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1 7 8 9 ");
}

Test(batcher, dropped_work_never_reaches_the_backend)
{
    ep_batcher_submit(batcher, works, 4, NULL);
    dropped[2] = true;
    hand_backend_complete_all(&hand);
    cr_expect_str_eq(submitted(), "0 1 3 ");
    cr_expect_eq(results[2], EP_ERR_CANCELLED);
    cr_expect_eq(works[2].started_ns, 0);
    cr_expect_eq(results[3], EP_OK);
}

Test(batcher, a_full_backend_gets_the_same_work_again_in_order)
{
    works[1].place.queue = works[2].place.queue = &queues[1];
    ep_batcher_submit(batcher, works, 1, NULL);
    hand.next_error = EP_ERR_RESOURCE_EXHAUSTED;
    ep_batcher_submit(batcher, works + 1, 2, NULL);
    cr_expect_str_eq(submitted(), "0 ");
    ep_batcher_stats stats;
    ep_batcher_read_stats(batcher, &stats);
    cr_expect_eq(stats.waiting[EP_WORK_DECODE], 2);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1+2 ");
}

Test(batcher, a_refusing_backend_fails_the_work_and_nothing_else)
{
    hand.next_error = EP_ERR_DEVICE_LOST;
    ep_batcher_submit(batcher, works, 2, NULL);
    cr_expect_eq(results[0], EP_ERR_DEVICE_LOST);
    hand_backend_complete(&hand, EP_ERR_DATA_LOSS);
    cr_expect_eq(results[1], EP_ERR_DATA_LOSS);
    hand.next_error =
        EP_ERR_RESOURCE_EXHAUSTED; /* full with nothing in flight: nobody would ever pump again */
    ep_batcher_submit(batcher, works + 2, 1, NULL);
    cr_expect_eq(results[2], EP_ERR_RESOURCE_EXHAUSTED);
}

Test(batcher, close_ends_what_waits_and_lets_the_backend_finish)
{
    ep_batcher_submit(batcher, works, 4, NULL);
    ep_batcher_close(batcher, EP_ERR_DRAINING);
    cr_expect_str_eq(log_text, "2 3 ");
    cr_expect_eq(results[2], EP_ERR_DRAINING);
    ep_batcher_submit(batcher, works + 4, 1, NULL);
    cr_expect_eq(results[4], EP_ERR_DRAINING);
    hand_backend_complete(&hand, EP_OK);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_eq(results[0], EP_OK);
    cr_expect_eq(results[1], EP_OK);
}

static int chain_left = 20000;

static void submit_again(ep_work *work, ep_err result)
{
    (void)result;
    if (--chain_left > 0) {
        ep_batcher_submit(batcher, work, 1, NULL);
    }
}

Test(batcher, done_may_submit_again)
{
    works[0].done = submit_again;
    chain_left = 1000;
    ep_batcher_submit(batcher, works, 1, NULL);
    hand_backend_complete_all(&hand);
    cr_expect_eq(hand.count, 1000);
}

static pthread_mutex_t group_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t group_changed = PTHREAD_COND_INITIALIZER;
static uint32_t group_done;

static void on_group_done(ep_work *work, ep_err result)
{
    (void)work;
    pthread_mutex_lock(&group_lock);
    group_done += result == EP_OK;
    pthread_cond_broadcast(&group_changed);
    pthread_mutex_unlock(&group_lock);
}

/*
 * A rank that never comes costs the others a window; here nothing but the timer can release them.
 * The window is long enough for the second submit to find it open on a slow machine.
 */
Test(batcher_groups, a_window_ends_by_itself)
{
    ep_timer_service *timers;
    const ep_batch_step step = {.layer = &queues, .group = 1, .size = 3, .member = 1};
    cr_assert_eq(ep_timer_service_create("test", &timers), EP_OK);
    const ep_batch_policy_config policy = {
        .jobs_max = 2, .tenants_count = 1, .group_window_ns = 2 * EP_NS_PER_S};
    start_batcher(&policy, timers);
    works[0].done = works[1].done = on_group_done;
    works[1].place.queue = works[0].place.queue;
    const ep_batch_step second = {.layer = &queues, .group = 1, .size = 3, .member = 2};
    ep_batcher_submit(batcher, works, 1, &step);
    ep_batcher_submit(batcher, works + 1, 1, &second);
    hand_backend_wait(&hand, 1);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0+1 ");
    cr_expect_eq(group_done, 2);
    works[2].done = on_group_done;
    const ep_batch_step other = {.layer = &queues, .group = 2, .size = 3};
    ep_batcher_submit(batcher, works + 2, 1, &other);
    ep_batcher_destroy(batcher); /* ends what waits for its group */
    cr_expect_eq(group_done, 2);
    ep_timer_service_destroy(timers);
}

/* Nothing but the new window tells the second group from the first, whose rank would wait for ever
 * here. */
Test(batcher_groups, another_window_holds_for_groups_that_begin_later)
{
    ep_timer_service *timers;
    const ep_batch_step waits = {.layer = &queues, .group = 1, .size = 2, .member = 1},
                        goes = {.layer = &queues, .group = 2, .size = 2, .member = 1};
    cr_assert_eq(ep_timer_service_create("test", &timers), EP_OK);
    const ep_batch_policy_config policy = {
        .jobs_max = 2, .tenants_count = 1, .group_window_ns = 3600 * EP_NS_PER_S};
    start_batcher(&policy, timers);
    works[0].done = works[1].done = on_group_done;
    ep_batcher_submit(batcher, works, 1, &waits);
    ep_batcher_set_group_window(batcher, 0);
    ep_batcher_submit(batcher, works + 1, 1, &goes);
    hand_backend_wait(&hand, 1);
    cr_expect_str_eq(submitted(), "1 ");
    hand_backend_complete(&hand, EP_OK);
    ep_batcher_destroy(batcher);
    cr_expect_eq(group_done, 1); /* the other one was cancelled */
    ep_timer_service_destroy(timers);
}

static bool is_arm_failing;
ep_err __real_ep_timer_arm(ep_timer_service *service, ep_timer *timer, uint64_t due_ns);
ep_err __wrap_ep_timer_arm(ep_timer_service *service, ep_timer *timer, uint64_t due_ns);

/* The linker puts it in the way of the batcher's calls. */
ep_err __wrap_ep_timer_arm(ep_timer_service *service, ep_timer *timer, uint64_t due_ns)
{
    return is_arm_failing ? EP_ERR_NO_MEMORY : __real_ep_timer_arm(service, timer, due_ns);
}

Test(batcher_groups, without_a_timer_nobody_waits_for_a_group, .fini = teardown)
{
    ep_timer_service *timers;
    const ep_batch_step step = {.layer = &queues, .group = 1, .size = 3};
    cr_assert_eq(ep_timer_service_create("test", &timers), EP_OK);
    start_batcher(&(ep_batch_policy_config){.jobs_max = 2,
                                            .tenants_count = 1,
                                            .group_window_ns = UINT64_MAX / 4},
                  timers);
    is_arm_failing = true;
    ep_batcher_submit(batcher, works, 2, &step);
    cr_expect_str_eq(submitted(), "0 1 ");
    hand_backend_complete(&hand, EP_OK);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(log_text, "0 1 ");
    ep_batcher_destroy(batcher);
    batcher = NULL;
    ep_timer_service_destroy(timers);
}
