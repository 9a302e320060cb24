/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random runs of the policy: whatever answers come in whatever order, a run completes exactly once,
 * not after its deadline, and every answer that is due finds its parcel. test_call_state_random
 * [SEED [RUNS]]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"
#include "call/call_state.h"

#define PARCELS_MAX 4096

static uint64_t seed_state;

static uint32_t dice(uint32_t n)
{
    return (uint32_t)(ep_splitmix64(&seed_state) % n);
}

typedef struct sim {
    ep_call_state state;
    uint64_t now;
    uint32_t due[PARCELS_MAX]; /* parcels whose answer is still to come */
    uint32_t due_count;
    uint32_t completions;
    uint64_t sent; /* for the first time */
    uint64_t hedges;
} sim;

static void expect_answer(sim *s, uint32_t parcel)
{
    EP_ASSERT(s->due_count < PARCELS_MAX);
    for (uint32_t d = 0; d < s->due_count; d++) {
        EP_ASSERT(s->due[d] != parcel); /* never reused before its answer */
    }
    s->due[s->due_count++] = parcel;
}

static void send_some(sim *s, uint32_t window, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t parcel = 0;
        if (dice(5) == 0) {
            EP_ASSERT(ep_call_state_add_stuck(&s->state, window, s->now, &parcel) == EP_OK);
        } else {
            EP_ASSERT(ep_call_state_add(&s->state, window, &parcel) == EP_OK);
            ep_call_state_watch(&s->state, parcel, s->now + dice(5000000), s->now + dice(50000000));
            expect_answer(s, parcel);
        }
    }
}

/* Sometimes there is no room for a second window. */
static void send_windows(sim *s, ep_call_actions *a)
{
    uint32_t window;
    while (!a->complete && ep_call_state_open_window(&s->state, &window)) {
        if (dice(3) == 0) {
            ep_call_state_withdraw_window(&s->state, window);
            if (ep_call_state_has_window(&s->state)) {
                return;
            }
            EP_ASSERT(ep_call_state_open_window(&s->state, &window));
        }
        uint32_t frames = dice(6);
        send_some(s, window, frames);
        ep_retry_budget_earn(s->state.budget, frames);
        s->sent += frames;
        ep_call_state_step(&s->state, s->now,
                           &(ep_call_event){.kind = EP_EVENT_WINDOW, .window = window}, a);
    }
}

static void end_windows(sim *s, uint32_t done)
{
    for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
        if ((done & 1u << w) != 0) {
            EP_ASSERT(s->state.windows[w].phase != EP_WINDOW_FREE);
            for (uint32_t i = 0; i < s->state.parcels_count; i++) {
                EP_ASSERT(s->state.parcels[i].window != w ||
                          s->state.parcels[i].phase < EP_PARCEL_OPEN);
            }
            ep_call_state_release_window(&s->state, w);
        }
    }
}

static void resend(sim *s)
{
    uint32_t again = 0;
    for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < s->state.parcels_count; i++) {
            if (s->state.parcels[i].phase == EP_PARCEL_ROUTABLE &&
                s->state.parcels[i].window == w) {
                ep_call_state_absorb(&s->state, i);
                count++;
            }
        }
        send_some(s, w, count);
        again += count;
    }
    EP_ASSERT(again > 0);
}

static void look(sim *s)
{
    uint32_t parcel = ep_call_state_next_due(&s->state, s->now, 0);
    while (parcel != UINT32_MAX) {
        bool silent = dice(3) == 0;
        uint32_t frames = 1 + dice(3);
        ep_call_state_watch(&s->state, parcel, EP_TIME_NEVER, s->now + 1 + dice(50000000));
        if (ep_call_state_begin_hedge(&s->state, parcel, frames, silent)) {
            s->hedges += silent ? 0 : frames;
            for (uint32_t i = 0; i < frames; i++) {
                uint32_t hedge = 0;
                EP_ASSERT(ep_call_state_add_hedge(&s->state, parcel, &hedge) == EP_OK);
                expect_answer(s, hedge);
            }
        }
        parcel = ep_call_state_next_due(&s->state, s->now, parcel + 1);
    }
    ep_call_state_looked(&s->state);
}

