/* SPDX-License-Identifier: Apache-2.0 */
/* The vendor's range table, one row per row of it: just inside passes, just outside names
 * parameter, value and allowed range. */
#include <criterion/criterion.h>
#include <string.h>

#include "group/group_layout.h"
#include "group/group_profile.h"
#include "group/group_sizes.h"

#pragma GCC diagnostic ignored "-Woverride-init" /* a row says what differs from the usual call */

#define USUAL                                                                                      \
    .operator= EP_GROUP_DISPATCH, .world_size = 16, .ranks = 16, .moe_experts = 64,                \
    .tp_world_size = 1, .comm = EP_GROUP_FULLMESH, .hidden = 7168, .top_k = 8,                     \
    .dtype = EP_DTYPE_BF16, .ids_dtype = EP_DTYPE_I32, .tokens = 32, .token_nums_type = 1
#define A2(...)                                                                                    \
    {                                                                                              \
        USUAL, .profile = EP_GROUP_A2, __VA_ARGS__                                                 \
    }
#define A3(...)                                                                                    \
    {                                                                                              \
        USUAL, .profile = EP_GROUP_A3, __VA_ARGS__                                                 \
    }
#define A2_HIERARCHY(...) A2(COMM(HIERARCHY, HIERARCHY), .has_expert_scales = 1, __VA_ARGS__)
#define A3_HIERARCHY(...) A3(COMM(HIERARCHY, HIERARCHY), .has_expert_scales = 1, __VA_ARGS__)
#define A3_V2(...) A3(COMM(FULLMESH_V2, FULLMESH_V2), __VA_ARGS__)
#define NATIVE(...)                                                                                \
    {                                                                                              \
        USUAL, .profile = EP_GROUP_NATIVE, __VA_ARGS__                                             \
    }

#define COMM(kind, spelled) .comm = EP_GROUP_##kind, .comm_given = EP_GROUP_NAMED_##spelled
#define WORLD(size) .world_size = (size), .ranks = (size)
#define SHARED(count, rows) .shared_ranks = (count), .shared_rows = (rows), .shared_experts = (rows)
#define PASSES NULL, NULL, NULL
#define COUNT(rows) (sizeof(rows) / sizeof((rows)[0]))

typedef struct {
    const char *claim;
    ep_group_call call;
    /* the text begins with the parameter and holds the others */
    const char *parameter, *value, *allowed;
} profile_row;

static void check(const ep_group_call *call, const profile_row *row)
{
    ep_error error;
    ep_error_clear(&error);
    ep_err err = ep_group_profile_check(call, &error);
    if (row->parameter == NULL) {
        cr_expect_eq(err, EP_OK, "%s: %s", row->claim, error.text);
        return;
    }
    cr_expect_eq(err, EP_ERR_INVALID_ARGUMENT, "%s: should be refused", row->claim);
    cr_expect(strncmp(error.text, row->parameter, strlen(row->parameter)) == 0 &&
                  strstr(error.text, row->value) != NULL &&
                  strstr(error.text, row->allowed) != NULL,
              "%s: '%s' and '%s' expected after '%s', is '%s'", row->claim, row->value,
              row->allowed, row->parameter, error.text);
}

static void check_all(const profile_row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        check(&rows[i].call, &rows[i]);
    }
}

