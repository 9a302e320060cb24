/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_accept.h. */
#include "transport/lane_accept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/log.h"
#include "transport/lane_common.h"
#include "transport/lane_fork.h"

#define DESCRIPTORS_LEFT_FREE 64
#define BACKOFF_MIN_MS 10
#define BACKOFF_MAX_MS 1000

static void count_unref(ep_accept_count *count)
{
    if (__atomic_sub_fetch(&count->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        free(count);
    }
}

bool ep_accept_count_add(ep_accept_count *count, uint32_t max)
{
    if (__atomic_add_fetch(&count->connections, 1, __ATOMIC_ACQ_REL) > max) {
        __atomic_sub_fetch(&count->connections, 1, __ATOMIC_ACQ_REL);
        return false;
    }
    __atomic_add_fetch(&count->refs, 1, __ATOMIC_ACQ_REL);
    return true;
}

void ep_accept_count_remove(ep_accept_count *count)
{
    if (count != NULL) {
        __atomic_sub_fetch(&count->connections, 1, __ATOMIC_ACQ_REL);
        count_unref(count);
    }
}

/* Lowers connections_max so that some descriptors stay free for the rest of the program; logs it
 * once. */
static void leave_descriptors(ep_lane_limits *limits, const char *url)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return;
    }
    rlim_t most =
        limit.rlim_cur > DESCRIPTORS_LEFT_FREE ? limit.rlim_cur - DESCRIPTORS_LEFT_FREE : 1;
    if (limits->connections_max > most) {
        ep_log(EP_LOG_WARN, "lane-few-descriptors", EP_KV(url, url),
               EP_KV(connections_max, limits->connections_max), EP_KV(fd_limit, limit.rlim_cur),
               EP_KV(lowered_to, most), EP_KV(reason, "this process may not open as many files"),
               EP_KV(hint, "raise LimitNOFILE of the unit (ulimit -n), or lower connections_max"));
        limits->connections_max = (uint32_t)most;
    }
}

/* ---- a listener ---- */

ep_err ep_lane_listen(const ep_lane_ops *lane, const ep_lane_address *address,
                      const ep_lane_limits *limits, ep_accept_func on_accept, void *arg,
                      ep_listener **out_listener, ep_error *out_error)
{
    *out_listener = NULL;
    ep_lane_limits own;
    ep_err err = ep_lane_limits_take(limits, true, &own, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_lane_listener *listener = calloc(1, lane->listener_bytes);
    ep_accept_count *count = calloc(1, sizeof(*count));
    if (listener == NULL || count == NULL) {
        free(listener);
        free(count);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a listener");
    }
    count->refs = 1;
    listener->base.ops = lane;
    listener->limits = own;
    listener->on_accept = on_accept;
    listener->arg = arg;
    listener->count = count;
    listener->forks = ep_lane_forks();
    snprintf(listener->url, sizeof(listener->url), "%s", address->url);
    pthread_mutex_init(&listener->lock, NULL);
    pthread_cond_init(&listener->changed, NULL);
    ep_lane_hold();
    *out_listener = &listener->base; /* on_accept may use it */
    err = lane->listen(&listener->base, address, out_error);
    if (err != EP_OK) {
        *out_listener = NULL;
        ep_lane_listener_free(listener);
    }
    return err;
}

void ep_lane_listener_free(ep_lane_listener *listener)
{
    count_unref(listener->count);
    pthread_cond_destroy(&listener->changed);
    pthread_mutex_destroy(&listener->lock);
    free(listener);
    ep_lane_drop();
}

void ep_listener_close(ep_listener *listener)
{
    if (ep_lane_is_ours(((ep_lane_listener *)listener)->forks)) {
        listener->ops->listener_close(listener);
    }
}

void ep_listener_url(ep_listener *listener, char *out_url, size_t bytes)
{
    snprintf(out_url, bytes, "%s", ((ep_lane_listener *)listener)->url);
}

bool ep_lane_listener_admit(ep_lane_listener *listener)
{
    uint32_t max = listener->limits.connections_max;
    bool admitted = ep_accept_count_add(listener->count, max);
    if (!admitted && !listener->refusing) {
        ep_log(EP_LOG_WARN, "lane-connections-max", EP_KV(url, listener->url),
               EP_KV(connections_max, max), EP_KV(reason, "all places are taken"),
               EP_KV(effect, "newcomers are turned away until one is free"),
               EP_KV(hint, "raise connections_max"));
    }
    listener->refusing = !admitted;
    return admitted;
}

uint32_t ep_lane_listener_pause_ms(ep_lane_listener *listener, const char *reason)
{
    uint32_t pause_ms = listener->backoff_ms * 2;
    if (pause_ms == 0) {
        ep_log(EP_LOG_WARN, "lane-accept-failed", EP_KV(url, listener->url), EP_KV(reason, reason),
               EP_KV(effect, "accepting is tried again"));
        pause_ms = BACKOFF_MIN_MS;
    }
    listener->backoff_ms = pause_ms < BACKOFF_MAX_MS ? pause_ms : BACKOFF_MAX_MS;
    return listener->backoff_ms;
}

void ep_lane_listener_set_port(ep_lane_listener *listener, int port)
{
    char *host = strstr(listener->url, "://") + 3;
    char *colon = strrchr(host, ':');
    char *end = colon != NULL && strchr(colon, ']') == NULL ? colon : host + strlen(host);
    snprintf(end, sizeof(listener->url) - (size_t)(end - listener->url), ":%d", port);
    leave_descriptors(&listener->limits, listener->url);
}

/* ---- strangers ---- */

#define SPARE 64 /* room for connections that are still closing */
#define STRANGERS_MIN 16u

uint32_t ep_accept_places(ep_lane_limits *limits, const char *url)
{
    uint32_t wanted = limits->connections_max;
    leave_descriptors(limits, url);
    if (limits->connections_max == wanted) {
        limits->connections_max += SPARE;
        return wanted;
    }
    uint32_t most = limits->connections_max;
    return most - (most / 4 < SPARE ? most / 4 : SPARE);
}

size_t ep_accept_host_bytes(const char *peer)
{
    const char *port = strrchr(peer, ':');
    return port != NULL ? (size_t)(port - peer) : strlen(peer);
}

static bool is_same_host(const char *peer, const char *other)
{
    size_t bytes = ep_accept_host_bytes(peer);
    return bytes == ep_accept_host_bytes(other) && memcmp(peer, other, bytes) == 0;
}

void ep_accept_pick_see(ep_accept_pick *pick, void *connection, const char *peer, bool is_stranger)
{
    pick->taken++;
    if (!is_stranger) {
        return;
    }
    pick->oldest = connection;
    if (is_same_host(peer, pick->newcomer)) {
        pick->of_host++;
        pick->oldest_of_host = connection;
    }
}

void *ep_accept_pick_choose(const ep_accept_pick *pick, uint32_t places, bool *out_room)
{
    bool is_full = pick->taken >= places;
    bool has_share = pick->of_host >= STRANGERS_MIN && pick->of_host >= places / 4;
    void *gone = has_share ? pick->oldest_of_host : is_full ? pick->oldest : NULL;
    *out_room = gone != NULL || !is_full;
    return gone;
}
