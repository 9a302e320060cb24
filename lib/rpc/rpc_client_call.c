/* SPDX-License-Identifier: Apache-2.0 */
/* A call at the client: start, wait for credit, send, and its single end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "rpc/rpc_channel.h"

/* ---- ids: one counter per process, so that no id is used twice; its high half is random and
 * identifies the process ---- */

static uint64_t first_id;
static uint64_t next_id;
static pthread_once_t next_id_once = PTHREAD_ONCE_INIT;

static void next_id_renew(void)
{
    first_id = (ep_random_id() | 1) << 32 | 1;
    next_id = first_id;
}

static void next_id_init(void)
{
    next_id_renew();
    pthread_atfork(NULL, NULL, next_id_renew); /* a forked child needs a random half of its own */
}

ep_rpc_call_id ep_rpc_call_id_next(void)
{
    pthread_once(&next_id_once, next_id_init);
    return __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
}

bool ep_rpc_call_id_was_given(ep_rpc_call_id id)
{
    pthread_once(&next_id_once, next_id_init);
    return id - first_id < __atomic_load_n(&next_id, __ATOMIC_RELAXED) - first_id;
}

/* ---- table ---- */

static ep_rpc_client_call **bucket_of(ep_rpc_channel *channel, ep_rpc_call_id id)
{
    /* our ids count up, so they spread evenly */
    return &channel->buckets[id & (channel->buckets_count - 1)];
}

ep_rpc_client_call *ep_rpc_client_call_find(ep_rpc_channel *channel, ep_rpc_call_id id)
{
    ep_rpc_client_call *call = *bucket_of(channel, id);
    while (call != NULL && call->id != id) {
        call = call->next;
    }
    return call;
}

static bool grow_table_locked(ep_rpc_channel *channel)
{
    size_t count = channel->buckets_count * 2;
    ep_rpc_client_call **buckets = calloc(count, sizeof(*buckets));
    if (buckets == NULL) {
        return false;
    }
    for (size_t i = 0; i < channel->buckets_count; i++) {
        while (channel->buckets[i] != NULL) {
            ep_rpc_client_call *call = channel->buckets[i];
            channel->buckets[i] = call->next;
            call->next = buckets[call->id & (count - 1)];
            buckets[call->id & (count - 1)] = call;
        }
    }
    free(channel->buckets);
    channel->buckets = buckets;
    channel->buckets_count = count;
    return true;
}

/* ---- waiting to be sent, oldest first ---- */

static void pending_insert_locked(ep_rpc_client_call *call, ep_rpc_out *taken_out, bool first)
{
    ep_rpc_channel *channel = call->channel;
    EP_ASSERT(!call->pending);
    call->pending = true;
    call->out = taken_out;
    channel->pending_bytes += taken_out->memory_bytes;
    call->pending_previous = first ? NULL : channel->pending_last;
    call->pending_next = first ? channel->pending_first : NULL;
    *(call->pending_previous != NULL ? &call->pending_previous->pending_next
                                     : &channel->pending_first) = call;
    *(call->pending_next != NULL ? &call->pending_next->pending_previous : &channel->pending_last) =
        call;
}

/* Removes the call from the queue and gives its frame to the caller. */
static ep_rpc_out *pending_remove_locked(ep_rpc_client_call *call)
{
    ep_rpc_channel *channel = call->channel;
    EP_ASSERT(call->pending);
    *(call->pending_previous != NULL ? &call->pending_previous->pending_next
                                     : &channel->pending_first) = call->pending_next;
    *(call->pending_next != NULL ? &call->pending_next->pending_previous : &channel->pending_last) =
        call->pending_previous;
    channel->pending_bytes -= call->out->memory_bytes;
    call->pending = false;
    call->pending_next = NULL;
    call->pending_previous = NULL;
    ep_rpc_out *out = call->out;
    call->out = NULL;
    return out;
}

/* ---- the end ---- */

void ep_rpc_client_call_ref(ep_rpc_client_call *call)
{
    __atomic_fetch_add(&call->refs, 1, __ATOMIC_RELAXED);
}

