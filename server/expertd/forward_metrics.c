/* SPDX-License-Identifier: Apache-2.0 */
/* Counters and histograms of Forward. */
#include "expertd/forward_metrics.h"

#include "base/check.h"
#include "moe/convert.h"

#define REQUESTS "expertd_requests_total"
#define REQUESTS_HELP "Forward calls by result; HEDGED: the caller uses another node's answer"
#define DURATION "expertd_request_duration_seconds"
#define DURATION_HELP "Time of a Forward call on this node, by stage"

static const double second_bounds[] = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3,
                                       5e-3,  10e-3,  20e-3,  50e-3,  0.1,  0.2,
                                       0.5,   1,      2,      5,      10};
static const double row_bounds[] = {1,   2,   4,    8,    16,   32,   64,    128,
                                    256, 512, 1024, 2048, 4096, 8192, 16384, 65536};

static ep_metric_series *duration(ep_metrics *registry, const char *stage)
{
    ep_metric_label label = {"stage", stage};
    return ep_metrics_histogram(registry, DURATION, DURATION_HELP, &label, 1, second_bounds,
                                EP_ARRAY_COUNT(second_bounds));
}

static ep_metric_series *requests(ep_metrics *registry, const char *result)
{
    ep_metric_label label = {"result", result};
    return ep_metrics_counter(registry, REQUESTS, REQUESTS_HELP, &label, 1);
}

void ep_forward_metrics_init(ep_forward_metrics *metrics, ep_metrics *registry)
{
    *metrics = (ep_forward_metrics){
        .registry = registry,
        .requests_ok = requests(registry, "OK"),
        .rows = ep_metrics_counter(registry, "expertd_rows_served_total", "Expert rows computed",
                                   NULL, 0),
        .nonfinite = ep_metrics_counter(
            registry, "expertd_nonfinite_values_total",
            "NaN and Inf in computed expert rows, before any sum of them", NULL, 0),
        .total_seconds = duration(registry, "total"),
        .queue_seconds = duration(registry, "queue"),
        .compute_seconds = duration(registry, "compute"),
        .request_rows =
            ep_metrics_histogram(registry, "expertd_request_rows", "Expert rows of a Forward call",
                                 NULL, 0, row_bounds, EP_ARRAY_COUNT(row_bounds)),
    };
}

void ep_forward_metrics_ended(ep_forward_metrics *metrics, ep_err result, bool hedged,
                              uint64_t rows, uint64_t took_ns, uint64_t queue_ns)
{
    ep_forward_stats *stats = &metrics->stats;
    ep_counter_add(result == EP_OK
                       ? metrics->requests_ok
                       : requests(metrics->registry, hedged ? "HEDGED" : ep_err_name(result)),
                   1);
    ep_histogram_observe(metrics->total_seconds, (double)took_ns * 1e-9);
    __atomic_fetch_add(result == EP_OK ? &stats->served
                       : hedged        ? &stats->hedged
                                       : &stats->failed,
                       1, __ATOMIC_RELAXED);
    if (result == EP_OK) {
        __atomic_fetch_add(&stats->rows_served, rows, __ATOMIC_RELAXED);
        ep_counter_add(metrics->rows, rows);
        ep_histogram_observe(metrics->request_rows, (double)rows);
        ep_histogram_observe(metrics->queue_seconds, (double)queue_ns * 1e-9);
        ep_histogram_observe(metrics->compute_seconds, (double)(took_ns - queue_ns) * 1e-9);
    }
}

void ep_forward_metrics_rows(ep_forward_metrics *metrics, const ep_job_row *rows,
                             uint32_t rows_count, ep_dtype dtype, size_t hidden)
{
    uint64_t nonfinite = 0;
    for (uint32_t r = 0; r < rows_count; r++) {
        nonfinite += ep_row_count_nonfinite(rows[r].out, dtype, hidden);
    }
    if (nonfinite != 0) {
        ep_counter_add(metrics->nonfinite, nonfinite);
    }
}
