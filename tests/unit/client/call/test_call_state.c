/* SPDX-License-Identifier: Apache-2.0 */
/* Every transition of the retry and routing policy, under a clock that only moves when told. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/clock.h"
#include "call/call_state.h"

#define MS EP_NS_PER_MS
#define DEADLINE (1000 * MS)

static ep_retry_budget budget;
static ep_call_state state;
static ep_call_actions actions;
static uint64_t now;

static void end(void)
{
    ep_call_state_fini(&state);
    state = (ep_call_state){0};
}

TestSuite(call_state, .fini = end);

static void open_window(uint32_t expected)
{
    uint32_t window = UINT32_MAX;
    cr_assert(ep_call_state_open_window(&state, &window));
    cr_assert_eq(window, expected);
}

static void begin(uint32_t windows, bool allow_missing)
{
    ep_retry_budget_init(&budget, 30);
    end();
    ep_call_state_init(&state, &budget, 7);
    now = 5 * MS;
    ep_call_state_begin(&state, now, now + DEADLINE, windows, allow_missing);
    open_window(0);
    actions = (ep_call_actions){0};
}

static void step(ep_call_event_kind kind, uint32_t parcel, const ep_error *error)
{
    actions = (ep_call_actions){0};
    ep_call_state_step(&state, now,
                       &(ep_call_event){.kind = kind, .parcel = parcel, .error = error}, &actions);
}

static void pass_to(uint64_t time_ns)
{
    now = time_ns;
    step(EP_EVENT_TIMER, 0, NULL);
}

static uint32_t add_to(uint32_t window)
{
    uint32_t parcel = UINT32_MAX;
    cr_assert_eq(ep_call_state_add(&state, window, &parcel), EP_OK);
    return parcel;
}

static uint32_t add(void)
{
    return add_to(0);
}

static void fail(uint32_t parcel, ep_err code, uint64_t retry_after_us)
{
    ep_error error;
    ep_error_set(&error, code, "told by a test");
    error.retry_after_us = retry_after_us;
    step(EP_EVENT_FAILED, parcel, &error);
}

static void refuse(uint32_t parcel, ep_err code)
{
    ep_error error;
    ep_error_set(&error, code, "told by a test");
    step(EP_EVENT_REFUSED, parcel, &error);
}

Test(call_state, completes_when_all_rows_are_there)
{
    begin(1, false);
    uint32_t a = add();
    uint32_t b = add();
    step(EP_EVENT_WINDOW, 0, NULL);
    cr_assert(!actions.complete);
    step(EP_EVENT_ROWS, b, NULL);
    cr_assert(!actions.complete && !actions.late);
    step(EP_EVENT_ROWS, a, NULL);
    cr_assert(actions.complete && !actions.late);
    cr_assert_eq(state.code, EP_OK);
    cr_assert_eq(ep_call_state_due_ns(&state), EP_TIME_NEVER);
}

/* So that a call that was given room for all its frames asks for no more. */
Test(call_state, a_free_parcel_is_room_for_the_next)
{
    begin(1, false);
    uint32_t first = add();
    uint32_t second = add();
    fail(first, EP_ERR_CONNECTION_LOST, 0);
    ep_call_state_absorb(&state, first);
    cr_assert_eq(add(), first);
    cr_assert_eq(state.parcels_count, 2u);
    cr_assert_neq(second, first);
}

Test(call_state, a_call_without_rows_completes_at_once)
{
    begin(1, false);
    step(EP_EVENT_WINDOW, 0, NULL);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_OK);
}

Test(call_state, windows_follow_one_another)
{
    begin(3, false);
    for (int w = 0; w < 3; w++) {
        uint32_t a = add();
        cr_assert_eq(a, 0, "the parcel of window %d was not reused", w);
        step(EP_EVENT_WINDOW, 0, NULL);
        step(EP_EVENT_ROWS, a, NULL);
        cr_assert_eq(actions.windows_done, w < 2 ? 1 : 0);
        cr_assert_eq(actions.complete, w == 2);
        ep_call_state_release_window(&state, 0);
        if (w < 2) {
            open_window(0);
        }
    }
}

static void sent(uint32_t window)
{
    actions = (ep_call_actions){0};
    ep_call_state_step(&state, now, &(ep_call_event){.kind = EP_EVENT_WINDOW, .window = window},
                       &actions);
}

