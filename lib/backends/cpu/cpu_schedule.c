/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/cpu_schedule.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/host_common.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/cpu_features.h"

#define SPIN_NS (50 * EP_NS_PER_US) /* an expert takes 50 to 500 us; waking a sleeper costs some 25 */
#define WHOLE_PASS_FMAS 262144u     /* a pass below this is one task: handing parts over would cost more */
#define TASK_FMAS 65536u            /* panels are taken together up to this much work */
#define SPARE_PASSES 3              /* passes open beyond one per thread: stage ends find other work, and one may be overtaken */

typedef enum { STAGE_PREPARE, STAGE_PACK, STAGE_GATE_UP, STAGE_DOWN, STAGE_END } stage;

typedef struct {
    bool open;
    ep_job *job;
    uint32_t first_row;
    uint32_t rows_count;
    stage stage;
    uint32_t tasks_count; /* of this stage */
    _Atomic uint32_t tasks_taken; /* written under lock */
    uint32_t tasks_done;
    uint32_t grain; /* tasks taken at a time */
    ep_err err;
    uint64_t order; /* older passes first */
    ep_ffn_pass pass;
    void *scratch;
    size_t scratch_bytes;
} cpu_pass;

typedef struct {
    ep_cpu_schedule *schedule;
    uint32_t index;
    pthread_t thread;
    float *tile; /* EP_FFN_TILE_BYTES */
    /* The kernel span: what this thread does for one stage of a pass, or several, without turning to another. */
    bool span_open;
    uint64_t span_order; /* of its pass */
    ep_trace_fields span;
} cpu_worker;

/* Some tasks of one stage, taken by one thread. */
typedef struct {
    cpu_pass *pass;
    stage stage;
    uint32_t first;
    uint32_t count;
} cpu_work;

struct ep_cpu_schedule {
    const ep_ffn_kernel *kernels[EP_FFN_FAMILIES];
    uint32_t threads;
    uint32_t threads_started;
    cpu_worker *workers;
    cpu_pass *passes; /* threads + SPARE_PASSES */
    uint32_t passes_count;

    _Atomic uint64_t changes; /* grows whenever new work can be taken, or stopping; written under lock */
    pthread_mutex_t lock;     /* below, and all of a pass but its data while its tasks run */
    pthread_cond_t wake;
    uint32_t sleepers_count;
    ep_job *first; /* jobs with rows not yet in a pass */
    ep_job *last;
    uint32_t jobs_count;
    uint32_t patient_running; /* threads in tasks of patient jobs */
    uint64_t next_order;
    bool stopping;
};

/* A job's private words while it is submitted. */
enum { JOB_PASSES_OPENED, JOB_PASSES_DONE, JOB_ERR, JOB_PIECES };

static uint32_t job_word(const ep_job *job, int word)
{
    return (uint32_t)(uintptr_t)job->scratch[word];
}

static void job_set_word(ep_job *job, int word, uint32_t value)
{
    job->scratch[word] = (void *)(uintptr_t)value;
}

static uint32_t job_passes_count(const ep_job *job)
{
    return (job->rows_count + EP_FFN_PASS_ROWS - 1) / EP_FFN_PASS_ROWS;
}

/*
 * ---- spans: an event per task would cost more than some tasks ----
 *
 * Events are recorded without the lock wherever possible: a microsecond more under it makes the threads queue for it. A span ends before its
 * thread's tasks are counted as done, so before the job's done().
 */

static void span_end(cpu_worker *worker, ep_err status)
{
    if (worker->span_open) {
        worker->span_open = false;
        worker->span.status = (int32_t)status;
        EP_TRACE(kernel_end, &worker->span);
    }
}

