/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How an operation goes on: begun on a plan, it waits for one exchange, or with a tensor-parallel
 * pair for two after each other, and ends in ep_group_plan_finish. What must happen between the two
 * happens in poll and finish, or on the thread that calls back.
 */
#ifndef EP_CLIENT_GROUP_RUN_H
#define EP_CLIENT_GROUP_RUN_H

#include "group/group_args.h"

/* What dispatch and combine do at each point. */
typedef struct group_operator {
    /* checks the data and sends the first frames, here those of the first exchange */
    ep_err (*start)(ep_group_plan *plan, ep_error *out_error);
    bool pair_first; /* with a pair its exchange is the first one */
    /* with a pair: all of the first exchange is here; sends the frames of the second */
    ep_err (*turn)(ep_group_plan *plan, ep_error *out_error);
    /* all of the last exchange is here: writes the outputs */
    ep_err (*place)(ep_group_plan *plan, ep_error *out_error);
    /* after it: copies the outputs that are on a device */
    ep_err (*out)(ep_group_plan *plan, ep_error *out_error);
    void (*drop)(ep_group_plan *plan); /* what it holds beside the exchanges; NULL: nothing */
} group_operator;

/*
 * Claims the plan for an operation. Errors: FAILED_PRECONDITION (no plan, its operation is under
 * way). name: of the operator, prepare: of what makes its plans.
 */
ep_err ep_group_run_claim(ep_group_plan *plan, const char *name, const char *prepare,
                          ep_error *out_error);
void ep_group_run_unclaim(ep_group_plan *plan);
/*
 * Begins the operation of a claimed plan whose view is set. Whatever the operator finds wrong is
 * told to the others and comes out in finish. Errors: as ep_group_op_begin; RESOURCE_EXHAUSTED (no
 * thread for callbacks); the plan is claimed as before.
 */
ep_err ep_group_run_begin(ep_group_plan *plan, const group_operator *kind, ep_group *group,
                          uint64_t deadline_us, ep_group_done_func done, void *arg,
                          ep_error *out_error);

#endif
