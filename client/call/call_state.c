/* SPDX-License-Identifier: Apache-2.0 */
/* The policy of call_state.h. Every change of a parcel's phase goes through set_phase, which keeps
 * the counts. */
#include "call/call_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/random.h"

#define PARCELS_MIN 16u
#define NO_PARCEL UINT32_MAX

void ep_call_state_init(ep_call_state *state, ep_retry_budget *budget, uint64_t seed)
{
    *state = (ep_call_state){
        .budget = budget, .random = seed, .blame = NO_PARCEL, .backoff_us = EP_CALL_BACKOFF_MIN_US};
    ep_error_clear(&state->last_error);
}

void ep_call_state_fini(ep_call_state *state)
{
    free(state->parcels);
    free(state->tried);
    state->parcels = NULL;
    state->tried = NULL;
}

static ep_err reserve_parcels(ep_call_state *state, uint32_t count)
{
    if (count <= state->parcels_capacity) {
        return EP_OK;
    }
    uint32_t capacity = state->parcels_capacity == 0 ? PARCELS_MIN : state->parcels_capacity * 2;
    capacity = capacity < count ? count : capacity;
    ep_parcel *parcels = realloc(state->parcels, capacity * sizeof(*parcels));
    if (parcels == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    state->parcels = parcels;
    state->parcels_capacity = capacity;
    return EP_OK;
}

static ep_err reserve_tried(ep_call_state *state, uint32_t copies)
{
    if (copies <= state->tried_capacity) {
        return EP_OK;
    }
    uint8_t *tried = calloc(copies, 1);
    if (tried == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    free(state->tried);
    state->tried = tried;
    state->tried_capacity = copies;
    state->tried_count = 0;
    state->tried_marks = 0;
    return EP_OK;
}

ep_err ep_call_state_reserve(ep_call_state *state, uint32_t parcels, uint32_t copies)
{
    ep_err err = reserve_parcels(state, parcels);
    return err != EP_OK ? err : reserve_tried(state, copies);
}

static void set_phase(ep_call_state *state, uint32_t parcel, ep_parcel_phase phase)
{
    ep_parcel *p = &state->parcels[parcel];
    state->windows[p->window].open_count += phase >= EP_PARCEL_OPEN;
    state->windows[p->window].open_count -= p->phase >= EP_PARCEL_OPEN;
    state->waiting_count += phase >= EP_PARCEL_WAITING;
    state->waiting_count -= p->phase >= EP_PARCEL_WAITING;
    p->phase = phase;
}

static void forget_tried(ep_call_state *state)
{
    if (state->tried_marks > 0) {
        memset(state->tried, 0, state->tried_count);
        state->tried_marks = 0;
    }
}

void ep_call_state_begin(ep_call_state *state, uint64_t now_ns, uint64_t deadline_ns,
                         uint32_t windows_count, bool allow_missing)
{
    EP_ASSERT(state->phase != EP_CALL_RUNNING && windows_count >= 1);
    for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
        EP_ASSERT(state->windows[w].phase == EP_WINDOW_FREE && state->windows[w].open_count == 0);
    }
    state->phase = EP_CALL_RUNNING;
    state->begin_ns = now_ns;
    state->deadline_ns = deadline_ns;
    state->allow_missing = allow_missing;
    state->windows_left = windows_count;
    state->attempt = 0;
    state->code = EP_OK;
    state->blame = NO_PARCEL;
    state->backoff_us = EP_CALL_BACKOFF_MIN_US;
    state->look_ns = EP_TIME_NEVER;
    state->last_error.code = EP_OK;
    forget_tried(state);
}

bool ep_call_state_open_window(ep_call_state *state, uint32_t *out_window)
{
    for (uint32_t w = 0; w < EP_CALL_WINDOWS && state->windows_left > 0; w++) {
        if (state->windows[w].phase == EP_WINDOW_FREE) {
            state->windows[w].phase = EP_WINDOW_SENDING;
            state->windows_left--;
            *out_window = w;
            return true;
        }
    }
    return false;
}

void ep_call_state_withdraw_window(ep_call_state *state, uint32_t window)
{
    EP_ASSERT(state->windows[window].phase == EP_WINDOW_SENDING &&
              state->windows[window].open_count == 0);
    state->windows[window].phase = EP_WINDOW_FREE;
    state->windows_left++;
}

bool ep_call_state_has_window(const ep_call_state *state)
{
    for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
        if (state->windows[w].phase != EP_WINDOW_FREE) {
            return true;
        }
    }
    return false;
}

