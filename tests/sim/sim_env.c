/* SPDX-License-Identifier: Apache-2.0 */
/* See sim_env.h. */
#include "sim_env.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "call/call.h"

ep_sim *sim_env;

void sim_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "%s:%d at %.6f s: ", file, line,
            sim_env != NULL ? (double)ep_sim_now_ns(sim_env) / 1e9 : 0.0);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    _Exit(1);
}

/* The linker's names for what is wrapped. */
uint64_t __wrap_ep_clock_now_ns(void);
uint64_t __wrap_ep_random_id(void);
int __wrap_pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex);
bool __wrap_ep_clock_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns);
ep_err __wrap_ep_thread_start(const char *name, void *(*func)(void *), void *arg,
                              pthread_t *out_thread);
int __wrap_pthread_join(pthread_t thread, void **out_result);
ep_err __wrap_ep_timer_service_create(const char *name, ep_timer_service **out_service);
void __wrap_ep_timer_service_destroy(ep_timer_service *service);
ep_err __wrap_ep_timer_arm(ep_timer_service *service, ep_timer *timer, uint64_t due_ns);
bool __wrap_ep_timer_cancel(ep_timer_service *service, ep_timer *timer);
bool __wrap_ep_timer_cancel_wait(ep_timer_service *service, ep_timer *timer);
bool __wrap_ep_timer_on_thread(ep_timer_service *service);
ep_err __wrap_ep_call_workers_create(ep_call_workers **out_workers);
void __wrap_ep_call_workers_destroy(ep_call_workers *workers);
void __wrap_ep_call_workers_post(ep_call_workers *workers, ep_call *call);
ep_err __wrap_ep_rpc_call_start(ep_rpc_channel *channel, const ep_rpc_request *request,
                                ep_rpc_reply_func on_reply, void *arg, ep_rpc_call_id *out_id,
                                ep_error *out_error);
ep_err __real_ep_rpc_call_start(ep_rpc_channel *channel, const ep_rpc_request *request,
                                ep_rpc_reply_func on_reply, void *arg, ep_rpc_call_id *out_id,
                                ep_error *out_error);
void __wrap_ep_combine(const ep_batch *batch, const ep_layer_shape *shape, const void *const *rows,
                       const void *const *row_scales, uint32_t token_begin, uint32_t token_end,
                       float *scratch, const ep_combine_out *out);
void __real_ep_combine(const ep_batch *batch, const ep_layer_shape *shape, const void *const *rows,
                       const void *const *row_scales, uint32_t token_begin, uint32_t token_end,
                       float *scratch, const ep_combine_out *out);

uint64_t __wrap_ep_clock_now_ns(void)
{
    return ep_sim_now_ns(sim_env);
}

uint64_t __wrap_ep_random_id(void)
{
    return ep_sim_random(sim_env) | 1;
}

ep_err __wrap_ep_rpc_call_start(ep_rpc_channel *channel, const ep_rpc_request *request,
                                ep_rpc_reply_func on_reply, void *arg, ep_rpc_call_id *out_id,
                                ep_error *out_error)
{
    sim_watch_call(request);
    return __real_ep_rpc_call_start(channel, request, on_reply, arg, out_id, out_error);
}

void __wrap_ep_combine(const ep_batch *batch, const ep_layer_shape *shape, const void *const *rows,
                       const void *const *row_scales, uint32_t token_begin, uint32_t token_end,
                       float *scratch, const ep_combine_out *out)
{
    sim_watch_combine(batch, token_begin, token_end);
    __real_ep_combine(batch, shape, rows, row_scales, token_begin, token_end, scratch, out);
}

/* ---- waiting ---- */

int __wrap_pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
    (void)cond;
    pthread_mutex_unlock(mutex);
    SIM_CHECK(ep_sim_run_one(sim_env), "nothing is left to happen, and something still waits");
    pthread_mutex_lock(mutex);
    return 0;
}

bool __wrap_ep_clock_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns)
{
    if (until_ns == EP_TIME_NEVER) {
        return __wrap_pthread_cond_wait(cond, lock) == 0;
    }
    pthread_mutex_unlock(lock);
    const bool in_time = ep_sim_next_ns(sim_env) <= until_ns;
    if (in_time) {
        ep_sim_run_one(sim_env);
    } else {
        ep_sim_run_until(sim_env, until_ns);
    }
    pthread_mutex_lock(lock);
    return in_time;
}

/* ---- threads ---- */

typedef struct sim_thread {
    ep_sim_event event;
    void *(*func)(void *);
    void *arg;
    bool done;
} sim_thread;

static void thread_run(ep_sim_event *event, void *arg)
{
    sim_thread *thread = arg;
    (void)event;
    thread->func(thread->arg);
    thread->done = true;
}

ep_err __wrap_ep_thread_start(const char *name, void *(*func)(void *), void *arg,
                              pthread_t *out_thread)
{
    sim_thread *thread = calloc(1, sizeof(*thread));
    (void)name;
    *thread = (sim_thread){.event = {.run = thread_run, .arg = thread}, .func = func, .arg = arg};
    ep_sim_post(sim_env, &thread->event, 0);
    *out_thread = (pthread_t)thread;
    return EP_OK;
}

