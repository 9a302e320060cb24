/* SPDX-License-Identifier: Apache-2.0 */
/* What every backend promises (lib/backends/backend.h), run over all of them. */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_backend.h"
#include "base/random.h"
#include "contract/backend/backend_variants.h"
#include "contract/backend/expert_fixture.h"
#include "support/expect.h"
#include "support/slow_backend.h"

#ifdef EP_CONTRACT_CANN
static const ep_dtype weight_dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16,
                                         EP_DTYPE_BF16}; /* the operators have no f32 */
static const char family[] = "ascend";
#else
static const ep_dtype weight_dtypes[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32};
static const char family[] = "portable";
#endif

static void expect_well(size_t variant, const char *wrong)
{
    cr_assert_null(wrong, "%s: %s", backend_variant_name(variant), wrong == NULL ? "" : wrong);
}

/* H around a panel of outputs, I around half a panel, rows around register tiles and a pass. */
static void run_shapes(uint32_t threads)
{
    const uint32_t hiddens[] = {1, 63, 64, 65, 150};
    const uint32_t inners[] = {1, 31, 32, 33, 100};
    const uint32_t rows[] = {1, 2, 5, 6, 7, 64, 257};
    const size_t variants = backend_variants_count();
    ep_backend **backends = calloc(variants, sizeof(*backends));
    uint64_t seed = 100;
    for (size_t v = 0; v < variants; v++) {
        backends[v] = backend_variant_open(v, threads, 0);
    }
    for (size_t h = 0; h < 5; h++) {
        for (size_t i = 0; i < 5; i++) {
            for (size_t d = 0; d < 3; d++) {
                expert_fixture f =
                    expert_fixture_make(seed++, hiddens[h], inners[i], 257, weight_dtypes[d]);
                for (size_t v = 0; v < variants; v++) {
                    ep_backend_weights *weights = fixture_load(&f, backends[v]);
                    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
                        expect_well(v,
                                    fixture_run(&f, backends[v], weights, 257 - rows[r], rows[r]));
                    }
                    backends[v]->ops->weights_unload(backends[v], weights);
                }
                expert_fixture_free(&f);
            }
        }
    }
    for (size_t v = 0; v < variants; v++) {
        backends[v]->ops->close(backends[v]);
    }
    free(backends);
}

Test(backend, rows_equal_the_reference_kernels_with_one_thread)
{
    run_shapes(1);
}

Test(backend, rows_equal_the_reference_kernels_with_two_threads)
{
    run_shapes(2);
}

/* The same rows, cut into jobs in several ways, all in flight together; big enough for many tasks
 * per job. */
Test(backend, bits_do_not_depend_on_how_rows_are_cut_into_jobs)
{
    const uint32_t cuts[] = {1, 3, 6, 50, 300};
    expert_fixture f = expert_fixture_make(5, 200, 170, 300, EP_DTYPE_BF16);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        for (uint32_t threads = 1; threads <= 2; threads++) {
            ep_backend *backend = backend_variant_open(v, threads, 0);
            ep_backend_weights *weights = fixture_load(&f, backend);
            for (size_t c = 0; c < sizeof(cuts) / sizeof(cuts[0]); c++) {
                uint32_t count = (f.rows_count + cuts[c] - 1) / cuts[c];
                fixture_job *jobs = calloc(count, sizeof(*jobs));
                for (uint32_t j = 0; j < count; j++) {
                    uint32_t left = f.rows_count - j * cuts[c];
                    fixture_job_init(&jobs[j], &f, weights, j * cuts[c],
                                     left < cuts[c] ? left : cuts[c]);
                    cr_assert_eq(ep_backend_run(backend, &jobs[j].job), EP_OK);
                }
                for (uint32_t j = 0; j < count; j++) {
                    cr_assert_eq(fixture_job_wait(&jobs[j]), EP_OK);
                    expect_well(v, fixture_job_check(&jobs[j]));
                    fixture_job_fini(&jobs[j]);
                }
                free(jobs);
            }
            backend->ops->weights_unload(backend, weights);
            backend->ops->close(backend);
        }
    }
    expert_fixture_free(&f);
}

