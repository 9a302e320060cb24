/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Five nodes that say they are on two hosts: with comm_alg hierarchy rows have the same bits as
 * with fullmesh and as the oracle's, decode and prefill; each row goes to each host once, counted
 * by ids and shapes; sums at nodes, and at hosts, equal the oracle's sums bit for bit and again the
 * second time; a node passes nothing on to another host, nor to whom the table does not name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "call/call.h"
#include "ref_checkpoint.h"
#include "reference_layer.h"
#include "support/cluster.h"
#include "support/forward_call.h"

enum {
    HIDDEN = 64,
    INNER = 32,
    EXPERTS = 10,
    TOP_K = 6,
    TOKENS_MAX = 600,
    NODES = 5,
    CALLS = 3,
    TRIES_MAX = 40,
    AUTO_CALLS_MAX = 3000,
    STARTS_MAX = 5,
    MADE_UP = 40
};

static const char *const hosts[NODES] = {"left", "left", "left", "right", "right"};
static const size_t node_of[EXPERTS] = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4};
static const size_t host_of[EXPERTS] = {0, 0, 0, 0, 0, 0, 1, 1, 1, 1};

#define DEVICE(id, ...) "{\"device_id\":" #id ",\"device_expert\":[" #__VA_ARGS__ "]}"
static const char map[] = "{\"moe_layer_count\":1,\"layer_list\":[{\"layer_id\":0,\"device_count\":"
                          "5,\"device_list\":[" DEVICE(0, 0, 1) "," DEVICE(1, 2, 3) "," DEVICE(
                              2, 4, 5) "," DEVICE(3, 6, 7) "," DEVICE(4, 8, 9) "]}]}";

static struct ref_checkpoint checkpoint;
static struct ref_layer layer;
static uint16_t x[TOKENS_MAX * HIDDEN];
static int32_t ids[TOKENS_MAX * TOP_K];
static float scales[TOKENS_MAX * TOP_K];

static void make_batch(void)
{
    uint64_t seed = 11;
    ep_test_fill_rows(7, EP_DTYPE_BF16, EP_ARRAY_COUNT(x), x);
    ep_test_fill_rows(8, EP_DTYPE_F32, EP_ARRAY_COUNT(scales), scales);
    for (uint32_t t = 0; t < TOKENS_MAX; t++) {
        int32_t pool[EXPERTS];
        for (int32_t e = 0; e < EXPERTS; e++) {
            pool[e] = e;
        }
        for (uint32_t k = 0; k < TOP_K; k++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            uint32_t pick = k + (uint32_t)((seed >> 33) % (EXPERTS - k));
            ids[t * TOP_K + k] = pool[pick];
            pool[pick] = pool[k];
        }
        if (t % 5 == 0) { /* tokens of one host */
            for (uint32_t k = 0; k < TOP_K; k++) {
                ids[t * TOP_K + k] = k < 4 ? 6 + (int32_t)k : -1;
            }
        }
    }
}

/* owner_of NULL: by rows. */
static void expected(uint32_t tokens, const size_t *owner_of, uint16_t *out)
{
    char text[REF_TEXT_BYTES];
    const struct ref_batch batch = {.tokens = tokens,
                                    .top_k = TOP_K,
                                    .x = x,
                                    .x_dtype = REF_BF16,
                                    .ids = ids,
                                    .ids_dtype = REF_I32,
                                    .scales = scales,
                                    .scales_dtype = REF_F32,
                                    .wire_dtype = REF_BF16,
                                    .out_dtype = REF_BF16,
                                    .owner_of = owner_of};
    EP_TEST_CHECK(ref_layer_forward(&layer, &batch, out, text) == REF_OK, "the oracle: %s", text);
}

typedef struct wish {
    ep_moe_mode mode;
    ep_moe_comm comm_alg;
    ep_moe_combine_at combine_at;
    uint32_t tokens;
} wish;