static void perform(sim *s, ep_call_actions *a)
{
    while (a->complete || a->windows_done != 0 || a->route || a->look) {
        if (a->complete) {
            s->completions++;
            EP_ASSERT(s->state.phase == EP_CALL_DONE);
            for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
                ep_call_state_release_window(&s->state, w);
            }
            return;
        }
        if (a->windows_done != 0) {
            uint32_t done = a->windows_done;
            a->windows_done = 0;
            end_windows(s, done);
            send_windows(s, a);
            continue;
        }
        if (a->look) {
            a->look = false;
            look(s);
            continue;
        }
        a->route = false;
        resend(s);
    }
}

static void answer(sim *s, ep_call_actions *a)
{
    static const ep_err codes[] = {EP_ERR_CONNECTION_LOST,    EP_ERR_NOT_OWNER,
                                   EP_ERR_RESOURCE_EXHAUSTED, EP_ERR_DEADLINE_EXCEEDED,
                                   EP_ERR_DRAINING,           EP_ERR_INVALID_ARGUMENT,
                                   EP_ERR_DATA_LOSS};
    uint32_t at = dice(s->due_count);
    uint32_t parcel = s->due[at];
    s->due[at] = s->due[--s->due_count];
    ep_parcel_phase phase = s->state.parcels[parcel].phase;
    /* else of a run before, or it lost */
    bool awaited = phase == EP_PARCEL_IN_FLIGHT || phase == EP_PARCEL_HEDGE;
    ep_error error;
    ep_call_event event = {.kind = EP_EVENT_ROWS, .parcel = parcel, .error = &error};
    if (dice(2) == 0) {
        uint32_t kind = dice(20);
        ep_error_set(&error, codes[kind < 7 ? kind : 0], "random");
        event.kind = EP_EVENT_FAILED;
    }
    ep_call_state_step(&s->state, s->now, &event, a);
    EP_ASSERT(a->late == !awaited);
}

static void run(sim *s)
{
    ep_call_actions a = {0};
    uint64_t deadline = s->now + (1 + dice(2000)) * EP_NS_PER_MS;
    s->completions = 0;
    ep_call_state_begin(&s->state, s->now, deadline, 1 + dice(4), dice(4) == 0);
    send_windows(s, &a);
    perform(s, &a);
    while (s->state.phase == EP_CALL_RUNNING) {
        uint64_t due = ep_call_state_due_ns(&s->state);
        EP_ASSERT(due <= deadline);
        a = (ep_call_actions){0};
        if (s->due_count > 0 && dice(3) != 0) {
            uint64_t later = s->now + dice(20 * 1000 * 1000);
            s->now = later < due ? later : due;
            answer(s, &a);
        } else if (dice(10) == 0) {
            ep_call_state_step(&s->state, s->now, &(ep_call_event){.kind = EP_EVENT_WAKE}, &a);
        } else if (dice(200) == 0) {
            ep_call_state_step(&s->state, s->now, &(ep_call_event){.kind = EP_EVENT_CANCEL}, &a);
        } else {
            s->now = due > s->now ? due : s->now;
            ep_call_state_step(&s->state, s->now, &(ep_call_event){.kind = EP_EVENT_TIMER}, &a);
        }
        perform(s, &a);
    }
    EP_ASSERT(s->completions == 1);
    EP_ASSERT(s->now <= deadline);
    while (s->due_count > 0 && dice(2) == 0) { /* some late answers now, some in a later run */
        a = (ep_call_actions){0};
        answer(s, &a);
        EP_ASSERT(!a.complete && !a.route && a.windows_done == 0);
    }
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : ep_random_id();
    uint64_t runs = argc > 2 ? strtoull(argv[2], NULL, 0) : 20000;
    static sim s;
    ep_retry_budget budget;
    printf("seed %" PRIu64 " runs %" PRIu64 "\n", seed, runs);
    fflush(stdout);
    seed_state = seed;
    ep_retry_budget_init(&budget, 300);
    ep_call_state_init(&s.state, &budget, seed);
    s.now = 1;
    for (uint64_t i = 0; i < runs; i++) {
        run(&s);
    }
    printf("%" PRIu64 " hedges of %" PRIu64 " frames\n", s.hedges, s.sent);
    EP_ASSERT(s.hedges * 1000 <= s.sent * 300 && s.hedges > s.sent / 50);
    ep_call_state_fini(&s.state);
    return 0;
}
