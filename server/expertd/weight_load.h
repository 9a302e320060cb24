/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files that load experts: weight_loader.c (the thread and its helpers),
 * weight_load.c (one load) and weight_room.c (memory for a load). */
#ifndef EP_EXPERTD_WEIGHT_LOAD_H
#define EP_EXPERTD_WEIGHT_LOAD_H

#include "expertd/weight_store_private.h"
#include "model/load_progress.h"

typedef enum load_kind { LOAD_URGENT, LOAD_FIRST, LOAD_PREFETCH } load_kind;

typedef struct loader {
    ep_weight_store *store;
    bool has_progress;
    bool owes_first;     /* the next load must be one of the first pass */
    uint64_t batch_left; /* experts of this batch of the first pass that are still queued */
    ep_load_progress progress;
    uint64_t paid_until_ns; /* the rate allows no load before */
    uint64_t rate_ns;       /* time that the rate prescribes for the current load */
    expert_entry *ahead;    /* the expert being prefetched, or NULL */
    uint64_t ahead_bytes;   /* memory of the prefetch while it can give way, else 0 */
    bool is_blocked;        /* the last urgent load needs the memory of the prefetch */
    uint64_t paused_ns;     /* time for which the current load gave way */
    uint64_t evicted_bytes; /* of experts evicted since a load succeeded, as memory was refused */
    uint64_t refusing;      /* bit d: device d has refused memory for the current load */
    bool has_warned;        /* that the system refuses memory */
    uint64_t said_ns;       /* when a failure for a shared reason was last logged */
    uint64_t unsaid;        /* such failures since then */
    bool is_alone;          /* the rest of the batch is loaded without helpers */
    ep_expert_room room;    /* file blocks, kept while there is something to load */
} loader;

/* One load and its outcome. */
typedef struct load {
    expert_entry *entry;
    load_kind kind;
    bool is_beside_others; /* helpers ran too, so took_ns says nothing about one load */
    bool is_done;
    bool is_saved;
    ep_resident *resident; /* NULL: an error */
    ep_err err;
    ep_error error;
    uint64_t took_ns;
    uint64_t rate_ns; /* time that the rate prescribes for it */
} load;

/* weight_load.c */
/* Marks the expert as being loaded. Lock held. */
void ep_weight_load_begin(ep_weight_store *store, expert_entry *entry, load_kind kind,
                          load *out_load);
/* Reads and packs the expert. No lock held. */
void ep_weight_load_run(loader *self, load *l);
/* Puts the outcome into the table and ends the waits for the expert. Lock held on entry and exit,
 * not in between. */
void ep_weight_load_end(loader *self, load *l);
/* Begins, runs and ends one load. Lock held on entry and exit, not in between. */
void ep_weight_load_one(loader *self, expert_entry *entry, load_kind kind);
/* Loads an expert that requests wait for, unless they have given up. Lock held on entry and exit,
 * not in between. */
void ep_weight_load_urgent(loader *self, expert_entry *entry);
/* Waits until the rate allows a load. Lock held, but not during the wait. False: do not load, for
 * the store stops, or a prefetch must give way to other loads. */
bool ep_weight_load_await_rate(loader *self, load_kind kind);

/* weight_room.c */
/*
 * Reserves a device and its bytes for a load that runs beside others. Loads begin in the queue's
 * order, so each gets the device that it would get alone. Such a load neither asks another device
 * nor evicts an expert. Lock held. False: no device has room.
 */
bool ep_weight_room_reserve(ep_weight_store *store, expert_entry *entry);
/* The load failed: gives the reservation back. Lock held. */
void ep_weight_room_unreserve(ep_weight_store *store, expert_entry *entry);
/* Makes sure that some device has room. takes: chooses the device and charges the bytes to it. No
 * lock held. Errors: DEVICE_LOST (no device is left), RESOURCE_EXHAUSTED. */
ep_err ep_weight_room_check(loader *self, ep_resident *resident, uint64_t bytes, load_kind kind,
                            bool takes, ep_error *out_error);
/* Gives back the bytes of a load that failed; those of a reservation stay. No lock held. */
void ep_weight_room_give_back(ep_weight_store *store, const ep_resident *resident, uint64_t bytes);
/* Whether to try a load that ended with err again: its device refused memory and another device has
 * room. No lock held. */
bool ep_weight_room_asks_another(loader *self, const ep_resident *resident, ep_err err);
/*
 * Whether to try it again: the system refused memory that the budget allows (a limit on addresses,
 * strict overcommit), a request waits, and an expert on the device that no job uses was evicted. No
 * lock held.
 */
bool ep_weight_room_frees_memory(loader *self, load_kind kind, const ep_resident *resident,
                                 ep_err err);
/*
 * Whether an expert stays cold because there is no room. With a budget this is also so when the
 * system refuses memory in the first pass: the expert is loaded later in place of another. No lock
 * held.
 */
bool ep_weight_room_is_lacking(loader *self, load_kind kind, ep_err err);
/* Chooses the next expert to prefetch. Lock held. False: none, or there is no time. */
bool ep_weight_room_prefetch(ep_weight_store *store, expert_entry **out_entry);

#endif
