/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for one load: which device has room, and which experts are evicted if none has. */
#include <inttypes.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/log.h"
#include "expertd/weight_load.h"

/* Evicted at most when memory is refused below the budget, until a load succeeds: the bytes of so
 * many experts like the one to load. If more would be needed, it is not experts that use the
 * memory, and those that are here go on serving. */
#define EVICTED_MAX 4

/* Which experts may be evicted. */
typedef struct victim_search {
    const ep_weight_store *store;
    uint32_t device; /* EP_WEIGHT_NO_DEVICE: any */
} victim_search;

static bool is_idle(void *arg, uint32_t layer, uint32_t expert)
{
    const victim_search *search = arg;
    const ep_resident *resident = search->store->layers[layer].experts[expert].resident;
    return resident != NULL &&
           (search->device == EP_WEIGHT_NO_DEVICE || resident->device == search->device) &&
           atomic_load_explicit(&resident->refs, memory_order_acquire) == 1;
}

/* Lock held, but not while memory is freed. */
static void evict(ep_weight_store *store, const ep_heat_choice *victim)
{
    expert_entry *entry = &store->layers[victim->layer].experts[victim->expert];
    ep_resident *resident = ep_weight_entry_evict(store, entry);
    store->stats.evictions_total++;
    pthread_mutex_unlock(&store->lock);
    ep_resident_release(resident);
    pthread_mutex_lock(&store->lock);
}

static bool fits(const device_entry *device, uint64_t bytes, uint64_t used)
{
    return !device->is_lost && (device->limit_bytes == 0 || (bytes <= device->limit_bytes &&
                                                             used <= device->limit_bytes - bytes));
}

/*
 * Chooses, of the devices with room that do not refuse memory, one with the fewest experts of the
 * layer, so that all devices compute a call for it; of these the emptiest. Experts that helpers are
 * loading count as loaded. refusing: bit d stands for device d. Lock held. False: there is none.
 */
static bool choose_device(const ep_weight_store *store, uint64_t refusing, uint32_t layer_slot,
                          uint64_t bytes, uint32_t *out_device)
{
    const layer_entry *layer = &store->layers[layer_slot];
    uint32_t counts[EP_BACKEND_DEVICES_MAX] = {0};
    uint32_t best = EP_WEIGHT_NO_DEVICE;
    for (uint32_t e = 0; store->devices_count > 1 && e < layer->experts_count; e++) {
        const expert_entry *entry = &layer->experts[e];
        const uint32_t on = entry->resident != NULL ? entry->resident->device : entry->reserved_on;
        if (on != EP_WEIGHT_NO_DEVICE) {
            counts[on]++;
        }
    }
    for (uint32_t d = 0; d < store->devices_count; d++) {
        const uint64_t used = store->devices[d].resident_bytes;
        const bool is_better =
            best == EP_WEIGHT_NO_DEVICE || counts[d] < counts[best] ||
            (counts[d] == counts[best] && used < store->devices[best].resident_bytes);
        const bool is_possible = fits(&store->devices[d], bytes, used) && (refusing >> d & 1) == 0;
        best = is_possible && is_better ? d : best;
    }
    *out_device = best;
    return best != EP_WEIGHT_NO_DEVICE;
}

/* Whether some device could hold so many bytes: when it is empty, or, with is_empty false, when
 * experts that only jobs still hold are gone. Lock held. */
static bool may_fit(const ep_weight_store *store, uint64_t bytes, bool is_empty)
{
    for (uint32_t d = 0; d < store->devices_count; d++) {
        const device_entry *device = &store->devices[d];
        if (fits(device, bytes, is_empty ? 0 : device->resident_bytes - device->leaving_bytes)) {
            return true;
        }
    }
    return false;
}

/*
 * Evicts experts until a device has room. The coldest that no job holds go first. When jobs hold
 * all, the coldest leaves the table: no new job gets it, and its bytes come back with its last job.
 * So a load never waits for an expert to become idle by chance, nor for the memory of a prefetch
 * that gave way to it. Room is made on the device of the first victim. Lock held, but not while
 * memory is freed or waited for.
 */
