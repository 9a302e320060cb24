/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/cpu_schedule.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu_ahead.h"
#include "backends/cpu/cpu_spin.h"
#include "backends/host_common.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/large_memory.h"
#include "base/thread.h"

/* an expert takes 50 to 500 us, waking a sleeping thread about 25 */
#define SPIN_NS (50 * EP_NS_PER_US)
/* a smaller pass is one task: handing parts over would cost more */
#define WHOLE_PASS_FMAS 262144u
#define SMALL_ROUND 16384u /* up to this many inner values, one thread rounds to int8 */
#define TASK_FMAS 65536u   /* panels are taken together up to this much work */
/* how many waiting jobs a thread passes over to find one of its own memory node */
#define LOCAL_LOOKS 32
/* how many jobs, or turns to passes, near ones may overtake before the one whose turn it is */
#define OVERTAKEN_MAX 64
#define CACHE_LINE 64
/* passes beyond one per thread, so that stage ends find other work, and a pass may be overtaken */
#define SPARE_PASSES 3

typedef enum { STAGE_PREPARE, STAGE_PACK, STAGE_GATE_UP, STAGE_ROUND, STAGE_DOWN, STAGE_END } stage;

/*
 * Tasks of a stage are claimed without the lock. `claim` holds the stage's number and how many
 * tasks are taken, so that a thread which still expects an earlier stage takes nothing. The rest of
 * a pass changes under the lock, and only while none of its tasks runs.
 */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t claim; /* number << 32 | tasks taken */
    _Atomic uint32_t tasks_done;
    _Atomic uint32_t threads_in; /* threads running its tasks; written under lock */
    bool open;
    bool is_whole; /* so small that it is a single task */
    ep_job *job;
    uint32_t first_row;
    uint32_t rows_count;
    stage stage;
    uint32_t number; /* tasks in this stage, like the next */
    uint32_t tasks_count;
    uint32_t grain; /* tasks taken at a time */
    ep_err err;
    uint64_t order; /* older passes first */
    ep_ffn_pass pass;
    void *scratch;
    size_t scratch_bytes;
} cpu_pass;

/* Panels of weights to be fetched. These are addresses only: the weights may be gone. */
typedef struct {
    const uint8_t *first;
    size_t bytes; /* of one */
    uint32_t count;
} cpu_panels;

/* A stage of a pass, as known to a thread that takes its tasks. */
typedef struct {
    cpu_pass *pass;
    stage stage;
    uint32_t number; /* of the stage, see cpu_pass.claim */
    uint32_t tasks_count;
    uint32_t grain;
    /* `changes` when the stage was chosen; while it is equal, no better stage can exist */
    uint64_t seen;
    cpu_panels then;           /* panels of the pass that is next in turn */
    const cpu_pass *then_pass; /* NULL: the panels are those of a job that waits */
    uint32_t then_number;      /* number of its stage */
} cpu_turn;

typedef struct {
    _Alignas(CACHE_LINE) ep_cpu_schedule *schedule;
    uint32_t index;
    uint32_t node; /* memory node */
    pthread_t thread;
    float *tile; /* EP_FFN_TILE_BYTES */
    cpu_turn turn;
    ep_cpu_spin spin;
    bool pinned;
    /* written by this thread only */
    _Atomic uint64_t tasks_near; /* with weights on its own memory node */
    _Atomic uint64_t tasks_far;
    _Atomic uint64_t idle; /* see IDLE */
    /* The kernel span: what this thread does without a break for one pass, in one or several
     * stages. */
    bool span_open;
    uint64_t span_order; /* `order` of its pass */
    ep_trace_fields span;
} cpu_worker;

/* Tasks of the stage that a thread works on. */
typedef struct {
    uint32_t first;
    uint32_t count;
} cpu_work;

struct ep_cpu_schedule {
    const ep_ffn_kernel *kernels[EP_FFN_FAMILIES];
    const ep_cpu_topology *topology;
    bool pins;
    bool spins;
    uint32_t threads;
    uint32_t threads_started;
    cpu_worker *workers;
    cpu_pass *passes; /* threads + SPARE_PASSES */
    uint32_t passes_count;
    _Atomic uint64_t idle_told_ns; /* the largest idle time reported so far */

