/* SPDX-License-Identifier: Apache-2.0 */
/* The weighted sum of expert rows per token. Elements are independent; the build forbids fusing
 * multiply and add. */
#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/float_env.h"
#include "base/struct_size.h"
#include "expertd/permute.h"
#include "moe/convert.h"
#include "moe/flow.h"
#include "moe/quantize.h"

#define ALIGN_FLOATS 16u
#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

void ep_unpermute_args_init_sized(ep_unpermute_args *out_args, size_t struct_bytes)
{
    const ep_unpermute_args args = {.dtype = EP_DTYPE_BF16, .out_dtype = EP_DTYPE_BF16};
    ep_struct_init(out_args, struct_bytes, &args, sizeof(args));
}

/* For the sum, a widened row and a widened bias. */
size_t ep_unpermute_workspace_bytes(const ep_unpermute_args *args)
{
    return 3 * ep_align_up(args->hidden, ALIGN_FLOATS) * sizeof(float);
}

static ep_err check_fields(const ep_unpermute_args *a, ep_error *out_error)
{
    const ep_range fields[] = {{"tokens", a->tokens, 0, EP_TOKENS_MAX},
                               {"top_k", a->top_k, 1, EP_TOP_K_MAX},
                               {"hidden", a->hidden, 1, EP_HIDDEN_MAX},
                               {"rows_count", a->rows_count, 0, INT32_MAX},
                               {"order", a->order, EP_PERMUTE_BY_TOKEN, EP_PERMUTE_BY_CHOICE},
                               {"experts", a->bias != NULL ? a->experts : 1, 1, EP_EXPERTS_MAX}};
    const ep_err err = ep_ranges_check(fields, EP_ARRAY_COUNT(fields), out_error);
    if (err != EP_OK) {
        return err;
    }
    if (a->dtype != EP_DTYPE_I8 && !ep_dtype_is_float(a->dtype)) {
        return BAD("dtype is %s (%d): allowed bf16, f16, f32, i8", ep_dtype_name(a->dtype),
                   (int)a->dtype);
    }
    if (!ep_dtype_is_float(a->out_dtype)) {
        return BAD("out_dtype is %s (%d): allowed bf16, f16, f32", ep_dtype_name(a->out_dtype),
                   (int)a->out_dtype);
    }
    return EP_OK;
}

static size_t slot_index(const ep_unpermute_args *a, uint32_t token, uint32_t k)
{
    return a->order == EP_PERMUTE_BY_TOKEN ? (size_t)token * a->top_k + k
                                           : (size_t)k * a->tokens + token;
}

static ep_err check_tensors(const ep_unpermute_args *a, ep_error *out_error)
{
    const char *missing = a->slot_rows == NULL                               ? "slot_rows"
                          : a->out == NULL                                   ? "out"
                          : a->rows == NULL && a->rows_count > 0             ? "rows"
                          : a->dtype == EP_DTYPE_I8 && a->row_scales == NULL ? "row_scales"
                          : a->bias != NULL && a->ids == NULL                ? "ids"
                                                                             : NULL;
    if (missing != NULL && a->tokens > 0) {
        return BAD("%s is NULL", missing);
    }
    for (size_t i = 0; i < (size_t)a->tokens * a->top_k; i++) {
        if (a->slot_rows[i] >= 0 && (uint64_t)a->slot_rows[i] >= a->rows_count) {
            return BAD("slot_rows[%zu] is %" PRId32 ": there are %" PRIu64 " rows", i,
                       a->slot_rows[i], a->rows_count);
        }
    }
    return EP_OK;
}

static const void *row_at(const void *rows, size_t index, size_t hidden, ep_dtype dtype)
{
    return (const uint8_t *)rows + index * hidden * ep_dtype_bytes(dtype);
}

