/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/known_answer.h"

#include <fenv.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"

/* H and I are no multiples of a panel, and ROWS is none of a chunk, so the answer covers a kernel's
 * edges. */
enum { HIDDEN = 96, INNER = EP_KNOWN_ANSWER_INNER, ROWS = 7 };

typedef struct {
    /* large enough for the widest format; narrow formats use the front */
    float gate[INNER * HIDDEN];
    float up[INNER * HIDDEN];
    float down[HIDDEN * INNER];
    float scales[3][INNER * HIDDEN / 16];
    float biases[3][HIDDEN];
    float shared_gate[HIDDEN];
    float x[ROWS * HIDDEN];
    int8_t x_i8[ROWS * HIDDEN];
    float out_f32[ROWS * HIDDEN];
    uint16_t out_bf16[ROWS * HIDDEN];
    bool wide_inputs;
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

static void put(void *to, ep_dtype dtype, size_t i, float v)
{
    if (dtype == EP_DTYPE_F32) {
        ((float *)to)[i] = v;
    } else {
        ((uint16_t *)to)[i] = dtype == EP_DTYPE_BF16 ? ep_f32_to_bf16(v) : ep_f32_to_f16(v);
    }
}

/* count values in [-scale, scale), 24 random bits each, stored as dtype. */
static void fill(uint64_t *state, void *to, ep_dtype dtype, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++) {
        put(to, dtype, i, ((float)(ep_splitmix64(state) >> 40) * 0x1p-23f - 1.0f) * scale);
    }
}

/* Any codes except those of f8e4m3 that mean NaN. */
static void fill_codes(uint64_t *state, ep_weight_format format, void *to, size_t count)
{
    const bool is_f8 = ep_weight_format_codes(format) == EP_CODES_E4M3;
    for (size_t i = 0; i < count; i++) {
        uint8_t code = (uint8_t)(ep_splitmix64(state) >> 56);
        ((uint8_t *)to)[i] = is_f8 && (code & 0x7fu) == 0x7fu ? 0x38 : code;
    }
}

/* The exponent of scales that makes weights about as large as in plain formats. */
static int scale_exponent(ep_weight_format format)
{
    return ep_weight_codes_are_nibbles(ep_weight_format_codes(format)) ? -4 : -9;
}

static void fill_parts(uint64_t *state, ep_weight_scales kind, uint8_t *to, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        const uint8_t part = (uint8_t)(ep_splitmix64(state) >> 56);
        to[i] = kind == EP_SCALES_E4M3_PARTS && (part & 0x7fu) == 0x7fu ? 0x38 : part;
    }
}

/* parts are up to 64 and more, so their factors are smaller by as much. */
static void fill_scales(uint64_t *state, ep_weight_format format, uint32_t rows, uint32_t columns,
                        uint8_t *to)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    const ep_weight_scales kind = ep_weight_format_scales(format);
    const bool has_levels = ep_weight_scales_have_levels(kind);
    const int exponent = scale_exponent(format);
    uint8_t *factors = to + arrays.scales + arrays.offsets;
    if (kind == EP_SCALES_E8M0) {
        for (size_t i = 0; i < arrays.scales; i++) {
            to[i] = (uint8_t)(127 + exponent + (int)(ep_splitmix64(state) % 3));
        }
    } else if (has_levels) {
        fill_parts(state, kind, to, arrays.scales);
    } else {
        const ep_dtype dtype = kind == EP_SCALES_BF16  ? EP_DTYPE_BF16
                               : kind == EP_SCALES_F16 ? EP_DTYPE_F16
                                                       : EP_DTYPE_F32;
        fill(state, to, dtype, arrays.scales / ep_dtype_bytes(dtype), ldexpf(1.0f, exponent));
    }
    fill_parts(state, EP_SCALES_NONE, to + arrays.scales, arrays.offsets);
    fill(state, factors, EP_DTYPE_F32,
         (arrays.scale_factors + arrays.offset_factors) / sizeof(float),
         ldexpf(1.0f, exponent - 6));
}

static void fill_matrix(uint64_t *state, ep_weight_format format, uint32_t rows, uint32_t columns,
                        void *values, void *scales)
{
    if (ep_weight_format_is_float(format)) {
        fill(state, values, ep_weight_format_dtype(format), (size_t)rows * columns, 0.5f);
        return;
    }
    fill_codes(state, format, values, rows * ep_weight_row_bytes(format, columns));
    fill_scales(state, format, rows, columns, scales);
}