static bool make_room(loader *self, uint32_t layer_slot, uint64_t bytes, load_kind kind,
                      uint32_t *out_device)
{
    ep_weight_store *store = self->store;
    victim_search search = {store, EP_WEIGHT_NO_DEVICE};
    while (!choose_device(store, self->refusing, layer_slot, bytes, out_device)) {
        ep_heat_choice victim;
        if (self->refusing != 0) { /* no other device has room: ask these again */
            self->refusing = 0;
            continue;
        }
        if (kind == LOAD_FIRST || store->stop || !may_fit(store, bytes, true)) {
            return false;
        }
        if (kind == LOAD_URGENT && !may_fit(store, bytes + self->ahead_bytes, true)) {
            self->is_blocked = true;
            return false;
        }
        if (ep_expert_heat_victim(store->heat, kind == LOAD_PREFETCH, is_idle, &search, &victim)) {
            search.device = store->layers[victim.layer].experts[victim.expert].resident->device;
            evict(store, &victim);
        } else if (search.device != EP_WEIGHT_NO_DEVICE) {
            search.device = EP_WEIGHT_NO_DEVICE;
        } else if (kind == LOAD_PREFETCH) {
            return false;
        } else if (!may_fit(store, bytes, false) &&
                   ep_expert_heat_victim(store->heat, false, NULL, NULL, &victim)) {
            evict(store, &victim);
        } else {
            pthread_cond_wait(&store->room, &store->lock);
        }
    }
    return true;
}

/* Warns once. */
static void warn_of_memory(loader *self, uint64_t used)
{
    if (!self->has_warned) {
        self->has_warned = true;
        ep_log(EP_LOG_WARN, "expert-memory", EP_KV(weights_bytes, used),
               EP_KV(weight_bytes_max, self->store->devices[0].limit_bytes),
               EP_KV(reason, "the system refused memory"),
               EP_KV(effect, "others go for experts that requests wait for"),
               EP_KV(hint, "set weight_bytes_max lower, or the limit (RLIMIT_AS, overcommit; of a "
                           "device: what others hold there) higher"));
    }
}

bool ep_weight_room_frees_memory(loader *self, load_kind kind, const ep_resident *resident,
                                 ep_err err)
{
    ep_weight_store *store = self->store;
    const uint64_t each = store->layers[resident->layer_slot].expert_bytes_max;
    victim_search search = {store, resident->device};
    ep_heat_choice victim;
    if (err != EP_ERR_NO_MEMORY || kind != LOAD_URGENT ||
        self->evicted_bytes >= EVICTED_MAX * each) {
        return false;
    }
    pthread_mutex_lock(&store->lock);
    const uint64_t used = ep_weight_store_bytes(store);
    const bool goes_one =
        !store->stop && ep_expert_heat_victim(store->heat, false, is_idle, &search, &victim);
    if (goes_one) {
        self->evicted_bytes += store->layers[victim.layer].experts[victim.expert].resident->bytes;
        evict(store, &victim);
    }
    pthread_mutex_unlock(&store->lock);
    if (goes_one) {
        warn_of_memory(self, used);
    }
    return goes_one;
}

static expert_entry *entry_of(const ep_resident *resident)
{
    return &resident->store->layers[resident->layer_slot].experts[resident->expert];
}

bool ep_weight_room_reserve(ep_weight_store *store, expert_entry *entry)
{
    const ep_weight_layer *layer = &store->layers[entry->layer_slot].layer;
    uint64_t bytes = ep_weight_layer_bytes_at_least(layer);
    (void)ep_weight_layer_bytes_packed(store, layer, entry->expert, &bytes); /* on failure the load
                                                                                reports why */
    if (!choose_device(store, 0, entry->layer_slot, bytes, &entry->reserved_on)) {
        return false;
    }
    store->devices[entry->reserved_on].resident_bytes += bytes;
    entry->reserved_bytes = bytes;
    return true;
}

void ep_weight_room_unreserve(ep_weight_store *store, expert_entry *entry)
{
    store->devices[entry->reserved_on].resident_bytes -= entry->reserved_bytes;
    entry->reserved_on = EP_WEIGHT_NO_DEVICE;
}

/* Sets the reservation to the bytes that the load takes. Lock held. False: they do not fit, or the
 * device is lost. */
