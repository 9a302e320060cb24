/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The door for any nng client: the REP side of nng's SP protocol, one request in one message, one
 * reply in one message. It moves whole messages and does not know their content.
 *
 * SP over TCP is simple: 8 bytes each way at the beginning ("\0SP\0", protocol), then messages with
 * an 8-byte big-endian length and a body that starts with the request id (4 bytes with the top bit
 * set; devices put their ids before it). It is implemented over the stream lane, not with nng's REP
 * socket. In nng 1.5.2 a connection that ends while a message arrives can block nng's reaper for
 * ever (seen with many clients that abandon requests), and then no connection of the process is
 * freed any more. On streams, connections can be closed at any time, each has its own bounded
 * queue, and requests are received in our own buffers.
 *
 * A slot holds one request in work, so the number of slots limits the requests in work. More
 * requests wait in a bounded queue; beyond that they are answered with on_overload. A caller that
 * does not read its replies is disconnected when its send queue is full. A connection is also
 * closed if it sends no greeting, asks nothing (for 30 s; 5 min after a request), or sends a
 * message more slowly than EP_FRAME_RATE_MIN. nng's clients dial again by themselves.
 *
 * Callbacks  run on the threads of the lane and the door, concurrently for different slots, with no
 *            lock held. They must not block.
 * Threads    all calls from any thread; _stop and _close not from a callback.
 */
#ifndef EP_TRANSPORT_NNG_REP_DOOR_H
#define EP_TRANSPORT_NNG_REP_DOOR_H

#include "transport/transport.h"

typedef struct ep_nng_rep_door ep_nng_rep_door;

/* Identifies one request for on_gone, so that a slot's next request is never mistaken for it. Grows
 * with each request. */
typedef uint64_t ep_nng_rep_ticket;

/* A reply. Its creator keeps parts alive until done, which is called exactly once, also when nobody
 * gets the reply. */
typedef struct ep_nng_rep_reply {
    const ep_send_part *parts; /* at most EP_SEND_PARTS_MAX - 1 */
    size_t parts_count;
    void (*done)(void *arg);
    void *arg;
} ep_nng_rep_reply;

typedef struct ep_nng_rep_handler {
    /*
     * A request: its bytes in a 64-byte aligned buffer; or NULL with the reason, valid until the
     * answer, when the pool has no buffer. Each request must be answered exactly once with
     * ep_nng_rep_door_reply, now or later.
     */
    void (*on_request)(void *arg, uint32_t slot, ep_nng_rep_ticket ticket, ep_buffer *taken_bytes,
                       const ep_error *error);
    /* The caller of a request that is not answered yet has gone. It must still be answered, which
     * frees the slot. */
    void (*on_gone)(void *arg, uint32_t slot, ep_nng_rep_ticket ticket);
    /* Too many requests wait: creates a reply at once. False: the caller gets no answer. */
    bool (*on_overload)(void *arg, const ep_buffer *bytes, ep_nng_rep_reply *out_reply);
    /* A connection is being closed because it used its place for nothing: no greeting, no request,
     * or a message byte by byte. Called under the door's lock, so it may only record this. */
    void (*on_turned_away)(void *arg, const char *peer, const char *why);
    void *arg;
} ep_nng_rep_handler;

typedef struct ep_nng_rep_limits {
    ep_buffer_pool *pool; /* borrowed until _close */
    /* the sender of a longer message is disconnected; slightly longer ones are accepted, so that
     * the handler can refuse them with a reason */
    size_t frame_bytes_max;
    uint32_t slots; /* at least 1 */
    /* beyond it, a new connection replaces one without a request; if there is none, it is
     * refused */
    uint32_t connections_max;
    uint32_t hello_timeout_ms; /* for the greeting, the first 8 bytes */
} ep_nng_rep_limits;

typedef struct ep_nng_rep_stats {
    uint64_t connections;      /* now */
    uint64_t requests_held;    /* requests now in slots */
    uint64_t requests_waiting; /* now */
    uint64_t replies_dropped;  /* the caller was gone, or did not read */
    uint64_t sends_queued;     /* now */
    uint64_t bytes_received;
    uint64_t bytes_sent;
} ep_nng_rep_stats;

/* Starts accepting requests. address: of the stream lane. Errors: as its listen. */
ep_err ep_nng_rep_door_open(const ep_lane_address *address, const ep_nng_rep_limits *limits,
                            const ep_nng_rep_handler *handler, ep_nng_rep_door **out_door,
                            ep_error *out_error);
/* The address with its real port; only before _stop. */
void ep_nng_rep_door_url(const ep_nng_rep_door *door, char *out_url, size_t bytes);
/* As ep_lane_ops.listener_renew_tls; not concurrent with _stop. */
ep_err ep_nng_rep_door_renew_tls(ep_nng_rep_door *door, ep_error *out_error);
/* The address of the caller of a slot's request; only before its answer. */
void ep_nng_rep_door_peer(ep_nng_rep_door *door, uint32_t slot, char *out_address, size_t bytes);
/* Answers a slot's request. reply NULL: only frees the slot. */
void ep_nng_rep_door_reply(ep_nng_rep_door *door, uint32_t slot, const ep_nng_rep_reply *reply);
void ep_nng_rep_door_read_stats(ep_nng_rep_door *door, ep_nng_rep_stats *out_stats);
/* Accepts no more connections and requests; drops waiting ones. Requests in slots must still be
 * answered. */
void ep_nng_rep_door_stop(ep_nng_rep_door *door);
/* After _stop: waits for the answers of requests in slots and shortly for replies being sent, then
 * closes and frees everything. NULL allowed. */
void ep_nng_rep_door_close(ep_nng_rep_door *door);

#endif
