/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the group operators' arguments, tensor by tensor. */
#include "group/group_args.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/args.h"
#include "base/struct_size.h"
#include "base/numeric.h"
#include "group/group_assist.h"
#include "group/group_profile.h"
#include "group/group_sizes.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)
#define TRY(check)                                                                                 \
    do {                                                                                           \
        ep_err try_err = (check);                                                                  \
        if (try_err != EP_OK) {                                                                    \
            return try_err;                                                                        \
        }                                                                                          \
    } while (0)

static const ep_dtype row_types[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_NONE};
static const ep_dtype id_types[] = {EP_DTYPE_I32, EP_DTYPE_I64, EP_DTYPE_NONE};
static const ep_dtype f32_types[] = {EP_DTYPE_F32, EP_DTYPE_NONE};
static const ep_dtype i32_types[] = {EP_DTYPE_I32, EP_DTYPE_NONE};
static const ep_dtype i64_types[] = {EP_DTYPE_I64, EP_DTYPE_NONE};
static const ep_dtype i8_types[] = {EP_DTYPE_I8, EP_DTYPE_NONE};
static const ep_dtype flag_types[] = {EP_DTYPE_BOOL, EP_DTYPE_U8, EP_DTYPE_NONE};

/* ---- initial values ---- */

void ep_group_params_init_sized(ep_group_params *out_params, size_t struct_bytes)
{
    const ep_group_params params = {.ep_rank_id = -1};
    ep_struct_init(out_params, struct_bytes, &params, sizeof(params));
}

void ep_moe_dispatch_args_init_sized(ep_moe_dispatch_args *out_args, size_t struct_bytes)
{
    const ep_moe_dispatch_args args = {.expert_token_nums_type = 1};
    ep_struct_init(out_args, struct_bytes, &args, sizeof(args));
}

void ep_moe_combine_args_init_sized(ep_moe_combine_args *out_args, size_t struct_bytes)
{
    const ep_moe_combine_args args = {0};
    ep_struct_init(out_args, struct_bytes, &args, sizeof(args));
}

void ep_moe_add_rms_norm_init_sized(ep_moe_add_rms_norm *out_norm, size_t struct_bytes)
{
    const ep_moe_add_rms_norm norm = {.eps = 1e-6f};
    ep_struct_init(out_norm, struct_bytes, &norm, sizeof(norm));
}

/* ---- the caller's structs, perhaps of an older version ---- */

ep_err ep_group_dispatch_take(const ep_moe_dispatch_args *given, ep_moe_dispatch_args *out_args,
                              ep_error *out_error)
{
    memset(out_args, 0, sizeof(*out_args));
    return ep_struct_in("ep_moe_dispatch_args", given,
                        EP_STRUCT_UPTO(ep_moe_dispatch_args, tp_recv_counts), out_args,
                        sizeof(*out_args), out_error);
}

ep_err ep_group_combine_take(const ep_moe_combine_args *given,
                             const ep_moe_add_rms_norm *given_norm, ep_moe_combine_args *out_args,
                             ep_moe_add_rms_norm *out_norm, ep_error *out_error)
{
    memset(out_args, 0, sizeof(*out_args));
    memset(out_norm, 0, sizeof(*out_norm));
    TRY(ep_struct_in("ep_moe_combine_args", given, EP_STRUCT_UPTO(ep_moe_combine_args, x_out),
                     out_args, sizeof(*out_args), out_error));
    return given_norm == NULL ? EP_OK
                              : ep_struct_in("ep_moe_add_rms_norm", given_norm,
                                             EP_STRUCT_UPTO(ep_moe_add_rms_norm, y), out_norm,
                                             sizeof(*out_norm), out_error);
}

/* ---- tensors ---- */

static ep_err check_shape(const char *name, const ep_tensor *tensor, uint32_t dimension,
                          int64_t wanted, const char *because, ep_error *out_error)
{
    return tensor->shape[dimension] == wanted
               ? EP_OK
               : BAD("%s has %" PRId64 " in dimension %" PRIu32 ": %s, so %" PRId64 " is needed",
                     name, tensor->shape[dimension], dimension, because, wanted);
}

/* Checks for at least so many elements in dimension 0; formula says why. */
static ep_err check_room(const char *name, const ep_tensor *tensor, int64_t wanted,
                         size_t each_bytes, const char *formula, ep_error *out_error)
{
    return tensor->shape[0] >= wanted
               ? EP_OK
               : BAD("%s has %" PRId64 " entries (%" PRId64 " bytes): needs %" PRId64 ", %" PRId64
                     " bytes; %s",
                     name, tensor->shape[0], tensor->shape[0] * (int64_t)each_bytes, wanted,
                     wanted * (int64_t)each_bytes, formula);
}

