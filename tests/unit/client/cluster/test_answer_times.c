/* SPDX-License-Identifier: Apache-2.0 */
/* What counts as late, and as silent, under times that are only told. */
#include <criterion/criterion.h>
#include <math.h>

#include "cluster/answer_times.h"
#include "base/clock.h"
#include "base/random.h"
#include "moe/routing_plan.h"
#include "cluster/silence.h"

#define US EP_NS_PER_US
#define MS EP_NS_PER_MS

static ep_answer_times times;

static void add(uint32_t slots, uint64_t took_ns, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        ep_answer_times_add(&times, slots, took_ns);
    }
}

Test(answer_times, nothing_is_late_before_enough_answers)
{
    add(8, 100 * US, EP_ANSWER_TIMES_MIN - 1);
    cr_assert_eq(ep_answer_times_late_ns(&times, 8), EP_ANSWER_TIMES_UNKNOWN);
    add(8, 100 * US, 1);
    cr_assert_neq(ep_answer_times_late_ns(&times, 8), EP_ANSWER_TIMES_UNKNOWN);
    cr_assert_eq(ep_answer_times_late_ns(&times, 4096), EP_ANSWER_TIMES_UNKNOWN, "another size");
}

/* For many distributions: at most 5 % of the answers are later, and the percentile is not above the
 * true one by more than a step, a quarter of an octave at its low end. */
Test(answer_times, at_most_one_in_twenty_is_late)
{
    uint64_t random = 11;
    static uint64_t took[1000];
    for (uint32_t round = 0; round < 50; round++) {
        double spread = 0.05 * round;
        times = (ep_answer_times){0};
        uint32_t below = 0;
        for (uint32_t i = 0; i < 1000; i++) {
            double u = (double)(ep_splitmix64(&random) >> 11) / 9007199254740992.0;
            took[i] = (uint64_t)(200000.0 * exp(spread * -log(1 - u)));
            ep_answer_times_add(&times, 20, took[i]);
        }
        /* the newest look was after 992 answers */
        uint64_t late = ep_answer_times_late_ns(&times, 20);
        for (uint32_t i = 0; i < 1000; i++) {
            below += took[i] < late;
        }
        cr_assert_geq(below, 942, "round %u: %u of 1000 below %lu", round, below, late);
        uint32_t well_below = 0;
        for (uint32_t i = 0; i < 1000; i++) {
            well_below += took[i] < late * 4 / 5;
        }
        cr_assert_leq(well_below, 960, "round %u: %u of 1000 below 4/5 of %lu", round, well_below,
                      late);
    }
}

Test(answer_times, a_step_holds_what_falls_into_it)
{
    for (uint64_t ns = 9000; ns < 30 * EP_NS_PER_S; ns += ns / 7) {
        times = (ep_answer_times){0};
        add(1, ns, EP_ANSWER_TIMES_MIN);
        uint64_t late = ep_answer_times_late_ns(&times, 1);
        cr_assert(late > ns && late <= ns + ns / 4, "%lu gives %lu", ns, late);
    }
    times = (ep_answer_times){0};
    add(1, 0, EP_ANSWER_TIMES_MIN);
    cr_assert_leq(ep_answer_times_late_ns(&times, 1), 11 * US);
    times = (ep_answer_times){0};
    add(1, UINT64_MAX, EP_ANSWER_TIMES_MIN);
    cr_assert_geq(ep_answer_times_late_ns(&times, 1), 30 * EP_NS_PER_S);
}

Test(answer_times, old_answers_lose_their_weight)
{
    add(8, 50 * MS, EP_ANSWER_TIMES_KEPT);
    add(8, 1 * MS, 8 * EP_ANSWER_TIMES_KEPT);
    cr_assert_lt(ep_answer_times_late_ns(&times, 8), 2 * MS);
    add(8, 50 * MS, EP_ANSWER_TIMES_KEPT / 8);
    cr_assert_gt(ep_answer_times_late_ns(&times, 8), 50 * MS);
}

/* Else each overtaken answer would make the next ones look late earlier. */
Test(answer_times, lost_answers_count_where_they_were_late)
{
    add(8, 1 * MS, 10 * EP_ANSWER_TIMES_MIN);
    uint64_t late = ep_answer_times_late_ns(&times, 8);
    uint32_t total = times.sizes[1].total;
    ep_answer_times_add_lost(&times, 8, late - 1);
    cr_assert_eq(times.sizes[1].total, total, "cancelled early: says nothing");
    ep_answer_times_add_lost(&times, 8, late);
    cr_assert_eq(times.sizes[1].total, total + 1);
    ep_answer_times_add_lost(&times, 4096, late);
    cr_assert_eq(ep_answer_times_late_ns(&times, 4096), EP_ANSWER_TIMES_UNKNOWN);
}

/* ---- silence ---- */

static uint64_t next;

