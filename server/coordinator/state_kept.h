/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of a coordinator's state that outlives its process, as plain data for a store.
 *
 * Ownership  names are inside; it holds references to both tables, which _fini drops.
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
    /* for readers of the store; a restored node is suspect */
    char state[EP_COORDINATOR_KEPT_STATE_BYTES];
    uint64_t incarnation;
} ep_coordinator_kept_node;

typedef struct ep_coordinator_kept {
    uint64_t number; /* last number given to a table or assignment */
    uint32_t next_node_id;
    size_t nodes_count;
    ep_coordinator_kept_node *nodes;
    size_t drained_count;
    char (*drained)[EP_NODE_NAME_BYTES];
    /* the assignment, as a table; NULL before the first placement */
    ep_routing_table *assigned;
    ep_routing_table *published; /* NULL before the first table */
    ep_policy policy;
} ep_coordinator_kept;

/* Zeroed and half-filled ones allowed. */
void ep_coordinator_kept_fini(ep_coordinator_kept *kept);

/* Errors: NO_MEMORY. */
ep_err ep_coordinator_state_save(const ep_coordinator_state *cluster,
                                 ep_coordinator_kept *out_kept);

/*
 * Fills a new state. Its table exists at once, with the state's term and a newer number. Nodes are
 * suspect, but stay in the table with the copies they held until they register again or restore_ms
 * has passed. Errors: NO_MEMORY; the state may then only be destroyed.
 */
ep_err ep_coordinator_state_restore(ep_coordinator_state *cluster, uint64_t now_ns,
                                    const ep_coordinator_kept *kept);

#endif
