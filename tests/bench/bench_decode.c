/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode through the service at the shape of a large model: H = 7168, I = 256, top-8 of 256
 * experts, spread evenly over 2, 4 and 8 nodes (real expertd processes that map one checkpoint;
 * each keeps its share packed). For each T: microseconds and bytes per token.
 *
 * Bytes    what the nodes counted on the lane, both ways: frames with their headers, pings too.
 *          Against the least that has to travel, computed here from ids and shapes alone: a row for
 *          each (token, distinct node), and for each slot 8 request bytes and a reply row.
 * Unfused  decode_ranks.h, over the same lane (the stream) and kernels. Rounds of both alternate;
 *          the median of their ratios is reported. The limit is what the same ranks need to compute
 *          alone, without rows to exchange: no form can be quicker, so the limit divided by the
 *          rival is the largest ratio there could be.
 * Local    one node with the first 32 experts, over shared memory, against the same kernels and
 *          combine in this process.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/bench_guard.h"
#include "bench/decode_case.h"
#include "bench/decode_ranks.h"
#include "bench/layer_local.h"
#include "support/checkpoint_fixture.h"

#define ROUNDS 7
#define LOCAL_ROUNDS_MAX 101
#define LOCAL_CALLS 3
#define LOCAL_EXPERTS 32
#define LOCAL_COMPUTE_MIN_US 2000.0
#define DISTINCT_EXPERTS 16 /* the others repeat them: values do not matter here */

static uint16_t x[DECODE_TOKENS_MAX * DECODE_HIDDEN];
static uint16_t y[DECODE_TOKENS_MAX * DECODE_HIDDEN], y_other[DECODE_TOKENS_MAX * DECODE_HIDDEN];
static int32_t ids[DECODE_TOKENS_MAX * DECODE_TOP_K];
static float scales[DECODE_TOKENS_MAX * DECODE_TOP_K];
static char checkpoint[EP_FIXTURE_PATH_BYTES];
static uint32_t only_nodes, only_tokens; /* 0: all */

static void write_checkpoint(void)
{
    ep_error error;
    ep_fixture_config fixture =
        ep_fixture_layer(DECODE_HIDDEN, DECODE_INNER, DECODE_EXPERTS, DECODE_TOP_K);
    fixture.distinct_experts = DISTINCT_EXPERTS;
    if (ep_fixture_write(&fixture, checkpoint, &error) != EP_OK) {
        bench_fail("checkpoint", error.text);
    }
}

static bench_tokens tokens_of(uint32_t tokens)
{
    return (bench_tokens){tokens, DECODE_TOP_K, DECODE_HIDDEN, x, ids, scales};
}

static void draw_routing(uint32_t experts)
{
    uint64_t seed = 7;
    bench_draw_routing(&seed, DECODE_TOKENS_MAX, DECODE_TOP_K, experts, ids, scales);
}

/* ---- against the unfused form, and bytes ---- */

/* Nodes are a bit each. */
static double bytes_min(uint32_t nodes_count, uint32_t tokens)
{
    double bytes = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        uint32_t nodes = 0;
        for (uint32_t k = 0; k < DECODE_TOP_K; k++) {
            nodes |= 1u << (uint32_t)ids[t * DECODE_TOP_K + k] / (DECODE_EXPERTS / nodes_count);
            bytes += 8 + DECODE_ROW_BYTES;
        }
        bytes += (double)__builtin_popcount(nodes) * DECODE_ROW_BYTES;
    }
    return bytes;
}

typedef enum form { FUSED, UNFUSED, COMPUTE } form;

/* ranks may be NULL when the form is FUSED. */
static double time_us(form what, const decode_nodes *nodes, decode_ranks *ranks,
                      const bench_tokens *of, int calls)
{
    const ep_batch batch = bench_batch(of);
    double us[16];
    for (int i = 0; i < calls; i++) {
        double begin = bench_now_us();
        if (what == FUSED) {
            decode_nodes_call(nodes, of, y);
        } else if (what == UNFUSED) {
            decode_ranks_call(ranks, &batch, y_other);
        } else {
            decode_ranks_compute(ranks, &batch);
        }
        us[i] = bench_now_us() - begin;
    }
    return bench_quantile(us, (size_t)calls, 0.5);
}

