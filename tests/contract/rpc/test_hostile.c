/* SPDX-License-Identifier: Apache-2.0 */
/* Peers that break the rules towards a server: each is refused, and another client on the same
 * server never notices. */
#include <criterion/criterion.h>
#include <endian.h>
#include <stdlib.h>
#include <sched.h>
#include <string.h>

#include "raw_peer.h"
#include "rpc_fixture.h"
#include "support/wrong_fields.h"

#define LANE_TEST(name) RPC_LANE_TEST(rpc_hostile, name)

#define FORWARD_ID 0x0101
#define NO_DEADLINE EP_FRAME_DEADLINE_NONE

static void expect_well(fixture *f)
{
    answer a;
    cr_assert_eq(forward(f, "echo", 100, 5, EP_TIME_NEVER, &a), EP_OK,
                 "the other client suffers: %s", a.error.text);
}

/* ---- the fixed part ---- */

static const ep_test_wrong_field wrong_fields[] = {
    EP_TEST_WRONG_FIELDS,
    {"flags answered", 6, 2, EP_FRAME_FLAG_ANSWERED},
    {"method Hello again", 18, 2, 0},
    {"tensor offset", 32, 4, 64},
    {"tensor offset", 32, 4, 129},
    {"tensor offset", 32, 4, 192},
    {"tensor_bytes above frame_bytes_max", 40, 8, 16 << 20},
    {"payload CRC though off", 48, 4, 1},
};

/* A good Forward request; returns its length. */
static size_t good_request(uint8_t *out, uint64_t call_id)
{
    Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
    size_t header_bytes;
    request.model = (char *)(uintptr_t) "echo";
    uint8_t *header = raw_request_header(&request.base, &header_bytes);
    ep_frame frame = raw_request(call_id, FORWARD_ID);
    frame.header_bytes = (uint32_t)header_bytes;
    frame.tensor_offset = ep_frame_tensor_offset(frame.header_bytes);
    memset(out, 0, frame.tensor_offset);
    memcpy(out + EP_FRAME_FIXED_BYTES, header, header_bytes);
    ep_frame_encode(&frame, out);
    free(header);
    return frame.tensor_offset;
}

static void put(uint8_t *out, const ep_test_wrong_field *w)
{
    uint64_t value = htole64(w->value);
    memcpy(out + w->at, &value, w->bytes);
    uint32_t crc = htole32(ep_crc32c(0, out, 60));
    memcpy(out + 60, &crc, sizeof(crc));
}

static void expect_closed(const char *url, const uint8_t *bytes, size_t count, bool hello,
                          const char *name)
{
    raw_peer p;
    raw_peer_dial(&p, url);
    if (hello) {
        cr_assert_eq(raw_peer_hello(&p, NULL), 0);
    }
    if (raw_peer_send_bytes(&p, bytes, count)) {
        cr_assert_eq(raw_peer_wait_closed(&p), 0, "%s was answered", name);
    }
    raw_peer_fini(&p);
}

LANE_TEST(every_fixed_field_wrong_in_turn_is_refused)
{
    fixture f;
    uint8_t bytes[256];
    size_t count = sizeof(wrong_fields) / sizeof(wrong_fields[0]);
    fixture_init(&f, &(fixture_options){.url = url});
    for (size_t i = 0; i < count; i++) {
        size_t length = good_request(bytes, 2);
        put(bytes, &wrong_fields[i]);
        expect_closed(f.url, bytes, length, true, wrong_fields[i].name);
        if (i % 8 == 0) {
            expect_well(&f);
        }
    }
    expect_well(&f);
    cr_assert_eq(f.forwards, (count + 7) / 8 + 1);
    fixture_fini(&f);
}

LANE_TEST(every_flipped_bit_of_the_fixed_part_is_refused)
{
    fixture f;
    uint8_t bytes[256];
    fixture_init(&f, &(fixture_options){.url = url});
    for (size_t bit = 0; bit < 64 * 8;
         /* 7 is prime to 8: every byte and every position in a byte */
         bit += 7) {
        size_t length = good_request(bytes, 2);
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        expect_closed(f.url, bytes, length, true, "a flipped bit");
    }
    expect_well(&f);
    cr_assert_eq(f.forwards, 1);
    fixture_fini(&f);
}

