/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the channel: the channel, its connection (a client link), and its calls.
 *
 * A call is in the table from start until it ends. It ends once, under the lock. Whoever ended it
 * then runs on_reply without the lock, or leaves that to the thread that is just delivering a
 * stream message of the call.
 *
 * Locks      channel->lock guards channel, client link and call fields. Order: channel -> link ->
 *            timers; none is held while on_reply runs.
 */
#ifndef EP_RPC_RPC_CHANNEL_H
#define EP_RPC_RPC_CHANNEL_H

#include <pthread.h>

#include "rpc/rpc.h"
#include "rpc/rpc_link.h"
#include "rpc/rpc_look.h"

#define EP_RPC_FREE_CLIENT_CALLS_MAX 1024

typedef struct ep_rpc_client_call ep_rpc_client_call;

typedef struct ep_rpc_client_link {
    ep_rpc_link link; /* first member */
    ep_rpc_channel *channel;
    uint64_t hello_id;
    bool ready;        /* only for the connection's callbacks */
    bool refused_send; /* the link refused a frame because it is closing: send no more */
    bool dead;         /* on_closed ran; dead_error says why */
    ep_error dead_error;
    ep_rpc_budget budget; /* holds peer */
    const Expertd__V1__Hello *peer;
    bool takes_answered;    /* the peer knows the flag `answered` of cancel frames */
    size_t frame_bytes_max; /* what the peer accepts */
    size_t header_bytes_max;
    uint64_t credit_bytes;  /* the most credit that the peer gives at a time */
    uint64_t granted_bytes; /* total since the connection began */
    uint64_t sent_bytes;    /* of requests */
} ep_rpc_client_link;

typedef enum ep_rpc_dial_phase {
    EP_DIAL_WAITING,
    EP_DIAL_DIALING,
    EP_DIAL_CONNECTED,
    EP_DIAL_OVER
} ep_rpc_dial_phase;

struct ep_rpc_channel {
    ep_rpc_common common;
    char *url;
    ep_tls_config tls;       /* a copy */
    ep_lane_address address; /* of url and tls */
    char *connection_class;
    bool reconnect;
    void (*on_state)(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *peer, const ep_error *error);
    void *arg;
    const ep_lane_ops *lane;
    ep_lane_limits lane_limits;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* signalled for state, and for whatever destroy waits for */
    ep_rpc_channel_state state;
    ep_error last_error; /* code EP_OK: none yet */
    bool closing;

    ep_rpc_dial_phase dial_phase;
    ep_dial *dial;   /* to be released before the next dial */
    ep_timer timer;  /* redial, or the time limit of the dial */
    uint64_t due_ns; /* of timer; a run before this time is outdated */
    uint32_t backoff_ms;
    uint32_t hello_wait_ms; /* how long the present dial waits for the answer to Hello */
    uint64_t random_state;
    ep_rpc_client_link *link;
    uint32_t links_alive;

    bool looking;    /* a thread looks at the port (rpc_look.h) */
    bool has_looked; /* look_thread must be joined */
    pthread_t look_thread;
    bool look_stop;     /* atomic: the look must end */
    uint64_t looked_ns; /* when the last look began, since the channel was last ready; 0 never */
    char look_peer[EP_ADDRESS_BYTES];
    /* result of the last look; code NULL: nothing found, or the channel was ready since */
    ep_rpc_look look;

    ep_rpc_client_call **buckets; /* by call id; a power of two */
    size_t buckets_count;
    size_t calls_count;
    ep_rpc_client_call *pending_first; /* not sent yet, oldest first */
    ep_rpc_client_call *pending_last;
    size_t pending_bytes;
    bool blocked;           /* the lane's queue is full; atomic */
    uint64_t *late_replies; /* the owner's, atomic; or NULL */
    ep_rpc_client_call *free_calls;
    uint32_t free_calls_count;
    uint32_t calls_alive; /* not in free_calls */
};

