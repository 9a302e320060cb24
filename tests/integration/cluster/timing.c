/* SPDX-License-Identifier: Apache-2.0 */
/* Where a call's time went, from real nodes: the parts fit into the whole, the sums per node grow
 * by the frames, and without the wish nothing is told. expertctl bench prints it. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/cluster.h"
#include "support/load.h"

enum { NODES = 2, TOKENS = 64, TOP_K = 2, CALLS = 20 };

static ep_moe_result call_once(ep_client *client, const ep_test_batch *batch, uint16_t *y,
                               bool timed)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, batch->tokens, batch->hidden);
    ep_test_batch_args(batch, &args);
    args.want_timing = timed;
    ep_err err = ep_moe_forward(client, &args, &out, &result);
    EP_TEST_CHECK(err == EP_OK, "%s", result.error.text);
    EP_TEST_CHECK(memcmp(y, batch->expected, (size_t)batch->tokens * batch->hidden * 2) == 0,
                  "wrong bits");
    return result;
}

static uint64_t frames_timed(ep_client *client)
{
    uint64_t frames = 0;
    ep_client_node_waits w = {.struct_bytes = sizeof(w)};
    for (uint32_t i = 0; ep_client_read_waits(client, i, &w) == EP_OK; i++) {
        EP_TEST_CHECK(w.node[0] != 0, "node %u has no name", i);
        EP_TEST_CHECK(w.wire_us <= w.wait_us && w.compute_us <= w.wait_us + w.frames,
                      "node %s: parts above the whole", w.node);
        EP_TEST_CHECK(w.wait_max_us <= w.wait_us, "node %s: the longest wait is above the sum",
                      w.node);
        frames += w.frames;
    }
    return frames;
}

static void check_calls(ep_client *client, const ep_test_batch *batch)
{
    uint16_t *y = malloc((size_t)batch->tokens * batch->hidden * 2);
    ep_moe_result plain = call_once(client, batch, y, false);
    EP_TEST_CHECK(
        plain.pack_us + plain.wire_us + plain.queue_us + plain.compute_us + plain.combine_us == 0,
        "times without the wish");
    EP_TEST_CHECK(frames_timed(client) == 0, "frames counted without the wish");
    uint64_t frames = 0;
    uint64_t named_us = 0;
    for (int i = 0; i < CALLS; i++) {
        ep_moe_result r = call_once(client, batch, y, true);
        frames += r.frames;
        named_us += r.wire_us + r.compute_us + r.queue_us;
        EP_TEST_CHECK(r.wire_us + r.queue_us + r.compute_us <= r.total_us + 3,
                      "wire %llu + queue %llu + compute %llu, total %llu",
                      (unsigned long long)r.wire_us, (unsigned long long)r.queue_us,
                      (unsigned long long)r.compute_us, (unsigned long long)r.total_us);
        EP_TEST_CHECK(r.pack_us <= r.total_us && r.combine_us <= r.total_us,
                      "a part above the whole");
    }
    EP_TEST_CHECK(named_us > 0, "%d calls took no time at all", CALLS);
    EP_TEST_CHECK(frames_timed(client) == frames, "%llu frames timed, %llu sent",
                  (unsigned long long)frames_timed(client), (unsigned long long)frames);
    free(y);
}

static void check_bench(ep_test_cluster *cluster)
{
    char *output = NULL;
    int code = ep_test_cluster_ctl(cluster, &output,
                                   "bench --model demo --layer 0 --tokens 8 --seconds 0.2 -o json");
    EP_TEST_CHECK(code == 0, "bench ended with %d: %s", code, output);
    json_t *root = json_loads(output, 0, NULL);
    json_t *mean = json_object_get(root, "mean_of_a_call");
    EP_TEST_CHECK(json_real_value(json_object_get(mean, "total_us")) > 0.0,
                  "no mean of a call in: %s", output);
    EP_TEST_CHECK(json_array_size(json_object_get(root, "nodes")) == NODES, "not %d nodes in: %s",
                  NODES, output);
    json_decref(root);
    free(output);
}

/* All nodes are on the caller's own host: nothing crosses, so auto asks them straight. */
static void check_bench_auto(ep_test_cluster *cluster)
{
    char *output = NULL;
    int code = ep_test_cluster_ctl(
        cluster, &output,
        "bench --model demo --layer 0 --tokens 8 --seconds 0.2 --comm-alg auto -o json");
    EP_TEST_CHECK(code == 0, "bench ended with %d: %s", code, output);
    json_t *root = json_loads(output, 0, NULL);
    const json_t *choice = json_object_get(root, "comm_alg_auto");
    const json_int_t calls = json_integer_value(json_object_get(root, "calls"));
    const json_int_t alone =
        json_integer_value(json_object_get(json_object_get(choice, "calls_by_reason"), "alone"));
    EP_TEST_CHECK(calls > 0 && alone == calls &&
                      json_integer_value(json_object_get(choice, "hierarchy_calls")) == 0,
                  "not all calls go straight: %s", output);
    json_decref(root);
    free(output);
}

int main(void)
{
    char model_path[EP_TEST_PATH_BYTES];
    ep_fixture_config config = ep_fixture_default();
    ep_test_batch batch;
    ep_test_cluster cluster;
    ep_test_checkpoint_new(&config, model_path);
    ep_test_batches_init(&batch, 1, model_path, "demo", TOKENS, 0, TOP_K, 3);
    const ep_test_model model = {"demo", model_path};
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){
                                        .nodes_count = NODES, .models = &model, .models_count = 1});
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    check_calls(client, &batch);
    check_bench(&cluster);
    check_bench_auto(&cluster);
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
    ep_test_batch_fini(&batch);
    ep_test_dir_remove(model_path);
    return 0;
}
