/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accepting. One accept is posted at a time. Out of descriptors accept fails at once, for ever: so every failure is followed
 * by a growing pause. Above connections_max a connection is closed as soon as it is accepted, so its peer knows.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/log.h"
#include "transport/nng_stream.h"

typedef struct stream_listener {
    ep_listener base;
    nng_stream_listener *listener;
    nng_aio *accept_aio;
    nng_aio *wait_aio;
    ep_lane_limits limits;
    ep_accept_func on_accept;
    void *arg;
    ep_accept_count *count;
    bool tls;
    bool closing;        /* atomic */
    char url[EP_ADDRESS_BYTES];
    /* touched only by the one callback in flight */
    uint32_t backoff_ms;
    bool refusing;       /* warned that connections_max is reached */
} stream_listener;

static void take_stream(stream_listener *l, nng_stream *stream)
{
    if (!ep_accept_count_add(l->count, l->limits.connections_max)) {
        if (!l->refusing) {
            ep_log(EP_LOG_WARN, "lane-connections-max", "listener %s connections_max %u", l->url, l->limits.connections_max);
        }
        l->refusing = true;
        nng_stream_free(stream);
        return;
    }
    l->refusing = false;
    stream_conn *conn;
    if (stream_conn_create(stream, &l->limits, l->tls, l->count, &conn) != EP_OK) {
        ep_accept_count_remove(l->count);
        nng_stream_free(stream);
        return;
    }
    l->on_accept(l->arg, &conn->base);
}

static void pause_accepting(stream_listener *l, int failed)
{
    l->backoff_ms = ep_accept_backoff_ms(l->backoff_ms, l->url, nng_strerror(failed));
    nng_sleep_aio((nng_duration)l->backoff_ms, l->wait_aio);
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
    l->backoff_ms = 0;
    take_stream(l, stream);
    nng_stream_listener_accept(l->listener, l->accept_aio);
}

static void accept_again(void *arg)
{
    stream_listener *l = arg;
    if (!__atomic_load_n(&l->closing, __ATOMIC_ACQUIRE)) {
        nng_stream_listener_accept(l->listener, l->accept_aio);
    }
}

/* Copes with a half-built listener. A stopped aio takes no new operation, so the two callbacks cannot revive each other. */
static void listener_free(stream_listener *l)
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
    ep_accept_count_unref(l->count);
    free(l);
}

static ep_err nng_failed(const char *url, int failed, ep_error *out_error)
{
    ep_err err = failed == NNG_EADDRINVAL ? EP_ERR_INVALID_ARGUMENT : stream_err_from_nng(failed);
    return ep_error_set(out_error, err, "cannot listen on %s: %s", url, nng_strerror(failed));
}

static ep_err set_options(stream_listener *l, const ep_lane_address *address, ep_error *out_error)
{
    int failed = nng_stream_listener_set_bool(l->listener, NNG_OPT_TCP_NODELAY, true);
    if (failed == 0) {
        failed = nng_stream_listener_set_bool(l->listener, NNG_OPT_TCP_KEEPALIVE, true);
    }
    if (failed != 0) {
        return nng_failed(address->url, failed, out_error);
    }
    if (l->tls) {
        nng_tls_config *config;
        ep_err err = stream_tls_config_create(address, NNG_TLS_MODE_SERVER, &config, out_error);
        if (err != EP_OK) {
            return err;
        }
        failed = nng_stream_listener_set_ptr(l->listener, NNG_OPT_TLS_CONFIG, config);
        nng_tls_config_free(config); /* the listener holds it */
        if (failed != 0) {
            return nng_failed(address->url, failed, out_error);
        }
    }
    return EP_OK;
}

static ep_err listener_open(stream_listener *l, const ep_lane_address *address, ep_error *out_error)
{
    l->count = ep_accept_count_create();
    if (l->count == NULL || nng_aio_alloc(&l->accept_aio, accepted, l) != 0 || nng_aio_alloc(&l->wait_aio, accept_again, l) != 0) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a listener");
    }
    int failed = nng_stream_listener_alloc(&l->listener, address->url);
    if (failed != 0) {
        return nng_failed(address->url, failed, out_error);
    }
    ep_err err = set_options(l, address, out_error);
    if (err != EP_OK) {
        return err;
    }
    failed = nng_stream_listener_listen(l->listener);
    if (failed != 0) {
        return nng_failed(address->url, failed, out_error);
    }
    int port = 0;
    nng_stream_listener_get_int(l->listener, NNG_OPT_TCP_BOUND_PORT, &port);
    ep_accept_url(address->url, port, l->url, sizeof(l->url));
    ep_accept_leave_descriptors(&l->limits, l->url);
    return EP_OK;
}

ep_err stream_listen(const ep_lane_address *address, const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                     ep_listener **out_listener, ep_error *out_error)
{
    bool tls;
    ep_err err = stream_address_check(address, &tls, out_error);
    if (err == EP_OK) {
        err = ep_lane_limits_check(limits, true, out_error);
    }
    if (err == EP_OK) {
        err = ep_reaper_start(out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    stream_listener *l = calloc(1, sizeof(*l));
    if (l == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a listener");
    }
    l->base.ops = &ep_nng_stream_lane;
    l->tls = tls;
    l->limits = *limits;
    l->on_accept = on_accept;
    l->arg = arg;
    err = listener_open(l, address, out_error);
    if (err != EP_OK) {
        listener_free(l);
        return err;
    }
    *out_listener = &l->base; /* on_accept may need it */
    nng_stream_listener_accept(l->listener, l->accept_aio);
    return EP_OK;
}

void stream_listener_close(ep_listener *base)
{
    stream_listener *l = (stream_listener *)base;
    __atomic_store_n(&l->closing, true, __ATOMIC_RELEASE);
    listener_free(l);
}

void stream_listener_url(ep_listener *base, char *out_url, size_t bytes)
{
    snprintf(out_url, bytes, "%s", ((stream_listener *)base)->url);
}
