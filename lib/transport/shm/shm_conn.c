/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shared-memory connection.
 *
 * Sending    the caller's thread copies into the ring while there is room; the loop does the rest
 *            when the peer wakes it. done() runs in the sender where its owner allows
 *            (done_inside). Otherwise it runs on the loop, which is not woken for it: when the loop
 *            is awake next, or a millisecond later.
 * Receiving  the loop copies each byte out of the ring once: the prefix, then the frame into its
 *            buffer. Only the copies are checked. If the peer runs on another CPU, the loop polls
 *            before it sleeps: in the middle of a frame, which the peer is then copying, and when
 *            the peer's last pause was about as short as a wake-up. How long is limited by what has
 *            been earned (shm_spin.h).
 * Ending     closing is set. Then the loop closes the socket, unmaps the memory, fails what is
 *            queued and calls on_closed. If the peer has ended, its ring is read to the end first.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/path_count.h"
#include "transport/lane_conn.h"
#include "transport/shm/shm_lane.h"
#include "transport/shm/shm_spin.h"

/* pieces in which the peer copies out while we copy in */
#define PUBLISH_BYTES ((size_t)64 << 10)
/* avoids a small piece at the end of a frame */
#define PIECE_BYTES_MAX (PUBLISH_BYTES + PUBLISH_BYTES / 2)
#define SHORT_PAUSE_NS (2 * SHM_SPIN_NS) /* including the wake-up that ends it */
#define SPINS_PER_LOOK 32
#define SERVE_BYTES ((size_t)1 << 20) /* after this, other connections are served */
#define SERVE_STEPS 4096              /* the same limit for a peer that moves byte by byte */
#define SERVE_FILLS 16                /* the same limit for pieces put into the ring */
/* how many pieces a caller of ep_conn_send puts in before the loop takes over */
#define SEND_FILLS 128
#define BELLS_UNREAD_MAX 32 /* far fewer than a socket holds */
#define BELL_READS_MAX 16

typedef enum receive_step { RECEIVE_IDLE, RECEIVE_MORE, RECEIVE_WAITS, RECEIVE_ERROR } receive_step;

typedef struct shm_conn {
    ep_lane_conn lane;
    shm_loop *loop;
    int socket;
    shm_source source;
    ep_lane_job job;   /* posted with a reference */
    ep_lane_job retry; /* waits for memory */
    shm_memory memory;

    /* guarded by lock */
    shm_producer out;
    /* senders that wake the peer or run a done() without the lock; the connection ends only at 0 */
    uint32_t inside;
    bool posted;

    /* the fields below are for the loop's thread */
    shm_consumer in;
    bool ended; /* socket and memory are released */
    bool peer_ended;
    uint32_t bells_unread;
    uint8_t prefix[EP_FRAME_PREFIX_BYTES];
    size_t prefix_have_bytes;
    ep_buffer *frame;
    size_t frame_have_bytes;
    shm_spin spin;
    uint64_t idle_ns;    /* since when nothing has arrived; 0: something is arriving */
    bool paused_shortly; /* the last pause before something arrived was short */
} shm_conn;

/* Lock held: makes the loop look at the connection. */
static void post(ep_lane_conn *lane)
{
    shm_conn *conn = (shm_conn *)lane;
    if (lane->over) {
        return;
    }
    if (conn->posted) {
        ep_shm_loop_hurry(conn->loop); /* it may have been posted lazily */
        return;
    }
    conn->posted = true;
    ep_lane_conn_ref(lane);
    ep_shm_loop_post(conn->loop, &conn->job);
}

/* Lock held: the same, without waking the loop. */
static void post_lazy(shm_conn *conn)
{
    if (!conn->posted) {
        conn->posted = true;
        ep_lane_conn_ref(&conn->lane);
        ep_shm_loop_post_lazy(conn->loop, &conn->job);
    }
}

/*
 * Wakes the peer. The socket is open, because the loop's thread calls this, or the lock is held and
 * closing is not set, or the caller is counted in conn->inside. Call it without the lock where
 * possible: the peer may run at once in place of this thread, and other threads that need the lock,
 * perhaps for the peer's answer, would wait until this thread has its core again.
 */
