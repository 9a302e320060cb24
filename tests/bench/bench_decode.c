/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode through the service at the shape of a large model: H = 7168, I = 256, top-8 of 256 experts, spread evenly over 2, 4 and 8 nodes
 * (real expertd processes that map one checkpoint; each keeps its share packed). For each T: microseconds and bytes per token.
 *
 * Bytes    against the least that has to travel, computed here from ids and shapes alone: a row for each (token, distinct node), and for
 *          each slot 8 request bytes and a reply row. What the client counts leaves out the protobuf header of a request; HEADER_BYTES for
 *          each frame are added for it.
 * Unfused  the same packing, lane (the stream) and kernels with a barrier between the steps: exchange counts with every node, exchange rows, wait for
 *          all, combine. Rounds of both alternate; the median of their ratios is reported.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/numeric.h"
#include "base/random.h"
#include "bench/bench_report.h"
#include "expert.pb-c.h"
#include "expertd/client.h"
#include "health.pb-c.h"
#include "moe/combine.h"
#include "moe/routing_plan.h"
#include "rpc/rpc.h"
#include "support/checkpoint_fixture.h"
#include "support/process.h"
#include "wire/forward_codec.h"

#define HIDDEN 7168
#define INNER 256
#define EXPERTS 256
#define TOP_K 8
#define TOKENS_MAX 128
#define NODES_MAX 8
#define ROUNDS 7
#define ROW_BYTES (HIDDEN * 2)
#define HEADER_BYTES 192

static uint16_t x[TOKENS_MAX * HIDDEN];
static uint16_t y[TOKENS_MAX * HIDDEN], y_unfused[TOKENS_MAX * HIDDEN];
static int32_t ids[TOKENS_MAX * TOP_K];
static float scales[TOKENS_MAX * TOP_K];

typedef struct answer {
    struct cluster *cluster;
    ep_buffer *frame;
    const uint8_t *tensors;
} answer;

typedef struct cluster {
    uint32_t nodes_count;
    ep_test_process nodes[NODES_MAX];
    ep_client *client;
    /* the unfused form */
    ep_rpc_common common;
    ep_rpc_channel *channels[NODES_MAX];
    ep_routing_plan plan;
    const void *rows[TOKENS_MAX * TOP_K];
    float *scratch;
    answer answers[NODES_MAX];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t awaited;
} cluster;

static const ep_layer_shape shape = {.hidden = HIDDEN, .inner = INNER, .experts = EXPERTS, .top_k = TOP_K};

static void fail(const char *what, const ep_error *error)
{
    fprintf(stderr, "bench_decode: %s: %s\n", what, error != NULL ? error->text : "");
    exit(1);
}

static char checkpoint[EP_FIXTURE_PATH_BYTES];

/* However the benchmark ends: it is 2.8 GB. */
static void remove_checkpoint(void)
{
    ep_fixture_remove(checkpoint);
}

static uint32_t owner(const cluster *c, int32_t expert)
{
    return (uint32_t)expert / (EXPERTS / c->nodes_count);
}

static void make_inputs(void)
{
    uint64_t seed = 5;
    for (size_t i = 0; i < EP_ARRAY_COUNT(x); i++) {
        x[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(&seed) * 0x1p-31f);
    }
    for (size_t t = 0; t < TOKENS_MAX; t++) {
        bool taken[EXPERTS] = {false};
        for (size_t k = 0; k < TOP_K; k++) {
            int32_t id;
            do {
                id = (int32_t)(ep_splitmix64(&seed) % EXPERTS);
            } while (taken[id]);
            taken[id] = true;
            ids[t * TOP_K + k] = id;
            scales[t * TOP_K + k] = 1.0f / TOP_K;
        }
    }
}

/* ---- the service ---- */

static void start_nodes(cluster *c, const char *dir)
{
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        char name[32], path[EP_TEST_PATH_BYTES + 64], config[1024], flag[EP_TEST_PATH_BYTES + 96];
        uint32_t share = EXPERTS / c->nodes_count;
        snprintf(name, sizeof(name), "node-%u-of-%u", n, c->nodes_count);
        snprintf(path, sizeof(path), "%s/%s.yaml", dir, name);
        snprintf(config, sizeof(config),
                 "node_name: %s\nlisten:\n  - tcp://127.0.0.1:0\nprobe_address: ''\nadmin_listen: ''\ndoor_listen: ''\nmodels:\n"
                 "  - name: bench\n    path: %s\n    experts: %u-%u\n",
                 name, checkpoint, n * share, (n + 1) * share - 1);
        snprintf(flag, sizeof(flag), "--config=%s", path);
        const char *args[] = {flag, NULL};
        if (!ep_test_write_file(path, config, 0600) ||
            !ep_test_process_start(&c->nodes[n], dir, name, EP_EXPERTD_PROGRAM, args, NULL, true) ||
            !ep_test_process_wait_ports(&c->nodes[n], 60000)) {
            fail("expertd did not start", NULL);
        }
    }
}