/* Checks that an optional tensor is there; why names what needs it. */
static ep_err require(const char *name, const ep_tensor *tensor, const char *why, int64_t value,
                      ep_error *out_error)
{
    return tensor->rank != 0
               ? EP_OK
               : BAD("%s is missing: it is required with %s %" PRId64, name, why, value);
}

/* A tensor that this mode does not use may be given, as vendors' programs do. It is checked all the
 * same, since the other mode would use it. */
static ep_err check_unused(const char *name, const ep_tensor *tensor, const ep_dtype *types,
                           ep_error *out_error)
{
    return tensor->rank == 0 ? EP_OK : ep_tensor_check(name, tensor, 1, types, out_error);
}

static ep_err check_absent(const char *name, const ep_tensor *tensor, const char *why,
                           ep_error *out_error)
{
    return tensor->rank == 0 ? EP_OK : BAD("%s is given: allowed only absent (%s)", name, why);
}

static ep_rows rows_of(const ep_tensor *tensor)
{
    return (ep_rows){
        .data = tensor->data, .stride_bytes = tensor->stride_bytes[0], .dtype = tensor->dtype};
}

/* Checks [T,K] of one of the types. */
static ep_err check_slots(const char *name, const ep_tensor *tensor, const ep_dtype *types,
                          const ep_group_call *call, ep_error *out_error)
{
    TRY(ep_tensor_check(name, tensor, 2, types, out_error));
    TRY(check_shape(name, tensor, 0, call->tokens, "the batch has that many tokens", out_error));
    return check_shape(name, tensor, 1, call->top_k, "expert_ids has that many slots", out_error);
}

/* Checks [T,H], or [a,b,H] with a*b = T and no gaps, of the call's type. */
static ep_err check_rows(const char *name, const ep_tensor *tensor, const ep_group_call *call,
                         ep_rows *out_rows, ep_error *out_error)
{
    const ep_dtype types[] = {(ep_dtype)call->dtype, EP_DTYPE_NONE};
    if (tensor->rank != 3) {
        TRY(ep_tensor_check(name, tensor, 2, types, out_error));
        TRY(check_shape(name, tensor, 0, call->tokens, "the batch has that many tokens",
                        out_error));
        TRY(check_shape(name, tensor, 1, call->hidden, "rows have that many elements", out_error));
        *out_rows = rows_of(tensor);
        return EP_OK;
    }
    TRY(ep_tensor_check(name, tensor, 3, types, out_error));
    int64_t row = tensor->stride_bytes[1];
    if (tensor->shape[0] * tensor->shape[1] != call->tokens ||
        (tensor->shape[0] > 1 && tensor->stride_bytes[0] != row * tensor->shape[1])) {
        return BAD("%s is [%" PRId64 ", %" PRId64
                   ", H]: allowed dimensions whose product is BS %" PRId64 ", without gaps",
                   name, tensor->shape[0], tensor->shape[1], call->tokens);
    }
    TRY(check_shape(name, tensor, 2, call->hidden, "rows have that many elements", out_error));
    *out_rows = (ep_rows){.data = tensor->data, .stride_bytes = row, .dtype = tensor->dtype};
    return EP_OK;
}

/* ---- params ---- */

static ep_err read_tp(ep_group *group, const ep_group_params *params, group_view *view,
                      ep_error *out_error)
{
    view->group_tp = params->tp_world_size == 2 ? params->group_tp : NULL;
    if (params->group_tp == NULL ? params->tp_world_size == 2 : params->tp_world_size == 0) {
        return BAD("tp_world_size is %" PRId64
                   " and group_tp is %s: allowed 2 with group_tp, 1 with or without, 0 without",
                   params->tp_world_size, params->group_tp == NULL ? "not given" : "given");
    }
    if (params->group_tp == NULL) {
        return EP_OK;
    }
    if (params->group_tp == group || strcmp(params->group_tp->name, group->name) == 0) {
        return BAD("group_tp is \"%.60s\": allowed another name than group_ep \"%.60s\"",
                   params->group_tp->name, group->name);
    }
    if (view->group_tp == NULL) { /* a single rank is no pair */
        return EP_OK;
    }
    if (params->group_tp->world != 2 || params->tp_rank_id != (int64_t)params->group_tp->rank) {
        return BAD("group_tp has %" PRIu32 " ranks and this is its rank %" PRIu32
                   ": allowed 2 ranks, and tp_rank_id (%" PRId64 ") equal",
                   params->group_tp->world, params->group_tp->rank, params->tp_rank_id);
    }
    return EP_OK;
}

