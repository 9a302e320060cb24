/* SPDX-License-Identifier: Apache-2.0 */
/* Series that count who was turned away. */
#include "common/rpc_metrics.h"

void ep_rpc_metrics_refused(ep_metrics *metrics, const ep_rpc_server_stats *stats)
{
    for (size_t i = 0; i < EP_REFUSALS_COUNT; i++) {
        const ep_metric_label reason = {"reason", ep_rpc_refusal_name((ep_rpc_refusal)i)};
        ep_counter_set(ep_metrics_counter(metrics, "expertd_rpc_refused_total",
                                          "Connections and calls turned away, by reason", &reason, 1),
                       stats->refused[i]);
    }
}

void ep_rpc_metrics_door(ep_metrics *metrics, ep_rpc_server *server)
{
    ep_rpc_door_stats door;
    ep_rpc_server_read_door_stats(server, &door);
    ep_counter_set(ep_metrics_counter(metrics, "expertd_door_requests_total", "Requests that came to the door", NULL, 0),
                   door.requests_total);
    for (int i = 0; i < EP_DOOR_REFUSALS; i++) {
        const ep_metric_label reason = {"reason", ep_rpc_door_refusal_name((ep_rpc_door_refusal)i)};
        ep_counter_set(ep_metrics_counter(metrics, "expertd_door_refused_total",
                                          "Requests of the door refused before their handler ran, by reason", &reason, 1),
                       door.refused_total[i]);
    }
    ep_counter_set(ep_metrics_counter(metrics, "expertd_door_replies_dropped_total",
                                      "Replies of the door whose caller was gone or did not read", NULL, 0),
                   door.replies_dropped);
    ep_gauge_set(ep_metrics_gauge(metrics, "expertd_door_requests_in_flight", "Requests of the door in work", NULL, 0),
                 (double)door.requests_in_flight);
    ep_gauge_set(ep_metrics_gauge(metrics, "expertd_door_connections", "Connections open at the door", NULL, 0),
                 (double)door.connections);
}
