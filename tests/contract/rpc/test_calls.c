/* SPDX-License-Identifier: Apache-2.0 */
/* What a caller sees of calls, over each lane. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc_fixture.h"
#include "support/expect.h"

/* One body, a test per lane. */
#define LANE_TEST(name) RPC_LANE_TEST(rpc_calls, name)

LANE_TEST(unary_call_brings_message_and_tensors_back)
{
    fixture f;
    answer a;
    size_t sizes[] = {0, 1, 63, 64, 65, 4096, 1000003};
    fixture_init(&f, &(fixture_options){.url = url});
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint8_t fill = (uint8_t)(17 + i);
        ASSERT_OK(forward(&f, "echo", sizes[i], fill, in_ms(SECONDS * 1000), &a), a.error);
        cr_assert_eq(a.tensor_bytes, sizes[i]);
        cr_assert_eq(a.slots, fill);
        cr_assert_eq(a.ends, 1);
        cr_assert(a.aligned);
        cr_assert(sizes[i] == 0 || (a.first_byte == fill && a.last_byte == fill));
    }
    cr_assert_str_eq(f.seen_metadata, "00-abc-def-01");
    cr_assert_str_eq(f.seen_peer, "worker-1");
    cr_assert(f.seen_deadline_ns != EP_TIME_NEVER && f.seen_deadline_ns > ep_clock_now_ns());
    fixture_fini(&f);
}

LANE_TEST(calls_above_the_frame_limit_are_refused_with_the_limit)
{
    fixture f;
    answer a;
    ep_error error;
    fixture_init(&f, &(fixture_options){.url = url});
    ASSERT_FAILS(forward_start(&f, "echo", (size_t)16 << 20, 1, EP_TIME_NEVER, &a, NULL, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "frame_bytes_max is 16777216");
    char *long_name = calloc(1, 70000);
    memset(long_name, 'x', 69999);
    ASSERT_FAILS(forward_start(&f, long_name, 0, 1, EP_TIME_NEVER, &a, NULL, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "header_bytes_max is 65536");
    free(long_name);
    fixture_fini(&f);
}

LANE_TEST(an_error_travels_with_every_detail)
{
    fixture f;
    answer a;
    fixture_init(&f, &(fixture_options){.url = url});
    cr_assert_eq(forward(&f, "error", 0, 1, EP_TIME_NEVER, &a), EP_ERR_NOT_OWNER);
    cr_assert_str_eq(a.error.text, "expert 9 of layer 4 is not here");
    cr_assert_str_eq(a.error.node, "node-a");
    cr_assert(a.error.layer == 4 && a.error.expert == 9 && a.error.waited_us == 11);
    cr_assert(a.error.retry_after_us == 22 && a.error.current_epoch == 33);
    cr_assert_eq(forward(&f, "none", 0, 1, EP_TIME_NEVER, &a), EP_ERR_INTERNAL);
    ASSERT_TEXT(a.error, "gave no reply");
    cr_assert_eq(forward(&f, "big", 0, 1, EP_TIME_NEVER, &a), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(forward(&f, "echo", 100, 1, EP_TIME_NEVER, &a), EP_OK);
    fixture_fini(&f);
}

LANE_TEST(a_stream_arrives_in_order_and_ends_once)
{
    fixture f;
    answer a;
    uint64_t counts[] = {0, 1, 2, 500};
    fixture_init(&f, &(fixture_options){.url = url});
    for (size_t i = 0; i < 4; i++) {
        uint64_t want = 0;
        for (uint64_t n = 1; n <= counts[i]; n++) {
            want = want * 31 + n;
        }
        cr_assert_eq(watch_start(&f, counts[i], false, EP_TIME_NEVER, &a, NULL), EP_OK);
        answer_wait_end(&a);
        ASSERT_OK(a.error.code, a.error);
        cr_assert(a.messages == counts[i] && a.ends == 1 && a.numbers == want);
    }
    fixture_fini(&f);
}

LANE_TEST(a_thousand_calls_in_flight_are_answered_in_any_order)
{
    enum { N = 1000 };
    fixture f;
    answer *a = calloc(N, sizeof(*a));
    fixture_init(&f, &(fixture_options){.url = url});
    f.late_batch = N;
    for (uint32_t i = 0; i < N; i++) {
        cr_assert_eq(
            forward_start(&f, "late", 64 + i, (uint8_t)i, EP_TIME_NEVER, &a[i], NULL, NULL), EP_OK);
    }
    for (uint32_t i = 0; i < N; i++) {
        answer_wait_end(&a[i]);
    }
    for (uint32_t i = 0; i < N; i++) {
        ASSERT_OK(a[i].error.code, a[i].error);
        cr_assert(a[i].ends == 1 && a[i].tensor_bytes == 64 + i);
        cr_assert(a[i].first_byte == (uint8_t)i && a[i].last_byte == (uint8_t)i);
    }
    fixture_fini(&f);
    free(a);
}

LANE_TEST(a_deadline_ends_the_call_once_and_cancels_it_at_the_server)
{
    fixture f;
    answer a;
    ep_rpc_server_stats stats;
    fixture_init(&f, &(fixture_options){.url = url});
    uint64_t deadline_ns = in_ms(30);
    cr_assert_eq(forward(&f, "hold", 100, 1, deadline_ns, &a), EP_ERR_DEADLINE_EXCEEDED);
    cr_assert(ep_clock_now_ns() >= deadline_ns);
    cr_assert(strstr(a.error.text, "node-a") != NULL &&
                  strstr(a.error.text, "expertd.v1.ExpertService.Forward") != NULL &&
                  strstr(a.error.text, " us") != NULL,
              "%s", a.error.text);
    cr_assert(a.error.waited_us > 0);
    cr_assert_str_eq(a.error.node, "node-a");
    fixture_wait(&f, &f.cancels, 1);
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &a), EP_OK);
    cr_assert_eq(f.cancels, 1);
    ep_rpc_server_read_stats(f.server, &stats);
    cr_assert_eq(stats.calls_total, 2);
    fixture_fini(&f);
}

LANE_TEST(a_deadline_in_the_past_never_reaches_a_handler)
{
    fixture f;
    answer a;
    fixture_init(&f, &(fixture_options){.url = url});
    cr_assert_eq(forward(&f, "echo", 0, 1, 1, &a), EP_ERR_DEADLINE_EXCEEDED, "%s", a.error.text);
    cr_assert_eq(a.ends, 1);
    cr_assert_eq(f.forwards, 0);
    fixture_fini(&f);
}

LANE_TEST(cancel_ends_the_call_and_tells_the_server)
{
    fixture f;
    answer a;
    answer b;
    ep_rpc_call_id id;
    fixture_init(&f, &(fixture_options){.url = url});
    cr_assert_eq(forward_start(&f, "hold", 0, 1, EP_TIME_NEVER, &a, &id, NULL), EP_OK);
    fixture_wait(&f, &f.held_count, 1);
    ep_rpc_call_cancel(f.channel, id);
    ep_rpc_call_cancel(f.channel, id);
    answer_wait_end(&a);
    cr_assert_eq(a.error.code, EP_ERR_CANCELLED);
    fixture_wait(&f, &f.cancels, 1);
    cr_assert_eq(f.answered, 0);
    ep_rpc_call_cancel(f.channel, id);
    ep_rpc_call_cancel(f.channel, 12345);
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &b), EP_OK);
    cr_assert_eq(a.ends, 1);
    fixture_fini(&f);
}

