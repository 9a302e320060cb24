/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latencies of many calls in bounded memory: exact count, sum and maximum; percentiles from a
 * uniform sample of at most EP_LATENCY_SAMPLES_MAX calls (all of them, up to that many).
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_LATENCY_H
#define EP_CLI_LATENCY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EP_LATENCY_SAMPLES_MAX 65536

typedef struct ep_latency {
    uint64_t count;
    uint64_t sum_us;
    uint64_t max_us;
    /* private */
    uint64_t *samples;
    uint32_t samples_count;
    uint32_t samples_capacity;
    uint64_t random;
    bool sorted;
} ep_latency;

/* Zeroed is empty. */
void ep_latency_fini(ep_latency *latency);
/* False without memory; the call is then only counted. */
bool ep_latency_add(ep_latency *latency, uint64_t us);
/* Adds another's calls. Each counts the same in the sample if both have about as many calls. */
bool ep_latency_merge(ep_latency *latency, const ep_latency *other);
/* Nearest rank, 0 < percent <= 100; 0 when there is no call. Sorts the samples. */
uint64_t ep_latency_percentile(ep_latency *latency, double percent);
double ep_latency_mean(const ep_latency *latency);

#endif
