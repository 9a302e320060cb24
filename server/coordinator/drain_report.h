/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What can be said of a node that is to be emptied, from the table that clients have. Pure.
 */
#ifndef EP_COORDINATOR_DRAIN_REPORT_H
#define EP_COORDINATOR_DRAIN_REPORT_H

#include "coordinator/state.h"

/* Copies that stand on the node in the table; table NULL: 0. */
uint32_t ep_table_copies_on(const ep_routing_table *table, const char *node);
/*
 * Completes the report of a drain or a heartbeat: copies_to_move counts those of the table that
 * clients have too, and note says why copies stay, or what is missing meanwhile.
 */
void ep_drain_report_complete(const ep_coordinator_state *cluster,
                              const ep_coordinator_state_config *config,
                              const ep_routing_table *served, bool undo,
                              ep_coordinator_drain *io_drain);

#endif
