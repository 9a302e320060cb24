/* SPDX-License-Identifier: Apache-2.0 */
/* libopapi_transformer.so: GroupedMatmul, V5 unless CANN_OLDER, and V4; groups of rows, one output tensor. */
#include <stdlib.h>
#include <string.h>

#include "support/cann/cann.h"
#include "support/cann/elements.h"

enum {
    X,
    OUT,
    GROUP_LIST,
    SCALE,
    PER_TOKEN_SCALE,
    FIRST_WEIGHT
};                                             /* places in launch->inputs; an absent one is x again */
enum { LIST_TYPE, WEIGHTS, GROUPS, IS_QUANT }; /* places in launch->numbers */

#define NAME "aclnnGroupedMatmul"

/* One row: f32 accumulation in ascending k, or the exact integer sum. */
static void multiply_row(const cann_launch *launch, int64_t row, const uint8_t *weight, float *sums, int64_t inner,
                         int64_t columns)
{
    const ep_acl_tensor *x = launch->inputs[X];
    const void *from = cann_tensor_bytes(x, NAME);
    memset(sums, 0, (size_t)columns * sizeof(*sums));
    if (launch->numbers[IS_QUANT] != 0) {
        for (int64_t n = 0; n < columns; n++) {
            int32_t sum = 0;
            for (int64_t k = 0; k < inner; k++) {
                sum += ((const int8_t *)from)[row * inner + k] * ((const int8_t *)weight)[k * columns + n];
            }
            sums[n] = (float)sum;
        }
        return;
    }
    for (int64_t k = 0; k < inner; k++) {
        const float a = cann_element(x->type, from, (size_t)(row * inner + k));
        for (int64_t n = 0; n < columns; n++) {
            sums[n] += a * cann_element(x->type, weight, (size_t)(k * columns + n));
        }
    }
}

static void store_row(const cann_launch *launch, int64_t row, int64_t group, const float *sums, int64_t columns)
{
    const ep_acl_tensor *out = launch->inputs[OUT];
    const ep_acl_tensor *scale = launch->inputs[SCALE];
    const bool is_quant = launch->numbers[IS_QUANT] != 0;
    void *to = cann_tensor_bytes(out, NAME);
    const void *scales = is_quant ? cann_tensor_bytes(scale, NAME) : NULL;
    const float per_token =
        is_quant ? cann_element(EP_ACL_FLOAT, cann_tensor_bytes(launch->inputs[PER_TOKEN_SCALE], NAME), (size_t)row)
                 : 0.0f;
    for (int64_t n = 0; n < columns; n++) {
        const float value =
            is_quant ? sums[n] * cann_element(scale->type, scales, (size_t)(group * columns + n)) * per_token
                     : sums[n];
        cann_element_set(out->type, to, (size_t)(row * columns + n), value);
    }
}

static ep_acl_code run_grouped_matmul(const cann_launch *launch)
{
    for (uint64_t i = 0; i < launch->inputs_count; i++) {
        (void)cann_tensor(launch->inputs[i], NAME);
    }
    const ep_acl_tensor *x = launch->inputs[X];
    const ep_acl_tensor *out = launch->inputs[OUT];
    const int64_t inner = x->shape[1];
    const int64_t columns = out->shape[1];
    const int64_t *list = cann_tensor_bytes(launch->inputs[GROUP_LIST], NAME);
    float *sums = malloc((size_t)columns * sizeof(*sums));
    int64_t row = 0;
    for (int64_t g = 0; g < launch->numbers[GROUPS]; g++) {
        const int64_t end = launch->numbers[LIST_TYPE] == EP_ACL_GROUP_LIST_COUNTS ? row + list[g] : list[g];
        if ((end < row || end > x->shape[0]) && cann_has_failed()) {
            free(sums);
            return CANN_CORE_FAULT;
        }
        if (end < row || end > x->shape[0]) {
            cann_violation(NAME ": group %lld ends with row %lld, begins with %lld of %lld", (long long)g,
                           (long long)end, (long long)row, (long long)x->shape[0]);
        }
        const bool one = launch->numbers[WEIGHTS] == 1;
        const ep_acl_tensor *weight = launch->inputs[FIRST_WEIGHT + (one ? 0 : g)];
        const uint8_t *values = cann_tensor_bytes(weight, NAME);
        values += one ? (size_t)(g * inner * columns) * weight->element_bytes : 0;
        for (; row < end; row++) {
            multiply_row(launch, row, values, sums, inner, columns);
            store_row(launch, row, g, sums, columns);
        }
    }
    for (; row < out->shape[0];
         row++) { /* what no group covers is not written on the device: nobody may count on what was there */
        memset((uint8_t *)cann_tensor_bytes(out, NAME) + (size_t)(row * columns) * out->element_bytes, 0xff,
               (size_t)columns * out->element_bytes);
    }
    free(sums);
    return 0;
}

