/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts this node holds, keyed (layer slot, table index), in the backend's packed form. A layer slot
 * stands for one (model, version, layer).
 *
 * Each expert is absent, queued, loading, resident or failed. One loader thread reads the checkpoint and
 * packs; nothing of it happens under the store's lock, so resident experts are never blocked. A bad tensor
 * or a full budget fails that expert only.
 *
 * Ownership  a resident expert is reference-counted: the store holds one, each job in flight another. Its
 *            weights are unloaded by whoever drops the last.
 * Threads    all calls from any thread, except create, add_layer, start, destroy.
 */
#ifndef EP_EXPERTD_WEIGHT_STORE_H
#define EP_EXPERTD_WEIGHT_STORE_H

#include "backends/backend.h"
#include "model/model.h"

typedef struct ep_weight_store ep_weight_store;

typedef struct ep_weight_store_config {
    ep_backend *backend;          /* borrowed */
    uint64_t weight_bytes_max;    /* 0: unlimited */
    bool shows_progress;          /* on stderr */
    void (*on_change)(void *arg); /* after each load and when the loader becomes idle; from the loader's
                                     thread; no lock held */
    void *arg;
} ep_weight_store_config;

typedef struct ep_weight_layer {
    const char *model;               /* borrowed, for messages */
    const ep_checkpoint *checkpoint; /* borrowed */
    ep_weight_format format;         /* every routed expert must have it: the numerics id says so */
    ep_layer_shape shape;
} ep_weight_layer;

typedef enum ep_expert_state {
    EP_EXPERT_ABSENT,
    EP_EXPERT_QUEUED,
    EP_EXPERT_LOADING,
    EP_EXPERT_RESIDENT,
    EP_EXPERT_FAILED
} ep_expert_state;
/* "is not held here", "is still loading", "could not be loaded", ... for messages. */
const char *ep_expert_state_text(ep_expert_state state);

typedef struct ep_resident {
    ep_backend_weights *weights;
    uint32_t layer_slot;
    uint32_t expert;
    size_t bytes;
    uint8_t sha256[EP_SHA256_BYTES];
    /* private */
    ep_weight_store *store;
    _Atomic uint32_t refs;
} ep_resident;

typedef struct ep_weight_stats {
    uint64_t resident_count;
    uint64_t resident_bytes;
    uint64_t pending_count; /* queued or loading */
    uint64_t failed_count;
    uint64_t loads_total;
    char last_error[EP_ERROR_TEXT_BYTES]; /* "" none */
} ep_weight_stats;

ep_err ep_weight_store_create(const ep_weight_store_config *config, ep_weight_store **out_store,
                              ep_error *out_error);
/* Stops the loader and drops every expert. No acquired resident may be out. NULL allowed. */
void ep_weight_store_destroy(ep_weight_store *store);
/* Before start. *out_slot counts up from 0. */
ep_err ep_weight_store_add_layer(ep_weight_store *store, const ep_weight_layer *layer, uint32_t *out_slot,
                                 ep_error *out_error);
ep_err ep_weight_store_start(ep_weight_store *store, ep_error *out_error);

/*
 * Sets which experts of a layer shall be held: wanted[E+S], 0 or 1. Missing ones are queued, failed ones
 * tried again; those no longer wanted stay until ep_weight_store_drop_unwanted.
 */
void ep_weight_store_want(ep_weight_store *store, uint32_t layer_slot, const uint8_t *wanted);
/* Experts resident though not wanted. */
uint64_t ep_weight_store_unwanted_count(ep_weight_store *store);
/* Lets them go; their memory is freed after the last job that uses them. */
void ep_weight_store_drop_unwanted(ep_weight_store *store);

/*
 * References for count experts of a layer, or none at all: then *out_missing is the first that is not
 * resident and *out_state why.
 */
bool ep_weight_store_acquire(ep_weight_store *store, uint32_t layer_slot, const uint32_t *experts,
                             uint32_t count, ep_resident **out_residents, uint32_t *out_missing,
                             ep_expert_state *out_state);
void ep_resident_release(ep_resident *resident);

/* Table indexes of the resident experts, ascending, into out[E+S]; returns how many. out_digests: NULL, or [E+S]: the first four
 * bytes of each one's SHA-256, little endian. */
uint32_t ep_weight_store_owned(ep_weight_store *store, uint32_t layer_slot, uint32_t *out, uint32_t *out_digests);
uint32_t ep_weight_store_owned_count(ep_weight_store *store, uint32_t layer_slot);
void ep_weight_store_read_stats(ep_weight_store *store, ep_weight_stats *out_stats);

#endif
