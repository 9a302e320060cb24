/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that loads experts: those that requests wait for, then the first pass, then what is
 * likely to be used next. It also makes the room they need. Nothing is read, packed or freed under
 * the store's lock. Until the first request comes it has helpers for the first pass.
 *
 * And the saver's, with the lowest priority, which writes packed experts into the cache one at a
 * time. It holds only the one it writes: an expert that goes before its turn is written when it
 * comes again.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "expertd/weight_store_private.h"
#include "model/load_progress.h"
#include "observe/trace.h"

/* from a load that failed for a passing reason to the next of the same expert */
#define RETRY_NS (EP_NS_PER_S / 2)
#define LATER_NS (2 * EP_NS_PER_S) /* the same in the first pass, where nobody waits for it */
/* from a line of the log on a reason that all loads share to the next */
#define SAID_NS EP_NS_PER_S
#define CARRY_NS (EP_NS_PER_S / 10) /* unused rate that may be made up for */

/* for one load, when memory is refused below the budget: beyond, it is not experts that take it */
#define EVICTED_MAX 4
#define SAVER_NICE 19
/* of a helper: the C library keeps those of threads that ended, and addresses may be limited */
#define HELPER_STACK_BYTES ((size_t)1 << 20)

typedef enum load_kind { LOAD_URGENT, LOAD_FIRST, LOAD_PREFETCH } load_kind;

typedef struct loader {
    ep_weight_store *store;
    bool has_progress;
    bool owes_first;     /* the next load is one of the first pass */
    uint64_t batch_left; /* of the first pass, as counted when its progress began */
    ep_load_progress progress;
    uint64_t paid_until_ns; /* the rate allows the next load then */
    uint64_t rate_ns;       /* how long the rate makes the load that runs last */
    expert_entry *ahead;    /* being loaded ahead of time */
    uint64_t ahead_bytes;   /* that its memory takes while it can give way */
    bool is_blocked;        /* the urgent load that ran last needs that memory too */
    uint64_t paused_ns;     /* the load that runs gave way so long */
    uint32_t evicted;       /* for the urgent load that runs, because memory was refused */
    uint64_t refusing;      /* bit d: device d has refused memory for the load that runs */
    bool has_warned;        /* of such memory */
    uint64_t said_ns;       /* when a load that failed for a reason that all share was said last */
    uint64_t unsaid;        /* that failed so since */
    bool is_alone;          /* the batch has no more helpers */
    ep_expert_room room;    /* kept while there is something to load */
} loader;

/* One load and what came of it. */
typedef struct load {
    expert_entry *entry;
    load_kind kind;
    bool is_beside_others; /* it took longer than one alone */
    bool is_done;
    bool is_saved;
    ep_resident *resident; /* NULL: an error */
    ep_err err;
    ep_error error;
    uint64_t took_ns;
    uint64_t rate_ns; /* how long the rate makes it */
} load;

static void load_urgent(loader *self, expert_entry *entry);

/* ---- rate ---- */

static void charge(loader *self, uint64_t ns)
{
    const uint64_t now_ns = ep_clock_now_ns();
    if (self->store->config.load_bytes_per_s != 0) {
        const uint64_t from_ns =
            self->paid_until_ns > now_ns - CARRY_NS ? self->paid_until_ns : now_ns - CARRY_NS;
        self->paid_until_ns = from_ns + ns;
    }
}

/* So many bytes are read now, of the cache's file or of the checkpoint's: only there it is known
 * which. The first pass has no rate. No lock needed, as for all of the loader's own. */
static void charge_read(loader *self, uint64_t bytes, load_kind kind)
{
    const uint64_t rate = self->store->config.load_bytes_per_s;
    const uint64_t ns =
        rate == 0 ? 0 : (uint64_t)((double)bytes / (double)rate * (double)EP_NS_PER_S);
    self->rate_ns += ns;
    if (kind != LOAD_FIRST) {
        charge(self, ns);
    }
}

/* ---- room ---- */

/* Whose experts may go. */
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

/* Lock held, but for the while in which memory is freed. */
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
 * Lock held. Of the devices with room that do not refuse memory, one with the fewest experts of the
 * layer, so that all compute a call for it; of these the emptiest. False: there is none.
 */
static bool choose_device(const loader *self, uint32_t layer_slot, uint64_t bytes,
                          uint32_t *out_device)
{
    const ep_weight_store *store = self->store;
    const layer_entry *layer = &store->layers[layer_slot];
    uint32_t counts[EP_BACKEND_DEVICES_MAX] = {0};
    uint32_t best = EP_WEIGHT_NO_DEVICE;
    for (uint32_t e = 0; store->devices_count > 1 && e < layer->experts_count; e++) {
        if (layer->experts[e].resident != NULL) {
            counts[layer->experts[e].resident->device]++;
        }
    }
    for (uint32_t d = 0; d < store->devices_count; d++) {
        const uint64_t used = store->devices[d].resident_bytes;
        const bool is_better =
            best == EP_WEIGHT_NO_DEVICE || counts[d] < counts[best] ||
            (counts[d] == counts[best] && used < store->devices[best].resident_bytes);
        const bool is_possible =
            fits(&store->devices[d], bytes, used) && (self->refusing >> d & 1) == 0;
        best = is_possible && is_better ? d : best;
    }
    *out_device = best;
    return best != EP_WEIGHT_NO_DEVICE;
}

