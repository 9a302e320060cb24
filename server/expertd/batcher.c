/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads around the policy: a lock, the jobs on the backend, and the pump that keeps the
 * backend filled. The backend's submit is called with the lock held, which keeps each expert's work
 * in order however many threads pump. Submit never blocks and never calls done() itself.
 */
#include "expertd/batcher.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "expertd/pass_cost.h"

/* A pick on the backend: all its works are of one expert. */
typedef struct backend_job {
    ep_batcher *batcher;
    ep_batch_pick pick;
    struct backend_job *next_free;
    ep_job job;                             /* a copy of the first work's, with the rows of all */
    ep_job_row rows[EP_BATCH_JOB_ROWS_MAX]; /* of several works */
} backend_job;

struct ep_batcher {
    ep_timer_service *timers;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    ep_batch_policy policy;
    backend_job *jobs; /* [policy.jobs_all_max] */
    backend_job *free;
    ep_timer window;        /* fires when the first window of a step group ends */
    uint64_t window_end_ns; /* when the timer fires; UINT64_MAX: it is not armed */
    bool is_closed;
    ep_err close_reason;
    uint32_t callbacks; /* done() calls of the backend that have not left our code yet */
    ep_batcher_stats stats;
    uint64_t busy_since_ns; /* while jobs are in flight */
    bool is_alone;          /* the job in flight never had another one beside it */
    ep_pass_cost pass_cost;
    double busy_work;
};

/* Work that ended without the backend; its done() is called once the lock is gone. */
typedef struct ended_list {
    ep_work *first;
    ep_work **end;
} ended_list;

static void on_window_end(ep_timer *timer, void *arg);

ep_err ep_batcher_create(const ep_batch_policy_config *policy, ep_timer_service *timers,
                         ep_batcher **out_batcher)
{
    ep_batcher *batcher = calloc(1, sizeof(*batcher));
    if (batcher == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    ep_batch_policy_init(&batcher->policy, policy);
    const uint32_t jobs_max = batcher->policy.jobs_all_max;
    backend_job *jobs = calloc(jobs_max, sizeof(*jobs));
    if (jobs == NULL) {
        free(batcher);
        return EP_ERR_NO_MEMORY;
    }
    if (timers == NULL) {
        batcher->policy.config.group_window_ns = 0;
    }
    ep_pass_cost_init(&batcher->pass_cost);
    batcher->stats.pass_rows = batcher->pass_cost.pass_rows;
    batcher->timers = timers;
    batcher->jobs = jobs;
    for (uint32_t i = 0; i < jobs_max; i++) {
        jobs[i].batcher = batcher;
        jobs[i].next_free = batcher->free;
        batcher->free = &jobs[i];
    }
    ep_timer_init(&batcher->window, on_window_end, batcher);
    batcher->window_end_ns = UINT64_MAX;
    pthread_mutex_init(&batcher->lock, NULL);
    pthread_cond_init(&batcher->idle, NULL);
    *out_batcher = batcher;
    return EP_OK;
}

/* ---- spans: of works that are traced ---- */

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
    if (EP_TRACE_SPAN_ON(queue)) {
        ep_trace_fields fields = queue_fields(work, 0);
        work->trace->queue_open = true;
        EP_TRACE(queue_begin, &fields);
    }
}

/* job: J, 0 when the work is dropped. */
static void trace_queue_end(ep_work *work, uint64_t job, ep_err status)
{
    if (work->trace->queue_open) {
        ep_trace_fields fields = queue_fields(work, job);
        work->trace->queue_open = false;
        fields.status = (int32_t)status;
        EP_TRACE(queue_end, &fields);
    }
}

static void trace_job_begin(ep_work *work)
{
    trace_queue_end(work, work->trace->fields.call, EP_OK);
    work->trace->job_open = EP_TRACE_SPAN_ON(job);
    if (work->trace->job_open) {
        EP_TRACE(job_begin, &work->trace->fields);
    }
}

static void trace_job_end(ep_work *work, ep_err status)
{
    if (work->trace->job_open) {
        ep_trace_fields fields = work->trace->fields;
        work->trace->job_open = false;
        fields.status = (int32_t)status;
        EP_TRACE(job_end, &fields);
    }
}

/* ---- endings ---- */

static void end_work(ended_list *ended, ep_work *work, ep_err result)
{
    if (work->trace != NULL) {
        trace_queue_end(work, 0, result);
    }
    work->place.next = NULL;
    work->result = result;
    *ended->end = work;
    ended->end = &work->place.next;
}

static void call_ended(ended_list *ended)
{
    for (ep_work *work = ended->first, *next; work != NULL; work = next) {
        next = work->place.next;
        work->done(work, work->result);
    }
}

/* ---- the backend ---- */

static void on_job_done(ep_job *job, ep_err result);

/* Takes works that nobody waits for out of the pick. */
static void drop_works(ep_batch_policy *policy, ep_batch_pick *pick, ended_list *ended)
{
    for (ep_work **at = &pick->works; *at != NULL;) {
        ep_work *work = *at;
        if (work->is_dropped != NULL && work->is_dropped(work)) {
            *at = work->place.next;
            ep_batch_policy_drop(policy, pick, work);
            end_work(ended, work, EP_ERR_CANCELLED);
        } else {
            at = &work->place.next;
        }
    }
}

