/* SPDX-License-Identifier: Apache-2.0 */
/* Resident experts and the thread that loads them. */
#include "expertd/weight_store.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "model/load_progress.h"

typedef struct expert_entry {
    ep_expert_state state;
    bool is_wanted;
    uint32_t layer_slot;
    uint32_t expert;
    ep_resident *resident;     /* the store's reference; NULL unless RESIDENT */
    struct expert_entry *next; /* in the loader's queue */
} expert_entry;

typedef struct layer_entry {
    ep_weight_layer layer;
    uint32_t experts_count; /* E + S */
    uint32_t owned_count;
    expert_entry *experts;
} layer_entry;

struct ep_weight_store {
    ep_weight_store_config config;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t work;
    pthread_t loader;
    bool loader_runs;
    bool stop;
    uint32_t layers_count;
    layer_entry *layers;
    expert_entry *queue;
    expert_entry **queue_end;
    uint64_t resident_bytes; /* also of experts that only jobs still hold */
    ep_weight_stats stats;
};

const char *ep_expert_state_text(ep_expert_state state)
{
    switch (state) {
    case EP_EXPERT_ABSENT:
        return "is not held here";
    case EP_EXPERT_QUEUED:
    case EP_EXPERT_LOADING:
        return "is still loading";
    case EP_EXPERT_RESIDENT:
        return "is held here";
    case EP_EXPERT_FAILED:
        return "could not be loaded";
    }
    return "is in an unknown state";
}

ep_err ep_weight_store_create(const ep_weight_store_config *config, ep_weight_store **out_store,
                              ep_error *out_error)
{
    ep_weight_store *store = calloc(1, sizeof(*store));
    if (store == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the weight store");
    }
    store->config = *config;
    store->queue_end = &store->queue;
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->work, NULL);
    *out_store = store;
    return EP_OK;
}

ep_err ep_weight_store_add_layer(ep_weight_store *store, const ep_weight_layer *layer, uint32_t *out_slot,
                                 ep_error *out_error)
{
    uint32_t count = layer->shape.experts + layer->shape.shared_experts;
    EP_ASSERT(!store->loader_runs);
    layer_entry *grown = realloc(store->layers, (store->layers_count + 1) * sizeof(*grown));
    if (grown != NULL) {
        store->layers = grown;
    }
    expert_entry *experts = calloc(count > 0 ? count : 1, sizeof(*experts));
    if (grown == NULL || experts == NULL) {
        free(experts);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for layer %u of model %s",
                            layer->shape.layer, layer->model);
    }
    for (uint32_t i = 0; i < count; i++) {
        experts[i].layer_slot = store->layers_count;
        experts[i].expert = i;
    }
    store->layers[store->layers_count] =
        (layer_entry){.layer = *layer, .experts_count = count, .experts = experts};
    *out_slot = store->layers_count++;
    return EP_OK;
}

/* The last reference is gone: nobody else can see it. */
static void unload(ep_resident *resident)
{
    ep_weight_store *store = resident->store;
    ep_backend *backend = store->config.backend;
    backend->ops->weights_unload(backend, resident->weights);
    pthread_mutex_lock(&store->lock);
    store->resident_bytes -= resident->bytes;
    pthread_mutex_unlock(&store->lock);
    free(resident);
}

void ep_resident_release(ep_resident *resident)
{
    if (resident != NULL && atomic_fetch_sub_explicit(&resident->refs, 1, memory_order_acq_rel) == 1) {
        unload(resident);
    }
}

/* What the packed form will take at least; reading a whole expert only to refuse it would be a waste. */
static uint64_t bytes_at_least(const ep_weight_layer *layer)
{
    const ep_layer_shape *shape = &layer->shape;
    const uint64_t wide = ep_weight_matrix_bytes(layer->format, shape->inner, shape->hidden);
    return (ep_activation_has_gate(shape->activation) ? 2 : 1) * wide +
           ep_weight_matrix_bytes(layer->format, shape->hidden, shape->inner);
}

static ep_err reserve(ep_weight_store *store, uint64_t bytes, ep_error *out_error)
{
    uint64_t limit = store->config.weight_bytes_max;
    pthread_mutex_lock(&store->lock);
    uint64_t used = store->resident_bytes;
    bool fits = limit == 0 || (bytes <= limit && used <= limit - bytes);
    if (fits) {
        store->resident_bytes += bytes;
    }
    pthread_mutex_unlock(&store->lock);
    return fits ? EP_OK
                : ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                               "needs %" PRIu64 " bytes, and %" PRIu64 " of weight_bytes_max %" PRIu64
                               " are in use",
                               bytes, used, limit);
}

