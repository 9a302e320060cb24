/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of a call's tensors, one function per tensor, and the conversion to ep_batch. */
#include "common/args.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "wire/gateway_codec.h"
#include "wire/moe_parameters.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

/* The public enumerations have the same values as those of lib/moe. */
_Static_assert((int)EP_MOE_UNCOMBINED == (int)EP_RESULT_UNCOMBINED &&
                   (int)EP_MOE_PARTIAL == (int)EP_RESULT_PARTIAL,
               "result form");
_Static_assert((int)EP_MOE_WEIGHT_ON_INPUT == (int)EP_WEIGHT_ON_INPUT, "weight_on");
_Static_assert((int)EP_MOE_SHARED_NONE == (int)EP_SHARED_NONE &&
                   (int)EP_MOE_SHARED_CALLER == (int)EP_SHARED_CALLER,
               "shared");
_Static_assert((int)EP_MOE_NAN_MEAN == (int)EP_NAN_MEAN &&
                   (int)EP_MOE_NAN_REJECT == (int)EP_NAN_REJECT,
               "nan policy");
_Static_assert((int)EP_MOE_PREFILL == (int)EP_MODE_PREFILL && (int)EP_MOE_AUTO == (int)EP_MODE_AUTO,
               "mode");
_Static_assert((int)EP_MOE_CONST_LINEAR == (int)EP_CONST_LINEAR, "const rule");
_Static_assert((int)EP_MOE_DISPATCH_INT8 == (int)EP_DISPATCH_INT8 &&
                   (int)EP_MOE_DISPATCH_FP8 == (int)EP_DISPATCH_FP8,
               "dispatch_quant");
_Static_assert((int)EP_MOE_COMBINE_INT8 == (int)EP_COMBINE_INT8, "combine_quant");

static const ep_dtype row_types[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_NONE};
static const ep_dtype x_types[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8,
                                   EP_DTYPE_NONE};
static const ep_dtype id_types[] = {EP_DTYPE_I32, EP_DTYPE_I64, EP_DTYPE_NONE};
static const ep_dtype scale_types[] = {EP_DTYPE_F32, EP_DTYPE_BF16, EP_DTYPE_NONE};
static const ep_dtype f32_types[] = {EP_DTYPE_F32, EP_DTYPE_NONE};
static const ep_dtype flag_types[] = {EP_DTYPE_BOOL, EP_DTYPE_U8, EP_DTYPE_NONE};

/* ---- one tensor ---- */

static ep_err check_type(const char *name, const ep_tensor *tensor, const ep_dtype *types,
                         ep_error *out_error)
{
    char allowed[64] = "";
    size_t used = 0;
    for (const ep_dtype *t = types; *t != EP_DTYPE_NONE; t++) {
        if (*t == tensor->dtype) {
            return EP_OK;
        }
        int n = snprintf(allowed + used, sizeof(allowed) - used, "%s%s", used == 0 ? "" : ", ",
                         ep_dtype_name(*t));
        used += n > 0 ? (size_t)n : 0;
    }
    return BAD("%s has type %s (%u): allowed %s", name, ep_dtype_name(tensor->dtype),
               (unsigned)tensor->dtype, allowed);
}

/* One byte past the last one. An empty tensor ends where it begins; strides may be wider than
 * memory: such a tensor ends with it. */
static uintptr_t end_of(const ep_tensor *tensor)
{
    size_t end = (size_t)(uintptr_t)tensor->data;
    bool fits = ep_add_size(end, ep_dtype_bytes(tensor->dtype), &end);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        size_t part = 0;
        if (tensor->shape[i] == 0) {
            return (uintptr_t)tensor->data;
        }
        fits = fits &&
               (tensor->shape[i] == 1 || (ep_mul_size((size_t)tensor->shape[i] - 1,
                                                      (size_t)tensor->stride_bytes[i], &part) &&
                                          ep_add_size(end, part, &end)));
    }
    return fits ? end : UINTPTR_MAX;
}

