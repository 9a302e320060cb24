/* SPDX-License-Identifier: Apache-2.0 */
/* The server object: services, listeners, the list of sessions, orderly shutdown. */
#include "rpc/rpc_server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "rpc/rpc_limits.h"
#include "transport/lane_accept.h"

/* Creates a share of the server's pool in which a frame of frame_bytes always fits. Without a limit
 * on the pool there are no shares. */
static ep_err create_share(ep_rpc_server *server, size_t sixteenths, size_t frame_bytes,
                           ep_buffer_pool **out_pool)
{
    size_t limit = ep_buffer_pool_limit(server->common.pool);
    size_t share = limit / 16 * sixteenths;
    /* room for two: the frame as it arrived, and the reply or (door) its copy without ids */
    size_t least = 2 * ep_buffer_class_bytes(frame_bytes);
    share = share > least ? share : least;
    return ep_buffer_pool_create_child(server->common.pool, share < limit ? share : limit,
                                       out_pool);
}

static ep_err create_shares(ep_rpc_server *server)
{
    size_t frame_bytes = server->common.limits.frame_bytes_max;
    ep_err err = create_share(server, 1, EP_RPC_HELLO_REQUEST_BYTES_MAX, &server->hello_pool);
    err = err != EP_OK ? err : create_share(server, 14, frame_bytes, &server->client_pool);
    return err != EP_OK ? err : create_share(server, 4, frame_bytes, &server->door_pool);
}

/* Also frees a server that is created only in part. */
static void server_free(ep_rpc_server *server)
{
    ep_buffer_pool_destroy(server->hello_pool);
    ep_buffer_pool_destroy(server->client_pool);
    ep_buffer_pool_destroy(server->door_pool);
    ep_rpc_common_free(&server->common);
    free(server);
}

void ep_rpc_server_read_shares(ep_rpc_server *server, ep_rpc_share out_shares[EP_RPC_SHARES])
{
    const struct {
        const char *name;
        ep_buffer_pool *pool;
    } rows[EP_RPC_SHARES - 1] = {{"all", server->common.pool},
                                 {"hello", server->hello_pool},
                                 {"clients", server->client_pool},
                                 {"door", server->door_pool}};
    for (size_t i = 0; i < EP_RPC_SHARES - 1; i++) {
        ep_buffer_pool_stats stats;
        ep_buffer_pool_read_stats(rows[i].pool, &stats);
        out_shares[i] = (ep_rpc_share){.name = rows[i].name,
                                       .lent_bytes = stats.lent_bytes,
                                       .limit_bytes = ep_buffer_pool_limit(rows[i].pool),
                                       .refusals = stats.refusals};
    }
    pthread_mutex_lock(&server->lock);
    ep_rpc_hosts_read(&server->hosts, &out_shares[EP_RPC_SHARES - 1]);
    pthread_mutex_unlock(&server->lock);
}

ep_err ep_rpc_server_create(const ep_rpc_server_config *config, ep_rpc_server **out_server,
                            ep_error *out_error)
{
    ep_rpc_server *server = calloc(1, sizeof(*server));
    if (server == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an RPC server");
    }
    ep_err err = ep_rpc_common_copy(&config->common, &server->common, out_error);
    /* if it were ignored, the server would be open to all */
    if (err == EP_OK && server->common.token[0] != 0) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                           "a server judges by credentials, not by a token");
    }
    if (err == EP_OK && create_shares(server) != EP_OK) {
        err = ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for an RPC server");
    }
    if (err != EP_OK) {
        server_free(server);
        return err;
    }
    ep_rpc_hosts_init(&server->hosts, server->client_pool, server->common.limits.frame_bytes_max);
    server->config = *config;
    server->lane_limits = (ep_lane_limits){
        .frame_bytes = ep_frame_read_bytes,
        .pool = server->hello_pool,
        .frame_bytes_max = server->common.limits.frame_bytes_max,
        .first_frame_bytes_max = ep_rpc_first_frame_bytes_max(&server->common.limits, true),
        .send_queue_bytes_max = server->common.limits.send_queue_bytes_max,
        .connections_max = server->common.limits.connections_max,
    };
    pthread_mutex_init(&server->lock, NULL);
    pthread_cond_init(&server->idle, NULL);
    ep_rpc_audit_init(&server->audit, server->common.timers);
    ep_rpc_health_init(&server->health);
    ep_rpc_reflection_init(&server->reflection);
    server->services[server->services_count++] = &server->health.service.base;
    server->services[server->services_count++] = &server->reflection.base;
    *out_server = server;
    return EP_OK;
}

