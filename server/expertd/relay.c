/* SPDX-License-Identifier: Apache-2.0 */
#include "expertd/relay.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/host.h"
#include "transport/address.h"

/* a link that is not connected is dropped after so long without use */
#define AWAY_NS (60 * EP_NS_PER_S)
/* A neighbour that stands still counts as lost after 400 ms, so that callers ask a copy. They
 * cannot notice it themselves: they are connected only to this node, which is alive. */
#define PING_MS 100

typedef enum link_state { LINK_CONNECTING, LINK_READY, LINK_BROKEN } link_state;

/* One neighbour and connection class. */
struct ep_relay_link {
    ep_relay *relay;
    char name[EP_NODE_NAME_BYTES];
    char url[EP_URL_BYTES];
    bool prefill;
    ep_rpc_channel *channel;
    uint32_t uses;    /* parts that hold it; under the relay's lock */
    uint64_t used_ns; /* the relay's lock */
    /* under the lock below */
    pthread_mutex_t lock;
    link_state state;
    ep_error why;             /* BROKEN */
    ep_relay_part *waiting;   /* CONNECTING */
    ep_relay_part *abandoned; /* cancelled while waiting; the timer ends them */
    ep_timer timer;
};

struct ep_relay {
    ep_rpc_common common;
    const ep_tls_config *tls;
    bool insecure;
    const ep_rpc_method *forward_method;
    pthread_mutex_t lock;
    ep_relay_neighbour *neighbours;
    size_t neighbours_count;
    uint32_t links_count;
    ep_relay_link *links[EP_RELAY_LINKS_MAX];
};

ep_err ep_relay_create(const ep_relay_config *config, ep_relay **out_relay)
{
    ep_relay *relay = calloc(1, sizeof(*relay));
    if (relay == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    relay->common = *config->common;
    relay->common.node = "";
    relay->common.role = "client";
    relay->tls = config->tls;
    relay->insecure = config->insecure;
    relay->forward_method = ep_rpc_method_by_name("expertd.v1.ExpertService", "Forward");
    pthread_mutex_init(&relay->lock, NULL);
    *out_relay = relay;
    return EP_OK;
}

/* ---- the end of a part ---- */

static const Expertd__V1__RelayPart *wire_part(const ep_relay_part *part)
{
    return part->header->relay[part->index];
}

void ep_relay_release(ep_relay_part *part)
{
    ep_relay_link *link = part->link;
    if (link != NULL) {
        pthread_mutex_lock(&link->relay->lock);
        link->uses--;
        link->used_ns = ep_clock_now_ns();
        pthread_mutex_unlock(&link->relay->lock);
    }
}

/* Errors between this node and its neighbour become UNAVAILABLE, so that the caller asks
 * elsewhere. */
static ep_err code_for_caller(ep_err code)
{
    switch (code) {
    case EP_ERR_CANCELLED:
    case EP_ERR_CLOSED:
    case EP_ERR_DRAINING: /* the neighbour drains, not this node */
    case EP_ERR_CONNECTION_LOST:
    case EP_ERR_UNAUTHENTICATED:
    case EP_ERR_PERMISSION_DENIED:
    case EP_ERR_UNIMPLEMENTED:
    case EP_ERR_FAILED_PRECONDITION:
        return EP_ERR_UNAVAILABLE;
    default:
        return code;
    }
}

static void fail_part(ep_relay_part *part, const ep_error *error)
{
    ep_error own = *error;
    const char *name = wire_part(part)->node;
    ep_error_prefix(&own, error->code, "passed on to node %s", name);
    own.code =
        ep_rpc_call_is_cancelled(part->call) ? EP_ERR_CANCELLED : code_for_caller(error->code);
    snprintf(own.node, sizeof(own.node), "%s", name);
    part->done(part, &own);
}

/* ---- a part's request ---- */

static ep_err check_reply(const ep_relay_part *part, const ep_rpc_reply *reply, ep_error *out_error)
{
    const Expertd__V1__ForwardReply *header =
        (const Expertd__V1__ForwardReply *)(const void *)reply->header;
    const ep_forward_view *view = part->view;
    uint32_t count = wire_part(part)->slots_count;
    size_t bytes = (size_t)count * view->hidden * ep_dtype_bytes(view->reply_dtype);
    if (header == NULL || header->slots != count || header->hidden != view->hidden ||
        header->dtype != (uint32_t)view->reply_dtype || header->node_sum ||
        reply->tensor_bytes != bytes) {
        return ep_error_set(
            out_error, EP_ERR_DATA_LOSS,
            "the reply of %zu tensor bytes does not fit its request: %zu are needed",
            reply->tensor_bytes, bytes);
    }
    if (part->header->numerics[0] != 0 && strcmp(header->numerics, part->header->numerics) != 0) {
        return ep_error_set(out_error, EP_ERR_DATA_LOSS,
                            "the reply was computed with numerics '%.95s': '%.95s' is pinned",
                            header->numerics, part->header->numerics);
    }
    return EP_OK;
}

static void on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error)
{
    ep_relay_part *part = arg;
    ep_error wrong;
    if (error == NULL && check_reply(part, reply, &wrong) != EP_OK) {
        error = &wrong;
    }
    if (error != NULL) {
        fail_part(part, error);
        return;
    }
    memcpy(part->rows, reply->tensors, reply->tensor_bytes);
    part->done(part, NULL);
}