/* Lock held. The thread turns to this pass; true when a span begins with that, once the lock is released. */
static bool span_turn(cpu_worker *worker, const cpu_pass *pass)
{
    if (worker->span_open && worker->span_order == pass->order) {
        return false;
    }
    span_end(worker, EP_OK); /* seldom: others took what was left of its stage */
    ep_job *job = pass->job;
    if (job->trace == NULL || !EP_TRACE_SPAN_ON(kernel)) {
        return false;
    }
    uint32_t piece = job_word(job, JOB_PIECES);
    job_set_word(job, JOB_PIECES, piece + 1);
    worker->span = *job->trace;
    worker->span.parent = 0;
    worker->span.sub = piece;
    worker->span.rows = pass->rows_count;
    worker->span_order = pass->order;
    worker->span_open = true;
    return true;
}

/* No lock, work's tasks not yet counted as done, so the pass stays in its stage. Ends the span when the thread will turn away: nothing of the
 * stage is left, and what comes next waits for other threads too, or is nothing. */
static void span_leave(cpu_worker *worker, const cpu_work *work, stage next)
{
    cpu_pass *pass = work->pass;
    bool took_all = work->count == pass->tasks_count;
    bool none_left = atomic_load_explicit(&pass->tasks_taken, memory_order_relaxed) == pass->tasks_count;
    if (none_left && (next == STAGE_END || !took_all)) {
        span_end(worker, pass->err);
    }
}

/* Lock held. Tells sleeping and spinning threads that there is work. */
static void announce(ep_cpu_schedule *s, uint32_t tasks)
{
    atomic_fetch_add_explicit(&s->changes, 1, memory_order_release);
    if (s->sleepers_count == 0) {
        return;
    }
    if (tasks == 1) {
        pthread_cond_signal(&s->wake);
    } else {
        pthread_cond_broadcast(&s->wake);
    }
}

static uint64_t pass_fmas(const cpu_pass *pass)
{
    return (uint64_t)3 * pass->job->weights->hidden * pass->job->weights->inner * pass->rows_count;
}

/* Lock held. Moves a pass into a stage; the caller announces its tasks. */
static void enter_stage(cpu_pass *pass, stage next)
{
    const ep_backend_weights *weights = pass->job->weights;
    const ep_ffn_packed *packed = &((const ep_cpu_weights *)weights)->packed;
    uint64_t task_fmas = 1;
    pass->stage = next;
    pass->tasks_taken = 0;
    pass->tasks_done = 0;
    switch (next) {
    case STAGE_PREPARE:
        pass->tasks_count = 1;
        break;
    case STAGE_PACK:
        pass->tasks_count = pass->pass.chunks.count;
        task_fmas = (uint64_t)weights->hidden * EP_FFN_CHUNK_ROWS;
        break;
    case STAGE_GATE_UP:
        pass->tasks_count = packed->gate_up_panels;
        task_fmas = (uint64_t)weights->hidden * EP_FFN_PANEL * pass->rows_count;
        break;
    case STAGE_DOWN:
        pass->tasks_count = packed->down_panels;
        task_fmas = (uint64_t)weights->inner * EP_FFN_PANEL * pass->rows_count;
        break;
    case STAGE_END:
        pass->tasks_count = 0;
        return;
    }
    pass->grain = (uint32_t)(task_fmas >= TASK_FMAS ? 1 : (TASK_FMAS + task_fmas - 1) / task_fmas);
}

/* Lock held. The next rows of the first waiting job become a pass, when one is free. */
static cpu_pass *open_pass(ep_cpu_schedule *s)
{
    ep_job *job = s->first;
    if (job == NULL) {
        return NULL;
    }
    cpu_pass *pass = NULL;
    for (uint32_t i = 0; i < s->passes_count && pass == NULL; i++) {
        pass = s->passes[i].open ? NULL : &s->passes[i];
    }
    if (pass == NULL) {
        return NULL;
    }
    const uint32_t count = job_passes_count(job);
    const uint32_t index = job_word(job, JOB_PASSES_OPENED);
    const uint32_t base = job->rows_count / count;
    const uint32_t longer = job->rows_count % count;
    pass->open = true;
    pass->job = job;
    pass->first_row = base * index + (index < longer ? index : longer);
    pass->rows_count = base + (index < longer ? 1 : 0);
    pass->err = EP_OK;
    pass->order = s->next_order++;
    job_set_word(job, JOB_PASSES_OPENED, index + 1);
    if (index + 1 == count) {
        s->first = job->next;
    }
    enter_stage(pass, STAGE_PREPARE);
    return pass;
}

