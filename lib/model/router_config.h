/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The router's part of config.json: combines its keys with the rule of the model's type. Where a
 * key contradicts the rule, the router is not computed. A key about experts or router that nothing
 * here reads refuses the whole file.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_ROUTER_CONFIG_H
#define EP_MODEL_ROUTER_CONFIG_H

#include "model/config_reader.h"
#include "model/model_config.h"

/* The MoE layers must be known. Errors, kept in the reader: BAD_FILE (key, value, allowed
 * range). */
void ep_router_config_read(ep_config_reader *reader, ep_model_config *config);
/* Refuses unknown keys about experts or router. Errors, kept in the reader: UNIMPLEMENTED (the key
 * and its value). */
void ep_config_refuse_unused(ep_config_reader *reader, json_t *root);

#endif
