/* SPDX-License-Identifier: Apache-2.0 */
/* Whether copies stand on different hosts: nodes of one host end together. Pure, private to
 * lib/placement. */
#ifndef EP_PLACEMENT_HOSTS_H
#define EP_PLACEMENT_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

#define EP_HOSTS_NO_NODE UINT32_MAX

typedef struct ep_hosts {
    const uint32_t *of_node; /* the index of its host's first node */
    /* hosts that the copies of an expert shall be on; below 2: they may be anywhere */
    uint32_t spread;
} ep_hosts;

/* A copy may go from `from` to `to`, or with nobody in place of one only come or go: the others and
 * it are on as many hosts as they shall be, or as they are. */
bool ep_hosts_allow(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count, uint32_t from,
                    uint32_t to);
/* `to` brings them onto a host that they lack. */
bool ep_hosts_gain(const ep_hosts *hosts, const uint32_t *nodes, uint32_t count, uint32_t from,
                   uint32_t to);

#endif
