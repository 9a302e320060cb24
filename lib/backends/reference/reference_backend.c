/* SPDX-License-Identifier: Apache-2.0 */
/* A queue, one thread, plain loops. Jobs finish in the order of submission. An expert is the
 * checkpoint's matrices, copied into one block. */
#include "backends/reference/reference_backend.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "backends/known_answer.h"
#include "base/check.h"
#include "base/large_memory.h"
#include "base/thread.h"

typedef struct reference_backend {
    ep_backend base;
    ep_backend_budget budget;
    ep_numerics numerics;
    pthread_mutex_t answer_lock;
    bool has_answer;
    ep_known_answer answers[2]; /* indexed by wide_inputs */
    pthread_t thread;
    bool started;
    float *scratch; /* of the worker thread */
    size_t scratch_floats;

    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t wake;
    ep_job *first;
    ep_job *last;
    uint32_t jobs_count; /* queued or running */
    bool stopping;
} reference_backend;

typedef struct reference_weights {
    ep_backend_weights base;
    ep_ffn_source matrices; /* point into memory */
    void *memory;
    size_t bytes;
} reference_weights;

/* One array of an expert: where the source keeps the pointer to it, and its bytes. */
typedef struct piece {
    const void **place;
    size_t bytes;
} piece;

#define PIECES 11

/* Lists the arrays of a source in a fixed order; `place` points into *source. Those that it does
 * not have get NULL and 0 bytes. Returns the bytes of all. */
static size_t list_pieces(ep_ffn_source *source, piece pieces[PIECES])
{
    const uint32_t hidden = source->hidden;
    const uint32_t inner = source->inner;
    const ep_weight_format format = source->format;
    const ep_weight_format down_format = ep_expert_down_format(source);
    const bool has_gate = ep_activation_has_gate(source->activation);
    const size_t wide = inner * ep_weight_row_bytes(format, hidden);
    const size_t wide_scales = ep_weight_scales_bytes(format, inner, hidden);
    const size_t bias = ep_dtype_bytes(source->bias_dtype);
    const piece all[PIECES] = {
        {&source->gate, has_gate ? wide : 0},
        {&source->up, wide},
        {&source->down, hidden * ep_weight_row_bytes(down_format, inner)},
        {&source->gate_scales, has_gate ? wide_scales : 0},
        {&source->up_scales, wide_scales},
        {&source->down_scales, ep_weight_scales_bytes(down_format, hidden, inner)},
        {&source->gate_bias, has_gate && source->gate_bias != NULL ? inner * bias : 0},
        {&source->up_bias, source->up_bias != NULL ? inner * bias : 0},
        {&source->down_bias, source->down_bias != NULL ? hidden * bias : 0},
        {&source->places, source->places != NULL ? hidden * sizeof(uint32_t) : 0},
        {&source->shared_gate,
         source->shared_gate != NULL ? hidden * ep_dtype_bytes(source->shared_gate_dtype) : 0},
    };
    size_t bytes = 0;
    for (size_t i = 0; i < PIECES; i++) {
        *all[i].place = all[i].bytes == 0 ? NULL : *all[i].place;
        pieces[i] = all[i];
        bytes += all[i].bytes;
    }
    return bytes;
}

static size_t reference_weights_bytes(ep_backend *base, const ep_expert_source *source)
{
    ep_ffn_source copy = *source;
    piece pieces[PIECES];
    (void)base;
    return ep_expert_source_supported(source) ? list_pieces(&copy, pieces) : 0;
}

