/* SPDX-License-Identifier: Apache-2.0 */
/* Computes buffer sizes before there is a group. */
#include <inttypes.h>

#include "base/struct_size.h"
#include "group/group_args.h"
#include "group/group_profile.h"
#include "group/group_sizes.h"
#include "moe/convert.h"

ep_err ep_group_buffer_sizes(const ep_group_params *given, int64_t max_bs, int64_t hidden,
                             int64_t top_k, ep_dtype dtype, ep_group_buffers *out_buffers,
                             ep_error *out_error)
{
    ep_group_params params;
    ep_group_params_init(&params);
    ep_err err =
        ep_struct_in("ep_group_params", given, EP_STRUCT_UPTO(ep_group_params, moe_expert_num),
                     &params, sizeof(params), out_error);
    if (err == EP_OK && (params.ep_world_size < 1 || params.ep_world_size > EP_GROUP_WORLD_MAX)) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                           "ep_world_size is %" PRId64 ": allowed 1..%d, since there is no group",
                           params.ep_world_size, EP_GROUP_WORLD_MAX);
    }
    ep_group_call call = {.operator= EP_GROUP_COMBINE,
                          .tokens = max_bs,
                          .hidden = hidden,
                          .top_k = top_k,
                          .dtype = dtype,
                          .ids_dtype = EP_DTYPE_I32,
                          .token_nums_type = 1,
                          .has_expert_scales = 1};
    if (err == EP_OK) {
        err = ep_group_call_fill(&params, (uint32_t)params.ep_world_size, &call, out_error);
    }
    if (err == EP_OK && !ep_dtype_is_float(dtype)) {
        err = ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                           "rows have type %s: allowed bf16, f16, f32", ep_dtype_name(dtype));
    }
    if (err == EP_OK) {
        ep_group_call_fill_shared(&params, &call);
        call.global_bs = 0; /* given as max_bs instead */
        err = ep_group_profile_check(&call, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    const ep_group_buffers buffers = {.frame_bytes = ep_group_worst_frame_bytes(&call, max_bs),
                                      .vendor_bytes = ep_group_vendor_bytes(&call, max_bs),
                                      .vendor_tp_bytes = ep_group_vendor_tp_bytes(&call, max_bs)};
    ep_struct_out(out_buffers, &buffers, sizeof(buffers));
    return EP_OK;
}
