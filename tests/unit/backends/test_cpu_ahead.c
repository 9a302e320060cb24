/* SPDX-License-Identifier: Apache-2.0 */
/* Which tasks threads take before they run the present ones. */
#include <criterion/criterion.h>

#include "backends/cpu/cpu_ahead.h"

enum { THREADS_MAX = 16 };

/* A stage from its beginning: threads come one after the other, while none has ended a task. Each
 * takes some, and perhaps more ahead. Returns how many of them found any. */
static uint32_t served(uint32_t threads, uint32_t tasks, uint32_t grain, bool has_other_work)
{
    uint32_t left = tasks;
    uint32_t count = 0;
    for (uint32_t in = 1; in <= threads && left > 0; in++, count++) {
        left -= left < grain ? left : grain;
        if (ep_cpu_may_claim_ahead(left, grain,
                                   ep_cpu_threads_expected(in, threads, has_other_work))) {
            left -= left < grain ? left : grain;
        }
    }
    return count;
}

Test(cpu_ahead, no_thread_takes_twice_while_others_find_nothing)
{
    for (uint32_t threads = 1; threads <= THREADS_MAX; threads++) {
        for (uint32_t grain = 1; grain <= 4; grain++) {
            for (uint32_t takes = 1; takes <= 3 * threads; takes++) {
                const uint32_t want = takes < threads ? takes : threads;
                cr_assert_eq(served(threads, takes * grain, grain, false), want,
                             "%u threads, %u takes of %u tasks", threads, takes, grain);
            }
        }
    }
}

Test(cpu_ahead, threads_with_other_work_are_not_waited_for)
{
    cr_assert(ep_cpu_may_claim_ahead(7, 1, ep_cpu_threads_expected(1, 8, true)));
    cr_assert_not(ep_cpu_may_claim_ahead(7, 1, ep_cpu_threads_expected(1, 8, false)));
    cr_assert(served(8, 8, 1, true) < 8);
}

Test(cpu_ahead, long_stages_are_claimed_ahead)
{
    cr_assert(ep_cpu_may_claim_ahead(8, 1, ep_cpu_threads_expected(1, 8, false)));
    cr_assert(ep_cpu_may_claim_ahead(32, 4, ep_cpu_threads_expected(8, 8, false)));
    cr_assert_not(ep_cpu_may_claim_ahead(31, 4, ep_cpu_threads_expected(8, 8, false)));
}