/* Lock held. Whether some device holds so much: when it is empty, or else when what leaves has
 * left. */
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
 * Lock held, but for some whiles. The coldest experts that no job holds go first. When all are
 * held, the coldest leaves the table: no new job gets it, and its bytes come back with its last
 * one. So a load never waits for an expert to be out of use by chance. Nor does it wait for the
 * memory of a load ahead of time that gave way to it. The device of the first that goes is the one
 * where room is made.
 */
static bool make_room(loader *self, uint32_t layer_slot, uint64_t bytes, load_kind kind,
                      uint32_t *out_device)
{
    ep_weight_store *store = self->store;
    victim_search search = {store, EP_WEIGHT_NO_DEVICE};
    while (!choose_device(self, layer_slot, bytes, out_device)) {
        ep_heat_choice victim;
        if (self->refusing != 0) { /* no other has room: they are asked again */
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

/* Once: it stays so. */
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

/*
 * Whether a load that ended so is worth another try: the system refused memory that the budget
 * allows (a limit on addresses, strict overcommit), a request waits, and a cold expert there that
 * no job holds could go. No lock held.
 */
static bool frees_memory(loader *self, load_kind kind, uint32_t device, ep_err err)
{
    ep_weight_store *store = self->store;
    victim_search search = {store, device};
    ep_heat_choice victim;
    if (err != EP_ERR_NO_MEMORY || kind != LOAD_URGENT || self->evicted == EVICTED_MAX) {
        return false;
    }
    pthread_mutex_lock(&store->lock);
    const uint64_t used = ep_weight_store_bytes(store);
    const bool goes_one =
        !store->stop && ep_expert_heat_victim(store->heat, false, is_idle, &search, &victim);
    if (goes_one) {
        evict(store, &victim);
        self->evicted++;
    }
    pthread_mutex_unlock(&store->lock);
    if (goes_one) {
        warn_of_memory(self, used);
    }
    return goes_one;
}

/* ---- one load ---- */

/* takes: the resident's device is chosen, and the bytes are its own. */
static ep_err check_room(loader *self, ep_resident *resident, uint64_t bytes, load_kind kind,
                         bool takes, ep_error *out_error)
{
    ep_weight_store *store = self->store;
    uint32_t device;
    ep_err err = EP_OK;
    pthread_mutex_lock(&store->lock);
    if (!make_room(self, resident->layer_slot, bytes, kind, &device)) {
        err = store->devices_left == 0
                  ? ep_error_set(out_error, EP_ERR_DEVICE_LOST, "%s", store->lost_why)
                  : ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                                 "needs %" PRIu64 " bytes, and %" PRIu64
                                 " of weight_bytes_max %" PRIu64 " on %u devices are in use",
                                 bytes, ep_weight_store_bytes(store), store->devices[0].limit_bytes,
                                 store->devices_left);
    } else if (takes) {
        store->devices[device].resident_bytes += bytes;
        resident->device = device;
        resident->backend = store->devices[device].backend;
    }
    pthread_mutex_unlock(&store->lock);
    return err;
}

/* Whether a load that ended so is worth another try: its device refused memory, and another one has
 * room. No lock held.
 */
static bool asks_another(loader *self, const ep_resident *resident, ep_err err)
{
    uint32_t device;
    if (err != EP_ERR_NO_MEMORY) {
        return false;
    }
    pthread_mutex_lock(&self->store->lock);
    self->refusing |= UINT64_C(1) << resident->device;
    const bool has_other = choose_device(self, resident->layer_slot, resident->bytes, &device);
    pthread_mutex_unlock(&self->store->lock);
    return has_other;
}

static void give_back(ep_weight_store *store, const ep_resident *resident, uint64_t bytes)
{
    pthread_mutex_lock(&store->lock);
    store->devices[resident->device].resident_bytes -= bytes;
    pthread_mutex_unlock(&store->lock);
}

/* Whether a load that ended so is worth another try: its device is lost, and others are left. No
 * lock held. */
static bool loses_device(loader *self, const ep_resident *resident, ep_err err,
                         const ep_error *error)
{
    ep_weight_store *store = self->store;
    if (err != EP_ERR_DEVICE_LOST || resident->device == EP_WEIGHT_NO_DEVICE) {
        return false;
    }
    ep_weight_store_lose(store, resident->device, error->text);
    pthread_mutex_lock(&store->lock);
    const bool goes_on = store->devices_left > 0 && !store->stop;
    pthread_mutex_unlock(&store->lock);
    return goes_on;
}

static ep_err pack(loader *self, const ep_weight_layer *layer, const ep_expert_data *data,
                   load_kind kind, ep_resident *resident, ep_error *out_error)
{
    ep_weight_store *store = self->store;
    const ep_expert_source *source = &data->source;
    /* often kept finer than the routed ones */
    const bool is_shared = resident->expert >= layer->shape.experts;
    const uint32_t allowed = layer->formats | 1u << layer->format;
    const uint32_t has = 1u << source->format | 1u << ep_expert_down_format(source);
    if (!is_shared && (has & ~allowed) != 0) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "is %s, down %s, the model's experts are %s",
                            ep_weight_format_name(source->format),
                            ep_weight_format_name(ep_expert_down_format(source)),
                            ep_weight_format_name(layer->format));
    }
    ep_err err;
    resident->bytes =
        store->devices[0].backend->ops->weights_bytes(store->devices[0].backend, source);
    memcpy(resident->sha256, data->sha256, sizeof(resident->sha256));
    resident->quant_error = data->quant_error;
    do {
        err = check_room(self, resident, resident->bytes, kind, true, out_error);
        if (err != EP_OK) {
            return err;
        }
        err = resident->backend->ops->weights_load(resident->backend, source, &resident->weights,
                                                   out_error);
        if (err != EP_OK) {
            give_back(store, resident, resident->bytes);
        }
    } while ((err == EP_ERR_NO_MEMORY && ep_expert_room_trim(&self->room, data)) ||
             asks_another(self, resident, err) || frees_memory(self, kind, resident->device, err));
    return err;
}