static void fill_data(known_data *data, ep_weight_format format)
{
    uint64_t state = 0x65787065727464ull + (uint64_t)format;
    fill_matrix(&state, format, INNER, HIDDEN, data->gate, data->scales[0]);
    fill_matrix(&state, format, INNER, HIDDEN, data->up, data->scales[1]);
    fill_matrix(&state, format, HIDDEN, INNER, data->down, data->scales[2]);
    fill(&state, data->biases, EP_DTYPE_F32, sizeof(data->biases) / sizeof(float), 0.5f);
    fill(&state, data->shared_gate, EP_DTYPE_F32, HIDDEN, 0.5f);
    fill(&state, data->x, EP_DTYPE_F32, ROWS * HIDDEN, 2.0f);
    for (size_t i = 0; i < ROWS * HIDDEN; i++) {
        data->x_i8[i] = (int8_t)((int)(ep_splitmix64(&state) % 255) - 127);
    }
}

/* Few different values, so that sums have few bits, are often halfway cases, and often cancel. */
static void fill_sparse(uint64_t *state, void *to, ep_dtype dtype, size_t count)
{
    static const float values[] = {0.0f, 0.0f, 0.0f, 0.0f, 1.0f, -1.0f, 1.0f, -1.0f};
    for (size_t i = 0; i < count; i++) {
        put(to, dtype, i, values[ep_splitmix64(state) >> 61]);
    }
}

/*
 * Rows on which processors differ: denormal inputs; inputs whose products and sums are denormal;
 * outputs that are denormal in f16; inputs and outputs halfway between two numbers of bf16 and f16;
 * sums that overflow; NaN with sign and payload; infinities that cancel.
 */
static float hard_input(uint64_t *state, size_t row)
{
    const uint64_t z = ep_splitmix64(state);
    const uint32_t sign = (uint32_t)(z >> 63) << 31;
    const float small = (float)(1 + (z & 0xfu)) * (sign != 0 ? -1.0f : 1.0f);
    switch (row) {
    case 0:
        return ep_f32_from_bits(sign | (uint32_t)(z & 0x7fffffu));
    case 1:
        return ldexpf(small * (1.0f + (float)(z >> 8 & 0x7fu) / 128.0f), -125);
    case 2:
        return ldexpf(small, -20);
    case 3:
        return small + ((z >> 8 & 1u) != 0 ? 0x1p-8f : 0x1p-11f) * (float)(1 + (z >> 9 & 7u));
    case 4:
        return ldexpf(small, 123);
    case 5:
        return (z & 0x3fu) == 0
                   ? ep_f32_from_bits(sign | 0x7f800001u | (uint32_t)(z >> 8 & 0x3fffffu))
                   : small;
    default:
        return (z & 0x1fu) == 0 ? copysignf(INFINITY, small) : small;
    }
}

static void fill_hard(known_data *data, ep_weight_format format)
{
    uint64_t state = 0x68617264ull + (uint64_t)format;
    fill_data(data, format);
    if (ep_weight_format_is_float(format)) {
        const ep_dtype dtype = ep_weight_format_dtype(format);
        fill_sparse(&state, data->up, dtype, INNER * HIDDEN);
        fill_sparse(&state, data->down, dtype, HIDDEN * INNER);
    }
    for (size_t i = 0; i < ROWS * HIDDEN; i++) {
        data->x[i] = hard_input(&state, i / HIDDEN);
    }
}

/* For MX formats: scales that put many weights below the normal numbers, and inputs large enough to
 * make such weights matter. */
static void fill_faint(known_data *data, ep_weight_format format)
{
    uint64_t state = 0x6661696eull + (uint64_t)format;
    fill_data(data, format);
    for (size_t i = 0; i < sizeof(data->scales[1]); i++) {
        ((uint8_t *)data->scales[1])[i] = (uint8_t)(ep_splitmix64(&state) % 12);
    }
    for (size_t i = 0; i < ROWS * HIDDEN; i++) {
        data->x[i] = ldexpf(1.0f + (float)(ep_splitmix64(&state) >> 57) / 128.0f, 60);
    }
}

static void put_nibble(void *codes, size_t at, unsigned code)
{
    uint8_t *byte = (uint8_t *)codes + at / 2;
    *byte = (uint8_t)(at % 2 == 0 ? (*byte & 0xf0u) | code : (*byte & 0x0fu) | code << 4);
}

