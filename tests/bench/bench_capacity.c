/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a service of nodes with known rates still does when one of eight is killed, and what
 * placement by heat gains under skewed traffic. Nodes compute at a fixed rate
 * (support/paced_backend.c), so that eight fit on a small machine.
 *
 *     bench_capacity [JSON] [long] [loss] [skew]
 *
 * long, or EP_TEST_LONG=1: minutes in the place of seconds. EP_PACED_ROW_US and EP_PACED_PASS_ROWS:
 * nodes of another cost than ROW_US a row and nothing for reading weights.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "bench/bench_report.h"
#include "bench/live_log.h"
#include "bench/live_table.h"
#include "support/cluster.h"

enum { HIDDEN = 64, TOKENS = 16, BATCHES = 64, IN_FLIGHT_MAX = 2000 };
#define MODEL "demo"
#define ROW_US "2000"

static bool is_long;
static bench_report *report;

typedef struct service {
    ep_test_cluster cluster;
    ep_client *client;
} service;

static void begin_service(service *s, uint32_t nodes, uint32_t copies, const char *path,
                          const char *const *coordinator_args)
{
    static const char *const programs[EP_TEST_NODES_MAX] = {
        EP_EXPERTD_PACED, EP_EXPERTD_PACED, EP_EXPERTD_PACED, EP_EXPERTD_PACED,
        EP_EXPERTD_PACED, EP_EXPERTD_PACED, EP_EXPERTD_PACED, EP_EXPERTD_PACED};
    static const char *const node_args[] = {"--backend=paced", NULL};
    static ep_test_model model;
    model = (ep_test_model){MODEL, path};
    setenv("EP_PACED_ROW_US", ROW_US, 0);
    ep_test_cluster_start(&s->cluster,
                          &(ep_test_cluster_options){.nodes_count = nodes,
                                                     .copies = copies,
                                                     .heartbeat_ms = 500,
                                                     .heartbeat_dead_count = 3,
                                                     .models = &model,
                                                     .models_count = 1,
                                                     .node_programs = programs,
                                                     .node_args = node_args,
                                                     .coordinator_args = coordinator_args});
    s->client = ep_test_cluster_client(&s->cluster, NULL);
}

static void end_service(service *s)
{
    ep_client_destroy(s->client);
    ep_test_cluster_stop(&s->cluster);
}

static void make_checkpoint(uint32_t experts, char out_path[EP_TEST_PATH_BYTES])
{
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, HIDDEN, experts, 2);
    ep_test_checkpoint_new(&fixture, out_path);
}

/* ---- calls at full speed ---- */

typedef struct measured {
    double calls_per_s;
    double p99_ms;
    uint64_t bad;
} measured;

/* So many calls in flight for some seconds, the first one of them not counted. */
static measured measure(service *s, const ep_test_batch *batches, uint32_t in_flight,
                        double seconds)
{
    ep_test_load_counts counts;
    live_log *log = live_log_create("full speed", batches, NULL);
    const ep_test_load_config config = {.client = s->client,
                                        .batches = batches,
                                        .batches_count = BATCHES,
                                        .calls_in_flight = in_flight,
                                        .mode = EP_MOE_DECODE};
    ep_test_load *load = live_load_start(log, config);
    const uint64_t from_ns = ep_clock_now_ns() + EP_NS_PER_S,
                   to_ns = from_ns + (uint64_t)(seconds * 1e9);
    live_sleep_until(to_ns);
    ep_test_load_stop(load, &counts);
    const uint64_t good = live_log_count(log, LIVE_GOOD, from_ns, to_ns);
    const measured m = {.calls_per_s = (double)good / seconds,
                        .p99_ms = live_log_quantile_ms(log, from_ns, to_ns, 0.99),
                        .bad = counts.failed + live_log_count(log, LIVE_WRONG, 0, UINT64_MAX)};
    live_log_destroy(log);
    return m;
}

/* ---- one of eight is lost ---- */

enum {
    LOSS_NODES = 8,
    LOSS_EXPERTS = 56,
    LOSS_VICTIM = 3
}; /* two copies of each: equal numbers on seven nodes, and on eight */
#define DEADLINE_MS 500