Test(backend, many_jobs_of_many_experts_in_flight)
{
    enum { EXPERTS = 6, JOBS = 300 };
    expert_fixture f[EXPERTS];
    for (uint64_t e = 0; e < EXPERTS; e++) {
        f[e] = expert_fixture_make(900 + e, 64 + 17 * (uint32_t)e, 40 + 9 * (uint32_t)e, 20,
                                   weight_dtypes[e % 3]);
    }
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *backend = backend_variant_open(v, 2, 0);
        ep_backend_weights *weights[EXPERTS];
        fixture_job *jobs = calloc(JOBS, sizeof(*jobs));
        uint64_t state = v;
        for (size_t e = 0; e < EXPERTS; e++) {
            weights[e] = fixture_load(&f[e], backend);
        }
        for (size_t j = 0; j < JOBS; j++) {
            size_t e = ep_splitmix64(&state) % EXPERTS;
            uint32_t count = 1 + (uint32_t)(ep_splitmix64(&state) % 20);
            uint32_t first = (uint32_t)(ep_splitmix64(&state) % (21 - count));
            fixture_job_init(&jobs[j], &f[e], weights[e], first, count);
            cr_assert_eq(ep_backend_run(backend, &jobs[j].job), EP_OK);
        }
        for (size_t j = 0; j < JOBS; j++) {
            cr_assert_eq(fixture_job_wait(&jobs[j]), EP_OK);
            expect_well(v, fixture_job_check(&jobs[j]));
        }
        for (size_t j = 0; j < JOBS; j++) {
            cr_assert_eq(jobs[j].done_count, 1, "%s: done() was called %u times",
                         backend_variant_name(v), jobs[j].done_count);
            fixture_job_fini(&jobs[j]);
        }
        for (size_t e = 0; e < EXPERTS; e++) {
            backend->ops->weights_unload(backend, weights[e]);
        }
        free(jobs);
        backend->ops->close(backend);
    }
    for (size_t e = 0; e < EXPERTS; e++) {
        expert_fixture_free(&f[e]);
    }
}

/* A job that submits itself again from done(); the last done() wakes the test. */
typedef struct {
    fixture_job inner;
    ep_backend *backend;
    uint32_t left;
    ep_err err;
    void (*wake)(ep_job *job, ep_err result);
    pthread_t submitter;
} chain;

static void chain_done(ep_job *job, ep_err result)
{
    chain *c = job->arg;
    if (pthread_equal(pthread_self(), c->submitter)) {
        c->err = EP_ERR_INTERNAL;
    }
    if (result == EP_OK && c->err == EP_OK && c->left > 0) {
        c->left--;
        c->err = ep_backend_run(c->backend, job);
        if (c->err == EP_OK) {
            return;
        }
    }
    job->arg = &c->inner;
    c->wake(job, c->err != EP_OK ? c->err : result);
}

Test(backend, a_job_may_be_submitted_from_done_which_runs_on_another_thread)
{
    expert_fixture f = expert_fixture_make(77, 70, 40, 9, weight_dtypes[2]);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *backend = backend_variant_open(v, 2, 0);
        ep_backend_weights *weights = fixture_load(&f, backend);
        chain c = {.backend = backend, .left = 100, .submitter = pthread_self()};
        fixture_job_init(&c.inner, &f, weights, 0, 9);
        c.wake = c.inner.job.done;
        c.inner.job.done = chain_done;
        c.inner.job.arg = &c;
        cr_assert_eq(ep_backend_run(backend, &c.inner.job), EP_OK);
        cr_assert_eq(fixture_job_wait(&c.inner), EP_OK);
        expect_well(v, fixture_job_check(&c.inner));
        cr_assert_eq(c.left, 0);
        fixture_job_fini(&c.inner);
        backend->ops->weights_unload(backend, weights);
        backend->ops->close(backend);
    }
    expert_fixture_free(&f);
}

