/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hedges: slots whose answer is late, or whose node is silent, go to other copies while the first
 * frame stays in flight. call_state decides which answer counts; this file chooses the copies. In a
 * steady state nothing is allocated.
 */
#include <stdlib.h>

#include "base/clock.h"
#include "call/call_steps.h"

/* Pause between looks for copies of a silent node's slots, when there is none or all have
 * failed. */
#define AGAIN_NS (50 * EP_NS_PER_MS)

static bool all_have_copy(const ep_call *call, const uint32_t *numbers, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (call->chosen[ep_call_expert(call, numbers[i])] == EP_NO_EXPERT) {
            return false;
        }
    }
    return true;
}

/* The frame's slots without a row, ascending. */
static uint32_t slots_wanted(const ep_call *call, const ep_call_frame *frame, uint32_t *out_numbers)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < frame->slots_count; i++) {
        if (call->rows[frame->slots[i]] == NULL) {
            out_numbers[count++] = frame->slots[i];
        }
    }
    ep_call_sort_slots(out_numbers, count);
    return count;
}

/* Whether there are frames for a late frame's hedges. A prepared call must not allocate for them,
 * nor take frames that the next run may need while losers of this run are in flight. */
static bool has_room(const ep_call *call, uint32_t chunks)
{
    uint32_t used = ep_call_state_parcels_used(&call->state);
    return call->first_frames_max == 0 ||
           used + chunks + call->first_frames_max <= call->frames_count;
}

/* Cancels a frame; when it ends, its slots go to other copies. */
static void give_up(ep_call_frame *frame)
{
    frame->given_up = true;
    ep_rpc_call_cancel(frame->channel, frame->rpc_id);
}

/* Sends all of a frame's slots or none, as the window waits for the slowest slot anyway. Node sums
 * must go in one frame again, since sums over other groups of slots cannot be mixed with the first
 * frame's. If that is not possible and the node is silent, its frame is given up instead. */
static void send_again(ep_call *call, uint32_t parcel, bool silent, uint32_t *numbers,
                       ep_call_actions *actions)
{
    ep_error error;
    uint32_t count = slots_wanted(call, call->frames[parcel], numbers);
    if (count == 0) {
        return;
    }
    ep_call_refresh_view(call);
    const ep_peer *first = call->frames[parcel]->link->peer;
    ep_call_choose(call, NULL, first, false);
    if (silent && !all_have_copy(call, numbers, count) &&
        ep_call_state_ask_anew(&call->state, parcel, ep_clock_now_ns(), AGAIN_NS)) {
        ep_call_choose(call, NULL, first, true);
    }
    if (!all_have_copy(call, numbers, count) ||
        ep_call_build_plan(call, NULL, numbers, count, &error) != EP_OK) {
        return;
    }
    if (call->spec.batch.node_sum && call->plan.chunks_count > 1) {
        if (silent) {
            give_up(call->frames[parcel]);
        }
        return;
    }
    if ((!silent && !has_room(call, call->plan.chunks_count)) ||
        !ep_call_state_begin_hedge(&call->state, parcel, call->plan.chunks_count, silent)) {
        return;
    }
    ep_call_send_plan(call, call->state.parcels[parcel].window,
                      silent ? EP_SEND_SILENT : EP_SEND_LATE, parcel, actions);
}

/* The list of slots uses memory of the new frames' slots; the plan copies it before. */
static void hedge(ep_call *call, uint32_t parcel, bool silent, ep_call_actions *actions)
{
    uint32_t count = call->frames[parcel]->slots_count;
    uint32_t window_index = call->state.parcels[parcel].window;
    const ep_call_window *window = &call->windows[window_index];
    size_t part = call->window_part;
    bool fits = window->slots_used + count <= part;
    uint32_t *numbers = fits ? call->window_slots + window_index * part + window->slots_used
                             : malloc(count * sizeof(*numbers));
    if (numbers == NULL) {
        return; /* the first frame is still in flight */
    }
    if (call->trace.is_on) {
        ep_call_trace_plan_begin(call, window->begin, window->end);
    }
    send_again(call, parcel, silent, numbers, actions);
    if (call->trace.plan_open) {
        ep_call_trace_plan_end(call);
    }
    if (!fits) {
        free(numbers);
    }
}

static void look_at(ep_call *call, uint32_t parcel, uint64_t now_ns, ep_call_actions *actions)
{
    const ep_parcel *p = &call->state.parcels[parcel];
    ep_call_frame *frame = call->frames[parcel];
    bool late = p->hedge_ns <= now_ns;
    bool silent = false;
    uint64_t look_ns = p->look_ns;
    if (look_ns <= now_ns) {
        silent = ep_peer_link_is_silent(frame->link, now_ns, frame->sent_ns, &look_ns);
        look_ns = silent ? now_ns + AGAIN_NS : look_ns;
    }
    ep_call_state_watch(&call->state, parcel, late ? EP_TIME_NEVER : p->hedge_ns, look_ns);
    if (p->phase == EP_PARCEL_HEDGE) {
        if (silent) { /* hedge_failed then decides what the parcel does */
            give_up(frame);
        }
        return;
    }
    if (late || silent) {
        hedge(call, parcel, silent, actions);
    }
}

void ep_call_look(ep_call *call, uint64_t now_ns, ep_call_actions *actions)
{
    uint32_t parcel = ep_call_state_next_due(&call->state, now_ns, 0);
    while (parcel != UINT32_MAX && !actions->complete) {
        look_at(call, parcel, now_ns, actions);
        parcel = ep_call_state_next_due(&call->state, now_ns, parcel + 1);
    }
    ep_call_state_looked(&call->state);
}
