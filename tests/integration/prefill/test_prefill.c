/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefill over real daemons with small windows and chunks: callers with batches of very unequal
 * size, among them empty ones, and batches whose tokens all want the same experts, side by side;
 * each result is the oracle's, nothing stalls, every buffer returns. The bytes sent are those of
 * each row once per node.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_checkpoint.h"
#include "support/cluster.h"
#include "support/load.h"

enum { HIDDEN = 256, EXPERTS = 6, TOP_K = 3, NODES = 3, CALLERS = 6, CALLS = 6 };
/* Fixed part, protobuf header, gaps of one frame. */
#define FRAME_REST_BYTES 640

#define DEVICE(id, experts) "{\"device_id\":" #id ",\"device_expert\":[" experts "]}"
/* Expert e is on node e / 2. */
static const char map[] =
    "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":3,\"device_list\":"
    "[" DEVICE(0, "0,1") "," DEVICE(1, "2,3") "," DEVICE(2, "4,5") "]}]}";

typedef struct caller {
    pthread_t thread;
    ep_client *client;
    ep_test_batch batch;
    uint32_t tokens;
    const int32_t *allowed; /* NULL: all experts */
} caller;

static const int32_t same[TOP_K] = {5, 0, 1};
static const int32_t one_node[TOP_K + 1] = {2, 3, 4, 5};

static void configure(ep_client_config *config)
{
    config->prefill_window_tokens = 64;
    config->chunk_bytes_max = 16384;
}

static uint64_t rows_once_per_node(const ep_test_batch *batch)
{
    uint64_t rows = 0;
    for (uint32_t t = 0; t < batch->tokens; t++) {
        bool to[NODES] = {false};
        for (uint32_t k = 0; k < batch->top_k; k++) {
            uint32_t node = (uint32_t)batch->ids[t * batch->top_k + k] / 2;
            rows += !to[node];
            to[node] = true;
        }
    }
    return rows;
}

static void call(const caller *c)
{
    static const uint16_t nothing;
    uint16_t *y = NULL;
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    size_t bytes = (size_t)c->tokens * HIDDEN * sizeof(*y);
    ep_test_batch_args(&c->batch, &args);
    args.mode = EP_MOE_PREFILL;
    y = malloc(bytes + 1);
    EP_TEST_CHECK(y != NULL, "no memory");
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, c->tokens, HIDDEN);
    EP_TEST_CHECK(ep_moe_forward(c->client, &args, &out, &result) == EP_OK, "%u tokens: %s",
                  c->tokens, result.error.text);
    EP_TEST_CHECK(memcmp(y, c->tokens > 0 ? c->batch.expected : &nothing, bytes) == 0,
                  "%u tokens: not the oracle's bits", c->tokens);
    uint64_t rows = rows_once_per_node(&c->batch);
    uint64_t least = rows * HIDDEN * 2 + (uint64_t)c->tokens * TOP_K * 8;
    EP_TEST_CHECK(result.bytes_sent >= least &&
                      result.bytes_sent <= least + (uint64_t)result.frames * FRAME_REST_BYTES,
                  "%u tokens: %llu bytes sent in %u frames, %llu are each row once per node",
                  c->tokens, (unsigned long long)result.bytes_sent, result.frames,
                  (unsigned long long)least);
    free(y);
}

static void *run(void *arg)
{
    for (int i = 0; i < CALLS; i++) {
        call(arg);
    }
    return NULL;
}

int main(void)
{
    static struct ref_checkpoint checkpoint;
    struct ref_layer reference;
    char path[EP_TEST_PATH_BYTES];
    ep_test_cluster cluster;
    caller callers[CALLERS] = {{.tokens = 0},
                               {.tokens = 1},
                               {.tokens = 37},
                               {.tokens = 1500},
                               {.tokens = 500, .allowed = same},
                               {.tokens = 300, .allowed = one_node}};
    ep_fixture_config fixture = ep_fixture_default();
    fixture.layers = 1;
    fixture.hidden = HIDDEN;
    fixture.experts = EXPERTS;
    fixture.top_k = TOP_K;
    ep_test_checkpoint_new(&fixture, path);
    ref_checkpoint_open(path, &checkpoint);
    ref_layer_load(&checkpoint, 0, &reference);
    for (uint32_t i = 0; i < CALLERS; i++) {
        uint32_t allowed = callers[i].allowed == same ? TOP_K : TOP_K + 1;
        ep_test_batch_init(&callers[i].batch, &reference, "m", 0, callers[i].tokens, TOP_K, 7 + i,
                           callers[i].allowed, allowed);
    }
    ref_layer_free(&reference);
    ref_checkpoint_close(&checkpoint);
    const ep_test_model model = {"m", path};
    const ep_test_cluster_options options = {
        .nodes_count = NODES, .models = &model, .models_count = 1, .expert_map = map};
    ep_test_cluster_start(&cluster, &options);
    ep_client *client = ep_test_cluster_client(&cluster, configure);
    ep_client_stats before = {.struct_bytes = sizeof(before)},
                    after = {.struct_bytes = sizeof(after)};
    ep_client_read_stats(client, &before);
    for (uint32_t i = 0; i < CALLERS; i++) {
        callers[i].client = client;
        call(&callers[i]); /* alone */
    }
    for (uint32_t i = 0; i < CALLERS; i++) {
        EP_TEST_CHECK(pthread_create(&callers[i].thread, NULL, run, &callers[i]) == 0, "no thread");
    }
    for (uint32_t i = 0; i < CALLERS; i++) {
        pthread_join(callers[i].thread, NULL);
    }
    ep_client_read_stats(client, &after);
    /* What is lent at rest: the nodes' Hellos, and a request that the network has not quite let go
     * of. */
    EP_TEST_CHECK(after.buffer_bytes_lent <= before.buffer_bytes_lent + (256u << 10),
                  "%llu bytes of buffers are lent, %llu before",
                  (unsigned long long)after.buffer_bytes_lent,
                  (unsigned long long)before.buffer_bytes_lent);
    EP_TEST_CHECK(after.buffer_bytes_peak > after.buffer_bytes_lent &&
                      after.buffer_bytes_peak <= (64u << 20),
                  "peak %llu", (unsigned long long)after.buffer_bytes_peak);
    printf("%d callers, %d calls each: the oracle's bits; peak of buffers %llu bytes\n", CALLERS,
           CALLS + 1, (unsigned long long)after.buffer_bytes_peak);
    for (uint32_t n = 0; n < NODES; n++) {
        double peak = ep_test_metric(&cluster.nodes[n], "expertd_buffer_bytes_peak");
        double lent = ep_test_metric(&cluster.nodes[n], "expertd_buffer_bytes");
        EP_TEST_CHECK(lent >= 0 && peak > lent && peak <= (64u << 20),
                      "node %u: peak %.0f, %.0f lent", n, peak, lent);
    }
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
    for (uint32_t i = 0; i < CALLERS; i++) {
        ep_test_batch_fini(&callers[i].batch);
    }
    ep_test_dir_remove(path);
    return 0;
}