LANE_TEST(a_cancel_may_say_that_another_answer_is_used)
{
    fixture f;
    answer a;
    ep_rpc_call_id id;
    fixture_init(&f, &(fixture_options){.url = url});
    cr_assert_eq(forward_start(&f, "hold", 0, 1, EP_TIME_NEVER, &a, &id, NULL), EP_OK);
    fixture_wait(&f, &f.held_count, 1);
    ep_rpc_call_cancel_answered(f.channel, id);
    answer_wait_end(&a);
    cr_assert_eq(a.error.code, EP_ERR_CANCELLED);
    fixture_wait(&f, &f.cancels, 1);
    cr_assert_eq(f.answered, 1);
    fixture_fini(&f);
}

LANE_TEST(a_stream_may_be_cancelled_from_its_own_callback)
{
    fixture f;
    answer a;
    ep_rpc_call_id id;
    fixture_init(&f, &(fixture_options){.url = url});
    pthread_mutex_lock(&f.lock); /* the callback waits for the id */
    cr_assert_eq(watch_start(&f, 3, true, EP_TIME_NEVER, &a, &id), EP_OK);
    a.cancel_inside = id;
    pthread_mutex_unlock(&f.lock);
    answer_wait_end(&a);
    cr_assert_eq(a.error.code, EP_ERR_CANCELLED);
    cr_assert(a.messages >= 1 && a.messages <= 3);
    fixture_wait(&f, &f.cancels, 1);
    fixture_fini(&f);
}

