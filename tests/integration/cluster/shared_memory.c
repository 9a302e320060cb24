/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of one host over shared memory: the client moves to it by itself, the bits are those of the
 * network and of the oracle, a killed node is noticed and its copy takes over, a node that comes
 * back over a stale socket is used again, and where shared memory cannot be had, or there is no
 * more of it, the network does the work.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "support/cluster.h"
#include "support/load.h"

enum { BATCHES = 4, NODES = 2, LOAD = 4, HIDDEN = 64 };

/* Each token of the batches, once, as bf16: the least that call_all sends. */
#define ROWS_BYTES ((1 + 51 + 101 + 151) * HIDDEN * 2.0)

static ep_test_batch batches[BATCHES];
static ep_test_cluster cluster;

static double metric(uint32_t node, const char *series)
{
    return ep_test_metric(&cluster.nodes[node], series);
}

static double shm_bytes(uint32_t node)
{
    return metric(node, "expertd_lane_received_bytes_total{lane=\"shm\"}");
}

static double shm_connections(uint32_t node)
{
    return metric(node, "expertd_lane_connections{lane=\"shm\"}");
}

static void call_all(ep_client *client)
{
    ep_moe_result result;
    for (uint32_t b = 0; b < BATCHES; b++) {
        EP_TEST_CHECK(ep_test_batch_call(&batches[b], client, 0, &result), "%s", result.error.text);
    }
}

static void pause_ms(long ms)
{
    const struct timespec pause = {.tv_nsec = ms * (long)EP_NS_PER_MS};
    nanosleep(&pause, NULL);
}

/*
 * Connections a node has over shared memory: a client opens two, and one client is always there,
 * the coordinator's gateway. Its pings are why no byte counts are compared exactly.
 */
enum { GATEWAY = 2, GATEWAY_AND_CLIENT = 4 };

/* Until there are so many. */
static void wait_connections(uint32_t node, double wanted)
{
    uint64_t until_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (shm_connections(node) != wanted) {
        EP_TEST_CHECK(ep_clock_now_ns() < until_ns,
                      "node%u has %.0f shared-memory connections, never %.0f", node,
                      shm_connections(node), wanted);
        pause_ms(2);
    }
}

static void only_stream(ep_client_config *config)
{
    config->lanes = "stream";
}

static void calls_run_over_shared_memory(void)
{
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    for (uint32_t n = 0; n < NODES; n++) {
        wait_connections(n, GATEWAY_AND_CLIENT);
    }
    double shm_before = shm_bytes(0) + shm_bytes(1);
    double stream_before = metric(0, "expertd_lane_received_bytes_total{lane=\"stream\"}") +
                           metric(1, "expertd_lane_received_bytes_total{lane=\"stream\"}");
    call_all(client);
    const double rows = ROWS_BYTES;
    double shm_moved = shm_bytes(0) + shm_bytes(1) - shm_before;
    double stream_moved = metric(0, "expertd_lane_received_bytes_total{lane=\"stream\"}") +
                          metric(1, "expertd_lane_received_bytes_total{lane=\"stream\"}") -
                          stream_before;
    EP_TEST_CHECK(shm_moved >= rows, "%.0f bytes went over shared memory, expected %.0f", shm_moved,
                  rows);
    EP_TEST_CHECK(stream_moved < rows / 4, "%.0f bytes still went over the network", stream_moved);
    ep_client_destroy(client);
    for (uint32_t n = 0; n < NODES; n++) {
        wait_connections(n, GATEWAY);
    }
    printf("%.0f bytes over shared memory, %.0f beside it\n", shm_moved, stream_moved);
}

static void a_client_can_be_told_not_to(void)
{
    double before = shm_bytes(0) + shm_bytes(1);
    ep_client *client = ep_test_cluster_client(&cluster, only_stream);
    call_all(client);
    EP_TEST_CHECK(setenv("LIBEXPERTD_LANES", "stream", 1) == 0, "setenv");
    ep_client *other = ep_test_cluster_client(&cluster, NULL);
    EP_TEST_CHECK(unsetenv("LIBEXPERTD_LANES") == 0, "unsetenv");
    call_all(other);
    EP_TEST_CHECK(shm_bytes(0) + shm_bytes(1) < before + ROWS_BYTES / 4,
                  "a client used shared memory though it was told not to");
    ep_client_destroy(client);
    ep_client_destroy(other);
}

static void start_node_again(uint32_t node, const char *dir)
{
    char name[32];
    char model[EP_TEST_PATH_BYTES + 16];
    snprintf(name, sizeof(name), "node%u", node);
    snprintf(model, sizeof(model), "--model=shared=%s", cluster.options.models[0].path);
    char coordinator[EP_TEST_PATH_BYTES + 32];
    char node_name[64];
    char shm_dir[EP_TEST_PATH_BYTES + 16];
    snprintf(coordinator, sizeof(coordinator), "--coordinator-url=%s", cluster.coordinator.rpc_url);
    snprintf(node_name, sizeof(node_name), "--node-name=%s", name);
    snprintf(shm_dir, sizeof(shm_dir), "--shm-dir=%s", dir);
    const char *args[] = {model,
                          coordinator,
                          node_name,
                          shm_dir,
                          "--shm=on",
                          "--threads=1",
                          "--listen=tcp://127.0.0.1:0",
                          "--admin-listen=tcp://127.0.0.1:0",
                          "--probe-address=127.0.0.1:0",
                          "--log-level=warn",
                          NULL};
    EP_TEST_CHECK(ep_test_process_start(&cluster.nodes[node], cluster.dir, name, ep_test_expertd,
                                        args, NULL, true) &&
                      ep_test_process_wait_ports(&cluster.nodes[node], EP_TEST_PATIENCE_MS),
                  "node%u does not start again", node);
}