Test(backend, equal_numerics_ids_for_equal_bits)
{
    for (size_t d = 0; d < 3; d++) {
        char first[EP_NUMERICS_ID_BYTES] = "";
        for (size_t v = 0; v < backend_variants_count(); v++) {
            ep_backend *backend = backend_variant_open(v, 1 + v % 2, 0);
            char id[EP_NUMERICS_ID_BYTES];
            char start[EP_NUMERICS_ID_BYTES];
            cr_assert_eq(backend->ops->numerics_id(backend, ep_weight_format_of(weight_dtypes[d]),
                                                   false, 0, id),
                         EP_OK);
            snprintf(start, sizeof(start), "%s/%s/rne/", family, ep_dtype_name(weight_dtypes[d]));
            cr_assert(strncmp(id, start, strlen(start)) == 0 && strlen(id) == strlen(start) + 8,
                      "id is %s", id);
            if (v == 0) {
                memcpy(first, id, sizeof(first));
            }
            cr_assert_str_eq(id, first, "%s", backend_variant_name(v));
            cr_assert_eq(backend->ops->numerics_id(backend, EP_WEIGHTS_NONE, false, 0, id),
                         EP_ERR_UNIMPLEMENTED);
            backend->ops->close(backend);
        }
    }
}

Test(backend, budget_counts_weights_bytes_exactly)
{
    expert_fixture f = expert_fixture_make(31, 100, 50, 3, EP_DTYPE_F16);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *probe = backend_variant_open(v, 1, 0);
        size_t bytes = probe->ops->weights_bytes(probe, &f.source);
        cr_assert_geq(bytes, 3 * 100 * 50 * 2);
        probe->ops->close(probe);

        ep_backend *backend = backend_variant_open(v, 1, 3 * bytes - 1);
        ep_backend_weights *weights[3] = {NULL, NULL, NULL};
        ep_error error;
        weights[0] = fixture_load(&f, backend);
        weights[1] = fixture_load(&f, backend);
        cr_assert_eq(backend->ops->weights_load(backend, &f.source, &weights[2], &error),
                     EP_ERR_RESOURCE_EXHAUSTED);
        char want[128];
        snprintf(want, sizeof(want), "%zu of %zu bytes of the weight budget are used", 2 * bytes,
                 3 * bytes - 1);
        ASSERT_TEXT(error, want);
        cr_assert_null(weights[2]);

        /* Space comes back, and reloaded weights answer as before. */
        for (int again = 0; again < 3; again++) {
            backend->ops->weights_unload(backend, weights[0]);
            weights[0] = fixture_load(&f, backend);
            expect_well(v, fixture_run(&f, backend, weights[0], 0, 3));
            expect_well(v, fixture_run(&f, backend, weights[1], 0, 3));
        }
        backend->ops->weights_unload(backend, weights[0]);
        backend->ops->weights_unload(backend, weights[1]);
        backend->ops->weights_unload(backend, NULL);
        backend->ops->close(NULL);
        backend->ops->close(backend);

        backend = backend_variant_open(v, 1, bytes); /* just enough for one */
        weights[0] = fixture_load(&f, backend);
        backend->ops->weights_unload(backend, weights[0]);
        backend->ops->close(backend);
    }
    expert_fixture_free(&f);
}

typedef struct packed_copy {
    uint8_t head[EP_PACKED_HEAD_BYTES];
    size_t head_bytes;
    uint8_t *body;
    size_t body_bytes;
    ep_err result; /* of fill */
} packed_copy;

static packed_copy copy_packed(ep_backend *backend, const ep_backend_weights *weights)
{
    ep_packed_view view;
    packed_copy copy = {.result = EP_OK};
    backend->ops->weights_export(backend, weights, &view);
    cr_assert_leq(view.head_bytes, sizeof(copy.head));
    memcpy(copy.head, view.head, view.head_bytes);
    copy.head_bytes = view.head_bytes;
    copy.body = malloc(view.body_bytes);
    memcpy(copy.body, view.body, view.body_bytes);
    copy.body_bytes = view.body_bytes;
    return copy;
}

static ep_err fill_from_copy(void *arg, void *body, size_t body_bytes, ep_error *out_error)
{
    const packed_copy *copy = arg;
    cr_assert_eq(body_bytes, copy->body_bytes);
    if (copy->result != EP_OK) {
        return ep_error_set(out_error, copy->result, "fill says no");
    }
    memcpy(body, copy->body, body_bytes);
    return EP_OK;
}

static ep_err import_copy(ep_backend *backend, packed_copy *copy, ep_backend_weights **out_weights,
                          ep_error *out_error)
{
    return backend->ops->weights_import(backend, copy->head, copy->head_bytes, copy->body_bytes,
                                        fill_from_copy, copy, out_weights, out_error);
}