/* Makes one job of the works; the rows of a single work are used where they are. To be called
 * before submit: the job may end before submit returns. */
static void begin_job(backend_job *run)
{
    const ep_batch_pick *pick = &run->pick;
    const uint64_t now_ns = ep_clock_now_ns();
    uint32_t count = 0;
    run->job = pick->works->job;
    run->job.rows_count = pick->rows;
    run->job.priority = pick->priority;
    run->job.done = on_job_done;
    run->job.arg = run;
    if (pick->works_count > 1) {
        run->job.rows = run->rows;
    }
    for (ep_work *work = pick->works; work != NULL; work = work->place.next) {
        if (pick->works_count > 1) {
            EP_ASSERT(count + work->job.rows_count <= EP_BATCH_JOB_ROWS_MAX);
            memcpy(&run->rows[count], work->job.rows,
                   work->job.rows_count * sizeof(*work->job.rows));
            count += work->job.rows_count;
        }
        work->started_ns = now_ns;
        if (work->trace != NULL) {
            trace_job_begin(work);
        }
    }
}

static void end_job_spans(const backend_job *run, ep_err result)
{
    for (ep_work *work = run->pick.works; work != NULL; work = work->place.next) {
        if (work->trace != NULL) {
            trace_job_end(work, result);
        }
    }
}

/* Lock held. Learns the cost only of a job that was alone: the backend may run several jobs in turn
 * or at once, so their times say nothing about one of them. */
static void count_ended(ep_batcher *batcher, const ep_backend_weights *used, uint64_t rows,
                        ep_err result)
{
    const uint64_t weights = (uint64_t)used->hidden * used->inner, now_ns = ep_clock_now_ns();
    const uint64_t pass_rows = batcher->stats.pass_rows;
    if (batcher->is_alone && result == EP_OK) {
        ep_pass_cost_add(&batcher->pass_cost, (uint32_t)rows,
                         (double)(now_ns - batcher->busy_since_ns) / (double)weights);
    }
    __atomic_store_n(&batcher->stats.pass_rows, batcher->pass_cost.pass_rows, __ATOMIC_RELAXED);
    batcher->busy_work += (double)((rows + pass_rows) * 2 * EP_BATCH_WEIGHT_ROWS * weights) /
                          (EP_BATCH_WEIGHT_ROWS + pass_rows) / 65536;
    if (--batcher->stats.in_flight == 0) {
        batcher->stats.busy_ns += now_ns - batcher->busy_since_ns;
    }
}

/* Lock held. Hands a pick to the backend. False: the backend is full and the works are back in
 * their queue. */
static bool start_pick(ep_batcher *batcher, ep_batch_pick *pick, ended_list *ended)
{
    drop_works(&batcher->policy, pick, ended);
    if (pick->works_count == 0) {
        ep_batch_policy_done(&batcher->policy, pick);
        return true;
    }
    backend_job *run = batcher->free;
    EP_ASSERT(run != NULL);
    run->pick = *pick;
    begin_job(run);
    ep_err err = ep_backend_run(pick->works->backend, &run->job);
    if (err == EP_OK) {
        batcher->free = run->next_free;
        batcher->is_alone = batcher->stats.in_flight++ == 0;
        if (batcher->is_alone) {
            batcher->busy_since_ns = pick->works->started_ns;
        }
        atomic_fetch_add_explicit(&pick->works->place.queue->passes, 1, memory_order_relaxed);
        batcher->stats.jobs_total[pick->work_class]++;
        batcher->stats.works_total[pick->work_class] += pick->works_count;
        batcher->stats.rows_total[pick->work_class] += pick->rows;
        return true;
    }
    end_job_spans(run, err);
    const bool is_full = err == EP_ERR_RESOURCE_EXHAUSTED && batcher->stats.in_flight > 0;
    for (ep_work *work = pick->works; work != NULL; work = work->place.next) {
        work->started_ns = 0;
        if (is_full && work->trace != NULL) {
            trace_queue_begin(work);
        }
    }
    if (is_full) {
        ep_batch_policy_put_back(&batcher->policy, pick); /* a completion will pump again */
        return false;
    }
    ep_batch_policy_done(&batcher->policy, pick);
    for (ep_work *work = pick->works, *next; work != NULL; work = next) {
        next = work->place.next;
        end_work(ended, work, err);
    }
    return true;
}

