/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes that were forgotten after silence: listed until they are back or an operator drains
 * them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "coordinator/state_private.h"

static size_t find_lost(const ep_coordinator_state *cluster, const char *name)
{
    size_t i = 0;
    while (i < cluster->lost_count && strcmp(cluster->lost[i].name, name) != 0) {
        i++;
    }
    return i;
}

bool ep_state_is_lost(const ep_coordinator_state *cluster, const char *name)
{
    return find_lost(cluster, name) < cluster->lost_count;
}

void ep_state_lost_remove(ep_coordinator_state *cluster, const char *name)
{
    size_t i = find_lost(cluster, name);
    if (i < cluster->lost_count) {
        memmove(&cluster->lost[i], &cluster->lost[i + 1],
                (--cluster->lost_count - i) * sizeof(cluster->lost[0]));
    }
}

void ep_state_lost_add(ep_coordinator_state *cluster, const cluster_node *node)
{
    if (cluster->lost == NULL) {
        cluster->lost = calloc(cluster->config.nodes_max, sizeof(cluster->lost[0]));
    }
    if (cluster->lost == NULL) {
        return; /* without memory only the log names it */
    }
    ep_state_lost_remove(cluster, node->name);
    if (cluster->lost_count == cluster->config.nodes_max) {
        /* the one that has been away longest */
        ep_state_lost_remove(cluster, cluster->lost[0].name);
    }
    lost_node *lost = &cluster->lost[cluster->lost_count++];
    *lost = (lost_node){.node_id = node->node_id,
                        .incarnation = node->incarnation,
                        .last_seen_ns = node->last_seen_ns};
    snprintf(lost->name, sizeof(lost->name), "%s", node->name);
    snprintf(lost->url, sizeof(lost->url), "%s", node->url);
}

bool ep_coordinator_state_lost(const ep_coordinator_state *cluster, size_t index, uint64_t now_ns,
                               Expertd__V1__NodeEntry *out_entry)
{
    if (index >= cluster->lost_count) {
        return false;
    }
    lost_node *lost = &cluster->lost[index];
    expertd__v1__node_entry__init(out_entry);
    out_entry->node_id = lost->node_id;
    out_entry->name = lost->name;
    out_entry->url = lost->url;
    out_entry->state = (char *)(uintptr_t)EP_NODE_LOST;
    out_entry->incarnation = lost->incarnation;
    out_entry->last_seen_ms = (now_ns - lost->last_seen_ns) / EP_NS_PER_MS;
    return true;
}