static ep_silence_verdict judge(uint64_t now_ms, uint64_t sent_ms, uint64_t heard_ms,
                                uint64_t pinged_ms)
{
    next = 0;
    return ep_silence_judge(now_ms * MS, sent_ms * MS, heard_ms * MS, pinged_ms * MS, 0, &next);
}

Test(silence, a_stopped_node_is_found_in_250_ms)
{
    cr_assert_eq(judge(1000, 1000, 990, 0), EP_SILENCE_NOT);
    cr_assert_eq(next, 1100 * MS);
    cr_assert_eq(judge(1100, 1000, 990, 0), EP_SILENCE_PING);
    cr_assert_eq(next, 1250 * MS);
    cr_assert_eq(judge(1249, 1000, 990, 1100), EP_SILENCE_NOT);
    cr_assert_eq(next, 1250 * MS);
    cr_assert_eq(judge(1250, 1000, 990, 1100), EP_SILENCE_SILENT);
}

Test(silence, whoever_answers_pings_is_not_silent)
{
    uint64_t heard = 990;
    uint64_t pinged = 0;
    for (uint64_t now = 1100; now < 5000; now = next / MS) {
        ep_silence_verdict verdict = judge(now, 1000, heard, pinged);
        cr_assert_neq(verdict, EP_SILENCE_SILENT, "at %lu", now);
        if (verdict == EP_SILENCE_PING) {
            pinged = now;
            heard = now + 149; /* just in time */
        }
    }
}

Test(silence, a_ping_that_has_not_left_proves_nothing)
{
    cr_assert_eq(judge(9000, 1000, 990, 0), EP_SILENCE_PING);
    cr_assert_eq(judge(9000, 1000, 990, 980), EP_SILENCE_PING, "it was answered");
}

/* A stopped node whose receive buffers are full, behind a frame of megabytes. */
Test(silence, a_node_that_takes_nothing_is_found_in_300_ms)
{
    cr_assert_eq(judge(1100, 1000, 990, 0), EP_SILENCE_PING);
    cr_assert_eq(ep_silence_judge(1250 * MS, 1000 * MS, 990 * MS, 0, 1100 * MS, &next),
                 EP_SILENCE_NOT);
    cr_assert_eq(next, 1300 * MS);
    cr_assert_eq(ep_silence_judge(1300 * MS, 1000 * MS, 990 * MS, 0, 1100 * MS, &next),
                 EP_SILENCE_SILENT);
    cr_assert_eq(ep_silence_judge(1300 * MS, 1000 * MS, 990 * MS, 0, 1250 * MS, &next),
                 EP_SILENCE_NOT, "something left meanwhile");
    cr_assert_eq(ep_silence_judge(1300 * MS, 1000 * MS, 1200 * MS, 0, 1100 * MS, &next),
                 EP_SILENCE_PING, "it was heard");
}

/* A ping that is out already, for another frame or by the connection itself, counts for this one
 * too. */
Test(silence, one_ping_serves_all_frames)
{
    cr_assert_eq(judge(1310, 1200, 990, 1100), EP_SILENCE_SILENT);
    cr_assert_eq(judge(1290, 1200, 990, 1100), EP_SILENCE_NOT, "a frame gets its time");
    cr_assert_eq(next, 1300 * MS);
}

/* ---- passes ---- */

Test(answer_times, what_a_pass_is_worth_is_the_mean_of_what_nodes_tell)
{
    ep_answer_norm told = {.pass = 0};
    ep_answer_pass_add(&told, 0);
    cr_expect_eq(told.pass, 0, "a node of an older version tells nothing");
    ep_answer_pass_add(&told, 4);
    cr_expect_eq(told.pass, 4 * 16);
    for (uint32_t i = 0; i < 1000; i++) {
        ep_answer_pass_add(&told, i % 2 == 0 ? 20 : 40);
    }
    cr_expect(told.pass > 28 * 16 && told.pass < 32 * 16, "it is %u", told.pass);
    for (uint32_t i = 0; i < 1000; i++) {
        ep_answer_pass_add(&told, UINT32_MAX);
    }
    cr_expect_leq(told.pass, 256u * 16, "no node tells more");
}

/* ---- pace ---- */

#define PEERS 4

static ep_answer_times peers[PEERS];
static ep_answer_norm norm;
static float slowness[PEERS];
static const uint8_t usable[PEERS] = {1, 1, 1, 1};

static void answers(uint32_t peer, uint32_t slots, double us, uint32_t count)
{
    static uint64_t random = 5;
    for (uint32_t i = 0; i < count; i++) {
        double u = (double)(ep_splitmix64(&random) >> 11) / 9007199254740992.0;
        ep_answer_pace_add(&peers[peer], &norm, slots, (uint64_t)(us * (0.8 + 0.4 * u) * 1000),
                           slowness[peer] <= 1);
    }
}

static bool compare(void)
{
    for (uint32_t p = 0; p < PEERS; p++) {
        slowness[p] = (float)peers[p].pace;
    }
    bool has_slow = ep_answer_slowness(slowness, usable, PEERS);
    for (uint32_t p = 0; p < PEERS && !has_slow; p++) {
        slowness[p] = 1;
    }
    return has_slow;
}

