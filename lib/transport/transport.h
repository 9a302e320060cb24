/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lane moves whole frames between two peers and knows no messages. This header is the porting
 * guide: a new lane (shared memory, RDMA, a simulator) fills one ep_lane_ops, with objects that
 * begin with those of lane_conn.h, lane_dial.h and lane_accept.h, makes descriptors and threads as
 * lane_fork.h says, and runs tests/contract/transport; nothing else changes.
 *
 * Frames     A frame is at least `prefix_bytes` long; the lane learns its length from the prefix
 *            through ep_lane_limits.frame_bytes, before anything is allocated. A frame arrives in
 *            one ep_buffer, 64-byte aligned.
 * Order      Frames of one connection arrive in the order they were sent. Frames are never
 *            interleaved, split or repeated. A frame above the sender's own frame_bytes_max, or
 *            below the prefix, is INVALID_ARGUMENT in ep_conn_send.
 * Sending    ep_conn_send queues a gather list the caller keeps alive until done() is called,
 *            exactly once, with EP_OK or the reason. Queued bytes are bounded
 *            (send_queue_bytes_max): beyond it ep_conn_send fails with RESOURCE_EXHAUSTED and takes
 *            nothing. EP_OK in done() means handed to the network, not received.
 * Receiving  The lane reads all the time; back-pressure is by credits a layer above. When no buffer
 *            can be had the lane stops reading until one can, and never drops a frame. Until
 *            ep_conn_allow_large only small frames are taken.
 * Callbacks  on_frame, on_closed and done run on the lane's threads, one at a time per connection
 *            (done may run beside on_frame), with no lane lock held, never inside the call that
 *            began them (but see done_inside). They must not block; they may send, and close, any
 *            connection.
 * Ending     ep_conn_close refuses new sends at once and ends the connection. on_closed is called
 *            exactly once for every connection that was handed out (whoever ended it), after every
 *            done(), and is the last callback. The handle stays valid until ep_conn_release, which
 *            each owner calls exactly once, after or inside on_closed, or before (then the lane
 *            closes first and still calls on_closed).
 *            Peer death (end of stream) is on_closed with CONNECTION_LOST, after the frames it had
 *            sent.
 * Threads    All calls from any thread, also from callbacks.
 * Forks      A child has no thread of its parent's lanes and keeps none of their descriptors (but
 *            nng's, and a shm memory that is being received). It may open lanes of its own where
 *            ep_lane_check_fork allows it. What the parent opened may be closed, released, started
 *            and sent on in the child as well: that returns at once, frees nothing and calls
 *            nobody; a send is CLOSED. None of these calls reaches an ep_lane_ops. A lane with
 *            threads or state of its own hooks ep_lane_fork_hook, so that in a child it begins anew
 *            and its fini ends only its own.
 */
#ifndef EP_TRANSPORT_TRANSPORT_H
#define EP_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buffer.h"
#include "base/error.h"

#define EP_FRAME_PREFIX_BYTES 64
#define EP_SEND_PARTS_MAX 64
#define EP_ADDRESS_BYTES 256

typedef struct ep_conn ep_conn;
typedef struct ep_listener ep_listener;
typedef struct ep_dial ep_dial;

typedef struct ep_send_part {
    const void *data;
    size_t bytes;
} ep_send_part;

/* A frame to send. The caller owns it and everything it points at until done(). Zero it first. */
typedef struct ep_send {
    ep_send_part parts[EP_SEND_PARTS_MAX];
    uint32_t parts_count;                              /* parts of 0 bytes are allowed */
    void (*done)(struct ep_send *send, ep_err result); /* required */
    void *arg;
    /* done() may also run inside the ep_conn_send of this frame: saves waking a thread for it */
    bool done_inside;
    /* the caller's time counts for more than the frame's delay: where sending is a system call, a
     * thread of the lane makes it, and done() runs there. Shared memory takes it like any other: a
     * copy that another thread made would cost as much, and a wake-up */
    bool is_patient;
    /* private to the lane while queued */
    struct ep_send *next;
    size_t total_bytes;
    size_t sent_bytes;
} ep_send;

/*
 * Tells the whole frame's length from its first prefix_bytes bytes (prefix included). Pure; called
 * before anything is allocated. An error closes the connection, with that error's text in
 * on_closed.
 */