    /* grows whenever there may be new work, and at stop; written under lock */
    _Alignas(CACHE_LINE) _Atomic uint64_t changes;
    /* guards the fields below, and passes except as stated there */
    _Alignas(CACHE_LINE) pthread_mutex_t lock;
    pthread_cond_t wake;
    uint32_t sleepers_count;
    ep_job *first; /* jobs with rows that are not yet in a pass */
    ep_job *last;
    uint32_t jobs_count;
    uint32_t jobs_overtaking;   /* how often the first job was passed over for a near one */
    uint32_t passes_overtaking; /* the same for the first pass by priority and age */
    uint32_t patient_running;   /* threads running tasks of patient jobs */
    uint64_t next_order;
    bool stopping;
};

/* The fields of a job's scratch while it is submitted. */
enum { JOB_PASSES, JOB_PASSES_OPENED, JOB_PASSES_DONE, JOB_ERR, JOB_PIECES };

static uint32_t job_node(const ep_job *job)
{
    return ((const ep_cpu_weights *)job->weights)->node;
}

static uint32_t tasks_taken(const cpu_pass *pass)
{
    return (uint32_t)atomic_load_explicit(&pass->claim, memory_order_relaxed);
}

static bool has_tasks(const cpu_pass *pass)
{
    return pass->open && tasks_taken(pass) < pass->tasks_count;
}

/*
 * ---- spans: an event per task would cost more than some tasks ----
 *
 * Events are recorded without the lock where possible: one more microsecond under it makes threads
 * queue for it. A span ends before its thread's tasks are counted as done, so before the job's
 * done().
 */

static void span_end(cpu_worker *worker, ep_err status)
{
    worker->span_open = false;
    worker->span.status = (int32_t)status;
    EP_TRACE(kernel_end, &worker->span);
}

/* Lock held. Called when the thread turns to this pass, or has a span open. True: a span must begin
 * once the lock is released. */
static bool span_turn(cpu_worker *worker, const cpu_pass *pass)
{
    if (worker->span_open) {
        if (worker->span_order == pass->order) {
            return false;
        }
        span_end(worker, EP_OK); /* rare: other threads took the rest of its stage */
    }
    ep_job *job = pass->job;
    if (job->trace == NULL || !EP_TRACE_SPAN_ON(kernel)) {
        return false;
    }
    worker->span = *job->trace;
    worker->span.parent = 0;
    worker->span.sub = job->scratch[JOB_PIECES]++;
    worker->span.rows = pass->rows_count;
    worker->span_order = pass->order;
    worker->span_open = true;
    return true;
}

/* Without the lock; work's tasks are not yet counted as done, so the pass stays in its stage. Ends
 * the span when the thread will leave the pass: the stage has no tasks left, and the next stage
 * waits for other threads too, or there is none. */
static void span_leave(cpu_worker *worker, const cpu_work *work, stage next)
{
    const cpu_pass *pass = worker->turn.pass;
    bool took_all = work->count == pass->tasks_count;
    bool none_left = tasks_taken(pass) == pass->tasks_count;
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

/* Lock held, no task of the pass runs. Moves it to a stage; the caller announces its tasks. */
static void enter_stage(cpu_pass *pass, stage next)
{
    const ep_backend_weights *weights = pass->job->weights;
    const ep_ffn_packed *packed = &((const ep_cpu_weights *)weights)->packed;
    uint64_t task_fmas = 1;
    pass->stage = next;
    pass->number++;
    atomic_store_explicit(&pass->tasks_done, 0, memory_order_relaxed);
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
    case STAGE_ROUND:
        pass->tasks_count = pass->pass.chunks.count;
        task_fmas = (uint64_t)weights->inner * EP_FFN_CHUNK_ROWS;
        break;
    case STAGE_DOWN:
        pass->tasks_count = packed->down_panels;
        task_fmas = (uint64_t)weights->inner * EP_FFN_PANEL * pass->rows_count;
        break;
    case STAGE_END:
        pass->tasks_count = 0;
        break;
    }
    pass->grain = (uint32_t)(task_fmas >= TASK_FMAS ? 1 : (TASK_FMAS + task_fmas - 1) / task_fmas);
    atomic_store_explicit(&pass->claim, (uint64_t)pass->number << 32, memory_order_release);
}

static bool is_patient(const ep_job *job)
{
    return (job->priority & EP_JOB_PATIENT) != 0;
}

/* Lock held. Whether a near pass or job may once more overtake the one whose turn it is. */
static bool may_overtake(uint32_t *count)
{
    *count = *count < OVERTAKEN_MAX ? *count + 1 : 0;
    return *count != 0;
}

/* Lock held, a job waits. The job to open for a thread of this memory node: the first, or one soon
 * after it with near weights. *out_before: the job queued before it; NULL none. */
