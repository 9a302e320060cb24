/* SPDX-License-Identifier: Apache-2.0 */
/* Family `bf16odd`: its scalars against cases worked out by hand and against the adder of this CPU
 * with other rounding. Its kernels and its error: test_bf16dp.c. */
#include <criterion/criterion.h>
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "base/random.h"
#include "kernels/bf16odd.h"

static uint32_t pair(float even, float odd)
{
    return (uint32_t)ep_f32_to_bf16(even) | (uint32_t)ep_f32_to_bf16(odd) << 16;
}

Test(bf16odd, products_are_added_first_and_each_sum_rounds_to_odd)
{
    /* 2^24 + 1 lies between 2^24 and 2^24 + 2, whose last bit is set; cut off it would be 2^24. */
    cr_assert_eq(ep_bf16odd_step(0x1p24f, pair(1.0f, 0.0f), pair(1.0f, 0.0f)), 0x1p24f + 2.0f);
    cr_assert_eq(ep_bf16odd_step(0x1p24f, pair(1.0f, 1.0f), pair(1.0f, 1.0f)), 0x1p24f + 2.0f);
    cr_assert_eq(ep_bf16odd_step(0x1p24f, pair(1.0f, -0x1p24f), pair(1.0f, 1.0f)), 1.0f);
    /* -2^24 + 1 is exact; 2^24 and then -2^40 is not: the sum of the products comes first. */
    cr_assert_eq(ep_bf16odd_step(0x1p40f, pair(1.0f, -0x1p40f), pair(1.0f, 1.0f)), 0x1p16f);
    cr_assert_eq(ep_bf16odd_step(1.0f, pair(2.0f, 3.0f), pair(5.0f, 7.0f)), 32.0f);
    /* What is lost on the other side of a power of two: 2^24 - 2^-1 lies between 2^24 - 1 and
     * 2^24. */
    cr_assert_eq(ep_bf16odd_sum(0x1p24f, -0.5f), 0x1p24f - 1.0f);
    cr_assert_eq(ep_bf16odd_sum(-0x1p24f, 0x1p-100f), -(0x1p24f - 1.0f));
}

Test(bf16odd, ends_of_the_range)
{
    const float denormal = 0x1p-127f;
    cr_assert_eq(ep_bf16odd_step(0.0f, pair(denormal, 0.0f), pair(0x1p100f, 0.0f)), 0.0f);
    cr_assert_eq(ep_bf16odd_step(denormal, pair(0.0f, 0.0f), pair(0.0f, 0.0f)), 0.0f);
    cr_assert_eq(ep_bf16odd_step(0.0f, pair(0x1p-63f, 0.0f), pair(0x1p-63f, 0.0f)), 0x1p-126f);
    cr_assert_eq(ep_bf16odd_step(0.0f, pair(0x1p-64f, 0.0f), pair(0x1p-63f, 0.0f)), 0.0f);
    cr_assert(signbit(ep_bf16odd_sum(-0x1.8p-126f, 0x1p-126f)), "a flushed result keeps its sign");
    cr_assert(!signbit(ep_bf16odd_sum(1.0f, -1.0f)));
    cr_assert(signbit(ep_bf16odd_sum(-0.0f, -0.0f)));
    /* below 2^128, and the last bit is set */
    cr_assert_eq(ep_bf16odd_sum(FLT_MAX, 0x1p100f), FLT_MAX);
    cr_assert_eq(ep_bf16odd_sum(FLT_MAX, 0x1p104f), INFINITY);
    cr_assert_eq(ep_bf16odd_step(0.0f, pair(-0x1p64f, 0.0f), pair(0x1p64f, 0.0f)), -INFINITY);
    cr_assert(isnan(ep_bf16odd_step(INFINITY, pair(-INFINITY, 0.0f), pair(1.0f, 0.0f))));
    cr_assert(isnan(ep_bf16odd_step(0.0f, pair(INFINITY, 0.0f), pair(denormal, 0.0f))));
}

/* The adder itself, cutting off, and its note of what it lost. */
static float sum_of_adder(float a, float b)
{
    volatile float x = a;
    volatile float y = b;
    fesetround(FE_TOWARDZERO);
    feclearexcept(FE_ALL_EXCEPT);
    volatile float sum = x + y;
    const int raised = fetestexcept(FE_ALL_EXCEPT);
    fesetround(FE_TONEAREST);
    if ((raised & FE_OVERFLOW) != 0) {
        return copysignf(INFINITY, sum);
    }
    if (fabsf(sum) < FLT_MIN && sum != 0.0f) {
        return copysignf(0.0f, sum);
    }
    return ep_f32_from_bits(ep_f32_bits(sum) | ((raised & FE_INEXACT) != 0 ? 1u : 0u));
}

Test(bf16odd, sums_are_those_of_the_adder_cut_off_with_a_mark)
{
    uint64_t state = 5;
    for (int i = 0; i < 400000; i++) {
        uint64_t z = ep_splitmix64(&state);
        float a = ep_bf16dp_flush(ep_f32_from_bits((uint32_t)z));
        uint32_t near = (uint32_t)(z >> 32) & 0x807fffffu;
        uint32_t exponent =
            ((uint32_t)z >> 23 & 0xffu) + (uint32_t)(ep_splitmix64(&state) % 61) - 30;
        float b = i % 4 == 0 ? ep_f32_from_bits((uint32_t)(z >> 32))
                             : ep_f32_from_bits(near | (exponent & 0xffu) << 23);
        b = ep_bf16dp_flush(b);
        if (isnan(a) || isnan(b) || isnan(a + b)) {
            cr_assert(isnan(ep_bf16odd_sum(a, b)) == isnan(a + b));
            continue;
        }
        const float want = sum_of_adder(a, b);
        cr_assert_eq(ep_f32_bits(ep_bf16odd_sum(a, b)), ep_f32_bits(want), "%a + %a: %a, want %a",
                     (double)a, (double)b, (double)ep_bf16odd_sum(a, b), (double)want);
    }
}