static double count_bytes(const decode_nodes *nodes, const bench_tokens *of, int calls)
{
    decode_lanes before = decode_nodes_lanes(nodes);
    for (int i = 0; i < calls; i++) {
        decode_nodes_call(nodes, of, y);
    }
    decode_lanes after = decode_nodes_lanes(nodes);
    if (after.shm != before.shm) {
        bench_fail("calls took another lane than the stream", NULL);
    }
    return (after.stream - before.stream) / calls;
}

static void bench_case(bench_report *report, const decode_nodes *nodes, decode_ranks *ranks,
                       uint32_t tokens)
{
    double fused[ROUNDS], unfused[ROUNDS], compute[ROUNDS], ratio[ROUNDS];
    int calls = tokens == 1 ? 15 : tokens <= 8 ? 5 : 1;
    const bench_tokens of = tokens_of(tokens);
    time_us(FUSED, nodes, NULL, &of, 1);
    time_us(UNFUSED, NULL, ranks, &of, 1);
    for (int r = 0; r < ROUNDS; r++) {
        fused[r] = time_us(FUSED, nodes, NULL, &of, calls);
        unfused[r] = time_us(UNFUSED, NULL, ranks, &of, calls);
        compute[r] = time_us(COMPUTE, NULL, ranks, &of, calls);
        ratio[r] = unfused[r] / fused[r];
        if (memcmp(y, y_other, (size_t)tokens * DECODE_ROW_BYTES) != 0) {
            bench_fail("the two forms differ", NULL);
        }
    }
    double us = bench_quantile(fused, ROUNDS, 0.5);
    bench_report_value(report, us / tokens, "us/token", BENCH_LOWER, NAN, "T = %u, %u nodes",
                       tokens, nodes->count);
    bench_row row = bench_value(tokens / us * 1e6, "tokens/s", BENCH_HIGHER, 1.20);
    row.limit = tokens / bench_quantile(compute, ROUNDS, 0.5) * 1e6;
    row.rival = tokens / bench_quantile(unfused, ROUNDS, 0.5) * 1e6;
    row.ratio = bench_quantile(ratio, ROUNDS, 0.5);
    bench_report_add(report, &row, "T = %u, %u nodes, against unfused", tokens, nodes->count);
    row = bench_value(count_bytes(nodes, &of, tokens == 1 ? 20 : 2) / tokens, "bytes/token",
                      BENCH_LOWER, 1.02);
    row.limit = bytes_min(nodes->count, tokens) / tokens;
    bench_report_add(report, &row, "T = %u, %u nodes, against the least", tokens, nodes->count);
}

static void bench_nodes(bench_report *report, const char *dir, uint32_t count)
{
    static const uint32_t tokens[] = {1, 8, 64, 128};
    static decode_nodes nodes;
    draw_routing(DECODE_EXPERTS);
    decode_nodes_start(&nodes, count, DECODE_EXPERTS, dir, checkpoint, true);
    decode_ranks *ranks = decode_ranks_start(count, dir, checkpoint);
    for (size_t t = 0; t < EP_ARRAY_COUNT(tokens); t++) {
        if (only_tokens == 0 || only_tokens == tokens[t]) {
            bench_case(report, &nodes, ranks, tokens[t]);
        }
    }
    decode_ranks_stop(ranks);
    decode_nodes_stop(&nodes);
}

/* ---- against the same layer in this process ---- */

static double local_time_us(layer_local *local, const bench_tokens *of)
{
    const ep_batch batch = bench_batch(of);
    double us[LOCAL_CALLS];
    for (int i = 0; i < LOCAL_CALLS; i++) {
        double begin = bench_now_us();
        if (layer_local_run(local, &batch, y_other) != EP_OK) {
            bench_fail("local layer", NULL);
        }
        us[i] = bench_now_us() - begin;
    }
    return bench_quantile(us, LOCAL_CALLS, 0.5);
}