void ep_rpc_client_call_unref(ep_rpc_client_call *call)
{
    if (__atomic_sub_fetch(&call->refs, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    ep_rpc_channel *channel = call->channel;
    if (call->link != NULL) {
        ep_rpc_link_unref(&call->link->link);
    }
    pthread_mutex_lock(&channel->lock);
    bool keep = channel->free_calls_count < EP_RPC_FREE_CLIENT_CALLS_MAX;
    if (keep) {
        call->next = channel->free_calls;
        channel->free_calls = call;
        channel->free_calls_count++;
    } else {
        free(call);
    }
    channel->calls_alive--;
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
}

bool ep_rpc_client_call_end(ep_rpc_client_call *call, const ep_error *error)
{
    EP_ASSERT(!call->ended);
    call->ended = true;
    ep_rpc_client_call **at = bucket_of(call->channel, call->id);
    while (*at != call) {
        EP_ASSERT(*at != NULL);
        at = &(*at)->next;
    }
    *at = call->next;
    call->channel->calls_count--;
    if (call->pending) {
        ep_rpc_out_destroy(pending_remove_locked(call));
    }
    if (ep_timer_cancel(call->channel->common.timers, &call->timer)) {
        ep_rpc_client_call_unref(call); /* the timer's reference; the table's still exists */
    }
    if (!call->delivering) {
        return true;
    }
    call->end_left = true;
    call->ending_error.code = EP_OK;
    if (error != NULL) {
        call->ending_error = *error;
    }
    return false;
}

void ep_rpc_client_call_deliver_end(ep_rpc_client_call *call, const ep_error *error)
{
    const ep_rpc_reply end = {.end = true};
    call->on_reply(call->arg, &end, error);
}

void ep_rpc_client_call_abandon(ep_rpc_client_call *call)
{
    pthread_mutex_lock(&call->channel->lock);
    call->abandoned = true; /* a thread that is just sending the call sees this afterwards */
    bool sent = call->sent;
    bool answered = sent && call->answered && call->link->takes_answered;
    pthread_mutex_unlock(&call->channel->lock);
    if (sent) {
        ep_rpc_link_send_bare(&call->link->link,
                              &(ep_frame){.kind = EP_FRAME_CANCEL,
                                          .flags = answered ? EP_FRAME_FLAG_ANSWERED : 0,
                                          .call_id = call->id,
                                          .attempt = call->attempt});
    }
}

/* Lets the timer's thread end the call with this error: for places that must not run on_reply. Lock
 * held. */
static void end_later_locked(ep_rpc_client_call *call, const ep_error *error)
{
    if (call->ended || call->ending_error.code != EP_OK) {
        return;
    }
    call->ending_error = *error;
    if (call->pending) {
        ep_rpc_out_destroy(pending_remove_locked(call));
    }
    /* If it is not armed, it is just firing and will see ending_error. */
    if (ep_timer_cancel(call->channel->common.timers, &call->timer)) {
        ep_err err = ep_timer_arm(call->channel->common.timers, &call->timer, ep_clock_now_ns());
        EP_ASSERT(err == EP_OK); /* the timer's place in the heap is kept */
    }
}

/* Why the deadline passed, in words. Lock held. */
static void describe_deadline_locked(const ep_rpc_client_call *call, ep_error *out_error)
{
    const ep_rpc_channel *channel = call->channel;
    const char *service = call->method->service->name;
    const char *method = call->method->method->name;
    int64_t waited_us = (int64_t)((ep_clock_now_ns() - call->started_ns) / EP_NS_PER_US);
    const ep_rpc_client_link *link = call->link;
    if (link == NULL && channel->state == EP_CHANNEL_READY) {
        link = channel->link;
    }
    const char *node = link != NULL ? link->peer->node : "";
    if (call->sent || call->sending) {
        ep_error_set(
            out_error, EP_ERR_DEADLINE_EXCEEDED, "no answer from %s%s%s to %s.%s after %lld us",
            node, node[0] != 0 ? " at " : "", channel->url, service, method, (long long)waited_us);
    } else if (channel->state == EP_CHANNEL_READY) {
        ep_error_set(
            out_error, EP_ERR_DEADLINE_EXCEEDED,
            "%s.%s waited %lld us for credit of %s%s%s (%zu request bytes, %llu left of %llu) and "
            "was not sent",
            service, method, (long long)waited_us, node, node[0] != 0 ? " at " : "", channel->url,
            call->frame_bytes,
            link != NULL ? (unsigned long long)(link->granted_bytes - link->sent_bytes) : 0,
            link != NULL ? (unsigned long long)link->credit_bytes : 0);
    } else {
        ep_error_set(out_error, EP_ERR_UNAVAILABLE,
                     "%s.%s waited %lld us for a connection to %s; last report: %.200s", service,
                     method, (long long)waited_us, channel->url,
                     channel->last_error.code != EP_OK ? channel->last_error.text : "none");
    }
    out_error->waited_us = waited_us;
    snprintf(out_error->node, sizeof(out_error->node), "%s", node);
}

static void call_timer(ep_timer *timer, void *arg)
{
    ep_rpc_client_call *call = arg;
    ep_rpc_channel *channel = call->channel;
    ep_error error;
    (void)timer;
    pthread_mutex_lock(&channel->lock);
    bool ended_here = !call->ended;
    bool deliver = false;
    if (ended_here) {
        if (call->ending_error.code != EP_OK) {
            error = call->ending_error;
        } else {
            describe_deadline_locked(call, &error);
        }
        deliver = ep_rpc_client_call_end(call, &error);
    }
    pthread_mutex_unlock(&channel->lock);
    if (ended_here) {
        ep_rpc_client_call_abandon(call);
        if (deliver) {
            ep_rpc_client_call_deliver_end(call, &error);
        }
        ep_rpc_client_call_unref(call); /* the table's reference */
    }
    ep_rpc_client_call_unref(call); /* the timer's reference */
}

static void cancel(ep_rpc_channel *channel, ep_rpc_call_id id, bool answered)
{
    ep_error why;
    pthread_mutex_lock(&channel->lock);
    ep_rpc_client_call *call = ep_rpc_client_call_find(channel, id);
    if (call != NULL) {
        ep_error_set(&why, EP_ERR_CANCELLED, "%s.%s to %s was cancelled by its caller",
                     call->method->service->name, call->method->method->name, channel->url);
        call->answered = answered;
        end_later_locked(call, &why);
    }
    pthread_mutex_unlock(&channel->lock);
}

void ep_rpc_call_cancel(ep_rpc_channel *channel, ep_rpc_call_id id)
{
    cancel(channel, id, false);
}

void ep_rpc_call_cancel_answered(ep_rpc_channel *channel, ep_rpc_call_id id)
{
    cancel(channel, id, true);
}

/* Ends call if the end of link ends it. True when on_reply must run. Lock held. */
static bool fail_one_locked(ep_rpc_client_call *call, ep_rpc_client_link *link,
                            const ep_error *error)
{
    bool all = link == NULL && call->channel->closing;
    bool carried = link != NULL && call->link == link && !call->sending && !call->pending;
    bool waiting = call->pending && (!call->wait_for_ready || !call->channel->reconnect);
    if (!all && !carried && !waiting) {
        return false;
    }
    if (call->ending_error.code != EP_OK) {
        return true; /* its end was already decided: that reason is kept */
    }
    call->ending_error = *error;
    if (!all && waiting) {
        ep_error_set(&call->ending_error, EP_ERR_UNAVAILABLE,
                     "not sent, the connection ended: %.400s", error->text);
    }
    return true;
}

void ep_rpc_channel_fail_calls(ep_rpc_channel *channel, ep_rpc_client_link *link,
                               const ep_error *error)
{
    ep_rpc_client_call *failed = NULL;
    pthread_mutex_lock(&channel->lock);
    for (size_t i = 0; i < channel->buckets_count; i++) {
        for (ep_rpc_client_call *call = channel->buckets[i], *next; call != NULL; call = next) {
            next = call->next;
            if (!fail_one_locked(call, link, error)) {
                continue;
            }
            ep_error why = call->ending_error;
            if (ep_rpc_client_call_end(call, &why)) {
                call->pending_next = failed; /* the field is free: the call is no longer pending */
                failed = call;
            } else {
                ep_rpc_client_call_unref(call); /* the delivering thread has its own reference */
            }
        }
    }
    pthread_mutex_unlock(&channel->lock);
    while (failed != NULL) {
        ep_rpc_client_call *call = failed;
        failed = call->pending_next;
        ep_error why = call->ending_error;
        why.waited_us = (int64_t)((ep_clock_now_ns() - call->started_ns) / EP_NS_PER_US);
        ep_error_prefix(&why, why.code, "%s.%s failed after %lld us", call->method->service->name,
                        call->method->method->name, (long long)why.waited_us);
        ep_rpc_client_call_deliver_end(call, &why);
        ep_rpc_client_call_unref(call);
    }
}

/* ---- sending ---- */

/* What forbids for good to send this call on link. Lock held. */
static ep_err check_peer_limits_locked(const ep_rpc_client_call *call,
                                       const ep_rpc_client_link *link, ep_error *out_error)
{
    size_t header = call->out->frame.header_bytes;
    if (header > link->header_bytes_max) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request header has %zu bytes, the peer's header_bytes_max is %zu",
                            header, link->header_bytes_max);
    }
    if (call->frame_bytes > link->frame_bytes_max) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request frame has %zu bytes, the peer's frame_bytes_max is %zu",
                            call->frame_bytes, link->frame_bytes_max);
    }
    if (call->frame_bytes > link->credit_bytes) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request frame has %zu bytes, the peer's credit_bytes is %llu",
                            call->frame_bytes, (unsigned long long)link->credit_bytes);
    }
    return EP_OK;
}

