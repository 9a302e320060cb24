/* SPDX-License-Identifier: Apache-2.0 */
/*
 * expertctl forward writes the oracle's file, byte for byte, whatever serves the layer: 1, 2, 3 or
 * 6 nodes, uniform or static placement, one or two copies, one or two compute threads, decode or
 * prefill, the batch in one call or cut up, T from 0 to 4096; with rows in 8 bits too; and whatever
 * carries the rows: each stream lane, shared memory.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "support/checkpoint_fixture.h"
#include "batch.h"

enum {
    HIDDEN = 64,
    INNER = 32,
    EXPERTS = 8,
    TOP_K = 2,
    LAYERS = 2,
    PATH_BYTES = EP_TEST_PATH_BYTES + 64
};

static const uint32_t token_counts[] = {0, 1, 7, 256, 4096};

/* How each batch is cut: not, in ragged parts with empty calls among them, in equal parts. */
static const char *const cuts[][3] = {
    {"", "--split=0,0", "--split-tokens=5"},          {"", "--split=0,1,0", "--split-tokens=1"},
    {"", "--split=1,2,4", "--split-tokens=3"},        {"", "--split=255,0,1", "--split-tokens=50"},
    {"", "--split=1,4000,95", "--split-tokens=1000"},
};

typedef struct service {
    const char *name;
    uint32_t nodes;
    uint32_t copies;
    const char *expert_map;
    uint32_t serving[LAYERS]; /* nodes with an expert of the layer */
} service;

#define DEVICE(id, ...) "{\"device_id\":" #id ",\"device_expert\":[" #__VA_ARGS__ "]}"
#define LAYER(id, devices, list)                                                                   \
    "{\"layer_id\":" #id ",\"device_count\":" #devices ",\"device_list\":[" list "]}"
#define MAP(layer0, layer1) "{\"moe_layer_count\":2,\"layer_list\":[" layer0 "," layer1 "]}"

static const service services[] = {
    {"1 node, uniform", 1, 1, NULL, {1, 1}},
    {"1 node, static",
     1,
     1,
     MAP(LAYER(0, 1, DEVICE(0, 7, 6, 5, 4, 3, 2, 1, 0)),
         LAYER(1, 1, DEVICE(0, 0, 2, 4, 6, 1, 3, 5, 7))),
     {1, 1}},
    {"2 nodes, uniform", 2, 1, NULL, {2, 2}},
    {"2 nodes, uniform, 2 copies", 2, 2, NULL, {2, 2}},
    {"2 nodes, static, one holds a single expert",
     2,
     1,
     MAP(LAYER(0, 2, DEVICE(0, 3) "," DEVICE(1, 0, 1, 2, 4, 5, 6, 7)),
         LAYER(1, 2, DEVICE(0, 0, 2, 4, 6) "," DEVICE(1, 1, 3, 5, 7))),
     {2, 2}},
    {"3 nodes, uniform", 3, 1, NULL, {3, 3}},
    {"3 nodes, uniform, 2 copies", 3, 2, NULL, {3, 3}},
    {"3 nodes, static, 1 to 3 copies",
     3,
     1,
     MAP(LAYER(0, 3, DEVICE(0, 0, 1, 2, 3) "," DEVICE(1, 4, 5, 6, 7, 0) "," DEVICE(2, 0, 1, 4, 5)),
         LAYER(1, 3, DEVICE(0, 7, 0, 3) "," DEVICE(1, 1, 2, 3) "," DEVICE(2, 4, 5, 6))),
     {3, 3}},
    {"6 nodes, uniform", 6, 1, NULL, {6, 6}},
    {"6 nodes, uniform, 2 copies", 6, 2, NULL, {6, 6}},
    {"6 nodes, static, a node without an expert in each layer",
     6,
     1,
     MAP(LAYER(0, 6,
               DEVICE(0, 0, 1) "," DEVICE(1, 2) "," DEVICE(2, 3, 4) "," DEVICE(3, 5) "," DEVICE(
                   4, 6, 7) "," DEVICE(5)),
         LAYER(1, 6,
               DEVICE(0) "," DEVICE(1, 7, 2) "," DEVICE(2, 3, 4) "," DEVICE(3, 5) "," DEVICE(
                   4, 6) "," DEVICE(5, 0, 1))),
     {5, 5}},
};

