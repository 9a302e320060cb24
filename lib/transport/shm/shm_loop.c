/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lane's threads. Each sleeps in epoll, then handles its events and runs posted jobs. A
 * connection belongs to one thread for its life. No timer or list is kept per connection, so a
 * thousand idle ones cost no wake-up.
 */
#include "transport/shm/shm_lane.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/thread.h"
#include "transport/lane_common.h"

#define EVENTS_MAX 64
#define LAZY_NS (1 * EP_NS_PER_MS)

typedef struct shm_lane {
    pthread_mutex_t lock;
    uint32_t loops_count; /* 0: not started */
    uint32_t next;        /* atomic */
    shm_loop loops[EP_LANE_THREADS_MAX];
} shm_lane;

static shm_lane lane = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void forget(void)
{
    lane = (shm_lane){.lock = PTHREAD_MUTEX_INITIALIZER};
}

/* ---- posting ---- */

static bool on_thread(const shm_loop *loop)
{
    return pthread_equal(loop->thread, pthread_self()) != 0;
}

static void ring_self(shm_loop *loop)
{
    uint64_t one = 1;
    ssize_t n = write(loop->wake, &one, sizeof(one));
    (void)n; /* it fails only when a wake-up is already there */
}

/* Lock held, so that the loop stays alive. */
static void wake(shm_loop *loop)
{
    if (!loop->woken && !on_thread(loop)) {
        loop->woken = true;
        ring_self(loop);
    }
}

bool ep_shm_loop_post(shm_loop *loop, ep_lane_job *job)
{
    pthread_mutex_lock(&loop->lock);
    bool added = ep_lane_jobs_push(&loop->posted, job);
    wake(loop);
    pthread_mutex_unlock(&loop->lock);
    return added;
}

void ep_shm_loop_hurry(shm_loop *loop)
{
    pthread_mutex_lock(&loop->lock);
    wake(loop);
    pthread_mutex_unlock(&loop->lock);
}

void ep_shm_loop_post_lazy(shm_loop *loop, ep_lane_job *job)
{
    struct itimerspec soon = {.it_value = {.tv_nsec = LAZY_NS}};
    pthread_mutex_lock(&loop->lock);
    ep_lane_jobs_push(&loop->posted, job);
    if (!loop->woken && !loop->timer_armed && !on_thread(loop)) {
        loop->timer_armed = true;
        timerfd_settime(loop->timer, 0, &soon, NULL);
    }
    pthread_mutex_unlock(&loop->lock);
}

/* ---- the thread ---- */

/* Runs the jobs posted until now. */
static void run_posted(shm_loop *loop)
{
    pthread_mutex_lock(&loop->lock);
    loop->woken = false;
    const ep_lane_job *last = loop->posted.tail;
    for (const ep_lane_job *ran = NULL; ran != last;) {
        ep_lane_job *job = ep_lane_jobs_pop(&loop->posted);
        ran = job;
        pthread_mutex_unlock(&loop->lock);
        job->run(job); /* may free its owner, may post again */
        pthread_mutex_lock(&loop->lock);
    }
    pthread_mutex_unlock(&loop->lock);
}

/* Runs the jobs that are due; returns when the next one is. */
static uint64_t run_due(shm_loop *loop)
{
    uint64_t now_ns = loop->later != NULL ? ep_clock_now_ns() : 0;
    uint64_t next_ns;
    for (ep_lane_job *job; (job = ep_lane_later_take(&loop->later, now_ns, &next_ns)) != NULL;) {
        job->run(job); /* may change the list */
    }
    return next_ns;
}

/* 0: do not sleep, because a job is posted. -1: no limit. */
static int sleep_ms(shm_loop *loop, uint64_t next_ns)
{
    pthread_mutex_lock(&loop->lock);
    bool busy = loop->posted.head != NULL;
    pthread_mutex_unlock(&loop->lock);
    if (busy) {
        return 0;
    }
    if (next_ns == EP_TIME_NEVER) {
        return -1;
    }
    uint64_t now_ns = ep_clock_now_ns();
    return next_ns <= now_ns ? 0 : (int)((next_ns - now_ns) / EP_NS_PER_MS) + 1;
}

static void on_wake(shm_source *source, uint32_t events)
{
    (void)source;
    /* the event only wakes the thread; edge-triggered, so the counter need not be read */
    (void)events;
}

