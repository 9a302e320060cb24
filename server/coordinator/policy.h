/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys that operators set while the service runs, each a number, under one revision that grows with
 * every change. A set key overrides the configuration files, over restarts too, until it is unset.
 *
 *   copies, spare_copies, move_rate, loading_nodes_max   are used by the coordinator
 *   decode_tokens_max, decode_nodes_min, hedge_permille by callers, with the routing table
 *   step_group_us                                        by nodes, with the answer to a heartbeat
 *
 * Pure: no I/O, no clock, no threads.
 */
#ifndef EP_COORDINATOR_POLICY_H
#define EP_COORDINATOR_POLICY_H

#include "base/quantity.h"
#include "coordinator/state.h"
#include "options/options.h"

/* A key by its name; its option in the table of policy.c. */
ep_policy_key ep_policy_find(const char *name); /* EP_POLICY_KEYS: not found */
const ep_option *ep_policy_option(ep_policy_key key);
/* Whose configuration holds while the key is unset, as "each node's configuration"; NULL: the
 * coordinator's. */
const char *ep_policy_elsewhere(ep_policy_key key);
/* Why the key cannot be used with the rest of this configuration; NULL: it can. */
const char *ep_policy_unused(ep_policy_key key, const ep_coordinator_state_config *configured);
/* Formats a number as in a configuration file. */
char *ep_policy_format(ep_policy_key key, uint64_t number, char out[EP_QUANTITY_BYTES]);

/* Whether this build accepts a value from a store. */
bool ep_policy_value_is_good(ep_policy_key key, uint64_t number);

typedef struct ep_policy_change {
    const char *key;
    const char *value; /* NULL: unset */
} ep_policy_change;

/*
 * Makes the policy after the changes, with the next revision, or the same if nothing changes. who
 * may be "". Errors: INVALID_ARGUMENT naming key, value and allowed range, or listing the keys;
 * FAILED_PRECONDITION for a key that this configuration does not use; NO_MEMORY.
 */
ep_err ep_policy_apply(const ep_policy *policy, const ep_coordinator_state_config *configured,
                       const ep_policy_change *changes, size_t count, const char *who,
                       uint64_t unix_now, ep_policy *out_policy, ep_error *out_error);

/* The configuration with the policy's values in it. */
void ep_policy_in_force(const ep_policy *policy, const ep_coordinator_state_config *configured,
                        ep_coordinator_state_config *out_config);

#endif
