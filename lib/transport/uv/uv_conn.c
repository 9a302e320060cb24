/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A uv stream connection.
 *
 * Sending    one thread at a time is inside the socket (writing): the caller of ep_conn_send, or
 *            the worker when the socket was full or a patient frame is next. It gathers queued
 *            frames, several small ones at a time.
 * Receiving  on its worker: reads while there are bytes, within a budget; lane_assembler makes
 *            frames.
 * Ending     closing is set and nothing new is written. When the last thread has left the socket,
 *            its worker closes the libuv handles, then the socket, and finishes in its next job.
 */
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "base/clock.h"
#include "transport/lane_conn.h"
#include "transport/uv/uv_lane.h"

#define IOVS_MAX 64
#define ROUNDS_MAX 16                  /* limits how long a caller writes the frames of others */
#define BUDGET_BYTES ((size_t)4 << 20) /* after this the worker serves its other connections */

typedef enum conn_state { CONN_NEW, CONN_OPEN, CONN_ENDING, CONN_ENDED } conn_state;

typedef struct uv_conn {
    ep_lane_conn lane;
    ep_uv_loop_worker *worker;
    ep_lane_job job; /* pushed with a reference */
    int fd;          /* closed by the worker when no thread is inside it */

    /* guarded by lock */
    bool writing; /* a thread is inside the socket, or runs done() of what it wrote */
    /* the socket is full, or the caller must not write: only the worker writes */
    bool wait_writable;

    /* the fields below are touched by the worker only */
    conn_state state;
    uv_poll_t poll;
    uv_timer_t retry; /* until memory may be available */
    unsigned handles; /* how many of the two are not closed yet */
    int events;       /* the events watched now */
} uv_conn;

/* From any thread, with a reference held: pushes the connection's job. */
static void kick(ep_lane_conn *lane)
{
    uv_conn *conn = (uv_conn *)lane;
    ep_lane_conn_ref(lane);
    if (!ep_uv_loop_worker_push(conn->worker, &conn->job)) {
        ep_lane_conn_unref(lane);
    }
}

/* ---- sending ---- */

/*
 * A write failed for good. If the peer has ended, bytes that it sent before may still be unread:
 * then reading goes on until the end of the stream. True: reading goes on.
 */
static bool end_after_failure(ep_lane_conn *lane, int failed)
{
    pthread_mutex_lock(lane->lock);
    bool reads = lane->started && (failed == EPIPE || failed == ECONNRESET);
    pthread_mutex_unlock(lane->lock);
    if (!reads) {
        ep_error lost;
        ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "sending to %s failed: %s", lane->peer,
                     strerror(failed));
        ep_lane_conn_end(lane, &lost);
    }
    return reads;
}

/* One write. Lock held, dropped meanwhile. mine, on_worker: see write_queue. */
static void write_once(uv_conn *conn, const ep_send **mine, bool on_worker)
{
    ep_lane_conn *lane = &conn->lane;
    bool reads = false;
    struct iovec iovs[IOVS_MAX];
    size_t bytes;
    struct msghdr message = {.msg_iov = iovs};
    message.msg_iovlen = ep_send_queue_gather(&lane->queue, on_worker, IOVS_MAX, iovs, &bytes);
    pthread_mutex_unlock(lane->lock);
    ssize_t sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    int failed = sent < 0 ? errno : 0;
    if (failed != 0 && failed != EAGAIN && failed != EINTR && failed != ENOBUFS) {
        reads = end_after_failure(lane, failed);
    }
    pthread_mutex_lock(lane->lock);
    ep_send *whole = ep_lane_conn_advance(lane, sent > 0 ? (size_t)sent : 0, *mine);
    conn->wait_writable =
        reads || failed == EAGAIN || failed == ENOBUFS || (failed == 0 && (size_t)sent < bytes);
    if (whole != NULL) {
        *mine = NULL; /* another send may get the same memory */
        pthread_mutex_unlock(lane->lock);
        whole->done(whole, EP_OK);
        pthread_mutex_lock(lane->lock);
    }
}

