/* SPDX-License-Identifier: Apache-2.0 */
/* The policy in answers to operators: each key with its value, where that comes from, and what is
 * allowed. */
#ifndef EP_COORDINATOR_POLICY_REPORT_H
#define EP_COORDINATOR_POLICY_REPORT_H

#include "common/admin_service.h"
#include "coordinator/service.h"

/* For ep_admin_config: request and answer of the Policy method. reload knows what the configuration
 * says. */
ep_err ep_policy_report_answer(ep_coordinator_service *service, const ep_reload *reload,
                               const Expertd__V1__PolicyRequest *request,
                               Expertd__V1__PolicyReply_Closure closure, void *closure_data,
                               ep_error *out_error);
/* The same: what is in force instead of the configuration's value of a key. */
bool ep_policy_report_override(ep_coordinator_service *service, const char *key,
                               ep_admin_override *out_override);

#endif
