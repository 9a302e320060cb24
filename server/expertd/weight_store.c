/* SPDX-License-Identifier: Apache-2.0 */
/* The table of experts: which are wanted, owned and resident, references to them, and requests that
 * wait for cold ones. */
#include "expertd/weight_store.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "expertd/weight_store_private.h"

#define PREFETCHES_MAX 64 /* the most after a visit; they end earlier when there is no room */

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

static void on_deadline(ep_timer *timer, void *arg);

static void init_devices(ep_weight_store *store)
{
    const ep_weight_store_config *config = &store->config;
    store->devices_count = store->devices_left = config->backends_count;
    for (uint32_t d = 0; d < config->backends_count; d++) {
        ep_backend_device device = {.weight_bytes_max = config->weight_bytes_max};
        if (config->backends[d]->ops->device_read != NULL) {
            config->backends[d]->ops->device_read(config->backends[d], &device);
        }
        store->devices[d] =
            (device_entry){.backend = config->backends[d], .limit_bytes = device.weight_bytes_max};
        store->has_budget |= device.weight_bytes_max != 0;
    }
}

ep_err ep_weight_store_create(const ep_weight_store_config *config, ep_weight_store **out_store,
                              ep_error *out_error)
{
    EP_ASSERT(config->backends_count == 1 || (config->backends_count > 1 && config->cache == NULL));
    ep_weight_store *store = calloc(1, sizeof(*store));
    device_entry *devices = calloc(config->backends_count, sizeof(*devices));
    if (store == NULL || devices == NULL || ep_expert_heat_create(&store->heat) != EP_OK) {
        free(store);
        free(devices);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the weight store");
    }
    store->config = *config;
    store->devices = devices;
    init_devices(store);
    store->urgent.end = &store->urgent.first;
    store->first.end = &store->first.first;
    store->later.end = &store->later.first;
    store->deadline_ns = EP_TIME_NEVER;
    ep_timer_init(&store->deadline, on_deadline, store);
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->work, NULL);
    pthread_cond_init(&store->room, NULL);
    pthread_cond_init(&store->save, NULL);
    store->is_warm_due = config->warms_up;
    *out_store = store;
    return EP_OK;
}

static uint64_t matrices_bytes(const ep_layer_shape *shape, ep_weight_format format,
                               ep_weight_format down_format)
{
    const uint64_t wide = ep_weight_matrix_bytes(format, shape->inner, shape->hidden);
    return (ep_activation_has_gate(shape->activation) ? 2 : 1) * wide +
           ep_weight_matrix_bytes(down_format == EP_WEIGHTS_NONE ? format : down_format,
                                  shape->hidden, shape->inner);
}

uint64_t ep_weight_layer_bytes_at_least(const ep_weight_layer *layer)
{
    return matrices_bytes(&layer->shape, layer->format, layer->down_format);
}

uint64_t ep_weight_layer_bytes_read(const ep_weight_layer *layer)
{
    return layer->file_format == EP_WEIGHTS_NONE
               ? ep_weight_layer_bytes_at_least(layer)
               : matrices_bytes(&layer->shape, layer->file_format, layer->file_down_format);
}

bool ep_weight_layer_bytes_packed(const ep_weight_store *store, const ep_weight_layer *layer,
                                  uint32_t expert, uint64_t *out_bytes)
{
    ep_backend *backend = store->devices[0].backend;
    const uint64_t least = ep_weight_layer_bytes_at_least(layer);
    ep_expert_source outline;
    ep_error error;
    if (ep_checkpoint_outline_expert(layer->checkpoint, layer->shape.layer, expert, &outline,
                                     &error) != EP_OK) {
        return false;
    }
    const uint64_t packed = backend->ops->weights_bytes(backend, &outline);
    *out_bytes = packed > least || expert >= layer->shape.experts ? packed : least;
    return true;
}

/* Limit of the device with the least; 0: no device has a limit. */
static uint64_t smallest_limit(const ep_weight_store *store)
{
    uint64_t limit = store->devices[0].limit_bytes;
    for (uint32_t d = 1; d < store->devices_count; d++) {
        limit = store->devices[d].limit_bytes < limit ? store->devices[d].limit_bytes : limit;
    }
    return limit;
}

