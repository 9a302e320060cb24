/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One function per family of rules; each rule names parameter, value and allowed range.
 *
 * Source of a2 and a3: the vendor's documents of torch_npu.npu_moe_distribute_dispatch_v2 and
 * combine_v2 (op-plugin, August 2026); where they are silent, those of aclnnMoeDistributeDispatchV4
 * and CombineV4, which these call. Rules that a later release dropped are not applied. With
 * expand_idx: npu_moe_distribute_dispatch and combine, whose ranges are narrower.
 */
#include "group/group_profile.h"

#include <inttypes.h>

#include "base/check.h"
#include "group/group_layout.h"

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err range(const char *name, int64_t value, int64_t min, int64_t max, const char *when,
                    ep_error *out_error)
{
    return value >= min && value <= max
               ? EP_OK
               : BAD("%s is %" PRId64 ": allowed %" PRId64 "..%" PRId64 "%s", name, value, min, max,
                     when);
}

static ep_err only_zero(const char *name, int64_t value, const char *why, ep_error *out_error)
{
    return value == 0 ? EP_OK : BAD("%s is %" PRId64 ": allowed 0 (%s)", name, value, why);
}

static ep_err absent(const char *name, int64_t given, const char *why, ep_error *out_error)
{
    return given == 0 ? EP_OK : BAD("%s is given: allowed only absent (%s)", name, why);
}

static ep_err present(const char *name, int64_t given, const char *why, ep_error *out_error)
{
    return given != 0 ? EP_OK : BAD("%s is missing: it is required with %s", name, why);
}

static ep_err one_of(const char *name, int64_t value, int64_t a, int64_t b, ep_error *out_error)
{
    return value == a || value == b
               ? EP_OK
               : BAD("%s is %" PRId64 ": allowed %" PRId64 " or %" PRId64, name, value, a, b);
}

#define TRY(check)                                                                                 \
    do {                                                                                           \
        ep_err try_err = (check);                                                                  \
        if (try_err != EP_OK) {                                                                    \
            return try_err;                                                                        \
        }                                                                                          \
    } while (0)

/* ---- always ---- */

/* The largest BS: slot numbers fit 31 bits. */
static int64_t most_tokens(const ep_group_call *call)
{
    return INT32_MAX / (call->top_k + call->shared_experts + 1);
}

static ep_err check_numbers(const ep_group_call *call, ep_error *out_error)
{
    TRY(range("profile", call->profile, EP_GROUP_NATIVE, EP_GROUP_A3, " (0 native, 1 a2, 2 a3)",
              out_error));
    TRY(one_of("const_rule", call->const_rule, EP_GROUP_CONST_KERNEL, EP_GROUP_CONST_LINEAR,
               out_error));
    TRY(one_of("quant_mode", call->quant_mode, 0, 2, out_error));
    TRY(one_of("comm_quant_mode", call->comm_quant_mode, 0, 2, out_error));
    TRY(one_of("expert_token_nums_type", call->token_nums_type, 0, 1, out_error));
    TRY(only_zero("expert_shard_type", call->shard_type, "shared-expert ranks come first",
                  out_error));
    TRY(only_zero("out_dtype", call->out_dtype, "x_out has expand_x's type", out_error));
    TRY(only_zero("group_list_type", call->group_list_type, "the vendor defines no other",
                  out_error));
    TRY(range("H", call->hidden, 1, EP_GROUP_HIDDEN_MAX, "", out_error));
    TRY(range("K", call->top_k, 1, EP_GROUP_TOP_K_MAX, "", out_error));
    TRY(range("BS", call->tokens, 0, most_tokens(call), "", out_error));
    TRY(range("zero_expert_num", call->zero_experts, 0, INT32_MAX, "", out_error));
    TRY(range("copy_expert_num", call->copy_experts, 0, INT32_MAX, "", out_error));
    TRY(range("const_expert_num", call->const_experts, 0, INT32_MAX, "", out_error));
    int64_t all = call->moe_experts + call->gone_experts + call->zero_experts + call->copy_experts +
                  call->const_experts;
    return all < INT32_MAX ? EP_OK
                           : BAD("moe_expert_num + zero_expert_num + copy_expert_num + "
                                 "const_expert_num is %" PRId64 ": allowed below 2147483647",
                                 all);
}

