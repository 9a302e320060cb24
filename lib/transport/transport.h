/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lane moves whole frames between two peers and knows no messages. This header is the porting
 * guide. A new lane (shared memory, RDMA, a simulator) fills one ep_lane_ops. Its objects begin
 * with those of lane_conn.h, lane_dial.h and lane_accept.h, it creates descriptors and threads as
 * lane_fork.h says, and it passes tests/contract/transport. Nothing else changes.
 *
 * Frames     A frame is at least `prefix_bytes` long. The lane learns its length from the prefix
 *            through ep_lane_limits.frame_bytes, before anything is allocated. A frame arrives in
 *            one ep_buffer, 64-byte aligned.
 * Order      Frames of one connection arrive in the order in which they were sent. Frames are never
 *            interleaved, split or repeated. ep_conn_send refuses a frame above the sender's own
 *            frame_bytes_max, or shorter than the prefix, with INVALID_ARGUMENT.
 * Sending    ep_conn_send queues a gather list. The caller keeps it alive until done() is called,
 *            exactly once, with EP_OK or the error. Queued bytes are bounded
 *            (send_queue_bytes_max): beyond it ep_conn_send fails with RESOURCE_EXHAUSTED and takes
 *            nothing. EP_OK in done() means handed to the network, not received.
 * Receiving  The lane reads all the time; back-pressure comes from credits, a layer above. When no
 *            buffer can be had, the lane stops reading until one can; it never drops a frame. Until
 *            ep_conn_allow_large only small frames are accepted.
 * Callbacks  on_frame, on_closed and done run on the lane's threads, one at a time per connection
 *            (done may run beside on_frame), with no lane lock held, never inside the call that
 *            began them (but see done_inside). They must not block. They may send on, and close,
 *            any connection.
 * Ending     ep_conn_close refuses new sends at once and ends the connection. on_closed is called
 *            exactly once for every connection that was handed out, whoever ended it. It comes
 *            after every done() and is the last callback. The handle stays valid until
 *            ep_conn_release, which each owner calls exactly once: after or inside on_closed, or
 *            before it (then the lane closes first and still calls on_closed).
 *            When the peer dies (end of stream), on_closed gets CONNECTION_LOST, after the frames
 *            that the peer had sent.
 * Threads    All calls from any thread, also from callbacks.
 * Forks      A child has no thread of its parent's lanes and keeps none of their descriptors
 *            (except nng's, and shm memory that is just being received). It may open lanes of its
 *            own where ep_lane_check_fork allows it. In the child, the parent's objects may also be
 *            closed, released, started and sent on: that returns at once, frees nothing and calls
 *            no callback; a send gives CLOSED. None of these calls reaches an ep_lane_ops. A lane
 *            with threads or state of its own registers with ep_lane_fork_hook, so that it starts
 *            anew in a child, where its fini ends only its own.
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
    /* done() may also run inside the ep_conn_send of this frame, which saves waking a thread */
    bool done_inside;
    /* The caller's time matters more than the frame's delay. Where sending is a system call, a
     * thread of the lane makes it and runs done(). Shared memory ignores this: a copy by another
     * thread would cost as much, and a wake-up */
    bool is_patient;
    /* private to the lane while queued */
    struct ep_send *next;
    size_t total_bytes;
    size_t sent_bytes;
} ep_send;

/*
 * Tells the length of the whole frame (prefix included) from its first prefix_bytes bytes. Pure;
 * called before anything is allocated. An error closes the connection; on_closed gets its text.
 */
typedef ep_err (*ep_frame_bytes_func)(const uint8_t prefix[EP_FRAME_PREFIX_BYTES],
                                      size_t *out_frame_bytes, ep_error *out_error);