struct ep_rpc_client_call {
    ep_rpc_channel *channel;
    ep_rpc_client_call *next; /* in its bucket, or among the free calls */
    ep_rpc_client_call *pending_next;
    ep_rpc_client_call *pending_previous;
    const ep_rpc_method *method;
    ep_rpc_call_id id;
    uint16_t attempt;
    bool wait_for_ready;
    ep_rpc_reply_func on_reply;
    void *arg;
    uint64_t started_ns;
    uint64_t deadline_ns;
    uint32_t refs;   /* atomic: table, timer, threads at work on it */
    ep_rpc_out *out; /* while pending */
    size_t frame_bytes;
    ep_rpc_client_link *link; /* the link that sends or has sent it; a reference */
    ep_timer timer; /* armed from start to end: the deadline, or at once when ending_error is set */
    bool pending;
    bool sending; /* a thread is handing it to the link */
    bool sent;
    bool ended;
    bool delivering; /* on_reply runs with a stream message */
    bool abandoned;  /* ended without an answer: the peer must be told */
    bool answered;   /* tell the peer that another peer's answer is used */
    /* ended during a delivery: the delivering thread reports the end with ending_error */
    bool end_left;
    ep_error ending_error; /* code EP_OK: not decided */
    uint32_t sequence;     /* expected of the next reply */
};

/* ---- rpc_dial.c: dial, Hello, losing the connection, redial ---- */
/* hello_wait_ms for a channel's first dial, and for the first dial after a connection was ready. */
uint32_t ep_rpc_dial_first_wait_ms(const ep_rpc_channel *channel);
/* Starts the first dial, on the timer's thread. Errors: NO_MEMORY. */
ep_err ep_rpc_dial_start_locked(ep_rpc_channel *channel, ep_error *out_error);
/* Stops dialling for good, ends the connection, and waits for both. */
void ep_rpc_dial_stop(ep_rpc_channel *channel);
/* Handles the first frame of a connection, which must be the reply to our Hello. */
void ep_rpc_client_hello(ep_rpc_client_link *link, const ep_frame *frame, const ep_buffer *buffer);
/* Joins the thread of a look that is over; that thread takes no lock any more. With the lock held,
 * or when nobody else uses the channel. */
void ep_rpc_dial_join_look(ep_rpc_channel *channel);

/* ---- rpc_client_call.c: start, send, end ---- */
/* Sends the pending calls that may be sent. Never runs on_reply. No lock held. */
void ep_rpc_channel_pump(ep_rpc_channel *channel);
/* Whether ep_rpc_call_id_next has returned this id. */
bool ep_rpc_call_id_was_given(ep_rpc_call_id id);
/* The call with this id, without a new reference; NULL when it has ended. Lock held. */
ep_rpc_client_call *ep_rpc_client_call_find(ep_rpc_channel *channel, ep_rpc_call_id id);
void ep_rpc_client_call_ref(ep_rpc_client_call *call);
void ep_rpc_client_call_unref(ep_rpc_client_call *call);
/*
 * Ends a call that has not ended. Lock held. The caller gets the table's reference. It must then,
 * without the lock, call ep_rpc_client_call_deliver_end if this returned true, and drop the
 * reference. error may be NULL: success.
 */
bool ep_rpc_client_call_end(ep_rpc_client_call *call, const ep_error *error);
void ep_rpc_client_call_deliver_end(ep_rpc_client_call *call, const ep_error *error);
/* Tells the peer that nobody waits for this call, which has ended; does nothing when it was never
 * sent. No lock held. */
void ep_rpc_client_call_abandon(ep_rpc_client_call *call);
/* Ends with error every call that link carried (NULL: every call) and every pending call, except
 * those that wait for another connection. No lock held; runs on_reply. */
void ep_rpc_channel_fail_calls(ep_rpc_channel *channel, ep_rpc_client_link *link,
                               const ep_error *error);

/* ---- rpc_reply.c ---- */
/* on_frame and on_sent of a client's link. */
void ep_rpc_client_frame(ep_rpc_link *base, const ep_frame *frame, ep_buffer *taken_buffer);
void ep_rpc_client_sent(ep_rpc_link *base);

#endif