LANE_TEST(only_hello_may_come_first)
{
    fixture f;
    uint8_t bytes[256];
    ep_frame frames[] = {
        {.kind = EP_FRAME_CANCEL, .call_id = 1},
        {.kind = EP_FRAME_PING},
        {.kind = EP_FRAME_PONG},
        {.kind = EP_FRAME_GOODBYE},
        {.kind = EP_FRAME_REPLY, .call_id = 1},
        {.kind = EP_FRAME_REQUEST, .deadline_us = NO_DEADLINE}, /* no CallHeader */
    };
    fixture_init(&f, &(fixture_options){.url = url});
    expect_closed(f.url, bytes, good_request(bytes, 1), false, "a request before Hello");
    for (size_t i = 0; i < sizeof(frames) / sizeof(frames[0]); i++) {
        frames[i].tensor_offset = EP_FRAME_FIXED_BYTES;
        ep_frame_encode(&frames[i], bytes);
        expect_closed(f.url, bytes, EP_FRAME_FIXED_BYTES, false,
                      ep_frame_kind_name(frames[i].kind));
    }
    expect_well(&f);
    fixture_fini(&f);
}

LANE_TEST(before_hello_nobody_takes_memory)
{
    enum { STRANGERS = 8 };
    fixture f;
    raw_peer p;
    ep_buffer_pool_stats stats;
    uint8_t *large = calloc(1, 8 << 20);
    ep_frame frame = raw_request(1, 0);
    frame.tensor_offset = ep_frame_tensor_offset(0);
    frame.tensor_bytes = (8 << 20) - frame.tensor_offset;
    ep_frame_encode(&frame, large);
    fixture_init(&f, &(fixture_options){.url = url, .no_channel = true});
    for (int i = 0; i < STRANGERS; i++) {
        raw_peer_dial(&p, f.url);
        raw_peer_send_bytes(&p, large, 8 << 20);
        cr_assert_eq(raw_peer_wait_closed(&p), 0);
        raw_peer_fini(&p);
    }
    ep_buffer_pool_read_stats(f.pool, &stats);
    cr_assert_lt(stats.lent_bytes_peak, 1u << 20);
    raw_peer_dial(&p, f.url); /* after Hello the same size is welcome */
    cr_assert_eq(raw_peer_hello(&p, NULL), 0);
    frame.call_id = 2;
    frame.method_id = FORWARD_ID;
    ep_frame_encode(&frame, large);
    raw_peer_send_bytes(&p, large, 8 << 20);
    ep_buffer *reply = raw_peer_receive(&p, &frame);
    cr_assert(reply != NULL && frame.kind == EP_FRAME_REPLY && frame.call_id == 2);
    ep_buffer_unref(reply);
    raw_peer_fini(&p);
    fixture_fini(&f);
    free(large);
}

static void one_place(ep_rpc_server_config *config)
{
    config->common.limits.connections_max = 1;
}

LANE_TEST(a_stranger_that_makes_room_is_counted_once)
{
    fixture f;
    raw_peer first;
    raw_peer second;
    ep_rpc_server_stats stats;
    fixture_init(&f, &(fixture_options){.url = url, .server = one_place, .no_channel = true});
    raw_peer_dial(&first, f.url);
    do {
        sched_yield();
        ep_rpc_server_read_stats(f.server, &stats);
    } while (stats.connections == 0);
    raw_peer_dial(&second, f.url);
    raw_peer_wait_closed(&first);
    raw_peer_fini(&first);
    raw_peer_fini(&second);
    do { /* until both have ended at the server too */
        sched_yield();
        ep_rpc_server_read_stats(f.server, &stats);
    } while (stats.connections_refused < 2 || stats.connections > 0);
    cr_assert_eq(stats.refused[EP_REFUSED_CONNECTIONS], 1);
    cr_assert_eq(stats.refused[EP_REFUSED_NO_HELLO], 1); /* the second one's */
    fixture_fini(&f);
}

LANE_TEST(padding_must_be_zero)
{
    fixture f;
    uint8_t bytes[256];
    fixture_init(&f, &(fixture_options){.url = url});
    size_t length = good_request(bytes, 2);
    bytes[length - 1] = 1;
    expect_closed(f.url, bytes, length, true, "padding");
    expect_well(&f);
    fixture_fini(&f);
}