LANE_TEST(a_stream_ends_at_its_deadline)
{
    fixture f;
    answer a;
    fixture_init(&f, &(fixture_options){.url = url});
    uint32_t timeout_ms = 50;
    do { /* on a busy machine a deadline can pass before the server hears of the call */
        cr_assert_eq(watch_start(&f, 2, true, in_ms(timeout_ms), &a, NULL), EP_OK);
        answer_wait_end(&a);
        cr_assert(a.error.code == EP_ERR_DEADLINE_EXCEEDED || a.error.code == EP_ERR_UNAVAILABLE,
                  "%s", a.error.text);
        timeout_ms *= 2;
    } while (a.messages == 0 || a.error.code != EP_ERR_DEADLINE_EXCEEDED);
    fixture_wait(&f, &f.cancels, 1);
    fixture_fini(&f);
}

LANE_TEST(roles_are_checked_by_name)
{
    fixture f;
    ep_error error;
    ProtobufCMessage *reply = NULL;
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    fixture_init(&f, &(fixture_options){.url = url});
    cr_assert_eq(ep_rpc_call_sync(f.channel, "expertd.v1.Coordinator", "RegisterNode",
                                  &request.base, in_ms(SECONDS * 1000), &reply, &error),
                 EP_ERR_PERMISSION_DENIED);
    cr_assert_str_eq(
        error.text,
        "expertd.v1.Coordinator.RegisterNode needs role node, the peer has role client");
    fixture_fini(&f);
}

static void as_node(ep_rpc_channel_config *config)
{
    config->common.role = "node";
}

LANE_TEST(a_node_may_register_and_a_sync_call_gives_its_reply)
{
    fixture f;
    ep_error error;
    ProtobufCMessage *reply = NULL;
    Expertd__V1__RegisterRequest request = EXPERTD__V1__REGISTER_REQUEST__INIT;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    fixture_init(&f, &(fixture_options){.url = url, .channel = as_node});
    ASSERT_OK(ep_rpc_call_sync(f.channel, "expertd.v1.Coordinator", "RegisterNode", &request.base,
                               EP_TIME_NEVER, &reply, &error),
              error);
    cr_assert_eq(((Expertd__V1__RegisterReply *)reply)->node_id, 5);
    protobuf_c_message_free_unpacked(reply, NULL);
    ASSERT_FAILS(ep_rpc_call_sync(f.channel, "expertd.v1.NodeInfo", "NodeStatus", &empty.base,
                                  EP_TIME_NEVER, &reply, &error),
                 EP_ERR_UNIMPLEMENTED, error, "expertd.v1.NodeInfo");
    cr_assert_eq(ep_rpc_call_sync(f.channel, "expertd.v1.Coordinator", "Nothing", &empty.base,
                                  EP_TIME_NEVER, &reply, &error),
                 EP_ERR_NOT_FOUND);
    fixture_fini(&f);
}

LANE_TEST(health_says_what_was_set_and_watches_follow)
{
    fixture f;
    ep_error error;
    answer a;
    ProtobufCMessage *reply = NULL;
    ep_rpc_call_id id;
    Expertd__V1__HealthCheckRequest request = EXPERTD__V1__HEALTH_CHECK_REQUEST__INIT;
    fixture_init(&f, &(fixture_options){.url = url});
    ep_rpc_request watch = {.method = ep_rpc_method_by_name("expertd.v1.Health", "Watch"),
                            .header = &request.base,
                            .deadline_ns = EP_TIME_NEVER,
                            .wait_for_ready = true};
    answer_init(&a, &f);
    cr_assert_eq(ep_rpc_call_start(f.channel, &watch, answer_reply, &a, &id, NULL), EP_OK);
    answer_wait_messages(&a, 1);
    ep_rpc_server_set_state(f.server, "serving");
    answer_wait_messages(&a, 2);
    cr_assert_eq(ep_rpc_call_sync(f.channel, "expertd.v1.Health", "Check", &request.base,
                                  EP_TIME_NEVER, &reply, &error),
                 EP_OK);
    cr_assert_eq(((Expertd__V1__HealthCheckReply *)reply)->status, 1);
    cr_assert_str_eq(((Expertd__V1__HealthCheckReply *)reply)->detail, "serving");
    protobuf_c_message_free_unpacked(reply, NULL);
    request.service = (char *)(uintptr_t) "expertd.v1.Nothing";
    cr_assert_eq(ep_rpc_call_sync(f.channel, "expertd.v1.Health", "Check", &request.base,
                                  EP_TIME_NEVER, &reply, &error),
                 EP_ERR_NOT_FOUND);
    ep_rpc_server_set_state(f.server, "draining");
    answer_wait_messages(&a, 3);
    cr_assert(a.draining);
    ep_rpc_call_cancel(f.channel, id);
    answer_wait_end(&a);
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &a), EP_ERR_DRAINING);
    ASSERT_TEXT(a.error, "node-a");
    fixture_fini(&f);
}

