/* SPDX-License-Identifier: Apache-2.0 */
/* Balance of one layer: against all placements of small cases, its promises on drawn ones, repair,
 * limits. */
#include "placement/balance.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "base/random.h"
#include "support/expect.h"

enum { EXPERTS_MAX = 64, NODES_MAX = 12 };

typedef struct {
    double heat[EXPERTS_MAX];
    double speeds[NODES_MAX];
    uint32_t slots[NODES_MAX];
    ep_balance_input in;
    uint64_t random;
} problem;

/* Of what the problem holds. */
static void set_input(problem *p, uint32_t experts, uint32_t nodes, uint32_t copies_min,
                      uint32_t copies_total)
{
    p->in = (ep_balance_input){.experts = experts,
                               .nodes = nodes,
                               .heat = p->heat,
                               .speeds = p->speeds,
                               .slots = p->slots,
                               .copies_min = copies_min,
                               .copies_total = copies_total};
}

static uint32_t below(problem *p, uint32_t limit)
{
    return (uint32_t)(ep_splitmix64(&p->random) % limit);
}

static void draw(problem *p, uint64_t seed, uint32_t experts, uint32_t nodes, bool is_even)
{
    memset(p, 0, sizeof(*p));
    p->random = seed;
    const uint32_t skew = 1 + below(p, 4);
    for (uint32_t e = 0; e < experts; e++) {
        p->heat[e] = pow((1 + below(p, 1000)) / 100.0, skew);
    }
    for (uint32_t n = 0; n < nodes; n++) {
        p->speeds[n] = is_even ? 2 : 1 + below(p, 4);
    }
    const uint32_t copies = 1 + below(p, nodes < 2 ? 1 : 2), least = experts * copies;
    set_input(p, experts, nodes, copies, least + below(p, experts * (nodes - copies) + 1));
    uint32_t slots = 0;
    for (uint32_t n = 0; n < nodes; n++) {
        p->slots[n] = (least + nodes - 1) / nodes + below(p, experts);
        p->slots[n] = p->slots[n] > experts ? experts : p->slots[n];
        slots += p->slots[n];
    }
    cr_assert_geq(slots, least);
}

static ep_balance *balance_of(const problem *p)
{
    ep_balance *b = NULL;
    ep_error error = {0};
    ASSERT_OK(ep_balance_create(&p->in, &b, &error), error);
    return b;
}

static ep_balance *solved(const problem *p, double good)
{
    ep_error error = {0};
    ep_balance *b = balance_of(p);
    ASSERT_OK(ep_balance_fill(b, &error), error);
    ep_balance_search(b, good);
    return b;
}

/* The busiest node's time from who holds what, and the promises about that. */
static double check(const problem *p, const ep_balance *b)
{
    double busy[NODES_MAX] = {0}, most = 0;
    uint32_t counts[NODES_MAX] = {0}, total = 0;
    for (uint32_t e = 0; e < p->in.experts; e++) {
        double speed = 0;
        uint32_t copies = 0;
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            if (ep_balance_holds(b, e, n)) {
                speed += p->speeds[n];
                counts[n]++;
                copies++;
            }
        }
        cr_assert_geq(copies, p->in.copies_min);
        total += copies;
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            busy[n] += ep_balance_holds(b, e, n) ? p->heat[e] / speed : 0;
        }
    }
    for (uint32_t n = 0; n < p->in.nodes; n++) {
        cr_assert_leq(counts[n], p->slots[n]);
        most = fmax(most, busy[n]);
    }
    cr_assert_leq(total, p->in.copies_total);
    cr_assert_float_eq(ep_balance_busiest(b), most, 1e-9 * most);
    return most;
}

/* The best of all placements, by trying every set of nodes for one expert after the other. */
static void try_all(const problem *p, uint32_t expert, uint32_t used, const double *busy,
                    const uint32_t *counts, double *io_best)
{
    if (expert == p->in.experts) {
        double most = 0;
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            most = fmax(most, busy[n]);
        }
        *io_best = most;
        return;
    }
    const uint32_t others = (p->in.experts - expert - 1) * p->in.copies_min;
    for (uint32_t set = 1; set < 1u << p->in.nodes; set++) {
        double then[NODES_MAX], speed = 0, most = 0;
        uint32_t filled[NODES_MAX];
        const uint32_t copies = (uint32_t)__builtin_popcount(set);
        bool fits = copies >= p->in.copies_min && used + copies + others <= p->in.copies_total;
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            speed += set >> n & 1 ? p->speeds[n] : 0;
        }
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            then[n] = busy[n] + (set >> n & 1 ? p->heat[expert] / speed : 0);
            filled[n] = counts[n] + (set >> n & 1);
            most = fmax(most, then[n]);
            fits = fits && filled[n] <= p->slots[n];
        }
        if (fits && most < *io_best * (1 - 1e-12)) {
            try_all(p, expert + 1, used + copies, then, filled, io_best);
        }
    }
}