/* Sets the scale of every group to one; for q4_K also the offset, so that codes of 8 mean zero. */
static void fill_units(ep_weight_format format, uint32_t rows, uint32_t columns, uint8_t *to)
{
    const ep_scale_arrays arrays = ep_weight_scale_arrays(format, rows, columns);
    const bool is_f16 = ep_weight_format_scales(format) == EP_SCALES_F16;
    const uint16_t one = is_f16 ? ep_f32_to_f16(1.0f) : ep_f32_to_bf16(1.0f);
    const float wide_one = 1.0f;
    uint8_t *factors = to + arrays.scales + arrays.offsets;
    if (format == EP_WEIGHTS_Q4_K) {
        memset(to, 1, arrays.scales);
        memset(to + arrays.scales, 8, arrays.offsets);
    } else if (format == EP_WEIGHTS_MXFP4) {
        memset(to, 128, arrays.scales); /* 2, for codes that mean 1/2 */
    } else {
        for (size_t at = 0; at < arrays.scales; at += sizeof(one)) {
            memcpy(to + at, &one, sizeof(one));
        }
    }
    for (size_t at = 0; at < arrays.scale_factors + arrays.offset_factors; at += sizeof(float)) {
        memcpy(factors + at, &wide_one, sizeof(wide_one));
    }
}

/*
 * 4-bit weights, for rows that become int8. A group's greatest input is 127 steps of a power of
 * two; all others lie halfway between two steps. Up passes them on, down has 0, 1 and -1. So sums
 * are whole steps, often halfway between two numbers of bf16 or f16.
 */
static void fill_halves(known_data *data, ep_weight_format format)
{
    const bool is_mx = format == EP_WEIGHTS_MXFP4;
    /* the codes of 0, a unit, minus a unit, 0 */
    const unsigned codes[4] = {is_mx ? 0 : 8, is_mx ? 1 : 9, is_mx ? 9 : 7, is_mx ? 0 : 8};
    uint64_t state = 0x68616c76ull + (uint64_t)format;
    fill_data(data, format);
    for (size_t at = 0; at < INNER * HIDDEN; at++) {
        put_nibble(data->up, at, codes[at % HIDDEN == at / HIDDEN]);
        put_nibble(data->down, at, codes[ep_splitmix64(&state) >> 62]);
    }
    fill_units(format, INNER, HIDDEN, (uint8_t *)data->scales[1]);
    fill_units(format, HIDDEN, INNER, (uint8_t *)data->scales[2]);
    for (size_t i = 0; i < ROWS * HIDDEN; i++) {
        const float half = (float)((int)(ep_splitmix64(&state) % 253) - 126) + 0.5f;
        data->x[i] = ldexpf(i % HIDDEN % EP_MX_GROUP == 0 ? 127.0f : half, -5 * (int)(i / HIDDEN));
    }
}

static uint32_t fnv1a(uint32_t hash, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        hash = (hash ^ ((value >> (8 * i)) & 0xffu)) * 16777619u;
    }
    return hash;
}

/* First f32 rows to f32, where every bit shows; then int8 rows with input weights to bf16. */
static ep_err run_jobs(ep_backend *backend, ep_backend_weights *weights, known_data *data,
                       uint32_t *hash)
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
    err = run_and_wait(backend, &job_i8);
    for (size_t i = 0; err == EP_OK && i < ROWS * HIDDEN; i++) {
        *hash = fnv1a(fnv1a(*hash, ep_f32_bits(data->out_f32[i])), data->out_bf16[i]);
    }
    return err;
}

/* f32 rows to f32, bf16 and f16, each with its own halfway cases and denormals. */
static ep_err run_hard_jobs(ep_backend *backend, ep_backend_weights *weights, known_data *data,
                            uint32_t *hash)
{
    static const ep_dtype outs[] = {EP_DTYPE_F32, EP_DTYPE_BF16, EP_DTYPE_F16};
    ep_job_row rows[ROWS];
    for (size_t o = 0; o < EP_ARRAY_COUNT(outs); o++) {
        const bool is_wide = outs[o] == EP_DTYPE_F32;
        ep_job job = {.weights = weights,
                      .rows = rows,
                      .rows_count = ROWS,
                      .x_dtype = EP_DTYPE_F32,
                      .out_dtype = outs[o]};
        for (size_t r = 0; r < ROWS; r++) {
            rows[r] = (ep_job_row){.x = data->x + r * HIDDEN,
                                   .out = is_wide ? (void *)(data->out_f32 + r * HIDDEN)
                                                  : (void *)(data->out_bf16 + r * HIDDEN)};
        }
        ep_err err = run_and_wait(backend, &job);
        if (err != EP_OK) {
            return err;
        }
        for (size_t i = 0; i < ROWS * HIDDEN; i++) {
            *hash = fnv1a(*hash, is_wide ? ep_f32_bits(data->out_f32[i]) : data->out_bf16[i]);
        }
    }
    return EP_OK;
}

