/* SPDX-License-Identifier: Apache-2.0 */
/* The door of a server: each slot of the REP socket is an origin that has one call at a time. */
#include "rpc/rpc_door.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "rpc/rpc_hello.h"
#include "rpc/rpc_server.h"
#include "rpc/rpc_status.h"
#include "transport/nng_rep_door.h"

/* the hint in refusals: each reply frees a place, but when the next one comes is not known */
#define OVERLOAD_RETRY_US 1000
#define SHOWN_BYTES 8 /* bytes of a request that is no frame which the reply's text shows */

typedef struct door_slot {
    ep_rpc_origin origin; /* first member */
    ep_rpc_door *door;
    uint32_t index;
    /* the fields below are under door->lock */
    ep_rpc_call *call; /* in flight, or NULL; only while it is in flight may a reference be taken */
    ep_nng_rep_ticket ticket; /* of call, or of the last one */
    /* of a request whose caller left before its call was registered */
    ep_nng_rep_ticket gone_ticket;
} door_slot;

struct ep_rpc_door {
    ep_rpc_server *server;
    ep_nng_rep_door *rep;
    bool payload_crc;
    uint32_t slots_count;
    door_slot *slots;
    uint64_t requests_total;                  /* atomic */
    uint64_t refused_total[EP_DOOR_REFUSALS]; /* atomic */
    pthread_mutex_t lock;
    pthread_cond_t unused;
    bool stopping;
    uint32_t refs; /* held by calls, for their slots */
};

static door_slot *slot_of(ep_rpc_origin *origin)
{
    return (door_slot *)(void *)origin; /* its first member */
}

const char *ep_rpc_door_refusal_name(ep_rpc_door_refusal refusal)
{
    static const char *const names[] = {"not_a_frame", "no_memory", "token", "overload"};
    return names[refusal];
}

/* ---- replies ---- */

static void reply_done(void *arg)
{
    ep_rpc_out_destroy(arg);
}

/* Takes taken_out. */
static void fill_reply(const ep_rpc_door *door, ep_rpc_out *taken_out, ep_nng_rep_reply *out_reply)
{
    ep_rpc_out_seal(taken_out, door->payload_crc);
    *out_reply = (ep_nng_rep_reply){.parts = taken_out->send.parts,
                                    .parts_count = taken_out->send.parts_count,
                                    .done = reply_done,
                                    .arg = taken_out};
}

/* Takes taken_out; NULL frees the slot without an answer. */
static void send_reply(door_slot *slot, ep_rpc_out *taken_out)
{
    if (taken_out == NULL) {
        ep_nng_rep_door_reply(slot->door->rep, slot->index, NULL);
        return;
    }
    ep_nng_rep_reply reply;
    fill_reply(slot->door, taken_out, &reply);
    ep_nng_rep_door_reply(slot->door->rep, slot->index, &reply);
}

/* The reply to a request that never became a call; NULL when out of memory. */
static ep_rpc_out *refusal_frame(ep_rpc_door *door, ep_rpc_door_refusal refusal,
                                 const ep_frame *frame, const ep_error *why)
{
    ep_rpc_server *server = door->server;
    ep_rpc_status_fields fields;
    ep_rpc_out *out = NULL;
    __atomic_fetch_add(&door->refused_total[refusal], 1, __ATOMIC_RELAXED);
    ep_rpc_status_fill(why->code, why, &fields);
    if (ep_rpc_out_create_message(server->door_pool, &fields.status.base, NULL, &out) == EP_OK) {
        out->frame.kind = EP_FRAME_REPLY;
        out->frame.flags = __atomic_load_n(&server->draining_flag, __ATOMIC_ACQUIRE);
        out->frame.status = ep_err_grpc_code(why->code);
        if (frame != NULL) {
            out->frame.call_id = frame->call_id;
            out->frame.attempt = frame->attempt;
            out->frame.method_id = frame->method_id;
        }
    }
    return out;
}

static void refuse(door_slot *slot, ep_rpc_door_refusal refusal, const ep_frame *frame,
                   const ep_error *why)
{
    send_reply(slot, refusal_frame(slot->door, refusal, frame, why));
}