static void a_killed_node_is_replaced_and_used_again(const char *dir)
{
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    wait_connections(0, GATEWAY_AND_CLIENT);
    wait_connections(1, GATEWAY_AND_CLIENT);
    const ep_test_load_config config = {
        .client = client, .batches = batches, .batches_count = BATCHES, .calls_in_flight = LOAD};
    ep_test_load *load = ep_test_load_start(&config); /* a failed call fails the test */
    ep_test_load_wait_succeeded(load, 50);
    EP_TEST_CHECK(ep_test_process_stop(&cluster.nodes[0], SIGKILL, EP_TEST_PATIENCE_MS) ==
                      128 + SIGKILL,
                  "kill");
    ep_test_load_wait_succeeded(load, 200);
    ep_test_process_destroy(&cluster.nodes[0]);
    char path[EP_TEST_PATH_BYTES + 32];
    snprintf(path, sizeof(path), "%s/node0.sock", dir);
    EP_TEST_CHECK(access(path, F_OK) == 0, "%s: a killed process leaves its socket", path);
    start_node_again(0, dir);
    ep_test_load_wait_succeeded(load, 50);
    wait_connections(0, GATEWAY_AND_CLIENT);
    ep_test_load_counts counts;
    ep_test_load_stop(load, &counts);
    printf("%llu calls, %llu frames sent again\n", (unsigned long long)counts.succeeded,
           (unsigned long long)counts.rerouted_frames);
    ep_client_destroy(client);
}

/* The name is gone: what Hello offers cannot be dialled. */
static void falls_back_when_it_cannot_be_reached(const char *dir)
{
    for (uint32_t n = 0; n < NODES; n++) {
        char path[EP_TEST_PATH_BYTES + 32];
        snprintf(path, sizeof(path), "%s/node%u.sock", dir, n);
        EP_TEST_CHECK(unlink(path) == 0, "%s is not there", path);
    }
    double before = shm_bytes(0) + shm_bytes(1);
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    call_all(client);
    EP_TEST_CHECK(shm_bytes(0) + shm_bytes(1) < before + ROWS_BYTES / 4,
                  "shared memory was used without its socket");
    ep_client_destroy(client);
}

/* A service of its own, whose memory holds the gateway's two connections and no more. */
static void callers_beyond_the_memory_use_the_network(const ep_test_model *model)
{
    char total[64];
    snprintf(total, sizeof(total), "--shm-total-bytes=%zu",
             GATEWAY * ep_shm_connection_bytes(EP_SHM_RING_BYTES_MIN));
    const char *args[] = {"--shm=on", "--shm-ring-bytes=64KiB", total, NULL};
    const ep_test_cluster_options options = {
        .nodes_count = NODES, .copies = 1, .models = model, .models_count = 1, .node_args = args};
    ep_test_cluster_start(&cluster, &options);
    for (uint32_t n = 0; n < NODES; n++) {
        wait_connections(n, GATEWAY);
    }
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    for (uint32_t n = 0; n < NODES; n++) {
        uint64_t until_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
        /* one for each of the client's connections */
        while (metric(n, "expertd_shm_refused_total") < 2) {
            EP_TEST_CHECK(ep_clock_now_ns() < until_ns, "node%u refused nobody", n);
            pause_ms(2);
        }
    }
    double before = shm_bytes(0) + shm_bytes(1);
    call_all(client);
    for (uint32_t n = 0; n < NODES; n++) {
        EP_TEST_CHECK(shm_connections(n) == GATEWAY, "node%u let somebody in", n);
        EP_TEST_CHECK(metric(n, "expertd_shm_memory_bytes") ==
                          (double)(GATEWAY * ep_shm_connection_bytes(EP_SHM_RING_BYTES_MIN)),
                      "node%u has %.0f bytes of shared memory", n,
                      metric(n, "expertd_shm_memory_bytes"));
    }
    EP_TEST_CHECK(shm_bytes(0) + shm_bytes(1) < before + ROWS_BYTES / 4,
                  "the calls went over shared memory");
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
}

int main(void)
{
    char dir[EP_TEST_PATH_BYTES];
    char path[EP_TEST_PATH_BYTES];
    ep_fixture_config config = ep_fixture_default();
    config.hidden = HIDDEN;
    config.inner = 32;
    config.experts = 8;
    config.top_k = 2;
    ep_test_dir_new(dir);
    ep_test_checkpoint_new(&config, path);
    ep_test_batches_init(batches, BATCHES, path, "shared", 1, 50, 2, 0);
    const ep_test_model model = {"shared", path};
    const char *args[] = {"--shm=on", "--shm-dir", dir, NULL};
    const ep_test_cluster_options options = {
        .nodes_count = NODES, .copies = 2, .models = &model, .models_count = 1, .node_args = args};
    ep_test_cluster_start(&cluster, &options);
    calls_run_over_shared_memory();
    a_client_can_be_told_not_to();
    a_killed_node_is_replaced_and_used_again(dir);
    falls_back_when_it_cannot_be_reached(dir);
    ep_test_cluster_stop(&cluster);
    callers_beyond_the_memory_use_the_network(&model);
    for (uint32_t b = 0; b < BATCHES; b++) {
        ep_test_batch_fini(&batches[b]);
    }
    ep_test_dir_remove(path);
    ep_test_dir_remove(dir);
    return 0;
}
