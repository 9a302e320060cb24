/* SPDX-License-Identifier: Apache-2.0 */
/* Heat, victims and prefetch choices on small, made-up loads. */
#include <criterion/criterion.h>

#include "moe/expert_heat.h"

static ep_expert_heat *heat;

static void setup(void)
{
    cr_assert_eq(ep_expert_heat_create(&heat), EP_OK);
}

static void teardown(void)
{
    ep_expert_heat_destroy(heat);
}

TestSuite(expert_heat, .init = setup, .fini = teardown);

static void add_layers(uint32_t count, uint32_t experts, ep_heat_place place)
{
    for (uint32_t l = 0; l < count; l++) {
        cr_assert_eq(ep_expert_heat_add_layer(heat, experts, 1000), EP_OK);
        for (uint32_t e = 0; e < experts; e++) {
            ep_expert_heat_set_place(heat, l, e, place);
        }
    }
}

static void visit(uint32_t layer, uint32_t a, uint32_t b)
{
    const uint32_t experts[2] = {a, b};
    ep_expert_heat_visit(heat, layer, experts, NULL, 2);
}

Test(expert_heat, what_is_used_more_often_is_hotter_and_the_coldest_goes)
{
    ep_heat_choice victim;
    add_layers(1, 4, EP_HEAT_RESIDENT);
    for (int i = 0; i < 60; i++) {
        visit(0, 0, i % 3 == 0 ? 2 : 1);
    }
    cr_expect_gt(ep_expert_heat_of(heat, 0, 0), ep_expert_heat_of(heat, 0, 1));
    cr_expect_gt(ep_expert_heat_of(heat, 0, 1), ep_expert_heat_of(heat, 0, 2));
    cr_expect_gt(ep_expert_heat_of(heat, 0, 2), ep_expert_heat_of(heat, 0, 3));
    cr_assert(ep_expert_heat_victim(heat, false, NULL, NULL, &victim));
    cr_expect_eq(victim.expert, 3);
    ep_expert_heat_set_place(heat, 0, 3, EP_HEAT_ABSENT);
    cr_assert(ep_expert_heat_victim(heat, false, NULL, NULL, &victim));
    cr_expect_eq(victim.expert, 2);
}

static bool not_expert_2(void *arg, uint32_t layer, uint32_t expert)
{
    (void)arg;
    (void)layer;
    return expert != 2;
}

static bool nobody(void *arg, uint32_t layer, uint32_t expert)
{
    (void)arg;
    (void)layer;
    (void)expert;
    return false;
}

Test(expert_heat, those_that_may_not_go_are_passed_over)
{
    ep_heat_choice victim;
    add_layers(2, 4, EP_HEAT_RESIDENT);
    for (int i = 0; i < 40; i++) {
        visit(0, 0, 1);
        visit(1, 0, 3);
    }
    for (uint32_t e = 0; e < 4; e++) {
        ep_expert_heat_set_place(heat, 0, e, EP_HEAT_BARRED);
    }
    ep_expert_heat_set_place(heat, 1, 1, EP_HEAT_BARRED);
    cr_assert(ep_expert_heat_victim(heat, false, NULL, NULL, &victim));
    cr_expect_eq(victim.layer, 1);
    cr_expect_eq(victim.expert, 2);
    cr_assert(ep_expert_heat_victim(heat, false, not_expert_2, NULL, &victim));
    cr_expect_neq(victim.expert, 2);
    cr_expect_not(ep_expert_heat_victim(heat, false, nobody, NULL, &victim));
    cr_assert(ep_expert_heat_victim(heat, false, NULL, NULL, &victim),
              "a refusal is not remembered");
    cr_expect_eq(victim.expert, 2);
}

Test(expert_heat, large_experts_go_before_small_ones_of_the_same_heat)
{
    ep_heat_choice victim;
    cr_assert_eq(ep_expert_heat_add_layer(heat, 2, 1000), EP_OK);
    cr_assert_eq(ep_expert_heat_add_layer(heat, 2, 4000), EP_OK);
    for (uint32_t e = 0; e < 2; e++) {
        ep_expert_heat_set_place(heat, 0, e, EP_HEAT_RESIDENT);
        ep_expert_heat_set_place(heat, 1, e, EP_HEAT_RESIDENT);
    }
    for (int i = 0; i < 50; i++) {
        visit(0, 0, 1);
        visit(1, 0, 1);
    }
    cr_assert(ep_expert_heat_victim(heat, false, NULL, NULL, &victim));
    cr_expect_eq(victim.layer, 1);
}

