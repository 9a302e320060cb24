/* SPDX-License-Identifier: Apache-2.0 */
/* on_tokens: each token once and in order, its row final when it is told of, long before the last
 * one; what is left when the call ends otherwise. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "call/call.h"
#include "harness.h"
#include "support/expect.h"

#define WINDOW 4
#define UNDER_WAY (4 * WINDOW) /* tokens */

/* What one call has told of. */
typedef struct told {
    const batch *b; /* NULL: rows are not compared */
    uint32_t tokens;
    uint32_t ranges;
    uint32_t cancel_at; /* so many told, it ends the call; 0 never */
    bool is_cancelled;
    bool in_begin; /* the call that begins it has not returned */
    pthread_t thread;
    sem_t more;
    sem_t done;
    ep_moe_result result;
} told;

static harness h;
static batch b;
static told t;
static ep_call *call;
static ep_moe_result result;
static ep_error error;

static bool rows_equal(const batch *own, uint32_t first, uint32_t end)
{
    const size_t row = (size_t)own->hidden * 2;
    return memcmp(own->out + first * row, own->expected + first * row, (end - first) * row) == 0;
}

static void on_tokens(void *arg, ep_call *own_call, uint32_t first, uint32_t count)
{
    told *w = arg;
    cr_expect(!__atomic_load_n(&w->in_begin, __ATOMIC_ACQUIRE) ||
              !pthread_equal(w->thread, pthread_self()));
    cr_expect(!w->is_cancelled, "told of %u tokens after it was cancelled", count);
    cr_expect_eq(first, w->tokens);
    cr_expect_gt(count, 0u);
    cr_expect(w->b == NULL || rows_equal(w->b, first, first + count), "tokens %u + %u", first,
              count);
    w->ranges++;
    __atomic_store_n(&w->tokens, first + count, __ATOMIC_RELEASE);
    if (w->cancel_at != 0 && w->tokens >= w->cancel_at) {
        w->is_cancelled = true;
        ep_call_cancel(own_call);
    }
    sem_post(&w->more);
}

static void on_done(void *arg, const ep_moe_result *r)
{
    told *w = arg;
    w->result = *r;
    sem_post(&w->done);
}

static void open_batch(uint32_t tokens, ep_moe_mode mode)
{
    batch_make(&b, &h, tokens, 2, tokens);
    t = (told){.b = &b, .thread = pthread_self()};
    sem_init(&t.more, 0, 0);
    sem_init(&t.done, 0, 0);
    b.args.mode = mode;
    b.args.on_tokens = on_tokens;
    b.args.on_tokens_arg = &t;
}

static void close_all(void)
{
    harness_close(&h);
    batch_free(&b);
}

TestSuite(on_tokens, .fini = close_all);

static ep_err run_async(void)
{
    t.in_begin = true;
    ASSERT_OK(ep_moe_forward_async(h.client, &b.args, &b.out_tensor, on_done, &t, &call, &error),
              error);
    __atomic_store_n(&t.in_begin, false, __ATOMIC_RELEASE);
    sem_wait(&t.done);
    result = t.result;
    return result.error.code;
}

static ep_err run_prepared(void)
{
    ep_call *prepared = NULL;
    ASSERT_OK(ep_call_create(h.client, &b.args, &b.out_tensor, &prepared, &error), error);
    ep_err err = EP_OK;
    for (int run = 0; run < 2 && err == EP_OK; run++) {
        t.tokens = 0;
        t.in_begin = true;
        ASSERT_OK(ep_call_begin(prepared, b.tokens, &error), error);
        __atomic_store_n(&t.in_begin, false, __ATOMIC_RELEASE);
        err = ep_call_finish(prepared, &result);
    }
    ep_call_destroy(prepared);
    return err;
}

static ep_err run(int form)
{
    return form == 0   ? ep_moe_forward(h.client, &b.args, &b.out_tensor, &result)
           : form == 1 ? run_async()
                       : run_prepared();
}

/* ---- calls that succeed ---- */

Test(on_tokens, every_form_and_mode_tells_of_each_token_once)
{
    static const uint32_t tokens[] = {1, 3, 64, 300, 700};
    for (uint32_t own_window = 0; own_window < 2; own_window++) {
        HARNESS_OPEN(&h, .scheme = own_window ? "tcp" : "loopback", .nodes_count = 3, .copies = 2,
                     .shared_experts = 1, .coordinator = true, .chunk_bytes_max = 16384,
                     .window_tokens = own_window * 50);
        for (uint32_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]) * 6; i++) {
            open_batch(tokens[i / 6], i % 2 == 0 ? EP_MOE_PREFILL : EP_MOE_DECODE);
            ASSERT_OK(run((int)(i / 2 % 3)), result.error);
            cr_expect(batch_equal(&b));
            cr_expect_eq(t.tokens, b.tokens);
            cr_expect_eq(result.tokens_delivered, b.tokens);
            batch_free(&b);
        }
        harness_close(&h);
    }
}

