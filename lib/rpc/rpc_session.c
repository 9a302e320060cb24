/* SPDX-License-Identifier: Apache-2.0 */
/* The server's side of one connection: Hello, the calls in flight, credits, cancel, end. */
#include "rpc/rpc_server.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "rpc/rpc_hello.h"

static ep_rpc_session *session_of_origin(ep_rpc_origin *origin)
{
    return (ep_rpc_session *)(void *)((char *)origin - offsetof(ep_rpc_session, origin));
}

/* ---- Hello ---- */

/* Creates a Hello reply frame from a message; NULL when out of memory. */
static ep_rpc_out *hello_reply(ep_rpc_session *session, uint64_t call_id, uint32_t status,
                               const ProtobufCMessage *message)
{
    ep_rpc_out *out;
    if (ep_rpc_out_create_message(session->server->common.pool, message, NULL, &out) != EP_OK) {
        return NULL;
    }
    out->frame.kind = EP_FRAME_REPLY;
    out->frame.flags = __atomic_load_n(&session->server->draining_flag, __ATOMIC_ACQUIRE);
    out->frame.call_id = call_id;
    out->frame.method_id = EP_RPC_HELLO_METHOD;
    out->frame.status = status;
    return out;
}

static void refuse(ep_rpc_session *session, uint64_t call_id, const ep_error *why)
{
    ep_rpc_status_fields fields;
    ep_rpc_status_fill(why->code, why, &fields);
    ep_rpc_link_send_last(
        &session->link,
        hello_reply(session, call_id, ep_err_grpc_code(why->code), &fields.status.base), why);
}

/* Packs Hello into a frame that the peer accepts. If it is too large with the models, they are left
 * out; the peer can ask for them. Errors: RESOURCE_EXHAUSTED (too large even so), NO_MEMORY. */
static ep_err welcome_pack(ep_rpc_session *session, uint64_t call_id, Expertd__V1__Hello *hello,
                           ep_rpc_out **out_frame, ep_error *out_error)
{
    size_t models = hello->n_models;
    size_t max = session->origin.peer_header_bytes_max;
    size_t bytes = protobuf_c_message_get_packed_size(&hello->base);
    if (bytes > max) {
        hello->n_models = 0;
        bytes = protobuf_c_message_get_packed_size(&hello->base);
    }
    ep_err err = EP_OK;
    if (bytes > max) {
        err = ep_error_set(
            out_error, EP_ERR_RESOURCE_EXHAUSTED,
            "the Hello reply has %zu bytes without its models, header_bytes_max is %zu", bytes,
            max);
    } else {
        *out_frame = hello_reply(session, call_id, 0, &hello->base);
        if (*out_frame == NULL) {
            err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the Hello reply");
        }
    }
    hello->n_models = models; /* hello_free needs the count */
    return err;
}

/* Our Hello, with the listeners' URLs as lanes and what the program adds. Errors: as
 * welcome_pack. */
static ep_err welcome_frame(ep_rpc_session *session, uint64_t call_id, bool payload_crc,
                            ep_rpc_out **out_frame, ep_error *out_error)
{
    ep_rpc_server *server = session->server;
    Expertd__V1__Hello hello;
    Expertd__V1__LaneOffer offers[EP_RPC_LISTENERS_MAX];
    Expertd__V1__LaneOffer *offer_list[EP_RPC_LISTENERS_MAX];
    ep_rpc_hello_fill(&server->common, payload_crc, &hello);
    pthread_mutex_lock(&server->lock);
    for (size_t i = 0; i < server->listeners_count; i++) {
        const ep_rpc_listener *listener = &server->listeners[i];
        if (listener->listener == NULL ||
            (listener->roles & EP_ROLE_BIT(session->origin.role)) == 0) {
            continue;
        }
        expertd__v1__lane_offer__init(&offers[hello.n_lanes]);
        offers[hello.n_lanes].name = ep_rpc_unconst(listener->listener->ops->name);
        offers[hello.n_lanes].url = ep_rpc_unconst(listener->url);
        offer_list[hello.n_lanes] = &offers[hello.n_lanes];
        hello.n_lanes++;
    }
    pthread_mutex_unlock(&server->lock);
    hello.lanes = offer_list;
    if (server->config.hello_fill != NULL) {
        server->config.hello_fill(server->config.arg, &hello);
    }
    ep_err err = welcome_pack(session, call_id, &hello, out_frame, out_error);
    if (server->config.hello_free != NULL) {
        server->config.hello_free(server->config.arg, &hello);
    }
    return err;
}

