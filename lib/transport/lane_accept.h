/* SPDX-License-Identifier: Apache-2.0 */
/* What listeners of all lanes share: how many connections they may have, pauses after failures, and
 * their address with the real port. */
#ifndef EP_TRANSPORT_LANE_ACCEPT_H
#define EP_TRANSPORT_LANE_ACCEPT_H

#include <pthread.h>

#include "transport/transport.h"

/* Connections a listener has accepted and that have not ended; outlives the listener. */
typedef struct ep_accept_count {
    uint32_t refs;
    uint32_t connections;
} ep_accept_count;

/* False when max are there already. */
bool ep_accept_count_add(ep_accept_count *count, uint32_t max);
/* Undoes one add and its reference. NULL: nothing. */
void ep_accept_count_remove(ep_accept_count *count);

/* First member of a lane's listener. */
typedef struct ep_lane_listener {
    ep_listener base;
    ep_lane_limits limits;
    ep_accept_func on_accept;
    void *arg;
    ep_accept_count *count;
    uint32_t forks;             /* ep_lane_forks of the process that made it */
    char url[EP_ADDRESS_BYTES]; /* with the real port once it is bound */
    pthread_mutex_t lock;       /* for the lane's use */
    pthread_cond_t changed;     /* for the lane's use, with lock */
    /* touched by whoever accepts, one at a time */
    uint32_t backoff_ms; /* after failures in a row; 0: the newest accept went well */
    bool refusing;       /* the newest newcomer found no place, and that is logged */
} ep_lane_listener;

void ep_lane_listener_free(ep_lane_listener *listener);
/* Takes a place of count for a newcomer. False: all are taken, which is logged once. */
bool ep_lane_listener_admit(ep_lane_listener *listener);
/* The next pause after a failed accept; the first in a row is logged. */
uint32_t ep_lane_listener_pause_ms(ep_lane_listener *listener, const char *reason);
/* It is bound, to this port: its URL says so, and places that this process lacks descriptors for
 * are taken away, which is logged. */
void ep_lane_listener_set_port(ep_lane_listener *listener, int port);

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

#endif