static ep_moe_result call(ep_client *client, const wish *w, uint16_t *out)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_tensor y = ep_tensor_2d(out, EP_DTYPE_BF16, w->tokens, HIDDEN);
    ep_moe_args_init(&args);
    args.model = "demo";
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, w->tokens, HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, w->tokens, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, w->tokens, TOP_K);
    args.mode = w->mode;
    args.comm_alg = w->comm_alg;
    args.combine_at = w->combine_at;
    ep_err err = ep_moe_forward(client, &args, &y, &result);
    EP_TEST_CHECK(err == EP_OK, "%s", result.error.text);
    EP_TEST_CHECK(result.combine_at == w->combine_at &&
                      (result.comm_alg == w->comm_alg || w->comm_alg == EP_MOE_COMM_AUTO),
                  "the result says %d, %d", (int)result.combine_at, (int)result.comm_alg);
    return result;
}

/* Bytes of a decode call's frames without their headers: 64 fixed, each row once per destination, 8
 * bytes a slot and, for sums, 6 more. */
static uint64_t bytes_needed(uint32_t tokens, const size_t *destination_of, size_t destinations,
                             bool sums)
{
    uint64_t bytes = 0;
    for (size_t d = 0; d < destinations; d++) {
        uint64_t rows = 0;
        uint64_t slots = 0;
        for (uint32_t t = 0; t < tokens; t++) {
            uint64_t of_token = 0;
            for (uint32_t k = 0; k < TOP_K; k++) {
                int32_t id = ids[t * TOP_K + k];
                of_token += id >= 0 && destination_of[id] == d;
            }
            rows += of_token > 0;
            slots += of_token;
        }
        uint64_t tensors = (rows * HIDDEN * 2 + 63) / 64 * 64 + slots * 8;
        if (sums) {
            tensors = (tensors + 63) / 64 * 64 + slots * 4;
            tensors = (tensors + 63) / 64 * 64 + slots * 2;
        }
        bytes += rows > 0 ? 64 + tensors : 0;
    }
    return bytes;
}

static void expect_result(ep_client *client, const wish *w)
{
    static uint16_t wanted[TOKENS_MAX * HIDDEN];
    static uint16_t got[TOKENS_MAX * HIDDEN];
    bool by_host = w->comm_alg == EP_MOE_COMM_HIERARCHY;
    bool sums = w->combine_at == EP_MOE_COMBINE_NODE_SUM;
    const size_t *destination_of = by_host ? host_of : node_of;
    expected(w->tokens, sums ? destination_of : NULL, wanted);
    int tries = 0;
    /* another node of the host gets the frame each time */
    for (int good = 0; good < CALLS; good++) {
        memset(got, 0xee, sizeof(got));
        ep_moe_result result = call(client, w, got);
        /* for a quarter of a second nobody ran: what is sent again goes straight to owners */
        if (result.rerouted_frames != 0) {
            EP_TEST_CHECK(++tries < TRIES_MAX,
                          "frames are sent again and again: mode %d, algorithm %d, combine_at %d",
                          (int)w->mode, (int)w->comm_alg, (int)w->combine_at);
            good--;
            continue;
        }
        for (size_t i = 0; i < (size_t)w->tokens * HIDDEN; i++) {
            EP_TEST_CHECK(got[i] == wanted[i],
                          "%s, %s, %u tokens: token %zu element %zu is %04x, the oracle says %04x",
                          by_host ? "hierarchy" : "fullmesh", sums ? "sums" : "rows", w->tokens,
                          i / HIDDEN, i % HIDDEN, got[i], wanted[i]);
        }
        if (w->mode == EP_MOE_DECODE) {
            uint64_t bytes = bytes_needed(w->tokens, destination_of, by_host ? 2 : NODES, sums);
            EP_TEST_CHECK(result.frames == (by_host ? 2 : NODES), "%u frames", result.frames);
            EP_TEST_CHECK(result.bytes_sent == bytes, "%llu bytes were sent, %llu are needed",
                          (unsigned long long)result.bytes_sent, (unsigned long long)bytes);
        }
    }
}

/* Ready is a client with one node; and nodes hear of their neighbours with their heartbeats. */
static void connect_all(ep_client *client)
{
    static uint16_t out[TOKENS_MAX * HIDDEN];
    for (int i = 0; i < 4; i++) {
        wish w = {.mode = i & 1 ? EP_MOE_PREFILL : EP_MOE_DECODE,
                  .comm_alg = i & 2 ? EP_MOE_COMM_HIERARCHY : EP_MOE_COMM_FULLMESH,
                  .tokens = TOKENS_MAX};
        for (uint32_t good = 0; good < NODES;) { /* as many in a row as may pass rows on */
            good = call(client, &w, out).rerouted_frames == 0 ? good + 1 : 0;
        }
    }
}

