/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that loads experts: first those that requests wait for, then those of the first pass,
 * then those that are likely to be used next. The store's lock is not held while it reads, packs or
 * frees. Until the first request comes, helpers share the first pass.
 */
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "expertd/weight_load.h"

/* Of a helper. Small, for the C library keeps stacks of threads that ended, and addresses may be
 * limited. */
#define HELPER_STACK_BYTES ((size_t)1 << 20)

/* ---- the first pass, with its progress ---- */

/* Makes all that is queued now one batch with one progress bar. Lock held. */
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

/* Takes the next expert of the first pass; NULL: it is not wanted any more. Lock held. */
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
    if (self->has_progress && entry->state != EP_EXPERT_QUEUED) { /* else it will be loaded again */
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
        ep_weight_load_one(self, entry, LOAD_FIRST);
        count_first(self, entry);
        /* without room nothing was loaded, which took no time */
        self->owes_first = self->owes_first && entry->state == EP_EXPERT_ABSENT;
    }
}

/* ---- the same with helpers ---- */

/*
 * Before the first request helpers disturb nobody. They take the batch's experts in the queue's
 * order; each has file blocks of its own, and each load a reserved place on a device. The loader
 * deals with the outcomes in the same order. So if no load fails, the log, the experts in memory
 * and their devices are those of one thread. When no device has room for the next expert, or a
 * device refuses memory or is lost, no helper begins another load and the loader goes on alone. It
 * loads again what failed for such a reason.
 */
typedef struct crew {
    loader *lead;
    pthread_cond_t changed;
    bool has_ended;      /* no load begins any more */
    uint64_t file_bytes; /* sum over the loads under way, in their files */
    uint32_t first;      /* loads is a ring */
    uint32_t count;
    load loads[2 * EP_WEIGHT_LOADERS_MAX];
} crew;

/* Bytes of an expert in its files. Shared experts may be wider than the layer says. Lock held. */
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
    return !c->has_ended && !store->stop && c->lead->batch_left > 0 && store->first.first != NULL &&
           !had_requests(store);
}

/* Begins the next load of the batch. Lock held, but not during the wait. NULL: there is none. */
static load *begin_next(crew *c)
{
    ep_weight_store *store = c->lead->store;
    while (may_begin(c)) {
        expert_entry *next = store->first.first;
        const uint64_t file_bytes = file_bytes_of(store, next);
        if (c->file_bytes > 0 && c->file_bytes + file_bytes > EP_WEIGHT_LOADING_BYTES) {
            return NULL; /* the running helpers are enough for experts of this size */
        }
        if (c->count == EP_ARRAY_COUNT(c->loads)) {
            pthread_cond_wait(&c->changed, &store->lock);
            continue;
        }
        if (next->is_wanted && !ep_weight_room_reserve(store, next)) {
            break;
        }
        if (take_first(c->lead) != NULL) {
            load *l = &c->loads[(c->first + c->count) % EP_ARRAY_COUNT(c->loads)];
            ep_weight_load_begin(store, next, LOAD_FIRST, l);
            l->is_beside_others = true;
            c->file_bytes += file_bytes;
            c->count++;
            return l;
        }
    }
    c->has_ended = true;
    return NULL;
}

/* Whether the load may end otherwise alone, with other devices to ask or less memory in use. */
static bool is_for_one(ep_err err)
{
    return err == EP_ERR_NO_MEMORY || err == EP_ERR_RESOURCE_EXHAUSTED || err == EP_ERR_DEVICE_LOST;
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
        ep_weight_load_run(&self, l);
        pthread_mutex_lock(&store->lock);
        l->is_done = true;
        c->file_bytes -= file_bytes_of(store, l->entry);
        if (l->err != EP_OK) {
            ep_weight_room_unreserve(store, l->entry);
        }
        c->has_ended = c->has_ended || is_for_one(l->err);
        pthread_cond_broadcast(&c->changed);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&store->lock);
    ep_expert_room_free(&self.room);
    return NULL;
}

/* Deals with outcomes until no load begins any more and all have ended. again: receives what must
 * be loaded again. Lock held on entry and exit, not in between. */
static void lead(crew *c, entry_queue *again)
{
    ep_weight_store *store = c->lead->store;
    while (!c->has_ended || c->count > 0) {
        load *l = &c->loads[c->first];
        if (c->count == 0 || !l->is_done) {
            pthread_cond_wait(&c->changed, &store->lock);
            continue;
        }
        if (is_for_one(l->err)) {
            l->entry->state = EP_EXPERT_QUEUED;
            ep_weight_entry_place(store, l->entry);
            ep_entry_queue_add(again, l->entry);
            c->lead->batch_left++;
        } else {
            ep_weight_load_end(c->lead, l);
            count_first(c->lead, l->entry);
        }
        c->first = (c->first + 1) % EP_ARRAY_COUNT(c->loads);
        c->count--;
        pthread_cond_broadcast(&c->changed);
    }
}

/* How many helpers to start; 0 or 1: none are worth it. Lock held. */
static uint32_t helpers_for(const loader *self)
{
    const ep_weight_store *store = self->store;
    const uint64_t each = file_bytes_of(store, store->first.first);
    uint64_t count = store->config.load_threads;
    count = count < EP_WEIGHT_LOADERS_MAX ? count : EP_WEIGHT_LOADERS_MAX;
    count = count < self->batch_left ? count : self->batch_left;
    count = count < EP_WEIGHT_LOADING_BYTES / each ? count : EP_WEIGHT_LOADING_BYTES / each;
    return self->is_alone || had_requests(store) ? 0 : (uint32_t)count;
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
    if (again.first != NULL) { /* in front of the queue, in their order */
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

/* Lock held on entry and exit, not in between. */
static void load_ahead(loader *self, expert_entry *entry)
{
    if (ep_weight_load_await_rate(self, LOAD_PREFETCH) && entry->state == EP_EXPERT_ABSENT &&
        entry->is_owned && entry->is_wanted) {
        self->ahead = entry;
        ep_weight_load_one(self, entry, LOAD_PREFETCH);
        self->ahead = NULL;
    }
}

/* Appends experts whose time has come to the first pass. Lock held. */
static void take_later(ep_weight_store *store)
{
    const uint64_t now_ns = ep_clock_now_ns();
    while (store->later.first != NULL && store->later.first->retry_ns <= now_ns) {
        ep_entry_queue_add(&store->first, ep_entry_queue_take(&store->later));
    }
}

/* Does one piece of work. Lock held on entry and exit. False: there is nothing to do. */
static bool work_once(loader *self)
{
    ep_weight_store *store = self->store;
    take_later(store);
    const bool owes_first = self->owes_first && store->first.first != NULL;
    expert_entry *entry = owes_first ? NULL : ep_entry_queue_take(&store->urgent);
    if (entry != NULL) {
        ep_weight_load_urgent(self, entry);
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
    if (ep_weight_room_prefetch(store, &entry)) {
        load_ahead(self, entry);
        return true;
    }
    return false;
}

/* Frees file blocks that are kept, or else waits for work. Lock held, but not meanwhile. */
static void await_work(loader *self)
{
    ep_weight_store *store = self->store;
    if (!ep_expert_room_is_empty(&self->room)) {
        pthread_mutex_unlock(&store->lock);
        ep_expert_room_free(&self->room);
        pthread_mutex_lock(&store->lock);
        return; /* work may have come meanwhile */
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
