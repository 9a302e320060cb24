/* SPDX-License-Identifier: Apache-2.0 */
/* Second sends in the policy: which answer counts, what each failure leads to, and what is paid. */
#include <criterion/criterion.h>

#include "base/clock.h"
#include "call/call_state.h"
#include "call/client_core.h"

#define MS EP_NS_PER_MS
#define DEADLINE (1000 * MS)

static ep_retry_budget budget;
static ep_call_state state;
static ep_call_actions actions;
static uint64_t now;
static uint32_t window;

static void end(void)
{
    ep_call_state_fini(&state);
    state = (ep_call_state){0};
}

TestSuite(call_hedge, .fini = end);

static void step(ep_call_event_kind kind, uint32_t parcel, const ep_error *error)
{
    actions = (ep_call_actions){0};
    ep_call_state_step(
        &state, now,
        &(ep_call_event){.kind = kind, .parcel = parcel, .window = window, .error = error},
        &actions);
}

static void rows(uint32_t parcel)
{
    step(EP_EVENT_ROWS, parcel, NULL);
}

static void fail(uint32_t parcel, ep_err code)
{
    ep_error error;
    ep_error_set(&error, code, "told by a test");
    step(EP_EVENT_FAILED, parcel, &error);
}

static uint32_t add(uint64_t hedge_ns, uint64_t look_ns)
{
    uint32_t parcel = UINT32_MAX;
    cr_assert_eq(ep_call_state_add(&state, window, &parcel), EP_OK);
    ep_call_state_watch(&state, parcel, hedge_ns, look_ns);
    return parcel;
}

/* A run of one parcel, late in 2 ms, with enough to pay for hedges. */
static uint32_t begin(void)
{
    ep_retry_budget_init(&budget, 30);
    ep_retry_budget_earn(&budget, 1000);
    end();
    ep_call_state_init(&state, &budget, 7);
    now = 5 * MS;
    ep_call_state_begin(&state, now, now + DEADLINE, 1, false);
    cr_assert(ep_call_state_open_window(&state, &window));
    uint32_t parcel = add(now + 2 * MS, now + 100 * MS);
    step(EP_EVENT_WINDOW, 0, NULL);
    return parcel;
}

static void hedge(uint32_t parcel, uint32_t frames, bool silent, uint32_t *out_hedges)
{
    cr_assert(ep_call_state_begin_hedge(&state, parcel, frames, silent));
    for (uint32_t i = 0; i < frames; i++) {
        cr_assert_eq(ep_call_state_add_hedge(&state, parcel, &out_hedges[i]), EP_OK);
    }
    ep_call_state_looked(&state);
}

Test(call_hedge, a_late_parcel_is_due_then_and_not_before)
{
    uint32_t a = begin();
    cr_assert_eq(ep_call_state_due_ns(&state), now + 2 * MS);
    now += 2 * MS - 1;
    step(EP_EVENT_TIMER, 0, NULL);
    cr_assert(!actions.look);
    now += 1;
    step(EP_EVENT_TIMER, 0, NULL);
    cr_assert(actions.look);
    cr_assert_eq(ep_call_state_next_due(&state, now, 0), a);
    cr_assert_eq(ep_call_state_next_due(&state, now, a + 1), UINT32_MAX);
    uint32_t h;
    hedge(a, 1, false, &h);
    cr_assert_eq(ep_call_state_due_ns(&state), state.deadline_ns, "nothing more to look at");
    cr_assert_eq(ep_call_state_next_due(&state, now + DEADLINE, 0), UINT32_MAX,
                 "hedges are not hedged");
    cr_assert(!ep_call_state_begin_hedge(&state, a, 1, false), "once only");
    cr_assert(!ep_call_state_begin_hedge(&state, a, 1, true));
}

