/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether there is time to load an expert that nobody has asked for yet. The way from disk to
 * memory carries one load at a time. Of what was seen it is kept how long it lies idle between the
 * loads that requests wait for, how long a load takes, and how far visits are apart. Pure; zero it
 * first. Times in nanoseconds of one clock that never goes back.
 *
 * Threads  none: the caller orders the calls.
 */
#ifndef EP_MOE_LOAD_ROOM_H
#define EP_MOE_LOAD_ROOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ep_load_room {
    /* private */
    double idle_ns; /* means; 0: none yet */
    double load_ns;
    double visit_ns;
    uint64_t last_visit_ns;
    uint64_t idle_since_ns;
    bool is_needed;
} ep_load_room;

void ep_load_room_visit(ep_load_room *room, uint64_t now_ns);
/* A request waits for a load. */
void ep_load_room_needed(ep_load_room *room, uint64_t now_ns);
/* None does any more. */
void ep_load_room_idle(ep_load_room *room, uint64_t now_ns);
void ep_load_room_loaded(ep_load_room *room, uint64_t took_ns);

/* Whether a load that begins now ends, as far as can be foretold, before the next one that a
 * request waits for. True also when none came for far longer than usual. */
bool ep_load_room_fits(const ep_load_room *room, uint64_t now_ns);
/* In how many visits from the last one a load that begins now has ended: 1..EP_LOAD_LEAD_MAX. */
#define EP_LOAD_LEAD_MAX 64
uint32_t ep_load_room_lead(const ep_load_room *room);

#endif