static ep_err read_elastic(ep_group *group, const ep_group_params *params, group_view *view,
                           ep_error *out_error)
{
    for (uint32_t r = 0; r < group->world; r++) {
        view->members[r] = r;
    }
    if (params->elastic_info.rank == 0) {
        return EP_OK;
    }
    TRY(ep_tensor_check("elastic_info", &params->elastic_info, 1, i32_types, out_error));
    TRY(check_shape("elastic_info", &params->elastic_info, 0, 4 + 2 * (int64_t)group->world,
                    "it is 4 + 2 * ep_world_size", out_error));
    view->call.has_elastic = 1;
    return ep_group_elastic_read(params->elastic_info.data, group->world, group->rank, &view->call,
                                 view->members, out_error);
}

/* The vendor's callers mean no shared expert by one without ranks. */
void ep_group_call_fill_shared(const ep_group_params *params, ep_group_call *call)
{
    call->shared_rows =
        params->shared_expert_num == 1 && call->shared_ranks == 0 ? 0 : params->shared_expert_num;
    call->shared_experts = call->shared_ranks > 0 ? call->shared_rows : 0;
}

ep_err ep_group_call_fill(const ep_group_params *params, uint32_t world, ep_group_call *call,
                          ep_error *out_error)
{
    call->profile = params->profile;
    call->const_rule = params->const_rule;
    call->world_size = world;
    call->ranks = world;
    call->moe_experts = params->moe_expert_num;
    call->shared_ranks = params->shared_expert_rank_num;
    call->shard_type = params->expert_shard_type;
    call->global_bs = params->global_bs;
    call->zero_experts = params->zero_expert_num;
    call->copy_experts = params->copy_expert_num;
    call->const_experts = params->const_expert_num;
    call->allow_duplicates = params->allow_duplicates;
    call->tp_world_size = params->tp_world_size == 0 ? 1 : params->tp_world_size;
    call->tp_rank = params->tp_rank_id;
    return ep_group_comm_parse(params->comm_alg, call, out_error);
}

static ep_err read_params(ep_group *group, const ep_group_params *given, group_view *view,
                          ep_error *out_error)
{
    ep_group_call *call = &view->call;
    ep_group_params taken;
    ep_group_params_init(&taken);
    TRY(ep_struct_in("ep_group_params", given, EP_STRUCT_UPTO(ep_group_params, moe_expert_num),
                     &taken, sizeof(taken), out_error));
    const ep_group_params *params = &taken;
    if (params->ep_world_size != 0 && params->ep_world_size != (int64_t)group->world) {
        return BAD("ep_world_size is %" PRId64 ": allowed %" PRIu32 ", the group's, or 0",
                   params->ep_world_size, group->world);
    }
    if (params->ep_rank_id != -1 && params->ep_rank_id != (int64_t)group->rank) {
        return BAD("ep_rank_id is %" PRId64 ": allowed %" PRIu32 ", the group's, or -1",
                   params->ep_rank_id, group->rank);
    }
    TRY(ep_group_call_fill(params, group->world, call, out_error));
    call->local_rank = group->rank;
    TRY(read_tp(group, params, view, out_error));
    TRY(read_elastic(group, params, view, out_error));
    ep_group_call_fill_shared(params, call);
    return EP_OK;
}

static ep_err read_policy(int64_t policy, float abs_max, group_view *view, ep_error *out_error)
{
    if (policy < EP_NAN_PASS || policy > EP_NAN_MEAN) {
        return BAD("nan_policy is %" PRId64 ": allowed 0 (pass), 1 (reject), 2 (zero), 3 (mean)",
                   policy);
    }
    if (!(abs_max >= 0.0f)) {
        return BAD("x_abs_max is %g: allowed 0 (off) or more", (double)abs_max);
    }
    view->batch.nan_policy = (ep_nan_policy)policy;
    view->batch.x_abs_max = abs_max;
    return EP_OK;
}