Test(call_state, several_windows_are_under_way_and_end_in_any_order)
{
    enum { LAST = EP_CALL_WINDOWS - 1 };
    uint32_t window, parcels[EP_CALL_WINDOWS];
    cr_assert_geq(EP_CALL_WINDOWS, 2);
    begin(EP_CALL_WINDOWS + 2, false);
    parcels[0] = add();
    sent(0);
    for (uint32_t w = 1; w < EP_CALL_WINDOWS; w++) {
        open_window(w);
        parcels[w] = add_to(w);
        if (w == 1) {
            step(EP_EVENT_ROWS, parcels[0], NULL);
            cr_assert_eq(actions.windows_done, 1,
                         "one window's end does not wait for the other to be sent");
        }
        sent(w);
    }
    cr_assert(!ep_call_state_open_window(&state, &window), "a window more before one was released");
    ep_call_state_release_window(&state, 0);
    open_window(0);
    parcels[0] = add_to(0);
    sent(0);
    step(EP_EVENT_ROWS, parcels[0], NULL);
    cr_assert_eq(actions.windows_done, 1, "a later window is done before the second");
    ep_call_state_release_window(&state, 0);
    cr_assert(ep_call_state_has_window(&state));
    open_window(0);
    cr_assert(!ep_call_state_open_window(&state, &window), "none is left");
    parcels[0] = add_to(0);
    for (uint32_t w = LAST; w > 0; w--) {
        step(EP_EVENT_ROWS, parcels[w], NULL);
        cr_assert_eq(actions.windows_done, 1u << w,
                     "not complete: the last window is still being sent");
    }
    sent(0);
    cr_assert(!actions.complete);
    step(EP_EVENT_ROWS, parcels[0], NULL);
    cr_assert(actions.complete && actions.windows_done == 0,
              "the others are released with the run");
}

Test(call_state, a_window_without_room_is_sent_later)
{
    begin(2, false);
    uint32_t a = add();
    sent(0);
    open_window(1);
    ep_call_state_withdraw_window(&state, 1);
    step(EP_EVENT_ROWS, a, NULL);
    cr_assert(actions.windows_done == 1 && !actions.complete, "a window is left");
    ep_call_state_release_window(&state, 0);
    cr_assert(!ep_call_state_has_window(&state));
    open_window(0);
    sent(0);
    cr_assert(actions.complete);
}

Test(call_state, an_empty_window_in_the_middle_is_done_at_once)
{
    begin(2, false);
    step(EP_EVENT_WINDOW, 0, NULL);
    cr_assert(actions.windows_done == 1 && !actions.complete);
    ep_call_state_release_window(&state, 0);
    open_window(0);
    step(EP_EVENT_WINDOW, 0, NULL);
    cr_assert(actions.complete);
}

Test(call_state, duplicate_and_late_answers_change_nothing)
{
    begin(1, false);
    uint32_t a = add();
    uint32_t b = add();
    step(EP_EVENT_WINDOW, 0, NULL);
    step(EP_EVENT_ROWS, a, NULL);
    step(EP_EVENT_ROWS, a, NULL);
    cr_assert(actions.late, "the same rows twice");
    fail(a, EP_ERR_CONNECTION_LOST, 0);
    cr_assert(actions.late && !actions.route, "a loss after the rows");
    step(EP_EVENT_CANCEL, 0, NULL);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_CANCELLED);
    step(EP_EVENT_ROWS, b, NULL);
    cr_assert(actions.late && !actions.complete);
    step(EP_EVENT_ROWS, b, NULL);
    cr_assert(actions.late && !actions.complete);
    step(EP_EVENT_CANCEL, 0, NULL);
    step(EP_EVENT_TIMER, 0, NULL);
    cr_assert(!actions.complete, "completed twice");
}

Test(call_state, a_zombie_of_the_run_before_is_not_reused_before_its_answer)
{
    begin(1, false);
    uint32_t a = add();
    step(EP_EVENT_CANCEL, 0, NULL);
    ep_call_state_release_window(&state, 0);
    ep_call_state_begin(&state, now, now + DEADLINE, 1, false);
    open_window(0);
    cr_assert_neq(add(), a);
    step(EP_EVENT_ROWS, a, NULL);
    cr_assert(actions.late && !actions.complete);
    cr_assert_eq(add(), a, "free again after its late answer");
}

/* code, outcome for the parcel */
static const struct {
    ep_err code;
    bool reroute;
} outcomes[] = {
    {EP_ERR_CONNECTION_LOST, true},
    {EP_ERR_NOT_OWNER, true},
    {EP_ERR_STALE_EPOCH, true},
    {EP_ERR_DRAINING, true},
    {EP_ERR_DEVICE_LOST, true},
    {EP_ERR_DATA_LOSS, true},
    {EP_ERR_UNAVAILABLE, true},
    {EP_ERR_INTERNAL, true},
    {EP_ERR_PROTOCOL, true},
    {EP_ERR_CANCELLED, true},
    {EP_ERR_CLOSED, true},
    {EP_ERR_NO_MEMORY, true},
    {EP_ERR_INVALID_ARGUMENT, false},
    {EP_ERR_NOT_FOUND, false},
    {EP_ERR_UNIMPLEMENTED, false},
    {EP_ERR_UNAUTHENTICATED, false},
    {EP_ERR_PERMISSION_DENIED, false},
    {EP_ERR_FAILED_PRECONDITION, false},
};