int __wrap_pthread_join(pthread_t handle, void **out_result)
{
    sim_thread *thread = (sim_thread *)handle;
    while (!thread->done) {
        SIM_CHECK(ep_sim_run_one(sim_env), "nothing is left to happen, and a thread has not ended");
    }
    if (out_result != NULL) {
        *out_result = NULL;
    }
    free(thread);
    return 0;
}

/* ---- workers: one event that runs what was posted ---- */

struct ep_call_workers {
    ep_sim_event event;
    STAILQ_HEAD(, ep_call) queue;
};

static void workers_run(ep_sim_event *event, void *arg)
{
    ep_call_workers *workers = arg;
    ep_call *call = STAILQ_FIRST(&workers->queue);
    STAILQ_REMOVE_HEAD(&workers->queue, work);
    if (!STAILQ_EMPTY(&workers->queue)) {
        ep_sim_post(sim_env, event, ep_sim_now_ns(sim_env));
    }
    ep_call_run_handed(call);
}

ep_err __wrap_ep_call_workers_create(ep_call_workers **out_workers)
{
    *out_workers = calloc(1, sizeof(**out_workers));
    STAILQ_INIT(&(*out_workers)->queue);
    (*out_workers)->event = (ep_sim_event){.run = workers_run, .arg = *out_workers};
    return EP_OK;
}

void __wrap_ep_call_workers_destroy(ep_call_workers *workers)
{
    SIM_CHECK(STAILQ_EMPTY(&workers->queue),
              "calls wait for a worker after the end of their client");
    free(workers);
}

void __wrap_ep_call_workers_post(ep_call_workers *workers, ep_call *call)
{
    if (STAILQ_EMPTY(&workers->queue)) {
        ep_sim_post(sim_env, &workers->event, ep_sim_now_ns(sim_env));
    }
    STAILQ_INSERT_TAIL(&workers->queue, call, work);
}

/* ---- timers: an array, the earliest last ---- */

struct ep_timer_service {
    ep_sim_event event;
    ep_sim_host_id host;
    ep_timer **armed;
    size_t count;
    size_t capacity;
    ep_timer *running;
};

static void sync_event(ep_timer_service *service)
{
    if (service->count == 0) {
        ep_sim_cancel(sim_env, &service->event);
        return;
    }
    ep_sim_host_id old = ep_sim_enter(sim_env, service->host);
    ep_sim_post(sim_env, &service->event, service->armed[service->count - 1]->due_ns);
    ep_sim_enter(sim_env, old);
}

static void timers_run(ep_sim_event *event, void *arg)
{
    ep_timer_service *service = arg;
    (void)event;
    ep_timer *timer = service->armed[--service->count];
    timer->heap_index = 0;
    service->running = timer;
    sync_event(service);
    timer->func(timer, timer->arg);
    service->running = NULL;
}

ep_err __wrap_ep_timer_service_create(const char *name, ep_timer_service **out_service)
{
    ep_timer_service *service = calloc(1, sizeof(*service));
    (void)name;
    if (service == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    service->event = (ep_sim_event){.run = timers_run, .arg = service};
    service->host = ep_sim_current_host(sim_env);
    *out_service = service;
    return EP_OK;
}

void __wrap_ep_timer_service_destroy(ep_timer_service *service)
{
    if (service != NULL) {
        ep_sim_cancel(sim_env, &service->event);
        free(service->armed);
        free(service);
    }
}

bool __wrap_ep_timer_cancel(ep_timer_service *service, ep_timer *timer)
{
    if (timer->heap_index == 0) {
        return false;
    }
    size_t i = 0;
    while (service->armed[i] != timer) {
        i++;
    }
    memmove(&service->armed[i], &service->armed[i + 1],
            (service->count - i - 1) * sizeof(ep_timer *));
    service->count--;
    timer->heap_index = 0;
    if (i == service->count) {
        sync_event(service);
    }
    return true;
}

bool __wrap_ep_timer_cancel_wait(ep_timer_service *service, ep_timer *timer)
{
    SIM_CHECK(service->running != timer, "a timer's callback waits for itself");
    return __wrap_ep_timer_cancel(service, timer);
}

bool __wrap_ep_timer_on_thread(ep_timer_service *service)
{
    return service->running != NULL;
}

ep_err __wrap_ep_timer_arm(ep_timer_service *service, ep_timer *timer, uint64_t due_ns)
{
    __wrap_ep_timer_cancel(service, timer);
    if (service->count == service->capacity) {
        size_t grown = service->capacity == 0 ? 16 : 2 * service->capacity;
        ep_timer **armed = realloc(service->armed, grown * sizeof(*armed));
        if (armed == NULL) {
            return EP_ERR_NO_MEMORY;
        }
        service->armed = armed;
        service->capacity = grown;
    }
    timer->due_ns = due_ns;
    timer->heap_index = 1;
    size_t i = service->count++;
    for (; i > 0 && service->armed[i - 1]->due_ns <= due_ns;
         /* equal ones in the order they were armed */
         i--) {
        service->armed[i] = service->armed[i - 1];
    }
    service->armed[i] = timer;
    if (i + 1 == service->count) {
        sync_event(service);
    }
    return EP_OK;
}
