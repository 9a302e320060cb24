/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Life of an nng stream connection. It ends in three acts: closing is set and nothing is posted any
 * more; when the last thread is out of the stream, the stream is closed, which completes what is in
 * flight; when both directions are idle the reaper frees the nng objects, fails the queued sends
 * and calls on_closed.
 */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "transport/nng/nng_lane.h"

static void unref(stream_conn *conn)
{
    pthread_mutex_lock(&conn->lock);
    EP_ASSERT(conn->refs > 0);
    bool last = --conn->refs == 0;
    pthread_mutex_unlock(&conn->lock);
    if (last) {
        pthread_mutex_destroy(&conn->lock);
        free(conn);
    }
}

void ep_nng_stream_conn_begin_end(stream_conn *conn, const ep_error *error)
{
    if (!conn->closing) {
        conn->closing = true;
        conn->end = *error;
    }
}

void ep_nng_stream_conn_leave(stream_conn *conn)
{
    if (conn->closing && !conn->stream_closed && conn->posting == 0) {
        conn->stream_closed = true;
        conn->posting++;
        pthread_mutex_unlock(&conn->lock);
        nng_stream_close(conn->stream);
        nng_aio_cancel(conn->wait_aio);
        nng_aio_cancel(conn->watch_aio);
        pthread_mutex_lock(&conn->lock);
        conn->posting--;
    }
    bool idle = conn->posting == 0 && !conn->send_busy && !conn->receive_busy && !conn->watch_busy;
    if (conn->stream_closed && idle && !conn->reaping) {
        conn->reaping = true;
        ep_reaper_push(&conn->reap);
    }
    pthread_mutex_unlock(&conn->lock);
}

/* What nng and memory there is of it. */
static void let_go(stream_conn *conn)
{
    nng_aio_free(conn->send_aio);
    nng_aio_free(conn->receive_aio);
    nng_aio_free(conn->wait_aio);
    nng_aio_free(conn->watch_aio);
    nng_stream_free(conn->stream);
    conn->stream = NULL;
    ep_assembler_fini(&conn->assembler);
    free(conn->scratch);
    ep_accept_count_remove(conn->count);
}

static void fail_sends(stream_conn *conn)
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

/* On the reaper's thread; a second time for a connection that was parked. */
static void finish(ep_reap_item *item)
{
    stream_conn *conn = (stream_conn *)(void *)((char *)item - offsetof(stream_conn, reap));
    if (conn->stream != NULL) {
        let_go(conn);
        fail_sends(conn);
    }
    pthread_mutex_lock(&conn->lock);
    bool started = conn->started;
    conn->parked = !started && !conn->released;
    bool parked = conn->parked;
    pthread_mutex_unlock(&conn->lock);
    if (parked) {
        return;
    }
    if (started) {
        conn->handler.on_closed(conn->handler.arg, &conn->base, &conn->end);
    }
    unref(conn);
    ep_lane_drop();
}

static void read_peer(stream_conn *conn)
{
    nng_sockaddr address;
    char host[INET6_ADDRSTRLEN] = "";
    snprintf(conn->peer, sizeof(conn->peer), "unknown");
    if (nng_stream_get_addr(conn->stream, NNG_OPT_REMADDR, &address) != 0) {
        return; /* it ended already */
    }
    if (address.s_family == NNG_AF_INET) {
        inet_ntop(AF_INET, &address.s_in.sa_addr, host, sizeof(host));
        snprintf(conn->peer, sizeof(conn->peer), "%s:%u", host, ntohs(address.s_in.sa_port));
    } else if (address.s_family == NNG_AF_INET6) {
        inet_ntop(AF_INET6, address.s_in6.sa_addr, host, sizeof(host));
        snprintf(conn->peer, sizeof(conn->peer), "[%s]:%u", host, ntohs(address.s_in6.sa_port));
    }
}