/*
 * Which way auto takes is a matter of times. But it tries both, for each host: rows are the
 * oracle's in any case, and sums those of one of the ways that there are.
 */
static void expect_auto(ep_client *client, ep_moe_mode mode, ep_moe_combine_at combine_at)
{
    static uint16_t wanted[4][TOKENS_MAX * HIDDEN];
    static uint16_t got[TOKENS_MAX * HIDDEN];
    const wish w = {.mode = mode,
                    .comm_alg = EP_MOE_COMM_AUTO,
                    .combine_at = combine_at,
                    .tokens = mode == EP_MOE_PREFILL ? TOKENS_MAX : 24};
    const bool sums = combine_at == EP_MOE_COMBINE_NODE_SUM;
    uint32_t straight = 0, by_host = 0, measured = 0;
    for (uint32_t ways = 0; ways < 4; ways++) { /* a bit for each host */
        size_t owner_of[EXPERTS];
        for (uint32_t e = 0; e < EXPERTS; e++) {
            owner_of[e] = (ways >> host_of[e] & 1) != 0 ? NODES + host_of[e] : node_of[e];
        }
        expected(w.tokens, sums ? owner_of : NULL, wanted[ways]);
    }
    for (uint32_t i = 0; by_host == 0 || measured == 0; i++) {
        const ep_moe_result result = call(client, &w, got);
        const bool is_by_host = result.comm_alg == EP_MOE_COMM_HIERARCHY;
        EP_TEST_CHECK(i < AUTO_CALLS_MAX, "of %u calls %u went straight, %u by host, %u by times",
                      i, straight, by_host, measured);
        if (result.rerouted_frames != 0) {
            continue; /* straight to owners then */
        }
        straight += !is_by_host;
        by_host += is_by_host;
        measured += result.comm_why == EP_MOE_COMM_WHY_MEASURED;
        EP_TEST_CHECK(result.comm_why != EP_MOE_COMM_WHY_MEASURED ||
                          (result.fullmesh_us > 0 && result.hierarchy_us > 0),
                      "measured, but no estimate");
        bool is_one = false;
        for (uint32_t ways = is_by_host ? 1 : 0; ways < (is_by_host ? 4 : 1); ways++) {
            is_one |= memcmp(got, wanted[ways], (size_t)w.tokens * HIDDEN * 2) == 0;
        }
        EP_TEST_CHECK(is_one, "auto, %s, %s: not the oracle's", is_by_host ? "by host" : "straight",
                      sums ? "sums" : "rows");
    }
    /* the first calls of this client with sums */
    EP_TEST_CHECK(straight > 0 || !sums, "by host before anything was measured");
}

static void expect_results(ep_test_cluster *cluster, void (*change)(ep_client_config *config))
{
    ep_client *client = ep_test_cluster_client(cluster, change);
    connect_all(client);
    for (int i = 0; i < 8; i++) {
        wish w = {.mode = i & 1 ? EP_MOE_PREFILL : EP_MOE_DECODE,
                  .comm_alg = i & 2 ? EP_MOE_COMM_HIERARCHY : EP_MOE_COMM_FULLMESH,
                  .combine_at = i & 4 ? EP_MOE_COMBINE_NODE_SUM : EP_MOE_COMBINE_ROWS,
                  .tokens = i & 1 ? TOKENS_MAX : 24};
        expect_result(client, &w);
    }
    ep_client_destroy(client);
    client = ep_test_cluster_client(cluster, change); /* without figures */
    connect_all(client);
    for (int i = 0; i < 4; i++) {
        expect_auto(client, i & 1 ? EP_MOE_PREFILL : EP_MOE_DECODE,
                    i & 2 ? EP_MOE_COMBINE_NODE_SUM : EP_MOE_COMBINE_ROWS);
    }
    ep_client_destroy(client);
}

static void make_narrow(ep_client_config *config)
{
    config->prefill_window_tokens = 100;
    config->chunk_bytes_max = 16 * 1024;
}

/*
 * What a hand-made request with parts gets, once node0 has heard of a neighbour that the table
 * names: text. With a host the neighbour is registered there, for each try: it sends no heartbeats
 * and leaves the table after a while.
 */
