/* SPDX-License-Identifier: Apache-2.0 */
/* libopapi_transformer.so: GroupedMatmulV4 with groups of rows and one output tensor; unless
 * CANN_OLDER also V5 and GroupedMatmulSwigluQuant. */
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
}; /* places in launch->inputs; an absent input is x again; biases, if any, follow the weights */
enum { LIST_TYPE, WEIGHTS, GROUPS, IS_QUANT, HAS_BIAS }; /* places in launch->numbers */

#define NAME "aclnnGroupedMatmul"

/* Returns group g's tensor of a list, or its part (`values` elements) of a tensor for all. */
static const uint8_t *group_part(const cann_launch *launch, uint64_t at, int64_t g, int64_t values)
{
    const bool one = launch->numbers[WEIGHTS] == 1;
    const ep_acl_tensor *tensor = launch->inputs[at + (uint64_t)(one ? 0 : g)];
    const uint8_t *bytes = cann_tensor_bytes(tensor, NAME);
    return bytes + (one ? (size_t)(g * values) * tensor->element_bytes : 0);
}

/* Operands of a group, in the types of the sums. */
typedef struct group {
    float *weights; /* [K][N]; exact also for int8 */
    float *biases;  /* [N] */
    float *scales;  /* [N]; int8 */
    float *sums;    /* [N], of the present row */
    int32_t *whole; /* sums of int8 */
} group;

static group group_make(int64_t inner, int64_t columns)
{
    const size_t n = (size_t)columns;
    return (group){.weights = malloc((size_t)inner * n * sizeof(float)),
                   .biases = malloc(n * sizeof(float)),
                   .scales = malloc(n * sizeof(float)),
                   .sums = malloc(n * sizeof(float)),
                   .whole = malloc(n * sizeof(int32_t))};
}

static void group_free(group *g)
{
    free(g->weights);
    free(g->biases);
    free(g->scales);
    free(g->sums);
    free(g->whole);
}

static void group_read(const cann_launch *launch, int64_t number, int64_t inner, int64_t columns,
                       group *g)
{
    const ep_acl_tensor *x = launch->inputs[X];
    const bool is_quant = launch->numbers[IS_QUANT] != 0;
    const bool has_bias = launch->numbers[HAS_BIAS] != 0;
    const uint64_t first_bias = FIRST_WEIGHT + (uint64_t)launch->numbers[WEIGHTS];
    const uint8_t *weights = group_part(launch, FIRST_WEIGHT, number, inner * columns);
    const uint8_t *biases = has_bias ? group_part(launch, first_bias, number, columns) : NULL;
    const ep_acl_tensor *scale = launch->inputs[SCALE];
    const void *scales = is_quant ? cann_tensor_bytes(scale, NAME) : NULL;
    for (int64_t i = 0; i < inner * columns; i++) {
        g->weights[i] = is_quant ? (float)((const int8_t *)weights)[i]
                                 : cann_element(x->type, weights, (size_t)i);
    }
    for (int64_t n = 0; n < columns; n++) {
        g->biases[n] =
            has_bias ? cann_element(launch->inputs[first_bias]->type, biases, (size_t)n) : 0.0f;
        g->scales[n] =
            is_quant ? cann_element(scale->type, scales, (size_t)(number * columns + n)) : 1.0f;
    }
}

/* Computes one row: f32 accumulation in ascending k, or the exact integer sum. */
static void multiply_row(const cann_launch *launch, const void *x, int64_t row, int64_t inner,
                         int64_t columns, float per_token, group *g)
{
    float *sums = g->sums;
    int32_t *whole = g->whole;
    const bool is_quant = launch->numbers[IS_QUANT] != 0;
    memset(sums, 0, (size_t)columns * sizeof(*sums));
    memset(whole, 0, (size_t)columns * sizeof(*whole));
    for (int64_t k = 0; k < inner; k++) {
        const float *weights = g->weights + k * columns;
        if (is_quant) {
            const int32_t a = ((const int8_t *)x)[row * inner + k];
            for (int64_t n = 0; n < columns; n++) {
                whole[n] += a * (int32_t)weights[n];
            }
        } else {
            const float a = cann_element(launch->inputs[X]->type, x, (size_t)(row * inner + k));
            for (int64_t n = 0; n < columns; n++) {
                sums[n] += a * weights[n];
            }
        }
    }
    for (int64_t n = 0; n < columns; n++) {
        sums[n] = (is_quant ? (float)whole[n] * g->scales[n] * per_token : sums[n]) + g->biases[n];
    }
}