static ep_job *choose_job(ep_cpu_schedule *s, uint32_t node, ep_job **out_before)
{
    ep_job *before = NULL;
    ep_job *job = s->first;
    for (uint32_t looks = 0;
         looks < LOCAL_LOOKS && job != NULL && is_patient(job) == is_patient(s->first); looks++) {
        if (job_node(job) == node) {
            if (before != NULL && !may_overtake(&s->jobs_overtaking)) {
                break;
            }
            *out_before = before;
            s->jobs_overtaking = before == NULL ? 0 : s->jobs_overtaking;
            return job;
        }
        before = job;
        job = job->next;
    }
    *out_before = NULL;
    s->jobs_overtaking = 0;
    return s->first;
}

/* Lock held, a job waits. Puts its next rows into a pass, if one is free. */
static cpu_pass *open_pass(ep_cpu_schedule *s, uint32_t node)
{
    cpu_pass *pass = NULL;
    for (uint32_t i = 0; i < s->passes_count && pass == NULL; i++) {
        pass = s->passes[i].open ? NULL : &s->passes[i];
    }
    if (pass == NULL) {
        return NULL;
    }
    ep_job *before;
    ep_job *job = choose_job(s, node, &before);
    const uint32_t count = job->scratch[JOB_PASSES];
    const uint32_t index = job->scratch[JOB_PASSES_OPENED]++;
    const uint32_t base = job->rows_count / count;
    const uint32_t longer = job->rows_count % count;
    pass->open = true;
    pass->job = job;
    pass->first_row = base * index + (index < longer ? index : longer);
    pass->rows_count = base + (index < longer ? 1 : 0);
    pass->is_whole = (uint64_t)3 * job->weights->hidden * job->weights->inner * pass->rows_count <=
                     WHOLE_PASS_FMAS;
    pass->err = EP_OK;
    pass->order = s->next_order++;
    if (index + 1 == count) { /* all its rows are in passes now */
        *(before == NULL ? &s->first : &before->next) = job->next;
        s->last = s->last == job ? before : s->last;
    }
    enter_stage(pass, STAGE_PREPARE);
    /* threads in a patient pass may have to leave it */
    atomic_fetch_add_explicit(&s->changes, 1, memory_order_release);
    return pass;
}

/* By priority, with patient jobs last, then by age. */
static bool is_due_before(const cpu_pass *a, const cpu_pass *b)
{
    const uint64_t a_priority = a->job->priority;
    const uint64_t b_priority = b->job->priority;
    return a_priority != b_priority ? a_priority < b_priority : a->order < b->order;
}

/* The order for a thread of this memory node: patient jobs last, near weights first, then by
 * priority and age. */
static bool is_before(const cpu_pass *a, const cpu_pass *b, uint32_t node)
{
    const bool a_near = job_node(a->job) == node;
    if (is_patient(a->job) == is_patient(b->job) && a_near != (job_node(b->job) == node)) {
        return a_near;
    }
    return is_due_before(a, b);
}

/* How many threads a pass can use in its widest stage. */
static uint32_t pass_width(const cpu_pass *pass)
{
    const ep_ffn_packed *packed = &((const ep_cpu_weights *)pass->job->weights)->packed;
    uint32_t panels =
        packed->gate_up_panels > packed->down_panels ? packed->gate_up_panels : packed->down_panels;
    return pass->is_whole ? 1 : panels;
}

/*
 * Lock held. The pass to take a task from; NULL: none that this thread should work on now. urgent:
 * how many threads the passes of urgent jobs can use. Their stages are short, and a panel of a
 * patient pass takes longer, so this many threads stay away from patient passes.
 */
static cpu_pass *choose_pass(ep_cpu_schedule *s, uint32_t node)
{
    cpu_pass *best = NULL;
    cpu_pass *due = NULL;
    uint64_t urgent = 0;
    for (uint32_t i = 0; i < s->passes_count; i++) {
        cpu_pass *pass = &s->passes[i];
        if (!pass->open) {
            continue;
        }
        urgent += is_patient(pass->job) ? 0 : pass_width(pass);
        if (has_tasks(pass)) {
            best = best == NULL || is_before(pass, best, node) ? pass : best;
            due = due == NULL || is_due_before(pass, due) ? pass : due;
        }
    }
    if (best == due) {
        s->passes_overtaking = 0;
    } else if (!may_overtake(&s->passes_overtaking)) {
        best = due;
    }
    bool may_turn_to_patient = urgent == 0 || s->patient_running + urgent < s->threads;
    const ep_job *waiting = s->first;
    if (waiting != NULL && (best == NULL || waiting->priority < best->job->priority) &&
        (!is_patient(waiting) || may_turn_to_patient)) {
        cpu_pass *opened = open_pass(s, node);
        best = opened != NULL ? opened : best;
    }
    return best != NULL && is_patient(best->job) && !may_turn_to_patient ? NULL : best;
}

