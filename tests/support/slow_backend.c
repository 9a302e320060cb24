/* SPDX-License-Identifier: Apache-2.0 */
#include "support/slow_backend.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "backends/host_common.h"
#include "backends/reference/reference_backend.h"
#include "base/check.h"
#include "base/random.h"
#include "base/thread.h"

/* the thread waits so long for more work, so that there is something to shuffle */
#define GATHER_NS (200 * 1000L)
#define GATHER_COUNT 4

/* ---- planned faults and counters, of all slow backends ---- */

typedef struct fault {
    uint64_t nth; /* 0: none planned */
    ep_err err;
} fault;

static pthread_mutex_t faults_lock = PTHREAD_MUTEX_INITIALIZER; /* of the next four */
static fault faults[EP_SLOW_OPERATIONS][2];
static uint64_t counts[EP_SLOW_OPERATIONS];
static bool device_lost;
static uint64_t shuffle_state = 1;
static _Atomic uint64_t overtakings;
static _Atomic uint64_t blocks_alive; /* not reset: blocks outlive a reset */

void ep_slow_backend_reset(uint64_t seed)
{
    pthread_mutex_lock(&faults_lock);
    memset(faults, 0, sizeof(faults));
    memset(counts, 0, sizeof(counts));
    device_lost = false;
    shuffle_state = seed;
    overtakings = 0;
    pthread_mutex_unlock(&faults_lock);
}

void ep_slow_backend_fail(ep_slow_operation operation, ep_slow_moment moment, uint64_t nth,
                          ep_err err)
{
    pthread_mutex_lock(&faults_lock);
    faults[operation][moment] = (fault){.nth = nth, .err = err};
    pthread_mutex_unlock(&faults_lock);
}

void ep_slow_backend_lose_device(void)
{
    pthread_mutex_lock(&faults_lock);
    device_lost = true;
    pthread_mutex_unlock(&faults_lock);
}

uint64_t ep_slow_backend_count(ep_slow_operation operation)
{
    pthread_mutex_lock(&faults_lock);
    uint64_t count = counts[operation];
    pthread_mutex_unlock(&faults_lock);
    return count;
}

uint64_t ep_slow_backend_blocks_alive(void)
{
    return blocks_alive;
}

uint64_t ep_slow_backend_overtakings(void)
{
    return overtakings;
}

/* faults_lock held. */
static ep_err planned(ep_slow_operation operation, ep_slow_moment moment)
{
    const fault *f = &faults[operation][moment];
    return f->nth != 0 && f->nth == counts[operation] ? f->err : EP_OK;
}

/* Counts a call. Returns the call's planned error, and in *out_later the error for its done(). */
static ep_err fault_at_call(ep_slow_operation operation, ep_err *out_later)
{
    pthread_mutex_lock(&faults_lock);
    counts[operation]++;
    ep_err now = device_lost ? EP_ERR_DEVICE_LOST : planned(operation, EP_SLOW_AT_CALL);
    *out_later = planned(operation, EP_SLOW_AT_DONE);
    pthread_mutex_unlock(&faults_lock);
    return now;
}

/* Returns DEVICE_LOST once the device is lost, else planned_err. */
static ep_err fault_at_done(ep_err planned_err)
{
    pthread_mutex_lock(&faults_lock);
    ep_err err = device_lost ? EP_ERR_DEVICE_LOST : planned_err;
    pthread_mutex_unlock(&faults_lock);
    return err;
}

static size_t random_below(size_t limit)
{
    pthread_mutex_lock(&faults_lock);
    uint64_t value = ep_splitmix64(&shuffle_state) % limit;
    pthread_mutex_unlock(&faults_lock);
    return (size_t)value;
}

/* ---- the device ---- */

/* One memfd, two mappings: `given` is PROT_NONE, for callers; `own` is private. */
struct ep_backend_memory {
    uint8_t *given;
    uint8_t *own;
    size_t bytes;
    struct ep_backend_memory *next;
};

typedef enum { WORK_COPY_IN, WORK_COPY_OUT, WORK_JOB } work_kind;

typedef struct slow_work {
    work_kind kind;
    ep_err err;     /* planned for done() */
    uint64_t order; /* of arrival */
    ep_job *job;
    uint8_t *own; /* copies: address in the private mapping */
    const void *const *from;
    void *const *to;
    size_t row_bytes;
    uint32_t rows_count;
    void (*done)(void *arg, ep_err result);
    void *arg;
} slow_work;