static ep_err check_layout(const ep_group_call *call, ep_error *out_error)
{
    TRY(range("moe_expert_num", call->moe_experts, 1, INT32_MAX, "", out_error));
    TRY(range("shared_expert_num", call->shared_rows, 0, EP_GROUP_WORLD_MAX, "", out_error));
    TRY(range("shared_expert_rank_num", call->shared_ranks, 0, call->ranks - 1,
              " (ep_world_size - 1)", out_error));
    if (call->shared_ranks > 0 &&
        (call->shared_rows < 1 || call->shared_rows > call->shared_ranks)) {
        return BAD("shared_expert_num is %" PRId64 ": allowed 1..%" PRId64
                   " (shared_expert_rank_num)",
                   call->shared_rows, call->shared_ranks);
    }
    return EP_OK;
}

static ep_err check_batch(const ep_group_call *call, ep_error *out_error)
{
    TRY(range("global_bs", call->global_bs, 0, most_tokens(call) * call->world_size,
              " (ep_world_size * the largest BS)", out_error));
    if (call->global_bs != 0 && call->global_bs < call->tokens * call->world_size) {
        return BAD("global_bs is %" PRId64 ": allowed 0, or at least BS * ep_world_size = %" PRId64
                   " * %" PRId64,
                   call->global_bs, call->tokens, call->world_size);
    }
    if (call->global_bs % call->world_size != 0) {
        return BAD("global_bs is %" PRId64 ": allowed 0 or a multiple of ep_world_size %" PRId64
                   " (ranks * largest BS)",
                   call->global_bs, call->world_size);
    }
    if (call->quant_mode == 0) {
        TRY(absent("scales", call->has_scales, "quant_mode is 0", out_error));
    }
    if (call->comm == EP_GROUP_HIERARCHY) {
        TRY(absent("scales", call->has_scales,
                   "comm_alg is hierarchy, where a token has one row for all experts of a host",
                   out_error));
    }
    if (call->shared_ranks > 0) {
        TRY(absent("shared_expert_x", call->has_shared_x, "shared_expert_rank_num is not 0",
                   out_error));
    }
    return EP_OK;
}

static ep_err check_tp(const ep_group_call *call, ep_error *out_error)
{
    TRY(range("tp_world_size", call->tp_world_size, 1, 2, " (or 0)", out_error));
    TRY(range("tp_rank_id", call->tp_rank, 0, call->tp_world_size - 1, "", out_error));
    if (call->tp_world_size == 2) {
        if (ep_group_most_local_experts(call) > 1) {
            return BAD("tp_world_size is 2 with %" PRId64
                       " local experts: allowed 1 local expert (moe_expert_num <= ep_world_size - "
                       "shared_expert_rank_num)",
                       ep_group_most_local_experts(call));
        }
        TRY(only_zero("comm_quant_mode", call->comm_quant_mode, "tp_world_size is 2", out_error));
    }
    return EP_OK;
}

/* ---- a2 and a3 ---- */

static ep_err check_vendor(const ep_group_call *call, ep_error *out_error)
{
    int64_t all = call->moe_experts + call->zero_experts + call->copy_experts + call->const_experts;
    TRY(range("moe_expert_num", call->moe_experts, 1, call->comm == EP_GROUP_HIERARCHY ? 512 : 1024,
              call->comm == EP_GROUP_HIERARCHY ? " (comm_alg hierarchy)" : "", out_error));
    if (call->moe_experts % (call->ranks - call->shared_ranks) != 0) {
        return BAD("moe_expert_num is %" PRId64
                   ": allowed multiples of ep_world_size - shared_expert_rank_num = %" PRId64,
                   call->moe_experts, call->ranks - call->shared_ranks);
    }
    TRY(range("K", call->top_k, 1, all < 16 ? all : 16, " (16, and at most all experts)",
              out_error));
    TRY(only_zero("allow_duplicates", call->allow_duplicates, "a token's experts differ",
                  out_error));
    if (call->dtype != EP_DTYPE_BF16 && call->dtype != EP_DTYPE_F16) {
        return BAD("x has type %s: allowed bf16, f16", ep_dtype_name((ep_dtype)call->dtype));
    }
    if (call->ids_dtype != EP_DTYPE_I32) {
        return BAD("expert_ids have type %s: allowed i32",
                   ep_dtype_name((ep_dtype)call->ids_dtype));
    }
    return absent("elastic_info", call->has_elastic, "the vendor keeps it for later", out_error);
}

