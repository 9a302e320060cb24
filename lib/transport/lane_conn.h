/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of a connection that all lanes share: owners, sends that wait, receiving, ending. A
 * lane's connection has this as its first member and adds what moves bytes.
 *
 * Ending   closing is set, with the first reason, and nothing new is queued. The lane ends its
 *          running operations, releases what it holds (ep_lane_conn_let_go) and finishes. Without a
 *          handler, on_closed waits for start or release, which wake the lane once more.
 * Threads  any, except that calls marked for the lane come from its receiving thread, one at a
 *          time.
 */
#ifndef EP_TRANSPORT_LANE_CONN_H
#define EP_TRANSPORT_LANE_CONN_H

#include <netinet/in.h>

#include "transport/lane_accept.h"
#include "transport/lane_assembler.h"
#include "transport/lane_common.h"

typedef struct ep_lane_conn {
    ep_conn base;
    /* Tells the lane to look at the connection, because it was started, is closing, or was
     * released. The lock is held; wake may drop it meanwhile. Not called once the connection is
     * over. */
    void (*wake)(struct ep_lane_conn *conn);
    pthread_mutex_t *lock; /* own_lock, or one lock of the lane for all connections */
    pthread_mutex_t own_lock;
    ep_lane_limits limits;
    ep_conn_handler handler;
    ep_accept_count *count; /* holds a place in it; NULL at the dialling end */
    char peer[EP_ADDRESS_BYTES];
    uint32_t forks; /* ep_lane_forks of the process that created it */
    bool is_trusted;
    bool large_allowed; /* atomic */
    bool memory_wait;   /* atomic */
    uint64_t heard_ns;  /* atomic; see ep_conn_receiving */
    uint32_t refs;      /* atomic: those of the owner, the lane, and each queued job */
    bool closing;       /* atomic; set under lock */

    /* the fields below are guarded by lock */
    ep_send_queue queue;
    ep_send_queue sent; /* sent as a whole; their done() must be called */
    ep_error end;       /* the reason, once closing is set */
    bool started;
    bool released;
    bool over; /* on_closed has begun, or will never be called */

    /* the fields below are the lane's */
    ep_assembler assembler; /* for a lane that receives a stream */
    uint32_t backoff_ms;    /* the last pause because of missing memory; 0: memory is there */
} ep_lane_conn;

/* conn: zeroed memory from malloc. One reference is the owner's, one the lane's. Takes count's
 * place. */
void ep_lane_conn_init(ep_lane_conn *conn, const ep_lane_ops *lane, const ep_lane_limits *limits,
                       ep_accept_count *taken_count, void (*wake)(ep_lane_conn *conn));
/* Undoes init, before anybody else knows the connection. */
void ep_lane_conn_abandon(ep_lane_conn *conn);
/* ip: in_addr or in6_addr; port: in network byte order. */
void ep_lane_conn_set_peer(ep_lane_conn *conn, int family, const void *ip, in_port_t port);
void ep_lane_conn_ref(ep_lane_conn *conn);
void ep_lane_conn_unref(ep_lane_conn *conn);

/* ---- sending ---- */

/* Queues a prepared send. Lock held. Errors: CLOSED, RESOURCE_EXHAUSTED. */
ep_err ep_lane_conn_queue(ep_lane_conn *conn, ep_send *send);
/*
 * Lock held: this many more bytes of the queue were sent. Moves frames that are complete to `sent`,
 * except mine, which is returned.
 */
ep_send *ep_lane_conn_advance(ep_lane_conn *conn, size_t bytes, const ep_send *mine);
/* Calls done() of the frames in `sent`. */
void ep_lane_conn_report_sent(ep_lane_conn *conn);

/* ---- receiving, by the lane ---- */

/* Delivers the assembler's frames, or ends the connection on an error. EP_ASSEMBLER_MORE: receive
 * on. */
ep_assembler_step ep_lane_conn_deliver(ep_lane_conn *conn);
/* Called when a frame has its buffer. */
void ep_lane_conn_begin_frame(ep_lane_conn *conn, const ep_buffer *frame);
/* Called when there is no memory for the next frame: how long to wait. */
uint32_t ep_lane_conn_wait_ms(ep_lane_conn *conn);

/* ---- ending ---- */

bool ep_lane_conn_is_closing(const ep_lane_conn *conn);
/* Ends the connection and wakes the lane. Only the first reason is kept. */
void ep_lane_conn_end(ep_lane_conn *conn, const ep_error *error);
/* The same with the lock held, and without waking. False: it was ending already. */
bool ep_lane_conn_begin_end(ep_lane_conn *conn, const ep_error *error);
/* By the lane, when no thread is inside any more: gives back place, memory and sends. */
void ep_lane_conn_let_go(ep_lane_conn *conn);
/* By the lane, after let_go: calls on_closed and drops its reference, or waits to be woken. */
void ep_lane_conn_finish(ep_lane_conn *conn);

#endif
