/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts placed on this node, keyed (layer slot, table index), in the backend's packed form as
 * far as the budget goes. A layer slot stands for one (model, version, layer).
 *
 * Placed      wanted here. The first pass loads placed experts until weight_bytes_max is used up.
 * Owned       placed, and the first pass has dealt with it: resident, or cold (it did not fit).
 *             Requests for it are served. A load that failed for good ends ownership (not one of a
 *             device's error or without memory: the next is tried a little later); what is no
 *             longer placed stays owned until ep_weight_store_drop_unwanted.
 * Resident    in memory. A request for a cold expert waits while it is loaded, ahead of everything
 *             else, in place of the expert with the least heat (moe/expert_heat.h). Experts that
 *             are likely to be used next come ahead of time while nothing else is to do.
 *
 * Devices     experts of a layer are spread over the instances of the backend, each with its own
 *             budget. When a device is lost its experts are cold and come on the others; with the
 *             last device ownership of all ends.
 *
 * One loader thread reads and packs, until the first request comes several; nothing of it happens
 * under the store's lock, so resident experts are never blocked. A bad tensor
 * takes down that expert only. Memory: weight_bytes_max of each device, and one expert as it stands
 * in the file, and as what it is quantised into; with several threads one for each of them, of
 * EP_WEIGHT_LOADING_BYTES in the file together at most.
 *
 * Ownership  a resident expert is reference-counted: the store holds one, each job in flight
 *            another. Its weights are unloaded by whoever drops the last.
 * Threads    all calls from any thread, except create, add_layer, start, stop, destroy.
 */
#ifndef EP_EXPERTD_WEIGHT_STORE_H
#define EP_EXPERTD_WEIGHT_STORE_H

#include "backends/backend.h"
#include "base/timer.h"
#include "expertd/weight_cache.h"
#include "model/model.h"

#define EP_WEIGHT_LOADERS_MAX 32
#define EP_WEIGHT_LOADING_BYTES ((uint64_t)256 << 20)

typedef struct ep_weight_store ep_weight_store;

typedef struct ep_weight_store_config {
    /* instances of one backend, one for each device, at least one; borrowed */
    ep_backend *const *backends;
    uint32_t backends_count;   /* more than one: without cache */
    uint64_t weight_bytes_max; /* of each; 0: unlimited, or what its device has */
    /* that load at once until the first request comes; 0: one */
    uint32_t load_threads;
    /* read by loads after the first pass, of whichever files; 0: unlimited */
    uint64_t load_bytes_per_s;
    /* cold experts likely to be used next are loaded while nothing else is to do */
    bool prefetches;
    ep_weight_cache *cache; /* borrowed; NULL: every load reads and packs */
    bool warms_up;          /* each kernel shape runs once before the first pass is over */
    const char *node_name;  /* borrowed; for spans. NULL: "" */
    /* borrowed; ends waits at their deadline. NULL: they end with the load */
    ep_timer_service *timers;
    bool shows_bar; /* progress of loading on stderr, when that is a terminal; else the log tells */
    /* after each load and when the loader becomes idle; from any thread; no lock held */
    void (*on_change)(void *arg);
    void *arg;
} ep_weight_store_config;

typedef struct ep_weight_layer {
    const char *model;               /* borrowed, for messages */
    const ep_checkpoint *checkpoint; /* borrowed */
    /* of the routed experts: of gate and up; as down_format for what an expert takes in memory */
    ep_weight_format format;
    ep_weight_format down_format;      /* NONE: the same */
    ep_weight_format file_format;      /* of gate and up in the file; NONE: all as in memory */
    ep_weight_format file_down_format; /* NONE: the same */
    /* more that a routed expert may be in (1 << format): the numerics id says which */
    uint32_t formats;
    ep_layer_shape shape;
    char numerics[EP_NUMERICS_ID_BYTES]; /* for the cache, as the next */
    uint8_t identity[EP_SHA256_BYTES];   /* ep_checkpoint_identity */
} ep_weight_layer;

typedef enum ep_expert_state {
    EP_EXPERT_ABSENT, /* also cold */
    EP_EXPERT_QUEUED,
    EP_EXPERT_LOADING,
    EP_EXPERT_RESIDENT,
    EP_EXPERT_FAILED
} ep_expert_state;
/* "is not held here", "is still loading", "could not be loaded", ... for messages. */
const char *ep_expert_state_text(ep_expert_state state);

typedef struct ep_resident {
    ep_backend_weights *weights;
    ep_backend *backend; /* whose they are */
    uint32_t layer_slot;
    uint32_t expert;
    size_t bytes;
    uint8_t sha256[EP_SHA256_BYTES];
    double quant_error; /* as ep_expert_data has it; 0 of one that was packed before */
    /* private */
    ep_weight_store *store;
    uint32_t device;
    /* under the store's lock: out of the table, its bytes come back with the last reference */
    bool is_leaving;
    _Atomic uint32_t refs;
} ep_resident;

/* A request's wish for one cold expert. Zero it first; left alone until ready(). */
typedef struct ep_weight_wait ep_weight_wait;
struct ep_weight_wait {
    uint32_t expert;
    uint64_t deadline_ns;
    /* Nobody needs it any more: it is not loaded for this. NULL: never. Must not block nor call the
     * store. */
    bool (*is_dropped)(const ep_weight_wait *wait);
    /*
     * Exactly once, no lock held: from the loader's thread, the timers', or inside
     * ep_weight_store_wait or _close. resident: with a reference; NULL: error says why (NOT_OWNER:
     * it could not be loaded; UNAVAILABLE: the deadline came first, or it cannot be loaded at the
     * moment; CANCELLED; what close was given), with layer and expert set.
     */
    void (*ready)(ep_weight_wait *wait, ep_resident *resident, const ep_error *error);
    void *arg;
    /* private */
    uint32_t layer_slot;
    uint64_t since_ns;
    ep_weight_wait *next;
    ep_weight_wait **link;
    ep_resident *resident;
};

/* What weight_quant costs, of all experts loaded since the start. 0: nothing is quantised, or
 * loaded yet. */
typedef struct ep_weight_quant_stats {
    double error; /* the greatest of an expert (weight_quant.h); of those packed before a sample */
    double output_error; /* of the layer's first expert that was loaded (weight_judge.h) */
} ep_weight_quant_stats;

typedef struct ep_weight_stats {
    uint64_t resident_count;
    uint64_t resident_bytes; /* also what only jobs still hold, and the expert being loaded */
    uint64_t owned_count;
    /* grows with each change of what is owned or of what is known of its hashes after the first
     * pass */
    uint64_t owned_changes;
    /* placed, and the first pass has not dealt with them yet; one more while kernels are warmed
     * up */
    uint64_t pending_count;
    uint64_t failed_count;
    uint64_t waiting_count; /* requests' wishes for cold experts */
    uint64_t loads_total;
    uint64_t load_ns_total;
    uint64_t hits_total;   /* uses of experts by requests: it was there ... */
    uint64_t misses_total; /* ... it had to be waited for */
    uint64_t evictions_total;
    uint64_t prefetches_total;
    uint64_t prefetches_useful_total;     /* used before they went */
    uint64_t prefetches_useless_total;    /* went unused */
    ep_weight_quant_stats quant;          /* the greatest of all layers */
    char last_error[EP_ERROR_TEXT_BYTES]; /* "" none */
    ep_err last_reason;                   /* of it */
} ep_weight_stats;

ep_err ep_weight_store_create(const ep_weight_store_config *config, ep_weight_store **out_store,
                              ep_error *out_error);
/* Ends all waits, and returns when no ready() runs and none will. Requests may go on with what they
 * hold. Idempotent. */
void ep_weight_store_stop(ep_weight_store *store);
/* Stops and drops every expert. No acquired resident may be out. NULL allowed. */
void ep_weight_store_destroy(ep_weight_store *store);
/* Before start. *out_slot counts up from 0. Errors: NO_MEMORY, BAD_CONFIG (weight_bytes_max cannot
 * hold one expert of it). */
ep_err ep_weight_store_add_layer(ep_weight_store *store, const ep_weight_layer *layer,
                                 uint32_t *out_slot, ep_error *out_error);
ep_err ep_weight_store_start(ep_weight_store *store, ep_error *out_error);

/*
 * Sets which experts of a layer shall be held: wanted[E+S], 0 or 1. Missing ones are queued, failed
 * ones tried again; those no longer wanted stay until ep_weight_store_drop_unwanted.
 */
void ep_weight_store_want(ep_weight_store *store, uint32_t layer_slot, const uint8_t *wanted);
/* Experts owned though not wanted. */
uint64_t ep_weight_store_unwanted_count(ep_weight_store *store);
/* Lets them go; their memory is freed after the last job that uses them. */
void ep_weight_store_drop_unwanted(ep_weight_store *store);

/*
 * One use of a layer by a request: count distinct owned experts, ascending, rows of each (NULL:
 * one). out_residents[i]: with a reference, or NULL when it is cold: ep_weight_store_wait for
 * those. False and no reference at all: *out_missing is the first that is not owned and *out_state
 * why.
 */
bool ep_weight_store_acquire(ep_weight_store *store, uint32_t layer_slot, const uint32_t *experts,
                             const uint32_t *rows, uint32_t count, ep_resident **out_residents,
                             uint32_t *out_missing, ep_expert_state *out_state);
/* Asks for experts of a layer to be loaded. ready() may come before this returns; then waits and
 * their memory may be gone. */
void ep_weight_store_wait(ep_weight_store *store, uint32_t layer_slot, ep_weight_wait *waits,
                          uint32_t count);
/* Ends all waits, and those to come, with reason. Idempotent. */
void ep_weight_store_close(ep_weight_store *store, ep_err reason);
/* The device of backends[index] is lost: nothing is loaded there any more, and what was there is
 * gone. Idempotent. */
void ep_weight_store_lose(ep_weight_store *store, uint32_t index, const char *why);
/* Another reference to one that the caller holds a reference to. */
void ep_resident_ref(ep_resident *resident, uint32_t count);
void ep_resident_release(ep_resident *resident);

/* Table indexes of the owned experts, ascending, into out[E+S]; returns how many. out_digests:
 * NULL, or [E+S]: the first four bytes of each one's SHA-256, little endian; 0: not known, it was
 * never read. */
uint32_t ep_weight_store_owned(ep_weight_store *store, uint32_t layer_slot, uint32_t *out,
                               uint32_t *out_digests);
/* What the layer's largest expert takes in memory. */
uint64_t ep_weight_store_expert_bytes(const ep_weight_store *store, uint32_t layer_slot);
uint32_t ep_weight_store_resident_count(ep_weight_store *store, uint32_t layer_slot);
ep_weight_quant_stats ep_weight_store_quant(ep_weight_store *store, uint32_t layer_slot);
void ep_weight_store_read_stats(ep_weight_store *store, ep_weight_stats *out_stats);
/* The budgets of all devices together; 0: no limit. Pure after create. */
uint64_t ep_weight_store_capacity(const ep_weight_store *store);
/* Of resident_bytes, what is on the device of backends[index]. */
uint64_t ep_weight_store_device_bytes(ep_weight_store *store, uint32_t index);

#endif
