/* SPDX-License-Identifier: Apache-2.0 */
/* Every rule of ep_batch_check with its text, and what a slot is. */
#include "moe/batch.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

enum { T = 4, K = 2, H = 3 };

typedef struct {
    ep_batch batch;
    ep_layer_shape shape;
    float x[T * H];
    float x_scales[T];
    int32_t ids[T * K];
    int64_t wide_ids[T * K];
    float scales[T * K];
    uint8_t mask_tokens[T];
    uint8_t mask_slots[T * K];
    uint8_t partial[T * K];
} fixture;

static fixture f;

static void setup(void)
{
    memset(&f, 0, sizeof(f));
    f.shape = (ep_layer_shape){
        .layer = 1, .hidden = H, .inner = 4, .experts = 8, .shared_experts = 1, .top_k = 2};
    f.batch = (ep_batch){.tokens = T,
                         .top_k = K,
                         .hidden = H,
                         .x = {f.x, H * 4, EP_DTYPE_F32},
                         .ids = {f.ids, K * 4, EP_DTYPE_I32},
                         .scales = {f.scales, K * 4, EP_DTYPE_F32},
                         .wire_dtype = EP_DTYPE_BF16,
                         .out_dtype = EP_DTYPE_BF16};
    for (int i = 0; i < T * K; i++) {
        f.ids[i] = i;
        f.scales[i] = 0.5f;
    }
    memset(f.mask_tokens, 1, sizeof(f.mask_tokens));
    memset(f.mask_slots, 1, sizeof(f.mask_slots));
    memset(f.partial, 1, sizeof(f.partial));
}

TestSuite(batch, .init = setup);

static void expect_refused(const char *text)
{
    ep_error error;
    cr_assert_eq(ep_batch_check(&f.batch, &f.shape, &error), EP_ERR_INVALID_ARGUMENT,
                 "accepted, expected: %s", text);
    cr_assert_str_eq(error.text, text);
    cr_assert_eq(ep_batch_check(&f.batch, &f.shape, NULL), EP_ERR_INVALID_ARGUMENT);
}

static void expect_accepted(void)
{
    ep_error error = {0};
    cr_assert_eq(ep_batch_check(&f.batch, &f.shape, &error), EP_OK, "%s", error.text);
}

/* Refused of a proper batch with nothing but this change. */
#define EXPECT_REFUSED(change, text)                                                               \
    do {                                                                                           \
        setup();                                                                                   \
        f.change;                                                                                  \
        expect_refused(text);                                                                      \
    } while (0)

Test(batch, accepts_a_proper_batch_and_an_empty_one)
{
    expect_accepted();
    f.batch.tokens = 0;
    f.batch.x.data = NULL;
    f.batch.ids.data = NULL;
    f.batch.scales.data = NULL;
    expect_accepted();
}

Test(batch, refuses_expert_ids_outside_the_range_and_names_the_place)
{
    f.ids[3 * K + 1] = 9;
    expect_refused("expert id 9 at token 3, slot 1: allowed 0..7, or -1 or 8 for an inactive slot");
    f.ids[3 * K + 1] = -2;
    expect_refused(
        "expert id -2 at token 3, slot 1: allowed 0..7, or -1 or 8 for an inactive slot");
    f.batch.special.copy_count = 2;
    f.ids[3 * K + 1] = 11;
    expect_refused(
        "expert id 11 at token 3, slot 1: allowed 0..9, or -1 or 10 for an inactive slot");
    f.ids[3 * K + 1] = 10;
    expect_accepted();
    f.ids[3 * K + 1] = -1;
    expect_accepted();
}

Test(batch, reads_64_bit_ids_whole)
{
    f.batch.ids = (ep_rows){f.wide_ids, K * 8, EP_DTYPE_I64};
    f.batch.allow_duplicates = true;
    expect_accepted();
    f.wide_ids[1] = (int64_t)1 << 32;
    expect_refused(
        "expert id 4294967296 at token 0, slot 1: allowed 0..7, or -1 or 8 for an inactive slot");
}

Test(batch, refuses_duplicates_unless_allowed_masked_or_inactive)
{
    f.ids[2 * K] = 5;
    expect_refused("expert id 5 at token 2, slot 1 is already in slot 0: a token's experts must "
                   "differ, unless allow_duplicates (--allow-duplicates) is set");
    f.batch.allow_duplicates = true;
    expect_accepted();
    f.batch.allow_duplicates = false;
    f.batch.mask_tokens = f.mask_tokens;
    f.mask_tokens[2] = 0;
    expect_accepted();
    f.ids[0] = f.ids[1] = -1;
    expect_accepted();
}

Test(batch, refuses_wrong_counts)
{
    EXPECT_REFUSED(batch.hidden = 4, "batch has rows of 4 elements, layer 1 has 3");
    setup();
    f.batch.top_k = 0;
    expect_accepted();
    f.batch.shared_source = EP_SHARED_NONE;
    expect_refused("batch has 0 slots per token: allowed 1..64");
    setup();
    f.batch.tokens = 65536;
    f.shape.shared_experts = 65534;
    expect_refused("batch has 65536 tokens of 65536 slots: allowed up to 4294967295 slots in all");
    EXPECT_REFUSED(
        batch.special.zero_count = UINT32_MAX,
        "layer 1 has 4294967303 experts with the special ones: allowed up to 2147483647");
}