typedef ep_err (*ep_frame_bytes_func)(const uint8_t prefix[EP_FRAME_PREFIX_BYTES],
                                      size_t *out_frame_bytes, ep_error *out_error);

typedef struct ep_lane_limits {
    ep_frame_bytes_func frame_bytes;
    /* what frame_bytes needs, 1..EP_FRAME_PREFIX_BYTES; 0: EP_FRAME_PREFIX_BYTES. No frame is
     * shorter */
    size_t prefix_bytes;
    ep_buffer_pool *pool; /* receive buffers; borrowed for the life of the listener or connection */
    /* frames above are refused: connection closed with RESOURCE_EXHAUSTED */
    size_t frame_bytes_max;
    /* the same until ep_conn_allow_large, so that a stranger takes little memory; 0: none */
    size_t first_frame_bytes_max;
    size_t send_queue_bytes_max; /* at least frame_bytes_max */
    uint32_t connections_max;    /* listener only */
} ep_lane_limits;

/* How receiving goes, for those who judge whether the peer lives. */
typedef struct ep_conn_receiving {
    /* ep_clock_now_ns() time when bytes last arrived, also those of a frame not whole yet */
    uint64_t heard_ns;
    bool waits_for_memory; /* the lane does not read now: silence is no sign of anything */
    /* since when a frame is there in part; 0: none is, or the lane does not tell */
    uint64_t begun_ns;
    uint64_t begun_bytes; /* so much of it */
} ep_conn_receiving;

/*
 * A frame has to arrive at EP_FRAME_RATE_MIN bytes a second after a grace of EP_FRAME_GRACE_MS: who
 * sends it byte by byte holds memory that others need, and looks alive for ever. A thousand peers
 * that share a TLS listener's 100 MB/s have more each.
 */
#define EP_FRAME_GRACE_MS 5000u
#define EP_FRAME_RATE_MIN ((uint64_t)64 << 10)
/* Pure. Ask several times in a row before it counts: a receiver that was stopped itself has not
 * read what is there. */
bool ep_conn_receiving_is_slow(const ep_conn_receiving *receiving, uint64_t now_ns);

typedef struct ep_conn_handler {
    /* A frame has begun: its prefix is checked and its buffer is there. on_frame brings it, unless
     * on_closed comes first. NULL allowed. */
    void (*on_begin)(void *arg, ep_conn *conn, const uint8_t prefix[EP_FRAME_PREFIX_BYTES]);
    /* A whole frame; the handler takes the buffer and unrefs it when done. */
    void (*on_frame)(void *arg, ep_conn *conn, ep_buffer *taken_frame);
    /* The connection ended; error->code is CLOSED (closed here), CONNECTION_LOST (peer), PROTOCOL
     * or RESOURCE_EXHAUSTED. */
    void (*on_closed)(void *arg, ep_conn *conn, const ep_error *error);
    void *arg;
} ep_conn_handler;

/* TLS files of a tls+tcp address. All paths from configuration, never from the wire. */
typedef struct ep_tls_config {
    const char *ca_file;       /* required by both sides */
    const char *cert_key_file; /* PEM with certificate and key; required by a listener */
    /* required by a dialer: without it any certificate of the CA would pass */
    const char *server_name;
    bool require_client_cert;
} ep_tls_config;

#define EP_SHM_IDS_MAX 32
#define EP_SHM_RING_BYTES_MIN ((size_t)64 << 10)
#define EP_SHM_RING_BYTES_MAX ((size_t)64 << 20)
#define EP_SHM_RING_BYTES_DEFAULT ((size_t)2 << 20)

/*
 * Of a shm address. The listener decides about the memory: two rings per connection, taken from the
 * system as they are used. The peer's process must run as our own user, as root, or as one of these
 * users or groups.
 */
typedef struct ep_shm_config {
    size_t ring_bytes; /* per direction, a power of two; 0: EP_SHM_RING_BYTES_DEFAULT */
    /* of all connections of the listener: beyond it a peer is refused; 0: no bound */
    size_t total_bytes;
    const uint32_t *uids;
    size_t uids_count; /* up to EP_SHM_IDS_MAX */
    const uint32_t *gids;
    size_t gids_count; /* up to EP_SHM_IDS_MAX */
} ep_shm_config;

