/* SPDX-License-Identifier: Apache-2.0 */
/* The vendor's range table, one test per row of it: just inside passes, just outside names
 * parameter, value and allowed range. */
#include <criterion/criterion.h>
#include <string.h>

#include "group/group_layout.h"
#include "group/group_profile.h"

static ep_group_call a2(void)
{
    return (ep_group_call){.operator= EP_GROUP_DISPATCH,
                           .profile = EP_GROUP_A2,
                           .world_size = 16,
                           .ranks = 16,
                           .moe_experts = 64,
                           .tp_world_size = 1,
                           .comm = EP_GROUP_FULLMESH,
                           .hidden = 7168,
                           .top_k = 8,
                           .dtype = EP_DTYPE_BF16,
                           .ids_dtype = EP_DTYPE_I32,
                           .tokens = 32,
                           .token_nums_type = 1};
}

static ep_group_call a2_hierarchy(void)
{
    ep_group_call call = a2();
    call.comm = EP_GROUP_HIERARCHY;
    call.comm_given = EP_GROUP_NAMED_HIERARCHY;
    return call;
}

static ep_group_call a3(void)
{
    ep_group_call call = a2();
    call.profile = EP_GROUP_A3;
    return call;
}

static ep_group_call a3_v2(void)
{
    ep_group_call call = a3();
    call.comm = EP_GROUP_FULLMESH_V2;
    call.comm_given = EP_GROUP_NAMED_FULLMESH_V2;
    return call;
}

static void set_world(ep_group_call *call, int64_t world)
{
    call->world_size = world;
    call->ranks = world;
}

static void passes(const ep_group_call *call)
{
    ep_error error;
    ep_error_clear(&error);
    cr_expect_eq(ep_group_profile_check(call, &error), EP_OK, "%s", error.text);
}

/* The text has to begin with the parameter and to hold the value and the range. */
static void refused(const ep_group_call *call, const char *parameter, const char *value,
                    const char *allowed)
{
    ep_error error;
    ep_error_clear(&error);
    cr_expect_eq(ep_group_profile_check(call, &error), EP_ERR_INVALID_ARGUMENT,
                 "%s should be refused", parameter);
    cr_expect(strncmp(error.text, parameter, strlen(parameter)) == 0, "%s: %s", parameter,
              error.text);
    cr_expect(strstr(error.text, value) != NULL, "%s: %s", value, error.text);
    cr_expect(strstr(error.text, allowed) != NULL, "%s: %s", allowed, error.text);
}

#define WITH(call, field, number)                                                                  \
    do {                                                                                           \
        (call).field = (number);                                                                   \
    } while (0)

/* The last value inside, the first one outside. */
#define EDGE(call, field, inside, outside, parameter, value, allowed)                              \
    do {                                                                                           \
        (call).field = (inside);                                                                   \
        passes(&(call));                                                                           \
        (call).field = (outside);                                                                  \
        refused(&(call), parameter, value, allowed);                                               \
    } while (0)

/* ---- a2 ---- */

Test(group_profile, a2_world_sizes)
{
    ep_group_call call = a2();
    call.moe_experts = 256;
    int64_t good[] = {16, 32, 64, 128, 256};
    for (size_t i = 0; i < 5; i++) {
        set_world(&call, good[i]);
        passes(&call);
    }
    set_world(&call, 8);
    refused(&call, "ep_world_size", "is 8:", "16, 32, 64, 128, 256");
}

Test(group_profile, a2_world_sizes_of_hierarchy)
{
    ep_group_call call = a2_hierarchy();
    call.moe_experts = 128;
    int64_t good[] = {16, 32, 64};
    for (size_t i = 0; i < 3; i++) {
        set_world(&call, good[i]);
        passes(&call);
    }
    set_world(&call, 128);
    refused(&call, "ep_world_size", "is 128:", "16, 32, 64 (2, 4, 8 servers");
}

Test(group_profile, a2_has_no_elastic_info)
{
    ep_group_call call = a2();
    passes(&call);
    WITH(call, has_elastic, 1);
    refused(&call, "elastic_info", "is given", "allowed only absent (profile a2)");
}

Test(group_profile, a2_experts_per_rank)
{
    ep_group_call call = a2();
    EDGE(call, moe_experts, 24 * 16, 25 * 16, "experts per rank", "is 25:", "1..24");
}

Test(group_profile, a2_hidden_fullmesh)
{
    ep_group_call call = a2();
    EDGE(call, hidden, 32, 7168 + 32, "H", "7200", "multiples of 32 up to 7168");
    WITH(call, hidden, 7000);
    refused(&call, "H", "7000", "multiples of 32 up to 7168");
}