/* The next call that may be sent now, marked as sending with one more reference; NULL when there is
 * none. Lock held. */
static ep_rpc_client_call *take_sendable_locked(ep_rpc_channel *channel, ep_rpc_out **out_frame)
{
    ep_rpc_client_link *link = channel->link;
    if (channel->state != EP_CHANNEL_READY || link == NULL || link->refused_send ||
        __atomic_load_n(&channel->blocked, __ATOMIC_SEQ_CST)) {
        return NULL;
    }
    while (channel->pending_first != NULL) {
        ep_rpc_client_call *call = channel->pending_first;
        ep_error error;
        if (call->deadline_ns <= ep_clock_now_ns()) {
            ep_rpc_out_destroy(pending_remove_locked(call)); /* its timer will end it */
            continue;
        }
        if (check_peer_limits_locked(call, link, &error) != EP_OK) {
            end_later_locked(call, &error);
            continue;
        }
        if (call->frame_bytes > link->granted_bytes - link->sent_bytes) {
            return NULL; /* first in, first out: a small call does not overtake */
        }
        *out_frame = pending_remove_locked(call);
        link->sent_bytes += call->frame_bytes;
        ep_rpc_link_ref(&link->link);
        call->link = link;
        call->sending = true;
        ep_rpc_client_call_ref(call);
        return call;
    }
    return NULL;
}