/* Reads T, K, H and types from the two tensors that have them. */
static ep_err read_batch(const ep_tensor *x, const char *x_name, const ep_tensor *ids,
                         group_view *view, ep_error *out_error)
{
    TRY(ep_tensor_check(x_name, x, 2, row_types, out_error));
    TRY(ep_tensor_check("expert_ids", ids, 2, id_types, out_error));
    view->call.tokens = ids->shape[0];
    view->call.top_k = ids->shape[1];
    view->call.hidden = x->shape[1];
    view->call.dtype = x->dtype;
    view->call.ids_dtype = ids->dtype;
    return EP_OK;
}

static ep_err read_mask(const ep_tensor *mask, group_view *view, ep_error *out_error)
{
    ep_batch *batch = &view->batch;
    if (mask->rank == 0) {
        return EP_OK;
    }
    if (mask->rank == 2) {
        view->call.mask = EP_GROUP_MASK_SLOTS;
        TRY(check_slots("x_active_mask", mask, flag_types, &view->call, out_error));
        batch->mask_slots = rows_of(mask);
        return EP_OK;
    }
    view->call.mask = EP_GROUP_MASK_TOKENS;
    TRY(ep_tensor_check("x_active_mask", mask, 1, flag_types, out_error));
    TRY(check_shape("x_active_mask", mask, 0, view->call.tokens, "the batch has that many tokens",
                    out_error));
    batch->mask_tokens = mask->data;
    return EP_OK;
}

static ep_err read_expert_scales(const ep_tensor *scales, group_view *view, ep_error *out_error)
{
    if (scales->rank == 0) {
        return EP_OK;
    }
    TRY(check_slots("expert_scales", scales, f32_types, &view->call, out_error));
    view->call.has_expert_scales = 1;
    view->batch.scales = rows_of(scales);
    return EP_OK;
}

static ep_err read_performance(const ep_tensor *performance, group_view *view, ep_error *out_error)
{
    if (performance->rank == 0) {
        return EP_OK;
    }
    view->call.has_performance = 1;
    TRY(ep_tensor_check("performance_info", performance, 1, i64_types, out_error));
    return check_shape("performance_info", performance, 0, view->call.world_size,
                       "it has an entry per rank (ep_world_size)", out_error);
}

/* Checks frame_bytes_max. In the vendors' profiles frames must hold any choice of the tokens, as
 * the vendors' buffers do; in native at least one row. */
static ep_err check_frames(const ep_group *group, const ep_group_call *call, ep_error *out_error)
{
    int64_t max_bs = call->global_bs != 0 ? call->global_bs / call->world_size : call->tokens;
    uint64_t element = call->quant_mode == 2 || call->comm_quant_mode == 2
                           ? 1
                           : ep_dtype_bytes((ep_dtype)call->dtype);
    uint64_t bytes = call->profile == EP_GROUP_NATIVE
                         ? EP_GROUP_BODY_OFFSET + (uint64_t)call->hidden * element
                         : ep_group_worst_frame_bytes(call, max_bs);
    return bytes <= group->frame_bytes_max
               ? EP_OK
               : ep_error_set(
                     out_error, EP_ERR_RESOURCE_EXHAUSTED,
                     "frame_bytes_max of ep_group_config is %zu: %s may take %" PRIu64 " bytes%s",
                     group->frame_bytes_max,
                     call->profile == EP_GROUP_NATIVE ? "one row" : "the rows for one rank", bytes,
                     call->profile == EP_GROUP_NATIVE ? ""
                                                      : ", when all tokens choose its experts "
                                                        "(ep_group_buffer_sizes)");
}

/* Fills in and checks what both operators' batches have in common. */
static ep_err finish(const ep_group *group, group_view *view, const ep_tensor *ids,
                     ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    TRY(ep_group_profile_check(call, out_error));
    TRY(check_frames(group, call, out_error));
    ep_batch *batch = &view->batch;
    batch->tokens = (uint32_t)call->tokens;
    batch->top_k = (uint32_t)call->top_k;
    batch->hidden = (uint32_t)call->hidden;
    batch->ids = rows_of(ids);
    batch->special.first_gap = (uint32_t)call->gone_experts;
    batch->special.zero_count = (uint32_t)call->zero_experts;
    batch->special.copy_count = (uint32_t)call->copy_experts;
    batch->special.const_count = (uint32_t)call->const_experts;
    batch->special.const_rule = (ep_const_rule)call->const_rule;
    batch->weight_on = EP_WEIGHT_ON_OUTPUT;
    batch->form = EP_RESULT_COMBINED;
    batch->shared_source = call->shared_experts > 0 ? EP_SHARED_SERVICE : EP_SHARED_NONE;
    batch->allow_duplicates = call->allow_duplicates != 0;
    batch->wire_dtype = (ep_dtype)call->dtype;
    batch->out_dtype = (ep_dtype)call->dtype;
    view->shape.hidden = (uint32_t)call->hidden;
    view->shape.experts = (uint32_t)call->moe_experts;
    view->shape.shared_experts = (uint32_t)call->shared_experts;
    view->shape.top_k = (uint32_t)call->top_k;
    view->layout = ep_group_layout_of(call);
    view->local_experts = ep_group_local_experts(&view->layout, (uint32_t)call->local_rank);
    view->capacity = call->tp_world_size * ep_group_capacity(call, (uint32_t)call->local_rank,
                                                             view->formula, sizeof(view->formula));
    return EP_OK;
}

