/* SPDX-License-Identifier: Apache-2.0 */
/* Timer service: a binary heap, one thread, one condition variable on CLOCK_MONOTONIC. */
#include "base/timer.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/thread.h"

struct ep_timer_service {
    pthread_mutex_t lock;
    pthread_cond_t wake; /* the earliest time changed, or stopping */
    pthread_cond_t idle; /* a callback returned */
    pthread_t thread;
    ep_timer **heap; /* 1-based */
    size_t count;
    size_t capacity;
    ep_timer *running;
    uint64_t wakes_ns; /* when the thread next wakes by itself; 0 while it is awake */
    bool stopping;
};

static void place(ep_timer_service *s, ep_timer *timer, size_t index)
{
    s->heap[index] = timer;
    timer->heap_index = index;
}

static void sift_up(ep_timer_service *s, size_t index)
{
    ep_timer *timer = s->heap[index];
    while (index > 1 && s->heap[index / 2]->due_ns > timer->due_ns) {
        place(s, s->heap[index / 2], index);
        index /= 2;
    }
    place(s, timer, index);
}

static void sift_down(ep_timer_service *s, size_t index)
{
    ep_timer *timer = s->heap[index];
    for (;;) {
        size_t child = index * 2;
        if (child > s->count) {
            break;
        }
        if (child < s->count && s->heap[child + 1]->due_ns < s->heap[child]->due_ns) {
            child++;
        }
        if (s->heap[child]->due_ns >= timer->due_ns) {
            break;
        }
        place(s, s->heap[child], index);
        index = child;
    }
    place(s, timer, index);
}

static void heap_remove(ep_timer_service *s, ep_timer *timer)
{
    size_t index = timer->heap_index;
    EP_ASSERT(index >= 1 && index <= s->count && s->heap[index] == timer);
    ep_timer *last = s->heap[s->count--];
    timer->heap_index = 0;
    if (last != timer) {
        place(s, last, index);
        sift_up(s, index);
        sift_down(s, last->heap_index);
    }
}

static void *timer_main(void *arg)
{
    ep_timer_service *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stopping) {
        ep_timer *timer = s->count > 0 ? s->heap[1] : NULL;
        if (timer == NULL || timer->due_ns > ep_clock_now_ns()) {
            s->wakes_ns = timer != NULL ? timer->due_ns : EP_TIME_NEVER;
            ep_clock_wait(&s->wake, &s->lock, s->wakes_ns);
            s->wakes_ns = 0;
            continue;
        }
        heap_remove(s, timer);
        s->running = timer;
        ep_timer_func func = timer->func;
        void *func_arg = timer->arg;
        pthread_mutex_unlock(&s->lock);
        func(timer, func_arg); /* may free the timer */
        pthread_mutex_lock(&s->lock);
        s->running = NULL;
        pthread_cond_broadcast(&s->idle);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

ep_err ep_timer_service_create(const char *name, ep_timer_service **out_service)
{
    ep_timer_service *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_cond_init(&s->idle, NULL);
    ep_err err = ep_thread_start(name, timer_main, s, &s->thread);
    if (err != EP_OK) {
        free(s);
        return err;
    }
    *out_service = s;
    return EP_OK;
}

void ep_timer_service_destroy(ep_timer_service *s)
{
    if (s == NULL) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->wake);
    pthread_cond_destroy(&s->idle);
    pthread_mutex_destroy(&s->lock);
    free(s->heap);
    free(s);
}

void ep_timer_init(ep_timer *timer, ep_timer_func func, void *arg)
{
    *timer = (ep_timer){.func = func, .arg = arg};
}

ep_err ep_timer_arm(ep_timer_service *s, ep_timer *timer, uint64_t due_ns)
{
    pthread_mutex_lock(&s->lock);
    if (timer->heap_index != 0) {
        heap_remove(s, timer);
    }
    if (s->count + 2 > s->capacity) {
        size_t capacity = s->capacity == 0 ? 64 : s->capacity * 2;
        ep_timer **heap = realloc(s->heap, capacity * sizeof(*heap));
        if (heap == NULL) {
            pthread_mutex_unlock(&s->lock);
            return EP_ERR_NO_MEMORY;
        }
        s->heap = heap;
        s->capacity = capacity;
    }
    timer->due_ns = due_ns;
    place(s, timer, ++s->count);
    sift_up(s, s->count);
    /* The thread still wakes at the time of a cancelled timer. So timers that are armed and
     * cancelled for every call cost a wake-up now and then instead of one each. */
    if (due_ns < s->wakes_ns) {
        s->wakes_ns = due_ns;
        pthread_cond_signal(&s->wake);
    }
    pthread_mutex_unlock(&s->lock);
    return EP_OK;
}

static bool cancel_locked(ep_timer_service *s, ep_timer *timer)
{
    bool armed = timer->heap_index != 0;
    if (armed) {
        heap_remove(s, timer);
    }
    return armed;
}

bool ep_timer_cancel(ep_timer_service *s, ep_timer *timer)
{
    pthread_mutex_lock(&s->lock);
    bool armed = cancel_locked(s, timer);
    pthread_mutex_unlock(&s->lock);
    return armed;
}

bool ep_timer_cancel_wait(ep_timer_service *s, ep_timer *timer)
{
    pthread_mutex_lock(&s->lock);
    bool armed = cancel_locked(s, timer);
    while (s->running == timer) {
        pthread_cond_wait(&s->idle, &s->lock);
        armed |= cancel_locked(s, timer); /* the callback may have re-armed it */
    }
    pthread_mutex_unlock(&s->lock);
    return armed;
}

bool ep_timer_on_thread(ep_timer_service *s)
{
    return pthread_equal(pthread_self(), s->thread) != 0;
}
