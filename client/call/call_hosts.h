/* SPDX-License-Identifier: Apache-2.0 */
/* comm_alg = HIERARCHY and AUTO: a window's first frames go once to each host; slots that are sent
 * again go straight to their owner. Measured times of hosts are kept, whatever comm_alg, with the
 * link of the node that stands for the host (way_speed.h). For the call's busy thread. */
#ifndef EP_CLIENT_CALL_HOSTS_H
#define EP_CLIENT_CALL_HOSTS_H

#include "call/call.h"
#include "moe/host_plan.h"
#include "wire/relay_codec.h"

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
