/* SPDX-License-Identifier: Apache-2.0 */
/* The channel's connection: dial, Hello, loss, and redial after a jittered back-off. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"
#include "rpc/rpc_channel.h"
#include "rpc/rpc_hello.h"
#include "transport/address.h"

/*
 * on_state runs one at a time, because each step begins only after the previous one has reported:
 * CONNECTING in the timer, then READY and BROKEN in the callbacks of one connection, and only then
 * is the timer armed again.
 */
static void report(ep_rpc_channel *channel, ep_rpc_channel_state state,
                   const Expertd__V1__Hello *peer, const ep_error *error)
{
    if (channel->on_state != NULL) {
        channel->on_state(channel->arg, channel, state, peer, error);
    }
}

static ep_err schedule_locked(ep_rpc_channel *channel, uint64_t due_ns)
{
    channel->due_ns = due_ns;
    return ep_timer_arm(channel->common.timers, &channel->timer, due_ns);
}

/*
 * A dial into a network that has just lost packets may hang for ever, while the next one is
 * answered at once. So the first wait is short. It grows by half each time, up to hello_timeout_ms,
 * for peers that are only slow.
 */
#define HELLO_WAIT_FIRST_MS 500u

uint32_t ep_rpc_dial_first_wait_ms(const ep_rpc_channel *channel)
{
    uint32_t whole_ms = channel->common.limits.hello_timeout_ms;
    return channel->reconnect && HELLO_WAIT_FIRST_MS < whole_ms ? HELLO_WAIT_FIRST_MS : whole_ms;
}

static uint32_t longer_wait_ms(const ep_rpc_channel *channel)
{
    uint32_t whole_ms = channel->common.limits.hello_timeout_ms;
    return channel->hello_wait_ms < whole_ms / 3 * 2
               ? channel->hello_wait_ms + channel->hello_wait_ms / 2
               : whole_ms;
}

/* Half of the back-off plus a random part of the other half; doubles the back-off. */
static uint64_t next_backoff_ns_locked(ep_rpc_channel *channel)
{
    const ep_rpc_limits *limits = &channel->common.limits;
    uint64_t half_ns = channel->backoff_ms * EP_NS_PER_MS / 2;
    uint64_t wait_ns = half_ns + ep_splitmix64(&channel->random_state) % (half_ns + 1);
    channel->backoff_ms = channel->backoff_ms > limits->redial_max_ms / 2 ? limits->redial_max_ms
                                                                          : channel->backoff_ms * 2;
    return wait_ns;
}

/* ---- a look at a port that took the connection and gave no answer ---- */

#define LOOK_EVERY_NS (10 * EP_NS_PER_S)

/* What the look found says more than how the connection ended. */
static void explain_locked(const ep_rpc_channel *channel, ep_error *io_why)
{
    if (channel->look.code != NULL) {
        ep_error_set(io_why, EP_ERR_UNAVAILABLE, "%s: %s; %s", channel->url, channel->look.text,
                     channel->look.advice);
    }
}

static void *look(void *arg)
{
    ep_rpc_channel *channel = arg;
    ep_rpc_look found;
    ep_rpc_look_at(&channel->address, channel->look_peer, &channel->look_stop, &found);
    if (found.code != NULL && strcmp(found.code, "nobody-there") == 0) {
        /* the fault is gone by now: the next dial reports errors that are still true */
        found.code = NULL;
    }
    pthread_mutex_lock(&channel->lock);
    channel->looking = false;
    if (channel->state != EP_CHANNEL_READY) {
        channel->look = found;
    }
    if (!channel->reconnect) { /* with reconnect, another error may be the last by now */
        explain_locked(channel, &channel->last_error);
    }
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
    return NULL;
}

/* Runs on its own thread, so that dials do not wait; later errors contain what it finds. */
static void look_locked(ep_rpc_channel *channel, ep_rpc_client_link *link)
{
    uint64_t now_ns = ep_clock_now_ns();
    bool has_port =
        ep_url_has_scheme(channel->url, "tcp") || ep_url_has_scheme(channel->url, "tls+tcp");
    if (!has_port || channel->looking ||
        (channel->looked_ns != 0 && now_ns < channel->looked_ns + LOOK_EVERY_NS)) {
        return;
    }
    ep_conn_peer(link->link.conn, channel->look_peer, sizeof(channel->look_peer));
    channel->looked_ns = now_ns;
    ep_rpc_dial_join_look(channel);
    channel->looking =
        ep_thread_start("expertd-look", look, channel, &channel->look_thread) == EP_OK;
    channel->has_looked = channel->looking;
}

void ep_rpc_dial_join_look(ep_rpc_channel *channel)
{
    if (channel->has_looked) {
        pthread_join(channel->look_thread, NULL);
        channel->has_looked = false;
    }
}

