/* SPDX-License-Identifier: Apache-2.0 */
/* The stream of routing tables from the coordinator. It restarts by itself; the tables in use stay
 * while it is away. */
#ifndef EP_CLIENT_WATCH_H
#define EP_CLIENT_WATCH_H

#include "cluster/cluster.h"

typedef struct ep_watch ep_watch;

ep_err ep_watch_create(ep_cluster *cluster, const ep_rpc_common *common,
                       const ep_lane_address *coordinator, ep_watch **out_watch,
                       ep_error *out_error);
/* Not from a callback. NULL allowed. */
void ep_watch_destroy(ep_watch *watch);

#endif
