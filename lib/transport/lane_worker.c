/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_worker.h. */
#include "transport/lane_worker.h"

#include "base/clock.h"
#include "base/thread.h"

/* ---- lists ---- */

bool ep_lane_jobs_push(ep_lane_jobs *jobs, ep_lane_job *job)
{
    if (job->queued) {
        return false;
    }
    job->queued = true;
    job->next = NULL;
    *(jobs->tail != NULL ? &jobs->tail->next : &jobs->head) = job;
    jobs->tail = job;
    return true;
}

ep_lane_job *ep_lane_jobs_pop(ep_lane_jobs *jobs)
{
    ep_lane_job *job = jobs->head;
    if (job != NULL) {
        jobs->head = job->next;
        jobs->tail = jobs->head != NULL ? jobs->tail : NULL;
        job->queued = false;
    }
    return job;
}

void ep_lane_later_add(ep_lane_job **later, ep_lane_job *job, uint64_t due_ns)
{
    job->waiting = true;
    job->due_ns = due_ns;
    job->next = *later;
    *later = job;
}

void ep_lane_later_remove(ep_lane_job **later, ep_lane_job *job)
{
    for (ep_lane_job **at = later; job->waiting && *at != NULL; at = &(*at)->next) {
        if (*at == job) {
            *at = job->next;
            job->waiting = false;
            break;
        }
    }
}

ep_lane_job *ep_lane_later_take(ep_lane_job **later, uint64_t now_ns, uint64_t *out_next_ns)
{
    *out_next_ns = EP_TIME_NEVER;
    for (ep_lane_job *job = *later; job != NULL; job = job->next) {
        if (job->due_ns <= now_ns) {
            ep_lane_later_remove(later, job);
            return job;
        }
        *out_next_ns = job->due_ns < *out_next_ns ? job->due_ns : *out_next_ns;
    }
    return NULL;
}

/* ---- the thread ---- */

static void *worker_main(void *arg)
{
    ep_lane_worker *worker = arg;
    pthread_mutex_lock(&worker->lock);
    for (;;) {
        uint64_t next_ns = EP_TIME_NEVER;
        uint64_t now_ns = worker->later != NULL ? ep_clock_now_ns() : 0;
        ep_lane_job *job = ep_lane_later_take(&worker->later, now_ns, &next_ns);
        job = job != NULL ? job : ep_lane_jobs_pop(&worker->jobs);
        if (job != NULL) {
            pthread_mutex_unlock(&worker->lock);
            job->run(job);
            pthread_mutex_lock(&worker->lock);
        } else if (worker->stopping) {
            break;
        } else {
            ep_clock_wait(&worker->work, &worker->lock, next_ns);
        }
    }
    pthread_mutex_unlock(&worker->lock);
    return NULL;
}

ep_err ep_lane_worker_start(ep_lane_worker *worker, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&worker->lock);
    if (!worker->running) {
        err = ep_thread_start(worker->name, worker_main, worker, &worker->thread);
        worker->running = err == EP_OK;
    }
    pthread_mutex_unlock(&worker->lock);
    return err == EP_OK ? EP_OK
                        : ep_error_set(out_error, err, "cannot start the network lane's thread %s",
                                       worker->name);
}

bool ep_lane_worker_push(ep_lane_worker *worker, ep_lane_job *job)
{
    pthread_mutex_lock(&worker->lock);
    bool waited = job->waiting;
    ep_lane_later_remove(&worker->later, job);
    bool added = ep_lane_jobs_push(&worker->jobs, job) && !waited;
    pthread_cond_signal(&worker->work);
    pthread_mutex_unlock(&worker->lock);
    return added;
}

bool ep_lane_worker_push_later(ep_lane_worker *worker, ep_lane_job *job, uint64_t due_ns)
{
    pthread_mutex_lock(&worker->lock);
    bool added = !job->queued && !job->waiting;
    if (added) {
        ep_lane_later_add(&worker->later, job, due_ns);
        pthread_cond_signal(&worker->work);
    }
    pthread_mutex_unlock(&worker->lock);
    return added;
}

void ep_lane_worker_stop(ep_lane_worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    bool running = worker->running;
    worker->stopping = running;
    pthread_cond_signal(&worker->work);
    pthread_mutex_unlock(&worker->lock);
    if (running) {
        pthread_join(worker->thread, NULL);
        pthread_mutex_lock(&worker->lock);
        worker->running = false;
        worker->stopping = false;
        pthread_mutex_unlock(&worker->lock);
    }
}
