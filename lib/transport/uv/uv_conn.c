/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Life of a uv stream connection. It ends in three acts: closing is set and nothing new is written;
 * when the last thread is out of the socket its worker closes the libuv handles; then it closes the
 * socket, fails the queued sends and calls on_closed. A connection that nobody has started or
 * released waits for that before the last act.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "transport/uv/uv_lane.h"

void ep_uv_conn_ref(ep_uv_conn *conn)
{
    __atomic_fetch_add(&conn->refs, 1, __ATOMIC_RELAXED);
}

void ep_uv_conn_unref(ep_uv_conn *conn)
{
    uint32_t before = __atomic_fetch_sub(&conn->refs, 1, __ATOMIC_ACQ_REL);
    EP_ASSERT(before > 0);
    if (before == 1) {
        pthread_mutex_destroy(&conn->lock);
        free(conn);
    }
}

void ep_uv_conn_kick(ep_uv_conn *conn)
{
    ep_uv_conn_ref(conn); /* the queued job's */
    if (!ep_uv_loop_worker_push(conn->worker, &conn->job)) {
        ep_uv_conn_unref(conn);
    }
}

bool ep_uv_conn_is_closing(const ep_uv_conn *conn)
{
    return __atomic_load_n(&conn->closing, __ATOMIC_ACQUIRE);
}

static bool begin_end_locked(ep_uv_conn *conn, const ep_error *error)
{
    bool first = !conn->closing;
    if (first) {
        conn->end = *error;
        __atomic_store_n(&conn->closing, true, __ATOMIC_RELEASE);
    }
    return first;
}

void ep_uv_conn_end(ep_uv_conn *conn, const ep_error *error)
{
    pthread_mutex_lock(&conn->lock);
    bool first = begin_end_locked(conn, error);
    pthread_mutex_unlock(&conn->lock);
    if (first) {
        ep_uv_conn_kick(conn);
    }
}

/* ---- on the worker ---- */

static void on_poll(uv_poll_t *poll, int status, int events)
{
    ep_uv_conn *conn = poll->data;
    if (status < 0) {
        conn->events = 0; /* libuv watches no more; reading tells why */
    }
    if ((events & UV_WRITABLE) != 0) {
        ep_uv_conn_writable(conn);
    }
    if (status < 0 || (events & UV_READABLE) != 0) {
        ep_uv_conn_readable(conn, status < 0);
    }
    if (!ep_uv_conn_is_closing(conn)) {
        ep_uv_conn_update_events(conn);
    }
}

void ep_uv_conn_update_events(ep_uv_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    bool writable = conn->wait_writable;
    bool readable = conn->started && !__atomic_load_n(&conn->memory_wait, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&conn->lock);
    int events = (readable ? UV_READABLE : 0) | (writable ? UV_WRITABLE : 0);
    if (events == conn->events) {
        return;
    }
    conn->events = events;
    if (events == 0) {
        uv_poll_stop(&conn->poll);
    } else {
        uv_poll_start(&conn->poll, events, on_poll);
    }
}

static void fail_sends(ep_uv_conn *conn)
{
    ep_err code = conn->end.code == EP_ERR_CLOSED ? EP_ERR_CLOSED : EP_ERR_CONNECTION_LOST;
    for (;;) {
        pthread_mutex_lock(&conn->lock);
        ep_send *send = ep_send_queue_pop(&conn->queue);
        pthread_mutex_unlock(&conn->lock);
        if (send == NULL) {
            return;
        }
        send->done(send, code);
    }
}

/* Calls on_closed, unless its handler is yet to come. */
static void finish(ep_uv_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    bool started = conn->started;
    bool parked = !started && !conn->released;
    conn->over = !parked;
    pthread_mutex_unlock(&conn->lock);
    if (parked) {
        return;
    }
    if (started) {
        conn->handler.on_closed(conn->handler.arg, &conn->base, &conn->end);
    }
    ep_uv_conn_unref(conn); /* the lane's; its job has one too */
    ep_lane_drop();
}

static void on_handle_closed(uv_handle_t *handle)
{
    ep_uv_conn *conn = handle->data;
    if (--conn->handles > 0) {
        return;
    }
    pthread_mutex_lock(&conn->lock);
    int fd = conn->fd;
    conn->fd = -1;
    pthread_mutex_unlock(&conn->lock);
    close(fd);
    ep_assembler_fini(&conn->assembler);
    ep_accept_count_remove(conn->count);
    ep_uv_conn_report_sent(conn);
    fail_sends(conn);
    conn->state = CONN_ENDED;
    ep_uv_conn_kick(conn); /* finishes in its job */
}

