/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What became of each call of a load: when it was due, when it ended, with whose bits. For benches
 * that disturb a service under load and ask afterwards what that cost.
 *
 * Threads    on_end: any; the others while calls go on too.
 */
#ifndef EP_BENCH_LIVE_LOG_H
#define EP_BENCH_LIVE_LOG_H

#include "support/load.h"

typedef enum live_outcome { LIVE_GOOD, LIVE_OTHER, LIVE_WRONG, LIVE_FAILED } live_outcome;

typedef struct live_call {
    uint64_t began_ns;
    uint64_t ended_ns;
    live_outcome outcome;
} live_call;

typedef struct live_log live_log;

/* batches: those of the load. others: the same inputs with another version's results, LIVE_OTHER;
 * NULL: none. name: for what is printed of failed and wrong calls. */
live_log *live_log_create(const char *name, const ep_test_batch *batches,
                          const ep_test_batch *others);
void live_log_destroy(live_log *log);
void live_log_on_end(void *log, const ep_test_batch *batch, const ep_moe_result *result,
                     const uint16_t *y, uint64_t began_ns, uint64_t ended_ns);
/* A load with this log; config's on_end and arg are set. */
ep_test_load *live_load_start(live_log *log, ep_test_load_config config);

/* Calls due in [from_ns, to_ns) that ended so. */
uint64_t live_log_count(live_log *log, live_outcome outcome, uint64_t from_ns, uint64_t to_ns);
/* Of the time taken by good calls due in [from_ns, to_ns); NAN without any. */
double live_log_quantile_ms(live_log *log, uint64_t from_ns, uint64_t to_ns, double quantile);
/* How much longer than typical_ms each call took that was in flight at at_ns; how many. They must
 * have ended. */
size_t live_log_extra_ms(live_log *log, uint64_t at_ns, double typical_ms, double *out_extra,
                         size_t extra_max);
/* The newest time at which a call was due that ended so; 0: none. */
uint64_t live_log_last_ns(live_log *log, live_outcome outcome);

void live_sleep_until(uint64_t when_ns);

#endif
