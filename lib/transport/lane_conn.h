/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection as all lanes have it: who owns it, what waits to be sent, how receiving goes, how it
 * ends. A lane's connection has this as its first member and brings what moves bytes.
 *
 * Ending   closing is set, with the first reason, and nothing new is queued. The lane ends what it
 *          has under way, lets go of what it has (ep_lane_conn_let_go) and finishes. Without a
 *          handler on_closed waits for start or release, which wake the lane once more.
 * Threads  any, but what is said to be for the lane: whoever receives, one at a time.
 */
#ifndef EP_TRANSPORT_LANE_CONN_H
#define EP_TRANSPORT_LANE_CONN_H

#include <netinet/in.h>

#include "transport/lane_accept.h"
#include "transport/lane_assembler.h"
#include "transport/lane_common.h"

typedef struct ep_lane_conn {
    ep_conn base;
    /* Lock held, which it may drop meanwhile: it was started, or is closing, or was released, so
     * the lane is to look at it. Not called any more once it is over. */
    void (*wake)(struct ep_lane_conn *conn);
    pthread_mutex_t *lock; /* own_lock, unless the lane has one for all */
    pthread_mutex_t own_lock;
    ep_lane_limits limits;
    ep_conn_handler handler;
    ep_accept_count *count; /* a place in it; NULL at the dialing end */
    char peer[EP_ADDRESS_BYTES];
    uint32_t forks; /* ep_lane_forks of the process that made it */
    bool is_trusted;
    bool large_allowed; /* atomic */
    bool memory_wait;   /* atomic */
    uint64_t heard_ns;  /* atomic; see ep_conn_receiving */
    uint32_t refs;      /* atomic: its owner, the lane, and each job that is queued */
    bool closing;       /* atomic; set under lock */

    /* guarded by lock */
    ep_send_queue queue;
    ep_send_queue sent; /* whole; their done() is due */
    ep_error end;       /* why, once closing */
    bool started;
    bool released;
    bool over; /* on_closed has begun or never will be */

    /* the lane's */
    ep_assembler assembler; /* of a lane that receives a stream */
    uint32_t backoff_ms;    /* the newest pause for want of memory; 0: there is some */
} ep_lane_conn;

/* Zeroed memory of malloc. One reference is the owner's, one the lane's. Takes count's place. */
void ep_lane_conn_init(ep_lane_conn *conn, const ep_lane_ops *lane, const ep_lane_limits *limits,
                       ep_accept_count *taken_count, void (*wake)(ep_lane_conn *conn));
/* Undoes it, before anybody knows the connection. */
void ep_lane_conn_abandon(ep_lane_conn *conn);
/* ip: in_addr or in6_addr; port: in network order. */
void ep_lane_conn_set_peer(ep_lane_conn *conn, int family, const void *ip, in_port_t port);
void ep_lane_conn_ref(ep_lane_conn *conn);
void ep_lane_conn_unref(ep_lane_conn *conn);

/* ---- sending ---- */

/* A prepared send. Lock held. Errors: CLOSED, RESOURCE_EXHAUSTED. */
ep_err ep_lane_conn_queue(ep_lane_conn *conn, ep_send *send);
/*
 * Lock held: so many more bytes of the queue are on their way. Frames that are whole now go to
 * sent, but mine, which is returned.
 */
ep_send *ep_lane_conn_advance(ep_lane_conn *conn, size_t bytes, const ep_send *mine);
/* Calls done() of what is sent. */
void ep_lane_conn_report_sent(ep_lane_conn *conn);

/* ---- receiving, by the lane ---- */

/* Delivers what the assembler has, and ends the connection when that cannot be. MORE: receive on.
 */
ep_assembler_step ep_lane_conn_deliver(ep_lane_conn *conn);
/* A frame has its buffer. */
void ep_lane_conn_begin_frame(ep_lane_conn *conn, const ep_buffer *frame);
/* There is no memory for the next: how long to wait. */
uint32_t ep_lane_conn_wait_ms(ep_lane_conn *conn);

/* ---- ending ---- */

bool ep_lane_conn_is_closing(const ep_lane_conn *conn);
/* The first reason stays, and wakes the lane. */
void ep_lane_conn_end(ep_lane_conn *conn, const ep_error *error);
/* The same. Lock held; does not wake. False: there is one. */
bool ep_lane_conn_begin_end(ep_lane_conn *conn, const ep_error *error);
/* By the lane, nobody is inside any more: gives back the place, the memory and the sends. */
void ep_lane_conn_let_go(ep_lane_conn *conn);
/* The same, after it: calls on_closed and drops the lane's reference, or waits to be woken. */
void ep_lane_conn_finish(ep_lane_conn *conn);

#endif
