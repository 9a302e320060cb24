/* SPDX-License-Identifier: Apache-2.0 */
/* What callers may get wrong in a call's arguments: each mistake is named with
 * its value and what is allowed. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "common/args.h"
#include "support/expect.h"

#define T 4
#define K 2
#define H 8
#define E 6

static uint16_t x[T * H];
static int8_t x8[T * H];
static float x_scales[T];
static int32_t ids[T * K];
static float scales[T * K];
static uint8_t flags[T * K];
static uint16_t y[T * K * H];
static ep_moe_args args;
static ep_tensor out;
static ep_call_spec spec;
static ep_error error;
static const ep_layer_shape shape = {
    .layer = 3, .hidden = H, .inner = 8, .experts = E, .shared_experts = 1, .top_k = K};

static void good(void)
{
    ep_moe_args_init(&args);
    args.model = "demo";
    args.layer = 3;
    args.x = ep_tensor_2d(x, EP_DTYPE_BF16, T, H);
    args.expert_ids = ep_tensor_2d(ids, EP_DTYPE_I32, T, K);
    args.expert_scales = ep_tensor_2d(scales, EP_DTYPE_F32, T, K);
    out = ep_tensor_2d(y, EP_DTYPE_BF16, T, H);
}

static ep_err run(void)
{
    ep_moe_args taken;
    ep_err err = ep_args_take(&args, &out, &taken, &error);
    return err != EP_OK ? err : ep_call_spec_fill(&args, &out, "demo", &shape, &spec, &error);
}

static void bad(ep_err code, const char *part)
{
    ep_err err = run();
    cr_expect_eq(err, code, "%s: got %s", part, ep_err_name(err));
    EXPECT_TEXT(error, part);
    good();
}

Test(args, a_good_call_is_converted)
{
    good();
    args.active_mask = ep_tensor_1d(flags, EP_DTYPE_BOOL, T);
    args.tenant = "me";
    ASSERT_OK(run(), error);
    cr_assert_eq(spec.batch.tokens, T);
    cr_assert_eq(spec.batch.top_k, K);
    cr_assert_eq(spec.batch.wire_dtype, EP_DTYPE_BF16);
    cr_assert_eq(spec.batch.out_dtype, EP_DTYPE_BF16);
    cr_assert_eq(spec.batch.mask_tokens, flags);
    cr_assert_str_eq(spec.tenant, "me");
    args.step_group = 1ull << 40;
    args.step_group_size = 8;
    ASSERT_OK(run(), error);
    cr_assert_eq(spec.step_group, 1ull << 40);
    cr_assert_eq(spec.step_group_size, 8);
    args.active_mask = ep_tensor_2d(flags, EP_DTYPE_BOOL, T, K);
    args.result = EP_MOE_UNCOMBINED;
    out = ep_tensor_3d(y, EP_DTYPE_BF16, T, K, H);
    ASSERT_OK(run(), error);
    cr_assert_null(spec.batch.mask_tokens);
    cr_assert_eq(spec.batch.mask_slots.data, flags);
    cr_assert_eq(spec.out.slot_stride_bytes, H * 2);
}

Test(args, shared_experts_alone_need_no_ids)
{
    good();
    args.expert_ids = ep_tensor_none();
    args.expert_scales = ep_tensor_none();
    ASSERT_OK(run(), error);
    cr_assert_eq(spec.batch.top_k, 0);
}

Test(args, structs_and_strings)
{
    char text[300];
    memset(text, 'a', sizeof(text) - 1);
    text[299] = 0;
    good();
    args.struct_bytes = 12;
    bad(EP_ERR_INVALID_ARGUMENT, "struct_bytes of args is 12");
    args.struct_bytes = UINT32_MAX;
    bad(EP_ERR_INVALID_ARGUMENT, "struct_bytes of args is 4294967295");
    args.model = NULL;
    bad(EP_ERR_INVALID_ARGUMENT, "model is not set");
    args.model = text;
    bad(EP_ERR_INVALID_ARGUMENT, "model has 299 bytes: allowed 0..127");
    args.version = text;
    bad(EP_ERR_INVALID_ARGUMENT, "version has 299 bytes");
    args.step_group = 7;
    bad(EP_ERR_INVALID_ARGUMENT, "step_group is 7, step_group_size 0: allowed both 0, or neither");
    args.traceparent = text;
    bad(EP_ERR_INVALID_ARGUMENT, "traceparent has 299 bytes");
    args.tenant = text;
    bad(EP_ERR_INVALID_ARGUMENT, "tenant has 299 bytes");
    args.mode = (ep_moe_mode)9;
    bad(EP_ERR_INVALID_ARGUMENT, "mode 9: allowed 0 (auto)");
    args.result = (ep_moe_result_form)7;
    bad(EP_ERR_INVALID_ARGUMENT, "result 7");
    args.shared_source = (ep_moe_shared)7;
    bad(EP_ERR_INVALID_ARGUMENT, "shared_source 7");
    args.weight_on = (ep_moe_weight_on)2;
    bad(EP_ERR_INVALID_ARGUMENT, "weight_on 2: allowed 0 (output), 1 (input)");
    args.nan_policy = (ep_moe_nan)4;
    bad(EP_ERR_INVALID_ARGUMENT, "nan_policy 4: allowed 0 (pass), 1 (reject), 2 (zero), 3 (mean)");
    args.const_rule = (ep_moe_const_rule)2;
    bad(EP_ERR_INVALID_ARGUMENT, "const_rule 2: allowed 0 (kernel), 1 (linear)");
    args.x_abs_max = NAN;
    bad(EP_ERR_INVALID_ARGUMENT, "x_abs_max nan: allowed 0 (off) or more");
    args.wire_dtype = EP_DTYPE_I8;
    bad(EP_ERR_INVALID_ARGUMENT, "wire_dtype 4: allowed 0 (default), 1 (bf16), 2 (f16), 3 (f32)");
    args.deadline_us = UINT32_MAX;
    bad(EP_ERR_INVALID_ARGUMENT, "deadline_us is 4294967295");
    args.x.struct_bytes = 0;
    bad(EP_ERR_INVALID_ARGUMENT, "x has struct_bytes 0");
}

Test(args, how_rows_reach_a_host)
{
    float smooth[(E + 1) * H] = {0};
    good();
    args.comm_alg = EP_MOE_COMM_HIERARCHY;
    ASSERT_OK(run(), error);
    cr_assert_eq(spec.comm_alg, EP_MOE_COMM_HIERARCHY);
    args.comm_alg = (ep_moe_comm)4;
    bad(EP_ERR_INVALID_ARGUMENT,
        "comm_alg 4: allowed 0 (default), 1 (fullmesh), 2 (hierarchy), 3 (auto)");
    args.comm_alg = EP_MOE_COMM_HIERARCHY;
    args.smooth_scales = ep_tensor_2d(smooth, EP_DTYPE_F32, E + 1, H);
    bad(EP_ERR_INVALID_ARGUMENT, "comm_alg hierarchy with smooth_scales: allowed fullmesh");
}

Test(args, sums_at_nodes)
{
    good();
    args.combine_at = EP_MOE_COMBINE_NODE_SUM;
    ASSERT_OK(run(), error);
    cr_assert(spec.batch.node_sum);
    args.combine_at = (ep_moe_combine_at)2;
    bad(EP_ERR_INVALID_ARGUMENT, "combine_at 2: allowed 0 (rows), 1 (node_sum)");
    args.combine_at = EP_MOE_COMBINE_NODE_SUM;
    args.result = EP_MOE_UNCOMBINED;
    bad(EP_ERR_INVALID_ARGUMENT,
        "combine_at node_sum with result uncombined: allowed combined, partial");
    args.combine_at = EP_MOE_COMBINE_NODE_SUM;
    args.weight_on = EP_MOE_WEIGHT_ON_INPUT;
    bad(EP_ERR_INVALID_ARGUMENT, "combine_at node_sum with weight_on input: allowed output");
}

Test(args, rows_in_8_bits)
{
    static float smooth[64 * 64];
    good();
    args.dispatch_quant = EP_MOE_DISPATCH_FP8;
    args.combine_quant = EP_MOE_COMBINE_INT8;
    ASSERT_OK(run(), error);
    cr_assert(spec.batch.dispatch_quant == EP_DISPATCH_FP8 &&
              spec.batch.combine_quant == EP_COMBINE_INT8);
    int64_t hidden = args.x.shape[1];
    args.smooth_scales = ep_tensor_2d(smooth, EP_DTYPE_F32, 1, hidden);
    bad(EP_ERR_INVALID_ARGUMENT,
        "smooth_scales are given, but dispatch_quant is 3: allowed with 2 (int8) only");
    good();
    args.dispatch_quant = (ep_moe_dispatch_quant)1;
    bad(EP_ERR_INVALID_ARGUMENT, "dispatch_quant 1: allowed 0 (plain), 2 (int8), 3 (fp8)");
    good();
    args.combine_quant = (ep_moe_combine_quant)1;
    bad(EP_ERR_INVALID_ARGUMENT, "combine_quant 1: allowed 0 (plain), 2 (int8)");
    good();
    args.dispatch_quant = EP_MOE_DISPATCH_INT8;
    args.smooth_scales = ep_tensor_2d(smooth, EP_DTYPE_F32, 63, hidden);
    bad(EP_ERR_INVALID_ARGUMENT, "smooth_scales are 63 x ");
    good();
    args.dispatch_quant = EP_MOE_DISPATCH_INT8;
    args.smooth_scales = ep_tensor_2d(smooth, EP_DTYPE_F32, 63, hidden);
    args.combine_at = EP_MOE_COMBINE_NODE_SUM;
    bad(EP_ERR_INVALID_ARGUMENT, "smooth_scales are given with combine_at 1 (node_sum)");
}

Test(args, forms_of_tensors)
{
    good();
    args.x = ep_tensor_none();
    bad(EP_ERR_INVALID_ARGUMENT, "x is missing");
    args.x.rank = 3;
    bad(EP_ERR_INVALID_ARGUMENT, "x has rank 3: allowed 2");
    args.x.dtype = EP_DTYPE_I64;
    bad(EP_ERR_INVALID_ARGUMENT, "x has type i64 (7): allowed bf16, f16, f32, i8");
    args.x.memory = EP_MEMORY_ASCEND;
    bad(EP_ERR_UNIMPLEMENTED, "x is in memory of kind 1");
    args.x.data = NULL;
    bad(EP_ERR_INVALID_ARGUMENT, "x has no data");
    args.x.shape[0] = -1;
    bad(EP_ERR_INVALID_ARGUMENT, "x has -1 in dimension 0");
    args.x.shape[0] = EP_TOKENS_MAX + 1;
    bad(EP_ERR_INVALID_ARGUMENT, "x has 65537 tokens: allowed 0..65536");
    args.x.shape[1] = 64;
    bad(EP_ERR_INVALID_ARGUMENT, "x has hidden 64, layer 3 of model demo has 8");
    args.x.stride_bytes[1] = 4;
    bad(EP_ERR_INVALID_ARGUMENT, "x has innermost stride 4: allowed 2");
    args.x.stride_bytes[0] = -2;
    bad(EP_ERR_INVALID_ARGUMENT, "x has stride -2 in dimension 0");
    args.x_scales = ep_tensor_1d(x_scales, EP_DTYPE_F32, T);
    bad(EP_ERR_INVALID_ARGUMENT, "x_scales are given, but x is bf16");
    args.x = ep_tensor_2d(x8, EP_DTYPE_I8, T, H);
    bad(EP_ERR_INVALID_ARGUMENT, "x_scales is missing");
    args.x = ep_tensor_2d(x8, EP_DTYPE_I8, T, H);
    args.x_scales = ep_tensor_1d(x_scales, EP_DTYPE_F32, T - 1);
    bad(EP_ERR_INVALID_ARGUMENT,
        "x_scales has 3 in dimension 0: x has that many tokens, so 4 is needed");
    args.x = ep_tensor_2d(x8, EP_DTYPE_I8, T, H);
    args.x_scales = ep_tensor_1d((char *)x_scales + 1, EP_DTYPE_F32, T);
    bad(EP_ERR_INVALID_ARGUMENT, "x_scales begin at");
}

Test(args, slots_and_masks)
{
    good();
    args.expert_ids = ep_tensor_none();
    bad(EP_ERR_INVALID_ARGUMENT, "expert_ids is missing");
    args.expert_ids.dtype = EP_DTYPE_F32;
    bad(EP_ERR_INVALID_ARGUMENT, "expert_ids has type f32 (3): allowed i32, i64");
    args.expert_ids.shape[0] = 3;
    bad(EP_ERR_INVALID_ARGUMENT, "expert_ids has 3 in dimension 0");
    args.expert_scales.shape[1] = 1;
    bad(EP_ERR_INVALID_ARGUMENT,
        "expert_scales has 1 in dimension 1: expert_ids have that many slots, so 2 is needed");
    args.expert_ids.shape[1] = 65;
    args.expert_scales.shape[1] = 65;
    bad(EP_ERR_INVALID_ARGUMENT, "expert_ids have 65 slots per token: allowed 1..64");
    args.active_mask = ep_tensor_1d(flags, EP_DTYPE_BOOL, 3);
    bad(EP_ERR_INVALID_ARGUMENT, "active_mask has 3 in dimension 0");
    args.active_mask = ep_tensor_2d(flags, EP_DTYPE_I32, T, K);
    bad(EP_ERR_INVALID_ARGUMENT, "active_mask has type i32 (6): allowed bool, u8");
    args.partial_slots = ep_tensor_2d(flags, EP_DTYPE_BOOL, T, K);
    bad(EP_ERR_INVALID_ARGUMENT, "partial_slots are given, but result is not partial");
    args.result = EP_MOE_PARTIAL;
    bad(EP_ERR_INVALID_ARGUMENT, "partial_slots is missing");
    args.shared = ep_tensor_2d(x, EP_DTYPE_BF16, T, H);
    bad(EP_ERR_INVALID_ARGUMENT, "shared is given, but shared_source is not caller");
    args.shared_source = EP_MOE_SHARED_CALLER;
    bad(EP_ERR_INVALID_ARGUMENT, "shared is missing");
    args.const_experts = 2;
    bad(EP_ERR_INVALID_ARGUMENT, "const_alpha1 is missing");
}

Test(args, out)
{
    good();
    out.dtype = EP_DTYPE_I8;
    bad(EP_ERR_INVALID_ARGUMENT, "out has type i8");
    out = ep_tensor_3d(y, EP_DTYPE_BF16, T, K, H);
    bad(EP_ERR_INVALID_ARGUMENT, "out has rank 3: allowed 2");
    out.shape[0] = 3;
    bad(EP_ERR_INVALID_ARGUMENT, "out has 3 in dimension 0");
    out.stride_bytes[0] = H;
    bad(EP_ERR_INVALID_ARGUMENT, "out has stride 8 between tokens: allowed 16 or more");
    args.result = EP_MOE_UNCOMBINED;
    out = ep_tensor_3d(y, EP_DTYPE_BF16, T, K, H);
    out.stride_bytes[1] = 2;
    bad(EP_ERR_INVALID_ARGUMENT, "out has stride 2 between slots: allowed 16 or more");
    out = ep_tensor_2d(x, EP_DTYPE_BF16, T, H);
    bad(EP_ERR_INVALID_ARGUMENT, "out overlaps x: they must be apart");
    out = ep_tensor_2d(x, EP_DTYPE_BF16, T, H);
    out.stride_bytes[0] = (int64_t)((UINT64_MAX - 63) / (T - 1)); /* would end before it begins */
    bad(EP_ERR_INVALID_ARGUMENT, "out overlaps x: they must be apart");
}

Test(args, empty_batches_need_no_data)
{
    good();
    args.x = ep_tensor_2d(NULL, EP_DTYPE_BF16, 0, H);
    args.expert_ids = ep_tensor_2d(NULL, EP_DTYPE_I32, 0, K);
    args.expert_scales = ep_tensor_2d(NULL, EP_DTYPE_F32, 0, K);
    out = ep_tensor_2d(NULL, EP_DTYPE_BF16, 0, H);
    ASSERT_OK(run(), error);
    cr_assert_eq(spec.batch.tokens, 0);
}
