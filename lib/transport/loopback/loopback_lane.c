/* SPDX-License-Identifier: Apache-2.0 */
/* The loopback lane: its thread, its listeners and dials. See loopback_conn.c for what a connection
 * does. */
#include "transport/loopback/loopback_lane.h"

#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "transport/address.h"
#include "transport/lanes.h"

typedef struct loopback_listener {
    ep_lane_listener lane;
    bool accepting; /* on_accept runs */
    struct loopback_listener *next;
} loopback_listener;

typedef struct loopback_dial {
    ep_lane_dial lane;
    loopback_work work;
} loopback_dial;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;    /* something was queued, or stop */
    pthread_cond_t changed; /* on_accept or on_dial returned */
    pthread_t thread;
    bool running;
    bool stopping;
    loopback_work *head;
    loopback_work *tail;
    loopback_work *later; /* any order: only connections short of memory are here */
    loopback_listener *listeners;
} lane = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .changed = PTHREAD_COND_INITIALIZER};

void ep_loopback_lock(void)
{
    pthread_mutex_lock(&lane.lock);
}

void ep_loopback_unlock(void)
{
    pthread_mutex_unlock(&lane.lock);
}

void ep_loopback_wait(void)
{
    pthread_cond_wait(&lane.changed, &lane.lock);
}

void ep_loopback_broadcast(void)
{
    pthread_cond_broadcast(&lane.changed);
}

bool ep_loopback_on_thread(void)
{
    return lane.running && pthread_equal(lane.thread, pthread_self()) != 0;
}

bool ep_loopback_work_push(loopback_work *work)
{
    if (work->queued || work->waiting) {
        return false;
    }
    work->queued = true;
    work->next = NULL;
    if (lane.tail == NULL) {
        lane.head = work;
    } else {
        lane.tail->next = work;
    }
    lane.tail = work;
    pthread_cond_signal(&lane.work);
    return true;
}

bool ep_loopback_work_push_later(loopback_work *work, uint64_t due_ns)
{
    if (work->queued || work->waiting) {
        return false;
    }
    work->waiting = true;
    work->due_ns = due_ns;
    work->next = lane.later;
    lane.later = work;
    return true;
}

void ep_loopback_work_hurry(loopback_work *work)
{
    if (work->waiting) {
        work->due_ns = 0;
        pthread_cond_signal(&lane.work);
    }
}

/* Moves what is due to the queue (its reference goes along); returns when the next is due. */
static uint64_t queue_due(void)
{
    uint64_t now = ep_clock_now_ns();
    uint64_t next_ns = EP_TIME_NEVER;
    loopback_work **at = &lane.later;
    while (*at != NULL) {
        loopback_work *work = *at;
        if (work->due_ns <= now) {
            *at = work->next;
            work->waiting = false;
            ep_loopback_work_push(work);
            continue;
        }
        if (work->due_ns < next_ns) {
            next_ns = work->due_ns;
        }
        at = &work->next;
    }
    return next_ns;
}

static void wait_for_work(uint64_t until_ns)
{
    if (until_ns == EP_TIME_NEVER) {
        pthread_cond_wait(&lane.work, &lane.lock);
        return;
    }
    struct timespec t = {.tv_sec = (time_t)(until_ns / EP_NS_PER_S),
                         .tv_nsec = (long)(until_ns % EP_NS_PER_S)};
    pthread_cond_clockwait(&lane.work, &lane.lock, CLOCK_MONOTONIC, &t);
}

static void *lane_main(void *arg)
{
    (void)arg;
    ep_loopback_lock();
    for (;;) {
        uint64_t next_ns = lane.later != NULL ? queue_due() : EP_TIME_NEVER;
        loopback_work *work = lane.head;
        if (work == NULL) {
            if (lane.stopping) {
                break;
            }
            wait_for_work(next_ns);
            continue;
        }
        lane.head = work->next;
        if (lane.head == NULL) {
            lane.tail = NULL;
        }
        work->queued = false;
        work->run(work);
        work->unref(work);
    }
    ep_loopback_unlock();
    return NULL;
}

ep_err ep_loopback_thread_start(ep_error *out_error)
{
    if (lane.running) {
        return EP_OK;
    }
    ep_err err = ep_lane_thread_create("ep-loopback", lane_main, NULL, &lane.thread);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "cannot start the thread of the loopback lane");
    }
    lane.running = true;
    return EP_OK;
}

void ep_loopback_fini(void)
{
    ep_loopback_lock();
    bool running = lane.running;
    lane.stopping = true;
    pthread_cond_signal(&lane.work);
    ep_loopback_unlock();
    if (running) {
        pthread_join(lane.thread, NULL);
    }
    ep_loopback_lock();
    lane.running = false;
    lane.stopping = false;
    ep_loopback_unlock();
}

/* ---- listener ---- */

static loopback_listener *find_listener(const char *url)
{
    for (loopback_listener *listener = lane.listeners; listener != NULL;
         listener = listener->next) {
        if (strcmp(listener->lane.url, url) == 0) {
            return listener;
        }
    }
    return NULL;
}

static ep_err check_url(const char *url, ep_error *out_error)
{
    size_t n = strlen(url);
    if (!ep_url_has_scheme(url, "loopback") || n == strlen("loopback://") ||
        n >= EP_ADDRESS_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s' must be loopback://name, up to %d characters", url,
                            EP_ADDRESS_BYTES - 1);
    }
    return EP_OK;
}