ep_err ep_tensor_check(const char *name, const ep_tensor *tensor, uint32_t rank,
                       const ep_dtype *types, ep_error *out_error)
{
    if (tensor->rank == 0) { /* not given; a zeroed tensor has no struct_bytes either */
        return BAD("%s is missing", name);
    }
    if (tensor->struct_bytes != sizeof(*tensor)) {
        return BAD("%s has struct_bytes %" PRIu32 ": ep_tensor_1d and its like set %zu", name,
                   tensor->struct_bytes, sizeof(*tensor));
    }
    if (tensor->rank != rank) {
        return BAD("%s has rank %" PRIu32 ": allowed %" PRIu32, name, tensor->rank, rank);
    }
    if (tensor->memory != EP_MEMORY_HOST) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "%s is in memory of kind %u: allowed here is 0, the host's "
                            "(ep_moe_begin_on_stream and the "
                            "group API take tokens on a device)",
                            name, (unsigned)tensor->memory);
    }
    ep_err err = check_type(name, tensor, types, out_error);
    if (err != EP_OK) {
        return err;
    }
    for (uint32_t i = 0; i < rank; i++) {
        if (tensor->shape[i] < 0 || tensor->shape[i] > UINT32_MAX) {
            return BAD("%s has %" PRId64 " in dimension %" PRIu32 ": allowed 0..%" PRIu32, name,
                       tensor->shape[i], i, UINT32_MAX);
        }
        if (i + 1 < rank && tensor->shape[i] > 1 && tensor->stride_bytes[i] < 0) {
            return BAD("%s has stride %" PRId64 " in dimension %" PRIu32 ": allowed 0 or more",
                       name, tensor->stride_bytes[i], i);
        }
    }
    if (tensor->data == NULL && end_of(tensor) != 0) { /* not empty: those end at NULL */
        return BAD("%s has no data", name);
    }
    int64_t element = (int64_t)ep_dtype_bytes(tensor->dtype);
    if (tensor->shape[rank - 1] > 1 && tensor->stride_bytes[rank - 1] != element) {
        return BAD("%s has innermost stride %" PRId64 ": allowed %" PRId64 ", the element size",
                   name, tensor->stride_bytes[rank - 1], element);
    }
    return EP_OK;
}

/* The required size of a dimension. */
typedef struct dimension {
    uint64_t wanted;
    const char *because; /* NULL: any size */
} dimension;

#define BY_X "x has that many tokens"
#define BY_IDS "expert_ids have that many slots"
#define BY_ROWS "rows have that many elements"

static ep_err check(const char *name, const ep_tensor *tensor, const ep_dtype *types, uint32_t rank,
                    const dimension *dimensions, ep_error *out_error)
{
    ep_err err = ep_tensor_check(name, tensor, rank, types, out_error);
    for (uint32_t i = 0; err == EP_OK && i < rank; i++) {
        const dimension *d = &dimensions[i];
        if (d->because != NULL && (uint64_t)tensor->shape[i] != d->wanted) {
            err = BAD("%s has %" PRId64 " in dimension %" PRIu32 ": %s, so %" PRIu64 " is needed",
                      name, tensor->shape[i], i, d->because, d->wanted);
        }
    }
    return err;
}

static ep_rows rows_of(const ep_tensor *tensor)
{
    return (ep_rows){
        .data = tensor->data, .stride_bytes = tensor->stride_bytes[0], .dtype = tensor->dtype};
}

/* ---- args ---- */

static ep_err check_strings(const ep_moe_args *args, ep_error *out_error)
{
    const struct {
        const char *name;
        const char *text;
        size_t bytes;
    } strings[] = {{"model", args->model, EP_MODEL_NAME_BYTES},
                   {"version", args->version, EP_VERSION_BYTES},
                   {"traceparent", args->traceparent, EP_TRACEPARENT_BYTES},
                   {"tenant", args->tenant, EP_TENANT_BYTES}};
    if (args->model == NULL || args->model[0] == 0) {
        return BAD("model is not set");
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(strings); i++) {
        if (strings[i].text != NULL && strlen(strings[i].text) >= strings[i].bytes) {
            return BAD("%s has %zu bytes: allowed 0..%zu", strings[i].name, strlen(strings[i].text),
                       strings[i].bytes - 1);
        }
    }
    return EP_OK;
}

