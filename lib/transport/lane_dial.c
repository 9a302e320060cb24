/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_dial.h. */
#include "transport/lane_dial.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "transport/lane_common.h"
#include "transport/lane_fork.h"

ep_err ep_lane_dial_begin(const ep_lane_ops *lane, const ep_lane_address *address,
                          const ep_lane_limits *limits, ep_dial_func on_dial, void *arg,
                          ep_dial **out_dial, ep_error *out_error)
{
    *out_dial = NULL;
    ep_lane_limits own;
    ep_err err = ep_lane_limits_take(limits, false, &own, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_lane_dial *dial = calloc(1, lane->dial_bytes);
    if (dial == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a dial");
    }
    pthread_mutex_init(&dial->lock, NULL);
    pthread_cond_init(&dial->changed, NULL);
    dial->base.ops = lane;
    dial->limits = own;
    dial->on_dial = on_dial;
    dial->arg = arg;
    dial->refs = 2;
    dial->forks = ep_lane_forks();
    snprintf(dial->url, sizeof(dial->url), "%s", address->url);
    ep_lane_hold();
    *out_dial = &dial->base; /* on_dial may use it */
    err = lane->dial(&dial->base, address, out_error);
    if (err != EP_OK) {
        *out_dial = NULL;
        ep_lane_dial_over(dial);
        ep_lane_dial_unref(dial);
    }
    return err;
}

void ep_lane_dial_ref(ep_lane_dial *dial)
{
    __atomic_fetch_add(&dial->refs, 1, __ATOMIC_RELAXED);
}

void ep_lane_dial_unref(ep_lane_dial *dial)
{
    if (__atomic_sub_fetch(&dial->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        pthread_cond_destroy(&dial->changed);
        pthread_mutex_destroy(&dial->lock);
        free(dial);
    }
}

void ep_lane_dial_over(ep_lane_dial *dial)
{
    ep_lane_dial_unref(dial);
    ep_lane_drop();
}

bool ep_lane_dial_is_cancelled(ep_lane_dial *dial)
{
    pthread_mutex_lock(&dial->lock);
    bool cancelled = dial->state == EP_DIAL_DONE;
    pthread_mutex_unlock(&dial->lock);
    return cancelled;
}

void ep_lane_dial_report(ep_lane_dial *dial, ep_conn *taken_conn, const ep_error *error)
{
    pthread_mutex_lock(&dial->lock);
    bool cancelled = dial->state == EP_DIAL_DONE;
    if (!cancelled) {
        dial->state = EP_DIAL_RUNNING;
        dial->runner = pthread_self();
    }
    pthread_mutex_unlock(&dial->lock);
    if (!cancelled) {
        dial->on_dial(dial->arg, taken_conn, taken_conn != NULL ? NULL : error);
    } else if (taken_conn != NULL) {
        ep_conn_release(taken_conn);
    }
    pthread_mutex_lock(&dial->lock);
    dial->state = EP_DIAL_DONE;
    pthread_cond_broadcast(&dial->changed);
    pthread_mutex_unlock(&dial->lock);
}

void ep_dial_release(ep_dial *base)
{
    ep_lane_dial *dial = (ep_lane_dial *)base;
    if (!ep_lane_is_ours(dial->forks)) {
        return;
    }
    pthread_mutex_lock(&dial->lock);
    bool cancelled = dial->state == EP_DIAL_PENDING;
    if (cancelled) {
        dial->state = EP_DIAL_DONE;
        if (dial->cancel != NULL) {
            dial->cancel(dial);
        }
    }
    while (dial->state == EP_DIAL_RUNNING) {
        EP_ASSERT(!pthread_equal(dial->runner, pthread_self()));
        pthread_cond_wait(&dial->changed, &dial->lock);
    }
    pthread_mutex_unlock(&dial->lock);
    if (cancelled) {
        ep_error error;
        ep_error_set(&error, EP_ERR_CANCELLED, "the dial to %s was cancelled", dial->url);
        dial->on_dial(dial->arg, NULL, &error);
    }
    ep_lane_dial_unref(dial);
}
