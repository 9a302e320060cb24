/* SPDX-License-Identifier: Apache-2.0 */
/* Percentiles by nearest rank, exact while all calls fit, and bounded memory beyond. */
#include <criterion/criterion.h>

#include "cli/latency.h"

Test(latency, empty_is_zero)
{
    ep_latency latency = {0};
    cr_assert_eq(ep_latency_percentile(&latency, 50), 0);
    cr_assert_eq(ep_latency_mean(&latency), 0.0);
    ep_latency_fini(&latency);
}

Test(latency, nearest_rank)
{
    ep_latency latency = {0};
    for (uint64_t i = 0; i < 200; i++) {
        cr_assert(ep_latency_add(&latency, (i * 73) % 200 + 1)); /* 1..200 in another order */
    }
    cr_assert_eq(ep_latency_percentile(&latency, 50), 100);
    cr_assert_eq(ep_latency_percentile(&latency, 99), 198);
    cr_assert_eq(ep_latency_percentile(&latency, 100), 200);
    cr_assert_eq(ep_latency_percentile(&latency, 0.1), 1);
    cr_assert_eq(latency.max_us, 200);
    cr_assert_float_eq(ep_latency_mean(&latency), 100.5, 1e-9);
    ep_latency_add(&latency, 1000);
    cr_assert_eq(ep_latency_percentile(&latency, 100), 1000, "adding after sorting was lost");
    ep_latency_fini(&latency);
}

Test(latency, merges)
{
    ep_latency a = {0};
    ep_latency b = {0};
    for (uint64_t i = 1; i <= 10; i++) {
        ep_latency_add(&a, i);
        ep_latency_add(&b, 10 + i);
    }
    cr_assert(ep_latency_merge(&a, &b));
    cr_assert_eq(a.count, 20);
    cr_assert_eq(ep_latency_percentile(&a, 50), 10);
    cr_assert_eq(ep_latency_percentile(&a, 100), 20);
    ep_latency_fini(&a);
    ep_latency_fini(&b);
}

Test(latency, memory_is_bounded_and_the_sample_stays_even)
{
    ep_latency latency = {0};
    const uint64_t calls = 4 * EP_LATENCY_SAMPLES_MAX;
    for (uint64_t i = 0; i < calls; i++) {
        cr_assert(ep_latency_add(&latency, i));
    }
    cr_assert_eq(latency.count, calls);
    cr_assert_leq(latency.samples_capacity, EP_LATENCY_SAMPLES_MAX);
    /* A sample of 65536 has its median within 2 % of the true one; 10 standard deviations. */
    double median = (double)ep_latency_percentile(&latency, 50);
    cr_assert_float_eq(median, (double)calls / 2.0, (double)calls * 0.02);
    ep_latency_fini(&latency);
}

Test(latency, merging_samples_counts_each_call_the_same)
{
    ep_latency a = {0};
    ep_latency b = {0};
    for (uint64_t i = 0; i < 4 * EP_LATENCY_SAMPLES_MAX; i++) {
        ep_latency_add(&a, 1);
        ep_latency_add(&b, 100);
    }
    cr_assert(ep_latency_merge(&a, &b));
    /* half of the calls took 100; 10 standard deviations */
    cr_assert_eq(ep_latency_percentile(&a, 48), 1);
    cr_assert_eq(ep_latency_percentile(&a, 52), 100);
    ep_latency_fini(&a);
    ep_latency_fini(&b);
}