Test(backend, exported_weights_come_back_with_the_same_bits)
{
    for (uint32_t d = 0; d < 3; d++) {
        for (uint64_t seed = 0; seed < 4; seed++) { /* with and without a shared gate */
            expert_fixture f = expert_fixture_make(60 + seed, 100, 50, 9, weight_dtypes[d]);
            for (size_t v = 0; v < backend_variants_count(); v++) {
                ep_backend *backend = backend_variant_open(v, 2, 0);
                if (backend->ops->weights_import != NULL) {
                    cr_assert_not_null(backend->ops->packed_layout(backend));
                    ep_backend_weights *weights = fixture_load(&f, backend);
                    packed_copy copy = copy_packed(backend, weights);
                    ep_error error;
                    backend->ops->weights_unload(backend, weights);
                    ASSERT_OK(import_copy(backend, &copy, &weights, &error), error);
                    expect_well(v, fixture_run(&f, backend, weights, 0, 9));
                    packed_copy again = copy_packed(backend, weights);
                    cr_assert_arr_eq(again.body, copy.body, copy.body_bytes);
                    free(again.body);
                    free(copy.body);
                    backend->ops->weights_unload(backend, weights);
                }
                backend->ops->close(backend);
            }
            expert_fixture_free(&f);
        }
    }
}

Test(backend, a_packed_form_that_does_not_fit_is_refused_and_holds_nothing)
{
    expert_fixture f = expert_fixture_make(31, 100, 50, 3, EP_DTYPE_BF16);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *backend = backend_variant_open(v, 1, 0);
        if (backend->ops->weights_import != NULL) {
            ep_backend_weights *weights = fixture_load(&f, backend), *none = NULL;
            packed_copy copy = copy_packed(backend, weights);
            const packed_copy good = copy;
            ep_error error;
            backend->ops->weights_unload(backend, weights);
            copy.head_bytes--;
            cr_expect_eq(import_copy(backend, &copy, &none, &error), EP_ERR_BAD_FILE);
            copy = good;
            copy.body_bytes -= 64;
            EXPECT_FAILS(import_copy(backend, &copy, &none, &error), EP_ERR_BAD_FILE, error,
                         "allowed");
            copy = good;
            memset(copy.head, 0, sizeof(copy.head));
            cr_expect_neq(import_copy(backend, &copy, &none, &error), EP_OK);
            copy = good;
            copy.result = EP_ERR_IO;
            cr_expect_eq(import_copy(backend, &copy, &none, &error), EP_ERR_IO);
            cr_expect_str_eq(error.text, "fill says no");
            cr_expect_null(none);
            free(good.body);
        }
        backend->ops->close(backend); /* asserts that no weights are held */
    }
    expert_fixture_free(&f);
}

static void expect_refused(ep_backend *backend, const ep_expert_source *source, ep_err want,
                           const char *text)
{
    ep_backend_weights *weights = NULL;
    ep_error error;
    ep_err err = backend->ops->weights_load(backend, source, &weights, &error);
    cr_assert_eq(err, want, "%s: got %s, want %s", backend->ops->name, ep_err_name(err),
                 ep_err_name(want));
    cr_assert_eq(error.code, want);
    cr_assert_str_eq(error.text, text);
    cr_assert_null(weights);
}

