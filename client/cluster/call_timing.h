/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a call's time went, for callers that ask (want_timing): what the result says of the call,
 * and what is summed up per node. Without the wish every function here is a branch.
 *
 * A frame's time from sent to answered is split by what the node tells: queue, compute, the rest of
 * its service; what remains is wire: both ways of the network and both ends of the stack. Clocks of
 * two hosts are never compared.
 *
 * Threads    _take on the call's busy thread; _answered on the transport's; the sums are atomic.
 */
#ifndef EP_CLIENT_CALL_TIMING_H
#define EP_CLIENT_CALL_TIMING_H

#include <stdint.h>

#include "base/clock.h"
#include "expert.pb-c.h"
#include "expertd/client.h"

typedef struct ep_call_frame ep_call_frame;

/* Of one frame; all 0 when not timed. */
typedef struct ep_frame_timing {
    uint64_t sent_ns;
    uint64_t answered_ns;
    uint64_t queue_us;
    uint64_t compute_us;
    uint64_t service_us;
} ep_frame_timing;

/* Sums over the timed frames of one node. Atomic, relaxed. */
typedef struct ep_peer_timing {
    uint64_t frames;
    uint64_t wait_us; /* sent to answered */
    uint64_t wait_max_us;
    uint64_t wire_us;
    uint64_t queue_us;
    uint64_t compute_us;
} ep_peer_timing;

/* Of the split above: what is left for the wire. Pure; never more than wait_us, 0 when the node
 * claims more than there was. */
uint64_t ep_timing_wire_us(uint64_t wait_us, uint64_t queue_us, uint64_t compute_us,
                           uint64_t service_us);

/* Now, or 0 when the call is not timed. */
uint64_t ep_call_timing_now(const ep_call *call);
void ep_call_timing_sent(ep_call_frame *frame);
void ep_call_timing_answered(ep_call_frame *frame, const Expertd__V1__ForwardReply *header);
/* The frame's rows are used: adds it to its node's sums, and to the call's result when it is the
 * slowest so far. */
void ep_call_timing_take(ep_call *call, const ep_call_frame *frame);

/* Fills the sums of a public struct. */
void ep_peer_timing_read(const ep_peer_timing *sums, ep_client_node_waits *out_waits);

/* Adds what has passed since begin_ns (0: nothing) to a field of the result that is still in
 * nanoseconds. */
static inline void ep_call_timing_add(uint64_t *sum_ns, uint64_t begin_ns)
{
    if (begin_ns != 0) {
        *sum_ns += ep_clock_now_ns() - begin_ns;
    }
}

#endif
