/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which layers are MoE layers, by all keys that models have for this. If a key lists layers, only
 * that key counts; otherwise, a layer is an MoE layer if all rules present agree. Then the files
 * are checked (checkpoint.c): they decide where there is no key, and a key that they contradict is
 * an error.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_LAYER_MAP_H
#define EP_MODEL_LAYER_MAP_H

#include "model/config_reader.h"
#include "model/model.h"

typedef struct ep_layer_map {
    bool moe[EP_MODEL_LAYERS_MAX];
    bool hash[EP_MODEL_LAYERS_MAX]; /* the router takes experts from a table by token id */
    char keys[96]; /* the keys that decided, for messages; "" none: any layer may be an MoE layer */
} ep_layer_map;

/* The number of layers in the keys that list kinds of layers; 0 without such a key. */
uint32_t ep_layer_map_count(const ep_config_reader *reader);
/* Errors are kept in the reader: BAD_FILE (key, value, allowed range; two lists that disagree). */
void ep_layer_map_read(ep_config_reader *reader, uint32_t layers, ep_layer_map *out_map);

#endif