/*
 * Between two pieces of a load ahead of time, no lock held: what requests wait for goes before it.
 * Nor does it wait for what the rate charged for the bytes that are not read yet: that is charged
 * when it goes on. False: it shall not go on: the store stops, or the budget does not hold both.
 */
static bool give_way(void *arg, size_t bytes_done)
{
    loader *self = arg;
    ep_weight_store *store = self->store;
    const double unread =
        self->ahead_bytes > 0 ? 1 - (double)bytes_done / (double)self->ahead_bytes : 0;
    const uint64_t rate_ns = self->rate_ns; /* of this load alone, so the refund is no more */
    const uint64_t unread_ns = (uint64_t)(unread * (double)rate_ns);
    bool goes_on = true;
    bool is_refunded = false;
    pthread_mutex_lock(&store->lock);
    while (goes_on && !store->stop && store->urgent.first != NULL &&
           !ep_weight_waits_any(store, self->ahead)) {
        const uint64_t bytes = store->layers[store->urgent.first->layer_slot].expert_bytes_max;
        const uint64_t limit = store->devices[0].limit_bytes; /* with a cache there is one */
        self->paid_until_ns -= is_refunded ? 0 : unread_ns;
        is_refunded = true;
        goes_on = limit == 0 || (bytes <= limit && self->ahead_bytes <= limit - bytes);
        if (goes_on) {
            const uint64_t begin_ns = ep_clock_now_ns();
            const uint64_t paused_ns = self->paused_ns;
            load_urgent(self, ep_entry_queue_take(&store->urgent));
            self->paused_ns = paused_ns + (ep_clock_now_ns() - begin_ns);
            self->rate_ns = rate_ns;
            goes_on = !self->is_blocked;
        }
    }
    goes_on = goes_on && !store->stop;
    if (is_refunded && goes_on) {
        charge(self, unread_ns);
    }
    pthread_mutex_unlock(&store->lock);
    return goes_on;
}

/* Gives back the blocks that are kept for the next load, before an expert has to go: true, try
 * again. What packing refused has its own (pack). No lock held. */
static bool frees_blocks(loader *self, ep_err err)
{
    const bool frees = err == EP_ERR_NO_MEMORY && !ep_expert_room_is_empty(&self->room);
    if (frees) {
        ep_expert_room_free(&self->room);
    }
    return frees;
}

/* From its file in the cache. NOT_FOUND: there is none of use. */
static ep_err load_from_cache(loader *self, const ep_weight_layer *layer, load_kind kind,
                              ep_resident *resident, ep_error *out_error)
{
    ep_weight_store *store = self->store;
    ep_weight_cache_key key;
    ep_weight_cache_file file;
    if (store->config.cache == NULL) {
        return EP_ERR_NOT_FOUND;
    }
    ep_weight_layer_key(layer, resident->expert, &key);
    if (!ep_weight_cache_find(store->config.cache, &key, &file)) {
        return EP_ERR_NOT_FOUND;
    }
    ep_err err = check_room(self, resident, file.body_bytes, kind, true, out_error);
    if (err != EP_OK) {
        ep_weight_cache_forget(&file);
        return err;
    }
    charge_read(self, file.body_bytes, kind);
    if (kind == LOAD_PREFETCH) {
        file.goes_on = give_way;
        file.arg = self;
        self->ahead_bytes = file.body_bytes;
    }
    err = ep_weight_cache_read(store->config.cache, &file, &resident->weights, out_error);
    if (frees_blocks(self, err)) {
        err = ep_weight_cache_read(store->config.cache, &file, &resident->weights, out_error);
    }
    self->ahead_bytes = kind == LOAD_PREFETCH ? 0 : self->ahead_bytes;
    if (err != EP_OK) {
        give_back(store, resident, file.body_bytes);
        return err == EP_ERR_BAD_FILE ? EP_ERR_NOT_FOUND : err;
    }
    resident->bytes = file.body_bytes;
    memcpy(resident->sha256, file.sha256, sizeof(resident->sha256));
    return EP_OK;
}

static ep_err load_from_checkpoint(loader *self, const ep_weight_layer *layer, load_kind kind,
                                   ep_resident *resident, ep_error *out_error)
{
    ep_expert_data data;
    charge_read(self, ep_weight_layer_bytes_read(layer), kind);
    ep_err err = ep_checkpoint_read_expert_in(layer->checkpoint, layer->shape.layer,
                                              resident->expert, &self->room, &data, out_error);
    if (frees_blocks(self, err)) {
        err = ep_checkpoint_read_expert_in(layer->checkpoint, layer->shape.layer, resident->expert,
                                           &self->room, &data, out_error);
    }
    return err == EP_OK ? pack(self, layer, &data, kind, resident, out_error) : err;
}

