/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The models a node serves: opened checkpoints, their versions, numerics ids and layers; look-up by
 * (model, version, layer); and their description for Hello, Describe and the coordinator.
 * Threads    immutable after open, except for counters, which are atomic. Descriptions may be made
 *            on any thread.
 */
#ifndef EP_EXPERTD_NODE_MODELS_H
#define EP_EXPERTD_NODE_MODELS_H

#include <stdatomic.h>

#include "common.pb-c.h"
#include "expertd/batcher.h"
#include "expertd/node_config.h"
#include "expertd/weight_fetch.h"
#include "expertd/weight_store.h"
#include "model/model.h"

typedef struct ep_node_layer {
    ep_layer_shape shape;
    uint32_t experts_total; /* E + S */
    uint32_t store_slot;
    ep_work_queue *queues; /* [E+S] */
    _Atomic uint64_t rows_served;
    _Atomic uint64_t *slots; /* [E] slots computed for each routed expert since the start */
} ep_node_layer;

typedef struct ep_node_model {
    const ep_node_model_config *config;
    ep_mirror *mirror; /* of the checkpoint; NULL: all its files are local */
    ep_checkpoint *checkpoint;
    const ep_model_info *info;
    char numerics[EP_NUMERICS_ID_BYTES];
    uint32_t layers_count;
    ep_node_layer *layers; /* ascending layer number */
} ep_node_model;

typedef struct ep_node_models {
    uint32_t count;
    ep_node_model *models;
    ep_weight_store *store; /* borrowed */
} ep_node_models;

/* Opens every checkpoint and adds its layers to the store, which must not be started yet and uses
 * these instances of a backend. fetch: for mirrored models; NULL: none. After an error call _close
 * too. */
ep_err ep_node_models_open(ep_node_models *models, const ep_node_config *config,
                           ep_backend *const *backends, uint32_t backends_count,
                           ep_weight_store *store, ep_weight_fetch *fetch, ep_error *out_error);
void ep_node_models_close(ep_node_models *models);

/* version "": the only version of that name. Errors: NOT_FOUND; the text lists what there is. */
ep_err ep_node_models_find(const ep_node_models *models, const char *name, const char *version,
                           uint32_t layer, ep_node_model **out_model, ep_node_layer **out_layer,
                           ep_error *out_error);
/* The same by the version of the files; finds a model in any memory format. */
ep_err ep_node_models_find_files(const ep_node_models *models, const char *name,
                                 const char *version, ep_node_model **out_model,
                                 ep_error *out_error);
/* wanted[E+S] of one layer by configuration alone, without assignments. */
void ep_node_model_configured(const ep_node_model *model, const ep_node_layer *layer,
                              uint8_t *out_wanted);
/* Size in the files of all experts that the configuration may want. */
uint64_t ep_node_models_file_bytes(const ep_node_models *models);

/* Fills *out_infos with count new messages, owned lists included. for_placement: with digests and
 * sizes, which only the coordinator uses; headers of Hello and Describe are small. Errors:
 * NO_MEMORY. Free with _infos_free. */
ep_err ep_node_models_describe(const ep_node_models *models, bool for_placement,
                               Expertd__V1__ModelInfo ***out_infos, size_t *out_count);
void ep_node_models_infos_free(Expertd__V1__ModelInfo **infos, size_t count);

#endif
