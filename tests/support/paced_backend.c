/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "paced": the cpu backend with jobs of a known duration. A job takes EP_PACED_ROW_US
 * microseconds per row, plus the time of EP_PACED_PASS_ROWS (0) rows for reading the weights; jobs
 * run one after the other. They use no processor time beyond the computation, so a machine with two
 * cores can run eight such nodes. A program gets the backend by linking this file.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "backends/cpu/cpu_backend.h"
#include "base/check.h"
#include "base/clock.h"

typedef struct paced_job {
    ep_job *job;
    void (*done)(ep_job *job, ep_err result);
    void *arg;
    uint64_t due_ns;
    bool is_computed;
    ep_err result;
    struct paced_job *next;
} paced_job;

/* A node that a busy machine delayed may catch up with so much work. */
#define CATCH_UP_NS (50 * EP_NS_PER_MS)

static ep_backend_ops paced_ops;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t pacer;
static paced_job *first, **last = &first;
static uint64_t free_ns; /* when the last submitted job will end */
static uint64_t row_ns;
static uint64_t pass_rows;
static bool is_idle = true; /* nothing waited when the last job ended */
static bool stopping;

/* Lock held on entry and exit, dropped meanwhile. */
static void end_first(void)
{
    paced_job *p = first;
    const struct timespec due = {.tv_sec = (time_t)(p->due_ns / EP_NS_PER_S),
                                 .tv_nsec = (long)(p->due_ns % EP_NS_PER_S)};
    first = p->next;
    last = first == NULL ? &first : last;
    pthread_mutex_unlock(&lock);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
    }
    p->job->done = p->done;
    p->job->arg = p->arg;
    p->job->done(p->job, p->result);
    free(p);
    pthread_mutex_lock(&lock);
    is_idle = first == NULL;
}

static void *pacer_main(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    while (!stopping || first != NULL) {
        if (first != NULL && first->is_computed) {
            end_first();
        } else {
            pthread_cond_wait(&changed, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void on_computed(ep_job *job, ep_err result)
{
    paced_job *p = job->arg;
    pthread_mutex_lock(&lock);
    p->result = result;
    p->is_computed = true;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

static ep_err paced_submit(ep_backend *backend, ep_job *job)
{
    paced_job *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    *p = (paced_job){.job = job, .done = job->done, .arg = job->arg};
    job->done = on_computed;
    job->arg = p;
    pthread_mutex_lock(&lock);
    const ep_err err = ep_backend_cpu_ops.submit(backend, job);
    if (err == EP_OK) {
        const uint64_t earliest_ns = ep_clock_now_ns() - (is_idle ? 0 : CATCH_UP_NS);
        is_idle = false;
        free_ns = (free_ns > earliest_ns ? free_ns : earliest_ns) +
                  (job->rows_count + pass_rows) * row_ns;
        p->due_ns = free_ns;
        *last = p;
        last = &p->next;
    }
    pthread_mutex_unlock(&lock);
    if (err != EP_OK) {
        job->done = p->done;
        job->arg = p->arg;
        free(p);
    }
    return err;
}

/* At most one instance per process. */
static ep_err paced_open(const ep_backend_config *config, ep_backend **out_backend,
                         ep_error *out_error)
{
    const char *text = getenv("EP_PACED_ROW_US");
    row_ns = text != NULL ? strtoull(text, NULL, 10) * EP_NS_PER_US : 0;
    if (row_ns == 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "EP_PACED_ROW_US is '%s', allowed 1 and more",
                            text != NULL ? text : "");
    }
    text = getenv("EP_PACED_PASS_ROWS");
    pass_rows = text != NULL ? strtoull(text, NULL, 10) : 0;
    EP_ASSERT(pacer == 0);
    const ep_err err = ep_backend_cpu_ops.open(config, out_backend, out_error);
    if (err == EP_OK) {
        /* all other operations are the cpu backend's, on its instance */
        (*out_backend)->ops = &paced_ops;
        EP_ASSERT(pthread_create(&pacer, NULL, pacer_main, NULL) == 0);
    }
    return err;
}

static void paced_close(ep_backend *backend)
{
    if (backend != NULL) {
        pthread_mutex_lock(&lock);
        stopping = true;
        pthread_cond_signal(&changed);
        pthread_mutex_unlock(&lock);
        pthread_join(pacer, NULL);
    }
    ep_backend_cpu_ops.close(backend);
}

__attribute__((constructor)) static void add_backend(void)
{
    paced_ops = ep_backend_cpu_ops;
    paced_ops.name = "paced";
    paced_ops.open = paced_open;
    paced_ops.close = paced_close;
    paced_ops.submit = paced_submit;
    ep_backend_register(&paced_ops);
}
