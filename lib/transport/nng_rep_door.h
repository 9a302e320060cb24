/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The open door for any nng client: the REP side of nng's SP protocol, one request in one message,
 * one reply in one message. It moves whole messages and knows nothing of what is in them.
 *
 * SP over TCP is small: 8 bytes each way at the beginning ("\0SP\0", protocol), then messages of an
 * 8-byte big-endian length and a body that starts with the request id (4 bytes with the top bit
 * set; after devices, their ids come first). It is spoken here over the stream lane, not with nng's
 * REP socket: in nng 1.5.2 a connection that ends while a message is arriving leaves nng's reaper
 * waiting for ever (found with clients that abandon requests in masses), and with the reaper no
 * connection of the whole process is freed any more. On streams connections may be closed at any
 * time, each one has its own bounded queue, and requests land in our own buffers.
 *
 * A slot holds one request in work: the number of slots is the most requests at once. Further ones
 * wait in a bounded queue, and beyond that they are answered with on_overload. A caller that does
 * not read its replies loses its connection when its send queue is full. A connection that says no
 * hello, asks nothing (30 s; after a request 5 min) or sends a message more slowly than
 * EP_FRAME_RATE_MIN is closed; nng's clients dial again by themselves.
 *
 * Callbacks  run on the lane's threads and the door's, several at once for different slots, with no
 *            lock held. They must not block.
 * Threads    all calls, any thread; _stop and _close not from a callback.
 */
#ifndef EP_TRANSPORT_NNG_REP_DOOR_H
#define EP_TRANSPORT_NNG_REP_DOOR_H

#include "transport/transport.h"

typedef struct ep_nng_rep_door ep_nng_rep_door;

/* Names one request for on_gone, so that a slot's next request is never taken for it. Grows with
 * each request. */
typedef uint64_t ep_nng_rep_ticket;

/* A reply on its way. The maker keeps parts alive until done, which is called exactly once, also
 * when nobody gets it. */
typedef struct ep_nng_rep_reply {
    const ep_send_part *parts; /* at most EP_SEND_PARTS_MAX - 1 */
    size_t parts_count;
    void (*done)(void *arg);
    void *arg;
} ep_nng_rep_reply;

typedef struct ep_nng_rep_handler {
    /*
     * A request: its bytes in a 64-byte aligned buffer, or NULL with the reason when the pool has
     * none. Each request is answered exactly once with ep_nng_rep_door_reply, now or later.
     */
    void (*on_request)(void *arg, uint32_t slot, ep_nng_rep_ticket ticket, ep_buffer *taken_bytes,
                       const ep_error *error);
    /* The caller of a request that is not answered yet is gone. It is still to be answered: that
     * frees the slot. */
    void (*on_gone)(void *arg, uint32_t slot, ep_nng_rep_ticket ticket);
    /* Too many wait: makes the reply at once. False: none, the caller hears nothing. */
    bool (*on_overload)(void *arg, const ep_buffer *bytes, ep_nng_rep_reply *out_reply);
    /* A connection is being closed that took room for nothing: no hello, no request, a message byte
     * by byte. Under the door's lock, so only to be written down. */
    void (*on_turned_away)(void *arg, const char *peer, const char *why);
    void *arg;
} ep_nng_rep_handler;

typedef struct ep_nng_rep_limits {
    ep_buffer_pool *pool; /* borrowed until _close */
    /* a longer message costs its sender the connection; a little more than this is let through, so
     * that the handler can say so */
    size_t frame_bytes_max;
    uint32_t slots; /* 1 at least */
    /* for further ones who sent no request yet must go; refused where none of those is */
    uint32_t connections_max;
    uint32_t hello_timeout_ms; /* for the first 8 bytes */
} ep_nng_rep_limits;

typedef struct ep_nng_rep_stats {
    uint64_t connections;      /* now */
    uint64_t requests_held;    /* now: in slots */
    uint64_t requests_waiting; /* now */
    uint64_t overloads;        /* requests beyond the queue */
    uint64_t replies_dropped;  /* the caller was gone, or did not read */
    uint64_t sends_queued;     /* now */
    uint64_t bytes_received;
    uint64_t bytes_sent;
} ep_nng_rep_stats;

/* Starts taking requests. address: of the stream lane. Errors: as its listen. */
ep_err ep_nng_rep_door_open(const ep_lane_address *address, const ep_nng_rep_limits *limits,
                            const ep_nng_rep_handler *handler, ep_nng_rep_door **out_door,
                            ep_error *out_error);
/* The address with its real port. */
void ep_nng_rep_door_url(const ep_nng_rep_door *door, char *out_url, size_t bytes);
/* As ep_lane_ops.listener_renew_tls; not beside _stop. */
ep_err ep_nng_rep_door_renew_tls(ep_nng_rep_door *door, ep_error *out_error);
/* The address of a slot's caller; before its answer. */
void ep_nng_rep_door_peer(ep_nng_rep_door *door, uint32_t slot, char *out_address, size_t bytes);
/* Answers a slot's request. reply NULL: no answer, the slot is only freed. */
void ep_nng_rep_door_reply(ep_nng_rep_door *door, uint32_t slot, const ep_nng_rep_reply *reply);
void ep_nng_rep_door_read_stats(ep_nng_rep_door *door, ep_nng_rep_stats *out_stats);
/* No connection and no request is taken any more; those that wait are dropped. Those held are still
 * to be answered. */
void ep_nng_rep_door_stop(ep_nng_rep_door *door);
/* After _stop: waits for the answers of held requests, shortly for replies on their way, closes
 * everything and frees. NULL allowed. */
void ep_nng_rep_door_close(ep_nng_rep_door *door);

#endif