/* What one connection takes of total_bytes. ring_bytes: as above. */
size_t ep_shm_connection_bytes(size_t ring_bytes);

/* The memory that this process made for its listeners' connections. */
typedef struct ep_shm_stats {
    uint64_t mapped_bytes;
    uint64_t refused_total; /* peers that total_bytes had no room for */
} ep_shm_stats;
void ep_shm_read_stats(ep_shm_stats *out_stats);

typedef struct ep_lane_address {
    /* "tcp://127.0.0.1:0", "tls+tcp://host:port", "loopback://name", "shm:///run/x/y.sock" */
    const char *url;
    const ep_tls_config *tls; /* NULL unless tls+tcp */
    const ep_shm_config *shm; /* NULL: defaults */
} ep_lane_address;

/* A new inbound connection. The callee must call ep_conn_start(conn, handler) now or later, or
 * ep_conn_release it. */
typedef void (*ep_accept_func)(void *arg, ep_conn *taken_conn);
/* Exactly once per dial: conn on success (start or release it), else NULL with the reason. */
typedef void (*ep_dial_func)(void *arg, ep_conn *taken_conn, const ep_error *error);

typedef struct ep_lane_ops {
    const char *name;           /* "uv-stream", "shm", "loopback": as offered in Hello */
    const char *const *schemes; /* NULL-terminated: "tcp", "tls+tcp" */

    size_t listener_bytes; /* of its listener, which begins with ep_lane_listener */
    size_t dial_bytes;     /* of its dial, which begins with ep_lane_dial */

    /* Called by ep_lane_listen with a listener whose first member is filled and whose rest is zero.
     * Writes the URL it is bound to (ep_lane_listener.url). on_accept is called only after
     * everything that may fail. On error it undoes what it did; the caller frees. */
    ep_err (*listen)(ep_listener *listener, const ep_lane_address *address, ep_error *out_error);
    /* As ep_listener_close. */
    void (*listener_close)(ep_listener *listener);
    /*
     * Reads the files of its TLS settings again, for connections from now on; those there are stay.
     * NULL: a lane without TLS.
     * Errors: BAD_FILE, NO_MEMORY; the settings are then as before. Not beside listener_close.
     */
    ep_err (*listener_renew_tls)(ep_listener *listener, ep_error *out_error);

    /* Called by ep_lane_dial_begin with a dial whose first member is filled and whose rest is zero.
     * Its result is reported only after everything that may fail here. On error it undoes what it
     * did; the caller frees. */
    ep_err (*dial)(ep_dial *dial, const ep_lane_address *address, ep_error *out_error);
    /* A send that is checked, its private fields filled. Errors: as ep_conn_send. */
    ep_err (*conn_send)(ep_conn *conn, ep_send *send);
    /* As ep_conn_unacked. NULL: there are none, or the lane cannot tell (nng). */
    uint64_t (*conn_unacked)(ep_conn *conn);

    /* Ends the lane's own threads, once nothing needs them (ep_lane_hold). NULL: it has none. */
    void (*fini)(void);
    /* FAILED_PRECONDITION in a forked child in which it cannot work. NULL: it works there. */
    ep_err (*check_fork)(ep_error *out_error);
} ep_lane_ops;

/* First member of ep_lane_conn, ep_lane_listener and ep_lane_dial, so that one pointer is enough to
 * call. */
struct ep_conn {
    const ep_lane_ops *ops;
};
struct ep_listener {
    const ep_lane_ops *ops;
};
struct ep_dial {
    const ep_lane_ops *ops;
};

/* Each table is the end of its lane's *_lane.c or, where there is none, of its *_listener.c. */
extern const ep_lane_ops ep_nng_stream_lane;
extern const ep_lane_ops ep_uv_stream_lane;
extern const ep_lane_ops ep_loopback_lane;
extern const ep_lane_ops ep_shm_lane;

/* One lane beside the built-in ones, for a program that brings its own (tests: the simulated one).
 * NULL: none. */
void ep_lane_register(const ep_lane_ops *ops);
/*
 * Which lane serves tcp:// from now on in this process: "uv", as it is by default, or "nng". Both
 * speak the same bytes; tls+tcp is always nng's. Errors: INVALID_ARGUMENT.
 */
