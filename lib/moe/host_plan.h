/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_alg = HIERARCHY: one frame per host. Nodes of one host form groups; a plan is built as if a
 * group were one node, and each of its chunks is then sorted by owner and given to one of the
 * owners, who passes the others' slots on.
 * Threads    pure.
 */
#ifndef EP_MOE_HOST_PLAN_H
#define EP_MOE_HOST_PLAN_H

#include "moe/routing_plan.h"

/*
 * out_groups [nodes_count]: node index that stands for the node's group. Nodes of one host, in the
 * table's order, form groups of at most members_max; a node whose host is not known is alone.
 * Errors: NO_MEMORY.
 */
ep_err ep_host_groups(const ep_routing_table *table, uint32_t members_max, uint32_t *out_groups);

/* A chunk's slots [begin, begin + count) that one node owns. */
typedef struct ep_host_part {
    uint32_t node;
    uint32_t begin; /* from the chunk's first slot */
    uint32_t count;
} ep_host_part;

/*
 * Sorts the slots of plan->chunks[chunk_index] by owner (chosen [experts]: node of each expert),
 * stably, the receiver's first and the others' by ascending node, and makes the receiver the
 * chunk's node. The receiver is one of the owners, another with each `spread`. scratch [slots of
 * the chunk]. Returns the number of parts; at most parts_max owners are expected.
 */
uint32_t ep_host_plan_split(ep_routing_plan *plan, uint32_t chunk_index, const uint32_t *chosen,
                            uint64_t spread, ep_plan_slot *scratch, ep_host_part *parts,
                            uint32_t parts_max);

#endif
