/* SPDX-License-Identifier: Apache-2.0 */
/* One call at the server: checks before its handler runs, functions for handlers, cancel, end. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "expert.pb-c.h"
#include "rpc/rpc_server.h"

/* ---- life ---- */

static void call_deadline(ep_timer *timer, void *arg)
{
    ep_rpc_call *call = arg;
    (void)timer;
    ep_rpc_call_cancelled(call, false);
    ep_rpc_call_unref(call);
}

ep_rpc_call *ep_rpc_call_create(ep_rpc_origin *origin, const ep_frame *frame,
                                ep_buffer *taken_buffer)
{
    ep_rpc_server *server = origin->server;
    pthread_mutex_lock(&server->lock);
    ep_rpc_call *call = server->free_calls;
    if (call != NULL) {
        server->free_calls = call->next;
        server->free_calls_count--;
    }
    pthread_mutex_unlock(&server->lock);
    if (call == NULL) {
        call = malloc(sizeof(*call));
        if (call == NULL) {
            return NULL;
        }
        pthread_mutex_init(&call->lock, NULL);
        pthread_cond_init(&call->cancel_done, NULL);
    }
    const size_t kept_bytes = offsetof(ep_rpc_call, origin);
    memset((uint8_t *)call + kept_bytes, 0, sizeof(*call) - kept_bytes);
    call->reply_error.code = EP_OK;
    call->origin = origin;
    call->attempt = frame->attempt;
    call->method_id = frame->method_id;
    call->frame = taken_buffer;
    call->frame_bytes = taken_buffer->bytes;
    call->incoming = (ep_rpc_incoming){.number = frame->call_id,
                                       .received_ns = ep_clock_now_ns(),
                                       .deadline_ns = EP_TIME_NEVER,
                                       .tensor_bytes = (size_t)frame->tensor_bytes,
                                       .pool = origin->pool,
                                       .peer_node = origin->node};
    if (frame->tensor_bytes > 0) {
        call->incoming.tensors = taken_buffer->data + frame->tensor_offset;
    }
    if (frame->deadline_us != EP_FRAME_DEADLINE_NONE) {
        call->incoming.deadline_ns = call->incoming.received_ns + frame->deadline_us * EP_NS_PER_US;
    }
    ep_rpc_budget_init(&call->budget, origin->pool, server->common.limits.unpack_bytes_max);
    call->refs = 1;
    ep_timer_init(&call->timer, call_deadline, call);
    __atomic_fetch_add(&server->stats.calls_total, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&server->stats.calls_in_flight, 1, __ATOMIC_RELAXED);
    return call;
}

void ep_rpc_call_free(ep_rpc_call *call)
{
    pthread_cond_destroy(&call->cancel_done);
    pthread_mutex_destroy(&call->lock);
    free(call);
}

void ep_rpc_call_ref(ep_rpc_call *call)
{
    __atomic_fetch_add(&call->refs, 1, __ATOMIC_RELAXED);
}

void ep_rpc_call_unref(ep_rpc_call *call)
{
    if (__atomic_sub_fetch(&call->refs, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    ep_rpc_origin *origin = call->origin;
    ep_rpc_server *server = origin->server;
    ep_rpc_budget_fini(&call->budget);
    ep_buffer_unref(call->frame);
    ep_buffer_unref(call->attached);
    ep_rpc_out_destroy(call->reply);
    __atomic_fetch_sub(&server->stats.calls_in_flight, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&server->lock);
    bool keep = server->free_calls_count < EP_RPC_FREE_CALLS_MAX;
    if (keep) {
        call->next = server->free_calls;
        server->free_calls = call;
        server->free_calls_count++;
    }
    pthread_mutex_unlock(&server->lock);
    if (!keep) {
        ep_rpc_call_free(call);
    }
    /* last, because the server may be freed once nobody refers to its origins */
    origin->ops->unref(origin);
}

/* ---- from a request to its handler ---- */

ProtobufCService *ep_rpc_service_find(const ep_rpc_server *server,
                                      const ProtobufCServiceDescriptor *descriptor)
{
    for (size_t i = 0; i < server->services_count; i++) {
        if (server->services[i]->descriptor == descriptor) {
            return server->services[i];
        }
    }
    return NULL;
}

static ep_err find_method(ep_rpc_call *call, ProtobufCService **out_service, ep_error *out_error)
{
    const ep_rpc_origin *origin = call->origin;
    const ep_rpc_method *method = ep_rpc_method_by_id(call->method_id);
    if (method == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED, "method id 0x%04x is not known here",
                            call->method_id);
    }
    call->method = method;
    /* checked before the caller can learn what is served here */
    if (method->role != EP_ROLE_CLIENT && method->role != origin->role) {
        return ep_error_set(out_error, EP_ERR_PERMISSION_DENIED,
                            "%s.%s needs role %s, the peer has role %s", method->service->name,
                            method->method->name, ep_rpc_role_name(method->role),
                            ep_rpc_role_name(origin->role));
    }
    *out_service = ep_rpc_service_find(origin->server, method->service);
    if (*out_service == NULL) {
        const ep_rpc_common *common = &origin->server->common;
        bool is_node = strcmp(common->role, "node") == 0;
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "service %s (method %s, id 0x%04x) is not served by this process, which is %s%s; by "
            "default a coordinator listens on port 7410, a node on 7420",
            method->service->name, method->method->name, method->id, is_node ? "node " : "a ",
            is_node ? common->node : common->role);
    }
    return EP_OK;
}

