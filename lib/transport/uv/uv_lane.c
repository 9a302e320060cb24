/* SPDX-License-Identifier: Apache-2.0 */
/* The uv-stream lane: its listeners and dials; connections are in uv_conn.c. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <string.h>

#include "base/log.h"
#include "transport/uv/uv_lane.h"

/* ---- listeners ----
 *
 * They accept on one worker; connections go to all workers in turn. We call accept ourselves:
 * without free descriptors libuv would close waiting peers. Here a growing pause follows a failure.
 * Above connections_max a connection is closed as soon as it is accepted, so that its peer knows.
 */

#define ACCEPTS_MAX 64 /* accepts in one callback */

typedef struct uv_listener {
    ep_lane_listener lane;
    ep_uv_loop_worker *worker;
    ep_lane_job job;
    int fd;
    /* guarded by lane.lock */
    bool closing;
    bool closed;
    /* touched by the worker only */
    uv_poll_t poll;
    uv_timer_t pause;
    unsigned handles; /* how many are open */
    bool opened;
    bool ending; /* handles are being closed */
} uv_listener;

static void on_acceptable(uv_poll_t *poll, int status, int events);

static void take_socket(uv_listener *l, int taken_fd, const struct sockaddr_storage *address)
{
    ep_conn *conn;
    if (!ep_lane_listener_admit(&l->lane)) {
        ep_lane_fd_close(taken_fd);
        return;
    }
    if (ep_uv_conn_create(l->lane.base.ops, taken_fd, address, &l->lane.limits,
                          ep_uv_loop_worker_choose(), l->lane.count, &conn) == EP_OK) {
        l->lane.on_accept(l->lane.arg, conn);
    }
}

static void watch(uv_listener *l)
{
    uv_poll_start(&l->poll, UV_READABLE, on_acceptable);
}

static void on_pause_over(uv_timer_t *timer)
{
    watch(timer->data);
}

static void pause_accepting(uv_listener *l, int failed)
{
    uint32_t pause_ms = ep_lane_listener_pause_ms(&l->lane, strerror(failed));
    uv_poll_stop(&l->poll);
    uv_timer_start(&l->pause, on_pause_over, pause_ms, 0);
}

static bool is_closing(uv_listener *l)
{
    pthread_mutex_lock(&l->lane.lock);
    bool closing = l->closing;
    pthread_mutex_unlock(&l->lane.lock);
    return closing;
}