static void all_answer(uint32_t rounds, double us_of_last)
{
    for (uint32_t r = 0; r < rounds; r++) {
        for (uint32_t p = 0; p < PEERS; p++) {
            answers(p, 20, p + 1 < PEERS ? 300 : us_of_last, 1);
        }
        compare();
    }
}

Test(answer_pace, equal_nodes_are_equal_whatever_sizes_they_get)
{
    cr_assert(!compare(), "nothing is known");
    for (uint32_t r = 0; r < 300; r++) {
        answers(0, 4, 100, 1);
        answers(1, 4000, 9000, 1);
        answers(2, r % 2 ? 4 : 4000, r % 2 ? 100 : 9000, 1);
        answers(3, 20, 300, 1);
        cr_assert(!compare());
    }
}

Test(answer_pace, a_slow_node_is_found_within_a_few_answers_and_so_is_its_recovery)
{
    all_answer(100, 300);
    cr_assert(!compare());
    all_answer(40, 3000);
    cr_assert(compare() && slowness[3] >= EP_COPY_SLOW, "%.1f", (double)slowness[3]);
    all_answer(100, 3000);
    cr_assert(slowness[3] > 7 && slowness[3] < 14 && slowness[0] == 1 && slowness[2] == 1, "%.1f",
              (double)slowness[3]);
    answers(3, 20, 300, 3);
    cr_assert(compare() && slowness[3] >= EP_COPY_SLOW, "a few quick ones may be luck: %.1f",
              (double)slowness[3]);
    answers(3, 20, 300, 12);
    cr_assert(!compare() || slowness[3] < EP_COPY_SLOW, "%.1f", (double)slowness[3]);
    answers(3, 20, 300, 24);
    cr_assert(!compare());
}

/* Slower nodes are sent smaller frames, of a size that no other node has answered yet. */
Test(answer_pace, a_slow_node_is_found_by_frames_that_it_alone_is_sent)
{
    all_answer(100, 300);
    for (uint32_t r = 0; r < 60; r++) {
        for (uint32_t p = 0; p < PEERS; p++) {
            answers(p, p + 1 < PEERS ? 20 : 5, p + 1 < PEERS ? 300 : 6000, 1);
        }
        compare();
    }
    cr_assert(compare() && slowness[3] >= EP_COPY_SLOW && slowness[0] == 1, "%.1f",
              (double)slowness[3]);
}

Test(answer_pace, answers_that_took_for_ever_make_no_slow_node_while_most_are_quick)
{
    for (uint32_t r = 0; r < 300; r++) {
        all_answer(1, 300);
        all_answer(1, r % 2 ? 300 : 1e6);
        all_answer(1, 300);
        cr_assert_leq(slowness[3], 1.0f, "%.2f", (double)slowness[3]);
    }
}

Test(answer_pace, all_nodes_that_slow_down_together_stay_in_step)
{
    all_answer(100, 300);
    for (uint32_t r = 0; r < 200; r++) {
        for (uint32_t p = 0; p < PEERS; p++) {
            answers(p, 20, 6000, 1);
        }
        compare();
        cr_assert(r < 1 || slowness[0] < EP_COPY_SLOW, "round %u: %.1f", r, (double)slowness[0]);
    }
    cr_assert(!compare());
    all_answer(20, 300);
    cr_assert(!compare());
}

/* A slow node's probes are overtaken by a copy, but for one in ten. */
Test(answer_pace, what_is_seldom_quick_stays_slow)
{
    all_answer(100, 3000);
    for (int i = 0; i < 1000; i++) {
        if (i % 10 == 0) {
            answers(3, 20, 300, 1);
        } else {
            ep_answer_pace_add_lost(&peers[3]);
        }
        cr_assert(compare() && slowness[3] >= EP_COPY_SLOW, "%d: %.1f", i, (double)slowness[3]);
    }
    cr_assert_lt(slowness[3], 33.0f);
}

Test(answer_pace, never_more_than_half_of_the_nodes_are_slow)
{
    uint64_t random = 17;
    for (int round = 0; round < 2000; round++) {
        float values[9];
        uint8_t can[9];
        uint32_t nodes = 1 + (uint32_t)(ep_splitmix64(&random) % 9), slow = 0, live = 0;
        for (uint32_t n = 0; n < nodes; n++) {
            values[n] =
                (float)(int32_t)(ep_splitmix64(&random) % (2 * EP_PACE_MAX + 1)) - EP_PACE_MAX;
            can[n] = ep_splitmix64(&random) % 4 != 0;
        }
        bool has_slow = ep_answer_slowness(values, can, nodes);
        for (uint32_t n = 0; n < nodes; n++) {
            live += can[n];
            slow += has_slow && can[n] && values[n] > 1;
        }
        cr_assert_leq(2 * slow, live, "%u of %u", slow, live);
    }
}
