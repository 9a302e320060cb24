/* SPDX-License-Identifier: Apache-2.0 */
/* Random batches and the threads that send them. */
#include "bench.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/numeric.h"
#include "base/random.h"

typedef struct bench_shared {
    ep_client *client;
    const ep_cli_bench_request *request;
    const ep_layer_desc *layer;
    pthread_mutex_t lock; /* guards warm_count, go and end_ns */
    pthread_cond_t changed;
    uint32_t warm_count; /* threads that have made their first call */
    bool go;
    uint64_t end_ns;
    bool stop; /* atomic: a call failed, or a thread could not be started */
} bench_shared;

typedef struct bench_thread {
    bench_shared *shared;
    pthread_t thread;
    ep_cli_bench_batch batch;
    uint16_t *out;
    ep_cli_bench_result result;
    ep_error error; /* code EP_OK: none */
} bench_thread;

/* -1 .. 1 */
static float random_value(uint64_t *state)
{
    return (float)(ep_splitmix64(state) >> 40) * 0x1p-23f - 1.0f;
}

static void fill_row(int32_t *ids, float *scales, uint32_t top_k, uint32_t experts, uint64_t *state)
{
    for (uint32_t k = 0; k < top_k; k++) {
        bool again = true;
        while (again) { /* ends, since K <= E */
            ids[k] = (int32_t)(ep_splitmix64(state) % experts);
            again = false;
            for (uint32_t j = 0; j < k; j++) {
                again = again || ids[j] == ids[k];
            }
        }
        scales[k] = 1.0f / (float)top_k;
    }
}

bool ep_cli_bench_batch_fill(ep_cli_bench_batch *out_batch, const ep_layer_desc *layer,
                             uint32_t tokens, uint32_t top_k, uint64_t seed)
{
    size_t values = (size_t)tokens * layer->hidden;
    size_t slots = (size_t)tokens * top_k * EP_CLI_BENCH_ROUTINGS;
    uint64_t state = seed;
    EP_ASSERT(top_k >= 1 && top_k <= layer->experts);
    out_batch->x = calloc(values + 1, sizeof(*out_batch->x));
    out_batch->ids = calloc(slots + 1, sizeof(*out_batch->ids));
    out_batch->scales = calloc(slots + 1, sizeof(*out_batch->scales));
    if (out_batch->x == NULL || out_batch->ids == NULL || out_batch->scales == NULL) {
        ep_cli_bench_batch_free(out_batch);
        return false;
    }
    for (size_t i = 0; i < values; i++) {
        out_batch->x[i] = ep_f32_to_bf16(random_value(&state));
    }
    for (size_t i = 0; i < slots; i += top_k) {
        fill_row(out_batch->ids + i, out_batch->scales + i, top_k, layer->experts, &state);
    }
    return true;
}

void ep_cli_bench_batch_free(ep_cli_bench_batch *batch)
{
    free(batch->x);
    free(batch->ids);
    free(batch->scales);
    *batch = (ep_cli_bench_batch){0};
}

static bool call_once(bench_thread *self, uint64_t turn, ep_moe_result *result)
{
    const bench_shared *shared = self->shared;
    const ep_cli_bench_request *request = shared->request;
    size_t routing = (size_t)(turn % EP_CLI_BENCH_ROUTINGS) * request->tokens * request->top_k;
    ep_moe_args args;
    ep_tensor out = ep_tensor_2d(self->out, EP_DTYPE_BF16, request->tokens, shared->layer->hidden);
    ep_moe_args_init(&args);
    *result = (ep_moe_result){.struct_bytes = sizeof(*result)};
    args.model = request->model;
    args.version = request->version;
    args.layer = request->layer;
    args.mode = request->mode;
    args.wire_dtype = request->wire_dtype;
    args.comm_alg = request->comm_alg;
    args.combine_at = request->combine_at;
    args.deadline_us = request->deadline_us;
    args.traceparent = request->traceparent;
    args.want_timing = true;
    args.x = ep_tensor_2d(self->batch.x, EP_DTYPE_BF16, request->tokens, shared->layer->hidden);
    args.expert_ids =
        ep_tensor_2d(self->batch.ids + routing, EP_DTYPE_I32, request->tokens, request->top_k);
    args.expert_scales =
        ep_tensor_2d(self->batch.scales + routing, EP_DTYPE_F32, request->tokens, request->top_k);
    ep_err err = ep_moe_forward(shared->client, &args, &out, result);
    if (err != EP_OK) {
        self->error = result->error;
        self->error.code = err;
        __atomic_store_n(&self->shared->stop, true, __ATOMIC_RELAXED);
    }
    return err == EP_OK;
}

