/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An nng stream connection.
 *
 * Sending    queued frames leave in slices of up to STREAM_IOVS_MAX pieces, several small frames at
 *            a time. nng may send a slice only in part, so each next slice is built anew from what
 *            has been sent.
 * Receiving  one receive is always posted, and lane_assembler makes frames of the bytes.
 * Ending     closing is set and nothing is posted any more. When the last thread has left the
 *            stream, the stream is closed, which completes the running operations. When all aios
 *            are idle, the reaper frees the nng objects and finishes.
 * Watching   TLS streams are checked regularly, because nng 1.5.2 can lose their end. nng reads
 *            ahead; when it meets the end of the connection while no receive is posted, it shuts
 *            the socket and reports nothing, and the next receive never completes. A socket that
 *            nng has shut and whose peer is gone has no peer name. So if a receive is still running
 *            one tick after the socket was seen like that, the connection is lost. The tick is
 *            there because nng may have decrypted bytes that complete the receive first.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/path_count.h"
#include "transport/lane_conn.h"
#include "transport/nng/nng_lane.h"

#define IOVS_GATHERED_MAX 64
#define WATCH_TICK_MS 250

ep_lane_worker ep_nng_reaper = EP_LANE_WORKER("ep-lane-reaper");

typedef struct stream_conn {
    ep_lane_conn lane;
    nng_stream *stream;
    nng_aio *send_aio;
    nng_aio *receive_aio;
    nng_aio *wait_aio;  /* sleeps until memory may be available */
    nng_aio *watch_aio; /* tls only: sleeps between checks of the socket */
    ep_lane_job reap;   /* pushed with a reference */
    bool tls;
    uint8_t *scratch; /* touched only by the thread that set send_busy */

    /* guarded by lock */
    uint32_t posting; /* threads inside an nng call on stream, which is closed only at 0 */
    bool stream_closed;
    bool send_busy; /* the send aio is in flight, or its callback runs */
    /* receive_aio or wait_aio is in flight, or its callback runs, which receives */
    bool receive_busy;
    bool watch_busy;         /* watch_aio is in flight, or its callback runs */
    bool receive_posted;     /* the receive aio is in flight */
    uint64_t receive_number; /* counts posted receives */
    /* number of the receive that was in flight when the socket was last seen shut; 0 none */
    uint64_t suspect_number;
} stream_conn;

/* ---- threads inside nng calls ---- */

/* Lock held, dropped meanwhile: closes the stream when no thread is inside, then gives the
 * connection to the reaper. */
static void settle(stream_conn *conn)
{
    ep_lane_conn *lane = &conn->lane;
    if (lane->closing && !conn->stream_closed && conn->posting == 0) {
        conn->stream_closed = true;
        conn->posting++;
        pthread_mutex_unlock(lane->lock);
        nng_stream_close(conn->stream);
        nng_aio_cancel(conn->wait_aio);
        nng_aio_cancel(conn->watch_aio);
        pthread_mutex_lock(lane->lock);
        conn->posting--;
    }
    bool idle = conn->posting == 0 && !conn->send_busy && !conn->receive_busy && !conn->watch_busy;
    if (conn->stream_closed && idle && !lane->over) {
        ep_lane_conn_ref(lane);
        if (!ep_lane_worker_push(&ep_nng_reaper, &conn->reap)) {
            ep_lane_conn_unref(lane);
        }
    }
}

/* Lock held, released on return. The caller must not touch conn afterwards. */
static void leave(stream_conn *conn)
{
    settle(conn);
    pthread_mutex_unlock(conn->lane.lock);
}

/* Lock held, dropped meanwhile: lets aio sleep. */
static void sleep_on(stream_conn *conn, nng_aio *aio, nng_duration ms)
{
    conn->posting++;
    pthread_mutex_unlock(conn->lane.lock);
    nng_sleep_aio(ms, aio);
    pthread_mutex_lock(conn->lane.lock);
    conn->posting--;
}

/* ---- sending ---- */

typedef struct slice {
    nng_iov iovs[STREAM_IOVS_MAX];
    unsigned count;
    uint8_t *scratch;
    size_t scratch_used;
    bool last_is_scratch;
    bool tls;
} slice;

/* Copies up to bytes to the scratch memory, appending to the last piece when that is there too.
 * Returns how many fit. */
static size_t slice_copy(slice *s, const uint8_t *data, size_t bytes)
{
    size_t room = STREAM_SCRATCH_BYTES - s->scratch_used;
    size_t taken = bytes < room ? bytes : room;
    uint8_t *at = s->scratch + s->scratch_used;
    if (taken == 0 || (!s->last_is_scratch && s->count == STREAM_IOVS_MAX)) {
        return 0;
    }
    memcpy(at, data, taken);
    ep_path_count(EP_PATH_LANE, taken);
    s->scratch_used += taken;
    if (s->last_is_scratch) {
        s->iovs[s->count - 1].iov_len += taken;
    } else {
        s->iovs[s->count++] = (nng_iov){.iov_buf = at, .iov_len = taken};
        s->last_is_scratch = true;
    }
    return taken;
}