/* ---- requests that are frames, but wrong: answered, the connection stays ---- */

static void expect_status(raw_peer *p, ep_frame frame, const void *header, uint32_t status,
                          const char *text)
{
    ep_error error;
    raw_peer_send(p, frame, header, NULL, false);
    uint64_t id = frame.call_id;
    ep_buffer *reply = raw_peer_receive(p, &frame);
    cr_assert_not_null(reply, "closed instead of status %u", status);
    cr_assert(frame.kind == EP_FRAME_REPLY && frame.call_id == id);
    raw_status(reply, &frame, &error);
    cr_assert_eq(frame.status, status, "%s", error.text);
    cr_assert(strstr(error.text, text) != NULL, "%s", error.text);
    ep_buffer_unref(reply);
}

LANE_TEST(wrong_requests_are_answered_by_name)
{
    fixture f;
    raw_peer p;
    ep_frame call = raw_request(10, 0x7777);
    uint8_t junk[] = {0, 0, 0, 0, 0xff, 0xff, 0xff};
    uint8_t lies[] = {0xff, 0xff, 0xff, 0x7f, 0, 0};
    uint8_t empty[] = {0, 0, 0, 0};
    fixture_init(&f, &(fixture_options){.url = url});
    raw_peer_meet(&p, f.url);
    expect_status(&p, call, NULL, 12, "method id 0x7777");
    call.method_id = 0x0201;
    expect_status(&p, call, NULL, 12, "expertd.v1.NodeInfo");
    call.method_id = FORWARD_ID;
    expect_status(&p, call, NULL, 3, "request header has 0 bytes");
    call.header_bytes = sizeof(junk);
    expect_status(&p, call, junk, 3, "expertd.v1.ForwardRequest");
    call.header_bytes = sizeof(lies);
    expect_status(&p, call, lies, 3, "CallHeader claims 2147483647");
    call.header_bytes = sizeof(empty);
    call.deadline_us = 0;
    expect_status(&p, call, empty, 4, "no time left");
    call.deadline_us = NO_DEADLINE;
    call.method_id = 0x0301;
    expect_status(&p, call, empty, 7, "needs role node");
    raw_peer_send(&p, (ep_frame){.kind = EP_FRAME_CANCEL, .call_id = 4711}, NULL, NULL,
                  false); /* unknown: ignored */
    raw_peer_send(&p, (ep_frame){.kind = EP_FRAME_PING, .call_id = 99}, NULL, NULL, false);
    ep_buffer *pong = raw_peer_receive(&p, &call);
    cr_assert(pong != NULL && call.kind == EP_FRAME_PONG && call.call_id == 99);
    ep_buffer_unref(pong);
    raw_peer_fini(&p);
    cr_assert_eq(f.forwards, 0);
    expect_well(&f);
    fixture_fini(&f);
}

LANE_TEST(a_budget_bomb_is_refused_cheaply)
{
    enum { PAIRS = 32000 }; /* 64,000 header bytes; unpacked naively 5 MB */
    fixture f;
    raw_peer p;
    uint8_t *header = calloc(1, 4 + 2 * PAIRS);
    ep_buffer_pool_stats stats;
    ep_frame call = raw_request(10, 0x0301);
    Expertd__V1__Hello hello;
    fixture_init(&f, &(fixture_options){.url = url});
    for (size_t i = 0; i < PAIRS; i++) {
        header[4 + 2 * i] = 0x22; /* field 4 of RegisterRequest: an empty ModelInfo */
    }
    raw_peer_dial(&p, f.url);
    raw_hello_init(&hello);
    hello.role = (char *)(uintptr_t) "node";
    cr_assert_eq(raw_peer_hello(&p, &hello), 0);
    call.header_bytes = 4 + 2 * PAIRS;
    expect_status(&p, call, header, 3, "unpack_bytes_max 1048576");
    ep_buffer_pool_read_stats(f.pool, &stats);
    cr_assert_leq(stats.lent_bytes_peak, 4u << 20);
    raw_peer_fini(&p);
    expect_well(&f);
    fixture_fini(&f);
    free(header);
}

static void raw_hold(raw_peer *p, uint64_t id, uint32_t deadline_us)
{
    Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_frame call = raw_request(id, FORWARD_ID);
    call.deadline_us = deadline_us;
    request.model = (char *)(uintptr_t) "hold";
    raw_peer_send_message(p, call, &request.base, true, false);
}