static const profile_row a2_rows[] = {
    {"world of 16", A2(WORLD(16), .moe_experts = 256), PASSES},
    {"world of 32", A2(WORLD(32), .moe_experts = 256), PASSES},
    {"world of 64", A2(WORLD(64), .moe_experts = 256), PASSES},
    {"world of 128", A2(WORLD(128), .moe_experts = 256), PASSES},
    {"world of 256", A2(WORLD(256), .moe_experts = 256), PASSES},
    {"world of 2", A2(WORLD(2), .moe_experts = 256), PASSES},
    {"world of 8, 32 experts each", A2(WORLD(8), .moe_experts = 256), PASSES},
    {"world of 192", A2(WORLD(192), .moe_experts = 192), PASSES},
    {"world of 384", A2(WORLD(384), .moe_experts = 384), PASSES},
    {"world of 1", A2(WORLD(1), .moe_experts = 256), "ep_world_size", "is 1:", "2..8, 16, 32"},
    {"world of 9", A2(WORLD(9), .moe_experts = 9), "ep_world_size", "is 9:", "2..8, 16, 32"},
    {"world of 48", A2(WORLD(48), .moe_experts = 48), "ep_world_size",
     "is 48:", "64, 128, 192, 256, 384"},
    {"hierarchy: world of 16", A2_HIERARCHY(WORLD(16), .moe_experts = 128), PASSES},
    {"hierarchy: world of 32", A2_HIERARCHY(WORLD(32), .moe_experts = 128), PASSES},
    {"hierarchy: world of 64", A2_HIERARCHY(WORLD(64), .moe_experts = 128), PASSES},
    {"hierarchy: world of 128", A2_HIERARCHY(WORLD(128), .moe_experts = 128), "ep_world_size",
     "is 128:", "16, 32, 64 (2, 4, 8 servers"},
    {"the usual call", A2(), PASSES},
    {"no elastic_info", A2(.has_elastic = 1), "elastic_info", "is given", "allowed only absent"},
    {"most experts", A2(.moe_experts = 1024), PASSES},
    {"hierarchy: most experts", A2_HIERARCHY(.moe_experts = 512), PASSES},
    {"hierarchy: too many experts", A2_HIERARCHY(.moe_experts = 528), "moe_expert_num", "is 528",
     "1..512 (comm_alg hierarchy)"},
    {"fullmesh: least H", A2(.hidden = 32), PASSES},
    {"fullmesh: H too large", A2(.hidden = 7168 + 32), "H", "7200", "multiples of 32 up to 7168"},
    {"fullmesh: H no multiple of 32", A2(.hidden = 7000), "H", "7000",
     "multiples of 32 up to 7168"},
    {"hierarchy: largest H", A2_HIERARCHY(.hidden = 10240), PASSES},
    {"hierarchy: H too large", A2_HIERARCHY(.hidden = 10272), "H", "10272",
     "multiples of 32 up to 10240"},
    {"largest batch", A2(.tokens = 256), PASSES},
    {"batch too large", A2(.tokens = 257), "BS", "is 257", "1..256"},
    {"batch of none", A2(.tokens = 0), "BS", "is 0", "1..256"},
    {"hierarchy: largest batch", A2_HIERARCHY(.tokens = 512), PASSES},
    {"hierarchy: batch too large", A2_HIERARCHY(.tokens = 513), "BS", "is 513", "1..512"},
    {"hierarchy without expert_scales", A2(COMM(HIERARCHY, HIERARCHY)), "expert_scales",
     "is missing", "required with comm_alg hierarchy"},
    {"no shared_expert_x", A2(.has_shared_x = 1, .operator= EP_GROUP_COMBINE), "shared_expert_x",
     "is given", "absent"},
    {"no tp", A2(.moe_experts = 16, .tp_world_size = 2), "tp_world_size", "is 2", "0..1"},
    {"no ranks of shared experts", A2(SHARED(8, 1)), "shared_expert_rank_num", "is 8", "allowed 0"},
    {"no shared experts", A2(.shared_rows = 2), "shared_expert_num", "is 2", "allowed 0"},
    {"expert_scales and performance_info", A2(.has_expert_scales = 1, .has_performance = 1),
     PASSES},
    {"comm_alg fullmesh", A2(.comm_given = EP_GROUP_NAMED_FULLMESH), PASSES},
    {"comm_alg fullmesh_v1", A2(.comm_given = EP_GROUP_NAMED_FULLMESH_V1), "comm_alg",
     "fullmesh_v1", "fullmesh, hierarchy"},
    {"comm_alg fullmesh_v2", A2(COMM(FULLMESH_V2, FULLMESH_V2)), "comm_alg", "fullmesh_v2",
     "fullmesh, hierarchy"},
    {"fullmesh: zero and copy experts", A2(.zero_experts = 1, .copy_experts = 2), PASSES},
    {"hierarchy: no copy experts", A2_HIERARCHY(.copy_experts = 2), "copy_expert_num", "is 2",
     "allowed 0"},
    {"hierarchy: no zero experts", A2_HIERARCHY(.zero_experts = 1), "zero_expert_num", "is 1",
     "allowed 0"},
    {"no constant experts", A2(.const_experts = 1), "const_expert_num", "is 1", "allowed 0"},
    {"fullmesh: mask", A2(.mask = EP_GROUP_MASK_TOKENS), PASSES},
    {"hierarchy: no mask", A2_HIERARCHY(.mask = EP_GROUP_MASK_TOKENS), "x_active_mask", "given",
     "absent"},
    {"hierarchy: int8 combine", A2_HIERARCHY(.comm_quant_mode = 2), PASSES},
    {"fullmesh: no int8 combine", A2(.comm_quant_mode = 2), "comm_quant_mode", "is 2", "allowed 0"},
    {"x of f32", A2(.dtype = EP_DTYPE_F32), "x", "f32", "bf16, f16"},
};

