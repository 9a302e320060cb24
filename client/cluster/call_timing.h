/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Splits the time from sending a frame to its answer. The node reports queue, compute and the whole
 * of its service. The rest is "wire": the network in both directions and both network stacks.
 * Clocks of two hosts are never compared.
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

/* Time on the wire. Pure; at most wait_us; 0 if the node reports more than that. */
uint64_t ep_timing_wire_us(const ep_frame_timing *timing);
void ep_peer_timing_add(ep_peer_timing *sums, const ep_frame_timing *timing);
/* Fills the sums of a public struct. */
void ep_peer_timing_read(const ep_peer_timing *sums, ep_client_node_waits *out_waits);

#endif