/* ---- a slot as the origin of a call ---- */

static void origin_reply(ep_rpc_origin *origin, ep_rpc_out *taken_out, const ep_error *why)
{
    (void)why; /* without memory for a frame, the reason cannot be sent */
    send_reply(slot_of(origin), taken_out);
}

/* A slot serves one caller only, so the reply is enough to tell it. */
static void origin_misbehaved(ep_rpc_origin *origin, const ep_error *why)
{
    (void)why;
    __atomic_fetch_add(&origin->server->stats.protocol_errors, 1, __ATOMIC_RELAXED);
}

static void origin_remove(ep_rpc_origin *origin, ep_rpc_call *call)
{
    door_slot *slot = slot_of(origin);
    pthread_mutex_lock(&slot->door->lock);
    EP_ASSERT(slot->call == call);
    slot->call = NULL;
    pthread_mutex_unlock(&slot->door->lock);
}

/* The bearer token of a request, or "". */
static const char *bearer_token(const Expertd__V1__CallHeader *header)
{
    size_t prefix = strlen(EP_RPC_DOOR_TOKEN_PREFIX);
    for (size_t i = 0; i < header->n_metadata; i++) {
        const Expertd__V1__Metadata *item = header->metadata[i];
        if (strcmp(item->key, EP_RPC_DOOR_TOKEN_KEY) == 0 &&
            strncmp(item->value, EP_RPC_DOOR_TOKEN_PREFIX, prefix) == 0) {
            return item->value + prefix;
        }
    }
    return "";
}

/* Callers at the door get role client, whatever their token is good for. */
static ep_err check_token(ep_rpc_origin *origin, const char *token, ep_error *out_error)
{
    door_slot *slot = slot_of(origin);
    ep_rpc_server *server = origin->server;
    ep_rpc_refusal refusal;
    ep_err err = ep_rpc_credentials_judge(server->common.credentials, EP_ROLE_BIT(EP_ROLE_CLIENT),
                                          EP_ROLE_CLIENT, token, &refusal, out_error);
    ep_nng_rep_door_peer(slot->door->rep, slot->index, origin->peer, sizeof(origin->peer));
    if (err != EP_OK) {
        const ep_rpc_audit_event event = {
            .peer = origin->peer, .role = ep_rpc_role_name(EP_ROLE_CLIENT), .method = "door"};
        ep_rpc_audit_refused(&server->audit, refusal, &event);
        __atomic_fetch_add(&slot->door->refused_total[EP_DOOR_TOKEN], 1, __ATOMIC_RELAXED);
        ep_error_prefix(out_error, err,
                        "metadata \"" EP_RPC_DOOR_TOKEN_KEY "\" = \"" EP_RPC_DOOR_TOKEN_PREFIX
                        "TOKEN\"");
    }
    return err;
}

/* Checks the token before anything else of the request. */
static ep_err origin_admit(ep_rpc_origin *origin, const ep_rpc_call *call, const ep_frame *frame,
                           ep_error *out_error)
{
    ep_rpc_server *server = origin->server;
    Expertd__V1__CallHeader *header;
    ep_rpc_budget budget;
    ep_rpc_budget_init(&budget, server->door_pool, server->common.limits.unpack_bytes_max);
    ep_err err = ep_rpc_call_header_unpack(&budget, call->frame->data + EP_FRAME_FIXED_BYTES,
                                           frame->header_bytes, &header, NULL, out_error);
    if (err == EP_OK) {
        err = check_token(origin, bearer_token(header), out_error);
    }
    ep_rpc_budget_fini(&budget);
    return err;
}

static void origin_unref(ep_rpc_origin *origin)
{
    ep_rpc_door *door = slot_of(origin)->door;
    pthread_mutex_lock(&door->lock);
    door->refs--;
    pthread_cond_broadcast(&door->unused);
    pthread_mutex_unlock(&door->lock);
}

static const ep_rpc_origin_ops origin_ops = {.reply = origin_reply,
                                             .misbehaved = origin_misbehaved,
                                             .remove = origin_remove,
                                             .admit = origin_admit,
                                             .unref = origin_unref};

/* ---- requests ---- */