uint32_t ep_call_state_parcels_used(const ep_call_state *state)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < state->parcels_count; i++) {
        used += state->parcels[i].phase != EP_PARCEL_FREE;
    }
    return used;
}

static ep_err take_parcel(ep_call_state *state, uint32_t window, ep_parcel_phase phase,
                          uint32_t *out_parcel)
{
    EP_ASSERT(state->phase == EP_CALL_RUNNING && state->windows[window].phase != EP_WINDOW_FREE);
    uint32_t parcel = 0;
    while (parcel < state->parcels_count && state->parcels[parcel].phase != EP_PARCEL_FREE) {
        parcel++;
    }
    if (parcel == state->parcels_count) {
        ep_err err = reserve_parcels(state, parcel + 1);
        if (err != EP_OK) {
            return err;
        }
        state->parcels_count++;
    }
    state->parcels[parcel] = (ep_parcel){.phase = EP_PARCEL_FREE,
                                         .window = window,
                                         .hedge_ns = EP_TIME_NEVER,
                                         .look_ns = EP_TIME_NEVER,
                                         .hedge_of = NO_PARCEL};
    set_phase(state, parcel, phase);
    *out_parcel = parcel;
    return EP_OK;
}

ep_err ep_call_state_add(ep_call_state *state, uint32_t window, uint32_t *out_parcel)
{
    return take_parcel(state, window, EP_PARCEL_IN_FLIGHT, out_parcel);
}

static void delay(ep_call_state *state, uint32_t parcel, ep_err reason, uint64_t due_ns)
{
    state->parcels[parcel].reason = reason;
    state->parcels[parcel].due_ns = due_ns;
    set_phase(state, parcel, EP_PARCEL_DELAYED);
}

/* Half fixed, half random, so that callers hit by one failure do not return at the same time. */
static uint64_t jittered_ns(ep_call_state *state, uint64_t us)
{
    uint64_t half = us / 2;
    return (half + ep_splitmix64(&state->random) % (us - half + 1)) * EP_NS_PER_US;
}

ep_err ep_call_state_add_stuck(ep_call_state *state, uint32_t window, uint64_t now_ns,
                               uint32_t *out_parcel)
{
    ep_err err = take_parcel(state, window, EP_PARCEL_STUCK, out_parcel);
    if (err != EP_OK) {
        return err;
    }
    state->parcels[*out_parcel].due_ns = now_ns + jittered_ns(state, state->backoff_us);
    state->backoff_us = state->backoff_us * 2 > EP_CALL_BACKOFF_MAX_US ? EP_CALL_BACKOFF_MAX_US
                                                                       : state->backoff_us * 2;
    return EP_OK;
}

ep_err ep_call_state_add_late(ep_call_state *state, uint32_t window, uint32_t *out_parcel)
{
    ep_err err = take_parcel(state, window, EP_PARCEL_DELAYED, out_parcel);
    if (err == EP_OK) {
        delay(state, *out_parcel, EP_ERR_RESOURCE_EXHAUSTED, state->deadline_ns);
    }
    return err;
}

void ep_call_state_absorb(ep_call_state *state, uint32_t parcel)
{
    EP_ASSERT(state->parcels[parcel].phase == EP_PARCEL_ROUTABLE);
    set_phase(state, parcel, EP_PARCEL_FREE);
}

void ep_call_state_release_window(ep_call_state *state, uint32_t window)
{
    EP_ASSERT(state->windows[window].open_count == 0);
    for (uint32_t i = 0; i < state->parcels_count; i++) {
        const ep_parcel *p = &state->parcels[i];
        if ((p->phase == EP_PARCEL_ARRIVED || p->phase == EP_PARCEL_SPENT) && p->window == window) {
            set_phase(state, i, EP_PARCEL_FREE);
        }
    }
    state->windows[window].phase = EP_WINDOW_FREE;
}

