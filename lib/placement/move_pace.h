/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much may be loaded at once where nothing would be lost by waiting: for balance, and for
 * copies beyond an expert's first. A rate in bytes per second, of which one second is saved up at
 * most. While something is left a load may begin, also a larger one; what it cost beyond that comes
 * off the time after. What nobody waited to load counts too, but never leaves more to pay than a
 * second's bytes, or an exchange: else a drain would hold up lost copies for hours.
 *
 * Pure: no clock, no threads.
 */
#ifndef EP_PLACEMENT_MOVE_PACE_H
#define EP_PLACEMENT_MOVE_PACE_H

#include <stdint.h>

typedef struct ep_move_pace {
    uint64_t bytes_per_s; /* 0: no limit */
    double left_bytes;    /* below 0: owed */
    uint64_t seen_ns;
} ep_move_pace;

/* Time goes on. Another rate begins with a whole second of it. Before the first tick there is no
 * limit. */
void ep_move_pace_tick(ep_move_pace *pace, uint64_t bytes_per_s, uint64_t now_ns);
/* How many copies of so many bytes (0: not known, no limit) may be loaded now, copies_max at most;
 * where any may, two: an exchange needs that many. */
uint32_t ep_move_pace_copies(const ep_move_pace *pace, uint64_t copy_bytes, uint32_t copies_max);
/* One copy is loaded now. */
void ep_move_pace_charge(ep_move_pace *pace, uint64_t copy_bytes);

#endif
