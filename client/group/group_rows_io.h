/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that dispatch and combine share. */
#ifndef EP_CLIENT_GROUP_ROWS_IO_H
#define EP_CLIENT_GROUP_ROWS_IO_H

#include "group/group_args.h"

/* The record that both ranks of a TP pair compare: the call's, without fields of one EP group. */
ep_group_call ep_group_tp_call(const group_view *view);

/* Adds the microseconds waited for each rank. */
void ep_group_add_performance(const group_op *op, const group_view *view,
                              const ep_tensor *performance);

#endif
