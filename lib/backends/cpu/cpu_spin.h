/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a thread without work may spin. On a host where more threads want to run than there are
 * CPUs (several daemons, say), a spinning thread takes time from one that works. The kernel tells:
 * a thread that is preempted shares its CPU. It then stops spinning for a while, twice as long each
 * time it is preempted again, and tries anew. Pure but for ep_cpu_preemptions.
 */
#ifndef EP_BACKENDS_CPU_CPU_SPIN_H
#define EP_BACKENDS_CPU_CPU_SPIN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define EP_CPU_SPIN_OFF_MIN_NS (10 * EP_NS_PER_MS)
#define EP_CPU_SPIN_OFF_MAX_NS (1000 * EP_NS_PER_MS)

/* Zeroed: the thread may spin. */
typedef struct ep_cpu_spin {
    uint64_t preemptions; /* seen so far */
    uint64_t off_until_ns;
    uint64_t off_ns; /* how long spinning was off the last time; 0: not lately */
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
        spin->off_ns = 0; /* undisturbed for as long as it was off */
    }
    return now_ns >= spin->off_until_ns;
}

/* How often the calling thread lost its CPU while it wanted to run. Constant if unknown. */
uint64_t ep_cpu_preemptions(void);

#endif
