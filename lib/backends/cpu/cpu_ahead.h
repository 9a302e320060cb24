/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a thread may take the tasks it will run after its present ones. What it takes no other
 * thread can begin, so the last tasks of a stage stay for those who would otherwise be idle. Pure.
 */
#ifndef EP_BACKENDS_CPU_CPU_AHEAD_H
#define EP_BACKENDS_CPU_CPU_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Threads that may yet want tasks of a stage. threads_in: those that are in it, of `threads` in
 * all. When a stage begins that is one, and the others are on their way, unless another pass has
 * work for them.
 */
static inline uint32_t ep_cpu_threads_expected(uint32_t threads_in, uint32_t threads,
                                               bool has_other_work)
{
    return has_other_work ? threads_in : threads;
}

/* left: tasks of the stage that nobody took. grain: tasks taken at a time. */
static inline bool ep_cpu_may_claim_ahead(uint32_t left, uint32_t grain, uint32_t threads_expected)
{
    return left >= (uint64_t)threads_expected * grain;
}

#endif