/* The error for a budget, or without one a device, that cannot hold one expert. */
static ep_err refuse_budget(const ep_weight_store *store, const ep_weight_layer *layer,
                            bool is_shared, uint64_t bytes, ep_error *out_error)
{
    const bool is_set = store->config.weight_bytes_max != 0;
    return ep_error_set(
        out_error, EP_ERR_BAD_CONFIG,
        "%s %" PRIu64 "%s, one %sexpert of layer %u of model %s needs %" PRIu64
        " bytes; allowed: at least that%s",
        is_set ? "weight_bytes_max is" : "a device has room for", smallest_limit(store),
        is_set ? "" : " bytes of weights", is_shared ? "shared " : "", layer->shape.layer,
        layer->model, bytes,
        is_set ? ", or 0"
               : "; free its memory, or leave the device out of ASCEND_RT_VISIBLE_DEVICES");
}

/* Errors: BAD_CONFIG (the budget cannot hold one expert). */
static ep_err measure_experts(const ep_weight_store *store, const ep_weight_layer *layer,
                              uint64_t *out_bytes, uint64_t *out_bytes_max, ep_error *out_error)
{
    const uint32_t routed = layer->shape.experts;
    const uint64_t limit = smallest_limit(store);
    *out_bytes = 0;
    *out_bytes_max = 0;
    /* All routed experts have one size, so one is measured; shared experts are wider, and often
     * kept in a finer format. If no expert can be read, the shape gives the size. */
    for (uint32_t e = 0; e < routed + layer->shape.shared_experts;
         e = e < routed ? routed : e + 1) {
        uint64_t bytes = ep_weight_layer_bytes_at_least(layer);
        while (!ep_weight_layer_bytes_packed(store, layer, e, &bytes) && e + 1 < routed) {
            e++;
        }
        if (limit != 0 && bytes > limit) {
            return refuse_budget(store, layer, e >= routed, bytes, out_error);
        }
        *out_bytes = e < routed || *out_bytes == 0 ? bytes : *out_bytes;
        *out_bytes_max = bytes > *out_bytes_max ? bytes : *out_bytes_max;
    }
    return EP_OK;
}

ep_err ep_weight_store_add_layer(ep_weight_store *store, const ep_weight_layer *layer,
                                 uint32_t *out_slot, ep_error *out_error)
{
    const uint32_t count = layer->shape.experts + layer->shape.shared_experts;
    uint64_t bytes, bytes_max;
    EP_ASSERT(!store->loader_runs);
    if (measure_experts(store, layer, &bytes, &bytes_max, out_error) != EP_OK) {
        return EP_ERR_BAD_CONFIG;
    }
    layer_entry *grown = realloc(store->layers, (store->layers_count + 1) * sizeof(*grown));
    if (grown != NULL) {
        store->layers = grown;
    }
    expert_entry *experts = calloc(count > 0 ? count : 1, sizeof(*experts));
    if (grown == NULL || experts == NULL ||
        ep_expert_heat_add_layer(store->heat, count, bytes) != EP_OK) {
        free(experts);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for layer %u of model %s",
                            layer->shape.layer, layer->model);
    }
    for (uint32_t i = 0; i < count; i++) {
        experts[i].layer_slot = store->layers_count;
        experts[i].expert = i;
        experts[i].reserved_on = EP_WEIGHT_NO_DEVICE;
    }
    store->layers[store->layers_count] = (layer_entry){
        .layer = *layer, .experts_count = count, .expert_bytes_max = bytes_max, .experts = experts};
    *out_slot = store->layers_count++;
    return EP_OK;
}

ep_err ep_weight_store_start(ep_weight_store *store, ep_error *out_error)
{
    int rc = pthread_create(&store->loader, NULL, ep_weight_loader_main, store);
    if (rc != 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot start the loader thread: %s",
                            strerror(rc));
    }
    pthread_setname_np(store->loader, "ep-loader");
    store->loader_runs = true;
    if (store->config.cache != NULL) {
        rc = pthread_create(&store->saver, NULL, ep_weight_saver_main, store);
        if (rc != 0) {
            return ep_error_set(out_error, EP_ERR_IO,
                                "cannot start the thread that keeps packed weights: %s",
                                strerror(rc));
        }
        pthread_setname_np(store->saver, "ep-saver");
        store->saver_runs = true;
    }
    return EP_OK;
}

