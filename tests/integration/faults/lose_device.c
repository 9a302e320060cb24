/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service of one node on an (emulated) NPU and one on the CPU, each with all experts, and a client that takes rows
 * of both: when the device is lost under load no call fails, no result is further off than the device's roundings, its
 * node lives on and says what happened.
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

#define BOTH                                                                                                          \
    "[{\"device_id\":0,\"device_expert\":[0,1,2,3,4,5,6,7]},{\"device_id\":1,\"device_expert\":[0,1,2,3,4,5,6,7]}]"
static const char map[] =
    "{\"moe_layer_count\":2,\"layer_list\":[{\"layer_id\":0,\"device_count\":2,\"device_list\":" BOTH
    "},{\"layer_id\":1,\"device_count\":2,\"device_list\":" BOTH "}]}";

static fault_fixture f;
static char dir[EP_TEST_PATH_BYTES];
static char node_program[EP_TEST_PATH_BYTES + 32];
static char lost_file[EP_TEST_PATH_BYTES + 32];
static _Atomic uint64_t calls_done;
static _Atomic bool ending;

/* expertd as the first node starts it. */
static void write_program(void)
{
    snprintf(node_program, sizeof(node_program), "%s/expertd-ascend", dir);
    snprintf(lost_file, sizeof(lost_file), "%s/lost", dir);
    FILE *file = fopen(node_program, "w");
    EP_TEST_CHECK(file != NULL, "%s cannot be written", node_program);
    fprintf(file, "#!/bin/sh\nASCEND_HOME_PATH=%s EP_CANN_LOST_FILE=%s exec %s \"$@\" --backend=ascend\n",
            EP_TEST_CANN, lost_file, ep_test_expertd);
    EP_TEST_CHECK(fclose(file) == 0 && chmod(node_program, 0700) == 0, "%s cannot be written", node_program);
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
        free(y);
        atomic_fetch_add(&calls_done, 1);
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

int main(void)
{
    const char *const programs[] = {node_program, NULL};
    pthread_t callers[CALLERS];
    ep_test_dir_new(dir);
    write_program();
    const ep_test_cluster_options options = {
        .nodes_count = 2, .copies = 2, .expert_map = map, .node_programs = programs};
    fault_fixture_init_cluster(&f, &options);
    f.client = ep_test_cluster_client(&f.cluster, any_numerics);
    for (uintptr_t c = 0; c < CALLERS; c++) {
        EP_TEST_CHECK(pthread_create(&callers[c], NULL, call_on, (void *)c) == 0, "no thread");
    }
    for (int i = 0; i < WAITS_MAX && rows_of(DEVICE) == 0; i++) { /* a busy host may have callers shun it at first */
        wait_calls(CALLS_BEFORE);
    }
    const uint64_t device_rows = rows_of(DEVICE);
    EP_TEST_CHECK(device_rows > 0, "the device computed nothing");
    (void)ep_test_cluster_wait_in_flight(&f.cluster, DEVICE);
    const int fd = open(lost_file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    EP_TEST_CHECK(fd >= 0 && close(fd) == 0, "%s cannot be made", lost_file);
    const uint64_t cpu_rows = rows_of(CPU);
    wait_calls(CALLS_AFTER);
    EP_TEST_CHECK(rows_of(CPU) > cpu_rows, "the CPU took nothing over");
    ep_test_cluster_expect_alive(&f.cluster);
    expect_told();
    atomic_store(&ending, true);
    for (int c = 0; c < CALLERS; c++) {
        pthread_join(callers[c], NULL);
    }
    printf("%llu calls, none failed; %llu rows by the device before its loss\n",
           (unsigned long long)atomic_load(&calls_done), (unsigned long long)device_rows);
    fault_fixture_fini(&f);
    return 0;
}
