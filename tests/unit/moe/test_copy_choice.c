/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of copies: even, by size, by speed, never one that is left out, and a slow node is
 * tried again seldom. */
#include <criterion/criterion.h>
#include <string.h>

#include "moe/routing_plan.h"
#include "unit/moe/random_batch.h"

#define EXPERTS_MAX 48
#define NODES_MAX 7

typedef struct scene {
    uint32_t offsets[EXPERTS_MAX + 1];
    uint32_t copies[EXPERTS_MAX * NODES_MAX];
    uint32_t slots[EXPERTS_MAX];
    uint32_t order[EXPERTS_MAX];
    uint32_t chosen[EXPERTS_MAX];
    uint8_t usable[NODES_MAX];
    float slowness[NODES_MAX];
    float busy[NODES_MAX];
    ep_routing_layer layer;
    ep_copy_choice choice;
} scene;

/* Every expert on every node, a slot each, all nodes alike. */
static void make_scene(scene *s, uint32_t experts, uint32_t nodes)
{
    memset(s, 0, sizeof(*s));
    for (uint32_t e = 0; e < experts; e++) {
        for (uint32_t n = 0; n < nodes; n++) {
            s->copies[s->offsets[e] + n] = n;
        }
        s->offsets[e + 1] = s->offsets[e] + nodes;
        s->slots[e] = 1;
    }
    for (uint32_t n = 0; n < nodes; n++) {
        s->usable[n] = 1;
        s->slowness[n] = 1;
    }
    s->layer = (ep_routing_layer){
        .shape = {.experts = experts}, .offsets = s->offsets, .copies = s->copies};
    s->choice = (ep_copy_choice){.nodes_count = nodes,
                                 .usable = s->usable,
                                 .slowness = s->slowness,
                                 .slots = s->slots,
                                 .pass_slots = EP_COPY_PASS_SLOTS,
                                 .order = s->order,
                                 .busy = s->busy};
}

static void choose(scene *s, uint64_t spread)
{
    s->choice.spread = spread;
    ep_choose_copies(&s->layer, &s->choice, s->chosen);
}

static uint32_t given_to(const scene *s, uint32_t node)
{
    uint32_t count = 0;
    for (uint32_t e = 0; e < s->layer.shape.experts; e++) {
        count += s->chosen[e] == node;
    }
    return count;
}

Test(copy_choice, spreads_calls_over_all_usable_copies_and_experts_over_nodes)
{
    scene s;
    make_scene(&s, 32, 4);
    s.usable[1] = 0;
    for (int is_round = 0; is_round < 2; is_round++) {
        unsigned by_expert[32][4] = {{0}};
        s.choice.slots = is_round == 0 ? NULL : s.slots;
        for (uint64_t spread = 0; spread < 3; spread++) {
            choose(&s, spread);
            cr_assert_eq(given_to(&s, 1), 0);
            for (uint32_t n = 0; n < 4; n++) {
                cr_assert(n == 1 || given_to(&s, n) == 10 || given_to(&s, n) == 11, "%u",
                          given_to(&s, n));
            }
            for (uint32_t e = 0; e < 32; e++) {
                by_expert[e][s.chosen[e]]++;
            }
        }
        for (uint32_t e = 0; e < 32; e++) {
            cr_assert(by_expert[e][0] == 1 && by_expert[e][2] == 1 && by_expert[e][3] == 1,
                      "three calls reach three copies");
        }
    }
}

Test(copy_choice, the_largest_comes_first)
{
    scene s;
    make_scene(&s, 5, 2);
    s.slots[4] = 100;
    choose(&s, 0);
    cr_assert_eq(given_to(&s, s.chosen[4]), 1, "the others go where it is not");
}

/* One copy: no choice, and the experts with one go around it. */
Test(copy_choice, what_has_no_choice_counts_before_what_has_one)
{
    scene s;
    make_scene(&s, 3, 2);
    /* expert 2 has one copy, on node 1; experts 0 and 1 have both */
    static const uint32_t copies[] = {0, 1, 0, 1, 1};
    static const uint32_t offsets[] = {0, 2, 4, 5};
    memcpy(s.copies, copies, sizeof(copies));
    memcpy(s.offsets, offsets, sizeof(offsets));
    s.slots[2] = 1000;
    choose(&s, 3);
    cr_assert(s.chosen[2] == 1 && s.chosen[0] == 0 && s.chosen[1] == 0);
    s.slots[1] = 0;
    choose(&s, 3);
    cr_assert_eq(s.chosen[1], EP_NO_EXPERT, "nobody asks for it");
}

static bool is_left_out(const scene *s, const uint8_t *tried, uint32_t copy)
{
    return tried[copy] != 0 || s->usable[s->copies[copy]] == 0;
}

/* Node 0 has one large expert, node 1 two small ones; the last is on both. */
Test(copy_choice, what_a_pass_is_worth_decides_between_few_experts_and_few_slots)
{
    static const uint32_t offsets[] = {0, 1, 2, 3, 5}, copies[] = {0, 1, 1, 0, 1},
                          slots[] = {10, 1, 1, 2};
    scene s;
    make_scene(&s, 4, 2);
    memcpy(s.offsets, offsets, sizeof(offsets));
    memcpy(s.copies, copies, sizeof(copies));
    memcpy(s.slots, slots, sizeof(slots));
    choose(&s, 0);
    cr_expect_eq(s.chosen[3], 0, "fewer experts are read there");
    s.choice.pass_slots = 1;
    choose(&s, 0);
    cr_expect_eq(s.chosen[3], 1, "fewer slots are computed there");
}

