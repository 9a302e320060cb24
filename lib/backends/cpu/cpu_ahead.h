/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a thread may claim the tasks that it will run after its present ones. No other thread can
 * begin claimed tasks, so the last tasks of a stage are left to threads that would otherwise be
 * idle. Pure.
 */
#ifndef EP_BACKENDS_CPU_CPU_AHEAD_H
#define EP_BACKENDS_CPU_CPU_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

/*
 * How many threads may still want tasks of a stage. threads_in: those working on it, of `threads`
 * in all. When a stage begins that is one thread; the others will come, unless another pass has
 * work for them.
 */
static inline uint32_t ep_cpu_threads_expected(uint32_t threads_in, uint32_t threads,
                                               bool has_other_work)
{
    return has_other_work ? threads_in : threads;
}

/* left: tasks of the stage that nobody has claimed. grain: tasks claimed at a time. */
static inline bool ep_cpu_may_claim_ahead(uint32_t left, uint32_t grain, uint32_t threads_expected)
{
    return left >= (uint64_t)threads_expected * grain;
}

#endif