/* weight * (row + bias), each rounded; a missing row is 0. */
static void add_biased(const ep_unpermute_args *a, bool has_row, size_t expert, float weight,
                       float *restrict sum, float *restrict wide)
{
    ep_dtype dtype = a->dtype == EP_DTYPE_I8 ? EP_DTYPE_F32 : a->dtype;
    float *restrict bias = wide + ep_align_up(a->hidden, ALIGN_FLOATS);
    ep_row_widen(row_at(a->bias, expert, a->hidden, dtype), dtype, a->hidden, bias);
    if (!has_row) {
        memset(wide, 0, a->hidden * sizeof(*wide));
    }
    for (uint32_t i = 0; i < a->hidden; i++) {
        float value = wide[i] + bias[i];
        sum[i] = sum[i] + weight * value;
    }
}

static void add_slot(const ep_unpermute_args *a, uint32_t token, uint32_t k, float *sum,
                     float *wide)
{
    int32_t row = a->slot_rows[slot_index(a, token, k)];
    size_t by_token = (size_t)token * a->top_k + k;
    float weight = a->weights != NULL ? a->weights[by_token] : 1.0f;
    if (row >= 0 && a->dtype == EP_DTYPE_I8) {
        ep_row_dequantize_i8(row_at(a->rows, (size_t)row, a->hidden, a->dtype), a->row_scales[row],
                             a->hidden, wide);
    } else if (row >= 0) {
        ep_row_widen(row_at(a->rows, (size_t)row, a->hidden, a->dtype), a->dtype, a->hidden, wide);
    }
    if (a->bias != NULL && a->ids[by_token] >= 0 && a->ids[by_token] < (int32_t)a->experts) {
        add_biased(a, row >= 0, (size_t)a->ids[by_token], weight, sum, wide);
    } else if (row >= 0 && a->bias == NULL) {
        ep_floats_add_weighted(wide, weight, a->hidden, sum);
    }
}

static void add_extra(const ep_unpermute_args *a, const void *rows, uint32_t token, float *sum,
                      float *wide)
{
    ep_dtype dtype = a->dtype == EP_DTYPE_I8 ? EP_DTYPE_F32 : a->dtype;
    if (rows != NULL) {
        ep_row_widen(row_at(rows, token, a->hidden, dtype), dtype, a->hidden, wide);
        ep_floats_add(wide, a->hidden, sum);
    }
}

static EP_FLOAT_WORK void sum_tokens(const ep_unpermute_args *args, float *sum, float *wide)
{
    size_t out_bytes = args->hidden * ep_dtype_bytes(args->out_dtype);
    for (uint32_t t = 0; t < args->tokens; t++) {
        memset(sum, 0, args->hidden * sizeof(*sum));
        add_extra(args, args->x1, t, sum, wide);
        add_extra(args, args->x2, t, sum, wide);
        for (uint32_t k = 0; k < args->top_k; k++) {
            add_slot(args, t, k, sum, wide);
        }
        ep_row_narrow(sum, args->hidden, args->out_dtype, (uint8_t *)args->out + t * out_bytes);
    }
}

ep_err ep_moe_unpermute(const ep_unpermute_args *given, void *workspace, size_t workspace_bytes,
                        ep_error *out_error)
{
    ep_unpermute_args taken;
    const ep_unpermute_args *args = &taken;
    ep_err err = ep_struct_in("args", given, EP_STRUCT_UPTO(ep_unpermute_args, out), &taken,
                              sizeof(taken), out_error);
    if (err == EP_OK) {
        err = check_fields(args, out_error);
    }
    if (err == EP_OK) {
        err = check_tensors(args, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    size_t needed = ep_unpermute_workspace_bytes(args);
    if (workspace == NULL || workspace_bytes < needed) {
        return BAD("workspace has %zu bytes: %zu are needed (12 per element of hidden, rounded up "
                   "to 16 elements)",
                   workspace == NULL ? 0 : workspace_bytes, needed);
    }
    float *sum = workspace;
    const ep_float_env env = ep_float_env_begin();
    sum_tokens(args, sum, sum + ep_align_up(args->hidden, ALIGN_FLOATS));
    ep_float_env_end(env);
    return EP_OK;
}
