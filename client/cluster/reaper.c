/* SPDX-License-Identifier: Apache-2.0 */
/* The short-lived thread that closes retired peers. */
#include "cluster/reaper.h"

#include <stddef.h>

#include "base/thread.h"

void ep_peer_reaper_init(ep_peer_reaper *out_reaper)
{
    *out_reaper = (ep_peer_reaper){.waiting = NULL};
    pthread_mutex_init(&out_reaper->lock, NULL);
}

static ep_peer *pop(ep_peer_reaper *reaper)
{
    ep_peer *peer = reaper->waiting;
    if (peer != NULL) {
        reaper->waiting = peer->next;
        peer->next = NULL;
    }
    return peer;
}

static void *reaper_main(void *arg)
{
    ep_peer_reaper *reaper = arg;
    ep_peer *peer;
    pthread_mutex_lock(&reaper->lock);
    while ((peer = pop(reaper)) != NULL) {
        pthread_mutex_unlock(&reaper->lock);
        ep_peer_destroy(peer);
        pthread_mutex_lock(&reaper->lock);
    }
    reaper->running = false;
    pthread_mutex_unlock(&reaper->lock);
    return NULL;
}

/* After a failure the next add or fini destroys the peer. */
static void start_thread(ep_peer_reaper *reaper)
{
    if (reaper->has_thread) {
        pthread_join(reaper->thread, NULL); /* it has left its loop */
        reaper->has_thread = false;
    }
    if (ep_thread_start("ep-client-close", reaper_main, reaper, &reaper->thread) == EP_OK) {
        reaper->has_thread = true;
        reaper->running = true;
    }
}

void ep_peer_reaper_add(ep_peer_reaper *reaper, ep_peer *taken_peer)
{
    pthread_mutex_lock(&reaper->lock);
    taken_peer->next = reaper->waiting;
    reaper->waiting = taken_peer;
    if (!reaper->running && !reaper->closing) {
        start_thread(reaper);
    }
    pthread_mutex_unlock(&reaper->lock);
}

void ep_peer_reaper_fini(ep_peer_reaper *reaper)
{
    pthread_mutex_lock(&reaper->lock);
    reaper->closing = true;
    bool join = reaper->has_thread;
    reaper->has_thread = false;
    pthread_mutex_unlock(&reaper->lock);
    if (join) {
        pthread_join(reaper->thread, NULL);
    }
    pthread_mutex_lock(&reaper->lock);
    ep_peer *peer;
    while ((peer = pop(reaper)) != NULL) {
        pthread_mutex_unlock(&reaper->lock);
        ep_peer_destroy(peer);
        pthread_mutex_lock(&reaper->lock);
    }
    pthread_mutex_unlock(&reaper->lock);
    pthread_mutex_destroy(&reaper->lock);
}
