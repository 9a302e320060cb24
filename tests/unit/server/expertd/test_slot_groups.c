/* SPDX-License-Identifier: Apache-2.0 */
/* Grouping slots, and admission: its two budgets, tenants, and who would be late. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/clock.h"
#include "expertd/admission.h"
#include "expertd/slot_groups.h"
#include "support/expect.h"

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

#define SECOND 1000000000ull

static ep_tenants tenants;
static ep_admission *admission;
static ep_error e;

static void setup(void)
{
    ep_tenants_init(&tenants);
}

static void teardown(void)
{
    ep_admission_destroy(admission);
}

TestSuite(admission, .init = setup, .fini = teardown);

static void open_admission(uint32_t inflight_tokens, uint64_t spill_bytes)
{
    cr_assert_eq(ep_admission_create(inflight_tokens, spill_bytes, &tenants, &admission), EP_OK);
}

static uint32_t add_tenant(const char *name, ep_tenant_limits limits)
{
    ep_tenants_add(&tenants, name, &limits);
    return ep_tenants_find(&tenants, name);
}

static ep_err enter_bytes(uint32_t tenant, uint32_t tokens, uint64_t bytes, uint64_t now_ns,
                          ep_ticket *out_ticket)
{
    *out_ticket = (ep_ticket){
        .tenant = tenant, .tokens = tokens, .bytes = bytes, .deadline_ns = EP_TIME_NEVER};
    return ep_admission_enter(admission, out_ticket, now_ns, &e);
}

static void leave(const ep_ticket *ticket, uint64_t took_ns)
{
    ep_admission_leave(admission, ticket, took_ns, took_ns, EP_OK);
}

Test(admission, tokens_then_spill_then_refusal)
{
    ep_ticket first, second, third;
    open_admission(100, 1000);
    cr_assert_eq(enter_bytes(0, 100, 5000, 0, &first), EP_OK);
    cr_expect_not(first.is_spilled);
    cr_assert_eq(enter_bytes(0, 1, 600, 0, &second), EP_OK);
    cr_expect(second.is_spilled);
    cr_assert_eq(enter_bytes(0, 2, 500, 0, &third), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_str_eq(
        e.text,
        "2 tokens, 500 bytes: 100 of inflight_tokens 100 and 600 of spill_bytes 1000 are in use");
    cr_expect_gt(e.retry_after_us, 0);
    ASSERT_FAILS(enter_bytes(0, 101, 1001, 0, &third), EP_ERR_RESOURCE_EXHAUSTED, e, "never fits");
    cr_expect_eq(e.retry_after_us, 0, "coming back would not help");
    leave(&first, 1000000);
    cr_assert_eq(enter_bytes(0, 2, 500, 0, &third), EP_OK);
    cr_expect_not(third.is_spilled);
    leave(&second, 1000000);
    leave(&third, 1000000);
    ep_admission_stats stats;
    ep_admission_read_stats(admission, &stats);
    cr_expect_eq(stats.tokens_used, 0);
    cr_expect_eq(stats.spill_used_bytes, 0);
    cr_expect_eq(stats.refused_total, 2);
}

/* A node without memory for replies must not call everybody back at once. */
Test(admission, a_request_that_is_not_begun_shortens_no_retry)
{
    ep_ticket first, again;
    open_admission(100, 0);
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(enter_bytes(0, 100, 1, 0, &first), EP_OK);
        leave(&first, SECOND);
    }
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(enter_bytes(0, 100, 1, 0, &first), EP_OK);
        ep_admission_leave(admission, &first, 0, 0, EP_ERR_RESOURCE_EXHAUSTED);
    }
    cr_assert_eq(enter_bytes(0, 100, 1, 0, &first), EP_OK);
    cr_expect_eq(enter_bytes(0, 100, 1, 0, &again), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_gt(e.retry_after_us, 900000u);
    leave(&first, SECOND);
}

static ep_err enter(uint32_t tenant, uint32_t tokens, uint64_t now_ns, ep_ticket *out_ticket)
{
    return enter_bytes(tenant, tokens, tokens * 100, now_ns, out_ticket);
}