/* With or without the lock. False when the stage has no task left, or is over. */
static bool claim_tasks(const cpu_turn *turn, cpu_work *out_work)
{
    uint64_t claim = atomic_load_explicit(&turn->pass->claim, memory_order_relaxed);
    uint32_t count;
    do {
        const uint32_t taken = (uint32_t)claim;
        if (claim >> 32 != turn->number || taken >= turn->tasks_count) {
            return false;
        }
        count = turn->tasks_count - taken < turn->grain ? turn->tasks_count - taken : turn->grain;
    } while (!atomic_compare_exchange_weak_explicit(&turn->pass->claim, &claim, claim + count,
                                                    memory_order_acquire, memory_order_relaxed));
    out_work->first = (uint32_t)claim;
    out_work->count = count;
    return true;
}

/* With or without the lock. The panels of gate-up or down. */
static cpu_panels panels_of(const ep_ffn_packed *weights, stage which)
{
    const bool is_down = which == STAGE_DOWN;
    return (cpu_panels){
        .first = (is_down ? ep_ffn_down_panel : ep_ffn_gate_up_panel)(weights, 0),
        .bytes =
            ep_ffn_panel_bytes(weights->family, is_down ? weights->down_format : weights->format,
                               is_down ? weights->inner : weights->hidden),
        .count = is_down ? weights->down_panels : weights->gate_up_panels,
    };
}

/* Lock held. Sets the panels that threads of this memory node will use when turn->pass has no more
 * tasks: those of another pass, or else of the job that is opened next. */
static void find_then(const ep_cpu_schedule *s, cpu_turn *turn, uint32_t node)
{
    const cpu_pass *best = NULL;
    for (uint32_t i = 0; i < s->passes_count; i++) {
        const cpu_pass *other = &s->passes[i];
        if (other != turn->pass && has_tasks(other) &&
            (other->stage == STAGE_GATE_UP || other->stage == STAGE_DOWN)) {
            best = best == NULL || is_before(other, best, node) ? other : best;
        }
    }
    if (best != NULL) {
        turn->then_pass = best;
        turn->then_number = best->number;
        turn->then = panels_of(best->pass.weights, best->stage);
    } else if (s->first != NULL) {
        turn->then = panels_of(&((const ep_cpu_weights *)s->first->weights)->packed, STAGE_GATE_UP);
    }
}

/* Lock held. Turns the thread to the pass that is best for it and takes its first tasks. False:
 * there is nothing to do now. */
static bool turn_to_work(cpu_worker *worker, cpu_work *out_work)
{
    ep_cpu_schedule *s = worker->schedule;
    cpu_turn *turn = &worker->turn;
    do {
        cpu_pass *pass = choose_pass(s, worker->node);
        if (pass == NULL) {
            return false;
        }
        *turn = (cpu_turn){.pass = pass,
                           .stage = pass->stage,
                           .number = pass->number,
                           .tasks_count = pass->tasks_count,
                           .grain = pass->grain,
                           .seen = atomic_load_explicit(&s->changes, memory_order_relaxed)};
        find_then(s, turn, worker->node);
    } while (!claim_tasks(turn, out_work)); /* threads already in the pass took the rest */
    atomic_fetch_add_explicit(&turn->pass->threads_in, 1, memory_order_relaxed);
    s->patient_running += is_patient(turn->pass->job);
    return true;
}

/*
 * Without the lock. Called when something may have come up that is better than the thread's stage.
 * If nothing has, for any thread, the thread stays in its stage and may claim ahead again.
 * Otherwise it would run its present tasks without knowing the next ones, whose weights would then
 * be cold.
 */
