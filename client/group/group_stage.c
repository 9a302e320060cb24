/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group_stage.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

typedef struct staged_tensor {
    const char *name;
    ep_tensor *tensor;
    uint32_t ways;
} staged_tensor;

static ep_err stage_device(ep_stage *stage, const staged_tensor *tensors, size_t count,
                           ep_error *out_error)
{
    ep_err err = EP_OK;
    stage->parts_count = 0;
    for (size_t i = 0; i < count && err == EP_OK; i++) {
        err = ep_stage_add(stage, tensors[i].name, tensors[i].tensor, tensors[i].ways, out_error);
    }
    if (err != EP_OK || stage->parts_count == 0) {
        return err;
    }
    if (stage->sync_handle == 0) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "tensors on a device have sync_handle 0: allowed the aclrtStream that "
                            "their work is on");
    }
    return ep_stage_place(stage, out_error);
}

static ep_err stage_all(ep_group_stage *stage, const staged_tensor *tensors, size_t count,
                        ep_error *out_error)
{
    ep_err err = stage_device(&stage->device, tensors, count, out_error);
    stage->strided.parts_count = 0;
    for (size_t i = 0; i < count && err == EP_OK; i++) {
        err = ep_strided_add(&stage->strided, tensors[i].name, tensors[i].tensor, tensors[i].ways,
                             out_error);
    }
    return err != EP_OK || stage->strided.parts_count == 0
               ? err
               : ep_strided_place(&stage->strided, out_error);
}

ep_err ep_group_stage_dispatch(ep_group_stage *stage, ep_moe_dispatch_args *args,
                               ep_error *out_error)
{
    /* Results that the operator writes only in part are copied in first, so that the rest of the
     * caller's tensor stays; scales too if this mode does not write them. */
    const uint32_t scales_ways = args->quant_mode == 2 ? EP_STAGE_OUT | EP_STAGE_ROWS : EP_STAGE_IN;
    const staged_tensor tensors[] = {
        {"x", &args->x, EP_STAGE_IN},
        {"expert_ids", &args->expert_ids, EP_STAGE_IN},
        {"scales", &args->scales, EP_STAGE_IN},
        {"x_active_mask", &args->x_active_mask, EP_STAGE_IN},
        {"expert_scales", &args->expert_scales, EP_STAGE_IN},
        {"performance_info", &args->performance_info, EP_STAGE_IN | EP_STAGE_OUT},
        {"expand_x", &args->expand_x, EP_STAGE_OUT | EP_STAGE_ROWS},
        {"dynamic_scales", &args->dynamic_scales, scales_ways},
        {"assist_info_for_combine", &args->assist_info_for_combine, EP_STAGE_OUT},
        {"expand_idx", &args->expand_idx, EP_STAGE_IN | EP_STAGE_OUT},
        {"expert_token_nums", &args->expert_token_nums, EP_STAGE_IN | EP_STAGE_OUT},
        {"ep_recv_counts", &args->ep_recv_counts, EP_STAGE_IN | EP_STAGE_OUT},
        {"tp_recv_counts", &args->tp_recv_counts, EP_STAGE_IN | EP_STAGE_OUT},
        {"expand_scales", &args->expand_scales, EP_STAGE_OUT | EP_STAGE_ROWS}};
    return stage_all(stage, tensors, EP_ARRAY_COUNT(tensors), out_error);
}

