/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a call's work, for its busy thread: call_send.c, call_reply.c, call_finish.c. */
#ifndef EP_CLIENT_CALL_STEPS_H
#define EP_CLIENT_CALL_STEPS_H

#include "call.h"

/* Sends windows while one is left and there is room for it: the first one always, or the call ends. */
void ep_call_send_windows(ep_call *call, ep_call_actions *actions);
/* Sends the slots of ROUTABLE parcels again. */
void ep_call_resend(ep_call *call, ep_call_actions *actions);
/* Grows the array of frames. Errors: NO_MEMORY. */
ep_err ep_call_reserve_frames(ep_call *call, uint32_t count);
/* Errors: NO_MEMORY. */
ep_err ep_call_reserve_layer(ep_call *call, const ep_view *view, const ep_routing_layer *layer);

/* On a transport thread: checks an answer and posts it. */
void ep_call_on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error);
/* Steps the state with a posted answer. Gives back the frame's use: the call is then held by someone else
 * only. */
void ep_call_take_answer(ep_call *call, ep_call_frame *frame, uint64_t now_ns, ep_call_actions *actions);
/* Notes which copies a failed frame tried; fills in the node of an error that names none. */
void ep_call_mark_frame(ep_call *call, ep_call_frame *frame, ep_error *error);
/* Drops what a frame holds: peer, reply, slots. */
void ep_call_clear_frame(ep_call_frame *frame);

/* Combines the tokens of an answer whose rows are all here. */
void ep_call_combine_ready(ep_call *call, const ep_call_frame *frame);
/* Combines what is left of the window and gives back its buffers. */
void ep_call_end_window(ep_call *call, uint32_t window);
/* The run is over with state.code: writes out or the error, fills call->result, cancels what is still in
 * flight. */
void ep_call_end_run(ep_call *call, uint64_t now_ns);
/* Between runs a call holds no table and no peer: a prepared one may outlive the client's connections. */
void ep_call_drop_view(ep_call *call);

/* A window's part of call->window_slots, in slots. */
static inline size_t ep_call_window_slots(const ep_call *call)
{
    return call->window_slots_bytes / sizeof(*call->window_slots) / EP_CALL_WINDOWS;
}

static inline uint32_t ep_call_slots_per_token(const ep_call *call)
{
    return ep_batch_slots_per_token(&call->spec.batch, &call->layer->shape);
}

#endif