/* Called when a dial failed (link NULL) or the connection ended. */
static void lost(ep_rpc_channel *channel, ep_rpc_client_link *link, const ep_error *error)
{
    ep_error why = *error;
    if (link == NULL) {
        ep_error_prefix(&why, why.code, "%s", channel->url);
    }
    pthread_mutex_lock(&channel->lock);
    bool closing = channel->closing;
    /* no frame has arrived */
    if (link != NULL && !closing &&
        __atomic_load_n(&link->link.bytes_received, __ATOMIC_RELAXED) == 0) {
        look_locked(channel, link);
        explain_locked(channel, &why);
    }
    channel->last_error = why;
    if (!closing) {
        channel->state = EP_CHANNEL_BROKEN;
        channel->dial_phase = channel->reconnect ? EP_DIAL_WAITING : EP_DIAL_OVER;
        bool was_ready = link != NULL && link->ready;
        channel->hello_wait_ms =
            was_ready ? ep_rpc_dial_first_wait_ms(channel) : longer_wait_ms(channel);
        /* a dial timeout that fires late then finds nothing to do */
        channel->due_ns = EP_TIME_NEVER;
    }
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
    if (closing) {
        return; /* destroy has already ended every call */
    }
    ep_rpc_channel_fail_calls(channel, link, &why);
    report(channel, EP_CHANNEL_BROKEN, NULL, &why);

    pthread_mutex_lock(&channel->lock);
    if (!channel->closing && channel->reconnect &&
        schedule_locked(channel, ep_clock_now_ns() + next_backoff_ns_locked(channel)) != EP_OK) {
        channel->dial_phase = EP_DIAL_OVER;
        ep_error_set(&channel->last_error, EP_ERR_NO_MEMORY, "%s: no memory to connect again",
                     channel->url);
        pthread_cond_broadcast(&channel->changed);
    }
    pthread_mutex_unlock(&channel->lock);
}

/* ---- Hello ---- */

static ep_err send_hello(ep_rpc_client_link *link)
{
    ep_rpc_channel *channel = link->channel;
    Expertd__V1__Hello hello;
    ep_rpc_out *out;
    char token[EP_TOKEN_BYTES_MAX + 1] = "";
    ep_rpc_hello_fill(&channel->common, link->link.payload_crc, &hello);
    hello.connection_class = channel->connection_class;
    hello.token = ep_rpc_unconst(channel->common.token);
    if (channel->common.credentials != NULL) {
        ep_rpc_role role;
        /* an unknown role is refused by the peer */
        (void)ep_rpc_role_read(channel->common.role, &role, NULL);
        ep_rpc_credentials_show(channel->common.credentials, role, token);
        hello.token = token;
    }
    ep_err err = ep_rpc_out_create_request(channel->common.pool,
                                           ep_rpc_request_header_bytes(NULL, 0, &hello.base), NULL,
                                           0, &hello.base, NULL, &out);
    explicit_bzero(token, sizeof(token));
    if (err != EP_OK) {
        return err;
    }
    out->frame.kind = EP_FRAME_REQUEST;
    out->frame.call_id = link->hello_id;
    out->frame.method_id = EP_RPC_HELLO_METHOD;
    out->frame.deadline_us = EP_FRAME_DEADLINE_NONE;
    err = ep_rpc_link_send(&link->link, out);
    if (err != EP_OK) {
        ep_rpc_out_destroy(out);
    }
    return err;
}

static ep_err read_hello(ep_rpc_client_link *link, const ep_frame *frame, const ep_buffer *buffer,
                         ep_error *out_error)
{
    const uint8_t *header = buffer->data + EP_FRAME_FIXED_BYTES;
    bool payload_crc = link->link.payload_crc;
    ProtobufCMessage *message;
    if (frame->kind != EP_FRAME_REPLY || frame->method_id != EP_RPC_HELLO_METHOD ||
        frame->call_id != link->hello_id) {
        return ep_error_set(
            out_error, EP_ERR_PROTOCOL,
            "the first frame is a %s frame of method 0x%04x, must be the reply to Hello",
            ep_frame_kind_name(frame->kind), frame->method_id);
    }
    if (frame->status != 0) { /* not checked by CRC: the refusal may be about the CRC itself */
        ep_rpc_status_read(link->channel->common.pool, frame->status, header, frame->header_bytes,
                           out_error);
        return ep_error_prefix(out_error, out_error->code, "the peer refused Hello");
    }
    ep_err err = ep_rpc_unpack(&link->budget, &expertd__v1__hello__descriptor, header,
                               frame->header_bytes, &message, out_error);
    if (err == EP_OK) {
        link->peer = (const Expertd__V1__Hello *)message;
        err = ep_rpc_hello_check_server(payload_crc, link->peer, out_error);
    }
    return err == EP_OK ? ep_rpc_payload_check(frame, buffer->data, payload_crc, out_error) : err;
}