static bool is_matrix(const ep_acl_tensor *tensor)
{
    return tensor->rank == 2 && cann_is_contiguous(tensor) && tensor->shape[1] <= EP_ACL_COLUMNS_MAX;
}

/* Weights of group g, or of all in one tensor of three axes. */
static bool weights_fit(const ep_acl_tensor_list *weight, const ep_acl_tensor *x, const ep_acl_tensor *out,
                        int64_t groups)
{
    if (weight->count != 1 && weight->count != (uint64_t)groups) {
        return false;
    }
    for (uint64_t i = 0; i < weight->count; i++) {
        const ep_acl_tensor *w = cann_tensor(weight->tensors[i], NAME);
        const uint64_t first = weight->count == 1 ? 1 : 0;
        if (w->type != x->type || w->rank != 2 + first || !cann_is_contiguous(w) ||
            (first == 1 && w->shape[0] != groups) || w->shape[first] != x->shape[1] ||
            w->shape[first + 1] != out->shape[1] || out->shape[1] > EP_ACL_COLUMNS_MAX) {
            return false;
        }
    }
    return true;
}

/* V4 has no f32 scales for bf16 results. */
static bool quant_fits(const char *name, const ep_acl_tensor_list *scale, const ep_acl_tensor_list *per_token,
                       const ep_acl_tensor_list *weight, const ep_acl_tensor *x, const ep_acl_tensor *out,
                       int64_t groups)
{
    if (scale == NULL || per_token == NULL || cann_list(scale, NAME)->count != 1 ||
        cann_list(per_token, NAME)->count != 1 || weight->count != 1) {
        return false; /* scales per token only with single tensors */
    }
    const ep_acl_tensor *s = cann_tensor(scale->tensors[0], NAME);
    const ep_acl_tensor *p = cann_tensor(per_token->tensors[0], NAME);
    const bool types =
        (out->type == EP_ACL_BF16 &&
         (s->type == EP_ACL_BF16 || (s->type == EP_ACL_FLOAT && strcmp(name, "aclnnGroupedMatmulV4") != 0))) ||
        (out->type == EP_ACL_FLOAT16 && s->type == EP_ACL_FLOAT);
    return types && p->type == EP_ACL_FLOAT && s->rank == 2 && s->shape[0] == groups && s->shape[1] == out->shape[1] &&
           p->rank == 1 && p->shape[0] == x->shape[0];
}

