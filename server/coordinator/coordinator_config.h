/* SPDX-License-Identifier: Apache-2.0 */
/* expertd-coordinator's option table and the configuration made from it. */
#ifndef EP_COORDINATOR_CONFIG_H
#define EP_COORDINATOR_CONFIG_H

#include "options/options.h"
#include "common/service_config.h"
#include "coordinator/state.h"

typedef struct ep_coordinator_config {
    ep_service_config service;
    ep_coordinator_state_config cluster; /* its term is for a start without a stored one */
    const char *state_dir;               /* borrowed; NULL: state in memory */
    bool gateway;
    uint32_t gateway_calls_max;
    bool metrics_per_expert;
    ep_expert_map *expert_map;    /* owned; NULL: uniform placement */
    const char **node_order;      /* owned array, borrowed texts */
    const char **advertise_allow; /* the same */
} ep_coordinator_config;

extern const ep_options_spec ep_coordinator_options;

/* Borrows from options. Errors: BAD_CONFIG naming origin, key, value and rule; those of reading the
 * expert map; NO_MEMORY. */
ep_err ep_coordinator_config_load(const ep_options *options, ep_coordinator_config *out_config,
                                  ep_error *out_error);
void ep_coordinator_config_fini(ep_coordinator_config *config);
/* For ep_options_main. */
ep_err ep_coordinator_config_check(const ep_options *options, ep_error *out_error);

#endif
