/* SPDX-License-Identifier: Apache-2.0 */
/* The nng-stream lane: tcp and tls+tcp through nng's stream sockets with our own framing. */
#include "transport/nng/nng_lane.h"

#include "transport/lanes.h"

/*
 * nng stays until the process ends when TLS was used: nng 1.5.2 frees the connection of a cancelled
 * accept or dial after it has completed the aio, and nng_fini has no way to wait for that (it was
 * seen to lock a destroyed mutex). Its memory then remains reachable, so leak checkers stay
 * content.
 */
void ep_nng_fini(void)
{
    ep_lane_worker_stop(&ep_nng_reaper);
    if (!ep_nng_tls_was_used()) {
        nng_fini();
    }
}

static const char *const schemes[] = {"tcp", "tls+tcp", NULL};

const ep_lane_ops ep_nng_stream_lane = {
    .name = "nng-stream",
    .schemes = schemes,
    .listen = ep_nng_listen,
    .listener_close = ep_nng_listener_close,
    .listener_renew_tls = ep_nng_listener_renew_tls,
    .dial = ep_nng_dial,
    .conn_send = ep_nng_conn_send,
};