static ep_err reference_weights_load(ep_backend *base, const ep_expert_source *source,
                                     ep_backend_weights **out_weights, ep_error *out_error)
{
    ep_backend_budget *budget = &((reference_backend *)base)->budget;
    ep_err err = ep_expert_source_check(source, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_ffn_source matrices = *source;
    piece pieces[PIECES];
    const size_t bytes = list_pieces(&matrices, pieces);
    err = ep_backend_budget_take(budget, bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    reference_weights *weights = calloc(1, sizeof(*weights));
    uint8_t *memory = ep_large_alloc(bytes, EP_HOST_ALIGN);
    if (weights == NULL || memory == NULL) {
        free(weights);
        ep_large_free(memory, bytes);
        ep_backend_budget_give(budget, bytes);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an expert of %zu bytes",
                            bytes);
    }
    uint8_t *to = memory;
    for (size_t i = 0; i < PIECES; i++) {
        if (pieces[i].bytes > 0) {
            memcpy(to, *pieces[i].place, pieces[i].bytes);
            *pieces[i].place = to;
            to += pieces[i].bytes;
        }
    }
    *weights = (reference_weights){.base = {.hidden = source->hidden,
                                            .inner = source->inner,
                                            .format = source->format,
                                            .down_format = ep_expert_down_format(source)},
                                   .matrices = matrices,
                                   .memory = memory,
                                   .bytes = bytes};
    *out_weights = &weights->base;
    return EP_OK;
}

static void reference_weights_unload(ep_backend *base, ep_backend_weights *base_weights)
{
    reference_weights *weights = (reference_weights *)base_weights;
    if (weights != NULL) {
        ep_backend_budget_give(&((reference_backend *)base)->budget, weights->bytes);
        ep_large_free(weights->memory, weights->bytes);
        free(weights);
    }
}

static ep_err run_job(reference_backend *backend, const ep_job *job)
{
    const reference_weights *weights = (const reference_weights *)job->weights;
    size_t floats = ep_ffn_reference_scratch_floats(weights->base.hidden, weights->base.inner);
    if (floats > backend->scratch_floats) {
        float *scratch = realloc(backend->scratch, floats * sizeof(*scratch));
        if (scratch == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        backend->scratch = scratch;
        backend->scratch_floats = floats;
    }
    const ep_ffn_batch batch = {
        .rows = job->rows,
        .rows_count = job->rows_count,
        .x_dtype = job->x_dtype,
        .out_dtype = job->out_dtype,
        .weight_on_input = job->weight_on_input,
    };
    ep_trace_fields span;
    bool is_traced = job->trace != NULL && EP_TRACE_SPAN_ON(kernel);
    if (is_traced) {
        span = *job->trace;
        span.parent = 0;
        EP_TRACE(kernel_begin, &span);
    }
    const ep_numerics numerics = ep_numerics_of(backend->numerics, weights->matrices.wide_inputs);
    ep_ffn_reference_of(
        ep_numerics_expert_family(numerics, weights->base.format, weights->base.down_format),
        &weights->matrices, &batch, backend->scratch);
    if (is_traced) {
        EP_TRACE(kernel_end, &span);
    }
    return EP_OK;
}

static void *worker_main(void *arg)
{
    reference_backend *backend = arg;
    ep_host_floats_reset();
    pthread_mutex_lock(&backend->lock);
    for (;;) {
        ep_job *job = backend->first;
        if (job == NULL) {
            if (backend->stopping) {
                break;
            }
            pthread_cond_wait(&backend->wake, &backend->lock);
            continue;
        }
        backend->first = job->next;
        pthread_mutex_unlock(&backend->lock);

        ep_err result = run_job(backend, job);

        pthread_mutex_lock(&backend->lock);
        backend->jobs_count--;
        pthread_mutex_unlock(&backend->lock);
        job->done(job, result); /* the job belongs to the caller again */
        pthread_mutex_lock(&backend->lock);
    }
    pthread_mutex_unlock(&backend->lock);
    return NULL;
}

static void reference_close(ep_backend *base)
{
    reference_backend *backend = (reference_backend *)base;
    if (backend == NULL) {
        return;
    }
    if (backend->started) {
        pthread_mutex_lock(&backend->lock);
        EP_ASSERT(backend->jobs_count == 0);
        backend->stopping = true;
        pthread_cond_signal(&backend->wake);
        pthread_mutex_unlock(&backend->lock);
        pthread_join(backend->thread, NULL);
    }
    EP_ASSERT(atomic_load(&backend->budget.used_bytes) == 0);
    pthread_mutex_destroy(&backend->answer_lock);
    pthread_mutex_destroy(&backend->lock);
    pthread_cond_destroy(&backend->wake);
    free(backend->scratch);
    free(backend);
}

static ep_err reference_open(const ep_backend_config *config, ep_backend **out_backend,
                             ep_error *out_error)
{
    if (config->threads > EP_BACKEND_THREADS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "compute threads is %u, allowed 0 to %u", config->threads,
                            EP_BACKEND_THREADS_MAX);
    }
    reference_backend *backend = calloc(1, sizeof(*backend));
    if (backend == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for backend reference");
    }
    backend->base.ops = &ep_backend_reference_ops;
    backend->numerics = config->numerics;
    pthread_mutex_init(&backend->answer_lock, NULL);
    pthread_mutex_init(&backend->lock, NULL);
    pthread_cond_init(&backend->wake, NULL);
    if (ep_thread_start("ep-reference", worker_main, backend, &backend->thread) != EP_OK) {
        reference_close(&backend->base);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                            "backend reference cannot start its thread");
    }
    backend->started = true;
    backend->budget.limit_bytes = config->memory_bytes;
    *out_backend = &backend->base;
    return EP_OK;
}

