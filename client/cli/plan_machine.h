/* SPDX-License-Identifier: Apache-2.0 */
/* The figures of a machine that plans need: worked out of a layer's measured times, and read from a
 * file again. */
#ifndef EP_CLI_PLAN_MACHINE_H
#define EP_CLI_PLAN_MACHINE_H

#include "moe/routing_table.h"
#include "output.h"
#include "plan_cost.h"

/* A batch of so many tokens with evenly drawn experts: a whole call, and what its node computed. */
typedef struct ep_plan_measured {
    double tokens;
    double total_s;
    double compute_s;
} ep_plan_measured;

/*
 * few: a batch so small that nearly every expert gets one row, so that its time is reading weights;
 * many: one of 32 rows an expert and more, whose time is computing. What a call takes beyond that
 * is the round trip, and bytes over the link: the second grows with the tokens. nodes_per_host and
 * nodes_at_once are left alone.
 * Errors: INVALID_ARGUMENT, and why: the layer is not on one node alone, or has shared experts (a
 * table does not tell their size), or copies of mixed numerics or weight formats; tokens as above
 * missing; times that contradict each other.
 */
ep_err ep_plan_machine_fit(const ep_routing_table *table, const ep_routing_layer *layer,
                           const ep_plan_measured *few, const ep_plan_measured *many,
                           ep_plan_machine *out_machine, ep_error *out_error);

/* The four figures. */
json_t *ep_plan_machine_json(const ep_plan_machine *machine);
/* The object "machine" of a file that expertctl tune -o json wrote: the four figures. Errors:
 * NOT_FOUND, IO, BAD_FILE (place, value, what is allowed), NO_MEMORY. */
ep_err ep_plan_machine_read(const char *path, ep_plan_machine *out_machine, ep_error *out_error);

#endif
