/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics text as Prometheus wants it. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "common/metrics.h"

static char *text_of(ep_metrics *metrics)
{
    char *text;
    size_t bytes;
    cr_assert_eq(ep_metrics_write(metrics, &text, &bytes), EP_OK);
    cr_assert_eq(strlen(text), bytes);
    return text;
}

Test(metrics, counters_gauges_and_histograms_as_text)
{
    ep_metrics *m;
    static const double bounds[] = {0.5, 1};
    ep_metric_label label = {"result", "a\"b\\c\nd"};
    cr_assert_eq(ep_metrics_create(&m), EP_OK);
    ep_metric_series *c = ep_metrics_counter(m, "expertd_x_total", "Counts x", &label, 1);
    ep_gauge_set(m, "expertd_y_bytes", "Bytes of y", NULL, 0, 1.5);
    ep_metric_series *h =
        ep_metrics_histogram(m, "expertd_z_seconds", "Time of z", NULL, 0, bounds, 2);
    ep_counter_add(c, 2);
    ep_counter_add(c, 3);
    ep_histogram_observe(h, 0.25);
    ep_histogram_observe(h, 0.5);
    ep_histogram_observe(h, 0.75);
    ep_histogram_observe(h, 7);
    char *text = text_of(m);
    cr_expect_str_eq(text, "# HELP expertd_x_total Counts x\n"
                           "# TYPE expertd_x_total counter\n"
                           "expertd_x_total{result=\"a\\\"b\\\\c\\\\x0ad\"} 5\n"
                           "# HELP expertd_y_bytes Bytes of y\n"
                           "# TYPE expertd_y_bytes gauge\n"
                           "expertd_y_bytes 1.5\n"
                           "# HELP expertd_z_seconds Time of z\n"
                           "# TYPE expertd_z_seconds histogram\n"
                           "expertd_z_seconds_bucket{le=\"0.5\"} 2\n"
                           "expertd_z_seconds_bucket{le=\"1\"} 3\n"
                           "expertd_z_seconds_bucket{le=\"+Inf\"} 4\n"
                           "expertd_z_seconds_sum 8.5\n"
                           "expertd_z_seconds_count 4\n");
    free(text);
    ep_metrics_destroy(m);
}

Test(metrics, same_name_and_labels_is_the_same_series)
{
    ep_metrics *m;
    ep_metric_label a = {"k", "a"}, b = {"k", "b"};
    cr_assert_eq(ep_metrics_create(&m), EP_OK);
    cr_expect_eq(ep_metrics_counter(m, "expertd_a_total", "A", &a, 1),
                 ep_metrics_counter(m, "expertd_a_total", "A", &a, 1));
    cr_expect_neq(ep_metrics_counter(m, "expertd_a_total", "A", &a, 1),
                  ep_metrics_counter(m, "expertd_a_total", "A", &b, 1));
    char *text = text_of(m);
    cr_expect(strstr(strstr(text, "# TYPE") + 1, "# TYPE") == NULL, "one TYPE line per name: %s",
              text);
    free(text);
    ep_metrics_destroy(m);
}

static void on_collect(void *arg)
{
    ep_gauge_set(arg, "expertd_g", "G", NULL, 0, 42);
}

Test(metrics, collect_functions_run_before_each_write)
{
    ep_metrics *m;
    cr_assert_eq(ep_metrics_create(&m), EP_OK);
    cr_assert_eq(ep_metrics_on_collect(m, on_collect, m), EP_OK);
    char *text = text_of(m);
    cr_expect(strstr(text, "expertd_g 42\n") != NULL);
    free(text);
    ep_metrics_destroy(m);
}

Test(metrics, a_null_series_is_accepted)
{
    ep_counter_add(NULL, 1);
    ep_histogram_observe(NULL, 1);
}