void ep_weight_store_stop(ep_weight_store *store)
{
    ep_weight_store_close(store, EP_ERR_CANCELLED);
    if (store->loader_runs) {
        pthread_mutex_lock(&store->lock);
        store->stop = true;
        pthread_cond_broadcast(&store->work);
        pthread_cond_broadcast(&store->room);
        pthread_cond_broadcast(&store->save);
        pthread_mutex_unlock(&store->lock);
        pthread_join(store->loader, NULL);
        store->loader_runs = false;
    }
    if (store->saver_runs) {
        pthread_join(store->saver, NULL);
        store->saver_runs = false;
    }
    if (store->config.timers != NULL) {
        ep_timer_cancel_wait(store->config.timers, &store->deadline);
    }
}

void ep_weight_store_destroy(ep_weight_store *store)
{
    if (store == NULL) {
        return;
    }
    ep_weight_store_stop(store);
    for (uint32_t l = 0; l < store->layers_count; l++) {
        for (uint32_t e = 0; e < store->layers[l].experts_count; e++) {
            ep_resident_release(store->layers[l].experts[e].resident);
        }
        free(store->layers[l].experts);
    }
    EP_ASSERT(ep_weight_store_bytes(store) == 0);
    free(store->layers);
    free(store->devices);
    ep_expert_heat_destroy(store->heat);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->work);
    pthread_cond_destroy(&store->room);
    pthread_cond_destroy(&store->save);
    free(store);
}

/* ---- references ---- */

/* Called when the last reference is gone, so nothing else uses the expert. */
static void unload(ep_resident *resident)
{
    ep_weight_store *store = resident->store;
    device_entry *device = &store->devices[resident->device];
    resident->backend->ops->weights_unload(resident->backend, resident->weights);
    pthread_mutex_lock(&store->lock);
    device->resident_bytes -= resident->bytes;
    device->leaving_bytes -= resident->is_leaving ? resident->bytes : 0;
    pthread_cond_broadcast(&store->room);
    pthread_mutex_unlock(&store->lock);
    free(resident);
}

void ep_resident_ref(ep_resident *resident, uint32_t count)
{
    atomic_fetch_add_explicit(&resident->refs, count, memory_order_relaxed);
}

void ep_resident_release(ep_resident *resident)
{
    if (resident != NULL &&
        atomic_fetch_sub_explicit(&resident->refs, 1, memory_order_acq_rel) == 1) {
        unload(resident);
    }
}

void ep_weight_entry_place(ep_weight_store *store, const expert_entry *entry)
{
    /* An expert whose load has just failed is not prefetched: it would be chosen again and
     * again. */
    const bool is_cold = entry->state == EP_EXPERT_ABSENT && entry->is_owned && entry->is_wanted &&
                         entry->retry_ns <= ep_clock_now_ns();
    ep_expert_heat_set_place(store->heat, entry->layer_slot, entry->expert,
                             entry->state == EP_EXPERT_RESIDENT ? EP_HEAT_RESIDENT
                             : is_cold                          ? EP_HEAT_ABSENT
                                                                : EP_HEAT_BARRED);
}

ep_resident *ep_weight_entry_evict(ep_weight_store *store, expert_entry *entry)
{
    ep_resident *resident = entry->resident;
    store->unsaved_count -= !entry->is_saved;
    resident->is_leaving = true;
    store->devices[resident->device].leaving_bytes += resident->bytes;
    store->stats.resident_count--;
    store->layers[entry->layer_slot].resident_count--;
    store->stats.prefetches_useless_total += entry->is_prefetched;
    entry->is_prefetched = false;
    entry->resident = NULL;
    entry->state = EP_EXPERT_ABSENT;
    ep_weight_entry_place(store, entry);
    return resident;
}

void ep_weight_entry_own(ep_weight_store *store, expert_entry *entry, bool is_owned)
{
    if (entry->is_owned != is_owned) {
        store->stats.owned_count += is_owned ? 1u : -1ull;
        store->stats.owned_changes++;
    }
    entry->is_owned = is_owned;
}

/* ---- lost devices ---- */

ep_resident *ep_weight_entry_lose(ep_weight_store *store, expert_entry *entry)
{
    const bool is_lost = entry->resident != NULL && store->devices[entry->resident->device].is_lost;
    ep_resident *resident = is_lost ? ep_weight_entry_evict(store, entry) : NULL;
    if (store->devices_left == 0 && entry->is_owned && entry->state == EP_EXPERT_ABSENT) {
        entry->state = entry->is_wanted ? EP_EXPERT_FAILED : EP_EXPERT_ABSENT;
        store->stats.failed_count += entry->is_wanted;
        ep_weight_entry_own(store, entry, false);
        ep_weight_entry_place(store, entry);
    }
    return resident;
}