typedef struct ep_lane_limits {
    ep_frame_bytes_func frame_bytes;
    /* how many bytes frame_bytes needs, 1..EP_FRAME_PREFIX_BYTES; 0: EP_FRAME_PREFIX_BYTES. No
     * frame is shorter */
    size_t prefix_bytes;
    /* for receive buffers; borrowed for the life of the listener or connection */
    ep_buffer_pool *pool;
    /* a larger frame closes the connection with RESOURCE_EXHAUSTED */
    size_t frame_bytes_max;
    /* the same until ep_conn_allow_large, so that a stranger takes little memory; 0: none */
    size_t first_frame_bytes_max;
    size_t send_queue_bytes_max; /* at least frame_bytes_max */
    uint32_t connections_max;    /* listener only */
} ep_lane_limits;

/* The state of receiving, for deciding whether the peer lives. */
typedef struct ep_conn_receiving {
    /* when bytes last arrived (ep_clock_now_ns), also those of a partial frame */
    uint64_t heard_ns;
    bool waits_for_memory; /* the lane is not reading now, so silence means nothing */
    /* since when there is a partial frame; 0: there is none, or the lane cannot tell */
    uint64_t begun_ns;
    uint64_t begun_bytes; /* how much of it */
} ep_conn_receiving;

/*
 * A frame must arrive at EP_FRAME_RATE_MIN bytes a second or more, after a grace of
 * EP_FRAME_GRACE_MS. A peer that sends it byte by byte would hold memory that others need, and look
 * alive for ever. A thousand peers that share a TLS listener's 100 MB/s get more than this each.
 */
#define EP_FRAME_GRACE_MS 5000u
#define EP_FRAME_RATE_MIN ((uint64_t)64 << 10)
/* Pure. Decide only after several such answers in a row: a receiver that was stopped itself has not
 * yet read what is there. */
bool ep_conn_receiving_is_slow(const ep_conn_receiving *receiving, uint64_t now_ns);

typedef struct ep_conn_handler {
    /* A frame has begun: its prefix is checked and it has a buffer. on_frame follows, unless
     * on_closed comes first. NULL allowed. */
    void (*on_begin)(void *arg, ep_conn *conn, const uint8_t prefix[EP_FRAME_PREFIX_BYTES]);
    /* A whole frame. The handler takes the buffer. */
    void (*on_frame)(void *arg, ep_conn *conn, ep_buffer *taken_frame);
    /* The connection ended; error->code is CLOSED (by this side), CONNECTION_LOST (by the peer),
     * PROTOCOL or RESOURCE_EXHAUSTED. */
    void (*on_closed)(void *arg, ep_conn *conn, const ep_error *error);
    void *arg;
} ep_conn_handler;

/* TLS files of a tls+tcp address. All paths come from configuration, never from the wire. */
typedef struct ep_tls_config {
    const char *ca_file;       /* required by both sides */
    const char *cert_key_file; /* PEM with certificate and key; required by a listener */
    /* required by a dialler: without it, any certificate of the CA would be accepted */
    const char *server_name;
    bool require_client_cert;
} ep_tls_config;

#define EP_SHM_IDS_MAX 32
#define EP_SHM_RING_BYTES_MIN ((size_t)64 << 10)
#define EP_SHM_RING_BYTES_MAX ((size_t)64 << 20)
#define EP_SHM_RING_BYTES_DEFAULT ((size_t)2 << 20)

/*
 * Settings of a shm address. The listener decides the size of the memory: two rings per connection,
 * which the system provides as they are used. The peer's process must run as our own user, as root,
 * or as one of these users or groups.
 */
typedef struct ep_shm_config {
    size_t ring_bytes; /* per direction, a power of two; 0: EP_SHM_RING_BYTES_DEFAULT */
    /* limit for all connections of the listener, beyond which a peer is refused; 0: no limit */
    size_t total_bytes;
    const uint32_t *uids;
    size_t uids_count; /* up to EP_SHM_IDS_MAX */
    const uint32_t *gids;
    size_t gids_count; /* up to EP_SHM_IDS_MAX */
} ep_shm_config;

/* How much of total_bytes one connection takes. ring_bytes: as above. */
size_t ep_shm_connection_bytes(size_t ring_bytes);

