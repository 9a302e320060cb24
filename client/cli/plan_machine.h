/* SPDX-License-Identifier: Apache-2.0 */
/* The figures of a machine for plans: computed from measured times of a layer, or read from a
 * file. */
#ifndef EP_CLI_PLAN_MACHINE_H
#define EP_CLI_PLAN_MACHINE_H

#include "moe/routing_table.h"
#include "output.h"
#include "plan_cost.h"

/* Times of a batch of so many tokens with evenly drawn experts: the whole call, and computing on
 * its node. */
typedef struct ep_plan_measured {
    double tokens;
    double total_s;
    double compute_s;
} ep_plan_measured;

/*
 * few: a batch so small that nearly every expert gets one row, so that it measures reading weights.
 * many: one with at least 32 rows per expert, which measures computing. The rest of a call's time
 * is the round trip and, growing with the tokens, bytes over the link. nodes_per_host and
 * nodes_at_once are not set. Errors: INVALID_ARGUMENT with the reason: the layer is not on one node
 * alone, or has shared experts (a table does not have their size), or copies of mixed numerics or
 * weight formats; the sizes are not as above; the times contradict each other.
 */
ep_err ep_plan_machine_fit(const ep_routing_table *table, const ep_routing_layer *layer,
                           const ep_plan_measured *few, const ep_plan_measured *many,
                           ep_plan_machine *out_machine, ep_error *out_error);

/* The four figures as JSON. */
json_t *ep_plan_machine_json(const ep_plan_machine *machine);
/* Reads the four figures from "machine" in a file that expertctl tune -o json wrote. Errors:
 * NOT_FOUND, IO, BAD_FILE (place, value, what is allowed), NO_MEMORY. */
ep_err ep_plan_machine_read(const char *path, ep_plan_machine *out_machine, ep_error *out_error);

#endif