static char fixture_dir[EP_TEST_PATH_BYTES];

static void input_path(char out[PATH_BYTES], uint32_t tokens)
{
    snprintf(out, PATH_BYTES, "%s/in-%u.safetensors", fixture_dir, tokens);
}

static void expected_path(char out[PATH_BYTES], uint32_t tokens, uint32_t layer)
{
    snprintf(out, PATH_BYTES, "%s/expected-%u-%u.safetensors", fixture_dir, tokens, layer);
}

static void make_fixture(void)
{
    ep_fixture_config config = ep_fixture_default();
    config.hidden = HIDDEN;
    config.inner = INNER;
    config.experts = EXPERTS;
    config.top_k = TOP_K;
    config.layers = LAYERS;
    config.shards = 3;
    ep_test_checkpoint_new(&config, fixture_dir);
    for (size_t i = 0; i < EP_ARRAY_COUNT(token_counts); i++) {
        char in[PATH_BYTES];
        input_path(in, token_counts[i]);
        batch_write(in, token_counts[i], HIDDEN, false, 1000 + token_counts[i]);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            char out[PATH_BYTES];
            expected_path(out, token_counts[i], layer);
            batch_run_oracle(fixture_dir, layer, in, out, "");
        }
    }
}

static void forward(ep_test_cluster *cluster, const service *s, uint32_t tokens, uint32_t layer,
                    bool prefill, const char *split)
{
    char in[PATH_BYTES];
    char expected[PATH_BYTES];
    char out[PATH_BYTES];
    char layer_text[16];
    char what[PATH_BYTES];
    char *output = NULL;
    input_path(in, tokens);
    expected_path(expected, tokens, layer);
    snprintf(out, sizeof(out), "%s/out.safetensors", cluster->dir);
    snprintf(layer_text, sizeof(layer_text), "%u", layer);
    snprintf(what, sizeof(what), "%s, %u threads, T %u, layer %u, %s %s", s->name,
             cluster->options.threads, tokens, layer, prefill ? "prefill" : "decode", split);
    unlink(out);
    int code = ep_test_cluster_ctl(
        cluster, &output, "forward --model=demo --layer %s --in %s --out %s %s %s", layer_text, in,
        out, prefill ? "--mode=prefill" : "--mode=decode", split[0] != 0 ? split : "");
    EP_TEST_CHECK(code == 0, "%s: exit code %d: %s", what, code, output);
    EP_TEST_CHECK(ep_test_files_equal(expected, out), "%s: %s differs from %s", what, out,
                  expected);
    free(output);
}

/*
 * By the nodes' own counters: who has no experts of a layer did nothing, and where every expert has
 * one copy, who has some did its share. Which of several copies is asked depends on which
 * connection is up first.
 */
static void expect_shares(ep_test_cluster *cluster, const service *s)
{
    uint32_t serving[LAYERS] = {0}, resident[LAYERS] = {0};
    for (uint32_t n = 0; n < s->nodes; n++) {
        Expertd__V1__NodeStatusReply *status = ep_test_cluster_node_status(cluster, n);
        EP_TEST_CHECK(status->n_layers == LAYERS, "%s: node%u has %zu layers", s->name, n,
                      status->n_layers);
        for (size_t l = 0; l < LAYERS; l++) {
            const Expertd__V1__LayerStatus *layer = status->layers[l];
            EP_TEST_CHECK(layer->rows_served == 0 || layer->experts_resident > 0,
                          "%s: node%u layer %u: no experts, %llu rows", s->name, n, layer->layer,
                          (unsigned long long)layer->rows_served);
            serving[l] += layer->rows_served > 0;
            resident[l] += layer->experts_resident;
        }
        protobuf_c_message_free_unpacked(&status->base, NULL);
    }
    for (size_t l = 0; l < LAYERS; l++) {
        bool one_copy = resident[l] == EXPERTS;
        EP_TEST_CHECK(one_copy ? serving[l] == s->serving[l]
                               : serving[l] >= 1 && serving[l] <= s->serving[l],
                      "%s: layer %zu was served by %u nodes, %u hold experts of it", s->name, l,
                      serving[l], s->serving[l]);
    }
}