static void expect_refused(ep_test_cluster *cluster, const char *name, const char *url,
                           const char *host, ep_err code, const char *text)
{
    static const char unlisted[] = "is not of this host in the newest table";
    const uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    ep_err err;

    static const ep_wire_slot slots[] = {{0, 0}, {0, 6}};
    Expertd__V1__RelayPart parts[2];
    Expertd__V1__RelayPart *list[2] = {&parts[0], &parts[1]};
    ep_test_peer peer;
    ep_error error;
    for (uint32_t i = 0; i < 2; i++) {
        expertd__v1__relay_part__init(&parts[i]);
        parts[i].node = (char *)(uintptr_t)(i == 0 ? "node0" : name);
        parts[i].url = (char *)(uintptr_t)(i == 0 ? "" : url);
        parts[i].slots_begin = i;
        parts[i].slots_count = 1;
    }
    const ep_test_forward forward = {.rows = 1,
                                     .slots = 2,
                                     .hidden = HIDDEN,
                                     .x_dtype = EP_DTYPE_BF16,
                                     .reply_dtype = EP_DTYPE_BF16,
                                     .x = x,
                                     .wire_slots = slots,
                                     .relay = list,
                                     .relay_count = 2};
    EP_TEST_CHECK(ep_test_peer_open(&peer, cluster->nodes[0].rpc_url, &error) == EP_OK, "%s",
                  error.text);
    do {
        if (host != NULL) {
            ep_test_cluster_register(cluster, name, url, host);
        }
        err = ep_test_forward_run(&peer, &forward, NULL, &error);
    } while (strstr(error.text, unlisted) != NULL && strcmp(text, unlisted) != 0 &&
             ep_clock_now_ns() < end_ns);
    EP_TEST_CHECK(err == code && strstr(error.text, text) != NULL, "%s: %s", ep_err_name(err),
                  error.text);
    if (code == EP_ERR_UNAVAILABLE) {
        EP_TEST_CHECK(strcmp(error.node, name) == 0, "the error names '%s'", error.node);
    }
    ep_test_peer_close(&peer);
}

/* Neighbours that the table does not name are not dialled, however many; and they take no room from
 * those it names. */
static void expect_unlisted(ep_test_cluster *cluster)
{
    static const char text[] = "is not of this host in the newest table";
    ep_client *client = ep_test_cluster_client(cluster, NULL);
    for (uint32_t i = 0; i < 2 * MADE_UP; i++) {
        char url[64];
        snprintf(url, sizeof(url), "tcp://127.0.0.1:%u", 1 + i);
        expect_refused(cluster, i % 2 == 0 ? "nobody" : "node1", url, NULL, EP_ERR_UNAVAILABLE,
                       text);
    }
    expect_refused(cluster, "node3", cluster->nodes[3].rpc_url, NULL, EP_ERR_UNAVAILABLE, text);
    expect_refused(cluster, "node2", cluster->nodes[1].rpc_url, NULL, EP_ERR_UNAVAILABLE, text);
    expect_refused(cluster, "nobody", "nonsense", NULL, EP_ERR_UNAVAILABLE, text);
    connect_all(client);
    expect_result(client,
                  &(wish){.mode = EP_MOE_DECODE, .comm_alg = EP_MOE_COMM_HIERARCHY, .tokens = 24});
    ep_client_destroy(client);
}

/*
 * Until their next heartbeat nodes do not know all their neighbours, and refuse to pass rows on.
 * That is nothing against the owners of these rows: they are asked at once, without a back-off,
 * though they have the only copies. True: a refusal came before they all knew.
 */
