/* SPDX-License-Identifier: Apache-2.0 */
/* What listeners of the stream lanes share: how many connections they may have, and their address
 * with the real port. */
#ifndef EP_TRANSPORT_LANE_ACCEPT_H
#define EP_TRANSPORT_LANE_ACCEPT_H

#include "transport/transport.h"

#define EP_ACCEPT_BACKOFF_MIN_MS 10
#define EP_ACCEPT_BACKOFF_MAX_MS 1000

/* Connections a listener has accepted and that have not ended; outlives the listener. */
typedef struct ep_accept_count {
    uint32_t refs;
    uint32_t connections;
} ep_accept_count;

/* NULL: no memory. */
ep_accept_count *ep_accept_count_create(void);
/* False when max are there already. */
bool ep_accept_count_add(ep_accept_count *count, uint32_t max);
/* Undoes one add and its reference. */
void ep_accept_count_remove(ep_accept_count *count);
void ep_accept_count_unref(ep_accept_count *count);

/*
 * For a listener that turns strangers away itself: limits->connections_max is the number of its
 * places. The lane gets some more, for connections that are still closing, but leaves descriptors
 * free as below. Returns the places there are, 1 at least.
 */
uint32_t ep_accept_places(ep_lane_limits *limits, const char *url);

/* Length of a peer's address, "host:port", without its port. Of shared memory a peer is a process
 * and has none. */
size_t ep_accept_host_bytes(const char *peer);

/*
 * Who is turned away for a newcomer. A stranger is a connection that has not said yet what it is
 * for (no Hello, no first request). Those of one address have a quarter of the places, 16 at least:
 * the oldest of them goes for its next one. Where all places are taken the oldest stranger of all
 * goes. Pure; zeroed but for newcomer.
 */
typedef struct ep_accept_pick {
    const char *newcomer; /* its address, "host:port" */
    uint32_t taken;       /* places, by all that are not being closed */
    uint32_t of_host;
    void *oldest_of_host;
    void *oldest;
} ep_accept_pick;
/* For each connection that is not being closed, the newest first. */
void ep_accept_pick_see(ep_accept_pick *pick, void *connection, const char *peer, bool is_stranger);
/* The one to close; NULL none. *out_room: the newcomer may stay. */
void *ep_accept_pick_choose(const ep_accept_pick *pick, uint32_t places, bool *out_room);

/* Lowers connections_max so that some descriptors stay free for the rest of the program; says so
 * once. */
void ep_accept_leave_descriptors(ep_lane_limits *limits, const char *url);
/* Says that all places are taken. */
void ep_accept_warn_full(const char *url, uint32_t connections_max);
/* The next pause after a failed accept, which is logged when it is the first in a row; backoff_ms
 * is 0 after a success. */
uint32_t ep_accept_backoff_ms(uint32_t backoff_ms, const char *url, const char *reason);
/* The URL asked for with the real port. */
void ep_accept_url(const char *asked, int port, char *out_url, size_t bytes);

#endif
