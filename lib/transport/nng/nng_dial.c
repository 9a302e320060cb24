/* SPDX-License-Identifier: Apache-2.0 */
/* Dialling. An nng dialer serves one attempt and is freed by the reaper, because its free waits for
 * its own callbacks. */
#include "transport/address.h"
#include "transport/nng/nng_lane.h"

static void free_nng_objects(stream_dial *d)
{
    nng_aio_free(d->aio);
    if (d->dialer != NULL) {
        nng_stream_dialer_free(d->dialer);
    }
}

static void dial_reap(ep_lane_job *job)
{
    stream_dial *d = (stream_dial *)(void *)((char *)job - offsetof(stream_dial, reap));
    free_nng_objects(d);
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

ep_err ep_nng_dial(ep_dial *base, const ep_lane_address *address, ep_error *out_error)
{
    stream_dial *d = (stream_dial *)base;
    ep_host_port to;
    ep_err err = ep_address_read_stream(address, true, &to, out_error);
    if (err == EP_OK) {
        err = ep_nng_start(out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    d->lane.cancel = cancel;
    d->tls = address->tls != NULL;
    d->reap.run = dial_reap;
    err = dialer_open(d, address, out_error);
    if (err != EP_OK) {
        free_nng_objects(d);
        return err;
    }
    pthread_mutex_lock(&d->lane.lock);
    nng_stream_dialer_dial(d->dialer, d->aio);
    pthread_mutex_unlock(&d->lane.lock);
    return EP_OK;
}