/* A first request often is no frame at all. Says at which byte it stops being a request frame. */
static ep_err check_begin(const uint8_t *bytes, size_t count, ep_error *out_error)
{
    static const uint8_t magic[] = {'E', 'P', 'D', '1'};
    char shown[SHOWN_BYTES + 1] = "";
    for (size_t i = 0; i < count && i < SHOWN_BYTES; i++) {
        shown[i] = (char)(bytes[i] >= 0x20 && bytes[i] < 0x7f ? bytes[i] : '.');
    }
    for (size_t i = 0; i < sizeof(magic); i++) {
        if (i < count && bytes[i] != magic[i]) {
            return ep_error_set(out_error, EP_ERR_PROTOCOL,
                                "this is no request frame: offset %zu has 0x%02x, allowed is "
                                "0x%02x; the message has "
                                "%zu bytes and begins with '%s', a frame begins with 'EPD1' "
                                "(expertctl frame encode "
                                "makes one)",
                                i, bytes[i], magic[i], count, shown);
        }
    }
    if (count < EP_FRAME_FIXED_BYTES) {
        return ep_error_set(
            out_error, EP_ERR_PROTOCOL,
            "this is no request frame: it ends at offset %zu, allowed is %d or more", count,
            EP_FRAME_FIXED_BYTES);
    }
    return EP_OK;
}

static ep_err read_frame(const ep_rpc_limits *limits, const ep_buffer *buffer, ep_frame *out_frame,
                         ep_error *out_error)
{
    size_t frame_bytes;
    ep_err err = check_begin(buffer->data, buffer->bytes, out_error);
    if (err == EP_OK) {
        err = ep_frame_decode(buffer->data, limits->frame_bytes_max, limits->header_bytes_max,
                              out_frame, &frame_bytes, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    if (out_frame->kind != EP_FRAME_REQUEST || out_frame->method_id == EP_RPC_HELLO_METHOD) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "offset 5 says %s frame (%u) and offset 18 method 0x%04x, allowed are "
                            "request frames (%u) of "
                            "methods other than 0x%04x (there is no Hello here)",
                            ep_frame_kind_name(out_frame->kind), (unsigned)out_frame->kind,
                            out_frame->method_id, (unsigned)EP_FRAME_REQUEST, EP_RPC_HELLO_METHOD);
    }
    if (frame_bytes != buffer->bytes) {
        return ep_error_set(out_error, EP_ERR_PROTOCOL,
                            "the message has %zu bytes, allowed is %zu: header_bytes %u (offset "
                            "28) and tensor_bytes %llu "
                            "(offset 40) say so",
                            buffer->bytes, frame_bytes, out_frame->header_bytes,
                            (unsigned long long)out_frame->tensor_bytes);
    }
    return EP_OK;
}

/* Registers the call for on_gone, and gives it its reference. False when the door is stopping. */
static bool enter(door_slot *slot, ep_rpc_call *call, ep_nng_rep_ticket ticket)
{
    pthread_mutex_lock(&slot->door->lock);
    bool enters = !slot->door->stopping;
    bool gone = slot->gone_ticket == ticket;
    slot->door->refs++;
    slot->call = call;
    slot->ticket = ticket;
    pthread_mutex_unlock(&slot->door->lock);
    if (gone) {
        ep_rpc_call_cancelled(call, false); /* its handler learns of it when it asks */
    }
    return enters;
}

static void on_request(void *arg, uint32_t index, ep_nng_rep_ticket ticket, ep_buffer *taken_bytes,
                       const ep_error *error)
{
    ep_rpc_door *door = arg;
    door_slot *slot = &door->slots[index];
    ep_frame frame;
    ep_error why;
    __atomic_fetch_add(&door->requests_total, 1, __ATOMIC_RELAXED);
    if (taken_bytes == NULL) {
        refuse(slot, EP_DOOR_NO_MEMORY, NULL, error);
        return;
    }
    if (read_frame(&door->server->common.limits, taken_bytes, &frame, &why) != EP_OK) {
        __atomic_fetch_add(&door->server->stats.protocol_errors, 1, __ATOMIC_RELAXED);
        ep_buffer_unref(taken_bytes);
        refuse(slot, EP_DOOR_NOT_A_FRAME, NULL, &why);
        return;
    }
    ep_rpc_call *call = ep_rpc_call_create(&slot->origin, &frame, taken_bytes);
    if (call == NULL) {
        ep_error_set(&why, EP_ERR_NO_MEMORY, "no memory for a call");
        ep_buffer_unref(taken_bytes);
        refuse(slot, EP_DOOR_NO_MEMORY, &frame, &why);
        return;
    }
    if (!enter(slot, call, ticket)) {
        ep_error_set(&why, EP_ERR_UNAVAILABLE, "the server stops");
        ep_rpc_call_finish(call, why.code, &why);
        return;
    }
    ep_rpc_service_dispatch(call, &frame, 1);
}