/* The memory that this process created for connections of its listeners. */
typedef struct ep_shm_stats {
    uint64_t mapped_bytes;
    uint64_t refused_total; /* peers for which total_bytes had no room */
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
/* Called exactly once per dial: conn on success (start or release it), else NULL with the error. */
typedef void (*ep_dial_func)(void *arg, ep_conn *taken_conn, const ep_error *error);

typedef struct ep_lane_ops {
    const char *name;           /* "uv-stream", "shm", "loopback": the name in Hello */
    const char *const *schemes; /* NULL-terminated: "tcp", "tls+tcp" */

    size_t listener_bytes; /* size of its listener struct, which begins with ep_lane_listener */
    size_t dial_bytes;     /* size of its dial struct, which begins with ep_lane_dial */

    /* Called by ep_lane_listen with a listener whose first member is filled and whose rest is zero.
     * Writes the URL that it is bound to (ep_lane_listener.url). on_accept may be called only after
     * everything that can fail. On error it undoes what it did; the caller frees. */
    ep_err (*listen)(ep_listener *listener, const ep_lane_address *address, ep_error *out_error);
    /* As ep_listener_close. */
    void (*listener_close)(ep_listener *listener);
    /*
     * Reads the files of its TLS settings again, for connections from now on; open ones stay. NULL:
     * a lane without TLS. Not concurrent with listener_close.
     * Errors: BAD_FILE, NO_MEMORY; the settings are then as before.
     */
    ep_err (*listener_renew_tls)(ep_listener *listener, ep_error *out_error);

    /* Called by ep_lane_dial_begin with a dial whose first member is filled and whose rest is zero.
     * The result may be reported only after everything that can fail here. On error it undoes what
     * it did; the caller frees. */
    ep_err (*dial)(ep_dial *dial, const ep_lane_address *address, ep_error *out_error);
    /* Sends a checked send with its private fields filled. Errors: as ep_conn_send. */
    ep_err (*conn_send)(ep_conn *conn, ep_send *send);
    /* As ep_conn_unacked. NULL: there are no such bytes, or the lane cannot tell (nng). */
    uint64_t (*conn_unacked)(ep_conn *conn);

    /* Ends the lane's own threads, once nothing needs them (ep_lane_hold). NULL: it has none. */
    void (*fini)(void);
    /* FAILED_PRECONDITION in a forked child where the lane cannot work. NULL: it works there. */
    ep_err (*check_fork)(ep_error *out_error);
} ep_lane_ops;

/* First member of ep_lane_conn, ep_lane_listener and ep_lane_dial, so calls can find the lane. */
struct ep_conn {
    const ep_lane_ops *ops;
};
struct ep_listener {
    const ep_lane_ops *ops;
};
struct ep_dial {
    const ep_lane_ops *ops;
};

/* Each is defined at the end of its *_lane.c. */
extern const ep_lane_ops ep_nng_stream_lane;
extern const ep_lane_ops ep_uv_stream_lane;
extern const ep_lane_ops ep_loopback_lane;
extern const ep_lane_ops ep_shm_lane;

/* Adds one lane to the built-in ones, for programs with their own (tests: the simulated one). NULL:
 * none. */
void ep_lane_register(const ep_lane_ops *ops);
/*
 * Which lane serves tcp:// from now on in this process: "uv" (the default) or "nng". Both send the
 * same bytes; tls+tcp always uses nng. Errors: INVALID_ARGUMENT.
 */
ep_err ep_stream_lane_choose(const char *name, ep_error *out_error);
/*
 * Chooses it by LIBEXPERTD_STREAM_LANE, and busy polling by LIBEXPERTD_BUSY_POLL_US, for programs
 * that only use our client. Does nothing after ep_stream_lane_choose. Errors: INVALID_ARGUMENT
 * naming the variable.
 */
ep_err ep_stream_lane_read_environment(ep_error *out_error);
/*
 * How long a worker of the uv-stream lane polls for more bytes after it last received some, before
 * it sleeps. This saves wake-ups and takes a core. 0 (the default): not at all.
 */
void ep_stream_lane_set_busy_poll(uint32_t microseconds);
/* The present setting, for code that waits like a worker. */
uint64_t ep_stream_lane_busy_poll_ns(void);

typedef struct ep_stream_lane_stats {
    const char *name; /* "uv" or "nng": the lane of tcp:// now */
    uint32_t busy_poll_us;
    uint64_t polls_total; /* polls of busy polling */
} ep_stream_lane_stats;
void ep_stream_lane_read_stats(ep_stream_lane_stats *out_stats);
/* FAILED_PRECONDITION where the URL's lane cannot work because this process was forked. */
ep_err ep_lane_check_fork(const char *url, ep_error *out_error);
/* The lane for a URL's scheme; NULL when there is none. */
const ep_lane_ops *ep_lane_for_url(const char *url);

/*
 * Waits (5 s at most) until all connections, dials and listeners of all lanes have ended, then ends
 * the lanes' threads; for leak checkers. Only programs call it, once, as the last call. If TLS was
 * used, the network library's threads stay until the process ends.
 */
void ep_transport_fini(void);

/*
 * Starts accepting and returns when the port is bound. Blocks shortly. *out_listener is written
 * before on_accept can run; NULL on error. Errors: INVALID_ARGUMENT, UNAVAILABLE (address in use).
 */
ep_err ep_lane_listen(const ep_lane_ops *lane, const ep_lane_address *address,
                      const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                      ep_listener **out_listener, ep_error *out_error);
/*
 * Begins a dial. on_dial is called exactly once unless this fails. Release *out_dial with
 * ep_dial_release; it is written before on_dial can run, and is NULL on error. A tls+tcp dial
 * succeeds before the handshake: a refused peer is reported by on_closed.
 */
ep_err ep_lane_dial_begin(const ep_lane_ops *lane, const ep_lane_address *address,
                          const ep_lane_limits *limits, ep_dial_func on_dial, void *arg,
                          ep_dial **out_dial, ep_error *out_error);

/* Address with the real port, e.g. "tcp://127.0.0.1:38211". */
void ep_listener_url(ep_listener *listener, char *out_url, size_t bytes);
/* Stops accepting, waits for a running on_accept, frees. Accepted ones stay open. Not from a
 * callback. */
void ep_listener_close(ep_listener *listener);
/*
 * Frees the dial, and cancels it if it is still running: on_dial then gets CANCELLED, on this
 * thread, before this returns. Waits for a running on_dial, so do not call it from on_dial or under
 * a lock that on_dial takes.
 */
void ep_dial_release(ep_dial *dial);

void ep_conn_start(ep_conn *conn, const ep_conn_handler *handler);
/* Errors: RESOURCE_EXHAUSTED (queue full), CLOSED, INVALID_ARGUMENT (parts); on error done() is not
 * called. */
ep_err ep_conn_send(ep_conn *conn, ep_send *send);
void ep_conn_close(ep_conn *conn);
void ep_conn_release(ep_conn *conn);
/*
 * Lifts first_frame_bytes_max for frames that begin from now on; called in on_frame, it applies to
 * the very next frame. Their buffers come from pool, borrowed for the life of the connection; NULL:
 * no change.
 */
void ep_conn_allow_large(ep_conn *conn, ep_buffer_pool *pool);
void ep_conn_read_receiving(ep_conn *conn, ep_conn_receiving *out_receiving);
void ep_conn_peer(ep_conn *conn, char *out_address, size_t bytes);
/* True when the lane encrypts and authenticates bytes, or never leaves this machine, so that no
 * payload CRC is needed. */
bool ep_conn_is_trusted(const ep_conn *conn);
/* Bytes of completed sends that the peer's system has not received; they are lost when this side
 * closes. 0: there are none, or the lane cannot tell. */
uint64_t ep_conn_unacked(ep_conn *conn);

#endif
