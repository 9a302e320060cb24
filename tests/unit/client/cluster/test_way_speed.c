/* SPDX-License-Identifier: Apache-2.0 */
/* Round trip and time of a byte out of calls whose times are only told. */
#include "cluster/way_speed.h"

#include <criterion/criterion.h>
#include <math.h>

#include "base/random.h"
#include "moe/host_choice.h"

#define TRIP_US 600.0
#define US_PER_BYTE 0.02

static ep_way_speed speed;

static double told(uint64_t bytes)
{
    ep_host_way way;
    ep_way_speed_read(&speed, &way);
    return way.round_trip_us + way.us_per_byte * (double)bytes;
}

static double noise(uint64_t *state, double share)
{
    return 1 + share * ((double)(ep_splitmix64(state) >> 11) * 0x1p-52 - 1);
}

static void expect(uint64_t bytes, double share)
{
    const double wanted = TRIP_US + US_PER_BYTE * (double)bytes;
    cr_assert_float_eq(told(bytes), wanted, share * wanted, "%lu bytes: %g, not %g", bytes,
                       told(bytes), wanted);
}

Test(way_speed, nothing_is_known_before_the_first_call)
{
    ep_host_way way;
    ep_way_speed_read(&speed, &way);
    cr_assert_eq(way.samples, 0u);
    ep_way_speed_add(&speed, 0, 100);
    ep_way_speed_add(&speed, 100, 0);
    ep_way_speed_read(&speed, &way);
    cr_assert_eq(way.samples, 0u, "of no bytes, or of no time, nothing can be learnt");
}

/* A program that always calls with one size needs only that: within 3 % under noise of 10 %. */
Test(way_speed, one_size_is_known_soon)
{
    uint64_t state = 3;
    for (uint64_t bytes = 100; bytes < 100000000; bytes *= 10) {
        speed = (ep_way_speed){0};
        for (int i = 0; i < 40; i++) {
            ep_way_speed_add(&speed, bytes,
                             (TRIP_US + US_PER_BYTE * (double)bytes) * noise(&state, 0.1));
        }
        expect(bytes, 0.03);
    }
}

Test(way_speed, many_sizes_tell_trip_and_rate)
{
    uint64_t state = 5;
    ep_host_way way;
    for (int i = 0; i < 3000; i++) {
        const uint64_t bytes = 1000ull << ep_splitmix64(&state) % 12;
        ep_way_speed_add(&speed, bytes,
                         (TRIP_US + US_PER_BYTE * (double)bytes) * noise(&state, 0.1));
    }
    ep_way_speed_read(&speed, &way);
    cr_assert_float_eq(way.round_trip_us, TRIP_US, 0.05 * TRIP_US, "%g", way.round_trip_us);
    cr_assert_float_eq(way.us_per_byte, US_PER_BYTE, 0.05 * US_PER_BYTE, "%g", way.us_per_byte);
    for (uint64_t bytes = 1000; bytes < 4000000; bytes *= 2) {
        expect(bytes, 0.05);
    }
}

/* One call in thirty that takes a hundred times as long moves the others' time by less than a
 * quarter; and the first one does not stay. */
Test(way_speed, calls_that_take_for_ever_do_not_count_much)
{
    const double usual = TRIP_US + US_PER_BYTE * 1e6;
    ep_way_speed_add(&speed, 1000000, usual * 100);
    for (int i = 0; i < 400; i++) {
        ep_way_speed_add(&speed, 1000000, i % 30 == 29 ? usual * 100 : usual);
    }
    expect(1000000, 0.25);
}

Test(way_speed, follows_a_link_that_changes)
{
    for (int i = 0; i < 200; i++) {
        ep_way_speed_add(&speed, 1000000, 4 * (TRIP_US + US_PER_BYTE * 1e6));
    }
    for (int i = 0; i < 150; i++) {
        ep_way_speed_add(&speed, 1000000, TRIP_US + US_PER_BYTE * 1e6);
    }
    expect(1000000, 0.02);
}