static void ring_bell(const shm_conn *conn)
{
    /* A full socket holds enough wake-ups; epoll reports a socket that has ended. */
    ssize_t n = send(conn->socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)n;
}

/* ---- sending ---- */

/*
 * Lock held: copies bytes of the queue into the ring, offset bytes behind its head. Returns how
 * many, at most room.
 */
static size_t gather(shm_conn *conn, size_t room)
{
    ep_send_queue *queue = &conn->lane.queue;
    size_t put = 0;
    while (queue->head != NULL && put < room) {
        const ep_send *send = queue->head;
        size_t left = send->total_bytes - send->sent_bytes;
        size_t want = left < room - put ? left : room - put;
        size_t piece;
        uint8_t *at = ep_shm_producer_at(&conn->out, put, want, &piece);
        ep_send_copy(send, send->sent_bytes, at, piece);
        ep_path_count(EP_PATH_LANE, piece);
        ep_lane_conn_advance(&conn->lane, piece, NULL);
        put += piece;
    }
    return put;
}

/* Lock held, the queue is not empty. */
static size_t unsent_bytes(const shm_conn *conn)
{
    return conn->lane.queue.bytes - conn->lane.queue.head->sent_bytes;
}

/* In pieces the peer copies out while we copy in; but on our CPU it would only interrupt us. */
static size_t piece_bytes(size_t bytes, bool apart)
{
    return bytes <= PIECE_BYTES_MAX || !apart ? bytes : PUBLISH_BYTES;
}

/*
 * Lock held, not closing: fills the ring from the queue. True: fills_max pieces were put in and
 * there may be room for more. Without fills_max a peer that frees byte by byte could keep us here,
 * with the lock held, for as long as it likes. *out_bell: the caller must wake the peer after
 * releasing the lock.
 */
static bool fill_ring(shm_conn *conn, unsigned fills_max, bool *out_bell)
{
    *out_bell = false;
    for (unsigned fills = 0; conn->lane.queue.head != NULL; fills++) {
        if (fills == fills_max) {
            return true;
        }
        size_t room;
        if (!ep_shm_producer_wait_room(&conn->out, &room)) {
            ep_error why;
            ep_error_set(&why, EP_ERR_PROTOCOL,
                         "%s broke the ring: it claims to have read what was not sent",
                         conn->lane.peer);
            ep_lane_conn_begin_end(&conn->lane, &why);
            return false;
        }
        if (room == 0) {
            return false;
        }
        if (*out_bell) {
            ring_bell(conn); /* now the peer copies out while we copy in */
        }
        size_t put = gather(conn, piece_bytes(room < unsent_bytes(conn) ? room : unsent_bytes(conn),
                                              ep_shm_producer_is_apart(&conn->out)));
        *out_bell = ep_shm_producer_publish(&conn->out, put);
    }
    return false;
}

/* The rest of a send: without the lock, counted in conn->inside. */
static void end_send(shm_conn *conn, bool bell, ep_send *own)
{
    if (bell) {
        ring_bell(conn);
    }
    if (own != NULL) {
        own->done(own, EP_OK);
    }
    pthread_mutex_lock(conn->lane.lock);
    if (--conn->inside == 0 && conn->lane.closing) {
        post(&conn->lane); /* the connection's end waits for this */
    }
    pthread_mutex_unlock(conn->lane.lock);
}

ep_err ep_shm_conn_send(ep_conn *base, ep_send *send)
{
    shm_conn *conn = (shm_conn *)base;
    ep_lane_conn *lane = &conn->lane;
    bool bell = false;
    bool more = false;
    ep_send *own = NULL;
    pthread_mutex_lock(lane->lock);
    bool first = lane->queue.head == NULL;
    ep_err err = ep_lane_conn_queue(lane, send);
    if (err == EP_OK && first) {
        more = fill_ring(conn, SEND_FILLS, &bell);
        /* if it is in the ring and done() may run here, it does not wait for the loop */
        own = send->done_inside && lane->sent.head == send ? ep_send_queue_pop(&lane->sent) : NULL;
    }
    if (lane->closing || more) {
        post(lane);
    } else if (lane->sent.head != NULL) {
        post_lazy(conn);
    }
    bool is_inside = bell || own != NULL;
    conn->inside += is_inside;
    pthread_mutex_unlock(lane->lock);
    if (is_inside) {
        end_send(conn, bell, own);
    }
    return err;
}

