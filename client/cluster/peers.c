/* SPDX-License-Identifier: Apache-2.0 */
/* A node's two channels and their state changes. */
#include "cluster/peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cluster/silence.h"
#include "base/host.h"

static const char *const class_names[EP_PEER_CLASSES] = {"decode", "bulk"};

static void note_error(ep_peer *peer, const ep_error *error)
{
    pthread_mutex_lock(&peer->lock);
    peer->last_error = *error;
    pthread_mutex_unlock(&peer->lock);
}

/* ---- shared memory ---- */

/* Longest pause of redials to a node that refuses; when its stream becomes ready it is dialled at
 * once. */
#define SHM_REDIAL_MAX_MS 30000

static void on_shm_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                         const Expertd__V1__Hello *hello, const ep_error *error)
{
    ep_peer_link *link = arg;
    (void)channel;
    (void)hello;
    (void)error; /* not the node's error: the stream goes on */
    if (state == EP_CHANNEL_READY) {
        __atomic_store_n(&link->suspected_ns, 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&link->shm_ready, state == EP_CHANNEL_READY, __ATOMIC_RELEASE);
}

/* The offered URL that this client can use; NULL: none. */
static const char *shm_offer(const ep_peer *peer, const Expertd__V1__Hello *hello)
{
    char host[EP_HOST_BYTES];
    if (!peer->config.allows_shm || hello->host[0] == 0) {
        return NULL;
    }
    if (peer->config.common.host != NULL) {
        snprintf(host, sizeof(host), "%s", peer->config.common.host);
    } else {
        ep_host_boot_id(host);
    }
    for (size_t i = 0; strcmp(host, hello->host) == 0 && i < hello->n_lanes; i++) {
        const char *url = hello->lanes[i]->url;
        if (strcmp(hello->lanes[i]->name, ep_shm_lane.name) == 0 &&
            ep_lane_for_url(url) == &ep_shm_lane && strlen(url) < EP_URL_BYTES) {
            return url;
        }
    }
    return NULL;
}

/*
 * Called only in on_state of the link's own channel, so never twice at once. If the node has moved
 * its socket, only the stream is used.
 */
static void take_offer(ep_peer_link *link, const Expertd__V1__Hello *hello)
{
    ep_peer *peer = link->peer;
    const char *url = shm_offer(peer, hello);
    if (link->shm != NULL) {
        if (url != NULL && strcmp(url, link->shm_url) == 0) {
            ep_rpc_channel_hurry(link->shm);
        }
        return;
    }
    if (url == NULL) {
        return;
    }
    snprintf(link->shm_url, sizeof(link->shm_url), "%s", url);
    ep_rpc_channel_config config = {.common = peer->config.common,
                                    .address = {.url = link->shm_url},
                                    .connection_class = class_names[link->class_index],
                                    .reconnect = true,
                                    .on_state = on_shm_state,
                                    .arg = link};
    config.common.limits.redial_max_ms = SHM_REDIAL_MAX_MS;
    ep_rpc_channel *channel = NULL;
    if (ep_rpc_channel_create(&config, &channel, NULL) == EP_OK) {
        __atomic_store_n(&link->shm, channel, __ATOMIC_RELEASE);
    }
}

/* The channel that calls use now. */
static ep_rpc_channel *best_channel(ep_peer_link *link)
{
    ep_rpc_channel *shm = __atomic_load_n(&link->shm, __ATOMIC_ACQUIRE);
    return shm != NULL && __atomic_load_n(&link->shm_ready, __ATOMIC_ACQUIRE) ? shm : link->channel;
}

ep_err ep_peer_link_call(ep_peer_link *link, const ep_rpc_request *request,
                         ep_rpc_reply_func on_reply, void *arg, ep_rpc_channel **out_channel,
                         ep_rpc_call_id *out_id, ep_error *out_error)
{
    ep_rpc_channel *best = best_channel(link);
    *out_channel = best;
    ep_err err = ep_rpc_call_start(best, request, on_reply, arg, out_id, out_error);
    bool gone = err == EP_ERR_UNAVAILABLE || err == EP_ERR_CLOSED;
    if (best == link->channel || !gone || !__atomic_load_n(&link->ready, __ATOMIC_ACQUIRE)) {
        return err;
    }
    *out_channel = link->channel;
    return ep_rpc_call_start(link->channel, request, on_reply, arg, out_id, out_error);
}

bool ep_peer_link_lost_only_shm(ep_peer_link *link, const ep_rpc_channel *channel)
{
    ep_rpc_channel *shm = __atomic_load_n(&link->shm, __ATOMIC_ACQUIRE);
    /* The channel's state, as shm_ready changes only after its frames have failed. */
    return shm != NULL && shm == channel && __atomic_load_n(&link->ready, __ATOMIC_ACQUIRE) &&
           ep_rpc_channel_get_state(shm) != EP_CHANNEL_READY;
}

/* ---- the stream ---- */

/* A connection that the network has dropped silently counts as lost after 1 s, not 2. */
#define PING_MS 250

static void on_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *hello, const ep_error *error)
{
    ep_peer_link *link = arg;
    ep_peer *peer = link->peer;
    (void)channel;
    if (error != NULL) {
        note_error(peer, error);
    }
    if (state != EP_CHANNEL_READY) {
        /* calls learn of it by their frames */
        __atomic_store_n(&link->ready, false, __ATOMIC_RELEASE);
        return;
    }
    __atomic_store_n(&peer->draining, false, __ATOMIC_RELAXED);
    __atomic_store_n(&link->suspected_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&peer->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    if (hello != NULL) {
        __atomic_store_n(&peer->frame_bytes_max, hello->frame_bytes_max, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&link->ready, true, __ATOMIC_RELEASE);
    if (hello != NULL) {
        take_offer(link, hello);
    }
    peer->config.on_ready(peer->config.arg, peer, link->class_index, hello);
}

static ep_err peer_new(const ep_peer_config *config, ep_peer **out_peer, ep_error *out_error)
{
    ep_peer *peer = calloc(1, sizeof(*peer));
    if (peer == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for node %s",
                            config->address.url);
    }
    pthread_mutex_init(&peer->lock, NULL);
    peer->refs = 1;
    peer->config = *config;
    snprintf(peer->name, sizeof(peer->name), "%s", config->name);
    snprintf(peer->url, sizeof(peer->url), "%s", config->address.url);
    ep_error_clear(&peer->last_error);
    for (int i = 0; i < EP_PEER_CLASSES; i++) {
        peer->links[i] = (ep_peer_link){.peer = peer, .class_index = (ep_peer_class)i};
    }
    *out_peer = peer;
    return EP_OK;
}

ep_err ep_peer_create_refused(const ep_peer_config *config, const ep_error *why, ep_peer **out_peer,
                              ep_error *out_error)
{
    ep_err err = peer_new(config, out_peer, out_error);
    if (err == EP_OK) {
        (*out_peer)->refused = true;
        note_error(*out_peer, why);
    }
    return err;
}

ep_err ep_peer_create(const ep_peer_config *config, ep_peer **out_peer, ep_error *out_error)
{
    if (strlen(config->address.url) >= EP_URL_BYTES || strlen(config->name) >= EP_NODE_NAME_BYTES) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "node '%.80s' at '%.300s': allowed %d and %d bytes", config->name,
                            config->address.url, EP_NODE_NAME_BYTES - 1, EP_URL_BYTES - 1);
    }
    ep_peer *peer = NULL;
    ep_err err = peer_new(config, &peer, out_error);
    if (err != EP_OK) {
        return err;
    }
    for (int i = 0; i < EP_PEER_CLASSES; i++) {
        ep_rpc_channel_config channel = {.common = config->common,
                                         .address = config->address,
                                         .connection_class = class_names[i],
                                         .reconnect = true,
                                         .on_state = on_state,
                                         .arg = &peer->links[i],
                                         .late_replies = config->late_replies};
        channel.common.limits.ping_ms = PING_MS;
        err = ep_rpc_channel_create(&channel, &peer->links[i].channel, out_error);
        if (err != EP_OK) {
            ep_peer_destroy(peer);
            return err;
        }
    }
    *out_peer = peer;
    return EP_OK;
}

