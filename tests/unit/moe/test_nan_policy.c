/* SPDX-License-Identifier: Apache-2.0 */
/* What the NaN policies make of a row: the same value widened here and sent to a node. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "base/numeric.h"
#include "moe/batch.h"
#include "moe/convert.h"

enum { H = 600 }; /* more than one internal chunk */

static ep_batch make_batch(ep_dtype dtype, const void *data, ep_nan_policy policy)
{
    return (ep_batch){.tokens = 1, .hidden = H, .x = {data, 0, dtype}, .nan_policy = policy};
}

static void make_row(float *row)
{
    for (int i = 0; i < H; i++) {
        row[i] = i < 300 ? 1.0f : 3.0f;
    }
    row[0] = NAN;
    row[299] = INFINITY;
    row[400] = -INFINITY;
    row[599] = -NAN;
}

Test(nan_policy, pass_changes_nothing)
{
    float row[H];
    float wide[H];
    float sent[H];
    make_row(row);
    ep_batch b = make_batch(EP_DTYPE_F32, row, EP_NAN_PASS);
    ep_batch_widen_row(&b, 0, wide);
    ep_batch_send_row(&b, 0, 0, 0, sent, NULL);
    cr_assert_eq(memcmp(row, wide, sizeof(row)), 0);
    cr_assert_eq(memcmp(row, sent, sizeof(row)), 0);
    cr_assert_eq(ep_batch_count_nonfinite(&b, 0), 4);
}

static void check_replaced(ep_dtype dtype, ep_nan_policy policy, float expected)
{
    float row[H];
    float wide[H];
    uint8_t given[H * 4];
    uint8_t sent[H * 4 + 1];
    float sent_wide[H];
    make_row(row);
    ep_row_narrow(row, H, dtype, given);
    ep_batch b = make_batch(dtype, given, policy);
    cr_assert_eq(ep_batch_count_nonfinite(&b, 0), 4);
    ep_batch_widen_row(&b, 0, wide);
    ep_batch_send_row(&b, 0, 0, 0, sent + 1, NULL);
    ep_row_widen(sent + 1, dtype, H, sent_wide);
    for (int i = 0; i < H; i++) {
        float want = isfinite(row[i]) ? row[i] : expected;
        cr_assert_eq(ep_f32_bits(wide[i]), ep_f32_bits(want), "element %d: %g", i, (double)wide[i]);
    }
    cr_assert_eq(memcmp(wide, sent_wide, sizeof(wide)), 0);
}

Test(nan_policy, zero_and_mean_replace_in_every_type)
{
    double mean = (298 * 1.0 + 298 * 3.0) / 596;
    const ep_dtype types[] = {EP_DTYPE_F32, EP_DTYPE_BF16, EP_DTYPE_F16};
    for (int i = 0; i < 3; i++) {
        check_replaced(types[i], EP_NAN_ZERO, 0.0f);
        check_replaced(types[i], EP_NAN_MEAN, (float)mean);
    }
}

Test(nan_policy, the_mean_is_rounded_to_the_type_of_x)
{
    uint16_t row[H];
    float wide[H];
    for (int i = 0; i < H; i++) {
        row[i] = i == 0 ? 0x7fc0 : i < 200 ? ep_f32_to_bf16(1.0f) : ep_f32_to_bf16(1.0078125f);
    }
    ep_batch b = make_batch(EP_DTYPE_BF16, row, EP_NAN_MEAN);
    ep_batch_widen_row(&b, 0, wide);
    float mean = (float)((199 * 1.0 + 400 * 1.0078125) / 599);
    cr_assert_neq(ep_bf16_to_f32(ep_f32_to_bf16(mean)), mean);
    cr_assert_eq(ep_f32_bits(wide[0]), ep_f32_bits(ep_bf16_to_f32(ep_f32_to_bf16(mean))));
}

Test(nan_policy, the_mean_of_huge_values_does_not_overflow_and_of_none_is_0)
{
    float row[H];
    float wide[H];
    for (int i = 0; i < H; i++) {
        row[i] = 3e38f;
    }
    row[7] = NAN;
    ep_batch b = make_batch(EP_DTYPE_F32, row, EP_NAN_MEAN);
    ep_batch_widen_row(&b, 0, wide);
    cr_assert(wide[7] == 3e38f);
    for (int i = 0; i < H; i++) {
        row[i] = NAN;
    }
    ep_batch_widen_row(&b, 0, wide);
    cr_assert(wide[7] == 0.0f);
}

Test(nan_policy, an_i8_row_is_bad_as_a_whole_when_its_scale_is)
{
    int8_t row[H];
    float wide[H];
    float scales[] = {NAN};
    memset(row, 1, sizeof(row));
    ep_batch b = make_batch(EP_DTYPE_I8, row, EP_NAN_PASS);
    b.x_scales = scales;
    cr_assert_eq(ep_batch_count_nonfinite(&b, 0), H);
    ep_batch_widen_row(&b, 0, wide);
    cr_assert(isnan(wide[0]));
    cr_assert(isnan(ep_batch_row_scale(&b, 0)));
    b.nan_policy = EP_NAN_MEAN;
    ep_batch_widen_row(&b, 0, wide);
    cr_assert(wide[0] == 0.0f);
    cr_assert(ep_batch_row_scale(&b, 0) == 0.0f);
    scales[0] = 0.5f;
    cr_assert_eq(ep_batch_count_nonfinite(&b, 0), 0);
    ep_batch_widen_row(&b, 0, wide);
    cr_assert(wide[H - 1] == 0.5f);
}
