/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop of a program, for signals, timers and work posted from other threads. Data frames
 * never pass through it.
 *
 * Signals    first SIGTERM or SIGINT: on_stop. A second one ends the process at once with 128 +
 *            signal number. SIGHUP: on_reload.
 * Watchdog   if the service manager has one, the loop itself notifies it, and only while is_alive
 *            returns true. So a stuck loop counts as a stuck program, and stuck other parts do too.
 * Threads    _post and _quit from any thread; everything else on the thread that runs the loop.
 *            Tasks and timers run on that thread, in order.
 */
#ifndef EP_SERVER_COMMON_SERVICE_LOOP_H
#define EP_SERVER_COMMON_SERVICE_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct ep_service_loop ep_service_loop;

typedef struct ep_service_loop_handler {
    void (*on_stop)(void *arg, const char *signal_name); /* required */
    void (*on_reload)(void *arg);                        /* NULL: SIGHUP is ignored */
    bool (*is_alive)(void *arg); /* asked every tick, on the loop's thread; NULL: always */
    void *arg;
} ep_service_loop_handler;

/* Work for the loop's thread, a member of its owner. Zero it, then set func and arg. */
typedef struct ep_loop_task {
    void (*func)(void *arg);
    void *arg;
    /* private */
    struct ep_loop_task *next;
    bool is_queued;
} ep_loop_task;

/* A repeating or single timer. */
typedef struct ep_loop_timer ep_loop_timer;

/* Takes over the three signals. One loop per process. Errors: NO_MEMORY, IO. */
ep_err ep_service_loop_create(const ep_service_loop_handler *handler, ep_service_loop **out_loop,
                              ep_error *out_error);
/* False: SIGTERM and SIGINT end the process at once with exit code 0, until this is called with
 * true. For a start that waits for other processes. */
void ep_service_loop_catch_stop(ep_service_loop *loop, bool is_caught);
/* After _run returned. Tasks still queued never run. */
void ep_service_loop_destroy(ep_service_loop *loop);
/* Runs until _quit; may be run again. */
void ep_service_loop_run(ep_service_loop *loop);
void ep_service_loop_quit(ep_service_loop *loop);
/* Queues a task unless it is queued already. Cannot fail. */
void ep_service_loop_post(ep_service_loop *loop, ep_loop_task *task);
/* Removes a task if it is queued. Call it after the last post and before its owner is freed, on the
 * loop's thread or while the loop does not run. */
void ep_service_loop_cancel(ep_service_loop *loop, ep_loop_task *task);

/* Errors: NO_MEMORY. Freed with the loop. */
ep_err ep_service_loop_timer_create(ep_service_loop *loop, void (*func)(void *arg), void *arg,
                                    ep_loop_timer **out_timer);
/* (Re)starts it: first call after delay_ms, then every repeat_ms (0: once). */
void ep_loop_timer_start(ep_loop_timer *timer, uint64_t delay_ms, uint64_t repeat_ms);
void ep_loop_timer_stop(ep_loop_timer *timer);

/* Time since the loop's last iteration. There is one at least every EP_SERVICE_LOOP_TICK_MS. Any
 * thread. */
#define EP_SERVICE_LOOP_TICK_MS 1000
uint64_t ep_service_loop_idle_ms(const ep_service_loop *loop);

#endif
