/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long the receiver of a shared-memory connection may poll for more before it sleeps. Arriving
 * bytes and frames earn polling time, and polling spends it. A peer that dribbles, or writes a byte
 * whenever we are about to sleep, would otherwise occupy its connection's thread, which others
 * share; so it costs 100 us in all. Bytes earn slightly more than the time that a peer needs to
 * copy them.
 */
#ifndef EP_TRANSPORT_SHM_SPIN_H
#define EP_TRANSPORT_SHM_SPIN_H

#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"

/* one poll: a peer copies a piece in a fraction of it; a wake-up costs about as much */
#define SHM_SPIN_NS (20 * EP_NS_PER_US)
/* the most that can be saved, and the longest single poll */
#define SHM_SPINS_NS (5 * SHM_SPIN_NS)
#define SHM_SPIN_BYTES ((size_t)64 << 10) /* this many bytes earn one poll */

typedef struct shm_spin {
    uint64_t left_ns;
} shm_spin;

static inline void shm_spin_init(shm_spin *spin)
{
    spin->left_ns = SHM_SPINS_NS;
}

/* frames: how many these bytes completed. Each earns one poll, since its sender may wait for an
 * answer before it sends the next. */
static inline void shm_spin_earn(shm_spin *spin, size_t bytes, unsigned frames)
{
    uint64_t looks_bytes = bytes < 5 * SHM_SPIN_BYTES ? bytes : 5 * SHM_SPIN_BYTES;
    spin->left_ns += frames * SHM_SPIN_NS + looks_bytes * SHM_SPIN_NS / SHM_SPIN_BYTES;
    spin->left_ns = spin->left_ns < SHM_SPINS_NS ? spin->left_ns : SHM_SPINS_NS;
}

/* The time that the next poll may take. */
static inline uint64_t shm_spin_allowed_ns(const shm_spin *spin)
{
    return spin->left_ns < SHM_SPIN_NS ? spin->left_ns : SHM_SPIN_NS;
}

static inline void shm_spin_pay(shm_spin *spin, uint64_t looked_ns)
{
    spin->left_ns -= looked_ns < spin->left_ns ? looked_ns : spin->left_ns;
}

#endif