static bool is_before(const cpu_pass *a, const cpu_pass *b)
{
    uint64_t a_priority = a->job->priority;
    uint64_t b_priority = b->job->priority;
    return a_priority != b_priority ? a_priority < b_priority : a->order < b->order;
}

static bool is_patient(const ep_job *job)
{
    return (job->priority & EP_JOB_PATIENT) != 0;
}

/* Threads that a pass can keep busy in its widest stage. */
static uint32_t pass_width(const cpu_pass *pass)
{
    const ep_ffn_packed *packed = &((const ep_cpu_weights *)pass->job->weights)->packed;
    uint32_t panels =
        packed->gate_up_panels > packed->down_panels ? packed->gate_up_panels : packed->down_panels;
    return pass_fmas(pass) > WHOLE_PASS_FMAS ? panels : 1;
}

/*
 * Lock held. The pass to take a task of; NULL: none that this thread should turn to now.
 * urgent: threads that passes of urgent jobs want. Their stages are short, and one of a patient pass's panels
 * takes longer: so many threads stay away from those.
 */
static cpu_pass *choose_pass(ep_cpu_schedule *s)
{
    cpu_pass *best = NULL;
    uint64_t urgent = 0;
    for (uint32_t i = 0; i < s->passes_count; i++) {
        cpu_pass *pass = &s->passes[i];
        if (!pass->open) {
            continue;
        }
        urgent += is_patient(pass->job) ? 0 : pass_width(pass);
        if (pass->tasks_taken < pass->tasks_count && (best == NULL || is_before(pass, best))) {
            best = pass;
        }
    }
    bool may_turn_to_patient = urgent == 0 || s->patient_running + urgent < s->threads;
    const ep_job *waiting = s->first;
    if (waiting != NULL && (best == NULL || waiting->priority < best->job->priority) &&
        (!is_patient(waiting) || may_turn_to_patient)) {
        cpu_pass *opened = open_pass(s);
        best = opened != NULL ? opened : best;
    }
    return best != NULL && is_patient(best->job) && !may_turn_to_patient ? NULL : best;
}

/* Lock held. False when there is nothing to do now. */
static bool take_work(ep_cpu_schedule *s, cpu_work *out_work)
{
    cpu_pass *pass = choose_pass(s);
    if (pass == NULL) {
        return false;
    }
    const uint32_t left = pass->tasks_count - pass->tasks_taken;
    out_work->pass = pass;
    out_work->stage = pass->stage;
    out_work->first = pass->tasks_taken;
    out_work->count = left < pass->grain ? left : pass->grain;
    pass->tasks_taken += out_work->count;
    s->patient_running += is_patient(pass->job);
    return true;
}

static void run_tasks(const ep_ffn_pass *pass, stage which, uint32_t first, uint32_t count, float *tile)
{
    for (uint32_t i = first; i < first + count; i++) {
        const bool more = i + 1 < first + count;
        if (which == STAGE_PACK) {
            ep_ffn_pass_pack_chunk(pass, i);
        } else if (which == STAGE_GATE_UP) {
            ep_ffn_pass_gate_up(pass, i, more ? ep_ffn_gate_up_panel(pass->weights, i + 1) : NULL, tile);
        } else {
            ep_ffn_pass_down(pass, i, more ? ep_ffn_down_panel(pass->weights, i + 1) : NULL, tile);
        }
    }
}

/* Scratch grows to the largest pass seen and is kept. */
static ep_err grow_scratch(cpu_pass *pass, size_t bytes)
{
    if (bytes <= pass->scratch_bytes) {
        return EP_OK;
    }
    free(pass->scratch);
    pass->scratch = ep_host_alloc(bytes);
    pass->scratch_bytes = pass->scratch == NULL ? 0 : bytes;
    return pass->scratch == NULL ? EP_ERR_NO_MEMORY : EP_OK;
}