Test(call_state, each_error_reroutes_at_once_or_ends_the_call)
{
    for (size_t i = 0; i < sizeof(outcomes) / sizeof(outcomes[0]); i++) {
        const char *name = ep_err_name(outcomes[i].code);
        begin(1, false);
        int64_t before = budget.units;
        uint32_t a = add();
        add();
        step(EP_EVENT_WINDOW, 0, NULL);
        fail(a, outcomes[i].code, 0);
        cr_assert_eq(actions.route, outcomes[i].reroute, "%s", name);
        cr_assert_eq(actions.complete, !outcomes[i].reroute, "%s", name);
        cr_assert_eq(budget.units, before, "%s was charged", name);
        if (!outcomes[i].reroute) {
            cr_assert_eq(state.code, outcomes[i].code, "%s", name);
            cr_assert_eq(state.blame, a);
            cr_assert_eq(state.parcels[a].phase, EP_PARCEL_FREE, "its answer has come");
        } else {
            cr_assert_eq(state.last_error.code, outcomes[i].code);
        }
    }
}

Test(call_state, resource_exhausted_waits_at_least_as_long_as_asked_and_pays)
{
    begin(1, false);
    int64_t before = budget.units;
    uint32_t a = add();
    step(EP_EVENT_WINDOW, 0, NULL);
    fail(a, EP_ERR_RESOURCE_EXHAUSTED, 40000);
    cr_assert(!actions.route && !actions.complete);
    cr_assert_eq(budget.units, before - EP_RETRY_COST);
    uint64_t due = ep_call_state_due_ns(&state);
    cr_assert(due >= now + 40 * MS && due <= now + 60 * MS);
    pass_to(due - 1);
    cr_assert(!actions.route);
    step(EP_EVENT_WAKE, 0, NULL);
    cr_assert(!actions.route, "a wake does not shorten a pause");
    pass_to(due);
    cr_assert(actions.route);
}

Test(call_state, a_node_without_room_before_the_deadline_is_not_waited_for)
{
    begin(1, false);
    int64_t before = budget.units;
    uint32_t a = add();
    step(EP_EVENT_WINDOW, 0, NULL);
    now += DEADLINE / 2;
    fail(a, EP_ERR_RESOURCE_EXHAUSTED, 500000);
    cr_assert(actions.route && !actions.complete, "another copy may be quicker");
    cr_assert_eq(state.parcels[a].reason, EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(budget.units, before - EP_RETRY_COST);
    begin(1, false);
    a = add();
    step(EP_EVENT_WINDOW, 0, NULL);
    fail(a, EP_ERR_RESOURCE_EXHAUSTED, 40000);
    pass_to(ep_call_state_due_ns(&state));
    cr_assert(actions.route);
    cr_assert_eq(state.parcels[a].reason, EP_OK, "its pause is over");
}

Test(call_state, with_missing_rows_a_node_without_room_before_the_deadline_costs_its_rows_alone)
{
    begin(1, true);
    uint32_t a = add(), kept;
    budget.units = EP_RETRY_COST - 1;
    fail(a, EP_ERR_RESOURCE_EXHAUSTED, 1000000);
    cr_assert(!actions.route && !actions.complete);
    cr_assert_eq(ep_call_state_add_late(&state, 0, &kept), EP_OK);
    step(EP_EVENT_WAKE, 0, NULL);
    cr_assert(!actions.route);
    cr_assert_eq(ep_call_state_due_ns(&state), state.deadline_ns);
    pass_to(state.deadline_ns);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_OK);
}

Test(call_state, resource_exhausted_ends_the_call_when_the_budget_is_spent)
{
    begin(1, false);
    budget.units = EP_RETRY_COST - 1;
    uint32_t a = add();
    step(EP_EVENT_WINDOW, 0, NULL);
    fail(a, EP_ERR_RESOURCE_EXHAUSTED, 1000);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_RESOURCE_EXHAUSTED);
}

