/* SPDX-License-Identifier: Apache-2.0 */
/* Who is turned away for a newcomer, see transport/lane_accept.h. */
#include <criterion/criterion.h>
#include <sys/resource.h>

#include "transport/lane_accept.h"

#define PLACES 200u
#define SHARE (PLACES / 4)

static int ids[PLACES + 1];

/* strangers of one host, then others that spoke; the newest first, so the oldest stranger is
 * ids[strangers - 1]. */
static void see(ep_accept_pick *pick, const char *peer, uint32_t strangers, uint32_t known)
{
    for (uint32_t i = 0; i < strangers + known; i++) {
        ep_accept_pick_see(pick, &ids[i], peer, i < strangers);
    }
}

static uint32_t counted_of_host(const char *newcomer, const char *peer)
{
    ep_accept_pick pick = {.newcomer = newcomer};
    ep_accept_pick_see(&pick, &ids[0], peer, true);
    return pick.of_host;
}

Test(accept_pick, ports_are_no_part_of_an_address)
{
    cr_assert_eq(counted_of_host("10.0.0.1:4000", "10.0.0.1:5"), 1);
    cr_assert_eq(counted_of_host("[fe80::1]:4000", "[fe80::1]:5"), 1);
    cr_assert_eq(counted_of_host("process 7 of user 0", "process 7 of user 0"), 1);
    cr_assert_eq(counted_of_host("10.0.0.1:4000", "10.0.0.11:4000"), 0);
    cr_assert_eq(counted_of_host("10.0.0.11:4000", "10.0.0.1:4000"), 0);
    cr_assert_eq(counted_of_host("[fe80::1]:4000", "[fe80::1:1]:4000"), 0);
    cr_assert_eq(counted_of_host("process 7 of user 0", "process 77 of user 0"), 0);
    cr_assert_eq(counted_of_host("process 7 of user 0", "process 7 of user 01"), 0);
}

Test(accept_pick, the_oldest_stranger_of_an_address_goes_at_its_share)
{
    ep_accept_pick pick = {.newcomer = "10.0.0.1:1"};
    bool room;
    see(&pick, "10.0.0.1:2", SHARE - 1, 1);
    cr_assert_null(ep_accept_pick_choose(&pick, PLACES, &room));
    cr_assert(room);
    see(&pick, "10.0.0.2:2", 60, 0);
    cr_assert_null(ep_accept_pick_choose(&pick, PLACES, &room),
                   "another's strangers count as its own");
    ep_accept_pick_see(&pick, &ids[PLACES], "10.0.0.1:3", true);
    cr_assert_eq(ep_accept_pick_choose(&pick, PLACES, &room), &ids[PLACES]);
    cr_assert(room);
}

Test(accept_pick, the_oldest_stranger_of_all_goes_where_all_places_are_taken)
{
    ep_accept_pick pick = {.newcomer = "10.0.0.9:1"};
    bool room;
    see(&pick, "10.0.0.1:2", 3, PLACES - 4);
    cr_assert_null(ep_accept_pick_choose(&pick, PLACES, &room));
    cr_assert(room);
    ep_accept_pick_see(&pick, &ids[PLACES], "10.0.0.2:2", false);
    cr_assert_eq(ep_accept_pick_choose(&pick, PLACES, &room), &ids[2]);
    cr_assert(room);
}

Test(accept_pick, nobody_who_spoke_goes)
{
    ep_accept_pick pick = {.newcomer = "10.0.0.1:1"};
    bool room;
    see(&pick, "10.0.0.1:2", 0, PLACES);
    cr_assert_null(ep_accept_pick_choose(&pick, PLACES, &room));
    cr_assert_not(room);
}

Test(accept_pick, the_lane_has_room_for_connections_that_close)
{
    ep_lane_limits limits = {.connections_max = 4};
    cr_assert_eq(ep_accept_places(&limits, "tcp://127.0.0.1:1"), 4);
    cr_assert_gt(limits.connections_max, 4);
}

/* Few descriptors leave places too, and what is said of them is what was asked for. */
Test(accept_pick, few_descriptors_are_divided)
{
    const struct rlimit few = {.rlim_cur = 128, .rlim_max = 128};
    ep_lane_limits limits = {.connections_max = 4096};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    uint32_t places = ep_accept_places(&limits, "tcp://127.0.0.1:1");
    cr_assert_lt(limits.connections_max, 128);
    cr_assert(places >= limits.connections_max / 2 && places < limits.connections_max, "%u places",
              places);
}
