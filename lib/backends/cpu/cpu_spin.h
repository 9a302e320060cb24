/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a thread without work may spin for some. On a host where more threads want to run than
 * there are CPUs (several daemons, say) a spinning thread takes the time of one that works. It is
 * told by the kernel: a thread that is preempted shares its CPU. It then stays off for a while,
 * twice as long each time it is preempted again, and tries anew. Pure but for ep_cpu_preemptions.
 */
#ifndef EP_BACKENDS_CPU_CPU_SPIN_H
#define EP_BACKENDS_CPU_CPU_SPIN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define EP_CPU_SPIN_OFF_MIN_NS (10 * EP_NS_PER_MS)
#define EP_CPU_SPIN_OFF_MAX_NS (1000 * EP_NS_PER_MS)

/* Zeroed: may spin. */
typedef struct ep_cpu_spin {
    uint64_t preemptions; /* seen so far */
    uint64_t off_until_ns;
    uint64_t off_ns; /* the last time off; 0 none lately */
} ep_cpu_spin;

/* preemptions: of the thread since it began. Returns whether it may spin now. */
static inline bool ep_cpu_spin_note(ep_cpu_spin *spin, uint64_t preemptions, uint64_t now_ns)
{
    if (preemptions != spin->preemptions) {
        spin->preemptions = preemptions;
        spin->off_ns = spin->off_ns == 0 ? EP_CPU_SPIN_OFF_MIN_NS : 2 * spin->off_ns;
        spin->off_ns =
            spin->off_ns < EP_CPU_SPIN_OFF_MAX_NS ? spin->off_ns : EP_CPU_SPIN_OFF_MAX_NS;
        spin->off_until_ns = now_ns + spin->off_ns;
    } else if (now_ns >= spin->off_until_ns + spin->off_ns) {
        spin->off_ns = 0; /* as long undisturbed as it was off */
    }
    return now_ns >= spin->off_until_ns;
}

/* Times the calling thread lost its CPU while it wanted to run. Any number where the system does
 * not tell, always the same. */
uint64_t ep_cpu_preemptions(void);

#endif
