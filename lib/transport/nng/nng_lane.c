/* SPDX-License-Identifier: Apache-2.0 */
/* The nng-stream lane: tcp and tls+tcp through nng's stream sockets with our own framing. Its
 * listeners and dials; connections are in nng_conn.c. */
#include "transport/nng/nng_lane.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/address.h"
#include "transport/lane_fork.h"

static bool in_child; /* atomic */
static bool tls_used; /* atomic */

/*
 * If TLS was used, nng stays until the process ends. nng 1.5.2 frees the connection of a cancelled
 * accept or dial after it has completed the aio, and nng_fini cannot wait for that (it was seen to
 * lock a destroyed mutex). The memory stays reachable, so leak checkers do not report it.
 */
static void nng_lane_fini(void)
{
    if (__atomic_load_n(&in_child, __ATOMIC_RELAXED)) {
        return; /* the threads belong to the parent */
    }
    ep_lane_worker_stop(&ep_nng_reaper);
    if (!__atomic_load_n(&tls_used, __ATOMIC_ACQUIRE)) {
        nng_fini();
    }
}

static void forget(void)
{
    __atomic_store_n(&in_child, true, __ATOMIC_RELAXED);
}

static ep_err check_fork(ep_error *out_error)
{
    return !__atomic_load_n(&in_child, __ATOMIC_RELAXED)
               ? EP_OK
               : ep_error_set(
                     out_error, EP_ERR_FAILED_PRECONDITION,
                     "this process was forked from one that used nng, whose threads are not "
                     "here and cannot be started again: fork before the first client of "
                     "tls+tcp:// or of LIBEXPERTD_STREAM_LANE=nng is made, or start a new "
                     "program (exec; in Python, multiprocessing's spawn)");
}

/* First step of a listener and a dial: checks the address, and starts the lane. Errors:
 * INVALID_ARGUMENT, IO; FAILED_PRECONDITION in a child of a user of nng. */
static ep_err begin(const ep_lane_address *address, ep_error *out_error)
{
    ep_host_port at;
    ep_err err = ep_address_read_stream(address, true, &at, out_error);
    if (err == EP_OK) {
        err = check_fork(out_error);
    }
    if (err == EP_OK) {
        if (address->tls != NULL) {
            __atomic_store_n(&tls_used, true, __ATOMIC_RELEASE);
        }
        ep_lane_fork_hook(forget);
        err = ep_lane_worker_start(&ep_nng_reaper, out_error);
    }
    return err;
}

/* ---- listeners ----
 *
 * One accept is posted at a time. Without free descriptors, accept fails at once and again; so a
 * growing pause follows every failure. Above connections_max a connection is closed as soon as it
 * is accepted, so that its peer knows.
 *
 * nng fixes the TLS settings of a connection when it posts the accept for it. After new settings
 * the listener connects to itself once. This uses up the accept that was posted with the old
 * settings; otherwise a caller would get it, perhaps after they have expired.
 */

typedef struct stream_listener {
    ep_lane_listener lane;
    nng_stream_listener *listener;
    nng_aio *accept_aio;
    nng_aio *wait_aio;
    bool tls;
    bool closing; /* atomic */
    /* atomic: port of our connection to ourselves, which on_accept does not get; 0 none */
    uint16_t own_port;
    ep_tls_config files; /* with tls */
} stream_listener;

static void take_stream(stream_listener *l, nng_stream *taken_stream)
{
    ep_conn *conn;
    if (!ep_lane_listener_admit(&l->lane)) {
        nng_stream_free(taken_stream);
    } else if (ep_nng_conn_create(l->lane.base.ops, taken_stream, &l->lane.limits, l->tls,
                                  l->lane.count, &conn) == EP_OK) {
        l->lane.on_accept(l->lane.arg, conn);
    }
}

/* Under the lock, which is also held to set TLS settings: nng reads them without a lock. */
static void post_accept(stream_listener *l)
{
    pthread_mutex_lock(&l->lane.lock);
    nng_stream_listener_accept(l->listener, l->accept_aio);
    pthread_mutex_unlock(&l->lane.lock);
}

static bool is_own(stream_listener *l, nng_stream *stream)
{
    uint16_t own = __atomic_load_n(&l->own_port, __ATOMIC_ACQUIRE);
    nng_sockaddr peer;
    if (own == 0 || nng_stream_get_addr(stream, NNG_OPT_REMADDR, &peer) != 0) {
        return false;
    }
    uint16_t port = peer.s_family == NNG_AF_INET6 ? peer.s_in6.sa_port : peer.s_in.sa_port;
    return ntohs(port) == own && __atomic_exchange_n(&l->own_port, 0, __ATOMIC_ACQ_REL) == own;
}

static void pause_accepting(stream_listener *l, int failed)
{
    uint32_t pause_ms = ep_lane_listener_pause_ms(&l->lane, nng_strerror(failed));
    nng_sleep_aio((nng_duration)pause_ms, l->wait_aio);
}

