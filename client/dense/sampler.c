/* SPDX-License-Identifier: Apache-2.0 */
/* Seeded sampling by inverting the cumulative sum. */
#include "dense/sampler.h"

#include "base/check.h"
#include "base/numeric.h"
#include "base/random.h"

static size_t largest(const float *logits, size_t count)
{
    size_t best = 0;
    for (size_t i = 1; i < count; i++) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return best;
}

size_t ep_sampler_pick(const float *logits, size_t count, float temperature, uint64_t *state)
{
    float weight[EP_SAMPLER_CHOICES_MAX];
    float total = 0.0f;
    float sum = 0.0f;
    size_t last = 0;
    EP_ASSERT(count >= 1 && count <= EP_SAMPLER_CHOICES_MAX);
    size_t best = largest(logits, count);
    if (temperature == 0.0f) {
        return best;
    }
    for (size_t i = 0; i < count; i++) {
        weight[i] = ep_expf((logits[i] - logits[best]) / temperature);
        total = total + weight[i];
        last = weight[i] > 0.0f ? i : last;
    }
    float bound = (float)(ep_splitmix64(state) >> 40) * 0x1p-24f * total;
    for (size_t i = 0; i < count; i++) {
        sum = sum + weight[i];
        if (sum > bound) {
            return i;
        }
    }
    return last;
}
