/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many threads an expert gets. One expert's pass, begun by the one thread that is free, has all
 * of them as soon as they are; as many small experts as there are threads have one each. Threads
 * meet inside the panel function and wait there for the others, so a thread that never comes ends
 * the test, whatever the number of CPUs. A plain program for ThreadSanitizer.
 */
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "backends/cpu/cpu_backend.h"
#include "contract/backend/expert_fixture.h"

enum { THREADS = 4, WIDE_ROWS = 20, PATIENCE_S = 60 };

static const ep_ffn_kernel *usual;
static atomic_bool meets; /* not in the known-answer run */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t there[THREADS];
static uint32_t there_count;
static bool gave_up;
static sem_t held, go;
static int failures;

static void fail(const char *what)
{
    fprintf(stderr, "FAILED: %s\n", what);
    failures++;
}

/* Lock held. False: not in time. */
static bool wait_for(uint32_t count)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += PATIENCE_S;
    while (there_count < count && !gave_up) {
        gave_up = pthread_cond_timedwait(&changed, &lock, &end) != 0 && there_count < count;
    }
    return !gave_up;
}

/* The first time a thread comes here it waits until all are here. */
static void meet(void)
{
    bool was_there = false;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < there_count; i++) {
        was_there |= pthread_equal(there[i], pthread_self()) != 0;
    }
    if (!was_there) {
        there[there_count++] = pthread_self();
        pthread_cond_broadcast(&changed);
        (void)wait_for(THREADS);
    }
    pthread_mutex_unlock(&lock);
}

static void panel_and_meet(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                           uint32_t lines, const uint8_t *next, float *c)
{
    if (atomic_load(&meets)) {
        meet();
    }
    usual->panel(dtype, a, rows, panel, lines, next, c);
}

static void on_held(ep_job *job, ep_err result)
{
    (void)job;
    (void)result;
    sem_post(&held);
    sem_wait(&go);
}

static void expect_job(fixture_job *job)
{
    const ep_err err = fixture_job_wait(job);
    const char *wrong = err != EP_OK ? ep_err_name(err) : fixture_job_check(job);
    if (wrong != NULL) {
        fail(wrong);
    }
}

static void submit(ep_backend *backend, fixture_job *job)
{
    if (ep_backend_run(backend, &job->job) != EP_OK) {
        abort();
    }
}

static ep_backend_weights *load(ep_backend *backend, const expert_fixture *fixture)
{
    ep_backend_weights *weights;
    ep_error error;
    if (backend->ops->weights_load(backend, &fixture->source, &weights, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        abort();
    }
    return weights;
}

static void begin_to_meet(void)
{
    pthread_mutex_lock(&lock);
    there_count = 0;
    pthread_mutex_unlock(&lock);
    atomic_store(&meets, true);
}

/* All threads but one are kept in a done() until the one that is free is in the wide pass. */
static void check_one_expert_for_all(ep_backend *backend, const expert_fixture *small,
                                     const expert_fixture *wide)
{
    ep_backend_weights *small_weights = load(backend, small);
    ep_backend_weights *wide_weights = load(backend, wide);
    fixture_job holders[THREADS - 1];
    fixture_job job;
    for (uint32_t i = 0; i < THREADS - 1; i++) {
        fixture_job_init(&holders[i], small, small_weights, 0, 1);
        holders[i].job.done = on_held;
        submit(backend, &holders[i]);
        sem_wait(&held);
    }
    begin_to_meet();
    fixture_job_init(&job, wide, wide_weights, 0, WIDE_ROWS);
    submit(backend, &job);
    pthread_mutex_lock(&lock);
    if (!wait_for(1)) {
        fail("the free thread did not begin");
    }
    pthread_mutex_unlock(&lock);
    for (uint32_t i = 0; i < THREADS - 1; i++) {
        sem_post(&go);
    }
    expect_job(&job);
    if (gave_up) {
        fail("one expert did not get all threads");
    }
    for (uint32_t i = 0; i < THREADS - 1; i++) {
        fixture_job_fini(&holders[i]);
    }
    fixture_job_fini(&job);
    backend->ops->weights_unload(backend, small_weights);
    backend->ops->weights_unload(backend, wide_weights);
}

static void check_an_expert_for_each(ep_backend *backend, const expert_fixture *small)
{
    ep_backend_weights *weights[THREADS];
    fixture_job jobs[THREADS];
    begin_to_meet();
    for (uint32_t i = 0; i < THREADS; i++) {
        weights[i] = load(backend, small);
        fixture_job_init(&jobs[i], small, weights[i], 0, 1);
        submit(backend, &jobs[i]);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        expect_job(&jobs[i]);
        fixture_job_fini(&jobs[i]);
        backend->ops->weights_unload(backend, weights[i]);
    }
    if (gave_up) {
        fail("small experts did not get a thread each");
    }
}

int main(void)
{
    const ep_backend_config config = {.numerics = EP_NUMERICS_PORTABLE, .threads = THREADS};
    expert_fixture small = expert_fixture_make(3, 40, 30, 1, EP_DTYPE_F32);
    expert_fixture wide = expert_fixture_make(4, 200, 300, WIDE_ROWS, EP_DTYPE_F32);
    usual = ep_ffn_kernel_of(EP_FFN_FAMILY_PORTABLE);
    ep_ffn_kernel kernel = *usual;
    kernel.panel = panel_and_meet;
    kernel.panel_to_rows = NULL;
    ep_backend *backend;
    ep_error error;
    sem_init(&held, 0, 0);
    sem_init(&go, 0, 0);
    if (ep_cpu_backend_open_with(&kernel, &config, &backend, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    check_one_expert_for_all(backend, &small, &wide);
    check_an_expert_for_each(backend, &small);
    backend->ops->close(backend);
    expert_fixture_free(&small);
    expert_fixture_free(&wide);
    return failures != 0;
}