/* Chooses the pool by role. False: no memory. */
static bool choose_pool(ep_rpc_session *session, ep_rpc_role role)
{
    ep_rpc_server *server = session->server;
    if (role != EP_ROLE_CLIENT) {
        session->origin.pool = server->common.pool;
        return true;
    }
    pthread_mutex_lock(&server->lock);
    /* the peer of shared memory is a process, not an address */
    const char *address = session->is_shm ? "this host" : session->origin.peer;
    session->host = ep_rpc_hosts_enter(&server->hosts, address, &session->origin.pool);
    pthread_mutex_unlock(&server->lock);
    return session->host != NULL;
}

/* Errors: NO_MEMORY, RESOURCE_EXHAUSTED (no frame for the answer). */
static ep_err welcome(ep_rpc_session *session, uint64_t call_id, const Expertd__V1__Hello *hello,
                      ep_rpc_role role, bool payload_crc, ep_error *out_error)
{
    ep_rpc_link *link = &session->link;
    const ep_rpc_limits *limits = &session->server->common.limits;
    session->origin.role = role;
    snprintf(session->origin.node, sizeof(session->origin.node), "%s", hello->node);
    session->origin.peer_frame_bytes_max =
        ep_rpc_hello_bound(limits->frame_bytes_max, hello->frame_bytes_max);
    session->origin.peer_header_bytes_max =
        ep_rpc_hello_bound(limits->header_bytes_max, hello->header_bytes_max);
    session->announced_bytes = limits->credit_bytes;
    session->origin.payload_crc = payload_crc;
    ep_rpc_link_set_crc(link, payload_crc);
    ep_rpc_out *out = NULL;
    if (!choose_pool(session, role)) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for another client");
    }
    ep_err err = welcome_frame(session, call_id, payload_crc, &out, out_error);
    if (err != EP_OK) {
        return err;
    }
    __atomic_store_n(&session->hello_done, true, __ATOMIC_RELAXED);
    ep_rpc_link_go_live(link, session->origin.node, session->origin.pool);
    ep_rpc_link_send_reply(link, out);
    return EP_OK;
}

/* An audit line about this Hello; never its token. */
static void audit_hello(ep_rpc_session *session, const Expertd__V1__Hello *hello,
                        ep_rpc_refusal refusal, const ep_error *why)
{
    ep_rpc_audit_event event = {.peer = session->origin.peer,
                                .node = hello->node,
                                .role = hello->role,
                                .method = "Hello",
                                .text = refusal == EP_REFUSED_HELLO ? why->text : NULL};
    __atomic_store_n(&session->hello_refused, true, __ATOMIC_RELAXED);
    ep_rpc_audit_refused(&session->server->audit, refusal, &event);
}

