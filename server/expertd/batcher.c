/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queues per expert, turns between experts, classes, and the pump that keeps the backend filled. The
 * backend's submit never blocks and never calls done() itself, so it is called with the lock held: that
 * keeps every expert's work in order however many threads pump.
 */
#include "expertd/batcher.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"

/* Experts that have work of a class, in the order of their turns. */
typedef struct ready_list {
    ep_work_queue *first;
    ep_work_queue *last;
} ready_list;

struct ep_batcher {
    ep_backend *backend;
    uint32_t in_flight_max;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    ready_list ready[EP_WORK_CLASSES];
    uint32_t decode_run; /* decode jobs since the last prefill job, while prefill waited */
    bool is_closed;
    ep_err close_reason;
    uint32_t callbacks; /* done() calls of the backend that have not left our code yet */
    ep_batcher_stats stats;
};

/* Work that ended without the backend; its done() is called once the lock is gone. */
typedef struct ended_list {
    ep_work *first;
    ep_work **end;
} ended_list;

ep_err ep_batcher_create(ep_backend *backend, uint32_t in_flight_max, ep_batcher **out_batcher)
{
    ep_batcher *batcher = calloc(1, sizeof(*batcher));
    if (batcher == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    EP_ASSERT(in_flight_max > 0);
    batcher->backend = backend;
    batcher->in_flight_max = in_flight_max;
    pthread_mutex_init(&batcher->lock, NULL);
    pthread_cond_init(&batcher->idle, NULL);
    *out_batcher = batcher;
    return EP_OK;
}

/* ---- spans ---- */

/* The queue span speaks of R, the job's of J. */
static ep_trace_fields queue_fields(const ep_work *work, uint64_t parent)
{
    ep_trace_fields fields = work->trace->fields;
    fields.call = work->trace->fields.parent;
    fields.parent = parent;
    fields.sub = work->trace->group;
    return fields;
}

static void trace_queue_begin(ep_work *work)
{
    if (work->trace != NULL && EP_TRACE_SPAN_ON(queue)) {
        ep_trace_fields fields = queue_fields(work, 0);
        work->trace->queue_open = true;
        EP_TRACE(queue_begin, &fields);
    }
}

/* job: J, 0 when the work is dropped. */
static void trace_queue_end(ep_work *work, uint64_t job, ep_err status)
{
    if (work->trace != NULL && work->trace->queue_open) {
        ep_trace_fields fields = queue_fields(work, job);
        work->trace->queue_open = false;
        fields.status = (int32_t)status;
        EP_TRACE(queue_end, &fields);
    }
}

static void trace_job_begin(ep_work *work)
{
    if (work->trace != NULL) {
        trace_queue_end(work, work->trace->fields.call, EP_OK);
        work->trace->job_open = EP_TRACE_SPAN_ON(job);
        if (work->trace->job_open) {
            EP_TRACE(job_begin, &work->trace->fields);
        }
    }
}

static void trace_job_end(ep_work *work, ep_err status)
{
    if (work->trace != NULL && work->trace->job_open) {
        ep_trace_fields fields = work->trace->fields;
        work->trace->job_open = false;
        fields.status = (int32_t)status;
        EP_TRACE(job_end, &fields);
    }
}

/* ---- queues ---- */

static void ready_append(ready_list *list, ep_work_queue *queue, ep_work_class work_class)
{
    queue->classes[work_class].next_ready = NULL;
    if (list->last != NULL) {
        list->last->classes[work_class].next_ready = queue;
    } else {
        list->first = queue;
    }
    list->last = queue;
}

static void ready_prepend(ready_list *list, ep_work_queue *queue, ep_work_class work_class)
{
    queue->classes[work_class].next_ready = list->first;
    list->first = queue;
    if (list->last == NULL) {
        list->last = queue;
    }
}

/* Takes the first work of the class's next expert, which then goes to the end of the turns when it has more.
 */
static ep_work *take_work(ep_batcher *batcher, ep_work_class work_class)
{
    ready_list *list = &batcher->ready[work_class];
    ep_work_queue *queue = list->first;
    ep_work *work = queue->classes[work_class].first;
    list->first = queue->classes[work_class].next_ready;
    if (list->first == NULL) {
        list->last = NULL;
    }
    queue->classes[work_class].first = work->next;
    if (work->next == NULL) {
        queue->classes[work_class].last = NULL;
    } else {
        ready_append(list, queue, work_class);
    }
    work->next = NULL;
    batcher->stats.waiting[work_class]--;
    return work;
}

/* Puts work back where it was: the backend's own queue is full. */
static void return_work(ep_batcher *batcher, ep_work *work)
{
    ep_work_class c = work->work_class;
    ep_work_queue *queue = work->queue;
    work->next = queue->classes[c].first;
    if (work->next == NULL) {
        queue->classes[c].last = work;
        ready_prepend(&batcher->ready[c], queue, c);
    }
    queue->classes[c].first = work;
    work->started_ns = 0;
    batcher->stats.waiting[c]++;
}

static ep_work_class choose_class(const ep_batcher *batcher)
{
    if (batcher->ready[EP_WORK_DECODE].first == NULL) {
        return EP_WORK_PREFILL;
    }
    bool prefill_is_due =
        batcher->ready[EP_WORK_PREFILL].first != NULL && batcher->decode_run >= EP_BATCHER_PREFILL_EVERY - 1;
    return prefill_is_due ? EP_WORK_PREFILL : EP_WORK_DECODE;
}

static void end_work(ended_list *ended, ep_work *work, ep_err result)
{
    trace_queue_end(work, 0, result);
    work->next = NULL;
    work->result = result;
    *ended->end = work;
    ended->end = &work->next;
}

static void call_ended(ended_list *ended)
{
    for (ep_work *work = ended->first, *next; work != NULL; work = next) {
        next = work->next;
        work->done(work, work->result);
    }
}

static void on_job_done(ep_job *job, ep_err result);

/* Hands one work to the backend. False: the backend is full and the work is back in its queue. */
static bool start_work(ep_batcher *batcher, ep_work *work, ended_list *ended)
{
    ep_work_class c = work->work_class;
    work->job.done = on_job_done;
    work->job.arg = work;
    work->started_ns = ep_clock_now_ns();
    trace_job_begin(work); /* before the backend has it: a worker may be quick */
    ep_err err = ep_backend_run(batcher->backend, &work->job);
    if (err == EP_OK) {
        batcher->stats.in_flight++;
        batcher->stats.jobs_total[c]++;
        bool prefill_waits = batcher->ready[EP_WORK_PREFILL].first != NULL;
        batcher->decode_run = c == EP_WORK_DECODE && prefill_waits ? batcher->decode_run + 1 : 0;
        return true;
    }
    trace_job_end(work, err);
    if (err == EP_ERR_RESOURCE_EXHAUSTED && batcher->stats.in_flight > 0) {
        trace_queue_begin(work);
        return_work(batcher, work); /* a completion will pump again */
        return false;
    }
    work->started_ns = 0;
    end_work(ended, work, err);
    return true;
}

/* Lock held. */
static void pump(ep_batcher *batcher, ended_list *ended)
{
    while (batcher->stats.in_flight < batcher->in_flight_max &&
           (batcher->ready[EP_WORK_DECODE].first != NULL || batcher->ready[EP_WORK_PREFILL].first != NULL)) {
        ep_work *work = take_work(batcher, choose_class(batcher));
        if (work->is_dropped != NULL && work->is_dropped(work)) {
            end_work(ended, work, EP_ERR_CANCELLED);
        } else if (!start_work(batcher, work, ended)) {
            return;
        }
    }
}

static void on_job_done(ep_job *job, ep_err result)
{
    ep_work *work = job->arg;
    ep_batcher *batcher = work->batcher;
    ended_list ended = {.end = &ended.first};
    trace_job_end(work, result);
    pthread_mutex_lock(&batcher->lock);
    batcher->stats.in_flight--;
    batcher->callbacks++;
    pump(batcher, &ended);
    pthread_mutex_unlock(&batcher->lock);
    work->done(work, result);
    call_ended(&ended);
    pthread_mutex_lock(&batcher->lock);
    batcher->callbacks--;
    if (batcher->stats.in_flight == 0 && batcher->callbacks == 0) {
        pthread_cond_broadcast(&batcher->idle);
    }
    pthread_mutex_unlock(&batcher->lock);
}

static void enqueue(ep_batcher *batcher, ep_work *work)
{
    ep_work_class c = work->work_class;
    ep_work_queue *queue = work->queue;
    if (queue->classes[c].last != NULL) {
        queue->classes[c].last->next = work;
    } else {
        queue->classes[c].first = work;
        ready_append(&batcher->ready[c], queue, c);
    }
    queue->classes[c].last = work;
    batcher->stats.waiting[c]++;
}

void ep_batcher_submit(ep_batcher *batcher, ep_work *works, uint32_t count)
{
    ended_list ended = {.end = &ended.first};
    pthread_mutex_lock(&batcher->lock);
    for (uint32_t i = 0; i < count; i++) {
        ep_work *work = &works[i];
        EP_ASSERT(work->job.rows_count > 0 && work->job.rows_count <= EP_JOB_ROWS_MAX);
        work->batcher = batcher;
        work->next = NULL;
        work->started_ns = 0;
        trace_queue_begin(work);
        if (batcher->is_closed) {
            end_work(&ended, work, batcher->close_reason);
        } else {
            enqueue(batcher, work);
        }
    }
    pump(batcher, &ended);
    pthread_mutex_unlock(&batcher->lock);
    call_ended(&ended);
}

void ep_batcher_close(ep_batcher *batcher, ep_err reason)
{
    ended_list ended = {.end = &ended.first};
    pthread_mutex_lock(&batcher->lock);
    if (!batcher->is_closed) {
        batcher->is_closed = true;
        batcher->close_reason = reason;
    }
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        while (batcher->ready[c].first != NULL) {
            end_work(&ended, take_work(batcher, (ep_work_class)c), batcher->close_reason);
        }
    }
    pthread_mutex_unlock(&batcher->lock);
    call_ended(&ended);
}

void ep_batcher_destroy(ep_batcher *batcher)
{
    if (batcher == NULL) {
        return;
    }
    ep_batcher_close(batcher, EP_ERR_CANCELLED);
    pthread_mutex_lock(&batcher->lock);
    while (batcher->stats.in_flight > 0 || batcher->callbacks > 0) {
        pthread_cond_wait(&batcher->idle, &batcher->lock);
    }
    pthread_mutex_unlock(&batcher->lock);
    pthread_mutex_destroy(&batcher->lock);
    pthread_cond_destroy(&batcher->idle);
    free(batcher);
}

void ep_batcher_read_stats(ep_batcher *batcher, ep_batcher_stats *out_stats)
{
    pthread_mutex_lock(&batcher->lock);
    *out_stats = batcher->stats;
    pthread_mutex_unlock(&batcher->lock);
}
