/* SPDX-License-Identifier: Apache-2.0 */
/* Converts PlacementSnapshot to and from ep_routing_table. The decoder checks everything, since
 * snapshots from the wire are not trusted. */
#ifndef EP_WIRE_PLACEMENT_CODEC_H
#define EP_WIRE_PLACEMENT_CODEC_H

#include "coordinator.pb-c.h"
#include "moe/routing_table.h"

/* Free *out_snapshot with ep_placement_snapshot_free. Node states are not part of a table; the
 * caller may set them. */
ep_err ep_placement_encode(const ep_routing_table *table,
                           Expertd__V1__PlacementSnapshot **out_snapshot);
void ep_placement_snapshot_free(Expertd__V1__PlacementSnapshot *snapshot);
/* The shape in a node's LayerInfo; unchecked. */
ep_layer_shape ep_layer_shape_of(const Expertd__V1__LayerInfo *info);
ep_err ep_placement_decode(const Expertd__V1__PlacementSnapshot *snapshot,
                           ep_routing_table **out_table, ep_error *out_error);

#endif