/* Adds a piece; false when the slice is full (the piece may then be added in part). */
static bool slice_add(slice *s, const struct iovec *piece)
{
    size_t bytes = piece->iov_len;
    bool copied =
        s->tls ? s->count > 0 || bytes < STREAM_SCRATCH_BYTES : bytes <= STREAM_COALESCE_BYTES_MAX;
    if (copied && (s->tls || STREAM_SCRATCH_BYTES - s->scratch_used >= bytes)) {
        return slice_copy(s, piece->iov_base, bytes) == bytes;
    }
    if (s->count == STREAM_IOVS_MAX) {
        return false;
    }
    s->iovs[s->count++] = (nng_iov){.iov_buf = piece->iov_base, .iov_len = bytes};
    s->last_is_scratch = false;
    return !s->tls; /* nng's tls sends only the first piece */
}

/* Posts the next slice. Lock held, dropped meanwhile; send_busy set, not closing, queue not
 * empty. */
static void post_send(stream_conn *conn)
{
    struct iovec pieces[IOVS_GATHERED_MAX];
    size_t bytes;
    slice s = {.scratch = conn->scratch, .tls = conn->tls};
    unsigned count =
        ep_send_queue_gather(&conn->lane.queue, true, IOVS_GATHERED_MAX, pieces, &bytes);
    for (unsigned i = 0; i < count && slice_add(&s, &pieces[i]); i++) {
    }
    conn->posting++;
    pthread_mutex_unlock(conn->lane.lock);
    nng_aio_set_iov(conn->send_aio, s.count, s.iovs);
    nng_stream_send(conn->stream, conn->send_aio);
    pthread_mutex_lock(conn->lane.lock);
    conn->posting--;
}

static void send_done(void *arg)
{
    stream_conn *conn = arg;
    ep_lane_conn *lane = &conn->lane;
    int failed = nng_aio_result(conn->send_aio);
    pthread_mutex_lock(lane->lock);
    ep_lane_conn_advance(lane, failed == 0 ? nng_aio_count(conn->send_aio) : 0, NULL);
    pthread_mutex_unlock(lane->lock);
    ep_lane_conn_report_sent(lane);
    pthread_mutex_lock(lane->lock);
    if (failed != 0) {
        ep_error lost;
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "sending to %s failed: %s", lane->peer,
                     nng_strerror(failed));
        ep_lane_conn_begin_end(lane, &lost);
    }
    if (lane->closing || lane->queue.head == NULL) {
        conn->send_busy = false;
    } else {
        post_send(conn);
    }
    leave(conn);
}

ep_err ep_nng_conn_send(ep_conn *base, ep_send *send)
{
    stream_conn *conn = (stream_conn *)base;
    pthread_mutex_lock(conn->lane.lock);
    ep_err err = ep_lane_conn_queue(&conn->lane, send);
    if (err == EP_OK && !conn->send_busy) {
        conn->send_busy = true;
        post_send(conn);
    }
    leave(conn);
    return err;
}

/* ---- receiving ---- */

/* Posts a receive. Lock held, dropped meanwhile; receive_busy is set, closing is not. */
static void post_receive(stream_conn *conn)
{
    struct iovec room[EP_ASSEMBLER_IOVS_MAX];
    nng_iov iovs[EP_ASSEMBLER_IOVS_MAX];
    unsigned count = ep_assembler_room(&conn->lane.assembler, &conn->lane.limits, room);
    for (unsigned i = 0; i < count; i++) {
        iovs[i] = (nng_iov){.iov_buf = room[i].iov_base, .iov_len = room[i].iov_len};
    }
    conn->posting++;
    conn->receive_posted = true;
    conn->receive_number++;
    pthread_mutex_unlock(conn->lane.lock);
    nng_aio_set_iov(conn->receive_aio, count, iovs);
    nng_stream_recv(conn->stream, conn->receive_aio);
    pthread_mutex_lock(conn->lane.lock);
    conn->posting--;
}

/* Delivers whole frames, then posts the next receive or waits for memory. */
static void pump(void *arg)
{
    stream_conn *conn = arg;
    ep_lane_conn *lane = &conn->lane;
    ep_assembler_step step = ep_lane_conn_deliver(lane);
    ep_assembler_note(&lane->assembler, ep_clock_now_ns());
    pthread_mutex_lock(lane->lock);
    if (lane->closing) {
        conn->receive_busy = false;
    } else if (step == EP_ASSEMBLER_NO_MEMORY) {
        sleep_on(conn, conn->wait_aio, (nng_duration)ep_lane_conn_wait_ms(lane));
    } else {
        post_receive(conn);
    }
    leave(conn);
}

