/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/decode_case.h"

#include "bench/bench_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/random.h"

static void pause_ms(long ms)
{
    const struct timespec pause = {.tv_nsec = ms * 1000000};
    nanosleep(&pause, NULL);
}

ep_batch decode_batch(uint32_t tokens, const uint16_t *x, const int32_t *ids, const float *scales)
{
    return (ep_batch){
        .tokens = tokens,
        .top_k = DECODE_TOP_K,
        .hidden = DECODE_HIDDEN,
        .x = {.data = x, .stride_bytes = DECODE_ROW_BYTES, .dtype = EP_DTYPE_BF16},
        .ids = {.data = ids, .stride_bytes = DECODE_TOP_K * 4, .dtype = EP_DTYPE_I32},
        .scales = {.data = scales, .stride_bytes = DECODE_TOP_K * 4, .dtype = EP_DTYPE_F32},
        .shared_source = EP_SHARED_SERVICE,
        .wire_dtype = EP_DTYPE_BF16,
        .out_dtype = EP_DTYPE_BF16};
}

void decode_draw_ids(int32_t *ids, uint32_t tokens, uint32_t experts, uint64_t seed)
{
    for (uint32_t t = 0; t < tokens; t++) {
        bool taken[DECODE_EXPERTS] = {false};
        for (uint32_t k = 0; k < DECODE_TOP_K; k++) {
            int32_t id;
            do {
                id = (int32_t)(ep_splitmix64(&seed) % experts);
            } while (taken[id]);
            taken[id] = true;
            ids[t * DECODE_TOP_K + k] = id;
        }
    }
}

/* ---- nodes ---- */

static void start_node(ep_test_process *process, const char *dir, const char *name,
                       const char *checkpoint, uint32_t first, uint32_t count)
{
    char path[EP_TEST_PATH_BYTES + 64], config[1024], flag[EP_TEST_PATH_BYTES + 96];
    snprintf(path, sizeof(path), "%s/%s.yaml", dir, name);
    snprintf(config, sizeof(config),
             "node_name: %s\nlisten:\n  - tcp://127.0.0.1:0\nprobe_address: "
             "127.0.0.1:0\nadmin_listen: ''\ndoor_listen: ''\nmodels:\n"
             "  - name: bench\n    path: %s\n    experts: %u-%u\n",
             name, checkpoint, first, first + count - 1);
    snprintf(flag, sizeof(flag), "--config=%s", path);
    const char *args[] = {flag, NULL};
    if (!ep_test_write_file(path, config, 0600) ||
        !ep_test_process_start(process, dir, name, EP_EXPERTD_PROGRAM, args, NULL, true)) {
        bench_fail("expertd did not start", NULL);
    }
}

static bool is_loaded(const ep_test_process *process)
{
    return ep_test_http_get(process->probe_url, "/readyz", NULL) == 200;
}

void decode_nodes_start(decode_nodes *nodes, uint32_t count, uint32_t experts, const char *dir,
                        const char *checkpoint, const char *lanes)
{
    const char *urls[DECODE_NODES_MAX];
    ep_client_config config;
    ep_error error;
    uint32_t share = experts / count;
    *nodes = (decode_nodes){.count = count};
    for (uint32_t n = 0; n < count; n++) {
        char name[48];
        snprintf(name, sizeof(name), "node-%u-of-%u-%s", n, count, lanes);
        start_node(&nodes->processes[n], dir, name, checkpoint, n * share, share);
    }
    for (uint32_t n = 0; n < count; n++) {
        if (!ep_test_process_wait_ports(&nodes->processes[n], 60000)) {
            bench_fail("expertd did not start", NULL);
        }
        while (!is_loaded(&nodes->processes[n])) {
            pause_ms(20);
        }
        urls[n] = nodes->processes[n].rpc_url;
    }
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = count;
    if (lanes[0] != '\0') {
        config.lanes = lanes;
    }
    if (ep_client_create(&config, &nodes->client, &error) != EP_OK ||
        ep_client_wait_ready(nodes->client, 60000000, &error) != EP_OK) {
        bench_fail("client", error.text);
    }
}

void decode_nodes_stop(decode_nodes *nodes)
{
    ep_client_destroy(nodes->client);
    for (uint32_t n = 0; n < nodes->count; n++) {
        ep_test_process_destroy(&nodes->processes[n]);
    }
}

void decode_nodes_call(const decode_nodes *nodes, const ep_batch *batch, uint16_t *out)
{
    ep_moe_args args;
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    ep_moe_args_init(&args);
    args.model = "bench";
    args.x =
        ep_tensor_2d((void *)(uintptr_t)batch->x.data, EP_DTYPE_BF16, batch->tokens, DECODE_HIDDEN);
    args.expert_ids =
        ep_tensor_2d((void *)(uintptr_t)batch->ids.data, EP_DTYPE_I32, batch->tokens, DECODE_TOP_K);
    args.expert_scales = ep_tensor_2d((void *)(uintptr_t)batch->scales.data, EP_DTYPE_F32,
                                      batch->tokens, DECODE_TOP_K);
    args.mode = EP_MOE_DECODE;
    args.deadline_us = 60000000;
    ep_tensor y = ep_tensor_2d(out, EP_DTYPE_BF16, batch->tokens, DECODE_HIDDEN);
    if (ep_moe_forward(nodes->client, &args, &y, &result) != EP_OK) {
        bench_fail("forward", result.error.text);
    }
}

/* ---- bytes ---- */

static double series(const char *metrics, const char *name)
{
    const char *at = strstr(metrics, name);
    if (at == NULL) {
        bench_fail("a node does not count", NULL);
    }
    return strtod(at + strlen(name), NULL);
}

static decode_lanes read_lanes(const decode_nodes *nodes)
{
    decode_lanes sum = {0};
    for (uint32_t n = 0; n < nodes->count; n++) {
        char *body = NULL;
        if (ep_test_http_get(nodes->processes[n].probe_url, "/metrics", &body) != 200) {
            bench_fail("a node has no metrics", NULL);
        }
        sum.shm += series(body, "expertd_lane_received_bytes_total{lane=\"shm\"} ") +
                   series(body, "expertd_lane_sent_bytes_total{lane=\"shm\"} ");
        sum.stream += series(body, "expertd_lane_received_bytes_total{lane=\"stream\"} ") +
                      series(body, "expertd_lane_sent_bytes_total{lane=\"stream\"} ");
        free(body);
    }
    return sum;
}

/* A node counts a reply when its lane is done with it, which may be after the client has it. */
decode_lanes decode_nodes_lanes(const decode_nodes *nodes)
{
    decode_lanes before, now = read_lanes(nodes);
    do {
        before = now;
        pause_ms(5);
        now = read_lanes(nodes);
    } while (now.shm + now.stream > before.shm + before.stream);
    return now;
}
