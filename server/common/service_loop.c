/* SPDX-License-Identifier: Apache-2.0 */
/* The event loop over libuv. */
#include "common/service_loop.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#include <uv.h>

#include "base/check.h"
#include "base/clock.h"
#include "common/sd_notify.h"

#define SIGNALS_COUNT 3
static const int signals[SIGNALS_COUNT] = {SIGTERM, SIGINT, SIGHUP};

struct ep_loop_timer {
    uv_timer_t timer; /* first: libuv's close callback frees the whole */
    void (*func)(void *arg);
    void *arg;
};

struct ep_service_loop {
    uv_loop_t uv;
    uv_signal_t signal_handles[SIGNALS_COUNT];
    uv_async_t wake;
    uv_timer_t tick;
    ep_service_loop_handler handler;
    bool stopping;
    bool tells_watchdog;
    _Atomic uint64_t last_turn_ns;
    _Atomic bool quit;
    pthread_mutex_t lock; /* the task list */
    ep_loop_task *tasks;
    ep_loop_task **tasks_end;
};

static void on_signal(uv_signal_t *handle, int number)
{
    ep_service_loop *loop = handle->data;
    if (number == SIGHUP) {
        if (loop->handler.on_reload != NULL) {
            loop->handler.on_reload(loop->handler.arg);
        }
        return;
    }
    if (loop->stopping) {
        _exit(128 + number);
    }
    loop->stopping = true;
    loop->handler.on_stop(loop->handler.arg, number == SIGTERM ? "SIGTERM" : "SIGINT");
}

static ep_loop_task *take_task(ep_service_loop *loop)
{
    pthread_mutex_lock(&loop->lock);
    ep_loop_task *task = loop->tasks;
    if (task != NULL) {
        loop->tasks = task->next;
        if (loop->tasks == NULL) {
            loop->tasks_end = &loop->tasks;
        }
        task->next = NULL;
        task->is_queued = false;
    }
    pthread_mutex_unlock(&loop->lock);
    return task;
}

static void on_wake(uv_async_t *handle)
{
    ep_service_loop *loop = handle->data;
    ep_loop_task *task;
    while ((task = take_task(loop)) != NULL) {
        task->func(task->arg);
    }
    if (atomic_load(&loop->quit)) {
        uv_stop(&loop->uv);
    }
}

static void on_tick(uv_timer_t *handle)
{
    ep_service_loop *loop = handle->data;
    atomic_store_explicit(&loop->last_turn_ns, ep_clock_now_ns(), memory_order_relaxed);
    bool is_alive = loop->handler.is_alive == NULL || loop->handler.is_alive(loop->handler.arg);
    if (loop->tells_watchdog && is_alive) {
        ep_sd_notify_watchdog();
    }
}

/* Opens the handles. After a failure close_all closes those that are open. */
static int open_handles(ep_service_loop *loop)
{
    int rc = uv_async_init(&loop->uv, &loop->wake, on_wake);
    loop->wake.data = loop;
    for (int i = 0; rc == 0 && i < SIGNALS_COUNT; i++) {
        rc = uv_signal_init(&loop->uv, &loop->signal_handles[i]);
        loop->signal_handles[i].data = loop;
        rc = rc == 0 ? uv_signal_start(&loop->signal_handles[i], on_signal, signals[i]) : rc;
    }
    if (rc != 0) {
        return rc;
    }
    uint64_t tick_ms = EP_SERVICE_LOOP_TICK_MS;
    uint64_t watchdog_ms = ep_sd_watchdog_us() / 1000;
    loop->tells_watchdog = watchdog_ms != 0;
    if (loop->tells_watchdog && watchdog_ms / 2 < tick_ms) {
        tick_ms = watchdog_ms / 2 > 0 ? watchdog_ms / 2 : 1;
    }
    uv_timer_init(&loop->uv, &loop->tick);
    loop->tick.data = loop;
    return uv_timer_start(&loop->tick, on_tick, tick_ms, tick_ms);
}

static void free_timer(uv_handle_t *handle)
{
    free(handle);
}

static void close_one(uv_handle_t *handle, void *arg)
{
    ep_service_loop *loop = arg;
    if (uv_is_closing(handle)) {
        return;
    }
    bool is_user_timer = handle->type == UV_TIMER && handle != (uv_handle_t *)&loop->tick;
    uv_close(handle, is_user_timer ? free_timer : NULL);
}

static void close_all(ep_service_loop *loop)
{
    uv_walk(&loop->uv, close_one, loop);
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    int rc = uv_loop_close(&loop->uv);
    EP_ASSERT(rc == 0);
}