static bool has_method(const ProtobufCServiceDescriptor *descriptor)
{
    size_t count;
    const ep_rpc_method *methods = ep_rpc_methods(&count);
    for (size_t i = 0; i < count; i++) {
        if (methods[i].service == descriptor) {
            return true;
        }
    }
    return false;
}

static ep_err check_service(ep_rpc_server *server, const ProtobufCService *service,
                            ep_error *out_error)
{
    const char *name = service->descriptor->name;
    if (server->listeners_count > 0) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "service %s must be added before the first listen", name);
    }
    if (!has_method(service->descriptor)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "service %s has no method in methods.def", name);
    }
    if (ep_rpc_service_find(server, service->descriptor) != NULL) {
        return ep_error_set(out_error, EP_ERR_ALREADY_EXISTS, "service %s is already registered",
                            name);
    }
    if (server->services_count == EP_RPC_SERVICES_MAX) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "service %s is one too many, allowed up to %d", name,
                            EP_RPC_SERVICES_MAX);
    }
    return EP_OK;
}

ep_err ep_rpc_server_add_service(ep_rpc_server *server, ProtobufCService *service,
                                 ep_error *out_error)
{
    pthread_mutex_lock(&server->lock);
    ep_err err = check_service(server, service, out_error);
    if (err == EP_OK) {
        server->services[server->services_count++] = service;
    }
    pthread_mutex_unlock(&server->lock);
    return err;
}

/* True when the connection may become a session. Operators have places of their own, so that a full
 * service does not keep them out. *out_gone (a reference): a session to close to make room. */
static bool admit(ep_rpc_server *server, const ep_rpc_listener *listener, const char *peer,
                  ep_rpc_session **out_gone)
{
    ep_accept_pick pick = {.newcomer = peer};
    bool is_admin = listener->roles == EP_ROLES_ADMIN;
    *out_gone = NULL;
    pthread_mutex_lock(&server->lock);
    for (ep_rpc_session *session = server->sessions; session != NULL; session = session->next) {
        if ((session->roles == EP_ROLES_ADMIN) == is_admin && !session->told_to_close) {
            bool is_stranger = !__atomic_load_n(&session->hello_done, __ATOMIC_RELAXED);
            ep_accept_pick_see(&pick, session, session->origin.peer, is_stranger);
        }
    }
    bool room;
    ep_rpc_session *gone = ep_accept_pick_choose(&pick, listener->places, &room);
    if (gone != NULL && ep_rpc_link_try_ref(&gone->link)) {
        gone->told_to_close = true;
        *out_gone = gone;
    }
    room = room && !server->stopping;
    pthread_mutex_unlock(&server->lock);
    return room;
}

/* A session whose Hello is just arriving is closed too, and its peer dials again. */
static void turn_away(ep_rpc_server *server, ep_rpc_session *taken_session)
{
    ep_error why;
    ep_error_set(&why, EP_ERR_RESOURCE_EXHAUSTED,
                 "its place is wanted: it said no Hello, and too many others have not either");
    const ep_rpc_audit_event event = {
        .peer = taken_session->origin.peer, .method = "Hello", .text = why.text};
    ep_rpc_audit_refused(&server->audit, EP_REFUSED_CONNECTIONS, &event);
    __atomic_store_n(&taken_session->hello_refused, true, __ATOMIC_RELAXED);
    ep_rpc_link_close(&taken_session->link, &why);
    ep_rpc_link_unref(&taken_session->link);
}

static void accepted(void *arg, ep_conn *taken_conn)
{
    const ep_rpc_listener *listener = arg;
    ep_rpc_server *server = listener->server;
    ep_rpc_session *gone;
    char peer[EP_ADDRESS_BYTES];
    __atomic_fetch_add(&server->stats.connections_total, 1, __ATOMIC_RELAXED);
    ep_conn_peer(taken_conn, peer, sizeof(peer));
    bool room = admit(server, listener, peer, &gone);
    if (gone != NULL) {
        turn_away(server, gone);
    }
    if (room) {
        ep_rpc_session_create(server, listener->roles, taken_conn);
    } else {
        __atomic_fetch_add(&server->stats.connections_refused, 1, __ATOMIC_RELAXED);
        ep_rpc_audit_count(&server->audit, EP_REFUSED_CONNECTIONS);
        ep_conn_release(taken_conn);
    }
}

