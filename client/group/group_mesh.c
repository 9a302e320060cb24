/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates and ends a group. Every rank listens, and dials the ranks below it. First all connect to
 * rank 0, which chooses the membership number and tells all ranks where the others listen. Then
 * these connect to each other.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/struct_size.h"
#include "group/group_core.h"
#include "transport/address.h"

#define DEADLINE_DEFAULT_US 30000000ull
#define FRAME_BYTES_DEFAULT ((uint64_t)256 << 20)
#define FRAME_BYTES_LEAST 65536
#define FIRST_FRAME_BYTES 4096
#define FLUSH_NS (5 * EP_NS_PER_S)
#define DIAL_BACKOFF_MIN_NS (2 * EP_NS_PER_MS)
#define DIAL_BACKOFF_MAX_NS (200 * EP_NS_PER_MS)
#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

bool ep_group_wait_until(ep_group *group, uint64_t deadline_ns)
{
    if (ep_clock_now_ns() >= deadline_ns) {
        return false;
    }
    ep_clock_wait(&group->changed, &group->lock, deadline_ns);
    return true;
}

/* ---- configuration ---- */

void ep_group_config_init_sized(ep_group_config *out_config, size_t struct_bytes)
{
    const ep_group_config config = {.deadline_us = DEADLINE_DEFAULT_US,
                                    .payload_crc = true,
                                    .frame_bytes_max = FRAME_BYTES_DEFAULT};
    ep_struct_init(out_config, struct_bytes, &config, sizeof(config));
}

static const char *listen_url_of(const ep_group_config *config)
{
    if (config->listen_url != NULL) {
        return config->listen_url;
    }
    return config->rank < config->urls_count ? config->urls[config->rank] : NULL;
}

static ep_err check_urls(const ep_group_config *config, ep_error *out_error)
{
    if (config->urls == NULL ||
        (config->urls_count != 1 && config->urls_count != config->world_size)) {
        return BAD("urls has %" PRIu32 " entries: allowed 1 (rank 0's) or %" PRIu32 " (world_size)",
                   config->urls == NULL ? 0 : config->urls_count, config->world_size);
    }
    for (uint32_t r = 0; r < config->urls_count; r++) {
        if (config->urls[r] == NULL || strlen(config->urls[r]) >= EP_GROUP_URL_BYTES ||
            ep_lane_for_url(config->urls[r]) == NULL) {
            return BAD("urls[%" PRIu32
                       "] is \"%.100s\": allowed a URL of up to %d characters whose "
                       "scheme a lane of this build serves (tcp, tls+tcp, loopback)",
                       r, config->urls[r] == NULL ? "" : config->urls[r], EP_GROUP_URL_BYTES - 1);
        }
    }
    const char *listen = listen_url_of(config);
    if (listen == NULL) {
        return BAD(
            "listen_url is missing: urls has rank 0's address alone, and this is rank %" PRIu32,
            config->rank);
    }
    if (strlen(listen) >= EP_GROUP_URL_BYTES || ep_lane_for_url(listen) == NULL) {
        return BAD(
            "listen_url is \"%.100s\": allowed a URL whose scheme a lane of this build serves",
            listen);
    }
    bool guarded =
        config->token != NULL && config->token[0] != 0 && strncmp(listen, "tls+tcp://", 10) == 0;
    if (!config->insecure && !ep_address_is_loopback(listen) && !guarded) {
        return BAD("listen_url \"%.100s\" is reachable from other hosts: use tls+tcp:// and a "
                   "token, or set insecure",
                   listen);
    }
    return EP_OK;
}

