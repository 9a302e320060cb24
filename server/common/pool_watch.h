/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks once a second whether memory for frames was refused, in total or in one of the shares for
 * Hello, clients and the door (rpc_server.h), and logs W pool-exhausted share clients refused 12
 * lent_bytes 939524096 limit_bytes 939524096, at most once in 10 s per share. So do readiness and
 * metrics.
 *
 * Threads    _start on the loop's thread; _check and _collect on any, until the server is
 *            destroyed.
 */
#ifndef EP_COMMON_POOL_WATCH_H
#define EP_COMMON_POOL_WATCH_H

#include "common/metrics.h"
#include "common/probes.h"
#include "common/service_loop.h"
#include "rpc/rpc.h"

typedef struct ep_pool_watch {
    ep_rpc_server *server;
    ep_loop_timer *timer;
    struct {
        uint64_t seen;   /* refusals at the last check */
        uint64_t logged; /* refusals logged */
        uint64_t logged_ns;
        uint64_t refused_ns; /* atomic: last check that found new ones; 0: never */
    } shares[EP_RPC_SHARES];
} ep_pool_watch;

/* server outlives the loop's timers. Errors: as ep_service_loop_timer_create. */
ep_err ep_pool_watch_start(ep_pool_watch *watch, ep_service_loop *loop, ep_rpc_server *server);
/* "buffers": not ok while even nodes and operators get no memory; a used-up share is only named. */
ep_probe_check ep_pool_watch_check(const ep_pool_watch *watch);
/* expertd_buffer_share_bytes, _limit_bytes and _refused_total by share. */
void ep_pool_watch_collect(const ep_pool_watch *watch, ep_metrics *metrics);

#endif
