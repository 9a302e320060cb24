/* SPDX-License-Identifier: Apache-2.0 */
/* libopapi_nn.so: SwiGlu, ClippedSwiglu, GeGluV3, DynamicQuant; the first three take a matrix of
 * two halves. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/cann/cann.h"
#include "support/cann/elements.h"

enum { IN, OUT, GELU_OUT };                              /* places in launch->inputs */
enum { SWIGLU, CLIPPED, GELU_ERF, GELU_TANH, KIND = 0 }; /* launch->numbers[KIND] */
enum { ALPHA, LIMIT, BIAS };                             /* places in launch->reals */

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static float gelu(float x, bool by_tanh)
{
    return by_tanh ? 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)))
                   : 0.5f * x * (1.0f + erff(x * 0.7071067812f));
}

/* Activates the first half. */
static float halves_become(const cann_launch *launch, float first, float second)
{
    if (launch->numbers[KIND] == CLIPPED) {
        const float limit = (float)launch->reals[LIMIT];
        first = fminf(first, limit);
        second = fmaxf(fminf(second, limit), -limit);
        return first * sigmoid((float)launch->reals[ALPHA] * first) *
               (second + (float)launch->reals[BIAS]);
    }
    const bool by_tanh = launch->numbers[KIND] == GELU_TANH;
    return (launch->numbers[KIND] == SWIGLU ? first * sigmoid(first) : gelu(first, by_tanh)) *
           second;
}

static ep_acl_code run_halves(const cann_launch *launch)
{
    const ep_acl_tensor *x = cann_tensor(launch->inputs[IN], launch->name);
    const ep_acl_tensor *out = cann_tensor(launch->inputs[OUT], launch->name);
    const void *from = cann_tensor_bytes(x, launch->name);
    void *to = cann_tensor_bytes(out, launch->name);
    void *beside = launch->inputs_count > GELU_OUT
                       ? cann_tensor_bytes(launch->inputs[GELU_OUT], launch->name)
                       : NULL;
    const int64_t columns = out->shape[1];
    for (int64_t r = 0; r < out->shape[0]; r++) {
        for (int64_t c = 0; c < columns; c++) {
            const float first = cann_element(x->type, from, (size_t)(r * 2 * columns + c));
            const float second =
                cann_element(x->type, from, (size_t)(r * 2 * columns + columns + c));
            cann_element_set(out->type, to, (size_t)(r * columns + c),
                             halves_become(launch, first, second));
            if (beside != NULL) {
                cann_element_set(out->type, beside, (size_t)(r * columns + c),
                                 gelu(first, launch->numbers[KIND] == GELU_TANH));
            }
        }
    }
    return 0;
}

/* Whether out is half of x along the last axis. */
static bool are_halves(const ep_acl_tensor *x, int64_t axis, const ep_acl_tensor *out)
{
    return x->type == out->type && cann_is_float(x->type) && x->rank == 2 && out->rank == 2 &&
           (axis == 1 || axis == -1) && cann_is_contiguous(x) && cann_is_contiguous(out) &&
           x->shape[0] == out->shape[0] && x->shape[1] == 2 * out->shape[1];
}

