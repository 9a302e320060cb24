/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker threads, each with a libuv loop. Jobs run before and after each wait, so a job that a
 * callback of the loop pushes needs no wake-up. Another thread wakes the loop only when it sleeps,
 * and only once.
 */
#include <sched.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/thread.h"
#include "transport/lane_common.h"
#include "transport/uv/uv_lane.h"

#define SPINS_PER_YIELD 8

typedef struct uv_lane {
    pthread_mutex_t lock;
    bool running;
    uint32_t count;
    ep_uv_loop_worker workers[EP_LANE_THREADS_MAX];
} uv_lane;

static uv_lane lane = {.lock = PTHREAD_MUTEX_INITIALIZER};
static uint32_t next_worker;                /* atomic */
static uint64_t busy_poll_ns;               /* atomic */
static uint64_t polls;                      /* atomic */
static __thread ep_uv_loop_worker *current; /* the worker of the present thread */

void ep_stream_lane_set_busy_poll(uint32_t microseconds)
{
    __atomic_store_n(&busy_poll_ns, microseconds * EP_NS_PER_US, __ATOMIC_RELAXED);
}

uint64_t ep_stream_lane_busy_poll_ns(void)
{
    return __atomic_load_n(&busy_poll_ns, __ATOMIC_RELAXED);
}

uint64_t ep_uv_polls(void)
{
    return __atomic_load_n(&polls, __ATOMIC_RELAXED);
}

/* ---- on a worker's thread ---- */

/* Runs all jobs. Lock held, dropped while a job runs. */
static void run_jobs_locked(ep_uv_loop_worker *worker)
{
    while (worker->jobs.head != NULL) {
        ep_lane_job *job = ep_lane_jobs_pop(&worker->jobs);
        pthread_mutex_unlock(&worker->lock);
        job->run(job); /* may free its owner */
        pthread_mutex_lock(&worker->lock);
    }
}

/* During busy polling: yields now and then to others that need this core, perhaps the peer. */
static void on_spin(uv_idle_t *spin)
{
    ep_uv_loop_worker *worker = spin->data;
    __atomic_fetch_add(&polls, 1, __ATOMIC_RELAXED);
    if (++worker->spins % SPINS_PER_YIELD == 0) {
        sched_yield();
    }
}

static void before_wait(uv_prepare_t *handle)
{
    ep_uv_loop_worker *worker = handle->data;
    const uint64_t poll_ns = __atomic_load_n(&busy_poll_ns, __ATOMIC_RELAXED);
    pthread_mutex_lock(&worker->lock);
    run_jobs_locked(worker);
    /* else it looks again at once */
    worker->sleeping =
        poll_ns == 0 || worker->heard_ns == 0 || ep_clock_now_ns() - worker->heard_ns >= poll_ns;
    if (worker->sleeping) {
        uv_idle_stop(&worker->spin);
    } else {
        uv_idle_start(&worker->spin, on_spin); /* nothing when it is active already */
    }
    pthread_mutex_unlock(&worker->lock);
}

static void close_own_handles(ep_uv_loop_worker *worker)
{
    uv_handle_t *handles[] = {(uv_handle_t *)&worker->wake, (uv_handle_t *)&worker->before,
                              (uv_handle_t *)&worker->after, (uv_handle_t *)&worker->spin};
    for (size_t i = 0; i < EP_ARRAY_COUNT(handles); i++) {
        uv_close(handles[i], NULL);
    }
}

static void after_wait(uv_check_t *handle)
{
    ep_uv_loop_worker *worker = handle->data;
    pthread_mutex_lock(&worker->lock);
    worker->sleeping = false;
    const bool stopping = worker->stopping;
    run_jobs_locked(worker);
    pthread_mutex_unlock(&worker->lock);
    if (stopping) {
        close_own_handles(worker); /* nothing else is open, so the loop ends */
    }
}

static void on_wake(uv_async_t *handle)
{
    (void)handle;
}

static void *worker_main(void *arg)
{
    ep_uv_loop_worker *worker = arg;
    current = worker;
    uv_run(&worker->loop, UV_RUN_DEFAULT);
    return NULL;
}

/* ---- from any thread ---- */

static ep_err worker_open(ep_uv_loop_worker *worker)
{
    *worker = (ep_uv_loop_worker){.lock = PTHREAD_MUTEX_INITIALIZER};
    if (uv_loop_init(&worker->loop) != 0) {
        return EP_ERR_IO;
    }
    if (uv_async_init(&worker->loop, &worker->wake, on_wake) != 0) {
        uv_loop_close(&worker->loop);
        return EP_ERR_IO;
    }
    uv_prepare_init(&worker->loop, &worker->before);
    uv_check_init(&worker->loop, &worker->after);
    uv_idle_init(&worker->loop, &worker->spin);
    worker->before.data = worker;
    worker->after.data = worker;
    worker->spin.data = worker;
    uv_prepare_start(&worker->before, before_wait);
    uv_check_start(&worker->after, after_wait);
    if (ep_thread_start("ep-lane-loop", worker_main, worker, &worker->thread) != EP_OK) {
        close_own_handles(worker);
        uv_run(&worker->loop, UV_RUN_DEFAULT);
        uv_loop_close(&worker->loop);
        return EP_ERR_IO;
    }
    return EP_OK;
}

static void worker_stop(ep_uv_loop_worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    worker->stopping = true;
    pthread_mutex_unlock(&worker->lock);
    uv_async_send(&worker->wake);
    pthread_join(worker->thread, NULL);
    EP_ASSERT(uv_loop_close(&worker->loop) == 0);
    pthread_mutex_destroy(&worker->lock);
}

static void forget(void)
{
    lane = (uv_lane){.lock = PTHREAD_MUTEX_INITIALIZER};
    current = NULL;
}

ep_err ep_uv_loop_workers_start(ep_error *out_error)
{
    ep_err err = EP_OK;
    ep_lane_fork_hook(forget);
    pthread_mutex_lock(&lane.lock);
    if (!lane.running) {
        uint32_t wanted = ep_lane_threads_count();
        for (lane.count = 0; lane.count < wanted && err == EP_OK; lane.count += err == EP_OK) {
            err = worker_open(&lane.workers[lane.count]);
        }
        lane.running = lane.count > 0; /* fewer workers are enough */
        err = lane.running ? EP_OK : err;
    }
    pthread_mutex_unlock(&lane.lock);
    return err == EP_OK
               ? EP_OK
               : ep_error_set(out_error, err, "cannot start the threads of the network lane");
}

ep_uv_loop_worker *ep_uv_loop_worker_choose(void)
{
    return &lane.workers[__atomic_fetch_add(&next_worker, 1, __ATOMIC_RELAXED) % lane.count];
}

bool ep_uv_loop_worker_push(ep_uv_loop_worker *worker, ep_lane_job *job)
{
    bool wake = false;
    pthread_mutex_lock(&worker->lock);
    bool added = ep_lane_jobs_push(&worker->jobs, job);
    if (added) {
        wake = worker->sleeping && current != worker;
        worker->sleeping = worker->sleeping && !wake;
    }
    pthread_mutex_unlock(&worker->lock);
    if (wake) {
        uv_async_send(&worker->wake);
    }
    return added;
}

void ep_uv_fini(void)
{
    pthread_mutex_lock(&lane.lock);
    for (uint32_t i = 0; lane.running && i < lane.count; i++) {
        worker_stop(&lane.workers[i]);
    }
    lane.running = false;
    pthread_mutex_unlock(&lane.lock);
}