static void renew_turn(cpu_worker *worker)
{
    ep_cpu_schedule *s = worker->schedule;
    cpu_turn *turn = &worker->turn;
    const bool has_products = turn->stage == STAGE_GATE_UP || turn->stage == STAGE_DOWN;
    if (!has_products || is_patient(turn->pass->job) ||
        tasks_taken(turn->pass) >= turn->tasks_count ||
        atomic_load_explicit(&s->changes, memory_order_relaxed) == turn->seen) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    bool is_best = s->first == NULL || s->first->priority >= turn->pass->job->priority;
    for (uint32_t i = 0; i < s->passes_count && is_best; i++) {
        const cpu_pass *other = &s->passes[i];
        is_best = other == turn->pass || !has_tasks(other) ||
                  (is_due_before(turn->pass, other) && is_before(turn->pass, other, worker->node));
    }
    if (is_best) {
        turn->seen = atomic_load_explicit(&s->changes, memory_order_relaxed);
        turn->then_pass = NULL;
        turn->then = (cpu_panels){.count = 0};
        find_then(s, turn, worker->node);
    }
    pthread_mutex_unlock(&s->lock);
}

/*
 * Without the lock. Claims the tasks that the thread will run after its present ones, so that it
 * knows which weights to fetch meanwhile. Not the last tasks of a stage (cpu_ahead.h), and not
 * those of patient jobs: they are long, and an urgent job would have to wait for them too.
 */
static cpu_work claim_ahead(const ep_cpu_schedule *s, const cpu_turn *turn)
{
    cpu_work ahead = {.count = 0};
    const uint32_t left = turn->tasks_count - tasks_taken(turn->pass);
    const uint32_t threads_in = atomic_load_explicit(&turn->pass->threads_in, memory_order_relaxed);
    const uint32_t threads =
        ep_cpu_threads_expected(threads_in, s->threads, turn->then_pass != NULL);
    if ((turn->stage == STAGE_GATE_UP || turn->stage == STAGE_DOWN) &&
        ep_cpu_may_claim_ahead(left, turn->grain, threads) && !is_patient(turn->pass->job) &&
        atomic_load_explicit(&s->changes, memory_order_relaxed) == turn->seen) {
        (void)claim_tasks(turn, &ahead);
    }
    return ahead;
}

/*
 * Where the weights begin that the thread will probably use after task `index`. If it has claimed
 * nothing ahead, threads are expected to take turns, also across the end of the stage.
 */
static const uint8_t *next_weights(const cpu_turn *turn, const cpu_work *work,
                                   const cpu_work *ahead, uint32_t index)
{
    const ep_ffn_packed *weights = turn->pass->pass.weights;
    const uint32_t others =
        (atomic_load_explicit(&turn->pass->threads_in, memory_order_relaxed) - 1) * turn->grain;
    uint32_t next = index + 1;
    cpu_panels panels = panels_of(weights, turn->stage);
    if (next == work->first + work->count) {
        const uint32_t taken = tasks_taken(turn->pass);
        next = ahead->count > 0 ? ahead->first : next + others > taken ? next + others : taken;
    }
    if (next >= panels.count) {
        /* A thread that comes to a stage early also claims ahead there: later ones find two tasks
         * taken for each thread before them. */
        const uint32_t over = next - panels.count;
        if (turn->stage == STAGE_GATE_UP && (turn->then_pass == NULL || over >= others)) {
            /* the thread that ends a stage begins the next one */
            panels = panels_of(weights, STAGE_DOWN);
            next = over < others ? 2 * (others - over) : 0;
        } else {
            panels = turn->then;
            next = 2 * over;
            if (turn->then_pass != NULL) { /* what is taken of it; all when that stage is over */
                const uint64_t claim =
                    atomic_load_explicit(&turn->then_pass->claim, memory_order_relaxed);
                next += claim >> 32 == turn->then_number ? (uint32_t)claim : panels.count;
            }
        }
    }
    return next < panels.count ? panels.first + next * panels.bytes : NULL;
}

/* ahead: the tasks it will run next; count 0: unknown. */
static void run_tasks(const cpu_turn *turn, const cpu_work *work, const cpu_work *ahead,
                      float *tile)
{
    const ep_ffn_pass *pass = &turn->pass->pass;
    for (uint32_t i = work->first; i < work->first + work->count; i++) {
        if (turn->stage == STAGE_PACK) {
            ep_ffn_pass_pack_chunk(pass, i);
        } else if (turn->stage == STAGE_GATE_UP) {
            ep_ffn_pass_gate_up(pass, i, next_weights(turn, work, ahead, i), tile);
        } else if (turn->stage == STAGE_ROUND) {
            ep_ffn_pass_round_chunk(pass, i);
        } else {
            ep_ffn_pass_down(pass, i, next_weights(turn, work, ahead, i), tile);
        }
    }
}

static void run_whole(cpu_pass *pass, stage which, uint32_t count, float *tile)
{
    const cpu_turn turn = {.pass = pass, .stage = which, .grain = 1};
    run_tasks(&turn, &(cpu_work){.count = count}, &(cpu_work){.count = 0}, tile);
}

