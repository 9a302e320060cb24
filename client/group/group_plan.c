/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: keep the call checked in the first phase, and check that a later one is the same. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/group_args.h"

ep_err ep_group_plan_create(const ep_group *group, const group_view *view, size_t workspace_bytes,
                            const char *workspace_formula, size_t work_bytes,
                            ep_group_stage *taken_stage, size_t *out_workspace_bytes,
                            ep_group_plan **out_plan, ep_error *out_error)
{
    ep_group_plan *plan = calloc(1, sizeof(*plan));
    if (plan == NULL) {
        ep_group_stage_fini(taken_stage);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a plan");
    }
    pthread_mutex_init(&plan->lock, NULL);
    pthread_cond_init(&plan->changed, NULL);
    plan->group = group;
    plan->stage = *taken_stage;
    plan->work = calloc(1, work_bytes);
    ep_err err = plan->work != NULL
                     ? ep_group_op_init(group->world, &plan->op, out_error)
                     : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for a plan");
    if (err == EP_OK && view->group_tp != NULL) {
        err = ep_group_op_init(2, &plan->pair, out_error);
    }
    if (err != EP_OK) {
        ep_group_plan_destroy(plan);
        return err;
    }
    plan->membership = group->membership;
    plan->call = view->call;
    plan->group_tp = view->group_tp;
    plan->workspace_bytes = workspace_bytes;
    plan->expand_rows = view->expand_rows;
    snprintf(plan->workspace_formula, sizeof(plan->workspace_formula), "%s", workspace_formula);
    *out_workspace_bytes = workspace_bytes;
    *out_plan = plan;
    return EP_OK;
}

void ep_group_plan_destroy(ep_group_plan *plan)
{
    if (plan == NULL || ep_fork_guard_in_child(&plan->group->fork)) {
        return; /* a forked child leaks it: the threads that held its locks are missing */
    }
    ep_group_plan_cancel(plan);
    ep_group_plan_finish(plan, NULL); /* fails harmlessly when nothing is under way */
    ep_group_op_fini(&plan->op);
    ep_group_op_fini(&plan->pair);
    ep_group_stage_fini(&plan->stage);
    pthread_cond_destroy(&plan->changed);
    pthread_mutex_destroy(&plan->lock);
    free(plan->work);
    free(plan);
}

ep_err ep_group_plan_check(const ep_group_plan *plan, const ep_group *group, const group_view *view,
                           const void *workspace, size_t workspace_bytes, ep_error *out_error)
{
    const char *operator= ep_group_operator_name(view->call.operator);
    if (plan->call.operator!= view->call.operator) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "stale plan: it was prepared for %s, this is %s",
                            ep_group_operator_name(plan->call.operator), operator);
    }
    if (plan->membership != group->membership || plan->group_tp != view->group_tp) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "stale plan: it was prepared in membership %016" PRIx64
                            ", the group's is %016" PRIx64 "; prepare again",
                            plan->membership, group->membership);
    }
    ep_err err = ep_group_call_check_plan(&plan->call, &view->call, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (plan->expand_rows != view->expand_rows) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "stale plan: expand_x has %" PRId64
                            " rows, the plan was prepared for %" PRId64 "; prepare again",
                            view->expand_rows, plan->expand_rows);
    }
    if (workspace_bytes < plan->workspace_bytes ||
        (workspace == NULL && plan->workspace_bytes > 0)) {
        return ep_error_set(out_error, EP_ERR_RESOURCE_EXHAUSTED,
                            "workspace has %zu bytes: %s needs %zu = %s",
                            workspace == NULL ? 0 : workspace_bytes, operator,
                            plan->workspace_bytes, plan->workspace_formula);
    }
    if ((uintptr_t)workspace % 64 != 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "workspace is at %p: allowed multiples of 64", workspace);
    }
    return EP_OK;
}
