/* SPDX-License-Identifier: Apache-2.0 */
#include "hostile_groups.h"

#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/random.h"
#include "coordinator.pb-c.h"
#include "expert.pb-c.h"
#include "hostile_peer.h"
#include "support/cluster.h"
#include "support/wrong_fields.h"

enum {
    IDLE_RPC = 500,
    IDLE_HTTP = 60 /* of 64 */,
    RANDOM_CONNECTIONS = 64,
    SLOW_CONNECTIONS = 32,
    SMALL_CROWD = 40
};
_Static_assert((int)IDLE_RPC <= (int)HOSTILE_OPEN_MAX, "idle connections fit");

#define FORWARD_ID 0x0101
#define REGISTER_ID 0x0301
#define FRAME_BYTES_MAX (16u << 20)
#define LENGTHS_LAST 80 /* 2^64-1 .. 2^64-80: where adding a header's size wraps */

static void expect_refused(const hostile_door *door, int fd, const char *what)
{
    if (door->is_http) {
        hostile_end(fd); /* it may wait for the rest of a line */
        hostile_expect_http_refused(fd, what);
    } else {
        hostile_expect_refused(fd, what);
    }
}

static const char *role_of(const hostile_door *door)
{
    return door->is_coordinator ? "node" : "client";
}

/* A right request of the port's own service. */
static void make_request(const hostile_door *door, hostile_frame *out)
{
    if (door->is_coordinator) {
        Expertd__V1__HeartbeatRequest heartbeat = EXPERTD__V1__HEARTBEAT_REQUEST__INIT;
        heartbeat.node = (char *)(uintptr_t) "nobody";
        hostile_frame_request(out, 0x0302, 2, &heartbeat.base);
    } else {
        Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
        request.model = (char *)(uintptr_t) "nothing";
        hostile_frame_request(out, FORWARD_ID, 2, &request.base);
    }
}

/* ---- lengths in front of a message ---- */

static size_t length_count(void)
{
    return 6 + LENGTHS_LAST;
}

static uint64_t length_at(size_t index)
{
    static const uint64_t fixed[] = {0,
                                     7,
                                     (uint64_t)FRAME_BYTES_MAX + 1,
                                     (uint64_t)1 << 31,
                                     (uint64_t)1 << 32,
                                     (uint64_t)1 << 63};
    return index < EP_ARRAY_COUNT(fixed) ? fixed[index]
                                         : UINT64_MAX - (index - EP_ARRAY_COUNT(fixed));
}

/* As a protocol with a length prefix would send them, in both byte orders, with bytes enough to be
 * judged at once. */
static void run_lengths(const hostile_door *door)
{
    for (size_t i = door->first; i < 2 * length_count(); i += door->step) {
        uint8_t bytes[128] = {0};
        char what[64];
        uint64_t length = length_at(i / 2);
        uint64_t wire = i % 2 == 0 ? htobe64(length) : htole64(length);
        memcpy(bytes, &wire, sizeof(wire));
        snprintf(what, sizeof(what), "length %llx %s", (unsigned long long)length,
                 i % 2 == 0 ? "big-endian" : "little-endian");
        int fd = hostile_connect(door->url);
        hostile_send(fd, bytes, sizeof(bytes));
        expect_refused(door, fd, what);
    }
}

/* The same lengths in a frame that is right otherwise. */
static void run_frame_lengths(const hostile_door *door)
{
    static hostile_frame frame;
    for (size_t i = door->first; i < 2 * length_count(); i += door->step) {
        bool tensors = i % 2 == 0;
        uint64_t wire = htole64(length_at(i / 2));
        if (length_at(i / 2) == 0 && tensors) {
            continue; /* no tensors: a right frame */
        }
        hostile_frame_hello(&frame, role_of(door));
        memcpy(frame.data + (tensors ? 40 : 28), &wire, tensors ? 8 : 4);
        hostile_frame_seal(&frame);
        int fd = hostile_connect(door->url);
        hostile_send(fd, frame.data, frame.bytes);
        hostile_end(fd); /* a length of 7 waits for bytes that never come */
        hostile_expect_refused(fd, tensors ? "tensor_bytes of Hello" : "header_bytes of Hello");
    }
}