/*
 * Whether an expert stays cold for want of room. In the first pass memory that the system refuses
 * is the end of the room, as the budget's end is: with a budget experts come in the place of
 * others. No lock held.
 */
static bool lacks_room(loader *self, load_kind kind, ep_err err)
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

/* Makes one expert resident, from the cache or from the checkpoint. RESOURCE_EXHAUSTED: the budget
 * has no room for it. No lock held. */
static ep_err load_expert(loader *self, const expert_entry *entry, load_kind kind,
                          ep_resident **out_resident, bool *out_is_saved, ep_error *out_error)
{
    ep_weight_store *store = self->store;
    const ep_weight_layer *layer = &store->layers[entry->layer_slot].layer;
    ep_resident *resident = calloc(1, sizeof(*resident));
    if (resident == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory");
    }
    resident->store = store;
    resident->layer_slot = entry->layer_slot;
    resident->expert = entry->expert;
    resident->device = EP_WEIGHT_NO_DEVICE;
    atomic_init(&resident->refs, 1);
    self->evicted = kind == LOAD_URGENT ? 0 : self->evicted;
    self->refusing = 0;
    ep_err err =
        check_room(self, resident, ep_weight_layer_bytes_at_least(layer), kind, false, out_error);
    if (err != EP_OK) {
        free(resident);
        return err;
    }
    do {
        err = load_from_cache(self, layer, kind, resident, out_error);
        *out_is_saved = err == EP_OK;
        if (err == EP_ERR_NOT_FOUND) {
            err = load_from_checkpoint(self, layer, kind, resident, out_error);
        }
    } while (frees_memory(self, kind, resident->device, err) ||
             loses_device(self, resident, err, out_error));
    if (err != EP_OK) {
        free(resident);
        return err;
    }
    *out_resident = resident;
    return EP_OK;
}

static uint32_t short_digest(const uint8_t *sha256)
{
    const uint32_t digest = (uint32_t)sha256[0] | (uint32_t)sha256[1] << 8 |
                            (uint32_t)sha256[2] << 16 | (uint32_t)sha256[3] << 24;
    return digest != 0 ? digest : 1; /* 0 says that it is not known */
}

/* Reasons that have nothing to do with the expert's bytes, and may be gone the next time. */
static bool is_passing(ep_err err)
{
    return err == EP_ERR_IO || err == EP_ERR_NO_MEMORY || err == EP_ERR_UNAVAILABLE ||
           err == EP_ERR_RESOURCE_EXHAUSTED;
}

/* No lock held. A disk, a system without memory, or a lost device fails every load: one line a
 * second says so. */
static void log_failure(loader *self, const expert_entry *entry, ep_err err, const ep_error *error)
{
    const layer_entry *layer = &self->store->layers[entry->layer_slot];
    const uint64_t now_ns = ep_clock_now_ns();
    const bool is_shared_reason = is_passing(err) || err == EP_ERR_DEVICE_LOST;
    uint64_t left_out = 0;
    if (is_shared_reason && self->said_ns != 0 && now_ns - self->said_ns < SAID_NS) {
        self->unsaid++;
        return;
    }
    if (is_shared_reason) {
        self->said_ns = now_ns;
        left_out = self->unsaid;
        self->unsaid = 0;
    }
    ep_log(err == EP_ERR_UNAVAILABLE ? EP_LOG_WARN : EP_LOG_ERROR, "expert-load",
           EP_KV(model, layer->layer.model), EP_KV(layer, layer->layer.shape.layer),
           EP_KV(expert, entry->expert), EP_KV(reason, error->text),
           EP_KV(lines_left_out, left_out));
}

/*
 * Lock held. Writes the outcome of one load into its entry. A cold expert stays cold when there was
 * no room for it, and an owned one owned when it could not be read this time: one error of a
 * device, or a moment without memory, must not cost every expert that is asked for then.
 */
static void settle(ep_weight_store *store, expert_entry *entry, load_kind kind,
                   ep_resident *resident, bool is_saved, bool had_no_room, ep_err err,
                   const ep_error *error)
{
    layer_entry *layer = &store->layers[entry->layer_slot];
    store->stats.pending_count -= kind == LOAD_FIRST;
    if (err == EP_OK) {
        const uint32_t digest = short_digest(resident->sha256);
        entry->state = EP_EXPERT_RESIDENT;
        entry->resident = resident;
        entry->is_prefetched = kind == LOAD_PREFETCH;
        entry->is_saved = is_saved || store->config.cache == NULL || store->saver_gave_up;
        store->unsaved_count += !entry->is_saved;
        pthread_cond_signal(&store->save);
        store->stats.owned_changes += entry->digest != digest;
        entry->digest = digest;
        ep_weight_errors_take(store, layer, entry->expert, resident->quant_error, 0);
        layer->resident_count++;
        store->stats.resident_count++;
        store->stats.loads_total++;
        store->stats.prefetches_total += kind == LOAD_PREFETCH;
        ep_weight_entry_own(store, entry, entry->is_owned || entry->is_wanted);
    } else if (had_no_room) {
        entry->state = EP_EXPERT_ABSENT;
        /* it may have been dropped meanwhile */
        ep_weight_entry_own(store, entry, entry->is_owned || entry->is_wanted);
    } else if (kind == LOAD_FIRST && err == EP_ERR_UNAVAILABLE) {
        /* its bytes are on other nodes, and may come yet */
        entry->state = EP_EXPERT_QUEUED;
        entry->retry_ns = ep_clock_now_ns() + LATER_NS;
        ep_entry_queue_add(&store->later, entry);
        store->stats.pending_count++;
    } else if (entry->is_owned && is_passing(err)) {
        entry->state = EP_EXPERT_ABSENT;
        entry->retry_ns = ep_clock_now_ns() + RETRY_NS;
    } else {
        entry->state = EP_EXPERT_FAILED;
        store->stats.failed_count++;
        ep_weight_entry_own(store, entry, false);
        snprintf(store->stats.last_error, sizeof(store->stats.last_error),
                 "model %s layer %u expert %u: %.350s", layer->layer.model,
                 layer->layer.shape.layer, entry->expert, error->text);
    }
    ep_weight_entry_place(store, entry);
}

