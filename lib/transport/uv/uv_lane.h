/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the uv-stream lane: tcp sockets on a few libuv loops, with the same framing as
 * nng-stream, so that each end may use either. We own the sockets; libuv watches them, keeps the
 * timers and resolves names.
 *
 * Sending     the caller of ep_conn_send writes to the socket itself if no other thread does and
 *             nothing waits. The connection's worker writes what the socket does not take, and
 *             patient frames. So a small frame wakes no thread of ours, and a thread that computes
 *             does not do the network's work.
 * Receiving   only on the worker, which also runs on_frame. What a callback sends leaves at once,
 *             from the same thread.
 * Elsewhere   everything else on a connection is a job of its worker, because only the worker may
 *             touch libuv handles.
 *
 * libuv 1.44.2: an error on a watched socket stops the watch and is reported as a negative status;
 * the read that follows tells which error it was. Waking a loop costs as much as a small round
 * trip, so a worker that is awake, or that is the caller, is not woken.
 */
#ifndef EP_TRANSPORT_UV_LANE_H
#define EP_TRANSPORT_UV_LANE_H

#include <sys/socket.h>
#include <uv.h>

#include "transport/address.h"
#include "transport/lane_accept.h"
#include "transport/lane_dial.h"
#include "transport/lane_fork.h"
#include "transport/lane_worker.h"

/* uv_loop.c */
typedef struct ep_uv_loop_worker {
    /* for its thread only */
    uv_loop_t loop;
    /* when its connections last received something, so that busy polling goes on */
    uint64_t heard_ns;
    /* private */
    uv_async_t wake;
    uv_prepare_t before;
    uv_check_t after;
    uv_idle_t spin; /* while active the loop does not sleep */
    pthread_t thread;
    uint32_t spins;
    pthread_mutex_t lock;
    /* guarded by lock */
    ep_lane_jobs jobs;
    bool sleeping; /* a push must wake the loop */
    bool stopping;
} ep_uv_loop_worker;

/* Starts the workers unless they run. Errors: IO, NO_MEMORY. */
ep_err ep_uv_loop_workers_start(ep_error *out_error);
/* Returns the workers in turn. */
ep_uv_loop_worker *ep_uv_loop_worker_choose(void);
/*
 * From any thread: runs job soon on the worker's thread, never inside this call. False when it was
 * queued already; it then runs only once.
 */
bool ep_uv_loop_worker_push(ep_uv_loop_worker *worker, ep_lane_job *job);
/* The number of busy polls so far. */
uint64_t ep_uv_polls(void);
/* fini of ep_lane_ops: ends the workers. */
void ep_uv_fini(void);

/* uv_conn.c */
/*
 * Takes the connected socket and the place of count (NULL: none), also on error; address is the
 * peer's. Errors: NO_MEMORY.
 */
ep_err ep_uv_conn_create(const ep_lane_ops *lane, int taken_fd,
                         const struct sockaddr_storage *address, const ep_lane_limits *limits,
                         ep_uv_loop_worker *worker, ep_accept_count *taken_count,
                         ep_conn **out_conn);
ep_err ep_uv_conn_send(ep_conn *conn, ep_send *send);
uint64_t ep_uv_conn_unacked(ep_conn *conn);

#endif
