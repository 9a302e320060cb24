/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load per (model, version, layer): slots and passes per routed expert, summed over nodes and their
 * incarnations, and gate probabilities from calls with logits.
 *
 * A node reports cumulative counts since its incarnation began. The increase over its last report
 * is added, so sums never decrease: not when a node restarts at 0, leaves, or sends an old report
 * late. Sums start at 0 with the coordinator. Older nodes report no passes. While one of them
 * reports a layer, no node's passes of that layer are added; otherwise experts would seem hotter on
 * the other nodes.
 *
 * Threads    all calls from any thread.
 */
#ifndef EP_COORDINATOR_LOAD_SUMS_H
#define EP_COORDINATOR_LOAD_SUMS_H

#include "coordinator.pb-c.h"
#include "moe/routing_table.h"

typedef struct ep_load_sums ep_load_sums;

#define EP_LOAD_SLOTS_MAX (1ull << 48) /* the most for one expert in one report, also of passes */

/* nodes_max: how many nodes' reports are kept; the one that reported longest ago is forgotten for a
 * new one. Errors: NO_MEMORY. */
ep_err ep_load_sums_create(uint32_t nodes_max, ep_load_sums **out_sums);
void ep_load_sums_destroy(ep_load_sums *sums);

/* Routed experts of a layer; 0: not known. */
typedef uint32_t (*ep_load_experts_func)(void *arg, const char *model, const char *version,
                                         uint32_t layer);

/*
 * Adds a heartbeat's loads; unknown layers are left out. Errors: INVALID_ARGUMENT naming layer,
 * field, value, allowed range; NO_MEMORY. After an error that layer and later ones are not added;
 * the next report has them again.
 */
ep_err ep_load_sums_take(ep_load_sums *sums, ep_load_experts_func experts_of, void *arg,
                         const Expertd__V1__HeartbeatRequest *request, ep_error *out_error);
/* Adds gate probabilities, summed per expert over `tokens` tokens. */
void ep_load_sums_add_probabilities(ep_load_sums *sums, const char *model, const char *version,
                                    uint32_t layer, uint32_t experts,
                                    const double *probability_sums, uint64_t tokens);

typedef struct ep_load_layer {
    char model[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
    uint32_t layer;
    uint32_t experts;         /* E */
    uint64_t *counts;         /* [E] slots */
    uint64_t *passes;         /* [E] jobs, each reading the expert's weights once */
    uint64_t slots_only;      /* number of the last report without passes; 0: none */
    double *probability_sums; /* [E] */
    uint64_t tokens;          /* tokens in probability_sums */
} ep_load_layer;

/* A copy of everything, by model, version, layer; freed with ep_load_layers_free. Errors:
 * NO_MEMORY. */
ep_err ep_load_sums_read(ep_load_sums *sums, ep_load_layer **out_layers, size_t *out_count);
void ep_load_layers_free(ep_load_layer *layers, size_t count);

#endif
