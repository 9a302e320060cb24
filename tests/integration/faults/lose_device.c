/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service of one node on (emulated) NPUs and one on the CPU, each with all experts, and a client that takes rows of
 * both: when a device is lost under load no call fails, no result is further off than the device's roundings, its node
 * lives on and says what happened.
 *
 *   only     its one device: it holds nothing any more, so callers are no longer sent there
 *   one      of three: the others take its experts over
 *   full     the same where the others have no room for all: experts come in the place of others from then on
 *   replace  two nodes with one device each share the experts; the other one is given those of the lost device
 */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/numeric.h"
#include "fault_fixture.h"

enum { CALLERS = 8, CALLS_BEFORE = 20, CALLS_AFTER = 20, WAITS_MAX = 100, DEVICE = 0, CPU = 1 };

/* Weights that each of three devices may hold, kind "full": six of the node's sixteen experts. */
#define FULL_BYTES (6 * 3 * FAULT_HIDDEN * FAULT_INNER * 2)

#define BOTH                                                                                                          \
    "[{\"device_id\":0,\"device_expert\":[0,1,2,3,4,5,6,7]},{\"device_id\":1,\"device_expert\":[0,1,2,3,4,5,6,7]}]"
static const char map[] =
    "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":" BOTH
    "},{\"layer_id\":1,\"device_count\":2,\"device_list\":" BOTH "}]}";

static fault_fixture f;
static char dir[EP_TEST_PATH_BYTES];
static char node_programs[2][EP_TEST_PATH_BYTES + 32];
static char lost_file[EP_TEST_PATH_BYTES + 32];
static uint32_t devices = 1;
static bool is_full;
static _Atomic uint64_t calls_done;
static _Atomic bool ending;

/* expertd as a node on NPUs starts it; the first one's may be lost. */
static void write_program(uint32_t node)
{
    char *path = node_programs[node];
    snprintf(path, sizeof(node_programs[node]), "%s/expertd-ascend-%u", dir, node);
    snprintf(lost_file, sizeof(lost_file), "%s/lost", dir);
    FILE *file = fopen(path, "w");
    EP_TEST_CHECK(file != NULL, "%s cannot be written", path);
    fprintf(file,
            "#!/bin/sh\nASCEND_HOME_PATH=%s EP_CANN_DEVICES=%u EP_CANN_LOST_FILE=%s exec %s \"$@\" --backend=ascend "
            "--weight-bytes-max=%d\n",
            EP_TEST_CANN, devices, node == DEVICE ? lost_file : "", ep_test_expertd, is_full ? FULL_BYTES : 0);
    EP_TEST_CHECK(fclose(file) == 0 && chmod(path, 0700) == 0, "%s cannot be written", path);
}

/*
 * The device rounds to bf16 (2^-8) at five steps where the oracle's sums are f32, and errors of the first are carried
 * on by the next; the whole token is looked at, so single values that cancel do not count.
 */
static void expect_near(const ep_test_batch *batch, const uint16_t *y)
{
    for (uint32_t t = 0; t < batch->tokens; t++) {
        double error = 0.0;
        double size = 0.0;
        for (uint32_t h = 0; h < batch->hidden; h++) {
            const size_t i = (size_t)t * batch->hidden + h;
            const double want = (double)ep_bf16_to_f32(batch->expected[i]);
            const double difference = (double)ep_bf16_to_f32(y[i]) - want;
            error += difference * difference;
            size += want * want;
        }
        EP_TEST_CHECK(sqrt(error) <= 0x1p-5 * sqrt(size), "token %u is off by %g of %g", t, sqrt(error), sqrt(size));
    }
}

static void *call_on(void *arg)
{
    uint64_t turn = (uint64_t)(uintptr_t)arg;
    while (!atomic_load(&ending)) {
        const ep_test_batch *batch = &f.all[turn++ % (FAULT_LAYERS * FAULT_BATCHES)];
        ep_moe_args args;
        ep_moe_result result = {.struct_bytes = sizeof(result)};
        uint16_t *y = calloc((size_t)batch->tokens * batch->hidden, sizeof(*y));
        EP_TEST_CHECK(y != NULL, "no memory");
        ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, batch->tokens, batch->hidden);
        ep_test_batch_args(batch, &args);
        const ep_err err = ep_moe_forward(f.client, &args, &out, &result);
        EP_TEST_CHECK(err == EP_OK, "a call failed: %s: %s", ep_err_name(err), result.error.text);
        expect_near(batch, y);
        atomic_fetch_add(&calls_done, 1);
        free(y);
    }
    return NULL;
}