/*
 * Writes what the socket takes. Lock held on entry and return; no other thread is writing. mine:
 * the frame whose done() may run here; NULL none. on_worker: this is the worker's thread, which
 * writes patient frames too. A caller may find a patient frame that another thread queued
 * meanwhile. True: the job must run.
 */
static bool write_queue(uv_conn *conn, const ep_send *mine, bool on_worker)
{
    ep_lane_conn *lane = &conn->lane;
    conn->writing = true;
    conn->wait_writable = false;
    for (int round = 0; lane->queue.head != NULL && !conn->wait_writable && !lane->closing;
         round++) {
        if (round == ROUNDS_MAX || (lane->queue.head->is_patient && !on_worker)) {
            conn->wait_writable = true;
            break;
        }
        write_once(conn, &mine, on_worker);
    }
    conn->writing = false;
    return conn->wait_writable || lane->closing || lane->sent.head != NULL;
}

ep_err ep_uv_conn_send(ep_conn *base, ep_send *send)
{
    uv_conn *conn = (uv_conn *)base;
    ep_lane_conn *lane = &conn->lane;
    bool must_kick = false;
    /* send may be freed as soon as it is queued */
    const ep_send *mine = send->done_inside ? send : NULL;
    const bool is_patient = send->is_patient;
    pthread_mutex_lock(lane->lock);
    ep_err err = ep_lane_conn_queue(lane, send);
    if (err == EP_OK && !conn->writing && !conn->wait_writable) {
        conn->wait_writable = is_patient;
        must_kick = is_patient || write_queue(conn, mine, false);
    }
    if (must_kick) {
        ep_lane_conn_ref(lane); /* a done() may release the connection */
    }
    pthread_mutex_unlock(lane->lock);
    if (must_kick) {
        kick(lane);
        ep_lane_conn_unref(lane);
    }
    return err;
}

/* On the worker: the socket has room again. */
static void on_writable(uv_conn *conn)
{
    ep_lane_conn *lane = &conn->lane;
    pthread_mutex_lock(lane->lock);
    bool must_kick = !conn->writing && !lane->closing && write_queue(conn, NULL, true);
    pthread_mutex_unlock(lane->lock);
    if (must_kick) {
        kick(lane); /* the job reports, after this callback */
    }
}

uint64_t ep_uv_conn_unacked(ep_conn *base)
{
    uv_conn *conn = (uv_conn *)base;
    int bytes = 0;
    pthread_mutex_lock(conn->lane.lock);
    if (conn->fd < 0 || ioctl(conn->fd, SIOCOUTQ, &bytes) != 0) {
        bytes = 0;
    }
    pthread_mutex_unlock(conn->lane.lock);
    return (uint64_t)bytes;
}

/* ---- receiving, on the worker ---- */

static void on_retry_memory(uv_timer_t *timer);

/* Delivers whole frames. False when nothing may be read now. */
static bool pump(uv_conn *conn)
{
    ep_assembler_step step = ep_lane_conn_deliver(&conn->lane);
    if (step == EP_ASSEMBLER_NO_MEMORY) {
        uv_timer_start(&conn->retry, on_retry_memory, ep_lane_conn_wait_ms(&conn->lane), 0);
    }
    return step == EP_ASSEMBLER_MORE;
}

static void end_of_stream(ep_lane_conn *lane, const char *reason)
{
    ep_error lost;
    ep_assembler_describe_end(&lane->assembler, lane->peer, reason, &lost);
    ep_lane_conn_end(lane, &lost);
}

/* The loop has read all that there is for now. */
static void rest(ep_lane_conn *lane)
{
    ep_assembler_rest(&lane->assembler);
    ep_assembler_note(&lane->assembler, ep_clock_now_ns());
}

/* A connection that is not started gets here only when its socket failed: it watches for room to
 * write, but has no handler yet. */
static bool is_started(ep_lane_conn *lane)
{
    pthread_mutex_lock(lane->lock);
    bool started = lane->started;
    pthread_mutex_unlock(lane->lock);
    return started;
}

