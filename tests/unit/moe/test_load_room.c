/* SPDX-License-Identifier: Apache-2.0 */
/* Whether there is time for a load that nobody asked for, on made-up times. */
#include <criterion/criterion.h>

#include "moe/load_room.h"

#define MS 1000000ull

/* Visits every 20 ms; each needs the first `busy_ms` of them for loads of 5 ms. Returns when the
 * last one's loads have ended. */
static uint64_t run(ep_load_room *room, uint64_t busy_ms)
{
    uint64_t now = 1000 * MS;
    for (int i = 0; i < 50; i++, now += 20 * MS) {
        ep_load_room_visit(room, now);
        ep_load_room_needed(room, now);
        ep_load_room_loaded(room, 5 * MS);
        ep_load_room_idle(room, now + busy_ms * MS);
    }
    return now - 20 * MS + busy_ms * MS;
}

Test(load_room, loads_begin_as_long_as_they_end_before_the_next_visit)
{
    ep_load_room room = {0};
    const uint64_t idle = run(&room, 8);
    cr_expect(ep_load_room_fits(&room, idle));
    cr_expect(ep_load_room_fits(&room, idle + 6 * MS));
    cr_expect_not(ep_load_room_fits(&room, idle + 8 * MS));
    cr_expect_not(ep_load_room_fits(&room, idle + 12 * MS));
    cr_expect(ep_load_room_fits(&room, idle + 60 * MS),
              "the next visit is late by far: who knows when it comes");
}

Test(load_room, nothing_was_ever_needed)
{
    ep_load_room room = {0};
    cr_expect(ep_load_room_fits(&room, 1000 * MS));
    ep_load_room_needed(&room, 1000 * MS);
    cr_expect_not(ep_load_room_fits(&room, 1001 * MS));
    ep_load_room_idle(&room, 1002 * MS);
    cr_expect(ep_load_room_fits(&room, 1003 * MS), "nobody knows when the next one comes");
}

Test(load_room, there_is_none_when_requests_need_it_all)
{
    ep_load_room room = {0};
    const uint64_t idle = run(&room, 18);
    cr_expect_not(ep_load_room_fits(&room, idle));
    ep_load_room_needed(&room, idle);
    cr_expect_not(ep_load_room_fits(&room, idle + 500 * MS), "a request waits");
}

Test(load_room, one_pause_promises_no_room)
{
    ep_load_room room = {0};
    uint64_t now = run(&room, 18) + 3600 * 1000 * MS;
    for (int i = 0; i < 40; i++, now += 20 * MS) {
        ep_load_room_visit(&room, now);
        ep_load_room_needed(&room, now);
        ep_load_room_idle(&room, now + 18 * MS);
    }
    cr_expect_not(ep_load_room_fits(&room, now - 2 * MS));
}

Test(load_room, slow_loads_are_for_later_visits)
{
    ep_load_room room = {0};
    cr_expect_eq(ep_load_room_lead(&room), 1, "nothing is known yet");
    run(&room, 8);
    cr_expect_eq(ep_load_room_lead(&room), 1);
    for (int i = 0; i < 200; i++) {
        ep_load_room_loaded(&room, 50 * MS);
    }
    cr_expect_eq(ep_load_room_lead(&room), 3);
    for (int i = 0; i < 2000; i++) {
        ep_load_room_loaded(&room, 100000 * MS);
    }
    cr_expect_eq(ep_load_room_lead(&room), EP_LOAD_LEAD_MAX);
}
