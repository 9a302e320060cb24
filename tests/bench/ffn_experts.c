/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ffn_experts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numeric.h"
#include "bench/bench_report.h"

ep_backend *ffn_backend_open(ep_numerics numerics, uint32_t threads)
{
    const ep_backend_config config = {.numerics = numerics, .threads = threads};
    ep_backend *backend;
    ep_error error;
    if (ep_backend_cpu_ops.open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "cpu backend: %s\n", error.text);
        exit(1);
    }
    return backend;
}

void ffn_backend_id(ep_backend *backend, ep_weight_format format, char out_id[EP_NUMERICS_ID_BYTES])
{
    if (backend->ops->numerics_id(backend, format, false, 0, out_id) != EP_OK) {
        snprintf(out_id, EP_NUMERICS_ID_BYTES, "no numerics id");
    }
}

static ep_err copy_body(void *arg, void *body, size_t body_bytes, ep_error *out_error)
{
    (void)out_error;
    memcpy(body, arg, body_bytes);
    return EP_OK;
}

/* The first is packed, the others are copies of what it became. */
static void load_one(ffn_experts *x, uint32_t e, const ep_expert_source *source)
{
    const ep_backend_ops *ops = x->backend->ops;
    ep_packed_view first;
    ep_error error;
    ep_err err;
    if (e == 0) {
        err = ops->weights_load(x->backend, source, &x->weights[e], &error);
    } else {
        ops->weights_export(x->backend, x->weights[0], &first);
        err = ops->weights_import(x->backend, first.head, first.head_bytes, first.body_bytes,
                                  copy_body, (void *)(uintptr_t)first.body, &x->weights[e], &error);
    }
    if (err != EP_OK) {
        fprintf(stderr, "weights: %s\n", error.text);
        exit(1);
    }
    const ep_cpu_weights *loaded = (const ep_cpu_weights *)x->weights[e];
    x->segments[e] = (ffn_segment){.memory = loaded->memory, .bytes = loaded->bytes};
}

void ffn_experts_load(ffn_experts *x, ep_backend *backend, const ffn_case *c)
{
    ffn_matrix matrices[FFN_MATRICES];
    for (int m = 0; m < FFN_MATRICES; m++) {
        ffn_case_matrix(c, m, &matrices[m]);
    }
    const ep_expert_source source = {.hidden = c->hidden,
                                     .inner = c->inner,
                                     .activation = EP_ACT_SILU,
                                     .format = c->format,
                                     .gate = matrices[FFN_GATE].values,
                                     .up = matrices[FFN_UP].values,
                                     .down = matrices[FFN_DOWN].values,
                                     .gate_scales = matrices[FFN_GATE].scales,
                                     .up_scales = matrices[FFN_UP].scales,
                                     .down_scales = matrices[FFN_DOWN].scales};
    *x = (ffn_experts){.backend = backend, .count = c->experts};
    x->weights = calloc(x->count, sizeof(*x->weights));
    x->segments = calloc(x->count, sizeof(*x->segments));
    if (x->weights == NULL || x->segments == NULL) {
        abort();
    }
    for (uint32_t e = 0; e < x->count; e++) {
        load_one(x, e, &source);
    }
    ffn_case_probe(c, matrices, &x->probe);
    for (int m = 0; m < FFN_MATRICES; m++) {
        ffn_matrix_free(&matrices[m]);
    }
}

void ffn_experts_unload(ffn_experts *x)
{
    for (uint32_t e = 0; e < x->count; e++) {
        x->backend->ops->weights_unload(x->backend, x->weights[e]);
    }
    free(x->weights);
    free(x->segments);
}

static void on_done(ep_job *job, ep_err result)
{
    ffn_pass *p = job->arg;
    pthread_mutex_lock(&p->lock);
    p->err = result != EP_OK ? result : p->err;
    if (--p->pending == 0) {
        p->end_us = bench_now_us();
        p->idle_end_ns = ep_cpu_backend_counts(p->experts->backend).idle_ns;
        pthread_cond_signal(&p->all_done);
    }
    pthread_mutex_unlock(&p->lock);
}

void ffn_pass_open(ffn_pass *p, const ffn_experts *experts, uint32_t hidden, const uint32_t *rows,
                   uint32_t count)
{
    size_t slots = 0;
    for (uint32_t e = 0; e < count; e++) {
        slots += rows[e];
    }
    *p = (ffn_pass){.experts = experts,
                    .lock = PTHREAD_MUTEX_INITIALIZER,
                    .all_done = PTHREAD_COND_INITIALIZER};
    p->jobs = calloc(count, sizeof(*p->jobs));
    p->rows = calloc(slots, sizeof(*p->rows));
    p->x = ffn_case_alloc(slots * hidden * sizeof(*p->x));
    p->y = ffn_case_alloc(slots * hidden * sizeof(*p->y));
    size_t at = 0;
    for (uint32_t e = 0; e < count; e++) {
        if (rows[e] > 0) {
            p->jobs[p->jobs_count++] = (ep_job){.weights = experts->weights[e],
                                                .rows = p->rows + at,
                                                .rows_count = rows[e],
                                                .x_dtype = EP_DTYPE_BF16,
                                                .out_dtype = EP_DTYPE_BF16,
                                                .done = on_done,
                                                .arg = p};
        }
        for (uint32_t r = 0; r < rows[e]; r++, at++) {
            for (uint32_t k = 0; k < hidden; k++) {
                p->x[at * hidden + k] = ep_f32_to_bf16(ffn_case_input(r, k));
            }
            p->rows[at] = (ep_job_row){.x = p->x + at * hidden, .out = p->y + at * hidden};
        }
    }
}

void ffn_pass_close(ffn_pass *p)
{
    free(p->jobs);
    free(p->rows);
    free(p->x);
    free(p->y);
}

double ffn_pass_run(ffn_pass *p, double *out_idle_us)
{
    ep_backend *backend = p->experts->backend;
    const uint64_t idle_ns = ep_cpu_backend_counts(backend).idle_ns;
    const double begin_us = bench_now_us();
    p->pending = p->jobs_count;
    for (uint32_t j = 0; j < p->jobs_count; j++) {
        if (backend->ops->submit(backend, &p->jobs[j]) != EP_OK) {
            abort();
        }
    }
    pthread_mutex_lock(&p->lock);
    while (p->pending > 0) {
        pthread_cond_wait(&p->all_done, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    if (p->err != EP_OK) {
        fprintf(stderr, "a job ended with %d\n", (int)p->err);
        exit(1);
    }
    if (out_idle_us != NULL) {
        *out_idle_us = (double)(p->idle_end_ns - idle_ns) * 1e-3;
    }
    return p->end_us - begin_us;
}