Test(backend, refuses_bad_experts_by_name)
{
    expert_fixture f = expert_fixture_make(32, 8, 8, 1, EP_DTYPE_BF16);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *backend = backend_variant_open(v, 1, 0);
        char text[EP_ERROR_TEXT_BYTES];
        ep_expert_source bad = f.source;
        bad.hidden = 0;
        snprintf(text, sizeof(text), "expert width H is 0, allowed 1 to %u", EP_HIDDEN_MAX);
        expect_refused(backend, &bad, EP_ERR_INVALID_ARGUMENT, text);
        cr_assert_eq(backend->ops->weights_bytes(backend, &bad), 0);
        bad = f.source;
        bad.inner = EP_INNER_MAX + 1;
        snprintf(text, sizeof(text), "expert inner width I is %u, allowed 1 to %u",
                 EP_INNER_MAX + 1, EP_INNER_MAX);
        expect_refused(backend, &bad, EP_ERR_INVALID_ARGUMENT, text);
        bad = f.source;
        bad.format = EP_WEIGHTS_COUNT;
        snprintf(text, sizeof(text), "weight format %d is not implemented, allowed 1..%d",
                 EP_WEIGHTS_COUNT, EP_WEIGHTS_COUNT - 1);
        expect_refused(backend, &bad, EP_ERR_UNIMPLEMENTED, text);
        bad = f.source;
        bad.format = EP_WEIGHTS_MXFP4; /* without scales */
        expect_refused(backend, &bad, EP_ERR_INVALID_ARGUMENT,
                       "the expert's gate matrix has its scales missing");
        bad = f.source;
        bad.activation = EP_ACT_COUNT;
        snprintf(text, sizeof(text), "activation %d is not implemented, allowed 0..%d",
                 EP_ACT_COUNT, EP_ACT_COUNT - 1);
        expect_refused(backend, &bad, EP_ERR_UNIMPLEMENTED, text);
        bad = f.source;
        bad.activation = EP_ACT_SITU;
        bad.numbers = (ep_activation_numbers){.alpha = 4.0f};
        expect_refused(backend, &bad, EP_ERR_INVALID_ARGUMENT,
                       "activation situ with alpha 4, beta 0, limit 0, allowed finite ones, limit "
                       ">= 0, alpha and beta > 0");
        bad = f.source;
        bad.up = NULL;
        expect_refused(backend, &bad, EP_ERR_INVALID_ARGUMENT, "the expert's up matrix is missing");
        bad = f.source;
        bad.shared_gate = f.source.gate;
        bad.shared_gate_dtype = EP_DTYPE_NONE;
        expect_refused(backend, &bad, EP_ERR_UNIMPLEMENTED,
                       "a shared gate of type none is not implemented, allowed: bf16, f16, f32");
        backend->ops->close(backend);
    }
    expert_fixture_free(&f);
}

Test(backend, refuses_bad_jobs_without_calling_done)
{
    expert_fixture f = expert_fixture_make(33, 8, 8, 1, EP_DTYPE_BF16);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *backend = backend_variant_open(v, 1, 0);
        ep_backend_weights *weights = fixture_load(&f, backend);
        fixture_job job;
        fixture_job_init(&job, &f, weights, 0, 1);
        const ep_job good = job.job;
        const ep_job_row good_row = job.rows[0];
#define EXPECT_REFUSED(change)                                                                     \
    do {                                                                                           \
        change;                                                                                    \
        cr_assert_eq(ep_backend_run(backend, &job.job), EP_ERR_INVALID_ARGUMENT, "%s: " #change,   \
                     backend_variant_name(v));                                                     \
        job.job = good;                                                                            \
        job.rows[0] = good_row;                                                                    \
    } while (0)
        EXPECT_REFUSED(job.job.rows_count = 0);
        EXPECT_REFUSED(job.job.rows_count = EP_JOB_ROWS_MAX + 1);
        EXPECT_REFUSED(job.job.x_dtype = EP_DTYPE_I32);
        EXPECT_REFUSED(job.job.x_dtype = EP_DTYPE_NONE);
        EXPECT_REFUSED(job.job.out_dtype = EP_DTYPE_I8);
        EXPECT_REFUSED(job.job.weights = NULL);
        EXPECT_REFUSED(job.job.rows = NULL);
        EXPECT_REFUSED(job.job.done = NULL);
        EXPECT_REFUSED(job.rows[0].x = NULL);
        EXPECT_REFUSED(job.rows[0].out = NULL);
        EXPECT_REFUSED(job.rows[0].out = (uint8_t *)good_row.out + 1);
#undef EXPECT_REFUSED
        cr_assert_eq(job.done_count, 0);
        cr_assert_eq(ep_backend_run(backend, &job.job), EP_OK);
        cr_assert_eq(fixture_job_wait(&job), EP_OK);
        expect_well(v, fixture_job_check(&job));
        fixture_job_fini(&job);
        backend->ops->weights_unload(backend, weights);
        backend->ops->close(backend);
    }
    expert_fixture_free(&f);
}

