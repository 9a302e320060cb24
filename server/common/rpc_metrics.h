/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics of an RPC server, for both daemons: refusals, lanes and the door. */
#ifndef EP_SERVER_COMMON_RPC_METRICS_H
#define EP_SERVER_COMMON_RPC_METRICS_H

#include "common/metrics.h"
#include "rpc/rpc.h"
#include "rpc/rpc_door.h"
#include "transport/transport.h"

/* expertd_rpc_refused_total by reason; for a collect function. Every reason exists from the start,
 * so that alerts can compare values. */
void ep_rpc_metrics_refused(ep_metrics *metrics, const ep_rpc_server_stats *stats);

/* expertd_lane_connections, _received_bytes_total and _sent_bytes_total by lane: shm, and stream
 * for the others. */
void ep_rpc_metrics_lanes(ep_metrics *metrics, const ep_rpc_server_stats *stats);

/* expertd_stream_lane_info, expertd_busy_polls_total. */
void ep_rpc_metrics_stream_lane(ep_metrics *metrics);
/* expertd_shm_memory_bytes, expertd_shm_refused_total. */
void ep_rpc_metrics_shm(ep_metrics *metrics);

/* expertd_door_*: requests, refusals by reason, requests in flight, connections, dropped
 * replies. */
void ep_rpc_metrics_door(ep_metrics *metrics, ep_rpc_server *server);

#endif