typedef struct slow_backend {
    ep_backend base;
    ep_backend *reference; /* holds the weights and computes */
    pthread_t thread;
    bool started;

    pthread_mutex_t lock; /* below */
    pthread_cond_t wake;
    ep_backend_memory *blocks;
    slow_work **works; /* waiting, any order */
    size_t works_count;
    size_t works_capacity;
    uint64_t next_order;
    uint32_t works_unfinished; /* waiting or running */
    bool stopping;
} slow_backend;

/* Lock held. Returns the private address of bytes at a given address; NULL: not wholly inside one
 * block. */
static uint8_t *to_own(slow_backend *backend, const void *address, size_t bytes)
{
    uintptr_t a = (uintptr_t)address;
    for (ep_backend_memory *m = backend->blocks; m != NULL; m = m->next) {
        uintptr_t start = (uintptr_t)m->given;
        if (a >= start && a - start <= m->bytes && bytes <= m->bytes - (a - start)) {
            return m->own + (a - start);
        }
    }
    return NULL;
}

static bool rows_are_ours(slow_backend *backend, const ep_job *job)
{
    const size_t x_bytes = job->weights->hidden * ep_dtype_bytes(job->x_dtype);
    const size_t out_bytes = job->weights->hidden * ep_dtype_bytes(job->out_dtype);
    bool ours = true;
    pthread_mutex_lock(&backend->lock);
    for (uint32_t r = 0; ours && r < job->rows_count; r++) {
        ours = to_own(backend, job->rows[r].x, x_bytes) != NULL &&
               to_own(backend, job->rows[r].out, out_bytes) != NULL;
    }
    pthread_mutex_unlock(&backend->lock);
    return ours;
}

/* A job of the reference backend, for which the slow backend's thread waits. */
typedef struct inner_job {
    ep_job job;
    ep_err result;
    sem_t done;
} inner_job;

static void on_computed(ep_job *job, ep_err result)
{
    inner_job *inner = job->arg;
    inner->result = result;
    sem_post(&inner->done);
}

static ep_err compute(slow_backend *backend, const ep_job *job)
{
    const size_t x_bytes = job->weights->hidden * ep_dtype_bytes(job->x_dtype);
    const size_t out_bytes = job->weights->hidden * ep_dtype_bytes(job->out_dtype);
    ep_job_row *rows = malloc(job->rows_count * sizeof(*rows));
    if (rows == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_lock(&backend->lock);
    for (uint32_t r = 0; r < job->rows_count; r++) {
        rows[r] = job->rows[r];
        rows[r].x = to_own(backend, job->rows[r].x, x_bytes);
        rows[r].out = to_own(backend, job->rows[r].out, out_bytes);
        EP_ASSERT(rows[r].x != NULL && rows[r].out != NULL);
    }
    pthread_mutex_unlock(&backend->lock);
    inner_job inner = {.job = *job};
    inner.job.rows = rows;
    inner.job.done = on_computed;
    inner.job.arg = &inner;
    sem_init(&inner.done, 0, 0);
    ep_err err = backend->reference->ops->submit(backend->reference, &inner.job);
    if (err == EP_OK) {
        while (sem_wait(&inner.done) != 0) {
        }
        err = inner.result;
    }
    sem_destroy(&inner.done);
    free(rows);
    return err;
}

static ep_err perform(slow_backend *backend, const slow_work *work)
{
    ep_err err = fault_at_done(work->err);
    if (err != EP_OK) {
        return err;
    }
    if (work->kind == WORK_JOB) {
        return compute(backend, work->job);
    }
    for (uint32_t r = 0; r < work->rows_count; r++) {
        uint8_t *own = work->own + r * work->row_bytes;
        if (work->kind == WORK_COPY_IN) {
            memcpy(own, work->from[r], work->row_bytes);
        } else {
            memcpy(work->to[r], own, work->row_bytes);
        }
    }
    return EP_OK;
}

/* Lock held. Waits up to GATHER_NS for more work. */
static void gather(slow_backend *backend)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += GATHER_NS;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    while (backend->works_count < GATHER_COUNT && !backend->stopping) {
        if (pthread_cond_timedwait(&backend->wake, &backend->lock, &until) != 0) {
            return;
        }
    }
}

/* Lock held; there is work. */
static slow_work *pick(slow_backend *backend)
{
    size_t index = random_below(backend->works_count);
    slow_work *work = backend->works[index];
    for (size_t i = 0; i < backend->works_count; i++) {
        if (backend->works[i]->order < work->order) {
            overtakings++;
            break;
        }
    }
    backend->works[index] = backend->works[--backend->works_count];
    return work;
}