static void trace_load(const ep_weight_store *store, const expert_entry *entry, uint64_t id,
                       uint64_t bytes, bool begins, ep_err err)
{
    const ep_trace_fields fields = {
        .call = id,
        .node = store->config.node_name != NULL ? store->config.node_name : "",
        .peer = "",
        .layer = (int32_t)store->layers[entry->layer_slot].layer.shape.layer,
        .expert = (int32_t)entry->expert,
        .rows = bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes,
        .status = begins ? 0 : (int32_t)err};
    if (begins) {
        EP_TRACE(load_begin, &fields);
    } else {
        EP_TRACE(load_end, &fields);
    }
}

/* Lock held. */
static void begin_load(ep_weight_store *store, expert_entry *entry, load_kind kind, load *out_load)
{
    *out_load = (load){.entry = entry, .kind = kind};
    ep_error_clear(&out_load->error);
    entry->state = EP_EXPERT_LOADING;
    ep_weight_entry_place(store, entry);
}

/* No lock held. */
static void run_load(loader *self, load *l)
{
    ep_weight_store *store = self->store;
    const uint64_t bytes =
        ep_weight_layer_bytes_at_least(&store->layers[l->entry->layer_slot].layer);
    const bool is_traced = EP_TRACE_SPAN_ON(load);
    const uint64_t id = is_traced ? ep_trace_new_id() : 0;
    const uint64_t begin_ns = ep_clock_now_ns();
    self->paused_ns = 0;
    self->rate_ns = 0;
    if (is_traced) {
        trace_load(store, l->entry, id, bytes, true, EP_OK);
    }
    l->err = load_expert(self, l->entry, l->kind, &l->resident, &l->is_saved, &l->error);
    if (is_traced) {
        trace_load(store, l->entry, id, bytes, false, l->err);
    }
    l->took_ns = ep_clock_now_ns() - begin_ns - self->paused_ns;
    l->rate_ns = self->rate_ns;
}

/* Ends the waits for the expert. Lock held on entry and exit, not in between. */
static void end_load(loader *self, load *l)
{
    ep_weight_store *store = self->store;
    expert_entry *entry = l->entry;
    const layer_entry *layer = &store->layers[entry->layer_slot];
    pthread_mutex_unlock(&store->lock);
    const bool had_no_room = lacks_room(self, l->kind, l->err);
    if (l->err == EP_OK) {
        ep_weight_errors_judge(store, l->resident);
    } else if (!had_no_room) {
        log_failure(self, entry, l->err, &l->error);
    }
    pthread_mutex_lock(&store->lock);
    store->stats.load_ns_total += l->took_ns;
    if (l->err == EP_OK && !l->is_beside_others) {
        ep_load_room_loaded(&store->room_ahead, l->took_ns > l->rate_ns ? l->took_ns : l->rate_ns);
    }
    settle(store, entry, l->kind, l->resident, l->is_saved, had_no_room, l->err, &l->error);
    const bool may_come = entry->state == EP_EXPERT_ABSENT && entry->is_owned;
    /* a prefetch gave up, or will */
    if (had_no_room && may_come && ep_weight_waits_any(store, entry)) {
        entry->state = EP_EXPERT_QUEUED;
        ep_weight_entry_place(store, entry);
        ep_entry_queue_add(&store->urgent, entry);
        pthread_mutex_unlock(&store->lock);
        store->config.on_change(store->config.arg);
        pthread_mutex_lock(&store->lock);
        return;
    }
    ep_weight_wait *ended = ep_weight_waits_take(store, entry, l->resident);
    /* On a device that was lost just then, or dropped while it was loading: those who waited have
     * it, nobody else. */
    ep_resident *unowned = ep_weight_entry_lose(store, entry);
    if (entry->resident != NULL && !entry->is_owned) {
        unowned = ep_weight_entry_evict(store, entry);
    }
    pthread_mutex_unlock(&store->lock);
    if (ended != NULL && l->err != EP_OK) {
        char why[sizeof(l->error.text)];
        snprintf(why, sizeof(why), "%s", l->error.text);
        ep_error_set(&l->error, may_come ? EP_ERR_UNAVAILABLE : EP_ERR_NOT_OWNER,
                     "model %s layer %u expert %u could not be loaded: %.300s", layer->layer.model,
                     layer->layer.shape.layer, entry->expert, why);
        l->error.layer = (int32_t)layer->layer.shape.layer;
        l->error.expert = (int32_t)entry->expert;
    }
    ep_weight_waits_end(ended, &l->error);
    ep_resident_release(unowned);
    store->config.on_change(store->config.arg);
    pthread_mutex_lock(&store->lock);
}

