/* SPDX-License-Identifier: Apache-2.0 */
/* comm_alg = HIERARCHY and AUTO: a window's first frames go one to a host; whatever is sent again
 * goes straight to its owner. What hosts took is kept with the link of the node that stands for
 * each (cluster/way_speed.h), whatever comm_alg the call had. For the call's busy thread. */
#ifndef EP_CLIENT_CALL_HOSTS_H
#define EP_CLIENT_CALL_HOSTS_H

#include "call/call.h"
#include "moe/host_plan.h"
#include "wire/relay_codec.h"

/* What of a frame goes on to other nodes; count 0: nothing. */
typedef struct ep_call_relay {
    uint32_t count;
    ep_host_part parts[EP_RELAY_PARTS_MAX];
    Expertd__V1__RelayPart messages[EP_RELAY_PARTS_MAX];
    Expertd__V1__RelayPart *list[EP_RELAY_PARTS_MAX];
} ep_call_relay;

/* Before the first window, where another way than fullmesh is asked for or nodes share hosts:
 * settles comm_alg. Fullmesh still without a coordinator, and for AUTO with a row per (token,
 * expert). */
void ep_call_begin_hosts(ep_call *call);
/* Not with fullmesh, after copies were chosen for tokens [token_begin, token_end): chooses the
 * hosts that get rows once. false: there are none. */
bool ep_call_choose_hosts(ep_call *call, uint32_t token_begin, uint32_t token_end);
/* After that: fills call->grouped, by which a plan for hosts is built, and makes room_bytes what
 * all of a group take. */
void ep_call_group_hosts(ep_call *call);
/* Gives a chunk of such a plan to one of its owners. */
void ep_call_split_chunk(ep_call *call, uint32_t chunk, ep_call_relay *out_relay);
/* Adds the parts to the chunk's header; they live as long as relay. */
void ep_call_fill_relay(const ep_call *call, ep_call_relay *relay,
                        Expertd__V1__ForwardRequest *header);

/* With knows_hosts, for the measured times of hosts: a frame was sent; its rows are here; it
 * failed. */
void ep_call_note_sent(ep_call *call, const ep_call_frame *frame);
void ep_call_note_answer(ep_call *call, const ep_call_frame *frame, uint64_t now_ns);
void ep_call_note_refusal(ep_call *call, const ep_call_frame *frame, uint64_t now_ns);
/* With knows_hosts, at the end of a run, while it holds its table: keeps what each host took. */
void ep_call_learn_hosts(ep_call *call);

#endif