void ep_peer_close(ep_peer *peer)
{
    for (int i = 0; peer != NULL && i < EP_PEER_CLASSES; i++) {
        ep_peer_link *link = &peer->links[i];
        ep_rpc_channel *channel = link->channel;
        link->channel = NULL;
        ep_rpc_channel_destroy(channel); /* take_offer cannot run after this */
        ep_rpc_channel *shm = link->shm;
        __atomic_store_n(&link->shm, NULL, __ATOMIC_RELEASE);
        ep_rpc_channel_destroy(shm);
    }
}

void ep_peer_destroy(ep_peer *peer)
{
    if (peer == NULL) {
        return;
    }
    ep_peer_close(peer);
    if (peer->hello != NULL) {
        protobuf_c_message_free_unpacked(&peer->hello->base, NULL);
    }
    pthread_mutex_destroy(&peer->lock);
    free(peer);
}

ep_peer *ep_peer_ref(ep_peer *peer)
{
    __atomic_fetch_add(&peer->refs, 1, __ATOMIC_RELAXED);
    return peer;
}

void ep_peer_unref(ep_peer *peer)
{
    if (peer != NULL && __atomic_fetch_sub(&peer->refs, 1, __ATOMIC_ACQ_REL) == 1) {
        peer->config.on_unused(peer->config.arg, peer);
    }
}

