/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the loopback lane: one thread runs work items; one lock guards every field below. Work
 * items and connections are counted, so that a callback may release what it is called for.
 */
#ifndef EP_TRANSPORT_LOOPBACK_LANE_H
#define EP_TRANSPORT_LOOPBACK_LANE_H

#include "transport/lane_accept.h"
#include "transport/lane_common.h"
#include "transport/lane_dial.h"

/* Run by the lane thread with the lock held; may drop it for callbacks. The queue holds a reference
 * to the owner. */
typedef struct loopback_work {
    void (*run)(struct loopback_work *work);
    void (*unref)(struct loopback_work *work); /* lock held */
    struct loopback_work *next;
    uint64_t due_ns; /* while waiting for memory */
    bool queued;
    bool waiting;
} loopback_work;

typedef struct loopback_conn {
    ep_conn base;
    loopback_work work;
    struct loopback_conn *peer; /* a reference; NULL once finished */
    ep_accept_count *count;     /* NULL at the dialing end */
    char peer_url[EP_ADDRESS_BYTES];
    ep_lane_limits limits;
    ep_conn_handler handler;
    ep_send_queue queue;
    ep_error end; /* why, once ending */
    uint64_t backoff_ns;
    uint32_t refs;
    uint64_t heard_ns; /* see ep_conn_receiving */
    bool memory_wait;  /* the peer's frames wait for memory of our pool */
    bool large_allowed;
    bool started;
    bool released;
    bool ending;
    bool finished; /* on_closed is being or has been called */
} loopback_conn;

void ep_loopback_lock(void);
void ep_loopback_unlock(void);
/* Waits for a broadcast; lock held. */
void ep_loopback_wait(void);
void ep_loopback_broadcast(void);
bool ep_loopback_on_thread(void);
/* Starts the lane thread if it does not run yet; lock held. Errors: IO. */
ep_err ep_loopback_thread_start(ep_error *out_error);
/* Queues work unless it is queued; a reference to its owner must have been taken when this returns
 * true. Lock held. */
bool ep_loopback_work_push(loopback_work *work);
/* Queues work at a later time instead; as above. */
bool ep_loopback_work_push_later(loopback_work *work, uint64_t due_ns);
/* Makes waiting work due now. */
void ep_loopback_work_hurry(loopback_work *work);

/* Makes both ends; the accepted end takes the place of count in every case. Lock held. Errors:
 * NO_MEMORY. */
ep_err ep_loopback_conn_pair_create(const ep_lane_dial *dial, const ep_lane_limits *accept_limits,
                                    ep_accept_count *taken_count, loopback_conn **out_dialed,
                                    loopback_conn **out_accepted);

void ep_loopback_conn_start(ep_conn *conn, const ep_conn_handler *handler);
ep_err ep_loopback_conn_send(ep_conn *conn, ep_send *send);
void ep_loopback_conn_close(ep_conn *conn);
void ep_loopback_conn_release(ep_conn *conn);
void ep_loopback_conn_allow_large(ep_conn *conn, ep_buffer_pool *pool);
void ep_loopback_conn_receiving(ep_conn *conn, ep_conn_receiving *out_receiving);
void ep_loopback_conn_peer(ep_conn *conn, char *out_address, size_t bytes);
bool ep_loopback_conn_is_trusted(ep_conn *conn);

#endif
