/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection, the part that is alike on both sides: sends and checks frames, Hello timeout,
 * ping, goodbye, and why it ended. The server's session and the channel's connection embed a link
 * as their first member.
 *
 * Life       new (only Hello may pass) -> live -> closing (a last frame is being sent) -> closed.
 * Ownership  counted: one reference for the open connection, one per frame being sent, one for its
 *            timer, and the owner's own. The last unref releases the connection and calls
 *            ops->on_free.
 * Threads    any. No lock is held when ops are called. on_frame and on_closed: one at a time,
 *            on_closed last.
 */
#ifndef EP_RPC_RPC_LINK_H
#define EP_RPC_RPC_LINK_H

#include <pthread.h>

#include "rpc/rpc.h"
#include "rpc/rpc_frame_io.h"
#include "rpc/rpc_status.h"

typedef struct ep_rpc_link ep_rpc_link;

typedef struct ep_rpc_link_ops {
    /* A request, reply, reply_more, cancel or credit; while the link is new, any kind but goodbye.
     * The header is within its limits, the payload is not checked yet. The callee takes the
     * buffer. */
    void (*on_frame)(ep_rpc_link *link, const ep_frame *frame, ep_buffer *taken_buffer);
    /* error: the reason, never EP_OK. CLOSED when this side closed it for no other reason. */
    void (*on_closed)(ep_rpc_link *link, const ep_error *error);
    /* A frame left the send queue: there is room again. NULL allowed. */
    void (*on_sent)(ep_rpc_link *link);
    void (*on_free)(ep_rpc_link *link);
} ep_rpc_link_ops;

typedef enum ep_rpc_link_phase {
    EP_LINK_NEW,
    EP_LINK_LIVE,
    EP_LINK_CLOSING,
    EP_LINK_CLOSED
} ep_rpc_link_phase;

struct ep_rpc_link {
    const ep_rpc_link_ops *ops;
    const ep_rpc_common *common; /* outlives the link */
    ep_conn *conn;
    bool payload_crc;     /* of frames sent and received; see ep_rpc_link_set_crc */
    pthread_mutex_t lock; /* also guards fields of the owner, as declared there */
    /* private */
    ep_conn_handler handler;
    uint32_t refs;
    ep_rpc_link_phase phase;
    ep_timer timer;
    bool timer_held;        /* the timer, armed or running, owns a reference */
    uint64_t last_until_ns; /* while closing: how long the last frame may take */
    bool close_asked;
    bool has_why;
    ep_error why;
    uint32_t pings_missed;
    uint32_t slow_looks;    /* how many checks in a row found the present frame too slow */
    bool too_slow;          /* the link ended for that reason */
    uint32_t memory_looks;  /* how many checks in a row found the lane waiting for memory */
    uint64_t pinged_ns;     /* when the last ping was sent */
    bool ping_busy;         /* the ping is in the lane's queue */
    uint64_t ping_asked_ns; /* since when it is there */
    uint64_t left_ns;       /* atomic: when a frame last left the lane's queue */
    uint32_t hello_wait_ms; /* set before start to change it; hello_timeout_ms at first */
    /* atomic: when the oldest unanswered ping left that queue, or the newest if none is; 0 never */
    uint64_t ping_left_ns;
    ep_send ping;
    uint8_t ping_bytes[EP_FRAME_FIXED_BYTES];
    uint64_t received_ns;
    uint32_t sends_in_flight;
    uint32_t sends_max;
    uint64_t bytes_received;
    uint64_t bytes_sent;
    const char *peer_name; /* for spans; "" until Hello */
    /* only for the connection's callbacks: a receive span is open, with these fields */
    bool receive_traced;
    ep_trace_fields receiving;
};

/* Takes conn on success. One reference is the caller's. Starts nothing. */
void ep_rpc_link_init(ep_rpc_link *link, const ep_rpc_link_ops *ops, const ep_rpc_common *common,
                      ep_conn *taken_conn);
/* Starts receiving and the Hello timeout. */
void ep_rpc_link_start(ep_rpc_link *link);
/* Only from a callback of this link or before it starts. */
void ep_rpc_link_set_crc(ep_rpc_link *link, bool payload_crc);
/* Hello is agreed: pings begin. peer_name must live as long as the link. From now on frames are
 * allocated from pool, which must live as long (NULL: no change). */
void ep_rpc_link_go_live(ep_rpc_link *link, const char *peer_name, ep_buffer_pool *pool);

void ep_rpc_link_ref(ep_rpc_link *link);
/* False when the last reference is already gone; for owners that keep links in a list. */
bool ep_rpc_link_try_ref(ep_rpc_link *link);
void ep_rpc_link_unref(ep_rpc_link *link);

/*
 * Queues a frame. On success the link owns it, on error the caller still does. Errors:
 * RESOURCE_EXHAUSTED (queue full; on_sent tells when to try again if ep_rpc_link_sends_in_flight is
 * not 0), CLOSED, others as ep_conn_send.
 */
ep_err ep_rpc_link_send(ep_rpc_link *link, ep_rpc_out *out);
uint32_t ep_rpc_link_sends_in_flight(ep_rpc_link *link);
/* The same for a reply, which is taken also on error. A peer that does not read is disconnected. */
void ep_rpc_link_send_reply(ep_rpc_link *link, ep_rpc_out *taken_out);
/* When anything last arrived, also part of a frame; now while the lane waits for memory. */
uint64_t ep_rpc_link_heard_ns(ep_rpc_link *link);
/* Since when a ping waits in the lane's queue and nothing leaves it; 0: none waits. */
uint64_t ep_rpc_link_blocked_ns(ep_rpc_link *link);
/* Sends a ping, unless the link is not live or a ping still waits in the lane's queue. */
void ep_rpc_link_ping(ep_rpc_link *link);
/* Sends a frame without payload; drops it when it cannot be sent. */
void ep_rpc_link_send_bare(ep_rpc_link *link, const ep_frame *frame);
/* Sends taken_out (may be NULL), then closes, within EP_LINK_LAST_FRAME_MS. on_closed gets why. */
void ep_rpc_link_send_last(ep_rpc_link *link, ep_rpc_out *taken_out, const ep_error *why);
/* send_last with a goodbye frame. */
void ep_rpc_link_goodbye(ep_rpc_link *link, ep_err code, const char *text);
/* Closes immediately. The first reason given is kept. */
void ep_rpc_link_close(ep_rpc_link *link, const ep_error *why);

#define EP_LINK_LAST_FRAME_MS 250

#endif
