/* SPDX-License-Identifier: Apache-2.0 */
/* The sampler: ties, seeds, shares, the ends of the range. */
#include <criterion/criterion.h>
#include <math.h>

#include "dense/sampler.h"

Test(sampler, temperature_zero_takes_the_largest_and_of_equals_the_lowest)
{
    const float logits[5] = {-1.0f, 3.0f, 2.0f, 3.0f, -INFINITY};
    uint64_t state = 7;
    cr_assert_eq(ep_sampler_pick(logits, 5, 0.0f, &state), 1);
    cr_assert_eq(state, 7, "temperature 0 used up a random number");
}

Test(sampler, same_seed_same_choices)
{
    float logits[256];
    uint64_t a = 42;
    uint64_t b = 42;
    uint64_t c = 43;
    int other = 0;
    for (int i = 0; i < 256; i++) {
        logits[i] = (float)((i * 37) % 64) / 16.0f;
    }
    for (int i = 0; i < 200; i++) {
        size_t x = ep_sampler_pick(logits, 256, 0.9f, &a);
        cr_assert_eq(x, ep_sampler_pick(logits, 256, 0.9f, &b));
        other += x != ep_sampler_pick(logits, 256, 0.9f, &c);
    }
    cr_assert_gt(other, 100, "another seed gave nearly the same choices");
}

/* Counts follow softmax(l / t): 20,000 draws, bound of 5 standard deviations. */
Test(sampler, shares_follow_the_softmax)
{
    const float logits[4] = {0.0f, 1.0f, 2.0f, -3.0f};
    const double temperature = 0.8;
    double total = 0.0;
    double count[4] = {0};
    uint64_t state = 1;
    for (int i = 0; i < 4; i++) {
        total += exp((double)logits[i] / temperature);
    }
    for (int i = 0; i < 20000; i++) {
        count[ep_sampler_pick(logits, 4, (float)temperature, &state)]++;
    }
    for (int i = 0; i < 4; i++) {
        double p = exp((double)logits[i] / temperature) / total;
        double bound = 5.0 * sqrt(20000.0 * p * (1.0 - p));
        cr_assert_lt(fabs(count[i] - 20000.0 * p), bound, "choice %d: %g draws, expected %g +- %g",
                     i, count[i], 20000.0 * p, bound);
    }
}

Test(sampler, a_choice_of_weight_zero_is_never_taken)
{
    const float logits[3] = {0.0f, -1000.0f, 0.0f};
    uint64_t state = 3;
    for (int i = 0; i < 1000; i++) {
        cr_assert_neq(ep_sampler_pick(logits, 3, 0.5f, &state), 1);
    }
    cr_assert_eq(ep_sampler_pick(logits, 1, 0.5f, &state), 0);
}