/* ---- dispatch ---- */

static ep_err read_smooth(const ep_moe_dispatch_args *args, group_view *view, ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    if (args->scales.rank == 0) {
        return EP_OK;
    }
    TRY(ep_tensor_check("scales", &args->scales, 2, f32_types, out_error));
    TRY(check_shape("scales", &args->scales, 0,
                    call->shared_rows + call->moe_experts + call->gone_experts,
                    "it has a row per shared and MoE expert", out_error));
    TRY(check_shape("scales", &args->scales, 1, call->hidden, "rows of x have that many elements",
                    out_error));
    view->batch.smooth = rows_of(&args->scales);
    view->batch.smooth_first = (uint32_t)call->shared_rows;
    return EP_OK;
}

/* Checks the tensor that says where rows came from, one of two; a dispatch writes it, a combine
 * reads it. */
static ep_err check_ways_back(const ep_tensor *assist, const ep_tensor *index, const char *formula,
                              const group_view *view, ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    if (index->rank != 0) {
        TRY(check_absent("assist_info_for_combine", assist, "expand_idx is given", out_error));
        TRY(ep_tensor_check("expand_idx", index, 1, i32_types, out_error));
        return check_room("expand_idx", index, call->tokens * call->top_k, sizeof(int32_t),
                          "4 * BS * K", out_error);
    }
    if (assist->rank == 0) {
        return BAD("assist_info_for_combine is missing: it is required without expand_idx");
    }
    int64_t rows = call->profile != EP_GROUP_NATIVE ? view->capacity / call->tp_world_size : 1;
    TRY(ep_tensor_check("assist_info_for_combine", assist, 1, i32_types, out_error));
    return check_room("assist_info_for_combine", assist,
                      EP_GROUP_ASSIST_INTS_PER_ROW * (rows > 1 ? rows : 1), sizeof(int32_t),
                      formula, out_error);
}

/* Checks expand_x and the tensors with an entry per row of it. */
static ep_err check_row_outputs(const ep_moe_dispatch_args *args, group_view *view,
                                ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    const ep_dtype x_types[] = {(ep_dtype)call->dtype, EP_DTYPE_NONE};
    size_t row_bytes =
        (size_t)call->hidden * (call->quant_mode == 2 ? 1 : ep_dtype_bytes((ep_dtype)call->dtype));
    int64_t tp = call->tp_world_size;
    bool vendor = call->profile != EP_GROUP_NATIVE;
    char formula[320];
    snprintf(formula, sizeof(formula), "max(tp_world_size,1) * A * H * element, %s", view->formula);
    TRY(ep_tensor_check("expand_x", &args->expand_x, 2, call->quant_mode == 2 ? i8_types : x_types,
                        out_error));
    TRY(check_shape("expand_x", &args->expand_x, 1, call->hidden,
                    "rows of x have that many elements", out_error));
    if (vendor) {
        TRY(check_room("expand_x", &args->expand_x, view->capacity, row_bytes, formula, out_error));
    }
    view->expand_rows = args->expand_x.shape[0];
    TRY(check_unused("dynamic_scales", &args->dynamic_scales, f32_types, out_error));
    if (call->quant_mode == 2) {
        TRY(require("dynamic_scales", &args->dynamic_scales, "quant_mode", 2, out_error));
        TRY(check_room("dynamic_scales", &args->dynamic_scales,
                       vendor ? view->capacity : view->expand_rows, sizeof(float),
                       "4 bytes per row of expand_x", out_error));
    }
    if (vendor && call->comm == EP_GROUP_HIERARCHY && args->expand_scales.rank == 0) {
        return BAD("expand_scales is missing: it is required with comm_alg hierarchy");
    }
    if (args->expand_scales.rank != 0) {
        TRY(ep_tensor_check("expand_scales", &args->expand_scales, 1, f32_types, out_error));
        TRY(check_room("expand_scales", &args->expand_scales,
                       vendor ? view->capacity / tp : view->expand_rows / tp, sizeof(float),
                       "4 bytes per row received", out_error));
        if (call->has_expert_scales == 0) {
            return BAD("expert_scales is missing: it is required with expand_scales");
        }
    }
    snprintf(formula, sizeof(formula), "128 * max(A, 1) ints, %s", view->formula);
    return check_ways_back(&args->assist_info_for_combine, &args->expand_idx, formula, view,
                           out_error);
}

