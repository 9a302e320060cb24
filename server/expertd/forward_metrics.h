/* SPDX-License-Identifier: Apache-2.0 */
/* Counters of the Forward handler. Threads: any. */
#ifndef EP_EXPERTD_FORWARD_METRICS_H
#define EP_EXPERTD_FORWARD_METRICS_H

#include "backends/backend.h"
#include "base/buffer.h"
#include "common/metrics.h"
#include "expertd/tensor.h"

typedef struct ep_forward_stats {
    uint64_t in_flight;
    uint64_t served;
    uint64_t failed;
    /* cancelled because the caller used another node's answer; not failures */
    uint64_t hedged;
    uint64_t rows_served; /* rows computed: one per slot */
} ep_forward_stats;

typedef struct ep_forward_metrics {
    ep_forward_stats stats; /* atomic */
    ep_metrics *registry;
    ep_metric_series *requests_ok;
    ep_metric_series *rows;
    ep_metric_series *nonfinite;
    ep_metric_series *total_seconds;
    ep_metric_series *queue_seconds;
    ep_metric_series *compute_seconds;
    ep_metric_series *request_rows;
} ep_forward_metrics;

void ep_forward_metrics_init(ep_forward_metrics *metrics, ep_metrics *registry);
/* Counts a request that has ended. hedged: it was cancelled because the caller used another node's
 * answer. With result OK: its rows were computed, beginning queue_ns after it arrived. To be called
 * before the reply is sent, so that whoever has the reply finds it counted. */
void ep_forward_metrics_ended(ep_forward_metrics *metrics, ep_err result, bool hedged,
                              uint64_t rows, uint64_t took_ns, uint64_t queue_ns);
/* Counts NaN and Inf in finished expert rows [hidden], while they are still in the processor's
 * cache. Sums of rows (node_sum) are not searched, so a sum that overflows is not counted. */
void ep_forward_metrics_rows(ep_forward_metrics *metrics, const ep_job_row *rows,
                             uint32_t rows_count, ep_dtype dtype, size_t hidden);

#endif
