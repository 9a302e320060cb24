/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors on a device, and those with strides, in the group's operators: memory of the plan stands
 * for them while the operator runs. */
#ifndef EP_CLIENT_GROUP_STAGE_H
#define EP_CLIENT_GROUP_STAGE_H

#include "common/device_stage.h"
#include "expertd/group.h"
#include "group/group_strided.h"

typedef struct ep_group_stage {
    ep_stage device;
    ep_strided strided; /* of host tensors, and of those that device has brought to the host */
} ep_group_stage;

/*
 * Makes dense host tensors of those in args (and norm, NULL allowed) that are on a device or have
 * strides. Errors: as ep_stage_add and ep_stage_place, ep_strided_add and _place; INVALID_ARGUMENT
 * (no stream).
 */
ep_err ep_group_stage_dispatch(ep_group_stage *stage, ep_moe_dispatch_args *args,
                               ep_error *out_error);
ep_err ep_group_stage_combine(ep_group_stage *stage, ep_moe_combine_args *args,
                              ep_moe_add_rms_norm *norm, ep_error *out_error);
/*
 * Copies what the operator reads, behind the stream's work, or what it wrote, of expand_x and its
 * like the first rows, and waits. Nothing where all is dense in host memory. Errors:
 * DEADLINE_EXCEEDED, DEVICE_LOST and other failures of the runtime.
 */
ep_err ep_group_stage_in(ep_group_stage *stage, uint64_t deadline_us, ep_error *out_error);
/* Of combine's expand_x the first rows: what it has room for may be many times what came. */
ep_err ep_group_stage_in_later(ep_group_stage *stage, size_t rows, uint64_t deadline_us,
                               ep_error *out_error);
ep_err ep_group_stage_out(ep_group_stage *stage, size_t rows, uint64_t deadline_us,
                          ep_error *out_error);
void ep_group_stage_fini(ep_group_stage *stage);

#endif
