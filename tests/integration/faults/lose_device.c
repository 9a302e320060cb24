/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service of one node on (emulated) NPUs and one on the CPU, each with all experts, and a client
 * that takes rows of both: when a device is lost under load no call fails, no result is further off
 * than the device's roundings, its node lives on and says what happened.
 *
 *   only     its one device: it holds nothing any more, so callers are no longer sent there
 *   one      of three: the others take its experts over
 *   full     the same where the others have no room for all: experts come in the place of others
 *            from then on
 *   replace  two nodes with one device each share the experts; the other one is given those of the
 *            lost device
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fault_device.h"
#include "fault_fixture.h"

enum {
    CALLS_IN_FLIGHT = 64,
    CALLS_BEFORE = 200,
    CALLS_AFTER = 200,
    WAITS_MAX = 100,
    DEVICE = 0,
    CPU = 1
};

/* Weights that each of three devices may hold, kind "full": six of the node's sixteen experts. */
#define FULL_BYTES (6 * 3 * FAULT_HIDDEN * FAULT_INNER * 2)

#define BOTH                                                                                       \
    "[{\"device_id\":0,\"device_expert\":[0,1,2,3,4,5,6,7]},{\"device_id\":1,\"device_expert\":["  \
    "0,1,2,3,4,5,6,7]}]"
static const char map[] =
    "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_"
    "list\":" BOTH "},{\"layer_id\":1,\"device_count\":2,\"device_list\":" BOTH "}]}";

static fault_fixture f;
static char dir[EP_TEST_PATH_BYTES];
static uint32_t devices = 1;
static bool is_full;
static ep_test_load *load;

static uint64_t rows_of(uint32_t node)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, node);
    const uint64_t rows = status->rows_served;
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
    return rows;
}

static void start_load(void)
{
    load = ep_test_load_start(&(ep_test_load_config){.client = f.client,
                                                     .batches = f.all,
                                                     .batches_count = FAULT_LAYERS * FAULT_BATCHES,
                                                     .calls_in_flight = CALLS_IN_FLIGHT,
                                                     .expect = fault_device_expect});
}

static void any_numerics(ep_client_config *config)
{
    config->numerics = "any";
}

/* What the node said, once. */
static void expect_told(void)
{
    char *text = ep_test_read_file(f.cluster.nodes[DEVICE].output_path);
    const char *line = strstr(text, "event=device-lost");
    EP_TEST_CHECK(line != NULL && strstr(line, "code 507010") != NULL &&
                      strstr(line, "npu-smi") != NULL,
                  "%s", text);
    EP_TEST_CHECK(strstr(line + 1, "event=device-lost") == NULL, "told twice: %s", text);
    free(text);
}

/* What has the part, sooner or later. */
static void wait_for(const char *url, const char *path, int code, const char *part)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    for (;;) {
        char *body = NULL;
        const int got = ep_test_http_get(url, path, &body);
        const bool is_there = got == code && strstr(body, part) != NULL;
        EP_TEST_CHECK(is_there || ep_clock_now_ns() < end_ns, "%s%s: %d, no '%s' in %s", url, path,
                      got, part, body);
        free(body);
        if (is_there) {
            return;
        }
    }
}

/* Status, doctor and the coordinator's metrics speak of it; the metrics wait for the heartbeat that
 * tells. */
static void expect_problem(const char *text)
{
    char *output;
    wait_for(f.cluster.coordinator.probe_url, "/metrics", 200,
             "expertd_coordinator_problems{code=\"device-lost\",severity=\"error\"} 1");
    EP_TEST_CHECK(ep_test_cluster_ctl(&f.cluster, &output, "status") != 0 &&
                      strstr(output, text) != NULL,
                  "%s", output);
    free(output);
    EP_TEST_CHECK(ep_test_cluster_ctl(&f.cluster, &output, "doctor") != 0 &&
                      strstr(output, text) != NULL && strstr(output, "507010") != NULL &&
                      strstr(output, "npu-smi") != NULL,
                  "%s", output);
    free(output);
    wait_for(f.cluster.coordinator.probe_url, "/readyz?verbose", 200, text);
}

