/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reports how far the drain of a node is, by the table that clients have. Pure.
 */
#ifndef EP_COORDINATOR_DRAIN_REPORT_H
#define EP_COORDINATOR_DRAIN_REPORT_H

#include "coordinator/state.h"

/*
 * Completes the report for a drain or a heartbeat: copies_to_move is at least the count in the
 * table that clients have, and note says why copies stay or which copies are missing.
 */
void ep_drain_report_complete(const ep_coordinator_state *cluster,
                              const ep_coordinator_state_config *config,
                              const ep_routing_table *served, bool undo,
                              ep_coordinator_drain *io_drain);

#endif
