/* SPDX-License-Identifier: Apache-2.0 */
/* The pace of moves under a clock the test owns. */
#include <criterion/criterion.h>

#include "base/clock.h"
#include "placement/move_pace.h"

#define MIB ((uint64_t)1 << 20)

Test(move_pace, without_a_rate_there_is_no_limit)
{
    ep_move_pace pace = {0};
    cr_assert_eq(ep_move_pace_copies(&pace, 100 * MIB, 64), 64u);
    ep_move_pace_tick(&pace, 0, 5 * EP_NS_PER_S);
    for (int copy = 0; copy < 10; copy++) {
        ep_move_pace_charge(&pace, 100 * MIB);
    }
    cr_assert_eq(ep_move_pace_copies(&pace, 100 * MIB, UINT32_MAX), UINT32_MAX);
}

Test(move_pace, bytes_bound_the_copies_whatever_their_size)
{
    ep_move_pace pace = {0};
    ep_move_pace_tick(&pace, 1000 * MIB, EP_NS_PER_S);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 64), 64u, "small ones as many as ever");
    cr_assert_eq(ep_move_pace_copies(&pace, 88 * MIB, 64), 12u);
    cr_assert_eq(ep_move_pace_copies(&pace, 0, 64), 64u, "nobody said how large they are");
    cr_assert_eq(ep_move_pace_copies(&pace, 5000 * MIB, 64), 2u,
                 "larger than a second's bytes, and it goes on all the same");
    cr_assert_eq(ep_move_pace_copies(&pace, 5000 * MIB, 1), 1u);
}

Test(move_pace, what_was_loaded_is_paid_by_time)
{
    ep_move_pace pace = {0};
    uint64_t loaded = 0, now_ns = 7 * EP_NS_PER_S;
    ep_move_pace_tick(&pace, 100 * MIB, now_ns);
    for (int tick = 0; tick < 600; tick++) { /* a minute */
        ep_move_pace_tick(&pace, 100 * MIB, now_ns);
        const uint32_t copies = ep_move_pace_copies(&pace, 300 * MIB, 64);
        for (uint32_t copy = 0; copy < copies; copy++) {
            ep_move_pace_charge(&pace, 300 * MIB);
        }
        loaded += copies * 300 * MIB;
        now_ns += EP_NS_PER_S / 10;
    }
    cr_assert(loaded >= 59 * 100 * MIB && loaded <= 61 * 100 * MIB + 600 * MIB,
              "%llu MiB in a minute", (unsigned long long)(loaded / MIB));
}

Test(move_pace, a_quiet_time_saves_up_one_second)
{
    ep_move_pace pace = {0};
    ep_move_pace_tick(&pace, 100 * MIB, EP_NS_PER_S);
    ep_move_pace_charge(&pace, 100 * MIB);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 1000), 0u);
    ep_move_pace_tick(&pace, 100 * MIB, EP_NS_PER_S + EP_NS_PER_S / 4);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 1000), 25u);
    ep_move_pace_tick(&pace, 100 * MIB, 3600 * EP_NS_PER_S);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 1000), 100u);
}

Test(move_pace, an_order_leaves_a_second_to_pay_or_an_exchange)
{
    ep_move_pace pace = {0};
    ep_move_pace_tick(&pace, 100 * MIB, EP_NS_PER_S);
    for (int copy = 0; copy < 20000; copy++) {
        ep_move_pace_charge(&pace, MIB);
    }
    ep_move_pace_tick(&pace, 100 * MIB, 2 * EP_NS_PER_S);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 64), 0u);
    ep_move_pace_tick(&pace, 100 * MIB, 2 * EP_NS_PER_S + EP_NS_PER_S / 4);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 64), 25u);
    ep_move_pace_charge(&pace, 500 * MIB);
    ep_move_pace_charge(&pace, 500 * MIB);
    ep_move_pace_charge(&pace, 500 * MIB);
    ep_move_pace_tick(&pace, 100 * MIB, 12 * EP_NS_PER_S);
    cr_assert_eq(ep_move_pace_copies(&pace, 500 * MIB, 64), 0u);
    ep_move_pace_tick(&pace, 100 * MIB, 12 * EP_NS_PER_S + EP_NS_PER_S / 2);
    cr_assert_eq(ep_move_pace_copies(&pace, 500 * MIB, 64), 2u);
}

Test(move_pace, another_rate_begins_at_once)
{
    ep_move_pace pace = {0};
    ep_move_pace_tick(&pace, MIB, EP_NS_PER_S);
    ep_move_pace_charge(&pace, 1000 * MIB);
    ep_move_pace_tick(&pace, 50 * MIB, EP_NS_PER_S);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 1000), 50u, "the old debt was at the old rate");
    ep_move_pace_tick(&pace, 0, EP_NS_PER_S);
    cr_assert_eq(ep_move_pace_copies(&pace, MIB, 1000), 1000u);
}