/* failed: the socket has an error, and is no longer watched. */
static void on_readable(uv_conn *conn, bool failed)
{
    ep_lane_conn *lane = &conn->lane;
    size_t had_bytes = 0;
    bool waits = __atomic_load_n(&lane->memory_wait, __ATOMIC_RELAXED);
    /* a connection that waits for memory does not read, so its error would be reported for ever */
    if (failed && (waits || !is_started(lane))) {
        end_of_stream(lane, "its socket failed");
        return;
    }
    bool more = !ep_lane_conn_is_closing(lane) && !waits;
    while (more && had_bytes < BUDGET_BYTES) {
        struct iovec room[EP_ASSEMBLER_IOVS_MAX];
        unsigned count = ep_assembler_room(&lane->assembler, &lane->limits, room);
        size_t asked = room[0].iov_len + (count > 1 ? room[1].iov_len : 0);
        struct msghdr message = {.msg_iov = room, .msg_iovlen = count};
        ssize_t got = recvmsg(conn->fd, &message, MSG_DONTWAIT);
        if (got > 0) {
            uint64_t now_ns = ep_clock_now_ns();
            __atomic_store_n(&lane->heard_ns, now_ns, __ATOMIC_RELAXED);
            conn->worker->heard_ns = now_ns;
            ep_assembler_received(&lane->assembler, (size_t)got);
            had_bytes += (size_t)got;
            /* fewer bytes than asked: the socket is empty */
            more = pump(conn) && (size_t)got == asked;
        } else if (got == 0) {
            end_of_stream(lane, "end of stream");
            more = false;
        } else if (errno != EINTR) {
            if (errno != EAGAIN) {
                end_of_stream(lane, strerror(errno));
            }
            more = false;
        }
    }
    rest(lane);
}

/* ---- life, on the worker ---- */

static void update_events(uv_conn *conn);

static void on_poll(uv_poll_t *poll, int status, int events)
{
    uv_conn *conn = poll->data;
    if (status < 0) {
        conn->events = 0; /* libuv has stopped watching; reading tells the error */
    }
    if ((events & UV_WRITABLE) != 0) {
        on_writable(conn);
    }
    if (status < 0 || (events & UV_READABLE) != 0) {
        on_readable(conn, status < 0);
    }
    /* Whoever else changes what is to be watched pushes the job. */
    const bool is_changed =
        events != UV_READABLE || __atomic_load_n(&conn->lane.memory_wait, __ATOMIC_RELAXED);
    if (is_changed && !ep_lane_conn_is_closing(&conn->lane)) {
        update_events(conn);
    }
}

/* Watches the events that are needed now. */
static void update_events(uv_conn *conn)
{
    pthread_mutex_lock(conn->lane.lock);
    bool writable = conn->wait_writable;
    bool readable =
        conn->lane.started && !__atomic_load_n(&conn->lane.memory_wait, __ATOMIC_RELAXED);
    pthread_mutex_unlock(conn->lane.lock);
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

static void on_retry_memory(uv_timer_t *timer)
{
    uv_conn *conn = timer->data;
    if (ep_lane_conn_is_closing(&conn->lane)) {
        return;
    }
    pump(conn); /* memory_wait stays set until there is memory */
    rest(&conn->lane);
    update_events(conn);
}

static void on_handle_closed(uv_handle_t *handle)
{
    uv_conn *conn = handle->data;
    if (--conn->handles > 0) {
        return;
    }
    pthread_mutex_lock(conn->lane.lock);
    int fd = conn->fd;
    conn->fd = -1;
    pthread_mutex_unlock(conn->lane.lock);
    ep_lane_fd_close(fd);
    ep_lane_conn_let_go(&conn->lane);
    conn->state = CONN_ENDED;
    kick(&conn->lane); /* its job finishes */
}

static void open_handles(uv_conn *conn)
{
    ep_lane_conn *lane = &conn->lane;
    uv_loop_t *loop = &conn->worker->loop;
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
    ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "cannot watch the connection to %s: %s", lane->peer,
                 uv_strerror(failed));
    ep_lane_conn_end(lane, &lost);
}

