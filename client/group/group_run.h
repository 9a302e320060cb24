/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs an operation: it begins on a plan, waits for one exchange, or for two in a row with a
 * tensor-parallel pair, and ends in ep_group_plan_finish. The step between the two runs in poll, in
 * finish, or on the thread that calls back.
 */
#ifndef EP_CLIENT_GROUP_RUN_H
#define EP_CLIENT_GROUP_RUN_H

#include "group/group_args.h"

/* The steps of dispatch or combine. */
typedef struct group_operator {
    /* checks the data and sends the frames of the first exchange */
    ep_err (*start)(ep_group_plan *plan, ep_error *out_error);
    bool pair_first; /* with a pair: its exchange is the first */
    /* with a pair: after the first exchange, sends the frames of the second */
    ep_err (*turn)(ep_group_plan *plan, ep_error *out_error);
    /* after the last exchange: writes the outputs */
    ep_err (*place)(ep_group_plan *plan, ep_error *out_error);
    /* after place: copies outputs to the device */
    ep_err (*out)(ep_group_plan *plan, ep_error *out_error);
    /* releases what it has besides the exchanges; NULL: nothing */
    void (*drop)(ep_group_plan *plan);
} group_operator;

/*
 * Claims the plan for an operation. Errors: FAILED_PRECONDITION (no plan, its operation is under
 * way). name: of the operator, prepare: of what makes its plans.
 */
ep_err ep_group_run_claim(ep_group_plan *plan, const char *name, const char *prepare,
                          ep_error *out_error);
void ep_group_run_unclaim(ep_group_plan *plan);
/*
 * Begins the operation of a claimed plan whose view is set. An error of the operator is sent to the
 * others and returned by finish. Errors: as ep_group_op_begin; RESOURCE_EXHAUSTED (no thread for
 * callbacks); the plan stays claimed.
 */
ep_err ep_group_run_begin(ep_group_plan *plan, const group_operator *kind, ep_group *group,
                          uint64_t deadline_us, ep_group_done_func done, void *arg,
                          ep_error *out_error);

/* Adds the microseconds waited for each rank. */
void ep_group_add_performance(const group_op *op, const group_view *view,
                              const ep_tensor *performance);

#endif