/*
 * Checks ep_recv_counts. If the vendor's operator sums inside a server (a2 with expert_scales in
 * the dispatch, hierarchy) it keeps two numbers per slot there for each server of 8 ranks, and its
 * programs give that room.
 */
static ep_err check_counts_room(const char *name, const ep_tensor *counts, const group_view *view,
                                bool has_weights, ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    int64_t wanted = call->ranks * call->tp_world_size * view->local_experts;
    if (call->profile == EP_GROUP_NATIVE || !has_weights ||
        (call->profile == EP_GROUP_A3 && call->comm != EP_GROUP_HIERARCHY)) {
        return check_room(name, counts, wanted, sizeof(int32_t),
                          "4 * ep_world_size * max(tp_world_size,1) * local experts", out_error);
    }
    int64_t batch = call->global_bs != 0 ? call->global_bs : call->tokens * call->ranks;
    char formula[160];
    snprintf(formula, sizeof(formula),
             "4 * (moe_expert_num + 2 * global_bs * K * server_num) = 4 * (%" PRId64
             " + 2 * %" PRId64 " * %" PRId64 " * %" PRId64 ")",
             wanted, batch, call->top_k, call->ranks / EP_GROUP_RANKS_PER_SERVER);
    wanted += 2 * batch * call->top_k * (call->ranks / EP_GROUP_RANKS_PER_SERVER);
    return check_room(name, counts, wanted, sizeof(int32_t), formula, out_error);
}

static ep_err check_count_outputs(const ep_moe_dispatch_args *args, const group_view *view,
                                  ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    TRY(ep_tensor_check("expert_token_nums", &args->expert_token_nums, 1, i64_types, out_error));
    TRY(check_room("expert_token_nums", &args->expert_token_nums, view->local_experts,
                   sizeof(int64_t), "8 bytes per local expert", out_error));
    TRY(ep_tensor_check("ep_recv_counts", &args->ep_recv_counts, 1, i32_types, out_error));
    TRY(check_counts_room("ep_recv_counts", &args->ep_recv_counts, view,
                          call->has_expert_scales != 0, out_error));
    TRY(check_unused("tp_recv_counts", &args->tp_recv_counts, i32_types, out_error));
    if (call->tp_world_size > 1) {
        TRY(require("tp_recv_counts", &args->tp_recv_counts, "tp_world_size", 2, out_error));
        TRY(check_room("tp_recv_counts", &args->tp_recv_counts, call->tp_world_size,
                       sizeof(int32_t), "4 * tp_world_size", out_error));
    }
    return EP_OK;
}

ep_err ep_group_dispatch_view(ep_group *group, const ep_moe_dispatch_args *args,
                              group_view *out_view, ep_error *out_error)
{
    group_view *view = out_view;
    memset(view, 0, sizeof(*view));
    if (group == NULL) {
        return BAD("group is missing");
    }
    view->call.operator= EP_GROUP_DISPATCH;
    TRY(read_params(group, args->params, view, out_error));
    TRY(read_batch(&args->x, "x", &args->expert_ids, view, out_error));
    TRY(check_shape("x", &args->x, 0, view->call.tokens, "expert_ids has that many tokens",
                    out_error));
    view->call.quant_mode = args->quant_mode;
    view->call.token_nums_type = args->expert_token_nums_type;
    view->call.has_scales = args->scales.rank != 0;
    view->call.by_host = view->call.comm == EP_GROUP_HIERARCHY;
    view->call.by_index = args->expand_idx.rank != 0;
    view->batch.x = rows_of(&args->x);
    TRY(read_mask(&args->x_active_mask, view, out_error));
    TRY(read_expert_scales(&args->expert_scales, view, out_error));
    TRY(read_performance(&args->performance_info, view, out_error));
    TRY(read_policy(args->nan_policy, args->x_abs_max, view, out_error));
    TRY(finish(group, view, &args->expert_ids, out_error));
    view->batch.dispatch_quant = args->quant_mode == 2 ? EP_DISPATCH_INT8 : EP_DISPATCH_PLAIN;
    TRY(read_smooth(args, view, out_error));
    TRY(check_row_outputs(args, view, out_error));
    return check_count_outputs(args, view, out_error);
}