static void finish(ep_call_state *state, ep_err code, uint32_t blame, ep_call_actions *actions)
{
    state->phase = EP_CALL_DONE;
    state->code = code;
    state->blame = blame;
    for (uint32_t i = 0; i < state->parcels_count; i++) {
        ep_parcel_phase phase = state->parcels[i].phase;
        if (phase == EP_PARCEL_IN_FLIGHT || phase == EP_PARCEL_HEDGE) {
            set_phase(state, i, EP_PARCEL_ZOMBIE);
        } else if (phase >= EP_PARCEL_OPEN) {
            set_phase(state, i, EP_PARCEL_FREE);
        }
    }
    actions->complete = true;
    actions->route = false;
    actions->windows_done = 0;
    actions->look = false;
    actions->cancel = false;
}

/* The parcel to blame is freed: it has had its answer or was not sent, so none will come. */
static void finish_with(ep_call_state *state, const ep_error *error, uint32_t blame,
                        uint64_t now_ns, ep_call_actions *actions)
{
    state->last_error = *error;
    state->last_error_ns = now_ns;
    if (blame != NO_PARCEL) {
        set_phase(state, blame, EP_PARCEL_FREE);
    }
    finish(state, error->code, blame, actions);
}

/* Checks whether the window, and perhaps the call, now has all rows. */
static void check_window(ep_call_state *state, uint32_t window, ep_call_actions *actions)
{
    bool is_last = state->windows_left == 0;
    for (uint32_t w = 0; w < EP_CALL_WINDOWS; w++) {
        const ep_call_state_window *each = &state->windows[w];
        if (each->open_count > 0 || each->phase == EP_WINDOW_SENDING) {
            if (w == window) {
                return;
            }
            is_last = false;
        }
    }
    if (is_last) {
        finish(state, EP_OK, NO_PARCEL, actions);
    } else {
        state->backoff_us = EP_CALL_BACKOFF_MIN_US;
        actions->windows_done |= 1u << window;
    }
}

static uint64_t pause_us(const ep_error *error)
{
    uint64_t us = error->retry_after_us;
    us = us < EP_CALL_PAUSE_MIN_US ? EP_CALL_PAUSE_MIN_US : us;
    return us > EP_CALL_PAUSE_MAX_US ? EP_CALL_PAUSE_MAX_US : us;
}

static void pause_parcel(ep_call_state *state, uint64_t now_ns, uint32_t parcel,
                         const ep_error *error)
{
    uint64_t us = pause_us(error);
    /* Not before the time asked for, and up to half of it later. */
    delay(state, parcel, EP_ERR_RESOURCE_EXHAUSTED,
          now_ns + us / 2 * EP_NS_PER_US + jittered_ns(state, us));
}

/* ---- hedges ---- */

void ep_call_state_watch(ep_call_state *state, uint32_t parcel, uint64_t hedge_ns, uint64_t look_ns)
{
    uint64_t first_ns = hedge_ns < look_ns ? hedge_ns : look_ns;
    state->parcels[parcel].hedge_ns = hedge_ns;
    state->parcels[parcel].look_ns = look_ns;
    state->look_ns = first_ns < state->look_ns ? first_ns : state->look_ns;
}

static bool is_watched(ep_parcel_phase phase)
{
    return phase == EP_PARCEL_IN_FLIGHT || phase == EP_PARCEL_HEDGE;
}

uint32_t ep_call_state_next_due(const ep_call_state *state, uint64_t now_ns, uint32_t from)
{
    for (uint32_t i = from; i < state->parcels_count; i++) {
        const ep_parcel *p = &state->parcels[i];
        if (is_watched(p->phase) && (p->hedge_ns <= now_ns || p->look_ns <= now_ns)) {
            return i;
        }
    }
    return NO_PARCEL;
}

void ep_call_state_looked(ep_call_state *state)
{
    state->look_ns = EP_TIME_NEVER;
    for (uint32_t i = 0; i < state->parcels_count; i++) {
        const ep_parcel *p = &state->parcels[i];
        if (is_watched(p->phase)) {
            uint64_t first_ns = p->hedge_ns < p->look_ns ? p->hedge_ns : p->look_ns;
            state->look_ns = first_ns < state->look_ns ? first_ns : state->look_ns;
        }
    }
}

