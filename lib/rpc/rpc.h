/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gRPC-like calls over a lane. protobuf-c service descriptors are the source of truth; method
 * numbers come from proto/methods.def. Unary and server-streaming calls, many in flight, replies in
 * any order, deadlines that travel as time left, cancel, canonical status codes, metadata, ping,
 * credits, exactly-once completion.
 *
 * A frame carries a protobuf header and a raw tensor section (64-byte aligned at the receiver).
 * Tensors are one ep_buffer on both sides; it is never copied here.
 *
 * Threads    every call from any thread, also from callbacks, unless said otherwise. No lock is
 *            held in callbacks.
 */
#ifndef EP_RPC_RPC_H
#define EP_RPC_RPC_H

#include <protobuf-c/protobuf-c.h>

#include "base/buffer.h"
#include "base/error.h"
#include "base/timer.h"
#include "common.pb-c.h"
#include "observe/trace.h"
#include "rpc/rpc_audit.h"
#include "rpc/rpc_credentials.h"
#include "transport/transport.h"

typedef struct ep_rpc_server ep_rpc_server;
typedef struct ep_rpc_channel ep_rpc_channel;
typedef struct ep_rpc_call ep_rpc_call; /* server side of one call */

typedef enum ep_rpc_stream { EP_RPC_UNARY, EP_RPC_SERVER_STREAM } ep_rpc_stream;

/* One row of proto/methods.def with the generated descriptor. */
typedef struct ep_rpc_method {
    uint16_t id; /* service << 8 | method */
    const ProtobufCServiceDescriptor *service;
    const ProtobufCMethodDescriptor *method;
    uint32_t method_index; /* in service->methods */
    ep_rpc_stream stream;
    ep_rpc_role role; /* who may call it; CLIENT: anybody */
    bool idempotent;
} ep_rpc_method;

/* NULL when unknown. Names as in methods.def. */
const ep_rpc_method *ep_rpc_method_by_id(uint16_t id);
const ep_rpc_method *ep_rpc_method_by_name(const char *service, const char *method);
/* All rows; count in *out_count. */
const ep_rpc_method *ep_rpc_methods(size_t *out_count);

/* Limits; fill with ep_rpc_limits_default, then change. The comments give the defaults. */
typedef struct ep_rpc_limits {
    size_t frame_bytes_max;  /* 16 MiB */
    size_t header_bytes_max; /* 64 KiB */
    size_t unpack_bytes_max; /* budget of one header's unpacking, 1 MiB */
    size_t credit_bytes; /* 64 MiB: request bytes a peer may have unanswered on one connection */
    size_t send_queue_bytes_max;       /* 96 MiB */
    uint32_t connections_max;          /* 4096 */
    uint32_t calls_per_connection_max; /* 1024 in flight */
    uint32_t hello_timeout_ms;         /* 5000 */
    uint32_t ping_ms;                  /* 500; 0: never */
    uint32_t ping_dead_count;          /* 3 */
    uint32_t redial_min_ms;            /* 10 */
    uint32_t redial_max_ms;            /* 200 */
} ep_rpc_limits;
void ep_rpc_limits_default(ep_rpc_limits *out_limits);
/* For connections to and of a coordinator, whose headers hold whole routing tables (60 layers of
 * 256 experts in two copies take about 100 KiB): raises header_bytes_max to at least 4 MiB and
 * unpack_bytes_max to at least 32 MiB. Data connections keep the small ones. */
void ep_rpc_limits_raise_for_control(ep_rpc_limits *limits);

/* What servers and channels are both configured with. Everything pointed at is borrowed for the
 * life of the server or channel, except strings, which are copied. */
typedef struct ep_rpc_common {
    ep_timer_service *timers;
    ep_buffer_pool *pool;
    ep_rpc_limits limits;
    /* the token that a channel shows in Hello; NULL or "" none. Not for servers */
    const char *token;
    /* The tokens of every role; NULL none. A server checks Hello against them; a channel shows its
     * own role's token, instead of `token`. */
    ep_rpc_credentials *credentials;
    const char *node; /* our name in Hello; "" for a client */
    const char *host; /* our host in Hello; NULL: the boot id. Up to EP_HOST_BYTES - 1 characters */
    const char *role; /* "client", "node", "operator", "coordinator" */
    uint64_t incarnation;
    bool payload_crc; /* on untrusted lanes; both ends must agree (Hello) */
} ep_rpc_common;

/* ---- server ---- */

typedef struct ep_rpc_server_config {
    ep_rpc_common common;
    /* Adds models and the like to the Hello reply. May be NULL. Strings that it sets must live
     * until hello_free is called. */
    void (*hello_fill)(void *arg, Expertd__V1__Hello *hello);
    void (*hello_free)(void *arg, Expertd__V1__Hello *hello);
    void *arg;
} ep_rpc_server_config;