/* ---- fields ---- */

static const ep_test_wrong_field wrong_fields[] = {
    EP_TEST_WRONG_FIELDS,
    {"method unknown", 18, 2, 0x7777},
    {"method of another service", 18, 2, 0x0501 + 0x0100},
    {"tensor_bytes above frame_bytes_max", 40, 8, FRAME_BYTES_MAX},
    {"payload CRC 0", 48, 4, 0},
    {"payload CRC all ones", 48, 4, 0xffffffff},
};

/* In the Hello and in a request after a right Hello; with the CRC that fits, and with the one from
 * before the change. */
static void send_wrong_field(const hostile_door *door, const ep_test_wrong_field *field,
                             bool after_hello, bool right_crc)
{
    static hostile_frame frame;
    char what[128];
    uint64_t wire = htole64(field->value);
    snprintf(what, sizeof(what), "%s %s Hello, %s CRC", field->name, after_hello ? "after" : "in",
             right_crc ? "right" : "wrong");
    int fd =
        after_hello ? hostile_connect_hello(door->url, role_of(door)) : hostile_connect(door->url);
    if (after_hello) {
        make_request(door, &frame);
    } else {
        hostile_frame_hello(&frame, role_of(door));
    }
    memcpy(frame.data + field->at, &wire, field->bytes);
    if (right_crc) {
        hostile_frame_seal(&frame);
    }
    hostile_send(fd, frame.data, frame.bytes);
    hostile_expect_refused(fd, what);
}

static void run_fields(const hostile_door *door)
{
    for (size_t i = door->first; i < 4 * EP_ARRAY_COUNT(wrong_fields); i += door->step) {
        send_wrong_field(door, &wrong_fields[i / 4], i / 2 % 2 == 1, i % 2 == 1);
    }
}

/* ---- other protocols and noise ---- */

