/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the nng-stream lane. What nng 1.5.2 demands, and where it is kept:
 *
 *   one send and one receive aio per stream, completions       nng_conn.c
 *   may be partial
 *   nothing is posted on a closed stream: it would never       stream_conn.posting
 *   complete
 *   no free inside an own callback                             ep_nng_reaper
 *   no timeout and no cancel on a tls aio                      none is ever set
 *   a tls stream forgets an end that it noticed while no       watch_tick
 *   receive was posted: the next receive never completes
 *   SIGPIPE: nng sends with MSG_NOSIGNAL, our threads block    nothing process-wide is changed
 *   every signal
 */
#ifndef EP_TRANSPORT_NNG_LANE_H
#define EP_TRANSPORT_NNG_LANE_H

#include <nng/nng.h>
#include <nng/supplemental/tls/tls.h>

#include "transport/lane_accept.h"
#include "transport/lane_dial.h"
#include "transport/lane_worker.h"

#define STREAM_IOVS_MAX 8              /* nng_aio_set_iov takes no more */
#define STREAM_SCRATCH_BYTES 16384     /* small parts are copied here and sent; one TLS record */
#define STREAM_COALESCE_BYTES_MAX 1024 /* parts up to this size are copied rather than gathered */

/* nng_conn.c */
/* The thread that frees objects which cannot be freed in their own callbacks. */
extern ep_lane_worker ep_nng_reaper;
/* Takes the stream and the place of count (NULL: none), also on error. Errors: NO_MEMORY. */
ep_err ep_nng_conn_create(const ep_lane_ops *lane, nng_stream *taken_stream,
                          const ep_lane_limits *limits, bool tls, ep_accept_count *taken_count,
                          ep_conn **out_conn);
ep_err ep_nng_conn_send(ep_conn *conn, ep_send *send);

/* nng_tls.c */
/* Errors: INVALID_ARGUMENT (a key is missing), BAD_FILE, NO_MEMORY. */
ep_err ep_nng_tls_config_create(const ep_lane_address *address, enum nng_tls_mode mode,
                                nng_tls_config **out_config, ep_error *out_error);
ep_err ep_nng_err(int nng_error);
/* What listen or dial returns when nng failed. */
ep_err ep_nng_failed(const char *url, int failed, bool listens, ep_error *out_error);
/* ep_address_advice for this error. */
const char *ep_nng_advice(int nng_error, bool listens);

#endif
