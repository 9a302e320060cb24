/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loopback connections: a send waits in its sender's queue until the lane thread copies it into a
 * buffer of the receiver's pool, so limits, order, back-pressure and callbacks are those of a
 * network lane.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "transport/loopback/loopback_lane.h"

#define MEMORY_BACKOFF_MIN_NS (1 * EP_NS_PER_MS)
#define MEMORY_BACKOFF_MAX_NS (50 * EP_NS_PER_MS)

static void conn_unref(loopback_conn *conn)
{
    EP_ASSERT(conn->refs > 0);
    if (--conn->refs == 0) {
        EP_ASSERT(conn->finished && conn->queue.head == NULL && conn->peer == NULL);
        free(conn);
    }
}

static loopback_conn *conn_of_work(loopback_work *work)
{
    return (loopback_conn *)(void *)((char *)work - offsetof(loopback_conn, work));
}

static void work_unref(loopback_work *work)
{
    conn_unref(conn_of_work(work));
}

static void wake(loopback_conn *conn)
{
    if (!conn->finished && ep_loopback_work_push(&conn->work)) {
        conn->refs++;
    }
}

/* The first reason to end stays. */
static void begin_end(loopback_conn *conn, const ep_error *error)
{
    if (!conn->ending) {
        conn->ending = true;
        conn->end = *error;
    }
    ep_loopback_work_hurry(&conn->work);
    wake(conn);
}

/* Ends both ends: the one with its reason, the other as a lost connection. */
static void end_pair(loopback_conn *conn, const ep_error *error)
{
    if (conn->ending) {
        return;
    }
    ep_error lost;
    ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "%s closed the connection", conn->peer->peer_url);
    begin_end(conn->peer, &lost);
    begin_end(conn, error);
}

static void finish(loopback_conn *conn)
{
    ep_send *send;
    while ((send = ep_send_queue_pop(&conn->queue)) != NULL) {
        ep_err code = conn->end.code == EP_ERR_CLOSED ? EP_ERR_CLOSED : EP_ERR_CONNECTION_LOST;
        ep_loopback_unlock();
        send->done(send, code);
        ep_loopback_lock();
    }
    if (conn->finished || (!conn->started && !conn->released)) {
        return; /* without a handler on_closed waits for start or release */
    }
    conn->finished = true;
    if (conn->started) {
        ep_loopback_unlock();
        conn->handler.on_closed(conn->handler.arg, &conn->base, &conn->end);
        ep_loopback_lock();
    }
    ep_accept_count_remove(conn->count);
    conn_unref(conn->peer);
    conn->peer = NULL;
    conn_unref(conn); /* the lane's own */
}

/* Copies a frame into a buffer of the receiver, under the receiver's limits. Errors: NO_MEMORY
 * means try again later. */
static ep_err gather(const ep_send *send, const ep_lane_limits *limits, bool large_allowed,
                     ep_buffer **out_frame, ep_error *out_error)
{
    uint8_t prefix[EP_FRAME_PREFIX_BYTES];
    size_t frame_bytes = 0;
    ep_send_copy(send, 0, prefix, sizeof(prefix));
    ep_err err = limits->frame_bytes(prefix, &frame_bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = ep_lane_frame_check(limits, large_allowed, frame_bytes, "loopback peer", out_error);
    if (err != EP_OK) {
        return err;
    }
    if (frame_bytes != send->total_bytes) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "frame announces %zu bytes and has %zu",
                            frame_bytes, send->total_bytes);
    }
    if (ep_buffer_acquire(limits->pool, frame_bytes, out_frame) != EP_OK) {
        return EP_ERR_NO_MEMORY;
    }
    ep_send_copy(send, 0, (*out_frame)->data, frame_bytes);
    return EP_OK;
}

static void wait_for_memory(loopback_conn *conn)
{
    conn->backoff_ns = conn->backoff_ns == 0 ? MEMORY_BACKOFF_MIN_NS : conn->backoff_ns * 2;
    if (conn->backoff_ns > MEMORY_BACKOFF_MAX_NS) {
        conn->backoff_ns = MEMORY_BACKOFF_MAX_NS;
    }
    if (ep_loopback_work_push_later(&conn->work, ep_clock_now_ns() + conn->backoff_ns)) {
        conn->refs++;
    }
}

static void deliver(loopback_conn *conn)
{
    loopback_conn *peer = conn->peer;
    ep_send *send = conn->queue.head;
    if (send == NULL || !peer->started) {
        return;
    }
    ep_error error;
    ep_error_clear(&error);
    ep_buffer *frame = NULL;
    bool large_allowed = peer->large_allowed;
    ep_loopback_unlock();
    ep_err err = gather(send, &peer->limits, large_allowed, &frame, &error);
    ep_loopback_lock();
    if (conn->ending) { /* meanwhile; its work is queued */
        ep_buffer_unref(frame);
        return;
    }
    peer->memory_wait = err == EP_ERR_NO_MEMORY;
    if (err == EP_ERR_NO_MEMORY) {
        wait_for_memory(conn);
        return;
    }
    if (err != EP_OK) {
        end_pair(peer, &error);
        return;
    }
    conn->backoff_ns = 0;
    peer->heard_ns = ep_clock_now_ns();
    ep_send_queue_pop(&conn->queue);
    ep_loopback_unlock();
    if (peer->handler.on_begin != NULL) {
        peer->handler.on_begin(peer->handler.arg, &peer->base, frame->data);
    }
    peer->handler.on_frame(peer->handler.arg, &peer->base, frame);
    send->done(send, EP_OK);
    ep_loopback_lock();
    if (conn->queue.head != NULL) {
        wake(conn);
    }
}