ep_err ep_nng_conn_create(const ep_lane_ops *lane, nng_stream *taken_stream,
                          const ep_lane_limits *limits, bool tls, ep_accept_count *taken_count,
                          ep_conn **out_conn)
{
    stream_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        nng_stream_free(taken_stream);
        ep_accept_count_remove(taken_count);
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&conn->lock, NULL);
    conn->base.ops = lane;
    conn->stream = taken_stream;
    conn->limits = *limits;
    conn->tls = tls;
    conn->count = taken_count;
    conn->reap.func = finish;
    conn->refs = 2;
    conn->scratch = malloc(STREAM_SCRATCH_BYTES);
    /* a posted receive holds its memory while nothing comes */
    ep_err err = ep_assembler_init(&conn->assembler, false);
    if (conn->scratch == NULL || err != EP_OK ||
        nng_aio_alloc(&conn->send_aio, ep_nng_stream_send_done, conn) != 0 ||
        nng_aio_alloc(&conn->receive_aio, ep_nng_stream_receive_done, conn) != 0 ||
        nng_aio_alloc(&conn->wait_aio, ep_nng_stream_receive_retry, conn) != 0 ||
        nng_aio_alloc(&conn->watch_aio, ep_nng_stream_watch_tick, conn) != 0) {
        let_go(conn);
        pthread_mutex_destroy(&conn->lock);
        free(conn);
        return EP_ERR_NO_MEMORY;
    }
    read_peer(conn);
    ep_lane_hold();
    *out_conn = &conn->base;
    return EP_OK;
}

void ep_nng_stream_conn_start(ep_conn *base, const ep_conn_handler *handler)
{
    stream_conn *conn = (stream_conn *)base;
    pthread_mutex_lock(&conn->lock);
    EP_ASSERT(!conn->started && !conn->released);
    conn->handler = *handler;
    conn->started = true;
    if (conn->parked) {
        conn->parked = false;
        ep_reaper_push(&conn->reap);
    } else if (!conn->closing) {
        conn->receive_busy = true;
        ep_nng_stream_receive_post(conn);
        ep_nng_stream_watch_start(conn);
    }
    ep_nng_stream_conn_leave(conn);
}

ep_err ep_nng_stream_conn_send(ep_conn *base, ep_send *send)
{
    stream_conn *conn = (stream_conn *)base;
    ep_err err = ep_send_prepare(send, &conn->limits);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&conn->lock);
    if (conn->closing) {
        err = EP_ERR_CLOSED;
    } else {
        err = ep_send_queue_push(&conn->queue, send, conn->limits.send_queue_bytes_max);
    }
    if (err == EP_OK && !conn->send_busy) {
        conn->send_busy = true;
        ep_nng_stream_send_post(conn);
    }
    ep_nng_stream_conn_leave(conn);
    return err;
}

static void close_locked(stream_conn *conn)
{
    if (!conn->closing) {
        ep_error closed;
        ep_error_set(&closed, EP_ERR_CLOSED, "the connection to %s was closed on this side",
                     conn->peer);
        ep_nng_stream_conn_begin_end(conn, &closed);
    }
}

void ep_nng_stream_conn_close(ep_conn *base)
{
    stream_conn *conn = (stream_conn *)base;
    pthread_mutex_lock(&conn->lock);
    close_locked(conn);
    ep_nng_stream_conn_leave(conn);
}

void ep_nng_stream_conn_release(ep_conn *base)
{
    stream_conn *conn = (stream_conn *)base;
    pthread_mutex_lock(&conn->lock);
    EP_ASSERT(!conn->released);
    conn->released = true;
    close_locked(conn);
    if (conn->parked) {
        conn->parked = false;
        ep_reaper_push(&conn->reap);
    }
    ep_nng_stream_conn_leave(conn);
    unref(conn); /* the owner's, so conn was alive until here */
}

void ep_nng_stream_conn_allow_large(ep_conn *base, ep_buffer_pool *pool)
{
    stream_conn *conn = (stream_conn *)base;
    ep_lane_limits_allow_large(&conn->limits, pool, &conn->large_allowed);
}

void ep_nng_stream_conn_receiving(ep_conn *base, ep_conn_receiving *out_receiving)
{
    const stream_conn *conn = (const stream_conn *)base;
    out_receiving->heard_ns = __atomic_load_n(&conn->heard_ns, __ATOMIC_RELAXED);
    out_receiving->waits_for_memory = __atomic_load_n(&conn->memory_wait, __ATOMIC_RELAXED);
    ep_assembler_read_noted(&conn->assembler, out_receiving);
}

void ep_nng_stream_conn_peer(ep_conn *base, char *out_address, size_t bytes)
{
    snprintf(out_address, bytes, "%s", ((stream_conn *)base)->peer);
}

bool ep_nng_stream_conn_is_trusted(ep_conn *base)
{
    return ((stream_conn *)base)->tls;
}