Test(admission, a_tenant_is_held_to_its_tokens_in_work)
{
    ep_ticket first, second, other;
    uint32_t batchy = add_tenant("batchy", (ep_tenant_limits){.weight = 1, .inflight_tokens = 10});
    open_admission(1000, 100000);
    cr_expect_eq(enter(batchy, 50, 1, &first), EP_OK, "alone it may be larger");
    cr_expect_eq(enter(batchy, 1, 1, &second), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_str_eq(
        e.text, "1 tokens: tenant 'batchy' has 50 of its inflight_tokens 10 in use (key tenants)");
    cr_expect_gt(e.retry_after_us, 0);
    cr_expect_eq(enter(0, 50, 1, &other), EP_OK);
    leave(&first, 1000);
    cr_expect_eq(enter(batchy, 6, 1, &first), EP_OK);
    cr_expect_eq(enter(batchy, 4, 1, &second), EP_OK);
    ep_admission_tenant_stats stats;
    ep_admission_read_tenant(admission, batchy, &stats);
    cr_expect_eq(stats.tokens_used, 10);
    cr_expect_eq(stats.tokens_total, 60);
    cr_expect_eq(stats.refused_total, 1);
}

Test(admission, a_tenant_is_held_to_its_tokens_per_second)
{
    ep_ticket ticket;
    uint32_t fast = add_tenant("fast", (ep_tenant_limits){.weight = 1, .tokens_per_s = 100});
    open_admission(100000, 100000);
    cr_expect_eq(enter(fast, 60, SECOND, &ticket), EP_OK);
    cr_expect_eq(enter(fast, 60, SECOND, &ticket), EP_OK,
                 "a second's worth at once, and the request that passes it");
    cr_expect_eq(enter(fast, 1, SECOND, &ticket), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect(e.retry_after_us > 199000 && e.retry_after_us < 201000, "%llu",
              (unsigned long long)e.retry_after_us);
    cr_expect_eq(enter(fast, 1, SECOND + SECOND / 10, &ticket), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_eq(enter(fast, 1, SECOND + SECOND / 4, &ticket), EP_OK);
    uint32_t tokens = 0;
    for (uint64_t ms = 300; ms < 10300; ms++) {
        tokens += enter(fast, 1, SECOND + ms * 1000000, &ticket) == EP_OK;
    }
    cr_expect(tokens > 990 && tokens < 1010, "%u", tokens);
    cr_expect_eq(enter(fast, 100, 9000 * SECOND, &ticket), EP_OK);
    cr_expect_eq(enter(fast, 1, 9000 * SECOND, &ticket), EP_ERR_RESOURCE_EXHAUSTED,
                 "idle time is not saved up");
}

Test(admission, one_tenant_leaves_room_for_the_others)
{
    ep_ticket ticket;
    uint32_t greedy = add_tenant("greedy", (ep_tenant_limits){.weight = 1});
    uint32_t rest = ep_tenants_find(&tenants, "somebody");
    cr_expect_neq(rest, 0);
    cr_expect_str_eq(ep_tenants_label(&tenants, rest), "other");
    cr_expect_str_eq(ep_tenants_label(&tenants, 0), "none");
    cr_expect_str_eq(ep_tenants_label(&tenants, greedy), "greedy");
    open_admission(80, 8000);
    int entered = 0;
    while (enter(greedy, 1, 1, &ticket) == EP_OK) {
        entered++;
    }
    cr_expect_eq(entered, 70 + 70);
    EXPECT_TEXT(e, "7/8");
    cr_expect_eq(enter(rest, 10, 1, &ticket), EP_OK);
    cr_expect_not(ticket.is_spilled);
    cr_expect_eq(enter(0, 10, 1, &ticket), EP_OK);
    cr_expect(ticket.is_spilled);
}

/* Threads read the clock before they wait for the lock: the later time may come first. */
Test(admission, a_tenants_rate_survives_times_out_of_order)
{
    ep_ticket ticket;
    const uint32_t tenant = add_tenant("t", (ep_tenant_limits){.weight = 1, .tokens_per_s = 10});
    open_admission(1000, 1000);
    cr_assert_eq(enter_bytes(tenant, 10, 1, 2000000000, &ticket), EP_OK);
    cr_expect_eq(enter_bytes(tenant, 1, 1, 1999999999, &ticket), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_eq(enter_bytes(tenant, 1, 1, 2000000000, &ticket), EP_ERR_RESOURCE_EXHAUSTED);
    cr_expect_eq(enter_bytes(tenant, 1, 1, 2200000000, &ticket), EP_OK);
}

/* ---- requests that would be late ---- */

#define MS 1000000ull

static ep_err enter_tokens(uint32_t tokens, bool is_prefill, uint64_t now_ns, uint64_t left_ns,
                           ep_ticket *out_ticket)
{
    *out_ticket = (ep_ticket){
        .tokens = tokens, .bytes = 1, .is_prefill = is_prefill, .deadline_ns = now_ns + left_ns};
    return ep_admission_enter(admission, out_ticket, now_ns, &e);
}

static ep_err enter_late(bool is_prefill, uint64_t now_ns, uint64_t left_ns, ep_ticket *out_ticket)
{
    return enter_tokens(10, is_prefill, now_ns, left_ns, out_ticket);
}

/* Requests take 10 ms each, one after the other, up to `until_ns`; one more is in. */
static void work_with(uint32_t tokens, uint64_t until_ns, ep_ticket *out_last)
{
    open_admission(1000000, 0);
    cr_assert_eq(enter_tokens(tokens, false, 0, SECOND, out_last), EP_OK);
    for (uint64_t now_ns = 10 * MS; now_ns <= until_ns; now_ns += 10 * MS) {
        ep_ticket next;
        cr_assert_eq(enter_tokens(tokens, false, now_ns, SECOND, &next), EP_OK);
        ep_admission_leave(admission, out_last, now_ns, 10 * MS, EP_OK);
        *out_last = next;
    }
}

/* Of 10 tokens. */
static void work_steadily(uint64_t until_ns, ep_ticket *out_last)
{
    work_with(10, until_ns, out_last);
}

/* As if the ticket's deadline were this one. */
static bool is_lost(const ep_ticket *ticket, double left, uint64_t deadline_ns, uint64_t now_ns)
{
    ep_ticket asked = *ticket;
    asked.deadline_ns = deadline_ns;
    return ep_admission_is_lost(admission, &asked, left, now_ns);
}

Test(admission, nobody_is_judged_where_nobody_was_late)
{
    ep_ticket last, hasty;
    work_steadily(SECOND, &last);
    cr_expect_eq(enter_late(false, SECOND, MS, &hasty), EP_OK);
    cr_expect_not(is_lost(&last, 1, SECOND + MS, SECOND));
    cr_expect(is_lost(&last, 1, SECOND, SECOND), "its deadline is over");
}

Test(admission, once_one_was_late_those_that_would_be_are_refused)
{
    ep_ticket last, tickets[10], hasty;
    work_steadily(SECOND, &last);
    /* 100 ms of work before those to come, and 10 that is under way */
    for (int i = 0; i < 10; i++) {
        cr_assert_eq(enter_late(false, SECOND, SECOND, &tickets[i]), EP_OK);
    }
    ep_admission_leave(admission, &last, SECOND + 10 * MS, 10 * MS, EP_ERR_DEADLINE_EXCEEDED);
    const uint64_t now_ns = SECOND + 10 * MS;
    EXPECT_FAILS(enter_late(false, now_ns, 110 * MS, &hasty), EP_ERR_RESOURCE_EXHAUSTED, e,
                 "have 110000 us left");
    cr_expect_gt(e.retry_after_us, 110000, "coming back before the deadline is of no use");
    cr_expect_eq(enter_late(true, now_ns, 110 * MS, &hasty), EP_OK, "prefill waits elsewhere");
    cr_expect(is_lost(&tickets[0], 1, now_ns + 5 * MS, now_ns), "it takes 10 ms");
    cr_expect_not(is_lost(&tickets[0], 0.25, now_ns + 5 * MS, now_ns), "the rest takes 2.5 ms");
    cr_expect_not(is_lost(&tickets[0], 1, now_ns + 50 * MS, now_ns));
    cr_expect_eq(enter_late(false, now_ns, 500 * MS, &hasty), EP_OK, "it has the time");
    cr_expect_eq(enter_late(false, now_ns + 2 * SECOND, MS, &hasty), EP_OK, "long ago");
}

Test(admission, one_that_is_alone_is_never_too_late)
{
    ep_ticket last, hasty;
    work_steadily(SECOND, &last);
    ep_admission_leave(admission, &last, SECOND + 10 * MS, 10 * MS, EP_ERR_DEADLINE_EXCEEDED);
    cr_expect_eq(enter_late(false, SECOND + 10 * MS, MS, &hasty), EP_OK);
}

Test(admission, after_a_stall_one_that_is_alone_is_computed)
{
    ep_ticket last, alone, second;
    work_steadily(SECOND, &last);
    const uint64_t now_ns = 11 * SECOND;
    ep_admission_leave(admission, &last, now_ns, 10 * SECOND, EP_ERR_DEADLINE_EXCEEDED);
    cr_assert_eq(enter_late(false, now_ns, 100 * MS, &alone), EP_OK);
    cr_expect_not(is_lost(&alone, 1, now_ns + 100 * MS, now_ns));
    cr_expect_eq(enter_late(false, now_ns, 100 * MS, &second), EP_ERR_RESOURCE_EXHAUSTED);
    ep_admission_leave(admission, &alone, now_ns + 10 * MS, 10 * MS, EP_OK);
}

Test(admission, a_request_is_judged_by_its_passes_over_weights_too)
{
    ep_ticket last, next, large;
    work_with(1, SECOND, &last);
    cr_assert_eq(enter_tokens(1, false, SECOND, SECOND, &next), EP_OK);
    ep_admission_leave(admission, &last, SECOND + 10 * MS, 10 * MS, EP_ERR_DEADLINE_EXCEEDED);
    EXPECT_OK(enter_tokens(64, false, SECOND + 10 * MS, 200 * MS, &large), e);
}

Test(admission, one_without_hope_does_not_prolong_the_judgement_of_others)
{
    ep_ticket last, next, hasty;
    work_steadily(SECOND, &last);
    cr_assert_eq(enter_late(false, SECOND, SECOND, &next), EP_OK);
    const uint64_t now_ns = SECOND + 10 * MS;
    ep_admission_leave(admission, &last, now_ns, 10 * MS, EP_ERR_DEADLINE_EXCEEDED);
    cr_expect_eq(enter_late(false, now_ns + SECOND / 2, MS, &hasty), EP_ERR_RESOURCE_EXHAUSTED);
    EXPECT_OK(enter_late(false, now_ns + SECOND, MS, &hasty), e);
}