static void conn_run(loopback_work *work)
{
    loopback_conn *conn = conn_of_work(work);
    if (conn->finished) {
        return;
    }
    if (conn->ending) {
        finish(conn);
    } else {
        deliver(conn);
    }
}

static loopback_conn *conn_create(const ep_lane_ops *lane, const ep_lane_limits *limits,
                                  const char *peer_url)
{
    loopback_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        return NULL;
    }
    conn->base.ops = lane;
    conn->work = (loopback_work){.run = conn_run, .unref = work_unref};
    conn->limits = *limits;
    conn->refs = 3; /* its owner, the lane, its peer */
    snprintf(conn->peer_url, sizeof(conn->peer_url), "%s", peer_url);
    return conn;
}

ep_err ep_loopback_conn_pair_create(const ep_lane_dial *dial, const ep_lane_limits *accept_limits,
                                    ep_accept_count *taken_count, loopback_conn **out_dialed,
                                    loopback_conn **out_accepted)
{
    loopback_conn *dialed = conn_create(dial->base.ops, &dial->limits, dial->url);
    loopback_conn *accepted = conn_create(dial->base.ops, accept_limits, "loopback peer");
    if (dialed == NULL || accepted == NULL) {
        free(dialed);
        free(accepted);
        ep_accept_count_remove(taken_count);
        return EP_ERR_NO_MEMORY;
    }
    dialed->peer = accepted;
    accepted->peer = dialed;
    accepted->count = taken_count;
    *out_dialed = dialed;
    *out_accepted = accepted;
    return EP_OK;
}

void ep_loopback_conn_start(ep_conn *base, const ep_conn_handler *handler)
{
    loopback_conn *conn = (loopback_conn *)base;
    ep_loopback_lock();
    EP_ASSERT(!conn->started && !conn->released);
    conn->handler = *handler;
    conn->started = true;
    if (conn->ending) {
        wake(conn);
    } else {
        wake(conn->peer); /* frames may be waiting for us */
    }
    ep_loopback_unlock();
}

ep_err ep_loopback_conn_send(ep_conn *base, ep_send *send)
{
    loopback_conn *conn = (loopback_conn *)base;
    ep_err err = ep_send_prepare(send, &conn->limits);
    if (err != EP_OK) {
        return err;
    }
    ep_loopback_lock();
    if (conn->ending || conn->finished) {
        err = EP_ERR_CLOSED;
    } else {
        err = ep_send_queue_push(&conn->queue, send, conn->limits.send_queue_bytes_max);
    }
    if (err == EP_OK) {
        wake(conn);
    }
    ep_loopback_unlock();
    return err;
}

static void close_locked(loopback_conn *conn)
{
    if (!conn->ending) {
        ep_error closed;
        ep_error_set(&closed, EP_ERR_CLOSED, "the connection was closed on this side");
        end_pair(conn, &closed);
    }
}

void ep_loopback_conn_close(ep_conn *base)
{
    ep_loopback_lock();
    close_locked((loopback_conn *)base);
    ep_loopback_unlock();
}

void ep_loopback_conn_release(ep_conn *base)
{
    loopback_conn *conn = (loopback_conn *)base;
    ep_loopback_lock();
    EP_ASSERT(!conn->released);
    close_locked(conn);
    conn->released = true;
    wake(conn);
    conn_unref(conn);
    ep_loopback_unlock();
}

void ep_loopback_conn_allow_large(ep_conn *base, ep_buffer_pool *pool)
{
    loopback_conn *conn = (loopback_conn *)base;
    ep_loopback_lock();
    ep_lane_limits_allow_large(&conn->limits, pool, &conn->large_allowed);
    ep_loopback_unlock();
}

void ep_loopback_conn_receiving(ep_conn *base, ep_conn_receiving *out_receiving)
{
    const loopback_conn *conn = (const loopback_conn *)base;
    ep_loopback_lock();
    *out_receiving =
        (ep_conn_receiving){.heard_ns = conn->heard_ns, .waits_for_memory = conn->memory_wait};
    ep_loopback_unlock();
}

void ep_loopback_conn_peer(ep_conn *base, char *out_address, size_t bytes)
{
    snprintf(out_address, bytes, "%s", ((loopback_conn *)base)->peer_url);
}

bool ep_loopback_conn_is_trusted(ep_conn *base)
{
    (void)base;
    return true;
}