/* Handles the first frame. Anything but a Hello request closes the connection without an answer. */
static void first_frame(ep_rpc_session *session, const ep_frame *frame, const ep_buffer *buffer)
{
    ep_rpc_server *server = session->server;
    bool payload_crc = ep_rpc_hello_wants_crc(&server->common, session->link.conn);
    Expertd__V1__CallHeader *call_header;
    ProtobufCMessage *message;
    ep_rpc_budget budget;
    ep_rpc_role role = EP_ROLE_CLIENT;
    ep_rpc_refusal refusal = EP_REFUSED_HELLO;
    ep_error why;
    if (frame->kind != EP_FRAME_REQUEST || frame->method_id != EP_RPC_HELLO_METHOD ||
        frame->tensor_bytes != 0) {
        ep_error_set(&why, EP_ERR_PROTOCOL,
                     "the first frame is a %s frame of method 0x%04x, must be the Hello request",
                     ep_frame_kind_name(frame->kind), frame->method_id);
        ep_rpc_link_close(&session->link, &why);
        return;
    }
    ep_rpc_budget_init(&budget, server->common.pool, server->common.limits.unpack_bytes_max);
    ep_err err = ep_rpc_request_unpack(&budget, &expertd__v1__hello__descriptor,
                                       buffer->data + EP_FRAME_FIXED_BYTES, frame->header_bytes,
                                       &call_header, &message, &why);
    if (err != EP_OK) {
        why.code = EP_ERR_PROTOCOL;
        ep_rpc_link_close(&session->link, &why);
    } else {
        const Expertd__V1__Hello *hello = (const Expertd__V1__Hello *)message;
        err = ep_rpc_hello_check_client(&server->common, session->roles, payload_crc, hello, &role,
                                        &refusal, &why);
        if (err == EP_OK) {
            err = ep_rpc_payload_check(frame, buffer->data, payload_crc, &why);
        }
        if (err == EP_OK) {
            ep_rpc_credentials_label(server->common.credentials, hello->token,
                                     session->origin.label);
            err = welcome(session, frame->call_id, hello, role, payload_crc, &why);
        }
        if (err != EP_OK) {
            audit_hello(session, hello, refusal, &why);
            /* this also closes the connection when there is no memory for the frame */
            refuse(session, frame->call_id, &why);
        }
    }
    ep_rpc_budget_fini(&budget);
}

/* ---- calls in flight ---- */

_Static_assert(EP_RPC_CALL_BUCKETS == 256, "find_locked takes 8 bits");

/* Where the pointer to the call with this id is, or the end of its list. link.lock is held. */
static ep_rpc_call **find_locked(ep_rpc_session *session, uint64_t id)
{
    ep_rpc_call **at = &session->calls[(id * 0x9e3779b97f4a7c15ull) >> 56];
    while (*at != NULL && (*at)->incoming.number != id) {
        at = &(*at)->next;
    }
    return at;
}

/* The credit to announce to the peer; 0 when none is due. */
static uint64_t credit_due_locked(ep_rpc_session *session)
{
    const ep_rpc_limits *limits = &session->server->common.limits;
    uint64_t grant = limits->credit_bytes + session->answered_bytes;
    uint64_t progress = grant - session->announced_bytes;
    uint64_t headroom = session->announced_bytes - session->received_bytes;
    /* The peer may be waiting for room for one whole frame: with less, it must be told of new
     * credit. */
    uint64_t frame_bytes = limits->frame_bytes_max < limits->credit_bytes ? limits->frame_bytes_max
                                                                          : limits->credit_bytes;
    uint64_t low = limits->credit_bytes / 2 > frame_bytes ? limits->credit_bytes / 2 : frame_bytes;
    bool nothing_open = session->answered_bytes == session->received_bytes;
    if (progress == 0 || headroom >= low ||
        (progress < limits->credit_bytes / 16 && !nothing_open)) {
        return 0;
    }
    session->announced_bytes = grant;
    return grant;
}

static void send_credit(ep_rpc_session *session, uint64_t bytes)
{
    ep_rpc_out *out;
    if (ep_rpc_out_create(session->origin.pool, EP_FRAME_CREDIT_BYTES, NULL, &out) != EP_OK) {
        ep_error why;
        ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for a credit frame");
        /* without new credit the peer would wait for ever */
        ep_rpc_link_close(&session->link, &why);
        return;
    }
    ep_frame_credit_encode(&(ep_frame_credit){.bytes = bytes}, out->header);
    out->frame.kind = EP_FRAME_CREDIT;
    ep_rpc_link_send_reply(&session->link, out);
}

/* Removes a finished call, returns its credit, and announces credit to the peer when it is due. */
static void origin_remove(ep_rpc_origin *origin, ep_rpc_call *call)
{
    ep_rpc_session *session = session_of_origin(origin);
    pthread_mutex_lock(&session->link.lock);
    ep_rpc_call **at = find_locked(session, call->incoming.number);
    EP_ASSERT(*at == call);
    *at = call->next;
    session->calls_count--;
    session->answered_bytes += call->frame_bytes;
    uint64_t credit = session->ended ? 0 : credit_due_locked(session);
    pthread_mutex_unlock(&session->link.lock);
    if (credit != 0) {
        send_credit(session, credit);
    }
}

