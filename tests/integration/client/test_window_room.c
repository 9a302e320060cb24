/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The room for reply rows that a call has claimed stays its own between its windows: other calls
 * that begin just as one ends get none of it. The moment is met by standing in for
 * ep_call_end_window.
 */
#include <criterion/criterion.h>
#include <semaphore.h>

#include "call/call.h"
#include "harness.h"
#include "support/expect.h"

#define WINDOWS 8

typedef struct waiter {
    sem_t done;
    ep_moe_result result;
} waiter;

static harness h;
static batch large, small[WINDOWS];
static waiter large_done, small_done[WINDOWS];
static ep_call *large_call;
static uint32_t small_begun;

void __real_ep_call_end_window(ep_call *call, uint32_t window);
void __wrap_ep_call_end_window(ep_call *call, uint32_t window);

static void on_done(void *arg, const ep_moe_result *result)
{
    waiter *w = arg;
    w->result = *result;
    sem_post(&w->done);
}

void __wrap_ep_call_end_window(ep_call *call, uint32_t window)
{
    bool is_large = call == large_call; /* the others never end while it runs */
    __real_ep_call_end_window(call, window);
    if (is_large && call->tokens_sent < large.tokens) {
        uint32_t i = small_begun++;
        ep_error error;
        ASSERT_OK(ep_moe_forward_async(h.client, &small[i].args, &small[i].out_tensor, on_done,
                                       &small_done[i], NULL, &error),
                  error);
    }
}

static void make(batch *b, waiter *w, uint32_t tokens, ep_moe_mode mode)
{
    batch_make(b, &h, tokens, 2, 1);
    b->args.mode = mode;
    sem_init(&w->done, 0, 0);
}

Test(client_window_room, stays_a_calls_own_between_its_windows)
{
    uint64_t seed = 1;
    ep_error error;
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1, .window_tokens = 16);
    fake_node_set_fault(h.nodes[0], FAKE_HANG, EP_OK, 0);
    make(&large, &large_done, WINDOWS * 16, EP_MOE_PREFILL);
    for (int i = 0; i < WINDOWS; i++) {
        make(&small[i], &small_done[i], 1, EP_MOE_DECODE);
    }
    ASSERT_OK(ep_moe_forward_async(h.client, &large.args, &large.out_tensor, on_done, &large_done,
                                   &large_call, &error),
              error);
    fake_node_wait_requests(h.nodes[0], EP_CALL_WINDOWS);
    h.client->window_bytes_max = h.client->window_bytes; /* no room beside the windows under way */
    for (int i = 0; i < WINDOWS; i += EP_CALL_WINDOWS) {
        fake_node_answer_held(h.nodes[0], EP_CALL_WINDOWS, &seed);
    }
    sem_wait(&large_done.done);
    ASSERT_OK(large_done.result.error.code, large_done.result.error);
    cr_assert(batch_equal(&large));
    cr_assert_eq(small_begun, WINDOWS - EP_CALL_WINDOWS);
    for (uint32_t i = 0; i < small_begun; i++) {
        sem_wait(&small_done[i].done);
        cr_assert_eq(small_done[i].result.error.code, EP_ERR_RESOURCE_EXHAUSTED, "%s",
                     small_done[i].result.error.text);
    }
    cr_assert_eq(h.client->window_bytes, 0u, "all of it is given back");
    harness_close(&h);
    batch_free(&large);
    for (int i = 0; i < WINDOWS; i++) {
        batch_free(&small[i]);
    }
}

/* The wait for a node is no cause where none was asked. */
Test(client_window_room, is_named_also_after_the_deadline)
{
    batch b;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 1);
    batch_make(&b, &h, 1, 2, 1);
    b.args.deadline_us = 1;
    h.client->window_bytes = 1; /* another call's */
    h.client->window_bytes_max = 1;
    EXPECT_FAILS(ep_moe_forward(h.client, &b.args, &b.out_tensor, &result),
                 EP_ERR_RESOURCE_EXHAUSTED, result.error, "reply rows of calls in flight need ");
    cr_expect_null(strstr(result.error.text, "no live copy"), "%s", result.error.text);
    h.client->window_bytes = 0;
    batch_free(&b);
    harness_close(&h);
}