/* ---- receiving, on the loop's thread ---- */

static void take(shm_conn *conn, uint8_t *out, size_t bytes)
{
    ep_path_count(EP_PATH_LANE, bytes);
    shm_spin_earn(&conn->spin, bytes, 0);
    if (ep_shm_consumer_take(&conn->in, out, bytes)) {
        ring_bell(conn);
    }
}

/* Called when the prefix is complete: gets the frame's buffer. */
static receive_step begin_frame(shm_conn *conn, ep_error *out_error)
{
    ep_lane_conn *lane = &conn->lane;
    bool large_allowed = __atomic_load_n(&lane->large_allowed, __ATOMIC_ACQUIRE);
    size_t bytes = 0;
    if (ep_lane_frame_length(&lane->limits, large_allowed, conn->prefix, lane->peer, &bytes,
                             out_error) != EP_OK) {
        return RECEIVE_ERROR;
    }
    if (ep_buffer_acquire(lane->limits.pool, bytes, &conn->frame) != EP_OK) {
        return RECEIVE_WAITS;
    }
    memcpy(conn->frame->data, conn->prefix, conn->prefix_have_bytes);
    conn->frame_have_bytes = conn->prefix_have_bytes;
    conn->prefix_have_bytes = 0;
    ep_lane_conn_begin_frame(lane, conn->frame);
    return RECEIVE_MORE;
}

/* Takes what is there, at most one frame. RECEIVE_MORE: there may be more. */
static receive_step receive_some(shm_conn *conn, ep_error *out_error)
{
    size_t available;
    size_t least = conn->lane.limits.prefix_bytes;
    if (!ep_shm_consumer_available(&conn->in, &available)) {
        ep_error_set(out_error, EP_ERR_PROTOCOL, "%s broke the ring: its position is impossible",
                     conn->lane.peer);
        return RECEIVE_ERROR;
    }
    if (conn->frame == NULL && conn->prefix_have_bytes < least) {
        size_t want = least - conn->prefix_have_bytes;
        size_t bytes = available < want ? available : want;
        if (bytes == 0) {
            return RECEIVE_IDLE;
        }
        take(conn, conn->prefix + conn->prefix_have_bytes, bytes);
        conn->prefix_have_bytes += bytes;
        available -= bytes;
        if (bytes < want) {
            return RECEIVE_IDLE;
        }
    }
    if (conn->frame == NULL) {
        receive_step step = begin_frame(conn, out_error);
        if (step != RECEIVE_MORE) {
            return step;
        }
    }
    size_t want = conn->frame->bytes - conn->frame_have_bytes;
    size_t bytes = available < want ? available : want;
    /* the peer fills the freed space meanwhile */
    bytes = piece_bytes(bytes, ep_shm_consumer_is_apart(&conn->in));
    if (bytes > 0) {
        take(conn, conn->frame->data + conn->frame_have_bytes, bytes);
        conn->frame_have_bytes += bytes;
    }
    if (conn->frame_have_bytes == conn->frame->bytes) {
        ep_buffer *frame = conn->frame;
        conn->frame = NULL;
        shm_spin_earn(&conn->spin, 0, 1);
        conn->lane.handler.on_frame(conn->lane.handler.arg, &conn->lane.base, frame);
        return RECEIVE_MORE;
    }
    return bytes > 0 ? RECEIVE_MORE : RECEIVE_IDLE;
}

/* Called when nothing is there: polls until until_ns at most, within what was earned. True when
 * bytes have come, or something is wrong. */
static bool spin_for_more(shm_conn *conn, uint64_t until_ns)
{
    if ((conn->frame == NULL && !conn->paused_shortly) || !ep_shm_consumer_is_apart(&conn->in)) {
        return false;
    }
    uint64_t begin_ns = ep_clock_now_ns();
    uint64_t end_ns = begin_ns + shm_spin_allowed_ns(&conn->spin);
    uint64_t now_ns = begin_ns;
    size_t available = 0;
    bool broken = false;
    end_ns = end_ns < until_ns ? end_ns : until_ns;
    while (available == 0 && !broken && now_ns < end_ns) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            ep_cpu_relax();
        }
        broken = !ep_shm_consumer_available(&conn->in, &available);
        now_ns = ep_clock_now_ns();
    }
    shm_spin_pay(&conn->spin, now_ns - begin_ns);
    return available > 0 || broken; /* the next step reports the fault */
}

