/* SPDX-License-Identifier: Apache-2.0 */
/* Counters and histograms of Forward. */
#include "expertd/forward_metrics.h"

#include <string.h>

#include "base/check.h"

#define REQUESTS "expertd_requests_total"
#define REQUESTS_HELP "Forward calls by result"
#define DURATION "expertd_request_duration_seconds"
#define DURATION_HELP "Time of a Forward call on this node, by stage"

static const double second_bounds[] = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3,
                                       50e-3, 0.1,    0.2,    0.5,    1,    2,    5,    10};
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
        .rows = ep_metrics_counter(registry, "expertd_rows_served_total", "Expert rows computed", NULL, 0),
        .nonfinite = ep_metrics_counter(registry, "expertd_nonfinite_values_total",
                                        "NaN and Inf among computed values", NULL, 0),
        .total_seconds = duration(registry, "total"),
        .queue_seconds = duration(registry, "queue"),
        .compute_seconds = duration(registry, "compute"),
        .request_rows =
            ep_metrics_histogram(registry, "expertd_request_rows", "Expert rows of a Forward call", NULL, 0,
                                 row_bounds, EP_ARRAY_COUNT(row_bounds)),
    };
}

void ep_forward_metrics_ended(ep_forward_metrics *metrics, ep_err result, uint64_t took_ns)
{
    ep_counter_add(result == EP_OK ? metrics->requests_ok : requests(metrics->registry, ep_err_name(result)),
                   1);
    ep_histogram_observe(metrics->total_seconds, (double)took_ns * 1e-9);
}

uint64_t ep_count_nonfinite(const void *values, ep_dtype dtype, size_t count)
{
    uint64_t found = 0;
    if (dtype == EP_DTYPE_F32) {
        for (size_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, (const char *)values + i * 4, 4);
            found += (bits & 0x7f800000u) == 0x7f800000u;
        }
        return found;
    }
    uint16_t exponent = dtype == EP_DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    for (size_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, (const char *)values + i * 2, 2);
        found += (bits & exponent) == exponent;
    }
    return found;
}

void ep_forward_metrics_computed(ep_forward_metrics *metrics, const void *values, size_t values_count,
                                 ep_dtype dtype, uint64_t rows, uint64_t queue_ns, uint64_t compute_ns)
{
    uint64_t nonfinite = ep_count_nonfinite(values, dtype, values_count);
    if (nonfinite != 0) {
        ep_counter_add(metrics->nonfinite, nonfinite);
    }
    ep_counter_add(metrics->rows, rows);
    ep_histogram_observe(metrics->request_rows, (double)rows);
    ep_histogram_observe(metrics->queue_seconds, (double)queue_ns * 1e-9);
    ep_histogram_observe(metrics->compute_seconds, (double)compute_ns * 1e-9);
}
