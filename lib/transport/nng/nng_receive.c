/* SPDX-License-Identifier: Apache-2.0 */
/* The receiving half of an nng stream: one receive is always posted, and lane_assembler makes
 * frames of what comes. */
#include "base/clock.h"
#include "transport/nng/nng_lane.h"

#define MEMORY_BACKOFF_MIN_MS 1
#define MEMORY_BACKOFF_MAX_MS 50

void ep_nng_stream_receive_post(stream_conn *conn)
{
    struct iovec room[EP_ASSEMBLER_IOVS_MAX];
    nng_iov iovs[EP_ASSEMBLER_IOVS_MAX];
    unsigned count = ep_assembler_room(&conn->assembler, &conn->limits, room);
    for (unsigned i = 0; i < count; i++) {
        iovs[i] = (nng_iov){.iov_buf = room[i].iov_base, .iov_len = room[i].iov_len};
    }
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
    ep_assembler_step step = EP_ASSEMBLER_FRAME;
    while ((step == EP_ASSEMBLER_FRAME || step == EP_ASSEMBLER_BEGUN) && !is_closing(conn)) {
        bool large_allowed = __atomic_load_n(&conn->large_allowed, __ATOMIC_ACQUIRE);
        step = ep_assembler_next(&conn->assembler, &conn->limits, large_allowed, conn->peer, &frame,
                                 &error);
        if (step == EP_ASSEMBLER_BEGUN || step == EP_ASSEMBLER_MORE) {
            conn->backoff_ms = 0;
            __atomic_store_n(&conn->memory_wait, false, __ATOMIC_RELAXED);
        }
        if (step == EP_ASSEMBLER_BEGUN && conn->handler.on_begin != NULL) {
            conn->handler.on_begin(conn->handler.arg, &conn->base, frame->data);
        } else if (step == EP_ASSEMBLER_FRAME) {
            conn->handler.on_frame(conn->handler.arg, &conn->base, frame);
        }
    }
    ep_assembler_note(&conn->assembler, ep_clock_now_ns());
    pthread_mutex_lock(&conn->lock);
    if (step == EP_ASSEMBLER_ERROR) {
        ep_nng_stream_conn_begin_end(conn, &error);
    }
    if (conn->closing) {
        conn->receive_busy = false;
    } else if (step == EP_ASSEMBLER_NO_MEMORY) {
        wait_for_memory(conn);
    } else {
        ep_nng_stream_receive_post(conn);
    }
    ep_nng_stream_conn_leave(conn);
}

static void end_of_stream(stream_conn *conn, int failed)
{
    const char *reason = failed != 0 ? nng_strerror(failed) : "end of stream";
    ep_error lost;
    ep_assembler_describe_end(&conn->assembler, conn->peer, reason, &lost);
    pthread_mutex_lock(&conn->lock);
    ep_nng_stream_conn_begin_end(conn, &lost);
    conn->receive_busy = false;
    ep_nng_stream_conn_leave(conn);
}

void ep_nng_stream_receive_done(void *arg)
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
    ep_assembler_received(&conn->assembler, received);
    pump(conn);
}

void ep_nng_stream_receive_retry(void *arg)
{
    pump(arg);
}