static void run_http(const hostile_door *door)
{
    static const char request[] =
        "GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a browser\r\nAccept: */*\r\n\r\n";
    static const char two[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for (size_t i = 0; i < 2; i++) {
        int fd = hostile_connect(door->url);
        hostile_send(fd, i == 0 ? request : two, i == 0 ? sizeof(request) - 1 : sizeof(two) - 1);
        hostile_end(fd);
        hostile_expect_refused(fd, "an HTTP request");
    }
}

static void run_wrong_http(const hostile_door *door)
{
    static const char *const requests[] = {
        "\r\n\r\n",
        "GET\r\n\r\n",
        "BREW /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /livez HTTP/9.9\r\n\r\n",
        "POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\nx",
        "POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
        "chunked\r\n\r\nffffffffffffffff\r\nx",
        /* of the status page, which a node has not */
        "POST /status.json HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        "DELETE / HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /placement.json HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /placement.json?model&layer HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /placement.json?model=%ff%00%0d%0aX:%20y&version=%1b%5b31m&layer=0 HTTP/1.1\r\nHost: "
        "x\r\n\r\n",
        "GET /placement.json?layer=99999999999999999999999&model=demo HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /placement.json?layer=-1&model=demo HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /placement.json?model=demo&layer=0&version=%s%n HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /status.json/.. HTTP/1.1\r\nHost: x\r\n\r\n",
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(requests); i++) {
        int fd = hostile_connect(door->url);
        hostile_send(fd, requests[i], strlen(requests[i]));
        hostile_end(fd);
        hostile_expect_http_refused(fd, requests[i]);
    }
    static char line[64 << 10]; /* above the memory of a connection */
    memset(line, 'a', sizeof(line));
    memcpy(line, "GET /", 5);
    int fd = hostile_connect(door->url);
    hostile_send(fd, line, sizeof(line));
    hostile_end(fd);
    hostile_expect_http_refused(fd, "a long line");
}

static size_t fill_random(uint64_t *state, uint8_t *out, size_t bytes_max)
{
    size_t count = 64 + (size_t)(ep_splitmix64(state) % (bytes_max - 64));
    for (size_t i = 0; i < count; i++) {
        out[i] = (uint8_t)ep_splitmix64(state);
    }
    return count;
}

static void run_random(const hostile_door *door)
{
    uint64_t state = 4711 + door->first;
    for (size_t i = door->first; i < RANDOM_CONNECTIONS; i += door->step) {
        uint8_t bytes[8192];
        size_t count = fill_random(&state, bytes, sizeof(bytes));
        int fd = hostile_connect(door->url);
        hostile_send(fd, bytes, count);
        expect_refused(door, fd, "random bytes");
    }
}

/* Noise after a right Hello; every second one as a fixed part with right magic, version and CRC. */
static void run_hello_then_random(const hostile_door *door)
{
    static hostile_frame frame;
    uint64_t state = 4712 + door->first;
    for (size_t i = door->first; i < RANDOM_CONNECTIONS; i += door->step) {
        frame.bytes = fill_random(&state, frame.data, 8192);
        if (i % 2 == 0) {
            memcpy(frame.data, "EPD1\x01", 5);
            /* request, reply, reply_more: what carries payload */
            frame.data[5] = (uint8_t)(1 + i / 2 % 3);
            hostile_frame_seal(&frame);
        }
        int fd = hostile_connect_hello(door->url, role_of(door));
        hostile_send(fd, frame.data, frame.bytes);
        hostile_end(fd);
        hostile_expect_refused(fd, "random bytes after Hello");
    }
}

/* ---- headers that would unpack to much memory ---- */

/* The bytes repeated to fill a header to its limit, after the CallHeader's length. */
static void make_bomb(hostile_frame *out, uint16_t method_id, uint32_t call_header_bytes,
                      const char *pattern, size_t pattern_bytes)
{
    static uint8_t header[65536];
    uint32_t length = htole32(call_header_bytes);
    size_t used = sizeof(length);
    memcpy(header, &length, sizeof(length));
    while (used + pattern_bytes <= sizeof(header)) {
        memcpy(header + used, pattern, pattern_bytes);
        used += pattern_bytes;
    }
    const ep_frame frame = {.kind = EP_FRAME_REQUEST,
                            .call_id = 1,
                            .method_id = method_id,
                            .deadline_us = EP_FRAME_DEADLINE_NONE};
    hostile_frame_make(out, frame, header, used, NULL, 0);
}

static void run_bombs(const hostile_door *door)
{
    static hostile_frame frame;
    uint16_t method_id = door->is_coordinator ? REGISTER_ID : FORWARD_ID;
    const struct {
        const char *name;
        bool after_hello;
        uint32_t call_header_bytes;
        const char *pattern;
        size_t bytes;
    } bombs[] = {
        {"21844 models in Hello", false, 0, "\x8a\x01\x00", 3},
        {"32766 required features in Hello", false, 0, "\x1a\x00", 2},
        {"32766 metadata of Hello", false, 65532, "\x0a\x00", 2},
        {"32766 metadata of a request", true, 65532, "\x0a\x00", 2},
        {"32766 models or fields unknown", true, 0, "\x22\x00", 2},
        {"21844 unknown numbers", true, 0, "\xf0\x01\x00", 3},
        {"a CallHeader longer than its frame", true, 0xffffffff, "\x22\x00", 2},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(bombs); i++) {
        make_bomb(&frame, bombs[i].after_hello ? method_id : 0, bombs[i].call_header_bytes,
                  bombs[i].pattern, bombs[i].bytes);
        int fd = bombs[i].after_hello ? hostile_connect_hello(door->url, role_of(door))
                                      : hostile_connect(door->url);
        hostile_send(fd, frame.data, frame.bytes);
        hostile_expect_refused(fd, bombs[i].name);
    }
}

/* ---- slow and silent peers ---- */

/* All but the last byte of a right Hello. */
void hostile_slow_hello(const hostile_door *door)
{
    static hostile_frame hello;
    int fds[SLOW_CONNECTIONS];
    hostile_frame_hello(&hello, role_of(door));
    for (int i = 0; i < SLOW_CONNECTIONS; i++) {
        fds[i] = hostile_connect(door->url);
    }
    for (size_t at = 0; at + 1 < hello.bytes && !hostile_is_closed(fds[0]); at++) {
        for (int i = 0; i < SLOW_CONNECTIONS; i++) {
            hostile_send(fds[i], hello.data + at, 1);
        }
        ep_test_load_wait_succeeded(door->load, 4);
    }
    for (int i = 0; i < SLOW_CONNECTIONS; i++) {
        hostile_wait_closed(fds[i], "a slow Hello");
    }
}

void hostile_crowd(const hostile_door *door, size_t count)
{
    static int fds[HOSTILE_OPEN_MAX];
    EP_TEST_CHECK(count <= HOSTILE_OPEN_MAX, "a crowd of %zu", count);
    for (size_t i = 0; i < count; i++) {
        fds[i] = hostile_connect(door->url);
    }
    ep_test_load_wait_succeeded(door->load, 20);
    for (size_t i = 0; i < count; i++) {
        close(fds[i]);
    }
}

static void run_small_crowd(const hostile_door *door)
{
    hostile_crowd(door, SMALL_CROWD);
}

/* A length prefix and a short body: closed when Hello is overdue. */
static size_t open_short_bodies(const hostile_door *door, int *fds)
{
    for (size_t i = 0; i < length_count(); i++) {
        uint8_t bytes[12] = {0};
        uint64_t wire = htobe64(length_at(i));
        memcpy(bytes, &wire, sizeof(wire));
        fds[i] = hostile_connect(door->url);
        hostile_send(fds[i], bytes, sizeof(bytes));
    }
    return length_count();
}

/* After a right Hello: the beginning of a large frame, and no answer to pings. */
static size_t open_stalled(const hostile_door *door, int *fds)
{
    static hostile_frame frame;
    make_request(door, &frame);
    uint64_t wire = htole64(1 << 20);
    memcpy(frame.data + 40, &wire, sizeof(wire));
    hostile_frame_seal(&frame);
    for (int i = 0; i < SLOW_CONNECTIONS; i++) {
        fds[i] = hostile_connect_hello(door->url, role_of(door));
        hostile_send(fds[i], frame.data, i % 2 == 0 ? frame.bytes : 70);
    }
    return SLOW_CONNECTIONS;
}

static size_t open_idle(const hostile_door *door, int *fds)
{
    size_t count = door->is_http ? IDLE_HTTP : IDLE_RPC;
    for (size_t i = 0; i < count; i++) {
        fds[i] = hostile_connect(door->url);
    }
    return count;
}

const hostile_group hostile_groups[] = {
    {"length prefixes", true, true, run_lengths},
    {"lengths in a frame", false, true, run_frame_lengths},
    {"every field wrong", false, true, run_fields},
    {"HTTP on the RPC port", false, true, run_http},
    {"wrong HTTP", true, false, run_wrong_http},
    {"random bytes", true, true, run_random},
    {"random bytes after Hello", false, true, run_hello_then_random},
    {"headers that unpack to much", false, true, run_bombs},
    {"a small crowd", true, true, run_small_crowd},
};
const size_t hostile_groups_count = EP_ARRAY_COUNT(hostile_groups);

const hostile_slow_group hostile_slow_groups[] = {
    {"short bodies", false, true, open_short_bodies},
    {"a frame that never ends", false, true, open_stalled},
    {"idle connections", true, true, open_idle},
};
const size_t hostile_slow_groups_count = EP_ARRAY_COUNT(hostile_slow_groups);