static void receive_done(void *arg)
{
    stream_conn *conn = arg;
    ep_lane_conn *lane = &conn->lane;
    int failed = nng_aio_result(conn->receive_aio);
    size_t received = failed == 0 ? nng_aio_count(conn->receive_aio) : 0;
    pthread_mutex_lock(lane->lock);
    conn->receive_posted = false;
    pthread_mutex_unlock(lane->lock);
    if (received > 0) {
        __atomic_store_n(&lane->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
        ep_assembler_received(&lane->assembler, received);
        pump(conn);
        return;
    }
    ep_error lost; /* tls reports the end as 0 bytes received */
    ep_assembler_describe_end(&lane->assembler, lane->peer,
                              failed != 0 ? nng_strerror(failed) : "end of stream", &lost);
    pthread_mutex_lock(lane->lock);
    ep_lane_conn_begin_end(lane, &lost);
    conn->receive_busy = false;
    leave(conn);
}

static void watch_tick(void *arg)
{
    stream_conn *conn = arg;
    ep_lane_conn *lane = &conn->lane;
    nng_sockaddr address; /* watch_busy keeps the stream alive */
    bool dead = nng_stream_get_addr(conn->stream, NNG_OPT_REMADDR, &address) != 0;
    pthread_mutex_lock(lane->lock);
    if (dead && conn->receive_posted) {
        if (conn->suspect_number == conn->receive_number) {
            ep_error lost;
            ep_error_set(&lost, EP_ERR_CONNECTION_LOST,
                         "connection to %s lost: its socket was shut", lane->peer);
            ep_lane_conn_begin_end(lane, &lost);
        }
        conn->suspect_number = conn->receive_number;
    }
    if (lane->closing) {
        conn->watch_busy = false;
    } else {
        sleep_on(conn, conn->watch_aio, WATCH_TICK_MS);
    }
    leave(conn);
}

/* ---- life ---- */

static void wake(ep_lane_conn *lane)
{
    stream_conn *conn = (stream_conn *)lane;
    if (!lane->closing) { /* so it was started */
        conn->receive_busy = true;
        post_receive(conn);
    }
    if (!lane->closing && conn->tls) {
        conn->watch_busy = true;
        sleep_on(conn, conn->watch_aio, WATCH_TICK_MS);
    }
    settle(conn);
}

static void free_nng_objects(stream_conn *conn)
{
    nng_aio_free(conn->send_aio);
    nng_aio_free(conn->receive_aio);
    nng_aio_free(conn->wait_aio);
    nng_aio_free(conn->watch_aio);
    nng_stream_free(conn->stream);
    free(conn->scratch);
    conn->stream = NULL;
}

/* On the reaper's thread; called a second time for a connection that had no handler. */
static void reap(ep_lane_job *job)
{
    stream_conn *conn = (stream_conn *)(void *)((char *)job - offsetof(stream_conn, reap));
    if (conn->stream != NULL) {
        free_nng_objects(conn);
        ep_lane_conn_let_go(&conn->lane);
    }
    ep_lane_conn_finish(&conn->lane);
    ep_lane_conn_unref(&conn->lane);
}

static void read_peer(stream_conn *conn)
{
    nng_sockaddr at;
    snprintf(conn->lane.peer, sizeof(conn->lane.peer), "unknown");
    if (nng_stream_get_addr(conn->stream, NNG_OPT_REMADDR, &at) != 0) {
        return; /* it has already ended */
    }
    if (at.s_family == NNG_AF_INET) {
        ep_lane_conn_set_peer(&conn->lane, AF_INET, &at.s_in.sa_addr, at.s_in.sa_port);
    } else if (at.s_family == NNG_AF_INET6) {
        ep_lane_conn_set_peer(&conn->lane, AF_INET6, at.s_in6.sa_addr, at.s_in6.sa_port);
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
    ep_lane_conn_init(&conn->lane, lane, limits, taken_count, wake);
    conn->lane.is_trusted = tls;
    conn->stream = taken_stream;
    conn->tls = tls;
    conn->reap.run = reap;
    conn->scratch = malloc(STREAM_SCRATCH_BYTES);
    /* false, since a posted receive would hold its memory while nothing comes */
    ep_err err = ep_assembler_init(&conn->lane.assembler, false);
    if (conn->scratch == NULL || err != EP_OK ||
        nng_aio_alloc(&conn->send_aio, send_done, conn) != 0 ||
        nng_aio_alloc(&conn->receive_aio, receive_done, conn) != 0 ||
        nng_aio_alloc(&conn->wait_aio, pump, conn) != 0 ||
        nng_aio_alloc(&conn->watch_aio, watch_tick, conn) != 0) {
        free_nng_objects(conn);
        ep_lane_conn_abandon(&conn->lane);
        return EP_ERR_NO_MEMORY;
    }
    read_peer(conn);
    *out_conn = &conn->lane.base;
    return EP_OK;
}
