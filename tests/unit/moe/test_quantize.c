/* SPDX-License-Identifier: Apache-2.0 */
/* int8 rows: each step as written, and each special case. */
#include "moe/quantize.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"

Test(quantize, rounds_half_to_even)
{
    /* amax 127 makes d exactly 1 */
    const float row[] = {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f};
    const int8_t want[] = {127, 0, 2, 2, 0, -2, -2, 126};
    int8_t q[8];
    cr_assert(ep_row_quantize_i8(row, NULL, 8, q) == 1.0f);
    cr_assert_eq(memcmp(q, want, 8), 0);
}

Test(quantize, scale_is_the_reciprocal_of_d_not_amax_over_127)
{
    unsigned differ = 0;
    uint64_t state = 1;
    for (int i = 0; i < 1000; i++) {
        float row[3];
        int8_t q[3];
        for (int j = 0; j < 3; j++) {
            row[j] = (float)(ep_splitmix64(&state) >> 40) * 0x1p-20f - 8.0f;
        }
        float amax = fmaxf(fabsf(row[0]), fmaxf(fabsf(row[1]), fabsf(row[2])));
        volatile float d = 127.0f / amax;
        volatile float scale = 1.0f / d;
        cr_assert_eq(ep_f32_bits(ep_row_quantize_i8(row, NULL, 3, q)), ep_f32_bits(scale));
        for (int j = 0; j < 3; j++) {
            volatile float scaled = row[j] * d;
            cr_assert_eq(q[j], (int8_t)nearbyintf(scaled));
        }
        differ += scale != amax / 127.0f;
    }
    cr_assert_gt(differ, 50u, "the two forms must be told apart by this test");
}

Test(quantize, a_zero_row_and_a_tiny_one_give_zeros_with_scale_0)
{
    const float zeros[] = {0.0f, -0.0f, 0.0f};
    const float tiny[] = {0x1p-149f, 0x1p-140f, 0x1p-135f}; /* 127 / 2^-135 overflows */
    int8_t q[3] = {1, 1, 1};
    const int8_t none[3] = {0, 0, 0};
    cr_assert(ep_f32_bits(ep_row_quantize_i8(zeros, NULL, 3, q)) == 0);
    cr_assert_eq(memcmp(q, none, 3), 0);
    memset(q, 1, 3);
    cr_assert(ep_f32_bits(ep_row_quantize_i8(tiny, NULL, 3, q)) == 0);
    cr_assert_eq(memcmp(q, none, 3), 0);
}

Test(quantize, a_row_with_a_non_finite_element_gives_zeros_with_scale_nan)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    const int8_t none[3] = {0, 0, 0};
    for (int place = 0; place < 3; place++) {
        for (int i = 0; i < 3; i++) {
            float row[3] = {1, 2, 3};
            int8_t q[3] = {1, 1, 1};
            row[place] = bad[i];
            cr_assert(isnan(ep_row_quantize_i8(row, NULL, 3, q)));
            cr_assert_eq(memcmp(q, none, 3), 0);
        }
    }
}

Test(quantize, smooth_scales_multiply_first_and_may_overflow_only_their_row)
{
    const float row[] = {1.0f, 2.0f, 4.0f};
    const float smooth[] = {127.0f, 1.0f, 0.25f};
    const int8_t want[] = {127, 2, 1};
    const float huge[] = {3e38f, 3e38f, 3e38f};
    int8_t q[3];
    cr_assert(ep_row_quantize_i8(row, smooth, 3, q) == 1.0f);
    cr_assert_eq(memcmp(q, want, 3), 0);
    cr_assert(isnan(ep_row_quantize_i8(row, huge, 3, q)));
}

Test(quantize, never_leaves_minus_127_to_127_and_dequantises_within_half_a_step)
{
    uint64_t state = 7;
    for (int i = 0; i < 20000; i++) {
        float row[5];
        float back[5];
        int8_t q[5];
        int exponent = (int)(ep_splitmix64(&state) % 200) - 100;
        for (int j = 0; j < 5; j++) {
            row[j] = ldexpf((float)(ep_splitmix64(&state) >> 40) * 0x1p-23f - 1.0f, exponent);
        }
        float scale = ep_row_quantize_i8(row, NULL, 5, q);
        ep_row_dequantize_i8(q, scale, 5, back);
        for (int j = 0; j < 5; j++) {
            cr_assert(q[j] >= -127);
            cr_assert(fabsf(back[j] - row[j]) <= scale * 0.50001f);
        }
    }
}

Test(quantize, an_empty_row_is_a_zero_row)
{
    cr_assert(ep_row_quantize_i8(NULL, NULL, 0, NULL) == 0.0f);
}