bool ep_call_state_begin_hedge(ep_call_state *state, uint32_t parcel, uint32_t frames, bool silent)
{
    ep_parcel *p = &state->parcels[parcel];
    EP_ASSERT(state->phase == EP_CALL_RUNNING && p->phase == EP_PARCEL_IN_FLIGHT && frames > 0);
    bool again = silent && p->hedge == EP_HEDGE_BROKEN && p->hedges_open == 0;
    if ((p->hedge != EP_HEDGE_NONE && !again) ||
        (!silent && !ep_retry_budget_take_hedge(state->budget, frames))) {
        return false;
    }
    p->hedge = EP_HEDGE_WHOLE;
    p->hedge_ns = EP_TIME_NEVER;
    p->look_ns = EP_TIME_NEVER;
    return true;
}

ep_err ep_call_state_add_hedge(ep_call_state *state, uint32_t parcel, uint32_t *out_hedge)
{
    EP_ASSERT(state->parcels[parcel].hedge != EP_HEDGE_NONE);
    ep_err err = take_parcel(state, state->parcels[parcel].window, EP_PARCEL_HEDGE, out_hedge);
    if (err != EP_OK) {
        state->parcels[parcel].hedge = EP_HEDGE_BROKEN;
        return err;
    }
    state->parcels[*out_hedge].hedge_of = parcel;
    state->parcels[parcel].hedges_open++;
    return EP_OK;
}

/* Makes a parcel's hedges ZOMBIE: they are not waited for any more. */
static void drop_hedges(ep_call_state *state, uint32_t parcel, ep_call_actions *actions)
{
    for (uint32_t i = 0; i < state->parcels_count && state->parcels[parcel].hedges_open > 0; i++) {
        if (state->parcels[i].phase == EP_PARCEL_HEDGE && state->parcels[i].hedge_of == parcel) {
            set_phase(state, i, EP_PARCEL_ZOMBIE);
            state->parcels[parcel].hedges_open--;
            actions->cancel = true;
        }
    }
}

static void hedge_arrived(ep_call_state *state, uint32_t hedge, ep_call_actions *actions)
{
    uint32_t parcel = state->parcels[hedge].hedge_of;
    ep_parcel *p = &state->parcels[parcel];
    set_phase(state, hedge, EP_PARCEL_ARRIVED);
    p->hedges_open--;
    if (p->hedges_open > 0 || p->hedge != EP_HEDGE_WHOLE) {
        return;
    }
    if (p->phase == EP_PARCEL_IN_FLIGHT) {
        set_phase(state, parcel, EP_PARCEL_ZOMBIE);
        actions->cancel = true;
    } else {
        set_phase(state, parcel, EP_PARCEL_SPENT);
    }
    check_window(state, p->window, actions);
}

bool ep_call_state_ask_anew(ep_call_state *state, uint32_t parcel, uint64_t now_ns,
                            uint64_t pause_ns)
{
    ep_parcel *p = &state->parcels[parcel];
    bool may = p->anew_ns <= now_ns;
    p->anew_ns = may ? now_ns + pause_ns : p->anew_ns;
    return may;
}

/* When to look again after a failed hedge: after a pause if the node or the own queue is full. */
static uint64_t look_again_ns(uint64_t now_ns, const ep_error *error)
{
    return error->code == EP_ERR_RESOURCE_EXHAUSTED ? now_ns + pause_us(error) * EP_NS_PER_US
                                                    : now_ns;
}

/* The hedge's parcel waits alone again or, if it has failed too, its slots go to another copy. */
static void hedge_failed(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                         ep_call_actions *actions)
{
    uint32_t parcel = state->parcels[event->parcel].hedge_of;
    ep_parcel *p = &state->parcels[parcel];
    state->last_error = *event->error;
    state->last_error_ns = now_ns;
    set_phase(state, event->parcel, EP_PARCEL_SPENT);
    p->hedges_open--;
    p->hedge = EP_HEDGE_BROKEN;
    if (p->phase == EP_PARCEL_IN_FLIGHT) {
        ep_call_state_watch(state, parcel, EP_TIME_NEVER, look_again_ns(now_ns, event->error));
    } else {
        drop_hedges(state, parcel, actions);
        set_phase(state, parcel, EP_PARCEL_ROUTABLE);
        actions->route = true;
    }
}

/* ---- answers ---- */

/* Whether no copy can give another answer. CANCELLED and CLOSED mean here that the connection was
 * closed. DEADLINE_EXCEEDED is left to the call's own deadline. */
static bool is_final(ep_err code)
{
    return !ep_err_other_copy_may_help(code) && code != EP_ERR_CANCELLED && code != EP_ERR_CLOSED &&
           code != EP_ERR_DEADLINE_EXCEEDED;
}

