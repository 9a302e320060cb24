/* SPDX-License-Identifier: Apache-2.0 */
/* WatchPlacement: one stream at a time, started when the channel is ready, restarted with jittered
 * back-off when it ends. */
#include "cluster/watch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/random.h"
#include "coordinator.pb-c.h"
#include "wire/placement_codec.h"

#define RESTART_MIN_US 10000u
#define RESTART_MAX_US 200000u

struct ep_watch {
    ep_watch_config config;
    char url[EP_ADDRESS_BYTES]; /* the coordinator's */
    ep_timer_service *timers;
    ep_rpc_channel *channel;
    ep_timer restart;
    const ep_rpc_method *method;
    pthread_mutex_t lock; /* protects the rest */
    bool active;          /* a stream is open */
    bool closing;
    uint64_t random;
    uint64_t backoff_us;
};

static void restart_later(ep_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    watch->active = false;
    if (!watch->closing) {
        uint64_t half = watch->backoff_us / 2;
        uint64_t us = half + ep_splitmix64(&watch->random) % (half + 1);
        watch->backoff_us =
            watch->backoff_us * 2 > RESTART_MAX_US ? RESTART_MAX_US : watch->backoff_us * 2;
        ep_timer_arm(watch->timers, &watch->restart, ep_clock_now_ns() + us * EP_NS_PER_US);
    }
    pthread_mutex_unlock(&watch->lock);
}

static void take_snapshot(ep_watch *watch, const ep_rpc_reply *reply)
{
    ep_error error;
    ep_routing_table *table = NULL;
    ep_err err = ep_placement_decode(
        (const Expertd__V1__PlacementSnapshot *)(const void *)reply->header, &table, &error);
    if (err == EP_OK) {
        err = watch->config.install(watch->config.arg, table, &error);
    }
    if (err != EP_OK) {
        ep_error_prefix(&error, err, "the coordinator's table");
        watch->config.report(watch->config.arg, &error);
    }
    pthread_mutex_lock(&watch->lock);
    watch->backoff_us = RESTART_MIN_US;
    pthread_mutex_unlock(&watch->lock);
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    ep_watch *watch = arg;
    if (error != NULL) {
        ep_error why = *error;
        /* the text is the peer's and does not name it */
        ep_error_prefix(&why, why.code, "%s", watch->url);
        watch->config.report(watch->config.arg, &why);
    } else if (reply->header != NULL) {
        take_snapshot(watch, reply);
    }
    if (reply == NULL || reply->end) {
        restart_later(watch);
    }
}

static void start(ep_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    bool skip = watch->active || watch->closing || watch->channel == NULL ||
                /* when it is ready, that starts the stream */
                ep_rpc_channel_get_state(watch->channel) != EP_CHANNEL_READY;
    watch->active = watch->active || !skip;
    pthread_mutex_unlock(&watch->lock);
    if (skip) {
        return;
    }
    ep_epoch have = watch->config.epoch(watch->config.arg);
    Expertd__V1__Epoch epoch = EXPERTD__V1__EPOCH__INIT;
    Expertd__V1__WatchPlacementRequest request = EXPERTD__V1__WATCH_PLACEMENT_REQUEST__INIT;
    epoch.term = have.term;
    epoch.number = have.number;
    request.have = &epoch;
    ep_rpc_request call = {.method = watch->method,
                           .header = &request.base,
                           .deadline_ns = EP_TIME_NEVER,
                           .attempt = 0};
    ep_error error;
    ep_rpc_call_id id;
    if (ep_rpc_call_start(watch->channel, &call, on_reply, watch, &id, &error) != EP_OK) {
        watch->config.report(watch->config.arg, &error);
        restart_later(watch);
    }
}

static void on_restart(ep_timer *timer, void *arg)
{
    (void)timer;
    start(arg);
}

static void start_soon(ep_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    watch->backoff_us = RESTART_MIN_US;
    if (!watch->closing) {
        ep_timer_arm(watch->timers, &watch->restart, ep_clock_now_ns());
    }
    pthread_mutex_unlock(&watch->lock);
}

static void on_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *hello, const ep_error *error)
{
    ep_watch *watch = arg;
    (void)channel;
    (void)hello;
    if (error != NULL) {
        watch->config.report(watch->config.arg, error);
    }
    if (state == EP_CHANNEL_READY) {
        start_soon(watch);
    }
}

ep_err ep_watch_create(const ep_watch_config *config, ep_watch **out_watch, ep_error *out_error)
{
    const ep_rpc_common *common = config->common;
    const ep_lane_address *coordinator = config->coordinator;
    ep_watch *watch = calloc(1, sizeof(*watch));
    if (watch == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to watch %s", coordinator->url);
    }
    watch->config = *config;
    snprintf(watch->url, sizeof(watch->url), "%s", coordinator->url);
    watch->timers = common->timers;
    watch->random = ep_random_id();
    watch->backoff_us = RESTART_MIN_US;
    watch->method = ep_rpc_method_by_name("expertd.v1.Coordinator", "WatchPlacement");
    pthread_mutex_init(&watch->lock, NULL);
    ep_timer_init(&watch->restart, on_restart, watch);
    ep_rpc_channel_config channel_config = {.common = *common,
                                            .address = *coordinator,
                                            .connection_class = "control",
                                            .reconnect = true,
                                            .on_state = on_state,
                                            .arg = watch};
    ep_rpc_limits_raise_for_control(&channel_config.common.limits);
    ep_rpc_channel *channel = NULL;
    ep_err err = ep_rpc_channel_create(&channel_config, &channel, out_error);
    if (err != EP_OK) {
        ep_watch_destroy(watch);
        return err;
    }
    pthread_mutex_lock(&watch->lock);
    watch->channel = channel;
    pthread_mutex_unlock(&watch->lock);
    start_soon(watch); /* the channel may have become ready before it was stored */
    *out_watch = watch;
    return EP_OK;
}

void ep_watch_destroy(ep_watch *watch)
{
    if (watch == NULL) {
        return;
    }
    pthread_mutex_lock(&watch->lock);
    watch->closing = true;
    pthread_mutex_unlock(&watch->lock);
    ep_timer_cancel_wait(watch->timers, &watch->restart);
    ep_rpc_channel_destroy(watch->channel);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}