void ep_rpc_client_hello(ep_rpc_client_link *link, const ep_frame *frame, const ep_buffer *buffer)
{
    ep_rpc_channel *channel = link->channel;
    ep_error why;
    if (read_hello(link, frame, buffer, &why) != EP_OK) {
        ep_rpc_link_close(&link->link, &why);
        return;
    }
    link->ready = true;
    ep_rpc_link_go_live(&link->link, link->peer->node, NULL);
    pthread_mutex_lock(&channel->lock);
    const ep_rpc_limits *limits = &channel->common.limits;
    link->frame_bytes_max =
        ep_rpc_hello_bound(limits->frame_bytes_max, link->peer->frame_bytes_max);
    link->header_bytes_max =
        ep_rpc_hello_bound(limits->header_bytes_max, link->peer->header_bytes_max);
    link->takes_answered = ep_rpc_hello_has_feature(link->peer, EP_RPC_FEATURE_ANSWERED);
    link->credit_bytes = link->peer->credit_bytes;
    link->granted_bytes = link->peer->credit_bytes;
    bool closing = channel->closing;
    if (!closing) {
        channel->state = EP_CHANNEL_READY;
        channel->looked_ns = 0;
        channel->look.code = NULL;
        channel->backoff_ms = limits->redial_min_ms;
        __atomic_store_n(&channel->blocked, false, __ATOMIC_SEQ_CST);
    }
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
    if (!closing) {
        report(channel, EP_CHANNEL_READY, link->peer, NULL);
        ep_rpc_channel_pump(channel);
    }
}

/* ---- the connection's callbacks; on_frame and on_sent are in rpc_reply.c ---- */

static void client_closed(ep_rpc_link *base, const ep_error *error)
{
    ep_rpc_client_link *link = (ep_rpc_client_link *)base;
    ep_rpc_channel *channel = link->channel;
    pthread_mutex_lock(&channel->lock);
    link->dead = true;
    link->dead_error = *error;
    if (link->dead_error.code == EP_ERR_CLOSED) {
        link->dead_error.code =
            EP_ERR_CONNECTION_LOST; /* closed on this side, but not by the caller of this channel */
    }
    ep_error_prefix(&link->dead_error, link->dead_error.code, "%s", channel->url);
    ep_error why = link->dead_error;
    bool current = channel->link == link;
    if (current) {
        channel->link = NULL;
    }
    pthread_mutex_unlock(&channel->lock);
    lost(channel, link, &why);
    if (current) {
        ep_rpc_link_unref(base);
    }
}

static void client_free(ep_rpc_link *base)
{
    ep_rpc_client_link *link = (ep_rpc_client_link *)base;
    ep_rpc_channel *channel = link->channel;
    ep_rpc_budget_fini(&link->budget);
    free(link);
    pthread_mutex_lock(&channel->lock);
    channel->links_alive--;
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
}

static const ep_rpc_link_ops client_ops = {.on_frame = ep_rpc_client_frame,
                                           .on_closed = client_closed,
                                           .on_sent = ep_rpc_client_sent,
                                           .on_free = client_free};

/* ---- dialling ---- */

/* Creates a link for the new connection; NULL (connection released): closing or out of memory. */
static ep_rpc_client_link *adopt(ep_rpc_channel *channel, ep_conn *taken_conn)
{
    ep_rpc_client_link *link = calloc(1, sizeof(*link));
    if (link == NULL) {
        ep_conn_release(taken_conn);
        return NULL;
    }
    link->channel = channel;
    ep_rpc_link_init(&link->link, &client_ops, &channel->common, taken_conn);
    link->link.hello_wait_ms = channel->hello_wait_ms;
    ep_rpc_link_set_crc(&link->link, ep_rpc_hello_wants_crc(&channel->common, taken_conn));
    ep_rpc_budget_init(&link->budget, channel->common.pool,
                       channel->common.limits.unpack_bytes_max);
    link->hello_id = ep_rpc_call_id_next();
    ep_rpc_link_ref(&link->link); /* the reference of channel->link */
    pthread_mutex_lock(&channel->lock);
    channel->link = link;
    channel->links_alive++;
    channel->dial_phase = EP_DIAL_CONNECTED;
    pthread_mutex_unlock(&channel->lock);
    return link;
}