static void count_call(ep_cli_bench_result *sums, const ep_moe_result *result)
{
    sums->calls++;
    sums->frames += result->frames;
    sums->rerouted_frames += result->rerouted_frames;
    sums->bytes_sent += result->bytes_sent;
    sums->bytes_received += result->bytes_received;
    sums->total_us += result->total_us;
    sums->pack_us += result->pack_us;
    sums->wire_us += result->wire_us;
    sums->queue_us += result->queue_us;
    sums->compute_us += result->compute_us;
    sums->combine_us += result->combine_us;
    sums->hierarchy_calls += result->comm_alg == EP_MOE_COMM_HIERARCHY;
    sums->estimated_calls += result->fullmesh_us > 0;
    sums->fullmesh_estimate_us += result->fullmesh_us;
    sums->hierarchy_estimate_us += result->hierarchy_us;
    EP_ASSERT(result->comm_why < EP_ARRAY_COUNT(sums->comm_whys));
    sums->comm_whys[result->comm_why]++;
}

/* Waits until all threads are warm; returns the time at which to end. */
static uint64_t wait_for_go(bench_shared *shared)
{
    pthread_mutex_lock(&shared->lock);
    shared->warm_count++;
    pthread_cond_broadcast(&shared->changed);
    while (!shared->go) {
        pthread_cond_wait(&shared->changed, &shared->lock);
    }
    uint64_t end_ns = shared->end_ns;
    pthread_mutex_unlock(&shared->lock);
    return end_ns;
}

static void *thread_main(void *arg)
{
    bench_thread *self = arg;
    bench_shared *shared = self->shared;
    ep_moe_result result;
    /* makes connections and buffers before the measurement */
    bool good = call_once(self, 0, &result);
    uint64_t end_ns = wait_for_go(shared);
    for (uint64_t turn = 1; good && !__atomic_load_n(&shared->stop, __ATOMIC_RELAXED); turn++) {
        uint64_t begin_ns = ep_clock_now_ns();
        if (begin_ns >= end_ns) {
            break;
        }
        good = call_once(self, turn, &result);
        if (good) {
            ep_latency_add(&self->result.latency, (ep_clock_now_ns() - begin_ns) / EP_NS_PER_US);
            count_call(&self->result, &result);
        }
    }
    return NULL;
}

/* Starts all threads, releases them together and joins them; *out_elapsed_us: the time they ran. */
static ep_err run_threads(bench_shared *shared, bench_thread *threads, uint64_t *out_elapsed_us,
                          ep_error *out_error)
{
    uint32_t count = shared->request->threads;
    uint32_t started = 0;
    while (started < count &&
           pthread_create(&threads[started].thread, NULL, thread_main, &threads[started]) == 0) {
        started++;
    }
    pthread_mutex_lock(&shared->lock);
    if (started < count) {
        __atomic_store_n(&shared->stop, true, __ATOMIC_RELAXED);
    }
    while (shared->warm_count < started) {
        pthread_cond_wait(&shared->changed, &shared->lock);
    }
    uint64_t begin_ns = ep_clock_now_ns();
    shared->end_ns = begin_ns + shared->request->duration_us * EP_NS_PER_US;
    shared->go = true;
    pthread_cond_broadcast(&shared->changed);
    pthread_mutex_unlock(&shared->lock);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i].thread, NULL);
    }
    *out_elapsed_us = (ep_clock_now_ns() - begin_ns) / EP_NS_PER_US;
    return started == count
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                              "only %u of %u threads could be started", started, count);
}

