/* SPDX-License-Identifier: Apache-2.0 */
/* Failure paths and small things both operators need. */
#include "group/group_rows_io.h"

static const uint32_t tp_members[2] = {0, 1};

ep_group_call ep_group_tp_call(const group_view *view)
{
    ep_group_call call = view->call;
    call.elastic_digest = 0;
    call.dispatch_number = 0;
    call.tokens = 0; /* each EP group has its own batches */
    call.has_inactive = 0;
    call.by_host = 0;
    call.ranks = 2;
    call.local_rank = view->call.tp_rank;
    return call;
}

/* The partner waits in its own call for our part of it. */
static void abandon_tp(const group_op *op, const group_view *view, const ep_error *error)
{
    if (view->group_tp == NULL) {
        return;
    }
    ep_group_call call = ep_group_tp_call(view);
    group_op tp;
    if (ep_group_op_begin(view->group_tp, &call, tp_members, op->deadline_us, &tp, NULL) == EP_OK) {
        ep_group_op_fail(&tp, error);
        ep_group_op_end(&tp);
    }
}

ep_err ep_group_call_lost(group_op *op, const group_view *view, const ep_error *error,
                          ep_error *out_error)
{
    abandon_tp(op, view, error);
    ep_group_op_end(op);
    if (out_error != NULL) {
        *out_error = *error;
    }
    return error->code;
}

ep_err ep_group_call_failed(group_op *op, const group_view *view, const ep_error *error,
                            ep_error *out_error)
{
    ep_group_op_fail(op, error);
    return ep_group_call_lost(op, view, error, out_error);
}

void ep_group_add_performance(const group_op *op, const group_view *view,
                              const ep_tensor *performance)
{
    if (performance->rank == 0) {
        return;
    }
    int64_t *waited = performance->data;
    for (uint32_t m = 0; m < view->layout.ranks; m++) {
        waited[view->members[m]] += ep_group_op_waited_us(op, m);
    }
}