Test(call_state, the_budget_is_ten_percent)
{
    ep_retry_budget b;
    ep_retry_budget_init(&b, 30);
    while (ep_retry_budget_take(&b)) {
    }
    ep_retry_budget_earn(&b, 9);
    cr_assert(!ep_retry_budget_take(&b));
    ep_retry_budget_earn(&b, 1);
    cr_assert(ep_retry_budget_take(&b));
    ep_retry_budget_earn(&b, 100 * EP_RETRY_BUDGET_MAX);
    cr_assert_eq(b.units, EP_RETRY_BUDGET_MAX);
}

Test(call_state, our_own_full_queue_only_pauses_and_is_not_charged)
{
    begin(1, false);
    budget.units = 0;
    uint32_t a = add();
    refuse(a, EP_ERR_RESOURCE_EXHAUSTED);
    step(EP_EVENT_WINDOW, 0, NULL);
    cr_assert(!actions.complete);
    cr_assert(ep_call_state_due_ns(&state) <= now + 2 * MS);
    refuse(add(), EP_ERR_UNAVAILABLE);
    cr_assert(actions.route);
    refuse(add(), EP_ERR_NO_MEMORY);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_NO_MEMORY);
}

Test(call_state, stuck_slots_back_off_from_10_to_200_ms_until_the_deadline)
{
    begin(1, false);
    uint64_t expected_ms = 10;
    int rounds = 0;
    for (;;) {
        uint32_t p;
        cr_assert_eq(ep_call_state_add_stuck(&state, 0, now, &p), EP_OK);
        cr_assert_eq(state.waiting_count, 1u);
        step(EP_EVENT_WINDOW, 0, NULL);
        cr_assert(!actions.complete);
        uint64_t due = ep_call_state_due_ns(&state);
        if (due == state.deadline_ns) {
            break;
        }
        cr_assert(due >= now + expected_ms * MS / 2 && due <= now + expected_ms * MS, "round %d",
                  rounds);
        pass_to(due);
        cr_assert(actions.route);
        ep_call_state_absorb(&state, p);
        expected_ms = expected_ms * 2 > 200 ? 200 : expected_ms * 2;
        rounds++;
    }
    cr_assert(rounds >= 6 && rounds <= 20, "%d rounds", rounds);
    pass_to(state.deadline_ns);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_UNAVAILABLE);
}

Test(call_state, a_wake_frees_stuck_slots_at_once)
{
    begin(1, false);
    uint32_t p;
    cr_assert_eq(ep_call_state_add_stuck(&state, 0, now, &p), EP_OK);
    step(EP_EVENT_WINDOW, 0, NULL);
    step(EP_EVENT_WAKE, 0, NULL);
    cr_assert(actions.route);
    cr_assert_eq(state.waiting_count, 0u);
    ep_call_state_absorb(&state, p);
    uint32_t a = add();
    step(EP_EVENT_ROWS, a, NULL);
    cr_assert(actions.complete);
}

Test(call_state, the_deadline_says_what_was_awaited)
{
    /* a live node that does not answer */
    begin(1, false);
    uint32_t a = add();
    pass_to(state.deadline_ns - 1);
    cr_assert(!actions.complete);
    pass_to(state.deadline_ns);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_DEADLINE_EXCEEDED);
    cr_assert_eq(state.blame, a);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_ZOMBIE);
    /* the same, but the node noticed first */
    begin(1, false);
    a = add();
    fail(a, EP_ERR_DEADLINE_EXCEEDED, 0);
    cr_assert(!actions.complete && !actions.route);
    cr_assert_eq(ep_call_state_due_ns(&state), state.deadline_ns);
    pass_to(state.deadline_ns);
    cr_assert_eq(state.code, EP_ERR_DEADLINE_EXCEEDED);
    /* slots without a copy weigh more than a missing answer */
    begin(1, false);
    add();
    uint32_t p;
    cr_assert_eq(ep_call_state_add_stuck(&state, 0, now, &p), EP_OK);
    pass_to(state.deadline_ns);
    cr_assert_eq(state.code, EP_ERR_UNAVAILABLE);
    cr_assert_eq(state.blame, p);
    /* a pause that did not end in time */
    begin(1, false);
    fail(add(), EP_ERR_RESOURCE_EXHAUSTED, 900000);
    pass_to(state.deadline_ns);
    cr_assert_eq(state.code, EP_ERR_RESOURCE_EXHAUSTED);
}

Test(call_state, allow_missing_turns_the_deadline_into_success)
{
    begin(2, true);
    add();
    pass_to(state.deadline_ns);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_OK);
}