static ep_err check_config(const ep_group_config *config, ep_error *out_error)
{
    size_t name_bytes = config->name == NULL ? 0 : strlen(config->name);
    if (name_bytes < 1 || name_bytes > EP_GROUP_NAME_BYTES_MAX) {
        return BAD("name (group_ep) has %zu characters: allowed 1..%d", name_bytes,
                   EP_GROUP_NAME_BYTES_MAX);
    }
    if (config->world_size < 1 || config->world_size > EP_GROUP_WORLD_MAX) {
        return BAD("world_size is %" PRIu32 ": allowed 1..%d", config->world_size,
                   EP_GROUP_WORLD_MAX);
    }
    if (config->rank >= config->world_size) {
        return BAD("rank is %" PRIu32 ": allowed 0..%" PRIu32, config->rank,
                   config->world_size - 1);
    }
    if (config->deadline_us == 0) {
        return BAD("deadline_us is 0: allowed 1 or more");
    }
    if (config->frame_bytes_max < FRAME_BYTES_LEAST || config->frame_bytes_max > (uint64_t)1
                                                                                     << 40) {
        return BAD("frame_bytes_max is %" PRIu64 ": allowed %d..%" PRIu64, config->frame_bytes_max,
                   FRAME_BYTES_LEAST, (uint64_t)1 << 40);
    }
    if (config->host != NULL && strlen(config->host) >= EP_HOST_BYTES) {
        return BAD("host is \"%.80s\" with %zu characters: allowed up to %d", config->host,
                   strlen(config->host), EP_HOST_BYTES - 1);
    }
    if (config->token != NULL && strlen(config->token) >= EP_GROUP_TOKEN_BYTES) {
        return BAD("token has %zu bytes: allowed up to %d", strlen(config->token),
                   EP_GROUP_TOKEN_BYTES - 1);
    }
    return check_urls(config, out_error);
}

/* ---- memory ---- */

static void group_free(ep_group *group)
{
    if (group->pool != NULL) {
        ep_buffer_pool_destroy(group->pool);
    }
    ep_fork_guard_fini(&group->fork);
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->lock);
    ep_tls_config_free(&group->tls);
    free(group->same_host);
    free(group->members);
    free(group->peers);
    explicit_bzero(group->token, sizeof(group->token));
    free(group);
}

