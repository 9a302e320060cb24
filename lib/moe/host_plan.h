/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_alg = HIERARCHY: one frame per host. Nodes of one host form groups. A plan is built as if a
 * group were one node. Then each chunk is sorted by owner and sent to one of the owners, which
 * passes on the slots of the others.
 *
 * Threads    pure.
 */
#ifndef EP_MOE_HOST_PLAN_H
#define EP_MOE_HOST_PLAN_H

#include "moe/routing_plan.h"

/*
 * out_groups [nodes_count]: the index of the node that stands for a node's group. Nodes of one
 * host, in the table's order, form groups of at most members_max; a node of unknown host is alone.
 * Errors: NO_MEMORY.
 */
ep_err ep_host_groups(const ep_routing_table *table, uint32_t members_max, uint32_t *out_groups);

/* The slots [begin, begin + count) of a chunk, which belong to one node. */
typedef struct ep_host_part {
    uint32_t node;
    uint32_t begin; /* from the chunk's first slot */
    uint32_t count;
} ep_host_part;

/*
 * Sorts the slots of plan->chunks[chunk_index] by owner (chosen [experts]: the node of each
 * expert), stably, the receiver's first, then the others' by ascending node. The receiver becomes
 * the chunk's node. It is one of the owners, chosen by `spread`. scratch [slots of the chunk].
 * Returns the number of parts, which must be at most parts_max.
 */
uint32_t ep_host_plan_split(ep_routing_plan *plan, uint32_t chunk_index, const uint32_t *chosen,
                            uint64_t spread, ep_plan_slot *scratch, ep_host_part *parts,
                            uint32_t parts_max);

#endif