static void origin_reply(ep_rpc_origin *origin, ep_rpc_out *taken_out, const ep_error *why)
{
    ep_rpc_link *link = &session_of_origin(origin)->link;
    if (taken_out == NULL) {
        ep_rpc_link_close(link, why); /* otherwise the peer would wait for ever */
    } else {
        ep_rpc_link_send_reply(link, taken_out);
    }
}

/* The reply that follows is dropped, since this closes the connection. */
static void origin_misbehaved(ep_rpc_origin *origin, const ep_error *why)
{
    ep_rpc_link_close(&session_of_origin(origin)->link, why);
}

static void origin_unref(ep_rpc_origin *origin)
{
    ep_rpc_link_unref(&session_of_origin(origin)->link);
}

static const ep_rpc_origin_ops origin_ops = {.reply = origin_reply,
                                             .misbehaved = origin_misbehaved,
                                             .remove = origin_remove,
                                             .unref = origin_unref};

static void take_request(ep_rpc_session *session, const ep_frame *frame, ep_buffer *taken_buffer)
{
    ep_error why;
    ep_rpc_call *call = ep_rpc_call_create(&session->origin, frame, taken_buffer);
    if (call == NULL) {
        ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for a call");
        ep_buffer_unref(taken_buffer);
        ep_rpc_link_close(&session->link, &why);
        return;
    }
    ep_rpc_link_ref(&session->link); /* the call's reference */
    ep_err err = EP_OK;
    pthread_mutex_lock(&session->link.lock);
    ep_rpc_call **at = find_locked(session, call->incoming.number);
    if (*at != NULL) {
        err = ep_error_set(&why, EP_ERR_PROTOCOL,
                           "call id %016llx is used again while its call is in flight",
                           (unsigned long long)call->incoming.number);
    } else if (call->frame_bytes > session->announced_bytes - session->received_bytes) {
        err = ep_error_set(&why, EP_ERR_PROTOCOL,
                           "peer sent %llu request bytes in all, its credit is %llu",
                           (unsigned long long)(session->received_bytes + call->frame_bytes),
                           (unsigned long long)session->announced_bytes);
    } else {
        session->received_bytes += call->frame_bytes;
        call->next = NULL;
        *at = call;
        session->calls_count++;
    }
    const uint32_t calls = session->calls_count;
    pthread_mutex_unlock(&session->link.lock);
    if (err != EP_OK) {
        ep_rpc_link_close(&session->link, &why);
        ep_rpc_call_unref(call);
        return;
    }
    ep_rpc_service_dispatch(call, frame, calls);
}

/* ---- frames and the end ---- */

static void session_frame(ep_rpc_link *link, const ep_frame *frame, ep_buffer *taken_buffer)
{
    ep_rpc_session *session = (ep_rpc_session *)link;
    ep_error why;
    if (!session->hello_done) {
        first_frame(session, frame, taken_buffer);
        ep_buffer_unref(taken_buffer);
        return;
    }
    if (frame->kind == EP_FRAME_REQUEST && frame->method_id != EP_RPC_HELLO_METHOD) {
        take_request(session, frame, taken_buffer);
        return;
    }
    if (frame->kind == EP_FRAME_CANCEL) {
        pthread_mutex_lock(&link->lock);
        ep_rpc_call *call = *find_locked(session, frame->call_id);
        if (call != NULL) {
            ep_rpc_call_ref(call);
        }
        pthread_mutex_unlock(&link->lock);
        if (call != NULL) {
            ep_rpc_call_cancelled(call, (frame->flags & EP_FRAME_FLAG_ANSWERED) != 0);
            ep_rpc_call_unref(call);
        }
    } else {
        ep_error_set(&why, EP_ERR_PROTOCOL,
                     "a %s frame of method 0x%04x may not be sent to a server after Hello",
                     ep_frame_kind_name(frame->kind), frame->method_id);
        ep_rpc_link_close(link, &why);
    }
    ep_buffer_unref(taken_buffer);
}