static void dialled(void *arg, ep_conn *taken_conn, const ep_error *error)
{
    ep_rpc_channel *channel = arg;
    ep_error why;
    if (taken_conn == NULL) {
        why = *error;
        if (why.code == EP_ERR_CANCELLED) {
            const bool is_short = channel->hello_wait_ms < channel->common.limits.hello_timeout_ms;
            ep_error_set(&why, EP_ERR_UNAVAILABLE, "no connection within %u ms%s",
                         channel->hello_wait_ms, is_short ? "; the next dial waits longer" : "");
        }
        lost(channel, NULL, &why);
        return;
    }
    ep_rpc_client_link *link = adopt(channel, taken_conn);
    if (link == NULL) {
        ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for a connection");
        lost(channel, NULL, &why);
        return;
    }
    ep_rpc_link_start(&link->link);
    ep_err err = send_hello(link);
    if (err != EP_OK) {
        ep_error_set(&why, err, "Hello cannot be sent: %s", ep_err_text(err));
        ep_rpc_link_close(&link->link, &why);
    }
    ep_rpc_link_unref(&link->link);
}

static void dial_now(ep_rpc_channel *channel)
{
    ep_dial *dial = NULL;
    ep_error why;
    pthread_mutex_lock(&channel->lock);
    ep_err err =
        schedule_locked(channel, ep_clock_now_ns() + channel->hello_wait_ms * EP_NS_PER_MS);
    pthread_mutex_unlock(&channel->lock);
    if (err != EP_OK) {
        ep_error_set(&why, err, "no memory for the dial's timer");
    } else {
        err = ep_lane_dial_begin(channel->lane, &channel->address, &channel->lane_limits, dialled,
                                 channel, &dial, &why);
    }
    if (err != EP_OK) {
        lost(channel, NULL, &why);
        return;
    }
    pthread_mutex_lock(&channel->lock);
    channel->dial = dial;
    pthread_mutex_unlock(&channel->lock);
}

/* Time to dial (EP_DIAL_WAITING), or the dial took too long (EP_DIAL_DIALING). */
static void dial_timer(ep_timer *timer, void *arg)
{
    ep_rpc_channel *channel = arg;
    (void)timer;
    pthread_mutex_lock(&channel->lock);
    if (channel->closing || ep_clock_now_ns() < channel->due_ns) {
        pthread_mutex_unlock(&channel->lock);
        return;
    }
    ep_rpc_dial_phase phase = channel->dial_phase;
    ep_dial *old = channel->dial;
    channel->dial = NULL;
    bool again = channel->state == EP_CHANNEL_BROKEN;
    if (phase == EP_DIAL_WAITING) {
        channel->dial_phase = EP_DIAL_DIALING;
        channel->state = EP_CHANNEL_CONNECTING;
        pthread_cond_broadcast(&channel->changed);
    }
    pthread_mutex_unlock(&channel->lock);
    if (old != NULL) {
        ep_dial_release(old); /* cancels a dial that is still running: dialled() then reports */
    }
    if (phase == EP_DIAL_WAITING) {
        if (again) {
            report(channel, EP_CHANNEL_CONNECTING, NULL, NULL);
        }
        dial_now(channel);
    }
}

ep_err ep_rpc_dial_start_locked(ep_rpc_channel *channel, ep_error *out_error)
{
    ep_timer_init(&channel->timer, dial_timer, channel);
    ep_err err = schedule_locked(channel, ep_clock_now_ns());
    return err == EP_OK ? EP_OK : ep_error_set(out_error, err, "no memory for the channel's timer");
}

void ep_rpc_channel_hurry(ep_rpc_channel *channel)
{
    pthread_mutex_lock(&channel->lock);
    /* due_ns is EP_TIME_NEVER while the last loss is being reported, which the dial must await */
    if (!channel->closing && channel->reconnect && channel->dial_phase == EP_DIAL_WAITING &&
        channel->due_ns != EP_TIME_NEVER) {
        channel->backoff_ms = channel->common.limits.redial_min_ms;
        ep_err err = schedule_locked(channel, ep_clock_now_ns());
        EP_ASSERT(err == EP_OK); /* it was armed before: its place in the heap is reused */
    }
    pthread_mutex_unlock(&channel->lock);
}

void ep_rpc_dial_stop(ep_rpc_channel *channel)
{
    /* once closing is set, nobody arms it */
    ep_timer_cancel_wait(channel->common.timers, &channel->timer);
    pthread_mutex_lock(&channel->lock);
    ep_dial *dial = channel->dial;
    channel->dial = NULL;
    pthread_mutex_unlock(&channel->lock);
    if (dial != NULL) {
        ep_dial_release(dial); /* after this, no new link appears */
    }
    pthread_mutex_lock(&channel->lock);
    ep_rpc_client_link *link = channel->link;
    if (link != NULL) {
        ep_rpc_link_ref(&link->link);
    }
    pthread_mutex_unlock(&channel->lock);
    if (link != NULL) {
        ep_rpc_link_goodbye(&link->link, EP_ERR_CLOSED, "the channel closes");
        ep_rpc_link_unref(&link->link);
    }
}