Test(on_tokens, a_call_without_it_says_0)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    open_batch(5, EP_MOE_PREFILL);
    b.args.on_tokens = NULL;
    ASSERT_OK(run(0), result.error);
    cr_expect_eq(result.tokens_delivered, 0u);
    cr_expect(batch_equal(&b));
}

Test(on_tokens, no_tokens_no_range)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    for (int form = 0; form < 3; form++) {
        open_batch(0, EP_MOE_AUTO);
        ASSERT_OK(run(form), result.error);
        cr_expect_eq(t.ranges, 0u);
        batch_free(&b);
    }
}

/* Tokens that wait for nothing hold nothing up, and are told of in their turn. */
Test(on_tokens, inactive_tokens_and_slots)
{
    uint8_t mask[40];
    const ep_moe_mode modes[] = {EP_MOE_DECODE, EP_MOE_PREFILL};
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .window_tokens = WINDOW);
    for (int i = 0; i < 12; i++) {
        open_batch(40, modes[i % 2]);
        for (uint32_t token = 0; token < 40; token++) {
            mask[token] = i / 6 == 0 && token % 5 != 0 && token / WINDOW != 3;
            if (mask[token] == 0) {
                memset(b.expected + (size_t)token * b.hidden * 2, 0, (size_t)b.hidden * 2);
            }
        }
        b.args.active_mask = ep_tensor_1d(mask, EP_DTYPE_BOOL, 40);
        ASSERT_OK(run(i / 2 % 3), result.error);
        cr_expect(batch_equal(&b));
        cr_expect_eq(t.tokens, 40u);
        batch_free(&b);
    }
}

/* The nodes hold all other rows: nobody waits for them to be told of the first tokens. */
static void expect_early(ep_moe_mode mode, uint32_t tokens, uint32_t early)
{
    uint64_t seed = tokens;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .window_tokens = WINDOW);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    open_batch(tokens, mode);
    ASSERT_OK(ep_moe_forward_async(h.client, &b.args, &b.out_tensor, on_done, &t, &call, &error),
              error);
    fake_node_answer_held(h.nodes[0], early / WINDOW, &seed);
    while (__atomic_load_n(&t.tokens, __ATOMIC_ACQUIRE) < early) {
        sem_wait(&t.more);
    }
    cr_expect_neq(sem_trywait(&t.done), 0);
    cr_expect(rows_equal(&b, 0, early));
}

Test(on_tokens, prefill_tells_long_before_the_last_row)
{
    expect_early(EP_MOE_PREFILL, 4 * UNDER_WAY, UNDER_WAY);
    fake_node_release(h.nodes[0]);
    sem_wait(&t.done);
    ASSERT_OK(t.result.error.code, t.result.error);
    cr_expect_eq(t.tokens, b.tokens);
    cr_expect(batch_equal(&b));
}

/* Expert e is on node e % 2. */
static void first_on_node_0(uint32_t tokens)
{
    for (uint32_t token = 0; token < b.tokens; token++) {
        b.ids[2 * token] = token < tokens ? 0 : 1;
        b.ids[2 * token + 1] = token < tokens ? 2 : 3;
    }
    batch_expect(&b, &h);
}

/* One frame a node: tokens of one node are there while another still holds its rows. */
static void expect_as_replies_land(ep_moe_combine_quant quant)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .experts = 4);
    open_batch(30, EP_MOE_DECODE);
    first_on_node_0(20);
    b.args.combine_quant = quant;
    if (quant != EP_MOE_COMBINE_PLAIN) { /* the bits to be are those of a call that is not told */
        b.args.on_tokens = NULL;
        ASSERT_OK(run(0), result.error);
        memcpy(b.expected, b.out, (size_t)b.tokens * b.hidden * 2);
        b.args.on_tokens = on_tokens;
    }
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    ASSERT_OK(ep_moe_forward_async(h.client, &b.args, &b.out_tensor, on_done, &t, &call, &error),
              error);
    sem_wait(&t.more);
    cr_expect_eq(t.tokens, 20u);
    cr_expect_neq(sem_trywait(&t.done), 0);
    fake_node_release(h.nodes[1]);
    sem_wait(&t.done);
    ASSERT_OK(t.result.error.code, t.result.error);
    cr_expect_eq(t.tokens, 30u);
    cr_expect_eq(t.ranges, 2u);
    cr_expect(batch_equal(&b));
}