Test(call_hedge, the_first_frame_wins)
{
    uint32_t a = begin(), h[2];
    hedge(a, 2, false, h);
    rows(h[0]);
    cr_assert(!actions.complete && !actions.late);
    rows(a);
    cr_assert(actions.complete && !actions.late);
    cr_assert_eq(state.parcels[h[1]].phase, EP_PARCEL_ZOMBIE);
    rows(h[1]);
    cr_assert(actions.late && !actions.complete);
    cr_assert_eq(state.parcels[h[1]].phase, EP_PARCEL_FREE);
}

Test(call_hedge, all_the_hedges_win_together)
{
    uint32_t a = begin(), h[2];
    hedge(a, 2, false, h);
    rows(h[1]);
    cr_assert(!actions.complete, "half of the slots");
    rows(h[0]);
    cr_assert(actions.complete && !actions.late);
    cr_assert_eq(state.code, EP_OK);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_ZOMBIE, "its place is kept for its answer");
    rows(a);
    cr_assert(actions.late && !actions.complete);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_FREE);
}

Test(call_hedge, a_loser_does_not_hold_up_the_next_window_and_is_late_in_it)
{
    ep_retry_budget_init(&budget, 1000);
    ep_retry_budget_earn(&budget, 100);
    end();
    ep_call_state_init(&state, &budget, 7);
    ep_call_state_begin(&state, now, now + DEADLINE, 2, false);
    cr_assert(ep_call_state_open_window(&state, &window));
    uint32_t a = add(now, now), h;
    step(EP_EVENT_WINDOW, 0, NULL);
    hedge(a, 1, false, &h);
    rows(h);
    cr_assert(actions.windows_done == 1u << window && actions.cancel && !actions.complete);
    ep_call_state_release_window(&state, window);
    cr_assert(ep_call_state_open_window(&state, &window));
    uint32_t b = add(EP_TIME_NEVER, EP_TIME_NEVER);
    cr_assert_neq(b, a);
    cr_assert_eq(b, h, "free since its rows were combined");
    step(EP_EVENT_WINDOW, 0, NULL);
    rows(a);
    cr_assert(actions.late && !actions.complete && actions.windows_done == 0);
    rows(b);
    cr_assert(actions.complete);
}

Test(call_hedge, a_failed_hedge_changes_nothing)
{
    uint32_t a = begin(), h[2];
    hedge(a, 2, false, h);
    fail(h[0], EP_ERR_INVALID_ARGUMENT);
    cr_assert(!actions.complete && !actions.route && !actions.late);
    rows(h[1]);
    cr_assert(!actions.complete, "the other hedge has only some of the slots");
    rows(a);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_OK);
}

Test(call_hedge, a_failed_frame_waits_for_its_hedges)
{
    uint32_t a = begin(), h[2];
    hedge(a, 2, false, h);
    fail(a, EP_ERR_CONNECTION_LOST);
    cr_assert(!actions.route && !actions.complete && !actions.late, "they bring the slots already");
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_COVERED);
    rows(h[0]);
    rows(h[1]);
    cr_assert(actions.complete);
    ep_call_state_release_window(&state, window);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_FREE);
}

/* The frame has failed, and its hedge went to a node that stands still. */
Test(call_hedge, a_hedge_is_looked_at_too)
{
    uint32_t a = begin(), h;
    hedge(a, 1, false, &h);
    ep_call_state_watch(&state, h, EP_TIME_NEVER, now + 3 * MS);
    fail(a, EP_ERR_CONNECTION_LOST);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_COVERED);
    ep_call_state_looked(&state);
    cr_assert_eq(ep_call_state_due_ns(&state), now + 3 * MS);
    cr_assert_eq(ep_call_state_next_due(&state, now + 3 * MS, 0), h);
    fail(h, EP_ERR_CANCELLED); /* given up */
    cr_assert(actions.route);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_ROUTABLE);
}