ep_err ep_service_loop_create(const ep_service_loop_handler *handler, ep_service_loop **out_loop,
                              ep_error *out_error)
{
    ep_service_loop *loop = calloc(1, sizeof(*loop));
    if (loop == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the event loop");
    }
    loop->handler = *handler;
    loop->tasks_end = &loop->tasks;
    atomic_store(&loop->last_turn_ns, ep_clock_now_ns());
    int rc = uv_loop_init(&loop->uv);
    if (rc != 0) {
        free(loop);
        return ep_error_set(out_error, EP_ERR_IO, "cannot make the event loop: %s",
                            uv_strerror(rc));
    }
    pthread_mutex_init(&loop->lock, NULL);
    rc = open_handles(loop);
    if (rc != 0) {
        ep_service_loop_destroy(loop);
        return ep_error_set(out_error, EP_ERR_IO, "cannot set up the event loop: %s",
                            uv_strerror(rc));
    }
    *out_loop = loop;
    return EP_OK;
}

static void end_at_once(int number)
{
    (void)number;
    _exit(0);
}

void ep_service_loop_catch_stop(ep_service_loop *loop, bool is_caught)
{
    for (int i = 0; i < SIGNALS_COUNT; i++) {
        if (signals[i] == SIGHUP) {
            continue;
        }
        if (is_caught) {
            (void)uv_signal_start(&loop->signal_handles[i], on_signal, signals[i]);
        } else {
            /* a handler, since the default action is ignored for a container's first process */
            const struct sigaction action = {.sa_handler = end_at_once};
            uv_signal_stop(&loop->signal_handles[i]);
            (void)sigaction(signals[i], &action, NULL);
        }
    }
}

void ep_service_loop_destroy(ep_service_loop *loop)
{
    if (loop != NULL) {
        close_all(loop);
        pthread_mutex_destroy(&loop->lock);
        free(loop);
    }
}

void ep_service_loop_run(ep_service_loop *loop)
{
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    /* a quit before run ends that run; one after a run ends the next */
    atomic_store(&loop->quit, false);
}

void ep_service_loop_quit(ep_service_loop *loop)
{
    atomic_store(&loop->quit, true);
    uv_async_send(&loop->wake);
}

void ep_service_loop_post(ep_service_loop *loop, ep_loop_task *task)
{
    pthread_mutex_lock(&loop->lock);
    if (!task->is_queued) {
        task->is_queued = true;
        task->next = NULL;
        *loop->tasks_end = task;
        loop->tasks_end = &task->next;
    }
    pthread_mutex_unlock(&loop->lock);
    uv_async_send(&loop->wake);
}

void ep_service_loop_cancel(ep_service_loop *loop, ep_loop_task *task)
{
    pthread_mutex_lock(&loop->lock);
    for (ep_loop_task **link = &loop->tasks; *link != NULL; link = &(*link)->next) {
        if (*link == task) {
            *link = task->next;
            if (loop->tasks_end == &task->next) {
                loop->tasks_end = link;
            }
            task->next = NULL;
            task->is_queued = false;
            break;
        }
    }
    pthread_mutex_unlock(&loop->lock);
}

static void on_user_timer(uv_timer_t *handle)
{
    ep_loop_timer *timer = (ep_loop_timer *)handle;
    timer->func(timer->arg);
}

ep_err ep_service_loop_timer_create(ep_service_loop *loop, void (*func)(void *arg), void *arg,
                                    ep_loop_timer **out_timer)
{
    ep_loop_timer *timer = calloc(1, sizeof(*timer));
    if (timer == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    timer->func = func;
    timer->arg = arg;
    uv_timer_init(&loop->uv, &timer->timer);
    *out_timer = timer;
    return EP_OK;
}

void ep_loop_timer_start(ep_loop_timer *timer, uint64_t delay_ms, uint64_t repeat_ms)
{
    uv_update_time(timer->timer.loop); /* the loop's cached time is as old as this iteration */
    uv_timer_start(&timer->timer, on_user_timer, delay_ms, repeat_ms);
}

void ep_loop_timer_stop(ep_loop_timer *timer)
{
    uv_timer_stop(&timer->timer);
}

uint64_t ep_service_loop_idle_ms(const ep_service_loop *loop)
{
    uint64_t now = ep_clock_now_ns();
    uint64_t last = atomic_load_explicit(&loop->last_turn_ns, memory_order_relaxed);
    return now > last ? (now - last) / EP_NS_PER_MS : 0;
}
