/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loopback lane: one thread creates and ends connections and delivers frames. A send waits in
 * its sender's queue until the thread copies it into a buffer of the receiver's pool. So limits,
 * order, back-pressure and callbacks are those of a network lane. The thread serves both ends of a
 * connection and runs one job at a time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "transport/address.h"
#include "transport/lane_conn.h"
#include "transport/lane_dial.h"
#include "transport/lane_fork.h"
#include "transport/lane_worker.h"

static ep_lane_worker worker = EP_LANE_WORKER("ep-loopback");

/* ---- connections ---- */

typedef struct loopback_conn {
    ep_lane_conn lane;
    ep_lane_job job; /* pushed with a reference */
    /* guarded by lock; written by the lane's thread */
    struct loopback_conn *peer; /* a reference; NULL once the peer knows of our end */
} loopback_conn;

static void kick(loopback_conn *conn)
{
    ep_lane_conn_ref(&conn->lane);
    if (!ep_lane_worker_push(&worker, &conn->job)) {
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
    if (!ep_lane_worker_push_later(&worker, &conn->job, ep_clock_now_ns() + wait_ns)) {
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

/* Creates both ends. The accepted end takes count's place, also on error. Errors: NO_MEMORY. */
static ep_err create_pair(const ep_lane_dial *dial, const ep_lane_limits *accept_limits,
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

static ep_err loopback_send(ep_conn *base, ep_send *send)
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

/* ---- listeners and dials ---- */

typedef struct loopback_listener {
    ep_lane_listener lane;
    bool accepting; /* on_accept is running */
    struct loopback_listener *next;
} loopback_listener;

typedef struct loopback_dial {
    ep_lane_dial lane;
    ep_lane_job job; /* pushed with the lane's reference */
} loopback_dial;

typedef struct loopback_lane {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* signalled when on_accept has returned */
    loopback_listener *listeners;
} loopback_lane;

static loopback_lane lane = {.lock = PTHREAD_MUTEX_INITIALIZER,
                             .changed = PTHREAD_COND_INITIALIZER};

static void forget(void)
{
    lane = (loopback_lane){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    worker = (ep_lane_worker)EP_LANE_WORKER("ep-loopback");
}

static void loopback_fini(void)
{
    ep_lane_worker_stop(&worker);
}

/* Lock held. */
static loopback_listener *find_listener(const char *url)
{
    for (loopback_listener *listener = lane.listeners; listener != NULL;
         listener = listener->next) {
        if (strcmp(listener->lane.url, url) == 0) {
            return listener;
        }
    }
    return NULL;
}

/* Checks the URL, and starts the lane's thread. */
static ep_err open_lane(const char *url, ep_error *out_error)
{
    size_t n = strlen(url);
    if (!ep_url_has_scheme(url, "loopback") || n == strlen("loopback://") ||
        n >= EP_ADDRESS_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s' must be loopback://name, up to %d characters", url,
                            EP_ADDRESS_BYTES - 1);
    }
    ep_lane_fork_hook(forget);
    return ep_lane_worker_start(&worker, out_error);
}

static ep_err loopback_listen(ep_listener *base, const ep_lane_address *address,
                              ep_error *out_error)
{
    loopback_listener *listener = (loopback_listener *)base;
    ep_err err = open_lane(address->url, out_error);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&lane.lock);
    if (find_listener(address->url) != NULL) {
        err = ep_error_set(out_error, EP_ERR_UNAVAILABLE, "address %s is in use", address->url);
    } else {
        listener->next = lane.listeners;
        lane.listeners = listener;
    }
    pthread_mutex_unlock(&lane.lock);
    return err;
}

static void loopback_listener_close(ep_listener *base)
{
    loopback_listener *listener = (loopback_listener *)base;
    pthread_mutex_lock(&lane.lock);
    for (loopback_listener **at = &lane.listeners; *at != NULL; at = &(*at)->next) {
        if (*at == listener) {
            *at = listener->next;
            break;
        }
    }
    EP_ASSERT(!listener->accepting || !pthread_equal(worker.thread, pthread_self()));
    while (listener->accepting) {
        pthread_cond_wait(&lane.changed, &lane.lock);
    }
    pthread_mutex_unlock(&lane.lock);
    ep_lane_listener_free(&listener->lane);
}

/* Creates the connection for a listener that cannot go away meanwhile. */
static ep_err connect_to(loopback_listener *listener, const ep_lane_dial *dial,
                         ep_conn **out_dialed, ep_error *out_error)
{
    ep_accept_count *count = listener->lane.count;
    const ep_lane_limits *limits = &listener->lane.limits;
    ep_conn *accepted;
    if (!ep_accept_count_add(count, limits->connections_max)) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s has connections_max %u connections", dial->url,
                            limits->connections_max);
    }
    if (create_pair(dial, limits, count, out_dialed, &accepted) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a connection");
    }
    listener->lane.on_accept(listener->lane.arg, accepted);
    return EP_OK;
}

static void dial_run(ep_lane_job *job)
{
    loopback_dial *d = (loopback_dial *)(void *)((char *)job - offsetof(loopback_dial, job));
    ep_lane_dial *dial = &d->lane;
    ep_conn *conn = NULL;
    ep_error error;
    ep_error_set(&error, EP_ERR_UNAVAILABLE, "nobody listens on %s", dial->url);
    pthread_mutex_lock(&lane.lock);
    loopback_listener *listener = ep_lane_dial_is_cancelled(dial) ? NULL : find_listener(dial->url);
    if (listener != NULL) {
        listener->accepting = true; /* keeps the listener alive, since its close waits for this */
        pthread_mutex_unlock(&lane.lock);
        connect_to(listener, dial, &conn, &error);
        pthread_mutex_lock(&lane.lock);
        listener->accepting = false;
        pthread_cond_broadcast(&lane.changed);
    }
    pthread_mutex_unlock(&lane.lock);
    ep_lane_dial_report(dial, conn, &error);
    ep_lane_dial_over(dial);
}

static ep_err loopback_dial_begin(ep_dial *base, const ep_lane_address *address,
                                  ep_error *out_error)
{
    loopback_dial *dial = (loopback_dial *)base;
    ep_err err = open_lane(address->url, out_error);
    if (err == EP_OK) {
        dial->job.run = dial_run;
        ep_lane_worker_push(&worker, &dial->job);
    }
    return err;
}

static const char *const schemes[] = {"loopback", NULL};

const ep_lane_ops ep_loopback_lane = {
    .name = "loopback",
    .schemes = schemes,
    .listener_bytes = sizeof(loopback_listener),
    .dial_bytes = sizeof(loopback_dial),
    .listen = loopback_listen,
    .listener_close = loopback_listener_close,
    .dial = loopback_dial_begin,
    .conn_send = loopback_send,
    .fini = loopback_fini,
};