static ep_acl_code plan_halves(cann_launch plan, int64_t axis, uint64_t *workspace_bytes,
                               ep_acl_executor **executor)
{
    for (uint64_t i = 0; i < plan.inputs_count; i++) {
        if (plan.inputs[i] == NULL) {
            return CANN_OP_NULL;
        }
        (void)cann_tensor(plan.inputs[i], plan.name);
    }
    const ep_acl_code code = cann_enter();
    if (code != 0) {
        return code;
    }
    for (uint64_t i = OUT; i < plan.inputs_count; i++) {
        if (!are_halves(plan.inputs[IN], axis, plan.inputs[i])) {
            return CANN_OP_INVALID;
        }
    }
    plan.run = run_halves;
    return cann_plan(&plan, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnSwiGluGetWorkspaceSize(const ep_acl_tensor *x, int64_t axis,
                                                    const ep_acl_tensor *out,
                                                    uint64_t *workspace_bytes,
                                                    ep_acl_executor **executor)
{
    const cann_launch plan = {
        .inputs = {x, out}, .inputs_count = 2, .name = "aclnnSwiGlu", .numbers = {SWIGLU}};
    return plan_halves(plan, axis, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnSwiGlu(void *workspace, uint64_t workspace_bytes,
                                    ep_acl_executor *executor, ep_acl_stream stream)
{
    return cann_launch_executor("aclnnSwiGlu", workspace, workspace_bytes, executor, stream);
}

CANN_EXPORT ep_acl_code aclnnClippedSwigluGetWorkspaceSize(
    const ep_acl_tensor *x, const ep_acl_tensor *group_index, int64_t axis, double alpha,
    double limit, double bias, bool interleaved, const ep_acl_tensor *out,
    uint64_t *workspace_bytes, ep_acl_executor **executor)
{
    const cann_launch plan = {.inputs = {x, out},
                              .inputs_count = 2,
                              .name = "aclnnClippedSwiglu",
                              .numbers = {CLIPPED},
                              .reals = {alpha, limit, bias},
                              .workspace_bytes = 32};
    return group_index != NULL || interleaved || !(limit > 0.0)
               ? CANN_OP_INVALID
               : plan_halves(plan, axis, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnClippedSwiglu(void *workspace, uint64_t workspace_bytes,
                                           ep_acl_executor *executor, ep_acl_stream stream)
{
    return cann_launch_executor("aclnnClippedSwiglu", workspace, workspace_bytes, executor, stream);
}

/* approximate 1: by tanh. */
CANN_EXPORT ep_acl_code aclnnGeGluV3GetWorkspaceSize(const ep_acl_tensor *x, int64_t axis,
                                                     int64_t approximate, bool activate_left,
                                                     ep_acl_tensor *out, ep_acl_tensor *gelu_out,
                                                     uint64_t *workspace_bytes,
                                                     ep_acl_executor **executor)
{
    const cann_launch plan = {.inputs = {x, out, gelu_out},
                              .inputs_count = 3,
                              .name = "aclnnGeGluV3",
                              .numbers = {approximate == 1 ? GELU_TANH : GELU_ERF}};
    if (!activate_left || (approximate != 0 && approximate != 1)) {
        return CANN_OP_INVALID;
    }
    return plan_halves(plan, axis, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnGeGluV3(void *workspace, uint64_t workspace_bytes,
                                     ep_acl_executor *executor, ep_acl_stream stream)
{
    return cann_launch_executor("aclnnGeGluV3", workspace, workspace_bytes, executor, stream);
}

static ep_acl_code run_quant(const cann_launch *launch)
{
    const ep_acl_tensor *x = cann_tensor(launch->inputs[0], "aclnnDynamicQuant");
    const void *from = cann_tensor_bytes(x, "aclnnDynamicQuant");
    int8_t *to = cann_tensor_bytes(launch->inputs[1], "aclnnDynamicQuant");
    float *scales = cann_tensor_bytes(launch->inputs[2], "aclnnDynamicQuant");
    const int64_t columns = x->shape[1];
    float *row = malloc((size_t)columns * sizeof(*row));
    for (int64_t r = 0; r < x->shape[0]; r++) {
        for (int64_t c = 0; c < columns; c++) {
            row[c] = cann_element(x->type, from, (size_t)(r * columns + c));
        }
        const float scale = cann_quantise(row, columns, to + r * columns);
        memcpy(scales + r, &scale, sizeof(scale));
    }
    free(row);
    return 0;
}

CANN_EXPORT ep_acl_code aclnnDynamicQuantGetWorkspaceSize(
    const ep_acl_tensor *x, const ep_acl_tensor *smooth_scales, const ep_acl_tensor *out,
    const ep_acl_tensor *scale_out, uint64_t *workspace_bytes, ep_acl_executor **executor)
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
        cann_tensor(scale_out, "aclnnDynamicQuant")->type != EP_ACL_FLOAT || x->rank != 2 ||
        out->rank != 2 || scale_out->rank != 1 || !cann_is_contiguous(x) ||
        !cann_is_contiguous(out)) {
        return CANN_OP_INVALID;
    }
    if (x->shape[0] != out->shape[0] || x->shape[1] != out->shape[1] ||
        scale_out->shape[0] != x->shape[0]) {
        return CANN_OP_INVALID;
    }
    const cann_launch plan = {.inputs = {x, out, scale_out},
                              .inputs_count = 3,
                              .run = run_quant,
                              .name = "aclnnDynamicQuant",
                              .workspace_bytes = 64};
    return cann_plan(&plan, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnDynamicQuant(void *workspace, uint64_t workspace_bytes,
                                          ep_acl_executor *executor, ep_acl_stream stream)
{
    return cann_launch_executor("aclnnDynamicQuant", workspace, workspace_bytes, executor, stream);
}
