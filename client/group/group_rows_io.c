/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that both operators need. */
#include "group/group_rows_io.h"

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