Test(call_state, fatal_and_cancel_end_the_call)
{
    ep_error error;
    begin(1, false);
    add();
    ep_error_set(&error, EP_ERR_NO_MEMORY, "told by a test");
    step(EP_EVENT_FATAL, 0, &error);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_NO_MEMORY);
    begin(1, false);
    add();
    step(EP_EVENT_CANCEL, 0, NULL);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_CANCELLED);
}

Test(call_state, completing_overrides_what_earlier_events_asked_for)
{
    begin(1, false);
    uint32_t a = add();
    uint32_t b = add();
    ep_error lost;
    ep_error bad;
    ep_error_set(&lost, EP_ERR_CONNECTION_LOST, "told by a test");
    ep_error_set(&bad, EP_ERR_INVALID_ARGUMENT, "told by a test");
    ep_call_state_step(&state, now,
                       &(ep_call_event){.kind = EP_EVENT_FAILED, .parcel = a, .error = &lost},
                       &actions);
    ep_call_state_step(&state, now,
                       &(ep_call_event){.kind = EP_EVENT_FAILED, .parcel = b, .error = &bad},
                       &actions);
    cr_assert(actions.complete && !actions.route);
}

/* ---- choosing copies ---- */

static uint32_t offsets[] = {0, 2, 3, 3};
static uint32_t copies[] = {0, 1, 1};
static ep_routing_layer layer = {.shape = {.experts = 3}, .offsets = offsets, .copies = copies};

static void choose(const uint8_t *usable, uint64_t spread, uint32_t *out_chosen)
{
    uint32_t order[3];
    float busy[2];
    const ep_copy_choice choice = {.nodes_count = 2,
                                   .usable = usable,
                                   .tried = state.tried,
                                   .pass_slots = EP_COPY_PASS_SLOTS,
                                   .spread = spread,
                                   .order = order,
                                   .busy = busy};
    ep_choose_copies(&layer, &choice, out_chosen);
}

Test(call_state, tried_copies_are_left_out_until_the_next_round)
{
    uint8_t usable[] = {1, 1};
    uint32_t chosen[3];
    begin(1, false);
    cr_assert_eq(ep_call_state_use_layer(&state, &layer), EP_OK);
    choose(usable, 0, chosen);
    cr_assert(chosen[0] <= 1);
    cr_assert_eq(chosen[1], 1);
    cr_assert_eq(chosen[2], EP_NO_EXPERT, "no copy in the table");
    uint32_t first = chosen[0];
    ep_call_state_mark_tried(&state, &layer, 0, first);
    choose(usable, 0, chosen);
    cr_assert_eq(chosen[0], 1 - first);
    cr_assert_eq(chosen[1], 1, "another expert on the same node is not touched");
    ep_call_state_mark_tried(&state, &layer, 0, 1 - first);
    choose(usable, 0, chosen);
    cr_assert_eq(chosen[0], EP_NO_EXPERT);
    /* a new round after the back-off */
    uint32_t p;
    cr_assert_eq(ep_call_state_add_stuck(&state, 0, now, &p), EP_OK);
    pass_to(ep_call_state_due_ns(&state));
    choose(usable, 0, chosen);
    cr_assert_neq(chosen[0], EP_NO_EXPERT);
}

Test(call_state, calls_go_around_busy_nodes_and_draining_ones_come_last)
{
    uint8_t usable[] = {1, 1};
    uint32_t chosen[3];
    uint32_t seen[2] = {0, 0};
    begin(1, false);
    cr_assert_eq(ep_call_state_use_layer(&state, &layer), EP_OK);
    for (uint64_t spread = 0; spread < 10; spread++) {
        choose(usable, spread, chosen);
        seen[chosen[0]]++;
    }
    cr_assert_eq(seen[0], 10, "node 1 has expert 1 to compute");
    usable[0] = 2;
    for (uint64_t spread = 0; spread < 10; spread++) {
        choose(usable, spread, chosen);
        cr_assert_eq(chosen[0], 1);
    }
    usable[1] = 0;
    choose(usable, 0, chosen);
    cr_assert_eq(chosen[0], 0, "better a draining copy than none");
    cr_assert_eq(chosen[1], EP_NO_EXPERT);
}

Test(call_state, another_table_forgets_what_was_tried)
{
    uint8_t usable[] = {1, 1};
    uint32_t chosen[3];
    begin(1, false);
    cr_assert_eq(ep_call_state_use_layer(&state, &layer), EP_OK);
    ep_call_state_mark_tried(&state, &layer, 1, 1);
    choose(usable, 0, chosen);
    cr_assert_eq(chosen[1], EP_NO_EXPERT);
    cr_assert_eq(ep_call_state_use_layer(&state, &layer), EP_OK);
    choose(usable, 0, chosen);
    cr_assert_eq(chosen[1], 1);
}
