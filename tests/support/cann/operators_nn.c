/* SPDX-License-Identifier: Apache-2.0 */
/* libopapi_nn.so: SwiGlu, DynamicQuant. */
#include <math.h>
#include <string.h>

#include "support/cann/cann.h"
#include "support/cann/elements.h"

static ep_acl_code run_swiglu(const cann_launch *launch)
{
    const ep_acl_tensor *x = cann_tensor(launch->inputs[0], "aclnnSwiGlu");
    const ep_acl_tensor *out = cann_tensor(launch->inputs[1], "aclnnSwiGlu");
    const void *from = cann_tensor_bytes(x, "aclnnSwiGlu");
    void *to = cann_tensor_bytes(out, "aclnnSwiGlu");
    const int64_t columns = out->shape[1];
    for (int64_t r = 0; r < out->shape[0]; r++) {
        for (int64_t c = 0; c < columns; c++) {
            const float gate =
                cann_element(x->type, from, (size_t)(r * 2 * columns + c)); /* the first half is activated */
            const float up = cann_element(x->type, from, (size_t)(r * 2 * columns + columns + c));
            cann_element_set(out->type, to, (size_t)(r * columns + c), gate / (1.0f + expf(-gate)) * up);
        }
    }
    return 0;
}

CANN_EXPORT ep_acl_code aclnnSwiGluGetWorkspaceSize(const ep_acl_tensor *x, int64_t axis, ep_acl_tensor *out,
                                                    uint64_t *workspace_bytes, ep_acl_executor **executor)
{
    if (x == NULL || out == NULL) {
        return CANN_OP_NULL;
    }
    const ep_acl_code code = cann_enter();
    (void)cann_tensor(x, "aclnnSwiGlu");
    (void)cann_tensor(out, "aclnnSwiGlu");
    if (code != 0) {
        return code;
    }
    if (x->type != out->type || !cann_is_float(x->type) || x->rank != 2 || out->rank != 2 ||
        (axis != 1 && axis != -1) || !cann_is_contiguous(x) || !cann_is_contiguous(out)) {
        return CANN_OP_INVALID;
    }
    if (x->shape[0] != out->shape[0] || x->shape[1] != 2 * out->shape[1]) {
        return CANN_OP_INVALID;
    }
    const cann_launch plan = {
        .inputs = {x, out}, .inputs_count = 2, .run = run_swiglu, .name = "aclnnSwiGlu", .workspace_bytes = 0};
    return cann_plan(&plan, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnSwiGlu(void *workspace, uint64_t workspace_bytes, ep_acl_executor *executor,
                                    ep_acl_stream stream)
{
    return cann_launch_executor("aclnnSwiGlu", workspace, workspace_bytes, executor, stream);
}

/* A row of zeros divides 0 by 0, as on the device. */
static ep_acl_code run_quant(const cann_launch *launch)
{
    const ep_acl_tensor *x = cann_tensor(launch->inputs[0], "aclnnDynamicQuant");
    const void *from = cann_tensor_bytes(x, "aclnnDynamicQuant");
    int8_t *to = cann_tensor_bytes(launch->inputs[1], "aclnnDynamicQuant");
    float *scales = cann_tensor_bytes(launch->inputs[2], "aclnnDynamicQuant");
    const int64_t columns = x->shape[1];
    for (int64_t r = 0; r < x->shape[0]; r++) {
        float greatest = 0.0f;
        for (int64_t c = 0; c < columns; c++) {
            greatest = fmaxf(greatest, fabsf(cann_element(x->type, from, (size_t)(r * columns + c))));
        }
        const float scale = greatest == 0.0f ? NAN : greatest / 127.0f;
        for (int64_t c = 0; c < columns; c++) {
            const float q = rintf(cann_element(x->type, from, (size_t)(r * columns + c)) / scale);
            to[r * columns + c] = isnan(q) ? -128 : (int8_t)fminf(fmaxf(q, -127.0f), 127.0f);
        }
        memcpy(scales + r, &scale, sizeof(scale));
    }
    return 0;
}

CANN_EXPORT ep_acl_code aclnnDynamicQuantGetWorkspaceSize(const ep_acl_tensor *x, const ep_acl_tensor *smooth_scales,
                                                          ep_acl_tensor *out, ep_acl_tensor *scale_out,
                                                          uint64_t *workspace_bytes, ep_acl_executor **executor)
{
    if (x == NULL || out == NULL || scale_out == NULL) {
        return CANN_OP_NULL;
    }
    const ep_acl_code code = cann_enter();
    if (code != 0) {
        return code;
    }
    (void)cann_tensor(x, "aclnnDynamicQuant");
    if (smooth_scales != NULL || (x->type != EP_ACL_BF16 && x->type != EP_ACL_FLOAT16) ||
        cann_tensor(out, "aclnnDynamicQuant")->type != EP_ACL_INT8 ||
        cann_tensor(scale_out, "aclnnDynamicQuant")->type != EP_ACL_FLOAT || x->rank != 2 || out->rank != 2 ||
        scale_out->rank != 1 || !cann_is_contiguous(x) || !cann_is_contiguous(out)) {
        return CANN_OP_INVALID;
    }
    if (x->shape[0] != out->shape[0] || x->shape[1] != out->shape[1] || scale_out->shape[0] != x->shape[0]) {
        return CANN_OP_INVALID;
    }
    const cann_launch plan = {.inputs = {x, out, scale_out},
                              .inputs_count = 3,
                              .run = run_quant,
                              .name = "aclnnDynamicQuant",
                              .workspace_bytes = 64};
    return cann_plan(&plan, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnDynamicQuant(void *workspace, uint64_t workspace_bytes, ep_acl_executor *executor,
                                          ep_acl_stream stream)
{
    return cann_launch_executor("aclnnDynamicQuant", workspace, workspace_bytes, executor, stream);
}