static ep_err prepare(bench_shared *shared, bench_thread *threads, ep_error *out_error)
{
    const ep_cli_bench_request *request = shared->request;
    for (uint32_t i = 0; i < request->threads; i++) {
        threads[i].shared = shared;
        ep_error_clear(&threads[i].error);
        threads[i].out =
            calloc((size_t)request->tokens * shared->layer->hidden + 1, sizeof(*threads[i].out));
        if (threads[i].out == NULL ||
            !ep_cli_bench_batch_fill(&threads[i].batch, shared->layer, request->tokens,
                                     request->top_k, request->seed + i)) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                "no memory for the batches of %u threads", request->threads);
        }
    }
    return EP_OK;
}

/* Adds up the threads' results; the first error counts. */
static ep_err collect(const bench_thread *threads, uint32_t count, ep_cli_bench_result *result,
                      ep_error *out_error)
{
    for (uint32_t i = 0; i < count; i++) {
        const ep_cli_bench_result *part = &threads[i].result;
        if (threads[i].error.code != EP_OK) {
            *out_error = threads[i].error;
            return threads[i].error.code;
        }
        result->calls += part->calls;
        result->frames += part->frames;
        result->rerouted_frames += part->rerouted_frames;
        result->bytes_sent += part->bytes_sent;
        result->bytes_received += part->bytes_received;
        result->total_us += part->total_us;
        result->pack_us += part->pack_us;
        result->wire_us += part->wire_us;
        result->queue_us += part->queue_us;
        result->compute_us += part->compute_us;
        result->combine_us += part->combine_us;
        result->hierarchy_calls += part->hierarchy_calls;
        result->estimated_calls += part->estimated_calls;
        result->fullmesh_estimate_us += part->fullmesh_estimate_us;
        result->hierarchy_estimate_us += part->hierarchy_estimate_us;
        for (size_t why = 0; why < EP_ARRAY_COUNT(part->comm_whys); why++) {
            result->comm_whys[why] += part->comm_whys[why];
        }
        ep_latency_merge(&result->latency, &part->latency);
    }
    return EP_OK;
}

ep_err ep_cli_bench_run(ep_client *client, const ep_cli_bench_request *request,
                        const ep_layer_desc *layer, ep_cli_bench_result *out_result,
                        ep_error *out_error)
{
    bench_shared shared = {.client = client, .request = request, .layer = layer};
    bench_thread *threads = calloc(request->threads, sizeof(*threads));
    memset(out_result, 0, sizeof(*out_result));
    if (threads == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for %u threads",
                            request->threads);
    }
    pthread_mutex_init(&shared.lock, NULL);
    pthread_cond_init(&shared.changed, NULL);
    ep_err err = prepare(&shared, threads, out_error);
    err = err != EP_OK ? err : run_threads(&shared, threads, &out_result->elapsed_us, out_error);
    err = err != EP_OK ? err : collect(threads, request->threads, out_result, out_error);
    for (uint32_t i = 0; i < request->threads; i++) {
        ep_latency_fini(&threads[i].result.latency);
        ep_cli_bench_batch_free(&threads[i].batch);
        free(threads[i].out);
    }
    pthread_cond_destroy(&shared.changed);
    pthread_mutex_destroy(&shared.lock);
    free(threads);
    return err;
}

ep_err ep_cli_bench_find_layer(ep_client *client, ep_cli_bench_request *request,
                               ep_layer_desc *out_layer, ep_error *out_error)
{
    ep_err err = EP_OK;
    uint32_t count = 0;
    for (; err == EP_OK; count++) {
        *out_layer = (ep_layer_desc){.struct_bytes = sizeof(*out_layer)};
        err = ep_client_layer(client, request->model, request->version, count, out_layer);
        if (err == EP_OK && out_layer->layer == request->layer) {
            request->top_k = request->top_k > 0 ? request->top_k : out_layer->top_k;
            if (request->top_k > out_layer->experts) {
                return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                                    "--top-k is %" PRIu32 ", allowed: 1..%" PRIu32
                                    ", the experts of layer %" PRIu32,
                                    request->top_k, out_layer->experts, request->layer);
            }
            return EP_OK;
        }
    }
    return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                        "the service has no layer %" PRIu32 " of model '%s'%s%s; it has %" PRIu32
                        " layers of it",
                        request->layer, request->model, request->version != NULL ? " version " : "",
                        request->version != NULL ? request->version : "", count - 1);
}
