/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second look at tls streams. nng 1.5.2 reads ahead; when it meets the end of the connection
 * while no receive is posted, it shuts the socket and tells nobody, and the receive posted next
 * never completes. A socket that nng has shut and whose peer is gone has no peer name. So: a
 * receive that is still in flight one tick after the socket was seen like that is lost. One tick of
 * grace, since plain text nng has decrypted already completes the receive first.
 */
#include "transport/nng/nng_lane.h"

#define WATCH_TICK_MS 250

static void sleep_on(stream_conn *conn)
{
    conn->posting++;
    pthread_mutex_unlock(&conn->lock);
    nng_sleep_aio(WATCH_TICK_MS, conn->watch_aio);
    pthread_mutex_lock(&conn->lock);
    conn->posting--;
}

void ep_nng_stream_watch_start(stream_conn *conn)
{
    if (conn->tls && !conn->closing) {
        conn->watch_busy = true;
        sleep_on(conn);
    }
}

/* watch_busy keeps the stream from being freed. */
static bool socket_is_dead(stream_conn *conn)
{
    nng_sockaddr address;
    return nng_stream_get_addr(conn->stream, NNG_OPT_REMADDR, &address) != 0;
}

void ep_nng_stream_watch_tick(void *arg)
{
    stream_conn *conn = arg;
    bool dead = socket_is_dead(conn);
    pthread_mutex_lock(&conn->lock);
    if (dead && !conn->closing && conn->receive_posted) {
        if (conn->suspect_number == conn->receive_number) {
            ep_error lost;
            ep_error_set(&lost, EP_ERR_CONNECTION_LOST,
                         "connection to %s lost: its socket was shut", conn->peer);
            ep_nng_stream_conn_begin_end(conn, &lost);
        }
        conn->suspect_number = conn->receive_number;
    }
    if (conn->closing) {
        conn->watch_busy = false;
    } else {
        sleep_on(conn);
    }
    ep_nng_stream_conn_leave(conn);
}
