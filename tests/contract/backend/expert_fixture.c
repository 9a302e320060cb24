/* SPDX-License-Identifier: Apache-2.0 */
#include "contract/backend/expert_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "kernels/ffn_element.h"
#include "support/check.h"
#include "support/random_scales.h"
#ifdef EP_CONTRACT_CANN
#include "contract/backend/expert_bound.h"
#endif

#define GUARD_BYTES 64
#define GUARD 0xa5

/* Begins at an odd address: any alignment is allowed. */
static uint8_t *random_values(uint64_t *state, ep_dtype dtype, size_t count)
{
    const size_t element = ep_dtype_bytes(dtype);
    uint8_t *values = malloc(count * element + 1);
    for (size_t i = 0; i < count; i++) {
        uint8_t *p = values + 1 + i * element;
        uint64_t z = ep_splitmix64(state);
        float v = (float)(int32_t)z * 0x1p-31f;
        uint16_t half = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(v) : ep_f32_to_f16(v);
        if (dtype == EP_DTYPE_I8) {
            *p = (uint8_t)z;
        } else if (dtype == EP_DTYPE_F32) {
            memcpy(p, &v, sizeof(v));
        } else {
            memcpy(p, &half, sizeof(half));
        }
    }
    return values;
}

void expert_fixture_answer(expert_fixture *f, ep_ffn_family family)
{
    const ep_ffn_batch batch = {.rows = f->rows,
                                .rows_count = f->rows_count,
                                .x_dtype = f->x_dtype,
                                .out_dtype = f->out_dtype,
                                .weight_on_input = f->weight_on_input};
    float *scratch = malloc(ep_ffn_reference_scratch_floats(f->source.hidden, f->source.inner) *
                            sizeof(*scratch));
    for (uint32_t r = 0; r < f->rows_count; r++) {
        f->rows[r].out = f->want + r * f->out_row_bytes;
    }
    ep_ffn_reference_of(family, &f->source, &batch, scratch);
    for (uint32_t r = 0; r < f->rows_count; r++) {
        f->rows[r].out = NULL;
    }
    free(scratch);
#ifdef EP_CONTRACT_CANN
    free(f->allowed);
    f->allowed = expert_bound_make(f);
#endif
}

/* Codes of a format with scales, any but those that mean NaN; one byte in front, as of values. */
static uint8_t *random_codes(uint64_t *state, ep_weight_format format, size_t bytes)
{
    const bool is_f8 = ep_weight_format_codes(format) == EP_CODES_E4M3;
    uint8_t *codes = random_values(state, EP_DTYPE_I8, bytes);
    for (size_t i = 1; is_f8 && i <= bytes; i++) {
        codes[i] = (codes[i] & 0x7fu) == 0x7fu ? 0x2a : codes[i];
    }
    return codes;
}

static uint8_t *random_matrix(uint64_t *state, ep_weight_format format, uint32_t rows,
                              uint32_t columns)
{
    return ep_weight_format_is_float(format)
               ? random_values(state, ep_weight_format_dtype(format), (size_t)rows * columns)
               : random_codes(state, format, rows * ep_weight_row_bytes(format, columns));
}

static uint8_t *random_scales(uint64_t *state, ep_weight_format format, uint32_t rows,
                              uint32_t columns)
{
    uint8_t *scales = malloc(ep_weight_scales_bytes(format, rows, columns) + 1);
    ep_test_random_scales(state, format, rows, columns, false, scales + 1);
    return scales;
}

expert_fixture expert_fixture_make(uint64_t seed, uint32_t hidden, uint32_t inner,
                                   uint32_t rows_count, ep_dtype dtype)
{
    return expert_fixture_make_of(seed, hidden, inner, rows_count,
                                  dtype == EP_DTYPE_I8 ? EP_WEIGHTS_W8A8
                                                       : ep_weight_format_of(dtype));
}

