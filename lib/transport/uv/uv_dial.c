/* SPDX-License-Identifier: Apache-2.0 */
/* Dialling, on the worker of the future connection: addresses are tried in order until one
 * connects. */
#include <errno.h>
#include <netdb.h>
#include <string.h>

#include "transport/uv/uv_lane.h"

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
static void run(ep_lane_job *job)
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

ep_err ep_uv_dial(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    uv_dial *d = (uv_dial *)base;
    ep_err err = ep_address_read_stream(address, false, &d->to, out_error);
    if (err == EP_OK) {
        err = ep_uv_loop_workers_start(out_error);
    }
    if (err == EP_OK) {
        d->lane.cancel = kick;
        d->worker = ep_uv_loop_worker_choose();
        d->job.run = run;
        d->fd = -1;
        kick(&d->lane);
    }
    return err;
}