static ep_err start_part(ep_relay_part *part, ep_error *out_error)
{
    static const char *const keys[] = {"traceparent", "tenant"};
    const Expertd__V1__ForwardRequest *from = part->header;
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_rpc_metadata metadata[EP_ARRAY_COUNT(keys)];
    size_t metadata_count = 0;
    ep_buffer *tensors = NULL;
    ep_rpc_call_id id;
    if (ep_rpc_call_is_cancelled(part->call)) {
        return ep_error_set(out_error, EP_ERR_CANCELLED, "the caller no longer waits");
    }
    ep_err err =
        ep_relay_pack(part->view, wire_part(part)->slots_begin, wire_part(part)->slots_count,
                      ep_rpc_call_incoming(part->call)->pool, &header, &tensors);
    if (err != EP_OK) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "no buffer for %" PRIu32 " slots: %s",
                            wire_part(part)->slots_count, ep_err_text(err));
    }
    header.model = from->model;
    header.version = from->version;
    header.layer = from->layer;
    header.epoch = from->epoch;
    header.prefill = from->prefill;
    header.numerics = from->numerics;
    header.step_group = from->step_group;
    header.step_group_size = from->step_group_size;
    header.step_member = from->step_member;
    for (size_t i = 0; i < EP_ARRAY_COUNT(keys); i++) {
        const char *value = ep_rpc_call_metadata(part->call, keys[i]);
        if (value != NULL) {
            metadata[metadata_count++] = (ep_rpc_metadata){keys[i], value};
        }
    }
    ep_rpc_request request = {.id = part->id,
                              .method = part->link->relay->forward_method,
                              .header = &header.base,
                              .tensors = tensors,
                              .deadline_ns = ep_rpc_call_incoming(part->call)->deadline_ns,
                              .metadata = metadata,
                              .metadata_count = metadata_count};
    err = ep_rpc_call_start(part->link->channel, &request, on_reply, part, &id, out_error);
    ep_buffer_unref(tensors);
    return err;
}

static void run_part(ep_relay_part *part)
{
    ep_error error;
    if (start_part(part, &error) != EP_OK) {
        fail_part(part, &error);
    }
}

/* ---- links ---- */

void ep_relay_set_neighbours(ep_relay *relay, ep_relay_neighbour *taken_neighbours, size_t count)
{
    pthread_mutex_lock(&relay->lock);
    ep_relay_neighbour *former = relay->neighbours;
    relay->neighbours = taken_neighbours;
    relay->neighbours_count = count;
    pthread_mutex_unlock(&relay->lock);
    free(former);
}

/* Relay's lock held. */
static bool is_listed(const ep_relay *relay, const char *name, const char *url)
{
    size_t i = 0;
    while (i < relay->neighbours_count && (strcmp(relay->neighbours[i].name, name) != 0 ||
                                           strcmp(relay->neighbours[i].url, url) != 0)) {
        i++;
    }
    return i < relay->neighbours_count;
}

static bool is_neighbour(const ep_relay_link *link, const Expertd__V1__Hello *peer,
                         ep_error *out_error)
{
    const char *host = link->relay->common.host;
    if (strcmp(peer->node, link->name) == 0 && host[0] != 0 && strcmp(peer->host, host) == 0) {
        return true;
    }
    ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                 "at %.120s is node '%.63s' of host '%.63s', not one of host '%.63s'", link->url,
                 peer->node, peer->host, host);
    return false;
}

