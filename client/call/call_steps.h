/* SPDX-License-Identifier: Apache-2.0 */
/* What a call's busy thread does with windows and frames: call_send.c, call_hedge.c, call_reply.c,
 * call_finish.c. */
#ifndef EP_CLIENT_CALL_STEPS_H
#define EP_CLIENT_CALL_STEPS_H

#include "call/call.h"

/* Sends windows while one is left and there is room for it: the first one always, or the call
 * ends. */
void ep_call_send_windows(ep_call *call, ep_call_actions *actions);
/* Sends the slots of ROUTABLE parcels again. */
void ep_call_resend(ep_call *call, ep_call_actions *actions);
/* Looks at frames that are late or whose node may be silent, and sends their slots to copies
 * too. */
void ep_call_look(ep_call *call, uint64_t now_ns, ep_call_actions *actions);
/* Ends frames nobody waits for any more; their nodes are told. */
void ep_call_cancel_zombies(ep_call *call, uint64_t now_ns);

typedef enum ep_send_reason {
    EP_SEND_FIRST,
    EP_SEND_AGAIN, /* after a failure */
    EP_SEND_LATE,  /* hedges of a frame whose answer is late */
    EP_SEND_SILENT /* the same, its node is silent */
} ep_send_reason;
/* For call_hedge.c. Takes the newest table, if it has the same layer. */
void ep_call_refresh_view(ep_call *call);
/* A copy for each expert that has slots, or, with NULL, for all experts. avoid: NULL, or a peer
 * that is to be left out, and with it those that are draining or suspected. tried_too: also copies
 * that were tried in this round. */
void ep_call_choose(ep_call *call, const uint32_t *slots, const ep_peer *avoid, bool tried_too);
/* Of the window, whose slots are listed, or with NULL of the slots numbers[numbers_count]. Errors:
 * as ep_routing_plan_build. */
ep_err ep_call_build_plan(ep_call *call, const ep_call_window *window, const uint32_t *numbers,
                          uint32_t numbers_count, ep_error *out_error);
/* Slot numbers, ascending. */
void ep_call_sort_slots(uint32_t *numbers, uint32_t count);
/* Sends the plan of slots of a window; hedge_of: the parcel that has its slots, with LATE and
 * SILENT. */
void ep_call_send_plan(ep_call *call, uint32_t window, ep_send_reason reason, uint32_t hedge_of,
                       ep_call_actions *actions);

/* On a transport thread: checks an answer to a frame, arg, and posts it. */
void ep_call_on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error);
/* Steps the state with a posted answer. Gives back the frame's use: the call is then held by
 * someone else only. */
void ep_call_take_answer(ep_call *call, ep_call_frame *frame, uint64_t now_ns,
                         ep_call_actions *actions);
/* Notes which copies a failed frame tried; fills in the node of an error that names none. */
void ep_call_mark_frame(ep_call *call, ep_call_frame *frame, ep_error *error);
/* Piecewise: combines the tokens of an answer whose rows are all here. */
void ep_call_combine_ready(ep_call *call, const ep_call_frame *frame);
/* Calls on_tokens, which is not NULL, with the finished tokens that follow those it was told of. */
void ep_call_tell_tokens(ep_call *call);
/* Combines what is left of the window and gives back its buffers. */
void ep_call_end_window(ep_call *call, uint32_t window);
/* The run is over with state.code: writes out or the error, fills call->result, cancels what is
 * still in flight. */
void ep_call_end_run(ep_call *call, uint64_t now_ns);

/* What a slot is, by its number; *out_expert as ep_batch_slot. */
static inline ep_slot_kind ep_call_slot(const ep_call *call, uint32_t number, uint32_t *out_expert)
{
    return ep_batch_slot(&call->spec.batch, &call->at.layer->shape, number / call->slots_per_token,
                         number % call->slots_per_token, out_expert);
}

/* Table index of a slot that needs a row (routed or shared). */
static inline uint32_t ep_call_expert(const ep_call *call, uint32_t number)
{
    uint32_t expert;
    ep_call_slot(call, number, &expert);
    return expert;
}

#endif
