/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the uv-stream lane: tcp sockets on a few libuv loops, with the same framing as
 * nng-stream, so that each end may use either. The sockets are ours; libuv watches them, keeps the
 * timers and resolves names.
 *
 * Sending     whoever calls ep_conn_send writes to the socket itself when nobody else does and
 *             nothing waits; what the socket does not take is left to the connection's worker, and
 *             so are patient frames. So a small frame wakes no thread of ours, and a thread that
 *             computes does not do the network's work.
 * Receiving   on the worker only, which also runs on_frame. What a callback sends leaves at once,
 *             from the same thread.
 * Elsewhere   every other act on a connection is a job of its worker: libuv handles are touched
 *             there only.
 *
 * libuv 1.44.2: an error on a watched socket stops the watch and is reported as a negative status;
 * the read that follows tells which. Waking a loop costs as much as a small round trip, so a worker
 * that is awake, or the caller, is not woken.
 */
#ifndef EP_TRANSPORT_UV_LANE_H
#define EP_TRANSPORT_UV_LANE_H

#include <sys/socket.h>
#include <uv.h>

#include "transport/lane_accept.h"
#include "transport/lane_assembler.h"
#include "transport/lane_common.h"

typedef struct ep_uv_loop_worker ep_uv_loop_worker;

/* Something to do on a worker's thread. Embedded in its owner. */
typedef struct ep_uv_loop_job {
    void (*run)(struct ep_uv_loop_job *job);
    struct ep_uv_loop_job *next;
    bool queued; /* guarded by the worker's lock */
} ep_uv_loop_job;

/* uv_loop.c */
/* Starts the workers unless they run. Errors: IO, NO_MEMORY. */
ep_err ep_uv_loop_workers_start(ep_error *out_error);
/* The workers in turn. */
ep_uv_loop_worker *ep_uv_loop_worker_choose(void);
uv_loop_t *ep_uv_loop_worker_loop(ep_uv_loop_worker *worker);
/*
 * From any thread: runs job soon on the worker's thread, never inside this call. False when it was
 * queued already: it then runs once for both.
 */
bool ep_uv_loop_worker_push(ep_uv_loop_worker *worker, ep_uv_loop_job *job);
/* On the worker's thread: something came for its connections, so busy polling goes on. */
void ep_uv_loop_worker_heard(ep_uv_loop_worker *worker, uint64_t now_ns);

typedef enum ep_uv_conn_state { CONN_NEW, CONN_OPEN, CONN_ENDING, CONN_ENDED } ep_uv_conn_state;

typedef struct ep_uv_conn {
    ep_conn base;
    ep_uv_loop_worker *worker;
    ep_uv_loop_job job;
    uint32_t refs; /* atomic: its owner, the lane, a queued job */
    int fd;        /* closed by the worker when nobody is inside it */
    ep_lane_limits limits;
    ep_conn_handler handler;
    ep_accept_count *count; /* a reference; NULL at the dialing end */
    char peer[EP_ADDRESS_BYTES];
    bool large_allowed; /* atomic */
    bool memory_wait;   /* atomic */
    uint64_t heard_ns;  /* atomic; see ep_conn_receiving */
    pthread_mutex_t lock;

    /* guarded by lock */
    ep_send_queue queue;
    ep_send *sent_first; /* whole, their done() is due on the worker; by next */
    ep_send *sent_last;
    ep_error end; /* why, once closing */
    bool started;
    bool released;
    bool closing; /* nothing is written any more; also read without the lock */
    bool writing; /* a thread is inside the socket, or runs the done() of what it wrote */
    /* the socket is full, or the caller is not to write: only the worker writes */
    bool wait_writable;
    /* on_closed is called or never will be; the worker is not used any more. Written by the
     * worker */
    bool over;

    /* touched by the worker only */
    ep_uv_conn_state state;
    uv_poll_t poll;
    uv_timer_t retry; /* until memory may be there */
    unsigned handles; /* of the two, not yet closed */
    int events;       /* watched now */
    uint64_t backoff_ms;
    ep_assembler assembler;
} ep_uv_conn;

/* uv_conn.c */
/*
 * Takes the connected socket and count's place (NULL: none) in every case; address is the peer's.
 * Errors: NO_MEMORY.
 */
ep_err ep_uv_conn_create(const ep_lane_ops *lane, int taken_fd,
                         const struct sockaddr_storage *address, const ep_lane_limits *limits,
                         ep_uv_loop_worker *worker, ep_accept_count *taken_count,
                         ep_conn **out_conn);
/* From any thread: the first reason stays; the worker ends the connection soon. */
void ep_uv_conn_end(ep_uv_conn *conn, const ep_error *error);
void ep_uv_conn_ref(ep_uv_conn *conn);
void ep_uv_conn_unref(ep_uv_conn *conn);
/* From any thread, with a reference held: runs the connection's job. */
void ep_uv_conn_kick(ep_uv_conn *conn);
bool ep_uv_conn_is_closing(const ep_uv_conn *conn);
/* On the worker: watches what is to be watched now. */
void ep_uv_conn_update_events(ep_uv_conn *conn);

void ep_uv_conn_start(ep_conn *conn, const ep_conn_handler *handler);
void ep_uv_conn_close(ep_conn *conn);
void ep_uv_conn_release(ep_conn *conn);

/* uv_send.c */
ep_err ep_uv_conn_send(ep_conn *conn, ep_send *send);
/* On the worker: the socket takes bytes again. */
void ep_uv_conn_writable(ep_uv_conn *conn);
/* On the worker: done() of what was written elsewhere. */
void ep_uv_conn_report_sent(ep_uv_conn *conn);

/* uv_receive.c: on the worker */
/* failed: the socket has an error; nothing watches it any more. */
void ep_uv_conn_readable(ep_uv_conn *conn, bool failed);

/* uv_listener.c, uv_dial.c */
ep_err ep_uv_listen(const ep_lane_ops *lane, const ep_lane_address *address,
                    const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                    ep_listener **out_listener, ep_error *out_error);
void ep_uv_listener_close(ep_listener *listener);
ep_err ep_uv_dial(const ep_lane_ops *lane, const ep_lane_address *address,
                  const ep_lane_limits *limits, ep_dial_func on_dial, void *arg, ep_dial **out_dial,
                  ep_error *out_error);

/* uv_socket.c */
ep_err ep_uv_err(int errno_number);
void ep_uv_socket_set_options(int fd);
/*
 * Of a connected socket: no pacing towards a peer on this machine. There is no network to be kind
 * to, and the pacing of BBR, the default of many systems, leaves two thirds of what memory can move
 * unused.
 */
void ep_uv_socket_set_congestion(int fd, const struct sockaddr_storage *peer);

#endif