static void on_timer(shm_source *source, uint32_t events)
{
    shm_loop *loop = (shm_loop *)(void *)((char *)source - offsetof(shm_loop, timer_source));
    (void)events;
    pthread_mutex_lock(&loop->lock);
    loop->timer_armed = false;
    pthread_mutex_unlock(&loop->lock);
}

static void *loop_main(void *arg)
{
    shm_loop *loop = arg;
    struct epoll_event events[EVENTS_MAX];
    for (;;) {
        pthread_mutex_lock(&loop->lock);
        bool stop = loop->stopping;
        pthread_mutex_unlock(&loop->lock);
        if (stop) {
            return NULL;
        }
        int count = epoll_wait(loop->epoll, events, EVENTS_MAX, sleep_ms(loop, run_due(loop)));
        for (int i = 0; i < count; i++) {
            shm_source *source = events[i].data.ptr;
            source->on_event(source, events[i].events);
        }
        /* jobs may free objects here: no event of this round points at them any more */
        run_posted(loop);
    }
}

ep_err ep_shm_loop_watch(shm_loop *loop, int fd, shm_source *source, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = source};
    return epoll_ctl(loop->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? EP_OK : EP_ERR_IO;
}

void ep_shm_loop_unwatch(shm_loop *loop, int fd)
{
    epoll_ctl(loop->epoll, EPOLL_CTL_DEL, fd, NULL);
}

/* ---- start and end ---- */

static void loop_close(shm_loop *loop)
{
    ep_lane_fd_close(loop->epoll);
    ep_lane_fd_close(loop->wake);
    ep_lane_fd_close(loop->timer);
    pthread_mutex_destroy(&loop->lock);
}

static ep_err loop_open(shm_loop *loop, const char *name)
{
    *loop = (shm_loop){.wake_source.on_event = on_wake, .timer_source.on_event = on_timer};
    pthread_mutex_init(&loop->lock, NULL);
    loop->epoll = EP_LANE_FD(epoll_create1(EPOLL_CLOEXEC));
    loop->wake = EP_LANE_FD(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    loop->timer = EP_LANE_FD(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    bool ok =
        loop->epoll >= 0 && loop->wake >= 0 && loop->timer >= 0 &&
        ep_shm_loop_watch(loop, loop->wake, &loop->wake_source, EPOLLIN | EPOLLET) == EP_OK &&
        ep_shm_loop_watch(loop, loop->timer, &loop->timer_source, EPOLLIN | EPOLLET) == EP_OK &&
        ep_thread_start(name, loop_main, loop, &loop->thread) == EP_OK;
    if (!ok) {
        loop_close(loop);
        return EP_ERR_IO;
    }
    return EP_OK;
}

static void stop_loops(void)
{
    for (uint32_t i = 0; i < lane.loops_count; i++) {
        shm_loop *loop = &lane.loops[i];
        pthread_mutex_lock(&loop->lock);
        loop->stopping = true;
        ring_self(loop);
        pthread_mutex_unlock(&loop->lock);
        pthread_join(loop->thread, NULL);
        loop_close(loop);
    }
    lane.loops_count = 0;
}

ep_err ep_shm_loops_start(ep_error *out_error)
{
    static const char *const names[EP_LANE_THREADS_MAX] = {"ep-shm-0", "ep-shm-1", "ep-shm-2",
                                                           "ep-shm-3"};
    ep_lane_fork_hook(forget);
    pthread_mutex_lock(&lane.lock);
    ep_err err = EP_OK;
    if (lane.loops_count == 0) {
        uint32_t wanted = ep_lane_threads_count();
        while (err == EP_OK && lane.loops_count < wanted) {
            err = loop_open(&lane.loops[lane.loops_count], names[lane.loops_count]);
            lane.loops_count += err == EP_OK;
        }
        if (err != EP_OK) {
            stop_loops();
        }
    }
    pthread_mutex_unlock(&lane.lock);
    return err == EP_OK
               ? EP_OK
               : ep_error_set(out_error, err, "cannot start the threads of the shared-memory lane");
}

shm_loop *ep_shm_loop_first(void)
{
    return &lane.loops[0];
}

shm_loop *ep_shm_loop_next(void)
{
    return &lane.loops[__atomic_fetch_add(&lane.next, 1, __ATOMIC_RELAXED) % lane.loops_count];
}

void ep_shm_fini(void)
{
    pthread_mutex_lock(&lane.lock);
    stop_loops();
    pthread_mutex_unlock(&lane.lock);
}