static void accepted(void *arg)
{
    stream_listener *l = arg;
    int failed = nng_aio_result(l->accept_aio);
    nng_stream *stream = failed == 0 ? nng_aio_get_output(l->accept_aio, 0) : NULL;
    if (__atomic_load_n(&l->closing, __ATOMIC_ACQUIRE)) {
        if (stream != NULL) {
            nng_stream_free(stream);
        }
        return;
    }
    if (failed != 0) {
        pause_accepting(l, failed);
        return;
    }
    l->lane.backoff_ms = 0;
    if (is_own(l, stream)) {
        nng_stream_free(stream);
    } else {
        take_stream(l, stream);
    }
    post_accept(l);
}

static void accept_again(void *arg)
{
    stream_listener *l = arg;
    if (!__atomic_load_n(&l->closing, __ATOMIC_ACQUIRE)) {
        post_accept(l);
    }
}

/* Also closes a half-built listener. A stopped aio takes no new operation, so the two callbacks
 * cannot restart each other. */
static void close_objects(stream_listener *l)
{
    if (l->listener != NULL) {
        nng_stream_listener_close(l->listener);
    }
    nng_aio_stop(l->accept_aio);
    nng_aio_stop(l->wait_aio);
    nng_aio_free(l->accept_aio);
    nng_aio_free(l->wait_aio);
    if (l->listener != NULL) {
        nng_stream_listener_free(l->listener);
    }
    ep_tls_config_free(&l->files);
}

static ep_err set_tls(stream_listener *l, const ep_lane_address *address, ep_error *out_error)
{
    nng_tls_config *config;
    ep_err err = ep_nng_tls_config_create(address, NNG_TLS_MODE_SERVER, &config, out_error);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&l->lane.lock);
    int failed = nng_stream_listener_set_ptr(l->listener, NNG_OPT_TLS_CONFIG, config);
    pthread_mutex_unlock(&l->lane.lock);
    nng_tls_config_free(config); /* the listener holds a reference */
    return failed == 0 ? EP_OK : ep_nng_failed(address->url, failed, true, out_error);
}

/* Best effort: if it fails, the next connection still gets the old settings. */
static void connect_to_self(stream_listener *l)
{
    const ep_lane_address plain = {.url = l->lane.url + strlen("tls+")};
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    ep_host_port at;
    struct addrinfo *to = NULL;
    union {
        struct sockaddr any;
        struct sockaddr_in v4; /* a v6 address has its port at the same place */
        struct sockaddr_in6 v6;
    } own = {.v6 = {0}};
    socklen_t own_bytes = sizeof(own);
    if (ep_address_read_stream(&plain, false, &at, NULL) != EP_OK ||
        getaddrinfo(at.host[0] != 0 ? at.host : "127.0.0.1", at.port, &hints, &to) != 0) {
        return;
    }
    own.any.sa_family = (sa_family_t)to->ai_family;
    int fd = EP_LANE_FD(socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    /* bound before it connects, since the accept may be quicker than this thread */
    if (fd >= 0 && bind(fd, &own.any, to->ai_addrlen) == 0 &&
        getsockname(fd, &own.any, &own_bytes) == 0) {
        __atomic_store_n(&l->own_port, ntohs(own.v4.sin_port), __ATOMIC_RELEASE);
        /* within this host, so it succeeds at once or fails */
        (void)connect(fd, to->ai_addr, to->ai_addrlen);
    }
    ep_lane_fd_close(fd);
    freeaddrinfo(to);
}

static ep_err listener_renew_tls(ep_listener *base, ep_error *out_error)
{
    stream_listener *l = (stream_listener *)base;
    if (!l->tls) {
        return EP_OK;
    }
    ep_err err = set_tls(l, &(ep_lane_address){.url = l->lane.url, .tls = &l->files}, out_error);
    if (err == EP_OK) {
        connect_to_self(l);
    }
    return err;
}

static ep_err listener_open(stream_listener *l, const ep_lane_address *address, ep_error *out_error)
{
    if (nng_aio_alloc(&l->accept_aio, accepted, l) != 0 ||
        nng_aio_alloc(&l->wait_aio, accept_again, l) != 0) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a listener");
    }
    int failed = nng_stream_listener_alloc(&l->listener, address->url);
    if (failed == 0) {
        failed = nng_stream_listener_set_bool(l->listener, NNG_OPT_TCP_NODELAY, true);
    }
    if (failed == 0) {
        failed = nng_stream_listener_set_bool(l->listener, NNG_OPT_TCP_KEEPALIVE, true);
    }
    if (failed != 0) {
        return ep_nng_failed(address->url, failed, true, out_error);
    }
    ep_err err = l->tls ? set_tls(l, address, out_error) : EP_OK;
    if (err != EP_OK) {
        return err;
    }
    failed = nng_stream_listener_listen(l->listener);
    if (failed != 0) {
        return ep_nng_failed(address->url, failed, true, out_error);
    }
    int port = 0;
    nng_stream_listener_get_int(l->listener, NNG_OPT_TCP_BOUND_PORT, &port);
    ep_lane_listener_set_port(&l->lane, port);
    return EP_OK;
}