/* Rows in 8 bits, from the command line to the file. */
static uint32_t forward_quantised(ep_test_cluster *cluster)
{
    static const char *const ways[][2] = {{"int8", "plain"}, {"fp8", "int8"}, {"plain", "int8"}};
    char in[PATH_BYTES];
    char expected[PATH_BYTES];
    char out[PATH_BYTES];
    input_path(in, 256);
    snprintf(expected, sizeof(expected), "%s/expected.safetensors", cluster->dir);
    snprintf(out, sizeof(out), "%s/out.safetensors", cluster->dir);
    for (size_t i = 0; i < EP_ARRAY_COUNT(ways); i++) {
        char *output = NULL;
        int code = ep_test_process_run_line(
            fixture_dir, ep_test_ref_forward, NULL, EP_TEST_PATIENCE_MS, &output,
            "--model %s --layer 1 --in %s --out %s --dispatch-quant %s --combine-quant %s",
            fixture_dir, in, expected, ways[i][0], ways[i][1]);
        EP_TEST_CHECK(code == 0, "the oracle: exit code %d: %s", code, output);
        free(output);
        code = ep_test_cluster_ctl(cluster, &output,
                                   "forward --model=demo --layer=1 --in %s --out %s "
                                   "--dispatch-quant %s --combine-quant %s",
                                   in, out, ways[i][0], ways[i][1]);
        EP_TEST_CHECK(code == 0, "exit code %d: %s", code, output);
        EP_TEST_CHECK(ep_test_files_equal(expected, out), "%s: %s differs from %s", ways[i][0], out,
                      expected);
        free(output);
    }
    return EP_ARRAY_COUNT(ways);
}

/* One lane for everything that moves rows, and how to see that it did. */
typedef struct lane_case {
    const char *name;
    const char *args[3];      /* of each daemon */
    const char *lanes;        /* LIBEXPERTD_LANES of expertctl */
    const char *stream_lane;  /* LIBEXPERTD_STREAM_LANE of expertctl */
    const char *busy_poll_us; /* LIBEXPERTD_BUSY_POLL_US of expertctl */
} lane_case;

static const lane_case lane_cases[] = {
    {"uv", {"--stream-lane=uv", "--busy-poll-us=1000"}, "stream", "uv", "1000"},
#ifndef __SANITIZE_THREAD__ /* races inside the packaged libnng are not ours to fail on */
    {"nng", {"--stream-lane=nng"}, "stream", "nng", "0"},
#endif
    {"shm", {"--stream-lane=uv"}, "", "uv", "0"},
};

/* More than the coordinator's Hello and pings, which use shared memory too; less than a large
 * batch's rows. */
#define SHM_ROWS_BYTES 65536

/* Frames of the size of the larger batches go over it in both directions. */
static const uint32_t lane_tokens[] = {7, 4096};

static void expect_lane(ep_test_cluster *cluster, const service *s, const lane_case *c)
{
    static const char shm_series[] = "expertd_lane_received_bytes_total{lane=\"shm\"}";
    char info[96];
    uint64_t end_ns = ep_clock_now_ns() + EP_TEST_PATIENCE_MS * EP_NS_PER_MS;
    bool polls = strcmp(c->busy_poll_us, "0") != 0;
    snprintf(info, sizeof(info), "expertd_stream_lane_info{busy_poll_us=\"%s\",stream_lane=\"%s\"}",
             c->busy_poll_us, c->stream_lane);
    for (uint32_t n = 0; n < cluster->options.nodes_count; n++) {
        EP_TEST_CHECK(ep_test_metric(&cluster->nodes[n], info) == 1, "%s: node%u does not show %s",
                      c->name, n, info);
        double looks = ep_test_metric(&cluster->nodes[n], "expertd_busy_polls_total");
        /* On a busy machine the millisecond may pass before a thread looks at all. */
        while (polls && looks == 0 && ep_clock_now_ns() < end_ns) {
            forward(cluster, s, 7, 0, false, "");
            looks = ep_test_metric(&cluster->nodes[n], "expertd_busy_polls_total");
        }
        EP_TEST_CHECK(polls ? looks > 0 : looks == 0, "%s: node%u looked again %.0f times", c->name,
                      n, looks);
        bool wants_shm = strcmp(c->name, "shm") == 0;
        double shm = ep_test_metric(&cluster->nodes[n], shm_series);
        /* A short program's calls may all go before its shared memory is there. */
        while (wants_shm && shm < SHM_ROWS_BYTES && ep_clock_now_ns() < end_ns) {
            forward(cluster, s, 4096, 0, true, "--split-tokens=1000");
            shm = ep_test_metric(&cluster->nodes[n], shm_series);
        }
        EP_TEST_CHECK(wants_shm ? shm >= SHM_ROWS_BYTES : shm == 0,
                      "%s: %.0f bytes over shared memory", c->name, shm);
    }
}

