/* SPDX-License-Identifier: Apache-2.0 */
/* Grouping slots, and the two budgets of admission. */
#include <criterion/criterion.h>
#include <string.h>

#include "expertd/admission.h"
#include "expertd/slot_groups.h"

Test(slot_groups, sorted_slots_are_counted_exactly)
{
    static const ep_wire_slot slots[] = {{0, 1}, {1, 1}, {2, 1}, {0, 4}, {1, 7}, {2, 7}};
    ep_slot_shape shape;
    ep_slot_shape_of(slots, 6, 8, 2, &shape);
    cr_expect(shape.is_sorted);
    cr_expect_eq(shape.experts_max, 3);
    cr_expect_eq(shape.works_max, 4); /* 1: 2 + 1, 4: 1, 7: 2 */
    ep_slot_shape_of(slots, 0, 8, 2, &shape);
    cr_expect(shape.is_sorted);
    cr_expect_eq(shape.works_max, 0);
}

Test(slot_groups, unsorted_slots_are_bounded_by_experts_and_sorted_stably)
{
    ep_wire_slot slots[100];
    uint32_t counts[6], order[100];
    ep_slot_shape shape;
    for (uint32_t i = 0; i < 100; i++) {
        slots[i] = (ep_wire_slot){.row = i, .expert = (i * 7) % 5};
    }
    ep_slot_shape_of(slots, 100, 5, 10, &shape);
    cr_expect_not(shape.is_sorted);
    cr_expect_eq(shape.experts_max, 5);
    cr_expect_eq(shape.works_max, 15); /* never one job per slot */
    ep_slot_order(slots, 100, 5, counts, order);
    for (uint32_t i = 1; i < 100; i++) {
        uint32_t a = slots[order[i - 1]].expert, b = slots[order[i]].expert;
        cr_expect(a < b || (a == b && order[i - 1] < order[i]), "place %u", i);
    }
}

Test(admission, tokens_then_spill_then_refusal)
{
    ep_admission *a;
    ep_ticket first, second, third;
    ep_error e;
    cr_assert_eq(ep_admission_create(100, 1000, &a), EP_OK);
    cr_assert_eq(ep_admission_enter(a, 100, 5000, &first, &e), EP_OK);
    cr_expect_not(first.is_spilled);
    cr_assert_eq(ep_admission_enter(a, 1, 600, &second, &e), EP_OK);
    cr_expect(second.is_spilled);
    cr_assert_eq(ep_admission_enter(a, 2, 500, &third, &e), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_str_eq(
        e.text, "2 tokens, 500 bytes: 100 of inflight_tokens 100 and 600 of spill_bytes 1000 are in use");
    cr_expect_gt(e.retry_after_us, 0);
    cr_assert_eq(ep_admission_enter(a, 101, 1001, &third, &e), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect(strstr(e.text, "never fits") != NULL, "%s", e.text);
    cr_expect_eq(e.retry_after_us, 0, "coming back would not help");
    ep_admission_leave(a, &first, 1000000);
    cr_assert_eq(ep_admission_enter(a, 2, 500, &third, &e), EP_OK);
    cr_expect_not(third.is_spilled);
    ep_admission_leave(a, &second, 1000000);
    ep_admission_leave(a, &third, 1000000);
    ep_admission_stats stats;
    ep_admission_read_stats(a, &stats);
    cr_expect_eq(stats.tokens_used, 0);
    cr_expect_eq(stats.spill_used_bytes, 0);
    cr_expect_eq(stats.refused_total, 2);
    ep_admission_destroy(a);
}
