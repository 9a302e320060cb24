/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/load_statistics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_counts(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

static ep_err gini(const uint64_t *counts, uint32_t experts, uint64_t slots, double *out_gini)
{
    uint64_t *sorted = malloc(experts * sizeof(*sorted));
    double weighted = 0;
    if (sorted == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    memcpy(sorted, counts, experts * sizeof(*sorted));
    qsort(sorted, experts, sizeof(*sorted), compare_counts);
    for (uint32_t i = 0; i < experts; i++) {
        weighted += (i + 1.0) * (double)sorted[i];
    }
    free(sorted);
    double value = 2.0 * weighted / ((double)experts * (double)slots) - (experts + 1.0) / experts;
    *out_gini = value > 0 ? value : 0; /* for even loads, rounding may give slightly less than 0 */
    return EP_OK;
}

ep_err ep_load_statistics_compute(const uint64_t *counts, uint32_t experts,
                                  const double *probability_sums, uint64_t tokens,
                                  ep_load_statistics *out_statistics)
{
    ep_load_statistics statistics = {0};
    double products = 0;
    for (uint32_t e = 0; e < experts; e++) {
        statistics.slots += counts[e];
        if (counts[e] > counts[statistics.max_expert]) {
            statistics.max_expert = e;
        }
    }
    if (statistics.slots == 0) {
        *out_statistics = statistics;
        return EP_OK;
    }
    double slots = (double)statistics.slots;
    statistics.max_over_mean = (double)counts[statistics.max_expert] / (slots / experts);
    for (uint32_t e = 0; tokens > 0 && e < experts; e++) {
        products += (double)counts[e] / slots * (probability_sums[e] / (double)tokens);
    }
    statistics.auxiliary_loss = experts * products;
    ep_err err = gini(counts, experts, statistics.slots, &statistics.gini);
    if (err == EP_OK) {
        *out_statistics = statistics;
    }
    return err;
}

static double sigmoid_of(float logit)
{
    return 1.0 / (1.0 + exp(-(double)logit));
}

void ep_load_add_probabilities(bool sigmoid, const float *logits, uint32_t experts, double *sums)
{
    float max = logits[0];
    double sum = 0;
    for (uint32_t e = 1; e < experts; e++) {
        max = logits[e] > max ? logits[e] : max;
    }
    for (uint32_t e = 0; e < experts; e++) {
        sum += sigmoid ? sigmoid_of(logits[e]) : exp((double)logits[e] - (double)max);
    }
    for (uint32_t e = 0; sum > 0 && e < experts; e++) {
        sums[e] += (sigmoid ? sigmoid_of(logits[e]) : exp((double)logits[e] - (double)max)) / sum;
    }
}