typedef struct ep_rpc_server_stats {
    uint64_t connections; /* now */
    uint64_t connections_total;
    uint64_t connections_refused;        /* for a bad Hello, a wrong token or a limit */
    uint64_t refused[EP_REFUSALS_COUNT]; /* counted by ep_rpc_refusal */
    uint64_t calls_in_flight;
    uint64_t calls_total;
    uint64_t calls_failed; /* finished with an error */
    uint64_t protocol_errors;
    uint64_t bytes_received;
    uint64_t bytes_sent;
    uint64_t shm_connections;    /* part of connections: those over shared memory */
    uint64_t shm_bytes_received; /* part of bytes_received */
    uint64_t shm_bytes_sent;     /* part of bytes_sent */
    /* now: frames handed to a connection that the lane has not yet written out */
    uint64_t sends_queued;
    /* now: bytes written out that the peer's system has not received, as far as lanes can tell;
     * they are lost when we close */
    uint64_t unacked_bytes;
} ep_rpc_server_stats;

ep_err ep_rpc_server_create(const ep_rpc_server_config *config, ep_rpc_server **out_server,
                            ep_error *out_error);
/* Registers a service made with EXPERTD__V1__X__INIT. Must come before the first listen. Health and
 * Reflection are built in. */
ep_err ep_rpc_server_add_service(ep_rpc_server *server, ProtobufCService *service,
                                 ep_error *out_error);
/* May be called several times with different URLs (loopback beside tcp). roles: which roles may
 * connect there, EP_ROLES_MAIN or EP_ROLES_ADMIN. So a main listener never serves the methods of
 * operators. */
ep_err ep_rpc_server_listen(ep_rpc_server *server, const ep_lane_address *address, unsigned roles,
                            ep_error *out_error);
/*
 * All TLS listeners, including the door's, read their files again; open connections stay. May run
 * beside calls, but not beside _listen or _destroy. Errors: as ep_lane_ops.listener_renew_tls; some
 * listeners may then be renewed and others not, so call it again once the files are good.
 */
ep_err ep_rpc_server_renew_tls(ep_rpc_server *server, ep_error *out_error);
/* URL of the index-th listener with its real port; "" when there is no such listener. */
void ep_rpc_server_url(ep_rpc_server *server, size_t index, char *out_url, size_t bytes);
/*
 * "starting" | "serving" | "draining" | "degraded" (a static string): what Health answers.
 * "draining" also sets the draining flag of every reply and refuses new calls of ExpertService with
 * DRAINING. A call that was accepted just before may reach its handler after this has returned: see
 * ep_rpc_call_check_draining.
 */
void ep_rpc_server_set_state(ep_rpc_server *server, const char *state);
void ep_rpc_server_read_stats(ep_rpc_server *server, ep_rpc_server_stats *out_stats);
/* Memory of frames, in shares: "all" of it, which nodes and operators may use, then "hello",
 * "clients", "client_address" (any single address of a client) and "door". */
#define EP_RPC_SHARES 5
#define EP_RPC_SHARE_ALL 0
typedef struct ep_rpc_share {
    const char *name;               /* static */
    char address[EP_ADDRESS_BYTES]; /* client_address: the address that holds most; "" none */
    uint64_t lent_bytes;            /* client_address: lent to that address */
    uint64_t limit_bytes;           /* 0: none */
    uint64_t refusals;
} ep_rpc_share;
void ep_rpc_server_read_shares(ep_rpc_server *server, ep_rpc_share out_shares[EP_RPC_SHARES]);
/* Sends goodbye, closes listeners and connections, waits until no callback runs and every handler
 * that started has finished its call. Handlers must not need the caller's thread. NULL allowed. Not
 * from a callback. */
void ep_rpc_server_destroy(ep_rpc_server *server);

/*
 * Handlers are the generated service functions: void f(Service *s, const Request *in, Reply_Closure
 * closure, void *closure_data). closure_data is the ep_rpc_call. in and the request's tensors stay
 * valid until ep_rpc_call_finish.
 *
 *   unary:   closure(&reply, closure_data) at most once, then ep_rpc_call_finish exactly once.
 *   stream:  closure(&reply, closure_data) any number of times, then finish. After the connection
 *            has closed, closure does nothing.
 *
 * closure copies the message (packs it) before it returns. Both may be called later and from any
 * thread.
 */
