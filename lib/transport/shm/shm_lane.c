/* SPDX-License-Identifier: Apache-2.0 */
/* The shared-memory lane: its listeners and dials; connections are in shm_conn.c. */
#include "transport/shm/shm_lane.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

/* ---- listeners ----
 *
 * The kernel says which process connects; if it is allowed, it gets its memory, otherwise it is
 * told why not. Without free descriptors, accept fails at once and again; so a growing pause
 * follows every failure.
 */

#define ACCEPTS_MAX 32 /* after this, the connections of this thread are served */

typedef struct shm_listener {
    ep_lane_listener lane;
    shm_loop *loop;
    shm_source source;
    ep_lane_job end;
    ep_lane_job retry; /* runs after a pause */
    int socket;
    int name_lock;
    shm_access access;
    const char *path; /* points into the URL */
    /* guarded by lane.lock */
    bool closing;
    bool accepting; /* on_accept is running */
} shm_listener;

/* For how many connections total_bytes has room. */
static uint32_t memory_room(const shm_access *access)
{
    size_t room = access->total_bytes / ep_shm_connection_bytes(access->ring_bytes);
    return access->total_bytes == 0 || room > UINT32_MAX ? UINT32_MAX : (uint32_t)room;
}

/* Creates the connection's memory and sends it. Takes the socket and a counted place. Errors: those
 * that the dialler is told. */
static ep_err welcome(shm_listener *l, int taken_socket, const char *peer, ep_conn **out_conn,
                      ep_error *out_error)
{
    shm_memory memory = {0};
    int fd = -1;
    ep_err err = ep_shm_memory_create(l->access.ring_bytes, &memory, &fd, out_error);
    if (err != EP_OK) {
        ep_shm_welcome_send(taken_socket, 0, -1, out_error);
        ep_lane_fd_close(taken_socket);
        ep_accept_count_remove(l->lane.count);
        return err;
    }
    bool sent = ep_shm_welcome_send(taken_socket, l->access.ring_bytes, fd, NULL);
    ep_lane_fd_close(fd);
    if (!sent) {
        ep_lane_fd_close(taken_socket);
        ep_shm_memory_close(&memory);
        ep_accept_count_remove(l->lane.count);
        return ep_error_set(out_error, EP_ERR_CONNECTION_LOST, "%s left before it was welcomed",
                            peer);
    }
    return ep_shm_conn_create(l->lane.base.ops, taken_socket, &memory, &l->lane.limits, peer,
                              l->lane.count, out_conn, out_error);
}

static void refuse(shm_listener *l, int taken_socket, const ep_error *why)
{
    if (why->code != EP_ERR_RESOURCE_EXHAUSTED || !l->lane.refusing) {
        ep_log(EP_LOG_WARN, "lane-refused", EP_KV(url, l->lane.url), EP_KV(reason, why->text));
    }
    l->lane.refusing = why->code == EP_ERR_RESOURCE_EXHAUSTED;
    ep_shm_welcome_send(taken_socket, 0, -1, why);
    ep_lane_fd_close(taken_socket);
}

static ep_conn *take_socket(shm_listener *l, int taken_socket)
{
    char peer[EP_ADDRESS_BYTES];
    ep_error error;
    if (ep_shm_access_check(&l->access, taken_socket, peer, sizeof(peer), &error) != EP_OK) {
        refuse(l, taken_socket, &error);
        return NULL;
    }
    uint32_t room = memory_room(&l->access);
    uint32_t max = l->lane.limits.connections_max;
    if (!ep_accept_count_add(l->lane.count, room < max ? room : max)) {
        if (room < max) {
            ep_shm_memory_count_refusal();
            ep_error_set(&error, EP_ERR_RESOURCE_EXHAUSTED,
                         "%s has %u connections of %zu bytes of shared memory, all that "
                         "total_bytes %zu allows",
                         l->lane.url, room, ep_shm_connection_bytes(l->access.ring_bytes),
                         l->access.total_bytes);
        } else {
            ep_error_set(&error, EP_ERR_RESOURCE_EXHAUSTED, "%s has connections_max %u connections",
                         l->lane.url, max);
        }
        refuse(l, taken_socket, &error);
        return NULL;
    }
    l->lane.refusing = false;
    ep_conn *conn = NULL;
    if (welcome(l, taken_socket, peer, &conn, &error) != EP_OK) {
        if (error.code != EP_ERR_CONNECTION_LOST) {
            ep_log(EP_LOG_WARN, "lane-accept-failed", EP_KV(url, l->lane.url),
                   EP_KV(reason, error.text), EP_KV(effect, "the caller uses the network"));
        }
        return NULL;
    }
    return conn;
}

