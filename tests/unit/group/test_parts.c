/* SPDX-License-Identifier: Apache-2.0 */
/* Layout, elastic_info, assist info, frames. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "group/group_rows.h"
#include "group/group_assist.h"
#include "group/group_frame.h"
#include "group/group_layout.h"
#include "group/group_norm.h"
#include "support/expect.h"

Test(group_layout, each_bucket_has_one_rank)
{
    for (uint32_t world = 1; world < 9; world++) {
        for (uint32_t shared = 0; shared < world; shared++) {
            for (uint32_t experts = 1; experts < 20; experts++) {
                ep_group_layout l = {world, shared, shared > 0 ? 1 : 0, experts};
                uint32_t bucket = 0;
                for (uint32_t r = 0; r < world; r++) {
                    cr_expect_eq(ep_group_first_bucket(&l, r), bucket);
                    for (uint32_t e = 0; e < ep_group_local_experts(&l, r); e++) {
                        cr_expect_eq(ep_group_bucket_rank(&l, bucket++), r);
                    }
                }
                cr_expect_eq(bucket, ep_group_buckets(&l));
            }
        }
    }
}

Test(group_layout, follows_the_vendors_formulas_where_they_divide)
{
    ep_group_layout l = {.ranks = 16, .shared_ranks = 8, .shared_experts = 2, .experts = 64};
    for (uint32_t e = 0; e < 64; e++) {
        cr_expect_eq(ep_group_bucket_rank(&l, 8 + e), e / 8 + 8);
    }
    for (uint32_t r = 0; r < 16; r++) {
        cr_expect_eq(ep_group_shared_rank(&l, 0, r), r % 4);
        cr_expect_eq(ep_group_shared_rank(&l, 1, r), r % 4 + 4);
    }
}

Test(group_layout, elastic_info)
{
    ep_group_call call = {.ranks = 4, .moe_experts = 8, .local_rank = 3};
    uint32_t members[4];
    ep_error error;
    int32_t whole[12] = {0};
    cr_expect_eq(ep_group_elastic_read(whole, 4, 3, &call, members, &error), EP_OK);
    cr_expect(call.ranks == 4 && call.moe_experts == 8 && call.elastic_digest == 0);
    int32_t less[12] = {1, 3, 1, 6, 0, -1, 1, 2, 0, 2, 3, -1};
    EXPECT_OK(ep_group_elastic_read(less, 4, 3, &call, members, &error), error);
    cr_expect(call.ranks == 3 && call.shared_ranks == 1 && call.moe_experts == 6 &&
              call.local_rank == 2 && call.elastic_digest != 0);
    cr_expect(members[0] == 0 && members[1] == 2 && members[2] == 3);
    EXPECT_FAILS(ep_group_elastic_read(less, 4, 1, &call, members, &error), EP_ERR_INVALID_ARGUMENT,
                 error, "leaves out rank 1");
    const struct {
        int index;
        int32_t value;
        const char *text;
    } bad[] = {{0, 2, "is_scaled_down is 2"},  {1, 0, "new rank number is 0"},
               {1, 5, "new rank number is 5"}, {4, 3, "table1[0] is 3"},
               {4, -1, "names 2 ranks"},       {9, 0, "table2[1] is 0"},
               {9, 7, "table2[1] is 7"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int32_t info[12];
        memcpy(info, less, sizeof(info));
        info[bad[i].index] = bad[i].value;
        EXPECT_FAILS(ep_group_elastic_read(info, 4, 3, &call, members, &error),
                     EP_ERR_INVALID_ARGUMENT, error, bad[i].text);
    }
    const int64_t wrong[] = {0, (INT64_C(1) << 32) + 6, INT64_MAX}; /* of which some went away */
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        call.moe_experts = wrong[i];
        EXPECT_FAILS(ep_group_elastic_read(less, 4, 3, &call, members, &error),
                     EP_ERR_INVALID_ARGUMENT, error, "moe_expert_num is ");
    }
}

