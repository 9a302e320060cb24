/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What of a coordinator's state outlives its process, as plain data between the state and a store.
 *
 * Ownership  names lie inside; both tables are referenced and given back by _fini.
 * Threads    plain data; the tables are immutable.
 */
#ifndef EP_COORDINATOR_STATE_KEPT_H
#define EP_COORDINATOR_STATE_KEPT_H

#include "coordinator/state.h"

#define EP_COORDINATOR_KEPT_STATE_BYTES 16

typedef struct ep_coordinator_kept_node {
    uint32_t node_id;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    /* for who reads the store; a restored node is suspect */
    char state[EP_COORDINATOR_KEPT_STATE_BYTES];
    uint64_t incarnation;
} ep_coordinator_kept_node;

typedef struct ep_coordinator_kept {
    uint64_t number; /* last one given to a table or an assignment */
    uint32_t next_node_id;
    size_t nodes_count;
    ep_coordinator_kept_node *nodes;
    size_t drained_count;
    char (*drained)[EP_NODE_NAME_BYTES];
    /* who shall own what, as a table; NULL before the first placement */
    ep_routing_table *assigned;
    ep_routing_table *published; /* NULL before the first table */
    ep_policy policy;
} ep_coordinator_kept;

/* Also for a zeroed or half-filled one. */
void ep_coordinator_kept_fini(ep_coordinator_kept *kept);

/* Errors: NO_MEMORY. */
ep_err ep_coordinator_state_save(const ep_coordinator_state *cluster,
                                 ep_coordinator_kept *out_kept);

/*
 * Fills a state that was just created. Nodes are suspect, but stand in the table with what they
 * held, until they register again or restore_ms has passed; the table is there at once, under the
 * state's term and a newer number. Errors: NO_MEMORY; the state is then good for destroy only.
 */
ep_err ep_coordinator_state_restore(ep_coordinator_state *cluster, uint64_t now_ns,
                                    const ep_coordinator_kept *kept);

#endif