static ep_acl_code plan_grouped_matmul(const char *name, EP_ACL_GROUPED_MATMUL_INPUTS, EP_ACL_GROUPED_MATMUL_OUTPUTS)
{
    if (x == NULL || weight == NULL || out == NULL || group_list == NULL) {
        return CANN_OP_NULL;
    }
    const ep_acl_code code = cann_enter();
    if (code != 0) {
        return code;
    }
    if (cann_list(x, name)->count != 1 || cann_list(out, name)->count != 1 ||
        cann_list(weight, name)->count > EP_ACL_GROUPS_MAX || split_item != EP_ACL_SPLIT_SINGLE ||
        group_type != EP_ACL_GROUP_ROWS || (group_list_type != 0 && group_list_type != 1) || bias != NULL ||
        offset != NULL || antiquant_scale != NULL || antiquant_offset != NULL || activation_input != NULL ||
        activation_quant_scale != NULL || activation_quant_offset != NULL || activation != EP_ACL_NO_ACTIVATION ||
        activation_feature_out != NULL || dynamic_scale_out != NULL) {
        return CANN_OP_INVALID;
    }
    const ep_acl_tensor *rows = cann_tensor(x->tensors[0], name);
    const ep_acl_tensor *result = cann_tensor(out->tensors[0], name);
    const int64_t groups = cann_tensor(group_list, name)->shape[0];
    const bool is_quant = rows->type == EP_ACL_INT8;
    if (group_list->type != EP_ACL_INT64 || group_list->rank != 1 || !is_matrix(rows) || !is_matrix(result) ||
        rows->shape[0] != result->shape[0] || !weights_fit(weight, rows, result, groups)) {
        return CANN_OP_INVALID;
    }
    if (is_quant
            ? !quant_fits(name, scale, per_token_scale, weight, rows, result, groups)
            : rows->type != result->type || !cann_is_float(rows->type) || scale != NULL || per_token_scale != NULL) {
        return CANN_OP_INVALID;
    }
    cann_launch plan = {.inputs = {rows, result, group_list, is_quant ? scale->tensors[0] : rows,
                                   is_quant ? per_token_scale->tensors[0] : rows},
                        .inputs_count = FIRST_WEIGHT + weight->count,
                        .run = run_grouped_matmul,
                        .flops = 2.0 * (double)rows->shape[0] * (double)rows->shape[1] * (double)result->shape[1],
                        .name = name,
                        .workspace_bytes = 4096 + (uint64_t)(rows->shape[0] * 64),
                        .numbers = {group_list_type, (int64_t)weight->count, groups, is_quant}};
    for (uint64_t i = 0; i < weight->count; i++) {
        plan.inputs[FIRST_WEIGHT + i] = weight->tensors[i];
    }
    return cann_plan(&plan, workspace_bytes, executor);
}

#define INPUTS_PASSED                                                                                                 \
    x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, group_list, activation_input, \
        activation_quant_scale, activation_quant_offset, split_item, group_type, group_list_type, activation
#define OUTPUTS_PASSED out, activation_feature_out, dynamic_scale_out, workspace_bytes, executor

#ifndef CANN_OLDER
CANN_EXPORT ep_acl_code aclnnGroupedMatmulV5GetWorkspaceSize(EP_ACL_GROUPED_MATMUL_INPUTS, ep_acl_int_array *tuning,
                                                             EP_ACL_GROUPED_MATMUL_OUTPUTS)
{
    return tuning != NULL ? CANN_OP_INVALID
                          : plan_grouped_matmul("aclnnGroupedMatmulV5", INPUTS_PASSED, OUTPUTS_PASSED);
}

CANN_EXPORT ep_acl_code aclnnGroupedMatmulV5(void *workspace, uint64_t workspace_bytes, ep_acl_executor *executor,
                                             ep_acl_stream stream)
{
    return cann_launch_executor("aclnnGroupedMatmulV5", workspace, workspace_bytes, executor, stream);
}
#endif

CANN_EXPORT ep_acl_code aclnnGroupedMatmulV4GetWorkspaceSize(EP_ACL_GROUPED_MATMUL_INPUTS,
                                                             EP_ACL_GROUPED_MATMUL_OUTPUTS)
{
    return plan_grouped_matmul("aclnnGroupedMatmulV4", INPUTS_PASSED, OUTPUTS_PASSED);
}

CANN_EXPORT ep_acl_code aclnnGroupedMatmulV4(void *workspace, uint64_t workspace_bytes, ep_acl_executor *executor,
                                             ep_acl_stream stream)
{
    return cann_launch_executor("aclnnGroupedMatmulV4", workspace, workspace_bytes, executor, stream);
}