static int hotter(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a < b) - (a > b);
}

Test(balance, bound_and_search_stand_on_both_sides_of_the_best_of_all_placements)
{
    double worst = 1, loosest = 1;
    for (uint64_t seed = 0; seed < 300; seed++) {
        problem p;
        const uint32_t nodes = 1 + (uint32_t)(seed % 4);
        draw(&p, seed, seed % 50 == 49 ? 12 : 1 + (uint32_t)(seed / 4 % 7),
             nodes > 3 && seed % 50 == 49 ? 3 : nodes, seed % 3 != 0);
        /* the sooner the best is near, the more is cut */
        qsort(p.heat, p.in.experts, sizeof(p.heat[0]), hotter);
        ep_balance *b = solved(&p, 1);
        const double found = check(&p, b);
        const double none[NODES_MAX] = {0};
        const uint32_t empty[NODES_MAX] = {0};
        double best = found * (1 + 1e-9);
        try_all(&p, 0, 0, none, empty, &best);
        best = fmin(best, found);
        for (int with_slots = 0; with_slots < 2; with_slots++) {
            const double bound = ep_balance_bound(&p.in, with_slots);
            cr_assert_leq(bound, best * (1 + 1e-6), "seed %lu: bound %.9g, a placement has %.9g",
                          (unsigned long)seed, bound, best);
            loosest = with_slots ? fmax(loosest, best / bound) : loosest;
        }
        worst = fmax(worst, found / best);
        ep_balance_destroy(b);
    }
    cr_log_info("of 300 small cases the search is at most %.3f of the best, which is at most %.3f "
                "of the bound",
                worst, loosest);
    cr_assert_leq(worst, 1.3);
}

Test(balance, promises_hold_on_drawn_cases)
{
    for (uint64_t seed = 1000; seed < 1400; seed++) {
        problem p;
        draw(&p, seed, 1 + (uint32_t)(seed % EXPERTS_MAX), 1 + (uint32_t)(seed % NODES_MAX),
             seed % 2 == 0);
        ep_balance *b = solved(&p, 1.001);
        cr_assert_geq(check(&p, b) * (1 + 1e-6), ep_balance_bound(&p.in, true));
        ep_balance *again = solved(&p, 1.001);
        cr_assert_eq(ep_balance_busiest(b), ep_balance_busiest(again),
                     "the same input, another result");
        ep_balance_destroy(again);
        ep_balance_destroy(b);
    }
}

Test(balance, even_heat_is_spread_evenly_and_a_hot_expert_gets_the_spare_copies)
{
    problem p = {.slots = {9, 9, 9, 9}, .speeds = {1, 1, 1, 1}};
    set_input(&p, 32, 4, 1, 35);
    for (uint32_t e = 0; e < 32; e++) {
        p.heat[e] = 1;
    }
    p.heat[5] = 31; /* as much as all others */
    ep_balance *b = solved(&p, 1.001);
    cr_assert_float_eq(check(&p, b), 62 / 4.0, 0.5);
    for (uint32_t n = 0; n < 4; n++) {
        cr_assert(ep_balance_holds(b, 5, n));
    }
    ep_balance_destroy(b);
}

/* A node's time is less than two small pieces of the hot experts: with all 72 copies it is 1.03 of
 * the bound. */
Test(balance, few_hot_experts_get_fewer_copies_than_there_are_where_these_divide_better)
{
    problem p = {0};
    set_input(&p, 64, 12, 1, 72);
    for (uint32_t e = 0; e < 64; e++) {
        p.heat[e] = fmin(1000, floor(6275 / ((e + 1.0) * (e + 1.0))) + 1);
    }
    for (uint32_t n = 0; n < 12; n++) {
        p.speeds[n] = 1;
        p.slots[n] = 6;
    }
    ep_balance *b = solved(&p, 1.001);
    cr_assert_leq(check(&p, b), 1.005 * ep_balance_bound(&p.in, true));
    ep_balance_destroy(b);
    uint64_t none = 0;
    p.in.work_left = &none;
    b = solved(&p, 1.001);
    cr_assert_gt(check(&p, b), 1.02 * ep_balance_bound(&p.in, true),
                 "without work left no other start is tried");
    ep_balance_destroy(b);
}

