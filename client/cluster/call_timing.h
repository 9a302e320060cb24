/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a frame's time went: from sent to answered it is split by what the node tells: queue,
 * compute, the rest of its service; what remains is wire: both ways of the network and both ends of
 * the stack. Clocks of two hosts are never compared.
 */
#ifndef EP_CLIENT_CALL_TIMING_H
#define EP_CLIENT_CALL_TIMING_H

#include <stdint.h>

#include "expertd/client.h"

typedef struct ep_frame_timing {
    uint64_t wait_us; /* sent to answered */
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t service_us;
} ep_frame_timing;

/* Sums over the timed frames of one node. Atomic, relaxed. */
typedef struct ep_peer_timing {
    uint64_t frames;
    uint64_t wait_us;
    uint64_t wait_max_us;
    uint64_t wire_us;
    uint64_t queue_us;
    uint64_t compute_us;
} ep_peer_timing;

/* What is left for the wire. Pure; never more than wait_us, 0 when the node claims more than there
 * was. */
uint64_t ep_timing_wire_us(const ep_frame_timing *timing);
void ep_peer_timing_add(ep_peer_timing *sums, const ep_frame_timing *timing);
/* Fills the sums of a public struct. */
void ep_peer_timing_read(const ep_peer_timing *sums, ep_client_node_waits *out_waits);

#endif