/* No lock; the pass has this one task. Returns the stage that follows. */
static stage prepare_pass(ep_cpu_schedule *s, cpu_pass *pass, float *tile)
{
    const ep_job *job = pass->job;
    const ep_ffn_packed *packed = &((const ep_cpu_weights *)job->weights)->packed;
    const ep_ffn_batch batch = {
        .rows = job->rows + pass->first_row,
        .rows_count = pass->rows_count,
        .x_dtype = job->x_dtype,
        .out_dtype = job->out_dtype,
        .weight_on_input = job->weight_on_input,
    };
    pass->err =
        grow_scratch(pass, ep_ffn_pass_scratch_bytes(packed->hidden, packed->inner, pass->rows_count));
    if (pass->err != EP_OK) {
        return STAGE_END;
    }
    ep_ffn_pass_init(&pass->pass, s->kernels[packed->family], packed, &batch, pass->scratch);
    if (pass_fmas(pass) > WHOLE_PASS_FMAS) {
        return STAGE_PACK;
    }
    run_tasks(&pass->pass, STAGE_PACK, 0, pass->pass.chunks.count, tile);
    run_tasks(&pass->pass, STAGE_GATE_UP, 0, packed->gate_up_panels, tile);
    run_tasks(&pass->pass, STAGE_DOWN, 0, packed->down_panels, tile);
    return STAGE_END;
}

static bool has_tasks(const ep_cpu_schedule *s)
{
    for (uint32_t i = 0; i < s->passes_count; i++) {
        if (s->passes[i].open && s->passes[i].tasks_taken < s->passes[i].tasks_count) {
            return true;
        }
    }
    return false;
}

/* Lock held. A pass has ended; returns its job when that was the job's last one. */
static ep_job *close_pass(ep_cpu_schedule *s, cpu_pass *pass)
{
    ep_job *job = pass->job;
    uint32_t done = job_word(job, JOB_PASSES_DONE) + 1;
    job_set_word(job, JOB_PASSES_DONE, done);
    if (pass->err != EP_OK) {
        job_set_word(job, JOB_ERR, (uint32_t)pass->err);
    }
    pass->open = false;
    pass->job = NULL;
    if (s->first != NULL || has_tasks(s)) {
        announce(s, s->threads); /* a waiting job may open this pass; patient ones may have given way to it */
    }
    if (done < job_passes_count(job)) {
        return NULL;
    }
    s->jobs_count--;
    return job;
}

/* Lock held before and after, not while tasks run and done() is called. */
static void do_work(cpu_worker *worker, const cpu_work *work)
{
    ep_cpu_schedule *s = worker->schedule;
    cpu_pass *pass = work->pass;
    stage next = (stage)(work->stage + 1);

    bool begins = span_turn(worker, pass);
    pthread_mutex_unlock(&s->lock);
    if (begins) {
        EP_TRACE(kernel_begin, &worker->span);
    }
    if (work->stage == STAGE_PREPARE) {
        next = prepare_pass(s, pass, worker->tile);
    } else {
        run_tasks(&pass->pass, work->stage, work->first, work->count, worker->tile);
    }
    span_leave(worker, work, next);
    pthread_mutex_lock(&s->lock);

    s->patient_running -= is_patient(pass->job);
    pass->tasks_done += work->count;
    if (pass->tasks_done < pass->tasks_count) {
        return;
    }
    if (next != STAGE_END) {
        enter_stage(pass, next);
        announce(s, (pass->tasks_count + pass->grain - 1) / pass->grain);
        return;
    }
    ep_job *job = close_pass(s, pass);
    if (job != NULL) {
        pthread_mutex_unlock(&s->lock);
        job->done(job, (ep_err)job_word(job, JOB_ERR)); /* the job is the caller's again */
        pthread_mutex_lock(&s->lock);
    }
}

/* No lock. True when something changed since seen before the time was up. */
static bool spin_for_change(ep_cpu_schedule *s, uint64_t seen)
{
    const uint64_t end_ns = ep_clock_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&s->changes, memory_order_acquire) != seen) {
                return true;
            }
            ep_cpu_relax();
        }
    } while (ep_clock_now_ns() < end_ns);
    return false;
}