Test(group_profile, a2)
{
    check_all(a2_rows, COUNT(a2_rows));
}

static const profile_row a3_rows[] = {
    {"world of 2", A3(WORLD(2)), PASSES},
    {"world of 768", A3(WORLD(768), .moe_experts = 768), PASSES},
    {"world of 769", A3(WORLD(769), .moe_experts = 769), "ep_world_size", "is 769", "2..768"},
    {"world of 1", A3(WORLD(1)), "ep_world_size", "is 1:", "2..768"},
    {"least H", A3(.hidden = 1024), PASSES},
    {"H too small", A3(.hidden = 1023), "H", "is 1023", "1024..8192"},
    {"largest H", A3(.hidden = 8192), PASSES},
    {"H too large", A3(.hidden = 8193), "H", "is 8193", "1024..8192"},
    {"largest batch", A3(.tokens = 512), PASSES},
    {"batch too large", A3(.tokens = 513), "BS", "is 513", "1..512"},
    {"batch of none", A3(.tokens = 0), "BS", "is 0", "1..512"},
    {"fullmesh_v2: largest batch", A3_V2(.tokens = 256), PASSES},
    {"fullmesh_v2: batch too large", A3_V2(.tokens = 257), "BS", "is 257", "1..256"},
    {"experts per rank times world", A3(WORLD(2), .moe_experts = 1024), PASSES},
    {"experts per rank times world too large", A3(WORLD(96), SHARED(64, 1), .moe_experts = 32 * 22),
     "experts per rank * ep_world_size", "22 * 96", "up to 2048"},
    {"tp of 2", A3(.moe_experts = 16, .tp_world_size = 2), PASSES},
    {"tp of 3", A3(.moe_experts = 16, .tp_world_size = 3), "tp_world_size", "is 3", "1..2"},
    {"tp of 2 with one local expert only", A3(.tp_world_size = 2), "tp_world_size",
     "4 local experts", "1 local expert"},
    {"shared experts", A3(SHARED(8, 4)), PASSES},
    {"five shared experts", A3(SHARED(8, 4), .shared_rows = 5), "shared_expert_num", "is 5",
     "0..4"},
    {"shared experts do not divide their ranks", A3(SHARED(8, 4), .shared_rows = 3),
     "shared_expert_rank_num", "is 8", "multiples of shared_expert_num 3"},
    {"no expert_scales", A3(.has_expert_scales = 1), "expert_scales", "given", "absent"},
    {"the combine needs expert_scales", A3(.has_expert_scales = 1, .operator= EP_GROUP_COMBINE),
     PASSES},
    {"performance_info", A3(.has_performance = 1), PASSES},
    {"no elastic_info", A3(.has_elastic = 1), "elastic_info", "given", "absent"},
    {"comm_alg fullmesh_v1", A3(.comm_given = EP_GROUP_NAMED_FULLMESH_V1), PASSES},
    {"comm_alg fullmesh", A3(.comm_given = EP_GROUP_NAMED_FULLMESH), "comm_alg", "fullmesh",
     "fullmesh_v1, fullmesh_v2, hierarchy"},
    {"hierarchy: least world", A3_HIERARCHY(WORLD(16)), PASSES},
    {"hierarchy: largest world", A3_HIERARCHY(WORLD(256), .moe_experts = 256), PASSES},
    {"hierarchy: world of 8", A3_HIERARCHY(WORLD(8)), "ep_world_size",
     "is 8:", "multiples of 16 in 16..256"},
    {"hierarchy: world of 272", A3_HIERARCHY(WORLD(272), .moe_experts = 272), "ep_world_size",
     "is 272:", "multiples of 16 in 16..256"},
    {"hierarchy: world of 24", A3_HIERARCHY(WORLD(24), .moe_experts = 48), "ep_world_size",
     "is 24:", "multiples of 16 in 16..256"},
    {"hierarchy: least H", A3_HIERARCHY(.hidden = 1024), PASSES},
    {"hierarchy: largest H", A3_HIERARCHY(.hidden = 7168), PASSES},
    {"hierarchy: H too large", A3_HIERARCHY(.hidden = 7200), "H", "is 7200",
     "multiples of 32 in 1024..7168"},
    {"hierarchy: H no multiple of 32", A3_HIERARCHY(.hidden = 1040), "H", "is 1040",
     "multiples of 32 in 1024..7168"},
    {"hierarchy: largest batch", A3_HIERARCHY(.tokens = 256), PASSES},
    {"hierarchy: batch too large", A3_HIERARCHY(.tokens = 257), "BS", "is 257", "1..256"},
    {"hierarchy: 24 experts per rank", A3_HIERARCHY(.moe_experts = 24 * 16), PASSES},
    {"hierarchy: 25 experts per rank", A3_HIERARCHY(.moe_experts = 25 * 16), "experts per rank",
     "is 25", "1..24"},
    {"hierarchy: too many experts", A3_HIERARCHY(WORLD(32), .moe_experts = 544), "moe_expert_num",
     "is 544", "1..512"},
    {"hierarchy: no expert_scales", A3(COMM(HIERARCHY, HIERARCHY)), "expert_scales", "is missing",
     "required with comm_alg hierarchy"},
    {"hierarchy: 1-D mask", A3_HIERARCHY(.mask = EP_GROUP_MASK_TOKENS), PASSES},
    {"hierarchy: no 2-D mask", A3_HIERARCHY(.mask = EP_GROUP_MASK_SLOTS), "x_active_mask",
     "[BS, K]", "allowed [BS], or absent"},
    {"hierarchy: no performance_info", A3_HIERARCHY(.has_performance = 1), "performance_info",
     "given", "absent"},
    {"hierarchy: no shared experts", A3_HIERARCHY(SHARED(8, 1)), "shared_expert_rank_num", "is 8",
     "allowed 0"},
    {"hierarchy: no tp", A3_HIERARCHY(.moe_experts = 16, .tp_world_size = 2), "tp_world_size",
     "is 2", "0..1"},
    {"hierarchy: no zero experts", A3_HIERARCHY(.zero_experts = 1), "zero_expert_num", "is 1",
     "allowed 0"},
    {"hierarchy: no copy experts", A3_HIERARCHY(.copy_experts = 1), "copy_expert_num", "is 1",
     "allowed 0"},
    {"hierarchy: no constant experts", A3_HIERARCHY(.const_experts = 1), "const_expert_num", "is 1",
     "allowed 0"},
    {"hierarchy: int8 combine", A3_HIERARCHY(.comm_quant_mode = 2), PASSES},
    {"shared experts without ranks", A3(.shared_rows = 2), "shared_expert_num", "is 2",
     "0..0, or 1"},
    {"fullmesh_v2", A3_V2(), PASSES},
    {"fullmesh_v2: mask", A3_V2(.mask = EP_GROUP_MASK_SLOTS), PASSES},
    {"fullmesh_v2: special experts",
     A3_V2(.zero_experts = 1, .copy_experts = 1, .const_experts = 1), PASSES},
    {"fullmesh_v2: no tp", A3_V2(.moe_experts = 16, .tp_world_size = 2), "tp_world_size", "is 2",
     "0..1"},
    {"fullmesh_v2: largest K", A3_V2(.top_k = 12), PASSES},
    {"fullmesh_v2: K too large", A3_V2(.top_k = 13), "K", "is 13", "1..12"},
    {"K of all experts, special ones too",
     A3(WORLD(2), .moe_experts = 4, .zero_experts = 1, .top_k = 5), PASSES},
    {"K above all experts", A3(WORLD(2), .moe_experts = 4, .zero_experts = 1, .top_k = 6), "K",
     "is 6", "1..5"},
    {"largest number of experts", A3(.moe_experts = 1024), PASSES},
    {"too many experts", A3(.moe_experts = 1040), "moe_expert_num", "is 1040", "1..1024"},
    {"no experts", A3(.moe_experts = 0), "moe_expert_num", "is 0", "1.."},
    {"most experts in all", A3(.zero_experts = INT32_MAX - 65), PASSES},
    {"too many experts in all", A3(.zero_experts = INT32_MAX - 64),
     "moe_expert_num + zero_expert_num", "2147483647", "below 2147483647"},
    {"expert_ids of i64", A3(.ids_dtype = EP_DTYPE_I64), "expert_ids", "i64", "i32"},
};

