/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes that an operator takes out of placement, by name. */
#include <stdio.h>
#include <string.h>

#include "coordinator/state_private.h"

static ep_err unknown_node(const ep_coordinator_state *cluster, const char *name,
                           ep_error *out_error)
{
    char known[EP_ERROR_TEXT_BYTES] = "none";
    size_t used = 0;
    for (size_t n = 0; n < cluster->nodes_count && used < sizeof(known); n++) {
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", n > 0 ? ", " : "",
                                 cluster->nodes[n]->name);
    }
    if (name[0] == '\0') {
        return ep_error_set(out_error, EP_ERR_NOT_FOUND,
                            "a coordinator drains the NODE that is named; known: %s", known);
    }
    return ep_error_set(out_error, EP_ERR_NOT_FOUND, "no node '%.64s'; known: %s", name, known);
}

ep_err ep_coordinator_state_drain(ep_coordinator_state *cluster, const char *name, bool undo,
                                  ep_coordinator_drain *out_drain, ep_error *out_error)
{
    cluster_node *node = ep_state_find_node(cluster, name);
    bool was_drained = ep_state_is_drained(cluster, name);
    if (node == NULL && !was_drained && !ep_state_is_lost(cluster, name)) {
        return unknown_node(cluster, name, out_error);
    }
    if (undo) {
        ep_state_drained_remove(cluster, name);
    } else if (!ep_state_drained_add(cluster, name)) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory to drain node %s", name);
    }
    if (!undo) {
        ep_state_lost_remove(cluster, name); /* the operator says that it will not come back */
    }
    if (was_drained == undo) {
        cluster->revision++;
    }
    if (node != NULL && node->is_drained == undo) {
        node->is_drained = !undo;
        cluster->rebalance = undo && node_can_own(node);
        (void)ep_state_judge_copies(cluster);
        ep_state_place(cluster);
        ep_state_publish(cluster);
    }
    ep_coordinator_state_leaving(cluster, name, out_drain);
    out_drain->is_news = was_drained == undo;
    return EP_OK;
}

void ep_coordinator_state_leaving(const ep_coordinator_state *cluster, const char *name,
                                  ep_coordinator_drain *out_drain)
{
    const cluster_node *node = ep_state_find_node(cluster, name);
    *out_drain = (ep_coordinator_drain){.state = "gone"};
    snprintf(out_drain->node, sizeof(out_drain->node), "%s", name);
    if (node == NULL) {
        return;
    }
    out_drain->state = ep_state_shown(cluster, node);
    out_drain->copies_to_move = node_is_emptied(node) ? ep_state_copies_of(cluster, node) : 0;
    out_drain->is_leaving = node->is_leaving;
}
