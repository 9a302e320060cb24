/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prepared call whose mask changes between runs, as that of a captured graph with padding does:
 * rows of active tokens have the oracle's bits, those of padding are zero, and padding is not sent,
 * by what the client says and by what the nodes counted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/cluster.h"
#include "support/load.h"

enum {
    NODES = 2,
    TOKENS = 32,
    TOP_K = 2,
    HIDDEN = 1024,
    ROW_BYTES = HIDDEN * 2,
    FRAME_SPARE = 1024,
    TRIES_MAX = 20
};

static ep_test_cluster cluster;
static ep_test_batch batch;
static uint16_t y[TOKENS * HIDDEN];
static uint8_t mask[TOKENS * TOP_K];

/* Bytes that the nodes received. */
static double received(void)
{
    double sum = 0;
    for (uint32_t n = 0; n < NODES; n++) {
        sum +=
            ep_test_metric(&cluster.nodes[n], "expertd_lane_received_bytes_total{lane=\"shm\"}") +
            ep_test_metric(&cluster.nodes[n], "expertd_lane_received_bytes_total{lane=\"stream\"}");
    }
    return sum;
}

/* Each active row goes to one node or two, with a few bytes for each slot and frame. */
static void check_bytes(double sent, uint32_t active, const char *who)
{
    double least = (double)active * ROW_BYTES;
    double most =
        active == 0 ? 0 : (double)active * (NODES * ROW_BYTES + 16 * TOP_K) + NODES * FRAME_SPARE;
    EP_TEST_CHECK(sent >= least && sent <= most,
                  "%u active tokens: %s %.0f bytes, expected %.0f to %.0f", active, who, sent,
                  least, most);
}

/* False: for a quarter of a second nobody ran, and frames were sent again. */
static bool run_once(ep_call *call, uint32_t per_token, uint32_t active_bits)
{
    ep_error error;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    uint32_t active = (uint32_t)__builtin_popcount(active_bits);
    for (uint32_t t = 0; t < TOKENS; t++) {
        memset(mask + (size_t)t * per_token, (int)(active_bits >> t & 1u), per_token);
    }
    memset(y, 0xa5, sizeof(y));
    double before = received();
    EP_TEST_CHECK(ep_call_begin(call, TOKENS, &error) == EP_OK, "begin: %s", error.text);
    EP_TEST_CHECK(ep_call_finish(call, &result) == EP_OK, "finish: %s", result.error.text);
    double moved = received() - before;
    for (uint32_t t = 0; t < TOKENS; t++) {
        static const uint16_t zero[HIDDEN];
        bool is_active = (active_bits >> t & 1u) != 0;
        EP_TEST_CHECK(memcmp(y + (size_t)t * HIDDEN,
                             is_active ? batch.expected + (size_t)t * HIDDEN : zero,
                             ROW_BYTES) == 0,
                      "mask %08x: the row of token %u, which is %s, differs", active_bits, t,
                      is_active ? "active" : "padding");
    }
    if (result.rerouted_frames > 0) {
        return false;
    }
    check_bytes((double)result.bytes_sent, active, "the client says it sent");
    /* Pings and calls of the coordinator come on top. */
    EP_TEST_CHECK(moved <= (double)result.bytes_sent + NODES * 4 * FRAME_SPARE,
                  "%u active tokens: the nodes received %.0f bytes, the client says %llu", active,
                  moved, (unsigned long long)result.bytes_sent);
    EP_TEST_CHECK(moved >= (double)active * ROW_BYTES,
                  "%u active tokens: the nodes received %.0f bytes", active, moved);
    EP_TEST_CHECK(active > 0 || result.frames == 0, "%u frames without an active token",
                  result.frames);
    return true;
}

static void run(ep_call *call, uint32_t per_token, uint32_t active_bits)
{
    for (int tries = 1; !run_once(call, per_token, active_bits); tries++) {
        EP_TEST_CHECK(tries < TRIES_MAX, "mask %08x: frames are sent again and again", active_bits);
    }
}

static void check_call(ep_client *client, bool by_slot)
{
    static const uint32_t masks[] = {0xffffffffu, 0x0000ffffu, 0x00000001u, 0u,         0x80000000u,
                                     0x55555555u, 0u,          0xffffffffu, 0x00010000u};
    ep_error error;
    ep_moe_args args;
    ep_call *call = NULL;
    ep_test_batch_args(&batch, &args);
    args.mode = EP_MOE_DECODE;
    args.active_mask = by_slot ? ep_tensor_2d(mask, EP_DTYPE_BOOL, TOKENS, TOP_K)
                               : ep_tensor_1d(mask, EP_DTYPE_BOOL, TOKENS);
    memset(mask, 1, sizeof(mask));
    const ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, TOKENS, HIDDEN);
    EP_TEST_CHECK(ep_call_create(client, &args, &out, &call, &error) == EP_OK, "create: %s",
                  error.text);
    for (size_t i = 0; i < sizeof(masks) / sizeof(masks[0]); i++) {
        run(call, by_slot ? TOP_K : 1, masks[i]);
    }
    ep_call_destroy(call);
}

int main(void)
{
    char path[EP_TEST_PATH_BYTES];
    ep_fixture_config config = ep_fixture_default();
    config.layers = 1;
    config.hidden = HIDDEN;
    ep_test_checkpoint_new(&config, path);
    ep_test_batches_init(&batch, 1, path, "demo", TOKENS, 0, TOP_K, 3);
    const ep_test_model model = {"demo", path};
    ep_test_cluster_start(&cluster, &(ep_test_cluster_options){
                                        .nodes_count = NODES, .models = &model, .models_count = 1});
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    check_call(client, false);
    check_call(client, true);
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
    ep_test_batch_fini(&batch);
    ep_test_dir_remove(path);
    return 0;
}
