/* SPDX-License-Identifier: Apache-2.0 */
/* The receiving half of a uv stream, on its worker: reads while bytes are there, within a budget;
 * lane_assembler makes frames. */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "transport/uv/uv_lane.h"

#define BUDGET_BYTES ((size_t)4 << 20) /* then the worker's other connections have their turn */
#define MEMORY_BACKOFF_MIN_MS 1
#define MEMORY_BACKOFF_MAX_MS 50

static void on_retry_memory(uv_timer_t *timer);

static void wait_for_memory(ep_uv_conn *conn)
{
    conn->backoff_ms = conn->backoff_ms == 0 ? MEMORY_BACKOFF_MIN_MS : conn->backoff_ms * 2;
    if (conn->backoff_ms > MEMORY_BACKOFF_MAX_MS) {
        conn->backoff_ms = MEMORY_BACKOFF_MAX_MS;
    }
    __atomic_store_n(&conn->memory_wait, true, __ATOMIC_RELAXED);
    uv_timer_start(&conn->retry, on_retry_memory, conn->backoff_ms, 0);
}

/* Delivers whole frames. False when nothing may be read now. */
static bool pump(ep_uv_conn *conn)
{
    ep_error error;
    ep_buffer *frame = NULL;
    ep_assembler_step step = EP_ASSEMBLER_FRAME;
    while ((step == EP_ASSEMBLER_FRAME || step == EP_ASSEMBLER_BEGUN) &&
           !ep_uv_conn_is_closing(conn)) {
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
    if (step == EP_ASSEMBLER_ERROR) {
        ep_uv_conn_end(conn, &error);
    } else if (step == EP_ASSEMBLER_NO_MEMORY) {
        wait_for_memory(conn);
    }
    return step == EP_ASSEMBLER_MORE;
}

static void end_of_stream(ep_uv_conn *conn, const char *reason)
{
    ep_error lost;
    ep_assembler_describe_end(&conn->assembler, conn->peer, reason, &lost);
    ep_uv_conn_end(conn, &lost);
}

/* Only a failed socket brings a connection here that is not started: it waits for room to write,
 * and there is no handler yet. */
static bool is_started(ep_uv_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    bool started = conn->started;
    pthread_mutex_unlock(&conn->lock);
    return started;
}

void ep_uv_conn_readable(ep_uv_conn *conn, bool failed)
{
    size_t had_bytes = 0;
    bool waits = __atomic_load_n(&conn->memory_wait, __ATOMIC_RELAXED);
    /* one that waits for memory does not read: its error would come again and again */
    if (!is_started(conn) || (failed && waits)) {
        end_of_stream(conn, "its socket failed");
        return;
    }
    bool more = !ep_uv_conn_is_closing(conn) && !waits;
    while (more && had_bytes < BUDGET_BYTES) {
        struct iovec room[EP_ASSEMBLER_IOVS_MAX];
        unsigned count = ep_assembler_room(&conn->assembler, &conn->limits, room);
        size_t asked = room[0].iov_len + (count > 1 ? room[1].iov_len : 0);
        struct msghdr message = {.msg_iov = room, .msg_iovlen = count};
        ssize_t got = recvmsg(conn->fd, &message, MSG_DONTWAIT);
        if (got > 0) {
            uint64_t now_ns = ep_clock_now_ns();
            __atomic_store_n(&conn->heard_ns, now_ns, __ATOMIC_RELAXED);
            ep_uv_loop_worker_heard(conn->worker, now_ns);
            ep_assembler_received(&conn->assembler, (size_t)got);
            had_bytes += (size_t)got;
            more = pump(conn) && (size_t)got == asked; /* less: the socket is empty */
        } else if (got == 0) {
            end_of_stream(conn, "end of stream");
            more = false;
        } else if (errno != EINTR) {
            if (errno != EAGAIN) {
                end_of_stream(conn, strerror(errno));
            }
            more = false;
        }
    }
    ep_assembler_rest(&conn->assembler);
    ep_assembler_note(&conn->assembler, ep_clock_now_ns());
}

static void on_retry_memory(uv_timer_t *timer)
{
    ep_uv_conn *conn = timer->data;
    if (ep_uv_conn_is_closing(conn)) {
        return;
    }
    pump(conn); /* memory_wait stays until there is memory */
    ep_assembler_rest(&conn->assembler);
    ep_assembler_note(&conn->assembler, ep_clock_now_ns());
    ep_uv_conn_update_events(conn);
}