expert_fixture expert_fixture_make_of(uint64_t seed, uint32_t hidden, uint32_t inner,
                                      uint32_t rows_count, ep_weight_format format)
{
    const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8};
    uint64_t state = seed;
    expert_fixture f = {.rows_count = rows_count};
    f.x_dtype = dtypes[ep_splitmix64(&state) % 4];
    f.out_dtype = dtypes[ep_splitmix64(&state) % 3];
    f.weight_on_input = ep_splitmix64(&state) % 2 != 0;
    bool shared = ep_splitmix64(&state) % 2 != 0;
    const bool has_scales = !ep_weight_format_is_float(format);
    const ep_dtype gate_dtype = has_scales ? EP_DTYPE_BF16 : ep_weight_format_dtype(format);
    uint8_t *matrices[4];
    uint8_t *scales[3] = {NULL};
    for (size_t m = 0; m < 3; m++) {
        matrices[m] = random_matrix(&state, format, m < 2 ? inner : hidden, m < 2 ? hidden : inner);
        f.memory[m] = matrices[m];
    }
    matrices[3] = random_values(&state, gate_dtype, hidden);
    f.memory[3] = matrices[3];
    for (size_t m = 0; has_scales && m < 3; m++) {
        scales[m] = random_scales(&state, format, m < 2 ? inner : hidden, m < 2 ? hidden : inner);
        f.memory[5 + m] = scales[m];
    }
    f.source = (ep_expert_source){
        .hidden = hidden,
        .inner = inner,
        .activation = EP_ACT_SILU,
        .format = format,
        .gate = matrices[0] + 1,
        .up = matrices[1] + 1,
        .down = matrices[2] + 1,
        .gate_scales = has_scales ? scales[0] + 1 : NULL,
        .up_scales = has_scales ? scales[1] + 1 : NULL,
        .down_scales = has_scales ? scales[2] + 1 : NULL,
        .shared_gate_dtype = gate_dtype,
        .shared_gate = shared ? matrices[3] + 1 : NULL,
    };
    uint8_t *x = random_values(&state, f.x_dtype, (size_t)rows_count * hidden);
    f.memory[4] = x;
    f.out_row_bytes = hidden * ep_dtype_bytes(f.out_dtype);
    f.want = malloc(rows_count * f.out_row_bytes);
    f.rows = calloc(rows_count, sizeof(*f.rows));
    for (uint32_t r = 0; r < rows_count; r++) {
        f.rows[r].x = x + 1 + r * (size_t)hidden * ep_dtype_bytes(f.x_dtype);
        f.rows[r].x_scale = 0.002f * (float)(1 + ep_splitmix64(&state) % 9);
        f.rows[r].input_weight = 0.1f * (float)(1 + ep_splitmix64(&state) % 19);
    }
    expert_fixture_answer(&f, EP_FFN_FAMILY_PORTABLE);
    return f;
}

void expert_fixture_reshape(expert_fixture *f, uint64_t seed, ep_activation activation,
                            bool has_biases)
{
    const ep_dtype dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
    const uint32_t counts[] = {f->source.inner, f->source.inner, f->source.hidden};
    const void **const biases[] = {&f->source.gate_bias, &f->source.up_bias, &f->source.down_bias};
    uint64_t state = seed;
    f->source.activation = activation;
    f->source.numbers = (ep_activation_numbers){.alpha = 1.702f, .beta = 1.0f, .limit = 0.75f};
    f->source.bias_dtype = dtypes[ep_splitmix64(&state) % 3];
    const uint64_t missing = ep_splitmix64(&state) % 6; /* of the three, if any */
    for (size_t b = 0; has_biases && b < 3; b++) {
        uint8_t *values = random_values(&state, f->source.bias_dtype, counts[b]);
        f->memory[8 + b] = values;
        *biases[b] = b == missing ? NULL : values + 1;
    }
    expert_fixture_answer(f, EP_FFN_FAMILY_PORTABLE);
}

void expert_fixture_free(expert_fixture *fixture)
{
    for (size_t m = 0; m < 11; m++) {
        free(fixture->memory[m]);
    }
    free(fixture->rows);
    free(fixture->want);
    free(fixture->allowed);
}

static size_t out_stride(const expert_fixture *fixture)
{
    return (fixture->out_row_bytes + GUARD_BYTES + 3) & ~(size_t)3;
}

static void job_done(ep_job *base, ep_err result)
{
    fixture_job *job = base->arg;
    pthread_mutex_lock(&job->lock);
    job->done_count++;
    job->result = result;
    pthread_cond_signal(&job->wake);
    pthread_mutex_unlock(&job->lock);
}

void fixture_job_init(fixture_job *job, const expert_fixture *fixture, ep_backend_weights *weights,
                      uint32_t first, uint32_t count)
{
    memset(job, 0, sizeof(*job));
    job->fixture = fixture;
    job->first = first;
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->wake, NULL);
    job->out_bytes = GUARD_BYTES + count * out_stride(fixture);
    job->out = malloc(job->out_bytes);
    memset(job->out, GUARD, job->out_bytes);
    job->rows = malloc(count * sizeof(*job->rows));
    for (uint32_t r = 0; r < count; r++) {
        job->rows[r] = fixture->rows[first + r];
        job->rows[r].out = job->out + GUARD_BYTES + r * out_stride(fixture);
    }
    job->job.weights = weights;
    job->job.rows = job->rows;
    job->job.rows_count = count;
    job->job.x_dtype = fixture->x_dtype;
    job->job.out_dtype = fixture->out_dtype;
    job->job.weight_on_input = fixture->weight_on_input;
    job->job.done = job_done;
    job->job.arg = job;
}

