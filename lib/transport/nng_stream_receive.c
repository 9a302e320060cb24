/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The receiving half of an nng stream. Bytes arrive in the staging memory until a frame's length is known; then the frame
 * gets its buffer, takes along what is staged, and the rest is received in place. Behind the rest of a frame the staging
 * memory takes what follows, so a stream of frames costs one receive each.
 */
#include <string.h>

#include "base/clock.h"
#include "base/path_count.h"
#include "transport/nng_stream.h"

#define MEMORY_BACKOFF_MIN_MS 1
#define MEMORY_BACKOFF_MAX_MS 50

typedef enum receive_step { RECEIVE_MORE, RECEIVE_FRAME, RECEIVE_NO_MEMORY, RECEIVE_ERROR } receive_step;

void stream_receive_post(stream_conn *conn)
{
    nng_iov iovs[2];
    unsigned count = 0;
    if (conn->frame != NULL) {
        iovs[count++] = (nng_iov){.iov_buf = conn->frame->data + conn->frame_have_bytes,
                                  .iov_len = conn->frame->bytes - conn->frame_have_bytes};
    }
    iovs[count++] = (nng_iov){.iov_buf = conn->staging + conn->staged_end, .iov_len = STREAM_STAGING_BYTES - conn->staged_end};
    conn->posting++;
    conn->receive_posted = true;
    conn->receive_number++;
    pthread_mutex_unlock(&conn->lock);
    nng_aio_set_iov(conn->receive_aio, count, iovs);
    nng_stream_recv(conn->stream, conn->receive_aio);
    pthread_mutex_lock(&conn->lock);
    conn->posting--;
}

static void wait_for_memory(stream_conn *conn)
{
    conn->backoff_ms = conn->backoff_ms == 0 ? MEMORY_BACKOFF_MIN_MS : conn->backoff_ms * 2;
    if (conn->backoff_ms > MEMORY_BACKOFF_MAX_MS) {
        conn->backoff_ms = MEMORY_BACKOFF_MAX_MS;
    }
    __atomic_store_n(&conn->memory_wait, true, __ATOMIC_RELAXED);
    conn->posting++;
    pthread_mutex_unlock(&conn->lock);
    nng_sleep_aio(conn->backoff_ms, conn->wait_aio);
    pthread_mutex_lock(&conn->lock);
    conn->posting--;
}

/* Reads the staged prefix and gives the frame its buffer. */
static receive_step begin_frame(stream_conn *conn, ep_error *out_error)
{
    const uint8_t *prefix = conn->staging + conn->staged_begin;
    size_t bytes = 0;
    ep_err err = conn->limits.frame_bytes(prefix, &bytes, out_error);
    if (err != EP_OK) {
        return RECEIVE_ERROR;
    }
    bool large_allowed = __atomic_load_n(&conn->large_allowed, __ATOMIC_ACQUIRE);
    if (ep_lane_frame_check(&conn->limits, large_allowed, bytes, conn->peer, out_error) != EP_OK) {
        return RECEIVE_ERROR;
    }
    if (bytes < ep_lane_prefix_bytes(&conn->limits)) {
        ep_error_set(out_error, EP_ERR_PROTOCOL, "frame of %zu bytes from %s, must be at least %zu", bytes, conn->peer,
                     ep_lane_prefix_bytes(&conn->limits));
        return RECEIVE_ERROR;
    }
    if (ep_buffer_acquire(conn->limits.pool, bytes, &conn->frame) != EP_OK) {
        return RECEIVE_NO_MEMORY;
    }
    size_t staged = conn->staged_end - conn->staged_begin;
    conn->frame_have_bytes = staged < bytes ? staged : bytes;
    memcpy(conn->frame->data, prefix, conn->frame_have_bytes);
    ep_path_count(EP_PATH_LANE, conn->frame_have_bytes);
    conn->staged_begin += conn->frame_have_bytes;
    conn->backoff_ms = 0;
    __atomic_store_n(&conn->memory_wait, false, __ATOMIC_RELAXED);
    if (conn->handler.on_begin != NULL) {
        conn->handler.on_begin(conn->handler.arg, &conn->base, conn->frame->data);
    }
    return RECEIVE_FRAME;
}

