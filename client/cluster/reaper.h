/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Destroys unreferenced peers on a thread of its own. Closing a channel waits for its callbacks, so
 * it must not run in a callback or on the timers' thread, where the last reference may be dropped.
 * Tables rarely lose a node, so the thread exists only while there are peers to close.
 *
 * Threads  any; ep_peer_reaper_fini not from a callback.
 */
#ifndef EP_CLIENT_REAPER_H
#define EP_CLIENT_REAPER_H

#include "cluster/peers.h"

typedef struct ep_peer_reaper {
    pthread_mutex_t lock;
    ep_peer *waiting;
    pthread_t thread;
    bool has_thread; /* thread must be joined */
    bool running;
    bool closing; /* no new thread: fini destroys the rest */
} ep_peer_reaper;

void ep_peer_reaper_init(ep_peer_reaper *out_reaper);
void ep_peer_reaper_add(ep_peer_reaper *reaper, ep_peer *taken_peer);
/* Destroys the waiting peers and waits for the thread. */
void ep_peer_reaper_fini(ep_peer_reaper *reaper);

#endif
