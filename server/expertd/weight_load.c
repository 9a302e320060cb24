/* SPDX-License-Identifier: Apache-2.0 */
/* One load: waits for the rate, reads the cache or the checkpoint, and tells the outcome to the
 * table and to those who wait. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "expertd/weight_load.h"
#include "observe/trace.h"

/* between a load that failed for a passing reason and the next try */
#define RETRY_NS (EP_NS_PER_S / 2)
#define LATER_NS (2 * EP_NS_PER_S) /* the same in the first pass, where nobody waits */
/* between two lines of the log about a reason that all loads share */
#define SAID_NS EP_NS_PER_S
#define REFUSED_MANY 4 /* loads in a row that fail for a passing reason before it is told */
#define CARRY_NS (EP_NS_PER_S / 10) /* unused time of the rate that later loads may use */

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

/* Charges the bytes that are read now, from the cache or the checkpoint. The first pass has no
 * rate. Needs no lock: only the loader's thread uses these fields. */
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

bool ep_weight_load_await_rate(loader *self, load_kind kind)
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

/* ---- from the cache, from the checkpoint ---- */

/* Whether to try a load that ended with err again: its device is lost, and there are others that it
 * may use. No lock held. */
static bool loses_device(ep_weight_store *store, const expert_entry *entry,
                         const ep_resident *resident, ep_err err, const ep_error *error)
{
    if (err != EP_ERR_DEVICE_LOST || resident->device == EP_WEIGHT_NO_DEVICE) {
        return false;
    }
    ep_weight_store_lose(store, resident->device, error->text);
    pthread_mutex_lock(&store->lock);
    const bool goes_on =
        store->devices_left > 0 && !store->stop && entry->reserved_on == EP_WEIGHT_NO_DEVICE;
    pthread_mutex_unlock(&store->lock);
    return goes_on;
}

static ep_err pack(loader *self, const ep_weight_layer *layer, const ep_expert_data *data,
                   load_kind kind, ep_resident *resident, ep_error *out_error)
{
    ep_weight_store *store = self->store;
    const ep_expert_source *source = &data->source;
    /* checkpoints often keep these in a finer format */
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
        err = ep_weight_room_check(self, resident, resident->bytes, kind, true, out_error);
        if (err != EP_OK) {
            return err;
        }
        err = resident->backend->ops->weights_load(resident->backend, source, &resident->weights,
                                                   out_error);
        if (err != EP_OK) {
            ep_weight_room_give_back(store, resident, resident->bytes);
        }
    } while ((err == EP_ERR_NO_MEMORY && ep_expert_room_trim(&self->room, data)) ||
             ep_weight_room_asks_another(self, resident, err) ||
             ep_weight_room_frees_memory(self, kind, resident, err));
    return err;
}

/*
 * Called between two pieces of a prefetch: runs loads that requests wait for first. These do not
 * wait for the rate of bytes that the prefetch has not read yet, which is refunded now and charged
 * again afterwards. No lock held. False: end the prefetch, for the store stops, or the budget does
 * not hold both experts.
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
            ep_weight_load_urgent(self, ep_entry_queue_take(&store->urgent));
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

/* After NO_MEMORY, frees the file blocks that are kept for the next load. True: they were freed, so
 * try again before an expert is evicted. pack() has its own way. No lock held. */
static bool frees_blocks(loader *self, ep_err err)
{
    const bool frees = err == EP_ERR_NO_MEMORY && !ep_expert_room_is_empty(&self->room);
    if (frees) {
        ep_expert_room_free(&self->room);
    }
    return frees;
}

/* Loads from the expert's file in the cache. NOT_FOUND: there is no usable file. */
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
    ep_err err = ep_weight_room_check(self, resident, file.body_bytes, kind, true, out_error);
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
    ep_weight_cache_forget(&file);
    self->ahead_bytes = kind == LOAD_PREFETCH ? 0 : self->ahead_bytes;
    if (err != EP_OK) {
        ep_weight_room_give_back(store, resident, file.body_bytes);
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

/* Makes one expert resident, from the cache or the checkpoint. RESOURCE_EXHAUSTED: the budget has
 * no room for it. No lock held. */
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
    self->refusing = 0;
    ep_err err = ep_weight_room_check(self, resident, ep_weight_layer_bytes_at_least(layer), kind,
                                      false, out_error);
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
    } while (ep_weight_room_frees_memory(self, kind, resident, err) ||
             loses_device(store, entry, resident, err, out_error));
    if (err != EP_OK) {
        free(resident);
        return err;
    }
    self->evicted_bytes = 0;
    *out_resident = resident;
    return EP_OK;
}

/* ---- the outcome ---- */

static uint32_t short_digest(const uint8_t *sha256)
{
    const uint32_t digest = (uint32_t)sha256[0] | (uint32_t)sha256[1] << 8 |
                            (uint32_t)sha256[2] << 16 | (uint32_t)sha256[3] << 24;
    return digest != 0 ? digest : 1; /* 0 means unknown */
}