static uint32_t run_lane(const lane_case *c)
{
    const ep_test_model model = {"demo", fixture_dir};
    const char *node_args[4] = {c->args[0], strcmp(c->name, "shm") == 0 ? "--shm=on" : "--shm=off",
                                c->args[1]};
    const service *s = &services[7]; /* 1 to 3 copies: rows of a call go to all nodes */
    const ep_test_cluster_options options = {.nodes_count = s->nodes,
                                             .copies = s->copies,
                                             .threads = 1,
                                             .expert_map = s->expert_map,
                                             .models = &model,
                                             .models_count = 1,
                                             .coordinator_args = c->args,
                                             .node_args = node_args};
    ep_test_cluster cluster;
    uint32_t runs = 0;
    EP_TEST_CHECK(setenv("LIBEXPERTD_LANES", c->lanes, 1) == 0 &&
                      setenv("LIBEXPERTD_STREAM_LANE", c->stream_lane, 1) == 0 &&
                      setenv("LIBEXPERTD_BUSY_POLL_US", c->busy_poll_us, 1) == 0,
                  "setenv");
    ep_test_cluster_start(&cluster, &options);
    for (size_t t = 0; t < EP_ARRAY_COUNT(lane_tokens); t++) {
        for (uint32_t prefill = 0; prefill < 2; prefill++) {
            forward(&cluster, s, lane_tokens[t], (uint32_t)t, prefill == 1,
                    prefill == 1 ? "--split-tokens=1000" : "");
            runs++;
        }
    }
    expect_lane(&cluster, s, c);
    ep_test_cluster_stop(&cluster);
    unsetenv("LIBEXPERTD_LANES");
    unsetenv("LIBEXPERTD_STREAM_LANE");
    unsetenv("LIBEXPERTD_BUSY_POLL_US");
    return runs;
}

static uint32_t run_service(const service *s, uint32_t number, uint32_t threads)
{
    const ep_test_model model = {"demo", fixture_dir};
    const ep_test_cluster_options options = {.nodes_count = s->nodes,
                                             .copies = s->copies,
                                             .threads = threads,
                                             .expert_map = s->expert_map,
                                             .models = &model,
                                             .models_count = 1};
    ep_test_cluster cluster;
    uint32_t runs = 0;
    ep_test_cluster_start(&cluster, &options);
    for (size_t t = 0; t < EP_ARRAY_COUNT(token_counts); t++) {
        for (uint32_t prefill = 0; prefill < 2; prefill++) {
            uint32_t layer = (uint32_t)(t + prefill) % LAYERS;
            /* Every cut of every T, in both modes and on both layers, comes up on some service. */
            const char *cut = cuts[t][(number + prefill + threads) % EP_ARRAY_COUNT(cuts[t])];
            forward(&cluster, s, token_counts[t], layer, prefill == 1, cut);
            runs++;
        }
    }
    expect_shares(&cluster, s);
    runs += number % 4 == 2 ? forward_quantised(&cluster) : 0;
    ep_test_cluster_stop(&cluster);
    return runs;
}

int main(void)
{
    uint32_t runs = 0;
    uint32_t services_run = 0;
    make_fixture();
    for (uint32_t i = 0; i < EP_ARRAY_COUNT(services); i++) {
        for (uint32_t threads = 1; threads <= 2; threads++) {
            /* a process starts slowly under a sanitizer */
            if (!ep_test_sanitized || threads == 1 + i % 2) {
                runs += run_service(&services[i], i, threads);
                services_run++;
            }
        }
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(lane_cases); i++) {
        runs += run_lane(&lane_cases[i]);
    }
    ep_test_dir_remove(fixture_dir);
    printf("%u runs of expertctl forward on %u services and %zu lanes: every file equals the "
           "oracle's\n",
           runs, services_run, EP_ARRAY_COUNT(lane_cases));
    return 0;
}