/* Any call that is not cancelled yet, with a reference. */
static ep_rpc_call *next_to_cancel(ep_rpc_session *session)
{
    pthread_mutex_lock(&session->link.lock);
    session->ended = true;
    for (size_t i = 0; i < EP_RPC_CALL_BUCKETS; i++) {
        for (ep_rpc_call *call = session->calls[i]; call != NULL; call = call->next) {
            if (!__atomic_load_n(&call->cancelled, __ATOMIC_ACQUIRE) &&
                !__atomic_load_n(&call->finished, __ATOMIC_ACQUIRE)) {
                ep_rpc_call_ref(call);
                pthread_mutex_unlock(&session->link.lock);
                return call;
            }
        }
    }
    pthread_mutex_unlock(&session->link.lock);
    return NULL;
}

static void session_closed(ep_rpc_link *link, const ep_error *error)
{
    ep_rpc_session *session = (ep_rpc_session *)link;
    ep_rpc_server_stats *stats = &session->server->stats;
    if (!session->hello_done) {
        __atomic_fetch_add(&stats->connections_refused, 1, __ATOMIC_RELAXED);
        if (!__atomic_load_n(&session->hello_refused, __ATOMIC_RELAXED)) {
            ep_rpc_audit_count(&session->server->audit, EP_REFUSED_NO_HELLO);
        }
    }
    if (link->too_slow) {
        const ep_rpc_audit_event event = {.peer = session->origin.peer,
                                          .node = session->origin.node,
                                          .label = session->origin.label,
                                          .role = ep_rpc_role_name(session->origin.role),
                                          .text = error->text};
        ep_rpc_audit_refused(&session->server->audit, EP_REFUSED_SLOW, &event);
    }
    if (error->code == EP_ERR_PROTOCOL || error->code == EP_ERR_RESOURCE_EXHAUSTED) {
        __atomic_fetch_add(&stats->protocol_errors, 1, __ATOMIC_RELAXED);
    }
    ep_rpc_call *call;
    while ((call = next_to_cancel(session)) != NULL) {
        ep_rpc_call_cancelled(call, false);
        ep_rpc_call_unref(call);
    }
}

static void session_free(ep_rpc_link *link)
{
    ep_rpc_session *session = (ep_rpc_session *)link;
    ep_rpc_server *server = session->server;
    EP_ASSERT(session->calls_count == 0);
    pthread_mutex_lock(&server->lock);
    *(session->previous != NULL ? &session->previous->next : &server->sessions) = session->next;
    if (session->next != NULL) {
        session->next->previous = session->previous;
    }
    if (session->host != NULL) {
        ep_rpc_hosts_leave(&server->hosts, session->host);
    }
    server->sessions_count--;
    __atomic_fetch_add(&server->stats.bytes_received, link->bytes_received, __ATOMIC_RELAXED);
    __atomic_fetch_add(&server->stats.bytes_sent, link->bytes_sent, __ATOMIC_RELAXED);
    if (session->is_shm) {
        __atomic_fetch_add(&server->stats.shm_bytes_received, link->bytes_received,
                           __ATOMIC_RELAXED);
        __atomic_fetch_add(&server->stats.shm_bytes_sent, link->bytes_sent, __ATOMIC_RELAXED);
    }
    pthread_cond_broadcast(&server->idle);
    pthread_mutex_unlock(&server->lock);
    free(session);
}

static const ep_rpc_link_ops session_ops = {
    .on_frame = session_frame, .on_closed = session_closed, .on_free = session_free};

void ep_rpc_session_create(ep_rpc_server *server, unsigned roles, ep_conn *taken_conn)
{
    ep_rpc_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        __atomic_fetch_add(&server->stats.connections_refused, 1, __ATOMIC_RELAXED);
        ep_conn_release(taken_conn);
        return;
    }
    session->is_shm = taken_conn->ops == &ep_shm_lane;
    ep_rpc_link_init(&session->link, &session_ops, &server->common, taken_conn);
    session->server = server;
    session->roles = roles;
    ep_conn_peer(taken_conn, session->origin.peer, sizeof(session->origin.peer));
    session->origin.ops = &origin_ops;
    session->origin.server = server;
    session->origin.pool = server->hello_pool;
    pthread_mutex_lock(&server->lock);
    session->next = server->sessions;
    if (session->next != NULL) {
        session->next->previous = session;
    }
    server->sessions = session;
    server->sessions_count++;
    pthread_mutex_unlock(&server->lock);
    ep_rpc_link_start(&session->link);
    ep_rpc_link_unref(&session->link);
}