/* Returns where group g of a list of counts or running sums ends, or a negative code. */
static int64_t group_end(const cann_launch *launch, const int64_t *list, int64_t g, int64_t row)
{
    const int64_t rows = launch->inputs[X]->shape[0];
    const int64_t end =
        launch->numbers[LIST_TYPE] == EP_ACL_GROUP_LIST_COUNTS ? row + list[g] : list[g];
    if (end >= row && end <= rows) {
        return end;
    }
    if (!cann_has_failed()) {
        cann_violation(NAME ": group %lld ends with row %lld, begins with %lld of %lld",
                       (long long)g, (long long)end, (long long)row, (long long)rows);
    }
    return -1;
}

static ep_acl_code run_grouped_matmul(const cann_launch *launch)
{
    for (uint64_t i = 0; i < launch->inputs_count; i++) {
        (void)cann_tensor(launch->inputs[i], NAME);
    }
    const ep_acl_tensor *out = launch->inputs[OUT];
    const int64_t inner = launch->inputs[X]->shape[1];
    const int64_t columns = out->shape[1];
    const int64_t *list = cann_tensor_bytes(launch->inputs[GROUP_LIST], NAME);
    const void *x = cann_tensor_bytes(launch->inputs[X], NAME);
    const float *per_token = launch->numbers[IS_QUANT] != 0
                                 ? cann_tensor_bytes(launch->inputs[PER_TOKEN_SCALE], NAME)
                                 : NULL;
    uint8_t *to = cann_tensor_bytes(out, NAME);
    group g = group_make(inner, columns);
    int64_t row = 0;
    for (int64_t number = 0; number < launch->numbers[GROUPS] && row >= 0; number++) {
        const int64_t end = group_end(launch, list, number, row);
        if (end > row) {
            group_read(launch, number, inner, columns, &g);
        }
        for (; row < end; row++) {
            multiply_row(launch, x, row, inner, columns, per_token != NULL ? per_token[row] : 1.0f,
                         &g);
            for (int64_t n = 0; n < columns; n++) {
                cann_element_set(out->type, to, (size_t)(row * columns + n), g.sums[n]);
            }
        }
        row = end;
    }
    /* the device leaves rows that no group covers: overwrite them to detect use */
    if (row >= 0) {
        memset(to + (size_t)(row * columns) * out->element_bytes, 0xff,
               (size_t)((out->shape[0] - row) * columns) * out->element_bytes);
    }
    group_free(&g);
    return row >= 0 ? 0 : CANN_CORE_FAULT;
}

static bool is_matrix(const ep_acl_tensor *tensor)
{
    return tensor->rank == 2 && cann_is_contiguous(tensor) &&
           tensor->shape[1] <= EP_ACL_COLUMNS_MAX;
}

/* Whether the weights are one tensor per group, or one of three axes for all. */
static bool weights_fit(const ep_acl_tensor_list *weight, const ep_acl_tensor *x,
                        const ep_acl_tensor *out, int64_t groups)
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

/* Whether the bias fits: f32 for bf16, f16 for f16; int8: V5 only, bf16 added after scaling. */
static bool bias_fits(const char *name, const ep_acl_tensor_list *bias,
                      const ep_acl_tensor_list *weight, const ep_acl_tensor *x,
                      const ep_acl_tensor *out, int64_t groups)
{
    if (bias == NULL) {
        return true;
    }
    const bool is_quant = x->type == EP_ACL_INT8;
    const ep_acl_data_type type = is_quant                 ? EP_ACL_BF16
                                  : x->type == EP_ACL_BF16 ? EP_ACL_FLOAT
                                                           : x->type;
    if (cann_list(bias, name)->count != weight->count ||
        (is_quant && strcmp(name, "aclnnGroupedMatmulV5") != 0)) {
        return false;
    }
    for (uint64_t i = 0; i < bias->count; i++) {
        const ep_acl_tensor *b = cann_tensor(bias->tensors[i], name);
        const uint64_t first = weight->count == 1 ? 1 : 0;
        if (b->type != type || b->rank != 1 + first || !cann_is_contiguous(b) ||
            (first == 1 && b->shape[0] != groups) || b->shape[first] != out->shape[1]) {
            return false;
        }
    }
    return true;
}

