/* SPDX-License-Identifier: Apache-2.0 */
/* The channel object: configuration, state, orderly shutdown. */
#include "rpc/rpc_channel.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "rpc/rpc_limits.h"
#include "transport/address.h"

#define BUCKETS_MIN 64

static void channel_free(ep_rpc_channel *channel)
{
    while (channel->free_calls != NULL) {
        ep_rpc_client_call *call = channel->free_calls;
        channel->free_calls = call->next;
        free(call);
    }
    pthread_cond_destroy(&channel->changed);
    pthread_mutex_destroy(&channel->lock);
    ep_rpc_common_free(&channel->common);
    free(channel->buckets);
    free(channel->url);
    free(channel->connection_class);
    ep_tls_config_free(&channel->tls);
    free(channel);
}

static ep_err fill(ep_rpc_channel *channel, const ep_rpc_channel_config *config,
                   ep_error *out_error)
{
    const ep_tls_config *tls = config->address.tls;
    ep_err err = ep_rpc_common_copy(&config->common, &channel->common, out_error);
    if (err != EP_OK) {
        return err;
    }
    channel->url = strdup(config->address.url);
    channel->connection_class =
        strdup(config->connection_class != NULL ? config->connection_class : "");
    channel->buckets_count = BUCKETS_MIN;
    channel->buckets = calloc(BUCKETS_MIN, sizeof(channel->buckets[0]));
    if (channel->url == NULL || channel->connection_class == NULL || channel->buckets == NULL ||
        (tls != NULL && ep_tls_config_copy(tls, &channel->tls) != EP_OK)) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a channel");
    }
    channel->address =
        (ep_lane_address){.url = channel->url, .tls = tls != NULL ? &channel->tls : NULL};
    channel->lane = ep_lane_for_url(channel->url);
    if (channel->lane == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "no lane serves the address \"%.100s\"", channel->url);
    }
    channel->lane_limits = (ep_lane_limits){
        .frame_bytes = ep_frame_read_bytes,
        .pool = channel->common.pool,
        .frame_bytes_max = channel->common.limits.frame_bytes_max,
        .first_frame_bytes_max = ep_rpc_first_frame_bytes_max(&channel->common.limits, false),
        .send_queue_bytes_max = channel->common.limits.send_queue_bytes_max,
    };
    channel->reconnect = config->reconnect;
    channel->on_state = config->on_state;
    channel->late_replies = config->late_replies;
    channel->arg = config->arg;
    channel->state = EP_CHANNEL_CONNECTING;
    channel->backoff_ms = channel->common.limits.redial_min_ms;
    channel->hello_wait_ms = ep_rpc_dial_first_wait_ms(channel);
    channel->random_state = ep_random_id();
    return EP_OK;
}

ep_err ep_rpc_channel_create(const ep_rpc_channel_config *config, ep_rpc_channel **out_channel,
                             ep_error *out_error)
{
    ep_rpc_channel *channel = calloc(1, sizeof(*channel));
    if (channel == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a channel");
    }
    pthread_cond_init(&channel->changed, NULL);
    pthread_mutex_init(&channel->lock, NULL);
    ep_err err = fill(channel, config, out_error);
    pthread_mutex_lock(&channel->lock);
    err = err == EP_OK ? ep_rpc_dial_start_locked(channel, out_error) : err;
    if (err == EP_OK) {
        *out_channel = channel; /* under the lock: before on_state can run */
    }
    pthread_mutex_unlock(&channel->lock);
    if (err != EP_OK) {
        channel_free(channel);
    }
    return err;
}

void ep_rpc_channel_destroy(ep_rpc_channel *channel)
{
    if (channel == NULL) {
        return;
    }
    ep_error why;
    ep_error_set(&why, EP_ERR_CANCELLED, "the channel was closed here");
    pthread_mutex_lock(&channel->lock);
    channel->closing = true;
    __atomic_store_n(&channel->look_stop, true, __ATOMIC_RELAXED);
    channel->state = EP_CHANNEL_CLOSED;
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
    ep_rpc_channel_fail_calls(channel, NULL, &why);
    ep_rpc_dial_stop(channel);
    pthread_mutex_lock(&channel->lock);
    while (channel->links_alive > 0 || channel->calls_alive > 0 || channel->looking) {
        pthread_cond_wait(&channel->changed, &channel->lock);
    }
    pthread_mutex_unlock(&channel->lock);
    ep_rpc_dial_join_look(channel);
    if (channel->on_state != NULL) {
        channel->on_state(channel->arg, channel, EP_CHANNEL_CLOSED, NULL, NULL);
    }
    channel_free(channel);
}

ep_rpc_channel_state ep_rpc_channel_get_state(ep_rpc_channel *channel)
{
    pthread_mutex_lock(&channel->lock);
    ep_rpc_channel_state state = channel->state;
    pthread_mutex_unlock(&channel->lock);
    return state;
}

void ep_rpc_channel_last_error(ep_rpc_channel *channel, ep_error *out_error)
{
    pthread_mutex_lock(&channel->lock);
    while (channel->looking) {
        pthread_cond_wait(&channel->changed, &channel->lock);
    }
    *out_error = channel->last_error;
    pthread_mutex_unlock(&channel->lock);
}

/* The live connection with a reference, or NULL. */
static ep_rpc_client_link *take_live_link(ep_rpc_channel *channel)
{
    pthread_mutex_lock(&channel->lock);
    ep_rpc_client_link *link = channel->state == EP_CHANNEL_READY ? channel->link : NULL;
    if (link != NULL) {
        ep_rpc_link_ref(&link->link);
    }
    pthread_mutex_unlock(&channel->lock);
    return link;
}

bool ep_rpc_channel_read_life(ep_rpc_channel *channel, ep_rpc_channel_life *out_life)
{
    ep_rpc_client_link *link = take_live_link(channel);
    if (link == NULL) {
        return false;
    }
    *out_life = (ep_rpc_channel_life){
        .heard_ns = ep_rpc_link_heard_ns(&link->link),
        .pinged_ns = __atomic_load_n(&link->link.ping_left_ns, __ATOMIC_RELAXED),
        .blocked_ns = ep_rpc_link_blocked_ns(&link->link)};
    ep_rpc_link_unref(&link->link);
    return true;
}

void ep_rpc_channel_ping(ep_rpc_channel *channel)
{
    ep_rpc_client_link *link = take_live_link(channel);
    if (link != NULL) {
        ep_rpc_link_ping(&link->link);
        ep_rpc_link_unref(&link->link);
    }
}

ep_err ep_rpc_channel_wait_ready(ep_rpc_channel *channel, uint64_t deadline_ns, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&channel->lock);
    while (channel->state != EP_CHANNEL_READY && err == EP_OK) {
        if (channel->closing) {
            err =
                ep_error_set(out_error, EP_ERR_CLOSED, "the channel to %s is closed", channel->url);
        } else if (channel->dial_phase == EP_DIAL_OVER && !channel->looking) {
            err = channel->last_error.code;
            if (out_error != NULL) {
                *out_error = channel->last_error;
            }
        } else if (deadline_ns <= ep_clock_now_ns()) {
            err =
                ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                             "no connection to %s in time; last report: %.300s", channel->url,
                             channel->last_error.code != EP_OK ? channel->last_error.text : "none");
        } else {
            ep_clock_wait(&channel->changed, &channel->lock, deadline_ns);
        }
    }
    pthread_mutex_unlock(&channel->lock);
    return err;
}