static uint64_t rows_of(uint32_t node)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, node);
    const uint64_t rows = status->rows_served;
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
    return rows;
}

static void wait_calls(uint64_t more)
{
    const uint64_t target = atomic_load(&calls_done) + more;
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    while (atomic_load(&calls_done) < target) {
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "calls do not end");
        (void)rows_of(CPU); /* a round trip between two looks */
    }
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
    EP_TEST_CHECK(line != NULL && strstr(line, "code 507010") != NULL && strstr(line, "npu-smi") != NULL, "%s", text);
    EP_TEST_CHECK(strstr(line + 1, "event=device-lost") == NULL, "told twice: %s", text);
    free(text);
}

static void lose(const char *suffix)
{
    char path[sizeof(lost_file) + 8];
    snprintf(path, sizeof(path), "%s%s", lost_file, suffix);
    const int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    EP_TEST_CHECK(fd >= 0 && close(fd) == 0, "%s cannot be made", path);
}

/* What has the part, sooner or later. */
static void wait_for(const char *url, const char *path, int code, const char *part)
{
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    for (;;) {
        char *body = NULL;
        const int got = ep_test_http_get(url, path, &body);
        const bool is_there = got == code && strstr(body, part) != NULL;
        EP_TEST_CHECK(is_there || ep_clock_now_ns() < end_ns, "%s%s: %d, no '%s' in %s", url, path, got, part, body);
        free(body);
        if (is_there) {
            return;
        }
    }
}

/* Status, doctor and the coordinator's metrics speak of it; the metrics wait for the heartbeat that tells. */
static void expect_problem(const char *text)
{
    const char *const status[] = {"status", NULL};
    const char *const doctor[] = {"doctor", NULL};
    char *output;
    wait_for(f.cluster.coordinator.probe_url, "/metrics",  200,
             "expertd_coordinator_problems{code=\"device-lost\",severity=\"error\"} 1");
    EP_TEST_CHECK(ep_test_cluster_ctl(&f.cluster, status, &output) != 0 && strstr(output, text) != NULL, "%s", output);
    free(output);
    EP_TEST_CHECK(ep_test_cluster_ctl(&f.cluster, doctor, &output) != 0 && strstr(output, text) != NULL &&
                      strstr(output, "507010") != NULL && strstr(output, "npu-smi") != NULL,
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
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "callers are still sent to the node without a device");
        before = requests_of(node);
        wait_calls(CALLS_AFTER);
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
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "only %llu experts are loaded", (unsigned long long)resident);
        wait_calls(1);
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, DEVICE);
        EP_TEST_CHECK(status->n_devices == 3 && status->devices[1]->lost_why[0] != 0 && status->experts_failed == 0,
                      "%s", status->last_error);
        EP_TEST_CHECK(status->devices[0]->weight_bytes > 0 && status->devices[2]->weight_bytes > 0 &&
                          status->devices[0]->memory_bytes > 0 && status->devices[1]->memory_bytes == 0,
                      "figures of the devices");
        for (size_t d = 0; is_full && d < status->n_devices; d++) {
            EP_TEST_CHECK(status->devices[d]->weight_bytes_max == FULL_BYTES &&
                              status->devices[d]->weight_bytes <= FULL_BYTES,
                          "device %zu holds %llu", d, (unsigned long long)status->devices[d]->weight_bytes);
        }
        resident = 0;
        for (size_t l = 0; l < status->n_layers; l++) {
            resident += status->layers[l]->experts_resident;
        }
        expertd__v1__node_status_reply__free_unpacked(status, NULL);
    }
    wait_for(f.cluster.nodes[DEVICE].probe_url, "/metrics", 200, "expertd_device_lost{device=\"1\"} 1");
    wait_for(f.cluster.nodes[DEVICE].probe_url, "/metrics", 200, "expertd_device_weights_bytes{device=\"1\"} 0");
    if (is_full) {
        char *metrics = NULL;
        EP_TEST_CHECK(ep_test_http_get(f.cluster.nodes[DEVICE].probe_url, "/metrics", &metrics) == 200 &&
                          strstr(metrics, "\nexpertd_expert_evictions_total 0\n") == NULL &&
                          strstr(metrics, "\nexpertd_expert_evictions_total ") != NULL,
                      "nothing had to go: %s", metrics);
        free(metrics);
    }
    wait_calls(CALLS_AFTER);
    EP_TEST_CHECK(rows_of(DEVICE) > rows, "the node computes no more");
}