static void close_handles(uv_conn *conn)
{
    conn->state = CONN_ENDING;
    if (conn->handles == 2) {
        uv_close((uv_handle_t *)&conn->poll, on_handle_closed);
    }
    uv_close((uv_handle_t *)&conn->retry, on_handle_closed);
}

/* The connection's job: does everything that is due. */
static void run(ep_lane_job *job)
{
    uv_conn *conn = (uv_conn *)(void *)((char *)job - offsetof(uv_conn, job));
    ep_lane_conn *lane = &conn->lane;
    if (conn->state == CONN_NEW) {
        open_handles(conn);
    }
    if (conn->state == CONN_OPEN) {
        ep_lane_conn_report_sent(lane);
        pthread_mutex_lock(lane->lock);
        bool closing = lane->closing;
        /* a thread that is writing pushes the job again when closing is set */
        bool writing = conn->writing;
        pthread_mutex_unlock(lane->lock);
        if (!closing) {
            update_events(conn);
        } else if (!writing) {
            close_handles(conn);
        }
    } else if (conn->state == CONN_ENDED) {
        ep_lane_conn_finish(lane);
    }
    ep_lane_conn_unref(lane);
}

static void read_peer(ep_lane_conn *lane, const struct sockaddr_storage *address)
{
    const struct sockaddr_in *in = (const struct sockaddr_in *)address;
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
    if (address->ss_family == AF_INET) {
        ep_lane_conn_set_peer(lane, AF_INET, &in->sin_addr, in->sin_port);
    } else {
        ep_lane_conn_set_peer(lane, AF_INET6, &in6->sin6_addr, in6->sin6_port);
    }
}

static bool same_machine(const struct sockaddr_storage *peer, const struct sockaddr_storage *own)
{
    if (peer->ss_family != own->ss_family) {
        return false;
    }
    if (peer->ss_family == AF_INET) {
        uint32_t a = ntohl(((const struct sockaddr_in *)peer)->sin_addr.s_addr);
        uint32_t b = ntohl(((const struct sockaddr_in *)own)->sin_addr.s_addr);
        return a == b || (a >> 24 == IN_LOOPBACKNET && b >> 24 == IN_LOOPBACKNET);
    }
    const struct in6_addr *a = &((const struct sockaddr_in6 *)peer)->sin6_addr;
    const struct in6_addr *b = &((const struct sockaddr_in6 *)own)->sin6_addr;
    return peer->ss_family == AF_INET6 && memcmp(a, b, sizeof(*a)) == 0;
}

/*
 * Small frames must not wait for acknowledgements, and a peer whose machine vanished must be
 * noticed at some time. Towards a peer on this machine pacing is turned off: BBR, the default of
 * many systems, would leave two thirds of the memory's bandwidth unused there.
 */
static void set_options(int fd, const struct sockaddr_storage *peer)
{
    static const char name[] = "reno";
    struct sockaddr_storage own;
    socklen_t bytes = sizeof(own);
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    memset(&own, 0, sizeof(own));
    if (getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 && same_machine(peer, &own)) {
        /* if this fails, the setting stays */
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, sizeof(name) - 1);
    }
}

ep_err ep_uv_conn_create(const ep_lane_ops *lane, int taken_fd,
                         const struct sockaddr_storage *address, const ep_lane_limits *limits,
                         ep_uv_loop_worker *worker, ep_accept_count *taken_count,
                         ep_conn **out_conn)
{
    uv_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL || ep_assembler_init(&conn->lane.assembler, true) != EP_OK) {
        free(conn);
        ep_lane_fd_close(taken_fd);
        ep_accept_count_remove(taken_count);
        return EP_ERR_NO_MEMORY;
    }
    ep_lane_conn_init(&conn->lane, lane, limits, taken_count, kick);
    conn->worker = worker;
    conn->job.run = run;
    conn->fd = taken_fd;
    set_options(taken_fd, address);
    read_peer(&conn->lane, address);
    *out_conn = &conn->lane.base;
    return EP_OK;
}