/* Random scenes: the choice is one of the best that are left, and the same each time. */
Test(copy_choice, never_takes_a_copy_that_is_left_out)
{
    uint64_t state = 3;
    for (int round = 0; round < 3000; round++) {
        scene s, again;
        uint8_t tried[EXPERTS_MAX * NODES_MAX] = {0};
        make_scene(&s, 1 + random_below(&state, EXPERTS_MAX), 1 + random_below(&state, NODES_MAX));
        for (uint32_t n = 0; n < s.choice.nodes_count; n++) {
            s.usable[n] = (uint8_t)random_below(&state, 3);
            s.slowness[n] = random_below(&state, 2) ? 1 : (float)random_below(&state, 200) / 10 + 1;
        }
        for (uint32_t e = 0; e < s.layer.shape.experts; e++) {
            s.slots[e] = random_below(&state, random_below(&state, 2) ? 4 : 500);
        }
        for (uint32_t c = 0; c < EXPERTS_MAX * NODES_MAX; c++) {
            tried[c] = random_below(&state, 4) == 0;
        }
        s.choice.tried = tried;
        choose(&s, random_below(&state, 1000));
        for (uint32_t e = 0; e < s.layer.shape.experts; e++) {
            uint32_t left = 0;
            bool has_good = false, is_found = false;
            for (uint32_t c = s.offsets[e]; c < s.offsets[e + 1]; c++) {
                left += !is_left_out(&s, tried, c);
                has_good |= !is_left_out(&s, tried, c) && s.usable[s.copies[c]] == 1;
                is_found |= s.copies[c] == s.chosen[e] && !is_left_out(&s, tried, c);
            }
            cr_assert_eq(s.chosen[e] != EP_NO_EXPERT, left > 0 && s.slots[e] > 0);
            cr_assert(s.chosen[e] == EP_NO_EXPERT ||
                      (is_found && (!has_good || s.usable[s.chosen[e]] == 1)));
        }
        again = s;
        memset(again.chosen, 0, sizeof(again.chosen));
        ep_choose_copies(&s.layer, &s.choice, again.chosen);
        cr_assert_eq(memcmp(again.chosen, s.chosen, s.layer.shape.experts * sizeof(s.chosen[0])),
                     0);
    }
}

/* With copies everywhere no node is ahead of another by more than one expert's work. */
Test(copy_choice, nodes_end_together)
{
    uint64_t state = 9;
    for (int round = 0; round < 500; round++) {
        scene s;
        uint32_t experts = 8 + random_below(&state, 40), nodes = 2 + random_below(&state, 6);
        uint32_t most = 0, work[NODES_MAX] = {0};
        make_scene(&s, experts, nodes);
        for (uint32_t e = 0; e < experts; e++) {
            s.slots[e] = 1 + random_below(&state, 300);
            most = s.slots[e] > most ? s.slots[e] : most;
        }
        choose(&s, (uint64_t)round);
        for (uint32_t e = 0; e < experts; e++) {
            work[s.chosen[e]] += EP_COPY_PASS_SLOTS + s.slots[e];
        }
        for (uint32_t n = 1; n < nodes; n++) {
            uint32_t apart = work[n] > work[0] ? work[n] - work[0] : work[0] - work[n];
            cr_assert_leq(apart, EP_COPY_PASS_SLOTS + most);
        }
    }
}

Test(copy_choice, a_node_half_as_quick_gets_half)
{
    scene s;
    make_scene(&s, 40, 3);
    s.slowness[1] = 2;
    uint32_t given[3] = {0};
    for (uint64_t spread = 0; spread < 1000; spread++) {
        choose(&s, spread);
        for (uint32_t n = 0; n < 3; n++) {
            given[n] += given_to(&s, n);
        }
    }
    cr_assert(given[1] * 10 > given[0] * 4 && given[1] * 10 < given[0] * 6, "%u of %u", given[1],
              given[0]);
    cr_assert(given[0] * 10 > given[2] * 9 && given[0] * 9 < given[2] * 10, "%u and %u", given[0],
              given[2]);
}

static uint32_t calls_to(scene *s, uint32_t node, uint64_t calls)
{
    uint32_t count = 0;
    for (uint64_t spread = 0; spread < calls; spread++) {
        choose(s, spread);
        count += given_to(s, node) > 0;
    }
    return count;
}

Test(copy_choice, a_slow_node_is_tried_by_few_calls)
{
    enum { CALLS = EP_COPY_PROBE_OF * 50 };
    scene s;
    make_scene(&s, 12, 4);
    s.slowness[2] = EP_COPY_SLOW;
    uint32_t alone = calls_to(&s, 2, CALLS);
    cr_assert(alone > 25 && alone < 75, "%u", alone);
    for (uint64_t spread = 0; spread < CALLS; spread++) {
        choose(&s, spread);
        cr_assert(given_to(&s, 2) == 0 || given_to(&s, 2) == 3,
                  "a probe is a share like the others'");
    }
    s.slowness[3] = 30;
    uint32_t first = calls_to(&s, 2, CALLS), second = calls_to(&s, 3, CALLS);
    cr_assert(first > 10 && second > 10 && first + second < 75, "%u, %u", first, second);
    s.choice.slots = NULL;
    cr_assert_eq(calls_to(&s, 2, CALLS), 0, "what is sent again is no probe");
    s.usable[0] = s.usable[1] = 0;
    cr_assert_eq(calls_to(&s, 2, 100), 100, "it is better than none");
    s.usable[0] = 2;
    choose(&s, 1);
    cr_assert_eq(given_to(&s, 0), 0, "and than one that drains");
}