static void *device_main(void *arg)
{
    slow_backend *backend = arg;
    pthread_mutex_lock(&backend->lock);
    for (;;) {
        if (backend->works_count == 0) {
            if (backend->stopping) {
                break;
            }
            pthread_cond_wait(&backend->wake, &backend->lock);
            continue;
        }
        gather(backend);
        slow_work *work = pick(backend);
        pthread_mutex_unlock(&backend->lock);
        ep_err result = perform(backend, work);
        pthread_mutex_lock(&backend->lock);
        backend->works_unfinished--;
        pthread_mutex_unlock(&backend->lock);
        if (work->kind == WORK_JOB) {
            work->job->done(work->job, result);
        } else {
            work->done(work->arg, result);
        }
        free(work);
        pthread_mutex_lock(&backend->lock);
    }
    pthread_mutex_unlock(&backend->lock);
    return NULL;
}

/* Lock held. Makes room for one more work; false at the limit. */
static bool make_room(slow_backend *backend)
{
    if (backend->works_count < backend->works_capacity) {
        return true;
    }
    if (backend->works_count >= EP_BACKEND_JOBS_MAX) {
        return false;
    }
    size_t capacity = backend->works_capacity == 0 ? 64 : 2 * backend->works_capacity;
    slow_work **works = realloc(backend->works, capacity * sizeof(*works));
    if (works == NULL) {
        return false;
    }
    backend->works = works;
    backend->works_capacity = capacity;
    return true;
}

/* Takes a copy of *work on success. */
static ep_err enqueue(slow_backend *backend, const slow_work *work)
{
    slow_work *copy = malloc(sizeof(*copy));
    if (copy == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    *copy = *work;
    pthread_mutex_lock(&backend->lock);
    if (!make_room(backend)) {
        pthread_mutex_unlock(&backend->lock);
        free(copy);
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    copy->order = backend->next_order++;
    backend->works[backend->works_count++] = copy;
    backend->works_unfinished++;
    pthread_cond_signal(&backend->wake);
    pthread_mutex_unlock(&backend->lock);
    return EP_OK;
}

static void slow_close(ep_backend *base)
{
    slow_backend *backend = (slow_backend *)base;
    if (backend == NULL) {
        return;
    }
    if (backend->started) {
        pthread_mutex_lock(&backend->lock);
        EP_ASSERT(backend->works_unfinished == 0);
        backend->stopping = true;
        pthread_cond_signal(&backend->wake);
        pthread_mutex_unlock(&backend->lock);
        pthread_join(backend->thread, NULL);
    }
    EP_ASSERT(backend->blocks == NULL);
    backend->reference->ops->close(backend->reference);
    pthread_mutex_destroy(&backend->lock);
    pthread_cond_destroy(&backend->wake);
    free(backend->works);
    free(backend);
}

static ep_err slow_open(const ep_backend_config *config, ep_backend **out_backend,
                        ep_error *out_error)
{
    slow_backend *backend = calloc(1, sizeof(*backend));
    if (backend == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for backend slow");
    }
    ep_backend_config portable = *config;
    portable.numerics = EP_NUMERICS_PORTABLE;
    ep_err err = ep_backend_reference_ops.open(&portable, &backend->reference, out_error);
    if (err != EP_OK) {
        free(backend);
        return err;
    }
    backend->base.ops = &ep_slow_backend_ops;
    pthread_mutex_init(&backend->lock, NULL);
    pthread_cond_init(&backend->wake, NULL);
    if (ep_thread_start("ep-slow", device_main, backend, &backend->thread) != EP_OK) {
        slow_close(&backend->base);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "backend slow cannot start its thread");
    }
    backend->started = true;
    *out_backend = &backend->base;
    return EP_OK;
}

static ep_err slow_numerics_id(ep_backend *base, ep_weight_format format, bool wide_inputs,
                               uint32_t others, char out_id[EP_NUMERICS_ID_BYTES])
{
    ep_backend *reference = ((slow_backend *)base)->reference;
    return reference->ops->numerics_id(reference, format, wide_inputs, others, out_id);
}

static size_t slow_weights_bytes(ep_backend *base, const ep_expert_source *source)
{
    ep_backend *reference = ((slow_backend *)base)->reference;
    return reference->ops->weights_bytes(reference, source);
}

static ep_err slow_weights_load(ep_backend *base, const ep_expert_source *source,
                                ep_backend_weights **out_weights, ep_error *out_error)
{
    ep_backend *reference = ((slow_backend *)base)->reference;
    if (fault_at_done(EP_OK) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_DEVICE_LOST, "backend slow: the device is lost");
    }
    return reference->ops->weights_load(reference, source, out_weights, out_error);
}

static void slow_weights_unload(ep_backend *base, ep_backend_weights *weights)
{
    ep_backend *reference = ((slow_backend *)base)->reference;
    reference->ops->weights_unload(reference, weights);
}