Test(group_profile, a2_hidden_hierarchy)
{
    ep_group_call call = a2_hierarchy();
    EDGE(call, hidden, 10240, 10272, "H", "10272", "multiples of 32 up to 10240");
}

Test(group_profile, a2_batch)
{
    ep_group_call call = a2();
    EDGE(call, tokens, 256, 257, "BS", "is 257", "1..256");
    WITH(call, tokens, 0);
    refused(&call, "BS", "is 0", "1..256");
}

Test(group_profile, a2_has_no_tp)
{
    ep_group_call call = a2();
    WITH(call, moe_experts, 16);
    WITH(call, tp_world_size, 2);
    refused(&call, "tp_world_size", "is 2", "0..1");
}

Test(group_profile, a2_has_no_shared_experts)
{
    ep_group_call call = a2();
    WITH(call, shared_ranks, 8);
    WITH(call, shared_rows, 1);
    WITH(call, shared_experts, 1);
    refused(&call, "shared_expert_rank_num", "is 8", "allowed 0");
    call = a2();
    WITH(call, shared_rows, 2);
    refused(&call, "shared_expert_num", "is 2", "allowed 0");
}

Test(group_profile, a2_allows_expert_scales_and_performance_info)
{
    ep_group_call call = a2();
    WITH(call, has_expert_scales, 1);
    WITH(call, has_performance, 1);
    passes(&call);
}

Test(group_profile, a2_algorithms)
{
    ep_group_call call = a2();
    EDGE(call, comm_given, EP_GROUP_NAMED_FULLMESH, EP_GROUP_NAMED_FULLMESH_V1, "comm_alg",
         "fullmesh_v1", "fullmesh, hierarchy");
    WITH(call, comm, EP_GROUP_FULLMESH_V2);
    WITH(call, comm_given, EP_GROUP_NAMED_FULLMESH_V2);
    refused(&call, "comm_alg", "fullmesh_v2", "fullmesh, hierarchy");
}

Test(group_profile, a2_special_experts_with_fullmesh_only)
{
    ep_group_call call = a2();
    WITH(call, zero_experts, 1);
    WITH(call, copy_experts, 2);
    passes(&call);
    call = a2_hierarchy();
    WITH(call, copy_experts, 2);
    refused(&call, "copy_expert_num", "is 2", "allowed 0");
    call = a2_hierarchy();
    WITH(call, zero_experts, 1);
    refused(&call, "zero_expert_num", "is 1", "allowed 0");
}

Test(group_profile, a2_has_no_constant_experts)
{
    ep_group_call call = a2();
    WITH(call, const_experts, 1);
    refused(&call, "const_expert_num", "is 1", "allowed 0");
}

Test(group_profile, a2_mask_with_fullmesh_only)
{
    ep_group_call call = a2();
    WITH(call, mask, EP_GROUP_MASK_TOKENS);
    passes(&call);
    call = a2_hierarchy();
    WITH(call, mask, EP_GROUP_MASK_TOKENS);
    refused(&call, "x_active_mask", "given", "absent");
}

Test(group_profile, a2_int8_combine_with_hierarchy_only)
{
    ep_group_call call = a2_hierarchy();
    WITH(call, comm_quant_mode, 2);
    passes(&call);
    call = a2();
    WITH(call, comm_quant_mode, 2);
    refused(&call, "comm_quant_mode", "is 2", "allowed 0");
}

/* ---- a3 ---- */

Test(group_profile, a3_world)
{
    ep_group_call call = a3();
    set_world(&call, 2);
    passes(&call);
    set_world(&call, 768);
    WITH(call, moe_experts, 768);
    passes(&call);
    set_world(&call, 769);
    WITH(call, moe_experts, 769);
    refused(&call, "ep_world_size", "is 769", "2..768");
    set_world(&call, 1);
    WITH(call, moe_experts, 64);
    refused(&call, "ep_world_size", "is 1:", "2..768");
}

Test(group_profile, a3_hidden)
{
    ep_group_call call = a3();
    EDGE(call, hidden, 1024, 1023, "H", "is 1023", "1024..8192");
    EDGE(call, hidden, 8192, 8193, "H", "is 8193", "1024..8192");
}

Test(group_profile, a3_batch)
{
    ep_group_call call = a3();
    EDGE(call, tokens, 512, 513, "BS", "is 513", "1..512");
    WITH(call, tokens, 0);
    refused(&call, "BS", "is 0", "1..512");
}

Test(group_profile, a3_batch_of_fullmesh_v2)
{
    ep_group_call call = a3_v2();
    EDGE(call, tokens, 256, 257, "BS", "is 257", "1..256");
}