static ep_err check_admission(const ep_rpc_call *call, const ep_frame *frame, uint32_t calls,
                              ep_error *out_error)
{
    const ep_rpc_origin *origin = call->origin;
    const ep_rpc_limits *limits = &origin->server->common.limits;
    const ep_rpc_method *method = call->method;
    if (origin->unary_only && method->stream != EP_RPC_UNARY) {
        return ep_error_set(
            out_error, EP_ERR_UNIMPLEMENTED,
            "%s.%s streams its replies, and here one request has one reply; call it on a listen "
            "address",
            method->service->name, method->method->name);
    }
    if (calls > limits->calls_per_connection_max) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "connection has %u calls in flight, calls_per_connection_max is %u",
                            calls, limits->calls_per_connection_max);
    }
    if (frame->deadline_us == 0) {
        return ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED, "%s.%s arrived with no time left",
                            method->service->name, method->method->name);
    }
    const bool is_work = method->service == &expertd__v1__expert_service__descriptor ||
                         method->service == &expertd__v1__weight_files__descriptor;
    return is_work ? ep_rpc_call_check_draining(call, out_error) : EP_OK;
}

/* Audits calls that the role does not allow, and all calls of operators. */
static void audit_call(const ep_rpc_call *call, bool allowed)
{
    const ep_rpc_origin *origin = call->origin;
    const ep_rpc_method *method = call->method;
    char name[128];
    ep_rpc_audit_event event = {.peer = origin->peer,
                                .node = origin->node,
                                .role = ep_rpc_role_name(origin->role),
                                .label = origin->label,
                                .method = name};
    snprintf(name, sizeof(name), "%s.%s", method->service->name, method->method->name);
    if (allowed) {
        ep_rpc_audit_admin(&event);
    } else {
        ep_rpc_audit_refused(&origin->server->audit, EP_REFUSED_METHOD, &event);
    }
}

void ep_rpc_service_dispatch(ep_rpc_call *call, const ep_frame *frame, uint32_t calls)
{
    ep_rpc_origin *origin = call->origin;
    ProtobufCService *service = NULL;
    ProtobufCMessage *input = NULL;
    ep_error error;
    ep_err err = ep_rpc_payload_check(frame, call->frame->data, origin->payload_crc, &error);
    if (err == EP_ERR_PROTOCOL) {
        origin->ops->misbehaved(origin, &error);
    }
    if (err == EP_OK && origin->ops->admit != NULL) {
        err = origin->ops->admit(origin, call, frame, &error);
    }
    if (err == EP_OK) {
        err = find_method(call, &service, &error);
        const bool is_refused = err == EP_ERR_PERMISSION_DENIED;
        if (is_refused || (call->method != NULL && call->method->role == EP_ROLE_OPERATOR)) {
            audit_call(call, !is_refused);
        }
    }
    if (err == EP_OK) {
        err = check_admission(call, frame, calls, &error);
    }
    if (err == EP_OK) {
        err = ep_rpc_request_unpack(&call->budget, call->method->method->input,
                                    call->frame->data + EP_FRAME_FIXED_BYTES, frame->header_bytes,
                                    &call->call_header, &input, &error);
    }
    if (err != EP_OK) {
        ep_rpc_call_finish(call, err, &error);
        return;
    }
    service->invoke(service, call->method->method_index, input, ep_rpc_call_closure, call);
}