LANE_TEST(a_draining_node_gives_no_weights)
{
    fixture f;
    ep_error error;
    ProtobufCMessage *reply = NULL;
    Expertd__V1__WeightListRequest request = EXPERTD__V1__WEIGHT_LIST_REQUEST__INIT;
    fixture_init(&f, &(fixture_options){.url = url, .channel = as_node});
    ep_rpc_server_set_state(f.server, "draining");
    cr_assert_eq(ep_rpc_call_sync(f.channel, "expertd.v1.WeightFiles", "List", &request.base,
                                  EP_TIME_NEVER, &reply, &error),
                 EP_ERR_DRAINING, "%s", error.text);
    fixture_fini(&f);
}

LANE_TEST(reflection_lists_what_is_served)
{
    fixture f;
    ep_error error;
    ProtobufCMessage *message = NULL;
    Expertd__V1__Empty empty = EXPERTD__V1__EMPTY__INIT;
    size_t methods = 0;
    fixture_init(&f, &(fixture_options){.url = url});
    ASSERT_OK(ep_rpc_call_sync(f.channel, "expertd.v1.Reflection", "ListServices", &empty.base,
                               EP_TIME_NEVER, &message, &error),
              error);
    Expertd__V1__ListServicesReply *reply = (Expertd__V1__ListServicesReply *)message;
    cr_assert_eq(reply->n_services, 5);
    for (size_t i = 0; i < reply->n_services; i++) {
        methods += reply->services[i]->n_methods;
        cr_assert_str_neq(reply->services[i]->name, "expertd.v1.NodeInfo");
    }
    cr_assert_eq(methods, 2 + 5 + 2 + 2 + 1);
    protobuf_c_message_free_unpacked(message, NULL);
    fixture_fini(&f);
}

static void small_credit(ep_rpc_server_config *config)
{
    config->common.limits.credit_bytes = 8192;
}

LANE_TEST(calls_wait_for_credit_and_go_on_when_it_returns)
{
    enum { N = 40 };
    fixture f;
    answer a[N];
    answer late;
    ep_rpc_server_stats stats;
    fixture_init(&f, &(fixture_options){.url = url, .server = small_credit});
    for (uint32_t i = 0; i < N; i++) {
        cr_assert_eq(forward_start(&f, "hold", 1000, 1, EP_TIME_NEVER, &a[i], NULL, NULL), EP_OK);
    }
    fixture_wait(&f, &f.held_count, 7); /* 7 frames of 1128 bytes fit into 8192 */
    cr_assert_eq(forward(&f, "echo", 0, 1, in_ms(50), &late), EP_ERR_DEADLINE_EXCEEDED);
    ASSERT_TEXT(late.error, "credit");
    ep_rpc_server_read_stats(f.server, &stats);
    cr_assert_eq(stats.calls_total, 7);
    for (uint32_t released = 0; released < N;) {
        fixture_wait(&f, &f.held_count, 1);
        released += fixture_release(&f, EP_ERR_ABORTED);
    }
    for (uint32_t i = 0; i < N; i++) {
        answer_wait_end(&a[i]);
        cr_assert_eq(a[i].error.code, EP_ERR_ABORTED, "%s", a[i].error.text);
    }
    cr_assert_eq(forward(&f, "echo", 9000, 1, EP_TIME_NEVER, &late), EP_ERR_INVALID_ARGUMENT);
    ASSERT_TEXT(late.error, "credit_bytes is 8192");
    for (uint32_t i = 0; i < 200; i++) { /* credit never leaks */
        cr_assert_eq(forward(&f, "echo", 3000 + i, 1, EP_TIME_NEVER, &late), EP_OK);
    }
    fixture_fini(&f);
}

static void few_calls(ep_rpc_server_config *config)
{
    config->common.limits.calls_per_connection_max = 3;
}