/* ---- combine ---- */

static ep_err read_const_rows(const char *name, const ep_tensor *tensor, const group_view *view,
                              ep_rows *out_rows, ep_error *out_error)
{
    const ep_dtype types[] = {(ep_dtype)view->call.dtype, EP_DTYPE_NONE};
    TRY(require(name, tensor, "const_expert_num", view->call.const_experts, out_error));
    TRY(ep_tensor_check(name, tensor, 2, types, out_error));
    TRY(check_shape(name, tensor, 0, view->call.const_experts, "const_expert_num is that",
                    out_error));
    TRY(check_shape(name, tensor, 1, view->call.hidden, "rows have that many elements", out_error));
    *out_rows = rows_of(tensor);
    return EP_OK;
}

static const char no_constants[] = "const_expert_num is 0";

static ep_err read_special(const ep_moe_combine_args *args, group_view *view, ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    if (call->copy_experts > 0 || call->const_experts > 0) {
        bool copies = call->copy_experts > 0;
        TRY(require("ori_x", &args->ori_x, copies ? "copy_expert_num" : "const_expert_num",
                    copies ? call->copy_experts : call->const_experts, out_error));
    }
    if (args->ori_x.rank != 0) {
        TRY(check_rows("ori_x", &args->ori_x, call, &view->batch.x, out_error));
    }
    if (call->const_experts == 0) {
        TRY(check_absent("const_expert_alpha_1", &args->const_expert_alpha_1, no_constants,
                         out_error));
        TRY(check_absent("const_expert_alpha_2", &args->const_expert_alpha_2, no_constants,
                         out_error));
        TRY(check_absent("const_expert_v", &args->const_expert_v, no_constants, out_error));
    } else {
        ep_special_experts *special = &view->batch.special;
        TRY(read_const_rows("const_expert_alpha_1", &args->const_expert_alpha_1, view,
                            &special->const_alpha1, out_error));
        TRY(read_const_rows("const_expert_alpha_2", &args->const_expert_alpha_2, view,
                            &special->const_alpha2, out_error));
        TRY(read_const_rows("const_expert_v", &args->const_expert_v, view, &special->const_v,
                            out_error));
    }
    return EP_OK;
}

static ep_err read_norm(const ep_moe_add_rms_norm *norm, group_view *view, ep_error *out_error)
{
    const ep_dtype types[] = {(ep_dtype)view->call.dtype, EP_DTYPE_NONE};
    TRY(check_rows("residual_x", &norm->residual_x, &view->call, &view->residual, out_error));
    TRY(ep_tensor_check("gamma", &norm->gamma, 1, types, out_error));
    TRY(check_shape("gamma", &norm->gamma, 0, view->call.hidden, "rows have that many elements",
                    out_error));
    TRY(check_rows("y", &norm->y, &view->call, &view->y, out_error));
    if (norm->x.rank != 0) {
        TRY(check_rows("x (the sum)", &norm->x, &view->call, &view->x_sum, out_error));
    }
    if (norm->rstd.rank != 0) {
        TRY(ep_tensor_check("rstd", &norm->rstd, norm->rstd.rank == 3 ? 3 : 1, f32_types,
                            out_error));
        TRY(check_shape("rstd", &norm->rstd, 0, view->call.tokens, "the batch has that many tokens",
                        out_error));
    }
    return EP_OK;
}

static ep_err check_counts_in(const ep_moe_combine_args *args, const group_view *view,
                              ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    TRY(ep_tensor_check("ep_send_counts", &args->ep_send_counts, 1, i32_types, out_error));
    TRY(check_counts_room("ep_send_counts", &args->ep_send_counts, view,
                          args->expand_scales.rank != 0, out_error));
    TRY(check_ways_back(&args->assist_info_for_combine, &args->expand_idx,
                        "128 * max(A, 1) ints, as the dispatch wrote it", view, out_error));
    if (call->profile != EP_GROUP_NATIVE) {
        TRY(check_room("expand_x", &args->expand_x, view->capacity,
                       (size_t)call->hidden * ep_dtype_bytes((ep_dtype)call->dtype), view->formula,
                       out_error));
    }
    TRY(check_unused("tp_send_counts", &args->tp_send_counts, i32_types, out_error));
    if (call->tp_world_size > 1) {
        TRY(require("tp_send_counts", &args->tp_send_counts, "tp_world_size", 2, out_error));
        TRY(check_room("tp_send_counts", &args->tp_send_counts, call->tp_world_size,
                       sizeof(int32_t), "4 * tp_world_size", out_error));
    }
    return EP_OK;
}

