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
