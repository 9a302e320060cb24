/* SPDX-License-Identifier: Apache-2.0 */
/* Row conversions: every 16-bit pattern survives, one rounding, any alignment, nothing past the
 * end. */
#include "moe/convert.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"

enum { ALL = 65536 };

static void check_round_trip(ep_dtype dtype, uint16_t (*quiet)(uint16_t))
{
    uint8_t *in = malloc(2 * ALL + 1);
    uint8_t *out = malloc(2 * ALL + 2);
    float *wide = malloc(ALL * sizeof(float));
    for (uint32_t i = 0; i < ALL; i++) {
        uint16_t bits = (uint16_t)i;
        memcpy(in + 1 + 2 * i, &bits, 2);
    }
    out[2 * ALL + 1] = 0xee;
    ep_row_widen(in + 1, dtype, ALL, wide);
    ep_row_narrow(wide, ALL, dtype, out + 1);
    for (uint32_t i = 0; i < ALL; i++) {
        uint16_t bits;
        memcpy(&bits, out + 1 + 2 * i, 2);
        cr_assert_eq(bits, quiet((uint16_t)i), "%04x became %04x", i, bits);
    }
    cr_assert_eq(out[2 * ALL + 1], 0xee);
    free(in);
    free(out);
    free(wide);
}

static uint16_t quiet_bf16(uint16_t b)
{
    return (b & 0x7fff) > 0x7f80 ? b | 0x40 : b;
}

static uint16_t quiet_f16(uint16_t h)
{
    return (h & 0x7fff) > 0x7c00 ? h | 0x200 : h;
}

Test(convert, every_bf16_and_f16_survives_widening_and_narrowing)
{
    check_round_trip(EP_DTYPE_BF16, quiet_bf16);
    check_round_trip(EP_DTYPE_F16, quiet_f16);
}

Test(convert, narrows_with_ties_to_even)
{
    const float in[] = {1.0f + 0x1p-8f, 1.0f + 0x3p-8f, 1.0f + 0x1p-8f + 0x1p-20f, -INFINITY,
                        3.4e38f};
    const uint16_t want[] = {0x3f80, 0x3f82, 0x3f81, 0xff80, 0x7f80};
    uint16_t out[5];
    ep_row_narrow(in, 5, EP_DTYPE_BF16, out);
    for (int i = 0; i < 5; i++) {
        cr_assert_eq(out[i], want[i], "%d: %04x", i, out[i]);
    }
}

Test(convert, converts_long_rows_between_types_and_copies_equal_ones)
{
    enum { N = 1000 };
    static float row[N];
    static uint16_t half[N];
    static float back[N];
    for (int i = 0; i < N; i++) {
        row[i] = (float)(i - 500) * 0.25f;
    }
    ep_row_convert(row, EP_DTYPE_F32, N, EP_DTYPE_F16, half);
    ep_row_convert(half, EP_DTYPE_F16, N, EP_DTYPE_F32, back);
    cr_assert_eq(memcmp(row, back, sizeof(row)), 0);
    memset(back, 0, sizeof(back));
    ep_row_convert(row, EP_DTYPE_F32, N, EP_DTYPE_F32, back);
    cr_assert_eq(memcmp(row, back, sizeof(row)), 0);
    ep_row_convert(row, EP_DTYPE_F32, 0, EP_DTYPE_BF16, NULL);
}

Test(convert, nonfinite_elements_are_counted)
{
    uint16_t bf16[] = {0x7f80, 0xff80, 0x7fc0, 0x3f80, 0x7f7f, 0};
    uint16_t f16[] = {0x7c00, 0x7e00, 0x7bff, 0x3c00};
    float f32[] = {INFINITY, NAN, 1.0f, 3.4e38f};
    cr_expect_eq(ep_row_count_nonfinite(bf16, EP_DTYPE_BF16, 6), 3);
    cr_expect_eq(ep_row_count_nonfinite(f16, EP_DTYPE_F16, 4), 2);
    cr_expect_eq(ep_row_count_nonfinite(f32, EP_DTYPE_F32, 4), 2);
    static uint16_t many[100003]; /* more than a 16-bit count holds, from an odd place */
    memset(many, 0x7f, sizeof(many));
    cr_expect_eq(ep_row_count_nonfinite(many, EP_DTYPE_BF16, EP_ARRAY_COUNT(many)), 0);
    memset(many, 0xff, sizeof(many));
    cr_expect_eq(
        ep_row_count_nonfinite((const char *)many + 1, EP_DTYPE_BF16, EP_ARRAY_COUNT(many) - 1),
        EP_ARRAY_COUNT(many) - 1);
    many[EP_ARRAY_COUNT(many) / 2] = 0;
    cr_expect_eq(ep_row_count_nonfinite(many, EP_DTYPE_F16, EP_ARRAY_COUNT(many)),
                 EP_ARRAY_COUNT(many) - 1);
}
