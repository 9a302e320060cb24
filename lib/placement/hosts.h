/* SPDX-License-Identifier: Apache-2.0 */
/* Whether an expert's copies are on different hosts, since nodes of one host fail together. Pure,
 * private to lib/placement. */
#ifndef EP_PLACEMENT_HOSTS_H
#define EP_PLACEMENT_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

#define EP_HOSTS_NO_NODE UINT32_MAX

typedef struct ep_hosts {
    const uint32_t *of_node; /* [nodes] the index of the first node on the same host */
    /* how many hosts the copies of an expert should be on; below 2: no requirement */
    uint32_t spread;
} ep_hosts;

/* Whether a copy may move from `from` to `to`, or with EP_HOSTS_NO_NODE for one of them only be
 * added or removed. Afterwards the copies must be on as many hosts as they should be, or as they
 * are now. */
bool ep_hosts_allow(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count, uint32_t from,
                    uint32_t to);
/* Whether the move to `to` puts them on a host that has none of them. */
bool ep_hosts_gain(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count, uint32_t from,
                   uint32_t to);

#endif