ep_err ep_rpc_server_listen(ep_rpc_server *server, const ep_lane_address *address, unsigned roles,
                            ep_error *out_error)
{
    const ep_lane_ops *lane = ep_lane_for_url(address->url);
    if (lane == NULL) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "no lane serves the address \"%.100s\"", address->url);
    }
    pthread_mutex_lock(&server->lock);
    bool room = server->listeners_count < EP_RPC_LISTENERS_MAX;
    size_t index = server->listeners_count;
    if (room) { /* the place is reserved while the lane binds */
        server->listeners[index] = (ep_rpc_listener){.server = server, .roles = roles};
        server->listeners_count++;
    }
    pthread_mutex_unlock(&server->lock);
    if (!room) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "a server may have up to %d listeners", EP_RPC_LISTENERS_MAX);
    }

    ep_rpc_listener *place = &server->listeners[index];
    ep_lane_limits limits = server->lane_limits;
    if (roles == EP_ROLES_ADMIN) {
        limits.pool = server->common.pool;
        limits.connections_max = EP_RPC_ADMIN_CONNECTIONS_MAX;
    }
    place->places = ep_accept_places(&limits, address->url);
    ep_listener *listener = NULL;
    ep_err err = ep_lane_listen(lane, address, &limits, accepted, place, &listener, out_error);
    pthread_mutex_lock(&server->lock);
    if (err == EP_OK) {
        ep_listener_url(listener, place->url, sizeof(place->url));
        place->listener = listener;
    } else if (server->listeners_count == index + 1) {
        server->listeners_count--;
    }
    pthread_mutex_unlock(&server->lock);
    return err;
}

void ep_rpc_server_url(ep_rpc_server *server, size_t index, char *out_url, size_t bytes)
{
    pthread_mutex_lock(&server->lock);
    snprintf(out_url, bytes, "%s",
             index < server->listeners_count ? server->listeners[index].url : "");
    pthread_mutex_unlock(&server->lock);
}

ep_err ep_rpc_server_renew_tls(ep_rpc_server *server, ep_error *out_error)
{
    ep_err err = server->door != NULL ? ep_rpc_door_renew_tls(server->door, out_error) : EP_OK;
    for (size_t i = 0; err == EP_OK && i < EP_RPC_LISTENERS_MAX; i++) {
        pthread_mutex_lock(&server->lock);
        ep_listener *listener = i < server->listeners_count ? server->listeners[i].listener : NULL;
        pthread_mutex_unlock(&server->lock);
        if (listener != NULL && listener->ops->listener_renew_tls != NULL) {
            err = listener->ops->listener_renew_tls(listener, out_error);
        }
    }
    return err;
}

void ep_rpc_server_set_state(ep_rpc_server *server, const char *state)
{
    __atomic_store_n(&server->draining_flag,
                     strcmp(state, "draining") == 0 ? EP_FRAME_FLAG_DRAINING : 0, __ATOMIC_SEQ_CST);
    ep_rpc_health_set_state(&server->health, state);
}

static uint64_t unacked_bytes(ep_rpc_server *server)
{
    uint64_t bytes = 0;
    /* The session stays in the list. Its reference is dropped without the lock, because its end
     * takes the lock. */
    ep_rpc_session *held = NULL;
    pthread_mutex_lock(&server->lock);
    for (ep_rpc_session *session = server->sessions; session != NULL; session = session->next) {
        if (!ep_rpc_link_try_ref(&session->link)) {
            continue; /* its connection is being released */
        }
        bytes += ep_conn_unacked(session->link.conn);
        if (held != NULL) {
            pthread_mutex_unlock(&server->lock);
            ep_rpc_link_unref(&held->link);
            pthread_mutex_lock(&server->lock);
        }
        held = session;
    }
    pthread_mutex_unlock(&server->lock);
    if (held != NULL) {
        ep_rpc_link_unref(&held->link);
    }
    return bytes;
}