/* Called after a poll that began at begin_ns: notes how long the peer had paused. */
static void note_pause(shm_conn *conn, bool moved, bool idle, uint64_t begin_ns)
{
    if (moved && conn->idle_ns != 0) {
        conn->paused_shortly = begin_ns - conn->idle_ns < SHORT_PAUSE_NS;
        conn->idle_ns = 0;
    }
    uint64_t now_ns = ep_clock_now_ns();
    if (moved) {
        __atomic_store_n(&conn->lane.heard_ns, now_ns, __ATOMIC_RELAXED);
    }
    if (idle && conn->idle_ns == 0) {
        conn->idle_ns = now_ns;
    }
}

/* Delivers frames. True: there is more, but other connections must be served first. */
static bool receive(shm_conn *conn)
{
    ep_error error;
    uint64_t begin = conn->in.tail;
    uint64_t begin_ns = ep_clock_now_ns();
    receive_step step = RECEIVE_MORE;
    ep_shm_consumer_disarm(&conn->in);
    for (unsigned steps = 0; steps < SERVE_STEPS && !ep_lane_conn_is_closing(&conn->lane) &&
                             conn->in.tail - begin < SERVE_BYTES;
         steps++) {
        step = receive_some(conn, &error);
        if (step == RECEIVE_IDLE && spin_for_more(conn, begin_ns + SHM_SPINS_NS)) {
            continue;
        }
        if (step == RECEIVE_IDLE && ep_shm_consumer_arm(&conn->in)) {
            break;
        }
        if (step == RECEIVE_IDLE) {
            ep_shm_consumer_disarm(&conn->in);
        } else if (step != RECEIVE_MORE) {
            break;
        }
    }
    note_pause(conn, conn->in.tail != begin, step == RECEIVE_IDLE, begin_ns);
    if (step == RECEIVE_WAITS) {
        uint64_t wait_ns = ep_lane_conn_wait_ms(&conn->lane) * EP_NS_PER_MS;
        ep_lane_later_add(&conn->loop->later, &conn->retry, ep_clock_now_ns() + wait_ns);
    } else if (step == RECEIVE_ERROR) {
        ep_lane_conn_end(&conn->lane, &error);
    } else if (step == RECEIVE_IDLE && conn->in.armed && conn->peer_ended) {
        ep_error_set(
            &error, EP_ERR_CONNECTION_LOST, "%s closed the connection%s", conn->lane.peer,
            conn->frame != NULL || conn->prefix_have_bytes > 0 ? " in the middle of a frame" : "");
        ep_lane_conn_end(&conn->lane, &error);
    }
    return step == RECEIVE_MORE || (step == RECEIVE_IDLE && !conn->in.armed);
}

/* ---- life ---- */

static void let_go(shm_conn *conn)
{
    conn->ended = true;
    ep_shm_loop_unwatch(conn->loop, conn->socket);
    ep_lane_later_remove(&conn->loop->later, &conn->retry);
    /* wait for threads that copy: they hold the lock and saw closing unset; after it none is
     * inside */
    pthread_mutex_lock(conn->lane.lock);
    shutdown(conn->socket, SHUT_RDWR);
    ep_lane_fd_close(conn->socket);
    ep_shm_memory_close(&conn->memory);
    pthread_mutex_unlock(conn->lane.lock);
    ep_buffer_unref(conn->frame);
    conn->frame = NULL;
    ep_lane_conn_let_go(&conn->lane);
}

/* Closing is set: ends the connection, as far as possible now. */
static void finish(shm_conn *conn)
{
    pthread_mutex_lock(conn->lane.lock);
    bool is_used = conn->inside > 0;
    pthread_mutex_unlock(conn->lane.lock);
    if (is_used) {
        return; /* the last thread to leave posts */
    }
    if (!conn->ended) {
        let_go(conn);
    }
    ep_lane_conn_finish(&conn->lane);
}

