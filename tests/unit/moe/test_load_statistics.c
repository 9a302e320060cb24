/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics against known values and against plain loops over pairs of experts. */
#include "moe/load_statistics.h"

#include <criterion/criterion.h>
#include <math.h>

#include "base/random.h"

enum { EXPERTS_MAX = 300 };

static void near(double got, double wanted, const char *what)
{
    cr_assert(fabs(got - wanted) <= 1e-9 * (1 + fabs(wanted)), "%s is %.17g, not %.17g", what, got,
              wanted);
}

Test(load_statistics, known_values)
{
    uint64_t counts[EXPERTS_MAX];
    double sums[EXPERTS_MAX];
    ep_load_statistics s;
    for (uint32_t experts = 1; experts <= EXPERTS_MAX; experts = experts * 2 + 1) {
        for (uint32_t e = 0; e < experts; e++) {
            counts[e] = 1000;
            sums[e] = 7.0 / experts;
        }
        cr_assert_eq(ep_load_statistics_compute(counts, experts, sums, 7, &s), EP_OK);
        near(s.gini, 0, "gini of even loads");
        near(s.max_over_mean, 1, "max over mean of even loads");
        near(s.auxiliary_loss, 1, "auxiliary loss of even loads");
        for (uint32_t e = 0; e < experts; e++) {
            counts[e] = e == experts / 2 ? 12345 : 0;
        }
        cr_assert_eq(ep_load_statistics_compute(counts, experts, sums, 7, &s), EP_OK);
        near(s.gini, (experts - 1.0) / experts, "gini, all on one");
        near(s.max_over_mean, experts, "max over mean, all on one");
        near(s.auxiliary_loss, 1, "auxiliary loss of a uniform p");
        cr_assert_eq(s.max_expert, experts / 2);
        for (uint32_t e = 0; e < experts; e++) {
            sums[e] = e == experts / 2 ? 7.0 : 0;
        }
        cr_assert_eq(ep_load_statistics_compute(counts, experts, sums, 7, &s), EP_OK);
        near(s.auxiliary_loss, experts, "auxiliary loss, f and p all on one");
    }
}

Test(load_statistics, nothing_yet)
{
    const uint64_t none[3] = {0, 0, 0};
    const uint64_t some[3] = {1, 2, 3};
    ep_load_statistics s;
    cr_assert_eq(ep_load_statistics_compute(none, 3, NULL, 0, &s), EP_OK);
    cr_assert(s.slots == 0 && s.max_over_mean == 0 && s.gini == 0 && s.auxiliary_loss == 0 &&
              s.max_expert == 0);
    cr_assert_eq(ep_load_statistics_compute(some, 3, NULL, 0, &s), EP_OK);
    cr_assert(s.slots == 6 && s.max_expert == 2 && s.auxiliary_loss == 0);
    near(s.max_over_mean, 1.5, "max over mean of 1 2 3");
    near(s.gini, 2.0 / 9.0, "gini of 1 2 3");
}

/* Gini is half the mean absolute difference of all pairs over the mean. */
Test(load_statistics, against_pairs)
{
    uint64_t state = 3;
    for (int round = 0; round < 50; round++) {
        uint64_t counts[EXPERTS_MAX];
        double sums[EXPERTS_MAX];
        uint32_t experts = 1 + (uint32_t)(ep_splitmix64(&state) % EXPERTS_MAX);
        double total = 0, differences = 0, products = 0, largest = 0;
        ep_load_statistics s;
        for (uint32_t e = 0; e < experts; e++) {
            counts[e] = ep_splitmix64(&state) >> (ep_splitmix64(&state) % 40 + 20);
            sums[e] = (double)(ep_splitmix64(&state) >> 40);
            total += (double)counts[e];
        }
        if (total == 0) {
            continue;
        }
        for (uint32_t a = 0; a < experts; a++) {
            products += (double)counts[a] / total * sums[a] / 11.0;
            largest = fmax(largest, (double)counts[a]);
            for (uint32_t b = 0; b < experts; b++) {
                differences += fabs((double)counts[a] - (double)counts[b]);
            }
        }
        cr_assert_eq(ep_load_statistics_compute(counts, experts, sums, 11, &s), EP_OK);
        near(s.gini, differences / (2.0 * experts * total), "gini");
        near(s.auxiliary_loss, experts * products, "auxiliary loss");
        near(s.max_over_mean, largest * experts / total, "max over mean");
    }
}

Test(load_statistics, probabilities)
{
    const float logits[4] = {0.0f, logf(2.0f), -INFINITY, logf(5.0f)};
    const float large[2] = {1000.0f, 1000.0f};
    double sums[4] = {1, 1, 1, 1};
    ep_load_add_probabilities(false, logits, 4, sums);
    cr_assert(fabs(sums[0] - 1.125) < 1e-6 && fabs(sums[1] - 1.25) < 1e-6 && sums[2] == 1 &&
              fabs(sums[3] - 1.625) < 1e-6);
    const float scores[2] = {logf(1.0f), logf(3.0f)}; /* sigmoid 1/2, 3/4 */
    double shares[2] = {0, 0};
    ep_load_add_probabilities(true, scores, 2, shares);
    cr_assert(fabs(shares[0] - 0.4) < 1e-6 && fabs(shares[1] - 0.6) < 1e-6);
    double halves[2] = {0, 0};
    ep_load_add_probabilities(false, large, 2, halves);
    cr_assert(halves[0] == 0.5 && halves[1] == 0.5);
    const float nothing[2] = {-INFINITY, -INFINITY};
    ep_load_add_probabilities(true, nothing, 2, halves);
    cr_assert(halves[0] == 0.5 && halves[1] == 0.5);
}
