/* SPDX-License-Identifier: Apache-2.0 */
/* The peer that breaks the rules, over any lane. */
#include "raw_peer.h"

#include <string.h>

#include "base/check.h"
#include "rpc/rpc_status.h"
#include "support/check.h"

static void signal_changed(raw_peer *p)
{
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

/* The lock is held. */
static void wait_changed(raw_peer *p, const char *what)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += SECONDS;
    CHECK(pthread_cond_timedwait(&p->changed, &p->lock, &t) == 0, "%s", what);
}

static void on_frame(void *arg, ep_conn *conn, ep_buffer *taken_frame)
{
    raw_peer *p = arg;
    (void)conn;
    pthread_mutex_lock(&p->lock);
    CHECK(p->frames_count != RAW_FRAMES_MAX, "too many frames");
    p->frames[p->frames_count++] = taken_frame;
    signal_changed(p);
}

static void on_closed(void *arg, ep_conn *conn, const ep_error *error)
{
    raw_peer *p = arg;
    (void)conn;
    pthread_mutex_lock(&p->lock);
    p->closed = true;
    p->why = *error;
    signal_changed(p);
}

static void adopt(raw_peer *p, ep_conn *taken_conn)
{
    ep_conn_handler handler = {.on_frame = on_frame, .on_closed = on_closed, .arg = p};
    ep_conn_start(taken_conn, &handler);
    pthread_mutex_lock(&p->lock);
    p->conn = taken_conn;
    p->dialled = true;
    signal_changed(p);
}

static void on_dial(void *arg, ep_conn *taken_conn, const ep_error *error)
{
    CHECK(taken_conn != NULL, "%s", error->text);
    adopt(arg, taken_conn);
}

static void on_accept(void *arg, ep_conn *taken_conn)
{
    raw_peer *p = arg;
    pthread_mutex_lock(&p->lock);
    bool first = !p->dialled;
    p->dialled = true;
    pthread_mutex_unlock(&p->lock);
    if (first) {
        adopt(p, taken_conn);
    } else {
        ep_conn_release(taken_conn);
    }
}

static ep_lane_limits init(raw_peer *p, size_t memory_bytes)
{
    memset(p, 0, sizeof(*p));
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&p->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&p->lock, NULL);
    CHECK(ep_buffer_pool_create(memory_bytes, 1 << 20, &p->pool) == EP_OK, "no pool");
    return (ep_lane_limits){.frame_bytes = ep_frame_read_bytes,
                            .pool = p->pool,
                            .frame_bytes_max = (size_t)64 << 20,
                            .send_queue_bytes_max = (size_t)256 << 20,
                            .connections_max = 16};
}

void raw_peer_dial(raw_peer *p, const char *url)
{
    raw_peer_dial_limited(p, url, 0);
}

void raw_peer_dial_limited(raw_peer *p, const char *url, size_t memory_bytes)
{
    ep_lane_limits limits = init(p, memory_bytes);
    ep_error error;
    ep_lane_address address = {.url = url};
    const ep_lane_ops *lane = ep_lane_for_url(url);
    CHECK(ep_lane_dial_begin(lane, &address, &limits, on_dial, p, &p->dial, &error) == EP_OK, "%s",
          error.text);
    raw_peer_accept(p);
}

void raw_peer_listen(raw_peer *p, const char *url)
{
    ep_lane_limits limits = init(p, 0);
    ep_error error;
    ep_lane_address address = {.url = url};
    const ep_lane_ops *lane = ep_lane_for_url(url);
    CHECK(ep_lane_listen(lane, &address, &limits, on_accept, p, &p->listener, &error) == EP_OK,
          "%s", error.text);
    ep_listener_url(p->listener, p->url, sizeof(p->url));
}

void raw_peer_accept(raw_peer *p)
{
    pthread_mutex_lock(&p->lock);
    while (p->conn == NULL) {
        wait_changed(p, "no connection");
    }
    pthread_mutex_unlock(&p->lock);
}

void raw_peer_fini(raw_peer *p)
{
    if (p->listener != NULL) {
        ep_listener_close(p->listener);
    }
    if (p->dial != NULL) {
        ep_dial_release(p->dial);
    }
    if (p->conn != NULL) {
        ep_conn_close(p->conn);
        raw_peer_wait_closed(p);
        ep_conn_release(p->conn);
    }
    for (uint32_t i = p->frames_read; i < p->frames_count; i++) {
        ep_buffer_unref(p->frames[i]);
    }
    ep_buffer_pool_destroy(p->pool);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
}

typedef struct raw_send {
    ep_send send; /* first member */
    raw_peer *peer;
    uint8_t bytes[];
} raw_send;

static void sent(ep_send *send, ep_err result)
{
    raw_send *s = (raw_send *)(void *)send;
    raw_peer *p = s->peer;
    (void)result;
    pthread_mutex_lock(&p->lock);
    p->sends_open--;
    signal_changed(p);
    free(s);
}

