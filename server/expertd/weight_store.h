/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts placed on this node, with as many as fit the budget in memory, in the backend's
 * packed form. An expert's key is (layer slot, table index); a slot is one (model, version, layer).
 *
 * Placed      wanted here. The first pass loads these experts until weight_bytes_max is used up.
 * Owned       placed, and the first pass is done with it: it is resident, or cold because it did
 *             not fit. Requests for it are served. A load that failed for good ends ownership.
 *             After a device's error or without memory the load is tried again a little later. An
 *             expert that is no longer placed stays owned until ep_weight_store_drop_unwanted.
 * Resident    in memory. A request for a cold expert waits while it is loaded. Such loads go first,
 *             and the expert takes the place of the one with the least heat (moe/expert_heat.h). An
 *             idle loader loads experts that are likely to be used next.
 *
 * Devices     a layer's experts are spread over the instances of the backend, each with its own
 *             budget. When a device is lost, its experts become cold and are loaded on the others;
 *             with the last device all ownership ends.
 *
 * One loader thread reads and packs; several do until the first request comes. The store's lock is
 * not held meanwhile, so resident experts are never blocked. A bad tensor costs only its expert.
 * Memory: weight_bytes_max of each device, plus per thread one expert as it is in the file and as
 * quantised; the experts being loaded by several threads have at most EP_WEIGHT_LOADING_BYTES in
 * the file together.
 *
 * Ownership  a resident expert is reference-counted: the store holds one reference, each job in
 *            flight another. Whoever drops the last one unloads the weights.
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
    uint64_t weight_bytes_max; /* for each device; 0: unlimited, or what the device has */
    /* threads that load until the first request comes; 0: one */
    uint32_t load_threads;
    /* limit for loads after the first pass, whatever files they read; 0: unlimited */
    uint64_t load_bytes_per_s;
    /* cold experts likely to be used next are loaded while nothing else is to do */
    bool prefetches;
    ep_weight_cache *cache; /* borrowed; NULL: every load reads and packs */
    bool warms_up;          /* each kernel shape runs once before the first pass is over */
    const char *node_name;  /* borrowed; for spans. NULL: "" */
    /* borrowed; ends waits at their deadline. NULL: they end with the load */
    ep_timer_service *timers;
    /* show a progress bar on stderr if that is a terminal; otherwise progress is logged */
    bool shows_bar;
    /* called after each load and when the loader becomes idle; on any thread, no lock held */
    void (*on_change)(void *arg);
    void *arg;
} ep_weight_store_config;

typedef struct ep_weight_layer {
    const char *model;               /* borrowed, for messages */
    const ep_checkpoint *checkpoint; /* borrowed */
    /* of the routed experts' gate and up, in memory; down_format: of down */
    ep_weight_format format;
    ep_weight_format down_format;      /* NONE: the same */
    ep_weight_format file_format;      /* of gate and up in the file; NONE: both as in memory */
    ep_weight_format file_down_format; /* NONE: the same */
    /* further formats that routed experts may have, as bits 1 << format; see the numerics id */
    uint32_t formats;
    ep_layer_shape shape;
    char numerics[EP_NUMERICS_ID_BYTES]; /* for the cache, as the next */
    uint8_t identity[EP_SHA256_BYTES];   /* ep_checkpoint_identity */
} ep_weight_layer;

typedef enum ep_expert_state {
    EP_EXPERT_ABSENT, /* or cold */
    EP_EXPERT_QUEUED,
    EP_EXPERT_LOADING,
    EP_EXPERT_RESIDENT,
    EP_EXPERT_FAILED
} ep_expert_state;
/* For messages: "is not held here", "is still loading", "could not be loaded", ... */
const char *ep_expert_state_text(ep_expert_state state);

typedef struct ep_resident {
    ep_backend_weights *weights;
    ep_backend *backend; /* whose they are */
    uint32_t layer_slot;
    uint32_t expert;
    size_t bytes;
    uint8_t sha256[EP_SHA256_BYTES];
    double quant_error; /* as in ep_expert_data; 0 if read from a packed file */
    /* private */
    ep_weight_store *store;
    uint32_t device;
    /* under the store's lock: it is out of the table, and the last reference frees its bytes */
    bool is_leaving;
    _Atomic uint32_t refs;
} ep_resident;