/* Without the lock; this is the pass's only task. Returns the next stage. */
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
    const size_t scratch_bytes = ep_ffn_pass_scratch_bytes(packed, pass->rows_count);
    if (scratch_bytes > pass->scratch_bytes) { /* grows to the largest pass seen, and is kept */
        ep_large_free(pass->scratch, pass->scratch_bytes);
        pass->scratch = ep_large_alloc(scratch_bytes, EP_HOST_ALIGN);
        pass->scratch_bytes = pass->scratch == NULL ? 0 : scratch_bytes;
    }
    if (scratch_bytes > pass->scratch_bytes) {
        pass->err = EP_ERR_NO_MEMORY;
        return STAGE_END;
    }
    ep_ffn_pass_init(&pass->pass, s->kernels[packed->family], packed, &batch, pass->scratch);
    if (!pass->is_whole && pass->pass.chunks.count > 1) {
        return STAGE_PACK;
    }
    run_whole(pass, STAGE_PACK, pass->pass.chunks.count, tile);
    if (!pass->is_whole) {
        return STAGE_GATE_UP;
    }
    run_whole(pass, STAGE_GATE_UP, packed->gate_up_panels, tile);
    if (ep_ffn_pass_rounds(packed)) {
        run_whole(pass, STAGE_ROUND, pass->pass.chunks.count, tile);
    }
    run_whole(pass, STAGE_DOWN, packed->down_panels, tile);
    return STAGE_END;
}

static stage stage_after(const cpu_turn *turn)
{
    const bool rounds = ep_ffn_pass_rounds(turn->pass->pass.weights);
    return turn->stage == STAGE_GATE_UP && !rounds ? STAGE_DOWN : (stage)(turn->stage + 1);
}

/* Without the lock; all tasks of gate and up have ended. The thread that ended them does a small
 * round at once, since handing it over would take longer. Returns the next stage. */
static stage round_if_small(cpu_pass *pass, float *tile)
{
    const ep_ffn_pass *p = &pass->pass;
    if (p->chunks.count > 1 && (uint64_t)p->weights->inner * pass->rows_count > SMALL_ROUND) {
        return STAGE_ROUND;
    }
    run_whole(pass, STAGE_ROUND, p->chunks.count, tile);
    return STAGE_DOWN;
}

/* Lock held, but not during done(). All tasks of the pass's stage have ended. */
static void end_stage(ep_cpu_schedule *s, cpu_pass *pass, stage next)
{
    ep_job *job = pass->job;
    if (next != STAGE_END) {
        enter_stage(pass, next);
        announce(s, (pass->tasks_count + pass->grain - 1) / pass->grain);
        return;
    }
    if (pass->err != EP_OK) {
        job->scratch[JOB_ERR] = (uint32_t)pass->err;
    }
    pass->open = false;
    pass->job = NULL;
    /* a waiting job may use this pass; patient jobs may have given way to it */
    bool is_awaited = s->first != NULL;
    for (uint32_t i = 0; i < s->passes_count && !is_awaited; i++) {
        is_awaited = has_tasks(&s->passes[i]);
    }
    if (is_awaited) {
        announce(s, s->threads);
    }
    if (++job->scratch[JOB_PASSES_DONE] == job->scratch[JOB_PASSES]) {
        s->jobs_count--;
        pthread_mutex_unlock(&s->lock);
        job->done(job, (ep_err)job->scratch[JOB_ERR]); /* the job belongs to the caller again */
        pthread_mutex_lock(&s->lock);
    }
}

/*
 * Without the lock. Runs tasks of the thread's stage until there are no more, or something better
 * may have come up. True: these were the last tasks, and *out_next follows.
 */