/* V4 has no f32 scales for bf16 results. */
static bool quant_fits(const char *name, const ep_acl_tensor_list *scale,
                       const ep_acl_tensor_list *per_token, const ep_acl_tensor_list *weight,
                       const ep_acl_tensor *x, const ep_acl_tensor *out, int64_t groups)
{
    if (scale == NULL || per_token == NULL || cann_list(scale, NAME)->count != 1 ||
        cann_list(per_token, NAME)->count != 1 || weight->count != 1) {
        return false; /* scales per token only with single tensors */
    }
    const ep_acl_tensor *s = cann_tensor(scale->tensors[0], NAME);
    const ep_acl_tensor *p = cann_tensor(per_token->tensors[0], NAME);
    const bool types = (out->type == EP_ACL_BF16 &&
                        (s->type == EP_ACL_BF16 ||
                         (s->type == EP_ACL_FLOAT && strcmp(name, "aclnnGroupedMatmulV4") != 0))) ||
                       (out->type == EP_ACL_FLOAT16 && s->type == EP_ACL_FLOAT);
    return types && p->type == EP_ACL_FLOAT && s->rank == 2 && s->shape[0] == groups &&
           s->shape[1] == out->shape[1] && p->rank == 1 && p->shape[0] == x->shape[0];
}

static ep_acl_code plan_grouped_matmul(const char *name, EP_ACL_GROUPED_MATMUL_INPUTS,
                                       EP_ACL_GROUPED_MATMUL_OUTPUTS)
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
        group_type != EP_ACL_GROUP_ROWS || (group_list_type != 0 && group_list_type != 1) ||
        offset != NULL || antiquant_scale != NULL || antiquant_offset != NULL ||
        activation_input != NULL || activation_quant_scale != NULL ||
        activation_quant_offset != NULL || activation != EP_ACL_NO_ACTIVATION ||
        activation_feature_out != NULL || dynamic_scale_out != NULL) {
        return CANN_OP_INVALID;
    }
    const ep_acl_tensor *rows = cann_tensor(x->tensors[0], name);
    const ep_acl_tensor *result = cann_tensor(out->tensors[0], name);
    const int64_t groups = cann_tensor(group_list, name)->shape[0];
    const bool is_quant = rows->type == EP_ACL_INT8;
    if (group_list->type != EP_ACL_INT64 || group_list->rank != 1 || !is_matrix(rows) ||
        !is_matrix(result) || rows->shape[0] != result->shape[0] ||
        !weights_fit(weight, rows, result, groups)) {
        return CANN_OP_INVALID;
    }
    if (is_quant ? !quant_fits(name, scale, per_token_scale, weight, rows, result, groups)
                 : rows->type != result->type || !cann_is_float(rows->type) || scale != NULL ||
                       per_token_scale != NULL) {
        return CANN_OP_INVALID;
    }
    if (!bias_fits(name, bias, weight, rows, result, groups)) {
        return CANN_OP_INVALID;
    }
    const uint64_t biases = bias != NULL ? bias->count : 0;
    cann_launch plan = {
        .inputs = {rows, result, group_list, is_quant ? scale->tensors[0] : rows,
                   is_quant ? per_token_scale->tensors[0] : rows},
        .inputs_count = FIRST_WEIGHT + weight->count + biases,
        .run = run_grouped_matmul,
        .flops = 2.0 * (double)rows->shape[0] * (double)rows->shape[1] * (double)result->shape[1],
        .name = name,
        .workspace_bytes = 4096 + (uint64_t)(rows->shape[0] * 64),
        .numbers = {group_list_type, (int64_t)weight->count, groups, is_quant, bias != NULL}};
    for (uint64_t i = 0; i < weight->count; i++) {
        plan.inputs[FIRST_WEIGHT + i] = weight->tensors[i];
    }
    for (uint64_t i = 0; i < biases; i++) {
        plan.inputs[FIRST_WEIGHT + weight->count + i] = bias->tensors[i];
    }
    return cann_plan(&plan, workspace_bytes, executor);
}

#define INPUTS_PASSED                                                                              \
    x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale,            \
        group_list, activation_input, activation_quant_scale, activation_quant_offset, split_item, \
        group_type, group_list_type, activation
#define OUTPUTS_PASSED out, activation_feature_out, dynamic_scale_out, workspace_bytes, executor

#ifndef CANN_OLDER
CANN_EXPORT ep_acl_code aclnnGroupedMatmulV5GetWorkspaceSize(EP_ACL_GROUPED_MATMUL_INPUTS,
                                                             ep_acl_int_array *tuning,
                                                             EP_ACL_GROUPED_MATMUL_OUTPUTS)
{
    return tuning != NULL
               ? CANN_OP_INVALID
               : plan_grouped_matmul("aclnnGroupedMatmulV5", INPUTS_PASSED, OUTPUTS_PASSED);
}