/* Copies on nodes of this placement that the other has not. */
static uint32_t loads_between(const problem *p, const ep_balance *before, const ep_balance *after)
{
    uint32_t loads = 0;
    for (uint32_t e = 0; e < p->in.experts; e++) {
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            loads += ep_balance_holds(after, e, n) && !ep_balance_holds(before, e, n);
        }
    }
    return loads;
}

static ep_balance *copy_of(const problem *p, const ep_balance *from)
{
    ep_balance *b = balance_of(p);
    for (uint32_t e = 0; e < p->in.experts; e++) {
        for (uint32_t n = 0; n < p->in.nodes; n++) {
            cr_assert(!ep_balance_holds(from, e, n) || ep_balance_put(b, e, n));
        }
    }
    return b;
}

Test(balance, repair_never_makes_it_worse_and_counts_what_it_loads)
{
    uint32_t helped = 0;
    for (uint64_t seed = 2000; seed < 2300; seed++) {
        problem p;
        draw(&p, seed, 2 + (uint32_t)(seed % (EXPERTS_MAX - 1)),
             2 + (uint32_t)(seed % (NODES_MAX - 1)), seed % 2 == 0);
        ep_balance *old = solved(&p, 1.001);
        for (uint32_t e = 0; e < p.in.experts; e++) {
            p.heat[e] *= 0.5 + below(&p, 1000) / 500.0; /* the placement is of yesterday */
        }
        ep_balance *before = copy_of(&p, old), *b = copy_of(&p, old);
        const uint32_t loads_max = below(&p, 30);
        const uint32_t loads = ep_balance_repair(b, 1.05, loads_max);
        const uint32_t needed = loads_between(&p, before, b);
        cr_assert_leq(loads, loads_max);
        cr_assert_leq(needed, loads);
        cr_assert_leq(check(&p, b), check(&p, before) * (1 + 1e-9));
        helped += ep_balance_busiest(b) < 0.99 * ep_balance_busiest(before);
        ep_balance_destroy(b);
        ep_balance_destroy(before);
        ep_balance_destroy(old);
    }
    cr_assert_gt(helped, 100);
}

Test(balance, what_is_put_stays_when_the_rest_is_filled_in)
{
    problem p;
    draw(&p, 7, 40, 8, true);
    for (uint32_t n = 0; n < 8; n++) {
        p.slots[n] = 40;
    }
    ep_balance *b = balance_of(&p);
    cr_assert(ep_balance_put(b, 3, 2));
    cr_assert_not(ep_balance_put(b, 3, 2));
    cr_assert(ep_balance_put(b, 9, 2));
    cr_assert_eq(ep_balance_fill(b, NULL), EP_OK);
    cr_assert(ep_balance_holds(b, 3, 2) && ep_balance_holds(b, 9, 2));
    ep_balance_destroy(b);
}

Test(balance, what_cannot_be_placed_is_refused)
{
    problem p = {.slots = {2, 2}, .speeds = {1, 1}};
    ep_balance *b = NULL;
    ep_error error = {0};
    set_input(&p, 5, 2, 1, 5);
    ASSERT_FAILS(ep_balance_create(&p.in, &b, &error), EP_ERR_INVALID_ARGUMENT, error, "5 experts");
    p.in.experts = 4;
    p.in.copies_min = 3;
    cr_assert_eq(ep_balance_create(&p.in, &b, &error), EP_ERR_INVALID_ARGUMENT,
                 "three copies over two nodes");
    /* Enough slots in all, but two copies of each would need two on the large node. */
    set_input(&p, 2, 2, 2, 4);
    p.slots[0] = 1;
    p.slots[1] = 3;
    cr_assert_eq(ep_balance_create(&p.in, &b, &error), EP_ERR_INVALID_ARGUMENT,
                 "a slot beyond one for each expert is none");
}

Test(balance, a_slot_beyond_one_for_each_expert_is_none)
{
    for (uint64_t seed = 3000; seed < 3050; seed++) {
        problem p;
        draw(&p, seed, 20, 6, true);
        p.slots[1] = p.slots[4] = 20;
        const double bounds[2] = {ep_balance_bound(&p.in, false), ep_balance_bound(&p.in, true)};
        p.slots[1] = p.slots[4] = UINT32_MAX;
        cr_assert_eq(ep_balance_bound(&p.in, false), bounds[0]);
        cr_assert_eq(ep_balance_bound(&p.in, true), bounds[1]);
        ep_balance *b = solved(&p, 1.001);
        check(&p, b);
        ep_balance_destroy(b);
    }
}