static ep_err listener_add(loopback_listener *listener, ep_error *out_error)
{
    ep_loopback_lock();
    ep_err err = EP_OK;
    if (find_listener(listener->lane.url) != NULL) {
        err =
            ep_error_set(out_error, EP_ERR_UNAVAILABLE, "address %s is in use", listener->lane.url);
    } else {
        err = ep_loopback_thread_start(out_error);
    }
    if (err == EP_OK) {
        listener->next = lane.listeners;
        lane.listeners = listener;
    }
    ep_loopback_unlock();
    return err;
}

static ep_err loopback_listen(const ep_lane_ops *ops, const ep_lane_address *address,
                              const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                              ep_listener **out_listener, ep_error *out_error)
{
    ep_lane_listener *listener;
    ep_err err = check_url(address->url, out_error);
    if (err == EP_OK) {
        err = ep_lane_listener_create(sizeof(loopback_listener), ops, address, limits, on_accept,
                                      arg, &listener, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    *out_listener = &listener->base; /* on_accept may need it */
    err = listener_add((loopback_listener *)listener, out_error);
    if (err != EP_OK) {
        *out_listener = NULL;
        ep_lane_listener_free(listener);
    }
    return err;
}

static void loopback_listener_close(ep_listener *base)
{
    loopback_listener *listener = (loopback_listener *)base;
    ep_loopback_lock();
    for (loopback_listener **at = &lane.listeners; *at != NULL; at = &(*at)->next) {
        if (*at == listener) {
            *at = listener->next;
            break;
        }
    }
    EP_ASSERT(!listener->accepting || !ep_loopback_on_thread());
    while (listener->accepting) {
        ep_loopback_wait();
    }
    ep_loopback_unlock();
    ep_lane_listener_free(&listener->lane);
}

/* ---- dial ---- */

static loopback_dial *dial_of_work(loopback_work *work)
{
    return (loopback_dial *)(void *)((char *)work - offsetof(loopback_dial, work));
}

static void dial_over(loopback_work *work)
{
    ep_lane_dial_over(&dial_of_work(work)->lane);
}

/* Makes the connection and hands out its accepted end. Lock held; dropped for on_accept. */
static ep_err connect_to_listener(const ep_lane_dial *dial, loopback_conn **out_dialed,
                                  ep_error *out_error)
{
    loopback_listener *listener = find_listener(dial->url);
    if (listener == NULL) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "nobody listens on %s", dial->url);
    }
    ep_accept_count *count = listener->lane.count;
    const ep_lane_limits *limits = &listener->lane.limits;
    loopback_conn *accepted;
    if (!ep_accept_count_add(count, limits->connections_max)) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s has connections_max %u connections", dial->url,
                            limits->connections_max);
    }
    if (ep_loopback_conn_pair_create(dial, limits, count, out_dialed, &accepted) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a connection");
    }
    listener->accepting = true; /* keeps it alive: its close waits */
    ep_loopback_unlock();
    listener->lane.on_accept(listener->lane.arg, &accepted->base);
    ep_loopback_lock();
    listener->accepting = false;
    ep_loopback_broadcast();
    return EP_OK;
}

static void dial_run(loopback_work *work)
{
    ep_lane_dial *dial = &dial_of_work(work)->lane;
    loopback_conn *conn = NULL;
    ep_error error;
    if (!ep_lane_dial_is_cancelled(dial)) {
        connect_to_listener(dial, &conn, &error);
    }
    ep_loopback_unlock();
    ep_lane_dial_report(dial, conn != NULL ? &conn->base : NULL, &error);
    ep_loopback_lock();
}

static ep_err loopback_dial_begin(const ep_lane_ops *ops, const ep_lane_address *address,
                                  const ep_lane_limits *limits, ep_dial_func on_dial, void *arg,
                                  ep_dial **out_dial, ep_error *out_error)
{
    ep_lane_dial *dial;
    ep_err err = check_url(address->url, out_error);
    if (err == EP_OK) {
        err = ep_lane_dial_create(sizeof(loopback_dial), ops, address, limits, on_dial, arg, &dial,
                                  out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    loopback_dial *d = (loopback_dial *)dial;
    d->work = (loopback_work){.run = dial_run, .unref = dial_over};
    *out_dial = &dial->base; /* on_dial may need it, so before it can run; undone below */
    ep_loopback_lock();
    err = ep_loopback_thread_start(out_error);
    if (err == EP_OK) {
        ep_loopback_work_push(&d->work);
    }
    ep_loopback_unlock();
    if (err != EP_OK) {
        *out_dial = NULL;
        ep_lane_dial_abandon(dial);
    }
    return err;
}

static const char *const schemes[] = {"loopback", NULL};

const ep_lane_ops ep_loopback_lane = {
    .name = "loopback",
    .schemes = schemes,
    .listen = loopback_listen,
    .listener_close = loopback_listener_close,
    .dial = loopback_dial_begin,
    .conn_start = ep_loopback_conn_start,
    .conn_send = ep_loopback_conn_send,
    .conn_close = ep_loopback_conn_close,
    .conn_release = ep_loopback_conn_release,
    .conn_allow_large = ep_loopback_conn_allow_large,
    .conn_receiving = ep_loopback_conn_receiving,
    .conn_peer = ep_loopback_conn_peer,
    .conn_is_trusted = ep_loopback_conn_is_trusted,
};