static void unreserve(ep_weight_store *store, uint64_t bytes)
{
    pthread_mutex_lock(&store->lock);
    store->resident_bytes -= bytes;
    pthread_mutex_unlock(&store->lock);
}

static ep_err pack(ep_weight_store *store, const ep_weight_layer *layer, const ep_expert_data *data,
                   ep_resident *resident, ep_error *out_error)
{
    ep_backend *backend = store->config.backend;
    const ep_expert_source *source = &data->source;
    const bool is_shared = resident->expert >= layer->shape.experts; /* often kept finer than the routed ones */
    if (!is_shared && source->format != layer->format) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE, "is %s, the model's config says %s",
                            ep_weight_format_name(source->format), ep_weight_format_name(layer->format));
    }
    size_t bytes = backend->ops->weights_bytes(backend, source);
    ep_err err = reserve(store, bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = backend->ops->weights_load(backend, source, &resident->weights, out_error);
    if (err != EP_OK) {
        unreserve(store, bytes);
        return err;
    }
    resident->bytes = bytes;
    memcpy(resident->sha256, data->sha256, sizeof(resident->sha256));
    return EP_OK;
}

/* Reads and packs one expert; no lock held. */
static ep_err load_expert(ep_weight_store *store, const layer_entry *layer, uint32_t layer_slot,
                          uint32_t expert, ep_resident **out_resident, ep_error *out_error)
{
    ep_expert_data data = {0};
    ep_err err = reserve(store, bytes_at_least(&layer->layer), out_error);
    if (err != EP_OK) {
        return err;
    }
    unreserve(store, bytes_at_least(&layer->layer));
    ep_resident *resident = calloc(1, sizeof(*resident));
    if (resident == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory");
    }
    resident->store = store;
    resident->layer_slot = layer_slot;
    resident->expert = expert;
    atomic_init(&resident->refs, 1);
    err = ep_checkpoint_read_expert(layer->layer.checkpoint, layer->layer.shape.layer, expert, &data,
                                    out_error);
    if (err == EP_OK) {
        err = pack(store, &layer->layer, &data, resident, out_error);
        ep_expert_data_free(&data);
    }
    if (err != EP_OK) {
        free(resident);
        return err;
    }
    *out_resident = resident;
    return EP_OK;
}

/* Lock held. */
static expert_entry *take_next(ep_weight_store *store)
{
    expert_entry *entry = store->queue;
    if (entry != NULL) {
        store->queue = entry->next;
        if (store->queue == NULL) {
            store->queue_end = &store->queue;
        }
        entry->next = NULL;
    }
    return entry;
}

/* Lock held. Writes the outcome of one load into its entry. */
static void settle(ep_weight_store *store, expert_entry *entry, ep_resident *resident, ep_err err,
                   const ep_error *error)
{
    layer_entry *layer = &store->layers[entry->layer_slot];
    store->stats.pending_count--;
    if (err == EP_OK) {
        entry->state = EP_EXPERT_RESIDENT;
        entry->resident = resident;
        layer->owned_count++;
        store->stats.resident_count++;
        store->stats.loads_total++;
        return;
    }
    entry->state = EP_EXPERT_FAILED;
    store->stats.failed_count++;
    snprintf(store->stats.last_error, sizeof(store->stats.last_error), "model %s layer %u expert %u: %.350s",
             layer->layer.model, layer->layer.shape.layer, entry->expert, error->text);
}