static bool take_reserved(ep_weight_store *store, expert_entry *entry, uint64_t bytes,
                          uint32_t *out_device)
{
    device_entry *device = &store->devices[entry->reserved_on];
    const uint64_t others = device->resident_bytes - entry->reserved_bytes;
    if (!fits(device, bytes, others)) {
        return false;
    }
    device->resident_bytes = others + bytes;
    entry->reserved_bytes = bytes;
    *out_device = entry->reserved_on;
    return true;
}

ep_err ep_weight_room_check(loader *self, ep_resident *resident, uint64_t bytes, load_kind kind,
                            bool takes, ep_error *out_error)
{
    ep_weight_store *store = self->store;
    expert_entry *entry = entry_of(resident);
    const bool is_reserved = entry->reserved_on != EP_WEIGHT_NO_DEVICE;
    uint32_t device;
    ep_err err = EP_OK;
    if (is_reserved && !takes) {
        return EP_OK;
    }
    pthread_mutex_lock(&store->lock);
    if (!(is_reserved ? take_reserved(store, entry, bytes, &device)
                      : make_room(self, resident->layer_slot, bytes, kind, &device))) {
        err = store->devices_left == 0
                  ? ep_error_set(out_error, EP_ERR_DEVICE_LOST, "%s", store->lost_why)
                  : ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                 "needs %" PRIu64 " bytes, and %" PRIu64
                                 " of weight_bytes_max %" PRIu64 " on %u devices are in use",
                                 bytes, ep_weight_store_bytes(store), store->devices[0].limit_bytes,
                                 store->devices_left);
    } else if (takes) {
        store->devices[device].resident_bytes += is_reserved ? 0 : bytes;
        resident->device = device;
        resident->backend = store->devices[device].backend;
    }
    pthread_mutex_unlock(&store->lock);
    return err;
}

bool ep_weight_room_asks_another(loader *self, const ep_resident *resident, ep_err err)
{
    uint32_t device;
    ep_weight_store *store = self->store;
    if (err != EP_ERR_NO_MEMORY || entry_of(resident)->reserved_on != EP_WEIGHT_NO_DEVICE) {
        return false;
    }
    pthread_mutex_lock(&store->lock);
    self->refusing |= UINT64_C(1) << resident->device;
    const bool has_other =
        choose_device(store, self->refusing, resident->layer_slot, resident->bytes, &device);
    pthread_mutex_unlock(&store->lock);
    return has_other;
}

void ep_weight_room_give_back(ep_weight_store *store, const ep_resident *resident, uint64_t bytes)
{
    pthread_mutex_lock(&store->lock);
    if (entry_of(resident)->reserved_on == EP_WEIGHT_NO_DEVICE) {
        store->devices[resident->device].resident_bytes -= bytes;
    }
    pthread_mutex_unlock(&store->lock);
}

bool ep_weight_room_is_lacking(loader *self, load_kind kind, ep_err err)
{
    ep_weight_store *store = self->store;
    if (err == EP_ERR_RESOURCE_EXHAUSTED) {
        return kind != LOAD_URGENT || self->is_blocked;
    }
    if (err != EP_ERR_NO_MEMORY || kind != LOAD_FIRST || !store->has_budget) {
        return false;
    }
    pthread_mutex_lock(&store->lock);
    const uint64_t used = ep_weight_store_bytes(store);
    pthread_mutex_unlock(&store->lock);
    if (used > 0) {
        warn_of_memory(self, used);
    }
    return used > 0;
}

bool ep_weight_room_prefetch(ep_weight_store *store, expert_entry **out_entry)
{
    ep_heat_choice choice;
    victim_search search = {store, EP_WEIGHT_NO_DEVICE};
    if (store->prefetches_due == 0 || !ep_load_room_fits(&store->room_ahead, ep_clock_now_ns()) ||
        !ep_expert_heat_prefetch(store->heat, ep_load_room_lead(&store->room_ahead), false, is_idle,
                                 &search, &choice)) {
        store->prefetches_due = 0;
        return false;
    }
    store->prefetches_due--;
    *out_entry = &store->layers[choice.layer].experts[choice.expert];
    return true;
}
