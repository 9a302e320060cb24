/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the server: the server, its sessions (one per connection) and its calls.
 *
 * Locks      server->lock: listeners, sessions, free calls. link.lock: the session's calls and
 *            credits. call->lock: cancel and reply of one call. Nested only in the order server ->
 *            call -> link; none is held when a callback or handler runs.
 */
#ifndef EP_RPC_RPC_SERVER_H
#define EP_RPC_RPC_SERVER_H

#include <pthread.h>

#include "health.pb-c.h"
#include "rpc/rpc.h"
#include "rpc/rpc_hosts.h"
#include "rpc/rpc_link.h"

#define EP_RPC_SERVICES_MAX 16
#define EP_RPC_LISTENERS_MAX 16
#define EP_RPC_CALL_BUCKETS 256
/* on listeners for operators; not counted in connections_max */
#define EP_RPC_ADMIN_CONNECTIONS_MAX 32
#define EP_RPC_FREE_CALLS_MAX 1024

typedef struct ep_rpc_session ep_rpc_session;
typedef struct ep_rpc_door ep_rpc_door;

/* Watchers of the built-in Health service. */
typedef struct ep_rpc_health_watcher {
    ep_rpc_call *call;
    struct ep_rpc_health_watcher *next;
} ep_rpc_health_watcher;

typedef struct ep_rpc_health {
    Expertd__V1__Health_Service service;
    pthread_mutex_t lock;
    const char *state;
    ep_rpc_health_watcher *watchers;
} ep_rpc_health;

/* A listener. Accept callbacks get it, so that a session knows which roles are admitted. */
typedef struct ep_rpc_listener {
    ep_rpc_server *server;
    unsigned roles;
    uint32_t places;       /* how many sessions of these roles all listeners together may have */
    ep_listener *listener; /* NULL while it binds and once it closes; under server->lock */
    char url[EP_ADDRESS_BYTES]; /* written once, before `listener` is */
} ep_rpc_listener;

/*
 * Where a call came from and where its reply goes: a session, or a slot of the door. It holds all
 * that a call may know of its caller, so that checks, dispatch and replies are the same code for
 * both.
 */
typedef struct ep_rpc_origin ep_rpc_origin;
typedef struct ep_rpc_origin_ops {
    /* Sends a frame of a call, in the order given. taken_out is NULL when there was no memory for
     * the frame; why is then the reason. */
    void (*reply)(ep_rpc_origin *origin, ep_rpc_out *taken_out, const ep_error *why);
    /* The caller broke the protocol. A reply still follows. */
    void (*misbehaved)(ep_rpc_origin *origin, const ep_error *why);
    /* A finished call is removed; its last reply follows. */
    void (*remove)(ep_rpc_origin *origin, ep_rpc_call *call);
    /* Checks the caller of one request, where no Hello did, and sets the role. NULL: not needed. */
    ep_err (*admit)(ep_rpc_origin *origin, const ep_rpc_call *call, const ep_frame *frame,
                    ep_error *out_error);
    /* Drops the reference of a call that is freed. */
    void (*unref)(ep_rpc_origin *origin);
} ep_rpc_origin_ops;

struct ep_rpc_origin {
    const ep_rpc_origin_ops *ops;
    ep_rpc_server *server;
    ep_rpc_role role;
    char node[EP_NODE_NAME_BYTES];
    char peer[EP_ADDRESS_BYTES];
    char label[EP_TOKEN_LABEL_BYTES]; /* label of its token; "" none */
    /* for its requests and replies: a share of the server's pool, or all of it */
    ep_buffer_pool *pool;
    size_t peer_frame_bytes_max;
    size_t peer_header_bytes_max;
    bool payload_crc;
    bool unary_only;        /* streaming methods cannot be answered here */
    bool answers_cancelled; /* only the reply tells the caller of a cancelled call */
};

struct ep_rpc_server {
    ep_rpc_common common;
    ep_rpc_server_config config; /* hello_fill, hello_free and arg; its common is not used */
    ep_lane_limits lane_limits;
    /* Shares of common.pool, so that nobody takes what others need. Nodes and operators may use
     * all. */
    ep_buffer_pool *hello_pool;                      /* for first frames, of any peer: 1/16 */
    ep_buffer_pool *client_pool;                     /* 7/8; rpc_hosts divides it */
    ep_buffer_pool *door_pool;                       /* 1/4 */
    ProtobufCService *services[EP_RPC_SERVICES_MAX]; /* fixed once the first listener exists */
    size_t services_count;
    ep_rpc_health health;
    Expertd__V1__Reflection_Service reflection;
    uint16_t draining_flag; /* atomic: flag of each reply; 0 unless the server drains */
    ep_rpc_audit audit;

