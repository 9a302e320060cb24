/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors on a device or with strides in the group's operators: the plan's memory replaces them
 * meanwhile. */
#ifndef EP_CLIENT_GROUP_STAGE_H
#define EP_CLIENT_GROUP_STAGE_H

#include "common/device_stage.h"
#include "expertd/group.h"
#include "group/group_strided.h"

typedef struct ep_group_stage {
    ep_stage device;
    ep_strided strided; /* for host tensors, also those copied from the device */
} ep_group_stage;

/*
 * Replaces tensors in args (and norm, NULL allowed) that are on a device or have strides by dense
 * host tensors. Errors: as ep_stage_add and ep_stage_place, ep_strided_add and _place;
 * INVALID_ARGUMENT (no stream).
 */
ep_err ep_group_stage_dispatch(ep_group_stage *stage, ep_moe_dispatch_args *args,
                               ep_error *out_error);
ep_err ep_group_stage_combine(ep_group_stage *stage, ep_moe_combine_args *args,
                              ep_moe_add_rms_norm *norm, ep_error *out_error);
/*
 * Copies inputs (EP_STAGE_IN; EP_STAGE_LATER: combine's expand_x, whose room may be many times
 * larger) or outputs (EP_STAGE_OUT), after the stream's work, and waits. Of tensors with
 * EP_STAGE_ROWS only the first rows. Does nothing if all are dense host tensors. Errors:
 * DEADLINE_EXCEEDED, DEVICE_LOST and other failures of the runtime.
 */
ep_err ep_group_stage_copy(ep_group_stage *stage, uint32_t way, size_t rows, uint64_t deadline_us,
                           ep_error *out_error);
void ep_group_stage_fini(ep_group_stage *stage);

#endif