Test(call_hedge, when_both_fail_the_slots_go_to_another_copy)
{
    uint32_t a = begin(), h[2];
    hedge(a, 2, false, h);
    fail(a, EP_ERR_CONNECTION_LOST);
    fail(h[0], EP_ERR_CONNECTION_LOST);
    cr_assert(actions.route && actions.cancel && !actions.complete);
    cr_assert_eq(state.parcels[a].phase, EP_PARCEL_ROUTABLE);
    cr_assert_eq(state.parcels[h[1]].phase, EP_PARCEL_ZOMBIE, "its slots go out once more");
    ep_call_state_absorb(&state, a);
    uint32_t b = add(EP_TIME_NEVER, EP_TIME_NEVER);
    rows(h[1]);
    cr_assert(actions.late);
    rows(b);
    cr_assert(actions.complete);
}

Test(call_hedge, after_a_failed_hedge_a_failed_frame_is_sent_again_at_once)
{
    uint32_t a = begin(), h[2];
    hedge(a, 2, false, h);
    fail(h[0], EP_ERR_UNAVAILABLE);
    fail(a, EP_ERR_CONNECTION_LOST);
    cr_assert(actions.route && actions.cancel);
}

Test(call_hedge, an_error_no_copy_can_mend_ends_the_call)
{
    uint32_t a = begin(), h;
    hedge(a, 1, false, &h);
    fail(a, EP_ERR_INVALID_ARGUMENT);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(state.parcels[h].phase, EP_PARCEL_ZOMBIE);
    rows(h);
    cr_assert(actions.late && !actions.complete);
}

Test(call_hedge, at_the_deadline_a_node_did_not_answer)
{
    uint32_t a = begin(), h;
    hedge(a, 1, false, &h);
    fail(a, EP_ERR_CONNECTION_LOST);
    now = state.deadline_ns;
    step(EP_EVENT_TIMER, 0, NULL);
    cr_assert(actions.complete);
    cr_assert_eq(state.code, EP_ERR_DEADLINE_EXCEEDED);
}

Test(call_hedge, hedges_pay_from_both_budgets_and_silence_pays_nothing)
{
    uint32_t a = begin(), h[2];
    ep_retry_budget_init(&budget, 30);
    cr_assert(!ep_call_state_begin_hedge(&state, a, 1, false), "nothing earned yet");
    ep_retry_budget_earn(&budget, 33);
    cr_assert(!ep_call_state_begin_hedge(&state, a, 1, false), "30 of 1000 are one in 33 1/3");
    ep_retry_budget_earn(&budget, 1);
    cr_assert(!ep_call_state_begin_hedge(&state, a, 2, false), "there is enough for one frame");
    budget.units = EP_RETRY_COST - 1;
    int64_t before = budget.hedge_units;
    cr_assert(!ep_call_state_begin_hedge(&state, a, 1, false), "the retry budget is used up");
    cr_assert_eq(budget.hedge_units, before, "charged for nothing");
    hedge(a, 2, true, h);
    cr_assert_eq(budget.hedge_units, before);
    cr_assert_eq(budget.units, EP_RETRY_COST - 1);
}

/* Of any number of frames, at most 3 % are hedged; and with an allowance of 100 %, still only what
 * retries may. */
Test(call_hedge, the_share_of_hedges_is_bounded)
{
    static const uint32_t shares[] = {0, 1, 30, 100, 1000};
    for (size_t s = 0; s < sizeof(shares) / sizeof(shares[0]); s++) {
        uint64_t hedges = 0;
        ep_retry_budget_init(&budget, shares[s]);
        for (uint64_t frames = 1; frames <= 20000; frames++) {
            ep_retry_budget_earn(&budget, 1);
            hedges += ep_retry_budget_take_hedge(&budget, 1);
            cr_assert_leq(hedges * 1000, frames * shares[s]);
            cr_assert_leq(hedges * EP_RETRY_COST, frames + EP_RETRY_BUDGET_START);
        }
        uint64_t expected = 20000 * (shares[s] < 100 ? shares[s] : 100) / 1000;
        cr_assert(hedges >= expected && hedges <= expected + 10, "%u: %lu", shares[s], hedges);
    }
}