/* Checks expand_scales, which are not read, because the token's own rank makes the sum. */
static ep_err check_expand_scales(const ep_tensor *scales, const group_view *view,
                                  ep_error *out_error)
{
    const ep_group_call *call = &view->call;
    bool hierarchy = call->comm == EP_GROUP_HIERARCHY;
    if (call->profile == EP_GROUP_A3 && !hierarchy) {
        return check_absent("expand_scales", scales,
                            "profile a3 has them with comm_alg hierarchy only", out_error);
    }
    if (scales->rank == 0) {
        return call->profile == EP_GROUP_NATIVE || !hierarchy
                   ? EP_OK
                   : BAD("expand_scales is missing: it is required with comm_alg hierarchy");
    }
    TRY(ep_tensor_check("expand_scales", scales, 1, f32_types, out_error));
    return call->profile == EP_GROUP_NATIVE
               ? EP_OK
               : check_room("expand_scales", scales, view->capacity, sizeof(float),
                            "4 bytes per row received", out_error);
}

static ep_err read_combine_tensors(const ep_moe_combine_args *args, const ep_moe_add_rms_norm *norm,
                                   group_view *view, ep_error *out_error)
{
    TRY(read_special(args, view, out_error));
    TRY(check_expand_scales(&args->expand_scales, view, out_error));
    if (args->shared_expert_x.rank != 0) {
        TRY(check_rows("shared_expert_x", &args->shared_expert_x, &view->call, &view->batch.shared,
                       out_error));
        view->batch.shared_source = EP_SHARED_CALLER;
    }
    TRY(check_counts_in(args, view, out_error));
    if (norm != NULL) {
        TRY(check_absent("x_out", &args->x_out, "the sum is `x` of ep_moe_add_rms_norm",
                         out_error));
        return read_norm(norm, view, out_error);
    }
    ep_rows unused;
    return check_rows("x_out", &args->x_out, &view->call, &unused, out_error);
}

ep_err ep_group_combine_view(ep_group *group, const ep_moe_combine_args *args,
                             const ep_moe_add_rms_norm *norm, group_view *out_view,
                             ep_error *out_error)
{
    group_view *view = out_view;
    memset(view, 0, sizeof(*view));
    if (group == NULL) {
        return BAD("group is missing");
    }
    view->call.operator= EP_GROUP_COMBINE;
    if (norm != NULL) {
        if (!(norm->eps >= 0.0f && norm->eps < 1e30f)) {
            return BAD("eps is %g: allowed 0 or more", (double)norm->eps);
        }
        view->call.operator= EP_GROUP_COMBINE_NORM;
        view->call.norm_eps_bits = ep_f32_bits(norm->eps);
    }
    TRY(read_params(group, args->params, view, out_error));
    TRY(read_batch(&args->expand_x, "expand_x", &args->expert_ids, view, out_error));
    view->expand_rows = args->expand_x.shape[0];
    view->call.comm_quant_mode = args->comm_quant_mode;
    view->call.out_dtype = args->out_dtype;
    view->call.group_list_type = args->group_list_type;
    view->call.has_shared_x = args->shared_expert_x.rank != 0;
    view->call.by_index = args->expand_idx.rank != 0;
    TRY(check_absent("activation_scale", &args->activation_scale, "the vendor keeps it for later",
                     out_error));
    TRY(check_absent("weight_scale", &args->weight_scale, "the vendor keeps it for later",
                     out_error));
    TRY(check_absent("group_list", &args->group_list, "the vendor keeps it for later", out_error));
    TRY(read_mask(&args->x_active_mask, view, out_error));
    TRY(check_slots("expert_scales", &args->expert_scales, f32_types, &view->call, out_error));
    TRY(read_expert_scales(&args->expert_scales, view, out_error));
    TRY(read_performance(&args->performance_info, view, out_error));
    TRY(read_policy(args->nan_policy, 0.0f, view, out_error));
    view->batch.rows_policy = view->batch.nan_policy;
    TRY(finish(group, view, &args->expert_ids, out_error));
    return read_combine_tensors(args, norm, view, out_error);
}
