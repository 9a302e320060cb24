/* SPDX-License-Identifier: Apache-2.0 */
/* What listeners of all lanes share: the limit of connections, pauses after failures, and the
 * address with the real port. */
#ifndef EP_TRANSPORT_LANE_ACCEPT_H
#define EP_TRANSPORT_LANE_ACCEPT_H

#include <pthread.h>

#include "transport/transport.h"

/* Connections that a listener has accepted and that have not ended; outlives the listener. */
typedef struct ep_accept_count {
    uint32_t refs;
    uint32_t connections;
} ep_accept_count;

/* False when there are already max. */
bool ep_accept_count_add(ep_accept_count *count, uint32_t max);
/* Undoes one add and drops its reference. NULL: does nothing. */
void ep_accept_count_remove(ep_accept_count *count);

/* First member of a lane's listener. */
typedef struct ep_lane_listener {
    ep_listener base;
    ep_lane_limits limits;
    ep_accept_func on_accept;
    void *arg;
    ep_accept_count *count;
    uint32_t forks;             /* ep_lane_forks of the process that created it */
    char url[EP_ADDRESS_BYTES]; /* with the real port once it is bound */
    pthread_mutex_t lock;       /* for the lane's use */
    pthread_cond_t changed;     /* for the lane's use, with lock */
    /* the fields below are for the thread that accepts; one thread at a time */
    uint32_t backoff_ms; /* pause after failures in a row; 0: the last accept succeeded */
    bool refusing;       /* the last newcomer found no place, and that was logged */
} ep_lane_listener;

void ep_lane_listener_free(ep_lane_listener *listener);
/* Takes a place of count for a newcomer. False: all places are taken, which is logged once. */
bool ep_lane_listener_admit(ep_lane_listener *listener);
/* How long to pause after a failed accept. The first failure in a row is logged. */
uint32_t ep_lane_listener_pause_ms(ep_lane_listener *listener, const char *reason);
/* Called when it is bound to this port: writes the port into the URL, and lowers connections_max to
 * what this process has descriptors for, which is logged. */
void ep_lane_listener_set_port(ep_lane_listener *listener, int port);

/*
 * For a listener that closes strangers itself: limits->connections_max is the number of its places.
 * The lane gets a few more, for connections that are still closing, but leaves descriptors free as
 * set_port does. Returns the number of places, at least 1.
 */
uint32_t ep_accept_places(ep_lane_limits *limits, const char *url);

/* Length of a peer's address "host:port" without its port. The peer of shared memory is a process
 * and has no port. */
size_t ep_accept_host_bytes(const char *peer);

/*
 * Chooses the connection to close for a newcomer. A stranger is a connection that has not yet said
 * what it is for (no Hello, no first request). Strangers of one address may have a quarter of the
 * places, at least 16; beyond that, the oldest of them is closed for the next one. Where all places
 * are taken, the oldest stranger of all is closed. Pure; zero the struct except newcomer.
 */
typedef struct ep_accept_pick {
    const char *newcomer; /* its address, "host:port" */
    uint32_t taken;       /* places taken by connections that are not being closed */
    uint32_t of_host;
    void *oldest_of_host;
    void *oldest;
} ep_accept_pick;
/* Called for each connection that is not being closed, the newest first. */
void ep_accept_pick_see(ep_accept_pick *pick, void *connection, const char *peer, bool is_stranger);
/* The connection to close; NULL none. *out_room: the newcomer may stay. */
void *ep_accept_pick_choose(const ep_accept_pick *pick, uint32_t places, bool *out_room);

#endif