LANE_TEST(one_call_too_many_is_refused_with_the_limit)
{
    fixture f;
    answer a[4];
    fixture_init(&f, &(fixture_options){.url = url, .server = few_calls});
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(forward_start(&f, "hold", 0, 1, EP_TIME_NEVER, &a[i], NULL, NULL), EP_OK);
    }
    fixture_wait(&f, &f.held_count, 3);
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &a[3]), EP_ERR_RESOURCE_EXHAUSTED);
    ASSERT_TEXT(a[3].error, "calls_per_connection_max is 3");
    fixture_release(&f, EP_ERR_ABORTED);
    for (uint32_t i = 0; i < 3; i++) {
        answer_wait_end(&a[i]);
    }
    cr_assert_eq(forward(&f, "echo", 0, 1, EP_TIME_NEVER, &a[3]), EP_OK);
    fixture_fini(&f);
}

LANE_TEST(a_steady_state_allocates_no_buffers)
{
    fixture f;
    answer a;
    ep_buffer_pool_stats before;
    ep_buffer_pool_stats after;
    fixture_init(&f, &(fixture_options){.url = url});
    for (uint32_t i = 0; i < 100; i++) {
        cr_assert_eq(forward(&f, "echo", 14336, 1, EP_TIME_NEVER, &a), EP_OK);
    }
    ep_buffer_pool_read_stats(f.pool, &before);
    for (uint32_t i = 0; i < 1000; i++) {
        cr_assert_eq(forward(&f, "echo", 14336, 1, EP_TIME_NEVER, &a), EP_OK);
    }
    ep_buffer_pool_read_stats(f.pool, &after);
    /* a buffer may be given back a moment later than before: a handful, never one per call */
    cr_assert_leq(after.system_allocations - before.system_allocations, 16);
    fixture_fini(&f);
}

LANE_TEST(a_stream_that_lost_a_message_ends)
{
    fixture f;
    answer a;
    Expertd__V1__WatchPlacementRequest header = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    Expertd__V1__Epoch have = EXPERTD__V1__EPOCH__INIT;
    ep_rpc_request request = {.method =
                                  ep_rpc_method_by_name("expertd.v1.Coordinator", "WatchPlacement"),
                              .header = &header.base,
                              .deadline_ns = EP_TIME_NEVER,
                              .wait_for_ready = true};
    have.number = 3;
    have.term = 2; /* then one that is too large, and the handler keeps the call */
    header.have = &have;
    fixture_init(&f, &(fixture_options){.url = url});
    answer_init(&a, &f);
    cr_assert_eq(ep_rpc_call_start(f.channel, &request, answer_reply, &a, NULL, NULL), EP_OK);
    answer_wait_end(&a);
    cr_assert(a.ends == 1 && a.messages == 3);
    cr_assert_eq(a.error.code, EP_ERR_INTERNAL, "%s", a.error.text);
    ASSERT_TEXT(a.error, "header_bytes_max is 65536");
    /* the handler is told too, or it would keep the call for ever */
    fixture_wait(&f, &f.cancels, 1);
    /* the connection stays */
    ASSERT_OK(forward(&f, "echo", 100, 5, EP_TIME_NEVER, &a), a.error);
    fixture_fini(&f);
}

static void small_lane_queue(ep_rpc_channel_config *config)
{
    config->common.limits.frame_bytes_max = 65536;
    config->common.limits.header_bytes_max = 16384;
    config->common.limits.send_queue_bytes_max = 131072;
}

LANE_TEST(a_full_queue_refuses_new_calls_and_loses_none)
{
    enum { N = 600 };
    fixture f;
    answer *a = calloc(N, sizeof(*a));
    uint32_t oldest = 0;
    uint32_t refused = 0;
    fixture_init(&f, &(fixture_options){.url = url, .channel = small_lane_queue});
    for (uint32_t i = 0; i < N; i++) {
        ep_error error;
        while (forward_start(&f, "echo", 30000, (uint8_t)i, EP_TIME_NEVER, &a[i], NULL, &error) !=
               EP_OK) {
            cr_assert_eq(error.code, EP_ERR_RESOURCE_EXHAUSTED, "%s", error.text);
            cr_assert_lt(oldest, i, "refused though nothing is on its way");
            answer_wait_end(&a[oldest++]);
            refused++;
        }
    }
    for (uint32_t i = 0; i < N; i++) {
        answer_wait_end(&a[i]);
        ASSERT_OK(a[i].error.code, a[i].error);
        cr_assert(a[i].ends == 1 && a[i].first_byte == (uint8_t)i);
    }
    cr_assert_gt(refused, 0);
    fixture_fini(&f);
    free(a);
}
