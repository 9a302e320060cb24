/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/known_answer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"

/* H and I are no multiples of a panel and ROWS of no chunk, so the edges of a kernel are part of the answer.
 */
enum { HIDDEN = 96, INNER = 80, ROWS = 7 };

typedef struct {
    float gate[INNER * HIDDEN]; /* room for the widest type; the narrow ones fill the front */
    float up[INNER * HIDDEN];
    float down[HIDDEN * INNER];
    float shared_gate[HIDDEN];
    float x[ROWS * HIDDEN];
    int8_t x_i8[ROWS * HIDDEN];
    float out_f32[ROWS * HIDDEN];
    uint16_t out_bf16[ROWS * HIDDEN];
} known_data;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool finished;
    ep_err result;
} waiter;

static void wake_waiter(ep_job *job, ep_err result)
{
    waiter *w = job->arg;
    pthread_mutex_lock(&w->lock);
    w->finished = true;
    w->result = result;
    pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
}

static ep_err run_and_wait(ep_backend *backend, ep_job *job)
{
    waiter w = {.lock = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};
    job->done = wake_waiter;
    job->arg = &w;
    ep_err err = ep_backend_run(backend, job);
    if (err == EP_OK) {
        pthread_mutex_lock(&w.lock);
        while (!w.finished) {
            pthread_cond_wait(&w.done, &w.lock);
        }
        pthread_mutex_unlock(&w.lock);
        err = w.result;
    }
    pthread_mutex_destroy(&w.lock);
    pthread_cond_destroy(&w.done);
    return err;
}

/* count values in [-scale, scale), 24 random bits each, stored as dtype. */
static void fill(uint64_t *state, void *to, ep_dtype dtype, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++) {
        float v = ((float)(ep_splitmix64(state) >> 40) * 0x1p-23f - 1.0f) * scale;
        if (dtype == EP_DTYPE_F32) {
            ((float *)to)[i] = v;
        } else {
            ((uint16_t *)to)[i] = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(v) : ep_f32_to_f16(v);
        }
    }
}

static void fill_data(known_data *data, ep_dtype dtype)
{
    uint64_t state = 0x65787065727464ull + (uint64_t)dtype;
    fill(&state, data->gate, dtype, INNER * HIDDEN, 0.5f);
    fill(&state, data->up, dtype, INNER * HIDDEN, 0.5f);
    fill(&state, data->down, dtype, HIDDEN * INNER, 0.5f);
    fill(&state, data->shared_gate, dtype, HIDDEN, 0.5f);
    fill(&state, data->x, EP_DTYPE_F32, ROWS * HIDDEN, 2.0f);
    for (size_t i = 0; i < ROWS * HIDDEN; i++) {
        data->x_i8[i] = (int8_t)((int)(ep_splitmix64(&state) % 255) - 127);
    }
}

static uint32_t fnv1a(uint32_t hash, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        hash = (hash ^ ((value >> (8 * i)) & 0xffu)) * 16777619u;
    }
    return hash;
}

/* f32 rows to f32 first, where every bit shows; then int8 rows with input weights to bf16. */
static ep_err run_jobs(ep_backend *backend, ep_backend_weights *weights, known_data *data)
{
    ep_job_row rows[ROWS];
    ep_job job = {.weights = weights,
                  .rows = rows,
                  .rows_count = ROWS,
                  .x_dtype = EP_DTYPE_F32,
                  .out_dtype = EP_DTYPE_F32};
    for (size_t r = 0; r < ROWS; r++) {
        rows[r] = (ep_job_row){.x = data->x + r * HIDDEN, .out = data->out_f32 + r * HIDDEN};
    }
    ep_err err = run_and_wait(backend, &job);
    if (err != EP_OK) {
        return err;
    }
    ep_job job_i8 = {.weights = weights,
                     .rows = rows,
                     .rows_count = ROWS,
                     .x_dtype = EP_DTYPE_I8,
                     .out_dtype = EP_DTYPE_BF16,
                     .weight_on_input = true};
    for (size_t r = 0; r < ROWS; r++) {
        rows[r] = (ep_job_row){.x = data->x_i8 + r * HIDDEN,
                               .x_scale = 0.011f + 0.003f * (float)r,
                               .input_weight = 0.3f + 0.1f * (float)r,
                               .out = data->out_bf16 + r * HIDDEN};
    }
    return run_and_wait(backend, &job_i8);
}

static ep_err run_type(ep_backend *backend, known_data *data, ep_dtype dtype, uint32_t *out_digest,
                       ep_error *out_error)
{
    fill_data(data, dtype);
    const ep_expert_source source = {
        .hidden = HIDDEN,
        .inner = INNER,
        .activation = EP_ACT_SILU,
        .dtype = dtype,
        .gate = data->gate,
        .up = data->up,
        .down = data->down,
        .shared_gate_dtype = dtype,
        .shared_gate = data->shared_gate,
    };
    ep_backend_weights *weights = NULL;
    ep_err err = backend->ops->weights_load(backend, &source, &weights, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = run_jobs(backend, weights, data);
    backend->ops->weights_unload(backend, weights);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "backend %s: the known-answer run failed: %s", backend->ops->name,
                            ep_err_text(err));
    }
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < ROWS * HIDDEN; i++) {
        hash = fnv1a(fnv1a(hash, ep_f32_bits(data->out_f32[i])), data->out_bf16[i]);
    }
    *out_digest = hash;
    return EP_OK;
}

ep_err ep_known_answer_run(ep_backend *backend, ep_known_answer *out_answer, ep_error *out_error)
{
    ep_known_answer answer;
    known_data *data = calloc(1, sizeof(*data));
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the known-answer run");
    }
    ep_err err = run_type(backend, data, EP_DTYPE_BF16, &answer.digest_bf16, out_error);
    if (err == EP_OK) {
        err = run_type(backend, data, EP_DTYPE_F16, &answer.digest_f16, out_error);
    }
    if (err == EP_OK) {
        err = run_type(backend, data, EP_DTYPE_F32, &answer.digest_f32, out_error);
    }
    free(data);
    if (err == EP_OK) {
        *out_answer = answer;
    }
    return err;
}

ep_err ep_known_answer_id(const ep_known_answer *answer, ep_dtype weight_dtype,
                          char out_id[EP_NUMERICS_ID_BYTES])
{
    uint32_t digest;
    switch (weight_dtype) {
    case EP_DTYPE_BF16:
        digest = answer->digest_bf16;
        break;
    case EP_DTYPE_F16:
        digest = answer->digest_f16;
        break;
    case EP_DTYPE_F32:
        digest = answer->digest_f32;
        break;
    default:
        return EP_ERR_UNIMPLEMENTED;
    }
    snprintf(out_id, EP_NUMERICS_ID_BYTES, "portable/%s/rne/%08x", ep_dtype_name(weight_dtype), digest);
    return EP_OK;
}