/* Choices that exclude each other. */
static ep_err check_together(const ep_moe_args *args, ep_error *out_error)
{
    bool is_node_sum = args->combine_at == EP_MOE_COMBINE_NODE_SUM;
    if ((args->step_group == 0) != (args->step_group_size == 0)) {
        return BAD("step_group is %" PRIu64 ", step_group_size %" PRIu32
                   ": allowed both 0, or neither",
                   args->step_group, args->step_group_size);
    }
    /* An int8 row with smooth scales belongs to one expert, so no host could share it. */
    if (args->comm_alg == EP_MOE_COMM_HIERARCHY && args->smooth_scales.rank != 0) {
        return BAD("comm_alg hierarchy with smooth_scales: allowed fullmesh");
    }
    /* A node can sum only what is summed here too: weighted rows of one token. */
    if (is_node_sum && args->result == EP_MOE_UNCOMBINED) {
        return BAD("combine_at node_sum with result uncombined: allowed combined, partial");
    }
    if (is_node_sum && args->rows_nan_policy != EP_MOE_NAN_PASS) {
        return BAD("rows_nan_policy is %u with combine_at node_sum: allowed 0 (pass), since nodes "
                   "send sums",
                   (unsigned)args->rows_nan_policy);
    }
    if (is_node_sum && args->weight_on == EP_MOE_WEIGHT_ON_INPUT) {
        return BAD("combine_at node_sum with weight_on input: allowed output");
    }
    return EP_OK;
}

ep_err ep_args_take(const ep_moe_args *given, const ep_tensor *out, ep_moe_args *args,
                    ep_error *out_error)
{
    memset(args, 0, sizeof(*args));
    ep_err err = ep_struct_in("args", given, EP_STRUCT_UPTO(ep_moe_args, expert_scales), args,
                              sizeof(*args), out_error);
    if (err != EP_OK) {
        return err;
    }
    if (out == NULL) {
        return BAD("out is NULL");
    }
    if ((err = check_strings(args, out_error)) != EP_OK ||
        (err = ep_parameters_check(&ep_moe_parameters, args, false, out_error)) != EP_OK) {
        return err;
    }
    if (args->deadline_us >= UINT32_MAX) {
        return BAD("deadline_us is %" PRIu64 ": allowed 0 (the client's default) to %" PRIu32,
                   args->deadline_us, UINT32_MAX - 1);
    }
    return check_together(args, out_error);
}