/* ---- credits and ids ---- */

static void small_credit(ep_rpc_server_config *config)
{
    config->common.limits.credit_bytes = 4096;
}

LANE_TEST(a_peer_that_overruns_its_credit_is_closed)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url, .server = small_credit});
    raw_peer_meet(&p, f.url);
    for (uint32_t i = 0; i < 33; i++) { /* 32 frames of 128 bytes fit */
        raw_hold(&p, 100 + i, NO_DEADLINE);
    }
    raw_peer_wait_closed(&p);
    fixture_wait(&f, &f.cancels, 32);
    cr_assert_eq(f.forwards, 32);
    raw_peer_fini(&p);
    expect_well(&f);
    fixture_fini(&f);
}

LANE_TEST(a_call_id_in_use_closes)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url});
    raw_peer_meet(&p, f.url);
    raw_hold(&p, 100, NO_DEADLINE);
    raw_hold(&p, 100, NO_DEADLINE);
    raw_peer_wait_closed(&p);
    fixture_wait(&f, &f.cancels, 1);
    raw_peer_fini(&p);
    expect_well(&f);
    fixture_fini(&f);
}

/* ---- loss ---- */

LANE_TEST(a_lost_client_cancels_its_calls)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url});
    raw_peer_meet(&p, f.url);
    for (uint64_t i = 0; i < 10; i++) {
        raw_hold(&p, 50 + i, NO_DEADLINE);
    }
    fixture_wait(&f, &f.held_count, 10);
    raw_peer_fini(&p);
    fixture_wait(&f, &f.cancels, 10);
    expect_well(&f);
    fixture_fini(&f);
}

LANE_TEST(the_server_cancels_at_the_deadline_by_itself)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url});
    raw_peer_meet(&p, f.url);
    raw_hold(&p, 50, 20000);
    fixture_wait(&f, &f.cancels, 1);
    raw_peer_fini(&p);
    fixture_fini(&f);
}

static void server_pings(ep_rpc_server_config *config)
{
    config->common.limits.ping_ms = 10;
}

LANE_TEST(a_client_that_answers_no_ping_is_closed)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url, .server = server_pings, .no_channel = true});
    raw_peer_meet(&p, f.url);
    raw_hold(&p, 50, NO_DEADLINE);
    /* one that cannot leave yet stands for the next */
    cr_assert_geq(raw_peer_wait_closed(&p), 1, "no ping");
    fixture_wait(&f, &f.cancels, 1);
    raw_peer_fini(&p);
    fixture_fini(&f);
}

LANE_TEST(a_goodbye_from_a_client_ends_its_calls)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url});
    raw_peer_meet(&p, f.url);
    raw_hold(&p, 50, NO_DEADLINE);
    fixture_wait(&f, &f.held_count, 1);
    raw_peer_send(&p, (ep_frame){.kind = EP_FRAME_GOODBYE}, NULL, NULL, false);
    raw_peer_wait_closed(&p);
    fixture_wait(&f, &f.cancels, 1);
    raw_peer_fini(&p);
    expect_well(&f);
    fixture_fini(&f);
}

static ep_buffer_pool *limited_pool;

static void limited_pings(ep_rpc_server_config *config)
{
    config->common.pool = limited_pool;
    config->common.limits.ping_ms = 50;
    /* a slow machine has 450 ms until the pool is empty */
    config->common.limits.ping_dead_count = 8;
}

/* Everything the pool has, as a list. */
static ep_err take_all(ep_buffer_pool *pool, ep_buffer **out_list)
{
    ep_buffer *buffer;
    while (ep_buffer_acquire(pool, 4096, &buffer) == EP_OK) {
        memcpy(buffer->data, out_list, sizeof(*out_list));
        *out_list = buffer;
    }
    return *out_list != NULL ? EP_OK : EP_ERR_NO_MEMORY;
}

static void give_all(ep_buffer *list)
{
    while (list != NULL) {
        ep_buffer *next;
        memcpy(&next, list->data, sizeof(next));
        ep_buffer_unref(list);
        list = next;
    }
}

