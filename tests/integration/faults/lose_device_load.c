/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service of one node on an (emulated) NPU and one on the CPU, each with all experts, and a client that takes rows
 * of both: when the device is lost with many calls in flight none fails, and no result is further off than the device's
 * roundings.
 */
#include <math.h>
#include <stdio.h>

#include "base/check.h"
#include "base/numeric.h"
#include "fault_device.h"
#include "fault_fixture.h"

enum { CALLS_IN_FLIGHT = 64, WAITS_MAX = 100, DEVICE = 0, CPU = 1 };

#define BOTH                                                                                                          \
    "[{\"device_id\":0,\"device_expert\":[0,1,2,3,4,5,6,7]},{\"device_id\":1,\"device_expert\":[0,1,2,3,4,5,6,7]}]"
static const char map[] =
    "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":" BOTH
    "},{\"layer_id\":1,\"device_count\":2,\"device_list\":" BOTH "}]}";

static fault_fixture f;

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

static uint64_t rows_of(uint32_t node)
{
    Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(&f.cluster, node);
    const uint64_t rows = status->rows_served;
    expertd__v1__node_status_reply__free_unpacked(status, NULL);
    return rows;
}

static void any_numerics(ep_client_config *config)
{
    config->numerics = "any";
}

int main(void)
{
    char dir[EP_TEST_PATH_BYTES];
    fault_device device;
    ep_test_load_counts before;
    ep_test_load_counts after;
    ep_test_dir_new(dir);
    fault_device_init(&device, dir);
    const char *const programs[] = {device.program, NULL};
    const ep_test_cluster_options options = {
        .nodes_count = 2, .copies = 2, .expert_map = map, .node_programs = programs};
    fault_fixture_init_cluster(&f, &options);
    f.client = ep_test_cluster_client(&f.cluster, any_numerics);
    ep_test_load *load = ep_test_load_start(&(ep_test_load_config){.client = f.client,
                                                                  .batches = f.all,
                                                                  .batches_count = FAULT_LAYERS * FAULT_BATCHES,
                                                                  .calls_in_flight = CALLS_IN_FLIGHT,
                                                                  .expect = expect_near});
    for (int i = 0; i < WAITS_MAX && rows_of(DEVICE) == 0; i++) { /* a busy host may have callers shun it at first */
        ep_test_load_wait_succeeded(load, 200);
    }
    const uint64_t device_rows = rows_of(DEVICE);
    EP_TEST_CHECK(device_rows > 0, "the device computed nothing");

    const uint64_t victim_in_flight = ep_test_cluster_wait_in_flight(&f.cluster, DEVICE);
    ep_test_load_read(load, &before);
    fault_device_lose(&device);
    const uint64_t cpu_rows = rows_of(CPU);
    ep_test_load_wait_succeeded(load, FAULT_FINISHED_AFTER_MIN);

    EP_TEST_CHECK(rows_of(CPU) > cpu_rows, "the CPU took nothing over");
    ep_test_cluster_expect_alive(&f.cluster);
    ep_test_load_stop(load, &after);
    fault_report("a lost device", before.in_flight, victim_in_flight, after.succeeded - before.succeeded);
    printf("%llu calls failed, %llu frames were sent again to the CPU; %llu rows by the device before its loss\n",
           (unsigned long long)after.failed, (unsigned long long)(after.rerouted_frames - before.rerouted_frames),
           (unsigned long long)device_rows);
    EP_TEST_CHECK(after.failed == 0, "%llu calls failed", (unsigned long long)after.failed);
    EP_TEST_CHECK(after.rerouted_frames + after.hedged_frames > before.rerouted_frames + before.hedged_frames,
                  "no call noticed: the device held none of them");
    fault_fixture_fini(&f);
    return 0;
}