    pthread_mutex_t lock;
    pthread_cond_t idle; /* a session was freed */
    bool stopping;
    ep_rpc_listener listeners[EP_RPC_LISTENERS_MAX];
    size_t listeners_count;
    ep_rpc_session *sessions;
    uint32_t sessions_count;
    ep_rpc_hosts hosts; /* for sessions of clients */
    ep_rpc_call *free_calls;
    uint32_t free_calls_count;
    ep_rpc_door *door; /* NULL: none */

    ep_rpc_server_stats stats; /* each field atomic, except that connections is sessions_count */
};

struct ep_rpc_session {
    ep_rpc_link link; /* first member */
    bool is_shm;      /* its lane is shared memory */
    /* role, node, limits: written while the link is new, only read afterwards */
    ep_rpc_origin origin;
    ep_rpc_host *host; /* of a client: the address whose memory origin.pool is; otherwise NULL */
    ep_rpc_server *server;
    ep_rpc_session *next;
    ep_rpc_session *previous;
    bool told_to_close; /* under server->lock, like next and previous */
    unsigned roles;     /* roles that its listener admits */
    bool hello_done;    /* atomic: written while the link is new, only read afterwards */
    bool hello_refused; /* atomic: the refusal is already logged and counted */
    /* the fields below are under link.lock */
    bool ended;
    uint32_t calls_count;
    ep_rpc_call *calls[EP_RPC_CALL_BUCKETS];
    uint64_t received_bytes;  /* of requests, since the connection began */
    uint64_t answered_bytes;  /* of these, those of answered requests */
    uint64_t announced_bytes; /* what the peer may send, as told to it */
};

struct ep_rpc_call {
    pthread_mutex_t lock; /* see below; lock and cancel_done survive when the call is reused */
    pthread_cond_t cancel_done;
    ep_error reply_error; /* also survives reuse, but is initialised; code EP_OK: none */

    ep_rpc_origin *origin; /* holds a reference */
    ep_rpc_call *next;     /* in its session's bucket, or in the list of free calls */
    const ep_rpc_method *method;
    ep_rpc_incoming incoming;
    uint16_t attempt;
    uint16_t method_id;
    size_t frame_bytes;
    ep_buffer *frame;
    ep_rpc_budget budget;
    Expertd__V1__CallHeader *call_header;
    uint32_t refs;

    /* the fields below are under lock */
    bool cancelled; /* also read without the lock */
    bool answered;  /* set before cancelled */
    bool finished;
    bool timer_held;  /* the timer was armed and holds a reference */
    bool stream_over; /* the peer was told the end before finish */
    bool cancel_running;
    bool is_patient; /* see ep_rpc_call_set_patient */
    pthread_t cancel_thread;
    void (*on_cancel)(void *arg, ep_rpc_call *call);
    void *cancel_arg;
    ep_timer timer; /* the deadline; armed once there is an on_cancel */
    ep_buffer *attached;
    ep_rpc_out *reply; /* of a unary call, kept until finish */
    uint32_t sequence;
    ep_trace_id trace; /* may be none */
};

/* Creates a session for an accepted connection and starts it. */
void ep_rpc_session_create(ep_rpc_server *server, unsigned roles, ep_conn *taken_conn);

/* Checks and starts a call that its origin has registered; calls: how many the origin has in flight
 * now. Always ends in finish. */
void ep_rpc_service_dispatch(ep_rpc_call *call, const ep_frame *frame, uint32_t calls);
/* The registered service with this descriptor, or NULL. */
ProtobufCService *ep_rpc_service_find(const ep_rpc_server *server,
                                      const ProtobufCServiceDescriptor *descriptor);

/* Creates a call for this request. On success it owns the buffer. The caller takes a reference of
 * origin for the call, which the call's last unref drops. NULL when out of memory. */
ep_rpc_call *ep_rpc_call_create(ep_rpc_origin *origin, const ep_frame *frame,
                                ep_buffer *taken_buffer);
void ep_rpc_call_ref(ep_rpc_call *call);
void ep_rpc_call_unref(ep_rpc_call *call);
/* The caller does not want the call any more: runs on_cancel unless the call has finished. */
void ep_rpc_call_cancelled(ep_rpc_call *call, bool answered);
/* The closure that handlers get. */
void ep_rpc_call_closure(const ProtobufCMessage *message, void *closure_data);
/* Frees a call kept for reuse. */
void ep_rpc_call_free(ep_rpc_call *call);

/* Adds the door's part. door may be NULL. */
void ep_rpc_door_add_stats(ep_rpc_door *door, ep_rpc_server_stats *stats);
ep_err ep_rpc_door_renew_tls(ep_rpc_door *door, ep_error *out_error);
/* Cancels its calls and waits for them, as for those of sessions. NULL allowed. */
void ep_rpc_door_destroy(ep_rpc_door *door);

void ep_rpc_health_init(ep_rpc_health *health);
void ep_rpc_health_fini(ep_rpc_health *health);
void ep_rpc_health_set_state(ep_rpc_health *health, const char *state);
void ep_rpc_reflection_init(Expertd__V1__Reflection_Service *reflection);

#endif