static bool on_overload(void *arg, const ep_buffer *bytes, ep_nng_rep_reply *out_reply)
{
    ep_rpc_door *door = arg;
    ep_frame frame;
    ep_error why;
    bool readable =
        bytes != NULL && read_frame(&door->server->common.limits, bytes, &frame, &why) == EP_OK;
    __atomic_fetch_add(&door->requests_total, 1, __ATOMIC_RELAXED);
    ep_error_set(&why, EP_ERR_RESOURCE_EXHAUSTED,
                 "%u requests are in work (door_contexts) and too many wait; try again later",
                 door->slots_count);
    why.retry_after_us = OVERLOAD_RETRY_US;
    ep_rpc_out *out = refusal_frame(door, EP_DOOR_OVERLOAD, readable ? &frame : NULL, &why);
    if (out != NULL) {
        fill_reply(door, out, out_reply);
    }
    return out != NULL;
}

static void on_turned_away(void *arg, const char *peer, const char *why)
{
    ep_rpc_door *door = arg;
    const ep_rpc_audit_event event = {
        .peer = peer, .role = "client", .method = "door", .text = why};
    ep_rpc_audit_refused(&door->server->audit, EP_REFUSED_SLOW, &event);
}

static void cancel_and_unlock(door_slot *slot, ep_rpc_call *call)
{
    if (call != NULL) {
        ep_rpc_call_ref(call);
    }
    pthread_mutex_unlock(&slot->door->lock);
    if (call != NULL) {
        ep_rpc_call_cancelled(call, false);
        ep_rpc_call_unref(call);
    }
}

static void on_gone(void *arg, uint32_t index, ep_nng_rep_ticket ticket)
{
    ep_rpc_door *door = arg;
    door_slot *slot = &door->slots[index];
    pthread_mutex_lock(&door->lock);
    if (ticket > slot->ticket) {
        slot->gone_ticket = ticket; /* on_request has yet to register it */
    }
    cancel_and_unlock(slot, slot->ticket == ticket ? slot->call : NULL);
}

/* ---- life ---- */

static void door_free(ep_rpc_door *door)
{
    pthread_cond_destroy(&door->unused);
    pthread_mutex_destroy(&door->lock);
    free(door->slots);
    free(door);
}

static ep_rpc_door *door_create(ep_rpc_server *server, bool payload_crc, uint32_t contexts)
{
    ep_rpc_door *door = calloc(1, sizeof(*door));
    if (door == NULL) {
        return NULL;
    }
    pthread_mutex_init(&door->lock, NULL);
    pthread_cond_init(&door->unused, NULL);
    door->server = server;
    door->payload_crc = payload_crc;
    door->slots = calloc(contexts, sizeof(*door->slots));
    if (door->slots == NULL) {
        door_free(door);
        return NULL;
    }
    door->slots_count = contexts;
    for (uint32_t i = 0; i < contexts; i++) {
        door->slots[i].door = door;
        door->slots[i].index = i;
        door->slots[i].origin =
            (ep_rpc_origin){.ops = &origin_ops,
                            .server = server,
                            .role = EP_ROLE_CLIENT,
                            .pool = server->door_pool,
                            .peer_frame_bytes_max = server->common.limits.frame_bytes_max,
                            .peer_header_bytes_max = server->common.limits.header_bytes_max,
                            .payload_crc = payload_crc,
                            .unary_only = true,
                            .answers_cancelled = true};
    }
    return door;
}