static ep_err listen_on(ep_listener *base, const ep_lane_address *address, ep_error *out_error)
{
    stream_listener *l = (stream_listener *)base;
    ep_err err = begin(address, out_error);
    if (err != EP_OK) {
        return err;
    }
    l->tls = address->tls != NULL;
    err = listener_open(l, address, out_error);
    if (err == EP_OK && l->tls && ep_tls_config_copy(address->tls, &l->files) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a listener");
    }
    if (err != EP_OK) {
        close_objects(l);
        return err;
    }
    post_accept(l);
    return EP_OK;
}

static void listener_close(ep_listener *base)
{
    stream_listener *l = (stream_listener *)base;
    __atomic_store_n(&l->closing, true, __ATOMIC_RELEASE);
    close_objects(l);
    ep_lane_listener_free(&l->lane);
}

/* ---- dials: an nng dialer serves one attempt and is freed by the reaper, because its free waits
 * for its own callbacks ---- */

typedef struct stream_dial {
    ep_lane_dial lane;
    nng_stream_dialer *dialer;
    nng_aio *aio;
    ep_lane_job reap;
    bool tls;
} stream_dial;

static void free_dialer(stream_dial *d)
{
    nng_aio_free(d->aio);
    if (d->dialer != NULL) {
        nng_stream_dialer_free(d->dialer);
    }
}

static void dial_reap(ep_lane_job *job)
{
    stream_dial *d = (stream_dial *)(void *)((char *)job - offsetof(stream_dial, reap));
    free_dialer(d);
    ep_lane_dial_over(&d->lane);
}

static void dialed(void *arg)
{
    stream_dial *d = arg;
    ep_conn *conn = NULL;
    ep_error error;
    int failed = nng_aio_result(d->aio);
    if (failed != 0) {
        ep_error_set(&error, ep_nng_err(failed), "cannot connect to %s: %s%s", d->lane.url,
                     nng_strerror(failed),
                     failed == NNG_EADDRINVAL ? ": the host's name cannot be resolved"
                                              : ep_nng_advice(failed, false));
    } else if (ep_nng_conn_create(d->lane.base.ops, nng_aio_get_output(d->aio, 0), &d->lane.limits,
                                  d->tls, NULL, &conn) != EP_OK) {
        ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for a connection to %s", d->lane.url);
    }
    /* takes its lock: nobody else is in the dialer any more */
    ep_lane_dial_report(&d->lane, conn, &error);
    ep_lane_worker_push(&ep_nng_reaper, &d->reap);
}

/* Lock held, so that dialed() waits: the dialer still exists. */
static void cancel(ep_lane_dial *dial)
{
    nng_stream_dialer_close(((stream_dial *)dial)->dialer);
}

static ep_err dialer_open(stream_dial *d, const ep_lane_address *address, ep_error *out_error)
{
    nng_tls_config *config = NULL;
    if (d->tls) {
        ep_err err = ep_nng_tls_config_create(address, NNG_TLS_MODE_CLIENT, &config, out_error);
        if (err != EP_OK) {
            return err;
        }
    }
    int failed = nng_aio_alloc(&d->aio, dialed, d);
    if (failed == 0) {
        failed = nng_stream_dialer_alloc(&d->dialer, address->url);
    }
    if (failed == 0) {
        failed = nng_stream_dialer_set_bool(d->dialer, NNG_OPT_TCP_NODELAY, true);
    }
    if (failed == 0) {
        failed = nng_stream_dialer_set_bool(d->dialer, NNG_OPT_TCP_KEEPALIVE, true);
    }
    if (failed == 0 && config != NULL) {
        failed = nng_stream_dialer_set_ptr(d->dialer, NNG_OPT_TLS_CONFIG, config);
    }
    if (config != NULL) {
        nng_tls_config_free(config); /* the dialer holds a reference */
    }
    return failed == 0 ? EP_OK : ep_nng_failed(address->url, failed, false, out_error);
}

static ep_err dial_begin(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    stream_dial *d = (stream_dial *)base;
    ep_err err = begin(address, out_error);
    if (err != EP_OK) {
        return err;
    }
    d->lane.cancel = cancel;
    d->tls = address->tls != NULL;
    d->reap.run = dial_reap;
    err = dialer_open(d, address, out_error);
    if (err != EP_OK) {
        free_dialer(d);
        return err;
    }
    pthread_mutex_lock(&d->lane.lock);
    nng_stream_dialer_dial(d->dialer, d->aio);
    pthread_mutex_unlock(&d->lane.lock);
    return EP_OK;
}

static const char *const schemes[] = {"tcp", "tls+tcp", NULL};

const ep_lane_ops ep_nng_stream_lane = {
    .name = "nng-stream",
    .schemes = schemes,
    .listener_bytes = sizeof(stream_listener),
    .dial_bytes = sizeof(stream_dial),
    .listen = listen_on,
    .listener_close = listener_close,
    .listener_renew_tls = listener_renew_tls,
    .dial = dial_begin,
    .conn_send = ep_nng_conn_send,
    .fini = nng_lane_fini,
    .check_fork = check_fork,
};
