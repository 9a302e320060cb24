/* SPDX-License-Identifier: Apache-2.0 */
/* Dialing, on the worker of the connection to be: the name's addresses are tried in order, the
 * first that takes us is it. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "transport/address.h"
#include "transport/uv/uv_lane.h"

typedef enum dial_state { DIAL_PENDING, DIAL_RUNNING, DIAL_DONE } dial_state;

typedef struct uv_dialer {
    ep_dial base;
    ep_uv_loop_worker *worker;
    ep_uv_loop_job job;
    ep_lane_limits limits;
    ep_dial_func on_dial;
    void *arg;
    char url[EP_ADDRESS_BYTES];
    uv_host_port to;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* guarded by lock */
    dial_state state;
    bool cancelled;
    uint32_t refs; /* its owner, the lane, a queued job */
    /* touched by the worker only */
    bool begun;
    bool resolving;
    bool polling; /* poll is open */
    bool over;
    uv_getaddrinfo_t resolve;
    uv_poll_t poll;
    struct addrinfo *list;
    const struct addrinfo *at;
    int fd;     /* -1: none */
    int failed; /* errno of the newest attempt; 0: connected */
} uv_dialer;

static void dial_unref(uv_dialer *d)
{
    pthread_mutex_lock(&d->lock);
    bool last = --d->refs == 0;
    pthread_mutex_unlock(&d->lock);
    if (last) {
        pthread_cond_destroy(&d->changed);
        pthread_mutex_destroy(&d->lock);
        free(d);
    }
}

static void kick(uv_dialer *d)
{
    pthread_mutex_lock(&d->lock);
    d->refs++;
    pthread_mutex_unlock(&d->lock);
    if (!ep_uv_loop_worker_push(d->worker, &d->job)) {
        dial_unref(d);
    }
}

static bool is_cancelled(uv_dialer *d)
{
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->cancelled;
    pthread_mutex_unlock(&d->lock);
    return cancelled;
}

/* The one result; nothing of the dial is open any more but fd. why: when there is no fd. */
static void report(uv_dialer *d, const ep_error *why)
{
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->cancelled;
    if (!cancelled) {
        d->state = DIAL_RUNNING;
    }
    pthread_mutex_unlock(&d->lock);
    ep_uv_conn *conn = NULL;
    ep_error error;
    if (why != NULL) {
        error = *why;
    } else if (!cancelled) {
        struct sockaddr_storage address;
        memset(&address, 0, sizeof(address));
        memcpy(&address, d->at->ai_addr, d->at->ai_addrlen);
        if (ep_uv_conn_create(d->fd, &address, &d->limits, d->worker, NULL, &conn) == EP_OK) {
            d->fd = -1;
        } else {
            ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for a connection to %s", d->url);
        }
    }
    if (d->fd >= 0) {
        close(d->fd);
    }
    if (!cancelled) {
        d->on_dial(d->arg, conn != NULL ? &conn->base : NULL, conn != NULL ? NULL : &error);
    }
    if (d->list != NULL) {
        freeaddrinfo(d->list);
    }
    d->over = true;
    pthread_mutex_lock(&d->lock);
    d->state = DIAL_DONE;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    ep_uv_loop_objects_drop();
    dial_unref(d); /* the lane's */
}

static void try_address(uv_dialer *d);

/* The attempt at d->at has ended. */
static void attempt_over(uv_dialer *d)
{
    ep_error error;
    if (d->failed == 0 || is_cancelled(d)) {
        report(d, NULL);
        return;
    }
    if (d->fd >= 0) {
        close(d->fd);
        d->fd = -1;
    }
    if (d->at->ai_next != NULL) {
        d->at = d->at->ai_next;
        try_address(d);
        return;
    }
    ep_error_set(&error, ep_uv_lane_err_from_errno(d->failed), "cannot connect to %s: %s%s", d->url,
                 strerror(d->failed), ep_address_advice(d->failed, false));
    report(d, &error);
}

static void on_poll_closed(uv_handle_t *handle)
{
    uv_dialer *d = handle->data;
    d->polling = false;
    attempt_over(d);
}

static void on_connected(uv_poll_t *poll, int status, int events)
{
    uv_dialer *d = poll->data;
    socklen_t bytes = sizeof(d->failed);
    (void)status; /* an error of the socket is told by SO_ERROR */
    (void)events;
    if (getsockopt(d->fd, SOL_SOCKET, SO_ERROR, &d->failed, &bytes) != 0) {
        d->failed = errno;
    }
    uv_poll_stop(poll);
    /* another handle watches the socket from then on */
    uv_close((uv_handle_t *)poll, on_poll_closed);
}

