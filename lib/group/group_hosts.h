/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_alg = hierarchy: which members of a call share a host, and which member receives another
 * host's rows for it. Every rank computes this from the same table, so nothing is exchanged.
 *
 * Members    numbers 0..count-1 of a call's ranks (after elastic_info).
 * Gateways   rows of member s go to member `gateway(s, host)` of each other host. Sources of one
 *            host use different gateways of another host, as far as it has that many ranks; so do
 *            hosts of one rank each.
 * Threads    pure.
 */
#ifndef EP_GROUP_HOSTS_H
#define EP_GROUP_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/host.h"
#include "expertd/group.h"

typedef struct ep_group_hosts {
    uint32_t count;                        /* hosts, numbered in the order of their first members */
    uint32_t host_of[EP_GROUP_WORLD_MAX];  /* by member */
    uint32_t place_of[EP_GROUP_WORLD_MAX]; /* position of a member among those of its host */
    uint32_t first[EP_GROUP_WORLD_MAX + 1]; /* members of host h: list[first[h] .. first[h + 1]) */
    uint32_t list[EP_GROUP_WORLD_MAX];
} ep_group_hosts;

/* names(arg, rank): the host of a rank of the group; "": unknown, shares with no other rank.
 * out_same [ranks]: the lowest rank on the same host. */
typedef const char *(*ep_group_host_name)(const void *arg, uint32_t rank);
void ep_group_hosts_match(ep_group_host_name name, const void *arg, uint32_t ranks,
                          uint32_t *out_same);

/* same: result of ep_group_hosts_match, by rank; members [count]: the call's ranks. */
void ep_group_hosts_build(const uint32_t *same, const uint32_t *members, uint32_t count,
                          ep_group_hosts *out_hosts);

static inline uint32_t ep_group_host_ranks(const ep_group_hosts *hosts, uint32_t host)
{
    return hosts->first[host + 1] - hosts->first[host];
}

static inline bool ep_group_hosts_share(const ep_group_hosts *hosts, uint32_t a, uint32_t b)
{
    return hosts->host_of[a] == hosts->host_of[b];
}

/* The member of a host that receives what source sends there; on its own host, source itself. */
uint32_t ep_group_gateway(const ep_group_hosts *hosts, uint32_t source, uint32_t host);

#endif