/* Rules of both profiles for hierarchy. */
static ep_err check_vendor_hierarchy(const ep_group_call *call, ep_error *out_error)
{
    TRY(only_zero("zero_expert_num", call->zero_experts, "comm_alg is hierarchy", out_error));
    TRY(only_zero("copy_expert_num", call->copy_experts, "comm_alg is hierarchy", out_error));
    TRY(only_zero("const_expert_num", call->const_experts, "comm_alg is hierarchy", out_error));
    return present("expert_scales", call->has_expert_scales, "comm_alg hierarchy", out_error);
}

static ep_err world_among(const ep_group_call *call, const int64_t *sizes, size_t count,
                          const char *says, ep_error *out_error)
{
    for (size_t i = 0; i < count; i++) {
        if (call->world_size == sizes[i]) {
            return EP_OK;
        }
    }
    return BAD("ep_world_size is %" PRId64 ": allowed %s", call->world_size, says);
}

/* ---- with expand_idx: the narrower ranges of the operators without _v2 ---- */

static ep_err check_index_world(const ep_group_call *call, ep_error *out_error)
{
    static const int64_t a2[] = {16, 32, 64};
    static const int64_t a3[] = {8, 16, 32, 64, 128, 144, 256, 288};
    return call->profile == EP_GROUP_A2
               ? world_among(call, a2, EP_ARRAY_COUNT(a2),
                             "16, 32, 64 (profile a2, with expand_idx)", out_error)
               : world_among(call, a3, EP_ARRAY_COUNT(a3),
                             "8, 16, 32, 64, 128, 144, 256, 288 (profile a3, with expand_idx)",
                             out_error);
}

static ep_err check_index_a3(const ep_group_call *call, ep_error *out_error)
{
    if (call->comm_given != EP_GROUP_NAMED_NOTHING) {
        return BAD("comm_alg is %s: allowed \"\" (profile a3 with expand_idx)",
                   ep_group_comm_spelled(call->comm_given));
    }
    TRY(range("H", call->hidden, 7168, 7168, " (profile a3 with expand_idx)", out_error));
    TRY(range("K", call->top_k, 1, 8, " (profile a3 with expand_idx)", out_error));
    TRY(range("shared_expert_num", call->shared_rows, 0, 1, " (with expand_idx)", out_error));
    return call->shared_ranks == 0 || call->world_size % call->shared_ranks == 0
               ? EP_OK
               : BAD("shared_expert_rank_num is %" PRId64
                     ": allowed divisors of ep_world_size %" PRId64 " (with expand_idx)",
                     call->shared_ranks, call->world_size);
}

static ep_err check_index_a2(const ep_group_call *call, ep_error *out_error)
{
    if (call->comm != EP_GROUP_HIERARCHY) {
        return range("experts per rank", ep_group_most_local_experts(call), 1, 24,
                     " (moe_expert_num / ep_world_size; profile a2 with expand_idx)", out_error);
    }
    TRY(range("H", call->hidden, 1, 7168, " (profile a2 with expand_idx, comm_alg hierarchy)",
              out_error));
    return range("BS", call->tokens, 1, 256, " (profile a2 with expand_idx, comm_alg hierarchy)",
                 out_error);
}