/* Loads one expert and ends the waits for it. Lock held on entry and exit, not in between. */
static void load_one(loader *self, expert_entry *entry, load_kind kind)
{
    ep_weight_store *store = self->store;
    load l;
    begin_load(store, entry, kind, &l);
    pthread_mutex_unlock(&store->lock);
    run_load(self, &l);
    pthread_mutex_lock(&store->lock);
    end_load(self, &l);
}

/* ---- the first pass, with its progress ---- */

/* Everything queued now is one batch with one progress bar. Lock held. */
static void begin_progress(loader *self)
{
    ep_weight_store *store = self->store;
    const char *model = store->layers[store->first.first->layer_slot].layer.model;
    uint64_t bytes = 0;
    self->batch_left = 0;
    self->is_alone = false;
    for (const expert_entry *e = store->first.first; e != NULL; e = e->next) {
        const ep_weight_layer *layer = &store->layers[e->layer_slot].layer;
        self->batch_left++;
        bytes += ep_weight_layer_bytes_at_least(layer);
        model = model != NULL && strcmp(layer->model, model) == 0 ? model : NULL;
    }
    self->has_progress = true;
    ep_load_progress_init(&self->progress, store->config.shows_bar ? STDERR_FILENO : -1, model,
                          self->batch_left, bytes);
}

static void end_progress(loader *self)
{
    self->batch_left = 0;
    if (self->has_progress) {
        self->has_progress = false;
        ep_load_progress_fini(&self->progress);
    }
}

/* Lock held. The next of the first pass; NULL: it is not wanted any more. */
static expert_entry *take_first(loader *self)
{
    ep_weight_store *store = self->store;
    expert_entry *entry = ep_entry_queue_take(&store->first);
    self->batch_left -= self->batch_left > 0;
    if (!entry->is_wanted) {
        entry->state = EP_EXPERT_ABSENT;
        store->stats.pending_count--;
        entry = NULL;
    }
    return entry;
}

/* Lock held on entry and exit. */
static void count_first(loader *self, const expert_entry *entry)
{
    ep_weight_store *store = self->store;
    const uint64_t bytes = ep_weight_layer_bytes_at_least(&store->layers[entry->layer_slot].layer);
    if (self->has_progress && entry->state != EP_EXPERT_QUEUED) { /* it comes again */
        const bool is_there = entry->state == EP_EXPERT_RESIDENT;
        pthread_mutex_unlock(&store->lock);
        ep_load_progress_add(&self->progress, 1, is_there ? bytes : 0);
        pthread_mutex_lock(&store->lock);
    }
}

/* Lock held on entry and exit, not in between. */
static void load_first(loader *self)
{
    expert_entry *entry = take_first(self);
    if (entry != NULL) {
        load_one(self, entry, LOAD_FIRST);
        count_first(self, entry);
        /* without room nothing was loaded: it costs no time */
        self->owes_first = self->owes_first && entry->state == EP_EXPERT_ABSENT;
    }
}

/* ---- the same with helpers ---- */

/*
 * Before the first request nobody is disturbed, so helpers take the batch's experts in the queue's
 * order, each with a room of its own. What came of them is dealt with in that order, by the loader:
 * the log, errors, and who is in memory are those of one thread where no memory is refused. Where
 * memory or room might run out nobody begins any more, and the loader goes on alone; an expert for
 * which memory was refused beside others is loaded again.
 */
typedef struct crew {
    loader *lead;
    pthread_cond_t changed;
    bool has_ended;      /* none begins any more */
    uint64_t bytes;      /* that those being loaded take in memory at most */
    uint64_t file_bytes; /* of the same in their files */
    uint32_t first;      /* of loads, a ring */
    uint32_t count;
    load loads[2 * EP_WEIGHT_LOADERS_MAX];
} crew;

/* Lock held. Shared experts are wider than the layer says. */
static uint64_t file_bytes_of(const ep_weight_store *store, const expert_entry *entry)
{
    const layer_entry *layer = &store->layers[entry->layer_slot];
    const uint64_t bytes = ep_weight_layer_bytes_read(&layer->layer);
    return entry->expert < layer->layer.shape.experts || bytes > layer->expert_bytes_max
               ? bytes
               : layer->expert_bytes_max;
}

/* Lock held. */
static bool had_requests(const ep_weight_store *store)
{
    return store->stats.hits_total + store->stats.misses_total > 0;
}

/* Lock held. */
static bool may_begin(const crew *c)
{
    const ep_weight_store *store = c->lead->store;
    const expert_entry *next = store->first.first;
    return !c->has_ended && !store->stop && c->lead->batch_left > 0 && next != NULL &&
           !had_requests(store) &&
           fits(&store->devices[0], c->bytes + store->layers[next->layer_slot].expert_bytes_max,
                store->devices[0].resident_bytes);
}

