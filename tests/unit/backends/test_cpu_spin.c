/* SPDX-License-Identifier: Apache-2.0 */
/* When a thread without work may spin. */
#include <criterion/criterion.h>

#include "backends/cpu/cpu_spin.h"

#define MS EP_NS_PER_MS

Test(cpu_spin, an_undisturbed_thread_may)
{
    ep_cpu_spin spin = {0};
    for (uint64_t t = 1; t < 100; t++) {
        cr_assert(ep_cpu_spin_note(&spin, 0, t * MS));
    }
}

Test(cpu_spin, a_preempted_thread_stays_off_and_tries_again)
{
    ep_cpu_spin spin = {0};
    cr_assert_not(ep_cpu_spin_note(&spin, 1, 100 * MS));
    cr_assert_not(ep_cpu_spin_note(&spin, 1, 109 * MS));
    cr_assert(ep_cpu_spin_note(&spin, 1, 110 * MS));
}

Test(cpu_spin, each_preemption_doubles_the_time_up_to_a_second)
{
    ep_cpu_spin spin = {0};
    uint64_t now = 100 * MS;
    uint64_t off = 10 * MS;
    for (uint64_t n = 1; n <= 12; n++) {
        cr_assert_not(ep_cpu_spin_note(&spin, n, now), "preemption %llu", (unsigned long long)n);
        cr_assert_not(ep_cpu_spin_note(&spin, n, now + off - 1));
        cr_assert(ep_cpu_spin_note(&spin, n, now + off));
        now += off;
        off = 2 * off < EP_CPU_SPIN_OFF_MAX_NS ? 2 * off : EP_CPU_SPIN_OFF_MAX_NS;
    }
}

Test(cpu_spin, a_quiet_time_forgives)
{
    ep_cpu_spin spin = {0};
    (void)ep_cpu_spin_note(&spin, 1, 100 * MS);
    (void)ep_cpu_spin_note(&spin, 2, 101 * MS); /* off until 121 */
    cr_assert(ep_cpu_spin_note(&spin, 2, 141 * MS));
    cr_assert_not(ep_cpu_spin_note(&spin, 3, 142 * MS));
    cr_assert(ep_cpu_spin_note(&spin, 3, 152 * MS), "10 ms again, not 40");
}