typedef struct ep_rpc_incoming {
    uint64_t number; /* the id in the caller's frame */
    uint64_t received_ns;
    uint64_t deadline_ns;   /* ep_clock_now_ns() time; EP_TIME_NEVER when the caller set none */
    const uint8_t *tensors; /* tensors of the request; NULL when there are none */
    size_t tensor_bytes;
    ep_buffer_pool *pool;  /* to allocate tensors of the reply from */
    const char *peer_node; /* name as given in Hello */
} ep_rpc_incoming;
/* What came with the request; valid as long as the call. */
const ep_rpc_incoming *ep_rpc_call_incoming(const ep_rpc_call *call);
/*
 * Whether work may still begin. A call that came just before ep_rpc_server_set_state("draining")
 * has passed the server's own check. So a handler that counts its work first counts this call
 * (sequentially consistent), then asks here, and uncounts it on error. Whoever has set "draining"
 * and then reads a count of 0 knows that no work is running and none will begin. Errors: DRAINING.
 */
ep_err ep_rpc_call_check_draining(const ep_rpc_call *call, ep_error *out_error);
/* Value of a metadata key, or NULL. */
const char *ep_rpc_call_metadata(const ep_rpc_call *call, const char *key);
/* True when the caller cancelled, its deadline passed, or its connection ended: the result is
 * dropped. */
bool ep_rpc_call_is_cancelled(const ep_rpc_call *call);
/* True when it was cancelled because the caller uses another peer's answer (a hedge that lost). */
bool ep_rpc_call_is_answered(const ep_rpc_call *call);
/*
 * func runs once when the call becomes cancelled (immediately, inside this function, if it already
 * is). It never runs after finish has returned, and finish waits for it. One per call at most. Set
 * it before the call is handed to a thread that may finish it.
 */
void ep_rpc_call_on_cancel(ep_rpc_call *call, void (*func)(void *arg, ep_rpc_call *call),
                           void *arg);
/* The (last) reply may leave a little later, if that spares the finishing thread the write to the
 * network. Call before finish. */
void ep_rpc_call_set_patient(ep_rpc_call *call);
/* Tensors of the (next) reply; taken also on failure. The bytes sent are taken_tensors->bytes. Call
 * before closure or finish. */
void ep_rpc_call_attach(ep_rpc_call *call, ep_buffer *taken_tensors);
/* Ends the call and invalidates it. error may be NULL when code is EP_OK; otherwise it fills
 * message Status. */
void ep_rpc_call_finish(ep_rpc_call *call, ep_err code, const ep_error *error);
/* The trace of this call, for the spans of its reply. Call before closure and finish. */
void ep_rpc_call_set_trace(ep_rpc_call *call, ep_trace_id trace);

/* ---- client ---- */

typedef enum ep_rpc_channel_state {
    EP_CHANNEL_CONNECTING,
    EP_CHANNEL_READY,
    EP_CHANNEL_BROKEN,
    EP_CHANNEL_CLOSED
} ep_rpc_channel_state;

typedef struct ep_rpc_channel_config {
    ep_rpc_common common;
    ep_lane_address address;      /* strings and TLS config are copied */
    const char *connection_class; /* "decode", "bulk", "control" */
    bool reconnect; /* dial again with jittered back-off until the channel is closed */
    /* Reports state changes after the first CONNECTING, one at a time, on the threads of timer and
     * lane. peer: the other side's Hello when READY, else NULL. error: the reason when BROKEN, else
     * NULL. */
    void (*on_state)(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *peer, const ep_error *error);
    void *arg;
    /* NULL, or a counter that outlives the channel, to which late replies are also added,
     * atomically */
    uint64_t *late_replies;
} ep_rpc_channel_config;

/* Starts dialling and returns immediately. */
ep_err ep_rpc_channel_create(const ep_rpc_channel_config *config, ep_rpc_channel **out_channel,
                             ep_error *out_error);
/* Fails every call in flight with CANCELLED, closes, waits for callbacks, frees. NULL allowed. Not
 * from a callback. */
void ep_rpc_channel_destroy(ep_rpc_channel *channel);
ep_rpc_channel_state ep_rpc_channel_get_state(ep_rpc_channel *channel);
/* The caller believes that the peer can be reached: a channel that waits for its next dial dials
 * now. */
void ep_rpc_channel_hurry(ep_rpc_channel *channel);
/* Why the channel is not ready: the last error. When a port gave no answer, waits a few seconds at
 * most for the look at it (rpc_look.h). Not from a callback. */
void ep_rpc_channel_last_error(ep_rpc_channel *channel, ep_error *out_error);
/* Waits until READY or deadline_ns. Errors: DEADLINE_EXCEEDED with the last error's text; CLOSED;
 * without reconnect, the reason why the channel broke. Not from a callback. */
ep_err ep_rpc_channel_wait_ready(ep_rpc_channel *channel, uint64_t deadline_ns,
                                 ep_error *out_error);