Test(backend, a_full_job_and_the_default_thread_count)
{
    expert_fixture f = expert_fixture_make(34, 9, 5, EP_JOB_ROWS_MAX, weight_dtypes[2]);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        ep_backend *backend = backend_variant_open(v, 0, 0);
        ep_backend_weights *weights = fixture_load(&f, backend);
        expect_well(v, fixture_run(&f, backend, weights, 0, EP_JOB_ROWS_MAX));
        backend->ops->weights_unload(backend, weights);
        backend->ops->close(backend);
    }
    expert_fixture_free(&f);
}

/* Jobs that pile up behind the first one's done(), which waits. */
typedef struct {
    pthread_mutex_t gate;
    _Atomic uint32_t done_count;
} pile;

static void pile_done(ep_job *job, ep_err result)
{
    pile *p = job->arg;
    pthread_mutex_lock(&p->gate);
    pthread_mutex_unlock(&p->gate);
    cr_assert_eq(result, EP_OK);
    atomic_fetch_add(&p->done_count, 1);
}

static void fill_queue(size_t variant)
{
    expert_fixture f = expert_fixture_make(35, 1, 1, 1, weight_dtypes[2]);
    ep_backend *backend = backend_variant_open(variant, 1, 0);
    ep_backend_weights *weights = fixture_load(&f, backend);
    float out;
    ep_job_row row = f.rows[0];
    row.out = &out;
    pile p = {.gate = PTHREAD_MUTEX_INITIALIZER};
    const uint32_t room = EP_BACKEND_JOBS_MAX + 2; /* one job may be in its done() already */
    ep_job *jobs = calloc(room, sizeof(*jobs));
    uint32_t accepted = 0;
    ep_err err = EP_OK;
    pthread_mutex_lock(&p.gate);
    while (accepted < room) {
        jobs[accepted] = (ep_job){.weights = weights,
                                  .rows = &row,
                                  .rows_count = 1,
                                  .x_dtype = f.x_dtype,
                                  .out_dtype = f.out_dtype,
                                  .done = pile_done,
                                  .arg = &p};
        err = backend->ops->submit(backend, &jobs[accepted]);
        if (err != EP_OK) {
            break;
        }
        accepted++;
    }
    pthread_mutex_unlock(&p.gate);
    cr_assert_eq(err, EP_ERR_RESOURCE_EXHAUSTED, "%s: %s", backend_variant_name(variant),
                 ep_err_name(err));
    cr_assert(accepted == EP_BACKEND_JOBS_MAX || accepted == EP_BACKEND_JOBS_MAX + 1, "%u accepted",
              accepted);
    while (atomic_load(&p.done_count) < accepted) {
        sched_yield();
    }
    backend->ops->weights_unload(backend, weights);
    backend->ops->close(backend);
    free(jobs);
    expert_fixture_free(&f);
}

Test(backend, a_full_queue_refuses_and_all_it_took_are_done)
{
    for (size_t v = 0; v < backend_variants_count(); v++) {
        /* its rows are elsewhere; its copies count too */
        if (strcmp(backend_variant_name(v), "slow") != 0) {
            fill_queue(v);
        }
    }
}

Test(backend, refuses_too_many_threads)
{
    for (size_t v = 0; v < backend_variants_count(); v++) {
        const ep_backend_config config = {.threads = EP_BACKEND_THREADS_MAX + 1};
        ep_backend *backend = NULL;
        ep_error error;
        cr_assert_eq(backend_variant_try_open(v, &config, &backend, &error),
                     EP_ERR_INVALID_ARGUMENT, "%s", backend_variant_name(v));
        cr_assert_str_eq(error.text, "compute threads is 513, allowed 0 to 512");
        cr_assert_null(backend);
    }
}

Test(registry, knows_the_built_in_backends_and_takes_more)
{
    cr_assert_eq(ep_backend_by_name("cpu"), &ep_backend_cpu_ops);
    cr_assert_str_eq(ep_backend_by_name("reference")->name, "reference");
    cr_assert_null(ep_backend_by_name("slow"));
    cr_assert_str_eq(ep_backend_names(), "cpu, ascend, reference");
    ep_backend_register(&ep_slow_backend_ops);
    ep_backend_register(&ep_slow_backend_ops);
    cr_assert_eq(ep_backend_by_name("slow"), &ep_slow_backend_ops);
    cr_assert_str_eq(ep_backend_names(), "cpu, ascend, reference, slow");
}