Test(group_assist, tells_another_dispatch)
{
    int32_t info[256] = {3, 2, 1, 6, 5, 4};
    ep_group_assist mine = {
        .membership = 7, .number = 11, .rows = 2, .ids_digest = 5, .counts_digest = 6};
    ep_group_assist out;
    ep_error error;
    cr_expect_eq(ep_group_assist_open(info, 256, &mine, &out, &error), EP_ERR_INVALID_ARGUMENT,
                 "never sealed");
    ep_group_assist_seal(&mine, info, 256);
    EXPECT_OK(ep_group_assist_open(info, 256, &mine, &out, &error), error);
    cr_expect(out.number == 11 && out.rows == 2);
    ep_group_assist other = mine;
    other.membership = 8;
    EXPECT_FAILS(ep_group_assist_open(info, 256, &other, &out, &error), EP_ERR_FAILED_PRECONDITION,
                 error, "membership");
    other = mine;
    other.ids_digest++;
    EXPECT_FAILS(ep_group_assist_open(info, 256, &other, &out, &error), EP_ERR_FAILED_PRECONDITION,
                 error, "another dispatch (number 11)");
    other = mine;
    other.counts_digest++;
    EXPECT_FAILS(ep_group_assist_open(info, 256, &other, &out, &error), EP_ERR_FAILED_PRECONDITION,
                 error, "ep_send_counts");
    info[4]++;
    cr_expect_eq(ep_group_assist_open(info, 256, &mine, &out, &error), EP_ERR_INVALID_ARGUMENT,
                 "altered");
    cr_expect_eq(ep_group_assist_open(info, 255, &mine, &out, &error), EP_ERR_INVALID_ARGUMENT,
                 "another length");
}

Test(group_frame, damage_is_found)
{
    uint8_t fixed[EP_GROUP_FRAME_FIXED_BYTES];
    ep_group_frame frame = {.kind = EP_GROUP_FRAME_ROWS,
                            .flags = 1,
                            .membership = 2,
                            .rank = 3,
                            .generation = 4,
                            .number = 5,
                            .payload_bytes = 6,
                            .payload_crc = 7,
                            .origin = 8};
    ep_group_frame back;
    size_t bytes;
    ep_group_frame_encode(&frame, fixed);
    cr_assert_eq(ep_group_frame_decode(fixed, &back, NULL), EP_OK);
    cr_expect(back.kind == frame.kind && back.flags == 1 && back.membership == 2 &&
              back.rank == 3 && back.generation == 4 && back.number == 5 &&
              back.payload_bytes == 6 && back.payload_crc == 7 && back.origin == 8);
    cr_expect_eq(ep_group_frame_read_bytes(fixed, &bytes, NULL), EP_OK);
    cr_expect_eq(bytes, 70);
    for (size_t i = 0; i < sizeof(fixed); i++) {
        fixed[i] ^= 0x20;
        cr_expect_eq(ep_group_frame_decode(fixed, &back, NULL), EP_ERR_PROTOCOL, "byte %zu", i);
        fixed[i] ^= 0x20;
    }
    frame.payload_bytes = (uint64_t)1 << 41;
    ep_group_frame_encode(&frame, fixed);
    cr_expect_eq(ep_group_frame_read_bytes(fixed, &bytes, NULL), EP_ERR_PROTOCOL);
}

Test(group_frame, hello)
{
    ep_group_hello hello = {
        .world_size = 4, .rank = 2, .name = "a", .url = "tcp://b:1", .token = "c", .host = "d"};
    ep_group_hello back;
    uint8_t payload[EP_GROUP_HELLO_BYTES];
    ep_group_hello_encode(&hello, payload);
    cr_assert_eq(ep_group_hello_decode(payload, sizeof(payload), &back, NULL), EP_OK);
    cr_expect(back.world_size == 4 && back.rank == 2 && strcmp(back.url, "tcp://b:1") == 0 &&
              strcmp(back.token, "c") == 0 && strcmp(back.host, "d") == 0);
    cr_expect_eq(ep_group_hello_decode(payload, sizeof(payload) - 1, &back, NULL), EP_ERR_PROTOCOL);
    memset(payload + sizeof(payload) - EP_HOST_BYTES, 'x', EP_HOST_BYTES);
    cr_expect_eq(ep_group_hello_decode(payload, sizeof(payload), &back, NULL), EP_ERR_PROTOCOL);
    payload[sizeof(payload) - 1] = 0;
    memset(payload + 8, 'x', EP_GROUP_NAME_BYTES_MAX + 1);
    cr_expect_eq(ep_group_hello_decode(payload, sizeof(payload), &back, NULL), EP_ERR_PROTOCOL);
}

Test(group_norm, sums_of_zero_and_eps)
{
    float sum[4] = {1, 2, 3, 4};
    float residual[4] = {-1, -2, -3, -4};
    float gamma[4] = {1, 1, 1, 1};
    float y[4] = {9, 9, 9, 9};
    float x[4] = {9, 9, 9, 9};
    cr_expect_eq(ep_group_add_rms_norm(sum, residual, gamma, 0.25f, 4, EP_DTYPE_F32, y, x), 2.0f);
    for (int i = 0; i < 4; i++) {
        cr_expect(y[i] == 0.0f && x[i] == 0.0f);
    }
}

/* ---- ids ---- */