ep_err ep_rpc_server_open_door(ep_rpc_server *server, const ep_lane_address *address,
                               uint32_t contexts, ep_error *out_error)
{
    if (contexts < 1 || contexts > EP_RPC_DOOR_CONTEXTS_MAX) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "door_contexts is %u, allowed 1..%d", contexts,
                            EP_RPC_DOOR_CONTEXTS_MAX);
    }
    if (server->door != NULL) {
        return ep_error_set(out_error, EP_ERR_ALREADY_EXISTS, "the server has a door already");
    }
    ep_rpc_door *door =
        door_create(server, server->common.payload_crc && address->tls == NULL, contexts);
    if (door == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a door of %u contexts",
                            contexts);
    }
    const ep_nng_rep_limits limits = {.pool = server->door_pool,
                                      .hello_timeout_ms = server->common.limits.hello_timeout_ms,
                                      .frame_bytes_max = server->common.limits.frame_bytes_max,
                                      .slots = contexts,
                                      .connections_max = server->common.limits.connections_max};
    const ep_nng_rep_handler handler = {.on_request = on_request,
                                        .on_gone = on_gone,
                                        .on_overload = on_overload,
                                        .on_turned_away = on_turned_away,
                                        .arg = door};
    ep_err err = ep_nng_rep_door_open(address, &limits, &handler, &door->rep, out_error);
    if (err != EP_OK) {
        door_free(door);
        return err;
    }
    server->door = door;
    return EP_OK;
}

ep_err ep_rpc_door_renew_tls(ep_rpc_door *door, ep_error *out_error)
{
    return ep_nng_rep_door_renew_tls(door->rep, out_error);
}

void ep_rpc_server_door_url(ep_rpc_server *server, char *out_url, size_t bytes)
{
    if (bytes > 0) {
        out_url[0] = 0;
    }
    if (server->door != NULL) {
        ep_nng_rep_door_url(server->door->rep, out_url, bytes);
    }
}

void ep_rpc_server_read_door_stats(ep_rpc_server *server, ep_rpc_door_stats *out_stats)
{
    ep_rpc_door *door = server->door;
    ep_nng_rep_stats rep;
    *out_stats = (ep_rpc_door_stats){0};
    if (door == NULL) {
        return;
    }
    ep_nng_rep_door_read_stats(door->rep, &rep);
    out_stats->requests_total = __atomic_load_n(&door->requests_total, __ATOMIC_RELAXED);
    for (int i = 0; i < EP_DOOR_REFUSALS; i++) {
        out_stats->refused_total[i] = __atomic_load_n(&door->refused_total[i], __ATOMIC_RELAXED);
    }
    out_stats->requests_in_flight = rep.requests_held;
    out_stats->connections = rep.connections;
    out_stats->replies_dropped = rep.replies_dropped;
}

void ep_rpc_door_add_stats(ep_rpc_door *door, ep_rpc_server_stats *stats)
{
    ep_nng_rep_stats rep;
    if (door != NULL) {
        ep_nng_rep_door_read_stats(door->rep, &rep);
        stats->bytes_received += rep.bytes_received;
        stats->bytes_sent += rep.bytes_sent;
        stats->sends_queued += rep.sends_queued;
    }
}

static void wait_unused(ep_rpc_door *door)
{
    pthread_mutex_lock(&door->lock);
    while (door->refs > 0) {
        pthread_cond_wait(&door->unused, &door->lock);
    }
    pthread_mutex_unlock(&door->lock);
}

void ep_rpc_door_destroy(ep_rpc_door *door)
{
    if (door == NULL) {
        return;
    }
    ep_nng_rep_door_stop(door->rep);
    pthread_mutex_lock(&door->lock);
    door->stopping = true;
    pthread_mutex_unlock(&door->lock);
    for (uint32_t i = 0; i < door->slots_count; i++) {
        pthread_mutex_lock(&door->lock);
        cancel_and_unlock(&door->slots[i], door->slots[i].call);
    }
    wait_unused(door);
    ep_nng_rep_door_close(door->rep); /* after this, no callback runs */
    wait_unused(door);                /* calls that arrived in between were refused */
    door_free(door);
}