Test(balance, fill_looks_at_what_nodes_have_in_common_while_it_is_allowed)
{
    uint64_t left = UINT64_MAX;
    problem p;
    draw(&p, 3, 64, 12, true);
    for (uint32_t e = 0; e < 64; e++) {
        p.heat[e] = 1;
    }
    p.in.copies_min = 2;
    p.in.copies_total = 128;
    for (uint32_t n = 0; n < 12; n++) {
        p.slots[n] = 64;
    }
    p.in.common_left = &left;
    ep_balance *all = solved(&p, 1);
    const uint64_t needed = UINT64_MAX - left;
    cr_assert_gt(needed, 0u);
    check(&p, all);
    left = needed / 2;
    ep_balance *half = solved(&p, 1);
    cr_assert_eq(left, 0u);
    check(&p, half);
    cr_assert_float_eq(ep_balance_busiest(half), ep_balance_busiest(all), 1e-9);
    uint32_t others = 0;
    for (uint32_t e = 0; e < 64; e++) {
        for (uint32_t n = 0; n < 12; n++) {
            others += ep_balance_holds(half, e, n) != ep_balance_holds(all, e, n);
        }
    }
    cr_assert_gt(others, 0u, "it looked on");
    ep_balance_destroy(half);
    ep_balance_destroy(all);
}

static void fill(ep_balance *b)
{
    ep_error error = {0};
    ASSERT_OK(ep_balance_fill(b, &error), error);
}

Test(balance, a_start_that_is_not_tried_takes_no_work)
{
    uint64_t work = UINT64_MAX;
    problem p = {.heat = {5, 4, 3, 3, 3}, .speeds = {1, 1}, .slots = {5, 5}};
    set_input(&p, 5, 2, 1, 6);
    p.in.work_left = &work;
    ep_balance *b = balance_of(&p);
    fill(b);
    cr_assert_gt(check(&p, b), 1.01 * ep_balance_bound(&p.in, true), "it is worth another start");
    cr_assert_eq(work, UINT64_MAX);
    ep_balance_destroy(b);
}

/* Where no further start is better, the first is made again. */
Test(balance, further_starts_take_nothing_of_what_nodes_may_have_in_common)
{
    uint32_t cases = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t work = 0, common = UINT64_MAX;
        problem p;
        draw(&p, seed, 32, 12, true);
        for (uint32_t e = 0; e < 32; e++) {
            p.heat[e] = ceil(p.heat[e]);
        }
        p.in.copies_min = 1;
        p.in.work_left = &work;
        p.in.common_left = &common;
        ep_balance *first = balance_of(&p), *again = balance_of(&p);
        fill(first);
        const uint64_t needed = UINT64_MAX - common;
        work = UINT64_MAX;
        common = needed;
        fill(again);
        bool is_same = true;
        for (uint32_t i = 0; i < 32 * 12; i++) {
            is_same = is_same && ep_balance_holds(first, i / 12, i % 12) ==
                                     ep_balance_holds(again, i / 12, i % 12);
        }
        if (work < UINT64_MAX && ep_balance_busiest(first) == ep_balance_busiest(again)) {
            cases += needed > 0;
            cr_assert(is_same && common == 0, "seed %llu", (unsigned long long)seed);
        }
        ep_balance_destroy(again);
        ep_balance_destroy(first);
    }
    cr_assert_gt(cases, 0u);
}

Test(balance, search_and_repair_end_with_the_work_they_are_allowed)
{
    uint64_t work = UINT64_MAX;
    problem p;
    draw(&p, 7, 64, 12, false);
    p.in.work_left = &work;
    ep_balance_destroy(solved(&p, 1));
    const uint64_t needed = UINT64_MAX - work;
    cr_assert_gt(needed, 0u);
    work = needed / 2;
    ep_balance *half = solved(&p, 1);
    check(&p, half);
    cr_assert_eq(work, 0u);
    ep_balance *none = solved(&p, 1);
    check(&p, none);
    const double before = ep_balance_busiest(none);
    cr_assert_eq(ep_balance_repair(none, 1, 1000), 0u);
    cr_assert_eq(ep_balance_busiest(none), before);
    ep_balance_destroy(none);
    ep_balance_destroy(half);
}