static bool run_stage(cpu_worker *worker, cpu_work work, stage *out_next)
{
    ep_cpu_schedule *s = worker->schedule;
    const cpu_turn *turn = &worker->turn; /* renew_turn changes it */
    cpu_pass *pass = turn->pass;
    uint32_t done;
    _Atomic uint64_t *counter =
        job_node(pass->job) == worker->node ? &worker->tasks_near : &worker->tasks_far;

    bool more;
    do {
        cpu_work ahead = {.count = 0};
        if (turn->stage == STAGE_PREPARE) {
            *out_next = prepare_pass(s, pass, worker->tile);
        } else {
            *out_next = stage_after(turn);
            renew_turn(worker);
            ahead = claim_ahead(s, turn);
            run_tasks(turn, &work, &ahead, worker->tile);
        }
        atomic_store_explicit(counter,
                              atomic_load_explicit(counter, memory_order_relaxed) + work.count,
                              memory_order_relaxed);
        if (worker->span_open && ahead.count == 0) {
            span_leave(worker, &work, *out_next);
        }
        done = work.count +
               atomic_fetch_add_explicit(&pass->tasks_done, work.count, memory_order_acq_rel);
        if (ahead.count > 0) {
            work = ahead;
            more = true;
        } else {
            more = done < turn->tasks_count &&
                   atomic_load_explicit(&s->changes, memory_order_relaxed) == turn->seen &&
                   claim_tasks(turn, &work);
        }
    } while (more);
    if (done == turn->tasks_count && *out_next == STAGE_ROUND) {
        *out_next = round_if_small(pass, worker->tile);
    }
    return done == turn->tasks_count;
}

/* Lock held before and after, but not while tasks and done() run. work: claimed tasks. */
static void do_work(cpu_worker *worker, const cpu_work *work)
{
    ep_cpu_schedule *s = worker->schedule;
    cpu_pass *pass = worker->turn.pass;
    const bool is_patient_job = is_patient(pass->job);
    stage next;

    const bool begins = (worker->span_open || pass->job->trace != NULL) && span_turn(worker, pass);
    pthread_mutex_unlock(&s->lock);
    if (begins) {
        EP_TRACE(kernel_begin, &worker->span);
    }
    const bool ends = run_stage(worker, *work, &next);
    pthread_mutex_lock(&s->lock);

    s->patient_running -= is_patient_job;
    atomic_fetch_sub_explicit(&pass->threads_in, 1, memory_order_relaxed);
    if (ends) {
        end_stage(s, pass, next);
    }
}

