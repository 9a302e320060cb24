/* SPDX-License-Identifier: Apache-2.0 */
/* Reservoir sampling and nearest-rank percentiles. */
#include "latency.h"

#include <math.h>
#include <stdlib.h>

#include "base/random.h"

#define SAMPLES_FIRST 256

void ep_latency_fini(ep_latency *latency)
{
    free(latency->samples);
    *latency = (ep_latency){0};
}

static bool grow(ep_latency *latency)
{
    uint32_t capacity =
        latency->samples_capacity == 0 ? SAMPLES_FIRST : latency->samples_capacity * 2;
    uint64_t *samples = realloc(latency->samples, capacity * sizeof(*samples));
    if (samples == NULL) {
        return false;
    }
    latency->samples = samples;
    latency->samples_capacity = capacity;
    return true;
}

/* seen: calls so far, with those of this sample, which stands for weight calls. */
static bool keep_sample(ep_latency *latency, uint64_t us, uint64_t seen, double weight)
{
    latency->sorted = false;
    if (latency->samples_count == EP_LATENCY_SAMPLES_MAX) {
        uint64_t place = (uint64_t)((double)(ep_splitmix64(&latency->random) % seen) / weight);
        if (place < EP_LATENCY_SAMPLES_MAX) {
            latency->samples[place] = us;
        }
        return true;
    }
    if (latency->samples_count == latency->samples_capacity && !grow(latency)) {
        return false;
    }
    latency->samples[latency->samples_count++] = us;
    return true;
}

bool ep_latency_add(ep_latency *latency, uint64_t us)
{
    latency->count++;
    latency->sum_us += us;
    latency->max_us = us > latency->max_us ? us : latency->max_us;
    return keep_sample(latency, us, latency->count, 1.0);
}

bool ep_latency_merge(ep_latency *latency, const ep_latency *other)
{
    bool good = true;
    const double weight = (double)other->count / other->samples_count;
    for (uint32_t i = 0; i < other->samples_count && good; i++) {
        good = keep_sample(latency, other->samples[i],
                           latency->count + (uint64_t)((i + 1.0) * weight), weight);
    }
    latency->count += other->count;
    latency->sum_us += other->sum_us;
    latency->max_us = other->max_us > latency->max_us ? other->max_us : latency->max_us;
    return good;
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

uint64_t ep_latency_percentile(ep_latency *latency, double percent)
{
    if (latency->samples_count == 0) {
        return 0;
    }
    if (!latency->sorted) {
        qsort(latency->samples, latency->samples_count, sizeof(*latency->samples), compare);
        latency->sorted = true;
    }
    double rank = ceil(percent / 100.0 * latency->samples_count);
    uint32_t index = rank < 1.0 ? 0 : (uint32_t)rank - 1;
    return latency->samples[index < latency->samples_count ? index : latency->samples_count - 1];
}

double ep_latency_mean(const ep_latency *latency)
{
    return latency->count > 0 ? (double)latency->sum_us / (double)latency->count : 0.0;
}