/* ---- functions for handlers ---- */

const ep_rpc_incoming *ep_rpc_call_incoming(const ep_rpc_call *call)
{
    return &call->incoming;
}

void ep_rpc_call_set_trace(ep_rpc_call *call, ep_trace_id trace)
{
    call->trace = trace;
}

ep_err ep_rpc_call_check_draining(const ep_rpc_call *call, ep_error *out_error)
{
    const ep_rpc_server *server = call->origin->server;
    return !__atomic_load_n(&server->draining_flag, __ATOMIC_SEQ_CST)
               ? EP_OK
               : ep_error_set(out_error, EP_ERR_DRAINING, "%s is draining and takes no new work",
                              server->common.node[0] != 0 ? server->common.node : "the node");
}

const char *ep_rpc_call_metadata(const ep_rpc_call *call, const char *key)
{
    for (size_t i = 0; i < call->call_header->n_metadata; i++) {
        if (strcmp(call->call_header->metadata[i]->key, key) == 0) {
            return call->call_header->metadata[i]->value;
        }
    }
    return NULL;
}

/* ---- cancel ---- */

bool ep_rpc_call_is_cancelled(const ep_rpc_call *call)
{
    return __atomic_load_n(&call->cancelled, __ATOMIC_ACQUIRE) ||
           (call->incoming.deadline_ns != EP_TIME_NEVER &&
            call->incoming.deadline_ns <= ep_clock_now_ns());
}

/* Runs on_cancel if there is one; finish waits for it. The lock is held, dropped for the callback,
 * and held again. */
static void run_on_cancel_locked(ep_rpc_call *call)
{
    void (*func)(void *arg, ep_rpc_call *call) = call->on_cancel;
    if (func == NULL || call->finished) {
        return;
    }
    call->on_cancel = NULL;
    call->cancel_running = true;
    call->cancel_thread = pthread_self();
    pthread_mutex_unlock(&call->lock);
    func(call->cancel_arg, call);
    pthread_mutex_lock(&call->lock);
    call->cancel_running = false;
    pthread_cond_broadcast(&call->cancel_done);
}

bool ep_rpc_call_is_answered(const ep_rpc_call *call)
{
    return __atomic_load_n(&call->cancelled, __ATOMIC_ACQUIRE) && call->answered;
}

void ep_rpc_call_cancelled(ep_rpc_call *call, bool answered)
{
    pthread_mutex_lock(&call->lock);
    if (!call->cancelled) {
        call->answered = answered;
        __atomic_store_n(&call->cancelled, true, __ATOMIC_RELEASE);
        run_on_cancel_locked(call);
    }
    pthread_mutex_unlock(&call->lock);
}

/* Lets the timer cancel the call at due_ns, or sooner if that is running already. The timer then
 * holds a reference. Errors: NO_MEMORY. */
static ep_err arm_cancel_locked(ep_rpc_call *call, uint64_t due_ns)
{
    ep_timer_service *timers = call->origin->server->common.timers;
    if (call->timer_held && !ep_timer_cancel(timers, &call->timer)) {
        return EP_OK; /* it is running, which is the cancel */
    }
    ep_err err = ep_timer_arm(timers, &call->timer, due_ns);
    if (err == EP_OK && !call->timer_held) {
        ep_rpc_call_ref(call);
    } else if (err != EP_OK && call->timer_held) {
        __atomic_fetch_sub(&call->refs, 1, __ATOMIC_RELAXED); /* not the last: the caller has one */
    }
    call->timer_held = err == EP_OK;
    return err;
}

void ep_rpc_call_on_cancel(ep_rpc_call *call, void (*func)(void *arg, ep_rpc_call *call), void *arg)
{
    ep_rpc_call_ref(call); /* func may finish the call */
    pthread_mutex_lock(&call->lock);
    EP_ASSERT(call->on_cancel == NULL && !call->finished);
    call->on_cancel = func;
    call->cancel_arg = arg;
    if (call->cancelled) {
        run_on_cancel_locked(call);
    } else if (call->incoming.deadline_ns != EP_TIME_NEVER && !call->timer_held) {
        /* if it fails, only the caller's own cancel can end the wait */
        arm_cancel_locked(call, call->incoming.deadline_ns);
    }
    pthread_mutex_unlock(&call->lock);
    ep_rpc_call_unref(call);
}

