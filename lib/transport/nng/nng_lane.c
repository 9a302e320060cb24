/* SPDX-License-Identifier: Apache-2.0 */
/* The nng-stream lane: tcp and tls+tcp through nng's stream sockets with our own framing. */
#include "transport/nng/nng_lane.h"

#include "transport/lane_fork.h"

static bool in_child; /* atomic */

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
    if (!ep_nng_tls_was_used()) {
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

ep_err ep_nng_start(ep_error *out_error)
{
    ep_err err = check_fork(out_error);
    if (err == EP_OK) {
        ep_lane_fork_hook(forget);
        err = ep_lane_worker_start(&ep_nng_reaper, out_error);
    }
    return err;
}

static const char *const schemes[] = {"tcp", "tls+tcp", NULL};

const ep_lane_ops ep_nng_stream_lane = {
    .name = "nng-stream",
    .schemes = schemes,
    .listener_bytes = sizeof(stream_listener),
    .dial_bytes = sizeof(stream_dial),
    .listen = ep_nng_listen,
    .listener_close = ep_nng_listener_close,
    .listener_renew_tls = ep_nng_listener_renew_tls,
    .dial = ep_nng_dial,
    .conn_send = ep_nng_conn_send,
    .fini = nng_lane_fini,
    .check_fork = check_fork,
};