static double share(live_log *log, uint64_t from_ns, uint64_t to_ns)
{
    const double good = (double)live_log_count(log, LIVE_GOOD, from_ns, to_ns);
    return good / (good + (double)live_log_count(log, LIVE_FAILED, from_ns, to_ns) +
                   (double)live_log_count(log, LIVE_WRONG, from_ns, to_ns));
}

/* Calls come at a fixed rate while a node is killed and stays away; then it comes back. */
static void lose_one(service *s, const ep_test_batch *batches, const char *name, double calls_per_s,
                     double bar)
{
    ep_test_load_counts counts;
    live_copies wanted = {
        .copies_min = 2, .nodes = LOSS_NODES, .node_copies_min = 2 * LOSS_EXPERTS / LOSS_NODES};
    const uint64_t after_s = is_long ? 120 : 8;
    live_log *log = live_log_create(name, batches, NULL);
    const ep_test_load_config config = {.client = s->client,
                                        .batches = batches,
                                        .batches_count = BATCHES,
                                        .calls_in_flight = IN_FLIGHT_MAX,
                                        .calls_per_s = calls_per_s,
                                        .deadline_us = DEADLINE_MS * 1000,
                                        .mode = EP_MOE_DECODE};
    ep_test_load *load = live_load_start(log, config);
    const uint64_t begin_ns = ep_clock_now_ns() + EP_NS_PER_S, kill_ns = begin_ns + 3 * EP_NS_PER_S;
    live_sleep_until(kill_ns);
    wanted.after = live_table_epoch(s->client);
    EP_TEST_CHECK(ep_test_process_signal(&s->cluster.nodes[LOSS_VICTIM], SIGKILL), "not killed");
    const uint64_t soon_ns = kill_ns + 2 * EP_NS_PER_S, end_ns = kill_ns + after_s * EP_NS_PER_S;
    live_sleep_until(end_ns);
    ep_test_load_stop(load, &counts);
    bench_report_value(report, calls_per_s, "calls", BENCH_HIGHER, NAN, "%s: calls a second", name);
    bench_report_value(report, share(log, begin_ns, kill_ns - DEADLINE_MS * EP_NS_PER_MS), "of 1",
                       BENCH_HIGHER, NAN, "%s: in time, before the kill", name);
    bench_report_value(report, share(log, kill_ns - DEADLINE_MS * EP_NS_PER_MS, soon_ns), "of 1",
                       BENCH_HIGHER, bar, "%s: in time, the two seconds from the kill on", name);
    bench_report_value(report, share(log, soon_ns, end_ns), "of 1", BENCH_HIGHER, bar,
                       "%s: in time, after that", name);
    bench_report_value(report, (double)live_log_count(log, LIVE_WRONG, 0, UINT64_MAX), "calls",
                       BENCH_LOWER, 0, "%s: wrong bits", name);
    live_log_destroy(log);
    ep_test_cluster_return_node(&s->cluster, LOSS_VICTIM);
    live_sleep_until(
        live_table_wait(s->client, "the node is back", live_table_has_copies, &wanted) +
        EP_NS_PER_S); /* it warms up */
}

static void bench_loss(void)
{
    static service s;
    static ep_test_batch batches[BATCHES];
    char path[EP_TEST_PATH_BYTES];
    make_checkpoint(LOSS_EXPERTS, path);
    live_batches_init(batches, BATCHES, path, MODEL, TOKENS, NULL);
    begin_service(&s, LOSS_NODES - 1, 2, path, NULL);
    live_copies wanted = {
        .copies_min = 2, .nodes = LOSS_NODES, .node_copies_min = 2 * LOSS_EXPERTS / LOSS_NODES};
    const double seven = measure(&s, batches, 64, is_long ? 20 : 4).calls_per_s;
    ep_test_cluster_add_node(&s.cluster);
    live_table_wait(s.client, "an eighth node", live_table_has_copies, &wanted);
    bench_report_value(report, seven, "calls/s", BENCH_HIGHER, NAN, "seven nodes at full speed");
    lose_one(&s, batches, "80 % of seven nodes", 0.8 * seven, 0.98);
    lose_one(&s, batches, "100 % of eight nodes", seven * 8 / 7, 0.98 * 7 / 8);
    end_service(&s);
    live_batches_fini(batches, BATCHES);
    ep_test_dir_remove(path);
}