/* What can be done with the bytes at hand. On RECEIVE_FRAME *out_frame is a whole frame. */
static receive_step next_step(stream_conn *conn, ep_buffer **out_frame, ep_error *out_error)
{
    size_t staged = conn->staged_end - conn->staged_begin;
    if (conn->frame == NULL) {
        if (staged < ep_lane_prefix_bytes(&conn->limits)) { /* to the front, so that the next receive has room */
            memmove(conn->staging, conn->staging + conn->staged_begin, staged);
            conn->staged_begin = 0;
            conn->staged_end = staged;
            return RECEIVE_MORE;
        }
        receive_step step = begin_frame(conn, out_error);
        if (step != RECEIVE_FRAME) {
            return step;
        }
    }
    if (conn->frame_have_bytes < conn->frame->bytes) { /* then everything staged is in it */
        conn->staged_begin = 0;
        conn->staged_end = 0;
        return RECEIVE_MORE;
    }
    *out_frame = conn->frame;
    conn->frame = NULL;
    return RECEIVE_FRAME;
}

static bool is_closing(stream_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    bool closing = conn->closing;
    pthread_mutex_unlock(&conn->lock);
    return closing;
}

/* Delivers whole frames, then receives on, waits for memory or ends the connection. */
static void pump(stream_conn *conn)
{
    ep_error error;
    ep_buffer *frame = NULL;
    receive_step step = RECEIVE_FRAME;
    while (step == RECEIVE_FRAME && !is_closing(conn)) {
        step = next_step(conn, &frame, &error);
        if (step == RECEIVE_FRAME) {
            conn->handler.on_frame(conn->handler.arg, &conn->base, frame);
        }
    }
    pthread_mutex_lock(&conn->lock);
    if (step == RECEIVE_ERROR) {
        stream_conn_begin_end(conn, &error);
    }
    if (conn->closing) {
        conn->receive_busy = false;
    } else if (step == RECEIVE_NO_MEMORY) {
        wait_for_memory(conn);
    } else {
        stream_receive_post(conn);
    }
    stream_conn_leave(conn);
}

static void count_received(stream_conn *conn, size_t received)
{
    if (conn->frame != NULL) {
        size_t rest = conn->frame->bytes - conn->frame_have_bytes;
        size_t in_place = received < rest ? received : rest;
        conn->frame_have_bytes += in_place;
        received -= in_place;
    }
    conn->staged_end += received;
}

static void end_of_stream(stream_conn *conn, int failed)
{
    const char *reason = failed != 0 ? nng_strerror(failed) : "end of stream";
    ep_error lost;
    if (conn->frame != NULL) {
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "connection to %s lost in the middle of a frame, %zu of %zu bytes: %s",
                     conn->peer, conn->frame_have_bytes, conn->frame->bytes, reason);
    } else {
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "connection to %s lost: %s", conn->peer, reason);
    }
    pthread_mutex_lock(&conn->lock);
    stream_conn_begin_end(conn, &lost);
    conn->receive_busy = false;
    stream_conn_leave(conn);
}

void stream_receive_done(void *arg)
{
    stream_conn *conn = arg;
    int failed = nng_aio_result(conn->receive_aio);
    size_t received = nng_aio_count(conn->receive_aio);
    pthread_mutex_lock(&conn->lock);
    conn->receive_posted = false;
    pthread_mutex_unlock(&conn->lock);
    if (failed != 0 || received == 0) { /* tls reports its end as 0 bytes received */
        end_of_stream(conn, failed);
        return;
    }
    __atomic_store_n(&conn->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    count_received(conn, received);
    pump(conn);
}

void stream_receive_retry(void *arg)
{
    pump(arg);
}