/* Signs of life of the connected peer, in ep_clock_now_ns() time. */
typedef struct ep_rpc_channel_life {
    /* when anything last arrived, also part of a frame; now while the lane cannot read */
    uint64_t heard_ns;
    /* when the oldest unanswered ping left, or the newest ping if all are answered; 0 never */
    uint64_t pinged_ns;
    uint64_t blocked_ns; /* since when a ping waits to be sent and nothing is sent; 0 none waits */
} ep_rpc_channel_life;
/* False when there is no connection. */
bool ep_rpc_channel_read_life(ep_rpc_channel *channel, ep_rpc_channel_life *out_life);
/* Sends a ping now, unless one still waits to be sent. */
void ep_rpc_channel_ping(ep_rpc_channel *channel);

typedef struct ep_rpc_reply {
    /* NULL unless error is EP_OK and this is not the end of a stream */
    const ProtobufCMessage *header;
    /* 64-byte aligned; valid in the callback, longer with ep_buffer_ref(frame) */
    const uint8_t *tensors;
    size_t tensor_bytes;
    ep_buffer *frame; /* what tensors point into */
    bool end;         /* the last callback of this call */
    bool draining;    /* the peer has announced that it drains */
} ep_rpc_reply;

/*
 * Completion. Unary: exactly once, end = true. Stream: once per message with end = false, then once
 * with end = true. error is NULL on success. Codes made here: DEADLINE_EXCEEDED, CANCELLED,
 * CONNECTION_LOST, UNAVAILABLE (not ready), RESOURCE_EXHAUSTED (queue full), DATA_LOSS; others come
 * from the peer. Never runs inside ep_rpc_call_start. A deadline that passes while there is no
 * connection gives UNAVAILABLE with the last report; DEADLINE_EXCEEDED means that a connected peer
 * did not answer (or gave no credit) in time.
 * Runs on the lane's threads, and for deadlines and cancels on the timer service's. It must return
 * quickly.
 */
typedef void (*ep_rpc_reply_func)(void *arg, const ep_rpc_reply *reply, const ep_error *error);

typedef struct ep_rpc_metadata {
    const char *key;
    const char *value;
} ep_rpc_metadata;

/* Identifies a call in its frames and for ep_rpc_call_cancel. Never reused in a process; 0 is no
 * call. */
typedef uint64_t ep_rpc_call_id;
ep_rpc_call_id ep_rpc_call_id_next(void);

typedef struct ep_rpc_request {
    /* from ep_rpc_call_id_next, if the caller must know it first; 0: ep_rpc_call_start makes one */
    ep_rpc_call_id id;
    ep_trace_id trace; /* of the frame's send span; may be none */
    const ep_rpc_method *method;
    const ProtobufCMessage *header; /* packed before ep_rpc_call_start returns */
    ep_buffer *tensors;   /* may be NULL; a reference is held until the bytes are on the wire */
    uint64_t deadline_ns; /* EP_TIME_NEVER: none */
    uint16_t attempt;
    const ep_rpc_metadata *metadata;
    size_t metadata_count;
    bool wait_for_ready; /* false: fail with UNAVAILABLE at once when the channel is not READY */
} ep_rpc_request;

/* Errors (on_reply is then never called): INVALID_ARGUMENT (too large, with limit), UNAVAILABLE,
 * RESOURCE_EXHAUSTED, CLOSED, NO_MEMORY. */
ep_err ep_rpc_call_start(ep_rpc_channel *channel, const ep_rpc_request *request,
                         ep_rpc_reply_func on_reply, void *arg, ep_rpc_call_id *out_id,
                         ep_error *out_error);
/* Ends the call with CANCELLED, on the timer service's thread, unless it has already ended, and
 * tells the peer. Does nothing for an unknown id. */
void ep_rpc_call_cancel(ep_rpc_channel *channel, ep_rpc_call_id id);
/* The same, and tells the peer that another peer's answer is used, so it counts no failure. */
void ep_rpc_call_cancel_answered(ep_rpc_channel *channel, ep_rpc_call_id id);

/* Copies a reply's message to the heap, to outlive the callback. Free it with
 * protobuf_c_message_free_unpacked(m, NULL). NULL: no memory. */
ProtobufCMessage *ep_rpc_message_copy(const ProtobufCMessage *message);

/* Unary call that waits; for control paths. *out_reply is freed with
 * protobuf_c_message_free_unpacked(m, NULL). Not from a callback. */
ep_err ep_rpc_call_sync(ep_rpc_channel *channel, const char *service, const char *method,
                        const ProtobufCMessage *header, uint64_t deadline_ns,
                        ProtobufCMessage **out_reply, ep_error *out_error);

#endif
