/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group_hosts.h"

#include <string.h>

void ep_group_hosts_match(ep_group_host_name name, const void *arg, uint32_t ranks,
                          uint32_t *out_same)
{
    for (uint32_t r = 0; r < ranks; r++) {
        const char *host = name(arg, r);
        out_same[r] = r;
        for (uint32_t before = 0; before < r && host[0] != '\0'; before++) {
            if (out_same[before] == before && strcmp(name(arg, before), host) == 0) {
                out_same[r] = before;
                break;
            }
        }
    }
}

void ep_group_hosts_build(const uint32_t *same, const uint32_t *members, uint32_t count,
                          ep_group_hosts *out_hosts)
{
    uint32_t host_of_rank[EP_GROUP_WORLD_MAX]; /* indexed by the rank that stands for the host */
    ep_group_hosts *hosts = out_hosts;
    memset(hosts, 0, sizeof(*hosts));
    memset(host_of_rank, 0xff, sizeof(host_of_rank));
    for (uint32_t m = 0; m < count; m++) {
        uint32_t *host = &host_of_rank[same[members[m]]];
        if (*host == UINT32_MAX) {
            *host = hosts->count++;
        }
        hosts->host_of[m] = *host;
        hosts->place_of[m] = hosts->first[*host + 1]++;
    }
    for (uint32_t h = 0; h < hosts->count; h++) {
        hosts->first[h + 1] += hosts->first[h];
    }
    for (uint32_t m = 0; m < count; m++) {
        hosts->list[hosts->first[hosts->host_of[m]] + hosts->place_of[m]] = m;
    }
}

uint32_t ep_group_gateway(const ep_group_hosts *hosts, uint32_t source, uint32_t host)
{
    uint32_t from = hosts->host_of[source];
    if (from == host) {
        return source;
    }
    return hosts->list[hosts->first[host] +
                       (hosts->place_of[source] + from) % ep_group_host_ranks(hosts, host)];
}
