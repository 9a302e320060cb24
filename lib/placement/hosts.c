/* SPDX-License-Identifier: Apache-2.0 */
#include "placement/hosts.h"

/* Whether none of the first `count` nodes, except `from`, is on the host. */
static bool is_new(const uint32_t *of_node, const uint32_t *nodes, uint32_t count, uint32_t from,
                   uint32_t host)
{
    for (uint32_t i = 0; i < count; i++) {
        if (nodes[i] != from && of_node[nodes[i]] == host) {
            return false;
        }
    }
    return true;
}

/* The number of hosts of `nodes`, counted up to spread, without `from` and with `to`
 * (EP_HOSTS_NO_NODE: nobody). */
static uint32_t count_hosts(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count,
                            uint32_t from, uint32_t to)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < count && found < hosts->spread; i++) {
        found +=
            nodes[i] != from && is_new(hosts->of_node, nodes, i, from, hosts->of_node[nodes[i]]);
    }
    if (found < hosts->spread && to != EP_HOSTS_NO_NODE) {
        found += is_new(hosts->of_node, nodes, count, from, hosts->of_node[to]);
    }
    return found;
}

bool ep_hosts_allow(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count, uint32_t from,
                    uint32_t to)
{
    if (hosts->spread < 2) {
        return true;
    }
    const uint32_t after = count_hosts(hosts, nodes, count, from, to);
    return after >= hosts->spread ||
           after >= count_hosts(hosts, nodes, count, EP_HOSTS_NO_NODE, EP_HOSTS_NO_NODE);
}

bool ep_hosts_gain(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count, uint32_t from,
                   uint32_t to)
{
    return hosts->spread >= 2 &&
           count_hosts(hosts, nodes, count, from, to) >
               count_hosts(hosts, nodes, count, EP_HOSTS_NO_NODE, EP_HOSTS_NO_NODE);
}
