/* SPDX-License-Identifier: Apache-2.0 */
/* Applies the policy to the state. */
#include "coordinator/policy.h"
#include "coordinator/state_private.h"

const ep_policy *ep_coordinator_state_get_policy(const ep_coordinator_state *cluster)
{
    return &cluster->policy;
}

const ep_coordinator_state_config *
ep_coordinator_state_in_force(const ep_coordinator_state *cluster)
{
    return &cluster->config;
}

const ep_coordinator_state_config *
ep_coordinator_state_configured(const ep_coordinator_state *cluster)
{
    return &cluster->configured;
}

ep_err ep_coordinator_state_set_policy(ep_coordinator_state *cluster, const ep_policy *policy,
                                       ep_error *out_error)
{
    ep_coordinator_state_config next;
    ep_policy_in_force(policy, &cluster->configured, &next);
    const bool is_placed_anew =
        next.copies != cluster->config.copies || next.spare_copies != cluster->config.spare_copies;
    const uint64_t bytes = is_placed_anew ? ep_state_table_bytes(cluster, &next) : 0;
    if (bytes > EP_COORDINATOR_TABLE_BYTES_MAX) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "with copies %u and spare_copies %u all layers together would make a "
                            "table of up to %llu "
                            "bytes, clients take up to "
                            "%llu; set fewer",
                            next.copies, next.spare_copies, (unsigned long long)bytes,
                            (unsigned long long)EP_COORDINATOR_TABLE_BYTES_MAX);
    }
    cluster->policy = *policy;
    cluster->config = next;
    cluster->revision++;
    if (is_placed_anew) {
        ep_state_place(cluster);
        ep_state_publish(cluster);
    } else if (cluster->table != NULL) {
        cluster->is_stale |= !ep_state_republish(cluster);
    }
    return EP_OK;
}