static void serve(shm_conn *conn)
{
    ep_lane_conn *lane = &conn->lane;
    bool more = false;
    pthread_mutex_lock(lane->lock);
    bool started = lane->started;
    bool bell = false;
    bool more_to_send = !lane->closing && fill_ring(conn, SERVE_FILLS, &bell);
    pthread_mutex_unlock(lane->lock);
    if (bell) {
        ring_bell(conn);
    }
    if (!conn->ended) {
        ep_lane_conn_report_sent(lane);
    }
    if (started && !ep_lane_conn_is_closing(lane) && !conn->retry.waiting) {
        more = receive(conn);
    }
    if (ep_lane_conn_is_closing(lane)) {
        finish(conn);
    } else if (more || more_to_send) {
        pthread_mutex_lock(lane->lock);
        post(lane);
        pthread_mutex_unlock(lane->lock);
    }
}

/*
 * Reads all of them: one event may stand for several, and a socket that stays full causes no more
 * events. The end of the socket is reported by events. Only a peer that fills it as fast as we read
 * makes us stop early.
 */
static void read_bells(shm_conn *conn)
{
    char bells[256];
    conn->bells_unread = 0;
    for (int i = 0; i < BELL_READS_MAX; i++) {
        if (recv(conn->socket, bells, sizeof(bells), MSG_DONTWAIT) < (ssize_t)sizeof(bells)) {
            return;
        }
    }
}

static void on_event(shm_source *source, uint32_t events)
{
    shm_conn *conn = (shm_conn *)(void *)((char *)source - offsetof(shm_conn, source));
    if ((events & EPOLLIN) != 0 && ++conn->bells_unread >= BELLS_UNREAD_MAX) {
        read_bells(conn);
    }
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
        conn->peer_ended = true;
    }
    ep_lane_conn_ref(&conn->lane);
    serve(conn);
    ep_lane_conn_unref(&conn->lane);
}

static void on_posted(ep_lane_job *job)
{
    shm_conn *conn = (shm_conn *)(void *)((char *)job - offsetof(shm_conn, job));
    pthread_mutex_lock(conn->lane.lock);
    conn->posted = false; /* a post from now on is seen below, or posts again */
    pthread_mutex_unlock(conn->lane.lock);
    serve(conn);
    ep_lane_conn_unref(&conn->lane);
}

static void on_retry(ep_lane_job *job)
{
    serve((shm_conn *)(void *)((char *)job - offsetof(shm_conn, retry)));
}

ep_err ep_shm_conn_create(const ep_lane_ops *lane, int taken_socket, shm_memory *taken_memory,
                          const ep_lane_limits *limits, const char *peer,
                          ep_accept_count *taken_count, ep_conn **out_conn, ep_error *out_error)
{
    shm_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        ep_lane_fd_close(taken_socket);
        ep_shm_memory_close(taken_memory);
        ep_accept_count_remove(taken_count);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a connection");
    }
    ep_lane_conn_init(&conn->lane, lane, limits, taken_count, post);
    conn->lane.is_trusted = true;
    snprintf(conn->lane.peer, sizeof(conn->lane.peer), "%s", peer);
    conn->loop = ep_shm_loop_next();
    conn->source.on_event = on_event;
    conn->job.run = on_posted;
    conn->retry.run = on_retry;
    conn->memory = *taken_memory;
    shm_spin_init(&conn->spin);
    ep_shm_memory_rings(&conn->memory, taken_count != NULL, &conn->out, &conn->in);
    conn->socket = taken_socket;
    *out_conn = &conn->lane.base;
    if (ep_shm_loop_watch(conn->loop, taken_socket, &conn->source,
                          EPOLLIN | EPOLLRDHUP | EPOLLET) != EP_OK) {
        ep_error_set(out_error, EP_ERR_IO, "epoll takes no more: %s", strerror(errno));
        *out_conn = NULL;
        ep_lane_fd_close(conn->socket);
        ep_shm_memory_close(&conn->memory);
        ep_lane_conn_abandon(&conn->lane);
        return EP_ERR_IO;
    }
    return EP_OK;
}