/* Lock held, but released while memory is freed. The loader handles experts that it is loading. */
static void lose_layer(ep_weight_store *store, layer_entry *layer)
{
    for (uint32_t e = 0; e < layer->experts_count; e++) {
        ep_resident *resident = ep_weight_entry_lose(store, &layer->experts[e]);
        if (resident != NULL) {
            pthread_mutex_unlock(&store->lock);
            ep_resident_release(resident);
            pthread_mutex_lock(&store->lock);
        }
    }
}

void ep_weight_store_lose(ep_weight_store *store, uint32_t index, const char *why)
{
    pthread_mutex_lock(&store->lock);
    const bool is_news = !store->devices[index].is_lost;
    store->devices[index].is_lost = true;
    store->devices_left -= is_news;
    if (is_news) {
        snprintf(store->lost_why, sizeof(store->lost_why), "%s", why);
    }
    if (is_news && store->devices_left == 0) {
        store->stats.last_reason = EP_ERR_DEVICE_LOST;
        snprintf(store->stats.last_error, sizeof(store->stats.last_error), "%s", why);
    }
    for (uint32_t l = 0; l < store->layers_count; l++) {
        lose_layer(store, &store->layers[l]);
    }
    pthread_cond_broadcast(&store->room); /* waiting for this device's memory is in vain */
    pthread_mutex_unlock(&store->lock);
    if (is_news) {
        store->config.on_change(store->config.arg);
    }
}

void ep_weight_layer_key(const ep_weight_layer *layer, uint32_t expert,
                         ep_weight_cache_key *out_key)
{
    *out_key = (ep_weight_cache_key){
        .numerics = layer->numerics, .layer = layer->shape.layer, .expert = expert};
    memcpy(out_key->identity, layer->identity, sizeof(out_key->identity));
}

/* ---- queues ---- */

void ep_entry_queue_add(entry_queue *queue, expert_entry *entry)
{
    entry->next = NULL;
    *queue->end = entry;
    queue->end = &entry->next;
}

expert_entry *ep_entry_queue_take(entry_queue *queue)
{
    expert_entry *entry = queue->first;
    if (entry != NULL) {
        queue->first = entry->next;
        if (queue->first == NULL) {
            queue->end = &queue->first;
        }
        entry->next = NULL;
    }
    return entry;
}

void ep_weight_entry_queue_first(ep_weight_store *store, expert_entry *entry)
{
    entry->state = EP_EXPERT_QUEUED;
    ep_entry_queue_add(&store->first, entry);
    store->stats.pending_count++;
}

/* ---- what is wanted ---- */

/* Lock held. */
static void want_one(ep_weight_store *store, expert_entry *entry, bool wanted)
{
    entry->is_wanted = wanted;
    if (entry->state == EP_EXPERT_FAILED) {
        store->stats.failed_count--;
        entry->state = EP_EXPERT_ABSENT;
    }
    if (wanted && entry->state == EP_EXPERT_ABSENT && !entry->is_owned) {
        ep_weight_entry_queue_first(store, entry);
    }
    ep_weight_entry_place(store, entry);
}

void ep_weight_refusals_end(ep_weight_store *store)
{
    const bool was_refused = store->stats.is_refused;
    store->refused_count = 0;
    store->stats.is_refused = false;
    if (was_refused && store->stats.failed_count == 0) {
        store->stats.last_error[0] = 0;
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
    ep_weight_refusals_end(store);
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
            count += entry->is_owned && !entry->is_wanted;
        }
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}

/* Ends the ownership of the next unwanted expert from *layer_slot, *expert on; false when there is
 * none. *out_resident: what to release. Lock held. */
static bool drop_next(ep_weight_store *store, uint32_t *layer_slot, uint32_t *expert,
                      ep_resident **out_resident)
{
    for (; *layer_slot < store->layers_count; (*layer_slot)++, *expert = 0) {
        layer_entry *layer = &store->layers[*layer_slot];
        for (; *expert < layer->experts_count; (*expert)++) {
            expert_entry *entry = &layer->experts[*expert];
            if (!entry->is_owned || entry->is_wanted) {
                continue;
            }
            ep_weight_entry_own(store, entry, false);
            *out_resident =
                entry->state == EP_EXPERT_RESIDENT ? ep_weight_entry_evict(store, entry) : NULL;
            return true;
        }
    }
    return false;
}

