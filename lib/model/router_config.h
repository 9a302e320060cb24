/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The router's part of config.json: its keys and the rule of the model's type become one
 * description. Where a key contradicts the rule, the router is not computed; where one says
 * something that nothing here reads, the whole file is refused.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_ROUTER_CONFIG_H
#define EP_MODEL_ROUTER_CONFIG_H

#include "model/config_reader.h"
#include "model/model_config.h"

/* The MoE layers are known. Errors, kept in the reader: BAD_FILE (key, value, allowed range). */
void ep_router_config_read(ep_config_reader *reader, ep_model_config *config);
/* Errors, kept in the reader: UNIMPLEMENTED (a key about experts or router, with its value, that
 * this build does not use). */
void ep_config_refuse_unused(ep_config_reader *reader, json_t *root);

#endif
