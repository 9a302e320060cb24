/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs of smaller priority overtake on the cpu backend: its one thread is kept inside a done()
 * until all jobs are there, so the order in which they end is the order it chose. A plain program
 * for ThreadSanitizer.
 */
#include <semaphore.h>
#include <stdio.h>
#include <string.h>

#include "backends/backend.h"
#include "contract/backend/expert_fixture.h"

enum { ROWS = 600, JOBS = 6 };

static sem_t go, ended;
static char order[64];

static void on_done(ep_job *job, ep_err result)
{
    size_t n = strlen(order);
    const char *name = job->arg;
    snprintf(order + n, sizeof(order) - n, "%s%s ", name, result == EP_OK ? "" : "!");
    if (strcmp(name, "first") == 0) {
        sem_wait(&go);
    }
    sem_post(&ended);
}

int main(void)
{
    const ep_backend_config config = {.threads = 1};
    const struct {
        const char *name;
        uint64_t priority;
        uint32_t rows;
    } plan[JOBS] = {{"first", 0, 1},   {"bulk", EP_JOB_PATIENT | 1, ROWS},
                    {"late", 9, 20},   {"soon", 5, 20},
                    {"soon2", 5, 300}, {"bulk0", EP_JOB_PATIENT, 20}};
    fixture_job jobs[JOBS];
    ep_backend *backend;
    ep_backend_weights *weights;
    ep_error error;
    int status = 0;
    expert_fixture fixture = expert_fixture_make(3, 200, 100, ROWS, EP_DTYPE_BF16);
    sem_init(&go, 0, 0);
    sem_init(&ended, 0, 0);
    const ep_backend_ops *ops = ep_backend_by_name("cpu");
    if (ops->open(&config, &backend, &error) != EP_OK ||
        ops->weights_load(backend, &fixture.source, &weights, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    for (size_t i = 0; i < JOBS; i++) {
        fixture_job_init(&jobs[i], &fixture, weights, 0, plan[i].rows);
        jobs[i].job.priority = plan[i].priority;
        jobs[i].job.done = on_done;
        jobs[i].job.arg = (void *)(uintptr_t)plan[i].name;
        if (ep_backend_run(backend, &jobs[i].job) != EP_OK) {
            fprintf(stderr, "a job was refused\n");
            return 1;
        }
    }
    sem_post(&go);
    for (size_t i = 0; i < JOBS; i++) {
        sem_wait(&ended);
    }
    if (strcmp(order, "first soon soon2 late bulk0 bulk ") != 0) {
        fprintf(stderr, "order: %s\n", order);
        status = 1;
    }
    for (size_t i = 0; i < JOBS; i++) {
        jobs[i].done_count = 1;
        const char *wrong = fixture_job_check(&jobs[i]);
        if (wrong != NULL) {
            fprintf(stderr, "%s: %s\n", plan[i].name, wrong);
            status = 1;
        }
        fixture_job_fini(&jobs[i]);
    }
    ops->weights_unload(backend, weights);
    ops->close(backend);
    expert_fixture_free(&fixture);
    return status;
}
