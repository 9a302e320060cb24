/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loopback connections. A send waits in its sender's queue until the lane's thread copies it into a
 * buffer of the receiver's pool. So limits, order, back-pressure and callbacks are those of a
 * network lane. The thread serves both ends and runs one job at a time.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "transport/lane_conn.h"
#include "transport/loopback/loopback_lane.h"

ep_lane_worker ep_loopback_worker = EP_LANE_WORKER("ep-loopback");

typedef struct loopback_conn {
    ep_lane_conn lane;
    ep_lane_job job; /* pushed with a reference */
    /* guarded by lock; written by the lane's thread */
    struct loopback_conn *peer; /* a reference; NULL once the peer knows of our end */
} loopback_conn;

static void kick(loopback_conn *conn)
{
    ep_lane_conn_ref(&conn->lane);
    if (!ep_lane_worker_push(&ep_loopback_worker, &conn->job)) {
        ep_lane_conn_unref(&conn->lane);
    }
}

static void wake(ep_lane_conn *lane)
{
    loopback_conn *conn = (loopback_conn *)lane;
    kick(conn);
    if (conn->peer != NULL) {
        kick(conn->peer); /* frames of the peer may wait for our start */
    }
}

/* From now on, nothing is delivered in either direction. */
static void end(loopback_conn *conn)
{
    loopback_conn *peer = conn->peer;
    if (peer != NULL) {
        ep_error lost;
        pthread_mutex_lock(conn->lane.lock);
        conn->peer = NULL;
        pthread_mutex_unlock(conn->lane.lock);
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "%s closed the connection", peer->lane.peer);
        ep_lane_conn_end(&peer->lane, &lost);
        ep_lane_conn_unref(&peer->lane);
        ep_lane_conn_let_go(&conn->lane);
    }
    ep_lane_conn_finish(&conn->lane);
}

/* Copies a frame into a buffer of the receiver, under its limits. Errors: NO_MEMORY (try again
 * later). */
static ep_err gather(const ep_send *send, const ep_lane_conn *to, ep_buffer **out_frame,
                     ep_error *out_error)
{
    uint8_t prefix[EP_FRAME_PREFIX_BYTES];
    size_t frame_bytes = 0;
    bool large_allowed = __atomic_load_n(&to->large_allowed, __ATOMIC_ACQUIRE);
    ep_send_copy(send, 0, prefix, sizeof(prefix));
    ep_err err =
        ep_lane_frame_length(&to->limits, large_allowed, prefix, to->peer, &frame_bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (frame_bytes != send->total_bytes) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL, "frame announces %zu bytes and has %zu",
                            frame_bytes, send->total_bytes);
    }
    if (ep_buffer_acquire(to->limits.pool, frame_bytes, out_frame) != EP_OK) {
        return EP_ERR_NO_MEMORY;
    }
    ep_send_copy(send, 0, (*out_frame)->data, frame_bytes);
    return EP_OK;
}

/* The oldest frame; NULL: there is none, or nobody to take it. */
static ep_send *next_send(loopback_conn *conn)
{
    pthread_mutex_lock(conn->peer->lane.lock);
    bool started = conn->peer->lane.started && !conn->peer->lane.closing;
    pthread_mutex_unlock(conn->peer->lane.lock);
    pthread_mutex_lock(conn->lane.lock);
    ep_send *send = started ? conn->lane.queue.head : NULL;
    pthread_mutex_unlock(conn->lane.lock);
    return send;
}

static void try_later(loopback_conn *conn)
{
    uint64_t wait_ns = ep_lane_conn_wait_ms(&conn->peer->lane) * EP_NS_PER_MS;
    ep_lane_conn_ref(&conn->lane);
    if (!ep_lane_worker_push_later(&ep_loopback_worker, &conn->job, ep_clock_now_ns() + wait_ns)) {
        ep_lane_conn_unref(&conn->lane);
    }
}

static void deliver(loopback_conn *conn)
{
    ep_lane_conn *to = &conn->peer->lane;
    ep_send *send = next_send(conn);
    ep_buffer *frame = NULL;
    ep_error error;
    if (send == NULL) {
        return;
    }
    ep_err err = gather(send, to, &frame, &error);
    if (err == EP_ERR_NO_MEMORY) {
        try_later(conn);
        return;
    }
    if (err != EP_OK) {
        ep_lane_conn_end(to, &error);
        return;
    }
    __atomic_store_n(&to->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    pthread_mutex_lock(conn->lane.lock);
    ep_lane_conn_advance(&conn->lane, send->total_bytes, NULL);
    bool more = conn->lane.queue.head != NULL;
    pthread_mutex_unlock(conn->lane.lock);
    ep_lane_conn_begin_frame(to, frame);
    to->handler.on_frame(to->handler.arg, &to->base, frame);
    ep_lane_conn_report_sent(&conn->lane);
    if (more) {
        kick(conn);
    }
}

static void run(ep_lane_job *job)
{
    loopback_conn *conn = (loopback_conn *)(void *)((char *)job - offsetof(loopback_conn, job));
    if (ep_lane_conn_is_closing(&conn->lane)) {
        end(conn);
    } else {
        deliver(conn);
    }
    ep_lane_conn_unref(&conn->lane);
}

ep_err ep_loopback_conn_pair_create(const ep_lane_dial *dial, const ep_lane_limits *accept_limits,
                                    ep_accept_count *taken_count, ep_conn **out_dialed,
                                    ep_conn **out_accepted)
{
    loopback_conn *dialed = calloc(1, sizeof(*dialed));
    loopback_conn *accepted = calloc(1, sizeof(*accepted));
    if (dialed == NULL || accepted == NULL) {
        free(dialed);
        free(accepted);
        ep_accept_count_remove(taken_count);
        return EP_ERR_NO_MEMORY;
    }
    ep_lane_conn_init(&dialed->lane, dial->base.ops, &dial->limits, NULL, wake);
    ep_lane_conn_init(&accepted->lane, dial->base.ops, accept_limits, taken_count, wake);
    snprintf(dialed->lane.peer, sizeof(dialed->lane.peer), "%s", dial->url);
    snprintf(accepted->lane.peer, sizeof(accepted->lane.peer), "loopback peer");
    dialed->peer = accepted;
    accepted->peer = dialed;
    for (int i = 0; i < 2; i++) {
        loopback_conn *conn = i == 0 ? dialed : accepted;
        conn->lane.is_trusted = true;
        conn->job.run = run;
        ep_lane_conn_ref(&conn->lane); /* the reference of its peer */
    }
    *out_dialed = &dialed->lane.base;
    *out_accepted = &accepted->lane.base;
    return EP_OK;
}

ep_err ep_loopback_conn_send(ep_conn *base, ep_send *send)
{
    loopback_conn *conn = (loopback_conn *)base;
    pthread_mutex_lock(conn->lane.lock);
    ep_err err = ep_lane_conn_queue(&conn->lane, send);
    if (err == EP_OK) {
        kick(conn);
    }
    pthread_mutex_unlock(conn->lane.lock);
    return err;
}
