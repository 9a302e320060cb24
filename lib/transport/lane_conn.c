/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_conn.h. */
#include "transport/lane_conn.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "transport/lane_fork.h"

#define MEMORY_BACKOFF_MIN_MS 1
#define MEMORY_BACKOFF_MAX_MS 50

void ep_lane_conn_init(ep_lane_conn *conn, const ep_lane_ops *lane, const ep_lane_limits *limits,
                       ep_accept_count *taken_count, void (*wake)(ep_lane_conn *conn))
{
    pthread_mutex_init(&conn->own_lock, NULL);
    conn->lock = &conn->own_lock;
    conn->base.ops = lane;
    conn->limits = *limits;
    conn->count = taken_count;
    conn->wake = wake;
    conn->refs = 2;
    conn->forks = ep_lane_forks();
    ep_lane_hold();
}

void ep_lane_conn_abandon(ep_lane_conn *conn)
{
    ep_lane_conn_let_go(conn);
    ep_lane_drop();
    ep_lane_conn_unref(conn);
    ep_lane_conn_unref(conn);
}

void ep_lane_conn_set_peer(ep_lane_conn *conn, int family, const void *ip, in_port_t port)
{
    char host[INET6_ADDRSTRLEN] = "";
    inet_ntop(family, ip, host, sizeof(host));
    snprintf(conn->peer, sizeof(conn->peer), family == AF_INET ? "%s:%u" : "[%s]:%u", host,
             ntohs(port));
}

void ep_lane_conn_ref(ep_lane_conn *conn)
{
    __atomic_fetch_add(&conn->refs, 1, __ATOMIC_RELAXED);
}

void ep_lane_conn_unref(ep_lane_conn *conn)
{
    uint32_t before = __atomic_fetch_sub(&conn->refs, 1, __ATOMIC_ACQ_REL);
    EP_ASSERT(before > 0);
    if (before == 1) {
        EP_ASSERT(conn->queue.head == NULL && conn->sent.head == NULL);
        pthread_mutex_destroy(&conn->own_lock);
        free(conn);
    }
}

/* ---- sending ---- */

