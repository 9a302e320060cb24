/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether there is time to prefetch an expert. Disk to memory carries one load at a time. This
 * keeps measured means: how long it is idle between loads that requests wait for, how long a load
 * takes, and the time between visits. Pure; zero it first. Times in nanoseconds of one clock that
 * never goes back.
 *
 * Threads  none: the caller orders the calls.
 */
#ifndef EP_MOE_LOAD_ROOM_H
#define EP_MOE_LOAD_ROOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ep_load_room {
    /* private */
    double idle_ns; /* means; 0: not measured yet */
    double load_ns;
    double visit_ns;
    uint64_t last_visit_ns;
    uint64_t idle_since_ns;
    bool is_needed;
} ep_load_room;

void ep_load_room_visit(ep_load_room *room, uint64_t now_ns);
/* A request begins to wait for a load. */
void ep_load_room_needed(ep_load_room *room, uint64_t now_ns);
/* No request waits any more. */
void ep_load_room_idle(ep_load_room *room, uint64_t now_ns);
void ep_load_room_loaded(ep_load_room *room, uint64_t took_ns);

/* Whether a load that begins now is likely to end before the next load that a request waits for.
 * Also true when no request has waited for far longer than usual. */
bool ep_load_room_fits(const ep_load_room *room, uint64_t now_ns);
/* After how many visits, counted from the last one, a load that begins now has ended:
 * 1..EP_LOAD_LEAD_MAX. */
#define EP_LOAD_LEAD_MAX 64
uint32_t ep_load_room_lead(const ep_load_room *room);

#endif