static void try_address(uv_dialer *d)
{
    d->fd = socket(d->at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (d->fd < 0) {
        d->failed = errno;
        attempt_over(d);
        return;
    }
    ep_uv_lane_set_options(d->fd);
    d->failed = connect(d->fd, d->at->ai_addr, d->at->ai_addrlen) == 0 ? 0 : errno;
    if (d->failed != EINPROGRESS) {
        attempt_over(d);
        return;
    }
    int failed = uv_poll_init(ep_uv_loop_worker_loop(d->worker), &d->poll, d->fd);
    if (failed != 0) {
        d->failed = -failed;
        attempt_over(d);
        return;
    }
    d->poll.data = d;
    d->polling = true;
    uv_poll_start(&d->poll, UV_WRITABLE, on_connected);
}

static void resolve_failed(uv_dialer *d, const char *reason)
{
    ep_error error;
    ep_error_set(&error, EP_ERR_UNAVAILABLE,
                 "cannot connect to %s: the host's name cannot be resolved (%s)", d->url, reason);
    report(d, &error);
}

static void on_resolved(uv_getaddrinfo_t *resolve, int status, struct addrinfo *list)
{
    uv_dialer *d = resolve->data;
    d->resolving = false;
    d->list = list;
    if (status != 0) {
        resolve_failed(d, uv_strerror(status));
    } else if (is_cancelled(d)) {
        report(d, NULL);
    } else {
        d->at = list;
        try_address(d);
    }
}

static void begin(uv_dialer *d)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST};
    d->begun = true;
    /* A numeric address, as most are, needs neither the resolver nor the threads it starts. */
    if (getaddrinfo(d->to.host[0] != 0 ? d->to.host : "127.0.0.1", d->to.port, &hints, &d->list) ==
        0) {
        d->at = d->list;
        try_address(d);
        return;
    }
    d->list = NULL;
    hints.ai_flags = AI_NUMERICSERV;
    d->resolve.data = d;
    int failed = uv_getaddrinfo(ep_uv_loop_worker_loop(d->worker), &d->resolve, on_resolved,
                                d->to.host, d->to.port, &hints);
    if (failed != 0) {
        resolve_failed(d, uv_strerror(failed));
        return;
    }
    d->resolving = true;
}

/* Begins; and ends what is under way when cancelled. */
static void run(ep_uv_loop_job *job)
{
    uv_dialer *d = (uv_dialer *)(void *)((char *)job - offsetof(uv_dialer, job));
    bool cancelled = is_cancelled(d);
    if (!d->begun && !cancelled) {
        begin(d);
    } else if (!d->begun) {
        d->begun = true;
        report(d, NULL);
    } else if (cancelled && !d->over && d->resolving) {
        uv_cancel((uv_req_t *)&d->resolve); /* when it runs already its end is waited for */
    } else if (cancelled && !d->over && d->polling && !uv_is_closing((uv_handle_t *)&d->poll)) {
        uv_close((uv_handle_t *)&d->poll, on_poll_closed);
    }
    dial_unref(d);
}

ep_err ep_uv_lane_dial(const ep_lane_address *address, const ep_lane_limits *limits,
                       ep_dial_func on_dial, void *arg, ep_dial **out_dial, ep_error *out_error)
{
    uv_host_port to;
    ep_err err = ep_uv_lane_read_url(address, &to, out_error);
    if (err == EP_OK) {
        err = ep_lane_limits_check(limits, false, out_error);
    }
    if (err == EP_OK) {
        err = ep_uv_loop_workers_start(out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    uv_dialer *d = calloc(1, sizeof(*d));
    if (d == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a dial");
    }
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->base.ops = &ep_uv_stream_lane;
    d->worker = ep_uv_loop_worker_choose();
    d->job.run = run;
    d->limits = *limits;
    d->on_dial = on_dial;
    d->arg = arg;
    d->to = to;
    d->fd = -1;
    d->refs = 2;
    snprintf(d->url, sizeof(d->url), "%s", address->url);
    ep_uv_loop_objects_hold();
    *out_dial = &d->base; /* on_dial may need it */
    kick(d);
    return EP_OK;
}

void ep_uv_lane_dial_release(ep_dial *base)
{
    uv_dialer *d = (uv_dialer *)base;
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->state == DIAL_PENDING;
    d->cancelled = cancelled;
    while (d->state == DIAL_RUNNING) {
        pthread_cond_wait(&d->changed, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    if (cancelled) {
        ep_error error;
        kick(d);
        ep_error_set(&error, EP_ERR_CANCELLED, "the dial to %s was cancelled", d->url);
        d->on_dial(d->arg, NULL, &error);
    }
    dial_unref(d);
}