static uint64_t requests_of(uint32_t node)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, node);
    const uint64_t requests = status->requests_served + status->requests_failed;
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
    return requests;
}

/* The client has heard of the table without the node once many calls pass it by. */
static void wait_avoided(uint32_t node)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    uint64_t before;
    do {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns,
                      "callers are still sent to the node without a device");
        before = requests_of(node);
        ep_test_load_wait_succeeded(load, CALLS_AFTER);
    } while (requests_of(node) != before);
}

static void expect_readyz(int code, const char *part)
{
    wait_for(f.cluster.nodes[DEVICE].probe_url, "/readyz?verbose", code, part);
}

static void check_only(void)
{
    expect_readyz(503, "1 of 1 devices lost: device 0: ");
    expect_problem("node node0 has lost 1 of 1 devices (0): it computes nothing");
    wait_avoided(DEVICE);
}

/* Its experts come on the others as they are called for. */
static void check_one(void)
{
    const uint64_t rows = rows_of(DEVICE);
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    expect_readyz(200, "1 of 3 devices lost: device 1: ");
    expect_problem("node node0 has lost 1 of 3 devices (1): its experts come on the others");
    const uint64_t wanted = is_full ? 10 : FAULT_LAYERS * FAULT_EXPERTS;
    for (uint64_t resident = 0; resident < wanted;) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "only %llu experts are loaded",
                      (unsigned long long)resident);
        ep_test_load_wait_succeeded(load, 1);
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, DEVICE);
        EP_TEST_CHECK(status->n_devices == 3 && status->devices[1]->lost_why[0] != 0 &&
                          status->experts_failed == 0,
                      "%s", status->last_error);
        EP_TEST_CHECK(
            status->devices[0]->weight_bytes > 0 && status->devices[2]->weight_bytes > 0 &&
                status->devices[0]->memory_bytes > 0 && status->devices[1]->memory_bytes == 0,
            "figures of the devices");
        for (size_t d = 0; is_full && d < status->n_devices; d++) {
            EP_TEST_CHECK(status->devices[d]->weight_bytes_max == FULL_BYTES &&
                              status->devices[d]->weight_bytes <= FULL_BYTES,
                          "device %zu holds %llu", d,
                          (unsigned long long)status->devices[d]->weight_bytes);
        }
        resident = 0;
        for (size_t l = 0; l < status->n_layers; l++) {
            resident += status->layers[l]->experts_resident;
        }
        expertd__v1__node_status_reply__free_unpacked(status, NULL);
    }
    wait_for(f.cluster.nodes[DEVICE].probe_url, "/metrics", 200,
             "expertd_device_lost{device=\"1\"} 1");
    wait_for(f.cluster.nodes[DEVICE].probe_url, "/metrics", 200,
             "expertd_device_weights_bytes{device=\"1\"} 0");
    if (is_full) {
        EP_TEST_CHECK(ep_test_metric(&f.cluster.nodes[DEVICE], "expertd_expert_evictions_total") >
                          0,
                      "nothing had to go");
    }
    do { /* callers may have taken it for slow: then they try it now and then */
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "the node computes no more");
        ep_test_load_wait_succeeded(load, CALLS_AFTER);
    } while (rows_of(DEVICE) <= rows);
}

/* Each device has a part of each layer before one is lost. */
static void expect_spread(void)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, DEVICE);
    EP_TEST_CHECK(status->n_devices == devices && status->inflight_tokens == devices * 1024u,
                  "%zu devices, %llu", status->n_devices,
                  (unsigned long long)status->inflight_tokens);
    for (uint32_t d = 0; d < devices; d++) {
        EP_TEST_CHECK(status->devices[d]->weight_bytes * devices >=
                          status->weight_bytes - status->weight_bytes / 4,
                      "device %u holds %llu of %llu", d,
                      (unsigned long long)status->devices[d]->weight_bytes,
                      (unsigned long long)status->weight_bytes);
    }
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
}