bool ep_call_state_is_too_late(const ep_call_state *state, uint64_t now_ns, const ep_error *error)
{
    const uint64_t left_ns = state->deadline_ns > now_ns ? state->deadline_ns - now_ns : 0;
    return error->code == EP_ERR_RESOURCE_EXHAUSTED &&
           error->retry_after_us >= left_ns / EP_NS_PER_US;
}

static void parcel_failed(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                          ep_call_actions *actions)
{
    const ep_error *error = event->error;
    const bool is_late = ep_call_state_is_too_late(state, now_ns, error);
    state->last_error = *error;
    state->last_error_ns = now_ns;
    if (state->parcels[event->parcel].hedge == EP_HEDGE_WHOLE && !is_final(error->code)) {
        set_phase(state, event->parcel, EP_PARCEL_COVERED);
        return;
    }
    drop_hedges(state, event->parcel, actions);
    switch (error->code) {
    case EP_ERR_DEADLINE_EXCEEDED:
        delay(state, event->parcel, error->code, state->deadline_ns);
        return;
    case EP_ERR_RESOURCE_EXHAUSTED:
        if (!ep_retry_budget_take(state->budget)) {
            if (state->allow_missing && is_late) {
                delay(state, event->parcel, error->code, state->deadline_ns);
            } else {
                finish_with(state, error, event->parcel, now_ns, actions);
            }
            return;
        }
        if (!is_late) {
            pause_parcel(state, now_ns, event->parcel, error);
            return;
        }
        state->parcels[event->parcel].reason = error->code;
        break; /* another copy may have room */
    default:
        if (is_final(error->code)) {
            finish_with(state, error, event->parcel, now_ns, actions);
            return;
        }
    }
    set_phase(state, event->parcel, EP_PARCEL_ROUTABLE);
    actions->route = true;
}

/* A parcel that was not sent: nothing is charged, and a full queue only needs a short pause. */
static void parcel_refused(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                           ep_call_actions *actions)
{
    if (event->error->code == EP_ERR_RESOURCE_EXHAUSTED) {
        state->last_error = *event->error;
        state->last_error_ns = now_ns;
        pause_parcel(state, now_ns, event->parcel, event->error);
        return;
    }
    if (event->error->code == EP_ERR_NO_MEMORY) {
        finish_with(state, event->error, event->parcel, now_ns, actions);
        return;
    }
    parcel_failed(state, now_ns, event, actions);
}

static void answer(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                   ep_call_actions *actions)
{
    EP_ASSERT(event->parcel < state->parcels_count);
    ep_parcel *p = &state->parcels[event->parcel];
    if (p->phase == EP_PARCEL_ZOMBIE) {
        set_phase(state, event->parcel, EP_PARCEL_FREE);
    }
    if (p->phase == EP_PARCEL_HEDGE && event->kind == EP_EVENT_ROWS) {
        hedge_arrived(state, event->parcel, actions);
        return;
    }
    if (p->phase == EP_PARCEL_HEDGE) {
        hedge_failed(state, now_ns, event, actions);
        return;
    }
    if (p->phase != EP_PARCEL_IN_FLIGHT) {
        actions->late = true;
        return;
    }
    if (event->kind == EP_EVENT_ROWS) {
        set_phase(state, event->parcel, EP_PARCEL_ARRIVED);
        if (p->hedges_open > 0) {
            drop_hedges(state, event->parcel, actions);
        }
        check_window(state, p->window, actions);
    } else if (event->kind == EP_EVENT_FAILED) {
        parcel_failed(state, now_ns, event, actions);
    } else {
        parcel_refused(state, now_ns, event, actions);
    }
}

/* The parcel to name in the error: slots without a copy, else a pause, else a missing answer. */
static uint32_t find_blame(const ep_call_state *state)
{
    static const ep_parcel_phase order[] = {EP_PARCEL_STUCK, EP_PARCEL_ROUTABLE, EP_PARCEL_DELAYED,
                                            EP_PARCEL_IN_FLIGHT, EP_PARCEL_COVERED};
    for (size_t k = 0; k < EP_ARRAY_COUNT(order); k++) {
        for (uint32_t i = 0; i < state->parcels_count; i++) {
            if (state->parcels[i].phase == order[k]) {
                return i;
            }
        }
    }
    return NO_PARCEL;
}

