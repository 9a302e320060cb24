/* SPDX-License-Identifier: Apache-2.0 */
#include "door_client.h"

#include <endian.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "expert.pb-c.h"
#include "rpc/rpc_frame_io.h"
#include "rpc/rpc_status.h"
#include "support/process.h"

#define URLS_MAX 64

bytes request_make(ep_buffer_pool *pool, const ProtobufCMessage *message,
                   const request_options *options)
{
    char authorization[256] = "";
    char *extra = calloc(1, options->extra_metadata + 1);
    ep_rpc_metadata metadata[2];
    size_t count = 0;
    ep_buffer *tensors = NULL;
    ep_rpc_out *out;
    CHECK(extra != NULL, "no memory");
    if (options->token != NULL) {
        snprintf(authorization, sizeof(authorization), "Bearer %s", options->token);
        metadata[count++] = (ep_rpc_metadata){"authorization", authorization};
    }
    if (options->extra_metadata > 0) {
        memset(extra, 'x', options->extra_metadata);
        metadata[count++] = (ep_rpc_metadata){"extra", extra};
    }
    if (options->tensor_bytes > 0) {
        CHECK(ep_buffer_acquire(pool, options->tensor_bytes, &tensors) == EP_OK, "no buffer");
        memset(tensors->data, options->fill, options->tensor_bytes);
    }
    CHECK(ep_rpc_out_create_request(pool, ep_rpc_request_header_bytes(metadata, count, message),
                                    metadata, count, message, tensors, &out) == EP_OK,
          "no frame");
    free(extra);
    out->frame.kind = EP_FRAME_REQUEST;
    out->frame.call_id = options->call_id;
    out->frame.method_id = options->method_id;
    out->frame.deadline_us = options->deadline_us == 0         ? EP_FRAME_DEADLINE_NONE
                             : options->deadline_us == EXPIRED ? 0
                                                               : options->deadline_us;
    ep_rpc_out_seal(out, true);
    bytes made = {.data = malloc(out->frame_bytes)};
    CHECK(made.data != NULL, "no memory");
    for (uint32_t i = 0; i < out->send.parts_count; i++) {
        memcpy(made.data + made.count, out->send.parts[i].data, out->send.parts[i].bytes);
        made.count += out->send.parts[i].bytes;
    }
    CHECK(made.count == out->frame_bytes, "%zu", made.count);
    ep_rpc_out_destroy(out);
    return made;
}

bytes forward_make(ep_buffer_pool *pool, const char *model, const request_options *options)
{
    Expertd__V1__ForwardRequest request = EXPERTD__V1__FORWARD_REQUEST__INIT;
    request_options copy = *options;
    request.model = (char *)(uintptr_t)model;
    request.slots = 7;
    copy.method_id = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward")->id;
    return request_make(pool, &request.base, &copy);
}

void reply_read(ep_buffer_pool *pool, bytes reply, reply_view *out_view)
{
    size_t frame_bytes;
    ep_error error;
    CHECK(reply.count >= EP_FRAME_FIXED_BYTES, "%zu bytes", reply.count);
    CHECK(ep_frame_decode(reply.data, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING,
                          &out_view->frame, &frame_bytes, &error) == EP_OK,
          "%s", error.text);
    CHECK(frame_bytes == reply.count, "%zu of %zu", frame_bytes, reply.count);
    CHECK(ep_rpc_payload_check(&out_view->frame, reply.data, true, &error) == EP_OK, "%s",
          error.text);
    CHECK(out_view->frame.kind == EP_FRAME_REPLY, "kind %d", out_view->frame.kind);
    out_view->tensors = reply.data + out_view->frame.tensor_offset;
    ep_error_clear(&out_view->status);
    if (out_view->frame.status != 0) {
        ep_rpc_status_read(pool, out_view->frame.status, reply.data + EP_FRAME_FIXED_BYTES,
                           out_view->frame.header_bytes, &out_view->status);
    }
}

/* ---- by hand ---- */

void sp_send_raw(int fd, const void *data, size_t count)
{
    const uint8_t *at = data;
    while (count > 0) {
        ssize_t n = send(fd, at, count, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return; /* closed by the peer: what follows will see it */
        }
        at += n;
        count -= (size_t)n;
    }
}