static ep_err fill_x(const ep_moe_args *args, const char *model, const ep_layer_shape *shape,
                     ep_batch *batch, ep_error *out_error)
{
    ep_err err = ep_tensor_check("x", &args->x, 2, x_types, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (args->x.shape[0] > EP_TOKENS_MAX) {
        return BAD("x has %" PRId64 " tokens: allowed 0..%d", args->x.shape[0], EP_TOKENS_MAX);
    }
    if (args->x.shape[1] != shape->hidden) {
        return BAD("x has hidden %" PRId64 ", layer %" PRIu32 " of model %s has %" PRIu32,
                   args->x.shape[1], shape->layer, model, shape->hidden);
    }
    batch->tokens = (uint32_t)args->x.shape[0];
    batch->hidden = shape->hidden;
    batch->x = rows_of(&args->x);
    if (args->x.dtype != EP_DTYPE_I8) {
        return args->x_scales.rank == 0
                   ? EP_OK
                   : BAD("x_scales are given, but x is %s: allowed with i8 only",
                         ep_dtype_name(args->x.dtype));
    }
    const dimension of_x[] = {{batch->tokens, BY_X}};
    err = check("x_scales", &args->x_scales, f32_types, 1, of_x, out_error);
    if (err != EP_OK) {
        return err;
    }
    if ((uintptr_t)args->x_scales.data % sizeof(float) != 0) {
        return BAD("x_scales begin at %p: allowed multiples of %zu", args->x_scales.data,
                   sizeof(float));
    }
    batch->x_scales = args->x_scales.data;
    return EP_OK;
}

static ep_err fill_slots(const ep_moe_args *args, const ep_layer_shape *shape, ep_batch *batch,
                         ep_error *out_error)
{
    ep_err err;
    bool shared_only = args->expert_ids.rank == 0 && batch->shared_source == EP_SHARED_SERVICE &&
                       shape->shared_experts > 0;
    if (shared_only && args->expert_scales.rank == 0) {
        batch->top_k = 0;
        return EP_OK;
    }
    dimension of_slots[] = {{batch->tokens, BY_X}, {0, NULL}};
    err = check("expert_ids", &args->expert_ids, id_types, 2, of_slots, out_error);
    if (err == EP_OK) {
        of_slots[1] = (dimension){(uint64_t)args->expert_ids.shape[1], BY_IDS};
        err = check("expert_scales", &args->expert_scales, scale_types, 2, of_slots, out_error);
    }
    if (err != EP_OK) {
        return err;
    }
    if (args->expert_ids.shape[1] > EP_TOP_K_MAX) {
        return BAD("expert_ids have %" PRId64 " slots per token: allowed 1..%d",
                   args->expert_ids.shape[1], EP_TOP_K_MAX);
    }
    batch->top_k = (uint32_t)args->expert_ids.shape[1];
    batch->ids = rows_of(&args->expert_ids);
    batch->scales = rows_of(&args->expert_scales);
    return EP_OK;
}

ep_err ep_args_check_mask(const ep_tensor *mask, uint64_t tokens, uint64_t top_k,
                          ep_error *out_error)
{
    const dimension of_slots[] = {{tokens, BY_X}, {top_k, BY_IDS}};
    return mask->rank == 0 ? EP_OK
                           : check("active_mask", mask, flag_types, mask->rank == 1 ? 1 : 2,
                                   of_slots, out_error);
}

static ep_err fill_masks(const ep_moe_args *args, ep_batch *batch, ep_error *out_error)
{
    const dimension of_slots[] = {{batch->tokens, BY_X}, {batch->top_k, BY_IDS}};
    const ep_tensor *mask = &args->active_mask;
    ep_err err = ep_args_check_mask(mask, batch->tokens, batch->top_k, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (mask->rank == 1) {
        batch->mask_tokens = mask->data;
    } else if (mask->rank == 2) {
        batch->mask_slots = rows_of(mask);
    }
    if (args->result == EP_MOE_PARTIAL) {
        batch->partial_slots = rows_of(&args->partial_slots);
        return check("partial_slots", &args->partial_slots, flag_types, 2, of_slots, out_error);
    }
    return args->partial_slots.rank == 0
               ? EP_OK
               : BAD("partial_slots are given, but result is not partial");
}

static ep_err fill_shared(const ep_moe_args *args, ep_batch *batch, ep_error *out_error)
{
    if (args->shared_source != EP_MOE_SHARED_CALLER) {
        return args->shared.rank == 0 ? EP_OK
                                      : BAD("shared is given, but shared_source is not caller (1)");
    }
    const dimension of_x[] = {{batch->tokens, BY_X}, {batch->hidden, BY_ROWS}};
    ep_err err = check("shared", &args->shared, row_types, 2, of_x, out_error);
    batch->shared = rows_of(&args->shared);
    return err;
}

static ep_err fill_special(const ep_moe_args *args, ep_batch *batch, ep_error *out_error)
{
    const char *names[] = {"const_alpha1", "const_alpha2", "const_v"};
    const ep_tensor *tensors[] = {&args->const_alpha1, &args->const_alpha2, &args->const_v};
    ep_rows *rows[] = {&batch->special.const_alpha1, &batch->special.const_alpha2,
                       &batch->special.const_v};
    batch->special.zero_count = args->zero_experts;
    batch->special.copy_count = args->copy_experts;
    batch->special.const_count = args->const_experts;
    batch->special.const_rule = (ep_const_rule)args->const_rule;
    for (size_t i = 0; i < 3 && args->const_experts > 0; i++) {
        const dimension of_table[] = {{args->const_experts, "const_experts says so"},
                                      {batch->hidden, BY_ROWS}};
        if (tensors[i]->rank == 0) {
            return BAD("%s is missing: const_experts is %" PRIu32 ", so it is needed, [%" PRIu32
                       ",%" PRIu32 "] of x's type; without constant experts const_experts is 0",
                       names[i], args->const_experts, args->const_experts, batch->hidden);
        }
        ep_err err = check(names[i], tensors[i], row_types, 2, of_table, out_error);
        if (err != EP_OK) {
            return err;
        }
        *rows[i] = rows_of(tensors[i]);
    }
    for (size_t i = 0; i < 3 && args->const_experts == 0; i++) {
        if (tensors[i]->rank != 0) {
            return BAD("%s is given, but const_experts is 0: allowed with 1 or more", names[i]);
        }
    }
    return EP_OK;
}

/* ---- how rows are quantised for their way to the nodes and back ---- */

static ep_err fill_smooth(const ep_moe_args *args, const ep_layer_shape *shape, ep_batch *batch,
                          ep_error *out_error)
{
    const ep_tensor *smooth = &args->smooth_scales;
    uint32_t rows = shape->shared_experts + shape->experts;
    if (args->dispatch_quant != EP_MOE_DISPATCH_INT8) {
        return BAD("smooth_scales are given, but dispatch_quant is %u: allowed with 2 (int8) only",
                   (unsigned)args->dispatch_quant);
    }
    /* Then each slot has a row of its own, which a node cannot share. */
    if (args->combine_at == EP_MOE_COMBINE_NODE_SUM) {
        return BAD("smooth_scales are given with combine_at 1 (node_sum): allowed with combine_at "
                   "0 (rows) and any comm_alg but 2 (hierarchy)");
    }
    ep_err err = ep_tensor_check("smooth_scales", smooth, 2, f32_types, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (smooth->shape[0] != rows || smooth->shape[1] != shape->hidden) {
        return BAD("smooth_scales are %" PRId64 " x %" PRId64 ": layer %" PRIu32 " has %" PRIu32
                   " shared and %" PRIu32 " routed experts of hidden %" PRIu32 ", so %" PRIu32
                   " x %" PRIu32 " is needed",
                   smooth->shape[0], smooth->shape[1], shape->layer, shape->shared_experts,
                   shape->experts, shape->hidden, rows, shape->hidden);
    }
    if ((uintptr_t)smooth->data % sizeof(float) != 0 ||
        smooth->stride_bytes[0] % (int64_t)sizeof(float) != 0) {
        return BAD("smooth_scales begin at %p with stride %" PRId64 ": allowed multiples of %zu",
                   smooth->data, smooth->stride_bytes[0], sizeof(float));
    }
    batch->smooth = rows_of(smooth);
    batch->smooth_first = shape->shared_experts;
    return EP_OK;
}

static ep_err fill_quant(const ep_moe_args *args, const ep_layer_shape *shape, ep_batch *batch,
                         ep_error *out_error)
{
    unsigned dispatch = (unsigned)args->dispatch_quant;
    if (dispatch != EP_MOE_DISPATCH_PLAIN && args->x.dtype == EP_DTYPE_I8) {
        return BAD("dispatch_quant is %u, but x is i8 already: allowed with bf16, f16, f32 only",
                   dispatch);
    }
    batch->dispatch_quant = (ep_dispatch_quant)dispatch;
    batch->combine_quant = (ep_combine_quant)args->combine_quant;
    return args->smooth_scales.rank != 0 ? fill_smooth(args, shape, batch, out_error) : EP_OK;
}

/* ---- out ---- */

static ep_err fill_out(const ep_tensor *out, ep_batch *batch, ep_combine_out *out_out,
                       ep_error *out_error)
{
    bool uncombined = batch->form == EP_RESULT_UNCOMBINED;
    int64_t row_bytes = (int64_t)batch->hidden * (int64_t)ep_dtype_bytes(out->dtype);
    const dimension combined[] = {{batch->tokens, BY_X}, {batch->hidden, BY_ROWS}};
    const dimension by_slot[] = {
        {batch->tokens, BY_X}, {batch->top_k, BY_IDS}, {batch->hidden, BY_ROWS}};
    ep_err err = check("out", out, row_types, uncombined ? 3 : 2, uncombined ? by_slot : combined,
                       out_error);
    if (err != EP_OK) {
        return err;
    }
    int64_t token_bytes = uncombined && batch->top_k == 0 ? 0 : row_bytes;
    if (uncombined && batch->top_k > 1) {
        if (out->stride_bytes[1] < row_bytes) {
            return BAD("out has stride %" PRId64 " between slots: allowed %" PRId64
                       " or more, the bytes of a row",
                       out->stride_bytes[1], row_bytes);
        }
        token_bytes = (int64_t)(batch->top_k - 1) * out->stride_bytes[1] + row_bytes;
    }
    if (batch->tokens > 1 && out->stride_bytes[0] < token_bytes) {
        return BAD("out has stride %" PRId64 " between tokens: allowed %" PRId64
                   " or more, the bytes of a token",
                   out->stride_bytes[0], token_bytes);
    }
    batch->out_dtype = out->dtype;
    *out_out = (ep_combine_out){.data = out->data,
                                .token_stride_bytes = out->stride_bytes[0],
                                .slot_stride_bytes = uncombined ? out->stride_bytes[1] : 0};
    return EP_OK;
}

/* out must not overlap inputs: it is written while they are still read. */
static ep_err check_apart(const ep_moe_args *args, const ep_tensor *out, ep_error *out_error)
{
    ep_moe_tensor row;
    const uintptr_t out_begin = (uintptr_t)out->data, out_end = end_of(out);
    for (uint32_t at = 0; ep_moe_tensor_next(&at, &row);) {
        const ep_tensor *in = (const ep_tensor *)(const void *)((const uint8_t *)args + row.at);
        const uintptr_t begin = (uintptr_t)in->data, end = in->rank == 0 ? begin : end_of(in);
        if (begin < end && out_begin < end && begin < out_end && out_begin < out_end) {
            return BAD("out overlaps %s: they must be apart", row.name);
        }
    }
    return EP_OK;
}

/* Copies a text whose length was checked; to is empty. */
static void copy_text(char *to, const char *text)
{
    if (text != NULL) {
        memcpy(to, text, strlen(text) + 1);
    }
}

ep_err ep_call_spec_fill(const ep_moe_args *args, const ep_tensor *out, const char *model,
                         const ep_layer_shape *shape, ep_call_spec *out_spec, ep_error *out_error)
{
    ep_err err;
    ep_call_spec spec = {.layer = args->layer,
                         .mode = (ep_mode)args->mode,
                         .comm_alg = args->comm_alg,
                         .allow_missing = args->allow_missing,
                         .step_group = args->step_group,
                         .step_group_size = args->step_group_size,
                         .want_timing = args->want_timing,
                         .missing_slots = args->missing_slots,
                         .missing_slots_max =
                             args->missing_slots != NULL ? args->missing_slots_max : 0,
                         .on_tokens = args->on_tokens,
                         .on_tokens_arg = args->on_tokens_arg,
                         .deadline_us = args->deadline_us};
    ep_batch *batch = &spec.batch;
    batch->weight_on = (ep_weight_on)args->weight_on;
    batch->form = (ep_result_form)args->result;
    batch->node_sum = args->combine_at == EP_MOE_COMBINE_NODE_SUM;
    batch->shared_source = (ep_shared_source)args->shared_source;
    batch->nan_policy = (ep_nan_policy)args->nan_policy;
    batch->x_abs_max = args->x_abs_max;
    batch->rows_policy = (ep_nan_policy)args->rows_nan_policy;
    batch->allow_duplicates = args->allow_duplicates;
    batch->wire_dtype = args->wire_dtype == EP_DTYPE_NONE ? EP_DTYPE_BF16 : args->wire_dtype;
    if ((err = fill_x(args, model, shape, batch, out_error)) != EP_OK ||
        (err = fill_slots(args, shape, batch, out_error)) != EP_OK ||
        (err = fill_masks(args, batch, out_error)) != EP_OK ||
        (err = fill_shared(args, batch, out_error)) != EP_OK ||
        (err = fill_special(args, batch, out_error)) != EP_OK ||
        (err = fill_quant(args, shape, batch, out_error)) != EP_OK ||
        (err = fill_out(out, batch, &spec.out, out_error)) != EP_OK ||
        (err = check_apart(args, out, out_error)) != EP_OK) {
        return err;
    }
    copy_text(spec.model, args->model);
    copy_text(spec.version, args->version);
    copy_text(spec.traceparent, args->traceparent);
    copy_text(spec.tenant, args->tenant);
    *out_spec = spec;
    return EP_OK;
}
