/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How often an expert is in memory when it is used, under the usual policies: LRU, LRU-2, SLRU (70
 * % protected), LFU with decay, and Belady's, which knows the future. One pool for all layers,
 * equal experts; an absent expert is always loaded, in place of a victim.
 */
#ifndef EP_BENCH_STORE_RIVALS_H
#define EP_BENCH_STORE_RIVALS_H

#include "bench/store_trace.h"

typedef enum rival {
    RIVAL_LRU,
    RIVAL_LRU2,
    RIVAL_SLRU,
    RIVAL_LFU,
    RIVAL_BELADY,
    RIVALS_COUNT
} rival;

extern const char *const rival_names[RIVALS_COUNT];

/* Part of the uses from visit `from` on that found their expert. capacity: experts. */
double rival_hit_rate(rival which, const store_trace *trace, uint32_t capacity, uint32_t from);

#endif