/* ---- replies ---- */

void ep_rpc_call_set_patient(ep_rpc_call *call)
{
    call->is_patient = true;
}

void ep_rpc_call_attach(ep_rpc_call *call, ep_buffer *taken_tensors)
{
    pthread_mutex_lock(&call->lock);
    ep_buffer *before = call->attached;
    call->attached = taken_tensors;
    pthread_mutex_unlock(&call->lock);
    ep_buffer_unref(before);
}

/* Sets the fields that every reply frame of this call has. */
static void fill_frame(const ep_rpc_call *call, ep_rpc_out *out, ep_frame_kind kind)
{
    out->frame.kind = kind;
    out->frame.flags = __atomic_load_n(&call->origin->server->draining_flag, __ATOMIC_ACQUIRE);
    out->frame.call_id = call->incoming.number;
    out->frame.attempt = call->attempt;
    out->frame.method_id = call->method_id;
    out->frame.stream_sequence = call->sequence;
    out->trace = call->trace;
}

/* Packs a reply and its tensors. On failure reply_error says why. The lock is held. */
static ep_rpc_out *pack_reply_locked(ep_rpc_call *call, const ProtobufCMessage *message)
{
    const ep_rpc_origin *origin = call->origin;
    ep_rpc_out *out = NULL;
    size_t header = protobuf_c_message_get_packed_size(message);
    size_t header_max = origin->peer_header_bytes_max;
    size_t tensors = call->attached != NULL ? call->attached->bytes : 0;
    size_t frame_max = origin->peer_frame_bytes_max;
    if (header > header_max) {
        ep_error_set(&call->reply_error, EP_ERR_INTERNAL,
                     "reply header has %zu bytes, header_bytes_max is %zu", header, header_max);
    } else if (tensors > frame_max ||
               ep_frame_tensor_offset((uint32_t)header) > frame_max - tensors) {
        ep_error_set(
            &call->reply_error, EP_ERR_INVALID_ARGUMENT,
            "the reply has %zu header and %zu tensor bytes, a frame to this peer may have up to "
            "%zu; ask for less",
            header, tensors, frame_max);
    } else {
        ep_err err = ep_rpc_out_create(origin->pool, header, call->attached, &out);
        if (err == EP_OK) {
            protobuf_c_message_pack(message, out->header);
            call->attached = NULL;
            return out;
        }
        ep_error_set(&call->reply_error, err, "no memory for a reply of %zu header bytes", header);
    }
    ep_buffer_unref(call->attached);
    call->attached = NULL;
    return NULL;
}

/* The frame that ends the call; NULL when out of memory. */
static ep_rpc_out *last_frame(ep_rpc_call *call, ep_err code, const ep_error *error)
{
    bool stream = call->method != NULL && call->method->stream == EP_RPC_SERVER_STREAM;
    ep_rpc_out *out = NULL;
    if (code == EP_OK && !stream) {
        out = call->reply;
        call->reply = NULL;
    } else {
        ep_rpc_status_fields fields;
        ep_rpc_status_fill(code, error, &fields);
        if (ep_rpc_out_create_message(call->origin->pool,
                                      code == EP_OK ? NULL : &fields.status.base, NULL,
                                      &out) != EP_OK) {
            return NULL;
        }
    }
    fill_frame(call, out, EP_FRAME_REPLY);
    out->send.is_patient = call->is_patient;
    out->frame.status = ep_err_grpc_code(code);
    if (stream) {
        out->frame.flags |= EP_FRAME_FLAG_END_OF_STREAM;
    }
    return out;
}

/*
 * A message of a stream is lost (reply_error says why). The peer must be told, so that it asks
 * again; it would otherwise take its state for current for ever. The end is sent now. The handler
 * learns of it by a cancel on the timer's thread, since it may hold locks here.
 */
