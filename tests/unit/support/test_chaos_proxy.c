/* SPDX-License-Identifier: Apache-2.0 */
/* The chaos proxy does what its rules say, to the frame they say, and nothing to others. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "expert.pb-c.h"
#include "expertd/tensor.h"
#include "rpc/rpc.h"
#include "support/chaos_proxy.h"

enum { HIDDEN = 8, FRAME_BYTES_MAX = 4096, SECONDS = 30 };

typedef struct wire {
    ep_chaos_proxy *proxy;
    int listen_fd;
    int client;
    int server;
} wire;

static int port_of(const char *url)
{
    return atoi(strrchr(url, ':') + 1);
}

/* A test that hangs is a failed one, not a stuck one. */
static void bound(int fd)
{
    struct timeval patience = {.tv_sec = SECONDS};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
}

static void wire_init(wire *w, const ep_chaos_rule *rule)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(address);
    char url[64];
    w->listen_fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_eq(bind(w->listen_fd, (struct sockaddr *)&address, sizeof(address)), 0);
    cr_assert_eq(listen(w->listen_fd, 1), 0);
    getsockname(w->listen_fd, (struct sockaddr *)&address, &bytes);
    snprintf(url, sizeof(url), "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    w->proxy = ep_chaos_proxy_create(7);
    cr_assert_not_null(w->proxy);
    ep_chaos_proxy_set_upstream(w->proxy, url);
    if (rule != NULL) {
        ep_chaos_proxy_set_rules(w->proxy, rule, 1);
    }
    address.sin_port = htons((uint16_t)port_of(ep_chaos_proxy_url(w->proxy)));
    w->client = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_eq(connect(w->client, (struct sockaddr *)&address, sizeof(address)), 0);
    w->server = accept(w->listen_fd, NULL, NULL);
    cr_assert_geq(w->server, 0);
    bound(w->client);
    bound(w->server);
}

static void wire_fini(wire *w)
{
    close(w->client);
    close(w->server);
    close(w->listen_fd);
    ep_chaos_proxy_destroy(w->proxy);
}

static uint64_t faults(const wire *w, ep_chaos_fault fault)
{
    ep_chaos_counts counts;
    ep_chaos_proxy_read(w->proxy, &counts);
    return counts.faults[fault];
}

/* A Forward frame of a call with so many slots; its length. */
static size_t make(uint8_t *out, ep_frame_kind kind, uint64_t id, uint32_t slots)
{
    uint8_t header[256] = {0};
    size_t header_bytes;
    Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
    Expertd__V1__ForwardReply reply = EXPERTD__V1__FORWARD_REPLY__INIT;
    request.slots = reply.slots = slots;
    request.hidden = reply.hidden = HIDDEN;
    request.x_dtype = reply.dtype = EP_DTYPE_BF16;
    request.numerics = reply.numerics = (char *)(uintptr_t) "n";
    if (kind == EP_FRAME_REQUEST) { /* after an empty CallHeader of length 0 */
        header_bytes = 4 + expertd__v1__forward_request__pack(&request, header + 4);
    } else {
        header_bytes = expertd__v1__forward_reply__pack(&reply, header);
    }
    ep_frame frame = {.kind = kind,
                      .call_id = id,
                      .method_id = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward")->id,
                      .deadline_us = kind == EP_FRAME_REQUEST ? 1000 : 0,
                      .header_bytes = (uint32_t)header_bytes,
                      .tensor_offset = ep_frame_tensor_offset((uint32_t)header_bytes),
                      .tensor_bytes = slots * HIDDEN * 2};
    size_t bytes = frame.tensor_offset + (size_t)frame.tensor_bytes;
    memset(out, 0, bytes);
    memcpy(out + EP_FRAME_FIXED_BYTES, header, header_bytes);
    memset(out + frame.tensor_offset, (int)id, (size_t)frame.tensor_bytes);
    frame.payload_crc = ep_crc32c(0, out + EP_FRAME_FIXED_BYTES, bytes - EP_FRAME_FIXED_BYTES);
    ep_frame_encode(&frame, out);
    return bytes;
}

