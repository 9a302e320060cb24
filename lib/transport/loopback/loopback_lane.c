/* SPDX-License-Identifier: Apache-2.0 */
/* The loopback lane: its listeners and dials. Connections are in loopback_conn.c. */
#include "transport/loopback/loopback_lane.h"

#include <string.h>

#include "base/check.h"
#include "transport/address.h"
#include "transport/lane_fork.h"

typedef struct loopback_listener {
    ep_lane_listener lane;
    bool accepting; /* on_accept is running */
    struct loopback_listener *next;
} loopback_listener;

typedef struct loopback_dial {
    ep_lane_dial lane;
    ep_lane_job job; /* pushed with the lane's reference */
} loopback_dial;

typedef struct loopback_lane {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* signalled when on_accept has returned */
    loopback_listener *listeners;
} loopback_lane;

#define LANE_AT_REST                                                                               \
    (loopback_lane)                                                                                \
    {                                                                                              \
        .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER                     \
    }

static loopback_lane lane = LANE_AT_REST;

static void forget(void)
{
    lane = LANE_AT_REST;
    ep_loopback_worker = (ep_lane_worker)EP_LANE_WORKER("ep-loopback");
}

static void loopback_fini(void)
{
    ep_lane_worker_stop(&ep_loopback_worker);
}

/* ---- listener ---- */

/* Lock held. */
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

/* Checks the URL, and starts the lane's thread. */
static ep_err open_lane(const char *url, ep_error *out_error)
{
    size_t n = strlen(url);
    if (!ep_url_has_scheme(url, "loopback") || n == strlen("loopback://") ||
        n >= EP_ADDRESS_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "address '%.64s' must be loopback://name, up to %d characters", url,
                            EP_ADDRESS_BYTES - 1);
    }
    ep_lane_fork_hook(forget);
    return ep_lane_worker_start(&ep_loopback_worker, out_error);
}

static ep_err loopback_listen(ep_listener *base, const ep_lane_address *address,
                              ep_error *out_error)
{
    loopback_listener *listener = (loopback_listener *)base;
    ep_err err = open_lane(address->url, out_error);
    if (err != EP_OK) {
        return err;
    }
    pthread_mutex_lock(&lane.lock);
    if (find_listener(address->url) != NULL) {
        err = ep_error_set(out_error, EP_ERR_UNAVAILABLE, "address %s is in use", address->url);
    } else {
        listener->next = lane.listeners;
        lane.listeners = listener;
    }
    pthread_mutex_unlock(&lane.lock);
    return err;
}

static void loopback_listener_close(ep_listener *base)
{
    loopback_listener *listener = (loopback_listener *)base;
    pthread_mutex_lock(&lane.lock);
    for (loopback_listener **at = &lane.listeners; *at != NULL; at = &(*at)->next) {
        if (*at == listener) {
            *at = listener->next;
            break;
        }
    }
    EP_ASSERT(!listener->accepting || !pthread_equal(ep_loopback_worker.thread, pthread_self()));
    while (listener->accepting) {
        pthread_cond_wait(&lane.changed, &lane.lock);
    }
    pthread_mutex_unlock(&lane.lock);
    ep_lane_listener_free(&listener->lane);
}

/* ---- dial ---- */

/* Creates the connection for a listener that cannot go away meanwhile. */
static ep_err connect_to(loopback_listener *listener, const ep_lane_dial *dial,
                         ep_conn **out_dialed, ep_error *out_error)
{
    ep_accept_count *count = listener->lane.count;
    const ep_lane_limits *limits = &listener->lane.limits;
    ep_conn *accepted;
    if (!ep_accept_count_add(count, limits->connections_max)) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "%s has connections_max %u connections", dial->url,
                            limits->connections_max);
    }
    if (ep_loopback_conn_pair_create(dial, limits, count, out_dialed, &accepted) != EP_OK) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a connection");
    }
    listener->lane.on_accept(listener->lane.arg, accepted);
    return EP_OK;
}

static void dial_run(ep_lane_job *job)
{
    loopback_dial *d = (loopback_dial *)(void *)((char *)job - offsetof(loopback_dial, job));
    ep_lane_dial *dial = &d->lane;
    ep_conn *conn = NULL;
    ep_error error;
    ep_error_set(&error, EP_ERR_UNAVAILABLE, "nobody listens on %s", dial->url);
    pthread_mutex_lock(&lane.lock);
    loopback_listener *listener = ep_lane_dial_is_cancelled(dial) ? NULL : find_listener(dial->url);
    if (listener != NULL) {
        listener->accepting = true; /* keeps the listener alive, since its close waits for this */
        pthread_mutex_unlock(&lane.lock);
        connect_to(listener, dial, &conn, &error);
        pthread_mutex_lock(&lane.lock);
        listener->accepting = false;
        pthread_cond_broadcast(&lane.changed);
    }
    pthread_mutex_unlock(&lane.lock);
    ep_lane_dial_report(dial, conn, &error);
    ep_lane_dial_over(dial);
}

static ep_err loopback_dial_begin(ep_dial *base, const ep_lane_address *address,
                                  ep_error *out_error)
{
    loopback_dial *dial = (loopback_dial *)base;
    ep_err err = open_lane(address->url, out_error);
    if (err == EP_OK) {
        dial->job.run = dial_run;
        ep_lane_worker_push(&ep_loopback_worker, &dial->job);
    }
    return err;
}

static const char *const schemes[] = {"loopback", NULL};

const ep_lane_ops ep_loopback_lane = {
    .name = "loopback",
    .schemes = schemes,
    .listener_bytes = sizeof(loopback_listener),
    .dial_bytes = sizeof(loopback_dial),
    .listen = loopback_listen,
    .listener_close = loopback_listener_close,
    .dial = loopback_dial_begin,
    .conn_send = ep_loopback_conn_send,
    .fini = loopback_fini,
};
