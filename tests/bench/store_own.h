/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The node's own choice of experts (lib/moe/expert_heat.h, load_room.h) on a trace, with a clock:
 * loads take the time they take, one after the other, and what comes ahead of time counts as a hit
 * only when its load had ended before the visit. One pool for all layers.
 */
#ifndef EP_BENCH_STORE_OWN_H
#define EP_BENCH_STORE_OWN_H

#include "bench/store_trace.h"

typedef struct store_clock {
    double load_us;    /* of one expert */
    double piece_us;   /* of a load ahead of time, until it can give way */
    double compute_us; /* of one expert's rows */
    double pace_us;    /* a visit begins so long after the one before, or when that has ended */
    double gap_us;     /* and at least so long after its end */
} store_clock;

typedef struct own_result {
    double hits;       /* part of the uses */
    double misses;     /* loads that a visit waits for, per visit */
    double prefetches; /* per visit */
    double useful;     /* part of the prefetches that were in memory when they were used */
    double waited;     /* time a visit waits for loads, in loads */
} own_result;

/* Counted from visit `from` on. capacity: experts. */
own_result own_run(const store_trace *trace, uint32_t capacity, uint32_t from,
                   const store_clock *clock, bool prefetches);

#endif
