/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numerics id a client that names none is to pin for a model: that of most nodes which hold a
 * copy of it; among equals the one with most copies. Nodes without a copy do not count: they are
 * drained, leaving or not loaded yet, and a coordinator may well keep the experts on others.
 *
 * Threads  the table is read only.
 */
#ifndef EP_CLIENT_NUMERICS_PICK_H
#define EP_CLIENT_NUMERICS_PICK_H

#include "moe/routing_table.h"

/* Borrowed from the table; NULL while no copy of the model is listed. */
const char *ep_numerics_pick(const ep_routing_table *table, uint32_t model_index);
/* Every expert of the model has a copy on a node of this id. */
bool ep_numerics_cover(const ep_routing_table *table, uint32_t model_index, const char *numerics);

#endif