void ep_weight_store_drop_unwanted(ep_weight_store *store)
{
    uint32_t layer_slot = 0;
    uint32_t expert = 0;
    bool found;
    do {
        ep_resident *resident = NULL;
        pthread_mutex_lock(&store->lock);
        found = drop_next(store, &layer_slot, &expert, &resident);
        pthread_mutex_unlock(&store->lock);
        ep_resident_release(resident); /* without the lock, as unloading may take a while */
    } while (found);
}

/* ---- requests ---- */

bool ep_weight_store_acquire(ep_weight_store *store, uint32_t layer_slot, const uint32_t *experts,
                             const uint32_t *rows, uint32_t count, ep_resident **out_residents,
                             uint32_t *out_missing, ep_expert_state *out_state)
{
    uint32_t i;
    pthread_mutex_lock(&store->lock);
    const layer_entry *layer = &store->layers[layer_slot];
    for (i = 0; i < count; i++) {
        const expert_entry *entry = &layer->experts[experts[i]];
        if (!entry->is_owned) {
            *out_missing = experts[i];
            *out_state = entry->state;
            break;
        }
        out_residents[i] = entry->resident;
        if (entry->resident != NULL) {
            ep_resident_ref(entry->resident, 1);
        }
    }
    const bool is_whole = i == count;
    uint32_t hits = 0;
    for (uint32_t j = 0; is_whole && j < count; j++) {
        expert_entry *entry = &layer->experts[experts[j]];
        if (entry->state == EP_EXPERT_RESIDENT) {
            hits++;
            store->stats.prefetches_useful_total += entry->is_prefetched;
            entry->is_prefetched = false;
        }
    }
    store->stats.hits_total += hits;
    store->stats.misses_total += is_whole ? count - hits : 0;
    if (is_whole && store->has_budget) { /* without a budget nothing is ever evicted */
        ep_expert_heat_visit(store->heat, layer_slot, experts, rows, count);
        ep_load_room_visit(&store->room_ahead, ep_clock_now_ns());
        if (store->config.prefetches && store->stats.owned_count > store->stats.resident_count) {
            store->prefetches_due = PREFETCHES_MAX;
            /* otherwise ep_weight_store_wait wakes the loader for cold experts, which go first */
            if (hits == count) {
                pthread_cond_signal(&store->work);
            }
        }
    }
    pthread_mutex_unlock(&store->lock);
    while (!is_whole && i > 0) {
        ep_resident_release(out_residents[--i]);
    }
    return is_whole;
}

static void list_add(ep_weight_wait **list, ep_weight_wait *wait)
{
    wait->next = *list;
    wait->link = list;
    if (wait->next != NULL) {
        wait->next->link = &wait->next;
    }
    *list = wait;
}

static void list_remove(ep_weight_wait *wait)
{
    *wait->link = wait->next;
    if (wait->next != NULL) {
        wait->next->link = wait->link;
    }
}

ep_weight_wait *ep_weight_waits_take(ep_weight_store *store, const expert_entry *entry,
                                     ep_resident *resident)
{
    ep_weight_wait *taken = NULL;
    for (ep_weight_wait *wait = store->waits, *next; wait != NULL; wait = next) {
        next = wait->next;
        if (wait->layer_slot == entry->layer_slot && wait->expert == entry->expert) {
            list_remove(wait);
            store->stats.waiting_count--;
            wait->resident = resident;
            if (resident != NULL) {
                ep_resident_ref(resident, 1);
            }
            list_add(&taken, wait);
        }
    }
    return taken;
}

bool ep_weight_waits_any(const ep_weight_store *store, const expert_entry *entry)
{
    for (const ep_weight_wait *wait = store->waits; wait != NULL; wait = wait->next) {
        if (wait->layer_slot == entry->layer_slot && wait->expert == entry->expert &&
            (wait->is_dropped == NULL || !wait->is_dropped(wait))) {
            return true;
        }
    }
    return false;
}

void ep_weight_waits_end(ep_weight_wait *list, const ep_error *error)
{
    for (ep_weight_wait *wait = list, *next; wait != NULL; wait = next) {
        next = wait->next; /* ready() may free the wait */
        wait->ready(wait, wait->resident, wait->resident == NULL ? error : NULL);
    }
}