static void lose_under_load(void)
{
    fault_device device;
    ep_test_load_counts before, after;
    fault_device_init(&device, dir, "expertd-ascend", devices, is_full ? FULL_BYTES : 0);
    const char *const programs[] = {device.program, NULL};
    const ep_test_cluster_options options = {
        .nodes_count = 2, .copies = 2, .expert_map = map, .node_programs = programs};
    fault_fixture_init_cluster(&f, &options);
    f.client = ep_test_cluster_client(&f.cluster, any_numerics);
    expect_spread();
    start_load();
    /* a busy host may have callers shun it at first */
    for (int i = 0; i < WAITS_MAX && rows_of(DEVICE) == 0; i++) {
        ep_test_load_wait_succeeded(load, CALLS_BEFORE);
    }
    const uint64_t device_rows = rows_of(DEVICE);
    EP_TEST_CHECK(device_rows > 0, "the device computed nothing");
    const uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f.cluster, DEVICE);
    ep_test_load_read(load, &before);
    fault_device_lose(&device, devices == 1 ? "" : ".1");
    const uint64_t cpu_rows = rows_of(CPU);
    ep_test_load_wait_succeeded(load, FAULT_FINISHED_AFTER_MIN);
    EP_TEST_CHECK(rows_of(CPU) > cpu_rows, "the CPU took nothing over");
    ep_test_cluster_expect_alive(&f.cluster);
    if (devices == 1) {
        check_only();
    } else {
        check_one();
    }
    expect_told();
    ep_test_load_stop(load, &after);
    fault_report("a lost device", before.in_flight, victim_in_flight,
                 after.succeeded - before.succeeded);
    printf(
        "%llu calls failed, %llu frames were sent again; %llu rows by the device before its loss\n",
        (unsigned long long)after.failed,
        (unsigned long long)(after.rerouted_frames - before.rerouted_frames),
        (unsigned long long)device_rows);
    EP_TEST_CHECK(after.failed == 0, "%llu calls failed", (unsigned long long)after.failed);
    EP_TEST_CHECK(after.rerouted_frames + after.hedged_frames >
                      before.rerouted_frames + before.hedged_frames,
                  "no call noticed: the device held none of them");
}

/* Each expert is on one of two nodes, until one of these has no device: then all are on the
 * other. */
static void lose_and_replace(void)
{
    fault_device device, other;
    ep_test_load_counts counts;
    fault_device_init(&device, dir, "expertd-ascend-0", 1, 0);
    fault_device_init(&other, dir, "expertd-ascend-1", 1, 0);
    const char *const programs[] = {device.program, other.program};
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    const ep_test_cluster_options options = {
        .nodes_count = 2, .copies = 1, .node_programs = programs};
    fault_fixture_init_cluster(&f, &options);
    f.client = ep_test_cluster_client(&f.cluster, any_numerics);
    fault_device_lose(&device, ""); /* nobody uses it: it is looked after */
    for (bool is_moved = false; !is_moved;) {
        char *output;
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns,
                      "the experts of the lost device are not given to the other node");
        EP_TEST_CHECK(ep_test_cluster_ctl(&f.cluster, &output, "table --model demo") == 0, "%s",
                      output);
        is_moved = strstr(output, "node0") == NULL && strstr(output, "none") == NULL;
        free(output);
    }
    const uint64_t before = requests_of(1);
    start_load();
    ep_test_load_wait_succeeded(load, CALLS_AFTER);
    ep_test_load_stop(load, &counts);
    EP_TEST_CHECK(requests_of(1) > before, "the other node computed nothing");
    expect_problem("node node0 has lost 1 of 1 devices (0): it computes nothing");
}

int main(int argc, char **argv)
{
    EP_TEST_CHECK(argc == 2, "which kind is not said");
    is_full = strcmp(argv[1], "full") == 0;
    devices = is_full || strcmp(argv[1], "one") == 0 ? 3 : 1;
    ep_test_dir_new(dir);
    if (strcmp(argv[1], "replace") == 0) {
        lose_and_replace();
    } else {
        lose_under_load();
    }
    fault_fixture_fini(&f);
    return 0;
}
