/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Destroys peers that nothing refers to any more. Closing a channel waits for its callbacks, so it
 * can run neither in a callback nor on the timer thread, and the last reference may be dropped in
 * both. Tables rarely lose a node: a thread exists only while there is something to close.
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
    bool has_thread; /* thread is to be joined */
    bool running;
    bool closing; /* no new thread: fini destroys what is left */
} ep_peer_reaper;

void ep_peer_reaper_init(ep_peer_reaper *out_reaper);
void ep_peer_reaper_add(ep_peer_reaper *reaper, ep_peer *taken_peer);
/* Destroys what waits, and waits for the thread. */
void ep_peer_reaper_fini(ep_peer_reaper *reaper);

#endif