static void open_client(cluster *c)
{
    const char *urls[NODES_MAX];
    ep_client_config config;
    ep_error error;
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        urls[n] = c->nodes[n].rpc_url;
    }
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = c->nodes_count;
    config.lanes = "stream"; /* that of the unfused form */
    if (ep_client_create(&config, &c->client, &error) != EP_OK ||
        ep_client_wait_ready(c->client, 120000000, &error) != EP_OK) {
        fail("client", &error);
    }
}

/* Nodes take part while they still load. */
static void wait_loaded(cluster *c)
{
    ep_layer_desc layer = {.struct_bytes = sizeof(layer)};
    const struct timespec pause = {.tv_nsec = 50000000};
    while (ep_client_layer(c->client, "bench", NULL, 0, &layer) != EP_OK || layer.copies_min == 0) {
        nanosleep(&pause, NULL);
    }
}

static void run_fused(cluster *c, uint32_t tokens, ep_moe_result *out_result)
{
    ep_moe_args args;
    ep_moe_args_init(&args);
    *out_result = (ep_moe_result){.struct_bytes = sizeof(*out_result)};
    args.model = "bench";
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, tokens, HIDDEN);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, tokens, TOP_K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, tokens, TOP_K);
    args.mode = EP_MOE_DECODE;
    args.deadline_us = 60000000;
    ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, tokens, HIDDEN);
    if (ep_moe_forward(c->client, &args, &out, out_result) != EP_OK) {
        fail("forward", &out_result->error);
    }
}

/* ---- the unfused form ---- */

static void open_channels(cluster *c)
{
    ep_error error;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    ep_routing_plan_init(&c->plan);
    size_t scratch = ep_combine_scratch_floats(HIDDEN) * sizeof(float);
    c->scratch = aligned_alloc(64, (scratch + 63) / 64 * 64);
    c->common = (ep_rpc_common){
        .token = "", .node = "", .role = "client", .incarnation = ep_random_id(), .payload_crc = true};
    ep_rpc_limits_default(&c->common.limits);
    if (c->scratch == NULL || ep_timer_service_create("unfused", &c->common.timers) != EP_OK ||
        ep_buffer_pool_create(0, 256 << 20, &c->common.pool) != EP_OK) {
        fail("no memory", NULL);
    }
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        ep_rpc_channel_config config = {.common = c->common,
                                        .address = {.url = c->nodes[n].rpc_url},
                                        .connection_class = "decode"};
        if (ep_rpc_channel_create(&config, &c->channels[n], &error) != EP_OK ||
            ep_rpc_channel_wait_ready(c->channels[n], ep_clock_now_ns() + 20 * EP_NS_PER_S, &error) != EP_OK) {
            fail("channel", &error);
        }
    }
}

static void on_answer(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    answer *a = arg;
    if (error != NULL) {
        fail("unfused", error);
    }
    a->frame = ep_buffer_ref(reply->frame);
    a->tensors = reply->tensors;
    pthread_mutex_lock(&a->cluster->lock);
    if (--a->cluster->awaited == 0) {
        pthread_cond_signal(&a->cluster->changed);
    }
    pthread_mutex_unlock(&a->cluster->lock);
}

static void send(cluster *c, uint32_t node, uint32_t index, const ep_rpc_method *method, const ProtobufCMessage *header,
                 ep_buffer *tensors)
{
    ep_error error;
    ep_rpc_request request = {
        .method = method, .header = header, .tensors = tensors, .deadline_ns = ep_clock_now_ns() + 60 * EP_NS_PER_S};
    c->answers[index].cluster = c;
    pthread_mutex_lock(&c->lock);
    c->awaited++;
    pthread_mutex_unlock(&c->lock);
    if (ep_rpc_call_start(c->channels[node], &request, on_answer, &c->answers[index], NULL, &error) != EP_OK) {
        fail("unfused", &error);
    }
}