/* Loads one expert from the queue. Lock held on entry and exit, not in between. */
static void load_one(ep_weight_store *store, expert_entry *entry, ep_load_progress *progress)
{
    ep_error error;
    ep_resident *resident = NULL;
    const layer_entry *layer = &store->layers[entry->layer_slot];
    if (!entry->is_wanted) {
        entry->state = EP_EXPERT_ABSENT;
        store->stats.pending_count--;
        return;
    }
    entry->state = EP_EXPERT_LOADING;
    pthread_mutex_unlock(&store->lock);
    ep_error_clear(&error);
    ep_err err = load_expert(store, layer, entry->layer_slot, entry->expert, &resident, &error);
    if (err != EP_OK) {
        ep_log(EP_LOG_ERROR, "expert-load", "model %s layer %u expert %u failed: %s", layer->layer.model,
               layer->layer.shape.layer, entry->expert, error.text);
    }
    if (progress != NULL) {
        ep_load_progress_add(progress, 1, err == EP_OK ? bytes_at_least(&layer->layer) : 0);
    }
    pthread_mutex_lock(&store->lock);
    settle(store, entry, resident, err, &error);
    pthread_mutex_unlock(&store->lock);
    store->config.on_change(store->config.arg);
    pthread_mutex_lock(&store->lock);
}

/* Everything queued now is one batch with one progress bar. Lock held on entry and exit. */
static void load_batch(ep_weight_store *store)
{
    ep_load_progress progress;
    uint64_t count = 0;
    uint64_t bytes = 0;
    const char *label = store->layers[store->queue->layer_slot].layer.model;
    for (const expert_entry *e = store->queue; e != NULL; e = e->next) {
        const ep_weight_layer *layer = &store->layers[e->layer_slot].layer;
        count++;
        bytes += bytes_at_least(layer);
        label = strcmp(layer->model, label) == 0 ? label : "experts";
    }
    bool shows = store->config.shows_progress;
    if (shows) {
        ep_load_progress_init(&progress, STDERR_FILENO, label, count, bytes);
    }
    for (uint64_t i = 0; i < count && !store->stop; i++) {
        expert_entry *entry = take_next(store);
        if (entry == NULL) {
            break;
        }
        load_one(store, entry, shows ? &progress : NULL);
    }
    if (shows) {
        ep_load_progress_fini(&progress);
    }
}

static void *loader_main(void *arg)
{
    ep_weight_store *store = arg;
    pthread_mutex_lock(&store->lock);
    while (!store->stop) {
        if (store->queue == NULL) {
            pthread_cond_wait(&store->work, &store->lock);
            continue;
        }
        load_batch(store);
        if (store->queue == NULL) {
            pthread_mutex_unlock(&store->lock);
            store->config.on_change(store->config.arg);
            pthread_mutex_lock(&store->lock);
        }
    }
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

ep_err ep_weight_store_start(ep_weight_store *store, ep_error *out_error)
{
    int rc = pthread_create(&store->loader, NULL, loader_main, store);
    if (rc != 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot start the loader thread: %s", strerror(rc));
    }
    pthread_setname_np(store->loader, "ep-loader");
    store->loader_runs = true;
    return EP_OK;
}

void ep_weight_store_destroy(ep_weight_store *store)
{
    if (store == NULL) {
        return;
    }
    if (store->loader_runs) {
        pthread_mutex_lock(&store->lock);
        store->stop = true;
        pthread_cond_signal(&store->work);
        pthread_mutex_unlock(&store->lock);
        pthread_join(store->loader, NULL);
    }
    for (uint32_t l = 0; l < store->layers_count; l++) {
        for (uint32_t e = 0; e < store->layers[l].experts_count; e++) {
            ep_resident_release(store->layers[l].experts[e].resident);
        }
        free(store->layers[l].experts);
    }
    EP_ASSERT(store->resident_bytes == 0);
    free(store->layers);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->work);
    free(store);
}

/* Lock held. */
static void want_one(ep_weight_store *store, expert_entry *entry, bool wanted)
{
    entry->is_wanted = wanted;
    if (entry->state == EP_EXPERT_FAILED) {
        store->stats.failed_count--;
        entry->state = EP_EXPERT_ABSENT;
    }
    if (wanted && entry->state == EP_EXPERT_ABSENT) {
        entry->state = EP_EXPERT_QUEUED;
        entry->next = NULL;
        *store->queue_end = entry;
        store->queue_end = &entry->next;
        store->stats.pending_count++;
    }
}

void ep_weight_store_want(ep_weight_store *store, uint32_t layer_slot, const uint8_t *wanted)
{
    pthread_mutex_lock(&store->lock);
    EP_ASSERT(layer_slot < store->layers_count);
    layer_entry *layer = &store->layers[layer_slot];
    for (uint32_t e = 0; e < layer->experts_count; e++) {
        want_one(store, &layer->experts[e], wanted[e] != 0);
    }
    if (store->stats.failed_count == 0) {
        store->stats.last_error[0] = 0;
    }
    pthread_cond_signal(&store->work);
    pthread_mutex_unlock(&store->lock);
}