Test(on_tokens, decode_tells_as_replies_land)
{
    expect_as_replies_land(EP_MOE_COMBINE_PLAIN);
}

Test(on_tokens, decode_tells_as_quantised_replies_land)
{
    expect_as_replies_land(EP_MOE_COMBINE_INT8);
}

static void begin_another(void *arg, ep_call *own_call, uint32_t first, uint32_t count)
{
    (void)own_call;
    (void)count;
    if (first == 0) {
        ASSERT_OK(ep_moe_forward_async(h.client, &((batch *)arg)->args, &((batch *)arg)->out_tensor,
                                       on_done, &t, NULL, &error),
                  error);
    }
}

Test(on_tokens, another_call_may_be_begun_in_it)
{
    batch next;
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .window_tokens = WINDOW);
    open_batch(40, EP_MOE_PREFILL);
    batch_make(&next, &h, 9, 2, 77);
    b.args.on_tokens = begin_another;
    b.args.on_tokens_arg = &next;
    ASSERT_OK(run(0), result.error);
    sem_wait(&t.done);
    ASSERT_OK(t.result.error.code, t.result.error);
    cr_expect(batch_equal(&b));
    cr_expect(batch_equal(&next));
    harness_close(&h);
    batch_free(&next);
}

/* ---- calls that end otherwise ---- */

Test(on_tokens, a_cancel_in_it_ends_every_form_behind_that_range)
{
    HARNESS_OPEN(&h, .scheme = "tcp", .nodes_count = 2, .window_tokens = WINDOW);
    for (int form = 0; form < 3; form++) {
        open_batch(10 * UNDER_WAY, EP_MOE_PREFILL);
        t.cancel_at = 1 + (uint32_t)form * UNDER_WAY;
        cr_expect_eq(run(form), EP_ERR_CANCELLED, "form %d", form);
        cr_expect(t.is_cancelled && t.tokens < b.tokens);
        cr_expect_eq(result.tokens_delivered, t.tokens);
        cr_expect(rows_equal(&b, 0, t.tokens));
        batch_free(&b);
    }
}

/* The other node's rows, the last ones, lie in the inbox by then. */
static void cancel_before_waiting_rows(void *arg, ep_call *own_call, uint32_t first, uint32_t count)
{
    bool has_answer = false;
    on_tokens(arg, own_call, first, count);
    if (first == 0) {
        fake_node_release(h.nodes[1]);
        while (!has_answer) {
            sched_yield();
            pthread_mutex_lock(&own_call->lock);
            has_answer = !STAILQ_EMPTY(&own_call->inbox);
            pthread_mutex_unlock(&own_call->lock);
        }
        t.is_cancelled = true;
        ep_call_cancel(own_call);
    }
}

Test(on_tokens, a_cancel_in_it_comes_before_rows_that_wait)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .experts = 4);
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    open_batch(30, EP_MOE_DECODE);
    first_on_node_0(20);
    b.args.on_tokens = cancel_before_waiting_rows;
    cr_expect_eq(run(0), EP_ERR_CANCELLED);
    cr_expect_eq(t.tokens, 20u);
    cr_expect_eq(result.tokens_delivered, 20u);
}

/* All that was asked for lies in the inbox by then, and the deadline has passed: what a caller
 * meets whose wait times out while the last answer arrives. */
static void outlast_the_deadline(void *arg, ep_call *own_call, uint32_t first, uint32_t count)
{
    on_tokens(arg, own_call, first, count);
    for (bool is_late = first > 0; !is_late;) {
        uint32_t missing = 0;
        const ep_call_frame *frame;
        sched_yield();
        for (uint32_t i = 0; i < own_call->state.parcels_count; i++) {
            missing += own_call->state.parcels[i].phase == EP_PARCEL_IN_FLIGHT;
        }
        pthread_mutex_lock(&own_call->lock);
        STAILQ_FOREACH(frame, &own_call->inbox, inbox)
        {
            missing--;
        }
        is_late = missing == 0 && ep_clock_now_ns() >= own_call->state.deadline_ns;
        own_call->flags |= is_late ? EP_CALL_FLAG_TIMER : 0;
        pthread_mutex_unlock(&own_call->lock);
    }
}