static void barrier(cluster *c)
{
    pthread_mutex_lock(&c->lock);
    while (c->awaited > 0) {
        pthread_cond_wait(&c->changed, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
}

static void drop_answers(cluster *c, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        ep_buffer_unref(c->answers[i].frame);
        c->answers[i].frame = NULL;
    }
}

static void exchange_counts(cluster *c)
{
    Expertd__V1__HealthCheckRequest header = EXPERTD__V1__HEALTH_CHECK_REQUEST__INIT;
    const ep_rpc_method *method = ep_rpc_method_by_name("expertd.v1.Health", "Check");
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        send(c, n, n, method, &header.base, NULL);
    }
    barrier(c);
    drop_answers(c, c->nodes_count);
}

static void exchange_rows(cluster *c, const ep_batch *batch)
{
    const ep_rpc_method *method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward");
    for (uint32_t i = 0; i < c->plan.chunks_count; i++) {
        Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
        ep_buffer *tensors = NULL;
        if (ep_forward_pack(batch, &c->plan, i, TOP_K, c->common.pool, &header, &tensors) != EP_OK) {
            fail("pack", NULL);
        }
        header.model = (char *)(uintptr_t) "bench";
        send(c, c->plan.chunks[i].node, i, method, &header.base, tensors);
        ep_buffer_unref(tensors);
    }
    barrier(c);
}

static void run_unfused(cluster *c, uint32_t tokens)
{
    uint32_t chosen[EXPERTS];
    uint64_t room[NODES_MAX];
    ep_error error;
    ep_routing_layer layer = {.shape = shape};
    ep_batch batch = {.tokens = tokens,
                      .top_k = TOP_K,
                      .hidden = HIDDEN,
                      .x = {.data = x, .stride_bytes = ROW_BYTES, .dtype = EP_DTYPE_BF16},
                      .ids = {.data = ids, .stride_bytes = TOP_K * 4, .dtype = EP_DTYPE_I32},
                      .scales = {.data = scales, .stride_bytes = TOP_K * 4, .dtype = EP_DTYPE_F32},
                      .shared_source = EP_SHARED_SERVICE,
                      .wire_dtype = EP_DTYPE_BF16,
                      .out_dtype = EP_DTYPE_BF16};
    for (int32_t e = 0; e < EXPERTS; e++) {
        chosen[e] = owner(c, e);
    }
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        room[n] = c->common.limits.frame_bytes_max - 8192;
    }
    const ep_plan_cut cut = {
        .row_bytes = ROW_BYTES, .slot_bytes = sizeof(ep_wire_slot), .reply_slot_bytes = ROW_BYTES, .room_bytes = room};
    if (ep_routing_plan_build(&c->plan, &batch, &layer, c->nodes_count, chosen, &cut, 0, tokens, NULL, 0, &error) != EP_OK) {
        fail("plan", &error);
    }
    EP_ASSERT(c->plan.chunks_count <= NODES_MAX);
    exchange_counts(c);
    exchange_rows(c, &batch);
    for (uint32_t i = 0; i < c->plan.chunks_count; i++) {
        const ep_plan_chunk *chunk = &c->plan.chunks[i];
        for (uint32_t s = 0; s < chunk->slots_count; s++) {
            c->rows[c->plan.slots[chunk->slots_begin + s].slot_number] = c->answers[i].tensors + (size_t)s * ROW_BYTES;
        }
    }
    ep_combine(&batch, &shape, c->rows, 0, tokens, c->scratch,
               &(ep_combine_out){.data = y_unfused, .token_stride_bytes = ROW_BYTES});
    drop_answers(c, c->plan.chunks_count);
}

static void stop(cluster *c)
{
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        ep_rpc_channel_destroy(c->channels[n]);
    }
    ep_buffer_pool_destroy(c->common.pool);
    ep_timer_service_destroy(c->common.timers);
    ep_routing_plan_fini(&c->plan);
    free(c->scratch);
    ep_client_destroy(c->client);
    for (uint32_t n = 0; n < c->nodes_count; n++) {
        ep_test_process_destroy(&c->nodes[n]);
    }
}

/* ---- rows ---- */

/* Nodes are a bit each. */
static double bytes_min(const cluster *c, uint32_t tokens)
{
    double bytes = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        uint32_t nodes = 0;
        for (uint32_t k = 0; k < TOP_K; k++) {
            nodes |= 1u << owner(c, ids[t * TOP_K + k]);
            bytes += 8 + ROW_BYTES;
        }
        bytes += (double)__builtin_popcount(nodes) * ROW_BYTES;
    }
    return bytes;
}