ep_err ep_stream_lane_choose(const char *name, ep_error *out_error);
/*
 * The same by LIBEXPERTD_STREAM_LANE, and busy polling by LIBEXPERTD_BUSY_POLL_US, for programs
 * that only use our client. Nothing after ep_stream_lane_choose. Errors: INVALID_ARGUMENT naming
 * the variable.
 */
ep_err ep_stream_lane_read_environment(ep_error *out_error);
/*
 * A worker of the uv-stream lane looks for bytes again and again for so long after it last had
 * some, before it sleeps; it saves wake-ups and takes a core. 0, which is the default: never.
 */
void ep_stream_lane_set_busy_poll(uint32_t microseconds);
/* What is set, for who waits like a worker. */
uint64_t ep_stream_lane_busy_poll_ns(void);

typedef struct ep_stream_lane_stats {
    const char *name; /* "uv", "nng": of tcp:// now */
    uint32_t busy_poll_us;
    uint64_t polls_total; /* looks of busy polling */
} ep_stream_lane_stats;
void ep_stream_lane_read_stats(ep_stream_lane_stats *out_stats);
/* FAILED_PRECONDITION where the URL's lane cannot work because this process was forked. */
ep_err ep_lane_check_fork(const char *url, ep_error *out_error);
/* The lane that serves a URL's scheme; NULL when none does. */
const ep_lane_ops *ep_lane_for_url(const char *url);

/*
 * Waits (5 s at most) until all connections, dials and listeners of all lanes have ended, then ends
 * the lanes' own threads; for leak checkers. Only programs call it, once, last. When TLS was used
 * the network library's threads stay until the process ends.
 */
void ep_transport_fini(void);

/*
 * Starts accepting; returns when the port is bound. Blocks shortly. *out_listener is written before
 * on_accept can run, NULL on error. Errors: INVALID_ARGUMENT, UNAVAILABLE (address in use).
 */
ep_err ep_lane_listen(const ep_lane_ops *lane, const ep_lane_address *address,
                      const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                      ep_listener **out_listener, ep_error *out_error);
/*
 * Begins a dial; on_dial is called exactly once unless this fails. *out_dial must be released by
 * ep_dial_release; it is written before on_dial can run, NULL on error. A tls+tcp dial succeeds
 * before the handshake: a refused peer is on_closed.
 */
ep_err ep_lane_dial_begin(const ep_lane_ops *lane, const ep_lane_address *address,
                          const ep_lane_limits *limits, ep_dial_func on_dial, void *arg,
                          ep_dial **out_dial, ep_error *out_error);

/* Address with the real port, e.g. "tcp://127.0.0.1:38211". */
void ep_listener_url(ep_listener *listener, char *out_url, size_t bytes);
/* Stops accepting, waits for a running on_accept, frees; accepted connections live on. Not from a
 * callback. */
void ep_listener_close(ep_listener *listener);
/*
 * Frees. Cancels if under way: on_dial then gets CANCELLED, on this thread, before this returns.
 * Waits for an on_dial that is running, so not from on_dial, and not under a lock that on_dial
 * takes.
 */
void ep_dial_release(ep_dial *dial);

void ep_conn_start(ep_conn *conn, const ep_conn_handler *handler);
/* Errors: RESOURCE_EXHAUSTED (queue full), CLOSED, INVALID_ARGUMENT (parts); on error done() is not
 * called. */
ep_err ep_conn_send(ep_conn *conn, ep_send *send);
void ep_conn_close(ep_conn *conn);
void ep_conn_release(ep_conn *conn);
/*
 * Lifts first_frame_bytes_max for the frames that begin from now on; called in on_frame, for the
 * very next one. They come from pool, borrowed for the life of the connection; NULL: from the same
 * as before.
 */
void ep_conn_allow_large(ep_conn *conn, ep_buffer_pool *pool);
void ep_conn_read_receiving(ep_conn *conn, ep_conn_receiving *out_receiving);
void ep_conn_peer(ep_conn *conn, char *out_address, size_t bytes);
/* True when the lane encrypts and authenticates bytes, or never leaves this machine: no payload CRC
 * needed. */
bool ep_conn_is_trusted(const ep_conn *conn);
/* Of sends that are done: bytes the peer's system does not have yet, which are lost when this side
 * closes. 0: there are none, or the lane cannot tell. */
uint64_t ep_conn_unacked(ep_conn *conn);

#endif
