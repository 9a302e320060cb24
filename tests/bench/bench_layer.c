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

#include "bench/bench_service.h"
#include "bench/layer_local.h"
#include "support/checkpoint_fixture.h"

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

/* Experts are split evenly over the nodes; the client finds them by what the nodes say they own. */
static void start(cluster *c, uint32_t nodes, const char *dir, const char *checkpoint)
{
    c->nodes_count = nodes;
    for (uint32_t n = 0; n < nodes; n++) {
        char name[32], experts[32];
        snprintf(name, sizeof(name), "node-%u-of-%u", n, nodes);
        snprintf(experts, sizeof(experts), "%u-%u", n * (EXPERTS / nodes),
                 (n + 1) * (EXPERTS / nodes) - 1);
        bench_node_start(&(bench_node){.name = name, .checkpoint = checkpoint, .experts = experts},
                         dir, &c->nodes[n]);
    }
    c->client = bench_client_of(c->nodes, nodes, NULL);
}

static void stop(cluster *c)
{
    ep_client_destroy(c->client);
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        ep_test_process_destroy(&c->nodes[n]);
    }
}

static bench_tokens tokens_of(uint32_t tokens)
{
    return (bench_tokens){tokens, TOP_K, HIDDEN, x, ids, scales};
}

static double remote_us(cluster *c, uint32_t tokens, ep_moe_mode mode)
{
    const bench_tokens of = tokens_of(tokens);
    ep_moe_args args = bench_args(&of);
    args.mode = mode;
    return bench_call_us(c->client, &args, y);
}

static double local_us(layer_local *local, uint32_t tokens)
{
    const bench_tokens of = tokens_of(tokens);
    const ep_batch batch = bench_batch(&of);
    const double begin_us = bench_now_us();
    if (layer_local_run(local, &batch, y_local) != EP_OK) {
        bench_fail("local layer", NULL);
    }
    return bench_now_us() - begin_us;
}

static double median_call_us(cluster *c, layer_local *local, uint32_t tokens, ep_moe_mode mode,
                             int calls)
{
    double us[512];
    for (int i = 0; i < calls; i++) {
        us[i] = c != NULL ? remote_us(c, tokens, mode) : local_us(local, tokens);
    }
    return bench_quantile(us, (size_t)calls, 0.5);
}

static void add_rows(bench_report *report, const char *mode, uint32_t tokens, uint32_t nodes,
                     double us, double local, double ratio)
{
    bench_report_rival(report, us, "us", local, ratio, BENCH_LOWER, NAN,
                       "%s, T = %u, %u node%s, per layer", mode, tokens, nodes,
                       nodes == 1 ? "" : "s");
    bench_report_rival(report, tokens / us * 1e6, "tokens/s", tokens / local * 1e6, 1.0 / ratio,
                       BENCH_HIGHER, NAN, "%s, T = %u, %u node%s, throughput", mode, tokens, nodes,
                       nodes == 1 ? "" : "s");
}

static void bench_case(bench_report *report, cluster clusters[2], layer_local *local,
                       const char *name, ep_moe_mode mode, uint32_t tokens)
{
    double us[2][ROUNDS], ratio[2][ROUNDS], alone_us[ROUNDS];
    int calls = tokens <= 8 ? 200 : tokens <= 64 ? 60 : 4;
    for (int r = 0; r < ROUNDS; r++) {
        alone_us[r] = median_call_us(NULL, local, tokens, mode, calls);
        for (int c = 0; c < 2; c++) {
            us[c][r] = median_call_us(&clusters[c], NULL, tokens, mode, calls);
            ratio[c][r] = us[c][r] / alone_us[r];
            if (memcmp(y, y_local, (size_t)tokens * HIDDEN * 2) != 0) {
                bench_fail("the service's result differs from the local one", NULL);
            }
        }
    }
    double local_median = bench_quantile(alone_us, ROUNDS, 0.5);
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
    uint64_t seed = 5;
    const ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, TOP_K);
    ep_fixture_new(&fixture, checkpoint);
    if (!ep_test_dir_create(dir)) {
        bench_fail("no directory", NULL);
    }
    bench_draw_rows(&seed, TOKENS_MAX * HIDDEN, x);
    bench_draw_routing(&seed, TOKENS_MAX, TOP_K, EXPERTS, ids, scales);
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
