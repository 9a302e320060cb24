/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of a call's busy thread: call_send.c, call_hedge.c, call_reply.c, call_finish.c,
 * call_hosts.c. */
#ifndef EP_CLIENT_CALL_STEPS_H
#define EP_CLIENT_CALL_STEPS_H

#include "call/call.h"
#include "moe/host_plan.h"
#include "wire/relay_codec.h"

/* Sends windows while there are some and they have room. Without room for the first one the call
 * ends. */
void ep_call_send_windows(ep_call *call, ep_call_actions *actions);
/* Sends the slots of ROUTABLE parcels again. */
void ep_call_resend(ep_call *call, ep_call_actions *actions);
/* Checks frames that are late or whose nodes may be silent; sends their slots to other copies. */
void ep_call_look(ep_call *call, uint64_t now_ns, ep_call_actions *actions);
/* Cancels frames that are not waited for any more, also at their nodes. */
void ep_call_cancel_zombies(ep_call *call, uint64_t now_ns);

typedef enum ep_send_reason {
    EP_SEND_FIRST,
    EP_SEND_AGAIN, /* after a failure */
    EP_SEND_LATE,  /* hedges: the frame's answer is late */
    EP_SEND_SILENT /* hedges: the frame's node is silent */
} ep_send_reason;
/* Also for call_hedge.c. Takes the newest table if it has the same layer. */
void ep_call_refresh_view(ep_call *call);
/* Chooses a copy for each expert that has slots, or for all experts if slots is NULL. avoid: NULL,
 * or a peer to leave out; then draining and suspected ones are left out too. tried_too: allows
 * copies that were tried in this round. */
void ep_call_choose(ep_call *call, const uint32_t *slots, const ep_peer *avoid, bool tried_too);
/* Plans the slots that are listed of the window, or with NULL the slots numbers[numbers_count].
 * Errors: as ep_routing_plan_build. */
ep_err ep_call_build_plan(ep_call *call, const ep_call_window *window, const uint32_t *numbers,
                          uint32_t numbers_count, ep_error *out_error);
/* Sorts slot numbers ascending, without allocating. */
void ep_call_sort_slots(uint32_t *numbers, uint32_t count);
/* Sends the frames of the plan. hedge_of: for LATE and SILENT, the parcel whose slots these are. */
void ep_call_send_plan(ep_call *call, uint32_t window, ep_send_reason reason, uint32_t hedge_of,
                       ep_call_actions *actions);

/* On a transport thread: checks an answer to a frame, arg, and posts it. */
void ep_call_on_reply(void *arg, const ep_rpc_reply *reply, const ep_error *error);
/* Steps the state with a posted answer and drops the frame's use, which is not the last. */
void ep_call_take_answer(ep_call *call, ep_call_frame *frame, uint64_t now_ns,
                         ep_call_actions *actions);
/* Marks the copies that a failed frame tried; adds the node to an error without one. */
void ep_call_mark_frame(ep_call *call, ep_call_frame *frame, ep_error *error);
/* With is_piecewise: combines tokens of an answer whose rows have all come. */
void ep_call_combine_ready(ep_call *call, const ep_call_frame *frame);
/* Calls on_tokens, which is not NULL, with newly finished tokens, in order and without gaps. */
void ep_call_tell_tokens(ep_call *call);
/* Combines the rest of the window and releases its buffers. */
void ep_call_end_window(ep_call *call, uint32_t window);
/* Ends a run with state.code: writes out or the error, fills call->result, cancels frames. */
void ep_call_end_run(ep_call *call, uint64_t now_ns);

/* The kind of a slot; *out_expert as ep_batch_slot. */
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

/*
 * ---- call_hosts.c ----
 *
 * comm_alg = HIERARCHY and AUTO: a window's first frames go once to each host; slots that are sent
 * again go straight to their owner. Measured times of hosts are kept, whatever comm_alg, with the
 * link of the node that stands for the host (way_speed.h).
 */

/* The parts of a frame that its receiver passes on to other nodes; count 0: none. */
typedef struct ep_call_relay {
    uint32_t count;
    ep_host_part parts[EP_RELAY_PARTS_MAX];
    Expertd__V1__RelayPart messages[EP_RELAY_PARTS_MAX];
    Expertd__V1__RelayPart *list[EP_RELAY_PARTS_MAX];
} ep_call_relay;

/* Sets the comm_alg of the run; to be called before the first window if the caller asks for more
 * than fullmesh or nodes share hosts. FULLMESH without a coordinator, and for AUTO with a row per
 * slot. */
void ep_call_begin_hosts(ep_call *call);
/* Not for fullmesh. Chooses the hosts that get rows only once, after copies were chosen for tokens
 * [token_begin, token_end). False: there are none. */
bool ep_call_choose_hosts(ep_call *call, uint32_t token_begin, uint32_t token_end);
/* After that: fills call->grouped for a plan by hosts, and lowers room_bytes to the least of a
 * group. */
void ep_call_group_hosts(ep_call *call);
/* Assigns a chunk of such a plan to one of its owners, with the other owners' slots as parts. */
void ep_call_split_chunk(ep_call *call, uint32_t chunk, ep_call_relay *out_relay);
/* Adds the parts to the header; they live as long as relay. */
void ep_call_fill_relay(const ep_call *call, ep_call_relay *relay,
                        Expertd__V1__ForwardRequest *header);

/* With knows_hosts: note for the times of hosts that a frame was sent, was answered, failed. */
void ep_call_note_sent(ep_call *call, const ep_call_frame *frame);
void ep_call_note_answer(ep_call *call, const ep_call_frame *frame, uint64_t now_ns);
void ep_call_note_refusal(ep_call *call, const ep_call_frame *frame, uint64_t now_ns);
/* With knows_hosts, at the end of a run, before the table is dropped: keeps each host's time. */
void ep_call_learn_hosts(ep_call *call);

#endif
