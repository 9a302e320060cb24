/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is it worth to send each row to a host once, and does comm_alg auto find out? Two hosts of
 * four nodes: network namespaces whose links to each other carry an eighth of what the loopback of
 * each does. The caller and the coordinator are on the left one. Experts are small, so that links
 * are what a call waits for.
 *
 * Each row: hierarchy against fullmesh, in turn, with results of nodes as rows of each slot and as
 * sums; and auto against the better of the two. Bytes are those that the link between
 * the hosts carried, both ways, counted by the kernel. Needs root and the programs `ip` and `tc`.
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/bench_service.h"
#include "bench/shaped_net.h"
#include "support/checkpoint_fixture.h"

enum {
    HIDDEN = 1024,
    INNER = 64,
    EXPERTS = 64,
    TOP_K = 8,
    NODES = 8,
    HOSTS = 2,
    TOKENS_MAX = 2048,
    ROUNDS = 15,
    WARM_ROUNDS = 8,       /* auto has figures of both */
    ROUND_TOKENS = 1024,   /* at least, of a round, */
    ROUND_CALLS_MAX = 256, /* but no more calls */
    WARM_CALLS = 50,
    WARM_CALLS_MAX = 5000
};
#define BETWEEN_BYTES_PER_S 50e6
#define WITHIN_BYTES_PER_S (8 * BETWEEN_BYTES_PER_S)

static uint16_t x[TOKENS_MAX * HIDDEN], y[TOKENS_MAX * HIDDEN];
static int32_t ids[TOKENS_MAX * TOP_K];
static float scales[TOKENS_MAX * TOP_K];
static ep_client *client;
static bench_report *report;
static const char *coordinator_url;

/* ---- the service ---- */

static void start_service(const char *dir, const char *checkpoint, ep_test_process *coordinator,
                          ep_test_process nodes[NODES])
{
    char text[1024], name[16];
    snprintf(text, sizeof(text),
             "listen:\n  - tcp://%s:0\ninsecure: true\nmin_nodes: %d\nprobe_address: ''\n"
             "admin_listen: ''\n",
             shaped_net_address(0), NODES);
    bench_daemon_start(&(bench_node){.name = "coordinator",
                                     .netns = shaped_net_name(0),
                                     .program = EP_COORDINATOR_PROGRAM},
                       dir, text, coordinator);
    for (uint32_t n = 0; n < NODES; n++) {
        uint32_t host = n / (NODES / HOSTS);
        snprintf(name, sizeof(name), "node%u", n);
        snprintf(text, sizeof(text),
                 "host: %s\ncoordinator_url: %s\ninsecure: true\nthreads: 1\n"
                 "tracing: off\nshm: off\ninflight_tokens: 65536\n",
                 host == 0 ? "left" : "right", coordinator->rpc_url);
        bench_node_start(&(bench_node){.name = name,
                                       .checkpoint = checkpoint,
                                       .keys = text,
                                       .address = shaped_net_address(host),
                                       .netns = shaped_net_name(host)},
                         dir, &nodes[n]);
    }
}

static void by_coordinator(ep_client_config *config)
{
    config->coordinator_url = coordinator_url;
}

/* ---- one call ---- */

/* What the left host's link has carried so far. */
static uint64_t link_bytes(void)
{
    char line[512];
    unsigned long long in = 0, out = 0;
    FILE *file = fopen("/proc/self/net/dev", "r");
    if (file == NULL) {
        bench_fail("/proc/self/net/dev", "cannot be read");
    }
    while (fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, " eth0: %llu %*u %*u %*u %*u %*u %*u %*u %llu", &in, &out) == 2) {
            break;
        }
    }
    fclose(file);
    return in + out;
}

typedef struct cost {
    double us;
    double bytes;
    bool straight;  /* no frame was sent again */
    double by_host; /* hierarchy was used; of several calls, the share */
} cost;

static cost call(uint32_t tokens, ep_moe_comm comm_alg, ep_moe_combine_at combine_at)
{
    const bench_tokens of = {tokens, TOP_K, HIDDEN, x, ids, scales};
    ep_moe_args args = bench_args(&of);
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, tokens, HIDDEN);
    args.comm_alg = comm_alg;
    args.combine_at = combine_at;
    uint64_t bytes = link_bytes();
    double begin = bench_now_us();
    if (ep_moe_forward(client, &args, &out, &result) != EP_OK) {
        bench_fail("call", result.error.text);
    }
    return (cost){bench_now_us() - begin, (double)(link_bytes() - bytes),
                  result.rerouted_frames == 0, result.comm_alg == EP_MOE_COMM_HIERARCHY ? 1 : 0};
}

/* The mean of as many calls as make a round long enough to be compared. */
static cost calls(uint32_t tokens, ep_moe_comm comm_alg, ep_moe_combine_at combine_at)
{
    const uint32_t wanted = tokens < ROUND_TOKENS ? ROUND_TOKENS / tokens : 1;
    const uint32_t count = wanted < ROUND_CALLS_MAX ? wanted : ROUND_CALLS_MAX;
    cost sum = {.straight = true};
    for (uint32_t i = 0; i < count; i++) {
        const cost one = call(tokens, comm_alg, combine_at);
        sum.us += one.us / count;
        sum.bytes += one.bytes / count;
        sum.straight &= one.straight;
        sum.by_host += one.by_host / count;
    }
    return sum;
}