ep_err ep_lane_conn_queue(ep_lane_conn *conn, ep_send *send)
{
    if (conn->closing) {
        return EP_ERR_CLOSED;
    }
    if (send->total_bytes > conn->limits.send_queue_bytes_max - conn->queue.bytes) {
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    ep_send_queue_append(&conn->queue, send);
    return EP_OK;
}

ep_send *ep_lane_conn_advance(ep_lane_conn *conn, size_t bytes, const ep_send *mine)
{
    ep_send *whole = NULL;
    while (bytes > 0 && conn->queue.head != NULL) {
        ep_send *head = conn->queue.head;
        size_t left = head->total_bytes - head->sent_bytes;
        size_t piece = bytes < left ? bytes : left;
        head->sent_bytes += piece;
        bytes -= piece;
        if (piece < left) {
            break;
        }
        ep_send_queue_pop(&conn->queue);
        if (head == mine) {
            whole = head;
        } else {
            ep_send_queue_append(&conn->sent, head);
        }
    }
    return whole;
}

/* Takes all sends out of queue under the lock and calls their done() without it. */
static void end_sends(ep_lane_conn *conn, ep_send_queue *queue, ep_err result)
{
    pthread_mutex_lock(conn->lock);
    ep_send_queue taken = *queue;
    *queue = (ep_send_queue){.head = NULL};
    pthread_mutex_unlock(conn->lock);
    for (ep_send *send; (send = ep_send_queue_pop(&taken)) != NULL;) {
        send->done(send, result);
    }
}

void ep_lane_conn_report_sent(ep_lane_conn *conn)
{
    end_sends(conn, &conn->sent, EP_OK);
}

/* ---- receiving ---- */

void ep_lane_conn_begin_frame(ep_lane_conn *conn, const ep_buffer *frame)
{
    conn->backoff_ms = 0;
    __atomic_store_n(&conn->memory_wait, false, __ATOMIC_RELAXED);
    if (conn->handler.on_begin != NULL) {
        conn->handler.on_begin(conn->handler.arg, &conn->base, frame->data);
    }
}

ep_assembler_step ep_lane_conn_deliver(ep_lane_conn *conn)
{
    ep_error error;
    ep_buffer *frame = NULL;
    ep_assembler_step step = EP_ASSEMBLER_FRAME;
    while ((step == EP_ASSEMBLER_FRAME || step == EP_ASSEMBLER_BEGUN) &&
           !ep_lane_conn_is_closing(conn)) {
        bool large_allowed = __atomic_load_n(&conn->large_allowed, __ATOMIC_ACQUIRE);
        step = ep_assembler_next(&conn->assembler, &conn->limits, large_allowed, conn->peer, &frame,
                                 &error);
        if (step == EP_ASSEMBLER_BEGUN) {
            ep_lane_conn_begin_frame(conn, frame);
        } else if (step == EP_ASSEMBLER_FRAME) {
            conn->handler.on_frame(conn->handler.arg, &conn->base, frame);
        } else if (step == EP_ASSEMBLER_MORE) {
            conn->backoff_ms = 0;
            __atomic_store_n(&conn->memory_wait, false, __ATOMIC_RELAXED);
        } else if (step == EP_ASSEMBLER_ERROR) {
            ep_lane_conn_end(conn, &error);
        }
    }
    return step;
}

uint32_t ep_lane_conn_wait_ms(ep_lane_conn *conn)
{
    uint32_t wait_ms = conn->backoff_ms == 0 ? MEMORY_BACKOFF_MIN_MS : conn->backoff_ms * 2;
    conn->backoff_ms = wait_ms < MEMORY_BACKOFF_MAX_MS ? wait_ms : MEMORY_BACKOFF_MAX_MS;
    __atomic_store_n(&conn->memory_wait, true, __ATOMIC_RELAXED);
    return conn->backoff_ms;
}

/* ---- ending ---- */

bool ep_lane_conn_is_closing(const ep_lane_conn *conn)
{
    return __atomic_load_n(&conn->closing, __ATOMIC_ACQUIRE);
}

bool ep_lane_conn_begin_end(ep_lane_conn *conn, const ep_error *error)
{
    bool first = !conn->closing;
    if (first) {
        conn->end = *error;
        __atomic_store_n(&conn->closing, true, __ATOMIC_RELEASE);
    }
    return first;
}

void ep_lane_conn_end(ep_lane_conn *conn, const ep_error *error)
{
    pthread_mutex_lock(conn->lock);
    if (ep_lane_conn_begin_end(conn, error)) {
        conn->wake(conn);
    }
    pthread_mutex_unlock(conn->lock);
}

void ep_lane_conn_let_go(ep_lane_conn *conn)
{
    ep_assembler_fini(&conn->assembler);
    ep_accept_count_remove(conn->count);
    ep_lane_conn_report_sent(conn);
    end_sends(conn, &conn->queue,
              conn->end.code == EP_ERR_CLOSED ? EP_ERR_CLOSED : EP_ERR_CONNECTION_LOST);
}

void ep_lane_conn_finish(ep_lane_conn *conn)
{
    pthread_mutex_lock(conn->lock);
    bool started = conn->started;
    bool over = !conn->over && (started || conn->released);
    conn->over = conn->over || over;
    pthread_mutex_unlock(conn->lock);
    if (!over) {
        return;
    }
    if (started) {
        conn->handler.on_closed(conn->handler.arg, &conn->base, &conn->end);
    }
    ep_lane_conn_unref(conn);
    ep_lane_drop();
}

/* ---- what owners call ---- */

void ep_conn_start(ep_conn *base, const ep_conn_handler *handler)
{
    ep_lane_conn *conn = (ep_lane_conn *)base;
    if (!ep_lane_is_ours(conn->forks)) {
        return;
    }
    pthread_mutex_lock(conn->lock);
    EP_ASSERT(!conn->started && !conn->released);
    conn->handler = *handler;
    conn->started = true;
    conn->wake(conn);
    pthread_mutex_unlock(conn->lock);
}

/* Lock held. False: it was closing already. */
static bool begin_close(ep_lane_conn *conn)
{
    ep_error closed;
    ep_error_set(&closed, EP_ERR_CLOSED, "the connection to %s was closed on this side",
                 conn->peer);
    return ep_lane_conn_begin_end(conn, &closed);
}

ep_err ep_conn_send(ep_conn *base, ep_send *send)
{
    const ep_lane_conn *conn = (const ep_lane_conn *)base;
    if (send->done == NULL || send->parts_count > EP_SEND_PARTS_MAX) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    size_t total = 0;
    for (uint32_t i = 0; i < send->parts_count; i++) {
        if ((send->parts[i].data == NULL && send->parts[i].bytes != 0) ||
            !ep_add_size(total, send->parts[i].bytes, &total)) {
            return EP_ERR_INVALID_ARGUMENT;
        }
    }
    if (total < conn->limits.prefix_bytes || total > conn->limits.frame_bytes_max) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    send->total_bytes = total;
    send->sent_bytes = 0;
    send->next = NULL;
    return ep_lane_is_ours(conn->forks) ? base->ops->conn_send(base, send) : EP_ERR_CLOSED;
}

uint64_t ep_conn_unacked(ep_conn *base)
{
    const bool is_told =
        base->ops->conn_unacked != NULL && ep_lane_is_ours(((ep_lane_conn *)base)->forks);
    return is_told ? base->ops->conn_unacked(base) : 0;
}

void ep_conn_close(ep_conn *base)
{
    ep_lane_conn *conn = (ep_lane_conn *)base;
    if (!ep_lane_is_ours(conn->forks)) {
        return;
    }
    pthread_mutex_lock(conn->lock);
    if (begin_close(conn)) {
        conn->wake(conn);
    }
    pthread_mutex_unlock(conn->lock);
}

void ep_conn_release(ep_conn *base)
{
    ep_lane_conn *conn = (ep_lane_conn *)base;
    if (!ep_lane_is_ours(conn->forks)) {
        return;
    }
    pthread_mutex_lock(conn->lock);
    EP_ASSERT(!conn->released);
    conn->released = true;
    begin_close(conn);
    if (!conn->over) {
        conn->wake(conn); /* a connection that waited for a handler can end now */
    }
    pthread_mutex_unlock(conn->lock);
    ep_lane_conn_unref(conn); /* the owner's reference; it kept conn alive until here */
}

void ep_conn_allow_large(ep_conn *base, ep_buffer_pool *pool)
{
    ep_lane_conn *conn = (ep_lane_conn *)base;
    conn->limits.pool = pool != NULL ? pool : conn->limits.pool;
    __atomic_store_n(&conn->large_allowed, true, __ATOMIC_RELEASE);
}

void ep_conn_read_receiving(ep_conn *base, ep_conn_receiving *out_receiving)
{
    const ep_lane_conn *conn = (const ep_lane_conn *)base;
    out_receiving->heard_ns = __atomic_load_n(&conn->heard_ns, __ATOMIC_RELAXED);
    out_receiving->waits_for_memory = __atomic_load_n(&conn->memory_wait, __ATOMIC_RELAXED);
    ep_assembler_read_noted(&conn->assembler, out_receiving);
}

void ep_conn_peer(ep_conn *base, char *out_address, size_t bytes)
{
    snprintf(out_address, bytes, "%s", ((ep_lane_conn *)base)->peer);
}

bool ep_conn_is_trusted(const ep_conn *conn)
{
    return ((const ep_lane_conn *)conn)->is_trusted;
}