static void on_acceptable(uv_poll_t *poll, int status, int events)
{
    uv_listener *l = poll->data;
    (void)events;
    if (status < 0) {
        pause_accepting(l, -status);
        return;
    }
    for (int i = 0; i < ACCEPTS_MAX && !is_closing(l); i++) {
        struct sockaddr_storage address;
        socklen_t bytes = sizeof(address);
        int fd = EP_LANE_FD(
            accept4(l->fd, (struct sockaddr *)&address, &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (fd >= 0) {
            l->lane.backoff_ms = 0;
            take_socket(l, fd, &address);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            pause_accepting(l, errno);
            return;
        }
    }
}

static void on_handle_closed(uv_handle_t *handle)
{
    uv_listener *l = handle->data;
    if (--l->handles > 0) {
        return;
    }
    ep_lane_fd_close(l->fd);
    pthread_mutex_lock(&l->lane.lock);
    l->closed = true;
    pthread_cond_broadcast(&l->lane.changed);
    pthread_mutex_unlock(&l->lane.lock); /* the listener may be freed after this */
}

/* The listener's job: opens on its first run, closes on its last. */
static void listener_run(ep_lane_job *job)
{
    uv_listener *l = (uv_listener *)(void *)((char *)job - offsetof(uv_listener, job));
    uv_loop_t *loop = &l->worker->loop;
    if (!l->opened) {
        l->opened = true;
        uv_timer_init(loop, &l->pause);
        l->pause.data = l;
        l->handles = 1;
        int failed = uv_poll_init(loop, &l->poll, l->fd);
        if (failed == 0) {
            l->poll.data = l;
            l->handles = 2;
            watch(l);
        } else {
            ep_log(EP_LOG_ERROR, "lane-accept-failed", EP_KV(url, l->lane.url),
                   EP_KV(reason, uv_strerror(failed)), EP_KV(effect, "nobody gets in there"));
        }
    }
    /* only once: a listener closed while it was being opened runs again */
    if (is_closing(l) && !l->ending) {
        l->ending = true;
        if (l->handles == 2) {
            uv_close((uv_handle_t *)&l->poll, on_handle_closed);
        }
        uv_close((uv_handle_t *)&l->pause, on_handle_closed);
    }
}

/* Opens a listening socket on the first address that allows it. Returns -1 with errno. */
static int open_socket(const struct addrinfo *list)
{
    int fd = -1;
    for (const struct addrinfo *at = list; at != NULL && fd < 0; at = at->ai_next) {
        int on = 1;
        fd = EP_LANE_FD(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (fd < 0) {
            continue;
        }
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        if (bind(fd, at->ai_addr, at->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
            int failed = errno;
            ep_lane_fd_close(fd);
            fd = -1;
            errno = failed;
        }
    }
    return fd;
}

static int bound_port(int fd)
{
    struct sockaddr_storage address = {.ss_family = AF_UNSPEC};
    socklen_t bytes = sizeof(address);
    getsockname(fd, (struct sockaddr *)&address, &bytes);
    return ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                               : ((struct sockaddr_in *)&address)->sin_port);
}

static ep_err bind_socket(uv_listener *l, const ep_lane_address *address, ep_error *out_error)
{
    ep_host_port at;
    struct addrinfo *list = NULL;
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    ep_err err = ep_address_read_stream(address, false, &at, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (at.host[0] == 0) {
        hints.ai_family = AF_INET;
    }
    int failed = getaddrinfo(at.host[0] != 0 ? at.host : NULL, at.port, &hints, &list);
    if (failed != 0) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                            "cannot listen on %s: the host's name cannot be resolved (%s)",
                            address->url, gai_strerror(failed));
    }
    l->fd = open_socket(list);
    failed = errno;
    freeaddrinfo(list);
    if (l->fd < 0) {
        return ep_error_set(out_error, ep_address_err(failed), "cannot listen on %s: %s%s",
                            address->url, strerror(failed), ep_address_advice(failed, true));
    }
    ep_lane_listener_set_port(&l->lane, bound_port(l->fd));
    return EP_OK;
}

static ep_err listen_on(ep_listener *base, const ep_lane_address *address, ep_error *out_error)
{
    uv_listener *l = (uv_listener *)base;
    ep_err err = ep_uv_loop_workers_start(out_error);
    if (err == EP_OK) {
        err = bind_socket(l, address, out_error);
    }
    if (err == EP_OK) {
        l->worker = ep_uv_loop_worker_choose();
        l->job.run = listener_run;
        ep_uv_loop_worker_push(l->worker, &l->job);
    }
    return err;
}

static void listener_close(ep_listener *base)
{
    uv_listener *l = (uv_listener *)base;
    pthread_mutex_lock(&l->lane.lock);
    l->closing = true;
    /* Pushed under the lock: a run that sees `closing` now must be followed by this one before the
     * listener is freed. */
    ep_uv_loop_worker_push(l->worker, &l->job);
    while (!l->closed) {
        pthread_cond_wait(&l->lane.changed, &l->lane.lock);
    }
    pthread_mutex_unlock(&l->lane.lock);
    ep_lane_listener_free(&l->lane);
}

/* ---- dials, on the worker of the future connection: addresses are tried in order until one
 * connects ---- */

typedef struct uv_dial {
    ep_lane_dial lane;
    ep_uv_loop_worker *worker;
    ep_lane_job job;
    ep_host_port to;
    /* the fields below are touched by the worker only */
    bool begun;
    bool resolving;
    bool polling; /* poll is open */
    bool over;
    uv_getaddrinfo_t resolve;
    uv_poll_t poll;
    struct addrinfo *list;
    const struct addrinfo *at;
    int fd;     /* -1: none */
    int failed; /* errno of the last attempt; 0: connected */
} uv_dial;

/* its owner has cancelled, so nobody reads it */
static const ep_error cancelled_error = {.code = EP_ERR_CANCELLED};

static void kick(ep_lane_dial *dial)
{
    uv_dial *d = (uv_dial *)dial;
    ep_lane_dial_ref(dial); /* the reference of the queued job */
    if (!ep_uv_loop_worker_push(d->worker, &d->job)) {
        ep_lane_dial_unref(dial);
    }
}

/* Reports the result, once; of the dial only fd is open. why: the error if not connected. */
static void report(uv_dial *d, const ep_error *why)
{
    ep_conn *conn = NULL;
    ep_error error;
    if (why != NULL) {
        ep_lane_fd_close(d->fd);
    } else {
        struct sockaddr_storage address;
        memset(&address, 0, sizeof(address));
        memcpy(&address, d->at->ai_addr, d->at->ai_addrlen);
        if (ep_uv_conn_create(d->lane.base.ops, d->fd, &address, &d->lane.limits, d->worker, NULL,
                              &conn) != EP_OK) {
            ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for a connection to %s", d->lane.url);
            why = &error;
        }
    }
    ep_lane_dial_report(&d->lane, conn, why);
    if (d->list != NULL) {
        freeaddrinfo(d->list);
    }
    d->over = true;
    ep_lane_dial_over(&d->lane);
}

static void try_address(uv_dial *d);

/* The attempt at d->at has ended. */
static void attempt_over(uv_dial *d)
{
    ep_error error;
    if (d->failed == 0) {
        report(d, NULL);
        return;
    }
    if (ep_lane_dial_is_cancelled(&d->lane)) {
        report(d, &cancelled_error);
        return;
    }
    ep_lane_fd_close(d->fd);
    d->fd = -1;
    if (d->at->ai_next != NULL) {
        d->at = d->at->ai_next;
        try_address(d);
        return;
    }
    ep_error_set(&error, ep_address_err(d->failed), "cannot connect to %s: %s%s", d->lane.url,
                 strerror(d->failed), ep_address_advice(d->failed, false));
    report(d, &error);
}

static void on_poll_closed(uv_handle_t *handle)
{
    uv_dial *d = handle->data;
    d->polling = false;
    attempt_over(d);
}

static void on_connected(uv_poll_t *poll, int status, int events)
{
    uv_dial *d = poll->data;
    socklen_t bytes = sizeof(d->failed);
    (void)status; /* SO_ERROR tells the error of the socket */
    (void)events;
    if (getsockopt(d->fd, SOL_SOCKET, SO_ERROR, &d->failed, &bytes) != 0) {
        d->failed = errno;
    }
    /* from then on another handle watches the socket */
    uv_close((uv_handle_t *)poll, on_poll_closed);
}

static void try_address(uv_dial *d)
{
    d->fd = EP_LANE_FD(socket(d->at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (d->fd < 0) {
        d->failed = errno;
        attempt_over(d);
        return;
    }
    d->failed = connect(d->fd, d->at->ai_addr, d->at->ai_addrlen) == 0 ? 0 : errno;
    if (d->failed != EINPROGRESS) {
        attempt_over(d);
        return;
    }
    int failed = uv_poll_init(&d->worker->loop, &d->poll, d->fd);
    if (failed != 0) {
        d->failed = -failed;
        attempt_over(d);
        return;
    }
    d->poll.data = d;
    d->polling = true;
    uv_poll_start(&d->poll, UV_WRITABLE, on_connected);
}

static void resolve_failed(uv_dial *d, const char *reason)
{
    ep_error error;
    ep_error_set(&error, EP_ERR_UNAVAILABLE,
                 "cannot connect to %s: the host's name cannot be resolved (%s)", d->lane.url,
                 reason);
    report(d, &error);
}

static void on_resolved(uv_getaddrinfo_t *resolve, int status, struct addrinfo *list)
{
    uv_dial *d = resolve->data;
    d->resolving = false;
    d->list = list;
    if (status != 0) {
        resolve_failed(d, uv_strerror(status));
    } else if (ep_lane_dial_is_cancelled(&d->lane)) {
        report(d, &cancelled_error);
    } else {
        d->at = list;
        try_address(d);
    }
}

static void begin(uv_dial *d)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST};
    d->begun = true;
    /* A numeric address, the usual case, needs neither the resolver nor its threads. */
    if (getaddrinfo(d->to.host[0] != 0 ? d->to.host : "127.0.0.1", d->to.port, &hints, &d->list) ==
        0) {
        d->at = d->list;
        try_address(d);
        return;
    }
    d->list = NULL;
    hints.ai_flags = AI_NUMERICSERV;
    d->resolve.data = d;
    int failed =
        uv_getaddrinfo(&d->worker->loop, &d->resolve, on_resolved, d->to.host, d->to.port, &hints);
    if (failed != 0) {
        resolve_failed(d, uv_strerror(failed));
        return;
    }
    d->resolving = true;
}

/* The dial's job: begins it, and ends what is running when cancelled. */
static void dial_run(ep_lane_job *job)
{
    uv_dial *d = (uv_dial *)(void *)((char *)job - offsetof(uv_dial, job));
    bool cancelled = ep_lane_dial_is_cancelled(&d->lane);
    if (!d->begun && !cancelled) {
        begin(d);
    } else if (!d->begun) {
        d->begun = true;
        report(d, &cancelled_error);
    } else if (cancelled && !d->over && d->resolving) {
        uv_cancel((uv_req_t *)&d->resolve); /* if it is running already, its end is waited for */
    } else if (cancelled && !d->over && d->polling && !uv_is_closing((uv_handle_t *)&d->poll)) {
        uv_close((uv_handle_t *)&d->poll, on_poll_closed);
    }
    ep_lane_dial_unref(&d->lane);
}

static ep_err dial_begin(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    uv_dial *d = (uv_dial *)base;
    ep_err err = ep_address_read_stream(address, false, &d->to, out_error);
    if (err == EP_OK) {
        err = ep_uv_loop_workers_start(out_error);
    }
    if (err == EP_OK) {
        d->lane.cancel = kick;
        d->worker = ep_uv_loop_worker_choose();
        d->job.run = dial_run;
        d->fd = -1;
        kick(&d->lane);
    }
    return err;
}

static const char *const schemes[] = {"tcp", NULL};

const ep_lane_ops ep_uv_stream_lane = {
    .name = "uv-stream",
    .schemes = schemes,
    .listener_bytes = sizeof(uv_listener),
    .dial_bytes = sizeof(uv_dial),
    .listen = listen_on,
    .listener_close = listener_close,
    .dial = dial_begin,
    .conn_send = ep_uv_conn_send,
    .conn_unacked = ep_uv_conn_unacked,
    .fini = ep_uv_fini,
};