void ep_rpc_server_read_stats(ep_rpc_server *server, ep_rpc_server_stats *out_stats)
{
    ep_rpc_server_stats *s = &server->stats;
    pthread_mutex_lock(&server->lock);
    *out_stats = (ep_rpc_server_stats){
        .connections = server->sessions_count,
        .connections_total = __atomic_load_n(&s->connections_total, __ATOMIC_RELAXED),
        .connections_refused = __atomic_load_n(&s->connections_refused, __ATOMIC_RELAXED),
        .calls_in_flight = __atomic_load_n(&s->calls_in_flight, __ATOMIC_RELAXED),
        .calls_total = __atomic_load_n(&s->calls_total, __ATOMIC_RELAXED),
        .calls_failed = __atomic_load_n(&s->calls_failed, __ATOMIC_RELAXED),
        .protocol_errors = __atomic_load_n(&s->protocol_errors, __ATOMIC_RELAXED),
        .bytes_received = __atomic_load_n(&s->bytes_received, __ATOMIC_RELAXED),
        .bytes_sent = __atomic_load_n(&s->bytes_sent, __ATOMIC_RELAXED),
        .shm_bytes_received = __atomic_load_n(&s->shm_bytes_received, __ATOMIC_RELAXED),
        .shm_bytes_sent = __atomic_load_n(&s->shm_bytes_sent, __ATOMIC_RELAXED),
    };
    for (size_t i = 0; i < EP_REFUSALS_COUNT; i++) {
        out_stats->refused[i] = __atomic_load_n(&server->audit.refused[i], __ATOMIC_RELAXED);
    }
    /* under one lock: a session that ends adds its bytes to those above */
    for (ep_rpc_session *session = server->sessions; session != NULL; session = session->next) {
        uint64_t received = __atomic_load_n(&session->link.bytes_received, __ATOMIC_RELAXED);
        uint64_t sent = __atomic_load_n(&session->link.bytes_sent, __ATOMIC_RELAXED);
        out_stats->bytes_received += received;
        out_stats->bytes_sent += sent;
        if (session->is_shm) {
            out_stats->shm_connections++;
            out_stats->shm_bytes_received += received;
            out_stats->shm_bytes_sent += sent;
        }
        out_stats->sends_queued += ep_rpc_link_sends_in_flight(&session->link);
    }
    pthread_mutex_unlock(&server->lock);
    out_stats->unacked_bytes = unacked_bytes(server);
    ep_rpc_door_add_stats(server->door, out_stats);
}

static void close_listeners(ep_rpc_server *server)
{
    pthread_mutex_lock(&server->lock);
    server->stopping = true;
    size_t count = server->listeners_count;
    pthread_mutex_unlock(&server->lock);
    for (size_t i = 0; i < count; i++) {
        pthread_mutex_lock(&server->lock);
        /* a session that gets Hello meanwhile must not offer it any more */
        ep_listener *listener = server->listeners[i].listener;
        server->listeners[i].listener = NULL;
        pthread_mutex_unlock(&server->lock);
        if (listener != NULL) {
            ep_listener_close(listener);
        }
    }
}

/* A session that was not yet told to close, with a reference; NULL when all were. */
static ep_rpc_session *next_to_close(ep_rpc_server *server)
{
    ep_rpc_session *session;
    pthread_mutex_lock(&server->lock);
    for (session = server->sessions; session != NULL; session = session->next) {
        /* a session without references waits for our lock to leave the list */
        if (!session->told_to_close && ep_rpc_link_try_ref(&session->link)) {
            session->told_to_close = true;
            break;
        }
    }
    pthread_mutex_unlock(&server->lock);
    return session;
}

void ep_rpc_server_destroy(ep_rpc_server *server)
{
    if (server == NULL) {
        return;
    }
    close_listeners(server);
    for (ep_rpc_session *session; (session = next_to_close(server)) != NULL;) {
        ep_rpc_link_goodbye(&session->link, EP_ERR_UNAVAILABLE, "the server stops");
        ep_rpc_link_unref(&session->link);
    }
    ep_rpc_door_destroy(server->door);
    pthread_mutex_lock(&server->lock);
    while (server->sessions != NULL) {
        pthread_cond_wait(&server->idle, &server->lock);
    }
    pthread_mutex_unlock(&server->lock);

    while (server->free_calls != NULL) {
        ep_rpc_call *call = server->free_calls;
        server->free_calls = call->next;
        ep_rpc_call_free(call);
    }
    ep_rpc_audit_fini(&server->audit);
    ep_rpc_health_fini(&server->health);
    pthread_cond_destroy(&server->idle);
    pthread_mutex_destroy(&server->lock);
    server_free(server);
}