Test(batch, refuses_mask_values_other_than_0_and_1)
{
    f.batch.mask_tokens = f.mask_tokens;
    f.mask_tokens[1] = 2;
    expect_refused("token mask is 2 at token 1: allowed 0 or 1");
    setup();
    f.batch.mask_slots = (ep_rows){f.mask_slots, K, EP_DTYPE_BOOL};
    f.mask_slots[3 * K] = 255;
    expect_refused("slot mask is 255 at token 3, slot 0: allowed 0 or 1");
    setup();
    f.batch.form = EP_RESULT_PARTIAL;
    f.batch.partial_slots = (ep_rows){f.partial, K, EP_DTYPE_BOOL};
    f.partial[1] = 7;
    expect_refused("mark of a partial result is 7 at token 0, slot 1: allowed 0 or 1");
}

Test(batch, rejects_nan_and_large_values_of_active_tokens_only)
{
    f.x[2 * H + 1] = NAN;
    expect_accepted();
    f.batch.nan_policy = EP_NAN_REJECT;
    expect_refused("x is nan at token 2, element 1: only finite values are allowed");
    f.x[2 * H + 1] = 5.0f;
    f.batch.x_abs_max = 4.0f;
    expect_refused("x is 5 at token 2, element 1: allowed -4..4");
    f.batch.mask_tokens = f.mask_tokens;
    f.mask_tokens[2] = 0;
    expect_accepted();
    f.mask_tokens[2] = 1;
    f.batch.nan_policy = EP_NAN_ZERO;
    f.x[2 * H + 1] = INFINITY;
    expect_accepted();
    f.batch.nan_policy = EP_NAN_PASS;
    expect_refused("x is inf at token 2, element 1: allowed -4..4");
}

Test(batch, rejects_an_i8_row_whose_scale_is_not_finite)
{
    f.batch.x = (ep_rows){f.x, H, EP_DTYPE_I8};
    f.batch.x_scales = f.x_scales;
    f.x_scales[3] = NAN;
    expect_accepted();
    f.batch.nan_policy = EP_NAN_REJECT;
    expect_refused("row scale of x is nan at token 3: only finite values are allowed");
}

Test(batch, says_what_each_slot_is)
{
    f.batch.special = (ep_special_experts){.zero_count = 2, .copy_count = 2, .const_count = 2};
    const struct {
        int32_t id;
        ep_slot_kind kind;
        uint32_t expert;
    } cases[] = {{0, EP_SLOT_ROUTED, 0},
                 {7, EP_SLOT_ROUTED, 7},
                 {8, EP_SLOT_INACTIVE, EP_NO_EXPERT},
                 {9, EP_SLOT_INACTIVE, EP_NO_EXPERT},
                 {10, EP_SLOT_COPY, 0},
                 {11, EP_SLOT_COPY, 1},
                 {12, EP_SLOT_CONST, 0},
                 {13, EP_SLOT_CONST, 1},
                 {14, EP_SLOT_INACTIVE, EP_NO_EXPERT},
                 {-1, EP_SLOT_INACTIVE, EP_NO_EXPERT}};
    uint32_t expert;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        f.ids[0] = cases[i].id;
        cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 0, 0, &expert), cases[i].kind, "id %d",
                     cases[i].id);
        cr_assert_eq(expert, cases[i].expert, "id %d", cases[i].id);
    }
    cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 0, K, &expert), EP_SLOT_SHARED);
    cr_assert_eq(expert, 8);
    f.batch.form = EP_RESULT_UNCOMBINED;
    cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 0, K, &expert), EP_SLOT_INACTIVE);
}

Test(batch, unmarked_slots_of_a_partial_result_are_inactive_and_do_not_make_a_token_inactive)
{
    f.batch.form = EP_RESULT_PARTIAL;
    f.batch.partial_slots = (ep_rows){f.partial, K, EP_DTYPE_BOOL};
    memset(f.partial, 0, sizeof(f.partial));
    f.partial[1] = 1;
    uint32_t expert;
    cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 0, 0, &expert), EP_SLOT_INACTIVE);
    cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 0, 1, &expert), EP_SLOT_ROUTED);
    cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 1, K, &expert), EP_SLOT_SHARED);
    cr_assert(ep_batch_token_active(&f.batch, 1));
}

Test(batch, a_token_is_inactive_by_mask_only)
{
    f.ids[0] = f.ids[1] = -1;
    cr_assert(ep_batch_token_active(&f.batch, 0));
    f.batch.mask_slots = (ep_rows){f.mask_slots, K, EP_DTYPE_BOOL};
    f.mask_slots[0] = 0;
    cr_assert(ep_batch_token_active(&f.batch, 0));
    f.mask_slots[1] = 0;
    cr_assert(!ep_batch_token_active(&f.batch, 0));
    uint32_t expert;
    cr_assert_eq(ep_batch_slot(&f.batch, &f.shape, 0, K, &expert), EP_SLOT_INACTIVE);
    f.batch.mask_slots.data = NULL;
    f.batch.mask_tokens = f.mask_tokens;
    f.mask_tokens[0] = 0;
    cr_assert(!ep_batch_token_active(&f.batch, 0));
}

Test(batch, widens_bf16_scales)
{
    uint16_t scales[] = {0x3f80, 0x4000};
    f.batch.scales = (ep_rows){scales, 4, EP_DTYPE_BF16};
    cr_assert(ep_batch_scale(&f.batch, 0, 0) == 1.0f);
    cr_assert(ep_batch_scale(&f.batch, 0, 1) == 2.0f);
}