/* Makes the error of a wait that ends without its expert. */
static void describe(const ep_weight_store *store, const ep_weight_wait *wait, ep_err code,
                     ep_expert_state state, uint64_t now_ns, ep_error *out_error)
{
    const ep_weight_layer *layer = &store->layers[wait->layer_slot].layer;
    ep_error_set(out_error, code,
                 "model %s layer %u expert %u is %s: waited %" PRIu64
                 " ms for it (weight_bytes_max %" PRIu64 ")",
                 layer->model, layer->shape.layer, wait->expert,
                 state == EP_EXPERT_LOADING  ? "being loaded"
                 : state == EP_EXPERT_QUEUED ? "queued for loading"
                                             : "not in memory",
                 (uint64_t)((now_ns - wait->since_ns) / EP_NS_PER_MS),
                 store->devices[0].limit_bytes);
    out_error->layer = (int32_t)layer->shape.layer;
    out_error->expert = (int32_t)wait->expert;
}

/* Lock held. Arms the timer for the earliest deadline of all waits. */
static void arm_deadline(ep_weight_store *store)
{
    uint64_t earliest_ns = EP_TIME_NEVER;
    for (const ep_weight_wait *wait = store->waits; wait != NULL; wait = wait->next) {
        earliest_ns = wait->deadline_ns < earliest_ns ? wait->deadline_ns : earliest_ns;
    }
    if (store->config.timers != NULL && earliest_ns < store->deadline_ns) {
        store->deadline_ns = earliest_ns;
        if (ep_timer_arm(store->config.timers, &store->deadline, earliest_ns) != EP_OK) {
            store->deadline_ns = EP_TIME_NEVER; /* the waits end with the load */
        }
    }
}

/* Ends all waits with reason; if that is EP_OK, those whose deadline has passed. One by one,
 * because their errors differ. */
static void end_waits(ep_weight_store *store, ep_err reason)
{
    for (;;) {
        const uint64_t now_ns = ep_clock_now_ns();
        ep_error error;
        pthread_mutex_lock(&store->lock);
        ep_weight_wait *wait = store->waits;
        while (wait != NULL && reason == EP_OK && wait->deadline_ns > now_ns) {
            wait = wait->next;
        }
        if (wait == NULL) {
            arm_deadline(store);
            pthread_mutex_unlock(&store->lock);
            return;
        }
        list_remove(wait);
        store->stats.waiting_count--;
        const expert_entry *entry = &store->layers[wait->layer_slot].experts[wait->expert];
        describe(store, wait, reason != EP_OK ? reason : EP_ERR_UNAVAILABLE, entry->state, now_ns,
                 &error);
        pthread_mutex_unlock(&store->lock);
        wait->ready(wait, NULL, &error);
    }
}

static void on_deadline(ep_timer *timer, void *arg)
{
    ep_weight_store *store = arg;
    (void)timer;
    pthread_mutex_lock(&store->lock);
    store->deadline_ns = EP_TIME_NEVER;
    pthread_mutex_unlock(&store->lock);
    end_waits(store, EP_OK);
}

void ep_weight_store_close(ep_weight_store *store, ep_err reason)
{
    pthread_mutex_lock(&store->lock);
    store->close_reason = store->close_reason == EP_OK ? reason : store->close_reason;
    pthread_mutex_unlock(&store->lock);
    end_waits(store, reason);
}

/* Lock held. Adds a wait to the store's list; to *ended if it need not wait; to *later if the
 * expert's load has just failed. */
static void wait_one(ep_weight_store *store, ep_weight_wait *wait, ep_weight_wait **ended,
                     ep_weight_wait **later)
{
    expert_entry *entry = &store->layers[wait->layer_slot].experts[wait->expert];
    wait->resident = entry->resident;
    if (entry->resident != NULL) {
        ep_resident_ref(entry->resident, 1);
    }
    if (entry->resident != NULL || !entry->is_owned) {
        list_add(ended, wait);
        return;
    }
    if (entry->state == EP_EXPERT_ABSENT && wait->since_ns < entry->retry_ns) {
        list_add(later, wait);
        return;
    }
    list_add(&store->waits, wait);
    store->stats.waiting_count++;
    if (entry->state == EP_EXPERT_ABSENT) {
        entry->state = EP_EXPERT_QUEUED;
        ep_weight_entry_place(store, entry);
        ep_entry_queue_add(&store->urgent, entry);
        ep_load_room_needed(&store->room_ahead, wait->since_ns);
    }
}

