/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One MoE layer through the service, on one and on two nodes (real expertd processes on loopback),
 * against the same kernels and combine in this process. Rounds alternate between all of them;
 * medians of ratios are reported.
 * On two cores the nodes share the processor with the caller, so two nodes cannot be faster than
 * one here.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "bench/layer_local.h"
#include "expertd/client.h"
#include "support/checkpoint_fixture.h"
#include "support/process.h"

#define HIDDEN 1024
#define INNER 512
#define EXPERTS 32
#define TOP_K 4
#define TOKENS_MAX 2048
#define ROUNDS 9

static uint16_t x[TOKENS_MAX * HIDDEN];
static uint16_t y[TOKENS_MAX * HIDDEN], y_local[TOKENS_MAX * HIDDEN];
static int32_t ids[TOKENS_MAX * TOP_K];
static float scales[TOKENS_MAX * TOP_K];

typedef struct cluster {
    ep_test_process nodes[2];
    uint32_t nodes_count;
    ep_client *client;
} cluster;

static void make_inputs(void)
{
    uint64_t seed = 5;
    for (size_t i = 0; i < (size_t)TOKENS_MAX * HIDDEN; i++) {
        x[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(&seed) * 0x1p-31f);
    }
    for (size_t t = 0; t < TOKENS_MAX; t++) {
        for (size_t k = 0; k < TOP_K; k++) {
            int32_t id;
            bool taken;
            do {
                id = (int32_t)(ep_splitmix64(&seed) % EXPERTS);
                taken = false;
                for (size_t j = 0; j < k; j++) {
                    taken |= ids[t * TOP_K + j] == id;
                }
            } while (taken);
            ids[t * TOP_K + k] = id;
            scales[t * TOP_K + k] = 1.0f / TOP_K;
        }
    }
}

/* Experts are split evenly over the nodes; the client finds them by what the nodes say they own. */
static void start(cluster *c, uint32_t nodes, const char *dir, const char *checkpoint)
{
    const char *urls[2];
    ep_error error;
    c->nodes_count = nodes;
    for (uint32_t n = 0; n < nodes; n++) {
        char name[32], config_path[EP_TEST_PATH_BYTES + 32], config[1024],
            flag[EP_TEST_PATH_BYTES + 64];
        snprintf(name, sizeof(name), "node-%u-of-%u", n, nodes);
        snprintf(config_path, sizeof(config_path), "%s/%s.yaml", dir, name);
        snprintf(config, sizeof(config),
                 "node_name: %s\nlisten:\n  - tcp://127.0.0.1:0\nprobe_address: ''\nadmin_listen: "
                 "''\ndoor_listen: ''\nmodels:\n"
                 "  - name: bench\n    path: %s\n    experts: %u-%u\n",
                 name, checkpoint, n * (EXPERTS / nodes), (n + 1) * (EXPERTS / nodes) - 1);
        snprintf(flag, sizeof(flag), "--config=%s", config_path);
        const char *args[] = {flag, NULL};
        if (!ep_test_write_file(config_path, config, 0600) ||
            !ep_test_process_start(&c->nodes[n], dir, name, EP_EXPERTD_PROGRAM, args, NULL, true) ||
            !ep_test_process_wait_ports(&c->nodes[n], 60000)) {
            bench_fail("expertd did not start", NULL);
        }
        urls[n] = c->nodes[n].rpc_url;
    }
    ep_client_config config;
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = nodes;
    if (ep_client_create(&config, &c->client, &error) != EP_OK ||
        ep_client_wait_ready(c->client, 60000000, &error) != EP_OK) {
        bench_fail("client", error.text);
    }
}

static void stop(cluster *c)
{
    ep_client_destroy(c->client);
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        ep_test_process_destroy(&c->nodes[n]);
    }
}

static void run_remote(cluster *c, uint32_t tokens, ep_moe_mode mode)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_moe_args_init(&args);
    args.model = "bench";
    args.layer = 0;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, tokens, HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, tokens, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, tokens, TOP_K);
    args.mode = mode;
    args.deadline_us = 60000000;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, tokens, HIDDEN);
    if (ep_moe_forward(c->client, &args, &out, &result) != EP_OK) {
        bench_fail("forward", result.error.text);
    }
}

