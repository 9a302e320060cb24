/* SPDX-License-Identifier: Apache-2.0 */
/* What profile `native` takes and refuses, and the sizes of buffers. The vendor's ranges have a row
 * each in unit/client/group/test_args.c, where prepare applies them. */
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

typedef struct {
    const char *claim;
    ep_group_call call;
    /* the text begins with the parameter and holds the others */
    const char *parameter, *value, *allowed;
} profile_row;

static void check(const profile_row *row)
{
    ep_error error;
    ep_error_clear(&error);
    ep_err err = ep_group_profile_check(&row->call, &error);
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
            check(&row);
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
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        check(&rows[i]);
    }
}

Test(group_profile, sizes_beyond_any_group_are_refused)
{
    static const profile_row rows[] = {
        {"world of 769", A3(WORLD(769), .moe_experts = 769), "ep_world_size", "is 769", "2..768"},
        {"largest global_bs", A2(.global_bs = INT32_MAX / 9 * (int64_t)16), PASSES},
        {"global_bs too large", A2(.global_bs = (INT32_MAX / 9 + 1) * (int64_t)16), "global_bs",
         "is 3817748720", "0..3817748704"},
        {"global_bs beyond all", A2(.global_bs = INT64_MAX - 15), "global_bs",
         "is 9223372036854775792", "0..3817748704"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        check(&rows[i]);
    }
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
