/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chooses the numerics id to pin for a model if the client names none: the id of most nodes with a
 * copy of it; on a tie the id with most copies. Nodes without a copy do not count, since they are
 * drained, leaving or not loaded yet.
 *
 * Threads  the table is read only.
 */
#ifndef EP_CLIENT_NUMERICS_PICK_H
#define EP_CLIENT_NUMERICS_PICK_H

#include "moe/routing_table.h"

/* Borrowed from the table; NULL while no copy of the model is listed. */
const char *ep_numerics_pick(const ep_routing_table *table, uint32_t model_index);
/* Whether every expert of the model has a copy on a node with this id. */
bool ep_numerics_cover(const ep_routing_table *table, uint32_t model_index, const char *numerics);

#endif
