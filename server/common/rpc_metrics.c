/* SPDX-License-Identifier: Apache-2.0 */
/* Sets the series of rpc_metrics.h. */
#include "common/rpc_metrics.h"

#include <stdio.h>

void ep_rpc_metrics_refused(ep_metrics *metrics, const ep_rpc_server_stats *stats)
{
    for (size_t i = 0; i < EP_REFUSALS_COUNT; i++) {
        const ep_metric_label reason = {"reason", ep_rpc_refusal_name((ep_rpc_refusal)i)};
        ep_counter_set(metrics, "expertd_rpc_refused_total",
                       "Connections and calls turned away, by reason", &reason, 1,
                       stats->refused[i]);
    }
}

/* Sets the series of a lane: "shm", or "stream" for all others. */
static void set_lane(ep_metrics *metrics, const char *name, uint64_t connections, uint64_t received,
                     uint64_t sent)
{
    const ep_metric_label lane = {"lane", name};
    ep_gauge_set(metrics, "expertd_lane_connections", "Connections now, by lane", &lane, 1,
                 (double)connections);
    ep_counter_set(metrics, "expertd_lane_received_bytes_total",
                   "Bytes of frames received, by lane", &lane, 1, received);
    ep_counter_set(metrics, "expertd_lane_sent_bytes_total", "Bytes of frames sent, by lane", &lane,
                   1, sent);
}

void ep_rpc_metrics_lanes(ep_metrics *metrics, const ep_rpc_server_stats *stats)
{
    set_lane(metrics, "shm", stats->shm_connections, stats->shm_bytes_received,
             stats->shm_bytes_sent);
    set_lane(metrics, "stream", stats->connections - stats->shm_connections,
             stats->bytes_received - stats->shm_bytes_received,
             stats->bytes_sent - stats->shm_bytes_sent);
}

void ep_rpc_metrics_stream_lane(ep_metrics *metrics)
{
    ep_stream_lane_stats lane;
    char busy_poll_us[16];
    ep_stream_lane_read_stats(&lane);
    snprintf(busy_poll_us, sizeof(busy_poll_us), "%u", lane.busy_poll_us);
    const ep_metric_label labels[] = {{"busy_poll_us", busy_poll_us}, {"stream_lane", lane.name}};
    ep_gauge_set(metrics, "expertd_stream_lane_info", "What carries tcp://; always 1", labels, 2,
                 1);
    ep_counter_set(metrics, "expertd_busy_polls_total",
                   "How often a network thread looked again before it slept", NULL, 0,
                   lane.polls_total);
}

void ep_rpc_metrics_shm(ep_metrics *metrics)
{
    ep_shm_stats shm;
    ep_shm_read_stats(&shm);
    ep_gauge_set(metrics, "expertd_shm_memory_bytes",
                 "Shared memory of the connections that are open now", NULL, 0,
                 (double)shm.mapped_bytes);
    ep_counter_set(metrics, "expertd_shm_refused_total",
                   "Callers that use the network because shm_total_bytes had no room for them",
                   NULL, 0, shm.refused_total);
}

void ep_rpc_metrics_door(ep_metrics *metrics, ep_rpc_server *server)
{
    ep_rpc_door_stats door;
    ep_rpc_server_read_door_stats(server, &door);
    ep_counter_set(metrics, "expertd_door_requests_total", "Requests that came to the door", NULL,
                   0, door.requests_total);
    for (int i = 0; i < EP_DOOR_REFUSALS; i++) {
        const ep_metric_label reason = {"reason", ep_rpc_door_refusal_name((ep_rpc_door_refusal)i)};
        ep_counter_set(metrics, "expertd_door_refused_total",
                       "Requests of the door refused before their handler ran, by reason", &reason,
                       1, door.refused_total[i]);
    }
    ep_counter_set(metrics, "expertd_door_replies_dropped_total",
                   "Replies of the door whose caller was gone or did not read", NULL, 0,
                   door.replies_dropped);
    ep_gauge_set(metrics, "expertd_door_requests_in_flight", "Requests of the door in work", NULL,
                 0, (double)door.requests_in_flight);
    ep_gauge_set(metrics, "expertd_door_connections", "Connections open at the door", NULL, 0,
                 (double)door.connections);
}