static void send_frame(int fd, ep_frame_kind kind, uint64_t id, uint32_t slots)
{
    uint8_t data[FRAME_BYTES_MAX];
    size_t bytes = make(data, kind, id, slots);
    cr_assert_eq(send(fd, data, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
}

static bool take(int fd, uint8_t *out, size_t bytes)
{
    return recv(fd, out, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

/* The next frame as it is; its call id, with right CRCs. */
static uint64_t take_frame(int fd, uint8_t *out, ep_frame *out_frame)
{
    size_t bytes;
    cr_assert(take(fd, out, EP_FRAME_FIXED_BYTES));
    cr_assert_eq(ep_frame_decode(out, FRAME_BYTES_MAX, FRAME_BYTES_MAX, out_frame, &bytes, NULL),
                 EP_OK);
    cr_assert(take(fd, out + EP_FRAME_FIXED_BYTES, bytes - EP_FRAME_FIXED_BYTES));
    cr_assert_eq(ep_crc32c(0, out + EP_FRAME_FIXED_BYTES, bytes - EP_FRAME_FIXED_BYTES),
                 out_frame->payload_crc);
    return out_frame->call_id;
}

/* Four requests under a rule for the second; the ids that arrive, in order, end with the
 * fourth's. */
static void expect_order(ep_chaos_fault fault, uint32_t amount, const uint64_t *ids, size_t count)
{
    const ep_chaos_rule rule = {.fault = fault,
                                .directions = EP_CHAOS_TO_SERVER,
                                .number = 2,
                                .amount_min = amount,
                                .amount_max = amount};
    wire w;
    uint8_t data[FRAME_BYTES_MAX];
    ep_frame frame;
    wire_init(&w, &rule);
    for (uint64_t id = 1; id <= 4; id++) {
        send_frame(w.client, EP_FRAME_REQUEST, id, (uint32_t)id);
    }
    for (size_t i = 0; i < count; i++) {
        cr_expect_eq(take_frame(w.server, data, &frame), ids[i], "%s: frame %zu is %llu",
                     ep_chaos_fault_name(fault), i, (unsigned long long)frame.call_id);
    }
    cr_assert_eq(faults(&w, fault), 1);
    wire_fini(&w);
}

Test(chaos_proxy, loses_repeats_and_reorders_the_frame_it_is_told)
{
    expect_order(EP_CHAOS_DROP, 0, (const uint64_t[]){1, 3, 4}, 3);
    expect_order(EP_CHAOS_DUPLICATE, 0, (const uint64_t[]){1, 2, 2, 3, 4}, 5);
    expect_order(EP_CHAOS_SWAP, 0, (const uint64_t[]){1, 3, 2, 4}, 4);
    expect_order(EP_CHAOS_HOLD, 2, (const uint64_t[]){1, 3, 4, 2}, 4);
    expect_order(EP_CHAOS_DELAY, 5, (const uint64_t[]){1, 2, 3, 4}, 4);
    expect_order(EP_CHAOS_STALL, 5, (const uint64_t[]){1, 2, 3, 4}, 4);
    expect_order(EP_CHAOS_SPLIT, 3, (const uint64_t[]){1, 2, 3, 4}, 4);
}

Test(chaos_proxy, flips_one_bit_of_the_section_it_is_told)
{
    uint8_t sent[FRAME_BYTES_MAX];
    uint8_t got[FRAME_BYTES_MAX];
    size_t bytes = make(sent, EP_FRAME_REQUEST, 1, 5);
    ep_frame frame;
    cr_assert_eq(ep_frame_decode(sent, FRAME_BYTES_MAX, FRAME_BYTES_MAX, &frame, NULL, NULL),
                 EP_OK);
    const size_t ends[] = {EP_FRAME_FIXED_BYTES, EP_FRAME_FIXED_BYTES + frame.header_bytes, bytes};
    const size_t begins[] = {0, EP_FRAME_FIXED_BYTES, frame.tensor_offset};
    for (int section = 0; section < 3; section++) {
        const ep_chaos_rule rule = {.fault = (ep_chaos_fault)(EP_CHAOS_FLIP_FIXED + section),
                                    .directions = EP_CHAOS_TO_SERVER,
                                    .rate = 10000};
        wire w;
        int bits = 0;
        wire_init(&w, &rule);
        cr_assert_eq(send(w.client, sent, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
        cr_assert(take(w.server, got, bytes));
        for (size_t i = 0; i < bytes; i++) {
            cr_assert(sent[i] == got[i] || (i >= begins[section] && i < ends[section]),
                      "section %d: byte %zu", section, i);
            bits += __builtin_popcount(sent[i] ^ got[i]);
        }
        cr_assert_eq(bits, 1, "section %d: %d bits", section, bits);
        wire_fini(&w);
    }
}

static uint32_t slots_of(const ep_frame *frame, const uint8_t *data)
{
    Expertd__V1__ForwardReply *reply =
        expertd__v1__forward_reply__unpack(NULL, frame->header_bytes, data + EP_FRAME_FIXED_BYTES);
    cr_assert_not_null(reply);
    uint32_t slots = reply->slots;
    expertd__v1__forward_reply__free_unpacked(reply, NULL);
    return slots;
}

/* Requests 1 and 2, of 3 and 4 slots; the answer to 1 as a lie with right CRCs. */
static void take_lie(ep_chaos_fault fault, uint8_t *data, ep_frame *frame)
{
    const ep_chaos_rule rule = {.fault = fault, .directions = EP_CHAOS_TO_CLIENT, .rate = 10000};
    wire w;
    wire_init(&w, &rule);
    for (uint32_t id = 1; id <= 2; id++) {
        send_frame(w.client, EP_FRAME_REQUEST, id, 2 + id);
        take_frame(w.server, data, frame);
    }
    send_frame(w.server, EP_FRAME_REPLY, 1, 3);
    take_frame(w.client, data, frame);
    cr_assert_eq(faults(&w, fault), 1, "%s", ep_chaos_fault_name(fault));
    wire_fini(&w);
}

Test(chaos_proxy, lies_with_right_crcs)
{
    uint8_t data[FRAME_BYTES_MAX];
    ep_frame frame;
    take_lie(EP_CHAOS_LIE_CALL, data, &frame);
    cr_assert(frame.call_id == 2 && slots_of(&frame, data) == 3);
    take_lie(EP_CHAOS_LIE_NO_CALL, data, &frame);
    cr_assert_gt(frame.call_id, 1ull << 32);
    take_lie(EP_CHAOS_LIE_ATTEMPT, data, &frame);
    cr_assert_neq(frame.attempt, 0);
    take_lie(EP_CHAOS_LIE_SEQUENCE, data, &frame);
    cr_assert_neq(frame.stream_sequence, 0);
    take_lie(EP_CHAOS_LIE_SLOTS, data, &frame);
    cr_assert(frame.call_id == 1 && slots_of(&frame, data) == 4 &&
              frame.tensor_bytes == 3 * HIDDEN * 2);
}

Test(chaos_proxy, ends_connections)
{
    ep_chaos_rule rule = {
        .fault = EP_CHAOS_TRUNCATE, .directions = EP_CHAOS_TO_SERVER, .number = 1};
    uint8_t data[FRAME_BYTES_MAX];
    size_t bytes = make(data, EP_FRAME_REQUEST, 1, 5);
    wire w;
    wire_init(&w, &rule);
    send_frame(w.client, EP_FRAME_REQUEST, 1, 5);
    ssize_t n = recv(w.server, data, bytes, MSG_WAITALL);
    cr_assert(n > 0 && n < (ssize_t)bytes, "%zd of %zu bytes", n, bytes);
    cr_assert_eq(recv(w.client, data, 1, 0), 0);
    wire_fini(&w);
    rule.fault = EP_CHAOS_RESET;
    wire_init(&w, &rule);
    send_frame(w.client, EP_FRAME_REQUEST, 1, 5);
    cr_assert(recv(w.server, data, 1, 0) < 0 && errno == ECONNRESET);
    cr_assert(recv(w.client, data, 1, 0) < 0 && errno == ECONNRESET);
    wire_fini(&w);
}

Test(chaos_proxy, cuts_one_direction_and_passes_what_is_no_frame)
{
    const ep_chaos_rule rule = {
        .fault = EP_CHAOS_CUT, .directions = EP_CHAOS_TO_SERVER, .number = 2};
    uint8_t data[FRAME_BYTES_MAX];
    ep_chaos_counts counts;
    ep_frame frame;
    wire w;
    wire_init(&w, &rule);
    send_frame(w.client, EP_FRAME_REQUEST, 1, 1);
    send_frame(w.client, EP_FRAME_REQUEST, 2, 1);
    cr_assert_eq(take_frame(w.server, data, &frame), 1);
    send_frame(w.server, EP_FRAME_REPLY, 1, 1);
    cr_assert_eq(take_frame(w.client, data, &frame), 1);
    memset(data, 'x', 100);
    cr_assert_eq(send(w.server, data, 100, 0), 100);
    cr_assert(take(w.client, data, 100) && data[99] == 'x');
    ep_chaos_proxy_read(w.proxy, &counts);
    cr_assert(counts.raw_bytes == 100 && counts.faults[EP_CHAOS_CUT] == 1);
    cr_assert_eq(recv(w.server, data, 1, MSG_DONTWAIT), -1);
    wire_fini(&w);
}