bool raw_peer_send_bytes(raw_peer *p, const void *bytes, size_t count)
{
    raw_send *s = calloc(1, sizeof(*s) + count);
    CHECK(s != NULL, "no memory");
    memcpy(s->bytes, bytes, count);
    s->peer = p;
    s->send.parts[0] = (ep_send_part){.data = s->bytes, .bytes = count};
    s->send.parts_count = 1;
    s->send.done = sent;
    pthread_mutex_lock(&p->lock);
    p->sends_open++;
    pthread_mutex_unlock(&p->lock);
    if (ep_conn_send(p->conn, &s->send) != EP_OK) {
        pthread_mutex_lock(&p->lock);
        p->sends_open--;
        pthread_mutex_unlock(&p->lock);
        free(s);
        return false;
    }
    return true;
}

void raw_peer_send(raw_peer *p, ep_frame frame, const void *header, const void *tensors,
                   bool payload_crc)
{
    frame.tensor_offset = ep_frame_tensor_offset(frame.header_bytes);
    size_t total = frame.tensor_offset + (size_t)frame.tensor_bytes;
    uint8_t *bytes = calloc(1, total);
    CHECK(bytes != NULL, "no memory");
    if (header != NULL) {
        memcpy(bytes + EP_FRAME_FIXED_BYTES, header, frame.header_bytes);
    }
    if (tensors != NULL) {
        memcpy(bytes + frame.tensor_offset, tensors, (size_t)frame.tensor_bytes);
    }
    if (payload_crc) {
        frame.payload_crc =
            ep_crc32c(0, bytes + EP_FRAME_FIXED_BYTES, total - EP_FRAME_FIXED_BYTES);
    }
    ep_frame_encode(&frame, bytes);
    raw_peer_send_bytes(p, bytes, total);
    free(bytes);
}

uint8_t *raw_request_header(const ProtobufCMessage *message, size_t *out_bytes)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *header = calloc(1, 4 + bytes);
    CHECK(header != NULL, "no memory");
    protobuf_c_message_pack(message, header + 4);
    *out_bytes = 4 + bytes;
    return header;
}

void raw_peer_send_message(raw_peer *p, ep_frame frame, const ProtobufCMessage *message,
                           bool as_request, bool payload_crc)
{
    size_t bytes;
    uint8_t *header = raw_request_header(message, &bytes);
    size_t skip = as_request ? 0 : 4;
    frame.header_bytes = (uint32_t)(bytes - skip);
    raw_peer_send(p, frame, header + skip, NULL, payload_crc);
    free(header);
}

ep_buffer *raw_peer_receive(raw_peer *p, ep_frame *out_frame)
{
    ep_buffer *frame = NULL;
    pthread_mutex_lock(&p->lock);
    while (p->frames_read == p->frames_count && !p->closed) {
        wait_changed(p, "no frame came");
    }
    if (p->frames_read < p->frames_count) {
        frame = p->frames[p->frames_read++];
    }
    pthread_mutex_unlock(&p->lock);
    CHECK(frame == NULL ||
              ep_frame_decode(frame->data, EP_FRAME_BYTES_CEILING, EP_FRAME_HEADER_BYTES_CEILING,
                              out_frame, NULL, NULL) == EP_OK,
          "received a bad frame");
    return frame;
}

uint32_t raw_peer_wait_closed(raw_peer *p)
{
    pthread_mutex_lock(&p->lock);
    while (!p->closed || p->sends_open > 0) {
        wait_changed(p, "the connection was not closed");
    }
    uint32_t frames = p->frames_count - p->frames_read;
    pthread_mutex_unlock(&p->lock);
    return frames;
}

void raw_hello_init(Expertd__V1__Hello *hello)
{
    expertd__v1__hello__init(hello);
    hello->protocol_min = 1;
    hello->protocol_max = 1;
    hello->role = (char *)(uintptr_t) "client";
    hello->credit_bytes = (uint64_t)64 << 20;
}

int raw_peer_hello(raw_peer *p, const Expertd__V1__Hello *hello)
{
    Expertd__V1__Hello good;
    ep_frame frame = raw_request(1, 0);
    raw_hello_init(&good);
    raw_peer_send_message(p, frame, hello != NULL ? &hello->base : &good.base, true, false);
    ep_buffer *reply = raw_peer_receive(p, &frame);
    if (reply == NULL) {
        return -1;
    }
    if (frame.status != 0) {
        raw_status(reply, &frame, &p->refusal);
    }
    ep_buffer_unref(reply);
    return (int)frame.status;
}

void raw_peer_meet(raw_peer *p, const char *url)
{
    raw_peer_dial(p, url);
    CHECK(raw_peer_hello(p, NULL) == 0, "a good Hello to %s was refused: %s", url, p->refusal.text);
}

ep_frame raw_request(uint64_t call_id, uint16_t method_id)
{
    return (ep_frame){.kind = EP_FRAME_REQUEST,
                      .call_id = call_id,
                      .method_id = method_id,
                      .deadline_us = EP_FRAME_DEADLINE_NONE};
}

void raw_status(const ep_buffer *buffer, const ep_frame *frame, ep_error *out_error)
{
    ep_buffer_pool *pool;
    CHECK(ep_buffer_pool_create(0, 0, &pool) == EP_OK, "no pool");
    ep_rpc_status_read(pool, frame->status, buffer->data + EP_FRAME_FIXED_BYTES,
                       frame->header_bytes, out_error);
    ep_buffer_pool_destroy(pool);
}