static void end_stream_locked(ep_rpc_call *call)
{
    ep_rpc_origin *origin = call->origin;
    ep_rpc_out *out = last_frame(call, call->reply_error.code, &call->reply_error);
    call->stream_over = true;
    ep_err err = arm_cancel_locked(call, ep_clock_now_ns());
    if (out == NULL || err != EP_OK) {
        ep_rpc_out_destroy(out);
        /* this closes the connection and so ends all its calls */
        origin->ops->reply(origin, NULL, &call->reply_error);
        return;
    }
    origin->ops->reply(origin, out, NULL);
}

void ep_rpc_call_closure(const ProtobufCMessage *message, void *closure_data)
{
    ep_rpc_call *call = closure_data;
    EP_ASSERT(message != NULL && message->descriptor == call->method->method->output);
    pthread_mutex_lock(&call->lock);
    EP_ASSERT(!call->finished);
    bool stream = call->method->stream == EP_RPC_SERVER_STREAM;
    EP_ASSERT(stream || call->reply == NULL); /* a unary call has one reply */
    if (call->cancelled || call->reply_error.code != EP_OK) {
        ep_buffer_unref(call->attached);
        call->attached = NULL;
    } else {
        ep_rpc_out *out = pack_reply_locked(call, message);
        if (out != NULL && stream) {
            fill_frame(call, out, EP_FRAME_REPLY_MORE);
            call->sequence++;
            /* under the lock, so that messages are sent in the order of their sequence numbers */
            call->origin->ops->reply(call->origin, out, NULL);
        } else if (stream) {
            end_stream_locked(call);
        } else {
            call->reply = out;
        }
    }
    pthread_mutex_unlock(&call->lock);
}

static void send_end(ep_rpc_call *call, ep_err code, const ep_error *error)
{
    ep_rpc_origin *origin = call->origin;
    bool cancelled = __atomic_load_n(&call->cancelled, __ATOMIC_ACQUIRE);
    if (cancelled && origin->answers_cancelled && call->reply == NULL &&
        (code == EP_OK || code == EP_ERR_CANCELLED)) {
        bool late = call->incoming.deadline_ns != EP_TIME_NEVER &&
                    call->incoming.deadline_ns <= ep_clock_now_ns();
        code = ep_error_set(
            &call->reply_error, late ? EP_ERR_DEADLINE_EXCEEDED : EP_ERR_CANCELLED, "%s",
            late ? "no answer before the deadline" : "the call was ended before it was answered");
        error = &call->reply_error;
    }
    if (code == EP_OK && call->reply_error.code != EP_OK) {
        code = call->reply_error.code;
        error = &call->reply_error;
    }
    if (code == EP_OK && call->method->stream == EP_RPC_UNARY && call->reply == NULL) {
        code =
            ep_error_set(&call->reply_error, EP_ERR_INTERNAL, "the handler of %s.%s gave no reply",
                         call->method->service->name, call->method->method->name);
        error = &call->reply_error;
    }
    if (code != EP_OK) {
        __atomic_fetch_add(&call->origin->server->stats.calls_failed, 1, __ATOMIC_RELAXED);
    }
    if (call->stream_over || (cancelled && !origin->answers_cancelled)) {
        return; /* nobody waits for it */
    }
    ep_rpc_out *out = last_frame(call, code, error);
    ep_error why;
    if (out == NULL) {
        ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for the end of a call");
    }
    origin->ops->reply(origin, out, &why);
}

void ep_rpc_call_finish(ep_rpc_call *call, ep_err code, const ep_error *error)
{
    pthread_mutex_lock(&call->lock);
    EP_ASSERT(!call->finished); /* finish is called exactly once */
    __atomic_store_n(&call->finished, true, __ATOMIC_RELEASE);
    while (call->cancel_running && !pthread_equal(call->cancel_thread, pthread_self())) {
        pthread_cond_wait(&call->cancel_done, &call->lock);
    }
    const bool timer_held = call->timer_held; /* the timer is not armed after this */
    pthread_mutex_unlock(&call->lock);
    if (timer_held && ep_timer_cancel(call->origin->server->common.timers, &call->timer)) {
        ep_rpc_call_unref(call);
    }
    /* Free place and credit before the reply leaves: who has the answer may use them. */
    call->origin->ops->remove(call->origin, call);
    send_end(call, code, error);
    ep_rpc_call_unref(call);
}