/* A request that waits for one cold expert. Zero it first; do not touch it until ready(). */
typedef struct ep_weight_wait ep_weight_wait;
struct ep_weight_wait {
    uint32_t expert;
    uint64_t deadline_ns;
    /* Whether nobody needs the expert any more; then it is not loaded for this request. Must not
     * block or call the store. NULL: never. */
    bool (*is_dropped)(const ep_weight_wait *wait);
    /*
     * Called exactly once, no lock held: from the loader's or the timers' thread, or inside
     * ep_weight_store_wait or _close. resident comes with a reference; if it is NULL, error has
     * layer, expert and the reason: NOT_OWNER (it could not be loaded), UNAVAILABLE (the deadline
     * came first, or it cannot be loaded at the moment), CANCELLED, or the code given to close.
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

/* The error that weight_quant makes, over all experts loaded since the start. 0: nothing is
 * quantised, or nothing is loaded yet. */
typedef struct ep_weight_quant_stats {
    /* the greatest of all experts (weight_quant.h); of those from packed files only a sample */
    double error;
    double output_error; /* of the layer's first expert that was loaded (weight_judge.h) */
} ep_weight_quant_stats;

typedef struct ep_weight_stats {
    uint64_t resident_count;
    /* including experts that only jobs still hold, and those being loaded */
    uint64_t resident_bytes;
    uint64_t owned_count;
    /* grows with each change of ownership, and with each digest learnt after the first pass */
    uint64_t owned_changes;
    /* placed experts that the first pass has not dealt with yet; plus one until kernels are warm */
    uint64_t pending_count;
    uint64_t failed_count;
    /* several loads in a row ended with last_error, which may pass, and none succeeded since */
    bool is_refused;
    uint64_t waiting_count; /* waits of requests for cold experts */
    uint64_t loads_total;
    uint64_t load_ns_total;
    uint64_t hits_total;   /* uses by requests of experts that were resident */
    uint64_t misses_total; /* uses that had to wait for a load */
    uint64_t evictions_total;
    uint64_t prefetches_total;
    uint64_t prefetches_useful_total;     /* used before they were evicted */
    uint64_t prefetches_useless_total;    /* evicted unused */
    ep_weight_quant_stats quant;          /* the greatest of all layers */
    char last_error[EP_ERROR_TEXT_BYTES]; /* "": none */
    ep_err last_reason;                   /* of last_error */
} ep_weight_stats;

ep_err ep_weight_store_create(const ep_weight_store_config *config, ep_weight_store **out_store,
                              ep_error *out_error);
/* Ends all waits, and returns when no ready() runs any more. Requests keep experts they hold.
 * Idempotent. */
void ep_weight_store_stop(ep_weight_store *store);
/* Stops and drops every expert. No reference may be out. NULL allowed. */
void ep_weight_store_destroy(ep_weight_store *store);
/* Before start. *out_slot counts up from 0. Errors: NO_MEMORY, BAD_CONFIG (weight_bytes_max cannot
 * hold one expert of it). */
ep_err ep_weight_store_add_layer(ep_weight_store *store, const ep_weight_layer *layer,
                                 uint32_t *out_slot, ep_error *out_error);
ep_err ep_weight_store_start(ep_weight_store *store, ep_error *out_error);

/*
 * Sets which experts of a layer are wanted: wanted[E+S], 0 or 1. Missing ones are queued for
 * loading, failed ones are tried again; those no longer wanted stay until
 * ep_weight_store_drop_unwanted.
 */
void ep_weight_store_want(ep_weight_store *store, uint32_t layer_slot, const uint8_t *wanted);
/* Number of experts that are owned but not wanted. */
uint64_t ep_weight_store_unwanted_count(ep_weight_store *store);
/* Drops these; their memory is freed after the last job that uses them. */
void ep_weight_store_drop_unwanted(ep_weight_store *store);

/*
 * Counts one use of a layer by a request and takes references to its experts: count distinct ones,
 * ascending, with rows each (NULL: one row each). out_residents[i] is NULL for a cold expert; call
 * ep_weight_store_wait for those. False: no reference is taken; *out_missing is the first expert
 * that is not owned, *out_state why.
 */
bool ep_weight_store_acquire(ep_weight_store *store, uint32_t layer_slot, const uint32_t *experts,
                             const uint32_t *rows, uint32_t count, ep_resident **out_residents,
                             uint32_t *out_missing, ep_expert_state *out_state);
/* Asks for cold experts of a layer. ready() may run, and free waits, before this returns. */
void ep_weight_store_wait(ep_weight_store *store, uint32_t layer_slot, ep_weight_wait *waits,
                          uint32_t count);
/* Ends all waits, present and future ones, with reason. Idempotent. */
void ep_weight_store_close(ep_weight_store *store, ep_err reason);
/* The device of backends[index] is lost: its experts are dropped. Idempotent. */
void ep_weight_store_lose(ep_weight_store *store, uint32_t index, const char *why);
/* Takes count further references; the caller must hold one. */
void ep_resident_ref(ep_resident *resident, uint32_t count);
void ep_resident_release(ep_resident *resident);

/* Table indexes of the owned experts, ascending, into out[E+S]; returns how many. out_digests:
 * NULL, or [E+S]: the first four bytes of each expert's SHA-256, little endian; 0: not known. */
uint32_t ep_weight_store_owned(ep_weight_store *store, uint32_t layer_slot, uint32_t *out,
                               uint32_t *out_digests);
/* Memory that the layer's largest expert takes. */
uint64_t ep_weight_store_expert_bytes(const ep_weight_store *store, uint32_t layer_slot);
uint32_t ep_weight_store_resident_count(ep_weight_store *store, uint32_t layer_slot);
ep_weight_quant_stats ep_weight_store_quant(ep_weight_store *store, uint32_t layer_slot);
void ep_weight_store_read_stats(ep_weight_store *store, ep_weight_stats *out_stats);
/* The budgets of all devices together; 0: no limit. Pure after create. */
uint64_t ep_weight_store_capacity(const ep_weight_store *store);
/* The part of resident_bytes on the device of backends[index]. */
uint64_t ep_weight_store_device_bytes(ep_weight_store *store, uint32_t index);

#endif
