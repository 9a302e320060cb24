/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two memory nodes with a thread each: a thread takes the jobs whose weights lie on its own node
 * first, whatever was queued before them, and the other node's when there are none left, or when 64
 * have gone before them. Both threads are kept inside a done() until all jobs are there; then one
 * of them is let go, so the order in which the jobs end is the order it chose.
 */
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_backend.h"
#include "contract/backend/expert_fixture.h"
#include "unit/backends/made_up_machine.h"

enum {
    EXPERTS = 4,
    FAR = 4,
    OVERTAKING = 64,
    NEAR = OVERTAKING + 3,
    JOBS = FAR + NEAR,
    HOLDERS = 2
};

static sem_t held, go[HOLDERS], ended;
static char order[2 * JOBS + 1];

static void on_held(ep_job *job, ep_err result)
{
    char name[16];
    (void)job;
    (void)result;
    pthread_getname_np(pthread_self(), name, sizeof(name));
    sem_post(&held);
    sem_wait(&go[name[strlen(name) - 1] - '0']);
    sem_post(&ended);
}

static void on_done(ep_job *job, ep_err result)
{
    size_t n = strlen(order);
    uint32_t node = ((const ep_cpu_weights *)job->weights)->node;
    snprintf(order + n, sizeof(order) - n, "%u%s", node, result == EP_OK ? "" : "!");
    sem_post(&ended);
}

/* All of the thread's own node but the last three, one of those that waited, the rest. */
static const char *expected_order(void)
{
    static char text[JOBS + 1];
    memset(text, '1', OVERTAKING);
    snprintf(text + OVERTAKING, sizeof(text) - OVERTAKING, "0111000");
    return text;
}

/* One thread has one node: no weights go to the other one. */
static int check_node_without_workers(const expert_fixture *fixture)
{
    const ep_backend_config config = {.threads = 1};
    ep_backend *backend;
    ep_backend_weights *weights[EXPERTS];
    ep_error error;
    int status = 0;
    if (ep_backend_cpu_ops.open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        if (backend->ops->weights_load(backend, &fixture->source, &weights[e], &error) != EP_OK) {
            abort();
        }
        if (((const ep_cpu_weights *)weights[e])->node != 0) {
            fprintf(stderr, "expert %u lies on a node without workers\n", e);
            status = 1;
        }
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        backend->ops->weights_unload(backend, weights[e]);
    }
    backend->ops->close(backend);
    return status;
}

static void submit(ep_backend *backend, fixture_job *job, void (*done)(ep_job *job, ep_err result))
{
    job->job.done = done;
    if (backend->ops->submit(backend, &job->job) != EP_OK) {
        abort();
    }
}

int main(void)
{
    const ep_backend_config config = {.threads = 2};
    expert_fixture fixture = expert_fixture_make(11, 64, 48, 4, EP_DTYPE_BF16);
    ep_backend *backend;
    ep_backend_weights *weights[EXPERTS];
    fixture_job jobs[HOLDERS + JOBS];
    ep_error error;
    int status = 0;
    made_up_machine("0-1", "0-1", "0:0 1:1");
    sem_init(&held, 0, 0);
    sem_init(&ended, 0, 0);
    if (ep_backend_cpu_ops.open(&config, &backend, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        if (backend->ops->weights_load(backend, &fixture.source, &weights[e], &error) != EP_OK) {
            fprintf(stderr, "%s\n", error.text);
            return 1;
        }
        if (((const ep_cpu_weights *)weights[e])->node != e % 2) {
            fprintf(stderr, "weights are not spread over the nodes\n");
            status = 1;
        }
    }
    for (uint32_t j = 0; j < HOLDERS + JOBS; j++) {
        /* holders, then four jobs of node 0, then those of node 1 */
        uint32_t node = j < HOLDERS ? j : j >= HOLDERS + FAR;
        fixture_job_init(&jobs[j], &fixture, weights[2 * (j % 2) + node], 0, 4);
    }
    for (uint32_t h = 0; h < HOLDERS; h++) {
        sem_init(&go[h], 0, 0); /* all of them first: either thread may take the first holder */
    }
    for (uint32_t h = 0; h < HOLDERS; h++) {
        submit(backend, &jobs[h], on_held);
    }
    for (uint32_t h = 0; h < HOLDERS; h++) {
        sem_wait(&held);
    }
    for (uint32_t j = HOLDERS; j < HOLDERS + JOBS; j++) {
        submit(backend, &jobs[j], on_done);
    }
    sem_post(&go[1]);
    for (uint32_t j = 0; j < JOBS + 1; j++) {
        sem_wait(&ended);
    }
    if (strcmp(order, expected_order()) != 0) {
        fprintf(stderr,
                "nodes of the jobs in the order in which the thread of node 1 took them: %s\n",
                order);
        status = 1;
    }
    const ep_cpu_counts counts = ep_cpu_backend_counts(backend);
    if (counts.tasks_near < NEAR || counts.tasks_far < FAR) {
        fprintf(stderr, "%llu near and %llu far tasks\n", (unsigned long long)counts.tasks_near,
                (unsigned long long)counts.tasks_far);
        status = 1;
    }
    uint64_t idle_ns = counts.idle_ns;
    for (uint32_t i = 0; i < 1000; i++) { /* a thread begins to be idle meanwhile */
        const uint64_t told_ns = ep_cpu_backend_counts(backend).idle_ns;
        status |= told_ns < idle_ns;
        idle_ns = told_ns;
    }
    sem_post(&go[0]);
    sem_wait(&ended);
    for (uint32_t j = 0; j < HOLDERS + JOBS; j++) {
        jobs[j].done_count = 1;
        const char *wrong = fixture_job_check(&jobs[j]);
        if (wrong != NULL) {
            fprintf(stderr, "%s\n", wrong);
            status = 1;
        }
        fixture_job_fini(&jobs[j]);
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        backend->ops->weights_unload(backend, weights[e]);
    }
    backend->ops->close(backend);
    status |= check_node_without_workers(&fixture);
    made_up_machine_remove();
    expert_fixture_free(&fixture);
    return status;
}