/* ---- skew ---- */

enum { SKEW_NODES = 4, SKEW_EXPERTS = 16, SKEW_IN_FLIGHT = 32, PAIRS_MAX = 50 };

typedef struct pair_ratios {
    double speed[PAIRS_MAX];
    double p99[PAIRS_MAX];
} pair_ratios;

/* Both services in turn, so that a busy moment of the machine meets both. */
static void compare(service *even, service *heat, const ep_test_batch *batches, const char *name,
                    double speed_bar, double p99_bar)
{
    static pair_ratios r;
    uint64_t bad = 0;
    const uint32_t pairs = is_long ? 30 : 5;
    for (uint32_t p = 0; p < pairs; p++) {
        const measured a = measure(even, batches, SKEW_IN_FLIGHT, 2),
                       b = measure(heat, batches, SKEW_IN_FLIGHT, 2);
        r.speed[p] = b.calls_per_s / a.calls_per_s;
        r.p99[p] = b.p99_ms / a.p99_ms;
        bad += a.bad + b.bad;
    }
    bench_report_value(report, bench_quantile(r.speed, pairs, 0.5), "times", BENCH_HIGHER,
                       speed_bar, "%s: calls a second, balanced against uniform", name);
    bench_report_value(report, bench_quantile(r.p99, pairs, 0.5), "times", BENCH_LOWER, p99_bar,
                       "%s: p99, balanced against uniform", name);
    bench_report_value(report, (double)bad, "calls", BENCH_LOWER, 0, "%s: calls failed or wrong",
                       name);
}

static void bench_skew(void)
{
    static const char *const balanced[] = {"--placement=balanced", "--spare-copies=4", NULL};
    static service uniform, heat;
    static ep_test_batch even[BATCHES], skewed[BATCHES];
    static int32_t hot[BATCHES * LIVE_TOP_K];
    char path[EP_TEST_PATH_BYTES];
    live_balance wanted = {.nodes = SKEW_NODES, .good = 1.1};
    make_checkpoint(SKEW_EXPERTS, path);
    live_draw_zipf(1.2, SKEW_EXPERTS, BATCHES, hot, wanted.heat);
    live_batches_init(even, BATCHES, path, MODEL, TOKENS, NULL);
    live_batches_init(skewed, BATCHES, path, MODEL, TOKENS, hot);
    begin_service(&uniform, SKEW_NODES, 1, path, NULL);
    begin_service(&heat, SKEW_NODES, 1, path, balanced);
    compare(&uniform, &heat, even, "even traffic", 0.98, 1.02);
    uint32_t rounds = 0;
    while (!live_table_is(heat.client, live_table_is_balanced, &wanted) && rounds++ < 10) {
        measure(&heat, skewed, SKEW_IN_FLIGHT, 2);
    }
    bench_report_value(report, wanted.ratio, "times", BENCH_LOWER, NAN,
                       "zipf 1.2: busiest node against the bound, when measured");
    compare(&uniform, &heat, skewed, "zipf 1.2", 1.4, 0.7);
    end_service(&uniform);
    end_service(&heat);
    live_batches_fini(even, BATCHES);
    live_batches_fini(skewed, BATCHES);
    ep_test_dir_remove(path);
}

int main(int argc, char **argv)
{
    const char *long_text = getenv("EP_TEST_LONG");
    bool loss = false, skew = false;
    is_long = long_text != NULL && strcmp(long_text, "0") != 0;
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "long") == 0) {
            is_long = true;
        } else if (strcmp(argv[i], "loss") == 0) {
            loss = true;
        } else if (strcmp(argv[i], "skew") == 0) {
            skew = true;
        } else {
            fprintf(stderr, "bench_capacity: '%s' is no option; there are: long loss skew\n",
                    argv[i]);
            return 2;
        }
    }
    report = bench_report_create("Nodes of known rates: one of eight is lost, and skewed traffic");
    if (loss || !skew) {
        bench_loss();
    }
    if (skew || !loss) {
        bench_skew();
    }
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
