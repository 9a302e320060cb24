/* SPDX-License-Identifier: Apache-2.0 */
/* Answers operators about the policy: each key with its value, its origin and its allowed range. */
#ifndef EP_COORDINATOR_POLICY_REPORT_H
#define EP_COORDINATOR_POLICY_REPORT_H

#include "common/admin_service.h"
#include "coordinator/service.h"

/* For ep_admin_config: the Policy method. reload has the configuration's values. */
ep_err ep_policy_report_answer(ep_coordinator_service *service, const ep_reload *reload,
                               const Expertd__V1__PolicyRequest *request,
                               Expertd__V1__PolicyReply_Closure closure, void *closure_data,
                               ep_error *out_error);
/* For ep_admin_config: the policy's value of a key, if it overrides the configuration. */
bool ep_policy_report_override(ep_coordinator_service *service, const char *key,
                               ep_admin_override *out_override);

#endif
