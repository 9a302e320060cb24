/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the nng-stream lane. What nng 1.5.2 demands, and where it is kept:
 *
 *   one send and one receive aio per stream, completions       nng_send.c,
 *   may be partial                                             nng_receive.c
 *   nothing is posted on a closed stream: it would never       stream_conn.posting,
 *   complete                                                   nng_conn.c
 *   no free inside an own callback                             lane_reaper
 *   no timeout and no cancel on a tls aio                      none is ever set
 *   a tls stream forgets an end that it noticed while no       nng_watch.c
 *   receive was posted: the next receive never completes
 *   SIGPIPE: nng sends with MSG_NOSIGNAL, our threads block    nothing process-wide is changed
 *   every signal
 */
#ifndef EP_TRANSPORT_NNG_LANE_H
#define EP_TRANSPORT_NNG_LANE_H

#include <nng/nng.h>
#include <nng/supplemental/tls/tls.h>

#include "transport/lane_accept.h"
#include "transport/lane_assembler.h"
#include "transport/lane_common.h"
#include "transport/lane_reaper.h"

#define STREAM_IOVS_MAX 8              /* nng_aio_set_iov takes no more */
#define STREAM_SCRATCH_BYTES 16384     /* small parts are sent from here; one TLS record */
#define STREAM_COALESCE_BYTES_MAX 1024 /* parts up to this size are copied rather than gathered */

typedef struct stream_conn {
    ep_conn base;
    pthread_mutex_t lock;
    nng_stream *stream;
    nng_aio *send_aio;
    nng_aio *receive_aio;
    nng_aio *wait_aio;  /* sleeps until memory may be there */
    nng_aio *watch_aio; /* tls only: sleeps between looks at the socket */
    ep_lane_limits limits;
    ep_conn_handler handler;
    ep_reap_item reap;
    ep_accept_count *count; /* a reference; NULL at the dialing end */
    bool tls;
    char peer[EP_ADDRESS_BYTES];
    bool large_allowed; /* atomic */
    bool memory_wait;   /* atomic */
    uint64_t heard_ns;  /* atomic; see ep_conn_receiving */

    /* guarded by lock */
    ep_send_queue queue;
    ep_error end;     /* why, once closing */
    uint32_t refs;    /* its owner and the lane */
    uint32_t posting; /* threads inside an nng call on stream: it is closed only at 0 */
    bool started;
    bool released;
    bool closing; /* nothing is posted any more */
    bool stream_closed;
    bool send_busy;          /* the send aio is in flight, or its callback runs */
    bool receive_busy;       /* the same of receive_aio or wait_aio */
    bool watch_busy;         /* the same of watch_aio */
    bool receive_posted;     /* the receive aio is in flight */
    uint64_t receive_number; /* counts posted receives */
    /* the receive that was in flight when the socket was last seen dead; 0 none */
    uint64_t suspect_number;
    bool reaping; /* handed to the reaper */
    bool parked;  /* ended without a handler: on_closed waits for start or release */

    /* touched only by whoever set send_busy */
    uint8_t *scratch;

    /* touched only by whoever set receive_busy */
    ep_assembler assembler;
    nng_duration backoff_ms;
} stream_conn;

/* nng_conn.c */
/* Takes the stream and count's place (NULL: none) in every case. Errors: NO_MEMORY. */
ep_err ep_nng_conn_create(const ep_lane_ops *lane, nng_stream *taken_stream,
                          const ep_lane_limits *limits, bool tls, ep_accept_count *taken_count,
                          ep_conn **out_conn);
/* Lock held: the first reason stays; the stream is closed when nobody is inside it. */
void ep_nng_stream_conn_begin_end(stream_conn *conn, const ep_error *error);
/* Lock held, released on return: closes and hands to the reaper when the time has come. Last touch
 * of conn. */
void ep_nng_stream_conn_leave(stream_conn *conn);

void ep_nng_stream_conn_start(ep_conn *conn, const ep_conn_handler *handler);
ep_err ep_nng_stream_conn_send(ep_conn *conn, ep_send *send);
void ep_nng_stream_conn_close(ep_conn *conn);
void ep_nng_stream_conn_release(ep_conn *conn);
void ep_nng_stream_conn_allow_large(ep_conn *conn, ep_buffer_pool *pool);
void ep_nng_stream_conn_receiving(ep_conn *conn, ep_conn_receiving *out_receiving);
void ep_nng_stream_conn_peer(ep_conn *conn, char *out_address, size_t bytes);
bool ep_nng_stream_conn_is_trusted(ep_conn *conn);

/* nng_send.c */
/* Lock held, send_busy set, not closing, queue not empty: posts the next slice. Drops the lock
 * meanwhile. */
void ep_nng_stream_send_post(stream_conn *conn);
void ep_nng_stream_send_done(void *conn);

/* nng_receive.c */
/* Lock held, receive_busy set, not closing. Drops the lock meanwhile. */
void ep_nng_stream_receive_post(stream_conn *conn);
void ep_nng_stream_receive_done(void *conn);
void ep_nng_stream_receive_retry(void *conn);

/* nng_watch.c */
/* Lock held, not closing. Drops the lock meanwhile. No-op but for tls. */
void ep_nng_stream_watch_start(stream_conn *conn);
void ep_nng_stream_watch_tick(void *conn);

/* nng_listener.c, nng_dial.c */
ep_err ep_nng_listen(const ep_lane_ops *lane, const ep_lane_address *address,
                     const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                     ep_listener **out_listener, ep_error *out_error);
void ep_nng_listener_close(ep_listener *listener);
ep_err ep_nng_listener_renew_tls(ep_listener *listener, ep_error *out_error);
ep_err ep_nng_dial(const ep_lane_ops *lane, const ep_lane_address *address,
                   const ep_lane_limits *limits, ep_dial_func on_dial, void *arg,
                   ep_dial **out_dial, ep_error *out_error);

/* nng_tls.c */
/* Errors: INVALID_ARGUMENT (a key is missing), BAD_FILE, NO_MEMORY. */
ep_err ep_nng_tls_config_create(const ep_lane_address *address, enum nng_tls_mode mode,
                                nng_tls_config **out_config, ep_error *out_error);
bool ep_nng_tls_was_used(void);
ep_err ep_nng_err(int nng_error);
/* ep_address_advice of this. */
const char *ep_nng_advice(int nng_error, bool listens);

#endif