static void answered_pings(ep_rpc_server_config *config)
{
    config->common.limits.ping_ms = 40;
    config->common.limits.ping_dead_count = 20; /* the test may stand still for 800 ms */
}

LANE_TEST(answered_pings_keep_the_connection)
{
    fixture f;
    raw_peer p;
    fixture_init(&f, &(fixture_options){.url = url, .server = answered_pings, .no_channel = true});
    raw_peer_meet(&p, f.url);
    for (int i = 0; i < 25; i++) { /* more than may be missed */
        ep_frame frame;
        ep_buffer *ping = raw_peer_receive(&p, &frame);
        cr_assert(ping != NULL && frame.kind == EP_FRAME_PING);
        ep_buffer_unref(ping);
        raw_peer_send(&p, (ep_frame){.kind = EP_FRAME_PONG, .call_id = frame.call_id}, NULL, NULL,
                      false);
    }
    raw_peer_fini(&p);
    fixture_fini(&f);
}

/* ---- memory is short here: no sign that the peer is dead ---- */

LANE_TEST(waiting_for_memory_is_not_taken_for_death)
{
    fixture f;
    raw_peer p;
    ep_frame frame = raw_request(7, FORWARD_ID);
    ep_buffer *lent = NULL;
    ep_buffer_pool *server_pool;
    cr_assert_eq(ep_buffer_pool_create(1 << 20, 0, &server_pool), EP_OK);
    limited_pool = server_pool;
    fixture_init(&f, &(fixture_options){.url = url, .server = limited_pings, .no_channel = true});
    raw_peer_meet(&p, f.url);
    ep_buffer_pool_stats stats;
    do { /* what Hello needed comes back first, else it would serve the request */
        sched_yield();
        ep_buffer_pool_read_stats(server_pool, &stats);
    } while (stats.lent_bytes != 0);
    cr_assert_eq(take_all(server_pool, &lent), EP_OK);
    uint8_t header[4] = {0};
    frame.header_bytes = sizeof(header);
    raw_peer_send(&p, frame, header, NULL, false);
    /* more than may be missed; none is answered, none needs the pool */
    for (int i = 0; i < 20; i++) {
        ep_buffer *ping = raw_peer_receive(&p, &frame);
        cr_assert_not_null(ping, "closed: %s", p.why.text);
        cr_assert_eq(frame.kind, EP_FRAME_PING);
        ep_buffer_unref(ping);
    }
    give_all(lent);
    do { /* pings may be before it */
        ep_buffer *reply = raw_peer_receive(&p, &frame);
        cr_assert_not_null(reply, "closed: %s", p.why.text);
        ep_buffer_unref(reply);
    } while (frame.kind != EP_FRAME_REPLY);
    cr_assert_eq(frame.call_id, 7);
    raw_peer_fini(&p);
    fixture_fini(&f);
    ep_buffer_pool_destroy(server_pool);
}

static void small_queue(ep_rpc_server_config *config)
{
    config->common.limits.frame_bytes_max = 65536;
    config->common.limits.header_bytes_max = 16384;
    config->common.limits.send_queue_bytes_max = 65536;
}

LANE_TEST(a_peer_that_does_not_read_its_replies_is_closed)
{
    fixture f;
    raw_peer p;
    ep_rpc_server_stats stats;
    Expertd__V1__WatchPlacementRequest request = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    Expertd__V1__Epoch have = EXPERTD__V1__EPOCH__INIT;
    ep_frame call = raw_request(9, 0x0303);
    fixture_init(&f, &(fixture_options){.url = url, .server = small_queue});
    raw_peer_dial_limited(&p, f.url, 32768);
    cr_assert_eq(raw_peer_hello(&p, NULL), 0);
    have.number = 200000; /* more than any socket buffer takes */
    have.term = 1;
    request.have = &have;
    raw_peer_send_message(&p, call, &request.base, true, false);
    fixture_wait(&f, &f.cancels, 1);
    ep_rpc_server_read_stats(f.server, &stats);
    cr_assert_eq(stats.protocol_errors, 1);
    expect_well(&f);
    /* memory again, so that its end can arrive */
    for (uint32_t i = p.frames_read; i < p.frames_count; i++) {
        ep_buffer_unref(p.frames[i]);
    }
    p.frames_read = p.frames_count;
    raw_peer_fini(&p);
    fixture_fini(&f);
}
