/* SPDX-License-Identifier: Apache-2.0 */
/* Load of each MoE layer's routed experts, drawn or counted by a service. */
#ifndef EP_CLI_PLAN_LOAD_H
#define EP_CLI_PLAN_LOAD_H

#include "moe/flow.h"

/* [layers][experts]: shares of a layer's slots, none above 1 / top_k (plan_cost.h). */
typedef struct ep_plan_load {
    uint32_t layers_count;
    double **shares;
} ep_plan_load;

/* Draws loads. Layers have top_k <= experts. The expert of rank r has r ^ -exponent before the cap;
 * ranks are drawn for each layer. Errors: NO_MEMORY. */
ep_err ep_plan_load_draw(double exponent, uint64_t seed, const ep_layer_shape *layers,
                         uint32_t layers_count, ep_plan_load *out_load, ep_error *out_error);
/* Reads the output of expertctl stats --experts -o json for one model with exactly these layers.
 * Errors: NOT_FOUND, IO, BAD_FILE (place, value, what is allowed), NO_MEMORY. */
ep_err ep_plan_load_read(const char *path, const ep_layer_shape *layers, uint32_t layers_count,
                         ep_plan_load *out_load, ep_error *out_error);
/* Zeroed allowed. */
void ep_plan_load_fini(ep_plan_load *load);

#endif
