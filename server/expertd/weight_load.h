/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of loading share: the thread and its helpers (weight_loader.c), one load
 * (weight_load.c), and its memory (weight_room.c). */
#ifndef EP_EXPERTD_WEIGHT_LOAD_H
#define EP_EXPERTD_WEIGHT_LOAD_H

#include "expertd/weight_store_private.h"
#include "model/load_progress.h"

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

/* weight_load.c */
/* Lock held. */
void ep_weight_load_begin(ep_weight_store *store, expert_entry *entry, load_kind kind,
                          load *out_load);
/* No lock held. */
void ep_weight_load_run(loader *self, load *l);
/* Ends the waits for the expert. Lock held on entry and exit, not in between. */
void ep_weight_load_end(loader *self, load *l);
/* All three. Lock held on entry and exit, not in between. */
void ep_weight_load_one(loader *self, expert_entry *entry, load_kind kind);
/* One that requests wait for, unless they have given up. Lock held on entry and exit, not in
 * between. */
void ep_weight_load_urgent(loader *self, expert_entry *entry);
/*
 * Lock held, but for the wait: until the rate allows a load, and so its bytes stay within the rate.
 * False: it shall not be; the store stops, or a prefetch gives way to what is due.
 */
bool ep_weight_load_await_rate(loader *self, load_kind kind);

/* weight_room.c */
/*
 * Lock held, as a load begins that runs beside others, which begin in the queue's order: its device
 * is the one that it would have alone, and its bytes are there from now on. It asks no other device
 * and nobody goes for it. False: no device has room.
 */
bool ep_weight_room_reserve(ep_weight_store *store, expert_entry *entry);
/* Lock held: it failed. */
void ep_weight_room_unreserve(ep_weight_store *store, expert_entry *entry);
/* No lock held. takes: the resident's device is chosen, and the bytes are its own. Errors:
 * DEVICE_LOST (all), RESOURCE_EXHAUSTED. */
ep_err ep_weight_room_check(loader *self, ep_resident *resident, uint64_t bytes, load_kind kind,
                            bool takes, ep_error *out_error);
/* No lock held. What is reserved stays so. */
void ep_weight_room_give_back(ep_weight_store *store, const ep_resident *resident, uint64_t bytes);
/* No lock held. Whether a load that ended so is worth another try: its device refused memory, and
 * another one has room. */
bool ep_weight_room_asks_another(loader *self, const ep_resident *resident, ep_err err);
/*
 * No lock held. The same: the system refused memory that the budget allows (a limit on addresses,
 * strict overcommit), a request waits, and a cold expert there that no job holds could go.
 */
bool ep_weight_room_frees_memory(loader *self, load_kind kind, uint32_t device, ep_err err);
/*
 * No lock held. Whether an expert stays cold for want of room. In the first pass memory that the
 * system refuses is the end of the room, as the budget's end is: with a budget experts come in the
 * place of others.
 */
bool ep_weight_room_is_lacking(loader *self, load_kind kind, ep_err err);
/* Lock held. The next expert to load ahead of time. False: none, or there is no time. */
bool ep_weight_room_prefetch(ep_weight_store *store, expert_entry **out_entry);

#endif
