/* SPDX-License-Identifier: Apache-2.0 */
/* Dialing. The nng dialer serves one attempt and is freed by the reaper: its free waits for
 * callbacks of its own. */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "transport/nng/nng_lane.h"

typedef enum dial_state { DIAL_PENDING, DIAL_RUNNING, DIAL_DONE } dial_state;

typedef struct stream_dialer {
    ep_dial base;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    nng_stream_dialer *dialer;
    nng_aio *aio;
    ep_lane_limits limits;
    ep_dial_func on_dial;
    void *arg;
    ep_reap_item reap;
    bool tls;
    char url[EP_ADDRESS_BYTES];
    /* guarded by lock */
    dial_state state;
    uint32_t refs; /* its owner and the lane */
} stream_dialer;

static void dial_unref(stream_dialer *d)
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

static void dial_reap(ep_reap_item *item)
{
    stream_dialer *d = (stream_dialer *)(void *)((char *)item - offsetof(stream_dialer, reap));
    nng_aio_free(d->aio);
    nng_stream_dialer_free(d->dialer);
    dial_unref(d);
    ep_reaper_drop();
}

static void report(stream_dialer *d, nng_stream *stream, int failed)
{
    stream_conn *conn = NULL;
    ep_error error;
    if (failed != 0) {
        ep_error_set(&error, ep_nng_stream_err_from_nng(failed), "cannot connect to %s: %s%s",
                     d->url, nng_strerror(failed),
                     failed == NNG_EADDRINVAL ? ": the host's name cannot be resolved"
                                              : ep_nng_stream_advice(failed, false));
    } else if (ep_nng_stream_conn_create(stream, &d->limits, d->tls, NULL, &conn) != EP_OK) {
        ep_error_set(&error, EP_ERR_NO_MEMORY, "no memory for a connection to %s", d->url);
        nng_stream_free(stream);
    }
    if (conn != NULL) {
        d->on_dial(d->arg, &conn->base, NULL);
    } else {
        d->on_dial(d->arg, NULL, &error);
    }
}

static void dialed(void *arg)
{
    stream_dialer *d = arg;
    /* waits until ep_nng_stream_dial or ep_nng_stream_dial_release is out of the dialer */
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->state != DIAL_PENDING;
    if (!cancelled) {
        d->state = DIAL_RUNNING;
    }
    pthread_mutex_unlock(&d->lock);
    int failed = nng_aio_result(d->aio);
    nng_stream *stream = failed == 0 ? nng_aio_get_output(d->aio, 0) : NULL;
    if (!cancelled) {
        report(d, stream, failed);
    } else if (stream != NULL) {
        nng_stream_free(stream);
    }
    pthread_mutex_lock(&d->lock);
    d->state = DIAL_DONE;
    pthread_cond_broadcast(&d->changed);
    ep_reaper_push(&d->reap);
    pthread_mutex_unlock(&d->lock);
}

static ep_err nng_failed(const char *url, int failed, ep_error *out_error)
{
    ep_err err =
        failed == NNG_EADDRINVAL ? EP_ERR_INVALID_ARGUMENT : ep_nng_stream_err_from_nng(failed);
    return ep_error_set(out_error, err, "cannot dial %s: %s", url, nng_strerror(failed));
}

static ep_err dialer_open(stream_dialer *d, const ep_lane_address *address, ep_error *out_error)
{
    nng_tls_config *config = NULL;
    if (d->tls) {
        ep_err err =
            ep_nng_stream_tls_config_create(address, NNG_TLS_MODE_CLIENT, &config, out_error);
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
        nng_tls_config_free(config); /* the dialer holds it */
    }
    return failed == 0 ? EP_OK : nng_failed(address->url, failed, out_error);
}

static stream_dialer *dial_create(const ep_lane_address *address, const ep_lane_limits *limits,
                                  bool tls, ep_dial_func on_dial, void *arg)
{
    stream_dialer *d = calloc(1, sizeof(*d));
    if (d == NULL) {
        return NULL;
    }
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->base.ops = &ep_nng_stream_lane;
    d->tls = tls;
    d->limits = *limits;
    d->on_dial = on_dial;
    d->arg = arg;
    d->reap.func = dial_reap;
    d->refs = 2;
    snprintf(d->url, sizeof(d->url), "%s", address->url);
    return d;
}

ep_err ep_nng_stream_dial(const ep_lane_address *address, const ep_lane_limits *limits,
                          ep_dial_func on_dial, void *arg, ep_dial **out_dial, ep_error *out_error)
{
    bool tls;
    ep_err err = ep_nng_stream_address_check(address, &tls, out_error);
    if (err == EP_OK) {
        err = ep_lane_limits_check(limits, false, out_error);
    }
    if (err == EP_OK) {
        err = ep_reaper_start(out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    stream_dialer *d = dial_create(address, limits, tls, on_dial, arg);
    if (d == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a dial");
    }
    err = dialer_open(d, address, out_error);
    if (err != EP_OK) {
        nng_aio_free(d->aio);
        if (d->dialer != NULL) {
            nng_stream_dialer_free(d->dialer);
        }
        d->refs = 1;
        dial_unref(d);
        return err;
    }
    *out_dial = &d->base; /* on_dial may need it */
    ep_reaper_hold();
    pthread_mutex_lock(&d->lock);
    nng_stream_dialer_dial(d->dialer, d->aio);
    pthread_mutex_unlock(&d->lock);
    return EP_OK;
}

void ep_nng_stream_dial_release(ep_dial *base)
{
    stream_dialer *d = (stream_dialer *)base;
    pthread_mutex_lock(&d->lock);
    bool cancelled = d->state == DIAL_PENDING;
    if (cancelled) {
        d->state = DIAL_DONE;
        nng_stream_dialer_close(d->dialer);
    }
    while (d->state == DIAL_RUNNING) {
        pthread_cond_wait(&d->changed, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    if (cancelled) {
        ep_error error;
        ep_error_set(&error, EP_ERR_CANCELLED, "the dial to %s was cancelled", d->url);
        d->on_dial(d->arg, NULL, &error);
    }
    dial_unref(d);
}
