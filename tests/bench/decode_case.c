/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/decode_case.h"

#include <stdio.h>
#include <time.h>

static void pause_ms(long ms)
{
    const struct timespec pause = {.tv_nsec = ms * 1000000};
    nanosleep(&pause, NULL);
}

static bool is_loaded(const ep_test_process *process)
{
    return ep_test_http_get(process->probe_url, "/readyz", NULL) == 200;
}

static void over_stream(ep_client_config *config)
{
    config->lanes = "stream";
}

void decode_nodes_start(decode_nodes *nodes, uint32_t count, uint32_t experts, const char *dir,
                        const char *checkpoint, bool stream)
{
    uint32_t share = experts / count;
    *nodes = (decode_nodes){.count = count};
    for (uint32_t n = 0; n < count; n++) {
        char name[48], own[32];
        snprintf(name, sizeof(name), "node-%u-of-%u%s", n, count, stream ? "-stream" : "");
        snprintf(own, sizeof(own), "%u-%u", n * share, (n + 1) * share - 1);
        bench_node_start(&(bench_node){.name = name, .checkpoint = checkpoint, .experts = own}, dir,
                         &nodes->processes[n]);
    }
    for (uint32_t n = 0; n < count; n++) {
        while (!is_loaded(&nodes->processes[n])) {
            pause_ms(20);
        }
    }
    nodes->client = bench_client_of(nodes->processes, count, stream ? over_stream : NULL);
}

void decode_nodes_stop(decode_nodes *nodes)
{
    ep_client_destroy(nodes->client);
    for (uint32_t n = 0; n < nodes->count; n++) {
        ep_test_process_destroy(&nodes->processes[n]);
    }
}

void decode_nodes_call(const decode_nodes *nodes, const bench_tokens *tokens, uint16_t *out)
{
    ep_moe_args args = bench_args(tokens);
    args.mode = EP_MOE_DECODE;
    bench_call_us(nodes->client, &args, out);
}

/* ---- bytes ---- */

static double lane_bytes(const decode_nodes *nodes, const char *lane)
{
    static const char *const ways[] = {"received", "sent"};
    double sum = 0;
    for (uint32_t i = 0; i < 2 * nodes->count; i++) {
        char series[96];
        snprintf(series, sizeof(series), "expertd_lane_%s_bytes_total{lane=\"%s\"}", ways[i % 2],
                 lane);
        sum += bench_metric(&nodes->processes[i / 2], series);
    }
    return sum;
}

static decode_lanes read_lanes(const decode_nodes *nodes)
{
    return (decode_lanes){.shm = lane_bytes(nodes, "shm"), .stream = lane_bytes(nodes, "stream")};
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