/* Lock held. Fills the backend, and arms the timer for the windows of step groups. */
static void pump(ep_batcher *batcher, ended_list *ended)
{
    ep_batch_policy *policy = &batcher->policy;
    const uint64_t now_ns = ep_clock_now_ns();
    ep_batch_pick pick;
    for (;;) {
        while (ep_batch_policy_take(policy, now_ns, &pick) && start_pick(batcher, &pick, ended)) {
        }
        if (policy->groups_waiting == 0 || batcher->is_closed) {
            return;
        }
        const uint64_t end_ns = ep_batch_policy_window_end(policy);
        if (end_ns == batcher->window_end_ns) {
            return;
        }
        batcher->window_end_ns = end_ns;
        if (ep_timer_arm(batcher->timers, &batcher->window, end_ns) == EP_OK) {
            return;
        }
        /* Without a timer nothing would end the windows, so all groups are released. */
        batcher->window_end_ns = UINT64_MAX;
        ep_batch_policy_release_groups(policy, UINT64_MAX, now_ns);
    }
}

static void on_window_end(ep_timer *timer, void *arg)
{
    ep_batcher *batcher = arg;
    ended_list ended = {.end = &ended.first};
    (void)timer;
    pthread_mutex_lock(&batcher->lock);
    batcher->window_end_ns = UINT64_MAX;
    pump(batcher, &ended);
    pthread_mutex_unlock(&batcher->lock);
    call_ended(&ended);
}

static void on_job_done(ep_job *job, ep_err result)
{
    backend_job *run = job->arg;
    ep_batcher *batcher = run->batcher;
    ended_list ended = {.end = &ended.first};
    ep_work *works = run->pick.works;
    const uint32_t rows = job->rows_count;
    ep_backend_weights *weights = job->weights; /* kept here: the job is freed with run */
    end_job_spans(run, result);
    pthread_mutex_lock(&batcher->lock);
    ep_batch_policy_done(&batcher->policy, &run->pick);
    run->next_free = batcher->free;
    batcher->free = run;
    count_ended(batcher, weights, rows, result);
    batcher->callbacks++;
    pump(batcher, &ended);
    pthread_mutex_unlock(&batcher->lock);
    for (ep_work *work = works, *next; work != NULL; work = next) {
        next = work->place.next; /* done() may reuse the work */
        work->done(work, result);
    }
    call_ended(&ended);
    pthread_mutex_lock(&batcher->lock);
    batcher->callbacks--;
    if (batcher->stats.in_flight == 0 && batcher->callbacks == 0) {
        pthread_cond_broadcast(&batcher->idle);
    }
    pthread_mutex_unlock(&batcher->lock);
}

/* ---- from outside ---- */

void ep_batcher_submit(ep_batcher *batcher, ep_work *works, uint32_t count,
                       const ep_batch_step *step)
{
    ended_list ended = {.end = &ended.first};
    for (uint32_t i = 0; i < count; i++) {
        works[i].started_ns = 0;
        works[i].place.next = i + 1 < count ? &works[i + 1] : NULL;
        if (works[i].trace != NULL) {
            trace_queue_begin(&works[i]);
        }
    }
    pthread_mutex_lock(&batcher->lock);
    if (batcher->is_closed) {
        for (uint32_t i = 0; i < count; i++) {
            end_work(&ended, &works[i], batcher->close_reason);
        }
    } else if (count > 0) {
        ep_batch_policy_add(&batcher->policy, works, step, ep_clock_now_ns());
        pump(batcher, &ended);
    }
    pthread_mutex_unlock(&batcher->lock);
    call_ended(&ended);
}

void ep_batcher_set_group_window(ep_batcher *batcher, uint64_t window_ns)
{
    pthread_mutex_lock(&batcher->lock);
    batcher->policy.config.group_window_ns = batcher->timers != NULL ? window_ns : 0;
    pthread_mutex_unlock(&batcher->lock);
}

void ep_batcher_close(ep_batcher *batcher, ep_err reason)
{
    ended_list ended = {.end = &ended.first};
    pthread_mutex_lock(&batcher->lock);
    if (!batcher->is_closed) {
        batcher->is_closed = true;
        batcher->close_reason = reason;
    }
    for (ep_work *work; (work = ep_batch_policy_drain(&batcher->policy)) != NULL;) {
        end_work(&ended, work, batcher->close_reason);
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
    if (batcher->timers != NULL) {
        ep_timer_cancel_wait(batcher->timers, &batcher->window);
    }
    pthread_mutex_destroy(&batcher->lock);
    pthread_cond_destroy(&batcher->idle);
    free(batcher->jobs);
    free(batcher);
}

uint32_t ep_batcher_pass_rows(const ep_batcher *batcher)
{
    return __atomic_load_n(&batcher->stats.pass_rows, __ATOMIC_RELAXED);
}

void ep_batcher_read_stats(ep_batcher *batcher, ep_batcher_stats *out_stats)
{
    pthread_mutex_lock(&batcher->lock);
    *out_stats = batcher->stats;
    out_stats->busy_work = (uint64_t)ceil(batcher->busy_work);
    if (out_stats->in_flight > 0) {
        out_stats->busy_ns += ep_clock_now_ns() - batcher->busy_since_ns;
    }
    for (int c = 0; c < EP_WORK_CLASSES; c++) {
        out_stats->waiting[c] = batcher->policy.waiting[c];
    }
    out_stats->group_window_ns = batcher->policy.config.group_window_ns;
    pthread_mutex_unlock(&batcher->lock);
}
