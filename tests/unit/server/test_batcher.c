/* SPDX-License-Identifier: Apache-2.0 */
/* Order, classes, limits and endings of the batcher, against a backend that does only what the test says. */
#include <criterion/criterion.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "expertd/batcher.h"
#include "hand_backend.h"

#define WORKS 64

static hand_backend hand;
static ep_batcher *batcher;
static ep_work works[WORKS];
static ep_work_queue queues[WORKS];
static ep_job_row row;
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

static void setup(void)
{
    hand_backend_init(&hand);
    cr_assert_eq(ep_batcher_create(&hand.base, 2, &batcher), EP_OK);
    for (int i = 0; i < WORKS; i++) {
        works[i] = (ep_work){.job = {.rows = &row, .rows_count = 1},
                             .queue = &queues[i],
                             .done = on_done,
                             .is_dropped = is_dropped};
        results[i] = EP_ERR_UNKNOWN;
    }
}

static void teardown(void)
{
    while (hand_backend_complete(&hand, EP_OK)) {
    }
    ep_batcher_destroy(batcher);
}

/* Numbers of the works given to the backend so far. */
static const char *submitted(void)
{
    static char text[1024];
    size_t n = 0;
    text[0] = 0;
    for (uint32_t i = 0; i < hand.count; i++) {
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%td ", (ep_work *)(void *)hand.jobs[i] - works);
    }
    return text;
}

TestSuite(batcher, .init = setup, .fini = teardown);

_Static_assert(offsetof(ep_work, job) == 0, "the test finds a work by its job");

Test(batcher, at_most_in_flight_max_jobs_are_on_the_backend)
{
    ep_batcher_submit(batcher, works, 5);
    cr_expect_str_eq(submitted(), "0 1 ");
    ep_batcher_stats stats;
    ep_batcher_read_stats(batcher, &stats);
    cr_expect_eq(stats.in_flight, 2);
    cr_expect_eq(stats.waiting[EP_WORK_DECODE], 3);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1 2 ");
    while (hand_backend_complete(&hand, EP_OK)) {
    }
    cr_expect_str_eq(log_text, "0 1 2 3 4 ");
}

Test(batcher, one_experts_work_is_first_in_first_out_and_experts_take_turns)
{
    for (int i = 0; i < 6; i++) {
        works[i].queue = &queues[i < 4 ? 0 : 1]; /* 0 1 2 3 for expert 0; 4 5 for expert 1 */
    }
    ep_batcher_submit(batcher, works, 6);
    while (hand_backend_complete(&hand, EP_OK)) {
    }
    cr_expect_str_eq(submitted(), "0 4 1 5 2 3 ");
}

Test(batcher, decode_goes_first_but_prefill_gets_every_eighth_job)
{
    for (int i = 0; i < 40; i++) {
        works[i].work_class = i < 20 ? EP_WORK_PREFILL : EP_WORK_DECODE;
    }
    ep_batcher_submit(batcher, works, 20);      /* 0 and 1 start: nothing else waits */
    ep_batcher_submit(batcher, works + 20, 20); /* decode */
    while (hand_backend_complete(&hand, EP_OK)) {
    }
    cr_expect_str_eq(submitted(), "0 1 20 21 22 23 24 25 26 2 27 28 29 30 31 32 33 3 34 35 36 37 38 39 4 5 6 "
                                  "7 8 9 10 11 12 13 14 15 16 17 18 19 ");
}

Test(batcher, dropped_work_never_reaches_the_backend)
{
    ep_batcher_submit(batcher, works, 4);
    dropped[2] = true;
    while (hand_backend_complete(&hand, EP_OK)) {
    }
    cr_expect_str_eq(submitted(), "0 1 3 ");
    cr_expect_eq(results[2], EP_ERR_CANCELLED);
    cr_expect_eq(works[2].started_ns, 0);
    cr_expect_eq(results[3], EP_OK);
}

Test(batcher, a_full_backend_gets_the_same_work_again_in_order)
{
    works[1].queue = works[2].queue = &queues[1];
    ep_batcher_submit(batcher, works, 1);
    hand.next_error = EP_ERR_RESOURCE_EXHAUSTED;
    ep_batcher_submit(batcher, works + 1, 2);
    cr_expect_str_eq(submitted(), "0 ");
    ep_batcher_stats stats;
    ep_batcher_read_stats(batcher, &stats);
    cr_expect_eq(stats.waiting[EP_WORK_DECODE], 2);
    hand_backend_complete(&hand, EP_OK);
    cr_expect_str_eq(submitted(), "0 1 2 ");
}

Test(batcher, a_refusing_backend_fails_the_work_and_nothing_else)
{
    hand.next_error = EP_ERR_DEVICE_LOST;
    ep_batcher_submit(batcher, works, 2);
    cr_expect_eq(results[0], EP_ERR_DEVICE_LOST);
    hand_backend_complete(&hand, EP_ERR_DATA_LOSS);
    cr_expect_eq(results[1], EP_ERR_DATA_LOSS);
    hand.next_error =
        EP_ERR_RESOURCE_EXHAUSTED; /* full with nothing in flight: nobody would ever pump again */
    ep_batcher_submit(batcher, works + 2, 1);
    cr_expect_eq(results[2], EP_ERR_RESOURCE_EXHAUSTED);
}

Test(batcher, close_ends_what_waits_and_lets_the_backend_finish)
{
    ep_batcher_submit(batcher, works, 4);
    ep_batcher_close(batcher, EP_ERR_DRAINING);
    cr_expect_str_eq(log_text, "2 3 ");
    cr_expect_eq(results[2], EP_ERR_DRAINING);
    ep_batcher_submit(batcher, works + 4, 1);
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
        ep_batcher_submit(batcher, work, 1);
    }
}

Test(batcher, done_may_submit_again)
{
    works[0].done = submit_again;
    chain_left = 1000;
    ep_batcher_submit(batcher, works, 1);
    while (hand_backend_complete(&hand, EP_OK)) {
    }
    cr_expect_eq(hand.count, 1000);
}
