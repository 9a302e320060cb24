/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench_service.h"

#include <stdio.h>

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"

void bench_daemon_start(const bench_node *node, const char *dir, const char *config,
                        ep_test_process *out_process)
{
    char path[EP_TEST_PATH_BYTES + 64], flag[EP_TEST_PATH_BYTES + 96];
    const char *program = node->program != NULL ? node->program : EP_EXPERTD_PROGRAM;
    const char *const args[] = {"netns", "exec", node->netns, program, flag, NULL};
    snprintf(path, sizeof(path), "%s/%s.yaml", dir, node->name);
    snprintf(flag, sizeof(flag), "--config=%s", path);
    if (!ep_test_write_file(path, config, 0600) ||
        !ep_test_process_start(out_process, dir, node->name,
                               node->netns != NULL ? "/usr/sbin/ip" : program,
                               node->netns != NULL ? args : args + 4, node->environment, true) ||
        !ep_test_process_wait_ports(out_process, BENCH_PATIENCE_MS)) {
        bench_fail(node->name, "did not start");
    }
}

void bench_node_start(const bench_node *node, const char *dir, ep_test_process *out_process)
{
    char config[2048];
    snprintf(config, sizeof(config),
             "node_name: %s\nlisten:\n  - tcp://%s:0\nprobe_address: 127.0.0.1:0\n"
             "admin_listen: ''\ndoor_listen: ''\n%smodels:\n"
             "  - name: " BENCH_MODEL "\n    path: %s\n%s%s\n",
             node->name, node->address != NULL ? node->address : "127.0.0.1",
             node->keys != NULL ? node->keys : "", node->checkpoint,
             node->experts != NULL ? "    experts: " : "",
             node->experts != NULL ? node->experts : "");
    bench_daemon_start(node, dir, config, out_process);
}

ep_client *bench_client_open(const char *const *urls, size_t count,
                             void (*change)(ep_client_config *config))
{
    ep_client *client = NULL;
    ep_client_config config;
    ep_error error;
    ep_client_config_init(&config);
    config.node_urls = urls;
    config.node_urls_count = count;
    if (change != NULL) {
        change(&config);
    }
    if (ep_client_create(&config, &client, &error) != EP_OK ||
        ep_client_wait_ready(client, BENCH_PATIENCE_MS * 1000ll, &error) != EP_OK) {
        bench_fail("client", error.text);
    }
    return client;
}

ep_client *bench_client_of(const ep_test_process *nodes, size_t count,
                           void (*change)(ep_client_config *config))
{
    const char *urls[16];
    EP_ASSERT(count <= EP_ARRAY_COUNT(urls));
    for (size_t n = 0; n < count; n++) {
        urls[n] = nodes[n].rpc_url;
    }
    return bench_client_open(urls, count, change);
}

double bench_metric(const ep_test_process *node, const char *series)
{
    const double value = ep_test_metric(node, series);
    if (value < 0) {
        bench_fail("no such series at /metrics", series);
    }
    return value;
}

void bench_draw_rows(uint64_t *seed, size_t count, uint16_t *out)
{
    for (size_t i = 0; i < count; i++) {
        out[i] = ep_f32_to_bf16((float)(int32_t)ep_splitmix64(seed) * 0x1p-31f);
    }
}

void bench_draw_routing(uint64_t *seed, uint32_t tokens, uint32_t top_k, uint32_t experts,
                        int32_t *out_ids, float *out_scales)
{
    for (uint32_t s = 0; s < tokens * top_k; s++) {
        const uint32_t first = s - s % top_k;
        bool taken;
        do {
            out_ids[s] = (int32_t)(ep_splitmix64(seed) % experts);
            taken = false;
            for (uint32_t j = first; j < s; j++) {
                taken |= out_ids[j] == out_ids[s];
            }
        } while (taken);
        out_scales[s] = 1.0f / (float)top_k;
    }
}

ep_batch bench_batch(const bench_tokens *of)
{
    const int64_t row_bytes = of->top_k * 4;
    return (ep_batch){
        .tokens = of->tokens,
        .top_k = of->top_k,
        .hidden = of->hidden,
        .x = {.data = of->x, .stride_bytes = of->hidden * 2, .dtype = EP_DTYPE_BF16},
        .ids = {.data = of->ids, .stride_bytes = row_bytes, .dtype = EP_DTYPE_I32},
        .scales = {.data = of->scales, .stride_bytes = row_bytes, .dtype = EP_DTYPE_F32},
        .shared_source = EP_SHARED_SERVICE,
        .wire_dtype = EP_DTYPE_BF16,
        .out_dtype = EP_DTYPE_BF16};
}

static ep_tensor tensor_of(const void *data, ep_dtype dtype, uint32_t rows, uint32_t columns)
{
    return ep_tensor_2d((void *)(uintptr_t)data, dtype, rows, columns);
}

ep_moe_args bench_args(const bench_tokens *of)
{
    ep_moe_args args;
    ep_moe_args_init(&args);
    args.model = BENCH_MODEL;
    args.x = tensor_of(of->x, EP_DTYPE_BF16, of->tokens, of->hidden);
    if (of->ids != NULL) {
        args.expert_ids = tensor_of(of->ids, EP_DTYPE_I32, of->tokens, of->top_k);
        args.expert_scales = tensor_of(of->scales, EP_DTYPE_F32, of->tokens, of->top_k);
    }
    args.deadline_us = 600000000;
    return args;
}

double bench_call_us(ep_client *client, const ep_moe_args *args, uint16_t *y)
{
    ep_moe_result result = {.struct_bytes = sizeof(result)};
    const ep_tensor out = ep_tensor_2d(y, EP_DTYPE_BF16, args->x.shape[0], args->x.shape[1]);
    const double begin_us = bench_now_us();
    if (ep_moe_forward(client, args, &out, &result) != EP_OK) {
        bench_fail("forward", result.error.text);
    }
    return bench_now_us() - begin_us;
}
