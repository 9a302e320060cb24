/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which layers are MoE layers, by every key that models have for it. A key that lists layers counts
 * alone; without one, all rules that are there must agree that a layer is one. The files have the
 * last word (checkpoint.c): they decide where no key speaks, and a key that they contradict is an
 * error.
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
    char keys[96]; /* which decided, for messages; "" none: all layers may be MoE layers */
} ep_layer_map;

/* How many layers the keys that list kinds of layers know; 0 without such a key. */
uint32_t ep_layer_map_count(const ep_config_reader *reader);
/* Errors are kept in the reader: BAD_FILE (key, value, allowed range; two lists that disagree). */
void ep_layer_map_read(ep_config_reader *reader, uint32_t layers, ep_layer_map *out_map);

#endif