/* Four routed experts, then `gone` that elastic_info took away, then a zero and a copy expert. */
static void expect_ids(ep_group_profile profile, uint32_t gone, const int32_t ids[3],
                       const uint8_t mask[3], const char *says)
{
    const ep_group_call call = {.profile = profile};
    const ep_layer_shape shape = {.hidden = 1, .experts = 4, .top_k = 3};
    ep_batch batch = {.tokens = 1,
                      .top_k = 3,
                      .hidden = 1,
                      .ids = {ids, 12, EP_DTYPE_I32},
                      .special = {.first_gap = gone, .zero_count = 1, .copy_count = 1}};
    bool has_inactive;
    ep_error error;
    ep_error_clear(&error);
    if (mask != NULL) {
        batch.mask_slots = (ep_rows){mask, 3, EP_DTYPE_BOOL};
    }
    ep_err err = ep_group_batch_check(&call, &batch, &shape, &has_inactive, &error);
    cr_expect(says == NULL ? err == EP_OK
                           : err == EP_ERR_INVALID_ARGUMENT && strstr(error.text, says) != NULL,
              "{%d, %d, %d}: \"%s\"", ids[0], ids[1], ids[2], error.text);
}

Test(group_rows, ids)
{
    static const uint8_t last_masked[] = {1, 1, 0};
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){0, 4, 5}, NULL, NULL);
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){0, 4, 4}, NULL, "is 4 at token 0, slots 1 and 2");
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){5, 1, 5}, NULL, "must differ, special ones too");
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){1, 2, 1}, NULL, "slots 0 and 2");
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){0, 4, 4}, last_masked, NULL);
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){0, 1, 6}, NULL, "allowed 0..5");
    expect_ids(EP_GROUP_A3, 0, (const int32_t[]){0, 1, -1}, NULL, "allowed 0..5");
    expect_ids(EP_GROUP_NATIVE, 0, (const int32_t[]){0, 4, 4}, NULL, NULL);
    expect_ids(EP_GROUP_NATIVE, 0, (const int32_t[]){1, 1, 4}, NULL, "unless allow_duplicates");
    expect_ids(EP_GROUP_NATIVE, 3, (const int32_t[]){0, 7, 8}, NULL, NULL);
    expect_ids(EP_GROUP_NATIVE, 3, (const int32_t[]){0, 4, 8}, NULL,
               "took away the experts from 4 to 6");
    expect_ids(EP_GROUP_NATIVE, 3, (const int32_t[]){6, 7, 8}, NULL,
               "took away the experts from 4 to 6");
    expect_ids(EP_GROUP_NATIVE, 3, (const int32_t[]){0, 9, -1}, NULL, NULL); /* none */
    expect_ids(EP_GROUP_NATIVE, 3, (const int32_t[]){0, 10, 1}, NULL, "is 10");
}

/* ---- expand_idx ---- */

/* Two shared-expert ranks, whose slots have no entry; a token that is masked and a slot of none. */
Test(group_rows, each_entry_of_expand_idx_is_checked_in_its_order)
{
    int32_t ids[4][2] = {{1, 0}, {1, 1}, {0, 1}, {-1, 1}};
    const int32_t good[8] = {0, 0, 0, 0, 1, 1, 0, 2};
    uint8_t mask[4] = {1, 0, 1, 1};
    const ep_group_layout layout = {
        .ranks = 4, .shared_ranks = 2, .shared_experts = 1, .experts = 2};
    const ep_layer_shape shape = {.hidden = 8, .experts = 2, .shared_experts = 1, .top_k = 2};
    const ep_batch batch = {
        .tokens = 4,
        .top_k = 2,
        .hidden = 8,
        .mask_tokens = mask,
        .form = EP_RESULT_COMBINED,
        .shared_source = EP_SHARED_SERVICE,
        .ids = {.data = ids, .stride_bytes = sizeof(ids[0]), .dtype = EP_DTYPE_I32}};
    uint32_t offsets[5], order[12], counts[4];
    int32_t index[8];
    ep_error error;
    ep_group_sort(&batch, &shape, &layout, 0, offsets, order);
    ep_group_write_index(&batch, &layout, ep_batch_slots_per_token(&batch, &shape), offsets, order,
                         index);
    cr_expect_arr_eq(index, good, sizeof(good));
    EXPECT_OK(ep_group_check_index(&batch, &shape, &layout, index, counts, &error), error);
    for (size_t i = sizeof(good) / sizeof(good[0]); i-- > 0;) { /* those before it are good */
        char says[64];
        index[i] = good[i] + 5;
        snprintf(says, sizeof(says), "expand_idx[%zu] is %d: allowed %d", i, good[i] + 5, good[i]);
        EXPECT_FAILS(ep_group_check_index(&batch, &shape, &layout, index, counts, &error),
                     EP_ERR_INVALID_ARGUMENT, error, says);
    }
}
