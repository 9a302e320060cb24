/* SPDX-License-Identifier: Apache-2.0 */
#include "hostile_peer.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/cluster.h"

#define CALL_HEADER_LENGTH_BYTES 4

int hostile_connect(const char *url)
{
    int fd = ep_test_tcp_connect(url);
    EP_TEST_CHECK(fd >= 0, "%s: %s", url, strerror(errno));
    return fd;
}

void hostile_send(int fd, const void *bytes, size_t count)
{
    const uint8_t *at = bytes;
    while (count > 0) {
        ssize_t n = send(fd, at, count, MSG_NOSIGNAL);
        if (n <= 0) {
            EP_TEST_CHECK(errno == EPIPE || errno == ECONNRESET, "send: %s", strerror(errno));
            return;
        }
        at += n;
        count -= (size_t)n;
    }
}

void hostile_end(int fd)
{
    shutdown(fd, SHUT_WR);
}

/* Bytes received, 0 at the end of the connection. */
static size_t receive(int fd, void *out, size_t bytes, const char *what)
{
    struct pollfd pfd = {.fd = fd, .events = POLLIN};
    EP_TEST_CHECK(poll(&pfd, 1, EP_TEST_PATIENCE_MS) == 1, "%s: the connection stays open", what);
    ssize_t n = recv(fd, out, bytes, 0);
    EP_TEST_CHECK(n >= 0 || errno == ECONNRESET, "%s: recv: %s", what, strerror(errno));
    return n > 0 ? (size_t)n : 0;
}

void hostile_wait_closed(int fd, const char *what)
{
    uint8_t dropped[4096];
    while (receive(fd, dropped, sizeof(dropped), what) > 0) {
    }
    close(fd);
}

bool hostile_is_closed(int fd)
{
    uint8_t dropped[4096];
    ssize_t n;
    while ((n = recv(fd, dropped, sizeof(dropped), MSG_DONTWAIT)) > 0) {
    }
    return n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

static bool receive_all(int fd, void *out, size_t bytes, const char *what)
{
    uint8_t *at = out;
    while (bytes > 0) {
        size_t n = receive(fd, at, bytes, what);
        if (n == 0) {
            return false;
        }
        at += n;
        bytes -= n;
    }
    return true;
}

bool hostile_receive_reply(int fd, ep_frame *out_frame, const uint8_t **out_header,
                           const char *what)
{
    uint8_t fixed[EP_FRAME_FIXED_BYTES];
    static uint8_t rest[HOSTILE_FRAME_BYTES_MAX];
    ep_error error;
    do {
        size_t frame_bytes;
        if (!receive_all(fd, fixed, sizeof(fixed), what)) {
            return false;
        }
        EP_TEST_CHECK(ep_frame_decode(fixed, sizeof(rest), sizeof(rest), out_frame, &frame_bytes,
                                      &error) == EP_OK,
                      "%s: %s", what, error.text);
        if (!receive_all(fd, rest, frame_bytes - sizeof(fixed), what)) {
            return false;
        }
    } while (out_frame->kind != EP_FRAME_REPLY);
    *out_header = rest;
    return true;
}

void hostile_expect_refused(int fd, const char *what)
{
    ep_frame reply;
    const uint8_t *header;
    bool answered = hostile_receive_reply(fd, &reply, &header, what);
    EP_TEST_CHECK(!answered || reply.status != 0, "%s was accepted", what);
    close(fd);
}

void hostile_expect_http_refused(int fd, const char *what)
{
    char answer[4096];
    size_t have = 0;
    size_t n;
    do {
        n = receive(fd, answer + have, sizeof(answer) - 1 - have, what);
        have += n;
    } while (n > 0 && have < sizeof(answer) - 1);
    answer[have] = 0;
    EP_TEST_CHECK(strncmp(answer, "HTTP/1.1 2", 10) != 0, "%s was answered: %s", what, answer);
    close(fd);
}

void hostile_frame_make(hostile_frame *out, ep_frame frame, const void *header, size_t header_bytes,
                        const void *tensors, size_t tensor_bytes)
{
    frame.header_bytes = (uint32_t)header_bytes;
    frame.tensor_bytes = tensor_bytes;
    frame.tensor_offset = ep_frame_tensor_offset(frame.header_bytes);
    out->bytes = frame.tensor_offset + tensor_bytes;
    EP_TEST_CHECK(out->bytes <= sizeof(out->data), "a frame of %zu bytes", out->bytes);
    memset(out->data, 0, out->bytes);
    if (header_bytes > 0) {
        memcpy(out->data + EP_FRAME_FIXED_BYTES, header, header_bytes);
    }
    if (tensor_bytes > 0) {
        memcpy(out->data + frame.tensor_offset, tensors, tensor_bytes);
    }
    frame.payload_crc =
        ep_crc32c(0, out->data + EP_FRAME_FIXED_BYTES, out->bytes - EP_FRAME_FIXED_BYTES);
    ep_frame_encode(&frame, out->data);
}

void hostile_frame_request(hostile_frame *out, uint16_t method_id, uint64_t call_id,
                           const ProtobufCMessage *message)
{
    uint8_t header[4096] = {0};
    size_t bytes = CALL_HEADER_LENGTH_BYTES + protobuf_c_message_get_packed_size(message);
    EP_TEST_CHECK(bytes <= sizeof(header), "a header of %zu bytes", bytes);
    protobuf_c_message_pack(message, header + CALL_HEADER_LENGTH_BYTES);
    const ep_frame frame = {.kind = EP_FRAME_REQUEST,
                            .call_id = call_id,
                            .method_id = method_id,
                            .deadline_us = EP_FRAME_DEADLINE_NONE};
    hostile_frame_make(out, frame, header, bytes, NULL, 0);
}

void hostile_hello_init(Expertd__V1__Hello *hello, const char *role)
{
    expertd__v1__hello__init(hello);
    hello->protocol_min = 1;
    hello->protocol_max = 1;
    hello->role = (char *)(uintptr_t)role;
    hello->credit_bytes = 64 << 20;
    hello->payload_crc = true;
}

void hostile_frame_hello(hostile_frame *out, const char *role)
{
    Expertd__V1__Hello hello;
    hostile_hello_init(&hello, role);
    hostile_frame_request(out, 0, 1, &hello.base);
}

void hostile_frame_seal(hostile_frame *frame)
{
    uint32_t crc = htole32(ep_crc32c(0, frame->data, 60));
    memcpy(frame->data + 60, &crc, sizeof(crc));
}

int hostile_connect_hello(const char *url, const char *role)
{
    static hostile_frame hello;
    ep_frame reply;
    const uint8_t *header;
    int fd = hostile_connect(url);
    hostile_frame_hello(&hello, role);
    hostile_send(fd, hello.data, hello.bytes);
    EP_TEST_CHECK(hostile_receive_reply(fd, &reply, &header, "Hello") && reply.status == 0,
                  "%s: a right Hello got status %u", url, reply.status);
    return fd;
}
