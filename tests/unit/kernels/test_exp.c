/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' exp and activation are the scalar ones bit for bit, for every kind of input. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "base/numeric.h"
#include "base/random.h"
#include "kernels/ffn_kernel.h"

enum { KERNELS_MAX = 16 };

/* Asked for once: each ep_ffn_kernel_at asks the CPU, which on a virtual one takes longer than many
 * exponentials. NULL behind the last. */
static const ep_ffn_kernel *kernels[KERNELS_MAX + 1];

static void find_kernels(void)
{
    size_t count = 0;
    while ((kernels[count] = ep_ffn_kernel_at(count)) != NULL) {
        count++;
        cr_assert(count <= KERNELS_MAX);
    }
}

TestSuite(exp, .init = find_kernels);
TestSuite(silu_mul, .init = find_kernels);

static void expect_equal_exp(const float x[16])
{
    float want[16];
    for (int i = 0; i < 16; i++) {
        want[i] = ep_expf(x[i]);
    }
    for (const ep_ffn_kernel *const *kernel = kernels; *kernel != NULL; kernel++) {
        float y[16];
        (*kernel)->exp16(x, y);
        for (int i = 0; i < 16 && memcmp(y, want, sizeof(y)) != 0; i++) {
            if (ep_f32_bits(y[i]) != ep_f32_bits(want[i])) {
                cr_assert_fail("%s: exp(%08x) is %08x, not %08x", (*kernel)->name,
                               ep_f32_bits(x[i]), ep_f32_bits(y[i]), ep_f32_bits(want[i]));
            }
        }
    }
}

Test(exp, equals_scalar_for_all_signs_exponents_and_mantissa_tops)
{
    float x[16];
    for (uint32_t top = 0; top < 0x10000u; top++) {
        for (uint32_t i = 0; i < 16; i++) { /* mantissa tails: 0, 1, .., all ones */
            x[i] = ep_f32_from_bits(top << 16 | (i < 8 ? i * 0x1111u : 0xffffu - (i - 8)));
        }
        expect_equal_exp(x);
    }
}

Test(exp, equals_scalar_for_random_bits)
{
    uint64_t state = 7;
    float x[16];
    for (int n = 0; n < 100000; n++) {
        for (int i = 0; i < 16; i += 2) {
            uint64_t z = ep_splitmix64(&state);
            x[i] = ep_f32_from_bits((uint32_t)z);
            x[i + 1] = (float)(int32_t)(z >> 32) *
                       (110.0f / 2147483648.0f); /* the range where exp is finite */
        }
        expect_equal_exp(x);
    }
}

Test(exp, equals_scalar_around_its_limits)
{
    const float centres[] = {EP_EXP_MAX, EP_EXP_MIN, -87.33655f,  88.0f,
                             0.0f,       -0.0f,      0.34657359f, -0.34657359f};
    for (size_t c = 0; c < sizeof(centres) / sizeof(centres[0]); c++) {
        float x[16];
        for (int32_t step = -2048; step < 2048; step += 16) {
            for (int32_t i = 0; i < 16; i++) {
                x[i] = ep_f32_from_bits(ep_f32_bits(centres[c]) + (uint32_t)(step + i));
            }
            expect_equal_exp(x);
        }
    }
}

Test(exp, special_values)
{
    cr_assert(isinf(ep_expf(INFINITY)) && ep_expf(INFINITY) > 0);
    cr_assert_eq(ep_expf(-INFINITY), 0.0f);
    cr_assert(isnan(ep_expf(NAN)));
    cr_assert_eq(ep_expf(0.0f), 1.0f);
    cr_assert_eq(ep_expf(-0.0f), 1.0f);
    float smallest = ep_expf(-103.9f);
    cr_assert(smallest > 0.0f && smallest < 0x1p-126f, "denormal results are not flushed: %a",
              (double)smallest);
}

/* One rounding each in the polynomial's tail and in the last sum: below 1.5 units in the last place
 * over normal results. */
Test(exp, scalar_is_within_1_5_ulp)
{
    double worst = 0;
    for (float x = -87.0f; x < 88.5f; x += 0.00037f) {
        double want = exp((double)x);
        double got = (double)ep_expf(x);
        double ulp = ldexp(1.0, ilogb(want) - 23);
        double error = fabs(got - want) / ulp;
        worst = error > worst ? error : worst;
    }
    cr_assert(worst < 1.5, "worst error is %g ulp", worst);
}

Test(silu_mul, equals_scalar_and_nan_stays_nan)
{
    uint64_t state = 11;
    _Alignas(64) float c[EP_FFN_PANEL];
    _Alignas(64) float h[EP_FFN_HALF_PANEL];
    for (int n = 0; n < 20000; n++) {
        for (int i = 0; i < EP_FFN_PANEL; i++) {
            uint64_t z = ep_splitmix64(&state);
            c[i] = n % 2 != 0 ? ep_f32_from_bits((uint32_t)z)
                              : (float)(int32_t)z * (100.0f / 2147483648.0f);
        }
        float want[EP_FFN_HALF_PANEL];
        for (int i = 0; i < EP_FFN_HALF_PANEL; i++) {
            want[i] = ep_siluf(c[i]) * c[EP_FFN_HALF_PANEL + i];
        }
        for (const ep_ffn_kernel *const *kernel = kernels; *kernel != NULL; kernel++) {
            (*kernel)->activate(EP_ACT_SILU, &(ep_activation_numbers){0}, c, 1, h, EP_FFN_PANEL);
            for (int i = 0; i < EP_FFN_HALF_PANEL; i++) {
                bool equal =
                    want[i] != want[i] ? h[i] != h[i] : ep_f32_bits(want[i]) == ep_f32_bits(h[i]);
                if (!equal) {
                    cr_assert_fail("%s: silu(%a) * %a is %a, not %a", (*kernel)->name, (double)c[i],
                                   (double)c[EP_FFN_HALF_PANEL + i], (double)h[i], (double)want[i]);
                }
            }
        }
    }
}