/* The frame was not taken: puts the call back, or ends it. Lock held. True: drop the call's
 * reference to the link. */
static bool not_sent_locked(ep_rpc_client_call *call, ep_rpc_out *out, ep_err err)
{
    ep_rpc_channel *channel = call->channel;
    ep_rpc_client_link *link = call->link;
    link->sent_bytes -= call->frame_bytes;
    if (call->ended || call->ending_error.code != EP_OK) {
        ep_rpc_out_destroy(out);
        return false;
    }
    if (link->dead && !(call->wait_for_ready && channel->reconnect)) {
        ep_error error = link->dead_error;
        error.code = EP_ERR_UNAVAILABLE;
        ep_rpc_out_destroy(out);
        end_later_locked(call, &error);
        return false;
    }
    pending_insert_locked(call, out, true);
    call->link = NULL;
    if (err == EP_ERR_RESOURCE_EXHAUSTED) {
        /* Wait for room. If no frame is being sent, no on_sent would follow: try again. */
        __atomic_store_n(&channel->blocked, true, __ATOMIC_SEQ_CST);
        if (ep_rpc_link_sends_in_flight(&link->link) == 0) {
            __atomic_store_n(&channel->blocked, false, __ATOMIC_SEQ_CST);
        }
    } else {
        link->refused_send = true; /* on_closed follows and decides about the call */
    }
    return true;
}

