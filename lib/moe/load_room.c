/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/load_room.h"

#include <math.h>

#define MEAN_OVER 16.0
/* a pause counts this many times the mean at most, or one would promise room for long */
#define PAUSE 4.0

static void learn(double *mean, double value)
{
    if (*mean <= 0) {
        *mean = value;
        return;
    }
    *mean += ((value < PAUSE * *mean ? value : PAUSE * *mean) - *mean) / MEAN_OVER;
}

static double since(uint64_t begin_ns, uint64_t now_ns)
{
    return now_ns > begin_ns ? (double)(now_ns - begin_ns) : 0;
}

void ep_load_room_visit(ep_load_room *room, uint64_t now_ns)
{
    if (room->last_visit_ns != 0) {
        learn(&room->visit_ns, since(room->last_visit_ns, now_ns));
    }
    room->last_visit_ns = now_ns;
}

void ep_load_room_needed(ep_load_room *room, uint64_t now_ns)
{
    if (!room->is_needed && room->idle_since_ns != 0) {
        learn(&room->idle_ns, since(room->idle_since_ns, now_ns));
    }
    room->is_needed = true;
}

void ep_load_room_idle(ep_load_room *room, uint64_t now_ns)
{
    if (room->is_needed) {
        room->is_needed = false;
        room->idle_since_ns = now_ns;
    }
}

void ep_load_room_loaded(ep_load_room *room, uint64_t took_ns)
{
    learn(&room->load_ns, (double)took_ns);
}

bool ep_load_room_fits(const ep_load_room *room, uint64_t now_ns)
{
    const double idle_ns = since(room->idle_since_ns, now_ns);
    const bool is_quiet = idle_ns > PAUSE * room->idle_ns; /* also true when nothing is known yet */
    return !room->is_needed && (is_quiet || idle_ns + room->load_ns <= room->idle_ns);
}

uint32_t ep_load_room_lead(const ep_load_room *room)
{
    const double visits = room->visit_ns > 0 ? ceil(room->load_ns / room->visit_ns) : 1;
    return visits < 1 ? 1 : visits > EP_LOAD_LEAD_MAX ? EP_LOAD_LEAD_MAX : (uint32_t)visits;
}
