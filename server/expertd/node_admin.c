/* SPDX-License-Identifier: Apache-2.0 */
/* Orders that operators give the node itself, and the policy that they set for all nodes. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/quantity.h"
#include "expertd/node_private.h"

/* Fills in how far the drain is. The coordinator counts copies in the table that clients have. */
static void report(const ep_node *node, ep_admin_drain *out_drain)
{
    ep_membership_view view;
    ep_weight_stats weights;
    ep_membership_read(node->membership, &view);
    snprintf(out_drain->node, sizeof(out_drain->node), "%s", node->config->name);
    out_drain->state = ep_node_state_text(node);
    if (!atomic_load(&node->is_leaving)) {
        return;
    }
    if (view.said_leaving) {
        out_drain->copies_to_move = view.copies_listed;
        snprintf(out_drain->note, sizeof(out_drain->note), "%s", view.note);
        if (view.copies_listed == 0) {
            out_drain->state = "drained";
        }
    } else {
        ep_weight_store_read_stats(node->store, &weights);
        out_drain->copies_to_move = (uint32_t)weights.owned_count; /* an upper bound */
    }
    if (!view.is_connected) {
        snprintf(out_drain->note, sizeof(out_drain->note),
                 "the coordinator at %s does not answer; the node goes on trying",
                 node->config->coordinator_url);
    }
}

ep_err ep_node_drain_order(void *arg, const char *name, bool undo, ep_admin_drain *out_drain,
                           ep_error *out_error)
{
    ep_node *node = arg;
    const char *own = node->config->name;
    if (name[0] != 0 && strcmp(name, own) != 0) {
        return ep_error_set(
            out_error, EP_ERR_NOT_FOUND,
            "this is node %s, which drains only itself; node '%.64s' is drained at the coordinator",
            own, name);
    }
    if (node->membership == NULL) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "node %s has no coordinator (coordinator_url) that could move its "
                            "experts; SIGTERM ends it and finishes "
                            "the calls in flight",
                            own);
    }
    if (node->is_draining) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION, "node %s is ending", own);
    }
    if (atomic_load(&node->is_leaving) == undo) {
        atomic_store(&node->is_leaving, !undo);
        ep_log(EP_LOG_INFO, "node-leave", EP_KV(node, own), EP_KV(leaving, (bool)!undo),
               EP_KV(effect, undo ? "it may get experts again"
                                  : "the coordinator moves its experts; it serves on"));
        ep_membership_leaving_changed(node->membership);
    }
    report(node, out_drain);
    return EP_OK;
}

static uint64_t group_window_us(const ep_node *node)
{
    ep_batcher_stats stats;
    ep_batcher_read_stats(node->batcher, &stats);
    return stats.group_window_ns / EP_NS_PER_US;
}

void ep_node_on_policy(void *arg, const Expertd__V1__NodePolicy *policy)
{
    ep_node *node = arg;
    const bool is_set = policy != NULL && policy->has_step_group_us;
    const uint64_t revision = is_set ? policy->revision : 0;
    const uint32_t window_us = is_set ? policy->step_group_us : node->config->step_group_us;
    const uint64_t window_before_us = group_window_us(node);
    if (window_us > EP_STEP_GROUP_US_MAX) {
        if (revision != node->policy_refused) { /* logged once: it comes with every heartbeat */
            node->policy_refused = revision;
            ep_log(EP_LOG_WARN, "policy", EP_KV(key, "step_group_us"), EP_KV(value_us, window_us),
                   EP_KV(value_us_max, EP_STEP_GROUP_US_MAX), EP_KV(revision, revision),
                   EP_KV(effect, "what is in force stays"),
                   EP_KV(hint, "is this coordinator of a newer version?"));
        }
        return;
    }
    if (window_us != window_before_us) {
        ep_batcher_set_group_window(node->batcher, window_us * EP_NS_PER_US);
        ep_log(EP_LOG_INFO, "policy", EP_KV(key, "step_group_us"), EP_KV(value_us, window_us),
               EP_KV(value_before_us, window_before_us), EP_KV(revision, revision),
               EP_KV(reason, is_set ? "the coordinator's policy"
                                    : "the configuration: the policy does not say"));
    }
    node->policy_revision = revision;
}

bool ep_node_overrides(void *arg, const char *key, ep_admin_override *out_override)
{
    const ep_node *node = arg;
    if (node->policy_revision == 0 || strcmp(key, "step_group_us") != 0) {
        return false;
    }
    ep_quantity_format(group_window_us(node), EP_UNIT_US, out_override->value);
    snprintf(out_override->origin, sizeof(out_override->origin), "policy revision %llu",
             (unsigned long long)node->policy_revision);
    return true;
}