static void local_case(bench_report *report, const decode_nodes *node, layer_local *local,
                       uint32_t tokens)
{
    double us[LOCAL_ROUNDS_MAX], local_us[LOCAL_ROUNDS_MAX], ratio[LOCAL_ROUNDS_MAX];
    /* a wake-up more or less matters most where calls are short */
    int rounds = tokens == 1 ? LOCAL_ROUNDS_MAX : tokens <= 8 ? 25 : 15;
    const bench_tokens of = tokens_of(tokens);
    time_us(FUSED, node, NULL, &of, 1);
    decode_lanes before = decode_nodes_lanes(node);
    for (int r = 0; r < rounds; r++) {
        local_us[r] = local_time_us(local, &of);
        us[r] = time_us(FUSED, node, NULL, &of, LOCAL_CALLS);
        ratio[r] = us[r] / local_us[r];
        if (memcmp(y, y_other, (size_t)tokens * DECODE_ROW_BYTES) != 0) {
            bench_fail("the service's result differs from the local one", NULL);
        }
    }
    decode_lanes after = decode_nodes_lanes(node);
    if (after.shm - before.shm < LOCAL_CALLS * rounds * bytes_min(1, tokens)) {
        bench_fail("calls did not go over shared memory", NULL);
    }
    double local_median = bench_quantile(local_us, (size_t)rounds, 0.5);
    bench_report_rival(report, bench_quantile(us, (size_t)rounds, 0.5), "us", local_median,
                       bench_quantile(ratio, (size_t)rounds, 0.5), BENCH_LOWER,
                       local_median >= LOCAL_COMPUTE_MIN_US ? 1.05 : NAN,
                       "T = %u, 1 node over shm, against in-process", tokens);
}

static void bench_local(bench_report *report, const char *dir)
{
    static const uint32_t tokens[] = {1, 8, 64};
    static decode_nodes node;
    layer_local *local;
    ep_error error;
    draw_routing(LOCAL_EXPERTS);
    decode_nodes_start(&node, 1, LOCAL_EXPERTS, dir, checkpoint, false);
    if (layer_local_open_share(checkpoint, 0, 0, LOCAL_EXPERTS, 0, &local, &error) != EP_OK) {
        bench_fail("local layer", error.text);
    }
    for (size_t t = 0; t < EP_ARRAY_COUNT(tokens); t++) {
        if (only_tokens == 0 || only_tokens == tokens[t]) {
            local_case(report, &node, local, tokens[t]);
        }
    }
    layer_local_close(local);
    decode_nodes_stop(&node);
}

/* bench_decode [FILE.json [NODES [TOKENS]]]: one number of nodes (1: against in-process) and of
 * tokens only. */
int main(int argc, char **argv)
{
    static const uint32_t nodes[] = {2, 4, 8};
    char dir[EP_TEST_PATH_BYTES];
    char title[160];
    uint64_t seed = 5;
    if (decode_rank_main(argc, argv)) {
        return 0;
    }
    only_nodes = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    only_tokens = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
    ep_fixture_temp_dir(checkpoint);
    if (!ep_test_dir_create(dir)) {
        bench_fail("no directory", NULL);
    }
    bench_guard((const char *[]){checkpoint, dir}, 2);
    write_checkpoint();
    bench_draw_rows(&seed, EP_ARRAY_COUNT(x), x);
    snprintf(title, sizeof(title),
             "Decode, H = %d, I = %d, top-%d of %d, bf16: microseconds and bytes per token",
             DECODE_HIDDEN, DECODE_INNER, DECODE_TOP_K, DECODE_EXPERTS);
    bench_report *report = bench_report_create(title);
    if (only_nodes <= 1) {
        bench_local(report, dir);
    }
    for (size_t n = 0; n < EP_ARRAY_COUNT(nodes); n++) {
        if (only_nodes == 0 || only_nodes == nodes[n]) {
            bench_nodes(report, dir, nodes[n]);
        }
    }
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