/*
 * The plain loops are slow in the known-answer run, so it runs when an id is first asked for, on a
 * backend of its own, where it disturbs no loads or jobs.
 */
static ep_err learn_answer(reference_backend *backend)
{
    const ep_backend_config config = {.numerics = backend->numerics, .threads = 1};
    ep_backend *other = NULL;
    ep_error error;
    pthread_mutex_lock(&backend->answer_lock);
    ep_err err = backend->has_answer ? EP_OK : reference_open(&config, &other, &error);
    if (other != NULL) {
        err = ep_known_answer_run(other, backend->numerics, backend->answers, &error);
        backend->has_answer = err == EP_OK;
        reference_close(other);
    }
    pthread_mutex_unlock(&backend->answer_lock);
    return err;
}

static ep_err reference_numerics_id(ep_backend *base, ep_weight_format format, bool wide_inputs,
                                    uint32_t others, char out_id[EP_NUMERICS_ID_BYTES])
{
    reference_backend *backend = (reference_backend *)base;
    const ep_err err = learn_answer(backend);
    const ep_ffn_family family =
        ep_numerics_family(ep_numerics_of(backend->numerics, wide_inputs), format);
    return err != EP_OK ? err
                        : ep_known_answer_id(&backend->answers[wide_inputs],
                                             ep_ffn_family_name(family), format, others, out_id);
}

static ep_err reference_submit(ep_backend *base, ep_job *job)
{
    reference_backend *backend = (reference_backend *)base;
    ep_err err = ep_job_check(job);
    if (err != EP_OK) {
        return err;
    }
    job->next = NULL;
    pthread_mutex_lock(&backend->lock);
    if (backend->jobs_count >= EP_BACKEND_JOBS_MAX) {
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        *(backend->first != NULL ? &backend->last->next : &backend->first) = job;
        backend->last = job;
        backend->jobs_count++;
        pthread_cond_signal(&backend->wake);
    }
    pthread_mutex_unlock(&backend->lock);
    return err;
}

const ep_backend_ops ep_backend_reference_ops = {
    .api_version = EP_BACKEND_API_VERSION,
    .name = "reference",
    .memory = EP_MEMORY_HOST,
    .open = reference_open,
    .close = reference_close,
    .numerics_id = reference_numerics_id,
    .weights_bytes = reference_weights_bytes,
    .weights_load = reference_weights_load,
    .weights_unload = reference_weights_unload,
    .submit = reference_submit,
};