CANN_EXPORT ep_acl_code aclnnGroupedMatmulV5(void *workspace, uint64_t workspace_bytes,
                                             ep_acl_executor *executor, ep_acl_stream stream)
{
    return cann_launch_executor("aclnnGroupedMatmulV5", workspace, workspace_bytes, executor,
                                stream);
}
#endif

CANN_EXPORT ep_acl_code aclnnGroupedMatmulV4GetWorkspaceSize(EP_ACL_GROUPED_MATMUL_INPUTS,
                                                             EP_ACL_GROUPED_MATMUL_OUTPUTS)
{
    return plan_grouped_matmul("aclnnGroupedMatmulV4", INPUTS_PASSED, OUTPUTS_PASSED);
}

CANN_EXPORT ep_acl_code aclnnGroupedMatmulV4(void *workspace, uint64_t workspace_bytes,
                                             ep_acl_executor *executor, ep_acl_stream stream)
{
    return cann_launch_executor("aclnnGroupedMatmulV4", workspace, workspace_bytes, executor,
                                stream);
}

#ifndef CANN_OLDER
#define FUSED "aclnnGroupedMatmulSwigluQuant"

enum {
    FUSED_X,
    FUSED_WEIGHT,
    FUSED_SCALE,
    FUSED_X_SCALE,
    FUSED_GROUPS,
    FUSED_OUT,
    FUSED_OUT_SCALE,
    FUSED_INPUTS
};

/* Returns row k, column n of weights laid out as [N/32][K/16][16][32]. */
static int8_t fractal_value(const int8_t *weight, int64_t inner, int64_t k, int64_t n)
{
    return weight[((n / 32 * (inner / 16) + k / 16) * 16 + k % 16) * 32 + n % 32];
}

/* Computes one row: gate and up stay in f32 until they are rounded to int8. */
static void run_fused_row(const cann_launch *launch, const int8_t *weight, const float *scales,
                          int64_t row, float *wide)
{
    const int64_t inner = launch->inputs[FUSED_X]->shape[1];
    const int64_t columns = 2 * launch->inputs[FUSED_OUT]->shape[1];
    const int8_t *x =
        (const int8_t *)cann_tensor_bytes(launch->inputs[FUSED_X], FUSED) + row * inner;
    const float x_scale =
        ((const float *)cann_tensor_bytes(launch->inputs[FUSED_X_SCALE], FUSED))[row];
    int8_t *out =
        (int8_t *)cann_tensor_bytes(launch->inputs[FUSED_OUT], FUSED) + row * (columns / 2);
    float *out_scale = (float *)cann_tensor_bytes(launch->inputs[FUSED_OUT_SCALE], FUSED) + row;
    for (int64_t n = 0; n < columns; n++) {
        int32_t sum = 0;
        for (int64_t k = 0; k < inner; k++) {
            sum += x[k] * fractal_value(weight, inner, k, n);
        }
        wide[n] = (float)sum * scales[n] * x_scale;
    }
    for (int64_t n = 0; n < columns / 2; n++) {
        wide[n] = wide[n] / (1.0f + expf(-wide[n])) * wide[columns / 2 + n];
    }
    *out_scale = cann_quantise(wide, columns / 2, out);
}

static ep_acl_code run_fused(const cann_launch *launch)
{
    for (uint64_t i = 0; i < launch->inputs_count; i++) {
        (void)cann_tensor(launch->inputs[i], FUSED);
    }
    const ep_acl_tensor *x = launch->inputs[FUSED_X];
    const int64_t columns = 2 * launch->inputs[FUSED_OUT]->shape[1];
    const int64_t *ends = cann_tensor_bytes(launch->inputs[FUSED_GROUPS], FUSED);
    const int8_t *weights = cann_tensor_bytes(launch->inputs[FUSED_WEIGHT], FUSED);
    const float *scales = cann_tensor_bytes(launch->inputs[FUSED_SCALE], FUSED);
    /* all rows but the first would be misaligned in a core's local memory */
    if (columns / 2 % EP_ACL_ALIGN != 0) {
        cann_violation(FUSED ": rows of %lld results are no whole blocks of %d bytes",
                       (long long)(columns / 2), EP_ACL_ALIGN);
    }
    float *wide = malloc((size_t)columns * sizeof(*wide));
    int64_t row = 0;
    ep_acl_code code = 0;
    for (int64_t g = 0; g < launch->inputs[FUSED_GROUPS]->shape[0] && code == 0; g++) {
        if (ends[g] < row || ends[g] > x->shape[0]) {
            if (!cann_has_failed()) {
                cann_violation(FUSED ": group %lld ends with row %lld, begins with %lld of %lld",
                               (long long)g, (long long)ends[g], (long long)row,
                               (long long)x->shape[0]);
            }
            code = CANN_CORE_FAULT;
        }
        for (; code == 0 && row < ends[g]; row++) {
            run_fused_row(launch, weights + g * x->shape[1] * columns, scales + g * columns, row,
                          wide);
        }
    }
    for (; code == 0 && row < x->shape[0]; row++) { /* rows that the device does not write */
        const float none = NAN;
        memcpy((float *)cann_tensor_bytes(launch->inputs[FUSED_OUT_SCALE], FUSED) + row, &none,
               sizeof(none));
    }
    free(wide);
    return code;
}

