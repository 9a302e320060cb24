/* SPDX-License-Identifier: Apache-2.0 */
/* A node's two channels and their state changes. */
#include "peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "silence.h"

static const char *const class_names[EP_PEER_CLASSES] = {"decode", "bulk"};

static void note_error(ep_peer *peer, const ep_error *error)
{
    pthread_mutex_lock(&peer->lock);
    peer->last_error = *error;
    peer->last_error_ns = ep_clock_now_ns();
    pthread_mutex_unlock(&peer->lock);
}

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
        __atomic_store_n(&link->ready, false, __ATOMIC_RELEASE); /* calls learn it from their own frames */
        return;
    }
    __atomic_store_n(&peer->draining, false, __ATOMIC_RELAXED);
    __atomic_store_n(&link->suspected_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&peer->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    if (hello != NULL) {
        __atomic_store_n(&peer->frame_bytes_max, hello->frame_bytes_max, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&link->ready, true, __ATOMIC_RELEASE);
    peer->config.on_ready(peer->config.arg, peer, link->class_index, hello);
}

static ep_err peer_new(const ep_peer_config *config, ep_peer **out_peer, ep_error *out_error)
{
    ep_peer *peer = calloc(1, sizeof(*peer));
    if (peer == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for node %s", config->address.url);
    }
    pthread_mutex_init(&peer->lock, NULL);
    peer->refs = 1;
    peer->config = *config;
    snprintf(peer->name, sizeof(peer->name), "%s", config->name);
    snprintf(peer->url, sizeof(peer->url), "%s", config->address.url);
    ep_error_clear(&peer->last_error);
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
        peer->links[i] = (ep_peer_link){.peer = peer, .class_index = (ep_peer_class)i};
        ep_rpc_channel_config channel = {.common = config->common,
                                         .address = config->address,
                                         .connection_class = class_names[i],
                                         .reconnect = true,
                                         .on_state = on_state,
                                         .arg = &peer->links[i],
                                         .late_replies = config->late_replies};
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
        ep_rpc_channel *channel = peer->links[i].channel;
        peer->links[i].channel = NULL;
        ep_rpc_channel_destroy(channel);
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

bool ep_peer_is_suspected(ep_peer *peer, ep_peer_class class_index)
{
    ep_peer_link *link = &peer->links[class_index];
    ep_rpc_channel_life life;
    uint64_t suspected_ns = __atomic_load_n(&link->suspected_ns, __ATOMIC_RELAXED);
    if (suspected_ns == 0) {
        return false;
    }
    if (!ep_rpc_channel_read_life(link->channel, &life) || life.heard_ns <= suspected_ns) {
        return true;
    }
    __atomic_store_n(&link->suspected_ns, 0, __ATOMIC_RELAXED);
    return false;
}

bool ep_peer_is_silent(ep_peer *peer, ep_peer_class class_index, uint64_t now_ns, uint64_t sent_ns,
                       uint64_t *out_next_ns)
{
    ep_peer_link *link = &peer->links[class_index];
    ep_rpc_channel_life life;
    *out_next_ns = EP_TIME_NEVER;
    if (ep_peer_is_suspected(peer, class_index)) {
        return true;
    }
    if (!ep_rpc_channel_read_life(link->channel, &life)) {
        return false; /* its end is on its way to the frame */
    }
    switch (ep_silence_judge(now_ns, sent_ns, life.heard_ns, life.pinged_ns, out_next_ns)) {
    case EP_SILENCE_PING:
        ep_rpc_channel_ping(link->channel);
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

void ep_peer_heard(ep_peer *peer, bool draining)
{
    __atomic_store_n(&peer->heard_ns, ep_clock_now_ns(), __ATOMIC_RELAXED);
    if (draining) {
        __atomic_store_n(&peer->draining, true, __ATOMIC_RELAXED);
    }
}

void ep_peer_describe(ep_peer *peer, ep_peer_class class_index, uint64_t now_ns, char *out_text, size_t bytes)
{
    uint64_t heard_ns = __atomic_load_n(&peer->heard_ns, __ATOMIC_RELAXED);
    char heard[48] = "never heard";
    char why[192] = "";
    if (heard_ns != 0) {
        snprintf(heard, sizeof(heard), "last heard %.1f s ago",
                 now_ns > heard_ns ? (double)(now_ns - heard_ns) / 1e9 : 0.0);
    }
    pthread_mutex_lock(&peer->lock);
    if (peer->last_error.code != EP_OK) {
        snprintf(why, sizeof(why), ": %s: %.140s", ep_err_name(peer->last_error.code), peer->last_error.text);
    }
    pthread_mutex_unlock(&peer->lock);
    if (ep_peer_is_ready(peer, class_index)) {
        snprintf(out_text, bytes, "connected, %s", heard);
    } else {
        snprintf(out_text, bytes, "not connected to %.100s, %s%s", peer->url, heard, why);
    }
}