static ep_err check_index(const ep_group_call *call, ep_error *out_error)
{
    static const char why[] = "expand_idx is given";
    if (call->operator== EP_GROUP_COMBINE_NORM) {
        return absent("expand_idx", 1, "the vendor has no ep_moe_combine_add_rms_norm with it",
                      out_error);
    }
    TRY(check_index_world(call, out_error));
    TRY(range("moe_expert_num", call->moe_experts, 1, 512, " (with expand_idx)", out_error));
    TRY(only_zero("zero_expert_num", call->zero_experts, why, out_error));
    TRY(only_zero("copy_expert_num", call->copy_experts, why, out_error));
    TRY(only_zero("const_expert_num", call->const_experts, why, out_error));
    TRY(absent("x_active_mask", call->mask, why, out_error));
    TRY(absent("performance_info", call->has_performance, why, out_error));
    TRY(absent("shared_expert_x", call->has_shared_x, why, out_error));
    return call->profile == EP_GROUP_A2 ? check_index_a2(call, out_error)
                                        : check_index_a3(call, out_error);
}

/* ---- a2 ---- */

static ep_err check_a2_world(const ep_group_call *call, bool hierarchy, ep_error *out_error)
{
    static const int64_t meshed[] = {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 192, 256, 384};
    static const int64_t by_server[] = {16, 32, 64};
    return hierarchy ? world_among(call, by_server, EP_ARRAY_COUNT(by_server),
                                   "16, 32, 64 (2, 4, 8 servers; comm_alg hierarchy) (profile a2)",
                                   out_error)
                     : world_among(call, meshed, EP_ARRAY_COUNT(meshed),
                                   "2..8, 16, 32, 64, 128, 192, 256, 384 (profile a2)", out_error);
}

static ep_err check_a2(const ep_group_call *call, ep_error *out_error)
{
    bool hierarchy = call->comm == EP_GROUP_HIERARCHY;
    if (call->comm_given != EP_GROUP_NAMED_NOTHING && call->comm_given != EP_GROUP_NAMED_FULLMESH &&
        !hierarchy) {
        return BAD("comm_alg is %s: allowed \"\", fullmesh, hierarchy (profile a2)",
                   ep_group_comm_spelled(call->comm_given));
    }
    TRY(check_a2_world(call, hierarchy, out_error));
    TRY(only_zero("shared_expert_rank_num", call->shared_ranks, "profile a2 has no shared experts",
                  out_error));
    if (call->shared_rows != 0) {
        return BAD(
            "shared_expert_num is %" PRId64
            ": allowed 0, or 1 with shared_expert_rank_num 0 (profile a2 has no shared experts)",
            call->shared_rows);
    }
    int64_t hidden_max = hierarchy ? 10240 : 7168;
    if (call->hidden > hidden_max || call->hidden % 32 != 0) {
        return BAD("H is %" PRId64 ": allowed multiples of 32 up to %" PRId64
                   " (profile a2, comm_alg %s)",
                   call->hidden, hidden_max, hierarchy ? "hierarchy" : "fullmesh");
    }
    TRY(range("BS", call->tokens, 1, hierarchy ? 512 : 256,
              hierarchy ? " (profile a2, comm_alg hierarchy)" : " (profile a2)", out_error));
    TRY(range("tp_world_size", call->tp_world_size, 0, 1, " (profile a2 has no TP)", out_error));
    TRY(only_zero("const_expert_num", call->const_experts, "profile a2 has no constant experts",
                  out_error));
    TRY(absent("shared_expert_x", call->has_shared_x, "profile a2 has no shared experts",
               out_error));
    if (hierarchy) {
        TRY(absent("x_active_mask", call->mask, "comm_alg is hierarchy", out_error));
        return check_vendor_hierarchy(call, out_error);
    }
    return only_zero("comm_quant_mode", call->comm_quant_mode,
                     "profile a2 has 2 with comm_alg hierarchy only", out_error);
}

/* ---- a3 ---- */