Test(expert_heat, the_next_layers_hot_experts_come_ahead_of_time)
{
    ep_heat_choice choice;
    add_layers(3, 4, EP_HEAT_RESIDENT);
    for (int i = 0; i < 50; i++) {
        for (uint32_t l = 0; l < 3; l++) {
            visit(l, 0, 1);
        }
    }
    visit(0, 0, 1);
    cr_expect_not(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice),
                  "all that is hot is there");
    ep_expert_heat_set_place(heat, 1, 1, EP_HEAT_ABSENT);
    cr_assert(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice));
    cr_expect_eq(choice.layer, 1);
    cr_expect_eq(choice.expert, 1);
    cr_expect_not(ep_expert_heat_prefetch(heat, 1, false, nobody, NULL, &choice),
                  "nobody can go for it");
    cr_expect(ep_expert_heat_prefetch(heat, 1, true, nobody, NULL, &choice), "there is room");
    ep_expert_heat_set_place(heat, 1, 1, EP_HEAT_BARRED);
    ep_expert_heat_set_place(heat, 1, 3, EP_HEAT_ABSENT);
    cr_expect_not(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice),
                  "nobody ever used it");
}

/* Layers in order, each with two experts that are always used and one used now and then. */
static void pass_layers(uint32_t layers, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        for (uint32_t l = 0; l < layers; l++) {
            const uint32_t experts[3] = {0, 1, 2};
            ep_expert_heat_visit(heat, l, experts, NULL, i % 3 == 0 ? 3 : 2);
        }
    }
}

Test(expert_heat, what_comes_ahead_takes_the_place_of_what_can_come_back_in_time)
{
    ep_heat_choice choice, victim;
    add_layers(8, 4, EP_HEAT_RESIDENT);
    for (uint32_t l = 0; l < 8; l++) {
        ep_expert_heat_set_place(heat, l, 3, EP_HEAT_BARRED);
    }
    pass_layers(8, 60);
    visit(0, 0, 1);
    /* equal heat everywhere, but its turn is next */
    ep_expert_heat_set_place(heat, 1, 2, EP_HEAT_ABSENT);
    cr_assert(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice));
    cr_expect_eq(choice.layer, 1);
    cr_expect_eq(choice.expert, 2);
    cr_assert(ep_expert_heat_victim(heat, true, NULL, NULL, &victim));
    cr_expect_eq(victim.expert, 2);
    cr_expect(victim.layer == 0 || victim.layer > 4, "layer %u has its turn soon", victim.layer);
    ep_expert_heat_set_place(heat, 1, 2, EP_HEAT_RESIDENT);
    ep_expert_heat_set_place(heat, 6, 2, EP_HEAT_ABSENT);
    cr_expect_not(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice),
                  "its turn is far off");
    ep_expert_heat_set_place(heat, 3, 2, EP_HEAT_ABSENT);
    cr_expect_not(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice), "so is this one's");
    cr_assert(ep_expert_heat_prefetch(heat, 3, false, NULL, NULL, &choice),
              "a load that takes three visits must begin");
    cr_expect_eq(choice.layer, 3);
    cr_expect_not(ep_expert_heat_prefetch(heat, 5, false, NULL, NULL, &choice),
                  "what it takes would be missed before");
}

/* Callers at layers of their own, in turn with each other: no layer says which one comes next. */
Test(expert_heat, without_an_order_of_visits_only_heat_counts)
{
    ep_heat_choice choice;
    uint64_t state = 3;
    add_layers(8, 4, EP_HEAT_RESIDENT);
    for (int i = 0; i < 2000; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        visit((uint32_t)(state >> 33) % 8, 0, i % 2 == 0 ? 1 : 2);
    }
    ep_expert_heat_set_place(heat, 5, 1, EP_HEAT_ABSENT);
    for (uint32_t l = 0; l < 8; l++) {
        ep_expert_heat_set_place(heat, l, 3, EP_HEAT_BARRED);
    }
    cr_expect_not(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice) &&
                      choice.heat < 0.3f,
                  "it is no hotter than the others");
    for (uint32_t l = 0; l < 8; l++) {
        ep_expert_heat_set_place(heat, l, 3, EP_HEAT_RESIDENT);
    }
    cr_assert(ep_expert_heat_prefetch(heat, 1, false, NULL, NULL, &choice),
              "one that is never used can go");
    cr_expect_eq(choice.layer, 5);
}

/* Two loads in turn: after the second turn of each the first visits of a turn make all its experts
 * hot again, in all layers. */
Test(expert_heat, a_load_that_comes_back_is_known_again)
{
    add_layers(8, 16, EP_HEAT_RESIDENT);
    for (int turn = 0; turn < 5; turn++) {
        const uint32_t base = turn % 2 == 0 ? 0 : 8;
        for (int i = 0; i < 120; i++) {
            for (uint32_t l = 0; l < 8; l++) {
                visit(l, base + (uint32_t)(i * 3) % 4, base + 4 + (uint32_t)(i * 5) % 4);
            }
        }
    }
    for (int i = 0; i < 3; i++) { /* the other load: a few visits of some layers only */
        for (uint32_t l = 0; l < 6; l++) {
            visit(l, 8 + (uint32_t)i, 12);
        }
    }
    cr_expect_gt(ep_expert_heat_of(heat, 7, 9), 0.1f);
    cr_expect_lt(ep_expert_heat_of(heat, 7, 1), 0.1f,
                 "not used in the last visit it would be cold, %f", ep_expert_heat_of(heat, 7, 1));
}