/* Lock held, but for the wait. NULL: nothing more. */
static load *begin_next(crew *c)
{
    ep_weight_store *store = c->lead->store;
    while (may_begin(c)) {
        const uint64_t file_bytes = file_bytes_of(store, store->first.first);
        if (c->file_bytes > 0 && c->file_bytes + file_bytes > EP_WEIGHT_LOADING_BYTES) {
            return NULL; /* those that run are enough for experts of this size */
        }
        if (c->count == EP_ARRAY_COUNT(c->loads)) {
            pthread_cond_wait(&c->changed, &store->lock);
            continue;
        }
        expert_entry *entry = take_first(c->lead);
        if (entry != NULL) {
            load *l = &c->loads[(c->first + c->count) % EP_ARRAY_COUNT(c->loads)];
            begin_load(store, entry, LOAD_FIRST, l);
            l->is_beside_others = true;
            c->file_bytes += file_bytes;
            c->bytes += store->layers[entry->layer_slot].expert_bytes_max;
            c->count++;
            return l;
        }
    }
    c->has_ended = true;
    return NULL;
}

static bool is_refused_memory(ep_err err)
{
    return err == EP_ERR_NO_MEMORY || err == EP_ERR_RESOURCE_EXHAUSTED;
}

static void *help(void *arg)
{
    crew *c = arg;
    ep_weight_store *store = c->lead->store;
    loader self = {.store = store};
    load *l;
    pthread_mutex_lock(&store->lock);
    while ((l = begin_next(c)) != NULL) {
        pthread_mutex_unlock(&store->lock);
        run_load(&self, l);
        pthread_mutex_lock(&store->lock);
        l->is_done = true;
        c->file_bytes -= file_bytes_of(store, l->entry);
        c->bytes -= store->layers[l->entry->layer_slot].expert_bytes_max; /* the device's now */
        c->has_ended = c->has_ended || is_refused_memory(l->err);
        pthread_cond_broadcast(&c->changed);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&store->lock);
    ep_expert_room_free(&self.room);
    return NULL;
}

/* Lock held on entry and exit, not in between. Until none begins any more and all have ended.
 * again: what is to be loaded once more. */
static void lead(crew *c, entry_queue *again)
{
    ep_weight_store *store = c->lead->store;
    while (!c->has_ended || c->count > 0) {
        load *l = &c->loads[c->first];
        if (c->count == 0 || !l->is_done) {
            pthread_cond_wait(&c->changed, &store->lock);
            continue;
        }
        if (is_refused_memory(l->err)) {
            l->entry->state = EP_EXPERT_QUEUED;
            ep_weight_entry_place(store, l->entry);
            ep_entry_queue_add(again, l->entry);
            c->lead->batch_left++;
        } else {
            end_load(c->lead, l);
            count_first(c->lead, l->entry);
        }
        c->first = (c->first + 1) % EP_ARRAY_COUNT(c->loads);
        c->count--;
        pthread_cond_broadcast(&c->changed);
    }
}

/* Lock held. 0, 1: none are worth it. */
static uint32_t helpers_for(const loader *self)
{
    const ep_weight_store *store = self->store;
    const uint64_t each = file_bytes_of(store, store->first.first);
    uint64_t count = store->config.load_threads;
    count = count < EP_WEIGHT_LOADERS_MAX ? count : EP_WEIGHT_LOADERS_MAX;
    count = count < self->batch_left ? count : self->batch_left;
    count = count < EP_WEIGHT_LOADING_BYTES / each ? count : EP_WEIGHT_LOADING_BYTES / each;
    return self->is_alone || store->devices_count > 1 || had_requests(store) ? 0 : (uint32_t)count;
}

/* Lock held on entry and exit, not in between. */
static void load_together(loader *self, uint32_t helpers)
{
    ep_weight_store *store = self->store;
    pthread_t threads[EP_WEIGHT_LOADERS_MAX];
    uint32_t started = 0;
    entry_queue again = {.end = &again.first};
    crew c = {.lead = self};
    pthread_attr_t attributes;
    pthread_mutex_unlock(&store->lock);
    pthread_cond_init(&c.changed, NULL);
    pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, HELPER_STACK_BYTES);
    while (started < helpers && pthread_create(&threads[started], &attributes, help, &c) == 0) {
        pthread_setname_np(threads[started++], "ep-loader");
    }
    pthread_attr_destroy(&attributes);
    pthread_mutex_lock(&store->lock);
    c.has_ended = c.has_ended || started == 0;
    lead(&c, &again);
    pthread_mutex_unlock(&store->lock);
    while (started > 0) {
        pthread_join(threads[--started], NULL);
    }
    pthread_cond_destroy(&c.changed);
    pthread_mutex_lock(&store->lock);
    if (again.first != NULL) { /* before all others, as they came */
        *again.end = store->first.first;
        store->first.end = store->first.first == NULL ? again.end : store->first.end;
        store->first.first = again.first;
    }
    self->is_alone = self->is_alone || self->batch_left > 0;
}

/* Lock held on entry and exit, not in between. */
static void end_first_pass(ep_weight_store *store)
{
    const bool warms_up = store->is_warm_due && store->stats.resident_count > 0;
    pthread_mutex_unlock(&store->lock);
    ep_weight_errors_say(store);
    if (warms_up) {
        ep_weight_warm(store);
        pthread_mutex_lock(&store->lock);
        store->is_warm_due = false;
        pthread_mutex_unlock(&store->lock);
    }
    store->config.on_change(store->config.arg);
    pthread_mutex_lock(&store->lock);
    pthread_cond_signal(&store->save);
}