static ep_err check_a3_hierarchy(const ep_group_call *call, ep_error *out_error)
{
    if (call->world_size < 16 || call->world_size > 256 || call->world_size % 16 != 0) {
        return BAD("ep_world_size is %" PRId64
                   ": allowed multiples of 16 in 16..256 (profile a3, comm_alg hierarchy)",
                   call->world_size);
    }
    if (call->hidden < 1024 || call->hidden > 7168 || call->hidden % 32 != 0) {
        return BAD("H is %" PRId64
                   ": allowed multiples of 32 in 1024..7168 (profile a3, comm_alg hierarchy)",
                   call->hidden);
    }
    TRY(range("tp_world_size", call->tp_world_size, 0, 1, " (comm_alg hierarchy has no TP)",
              out_error));
    TRY(only_zero("shared_expert_rank_num", call->shared_ranks, "comm_alg is hierarchy",
                  out_error));
    TRY(range("experts per rank", ep_group_most_local_experts(call), 1, 24,
              " (moe_expert_num / ep_world_size; profile a3, comm_alg hierarchy)", out_error));
    if (call->mask == EP_GROUP_MASK_SLOTS) {
        return BAD("x_active_mask is [BS, K]: allowed [BS], or absent (comm_alg is hierarchy)");
    }
    TRY(absent("performance_info", call->has_performance, "comm_alg is hierarchy", out_error));
    return check_vendor_hierarchy(call, out_error);
}

static ep_err check_a3(const ep_group_call *call, ep_error *out_error)
{
    bool v2 = call->comm == EP_GROUP_FULLMESH_V2;
    bool hierarchy = call->comm == EP_GROUP_HIERARCHY;
    if (call->comm_given == EP_GROUP_NAMED_FULLMESH) {
        return BAD("comm_alg is %s: allowed \"\", fullmesh_v1, fullmesh_v2, hierarchy (profile a3)",
                   ep_group_comm_spelled(call->comm_given));
    }
    TRY(range("ep_world_size", call->world_size, 2, 768, " (profile a3)", out_error));
    TRY(range("H", call->hidden, 1024, 8192, " (profile a3)", out_error));
    TRY(range("BS", call->tokens, 1, v2 || hierarchy ? 256 : 512,
              v2          ? " (profile a3, fullmesh_v2)"
              : hierarchy ? " (profile a3, comm_alg hierarchy)"
                          : " (profile a3)",
              out_error));
    if (ep_group_most_local_experts(call) * call->ranks > 2048) {
        return BAD("experts per rank * ep_world_size is %" PRId64 " * %" PRId64
                   ": allowed up to 2048 (profile a3)",
                   ep_group_most_local_experts(call), call->ranks);
    }
    TRY(range("shared_expert_num", call->shared_rows, 0, call->shared_ranks > 0 ? 4 : 0,
              call->shared_ranks > 0 ? " (profile a3)"
                                     : ", or 1 (profile a3, shared_expert_rank_num is 0)",
              out_error));
    if (call->shared_rows > 0 && call->shared_ranks % call->shared_rows != 0) {
        return BAD("shared_expert_rank_num is %" PRId64
                   ": allowed multiples of shared_expert_num %" PRId64 " (profile a3)",
                   call->shared_ranks, call->shared_rows);
    }
    if (hierarchy) {
        return check_a3_hierarchy(call, out_error);
    }
    if (call->operator== EP_GROUP_DISPATCH) {
        TRY(absent("expert_scales", call->has_expert_scales,
                   "profile a3 sends them with comm_alg hierarchy only", out_error));
    }
    if (!v2) {
        return EP_OK;
    }
    TRY(range("tp_world_size", call->tp_world_size, 0, 1, " (comm_alg fullmesh_v2 has no TP)",
              out_error));
    return range("K", call->top_k, 1, 12, " (comm_alg fullmesh_v2)", out_error);
}

ep_err ep_group_profile_check(const ep_group_call *call, ep_error *out_error)
{
    TRY(check_layout(call, out_error));
    TRY(check_numbers(call, out_error));
    TRY(check_batch(call, out_error));
    TRY(check_tp(call, out_error));
    if (call->profile == EP_GROUP_NATIVE) {
        return EP_OK;
    }
    if (call->by_index != 0) { /* checked first, because its ranges are within the others */
        TRY(check_index(call, out_error));
    }
    TRY(check_vendor(call, out_error));
    return call->profile == EP_GROUP_A2 ? check_a2(call, out_error) : check_a3(call, out_error);
}