Test(on_tokens, a_deadline_with_nothing_to_wait_for_is_an_error)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .window_tokens = WINDOW);
    open_batch(4 * UNDER_WAY, EP_MOE_PREFILL);
    b.args.on_tokens = outlast_the_deadline;
    b.args.deadline_us = 1000000;
    EXPECT_FAILS(run(0), EP_ERR_DEADLINE_EXCEEDED, result.error,
                 "before the service was asked for all tokens");
    cr_expect_eq(result.tokens_delivered, t.tokens);
    cr_expect_lt(t.tokens, b.tokens);
}

Test(on_tokens, a_cancel_in_the_last_range_comes_too_late)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    for (int form = 0; form < 2; form++) {
        open_batch(8, EP_MOE_DECODE);
        t.cancel_at = 8;
        ASSERT_OK(run(form), result.error);
        cr_expect_eq(result.tokens_delivered, 8u);
        batch_free(&b);
    }
    open_batch(8, EP_MOE_DECODE); /* nor does it end the call that has the place next */
    ASSERT_OK(run(0), result.error);
}

/* Neither a call that never ran nor one whose newest begin was refused has tokens to tell of. */
Test(on_tokens, a_cancel_between_runs_tells_of_nothing)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    open_batch(8, EP_MOE_DECODE);
    ASSERT_OK(ep_call_create(h.client, &b.args, &b.out_tensor, &call, &error), error);
    ep_call_cancel(call);
    for (uint32_t tokens = 8; tokens > 0; tokens -= 4) {
        t.tokens = 0;
        ASSERT_OK(ep_call_begin(call, tokens, &error), error);
        ASSERT_OK(ep_call_finish(call, &result), result.error);
        cr_expect_eq(t.tokens, tokens);
    }
    b.ids[15] = INT32_MIN;
    cr_expect_eq(ep_call_begin(call, 8, &error), EP_ERR_INVALID_ARGUMENT);
    ep_call_cancel(call);
    ep_call_destroy(call);
    harness_close(&h); /* waits for what was handed to a thread */
    cr_expect_eq(t.tokens, 4u);
}

Test(on_tokens, after_an_error_the_tokens_told_of_stay)
{
    expect_early(EP_MOE_PREFILL, 4 * UNDER_WAY, UNDER_WAY);
    harness_stop_node(&h, 0); /* the only copy */
    ep_call_cancel(call);
    sem_wait(&t.done);
    cr_expect_eq(t.result.error.code, EP_ERR_CANCELLED);
    cr_expect_eq(t.result.tokens_delivered, (uint32_t)UNDER_WAY);
    cr_expect_eq(t.tokens, (uint32_t)UNDER_WAY);
    cr_expect(rows_equal(&b, 0, UNDER_WAY));
}

Test(on_tokens, an_error_of_a_node_behind_the_first_windows)
{
    uint64_t seed = 3;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .window_tokens = WINDOW);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    open_batch(8 * UNDER_WAY, EP_MOE_PREFILL);
    ASSERT_OK(ep_moe_forward_async(h.client, &b.args, &b.out_tensor, on_done, &t, &call, &error),
              error);
    fake_node_answer_held(h.nodes[0], 4, &seed);
    fake_node_answer_held(h.nodes[0], 3, &seed); /* one of the second four stays */
    fake_node_wait_requests(h.nodes[0], 11);
    fake_node_set_fault(h.nodes[0], FAKE_ERROR, EP_ERR_INVALID_ARGUMENT, 0);
    fake_node_answer_held(h.nodes[0], 1, &seed); /* the window behind it is refused */
    sem_wait(&t.done);
    cr_expect_eq(t.result.error.code, EP_ERR_INVALID_ARGUMENT, "%s", t.result.error.text);
    cr_expect_eq(t.result.tokens_delivered, t.tokens);
    cr_expect(t.tokens >= UNDER_WAY && t.tokens < b.tokens, "%u", t.tokens);
    cr_expect(rows_equal(&b, 0, t.tokens));
}

/* Those behind a row that does not come are told of at the deadline. */
Test(on_tokens, missing_rows_come_last)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .experts = 4);
    fake_node_set_fault(h.nodes[1], FAKE_HANG, EP_OK, 0);
    open_batch(30, EP_MOE_DECODE);
    t.b = NULL;
    for (uint32_t token = 0; token < 30; token++) {
        b.ids[2 * token] = 0;
        b.ids[2 * token + 1] = token == 20 ? 1 : 2;
    }
    b.args.allow_missing = true;
    b.args.deadline_us = 300000;
    ASSERT_OK(run(0), result.error);
    cr_expect_eq(result.missing_count, 1u);
    cr_expect_eq(result.missing_first_slot, 41u);
    cr_expect_eq(result.tokens_delivered, 30u);
    cr_expect_eq(t.ranges, 2u);
    cr_expect_eq(t.tokens, 30u);
}