static bool expect_no_back_off(const ep_test_cluster_options *options)
{
    static uint16_t out[24 * HIDDEN];
    ep_test_cluster cluster;
    ep_moe_args args;
    ep_call *prepared;
    ep_error error;
    uint32_t refused = 0;
    const ep_tensor y = ep_tensor_2d(out, EP_DTYPE_BF16, 24, HIDDEN);
    ep_test_cluster_start(&cluster, options);
    ep_client *client = ep_test_cluster_client(&cluster, NULL);
    ep_moe_args_init(&args);
    args.model = "demo";
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, 24, HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, 24, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, 24, TOP_K);
    args.mode = EP_MOE_DECODE;
    args.comm_alg = EP_MOE_COMM_FULLMESH; /* until all are connected */
    for (uint32_t nodes = 0; nodes < NODES;) {
        ep_moe_result result = {.struct_bytes = sizeof(result)};
        EP_TEST_CHECK(ep_moe_forward(client, &args, &y, &result) == EP_OK, "%s", result.error.text);
        nodes = result.rerouted_frames == 0 ? result.nodes : 0;
    }
    args.comm_alg = EP_MOE_COMM_HIERARCHY;
    EP_TEST_CHECK(ep_call_create(client, &args, &y, &prepared, &error) == EP_OK, "%s", error.text);
    for (uint32_t good = 0; good < NODES;) {
        ep_moe_result result = {.struct_bytes = sizeof(result)};
        EP_TEST_CHECK(ep_call_begin(prepared, 24, &error) == EP_OK &&
                          ep_call_finish(prepared, &result) == EP_OK,
                      "%s%s", error.text, result.error.text);
        EP_TEST_CHECK(prepared->state.backoff_us == EP_CALL_BACKOFF_MIN_US,
                      "rows waited, though nothing was known against their owners");
        refused += result.rerouted_frames;
        good = result.rerouted_frames == 0 ? good + 1 : 0;
    }
    ep_call_destroy(prepared);
    ep_client_destroy(client);
    ep_test_cluster_stop(&cluster);
    return refused > 0;
}

/* What auto chose, why, and both estimates. */
static void expect_printed(ep_test_cluster *cluster)
{
    static const char *const texts[] = {"comm-alg auto: hierarchy in ",
                                        "  estimates of a call: fullmesh ",
                                        " calls: few calls were measured yet"};
    char *output = NULL;
    const int code =
        ep_test_cluster_ctl(cluster, &output,
                            "bench --model demo --layer 0 --tokens 24 --seconds 3 --comm-alg auto "
                            "--combine-at node_sum");
    EP_TEST_CHECK(code == 0, "bench ended with %d: %s", code, output);
    for (size_t i = 0; i < EP_ARRAY_COUNT(texts); i++) {
        EP_TEST_CHECK(strstr(output, texts[i]) != NULL, "'%s' is not in: %s", texts[i], output);
    }
    free(output);
}

int main(void)
{
    char model_path[EP_TEST_PATH_BYTES];
    ep_test_cluster cluster;
    ep_fixture_config config = ep_fixture_default();
    config.hidden = HIDDEN;
    config.inner = INNER;
    config.experts = EXPERTS;
    config.layers = 1;
    ep_test_checkpoint_new(&config, model_path);
    ref_checkpoint_open(model_path, &checkpoint);
    ref_layer_load(&checkpoint, 0, &layer);
    make_batch();
    const ep_test_model model = {"demo", model_path};
    ep_test_cluster_options options = {.nodes_count = NODES,
                                       .models = &model,
                                       .models_count = 1,
                                       .expert_map = map,
                                       .hosts = hosts};
    ep_test_cluster_start(&cluster, &options);
    expect_results(&cluster, NULL);
    expect_results(&cluster, make_narrow);
    expect_printed(&cluster);
    expect_unlisted(&cluster);
    /* What says that it is on this host, and is not. */
    expect_refused(&cluster, "x-moved", cluster.nodes[3].rpc_url, "left", EP_ERR_UNAVAILABLE,
                   "of host 'right', not one of host 'left'");
    expect_refused(&cluster, "x-false", cluster.nodes[1].rpc_url, "left", EP_ERR_UNAVAILABLE,
                   "is node 'node1' of host 'left'");
    expect_refused(&cluster, "node0", cluster.nodes[0].rpc_url, NULL, EP_ERR_INVALID_ARGUMENT,
                   "are both for node node0");
    ep_test_cluster_expect_alive(&cluster);
    ep_test_cluster_stop(&cluster);
    /* between a heartbeat and the next all are connected and a call is made */
    options.heartbeat_ms = 300;
    for (uint32_t tries = 1; !expect_no_back_off(&options); tries++) {
        EP_TEST_CHECK(tries < STARTS_MAX, "no node refused to pass rows on in %u starts", tries);
        options.heartbeat_ms *= 2;
    }
    ref_layer_free(&layer);
    ref_checkpoint_close(&checkpoint);
    ep_test_dir_remove(model_path);
    printf("rows and sums by nodes and by hosts: equal to the oracle's\n");
    return 0;
}
