/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load per (model, version, layer): slots and passes per routed expert, summed over nodes and their
 * incarnations, and gate probabilities where logits were seen.
 *
 * A node reports cumulative counts since its incarnation began. What is more than in its report
 * before is added, so that sums never go back: not when a node restarts at 0, not when it leaves,
 * not when an old report comes late. Sums begin anew with the coordinator. Older nodes tell no
 * passes: while one reports a layer, nobody's passes of it are added, else experts would seem
 * hotter on the others.
 *
 * Threads    all calls from any thread.
 */
#ifndef EP_COORDINATOR_LOAD_SUMS_H
#define EP_COORDINATOR_LOAD_SUMS_H

#include "coordinator.pb-c.h"
#include "moe/routing_table.h"

typedef struct ep_load_sums ep_load_sums;

#define EP_LOAD_SLOTS_MAX (1ull << 48) /* of one expert in one report, passes too */

/* nodes_max: nodes whose reports are remembered; beyond it the one that reported longest ago is
 * forgotten. Errors: NO_MEMORY. */
ep_err ep_load_sums_create(uint32_t nodes_max, ep_load_sums **out_sums);
void ep_load_sums_destroy(ep_load_sums *sums);

/* Routed experts of a layer; 0: not known. */
typedef uint32_t (*ep_load_experts_func)(void *arg, const char *model, const char *version,
                                         uint32_t layer);

/*
 * A heartbeat's loads. Layers that nobody knows are left out. Errors: INVALID_ARGUMENT naming
 * layer, field, value, allowed range (nothing of that layer or later ones is added); NO_MEMORY
 * (they come again too).
 */
ep_err ep_load_sums_take(ep_load_sums *sums, ep_load_experts_func experts_of, void *arg,
                         const Expertd__V1__HeartbeatRequest *request, ep_error *out_error);
/* Probabilities of `tokens` tokens of a layer with so many experts, added up per expert. */
void ep_load_sums_add_probabilities(ep_load_sums *sums, const char *model, const char *version,
                                    uint32_t layer, uint32_t experts,
                                    const double *probability_sums, uint64_t tokens);

typedef struct ep_load_layer {
    char model[EP_MODEL_NAME_BYTES];
    char version[EP_VERSION_BYTES];
    uint32_t layer;
    uint32_t experts;         /* E */
    uint64_t *counts;         /* [E] slots */
    uint64_t *passes;         /* [E] jobs, each of which read the expert's weights */
    uint64_t slots_only;      /* report that had no passes last, of all reports; 0: none */
    double *probability_sums; /* [E] */
    uint64_t tokens;          /* whose logits were seen */
} ep_load_layer;

/* A copy of everything, by model, version, layer; freed with ep_load_layers_free. Errors:
 * NO_MEMORY. */
ep_err ep_load_sums_read(ep_load_sums *sums, ep_load_layer **out_layers, size_t *out_count);
void ep_load_layers_free(ep_load_layer *layers, size_t count);

#endif