/* Each device has a part of each layer before one is lost. */
static void expect_spread(void)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, DEVICE);
    EP_TEST_CHECK(status->n_devices == devices && status->inflight_tokens == devices * 1024u, "%zu devices, %llu",
                  status->n_devices, (unsigned long long)status->inflight_tokens);
    for (uint32_t d = 0; d < devices; d++) {
        EP_TEST_CHECK(status->devices[d]->weight_bytes * devices >= status->weight_bytes - status->weight_bytes / 4,
                      "device %u holds %llu of %llu", d, (unsigned long long)status->devices[d]->weight_bytes,
                      (unsigned long long)status->weight_bytes);
    }
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
}

static void lose_under_load(void)
{
    const char *const programs[] = {node_programs[DEVICE], NULL};
    pthread_t callers[CALLERS];
    write_program(DEVICE);
    const ep_test_cluster_options options = {
        .nodes_count = 2, .copies = 2, .expert_map = map, .node_programs = programs};
    fault_fixture_init_cluster(&f, &options);
    f.client = ep_test_cluster_client(&f.cluster, any_numerics);
    expect_spread();
    for (uintptr_t c = 0; c < CALLERS; c++) {
        EP_TEST_CHECK(pthread_create(&callers[c], NULL, call_on, (void *)c) == 0, "no thread");
    }
    for (int i = 0; i < WAITS_MAX && rows_of(DEVICE) == 0; i++) { /* a busy host may have callers shun it at first */
        wait_calls(CALLS_BEFORE);
    }
    const uint64_t device_rows = rows_of(DEVICE);
    EP_TEST_CHECK(device_rows > 0, "the device computed nothing");
    (void)ep_test_cluster_wait_in_flight(&f.cluster, DEVICE);
    lose(devices == 1 ? "" : ".1");
    const uint64_t cpu_rows = rows_of(CPU);
    wait_calls(CALLS_AFTER);
    EP_TEST_CHECK(rows_of(CPU) > cpu_rows, "the CPU took nothing over");
    ep_test_cluster_expect_alive(&f.cluster);
    if (devices == 1) {
        check_only();
    } else {
        check_one();
    }
    expect_told();
    atomic_store(&ending, true);
    for (int c = 0; c < CALLERS; c++) {
        pthread_join(callers[c], NULL);
    }
    printf("%llu calls, none failed; %llu rows by the device before its loss\n",
           (unsigned long long)atomic_load(&calls_done), (unsigned long long)device_rows);
}

/* Each expert is on one of two nodes, until one of these has no device: then all are on the other. */
static void lose_and_replace(void)
{
    const char *const programs[] = {node_programs[0], node_programs[1]};
    const char *const table[] = {"table", "--model", "demo", NULL};
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    write_program(0);
    write_program(1);
    const ep_test_cluster_options options = {.nodes_count = 2, .copies = 1, .node_programs = programs};
    fault_fixture_init_cluster(&f, &options);
    f.client = ep_test_cluster_client(&f.cluster, any_numerics);
    lose(""); /* nobody uses it: it is looked after */
    for (bool is_moved = false; !is_moved;) {
        char *output;
        EP_TEST_CHECK(ep_clock_now_ns() < end_ns, "the experts of the lost device are not given to the other node");
        EP_TEST_CHECK(ep_test_cluster_ctl(&f.cluster, table, &output) == 0, "%s", output);
        is_moved = strstr(output, "node0") == NULL && strstr(output, "none") == NULL;
        free(output);
    }
    pthread_t caller;
    const uint64_t before = requests_of(1);
    EP_TEST_CHECK(pthread_create(&caller, NULL, call_on, NULL) == 0, "no thread");
    wait_calls(CALLS_AFTER);
    atomic_store(&ending, true);
    pthread_join(caller, NULL);
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