/* False when the listener is closing. */
static bool begin_accept(shm_listener *l)
{
    pthread_mutex_lock(&l->lane.lock);
    l->accepting = !l->closing;
    bool go = l->accepting;
    pthread_mutex_unlock(&l->lane.lock);
    return go;
}

static void end_accept(shm_listener *l)
{
    pthread_mutex_lock(&l->lane.lock);
    l->accepting = false;
    pthread_cond_broadcast(&l->lane.changed);
    pthread_mutex_unlock(&l->lane.lock);
}

static void pause_accepting(shm_listener *l)
{
    uint64_t pause_ms = ep_lane_listener_pause_ms(&l->lane, strerror(errno));
    ep_lane_later_add(&l->loop->later, &l->retry, ep_clock_now_ns() + pause_ms * EP_NS_PER_MS);
}

static void accept_all(shm_listener *l)
{
    for (unsigned accepts = 0; !l->retry.waiting && begin_accept(l); accepts++) {
        int fd = EP_LANE_FD(accept4(l->socket, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
        bool none = fd < 0 && (errno == EAGAIN || errno == EINVAL);
        if (fd >= 0) {
            l->lane.backoff_ms = 0;
            ep_conn *conn = take_socket(l, fd);
            if (conn != NULL) {
                l->lane.on_accept(l->lane.arg, conn);
            }
        } else if (!none && errno != EINTR && errno != ECONNABORTED) {
            pause_accepting(l);
        }
        if (!none && accepts >= ACCEPTS_MAX && !l->retry.waiting) {
            ep_lane_later_add(&l->loop->later, &l->retry, ep_clock_now_ns());
        }
        end_accept(l);
        if (none) {
            return;
        }
    }
}

static void on_newcomer(shm_source *source, uint32_t events)
{
    (void)events;
    accept_all((shm_listener *)(void *)((char *)source - offsetof(shm_listener, source)));
}

static void on_retry(ep_lane_job *job)
{
    accept_all((shm_listener *)(void *)((char *)job - offsetof(shm_listener, retry)));
}

/* Ends the listener, at a point where no event can be in progress. */
static void on_end(ep_lane_job *job)
{
    shm_listener *l = (shm_listener *)(void *)((char *)job - offsetof(shm_listener, end));
    ep_shm_loop_unwatch(l->loop, l->socket);
    ep_lane_later_remove(&l->loop->later, &l->retry);
    ep_lane_fd_close(l->socket);
    ep_lane_listener_free(&l->lane);
}

static ep_err listen_on(ep_listener *base, const ep_lane_address *address, ep_error *out_error)
{
    shm_listener *l = (shm_listener *)base;
    ep_err err = ep_shm_open(address, l->lane.url, &l->path, &l->access, out_error);
    if (err == EP_OK) {
        bool others = l->access.uids_count > 0 || l->access.gids_count > 0;
        err = ep_shm_path_listen(l->path, others, &l->socket, &l->name_lock, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    l->loop = ep_shm_loop_first();
    l->source.on_event = on_newcomer;
    l->end.run = on_end;
    l->retry.run = on_retry;
    if (ep_shm_loop_watch(l->loop, l->socket, &l->source, EPOLLIN | EPOLLET) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_IO, "epoll takes no more: %s", strerror(errno));
        ep_shm_path_close(l->path, l->name_lock);
        ep_lane_fd_close(l->socket);
    }
    return err;
}

static void listener_close(ep_listener *base)
{
    shm_listener *l = (shm_listener *)base;
    pthread_mutex_lock(&l->lane.lock);
    l->closing = true;
    while (l->accepting) {
        pthread_cond_wait(&l->lane.changed, &l->lane.lock);
    }
    pthread_mutex_unlock(&l->lane.lock);
    shutdown(l->socket, SHUT_RDWR);
    ep_shm_path_close(l->path, l->name_lock);
    ep_shm_loop_post(l->loop, &l->end);
}

/* ---- dials: connect, wait for the listener's memory, check both, map it ---- */

typedef struct shm_dial {
    ep_lane_dial lane;
    shm_loop *loop;
    shm_source source;
    ep_lane_job job; /* begins the dial, and ends it when cancelled; posted with a reference */
    shm_access access;
    const char *path; /* points into the URL */
    /* the fields below are for the loop's thread */
    int socket;
    bool begun;
    bool over;
} shm_dial;

/* Errors: those of on_dial. */
static ep_err open_socket(shm_dial *d, ep_error *out_error)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof(name.sun_path), "%s", d->path);
    const int fd = EP_LANE_FD(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    d->socket = fd;
    if (fd < 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot create a socket: %s", strerror(errno));
    }
    if (connect(fd, (struct sockaddr *)&name, sizeof(name)) != 0) {
        ep_err err =
            errno == EACCES || errno == EPERM ? EP_ERR_PERMISSION_DENIED : EP_ERR_UNAVAILABLE;
        return ep_error_set(out_error, err, "cannot connect to %s: %s", d->lane.url,
                            strerror(errno));
    }
    ep_err err = ep_shm_access_check_listener(&d->access, fd, d->path, out_error);
    if (err == EP_OK && ep_shm_loop_watch(d->loop, fd, &d->source, EPOLLIN | EPOLLRDHUP) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_IO, "epoll takes no more: %s", strerror(errno));
    }
    return err == EP_OK ? EP_OK : ep_error_prefix(out_error, err, "%s", d->lane.url);
}

/* Makes a connection of what arrived on the socket. EP_ERR_CANCELLED: nothing has arrived yet. */
static ep_err take_welcome(shm_dial *d, ep_conn **out_conn, ep_error *out_error)
{
    uint64_t ring_bytes;
    int memory_fd;
    shm_memory memory = {0};
    ep_err err = ep_shm_welcome_receive(d->socket, &ring_bytes, &memory_fd, out_error);
    if (err == EP_ERR_CANCELLED) {
        return err;
    }
    if (err == EP_OK) {
        err = ep_shm_memory_adopt(memory_fd, ring_bytes, &memory, out_error);
        /* lane_fork.h does not know this descriptor: a child forked meanwhile keeps the memory, but
         * it hides no end from the peer */
        close(memory_fd);
    }
    if (err == EP_OK) { /* this takes the socket in every case */
        int socket = d->socket;
        ep_shm_loop_unwatch(d->loop, socket);
        d->socket = -1;
        err = ep_shm_conn_create(d->lane.base.ops, socket, &memory, &d->lane.limits, d->lane.url,
                                 NULL, out_conn, out_error);
    }
    return err == EP_OK ? EP_OK
                        : ep_error_prefix(out_error, err, "cannot connect to %s", d->lane.url);
}

static void over(shm_dial *d, ep_conn *conn, const ep_error *error)
{
    if (d->socket >= 0) {
        ep_shm_loop_unwatch(d->loop, d->socket);
        ep_lane_fd_close(d->socket);
    }
    d->over = true;
    ep_lane_dial_report(&d->lane, conn, error);
    ep_lane_dial_over(&d->lane);
}

static void on_welcome(shm_source *source, uint32_t events)
{
    shm_dial *d = (shm_dial *)(void *)((char *)source - offsetof(shm_dial, source));
    ep_conn *conn = NULL;
    ep_error error;
    (void)events;
    if (take_welcome(d, &conn, &error) != EP_ERR_CANCELLED) {
        over(d, conn, &error);
    }
}

static void on_posted(ep_lane_job *job)
{
    shm_dial *d = (shm_dial *)(void *)((char *)job - offsetof(shm_dial, job));
    bool cancelled = ep_lane_dial_is_cancelled(&d->lane);
    ep_error error = {.code = EP_ERR_CANCELLED};
    if (!d->over && (cancelled || (!d->begun && open_socket(d, &error) != EP_OK))) {
        over(d, NULL, &error);
    }
    d->begun = true;
    ep_lane_dial_unref(&d->lane);
}

static void post(ep_lane_dial *dial)
{
    shm_dial *d = (shm_dial *)dial;
    ep_lane_dial_ref(dial);
    if (!ep_shm_loop_post(d->loop, &d->job)) {
        ep_lane_dial_unref(dial);
    }
}

static ep_err dial_begin(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    shm_dial *d = (shm_dial *)base;
    ep_err err = ep_shm_open(address, d->lane.url, &d->path, &d->access, out_error);
    if (err == EP_OK) {
        d->lane.cancel = post;
        d->loop = ep_shm_loop_first();
        d->source.on_event = on_welcome;
        d->job.run = on_posted;
        d->socket = -1;
        post(&d->lane);
    }
    return err;
}

static const char *const schemes[] = {"shm", NULL};

const ep_lane_ops ep_shm_lane = {
    .name = "shm",
    .schemes = schemes,
    .listener_bytes = sizeof(shm_listener),
    .dial_bytes = sizeof(shm_dial),
    .listen = listen_on,
    .listener_close = listener_close,
    .dial = dial_begin,
    .conn_send = ep_shm_conn_send,
    .fini = ep_shm_fini,
};
