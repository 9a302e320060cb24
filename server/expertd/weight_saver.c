/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The saver's thread. It writes packed experts into the cache, one at a time and with the lowest
 * priority. It holds a reference only to the one it writes: an expert that is evicted before its
 * turn is written after it has been loaded again.
 */
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "expertd/weight_store_private.h"

#define SAVER_NICE 19

/* Finds the next resident expert without a file; NULL: none. Lock held. */
static expert_entry *find_unsaved(ep_weight_store *store)
{
    for (uint32_t l = 0; l < store->layers_count && store->unsaved_count > 0; l++) {
        layer_entry *layer = &store->layers[l];
        for (uint32_t e = 0; e < layer->experts_count; e++) {
            if (layer->experts[e].state == EP_EXPERT_RESIDENT && !layer->experts[e].is_saved) {
                return &layer->experts[e];
            }
        }
    }
    return NULL;
}

/* Lock held on entry and exit, not in between. */
static void save_one(ep_weight_store *store, expert_entry *entry)
{
    ep_resident *resident = entry->resident;
    ep_resident_ref(resident, 1);
    entry->is_saved = true; /* also if writing fails, which is logged */
    store->unsaved_count--;
    pthread_mutex_unlock(&store->lock);
    ep_weight_cache_key key;
    ep_weight_layer_key(&store->layers[entry->layer_slot].layer, entry->expert, &key);
    const bool is_written =
        ep_weight_cache_write(store->config.cache, &key, resident->weights, resident->sha256);
    ep_resident_release(resident);
    pthread_mutex_lock(&store->lock);
    store->saver_gave_up = !is_written;
}

void *ep_weight_saver_main(void *arg)
{
    ep_weight_store *store = arg;
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), SAVER_NICE); /* of this thread */
    pthread_mutex_lock(&store->lock);
    while (!store->stop && !store->saver_gave_up) {
        /* the first pass has precedence */
        expert_entry *entry = store->first.first == NULL ? find_unsaved(store) : NULL;
        if (entry != NULL) {
            save_one(store, entry);
        } else {
            pthread_cond_wait(&store->save, &store->lock);
        }
    }
    pthread_mutex_unlock(&store->lock);
    return NULL;
}
