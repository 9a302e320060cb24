/* SPDX-License-Identifier: Apache-2.0 */
/* Waits for a weight store of this program, which must be given store_on_change. */
#ifndef EP_TEST_STORE_WATCH_H
#define EP_TEST_STORE_WATCH_H

#include <pthread.h>

#include "expertd/weight_store.h"

static pthread_mutex_t store_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t store_changed = PTHREAD_COND_INITIALIZER;
static uint64_t store_changes; /* guarded by the lock; a test may guard its own data with it */

static inline void store_on_change(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&store_lock);
    store_changes++;
    pthread_cond_broadcast(&store_changed);
    pthread_mutex_unlock(&store_lock);
}

/* Waits until nothing is queued or loading and so many prefetches have succeeded: the store counts
 * one only after its import has returned. */
static inline ep_weight_stats store_settle_with(ep_weight_store *store, uint64_t prefetches)
{
    ep_weight_stats stats;
    for (;;) {
        pthread_mutex_lock(&store_lock);
        const uint64_t seen = store_changes;
        pthread_mutex_unlock(&store_lock);
        ep_weight_store_read_stats(store, &stats);
        if (stats.pending_count == 0 && stats.prefetches_total >= prefetches) {
            return stats;
        }
        pthread_mutex_lock(&store_lock);
        while (store_changes == seen) {
            pthread_cond_wait(&store_changed, &store_lock);
        }
        pthread_mutex_unlock(&store_lock);
    }
}

static inline ep_weight_stats store_settle(ep_weight_store *store)
{
    return store_settle_with(store, 0);
}

#endif