static ep_err group_alloc(const ep_group_config *config, ep_group **out_group)
{
    ep_group *group = calloc(1, sizeof(*group));
    if (group == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    pthread_cond_init(&group->changed, NULL);
    pthread_mutex_init(&group->lock, NULL);
    ep_fork_guard_init(&group->fork);
    STAILQ_INIT(&group->held);
    size_t world = config->world_size;
    group->world = config->world_size;
    group->rank = config->rank;
    group->deadline_us = config->deadline_us;
    group->frame_bytes_max = (size_t)config->frame_bytes_max;
    group->payload_crc = config->payload_crc;
    snprintf(group->name, sizeof(group->name), "%s", config->name);
    snprintf(group->token, sizeof(group->token), "%s", config->token == NULL ? "" : config->token);
    if (config->host != NULL) {
        snprintf(group->own_host, sizeof(group->own_host), "%s", config->host);
    } else {
        ep_host_boot_id(group->own_host);
    }
    group->guards_token = !config->insecure && group->token[0] != 0;
    const ep_tls_config tls = {.ca_file = config->tls_ca_file,
                               .cert_key_file = config->tls_cert_key_file,
                               .server_name = config->tls_server_name};
    bool failed = ep_tls_config_copy(&tls, &group->tls) != EP_OK;
    group->same_host = calloc(world, sizeof(*group->same_host));
    group->members = calloc(world, sizeof(*group->members));
    group->peers = calloc(world, sizeof(*group->peers));
    failed = failed || group->same_host == NULL || group->members == NULL || group->peers == NULL ||
             ep_buffer_pool_create(0, (size_t)config->frame_bytes_max, &group->pool) != EP_OK;
    if (failed) {
        group_free(group);
        return EP_ERR_NO_MEMORY;
    }
    for (uint32_t r = 0; r < group->world; r++) {
        group->members[r] = r;
    }
    group->members_count = group->world;
    snprintf(group->peers[group->rank].host, EP_HOST_BYTES, "%s", group->own_host);
    ep_group_find_hosts(group);
    group->limits = (ep_lane_limits){
        .frame_bytes = ep_group_frame_read_bytes,
        .prefix_bytes = EP_GROUP_FRAME_FIXED_BYTES,
        .pool = group->pool,
        .frame_bytes_max = group->frame_bytes_max,
        .first_frame_bytes_max = FIRST_FRAME_BYTES,
        /* room for all frames that may be passed on */
        .send_queue_bytes_max =
            2 * EP_GROUP_OPERATIONS_MAX * world * group->frame_bytes_max + FRAME_BYTES_LEAST,
        .connections_max = group->world + 16};
    *out_group = group;
    return EP_OK;
}

/* ---- welcome and table ---- */

static const char *host_of(const void *arg, uint32_t rank)
{
    const ep_group *group = arg;
    return group->peers[rank].host;
}

void ep_group_find_hosts(ep_group *group)
{
    ep_group_hosts_match(host_of, group, group->world, group->same_host);
    for (uint32_t r = 0; r < group->world; r++) {
        group->has_neighbours =
            group->has_neighbours ||
            (r != group->rank && group->same_host[r] == group->same_host[group->rank]);
    }
    ep_group_hosts_build(group->same_host, group->members, group->members_count, &group->hosts);
}

void ep_group_send_welcome(group_link *link)
{
    ep_group_send_text(link, EP_GROUP_FRAME_WELCOME, 0, 0, EP_OK, NULL);
}

/* The table cannot be sent: refuses all ranks, so that none waits for it. False. Lock not held. */
static bool refuse_all(ep_group *group, size_t bytes, const ep_error *error)
{
    ep_error why;
    if (error->code == EP_ERR_RESOURCE_EXHAUSTED) {
        ep_error_set(
            &why, error->code,
            "the table of %" PRIu32
            " ranks takes %zu bytes: allowed %zu (frame_bytes_max of ep_group_config at rank 0)",
            group->world, EP_GROUP_FRAME_FIXED_BYTES + bytes, group->frame_bytes_max);
    } else {
        why = *error;
    }
    for (uint32_t r = 1; r < group->world; r++) {
        group_link *link = ep_group_peer_link(group, r);
        if (link != NULL) {
            ep_group_send_text(link, EP_GROUP_FRAME_REFUSED, 0, 0, why.code, why.text);
        }
    }
    pthread_mutex_lock(&group->lock);
    group->create_error = why; /* set last, as ep_group_create then closes the links */
    pthread_mutex_unlock(&group->lock);
    return false;
}

bool ep_group_send_table(ep_group *group)
{
    size_t bytes = 0;
    for (uint32_t r = 0; r < group->world; r++) {
        bytes += strlen(group->peers[r].url) + 1 + strlen(group->peers[r].host) + 1;
    }
    for (uint32_t r = 1; r < group->world; r++) {
        ep_buffer *buffer;
        uint8_t *data;
        ep_error error;
        if (ep_group_frame_acquire(group, EP_GROUP_FRAME_FIXED_BYTES + bytes, &buffer, &data,
                                   &error) != EP_OK) {
            return refuse_all(group, bytes, &error);
        }
        char *at = (char *)data + EP_GROUP_FRAME_FIXED_BYTES;
        for (uint32_t i = 0; i < group->world; i++) {
            at = stpcpy(at, group->peers[i].url) + 1;
            at = stpcpy(at, group->peers[i].host) + 1;
        }
        ep_group_frame frame = {.kind = EP_GROUP_FRAME_TABLE};
        group_link *link = ep_group_peer_link(group, r);
        if (link == NULL) {
            ep_buffer_unref(buffer);
        } else {
            ep_group_frame_send(link, &frame, buffer);
        }
    }
    return true;
}

void ep_group_answer_hellos(ep_group *group)
{
    for (uint32_t r = 0; r < group->world; r++) {
        pthread_mutex_lock(&group->lock);
        group_peer *peer = &group->peers[r];
        group_link *link = peer->hello_waits ? peer->link : NULL;
        bool welcome = link != NULL && peer->hello_membership == group->membership;
        if (link != NULL) {
            peer->hello_waits = false;
            peer->ready = welcome;
        }
        pthread_mutex_unlock(&group->lock);
        if (welcome) {
            ep_group_send_welcome(link);
        } else if (link != NULL) {
            ep_conn_close(link->conn);
        }
    }
    pthread_mutex_lock(&group->lock);
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

/* ---- dialing ---- */

typedef struct dial_arg {
    ep_group *group;
    uint32_t rank;
} dial_arg;

static void send_hello(ep_group *group, group_link *link)
{
    ep_buffer *buffer;
    uint8_t *data;
    if (ep_group_frame_acquire(group, EP_GROUP_FRAME_FIXED_BYTES + EP_GROUP_HELLO_BYTES, &buffer,
                               &data, NULL) != EP_OK) {
        return;
    }
    ep_group_hello hello = {.world_size = group->world, .rank = group->rank};
    memcpy(hello.name, group->name, sizeof(hello.name));
    memcpy(hello.url, group->own_url, sizeof(hello.url));
    memcpy(hello.token, group->token, sizeof(hello.token));
    memcpy(hello.host, group->own_host, sizeof(hello.host));
    ep_group_hello_encode(&hello, data + EP_GROUP_FRAME_FIXED_BYTES);
    explicit_bzero(&hello, sizeof(hello));
    ep_group_frame frame = {.kind = EP_GROUP_FRAME_HELLO};
    ep_group_frame_send(link, &frame, buffer);
}

static void on_dial(void *arg, ep_conn *taken_conn, const ep_error *error)
{
    dial_arg *dial = arg;
    ep_group *group = dial->group;
    group_peer *peer = &group->peers[dial->rank];
    if (taken_conn != NULL) {
        group_link *link = ep_group_link_start(group, taken_conn, dial->rank);
        if (link != NULL) {
            send_hello(group, link);
        }
    }
    pthread_mutex_lock(&group->lock);
    if (taken_conn == NULL && error->code != EP_ERR_CANCELLED) {
        snprintf(peer->dial_why, sizeof(peer->dial_why), "%.199s", error->text);
    }
    peer->dial_done = true;
    peer->dial_at_ns = ep_clock_now_ns() + peer->dial_backoff_ns;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
    free(dial);
}

/* Lock held; released meanwhile. */
static ep_err dial_peer(ep_group *group, uint32_t rank, ep_error *out_error)
{
    group_peer *peer = &group->peers[rank];
    peer->dial_done = false;
    peer->dial_backoff_ns =
        peer->dial_backoff_ns == 0 ? DIAL_BACKOFF_MIN_NS : peer->dial_backoff_ns * 2;
    if (peer->dial_backoff_ns > DIAL_BACKOFF_MAX_NS) {
        peer->dial_backoff_ns = DIAL_BACKOFF_MAX_NS;
    }
    ep_lane_address address;
    ep_err err =
        ep_address_for_dial(peer->url, &group->tls, group->guards_token, &address, out_error);
    if (err != EP_OK) {
        return ep_error_prefix(out_error, err, "rank %" PRIu32, rank);
    }
    pthread_mutex_unlock(&group->lock);
    const ep_lane_ops *lane = ep_lane_for_url(address.url);
    dial_arg *arg = malloc(sizeof(*arg));
    ep_lane_limits limits = group->limits;
    limits.first_frame_bytes_max = 0; /* no limit, since dialed ranks are trusted */
    if (lane == NULL || arg == NULL) {
        err = ep_error_set(out_error, lane == NULL ? EP_ERR_INVALID_ARGUMENT : EP_ERR_NO_MEMORY,
                           "cannot dial rank %" PRIu32 " at %s", rank, address.url);
    } else {
        *arg = (dial_arg){group, rank};
        err = ep_lane_dial_begin(lane, &address, &limits, on_dial, arg, &peer->dial, out_error);
    }
    if (err != EP_OK) {
        free(arg);
    }
    pthread_mutex_lock(&group->lock);
    return err;
}

/*
 * Dials peers that are due and releases finished dials. Lock held. *out_next_ns: when to call
 * again; 0: at once, since the lock was released meanwhile.
 */
static ep_err drive_dials(ep_group *group, uint64_t *out_next_ns, ep_error *out_error)
{
    uint32_t known = group->membership != 0 ? group->rank : (group->rank > 0 ? 1 : 0);
    for (uint32_t r = 0; r < known; r++) {
        group_peer *peer = &group->peers[r];
        if (peer->dial != NULL && peer->dial_done) {
            ep_dial *dial = peer->dial;
            peer->dial = NULL;
            pthread_mutex_unlock(&group->lock);
            ep_dial_release(dial);
            pthread_mutex_lock(&group->lock);
            *out_next_ns = 0;
        }
        if (peer->dial != NULL || peer->link != NULL || peer->ready) {
            continue;
        }
        if (ep_clock_now_ns() >= peer->dial_at_ns) {
            ep_err err = dial_peer(group, r, out_error);
            if (err != EP_OK) {
                return err;
            }
            *out_next_ns = 0;
        } else if (peer->dial_at_ns < *out_next_ns) {
            *out_next_ns = peer->dial_at_ns;
        }
    }
    return EP_OK;
}

static bool all_ready(const ep_group *group)
{
    for (uint32_t r = 0; r < group->world; r++) {
        if (r != group->rank && !group->peers[r].ready) {
            return false;
        }
    }
    return group->membership != 0 && (group->rank != 0 || group->table_out);
}

/* Before the first call all ranks are members. */
static void missing_ranks(const ep_group *group, char *out, size_t bytes)
{
    bool missing[EP_GROUP_WORLD_MAX];
    for (uint32_t r = 0; r < group->world; r++) {
        missing[r] = r != group->rank && !group->peers[r].ready;
    }
    ep_group_ranks_text(missing, group->members, group->world, out, bytes);
}

static ep_err meet(ep_group *group, uint64_t deadline_ns, ep_error *out_error)
{
    ep_err err = EP_OK;
    pthread_mutex_lock(&group->lock);
    while (err == EP_OK && !all_ready(group)) {
        uint64_t next_ns = deadline_ns;
        if (group->create_error.code != EP_OK) {
            *out_error = group->create_error;
            err = out_error->code;
            break;
        }
        err = drive_dials(group, &next_ns, out_error);
        if (err == EP_OK && next_ns != 0 && !all_ready(group) &&
            group->create_error.code == EP_OK && !ep_group_wait_until(group, next_ns) &&
            next_ns == deadline_ns) {
            char missing[160];
            const char *why = group->last_refusal[0] != 0 ? group->last_refusal
                              : group->rank > 0           ? group->peers[0].dial_why
                                                          : "";
            missing_ranks(group, missing, sizeof(missing));
            err = ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                               "group %.40s: rank %" PRIu32 " has not met rank %s in time%s%.150s",
                               group->name, group->rank, missing,
                               why[0] != 0 ? "; the last report: " : "", why);
        }
    }
    pthread_mutex_unlock(&group->lock);
    return err;
}

/* ---- create and destroy ---- */

/* The URL that others dial: the configured one if it has a port, else the listener's. */
static ep_err choose_own_url(ep_group *group, const ep_group_config *config, ep_error *out_error)
{
    char real[EP_GROUP_URL_BYTES];
    ep_listener_url(group->listener, real, sizeof(real));
    const char *given = config->urls_count == config->world_size || config->rank == 0
                            ? config->urls[config->rank]
                            : NULL;
    const char *port = given == NULL ? NULL : strrchr(given, ':');
    bool use_given =
        given != NULL && !(port != NULL && strcmp(port, ":0") == 0) && config->listen_url != NULL;
    snprintf(group->own_url, sizeof(group->own_url), "%s", use_given ? given : real);
    const char *host = strstr(group->own_url, "://");
    host = host == NULL ? group->own_url : host + 3;
    if (strncmp(host, "0.0.0.0:", 8) == 0 || strncmp(host, "[::]:", 5) == 0 || host[0] == ':' ||
        host[0] == '*') {
        return BAD("listen_url is %s: the other ranks cannot dial that; name this host's address",
                   group->own_url);
    }
    snprintf(group->peers[group->rank].url, sizeof(group->peers[0].url), "%s", group->own_url);
    if (group->rank != 0) {
        snprintf(group->peers[0].url, sizeof(group->peers[0].url), "%s", config->urls[0]);
    }
    if (config->on_listening != NULL) {
        config->on_listening(config->on_listening_arg, real);
    }
    return EP_OK;
}

static ep_err open_listener(ep_group *group, const ep_group_config *config, ep_error *out_error)
{
    const char *url = listen_url_of(config);
    ep_lane_address address = {.url = url,
                               .tls = strncmp(url, "tls+tcp://", 10) == 0 ? &group->tls : NULL};
    ep_err err = ep_lane_listen(ep_lane_for_url(url), &address, &group->limits, ep_group_accepted,
                                group, &group->listener, out_error);
    return err != EP_OK ? err : choose_own_url(group, config, out_error);
}

static void close_listener(ep_group *group)
{
    if (group->listener != NULL) {
        ep_listener_close(group->listener);
        group->listener = NULL;
    }
}

static void release_dials(ep_group *group)
{
    for (uint32_t r = 0; r < group->world; r++) {
        if (group->peers[r].dial != NULL) {
            ep_dial_release(group->peers[r].dial);
            group->peers[r].dial = NULL;
        }
    }
}

/* Closes connections that never became peers. */
static void close_strangers(ep_group *group)
{
    pthread_mutex_lock(&group->lock);
    for (group_link *link = LIST_FIRST(&group->links); link != NULL;
         link = LIST_NEXT(link, entry)) {
        if (link->rank == GROUP_NO_RANK && !link->closed) {
            ep_conn_close(link->conn);
        }
    }
    pthread_mutex_unlock(&group->lock);
}

ep_err ep_group_create(const ep_group_config *given, ep_group **out_group, ep_error *out_error)
{
    ep_group *group;
    ep_group_config taken;
    const ep_group_config *config = &taken;
    ep_group_config_init(&taken);
    ep_err err = ep_struct_in("ep_group_config", given, EP_STRUCT_UPTO(ep_group_config, urls_count),
                              &taken, sizeof(taken), out_error);
    if (err == EP_OK) {
        err = check_config(config, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    err = group_alloc(config, &group);
    if (err != EP_OK) {
        return ep_error_set(out_error, err, "no memory for a group of %" PRIu32 " ranks",
                            config->world_size);
    }
    uint64_t deadline_ns = ep_clock_after_us(config->deadline_us);
    if (group->rank == 0) {
        group->membership = ep_random_id();
    }
    if (group->world > 1) {
        ep_error error;
        ep_error_clear(&error);
        err = open_listener(group, config, &error);
        if (err == EP_OK) {
            err = meet(group, deadline_ns, &error);
        }
        if (err != EP_OK) {
            if (out_error != NULL) {
                *out_error = error;
            }
            ep_group_destroy(group);
            return err;
        }
        close_listener(group);
        release_dials(group);
        close_strangers(group);
        ep_group_relay_open(group);
    }
    *out_group = group;
    return EP_OK;
}

/*
 * The text of this rank's goodbye. Others may get it before they notice the cause themselves, so it
 * names what broke the generation. Ranks that are gone may have left because of that.
 */
static void describe_leaving(ep_group *group, char *out_text, size_t bytes)
{
    out_text[0] = 0;
    pthread_mutex_lock(&group->lock);
    if (group->broken.code != EP_OK) {
        snprintf(out_text, bytes, "%s", group->broken.text);
    }
    for (uint32_t r = 0; r < group->world && out_text[0] == 0; r++) {
        if (group->peers[r].gone) {
            snprintf(out_text, bytes, "rank %u is gone (%s)", r, group->peers[r].why);
        }
    }
    pthread_mutex_unlock(&group->lock);
}

static void say_goodbye(ep_group *group)
{
    char why[EP_ERROR_TEXT_BYTES];
    describe_leaving(group, why, sizeof(why));
    for (uint32_t r = 0; r < group->world; r++) {
        pthread_mutex_lock(&group->lock);
        group_peer *peer = &group->peers[r];
        group_link *link =
            peer->ready && peer->link != NULL && !peer->link->closed ? peer->link : NULL;
        pthread_mutex_unlock(&group->lock);
        if (link != NULL) { /* valid: only ep_group_destroy frees links of peers */
            ep_group_send_text(link, EP_GROUP_FRAME_BYE, 0, 0, EP_OK, why);
        }
    }
}

static void stop_watcher(ep_group *group)
{
    pthread_mutex_lock(&group->lock);
    bool runs = group->has_watcher;
    group->watcher_ends = true;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
    if (runs) {
        pthread_join(group->watcher, NULL);
    }
}

void ep_group_destroy(ep_group *group)
{
    if (group == NULL || ep_fork_guard_in_child(&group->fork)) {
        return;
    }
    stop_watcher(group);
    close_listener(group);
    release_dials(group);
    say_goodbye(group);
    uint64_t flushed_ns = ep_clock_now_ns() + FLUSH_NS;
    pthread_mutex_lock(&group->lock);
    group->closing = true;
    while (group->sends_in_flight > 0 && ep_group_wait_until(group, flushed_ns)) {
    }
    group_link *link;
    for (link = LIST_FIRST(&group->links); link != NULL; link = LIST_NEXT(link, entry)) {
        if (!link->closed) {
            ep_conn_close(link->conn);
        }
    }
    while (group->links_open > 0) {
        pthread_cond_wait(&group->changed, &group->lock);
    }
    for (uint32_t r = 0; r < group->world; r++) {
        group_peer *peer = &group->peers[r];
        for (uint32_t i = 0; i < peer->ring_count; i++) {
            ep_buffer_unref(peer->ring[i].buffer);
        }
    }
    while ((link = LIST_FIRST(&group->links)) != NULL) {
        LIST_REMOVE(link, entry);
        ep_conn_release(link->conn);
        free(link);
    }
    ep_group_relay_drop(group);
    pthread_mutex_unlock(&group->lock);
    group_free(group);
}

uint32_t ep_group_rank(const ep_group *group)
{
    return group->rank;
}

uint32_t ep_group_world_size(const ep_group *group)
{
    return group->world;
}
