/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drives one MoE layer with random batches from several threads for a while and measures.
 *
 * Threads  ep_cli_bench_run starts its own and joins them.
 */
#ifndef EP_CLI_BENCH_H
#define EP_CLI_BENCH_H

#include "expertd/client.h"
#include "latency.h"

#define EP_CLI_BENCH_THREADS_MAX 256
#define EP_CLI_BENCH_ROUTINGS 16 /* different id and scale sets per thread, used in turn */

typedef struct ep_cli_bench_request {
    const char *model;
    const char *version; /* NULL: the default of the model */
    uint32_t layer;
    uint32_t tokens;
    uint32_t top_k;
    uint32_t threads;
    uint64_t duration_us;
    uint64_t deadline_us;
    uint64_t seed;
    ep_moe_mode mode;
    ep_dtype wire_dtype;
    ep_moe_comm comm_alg;
    ep_moe_combine_at combine_at;
    const char *traceparent; /* NULL none */
} ep_cli_bench_request;

typedef struct ep_cli_bench_result {
    uint64_t calls;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t frames;
    uint64_t rerouted_frames;
    /* Sums over the calls; the stages as in ep_moe_result. */
    uint64_t total_us;
    uint64_t pack_us;
    uint64_t wire_us;
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t combine_us;
    /* with comm_alg auto */
    uint64_t hierarchy_calls;
    uint64_t estimated_calls; /* with estimates; their sums */
    uint64_t fullmesh_estimate_us;
    uint64_t hierarchy_estimate_us;
    uint64_t comm_whys[EP_MOE_COMM_WHY_MEASURED + 1];
    uint64_t elapsed_us;
    ep_latency latency;
} ep_cli_bench_result;

/* Random inputs of one thread: x [T,H] bf16, and EP_CLI_BENCH_ROUTINGS sets of ids and scales
 * [T,K]. */
typedef struct ep_cli_bench_batch {
    uint16_t *x;
    int32_t *ids;
    float *scales;
} ep_cli_bench_batch;

/* Distinct experts in every row, scales that add up to about 1; a pure function of seed. False
 * without memory. */
bool ep_cli_bench_batch_fill(ep_cli_bench_batch *out_batch, const ep_layer_desc *layer,
                             uint32_t tokens, uint32_t top_k, uint64_t seed);
void ep_cli_bench_batch_free(ep_cli_bench_batch *batch);

/* Finds the requested layer; top_k 0 becomes the layer's. Errors: NOT_FOUND, INVALID_ARGUMENT (more
 * experts per token than it has). */
ep_err ep_cli_bench_find_layer(ep_client *client, ep_cli_bench_request *request,
                               ep_layer_desc *out_layer, ep_error *out_error);

/* The first failed call ends the run. Errors: those of ep_moe_forward, NO_MEMORY. Call
 * ep_latency_fini on the result's latency in any case. */
ep_err ep_cli_bench_run(ep_client *client, const ep_cli_bench_request *request,
                        const ep_layer_desc *layer, ep_cli_bench_result *out_result,
                        ep_error *out_error);

#endif