static double time_us(cluster *c, uint32_t tokens, bool fused, int calls, ep_moe_result *result)
{
    double us[256];
    for (int i = 0; i < calls; i++) {
        double begin = bench_now_us();
        if (fused) {
            run_fused(c, tokens, result);
        } else {
            run_unfused(c, tokens);
        }
        us[i] = bench_now_us() - begin;
    }
    return bench_quantile(us, (size_t)calls, 0.5);
}

static void bench_case(bench_report *report, cluster *c, uint32_t tokens)
{
    double fused[ROUNDS], unfused[ROUNDS], ratio[ROUNDS];
    ep_moe_result result;
    int calls = tokens <= 8 ? 30 : 3;
    time_us(c, tokens, true, 2, &result);
    time_us(c, tokens, false, 2, &result);
    for (int r = 0; r < ROUNDS; r++) {
        fused[r] = time_us(c, tokens, true, calls, &result);
        unfused[r] = time_us(c, tokens, false, calls, &result);
        ratio[r] = unfused[r] / fused[r];
        if (memcmp(y, y_unfused, (size_t)tokens * ROW_BYTES) != 0) {
            fail("the two forms differ", NULL);
        }
    }
    double us = bench_quantile(fused, ROUNDS, 0.5);
    bench_row row = {.unit = "us/token", .value = us / tokens, .limit = NAN, .rival = NAN, .ratio = NAN,
                     .better = BENCH_LOWER, .bar = NAN};
    snprintf(row.name, sizeof(row.name), "T = %u, %u nodes", tokens, c->nodes_count);
    bench_report_add(report, &row);
    row = (bench_row){.unit = "tokens/s", .value = tokens / us * 1e6, .limit = NAN,
                      .rival = tokens / bench_quantile(unfused, ROUNDS, 0.5) * 1e6,
                      .ratio = bench_quantile(ratio, ROUNDS, 0.5), .better = BENCH_HIGHER, .bar = 1.20};
    snprintf(row.name, sizeof(row.name), "T = %u, %u nodes, against unfused", tokens, c->nodes_count);
    bench_report_add(report, &row);
    double sent = (double)(result.bytes_sent + result.bytes_received) + (double)result.frames * HEADER_BYTES;
    row = (bench_row){.unit = "bytes/token", .value = sent / tokens, .limit = bytes_min(c, tokens) / tokens, .rival = NAN,
                      .ratio = NAN, .better = BENCH_LOWER, .bar = 1.02};
    snprintf(row.name, sizeof(row.name), "T = %u, %u nodes, against the least", tokens, c->nodes_count);
    bench_report_add(report, &row);
}

int main(int argc, char **argv)
{
    static const uint32_t nodes[] = {2, 4, 8};
    static const uint32_t tokens[] = {1, 8, 64, 128};
    char dir[EP_TEST_PATH_BYTES];
    ep_error error;
    ep_fixture_config fixture = ep_fixture_default();
    fixture.layers = 1;
    fixture.hidden = HIDDEN;
    fixture.inner = INNER;
    fixture.experts = EXPERTS;
    fixture.top_k = TOP_K;
    ep_fixture_temp_dir(checkpoint);
    atexit(remove_checkpoint);
    if (!ep_test_dir_create(dir) || ep_fixture_write(&fixture, checkpoint, &error) != EP_OK) {
        fail("checkpoint", &error);
    }
    make_inputs();
    char title[160];
    snprintf(title, sizeof(title), "Decode, H = %d, I = %d, top-%d of %d, bf16: microseconds and bytes per token", HIDDEN, INNER,
             TOP_K, EXPERTS);
    bench_report *report = bench_report_create(title);
    for (size_t n = 0; n < EP_ARRAY_COUNT(nodes); n++) {
        static cluster c;
        memset(&c, 0, sizeof(c));
        c.nodes_count = nodes[n];
        start_nodes(&c, dir);
        open_client(&c);
        wait_loaded(&c);
        open_channels(&c);
        for (size_t t = 0; t < EP_ARRAY_COUNT(tokens); t++) {
            bench_case(report, &c, tokens[t]);
        }
        stop(&c);
    }
    ep_test_dir_remove(dir);
    return bench_report_finish(report, argc > 1 ? argv[1] : NULL);
}
