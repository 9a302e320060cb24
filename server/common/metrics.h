/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A registry of counters, gauges and histograms, written as Prometheus text. Names begin with
 * "expertd_" and carry their unit (_seconds, _bytes); counters end in _total.
 *
 * Updates are lock-free. The same name and labels always give the same series. Updates accept a
 * NULL series (out of memory), so metrics never fail the work that they count. Threads any. Collect
 * functions run on the thread that writes, one writer at a time.
 */
#ifndef EP_SERVER_COMMON_METRICS_H
#define EP_SERVER_COMMON_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define EP_METRIC_BUCKETS_MAX 24
#define EP_METRIC_LABELS_MAX 8

typedef struct ep_metrics ep_metrics;
typedef struct ep_metric_series ep_metric_series;

typedef struct ep_metric_label {
    const char *name;
    const char *value;
} ep_metric_label;

ep_err ep_metrics_create(ep_metrics **out_metrics);
void ep_metrics_destroy(ep_metrics *metrics);

/* labels may be NULL with count 0; all texts are copied. One name has one kind and one help. NULL:
 * no memory.
 */
ep_metric_series *ep_metrics_counter(ep_metrics *metrics, const char *name, const char *help,
                                     const ep_metric_label *labels, size_t count);
/* bounds: ascending upper bounds of the buckets, 1..EP_METRIC_BUCKETS_MAX; +Inf is added. */
ep_metric_series *ep_metrics_histogram(ep_metrics *metrics, const char *name, const char *help,
                                       const ep_metric_label *labels, size_t count,
                                       const double *bounds, size_t bounds_count);

void ep_counter_add(ep_metric_series *series, uint64_t n);
/* Set a value that is counted elsewhere, at each collect. Without memory it is not shown. */
void ep_counter_set(ep_metrics *metrics, const char *name, const char *help,
                    const ep_metric_label *labels, size_t count, uint64_t total);
void ep_gauge_set(ep_metrics *metrics, const char *name, const char *help,
                  const ep_metric_label *labels, size_t count, double value);
void ep_histogram_observe(ep_metric_series *series, double value);

/* func runs before each write, to set gauges. At most 8. Errors: RESOURCE_EXHAUSTED. */
ep_err ep_metrics_on_collect(ep_metrics *metrics, void (*func)(void *arg), void *arg);
/* Text exposition; *out_text is malloc'ed. Errors: NO_MEMORY. */
ep_err ep_metrics_write(ep_metrics *metrics, char **out_text, size_t *out_bytes);

#endif