/* The link took the frame, or did not. Lock held. *out_tell_peer: the call was abandoned meanwhile.
 * Returns the link whose reference is to be dropped, or NULL. */
static ep_rpc_client_link *sent_locked(ep_rpc_client_call *call, ep_rpc_out *out, ep_err err,
                                       bool *out_tell_peer)
{
    ep_rpc_client_link *link = call->link;
    call->sending = false;
    if (err != EP_OK) {
        return not_sent_locked(call, out, err) ? link : NULL;
    }
    call->sent = true;
    *out_tell_peer = call->ended && call->abandoned;
    if (link->dead && !call->ended) {
        end_later_locked(call, &link->dead_error);
    }
    return NULL;
}

void ep_rpc_channel_pump(ep_rpc_channel *channel)
{
    ep_rpc_client_call *call = NULL; /* of the round before */
    ep_rpc_out *out = NULL;
    ep_err err = EP_OK;
    for (;;) {
        ep_rpc_client_link *dropped = NULL;
        bool tell_peer = false;
        pthread_mutex_lock(&channel->lock);
        if (call != NULL) {
            dropped = sent_locked(call, out, err, &tell_peer);
        }
        ep_rpc_client_call *next = take_sendable_locked(channel, &out);
        pthread_mutex_unlock(&channel->lock);
        if (tell_peer) {
            ep_rpc_client_call_abandon(call);
        }
        if (dropped != NULL) {
            ep_rpc_link_unref(&dropped->link);
        }
        if (call != NULL) {
            ep_rpc_client_call_unref(call);
        }
        if (next == NULL) {
            return;
        }
        call = next;
        out->frame.deadline_us = EP_FRAME_DEADLINE_NONE;
        if (call->deadline_ns != EP_TIME_NEVER) {
            uint64_t now_ns = ep_clock_now_ns();
            uint64_t left_ns = call->deadline_ns > now_ns ? call->deadline_ns - now_ns : 0;
            uint64_t left_us = left_ns / EP_NS_PER_US;
            out->frame.deadline_us =
                left_us < EP_FRAME_DEADLINE_NONE ? (uint32_t)left_us : EP_FRAME_DEADLINE_NONE - 1;
        }
        err = ep_rpc_link_send(&call->link->link, out);
    }
}

/* ---- start ---- */

/* Whether a call may start now. Lock held. */
static ep_err check_state_locked(ep_rpc_channel *channel, const ep_rpc_request *request,
                                 size_t queue_bytes, ep_error *out_error)
{
    size_t queue_max = channel->common.limits.send_queue_bytes_max;
    if (channel->closing) {
        return ep_error_set(out_error, EP_ERR_CLOSED, "the channel to %s is closed", channel->url);
    }
    if (channel->state != EP_CHANNEL_READY &&
        (!request->wait_for_ready || channel->dial_phase == EP_DIAL_OVER)) {
        return ep_error_set(
            out_error, EP_ERR_UNAVAILABLE, "%s is not connected; last report: %.300s", channel->url,
            channel->last_error.code != EP_OK ? channel->last_error.text : "none yet");
    }
    if (queue_bytes >
        queue_max - (channel->pending_bytes < queue_max ? channel->pending_bytes : queue_max)) {
        return ep_error_set(
            out_error, EP_ERR_RESOURCE_EXHAUSTED,
            "%zu bytes of calls to %s wait to be sent, %zu more exceed send_queue_bytes_max %zu",
            channel->pending_bytes, channel->url, queue_bytes, queue_max);
    }
    return EP_OK;
}

