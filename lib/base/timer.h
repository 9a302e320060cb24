/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread that calls functions at given times: deadlines, pings, back-off. Used where there is
 * no event loop.
 *
 * Ownership  a timer is embedded in its owner, and borrowed by the service while armed.
 * Threads    all calls from any thread and from inside a callback, except _destroy, and
 *            ep_timer_cancel_wait of the timer whose callback is running. Callbacks run on the
 *            service's thread, one at a time, with no lock held; they must be short.
 */
#ifndef EP_BASE_TIMER_H
#define EP_BASE_TIMER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "expertd/error.h"

typedef struct ep_timer_service ep_timer_service;
typedef struct ep_timer ep_timer;
typedef void (*ep_timer_func)(ep_timer *timer, void *arg);

struct ep_timer {
    ep_timer_func func;
    void *arg;
    /* private */
    uint64_t due_ns;
    size_t heap_index; /* 1-based; 0: not armed */
};

/* name: thread name, up to 15 characters. Errors: NO_MEMORY, IO. */
ep_err ep_timer_service_create(const char *name, ep_timer_service **out_service);
/* Stops the thread; armed timers never fire. NULL allowed. Never from a callback. */
void ep_timer_service_destroy(ep_timer_service *service);

void ep_timer_init(ep_timer *timer, ep_timer_func func, void *arg);
/* Arms, or re-arms for another time. due_ns: ep_clock_now_ns() time. Errors: NO_MEMORY (not
 * armed). */
ep_err ep_timer_arm(ep_timer_service *service, ep_timer *timer, uint64_t due_ns);
/* True when it was armed and will not fire; false when not armed, already fired, or just firing. */
bool ep_timer_cancel(ep_timer_service *service, ep_timer *timer);
/* The same, and waits until a running callback of it has returned. Not from its own callback. */
bool ep_timer_cancel_wait(ep_timer_service *service, ep_timer *timer);
/* Whether the calling thread is the service's. */
bool ep_timer_on_thread(ep_timer_service *service);

#endif