/* Without the lock. True when `changes` differed from seen before the time was up. */
static bool spin_for_change(ep_cpu_schedule *s, uint64_t seen, uint64_t now_ns)
{
    const uint64_t end_ns = now_ns + SPIN_NS;
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

/* Without the lock. A thread that shares its CPU neither spins nor stays tied to it. */
static bool may_spin(cpu_worker *worker, uint64_t now_ns)
{
    ep_cpu_schedule *s = worker->schedule;
    if (!s->spins) {
        return false;
    }
    const bool alone = ep_cpu_spin_note(&worker->spin, ep_cpu_preemptions(), now_ns);
    if (s->pins && alone != worker->pinned) {
        worker->pinned = alone;
        ep_cpu_topology_place(s->topology, worker->index, s->threads, alone);
    }
    return alone;
}

/*
 * A thread's idle time is one word, so that a reader counts every idle stretch exactly once. At
 * work it is the sum of all stretches. Without a task it is IDLE plus, modulo IDLE, that sum minus
 * the time when the stretch began.
 */
#define IDLE ((uint64_t)1 << 63)

static uint64_t idle_sum(const cpu_worker *worker)
{
    const uint64_t idle = atomic_load_explicit(&worker->idle, memory_order_acquire);
    return (idle & IDLE) == 0 ? idle : (idle + ep_clock_now_ns()) & ~IDLE;
}

/* Lock held before and after. Returns when there may be work. */
static void wait_for_work(cpu_worker *worker)
{
    ep_cpu_schedule *s = worker->schedule;
    const uint64_t seen = atomic_load_explicit(&s->changes, memory_order_relaxed);
    pthread_mutex_unlock(&s->lock);
    const uint64_t begin_ns = ep_clock_now_ns();
    uint64_t idle = atomic_load_explicit(&worker->idle, memory_order_relaxed);
    idle = (idle - begin_ns) | IDLE;
    atomic_store_explicit(&worker->idle, idle, memory_order_release);
    const bool changed = may_spin(worker, begin_ns) && spin_for_change(s, seen, begin_ns);
    pthread_mutex_lock(&s->lock);
    if (!changed) {
        s->sleepers_count++;
        while (atomic_load_explicit(&s->changes, memory_order_relaxed) == seen) {
            pthread_cond_wait(&s->wake, &s->lock);
        }
        s->sleepers_count--;
    }
    atomic_store_explicit(&worker->idle, (idle + ep_clock_now_ns()) & ~IDLE, memory_order_release);
}

static void *worker_main(void *arg)
{
    cpu_worker *worker = arg;
    ep_cpu_schedule *s = worker->schedule;
    ep_host_floats_reset();
    ep_cpu_topology_place(s->topology, worker->index, s->threads, s->pins);
    worker->pinned = s->pins;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        cpu_work work;
        if (turn_to_work(worker, &work)) {
            do_work(worker, &work);
        } else if (s->stopping) {
            break;
        } else {
            if (worker->span_open) {
                span_end(worker, EP_OK);
            }
            wait_for_work(worker);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

ep_err ep_cpu_schedule_start(const ep_cpu_schedule_config *config, ep_cpu_schedule **out_schedule)
{
    ep_cpu_schedule *s = aligned_alloc(CACHE_LINE, sizeof(*s));
    if (s == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    memset(s, 0, sizeof(*s));
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    memcpy(s->kernels, config->kernels, sizeof(s->kernels));
    s->topology = config->topology;
    s->threads = config->threads;
    s->pins = config->pins && config->threads == ep_cpu_topology_cpus(config->topology);
    s->spins = config->threads <= ep_cpu_topology_cpus(config->topology);
    s->passes_count = s->threads + SPARE_PASSES;
    s->workers = aligned_alloc(CACHE_LINE, s->threads * sizeof(*s->workers));
    s->passes = aligned_alloc(CACHE_LINE, s->passes_count * sizeof(*s->passes));
    if (s->workers == NULL || s->passes == NULL) {
        ep_cpu_schedule_stop(s);
        return EP_ERR_NO_MEMORY;
    }
    memset(s->workers, 0, s->threads * sizeof(*s->workers));
    memset(s->passes, 0, s->passes_count * sizeof(*s->passes));
    for (uint32_t i = 0; i < s->threads; i++) {
        cpu_worker *worker = &s->workers[i];
        worker->schedule = s;
        worker->index = i;
        worker->node = ep_cpu_topology_node(s->topology, i, s->threads);
        worker->tile = ep_large_alloc(EP_FFN_TILE_BYTES, EP_HOST_ALIGN);
        char name[16];
        snprintf(name, sizeof(name), "ep-cpu-%u", i % 100000);
        if (worker->tile == NULL ||
            ep_thread_start(name, worker_main, worker, &worker->thread) != EP_OK) {
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
    for (uint32_t i = 0; s->workers != NULL && s->passes != NULL && i < s->threads; i++) {
        ep_large_free(s->workers[i].tile, EP_FFN_TILE_BYTES);
    }
    for (uint32_t i = 0; s->workers != NULL && s->passes != NULL && i < s->passes_count; i++) {
        ep_large_free(s->passes[i].scratch, s->passes[i].scratch_bytes);
    }
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    free(s->workers);
    free(s->passes);
    free(s);
}

/* Lock held. By priority; equal ones in the order of submission. */
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
    bool wakes = false;
    job->next = NULL;
    memset(job->scratch, 0, sizeof(job->scratch));
    job->scratch[JOB_PASSES] = (job->rows_count + EP_FFN_PASS_ROWS - 1) / EP_FFN_PASS_ROWS;
    pthread_mutex_lock(&s->lock);
    if (s->jobs_count >= EP_BACKEND_JOBS_MAX) {
        err = EP_ERR_RESOURCE_EXHAUSTED;
    } else {
        queue_job(s, job);
        s->jobs_count++;
        atomic_fetch_add_explicit(&s->changes, 1, memory_order_release);
        wakes = s->sleepers_count > 0;
    }
    pthread_mutex_unlock(&s->lock);
    if (wakes) { /* a thread that wakes in place of this one would only wait for the lock */
        pthread_cond_signal(&s->wake);
    }
    return err;
}

ep_cpu_counts ep_cpu_schedule_counts(ep_cpu_schedule *s)
{
    ep_cpu_counts counts = {0};
    for (uint32_t i = 0; i < s->threads; i++) {
        const cpu_worker *worker = &s->workers[i];
        counts.tasks_near += atomic_load_explicit(&worker->tasks_near, memory_order_relaxed);
        counts.tasks_far += atomic_load_explicit(&worker->tasks_far, memory_order_relaxed);
        counts.idle_ns += idle_sum(worker);
    }
    /* A stretch may end slightly before the clock is read here, so a reported sum never shrinks. */
    uint64_t told_ns = atomic_load(&s->idle_told_ns);
    while (told_ns < counts.idle_ns &&
           !atomic_compare_exchange_weak(&s->idle_told_ns, &told_ns, counts.idle_ns)) {
    }
    counts.idle_ns = told_ns > counts.idle_ns ? told_ns : counts.idle_ns;
    return counts;
}