/* The filled data as an expert. */
static ep_expert_source expert_of(const known_data *data, ep_weight_format format,
                                  ep_activation activation)
{
    const bool has_scales = !ep_weight_format_is_float(format);
    return (ep_expert_source){
        .hidden = HIDDEN,
        .inner = INNER,
        .format = format,
        .activation = activation,
        .numbers = {.alpha = 1.7f, .beta = 1.25f, .limit = 2.5f},
        .wide_inputs = data->wide_inputs,
        .gate = ep_activation_has_gate(activation) ? data->gate : NULL,
        .up = data->up,
        .down = data->down,
        .gate_scales = has_scales ? data->scales[0] : NULL,
        .up_scales = has_scales ? data->scales[1] : NULL,
        .down_scales = has_scales ? data->scales[2] : NULL,
        .bias_dtype = EP_DTYPE_F32,
        .gate_bias = data->biases[0],
        .up_bias = data->biases[1],
        .down_bias = data->biases[2],
        .shared_gate_dtype = EP_DTYPE_F32,
        .shared_gate = data->shared_gate,
    };
}

typedef ep_err (*jobs_func)(ep_backend *backend, ep_backend_weights *weights, known_data *data,
                            uint32_t *hash);

/* Hashes one expert's answers into *hash. */
static ep_err run_source(ep_backend *backend, known_data *data, const ep_expert_source *source,
                         jobs_func run, uint32_t *hash, ep_error *out_error)
{
    ep_backend_weights *weights = NULL;
    ep_err err = backend->ops->weights_load(backend, source, &weights, out_error);
    if (err != EP_OK) {
        return err;
    }
    err = run(backend, weights, data, hash);
    backend->ops->weights_unload(backend, weights);
    return err == EP_OK
               ? err
               : ep_error_set(out_error, err, "backend %s: the known-answer run failed: %s",
                              backend->ops->name, ep_err_text(err));
}

static ep_err run_one(ep_backend *backend, known_data *data, ep_weight_format format,
                      ep_activation activation, uint32_t *hash, ep_error *out_error)
{
    fill_data(data, format);
    const ep_expert_source source = expert_of(data, format, activation);
    return run_source(backend, data, &source, run_jobs, hash, out_error);
}

/* The same with hard rows. Two matrices and relu: nothing large hides small values, and denormals
 * reach the outputs. */
static ep_err run_hard(ep_backend *backend, known_data *data,
                       void (*fill_with)(known_data *data, ep_weight_format format),
                       ep_weight_format format, uint32_t *hash, ep_error *out_error)
{
    fill_with(data, format);
    ep_expert_source source = expert_of(data, format, EP_ACT_RELU_NO_GATE);
    source.gate_scales = source.gate_bias = source.up_bias = source.down_bias = source.shared_gate =
        NULL;
    return run_source(backend, data, &source, run_hard_jobs, hash, out_error);
}

/* Hashes of all activations in one format. */
static ep_err run_activations(ep_backend *backend, known_data *data, ep_weight_format format,
                              uint32_t *hash, ep_error *out_error)
{
    ep_err err = EP_OK;
    *hash = 2166136261u;
    for (unsigned a = 0; err == EP_OK && a < EP_ACT_COUNT; a++) {
        err = run_one(backend, data, format, (ep_activation)a, hash, out_error);
    }
    return err;
}

/*
 * Runs each format in its own family. Not covered: experts of two formats of which w4a8 supports
 * one, such as q4_K with down in q6_K. Their q4_K panels are computed in bf16dp or portable. The
 * digests of other formats show the rounding of those families, but not how they widen q4_K.
 * Covering them would need a second set of digests for each w4a8 format.
 */
