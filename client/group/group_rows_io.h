/* SPDX-License-Identifier: Apache-2.0 */
/* What dispatch and combine share on top of a call's exchange: ways out after an error, and the
 * tensor-parallel pair. */
#ifndef EP_CLIENT_GROUP_ROWS_IO_H
#define EP_CLIENT_GROUP_ROWS_IO_H

#include "group/group_args.h"

/* This rank's own failure inside a call: tells the others, also the TP partner, and ends the call.
 * Returns error->code. */
ep_err ep_group_call_failed(group_op *op, const group_view *view, const ep_error *error,
                            ep_error *out_error);
/* The exchange itself failed, so the others know; only the TP partner is told. Ends the call. */
ep_err ep_group_call_lost(group_op *op, const group_view *view, const ep_error *error,
                          ep_error *out_error);

/* The record both ranks of a TP pair compare: the call's without what belongs to one EP group. */
ep_group_call ep_group_tp_call(const group_view *view);

/* Adds the microseconds waited for each rank. */
void ep_group_add_performance(const group_op *op, const group_view *view,
                              const ep_tensor *performance);

#endif