Test(group_profile, a3_experts_per_rank_times_world)
{
    ep_group_call call = a3();
    set_world(&call, 2);
    WITH(call, moe_experts, 1024);
    passes(&call);
    set_world(&call, 96);
    WITH(call, shared_ranks, 64);
    WITH(call, shared_rows, 1);
    WITH(call, shared_experts, 1);
    WITH(call, moe_experts, 32 * 22);
    refused(&call, "experts per rank * ep_world_size", "22 * 96", "up to 2048");
}

Test(group_profile, a3_tp)
{
    ep_group_call call = a3();
    WITH(call, moe_experts, 16);
    EDGE(call, tp_world_size, 2, 3, "tp_world_size", "is 3", "1..2");
}

Test(group_profile, a3_tp_of_two_with_one_local_expert)
{
    ep_group_call call = a3();
    WITH(call, tp_world_size, 2);
    refused(&call, "tp_world_size", "4 local experts", "1 local expert");
}

Test(group_profile, a3_shared_experts)
{
    ep_group_call call = a3();
    WITH(call, shared_ranks, 8);
    WITH(call, shared_rows, 4);
    WITH(call, shared_experts, 4);
    passes(&call);
    WITH(call, shared_rows, 5);
    refused(&call, "shared_expert_num", "is 5", "0..4");
    WITH(call, shared_rows, 3);
    refused(&call, "shared_expert_rank_num", "is 8", "multiples of shared_expert_num 3");
}

Test(group_profile, a3_takes_no_expert_scales)
{
    ep_group_call call = a3();
    WITH(call, has_expert_scales, 1);
    refused(&call, "expert_scales", "given", "absent");
    WITH(call, operator, EP_GROUP_COMBINE); /* the combine needs them */
    passes(&call);
}

Test(group_profile, a3_takes_no_performance_info)
{
    ep_group_call call = a3();
    WITH(call, has_performance, 1);
    refused(&call, "performance_info", "given", "absent");
}

Test(group_profile, a3_takes_no_elastic_info)
{
    ep_group_call call = a3();
    WITH(call, has_elastic, 1);
    refused(&call, "elastic_info", "given", "absent");
}

Test(group_profile, a3_algorithms)
{
    ep_group_call call = a3();
    EDGE(call, comm_given, EP_GROUP_NAMED_FULLMESH_V1, EP_GROUP_NAMED_FULLMESH, "comm_alg",
         "fullmesh", "fullmesh_v1, fullmesh_v2");
    WITH(call, comm, EP_GROUP_HIERARCHY);
    WITH(call, comm_given, EP_GROUP_NAMED_HIERARCHY);
    refused(&call, "comm_alg", "hierarchy", "fullmesh_v1, fullmesh_v2");
}

Test(group_profile, a3_fullmesh_v2_has_no_tp_no_mask_no_special_experts)
{
    ep_group_call call = a3_v2();
    passes(&call);
    WITH(call, mask, EP_GROUP_MASK_SLOTS);
    refused(&call, "x_active_mask", "given", "absent");
    call = a3_v2();
    WITH(call, moe_experts, 16);
    WITH(call, tp_world_size, 2);
    refused(&call, "tp_world_size", "is 2", "0..1");
    call = a3_v2();
    WITH(call, zero_experts, 1);
    refused(&call, "zero_expert_num", "is 1", "allowed 0");
    call = a3_v2();
    WITH(call, copy_experts, 1);
    refused(&call, "copy_expert_num", "is 1", "allowed 0");
    call = a3_v2();
    WITH(call, const_experts, 1);
    refused(&call, "const_expert_num", "is 1", "allowed 0");
}

Test(group_profile, a3_fullmesh_v2_top_k)
{
    ep_group_call call = a3_v2();
    EDGE(call, top_k, 12, 13, "K", "is 13", "1..12");
}

/* ---- both ---- */

Test(group_profile, both_top_k)
{
    ep_group_call calls[] = {a2(), a3()};
    for (size_t i = 0; i < 2; i++) {
        EDGE(calls[i], top_k, 16, 17, "K", "is 17", "1..16");
        WITH(calls[i], top_k, 0);
        refused(&calls[i], "K", "is 0", "1..");
    }
    ep_group_call call = a3();
    set_world(&call, 2);
    WITH(call, moe_experts, 4);
    WITH(call, zero_experts, 1);
    EDGE(call, top_k, 5, 6, "K", "is 6", "1..5");
}

Test(group_profile, both_expert_number)
{
    ep_group_call call = a3();
    EDGE(call, moe_experts, 1024, 1040, "moe_expert_num", "is 1040", "1..1024");
    WITH(call, moe_experts, 0);
    refused(&call, "moe_expert_num", "is 0", "1..");
}