/* Nodes hear of their neighbours with heartbeats, and connect when first asked to pass rows on. */
static void warm_up(void)
{
    uint32_t straight = 0;
    for (uint32_t i = 0; straight < WARM_CALLS; i++) {
        if (i == WARM_CALLS_MAX) {
            bench_fail("warm-up", "nodes do not pass rows on");
        }
        cost one = call(16, EP_MOE_COMM_HIERARCHY, EP_MOE_COMBINE_ROWS);
        straight = one.straight ? straight + 1 : 0;
    }
}

/* Auto against the better of the two, each round by itself. */
static void judge_auto(const char *name, const double *auto_us, const double *mesh_us,
                       const double *by_host_us, bool is_by_host_better)
{
    double value[ROUNDS], better[ROUNDS], ratio[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        value[r] = auto_us[r];
        better[r] = is_by_host_better ? by_host_us[r] : mesh_us[r];
        ratio[r] = value[r] / better[r];
    }
    bench_report_rival(report, bench_quantile(value, ROUNDS, 0.5), "us",
                       bench_quantile(better, ROUNDS, 0.5), bench_quantile(ratio, ROUNDS, 0.5),
                       BENCH_LOWER, 1.05, "%s: time of auto against the better", name);
}

static void compare(uint32_t tokens, ep_moe_combine_at combine_at, const char *what, double us_bar,
                    double bytes_bar)
{
    double mesh_us[ROUNDS], by_host_us[ROUNDS], auto_us[ROUNDS], us[ROUNDS];
    double mesh_bytes[ROUNDS], by_host_bytes[ROUNDS], bytes[ROUNDS];
    double auto_by_host = 0;
    char name[64];
    snprintf(name, sizeof(name), "%u tokens, %s", tokens, what);
    for (int r = -WARM_ROUNDS; r < ROUNDS; r++) {
        static const ep_moe_comm algorithms[] = {EP_MOE_COMM_FULLMESH, EP_MOE_COMM_HIERARCHY,
                                                 EP_MOE_COMM_AUTO};
        cost costs[3];
        for (uint32_t i = 0; i < 3; i++) { /* another first each round */
            const uint32_t which = (i + (uint32_t)(r + WARM_ROUNDS)) % 3;
            costs[which] = calls(tokens, algorithms[which], combine_at);
        }
        const cost mesh = costs[0], by_host = costs[1], by_itself = costs[2];
        if (r >= 0) {
            auto_us[r] = by_itself.us;
            auto_by_host += by_itself.by_host / ROUNDS;
            mesh_us[r] = mesh.us;
            by_host_us[r] = by_host.us;
            us[r] = by_host.us / mesh.us;
            mesh_bytes[r] = mesh.bytes;
            by_host_bytes[r] = by_host.bytes;
            bytes[r] = by_host.bytes / mesh.bytes;
        }
    }
    const double us_ratio = bench_quantile(us, ROUNDS, 0.5);
    judge_auto(name, auto_us, mesh_us, by_host_us, us_ratio < 1);
    printf("%s: auto took hierarchy in %.0f %% of its calls\n", name, 100 * auto_by_host);
    bench_report_rival(report, bench_quantile(by_host_bytes, ROUNDS, 0.5), "bytes",
                       bench_quantile(mesh_bytes, ROUNDS, 0.5), bench_quantile(bytes, ROUNDS, 0.5),
                       BENCH_LOWER, bytes_bar, "%s: bytes between hosts", name);
    bench_report_rival(report, bench_quantile(by_host_us, ROUNDS, 0.5), "us",
                       bench_quantile(mesh_us, ROUNDS, 0.5), us_ratio, BENCH_LOWER, us_bar,
                       "%s: time", name);
}

int main(int argc, char **argv)
{
    static ep_test_process coordinator, nodes[NODES];
    static const uint32_t tokens[] = {1, 16, 128, 512, TOKENS_MAX};
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES];
    uint64_t seed = 5;
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, TOP_K);
    if (!shaped_net_create(HOSTS) || !shaped_net_set_rate(BETWEEN_BYTES_PER_S) ||
        !shaped_net_set_loopback(WITHIN_BYTES_PER_S)) {
        bench_fail("needs root, network namespaces and tc", "not allowed here");
    }
    ep_fixture_new(&fixture, checkpoint);
    if (!ep_test_dir_create(dir)) {
        bench_fail("no directory", NULL);
    }
    bench_draw_rows(&seed, EP_ARRAY_COUNT(x), x);
    bench_draw_routing(&seed, TOKENS_MAX, TOP_K, EXPERTS, ids, scales);
    start_service(dir, checkpoint, &coordinator, nodes);
    coordinator_url = coordinator.rpc_url;
    if (!shaped_net_enter(0)) {
        bench_fail("cannot enter the namespace", NULL);
    }
    client = bench_client_open(NULL, 0, by_coordinator);
    warm_up();
    report =
        bench_report_create("Hierarchy against fullmesh: two hosts of four nodes, top-8 of 64, "
                            "H = 1024, 50 MB/s between hosts, 400 MB/s within");
    for (size_t i = 0; i < EP_ARRAY_COUNT(tokens); i++) {
        bool is_large = tokens[i] >= 128;
        compare(tokens[i], EP_MOE_COMBINE_NODE_SUM, "sums", is_large ? 0.7 : NAN,
                is_large ? 0.4 : NAN);
        compare(tokens[i], EP_MOE_COMBINE_ROWS, "rows", NAN, NAN);
    }
    ep_client_destroy(client);
    for (uint32_t n = 0; n < NODES; n++) {
        ep_test_process_destroy(&nodes[n]);
    }
    ep_test_process_destroy(&coordinator);
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