Test(group_profile, a3)
{
    check_all(a3_rows, COUNT(a3_rows));
}

Test(group_profile, a2_and_a3)
{
    static const profile_row rows[] = {
        {"largest K", A2(.top_k = 16), PASSES},
        {"K too large", A2(.top_k = 17), "K", "is 17", "1..16"},
        {"K of none", A2(.top_k = 0), "K", "is 0", "1.."},
        {"experts do not divide", A2(.moe_experts = 65), "moe_expert_num", "is 65",
         "multiples of ep_world_size - shared_expert_rank_num = 16"},
        {"quant_mode of int8", A2(.quant_mode = 2), PASSES},
        {"quant_mode 1", A2(.quant_mode = 1), "quant_mode", "is 1", "0 or 2"},
        {"expert_token_nums_type 0", A2(.token_nums_type = 0), PASSES},
        {"expert_token_nums_type 2", A2(.token_nums_type = 2), "expert_token_nums_type", "is 2",
         "0 or 1"},
        {"global_bs of equal batches", A2(.global_bs = 32 * 16), PASSES},
        {"global_bs above them", A2(.global_bs = 64 * 16), PASSES},
        {"global_bs below them", A2(.global_bs = 31 * 16), "global_bs", "is 496",
         "at least BS * ep_world_size"},
        {"global_bs no multiple", A2(.global_bs = 32 * 16 + 1), "global_bs", "is 513",
         "multiple of ep_world_size 16"},
        {"largest global_bs", A2(.global_bs = INT32_MAX / 9 * (int64_t)16), PASSES},
        {"global_bs too large", A2(.global_bs = (INT32_MAX / 9 + 1) * (int64_t)16), "global_bs",
         "is 3817748720", "0..3817748704"},
        {"global_bs beyond all", A2(.global_bs = INT64_MAX - 15), "global_bs",
         "is 9223372036854775792", "0..3817748704"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        ep_group_call call = rows[i].call;
        check(&call, &rows[i]);
        call.profile = EP_GROUP_A3;
        check(&call, &rows[i]);
    }
}

Test(group_profile, native_divides_nothing)
{
    for (int64_t world = 1; world <= 9; world++) {
        for (int64_t shared = 0; shared < world; shared++) {
            const profile_row row = {"odd numbers",
                                     {.operator= EP_GROUP_DISPATCH,
                                      WORLD(world),
                                      SHARED(shared, (shared + 1) / 2),
                                      .moe_experts = 7,
                                      .tp_world_size = 1,
                                      .comm = EP_GROUP_FULLMESH,
                                      .hidden = 3,
                                      .top_k = 2,
                                      .dtype = EP_DTYPE_F32,
                                      .ids_dtype = EP_DTYPE_I64},
                                     PASSES};
            check(&row.call, &row);
        }
    }
}

Test(group_profile, native_keeps_what_the_layout_needs)
{
    static const profile_row rows[] = {
        {"all ranks have shared experts", NATIVE(.shared_ranks = 16), "shared_expert_rank_num",
         "is 16", "0..15"},
        {"more shared experts than ranks", NATIVE(.shared_ranks = 2, .shared_rows = 3),
         "shared_expert_num", "is 3", "1..2"},
        {"scales without quantization", NATIVE(.has_scales = 1), "scales", "given",
         "quant_mode is 0"},
        {"scales with quantization", NATIVE(.has_scales = 1, .quant_mode = 2), PASSES},
        {"scales with hierarchy",
         NATIVE(.has_scales = 1, .quant_mode = 2, .comm = EP_GROUP_HIERARCHY), "scales", "given",
         "comm_alg is hierarchy"},
    };
    check_all(rows, COUNT(rows));
}

/* ---- A ---- */

Test(group_profile, capacity)
{
    const ep_group_call call = A3(), global = A3(.global_bs = 64 * 16), shared = A3(SHARED(8, 2));
    char formula[200];
    cr_expect_eq(ep_group_capacity(&call, 3, formula, sizeof(formula)), 32 * 16 * 4);
    cr_expect(strstr(formula, "32 * 16 * min(4, 8)") != NULL, "%s", formula);
    cr_expect_eq(ep_group_capacity(&global, 3, NULL, 0), 64 * 16 * 4);
    cr_expect_eq(ep_group_capacity(&shared, 0, NULL, 0), 32 * 16 * 2 / 8);
    cr_expect_eq(ep_group_capacity(&shared, 8, NULL, 0), 32 * 16 * 8);
}

/* ---- buffers ---- */

/* Each line by hand from the documented formula. */
Test(group_profile, vendor_buffers)
{
    const uint64_t mib = 1 << 20;
    const ep_group_call a2 = A2(.moe_experts = 32),
                        a2_h = A2_HIERARCHY(.moe_experts = 32, .top_k = 9);
    const ep_group_call a3 = A3(WORLD(2), .moe_experts = 128, .hidden = 2048);
    const ep_group_call v2 = A3_V2(WORLD(2), .moe_experts = 128, .hidden = 2048);
    const ep_group_call a3_h = A3_HIERARCHY(.moe_experts = 32), native = NATIVE();
    const ep_group_call shared = A3(SHARED(8, 4), .moe_experts = 64, .hidden = 1024);
    const ep_group_call tp = A3(.moe_experts = 16, .tp_world_size = 2, .hidden = 1024);
    cr_expect_eq(ep_group_vendor_bytes(&native, 8), 0);
    cr_expect_eq(ep_group_vendor_bytes(&a2, 8), 2 * (8ull * 16 * 2 * 7168 * 2 + 2 * mib));
    cr_expect_eq(ep_group_vendor_bytes(&a2_h, 8), 36ull * (8 * (14336 + 256)) + 8 * mib);
    /* a report of users: 608 MiB, which the operator names as 609 */
    cr_expect_eq(ep_group_vendor_bytes(&a3, 512), 608 * mib);
    cr_expect_eq(ep_group_vendor_bytes(&v2, 512), 2 * (64ull * 512 * 2 * 9 * 512 + 8 * 512 * 4096));
    cr_expect_eq(ep_group_vendor_bytes(&a3_h, 8), 32ull * 8 * (14336 + 128) + 404 * mib);
    cr_expect_eq(ep_group_vendor_bytes(&shared, 8), 2 * (8ull * 8 * 16 * 2560 + 12 * 8 * 2048));
    cr_expect_eq(ep_group_vendor_tp_bytes(&tp, 8), 2 * (8ull * 16) * (2560 + 2048));
    cr_expect_eq(ep_group_vendor_tp_bytes(&a3, 8), 0);
}