/* A silent node's frame goes to a copy again when the first copy failed as well. */
Test(call_hedge, a_silent_node_is_looked_at_again_after_its_hedge_failed)
{
    uint32_t a = begin(), h;
    hedge(a, 1, true, &h);
    fail(h, EP_ERR_CONNECTION_LOST);
    cr_assert_eq(ep_call_state_due_ns(&state), now);
    step(EP_EVENT_TIMER, 0, NULL);
    cr_assert(actions.look);
    cr_assert_eq(ep_call_state_next_due(&state, now, 0), a);
    cr_assert(!ep_call_state_begin_hedge(&state, a, 1, false), "late twice is not paid twice");
    hedge(a, 1, true, &h);
    rows(h);
    cr_assert(actions.complete);
}

/* A copy that fails at once is not asked again as fast as it fails. */
Test(call_hedge, copies_that_failed_are_asked_anew_after_a_pause)
{
    uint32_t a = begin();
    uint32_t b = add(EP_TIME_NEVER, EP_TIME_NEVER);
    cr_assert(ep_call_state_ask_anew(&state, a, now, 50 * MS));
    cr_assert_not(ep_call_state_ask_anew(&state, a, now, 50 * MS));
    cr_assert(ep_call_state_ask_anew(&state, b, now, 50 * MS), "each frame for itself");
    cr_assert_not(ep_call_state_ask_anew(&state, a, now + 49 * MS, 50 * MS));
    cr_assert(ep_call_state_ask_anew(&state, a, now + 50 * MS, 50 * MS));
}

/* Nor is one that is full, or behind our own full queue. */
Test(call_hedge, a_full_copy_is_asked_again_when_it_said)
{
    uint32_t a = begin(), h[1];
    ep_error full;
    hedge(a, 1, true, h);
    ep_error_set(&full, EP_ERR_RESOURCE_EXHAUSTED, "told by a test");
    full.retry_after_us = 2000;
    step(EP_EVENT_REFUSED, h[0], &full);
    cr_assert_eq(state.parcels[a].look_ns, now + 2 * MS);
    full.retry_after_us = 0;
    hedge(a, 1, true, h);
    step(EP_EVENT_FAILED, h[0], &full);
    cr_assert_eq(state.parcels[a].look_ns, now + EP_CALL_PAUSE_MIN_US * EP_NS_PER_US);
}

/* The program's own setting, then the table's policy, then the default. */
Test(call_hedge, who_decides_the_share)
{
    ep_routing_table table = {.epoch = {1, 1}};
    ep_client_config config;
    ep_client_config_init(&config);
    cr_assert_eq(ep_client_hedge_permille(&config, &table), 30u);
    table.caller_policy = (ep_caller_policy){.revision = 1};
    cr_assert_eq(ep_client_hedge_permille(&config, &table), 30u);
    table.caller_policy =
        (ep_caller_policy){.revision = 2, .has_hedge_permille = true, .hedge_permille = 0};
    cr_assert_eq(ep_client_hedge_permille(&config, &table), 0u);
    table.caller_policy.hedge_permille = 90;
    cr_assert_eq(ep_client_hedge_permille(&config, &table), 90u);
    config.hedge_permille = 30;
    cr_assert_eq(ep_client_hedge_permille(&config, &table), 30u);
    config.hedge_permille = 0;
    cr_assert_eq(ep_client_hedge_permille(&config, &table), 0u);
}

Test(call_hedge, another_share_holds_from_then_on)
{
    ep_retry_budget_init(&budget, 1000);
    ep_retry_budget_earn(&budget, 100);
    ep_retry_budget_share(&budget, 0);
    cr_assert(!ep_retry_budget_take_hedge(&budget, 1),
              "what was saved up pays for none when nothing shall be hedged");
    ep_retry_budget_init(&budget, 0);
    ep_retry_budget_earn(&budget, 100);
    ep_retry_budget_share(&budget, 10);
    cr_assert(!ep_retry_budget_take_hedge(&budget, 1), "nothing was earned before");
    ep_retry_budget_earn(&budget, 100);
    cr_assert(ep_retry_budget_take_hedge(&budget, 1));
}