/* Puts a packed request into the table and the queue. Lock held. */
static ep_err enter_locked(ep_rpc_channel *channel, const ep_rpc_request *request, ep_rpc_out *out,
                           ep_rpc_reply_func on_reply, void *arg, ep_rpc_call_id *out_id,
                           ep_error *out_error)
{
    ep_err err = check_state_locked(channel, request, out->memory_bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_rpc_client_call *call = channel->free_calls;
    if (call != NULL) {
        channel->free_calls = call->next;
        channel->free_calls_count--;
    } else {
        call = malloc(sizeof(*call));
    }
    if (call == NULL ||
        (channel->calls_count >= channel->buckets_count && !grow_table_locked(channel))) {
        free(call);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a call");
    }
    memset(call, 0, offsetof(ep_rpc_client_call, ending_error));
    ep_error_clear(&call->ending_error);
    call->sequence = 0;
    call->channel = channel;
    call->method = request->method;
    call->id = request->id != 0 ? request->id : ep_rpc_call_id_next();
    call->attempt = request->attempt;
    call->wait_for_ready = request->wait_for_ready;
    call->on_reply = on_reply;
    call->arg = arg;
    call->started_ns = ep_clock_now_ns();
    call->deadline_ns = request->deadline_ns;
    call->refs = 2; /* those of the table and the timer */
    call->frame_bytes = out->frame_bytes;
    ep_timer_init(&call->timer, call_timer, call);
    err = ep_timer_arm(channel->common.timers, &call->timer, call->deadline_ns);
    if (err != EP_OK) {
        free(call);
        return ep_error_set(out_error, err, "no memory for a call's timer");
    }
    out->frame.kind = EP_FRAME_REQUEST;
    out->frame.call_id = call->id;
    out->frame.attempt = call->attempt;
    out->frame.method_id = call->method->id;
    out->trace = request->trace;
    ep_rpc_client_call **bucket = bucket_of(channel, call->id);
    call->next = *bucket;
    *bucket = call;
    channel->calls_count++;
    channel->calls_alive++;
    pending_insert_locked(call, out, false);
    if (out_id != NULL) {
        *out_id = call->id;
    }
    return EP_OK;
}

ep_err ep_rpc_call_start(ep_rpc_channel *channel, const ep_rpc_request *request,
                         ep_rpc_reply_func on_reply, void *arg, ep_rpc_call_id *out_id,
                         ep_error *out_error)
{
    const ep_rpc_limits *limits = &channel->common.limits;
    EP_ASSERT(request->method != NULL &&
              request->header->descriptor == request->method->method->input);
    const size_t header =
        ep_rpc_request_header_bytes(request->metadata, request->metadata_count, request->header);
    if (header > limits->header_bytes_max) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request header has %zu bytes, header_bytes_max is %zu", header,
                            limits->header_bytes_max);
    }
    const size_t tensor_bytes = request->tensors != NULL ? request->tensors->bytes : 0;
    if (tensor_bytes > limits->frame_bytes_max ||
        ep_frame_tensor_offset((uint32_t)header) > limits->frame_bytes_max - tensor_bytes) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "request has %zu header and %zu tensor bytes, frame_bytes_max is %zu",
                            header, tensor_bytes, limits->frame_bytes_max);
    }
    ep_rpc_out *out;
    ep_buffer *tensors = request->tensors != NULL ? ep_buffer_ref(request->tensors) : NULL;
    ep_err err = ep_rpc_out_create_request(channel->common.pool, header, request->metadata,
                                           request->metadata_count, request->header, tensors, &out);
    if (err != EP_OK) {
        ep_buffer_unref(tensors);
        ep_error_set(out_error, err, "no buffer for a request: %s", ep_err_text(err));
        pthread_mutex_lock(&channel->lock);
        const ep_err state = check_state_locked(channel, request, 0, out_error);
        pthread_mutex_unlock(&channel->lock);
        /* nobody waits for a buffer when the channel is not ready: report the state */
        return state != EP_OK ? state : err;
    }
    pthread_mutex_lock(&channel->lock);
    err = enter_locked(channel, request, out, on_reply, arg, out_id, out_error);
    pthread_mutex_unlock(&channel->lock);
    if (err != EP_OK) {
        ep_rpc_out_destroy(out);
        return err;
    }
    ep_rpc_channel_pump(channel);
    return EP_OK;
}
