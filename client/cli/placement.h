/* SPDX-License-Identifier: Apache-2.0 */
/* The routing table for commands: the coordinator's newest one, or one made of the given nodes'
 * reports. */
#ifndef EP_CLI_PLACEMENT_H
#define EP_CLI_PLACEMENT_H

#include "control.h"
#include "moe/routing_table.h"

/* control NULL: one of its own. Free *out_table with ep_routing_table_unref. Errors: UNAVAILABLE,
 * DEADLINE_EXCEEDED (no table within the timeout), those of bad tables. */
ep_err ep_cli_placement_read(ep_cli_control *control, const ep_cli_connect *connect,
                             ep_routing_table **out_table, ep_error *out_error);

/* Sets NOT_FOUND: there is no such layer (-1: any) of the model and version (NULL: any); lists
 * which there are. */
ep_err ep_cli_placement_missing(const ep_routing_table *table, const char *model,
                                const char *version, int64_t layer, ep_error *out_error);

/* The least and greatest number of copies of the layer's experts. */
void ep_cli_placement_copies(const ep_routing_layer *layer, uint32_t *out_min, uint32_t *out_max);

#endif
