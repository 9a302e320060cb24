/* SPDX-License-Identifier: Apache-2.0 */
/* A callback that blocks, which it must not, holds up no other call: neither its deadline nor its
 * callback. */
#include <criterion/criterion.h>
#include <errno.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>

#include "harness.h"

#define PATIENCE_S 20

static harness h;
static sem_t slow_entered;
static sem_t slow_may_go;
static sem_t others_ended;
static ep_err ended_with[3];

static bool wait_for(sem_t *semaphore)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    int result;
    while ((result = sem_timedwait(semaphore, &until)) != 0 && errno == EINTR) {
    }
    return result == 0;
}

static void slow_done(void *arg, const ep_moe_result *result)
{
    *(ep_err *)arg = result->error.code;
    sem_post(&slow_entered);
    wait_for(&slow_may_go);
}

static void other_done(void *arg, const ep_moe_result *result)
{
    *(ep_err *)arg = result->error.code;
    sem_post(&others_ended);
}

static ep_call *begin(batch *b, uint64_t seed, uint64_t deadline_us, ep_moe_done_func done,
                      ep_err *out_end)
{
    ep_error error;
    ep_call *call = NULL;
    batch_make(b, &h, 2, 2, seed);
    b->args.deadline_us = deadline_us;
    ep_err err =
        ep_moe_forward_async(h.client, &b->args, &b->out_tensor, done, out_end, &call, &error);
    cr_assert_eq(err, EP_OK, "%s", error.text);
    return call;
}

static void open_hanging(const char *scheme)
{
    HARNESS_OPEN(&h, .scheme = scheme, .nodes_count = 1, .copies = 1);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    sem_init(&slow_entered, 0, 0);
    sem_init(&slow_may_go, 0, 0);
    sem_init(&others_ended, 0, 0);
}

Test(slow_callback, after_a_deadline_delays_no_other_deadline)
{
    batch slow, callback, blocking;
    ep_moe_result result;
    open_hanging("tcp");
    begin(&slow, 1, 20000, slow_done, &ended_with[0]);
    begin(&callback, 2, 200000, other_done, &ended_with[1]);
    cr_assert(wait_for(&slow_entered));
    cr_assert_eq(ended_with[0], EP_ERR_DEADLINE_EXCEEDED);
    bool ended = wait_for(&others_ended);
    cr_expect(ended, "the other call's deadline passed unnoticed");
    cr_expect_eq(ended_with[1], EP_ERR_DEADLINE_EXCEEDED);
    batch_make(&blocking, &h, 2, 2, 3);
    blocking.args.deadline_us = 20000;
    cr_expect_eq(ep_moe_forward(h.client, &blocking.args, &blocking.out_tensor, &result),
                 EP_ERR_DEADLINE_EXCEEDED);
    sem_post(&slow_may_go);
    harness_close(&h);
    batch_free(&slow);
    batch_free(&callback);
    batch_free(&blocking);
}

Test(slow_callback, after_a_cancel_delays_no_other_deadline)
{
    batch slow, callback;
    open_hanging("loopback");
    ep_call *call = begin(&slow, 1, 10000000, slow_done, &ended_with[0]);
    ep_call_cancel(call);
    cr_assert(wait_for(&slow_entered));
    cr_assert_eq(ended_with[0], EP_ERR_CANCELLED);
    begin(&callback, 2, 20000, other_done, &ended_with[1]);
    cr_expect(wait_for(&others_ended), "the other call's deadline passed unnoticed");
    cr_expect_eq(ended_with[1], EP_ERR_DEADLINE_EXCEEDED);
    sem_post(&slow_may_go);
    harness_close(&h);
    batch_free(&slow);
    batch_free(&callback);
}