ep_err ep_group_stage_combine(ep_group_stage *stage, ep_moe_combine_args *args,
                              ep_moe_add_rms_norm *norm, ep_error *out_error)
{
    ep_moe_add_rms_norm none = {.struct_bytes = sizeof(none)};
    norm = norm != NULL ? norm : &none;
    const staged_tensor tensors[] = {
        {"expand_x", &args->expand_x, EP_STAGE_LATER | EP_STAGE_ROWS},
        {"expert_ids", &args->expert_ids, EP_STAGE_IN},
        {"assist_info_for_combine", &args->assist_info_for_combine, EP_STAGE_IN},
        {"expand_idx", &args->expand_idx, EP_STAGE_IN},
        {"ep_send_counts", &args->ep_send_counts, EP_STAGE_IN},
        {"expert_scales", &args->expert_scales, EP_STAGE_IN},
        {"tp_send_counts", &args->tp_send_counts, EP_STAGE_IN},
        {"x_active_mask", &args->x_active_mask, EP_STAGE_IN},
        {"shared_expert_x", &args->shared_expert_x, EP_STAGE_IN},
        {"ori_x", &args->ori_x, EP_STAGE_IN},
        {"const_expert_alpha_1", &args->const_expert_alpha_1, EP_STAGE_IN},
        {"const_expert_alpha_2", &args->const_expert_alpha_2, EP_STAGE_IN},
        {"const_expert_v", &args->const_expert_v, EP_STAGE_IN},
        {"performance_info", &args->performance_info, EP_STAGE_IN | EP_STAGE_OUT},
        {"x_out", &args->x_out, EP_STAGE_OUT},
        {"residual_x", &norm->residual_x, EP_STAGE_IN},
        {"gamma", &norm->gamma, EP_STAGE_IN},
        {"y", &norm->y, EP_STAGE_OUT},
        {"rstd", &norm->rstd, EP_STAGE_OUT},
        {"x", &norm->x, EP_STAGE_OUT}};
    _Static_assert(EP_ARRAY_COUNT(tensors) <= EP_STAGE_PARTS_MAX, "all may be on a device");
    return stage_all(stage, tensors, EP_ARRAY_COUNT(tensors), out_error);
}

/* Waits for copies. If one may still be under way afterwards, its memory is never freed. */
static ep_err wait_for_copies(ep_stage *stage, ep_acl_stream stream, uint64_t deadline_us,
                              ep_error *out_error)
{
    const uint64_t ms = deadline_us / 1000 + 1;
    const ep_acl_code code = stage->acl->aclrtSynchronizeStreamWithTimeout(
        stream, ms < INT32_MAX ? (int32_t)ms : INT32_MAX);
    const ep_err err = ep_stage_check(stage, code, "aclrtSynchronizeStreamWithTimeout", out_error);
    if (err != EP_OK) {
        stage->memory = NULL;
        stage->memory_bytes = 0;
    }
    return strcmp(ep_acl_code_name(code), "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT") != 0
               ? err
               : ep_error_set(out_error, EP_ERR_DEADLINE_EXCEEDED,
                              "the stream of the tensors did not end its work within %" PRIu64
                              " us",
                              deadline_us);
}

static ep_err copy(ep_stage *stage, uint32_t way, size_t rows, uint64_t deadline_us,
                   ep_error *out_error)
{
    ep_acl_stream stream = (ep_acl_stream)(uintptr_t)stage->sync_handle;
    ep_error error;
    const ep_err enqueued = ep_stage_copy(stage, way, rows, stream, &error);
    /* waits also for copies that were enqueued before a failure */
    const ep_err waited = wait_for_copies(stage, stream, deadline_us, out_error);
    if (enqueued != EP_OK && out_error != NULL) {
        *out_error = error;
    }
    return enqueued != EP_OK ? enqueued : waited;
}

ep_err ep_group_stage_copy(ep_group_stage *stage, uint32_t way, size_t rows, uint64_t deadline_us,
                           ep_error *out_error)
{
    ep_err err = EP_OK;
    if (way == EP_STAGE_OUT) {
        ep_strided_copy(&stage->strided, way, rows);
    }
    if (stage->device.parts_count > 0) {
        err = copy(&stage->device, way, rows, deadline_us, out_error);
    }
    if (err == EP_OK && way != EP_STAGE_OUT) {
        ep_strided_copy(&stage->strided, way, rows);
    }
    return err;
}

void ep_group_stage_fini(ep_group_stage *stage)
{
    ep_stage_fini(&stage->device);
    ep_strided_fini(&stage->strided);
}