/* Reasons that have nothing to do with the expert's bytes and may have passed by the next try. */
static bool is_passing(ep_err err)
{
    return err == EP_ERR_IO || err == EP_ERR_NO_MEMORY || err == EP_ERR_UNAVAILABLE ||
           err == EP_ERR_RESOURCE_EXHAUSTED;
}

/* Logs a failed load. A bad disk, refused memory or a lost device fails every load: then at most
 * one line a second. No lock held. */
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

/* Lock held. */
static void note_error(ep_weight_store *store, const expert_entry *entry, ep_err err,
                       const ep_error *error)
{
    const ep_weight_layer *layer = &store->layers[entry->layer_slot].layer;
    store->stats.last_reason = err;
    snprintf(store->stats.last_error, sizeof(store->stats.last_error),
             "model %s layer %u expert %u: %.350s", layer->model, layer->shape.layer, entry->expert,
             error->text);
}

/*
 * Writes the outcome of one load into its entry. A cold expert stays cold if there was no room, and
 * an owned one stays owned if the reason may pass: otherwise one error of a device, or a moment
 * without memory, would cost every expert that is needed just then. Lock held.
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
        entry->reserved_on = EP_WEIGHT_NO_DEVICE; /* the bytes now belong to the resident */
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
        ep_weight_refusals_end(store);
        ep_weight_entry_own(store, entry, entry->is_owned || entry->is_wanted);
    } else if (had_no_room) {
        entry->state = EP_EXPERT_ABSENT;
        /* the expert may have been dropped meanwhile */
        ep_weight_entry_own(store, entry, entry->is_owned || entry->is_wanted);
    } else if (kind == LOAD_FIRST && err == EP_ERR_UNAVAILABLE) {
        /* its bytes are on other nodes and may still come */
        entry->state = EP_EXPERT_QUEUED;
        entry->retry_ns = ep_clock_now_ns() + LATER_NS;
        ep_entry_queue_add(&store->later, entry);
        store->stats.pending_count++;
    } else if (entry->is_owned && is_passing(err)) {
        entry->state = EP_EXPERT_ABSENT;
        entry->retry_ns = ep_clock_now_ns() + RETRY_NS;
        if (++store->refused_count >= REFUSED_MANY) {
            store->stats.is_refused = true;
            if (store->stats.failed_count == 0) { /* else there is a reason that does not pass */
                note_error(store, entry, err, error);
            }
        }
    } else {
        entry->state = EP_EXPERT_FAILED;
        store->stats.failed_count++;
        ep_weight_entry_own(store, entry, false);
        note_error(store, entry, err, error);
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

void ep_weight_load_begin(ep_weight_store *store, expert_entry *entry, load_kind kind,
                          load *out_load)
{
    *out_load = (load){.entry = entry, .kind = kind};
    ep_error_clear(&out_load->error);
    entry->state = EP_EXPERT_LOADING;
    ep_weight_entry_place(store, entry);
}

void ep_weight_load_run(loader *self, load *l)
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

void ep_weight_load_end(loader *self, load *l)
{
    ep_weight_store *store = self->store;
    expert_entry *entry = l->entry;
    const layer_entry *layer = &store->layers[entry->layer_slot];
    pthread_mutex_unlock(&store->lock);
    const bool had_no_room = ep_weight_room_is_lacking(self, l->kind, l->err);
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
    /* a prefetch has ended or will, which makes room */
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
    /* If its device has just been lost, or the expert was dropped while it was loading, only those
     * who waited get it. */
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

void ep_weight_load_one(loader *self, expert_entry *entry, load_kind kind)
{
    ep_weight_store *store = self->store;
    load l;
    ep_weight_load_begin(store, entry, kind, &l);
    pthread_mutex_unlock(&store->lock);
    ep_weight_load_run(self, &l);
    pthread_mutex_lock(&store->lock);
    ep_weight_load_end(self, &l);
}

/* ---- for requests ---- */

/* Ends an urgent load that nobody waits for any more. Lock held on entry and exit, not in between.
 */
static void give_up(ep_weight_store *store, expert_entry *entry)
{
    ep_weight_wait *ended = ep_weight_waits_take(store, entry, NULL);
    ep_error error;
    entry->state = EP_EXPERT_ABSENT;
    if (entry->is_wanted && !entry->is_owned) { /* dropped while queued, then wanted again */
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

void ep_weight_load_urgent(loader *self, expert_entry *entry)
{
    ep_weight_store *store = self->store;
    self->is_blocked = false;
    /* The requests may give up during the wait for the rate. */
    if (!ep_weight_waits_any(store, entry) || !ep_weight_load_await_rate(self, LOAD_URGENT) ||
        !ep_weight_waits_any(store, entry)) {
        give_up(store, entry);
    } else {
        ep_weight_load_one(self, entry, LOAD_URGENT);
        /* so that steady misses do not keep the first pass from its end */
        self->owes_first = self->owes_first || !self->is_blocked;
    }
    if (store->urgent.first == NULL) {
        ep_load_room_idle(&store->room_ahead, ep_clock_now_ns());
    }
}