void fixture_job_fini(fixture_job *job)
{
    pthread_mutex_destroy(&job->lock);
    pthread_cond_destroy(&job->wake);
    free(job->rows);
    free(job->out);
}

ep_err fixture_job_wait(fixture_job *job)
{
    pthread_mutex_lock(&job->lock);
    while (job->done_count == 0) {
        pthread_cond_wait(&job->wake, &job->lock);
    }
    ep_err result = job->result;
    pthread_mutex_unlock(&job->lock);
    return result;
}

/* An infinity of f16 is what any value beyond its range is rounded to. */
static double near_value_of(const expert_fixture *f, const uint8_t *row, uint32_t h)
{
    const double value = (double)ep_ffn_read_float(row, f->out_dtype, h);
    return f->out_dtype == EP_DTYPE_F16 && isinf(value) ? copysign(65504.0, value) : value;
}

/* Whether a row is the wanted one, bit for bit or as near as is allowed. */
static bool row_is_well(const expert_fixture *f, uint32_t row, const uint8_t *got)
{
    const uint8_t *want = f->want + row * f->out_row_bytes;
    if (f->allowed == NULL) {
        return memcmp(got, want, f->out_row_bytes) == 0;
    }
    for (uint32_t h = 0; h < f->source.hidden; h++) {
        const double difference = near_value_of(f, got, h) - near_value_of(f, want, h);
        if (!(fabs(difference) <= f->allowed[(size_t)row * f->source.hidden + h])) { /* NaN too */
            return false;
        }
    }
    return true;
}

const char *fixture_job_check(const fixture_job *job)
{
    static _Thread_local char text[256];
    const expert_fixture *f = job->fixture;
    const uint8_t *p = job->out;
    const uint8_t *end = job->out + job->out_bytes;
    for (uint32_t r = 0; r < job->job.rows_count; r++) {
        const uint8_t *row = job->out + GUARD_BYTES + r * out_stride(f);
        for (; p < row; p++) {
            if (*p != GUARD) {
                snprintf(text, sizeof(text), "a byte outside row %u of %u was written", r,
                         job->job.rows_count);
                return text;
            }
        }
        if (!row_is_well(f, job->first + r, row)) {
            snprintf(text, sizeof(text), "row %u of %u differs: H %u I %u weights %s x %s out %s",
                     job->first + r, job->job.rows_count, f->source.hidden, f->source.inner,
                     ep_weight_format_name(f->source.format), ep_dtype_name(f->x_dtype),
                     ep_dtype_name(f->out_dtype));
            return text;
        }
        p += f->out_row_bytes;
    }
    for (; p < end; p++) {
        if (*p != GUARD) {
            return "a byte behind the last row was written";
        }
    }
    return NULL;
}

const char *fixture_run(const expert_fixture *fixture, ep_backend *backend,
                        ep_backend_weights *weights, uint32_t first, uint32_t count)
{
    fixture_job job;
    fixture_job_init(&job, fixture, weights, first, count);
    const char *wrong = NULL;
    ep_err err = ep_backend_run(backend, &job.job);
    if (err == EP_OK) {
        err = fixture_job_wait(&job);
    }
    if (err != EP_OK) {
        wrong = ep_err_name(err);
    } else {
        wrong = fixture_job_check(&job);
    }
    fixture_job_fini(&job);
    return wrong;
}

ep_backend_weights *fixture_load(const expert_fixture *fixture, ep_backend *backend)
{
    ep_backend_weights *weights = NULL;
    ep_error error;
    CHECK(backend->ops->weights_load(backend, &fixture->source, &weights, &error) == EP_OK,
          "%s: %s", backend->ops->name, error.text);
    return weights;
}

void fixture_run_counts(const expert_fixture *fixture, ep_backend *backend, const char *name,
                        uint32_t threads, const uint32_t *counts, size_t counts_count)
{
    ep_backend_weights *weights = fixture_load(fixture, backend);
    for (size_t i = 0; i < counts_count; i++) {
        const uint32_t first = fixture->rows_count - counts[i];
        const char *wrong = fixture_run(fixture, backend, weights, first, counts[i]);
        CHECK(wrong == NULL, "%s, %u threads, %u rows: %s", name, threads, counts[i], wrong);
    }
    backend->ops->weights_unload(backend, weights);
}
