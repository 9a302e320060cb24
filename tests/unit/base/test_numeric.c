/* SPDX-License-Identifier: Apache-2.0 */
/* Every bf16 and f16 value survives the round trip; rounding and exp agree with double
 * arithmetic. */
#include <criterion/criterion.h>
#include <math.h>

#include "base/numeric.h"
#include "base/random.h"

Test(numeric, every_half_value_survives_the_round_trip)
{
    for (uint32_t i = 0; i < 65536; i++) {
        float b = ep_bf16_to_f32((uint16_t)i), h = ep_f16_to_f32((uint16_t)i);
        if (isnan(b)) {
            cr_assert(isnan(ep_bf16_to_f32(ep_f32_to_bf16(b))));
        } else {
            cr_assert_eq(ep_f32_to_bf16(b), i);
        }
        if (isnan(h)) {
            cr_assert(isnan(ep_f16_to_f32(ep_f32_to_f16(h))));
        } else {
            cr_assert_eq(ep_f32_to_f16(h), i);
        }
    }
}

/* The nearest of the two neighbours found by search, ties to the even code: an independent reading
 * of the rule. */
static uint16_t nearest(float x, float (*widen)(uint16_t), uint16_t inf)
{
    uint16_t sign = signbit(x) ? 0x8000u : 0;
    double a = fabs((double)x);
    uint32_t low = 0, high = inf;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if ((double)widen((uint16_t)middle) <= a) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = widen((uint16_t)low);
    double above = high == inf ? below + (below - (double)widen((uint16_t)(low - 1)))
                               : (double)widen((uint16_t)high);
    if (a - below < above - a || (a - below == above - a && low % 2 == 0)) {
        return (uint16_t)(sign | low);
    }
    return (uint16_t)(sign | high);
}

Test(numeric, rounds_to_nearest_even)
{
    uint64_t seed = 1;
    for (int i = 0; i < 300000; i++) {
        float x = ep_f32_from_bits((uint32_t)ep_splitmix64(&seed));
        if (isnan(x) || isinf(x)) {
            continue;
        }
        cr_assert_eq(ep_f32_to_bf16(x), nearest(x, ep_bf16_to_f32, 0x7f80), "bf16 of %a",
                     (double)x);
        cr_assert_eq(ep_f32_to_f16(x), nearest(x, ep_f16_to_f32, 0x7c00), "f16 of %a", (double)x);
        float small = x == 0 ? 0 : (float)ldexp(frexp((double)x, &(int){0}), (int)(i % 50) - 30);
        cr_assert_eq(ep_f32_to_f16(small), nearest(small, ep_f16_to_f32, 0x7c00), "f16 of %a",
                     (double)small);
    }
}

Test(numeric, exp_is_within_two_units_and_has_the_right_ends)
{
    for (float x = -103.0f; x < 88.7f; x += 0.00137f) {
        double want = exp((double)x), got = (double)ep_expf(x);
        double unit = fmax(ldexp(1.0, ilogb(want) - 23), 0x1p-149);
        cr_assert_leq(fabs(got - want), 2.0 * unit, "exp(%a)", (double)x);
    }
    cr_assert_eq(ep_expf(0.0f), 1.0f);
    cr_assert_eq(ep_expf(INFINITY), INFINITY);
    cr_assert_eq(ep_expf(-INFINITY), 0.0f);
    cr_assert(isnan(ep_expf(NAN)));
    /* -inf / inf: NaN, as the formula says */
    cr_assert_eq(ep_siluf(-INFINITY) != ep_siluf(-INFINITY), 1);
}