void ep_weight_store_wait(ep_weight_store *store, uint32_t layer_slot, ep_weight_wait *waits,
                          uint32_t count)
{
    const uint64_t now_ns = ep_clock_now_ns();
    ep_weight_wait *ended = NULL;
    ep_weight_wait *later = NULL;
    ep_error error, later_error;
    pthread_mutex_lock(&store->lock);
    const ep_err reason = store->close_reason;
    for (uint32_t i = 0; i < count; i++) {
        waits[i].layer_slot = layer_slot;
        waits[i].since_ns = now_ns;
        wait_one(store, &waits[i], &ended, &later);
    }
    arm_deadline(store);
    pthread_cond_signal(&store->work);
    if (ended != NULL && ended->resident == NULL) { /* dropped between acquire and wait */
        describe(store, ended, EP_ERR_NOT_OWNER, EP_EXPERT_ABSENT, now_ns, &error);
    } else {
        ep_error_set(
            &error, EP_ERR_NOT_OWNER, "model %s layer %u: an expert is no longer held here",
            store->layers[layer_slot].layer.model, store->layers[layer_slot].layer.shape.layer);
    }
    if (later != NULL) {
        ep_error_set(&later_error, EP_ERR_UNAVAILABLE,
                     "model %s layer %u expert %u could not be loaded just now; it is tried again",
                     store->layers[layer_slot].layer.model,
                     store->layers[layer_slot].layer.shape.layer, later->expert);
        later_error.layer = (int32_t)store->layers[layer_slot].layer.shape.layer;
        later_error.expert = (int32_t)later->expert;
    }
    pthread_mutex_unlock(&store->lock);
    ep_weight_waits_end(ended, &error);
    ep_weight_waits_end(later, &later_error);
    if (reason != EP_OK) {
        end_waits(store, reason);
    }
}

/* ---- what others ask ---- */

uint32_t ep_weight_store_owned(ep_weight_store *store, uint32_t layer_slot, uint32_t *out,
                               uint32_t *out_digests)
{
    uint32_t n = 0;
    pthread_mutex_lock(&store->lock);
    const layer_entry *layer = &store->layers[layer_slot];
    for (uint32_t e = 0; e < layer->experts_count; e++) {
        if (layer->experts[e].is_owned) {
            if (out_digests != NULL) {
                out_digests[n] = layer->experts[e].digest;
            }
            out[n++] = e;
        }
    }
    pthread_mutex_unlock(&store->lock);
    return n;
}

uint64_t ep_weight_store_expert_bytes(const ep_weight_store *store, uint32_t layer_slot)
{
    return store->layers[layer_slot].expert_bytes_max;
}

uint32_t ep_weight_store_resident_count(ep_weight_store *store, uint32_t layer_slot)
{
    pthread_mutex_lock(&store->lock);
    uint32_t count = store->layers[layer_slot].resident_count;
    pthread_mutex_unlock(&store->lock);
    return count;
}

ep_weight_quant_stats ep_weight_store_quant(ep_weight_store *store, uint32_t layer_slot)
{
    pthread_mutex_lock(&store->lock);
    const ep_weight_quant_stats quant = store->layers[layer_slot].quant;
    pthread_mutex_unlock(&store->lock);
    return quant;
}

void ep_weight_store_read_stats(ep_weight_store *store, ep_weight_stats *out_stats)
{
    pthread_mutex_lock(&store->lock);
    *out_stats = store->stats;
    out_stats->resident_bytes = ep_weight_store_bytes(store);
    out_stats->pending_count += store->is_warm_due && store->stats.resident_count > 0;
    pthread_mutex_unlock(&store->lock);
}

uint64_t ep_weight_store_bytes(const ep_weight_store *store)
{
    uint64_t bytes = 0;
    for (uint32_t d = 0; d < store->devices_count; d++) {
        bytes += store->devices[d].resident_bytes;
    }
    return bytes;
}

uint64_t ep_weight_store_capacity(const ep_weight_store *store)
{
    uint64_t bytes = 0;
    for (uint32_t d = 0; d < store->devices_count; d++) {
        bytes += store->devices[d].limit_bytes;
    }
    return bytes;
}

uint64_t ep_weight_store_device_bytes(ep_weight_store *store, uint32_t index)
{
    pthread_mutex_lock(&store->lock);
    const uint64_t bytes = store->devices[index].resident_bytes;
    pthread_mutex_unlock(&store->lock);
    return bytes;
}