/* Lock held before and after. Returns when there may be work. */
static void wait_for_work(ep_cpu_schedule *s)
{
    uint64_t seen = atomic_load_explicit(&s->changes, memory_order_relaxed);
    pthread_mutex_unlock(&s->lock);
    bool changed = spin_for_change(s, seen);
    pthread_mutex_lock(&s->lock);
    if (changed) {
        return;
    }
    s->sleepers_count++;
    while (atomic_load_explicit(&s->changes, memory_order_relaxed) == seen) {
        pthread_cond_wait(&s->wake, &s->lock);
    }
    s->sleepers_count--;
}

static void *worker_main(void *arg)
{
    cpu_worker *worker = arg;
    ep_cpu_schedule *s = worker->schedule;
    char name[16];
    snprintf(name, sizeof(name), "ep-cpu-%u", worker->index % 100000);
    pthread_setname_np(pthread_self(), name);

    pthread_mutex_lock(&s->lock);
    for (;;) {
        cpu_work work;
        if (take_work(s, &work)) {
            do_work(worker, &work);
        } else if (s->stopping) {
            break;
        } else {
            span_end(worker, EP_OK);
            wait_for_work(s);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

ep_err ep_cpu_schedule_start(const ep_ffn_kernel *const kernels[EP_FFN_FAMILIES], uint32_t threads,
                             ep_cpu_schedule **out_schedule)
{
    ep_cpu_schedule *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    memcpy(s->kernels, kernels, sizeof(s->kernels));
    s->threads = threads;
    s->passes_count = threads + SPARE_PASSES;
    s->workers = calloc(threads, sizeof(*s->workers));
    s->passes = calloc(s->passes_count, sizeof(*s->passes));
    if (s->workers == NULL || s->passes == NULL) {
        ep_cpu_schedule_stop(s);
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < threads; i++) {
        cpu_worker *worker = &s->workers[i];
        worker->schedule = s;
        worker->index = i;
        worker->tile = ep_host_alloc(EP_FFN_TILE_BYTES);
        if (worker->tile == NULL || ep_host_thread_start(&worker->thread, worker_main, worker) != EP_OK) {
            ep_cpu_schedule_stop(s);
            return EP_ERR_NO_MEMORY;
        }
        s->threads_started++;
    }
    *out_schedule = s;
    return EP_OK;
}

void ep_cpu_schedule_stop(ep_cpu_schedule *s)
{
    if (s == NULL) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    EP_ASSERT(s->jobs_count == 0);
    s->stopping = true;
    announce(s, s->threads);
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
    for (uint32_t i = 0; i < s->threads_started; i++) {
        pthread_join(s->workers[i].thread, NULL);
    }
    for (uint32_t i = 0; s->workers != NULL && i < s->threads; i++) {
        free(s->workers[i].tile);
    }
    for (uint32_t i = 0; s->passes != NULL && i < s->passes_count; i++) {
        free(s->passes[i].scratch);
    }
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    free(s->workers);
    free(s->passes);
    free(s);
}

/* Lock held. By priority; equal ones in the order they came. */
static void queue_job(ep_cpu_schedule *s, ep_job *job)
{
    if (s->first == NULL || s->last->priority <= job->priority) {
        *(s->first == NULL ? &s->first : &s->last->next) = job;
        s->last = job;
        return;
    }
    ep_job **at = &s->first;
    while ((*at)->priority <= job->priority) {
        at = &(*at)->next;
    }
    job->next = *at;
    *at = job;
}

ep_err ep_cpu_schedule_submit(ep_cpu_schedule *s, ep_job *job)
{
    ep_err err = EP_OK;
    job->next = NULL;
    memset(job->scratch, 0, sizeof(job->scratch));
    pthread_mutex_lock(&s->lock);
    if (s->jobs_count >= EP_BACKEND_JOBS_MAX) {
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        queue_job(s, job);
        s->jobs_count++;
        announce(s, 1);
    }
    pthread_mutex_unlock(&s->lock);
    return err;
}
