/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many jobs of many experts at once, wide passes and whole ones, urgent and patient, over thread
 * counts and memory nodes: every row has the reference's bits, every job ends once. A plain program
 * for ThreadSanitizer. Argument: the seed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_backend.h"
#include "base/random.h"
#include "contract/backend/expert_fixture.h"
#include "unit/backends/made_up_machine.h"

enum { FIXTURES = 3, COPIES = 2, JOBS = 24, ROWS = 40, ROUNDS = 3 };

static expert_fixture fixtures[FIXTURES];

static int run_round(ep_backend *backend, ep_backend_weights *weights[FIXTURES][COPIES],
                     uint64_t *state)
{
    fixture_job jobs[JOBS];
    int failures = 0;
    for (int j = 0; j < JOBS; j++) {
        uint32_t f = (uint32_t)(ep_splitmix64(state) % FIXTURES);
        uint32_t count = 1 + (uint32_t)(ep_splitmix64(state) % ROWS);
        fixture_job_init(&jobs[j], &fixtures[f], weights[f][ep_splitmix64(state) % COPIES],
                         (uint32_t)(ep_splitmix64(state) % (ROWS + 1 - count)), count);
        jobs[j].job.priority =
            ep_splitmix64(state) % 3 + (ep_splitmix64(state) % 2 == 0 ? EP_JOB_PATIENT : 0);
    }
    for (int j = 0; j < JOBS; j++) {
        if (backend->ops->submit(backend, &jobs[j].job) != EP_OK) {
            abort();
        }
    }
    for (int j = 0; j < JOBS; j++) {
        ep_err err = fixture_job_wait(&jobs[j]);
        const char *wrong = err != EP_OK ? ep_err_name(err) : fixture_job_check(&jobs[j]);
        if (wrong != NULL) {
            fprintf(stderr, "%s\n", wrong);
            failures++;
        }
        fixture_job_fini(&jobs[j]);
    }
    return failures;
}

/* nodes: of a made-up machine. Threads are tied to its CPUs and memory to its nodes as far as this
 * one has them. */
static int run_with(const char *nodes, uint32_t threads, bool unpinned, uint64_t seed)
{
    const ep_backend_config config = {.threads = threads, .unpinned = unpinned};
    ep_backend_weights *weights[FIXTURES][COPIES];
    ep_backend *backend;
    ep_error error;
    int failures = 0;
    if (nodes != NULL) {
        made_up_machine("0-3", "0-7", nodes);
    } else {
        made_up_machine_remove();
    }
    if (ep_backend_cpu_ops.open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    for (int i = 0; i < FIXTURES * COPIES; i++) {
        if (backend->ops->weights_load(backend, &fixtures[i % FIXTURES].source,
                                       &weights[i % FIXTURES][i / FIXTURES], &error) != EP_OK) {
            fprintf(stderr, "%s\n", error.text);
            abort();
        }
    }
    for (int round = 0; round < ROUNDS; round++) {
        failures += run_round(backend, weights, &seed);
    }
    for (int i = 0; i < FIXTURES * COPIES; i++) {
        backend->ops->weights_unload(backend, weights[i % FIXTURES][i / FIXTURES]);
    }
    backend->ops->close(backend);
    if (failures != 0) {
        fprintf(stderr, "nodes %s, %u threads: %d jobs failed\n",
                nodes != NULL ? nodes : "of this machine", threads, failures);
    }
    return failures;
}

int main(int argc, char **argv)
{
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 5;
    static const char *const machines[] = {NULL, "0:0-1 1:2-3", "0:0 4:1 6:2", "0:1,3 1:0,2"};
    const uint32_t threads[] = {0, 1, 2, 3, 7};
    int failures = 0;
    printf("seed %llu\n", (unsigned long long)seed);
    fixtures[0] = expert_fixture_make(seed, 40, 30, ROWS, EP_DTYPE_BF16); /* whole */
    fixtures[1] = expert_fixture_make(seed + 1, 300, 200, ROWS, EP_DTYPE_BF16);
    fixtures[2] = expert_fixture_make(seed + 2, 130, 333, ROWS, EP_DTYPE_F32);
    for (size_t t = 0; t < sizeof(machines) / sizeof(machines[0]); t++) {
        for (size_t n = 0; n < sizeof(threads) / sizeof(threads[0]); n++) {
            failures += run_with(machines[t], threads[n], n % 2 == 1, seed + 100 * t + n);
        }
    }
    made_up_machine_remove();
    for (int i = 0; i < FIXTURES; i++) {
        expert_fixture_free(&fixtures[i]);
    }
    return failures != 0;
}
