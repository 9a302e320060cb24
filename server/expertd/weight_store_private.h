/* SPDX-License-Identifier: Apache-2.0 */
/* What the store's table (weight_store.c) shares with the threads that load and save. */
#ifndef EP_EXPERTD_WEIGHT_STORE_PRIVATE_H
#define EP_EXPERTD_WEIGHT_STORE_PRIVATE_H

#include <pthread.h>

#include "expertd/weight_store.h"
#include "moe/expert_heat.h"
#include "moe/load_room.h"

typedef struct expert_entry {
    ep_expert_state state;
    bool is_wanted;
    bool is_owned;
    bool is_saved;      /* has its file in the cache, or cannot have one */
    bool is_prefetched; /* resident ahead of time and not used yet */
    uint32_t layer_slot;
    uint32_t expert;
    uint64_t retry_ns;         /* a load failed for a passing reason: none before this */
    uint32_t digest;           /* first bytes of its SHA-256; 0: never read */
    uint32_t reserved_on;      /* the device of a load that runs beside others; NO_DEVICE: none */
    uint64_t reserved_bytes;   /* there */
    ep_resident *resident;     /* the store's reference; NULL unless RESIDENT */
    struct expert_entry *next; /* in one of the loader's queues */
} expert_entry;

typedef struct layer_entry {
    ep_weight_layer layer;
    uint32_t experts_count; /* E + S */
    uint32_t resident_count;
    uint64_t expert_bytes_max; /* in memory, of its largest expert */
    expert_entry *experts;
    ep_weight_quant_stats quant;
    uint32_t quant_worst; /* the expert of quant.error */
    bool is_judged;       /* of the loader's thread: an expert's outputs were looked at */
} layer_entry;

/* One instance of the backend and its memory. */
typedef struct device_entry {
    ep_backend *backend;
    uint64_t limit_bytes; /* 0: none */
    /* also of experts that only jobs still hold, and of those being loaded */
    uint64_t resident_bytes;
    uint64_t leaving_bytes; /* of experts that only jobs still hold */
    bool is_lost;
} device_entry;

#define EP_WEIGHT_NO_DEVICE UINT32_MAX

typedef struct entry_queue {
    expert_entry *first;
    expert_entry **end;
} entry_queue;

struct ep_weight_store {
    ep_weight_store_config config;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t work;
    pthread_cond_t room; /* bytes came back */
    pthread_cond_t save; /* an expert may be written to the cache */
    pthread_t loader;
    pthread_t saver;
    bool loader_runs;
    bool saver_runs;
    bool saver_gave_up;
    bool is_warm_due;
    bool stop;
    ep_err close_reason; /* EP_OK: open */
    uint32_t devices_count;
    uint32_t devices_left; /* not lost */
    device_entry *devices;
    bool has_budget;                    /* on some device; else nothing ever goes */
    char lost_why[EP_ERROR_TEXT_BYTES]; /* of the last device */
    uint32_t layers_count;
    layer_entry *layers;
    entry_queue urgent; /* requests wait for them */
    entry_queue first;  /* first pass */
    /* the same, when retry_ns allows: nobody gave their bytes; in the order of that */
    entry_queue later;
    uint32_t prefetches_due; /* of the last visit */
    ep_expert_heat *heat;
    ep_load_room room_ahead; /* is there time for prefetches? */
    ep_weight_wait *waits;   /* of all experts */
    ep_timer deadline;
    uint64_t deadline_ns;   /* armed for; EP_TIME_NEVER not */
    uint64_t unsaved_count; /* resident experts without a file */
    double said_errors;     /* sum of the layers' that were said last */
    ep_weight_stats stats;
};

void ep_entry_queue_add(entry_queue *queue, expert_entry *entry);
expert_entry *ep_entry_queue_take(entry_queue *queue); /* NULL: empty */

/* Lock held: to the first pass, which decides on its ownership. */
void ep_weight_entry_queue_first(ep_weight_store *store, expert_entry *entry);

/* What the packed form will take at least. */
uint64_t ep_weight_layer_bytes_at_least(const ep_weight_layer *layer);
/* What an expert of it takes in memory, by the outline of its tensors. False: they are not as they
 * should be. */
bool ep_weight_layer_bytes_packed(const ep_weight_store *store, const ep_weight_layer *layer,
                                  uint32_t expert, uint64_t *out_bytes);
/* What loading an expert of the layer from its model's files reads. */
uint64_t ep_weight_layer_bytes_read(const ep_weight_layer *layer);

/* Lock held: says to the heat where the expert is. */
void ep_weight_entry_place(ep_weight_store *store, const expert_entry *entry);
/* Lock held: ends or begins its ownership. */
void ep_weight_entry_own(ep_weight_store *store, expert_entry *entry, bool is_owned);
/* Lock held: resident_bytes of all devices. */
uint64_t ep_weight_store_bytes(const ep_weight_store *store);
/* Lock held: lets an expert go that is on a lost device, or cold with no device left; the caller
 * releases what comes back (NULL: nothing) without the lock. To be called where an expert becomes
 * either. */
ep_resident *ep_weight_entry_lose(ep_weight_store *store, expert_entry *entry);
/* Lock held: takes an expert out of the table; the caller releases what comes back, without the
 * lock. */
ep_resident *ep_weight_entry_evict(ep_weight_store *store, expert_entry *entry);
/* Lock held: the waits for an expert, out of the list, with a reference to resident each, or with
 * error (copied); to be ended without the lock. */
ep_weight_wait *ep_weight_waits_take(ep_weight_store *store, const expert_entry *entry,
                                     ep_resident *resident);
/* Lock held: whether anybody still wants what he waits for. */
bool ep_weight_waits_any(const ep_weight_store *store, const expert_entry *entry);
/* No lock held. error: of those without a resident. */
void ep_weight_waits_end(ep_weight_wait *list, const ep_error *error);

/* The key of an expert's file. */
void ep_weight_layer_key(const ep_weight_layer *layer, uint32_t expert,
                         ep_weight_cache_key *out_key);

/* weight_errors.c. Lock held: what quantising an expert cost (0: not known), and its outputs. */
void ep_weight_errors_take(ep_weight_store *store, layer_entry *layer, uint32_t expert,
                           double error, double output_error);
/* No lock held, the loader's thread. Looks at the outputs of the first expert of a layer, which is
 * read once more for it. What cannot be read now can be with the next one. */
void ep_weight_errors_judge(ep_weight_store *store, const ep_resident *resident);
/* The same. In one line a model, when there is something that was not said. */
void ep_weight_errors_say(ep_weight_store *store);

/* weight_loader.c, weight_saver.c */
void *ep_weight_loader_main(void *store);
void *ep_weight_saver_main(void *store);
/* weight_warm.c. No lock held. */
void ep_weight_warm(ep_weight_store *store);

#endif