Test(group_profile, both_experts_divide)
{
    ep_group_call calls[] = {a2(), a3()};
    for (size_t i = 0; i < 2; i++) {
        WITH(calls[i], moe_experts, 65);
        refused(&calls[i], "moe_expert_num", "is 65",
                "multiples of ep_world_size - shared_expert_rank_num = 16");
    }
}

Test(group_profile, both_quant_mode)
{
    ep_group_call calls[] = {a2(), a3()};
    for (size_t i = 0; i < 2; i++) {
        EDGE(calls[i], quant_mode, 2, 1, "quant_mode", "is 1", "0 or 2");
    }
}

Test(group_profile, both_token_nums_type)
{
    ep_group_call calls[] = {a2(), a3()};
    for (size_t i = 0; i < 2; i++) {
        EDGE(calls[i], token_nums_type, 0, 2, "expert_token_nums_type", "is 2", "0 or 1");
    }
}

Test(group_profile, both_global_bs)
{
    ep_group_call calls[] = {a2(), a3()};
    for (size_t i = 0; i < 2; i++) {
        WITH(calls[i], global_bs, 32 * 16);
        passes(&calls[i]);
        EDGE(calls[i], global_bs, 64 * 16, 31 * 16, "global_bs", "is 496",
             "at least BS * ep_world_size");
        WITH(calls[i], global_bs, 32 * 16 + 1);
        refused(&calls[i], "global_bs", "is 513", "multiple of ep_world_size 16");
    }
}

Test(group_profile, both_experts_in_all)
{
    ep_group_call call = a3();
    EDGE(call, zero_experts, INT32_MAX - 65, INT32_MAX - 64, "moe_expert_num + zero_expert_num",
         "2147483647", "below 2147483647");
}

Test(group_profile, both_types)
{
    ep_group_call call = a2();
    WITH(call, dtype, EP_DTYPE_F32);
    refused(&call, "x", "f32", "bf16, f16");
    call = a3();
    WITH(call, ids_dtype, EP_DTYPE_I64);
    refused(&call, "expert_ids", "i64", "i32");
}

/* ---- native ---- */

Test(group_profile, native_divides_nothing)
{
    for (int64_t world = 1; world <= 9; world++) {
        for (int64_t shared = 0; shared < world; shared++) {
            ep_group_call call = {.operator= EP_GROUP_DISPATCH,
                                  .moe_experts = 7,
                                  .tp_world_size = 1,
                                  .comm = EP_GROUP_FULLMESH,
                                  .hidden = 3,
                                  .top_k = 2,
                                  .dtype = EP_DTYPE_F32,
                                  .ids_dtype = EP_DTYPE_I64};
            set_world(&call, world);
            WITH(call, shared_ranks, shared);
            WITH(call, shared_rows, shared > 0 ? (shared + 1) / 2 : 0);
            WITH(call, shared_experts, call.shared_rows);
            passes(&call);
        }
    }
}

Test(group_profile, native_keeps_what_the_layout_needs)
{
    ep_group_call call = a2();
    WITH(call, profile, EP_GROUP_NATIVE);
    WITH(call, shared_ranks, 16);
    refused(&call, "shared_expert_rank_num", "is 16", "0..15");
    WITH(call, shared_ranks, 2);
    WITH(call, shared_rows, 3);
    refused(&call, "shared_expert_num", "is 3", "1..2");
    call = a2();
    WITH(call, profile, EP_GROUP_NATIVE);
    WITH(call, has_scales, 1);
    refused(&call, "scales", "given", "quant_mode is 0");
    WITH(call, quant_mode, 2);
    passes(&call);
    WITH(call, comm, EP_GROUP_HIERARCHY);
    refused(&call, "scales", "given", "comm_alg is hierarchy");
}

/* ---- A ---- */

Test(group_profile, capacity)
{
    ep_group_call call = a3();
    char formula[200];
    cr_expect_eq(ep_group_capacity(&call, 3, formula, sizeof(formula)), 32 * 16 * 4);
    cr_expect(strstr(formula, "32 * 16 * min(4, 8)") != NULL, "%s", formula);
    WITH(call, global_bs, 64 * 16);
    cr_expect_eq(ep_group_capacity(&call, 3, NULL, 0), 64 * 16 * 4);
    WITH(call, global_bs, 0);
    WITH(call, shared_ranks, 8);
    WITH(call, shared_rows, 2);
    WITH(call, shared_experts, 2);
    cr_expect_eq(ep_group_capacity(&call, 0, NULL, 0), 32 * 16 * 2 / 8);
    cr_expect_eq(ep_group_capacity(&call, 8, NULL, 0), 32 * 16 * 8);
}