static void expire(ep_call_state *state, ep_call_actions *actions)
{
    uint32_t blame = find_blame(state);
    ep_err code = EP_ERR_DEADLINE_EXCEEDED;
    if (state->allow_missing) {
        code = EP_OK;
    } else if (blame != NO_PARCEL && state->parcels[blame].phase == EP_PARCEL_DELAYED) {
        code = state->parcels[blame].reason;
    } else if (blame != NO_PARCEL && state->parcels[blame].phase != EP_PARCEL_IN_FLIGHT &&
               state->parcels[blame].phase != EP_PARCEL_COVERED) {
        code = EP_ERR_UNAVAILABLE;
    }
    finish(state, code, blame, actions);
}

/* Makes waiting parcels ROUTABLE: those whose time has come and, when woken, the stuck ones. */
static void release_waiting(ep_call_state *state, uint64_t now_ns, bool woken,
                            ep_call_actions *actions)
{
    for (uint32_t i = 0; i < state->parcels_count && state->waiting_count > 0; i++) {
        ep_parcel *p = &state->parcels[i];
        bool stuck = p->phase == EP_PARCEL_STUCK;
        if (p->phase < EP_PARCEL_WAITING || !((woken && stuck) || p->due_ns <= now_ns)) {
            continue;
        }
        p->reason = EP_OK;
        set_phase(state, i, EP_PARCEL_ROUTABLE);
        actions->route = true;
        if (stuck) {
            forget_tried(state);
        }
    }
}

void ep_call_state_step(ep_call_state *state, uint64_t now_ns, const ep_call_event *event,
                        ep_call_actions *actions)
{
    ep_error cancelled;
    bool is_answer = event->kind == EP_EVENT_ROWS || event->kind == EP_EVENT_FAILED;
    actions->late = false;
    if (state->phase != EP_CALL_RUNNING && !is_answer) {
        return;
    }
    switch (event->kind) {
    case EP_EVENT_WINDOW:
        state->windows[event->window].phase = EP_WINDOW_SENT;
        check_window(state, event->window, actions);
        break;
    case EP_EVENT_WAKE:
        release_waiting(state, now_ns, true, actions);
        break;
    case EP_EVENT_TIMER:
        if (now_ns >= state->deadline_ns) {
            expire(state, actions);
        } else {
            release_waiting(state, now_ns, false, actions);
            actions->look = now_ns >= state->look_ns;
        }
        break;
    case EP_EVENT_CANCEL:
        ep_error_set(&cancelled, EP_ERR_CANCELLED, "the call was cancelled");
        finish_with(state, &cancelled, NO_PARCEL, now_ns, actions);
        break;
    case EP_EVENT_FATAL:
        finish_with(state, event->error, NO_PARCEL, now_ns, actions);
        break;
    case EP_EVENT_ROWS:
    case EP_EVENT_FAILED:
    case EP_EVENT_REFUSED:
        answer(state, now_ns, event, actions);
        break;
    }
}

uint64_t ep_call_state_due_ns(const ep_call_state *state)
{
    if (state->phase != EP_CALL_RUNNING) {
        return EP_TIME_NEVER;
    }
    uint64_t due_ns = state->look_ns < state->deadline_ns ? state->look_ns : state->deadline_ns;
    for (uint32_t i = 0, left = state->waiting_count; i < state->parcels_count && left > 0; i++) {
        const ep_parcel *p = &state->parcels[i];
        if (p->phase >= EP_PARCEL_WAITING) {
            due_ns = p->due_ns < due_ns ? p->due_ns : due_ns;
            left--;
        }
    }
    return due_ns;
}

ep_err ep_call_state_use_layer(ep_call_state *state, const ep_routing_layer *layer)
{
    uint32_t copies = layer->offsets[layer->shape.experts + layer->shape.shared_experts];
    forget_tried(state);
    ep_err err = reserve_tried(state, copies);
    if (err == EP_OK) {
        state->tried_count = copies;
    }
    return err;
}

void ep_call_state_mark_tried(ep_call_state *state, const ep_routing_layer *layer, uint32_t expert,
                              uint32_t node)
{
    for (uint32_t i = layer->offsets[expert]; i < layer->offsets[expert + 1]; i++) {
        if (layer->copies[i] == node && state->tried[i] == 0) {
            state->tried[i] = 1;
            state->tried_marks++;
        }
    }
}