static void on_state(void *arg, ep_rpc_channel *channel, ep_rpc_channel_state state,
                     const Expertd__V1__Hello *peer, const ep_error *error)
{
    ep_relay_link *link = arg;
    ep_relay_part *waiting;
    ep_error why;
    (void)channel;
    if (state != EP_CHANNEL_READY && state != EP_CHANNEL_BROKEN) {
        return;
    }
    bool is_ready = state == EP_CHANNEL_READY && is_neighbour(link, peer, &why);
    if (state == EP_CHANNEL_BROKEN) {
        why = *error;
    }
    pthread_mutex_lock(&link->lock);
    link->state = is_ready ? LINK_READY : LINK_BROKEN;
    if (!is_ready) {
        link->why = why;
    }
    waiting = link->waiting;
    link->waiting = NULL;
    pthread_mutex_unlock(&link->lock);
    while (waiting != NULL) {
        ep_relay_part *part = waiting;
        waiting = part->next;
        if (is_ready) {
            run_part(part);
        } else {
            fail_part(part, &why);
        }
    }
}

/* Ends cancelled parts on the timer's thread, as the canceller still uses the parts. */
static void end_abandoned(ep_timer *timer, void *arg)
{
    ep_relay_link *link = arg;
    ep_error error;
    (void)timer;
    pthread_mutex_lock(&link->lock);
    ep_relay_part *abandoned = link->abandoned;
    link->abandoned = NULL;
    pthread_mutex_unlock(&link->lock);
    ep_error_set(&error, EP_ERR_CANCELLED, "there was no connection while the caller waited");
    while (abandoned != NULL) {
        ep_relay_part *part = abandoned;
        abandoned = part->next;
        fail_part(part, &error);
    }
}

/* Takes a part out of those that wait for a connection. False: it did not wait, or no timer. */
static bool abandon(ep_relay_part *part)
{
    ep_relay_link *link = part->link;
    bool is_abandoned = false;
    pthread_mutex_lock(&link->lock);
    ep_relay_part **at = &link->waiting;
    while (*at != NULL && *at != part) {
        at = &(*at)->next;
    }
    /* The timer is armed exactly while the list is not empty, so it is never armed twice. */
    if (*at == part &&
        (link->abandoned != NULL ||
         ep_timer_arm(link->relay->common.timers, &link->timer, ep_clock_now_ns()) == EP_OK)) {
        *at = part->next;
        part->next = link->abandoned;
        link->abandoned = part;
        is_abandoned = true;
    }
    pthread_mutex_unlock(&link->lock);
    return is_abandoned;
}

static bool shows_token(const ep_relay *relay)
{
    char token[EP_TOKEN_BYTES_MAX + 1] = "";
    if (relay->common.credentials != NULL) {
        ep_rpc_credentials_show(relay->common.credentials, EP_ROLE_CLIENT, token);
    }
    bool has_token = token[0] != 0;
    explicit_bzero(token, sizeof(token));
    return has_token;
}

/* Relay's lock held. Errors: UNAVAILABLE (no memory); of dial and channel. */
static ep_err make_link(ep_relay *relay, const Expertd__V1__RelayPart *to, bool prefill,
                        ep_error *out_error)
{
    ep_lane_address address;
    ep_err err = ep_address_for_dial(to->url, relay->tls, !relay->insecure && shows_token(relay),
                                     &address, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_relay_link *link = calloc(1, sizeof(*link));
    if (link == NULL) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "no memory for a connection");
    }
    link->relay = relay;
    link->prefill = prefill;
    link->used_ns = ep_clock_now_ns();
    snprintf(link->name, sizeof(link->name), "%s", to->node);
    snprintf(link->url, sizeof(link->url), "%s", to->url);
    pthread_mutex_init(&link->lock, NULL);
    ep_timer_init(&link->timer, end_abandoned, link);
    ep_rpc_channel_config config = {
        .common = relay->common,
        .address = {.url = link->url, .tls = address.tls},
        .connection_class = prefill ? "bulk" : "decode",
        .reconnect = true,
        .on_state = on_state,
        .arg = link,
    };
    config.common.limits.ping_ms = PING_MS;
    err = ep_rpc_channel_create(&config, &link->channel, out_error);
    if (err != EP_OK) {
        pthread_mutex_destroy(&link->lock);
        free(link);
        return err;
    }
    relay->links[relay->links_count++] = link;
    return EP_OK;
}

