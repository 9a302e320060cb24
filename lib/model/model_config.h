/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.json of a model: the shape of every MoE layer, the router, and the few numbers of the
 * dense part. The number of layers comes from here, never from the largest layer number among the
 * tensors: checkpoints carry extra layers (multi-token prediction) after the last one.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_MODEL_CONFIG_H
#define EP_MODEL_MODEL_CONFIG_H

#include "model/layer_map.h"
#include "model/model.h"
#include "model/model_types.h"
#include "model/quant_config.h"

#define EP_MODEL_CONFIG_NAME "config.json"
#define EP_MODEL_CONFIG_BYTES_MAX ((size_t)16 << 20)
#define EP_INNER_MAX 1048576

typedef struct ep_model_config {
    /* all but names, format, version and config_hash; the config owns its arrays */
    ep_model_info info;
    const ep_model_type *type; /* NULL: the type has no row */
    /* MoE layers by the keys of config.json; info.moe_layers lists them */
    ep_layer_map layer_map;
    ep_quant_config quant;
    bool is_quantised;         /* the file has a quantization config */
    bool shared_gate_required; /* the model type's shared expert always has its own gate */
    bool shared_halved;        /* the result is the mean of shared and routed experts */
} ep_model_config;

/* Errors: BAD_FILE (key, value, allowed range), UNIMPLEMENTED (activation, quantised weights),
 * NO_MEMORY. */
ep_err ep_model_config_parse(const char *file, const char *bytes, size_t count,
                             ep_model_config *out_config, ep_error *out_error);
void ep_model_config_fini(ep_model_config *config);

#endif