bool ep_peer_link_is_suspected(ep_peer_link *link)
{
    ep_rpc_channel_life life;
    uint64_t suspected_ns = __atomic_load_n(&link->suspected_ns, __ATOMIC_RELAXED);
    if (suspected_ns == 0) {
        return false;
    }
    if (!ep_rpc_channel_read_life(best_channel(link), &life) || life.heard_ns <= suspected_ns) {
        return true;
    }
    __atomic_store_n(&link->suspected_ns, 0, __ATOMIC_RELAXED);
    return false;
}

bool ep_peer_link_is_silent(ep_peer_link *link, uint64_t now_ns, uint64_t sent_ns,
                            uint64_t *out_next_ns)
{
    ep_rpc_channel_life life;
    *out_next_ns = EP_TIME_NEVER;
    if (ep_peer_link_is_suspected(link)) {
        return true;
    }
    if (!ep_rpc_channel_read_life(best_channel(link), &life)) {
        return false; /* the connection has ended, and the frame's error is on its way */
    }
    switch (ep_silence_judge(now_ns, sent_ns, life.heard_ns, life.pinged_ns, life.blocked_ns,
                             out_next_ns)) {
    case EP_SILENCE_PING:
        ep_rpc_channel_ping(best_channel(link));
        return false;
    case EP_SILENCE_SILENT:
        __atomic_store_n(&link->suspected_ns, now_ns, __ATOMIC_RELAXED);
        return true;
    case EP_SILENCE_NOT:
        break;
    }
    return false;
}

const char *ep_peer_label(const ep_peer *peer)
{
    return peer->name[0] != 0 ? peer->name : peer->url;
}

bool ep_peer_was_tried(ep_peer *peer)
{
    pthread_mutex_lock(&peer->lock);
    const bool has_failed = peer->last_error.code != EP_OK;
    pthread_mutex_unlock(&peer->lock);
    return has_failed || peer->hello != NULL;
}

void ep_peer_link_describe(ep_peer_link *link, uint64_t now_ns, char *out_text, size_t bytes)
{
    ep_peer *peer = link->peer;
    uint64_t heard_ns = __atomic_load_n(&peer->heard_ns, __ATOMIC_RELAXED);
    char heard[48] = "never heard";
    char why[192] = "";
    if (heard_ns != 0) {
        snprintf(heard, sizeof(heard), "last heard %.1f s ago",
                 now_ns > heard_ns ? (double)(now_ns - heard_ns) / 1e9 : 0.0);
    }
    pthread_mutex_lock(&peer->lock);
    if (peer->last_error.code != EP_OK) {
        snprintf(why, sizeof(why), ": %s: %.140s", ep_err_name(peer->last_error.code),
                 peer->last_error.text);
    }
    pthread_mutex_unlock(&peer->lock);
    if (ep_peer_link_is_ready(link)) {
        bool shm = __atomic_load_n(&link->shm_ready, __ATOMIC_ACQUIRE);
        snprintf(out_text, bytes, "connected%s, %s", shm ? " by shared memory" : "", heard);
    } else {
        snprintf(out_text, bytes, "not connected to %.100s, %s%s", peer->url, heard, why);
    }
}