static void run_local(layer_local *local, uint32_t tokens)
{
    ep_batch batch = {.tokens = tokens,
                      .top_k = TOP_K,
                      .hidden = HIDDEN,
                      .x = {.data = x, .stride_bytes = HIDDEN * 2, .dtype = EP_DTYPE_BF16},
                      .ids = {.data = ids, .stride_bytes = TOP_K * 4, .dtype = EP_DTYPE_I32},
                      .scales = {.data = scales, .stride_bytes = TOP_K * 4, .dtype = EP_DTYPE_F32},
                      .shared_source = EP_SHARED_SERVICE,
                      .wire_dtype = EP_DTYPE_BF16,
                      .out_dtype = EP_DTYPE_BF16};
    if (layer_local_run(local, &batch, y_local) != EP_OK) {
        bench_fail("local layer", NULL);
    }
}

static double median_call_us(cluster *c, layer_local *local, uint32_t tokens, ep_moe_mode mode,
                             int calls)
{
    double us[512];
    for (int i = 0; i < calls; i++) {
        double begin = bench_now_us();
        if (c != NULL) {
            run_remote(c, tokens, mode);
        } else {
            run_local(local, tokens);
        }
        us[i] = bench_now_us() - begin;
    }
    return bench_quantile(us, (size_t)calls, 0.5);
}

static void add_rows(bench_report *report, const char *mode, uint32_t tokens, uint32_t nodes,
                     double us, double local_us, double ratio)
{
    bench_row row = bench_value(us, "us", BENCH_LOWER, NAN);
    row.rival = local_us;
    row.ratio = ratio;
    bench_report_add(report, &row, "%s, T = %u, %u node%s, per layer", mode, tokens, nodes,
                     nodes == 1 ? "" : "s");
    row.unit = "tokens/s";
    row.value = tokens / us * 1e6;
    row.rival = tokens / local_us * 1e6;
    row.ratio = 1.0 / ratio;
    row.better = BENCH_HIGHER;
    bench_report_add(report, &row, "%s, T = %u, %u node%s, throughput", mode, tokens, nodes,
                     nodes == 1 ? "" : "s");
}

static void bench_case(bench_report *report, cluster clusters[2], layer_local *local,
                       const char *name, ep_moe_mode mode, uint32_t tokens)
{
    double us[2][ROUNDS], ratio[2][ROUNDS], local_us[ROUNDS];
    int calls = tokens <= 8 ? 200 : tokens <= 64 ? 60 : 4;
    for (int r = 0; r < ROUNDS; r++) {
        local_us[r] = median_call_us(NULL, local, tokens, mode, calls);
        for (int c = 0; c < 2; c++) {
            us[c][r] = median_call_us(&clusters[c], NULL, tokens, mode, calls);
            ratio[c][r] = us[c][r] / local_us[r];
            if (memcmp(y, y_local, (size_t)tokens * HIDDEN * 2) != 0) {
                bench_fail("the service's result differs from the local one", NULL);
            }
        }
    }
    double local_median = bench_quantile(local_us, ROUNDS, 0.5);
    for (int c = 0; c < 2; c++) {
        add_rows(report, name, tokens, clusters[c].nodes_count, bench_quantile(us[c], ROUNDS, 0.5),
                 local_median, bench_quantile(ratio[c], ROUNDS, 0.5));
    }
}

int main(int argc, char **argv)
{
    char dir[EP_TEST_PATH_BYTES], checkpoint[EP_FIXTURE_PATH_BYTES];
    ep_error error;
    cluster clusters[2] = {0};
    layer_local *local;
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, TOP_K);
    ep_fixture_new(&fixture, checkpoint);
    if (!ep_test_dir_create(dir)) {
        bench_fail("no directory", NULL);
    }
    make_inputs();
    if (layer_local_open(checkpoint, 0, 0, &local, &error) != EP_OK) {
        bench_fail("local layer", error.text);
    }
    start(&clusters[0], 1, dir, checkpoint);
    start(&clusters[1], 2, dir, checkpoint);

    char title[160];
    snprintf(title, sizeof(title),
             "One MoE layer, H = %d, I = %d, top-%d of %d, bf16: service against in-process "
             "(rival), same run",
             HIDDEN, INNER, TOP_K, EXPERTS);
    bench_report *report = bench_report_create(title);
    bench_case(report, clusters, local, "decode", EP_MOE_DECODE, 1);
    bench_case(report, clusters, local, "decode", EP_MOE_DECODE, 8);
    bench_case(report, clusters, local, "decode", EP_MOE_DECODE, 64);
    bench_case(report, clusters, local, "prefill", EP_MOE_PREFILL, 512);
    bench_case(report, clusters, local, "prefill", EP_MOE_PREFILL, 2048);

    stop(&clusters[0]);
    stop(&clusters[1]);
    layer_local_close(local);
    ep_fixture_remove(checkpoint);
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