/* ---- the thread ---- */

/*
 * Lock held, but for the wait: until the rate allows a load, and so its bytes stay within the rate.
 * False: it shall not be; the store stops, or a prefetch gives way to what is due.
 */
static bool await_rate(loader *self, load_kind kind)
{
    ep_weight_store *store = self->store;
    for (;;) {
        if (store->stop || (kind == LOAD_PREFETCH &&
                            (store->urgent.first != NULL || store->first.first != NULL))) {
            return false;
        }
        if (store->config.load_bytes_per_s == 0 || ep_clock_now_ns() >= self->paid_until_ns) {
            return true;
        }
        ep_clock_wait(&store->work, &store->lock, self->paid_until_ns);
    }
}

static bool take_prefetch(ep_weight_store *store, expert_entry **out_entry)
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

/* Nobody waits for it any more. Lock held on entry and exit, not in between. */
static void give_up(ep_weight_store *store, expert_entry *entry)
{
    ep_weight_wait *ended = ep_weight_waits_take(store, entry, NULL);
    ep_error error;
    entry->state = EP_EXPERT_ABSENT;
    if (entry->is_wanted && !entry->is_owned) { /* dropped while it was queued, and wanted again */
        ep_weight_entry_queue_first(store, entry);
    }
    ep_weight_entry_place(store, entry);
    (void)ep_weight_entry_lose(store, entry); /* it is not resident */
    pthread_mutex_unlock(&store->lock);
    ep_error_set(&error, EP_ERR_CANCELLED, "the caller no longer waits");
    ep_weight_waits_end(ended, &error);
    store->config.on_change(store->config.arg);
    pthread_mutex_lock(&store->lock);
}

/* Lock held on entry and exit, not in between. */
static void load_urgent(loader *self, expert_entry *entry)
{
    ep_weight_store *store = self->store;
    self->is_blocked = false;
    /* They may give up while the rate is waited for. */
    if (!ep_weight_waits_any(store, entry) || !await_rate(self, LOAD_URGENT) ||
        !ep_weight_waits_any(store, entry)) {
        give_up(store, entry);
    } else {
        load_one(self, entry, LOAD_URGENT);
        /* or an assignment would never be whole while requests miss again and again */
        self->owes_first = self->owes_first || !self->is_blocked;
    }
    if (store->urgent.first == NULL) {
        ep_load_room_idle(&store->room_ahead, ep_clock_now_ns());
    }
}

/* Lock held on entry and exit, not in between. */
static void load_ahead(loader *self, expert_entry *entry)
{
    if (await_rate(self, LOAD_PREFETCH) && entry->state == EP_EXPERT_ABSENT && entry->is_owned &&
        entry->is_wanted) {
        self->ahead = entry;
        load_one(self, entry, LOAD_PREFETCH);
        self->ahead = NULL;
    }
}

/* Lock held. Experts that are due again go to the end of the first pass. */
static void take_later(ep_weight_store *store)
{
    const uint64_t now_ns = ep_clock_now_ns();
    while (store->later.first != NULL && store->later.first->retry_ns <= now_ns) {
        ep_entry_queue_add(&store->first, ep_entry_queue_take(&store->later));
    }
}

/* Lock held on entry and exit. False: nothing to do. */
static bool work_once(loader *self)
{
    ep_weight_store *store = self->store;
    take_later(store);
    const bool owes_first = self->owes_first && store->first.first != NULL;
    expert_entry *entry = owes_first ? NULL : ep_entry_queue_take(&store->urgent);
    if (entry != NULL) {
        load_urgent(self, entry);
        return true;
    }
    if (store->first.first != NULL && self->batch_left == 0) {
        end_progress(self);
        begin_progress(self);
    }
    if (store->first.first != NULL) {
        const uint32_t helpers = helpers_for(self);
        if (helpers > 1) {
            load_together(self, helpers);
        } else {
            load_first(self);
        }
        if (store->first.first == NULL) {
            end_progress(self);
            end_first_pass(store);
        }
        return true;
    }
    if (take_prefetch(store, &entry)) {
        load_ahead(self, entry);
        return true;
    }
    return false;
}

/* Lock held, but for the wait, and while blocks are freed: then it does not wait. */
static void await_work(loader *self)
{
    ep_weight_store *store = self->store;
    if (!ep_expert_room_is_empty(&self->room)) {
        pthread_mutex_unlock(&store->lock);
        ep_expert_room_free(&self->room);
        pthread_mutex_lock(&store->lock);
        return; /* something may have come meanwhile */
    }
    ep_clock_wait(&store->work, &store->lock,
                  store->later.first != NULL ? store->later.first->retry_ns : EP_TIME_NEVER);
}

void *ep_weight_loader_main(void *arg)
{
    loader self = {.store = arg};
    ep_weight_store *store = arg;
    pthread_mutex_lock(&store->lock);
    while (!store->stop) {
        if (!work_once(&self) && !store->stop) {
            await_work(&self);
        }
    }
    pthread_mutex_unlock(&store->lock);
    ep_expert_room_free(&self.room);
    end_progress(&self);
    return NULL;
}

/* ---- the saver ---- */

/* Lock held: the next resident expert without a file, from *layer, *expert on and round; NULL:
 * none. */
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
    entry->is_saved = true; /* also when it cannot be: it was said why */
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
        /* the first pass goes before */
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