static void open_handles(ep_uv_conn *conn)
{
    uv_loop_t *loop = ep_uv_loop_worker_loop(conn->worker);
    int failed = uv_poll_init(loop, &conn->poll, conn->fd);
    uv_timer_init(loop, &conn->retry);
    conn->retry.data = conn;
    conn->handles = 1;
    conn->state = CONN_OPEN;
    if (failed == 0) {
        conn->poll.data = conn;
        conn->handles = 2;
        return;
    }
    ep_error lost;
    ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "cannot watch the connection to %s: %s", conn->peer,
                 uv_strerror(failed));
    pthread_mutex_lock(&conn->lock);
    begin_end_locked(conn, &lost);
    pthread_mutex_unlock(&conn->lock);
}

static void close_handles(ep_uv_conn *conn)
{
    conn->state = CONN_ENDING;
    if (conn->handles == 2) {
        uv_close((uv_handle_t *)&conn->poll, on_handle_closed);
    }
    uv_close((uv_handle_t *)&conn->retry, on_handle_closed);
}

/* Whatever is due. */
static void run(ep_uv_loop_job *job)
{
    ep_uv_conn *conn = (ep_uv_conn *)(void *)((char *)job - offsetof(ep_uv_conn, job));
    if (conn->state == CONN_NEW) {
        open_handles(conn);
    }
    if (conn->state == CONN_OPEN) {
        ep_uv_conn_report_sent(conn);
        pthread_mutex_lock(&conn->lock);
        bool closing = conn->closing;
        bool writing = conn->writing; /* who writes kicks again when closing */
        pthread_mutex_unlock(&conn->lock);
        if (!closing) {
            ep_uv_conn_update_events(conn);
        } else if (!writing) {
            close_handles(conn);
        }
    } else if (conn->state == CONN_ENDED && !conn->over) {
        finish(conn);
    }
    ep_uv_conn_unref(conn);
}

/* ---- from any thread ---- */

static void read_peer(ep_uv_conn *conn, const struct sockaddr_storage *address)
{
    char host[INET6_ADDRSTRLEN] = "";
    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof(host));
        snprintf(conn->peer, sizeof(conn->peer), "%s:%u", host, ntohs(in->sin_port));
    } else {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof(host));
        snprintf(conn->peer, sizeof(conn->peer), "[%s]:%u", host, ntohs(in6->sin6_port));
    }
}

ep_err ep_uv_conn_create(const ep_lane_ops *lane, int taken_fd,
                         const struct sockaddr_storage *address, const ep_lane_limits *limits,
                         ep_uv_loop_worker *worker, ep_accept_count *taken_count,
                         ep_conn **out_conn)
{
    ep_uv_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL || ep_assembler_init(&conn->assembler, true) != EP_OK) {
        free(conn);
        close(taken_fd);
        ep_accept_count_remove(taken_count);
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&conn->lock, NULL);
    conn->base.ops = lane;
    conn->worker = worker;
    conn->job.run = run;
    conn->refs = 2; /* its owner and the lane */
    conn->fd = taken_fd;
    ep_uv_socket_set_congestion(taken_fd, address);
    conn->limits = *limits;
    conn->count = taken_count;
    read_peer(conn, address);
    ep_lane_hold();
    *out_conn = &conn->base;
    return EP_OK;
}

void ep_uv_conn_start(ep_conn *base, const ep_conn_handler *handler)
{
    ep_uv_conn *conn = (ep_uv_conn *)base;
    pthread_mutex_lock(&conn->lock);
    EP_ASSERT(!conn->started && !conn->released);
    conn->handler = *handler;
    conn->started = true;
    pthread_mutex_unlock(&conn->lock);
    ep_uv_conn_kick(conn);
}

/* Lock held. True: the job is to run. */
static bool close_locked(ep_uv_conn *conn)
{
    ep_error closed;
    ep_error_set(&closed, EP_ERR_CLOSED, "the connection to %s was closed on this side",
                 conn->peer);
    return begin_end_locked(conn, &closed);
}

void ep_uv_conn_close(ep_conn *base)
{
    ep_uv_conn *conn = (ep_uv_conn *)base;
    pthread_mutex_lock(&conn->lock);
    bool kick = close_locked(conn);
    pthread_mutex_unlock(&conn->lock);
    if (kick) {
        ep_uv_conn_kick(conn);
    }
}

void ep_uv_conn_release(ep_conn *base)
{
    ep_uv_conn *conn = (ep_uv_conn *)base;
    pthread_mutex_lock(&conn->lock);
    EP_ASSERT(!conn->released);
    conn->released = true;
    close_locked(conn);
    bool kick = !conn->over; /* a parked one goes on to its end */
    pthread_mutex_unlock(&conn->lock);
    if (kick) {
        ep_uv_conn_kick(conn);
    }
    ep_uv_conn_unref(conn); /* the owner's, so conn was alive until here */
}
