/* SPDX-License-Identifier: Apache-2.0 */
/* See lane_accept.h. */
#include "transport/lane_accept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/log.h"

#define DESCRIPTORS_LEFT_FREE 64

ep_accept_count *ep_accept_count_create(void)
{
    ep_accept_count *count = calloc(1, sizeof(*count));
    if (count != NULL) {
        count->refs = 1;
    }
    return count;
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
    __atomic_sub_fetch(&count->connections, 1, __ATOMIC_ACQ_REL);
    ep_accept_count_unref(count);
}

void ep_accept_count_unref(ep_accept_count *count)
{
    if (count != NULL && __atomic_sub_fetch(&count->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        free(count);
    }
}

/* ---- strangers ---- */

#define SPARE 64 /* connections that are still closing */
#define STRANGERS_MIN 16u

uint32_t ep_accept_places(ep_lane_limits *limits, const char *url)
{
    uint32_t wanted = limits->connections_max;
    ep_accept_leave_descriptors(limits, url);
    if (limits->connections_max == wanted) {
        limits->connections_max += SPARE;
        return wanted;
    }
    uint32_t most = limits->connections_max;
    return most - (most / 4 < SPARE ? most / 4 : SPARE);
}

static uint32_t share_of_address(uint32_t places)
{
    return places / 4 > STRANGERS_MIN ? places / 4 : STRANGERS_MIN;
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
    bool has_share = pick->of_host >= share_of_address(places);
    void *gone = has_share ? pick->oldest_of_host : is_full ? pick->oldest : NULL;
    *out_room = gone != NULL || !is_full;
    return gone;
}

/* ---- descriptors, failures, addresses ---- */

void ep_accept_leave_descriptors(ep_lane_limits *limits, const char *url)
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

void ep_accept_warn_full(const char *url, uint32_t connections_max)
{
    ep_log(EP_LOG_WARN, "lane-connections-max", EP_KV(url, url),
           EP_KV(connections_max, connections_max), EP_KV(reason, "all places are taken"),
           EP_KV(effect, "newcomers are turned away until one is free"),
           EP_KV(hint, "raise connections_max"));
}

uint32_t ep_accept_backoff_ms(uint32_t backoff_ms, const char *url, const char *reason)
{
    if (backoff_ms == 0) {
        ep_log(EP_LOG_WARN, "lane-accept-failed", EP_KV(url, url), EP_KV(reason, reason),
               EP_KV(effect, "accepting is tried again"));
        return EP_ACCEPT_BACKOFF_MIN_MS;
    }
    return backoff_ms * 2 > EP_ACCEPT_BACKOFF_MAX_MS ? EP_ACCEPT_BACKOFF_MAX_MS : backoff_ms * 2;
}

void ep_accept_url(const char *asked, int port, char *out_url, size_t bytes)
{
    const char *host = strstr(asked, "://") + 3;
    const char *colon = strrchr(host, ':');
    size_t kept =
        colon != NULL && strchr(colon, ']') == NULL ? (size_t)(colon - asked) : strlen(asked);
    snprintf(out_url, bytes, "%.*s:%d", (int)kept, asked, port);
}
