/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four threads load, submit, wait and unload on one backend at the same time; every row is checked.
 * A plain program, so that it runs under ThreadSanitizer. Arguments: the first seed (1), how many
 * (1).
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/random.h"
#include "contract/backend/backend_variants.h"
#include "contract/backend/expert_fixture.h"

enum { THREADS = 4, ROUNDS = 12, IN_FLIGHT = 8, FIXTURES = 5, ROWS = 12 };

#ifdef EP_CONTRACT_CANN /* the operators have no f32 */
static const ep_dtype dtypes[FIXTURES] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F16, EP_DTYPE_BF16,
                                          EP_DTYPE_I8};
#else
static const ep_dtype dtypes[FIXTURES] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_BF16,
                                          EP_DTYPE_I8};
#endif
static expert_fixture fixtures[FIXTURES];
static ep_backend *backend;
static _Atomic uint32_t failures;

static void fail(const char *what)
{
    atomic_fetch_add(&failures, 1);
    fprintf(stderr, "%s: %s\n", backend->ops->name, what);
}

static void round_of_jobs(uint64_t *state)
{
    const expert_fixture *f = &fixtures[ep_splitmix64(state) % FIXTURES];
    ep_backend_weights *weights = NULL;
    ep_error error;
    if (backend->ops->weights_load(backend, &f->source, &weights, &error) != EP_OK) {
        fail(error.text);
        return;
    }
    fixture_job jobs[IN_FLIGHT];
    for (size_t j = 0; j < IN_FLIGHT; j++) {
        uint32_t count = 1 + (uint32_t)(ep_splitmix64(state) % ROWS);
        uint32_t first = (uint32_t)(ep_splitmix64(state) % (ROWS + 1 - count));
        fixture_job_init(&jobs[j], f, weights, first, count);
        jobs[j].job.priority =
            ep_splitmix64(state) % 4 + (ep_splitmix64(state) % 2 == 0 ? EP_JOB_PATIENT : 0);
        if (ep_backend_run(backend, &jobs[j].job) != EP_OK) {
            fail("a job was refused");
            exit(1);
        }
    }
    for (size_t j = 0; j < IN_FLIGHT; j++) {
        ep_err err = fixture_job_wait(&jobs[j]);
        const char *wrong = err != EP_OK ? ep_err_name(err) : fixture_job_check(&jobs[j]);
        if (wrong != NULL) {
            fail(wrong);
        }
        fixture_job_fini(&jobs[j]);
    }
    backend->ops->weights_unload(backend, weights);
}

static void *submitter_main(void *arg)
{
    uint64_t state = (uint64_t)(uintptr_t)arg;
    for (int round = 0; round < ROUNDS; round++) {
        round_of_jobs(&state);
    }
    return NULL;
}

static void run_variant(size_t variant, uint64_t seed)
{
    pthread_t threads[THREADS];
    backend = backend_variant_open(variant, 2, 0);
    for (size_t t = 0; t < THREADS; t++) {
        if (pthread_create(&threads[t], NULL, submitter_main,
                           (void *)(uintptr_t)(seed * THREADS + t + 1)) != 0) {
            exit(1);
        }
    }
    for (size_t t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
    }
    printf("%s: %d jobs\n", backend_variant_name(variant), THREADS * ROUNDS * IN_FLIGHT);
    backend->ops->close(backend);
}

static void run_seed(uint64_t seed)
{
    /* the last rounds in a stage and writes rows at once */
    const uint32_t shapes[][2] = {{40, 30}, {100, 80}, {160, 130}, {220, 180}, {70, 2000}};
    char text[32];
    printf("seed %llu\n", (unsigned long long)seed);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)seed);
    setenv("EP_CANN_SEED", text, 1);
    for (uint32_t i = 0; i < FIXTURES; i++) {
        fixtures[i] = expert_fixture_make(seed + i, shapes[i][0], shapes[i][1], ROWS, dtypes[i]);
    }
    fixtures[FIXTURES - 1].source.shared_gate = NULL;
    expert_fixture_answer(&fixtures[FIXTURES - 1], EP_FFN_FAMILY_PORTABLE);
    for (size_t v = 0; v < backend_variants_count(); v++) {
        run_variant(v, seed);
    }
    for (size_t i = 0; i < FIXTURES; i++) {
        expert_fixture_free(&fixtures[i]);
    }
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    for (uint64_t seed = first; seed < first + count; seed++) {
        run_seed(seed);
    }
    return atomic_load(&failures) == 0 ? 0 : 1;
}