/* Finds or makes the link to a neighbour and counts one more use. Errors: UNAVAILABLE. */
static ep_err take_link(ep_relay *relay, const Expertd__V1__RelayPart *to, bool prefill,
                        ep_relay_link **out_link, ep_error *out_error)
{
    ep_err err = EP_OK;
    uint32_t i = 0;
    pthread_mutex_lock(&relay->lock);
    while (i < relay->links_count &&
           (relay->links[i]->prefill != prefill || strcmp(relay->links[i]->name, to->node) != 0 ||
            strcmp(relay->links[i]->url, to->url) != 0)) {
        i++;
    }
    if (!is_listed(relay, to->node, to->url)) {
        err = ep_error_set(
            out_error, EP_ERR_UNAVAILABLE,
            "node %s at '%.120s' is not of this host in the newest table, which lists %zu others",
            to->node, to->url, relay->neighbours_count);
    } else if (i == EP_RELAY_LINKS_MAX) {
        err = ep_error_set(out_error, EP_ERR_UNAVAILABLE, "%d connections to neighbours are in use",
                           EP_RELAY_LINKS_MAX);
    } else if (i == relay->links_count && make_link(relay, to, prefill, out_error) != EP_OK) {
        err = EP_ERR_UNAVAILABLE;
    }
    if (err == EP_OK) {
        *out_link = relay->links[i];
        relay->links[i]->uses++;
    } else {
        out_error->code = EP_ERR_UNAVAILABLE;
    }
    pthread_mutex_unlock(&relay->lock);
    return err;
}

void ep_relay_send(ep_relay *relay, ep_relay_part *part)
{
    ep_error error;
    part->link = NULL;
    part->id = ep_rpc_call_id_next();
    if (take_link(relay, wire_part(part), part->header->prefill, &part->link, &error) != EP_OK) {
        fail_part(part, &error);
        return;
    }
    ep_relay_link *link = part->link;
    pthread_mutex_lock(&link->lock);
    link_state state = link->state;
    if (state == LINK_CONNECTING) {
        part->next = link->waiting;
        link->waiting = part;
    } else if (state == LINK_BROKEN) {
        error = link->why;
    }
    pthread_mutex_unlock(&link->lock);
    if (state == LINK_READY) {
        run_part(part);
    } else if (state == LINK_BROKEN) {
        fail_part(part, &error);
    }
}

void ep_relay_cancel(ep_relay_part *part)
{
    if (part->link != NULL && !abandon(part)) {
        (ep_rpc_call_is_answered(part->call) ? ep_rpc_call_cancel_answered
                                             : ep_rpc_call_cancel)(part->link->channel, part->id);
    }
}

static void destroy_link(ep_relay_link *link)
{
    /* waits for callbacks, which may release the last uses */
    ep_rpc_channel_destroy(link->channel);
    ep_timer_cancel_wait(link->relay->common.timers, &link->timer);
    EP_ASSERT(link->uses == 0 && link->waiting == NULL);
    pthread_mutex_destroy(&link->lock);
    free(link);
}

void ep_relay_sweep(ep_relay *relay, uint64_t now_ns)
{
    ep_relay_link *gone[EP_RELAY_LINKS_MAX];
    uint32_t gone_count = 0;
    pthread_mutex_lock(&relay->lock);
    for (uint32_t i = 0; i < relay->links_count;) {
        ep_relay_link *link = relay->links[i];
        pthread_mutex_lock(&link->lock);
        bool is_away = link->state == LINK_BROKEN;
        pthread_mutex_unlock(&link->lock);
        bool is_old = is_away && now_ns > link->used_ns + AWAY_NS;
        if (link->uses == 0 && (is_old || !is_listed(relay, link->name, link->url))) {
            gone[gone_count++] = link;
            relay->links[i] = relay->links[--relay->links_count];
        } else {
            i++;
        }
    }
    pthread_mutex_unlock(&relay->lock);
    for (uint32_t i = 0; i < gone_count; i++) {
        destroy_link(gone[i]);
    }
}

void ep_relay_destroy(ep_relay *relay)
{
    if (relay == NULL) {
        return;
    }
    for (uint32_t i = 0; i < relay->links_count; i++) {
        destroy_link(relay->links[i]);
    }
    pthread_mutex_destroy(&relay->lock);
    free(relay->neighbours);
    free(relay);
}
