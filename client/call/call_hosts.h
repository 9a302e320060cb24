/* SPDX-License-Identifier: Apache-2.0 */
/* comm_alg = HIERARCHY: a window's first frames go one to a host; whatever is sent again goes
 * straight to its owner. For the call's busy thread. */
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

/* After copies were chosen: fills call->grouped, by which a plan for hosts is built, and makes
 * room_bytes what all of a group take. */
void ep_call_group_hosts(ep_call *call);
/* Gives a chunk of such a plan to one of its owners. */
void ep_call_split_chunk(ep_call *call, uint32_t chunk, ep_call_relay *out_relay);
/* Adds the parts to the chunk's header; they live as long as relay. */
void ep_call_fill_relay(const ep_call *call, ep_call_relay *relay,
                        Expertd__V1__ForwardRequest *header);

#endif