static ep_err slow_submit(ep_backend *base, ep_job *job)
{
    slow_backend *backend = (slow_backend *)base;
    slow_work work = {.kind = WORK_JOB, .job = job};
    ep_err err = ep_job_check(job);
    if (err == EP_OK && !rows_are_ours(backend, job)) {
        err = EP_ERR_INVALID_ARGUMENT;
    }
    if (err == EP_OK) {
        err = fault_at_call(EP_SLOW_SUBMIT, &work.err);
    }
    return err != EP_OK ? err : enqueue(backend, &work);
}

static ep_err slow_memory_alloc(ep_backend *base, size_t bytes, ep_backend_memory **out_memory)
{
    slow_backend *backend = (slow_backend *)base;
    ep_err later;
    ep_err err = fault_at_call(EP_SLOW_ALLOC, &later);
    if (err != EP_OK) {
        return err;
    }
    ep_backend_memory *memory = calloc(1, sizeof(*memory));
    int fd = memfd_create("ep-slow-backend", MFD_CLOEXEC);
    if (memory == NULL || fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        goto fail;
    }
    memory->bytes = bytes;
    memory->given = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    if (memory->given == MAP_FAILED) {
        goto fail;
    }
    memory->own = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory->own == MAP_FAILED) {
        munmap(memory->given, bytes);
        goto fail;
    }
    close(fd);
    pthread_mutex_lock(&backend->lock);
    memory->next = backend->blocks;
    backend->blocks = memory;
    pthread_mutex_unlock(&backend->lock);
    blocks_alive++;
    *out_memory = memory;
    return EP_OK;

fail:
    if (fd >= 0) {
        close(fd);
    }
    free(memory);
    return EP_ERR_NO_MEMORY;
}

static void slow_memory_free(ep_backend *base, ep_backend_memory *memory)
{
    slow_backend *backend = (slow_backend *)base;
    pthread_mutex_lock(&backend->lock);
    ep_backend_memory **link = &backend->blocks;
    while (*link != NULL && *link != memory) {
        link = &(*link)->next;
    }
    EP_ASSERT(*link == memory);
    *link = memory->next;
    pthread_mutex_unlock(&backend->lock);
    munmap(memory->given, memory->bytes);
    munmap(memory->own, memory->bytes);
    free(memory);
    blocks_alive--;
}

static void *slow_memory_address(ep_backend_memory *memory)
{
    return memory->given;
}

static ep_err enqueue_copy(ep_backend *base, ep_backend_memory *memory, size_t offset,
                           ep_slow_operation operation, slow_work work)
{
    size_t bytes;
    if (!ep_mul_size(work.row_bytes, work.rows_count, &bytes) || offset > memory->bytes ||
        bytes > memory->bytes - offset) {
        return EP_ERR_INVALID_ARGUMENT;
    }
    work.own = memory->own + offset;
    ep_err err = fault_at_call(operation, &work.err);
    return err != EP_OK ? err : enqueue((slow_backend *)base, &work);
}

static ep_err slow_copy_in(ep_backend *base, ep_backend_memory *memory, size_t offset,
                           const void *const *rows, size_t row_bytes, uint32_t rows_count,
                           void (*done)(void *arg, ep_err result), void *arg)
{
    return enqueue_copy(base, memory, offset, EP_SLOW_COPY_IN,
                        (slow_work){.kind = WORK_COPY_IN,
                                    .from = rows,
                                    .row_bytes = row_bytes,
                                    .rows_count = rows_count,
                                    .done = done,
                                    .arg = arg});
}

static ep_err slow_copy_out(ep_backend *base, ep_backend_memory *memory, size_t offset,
                            void *const *rows, size_t row_bytes, uint32_t rows_count,
                            void (*done)(void *arg, ep_err result), void *arg)
{
    return enqueue_copy(base, memory, offset, EP_SLOW_COPY_OUT,
                        (slow_work){.kind = WORK_COPY_OUT,
                                    .to = rows,
                                    .row_bytes = row_bytes,
                                    .rows_count = rows_count,
                                    .done = done,
                                    .arg = arg});
}

const ep_backend_ops ep_slow_backend_ops = {
    .api_version = EP_BACKEND_API_VERSION,
    .name = "slow",
    .memory = EP_MEMORY_ASCEND,
    .open = slow_open,
    .close = slow_close,
    .numerics_id = slow_numerics_id,
    .weights_bytes = slow_weights_bytes,
    .weights_load = slow_weights_load,
    .weights_unload = slow_weights_unload,
    .submit = slow_submit,
    .memory_alloc = slow_memory_alloc,
    .memory_free = slow_memory_free,
    .memory_address = slow_memory_address,
    .copy_in = slow_copy_in,
    .copy_out = slow_copy_out,
};