static bool is_vector(const ep_acl_tensor *tensor, ep_acl_data_type type, int64_t count)
{
    return tensor->type == type && tensor->rank == 1 && cann_is_contiguous(tensor) &&
           tensor->shape[0] == count;
}

static bool fused_fits(const cann_launch *plan)
{
    const ep_acl_tensor *x = plan->inputs[FUSED_X];
    const ep_acl_tensor *w = plan->inputs[FUSED_WEIGHT];
    const ep_acl_tensor *s = plan->inputs[FUSED_SCALE];
    const ep_acl_tensor *out = plan->inputs[FUSED_OUT];
    if (x->type != EP_ACL_INT8 || !is_matrix(x) || x->rank != 2 || w->type != EP_ACL_INT8 ||
        w->format != EP_ACL_FRACTAL_NZ || w->rank != 5 || s->type != EP_ACL_FLOAT || s->rank != 2 ||
        !cann_is_contiguous(s) || out->type != EP_ACL_INT8 || !is_matrix(out)) {
        return false;
    }
    const int64_t rows = x->shape[0];
    const int64_t columns = s->shape[1];
    const ep_acl_tensor *groups = plan->inputs[FUSED_GROUPS];
    return w->shape[0] == s->shape[0] && w->shape[1] * 32 == columns &&
           w->shape[2] * 16 == x->shape[1] && w->shape[3] == 16 && w->shape[4] == 32 &&
           columns <= 10240 && out->shape[0] == rows && out->shape[1] * 2 == columns &&
           is_vector(plan->inputs[FUSED_X_SCALE], EP_ACL_FLOAT, rows) &&
           is_vector(plan->inputs[FUSED_OUT_SCALE], EP_ACL_FLOAT, rows) &&
           is_vector(groups, EP_ACL_INT64, groups->shape[0]) && groups->shape[0] <= w->shape[0];
}

CANN_EXPORT ep_acl_code aclnnGroupedMatmulSwigluQuantGetWorkspaceSize(
    const ep_acl_tensor *x, const ep_acl_tensor *weight, const ep_acl_tensor *bias,
    const ep_acl_tensor *offset, const ep_acl_tensor *scale, const ep_acl_tensor *per_token_scale,
    const ep_acl_tensor *group_list, ep_acl_tensor *out, ep_acl_tensor *scale_out,
    ep_acl_tensor *offset_out, uint64_t *workspace_bytes, ep_acl_executor **executor)
{
    cann_launch plan = {.inputs = {x, weight, scale, per_token_scale, group_list, out, scale_out},
                        .inputs_count = FUSED_INPUTS,
                        .run = run_fused,
                        .name = FUSED,
                        .workspace_bytes = 8192};
    for (uint64_t i = 0; i < FUSED_INPUTS; i++) {
        if (plan.inputs[i] == NULL) {
            return CANN_OP_NULL;
        }
        (void)cann_tensor(plan.inputs[i], FUSED);
    }
    const ep_acl_code code = cann_enter();
    if (code != 0) {
        return code;
    }
    if (bias != NULL || offset != NULL || offset_out != NULL || !fused_fits(&plan)) {
        return CANN_OP_INVALID;
    }
    plan.flops = 2.0 * (double)x->shape[0] * (double)x->shape[1] * (double)scale->shape[1];
    return cann_plan(&plan, workspace_bytes, executor);
}

CANN_EXPORT ep_acl_code aclnnGroupedMatmulSwigluQuant(void *workspace, uint64_t workspace_bytes,
                                                      ep_acl_executor *executor,
                                                      ep_acl_stream stream)
{
    return cann_launch_executor(FUSED, workspace, workspace_bytes, executor, stream);
}
#endif