static ep_err run_all(ep_backend *backend, ep_numerics numerics, bool wide_inputs,
                      ep_known_answer *out_answer, ep_error *out_error)
{
    ep_known_answer answer = {0};
    uint32_t activations = 0;
    uint32_t pairs = 0;
    uint32_t quads = 0;
    known_data *data = calloc(1, sizeof(*data));
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the known-answer run");
    }
    data->wide_inputs = wide_inputs;
    numerics = ep_numerics_of(numerics, wide_inputs);
    /* In f32, which every family computes alike, so that formats with equal bits have equal digests
     * whatever family the others use. */
    ep_err err = run_activations(backend, data, EP_WEIGHTS_F32, &activations, out_error);
    /* Kernels of other families have activations of their own; bf16 is in all of these families but
     * one. */
    err = err == EP_OK ? run_activations(backend, data, EP_WEIGHTS_BF16, &pairs, out_error) : err;
    if (err == EP_OK && ep_numerics_family(numerics, EP_WEIGHTS_MXFP4) == EP_FFN_FAMILY_W4A8) {
        err = run_activations(backend, data, EP_WEIGHTS_MXFP4, &quads, out_error);
    }
    for (unsigned f = EP_WEIGHTS_NONE + 1; err == EP_OK && f < EP_WEIGHTS_COUNT; f++) {
        const ep_ffn_family family = ep_numerics_family(numerics, (ep_weight_format)f);
        const bool has_quads = family == EP_FFN_FAMILY_W4A8;
        const bool has_pairs = f == EP_WEIGHTS_BF16 || ep_ffn_family_has_pairs(family);
        answer.digests[f] = fnv1a(has_quads ? quads : has_pairs ? pairs : activations, f);
        err =
            run_one(backend, data, (ep_weight_format)f, EP_ACT_SILU, &answer.digests[f], out_error);
        err = err == EP_OK ? run_hard(backend, data, fill_hard, (ep_weight_format)f,
                                      &answer.digests[f], out_error)
                           : err;
        if (err == EP_OK && (f == EP_WEIGHTS_MXFP4 || f == EP_WEIGHTS_MXFP8)) {
            err = run_hard(backend, data, fill_faint, (ep_weight_format)f, &answer.digests[f],
                           out_error);
        }
        if (err == EP_OK && has_quads) {
            err = run_hard(backend, data, fill_halves, (ep_weight_format)f, &answer.digests[f],
                           out_error);
        }
    }
    free(data);
    if (err == EP_OK) {
        *out_answer = answer;
    }
    return err;
}

ep_err ep_known_answer_run(ep_backend *backend, ep_numerics numerics,
                           ep_known_answer out_answers[2], ep_error *out_error)
{
    fenv_t before; /* the opener's environment, since experts are drawn and packed here */
    (void)fegetenv(&before);
    ep_host_floats_reset();
    ep_err err = run_all(backend, numerics, false, &out_answers[false], out_error);
    out_answers[true] = out_answers[false];
    if (err == EP_OK && ep_numerics_family(numerics, EP_WEIGHTS_MXFP4) !=
                            ep_numerics_family(ep_numerics_of(numerics, true), EP_WEIGHTS_MXFP4)) {
        err = run_all(backend, numerics, true, &out_answers[true], out_error);
    }
    (void)fesetenv(&before);
    return err;
}

ep_err ep_known_answer_run_expert(ep_backend *backend, ep_weight_format format,
                                  ep_activation activation, bool has_biases, uint32_t inner,
                                  uint32_t *digest, ep_error *out_error)
{
    uint32_t hash = fnv1a(*digest != 0 ? *digest : 2166136261u, format);
    known_data *data = calloc(1, sizeof(*data));
    if (data == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the known-answer run");
    }
    fill_data(data, format);
    ep_expert_source source = expert_of(data, format, activation);
    EP_ASSERT(inner <= INNER);
    source.inner = inner;
    if (!has_biases) {
        source.gate_bias = source.up_bias = source.down_bias = NULL;
    }
    const ep_err err = run_source(backend, data, &source, run_jobs, &hash, out_error);
    free(data);
    *digest = err == EP_OK ? hash : *digest;
    return err;
}

ep_err ep_known_answer_id(const ep_known_answer *answer, const char *family,
                          ep_weight_format format, uint32_t others,
                          char out_id[EP_NUMERICS_ID_BYTES])
{
    if (format == EP_WEIGHTS_NONE || (unsigned)format >= EP_WEIGHTS_COUNT) {
        return EP_ERR_UNIMPLEMENTED;
    }
    uint32_t digest = answer->digests[format];
    for (unsigned f = EP_WEIGHTS_NONE + 1; f < EP_WEIGHTS_COUNT; f++) {
        digest = f != (unsigned)format && (others >> f & 1u) != 0
                     ? fnv1a(digest, answer->digests[f])
                     : digest;
    }
    snprintf(out_id, EP_NUMERICS_ID_BYTES, "%s/%s/rne/%08x", family, ep_weight_format_name(format),
             digest);
    return EP_OK;
}