uint64_t ep_weight_store_unwanted_count(ep_weight_store *store)
{
    uint64_t count = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t l = 0; l < store->layers_count; l++) {
        for (uint32_t e = 0; e < store->layers[l].experts_count; e++) {
            const expert_entry *entry = &store->layers[l].experts[e];
            count += entry->state == EP_EXPERT_RESIDENT && !entry->is_wanted;
        }
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}

/* Takes one unwanted expert out of its entry; NULL when there is none from *layer_slot, *expert on. Lock
 * held. */
static ep_resident *take_unwanted(ep_weight_store *store, uint32_t *layer_slot, uint32_t *expert)
{
    for (; *layer_slot < store->layers_count; (*layer_slot)++, *expert = 0) {
        layer_entry *layer = &store->layers[*layer_slot];
        for (; *expert < layer->experts_count; (*expert)++) {
            expert_entry *entry = &layer->experts[*expert];
            if (entry->state == EP_EXPERT_RESIDENT && !entry->is_wanted) {
                ep_resident *resident = entry->resident;
                entry->resident = NULL;
                entry->state = EP_EXPERT_ABSENT;
                layer->owned_count--;
                store->stats.resident_count--;
                return resident;
            }
        }
    }
    return NULL;
}

void ep_weight_store_drop_unwanted(ep_weight_store *store)
{
    uint32_t layer_slot = 0;
    uint32_t expert = 0;
    ep_resident *resident;
    do {
        pthread_mutex_lock(&store->lock);
        resident = take_unwanted(store, &layer_slot, &expert);
        pthread_mutex_unlock(&store->lock);
        ep_resident_release(resident); /* outside the lock: unloading may take a while */
    } while (resident != NULL);
}

bool ep_weight_store_acquire(ep_weight_store *store, uint32_t layer_slot, const uint32_t *experts,
                             uint32_t count, ep_resident **out_residents, uint32_t *out_missing,
                             ep_expert_state *out_state)
{
    uint32_t i;
    pthread_mutex_lock(&store->lock);
    const layer_entry *layer = &store->layers[layer_slot];
    for (i = 0; i < count; i++) {
        const expert_entry *entry = &layer->experts[experts[i]];
        if (entry->state != EP_EXPERT_RESIDENT) {
            *out_missing = experts[i];
            *out_state = entry->state;
            break;
        }
        atomic_fetch_add_explicit(&entry->resident->refs, 1, memory_order_relaxed);
        out_residents[i] = entry->resident;
    }
    pthread_mutex_unlock(&store->lock);
    if (i == count) {
        return true;
    }
    while (i > 0) {
        ep_resident_release(out_residents[--i]);
    }
    return false;
}

static uint32_t short_digest(const uint8_t *sha256)
{
    return (uint32_t)sha256[0] | (uint32_t)sha256[1] << 8 | (uint32_t)sha256[2] << 16 | (uint32_t)sha256[3] << 24;
}

uint32_t ep_weight_store_owned(ep_weight_store *store, uint32_t layer_slot, uint32_t *out, uint32_t *out_digests)
{
    uint32_t n = 0;
    pthread_mutex_lock(&store->lock);
    const layer_entry *layer = &store->layers[layer_slot];
    for (uint32_t e = 0; e < layer->experts_count; e++) {
        if (layer->experts[e].state == EP_EXPERT_RESIDENT) {
            if (out_digests != NULL) {
                out_digests[n] = short_digest(layer->experts[e].resident->sha256);
            }
            out[n++] = e;
        }
    }
    pthread_mutex_unlock(&store->lock);
    return n;
}

uint32_t ep_weight_store_owned_count(ep_weight_store *store, uint32_t layer_slot)
{
    pthread_mutex_lock(&store->lock);
    uint32_t count = store->layers[layer_slot].owned_count;
    pthread_mutex_unlock(&store->lock);
    return count;
}

void ep_weight_store_read_stats(ep_weight_store *store, ep_weight_stats *out_stats)
{
    pthread_mutex_lock(&store->lock);
    *out_stats = store->stats;
    out_stats->resident_bytes = store->resident_bytes;
    pthread_mutex_unlock(&store->lock);
}