/* False at the end of the stream. */
static bool read_all(int fd, void *out, size_t count)
{
    uint8_t *at = out;
    while (count > 0) {
        ssize_t n = recv(fd, at, count, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        at += n;
        count -= (size_t)n;
    }
    return true;
}

int sp_connect(const char *url, uint16_t protocol)
{
    const uint8_t hello[8] = {0, 'S', 'P', 0, (uint8_t)(protocol >> 8), (uint8_t)protocol, 0, 0};
    uint8_t theirs[8];
    int fd = ep_test_tcp_connect(url);
    CHECK(fd >= 0, "cannot connect to %s", url);
    int one = 1;
    /* small writes would wait for acknowledgements */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    sp_send_raw(fd, hello, sizeof(hello));
    if (!read_all(fd, theirs, sizeof(theirs))) {
        close(fd);
        return -1;
    }
    CHECK(theirs[5] == SP_PROTOCOL_REP, "protocol %02x", theirs[5]);
    return fd;
}

void sp_send_length(int fd, uint64_t length)
{
    length = htobe64(length);
    sp_send_raw(fd, &length, sizeof(length));
}

void sp_send(int fd, uint32_t request_id, bytes body)
{
    uint32_t id = htobe32(request_id | 0x80000000u);
    sp_send_length(fd, sizeof(id) + body.count);
    sp_send_raw(fd, &id, sizeof(id));
    sp_send_raw(fd, body.data, body.count);
}

bytes sp_receive(int fd, uint32_t *out_request_id)
{
    uint64_t length;
    uint32_t id;
    CHECK(read_all(fd, &length, sizeof(length)), "the door closed the connection");
    length = be64toh(length);
    CHECK(length >= sizeof(id) && length < (1u << 30), "length %llu", (unsigned long long)length);
    bytes body = {.data = malloc((size_t)length), .count = (size_t)length - sizeof(id)};
    CHECK(body.data != NULL && read_all(fd, &id, sizeof(id)) && read_all(fd, body.data, body.count),
          "cut");
    if (out_request_id != NULL) {
        *out_request_id = be32toh(id) & 0x7fffffffu;
    }
    return body;
}

void sp_wait_closed(int fd)
{
    uint8_t byte;
    while (read_all(fd, &byte, 1)) {
    }
    close(fd);
}

/* ---- nng's own client ---- */

bytes nng_ask(const char *url, bytes body)
{
    static char urls[URLS_MAX][EP_ADDRESS_BYTES];
    static nng_socket sockets[URLS_MAX]; /* never closed: see nng_rep_door.h */
    size_t i = 0;
    nng_ctx context;
    nng_aio *aio;
    nng_msg *message;
    while (i < URLS_MAX && urls[i][0] != 0 && strcmp(urls[i], url) != 0) {
        i++;
    }
    CHECK(i < URLS_MAX, "too many doors");
    if (urls[i][0] == 0) {
        snprintf(urls[i], sizeof(urls[i]), "%s", url);
        CHECK(nng_req0_open(&sockets[i]) == 0 && nng_dial(sockets[i], url, NULL, 0) == 0,
              "cannot dial %s", url);
    }
    CHECK(nng_ctx_open(&context, sockets[i]) == 0 && nng_aio_alloc(&aio, NULL, NULL) == 0 &&
              nng_msg_alloc(&message, body.count) == 0,
          "no memory");
    nng_ctx_set_ms(context, NNG_OPT_REQ_RESENDTIME, NNG_DURATION_INFINITE);
    if (body.count > 0) {
        memcpy(nng_msg_body(message), body.data, body.count);
    }
    nng_aio_set_msg(aio, message);
    nng_ctx_send(context, aio);
    nng_aio_wait(aio);
    CHECK(nng_aio_result(aio) == 0, "%s", nng_strerror(nng_aio_result(aio)));
    nng_ctx_recv(context, aio);
    nng_aio_wait(aio);
    CHECK(nng_aio_result(aio) == 0, "%s", nng_strerror(nng_aio_result(aio)));
    message = nng_aio_get_msg(aio);
    bytes reply = {.data = malloc(nng_msg_len(message) + 1), .count = nng_msg_len(message)};
    CHECK(reply.data != NULL, "no memory");
    memcpy(reply.data, nng_msg_body(message), reply.count);
    nng_msg_free(message);
    nng_aio_free(aio);
    nng_ctx_close(context);
    return reply;
}
