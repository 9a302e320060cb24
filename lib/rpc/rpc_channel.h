/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the channel: the channel, its connection (a client link), and its calls.
 *
 * A call is in the table from start until it ends. It ends once, under the lock; whoever ended it
 * runs on_reply afterwards with the lock dropped, or leaves that to the thread that is delivering a
 * stream message of it just now.
 *
 * Locks      channel->lock guards channel, client link and call fields. channel -> link -> timers;
 *            never while on_reply runs.
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
    bool ready;        /* in the connection's callbacks only */
    bool refused_send; /* it is closing: stop feeding it */
    bool dead;         /* on_closed ran; dead_error says why */
    ep_error dead_error;
    ep_rpc_budget budget; /* holds peer */
    const Expertd__V1__Hello *peer;
    bool takes_answered;    /* the flag of cancel frames */
    size_t frame_bytes_max; /* what the peer accepts */
    size_t header_bytes_max;
    uint64_t credit_bytes;  /* what it gives at most at once */
    uint64_t granted_bytes; /* absolute */
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
    pthread_cond_t changed; /* state, or something destroy waits for */
    ep_rpc_channel_state state;
    ep_error last_error; /* code EP_OK: none yet */
    bool closing;

    ep_rpc_dial_phase dial_phase;
    ep_dial *dial;   /* to be released before the next one */
    ep_timer timer;  /* redial, or bound on the dial */
    uint64_t due_ns; /* of it: an earlier run is one that was overtaken */
    uint32_t backoff_ms;
    uint32_t hello_wait_ms; /* of the dial at hand: until Hello is answered */
    uint64_t random_state;
    ep_rpc_client_link *link;
    uint32_t links_alive;

    bool looking;    /* a thread looks at the port */
    bool has_looked; /* look_thread is to be joined */
    pthread_t look_thread;
    bool look_stop;     /* atomic: it is to end */
    uint64_t looked_ns; /* when it last began, since the channel was ready; 0 never */
    char look_peer[EP_ADDRESS_BYTES];
    /* what the last one found; code NULL: nothing, or the channel was ready since */
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
    ep_rpc_client_link *link; /* where it was or is being sent; a reference */
    ep_timer timer; /* armed from start to end: the deadline, or at once when ending_error is set */
    bool pending;
    bool sending; /* a thread hands it to the link */
    bool sent;
    bool ended;
    bool delivering;       /* on_reply runs with a stream message */
    bool abandoned;        /* ended without an answer: the peer is to be told */
    bool answered;         /* told so: the caller uses another peer's answer */
    bool end_left;         /* ended while delivering: that thread runs the end with ending_error */
    ep_error ending_error; /* code EP_OK: none decided */
    uint32_t sequence;     /* of the next reply */
};

/* ---- rpc_dial.c: connecting, Hello, losing the connection, connecting again ---- */
/* hello_wait_ms of a channel's first dial, and of the first after a connection was ready. */
uint32_t ep_rpc_dial_first_wait_ms(const ep_rpc_channel *channel);
/* Everything the first dial needs that may fail. Errors: NO_MEMORY. */
ep_err ep_rpc_dial_prepare(ep_rpc_channel *channel, ep_error *out_error);
/* Starts the first dial, on the timer's thread. */
void ep_rpc_dial_start(ep_rpc_channel *channel);
/* Ends dialling for good and the connection, and waits for both. */
void ep_rpc_dial_stop(ep_rpc_channel *channel);
/* The first frame of a connection, which is to be the reply to our Hello. */
void ep_rpc_client_hello(ep_rpc_client_link *link, const ep_frame *frame, const ep_buffer *buffer);
/* Ends the thread of a look that is over, which takes no lock any more. Lock held, or nobody else
 * there. */
void ep_rpc_dial_join_look(ep_rpc_channel *channel);

/* ---- rpc_client_call.c: start, send, end ---- */
/* Sends what may be sent. Never runs on_reply. No lock held. */
void ep_rpc_channel_pump(ep_rpc_channel *channel);
/* ep_rpc_call_id_next has given it out. */
bool ep_rpc_call_id_was_given(ep_rpc_call_id id);
/* The call with this id, without a reference; NULL when it ended. Lock held. */
ep_rpc_client_call *ep_rpc_client_call_find(ep_rpc_channel *channel, ep_rpc_call_id id);
void ep_rpc_client_call_ref(ep_rpc_client_call *call);
void ep_rpc_client_call_unref(ep_rpc_client_call *call);
/*
 * Ends a call that has not ended. Lock held. The table's reference goes to the caller, who then,
 * without the lock, calls client_call_deliver_end if this returned true and drops the reference.
 * error may be NULL: success.
 */
bool ep_rpc_client_call_end(ep_rpc_client_call *call, const ep_error *error);
void ep_rpc_client_call_deliver_end(ep_rpc_client_call *call, const ep_error *error);
/* Tells the peer that nobody waits for this call, which ended; no-op when it was never sent. No
 * lock held. */
void ep_rpc_client_call_abandon(ep_rpc_client_call *call);
/* Ends with error every call that link carried (NULL: every call) and, unless they wait for another
 * connection, every pending one. No lock held; runs on_reply. */
void ep_rpc_channel_fail_calls(ep_rpc_channel *channel, ep_rpc_client_link *link,
                               const ep_error *error);

/* ---- rpc_reply.c ---- */
/* on_frame and on_sent of a client's link. */
void ep_rpc_client_frame(ep_rpc_link *base, const ep_frame *frame, ep_buffer *taken_buffer);
void ep_rpc_client_sent(ep_rpc_link *base);

#endif
