/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits how much is loaded in a second where waiting loses nothing: for balance, and for copies
 * beyond an expert's first. It is a rate in bytes per second; at most one second's bytes can be
 * saved. While some are left, a load may begin, even a larger one; the excess is paid off later.
 * Loads that never wait count too, but never leave more to pay than a second's bytes, or an
 * exchange: otherwise a drain would delay lost copies for hours.
 * Pure: no clock, no threads.
 */
#ifndef EP_PLACEMENT_MOVE_PACE_H
#define EP_PLACEMENT_MOVE_PACE_H

#include <stdint.h>

typedef struct ep_move_pace {
    uint64_t bytes_per_s; /* 0: no limit */
    double left_bytes;    /* below 0: still to be paid */
    uint64_t seen_ns;
} ep_move_pace;

/* Advances time. A changed rate starts with a second's bytes. No limit before the first tick. */
void ep_move_pace_tick(ep_move_pace *pace, uint64_t bytes_per_s, uint64_t now_ns);
/* How many copies of copy_bytes (0: unknown, no limit) may be loaded now, at most copies_max. If
 * any, at least two, because an exchange needs two. */
uint32_t ep_move_pace_copies(const ep_move_pace *pace, uint64_t copy_bytes, uint32_t copies_max);
/* Charges one copy that is loaded now. */
void ep_move_pace_charge(ep_move_pace *pace, uint64_t copy_bytes);

#endif
