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
    uint64_t retry_ns;         /* no load before this time, after one failed for a passing reason */
    uint32_t digest;           /* first bytes of its SHA-256; 0: never read */
    uint32_t reserved_on;      /* device of a load that runs beside others; NO_DEVICE: none */
    uint64_t reserved_bytes;   /* on that device */
    ep_resident *resident;     /* the store's reference; NULL unless RESIDENT */
    struct expert_entry *next; /* in one of the loader's queues */
} expert_entry;

typedef struct layer_entry {
    ep_weight_layer layer;
    uint32_t experts_count; /* E + S */
    uint32_t resident_count;
    uint64_t expert_bytes_max; /* memory of its largest expert */
    expert_entry *experts;
    ep_weight_quant_stats quant;
    uint32_t quant_worst; /* the expert of quant.error */
    bool is_judged;       /* loader's thread only: an expert's outputs were checked */
} layer_entry;

/* One instance of the backend and its memory. */
typedef struct device_entry {
    ep_backend *backend;
    uint64_t limit_bytes; /* 0: none */
    /* includes experts that only jobs still hold, and those being loaded */
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
    pthread_mutex_t lock; /* protects everything below */
    pthread_cond_t work;
    pthread_cond_t room; /* memory was freed */
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
    bool has_budget;                    /* some device has one; else nothing is evicted */
    char lost_why[EP_ERROR_TEXT_BYTES]; /* reason of the latest loss */
    uint32_t layers_count;
    layer_entry *layers;
    entry_queue urgent; /* experts that requests wait for */
    entry_queue first;  /* first pass */
    /* first pass, from retry_ns on: no node or storage gave their bytes; in order of retry_ns */
    entry_queue later;
    uint32_t prefetches_due; /* by the last visit of a layer */
    ep_expert_heat *heat;
    ep_load_room room_ahead; /* whether there is time for prefetches */
    ep_weight_wait *waits;   /* for all experts */
    ep_timer deadline;
    uint64_t deadline_ns;   /* when deadline is due; EP_TIME_NEVER: not armed */
    uint64_t unsaved_count; /* resident experts without a file */
    uint32_t refused_count; /* loads in a row that failed for a passing reason */
    double said_errors;     /* sum of the layers' errors when last logged */
    ep_weight_stats stats;
};

void ep_entry_queue_add(entry_queue *queue, expert_entry *entry);
expert_entry *ep_entry_queue_take(entry_queue *queue); /* NULL: empty */

/* Queues it for the first pass, which decides on its ownership. Lock held. */
void ep_weight_entry_queue_first(ep_weight_store *store, expert_entry *entry);

/* The least bytes that the packed form can take. */
uint64_t ep_weight_layer_bytes_at_least(const ep_weight_layer *layer);
/* Bytes that an expert of the layer takes in memory, by the outline of its tensors. False: they are
 * not as they should be. */
bool ep_weight_layer_bytes_packed(const ep_weight_store *store, const ep_weight_layer *layer,
                                  uint32_t expert, uint64_t *out_bytes);
/* Bytes that are read to load an expert of the layer from its model's files. */
uint64_t ep_weight_layer_bytes_read(const ep_weight_layer *layer);

/* Tells store->heat where the expert is. Lock held. */
void ep_weight_entry_place(ep_weight_store *store, const expert_entry *entry);
/* A load has succeeded, or the assignment is another: what was refused may come now. Lock held. */
void ep_weight_refusals_end(ep_weight_store *store);
/* Begins or ends its ownership. Lock held. */
void ep_weight_entry_own(ep_weight_store *store, expert_entry *entry, bool is_owned);
/* The sum of resident_bytes of all devices. Lock held. */
uint64_t ep_weight_store_bytes(const ep_weight_store *store);
/* Takes an expert out of the table that is on a lost device, or ends the ownership of a cold one
 * when no device is left. Call it wherever an expert becomes either. Lock held; the caller releases
 * the result (NULL: nothing) without the lock. */
ep_resident *ep_weight_entry_lose(ep_weight_store *store, expert_entry *entry);
/* Takes an expert out of the table. Lock held; the caller releases the result without the lock. */
ep_resident *ep_weight_entry_evict(ep_weight_store *store, expert_entry *entry);
/* Takes the waits for an expert from the list, each with a reference to resident unless that is
 * NULL. Lock held; end them without the lock. */
ep_weight_wait *ep_weight_waits_take(ep_weight_store *store, const expert_entry *entry,
                                     ep_resident *resident);
/* Whether any wait for the expert is still wanted. Lock held. */
bool ep_weight_waits_any(const ep_weight_store *store, const expert_entry *entry);
/* Ends waits; those without a resident get the error. No lock held. */
void ep_weight_waits_end(ep_weight_wait *list, const ep_error *error);

/* The key of an expert's file in the cache. */
void ep_weight_layer_key(const ep_weight_layer *layer, uint32_t expert,
                         ep_weight_cache_key *out_key);

/* weight_errors.c. Notes the error of an expert's quantised weights (0: unknown) and of its
 * outputs. Lock held. */
void ep_weight_errors_take(ep_weight_store *store, layer_entry *layer, uint32_t expert,
                           double error, double output_error);
/* Checks the outputs of the first expert of a layer, which is read once more for that; if it cannot
 * be read now, the next one is taken. No lock held; the loader's thread. */
void ep_weight_errors_judge(ep_weight_store *store, const ep_resident *resident);
/* Logs what was not logged yet, one line a model. No lock held; the loader's thread. */
void ep_weight_errors_say(ep_weight_store *store);

/* weight_loader.c, weight_saver.c */
void *ep_weight_loader_main(void *store);
void *ep_weight_saver_main(void *store);
/* weight_warm.c. No lock held. */
void ep_weight_warm(ep_weight_store *store);

#endif
