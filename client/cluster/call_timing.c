/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster/call_timing.h"

#include "call/call.h"

uint64_t ep_timing_wire_us(uint64_t wait_us, uint64_t queue_us, uint64_t compute_us,
                           uint64_t service_us)
{
    uint64_t told = queue_us + compute_us;
    told = told < queue_us ? UINT64_MAX : told;
    uint64_t node_us = service_us > told ? service_us : told;
    return node_us < wait_us ? wait_us - node_us : 0;
}

uint64_t ep_call_timing_now(const ep_call *call)
{
    return call->spec.want_timing ? ep_clock_now_ns() : 0;
}

void ep_call_timing_sent(ep_call_frame *frame)
{
    frame->timing = (ep_frame_timing){.sent_ns = ep_call_timing_now(frame->call)};
}

void ep_call_timing_answered(ep_call_frame *frame, const Expertd__V1__ForwardReply *header)
{
    if (frame->timing.sent_ns != 0) {
        frame->timing.answered_ns = ep_clock_now_ns();
        frame->timing.queue_us = header->queue_us;
        frame->timing.compute_us = header->compute_us;
        frame->timing.service_us = header->service_us;
    }
}

static void keep_most(uint64_t *most, uint64_t value)
{
    uint64_t seen = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (value > seen && !__atomic_compare_exchange_n(most, &seen, value, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
    }
}

void ep_call_timing_take(ep_call *call, const ep_call_frame *frame)
{
    const ep_frame_timing *t = &frame->timing;
    if (t->answered_ns == 0) {
        return;
    }
    uint64_t wait_us = (t->answered_ns - t->sent_ns) / EP_NS_PER_US;
    uint64_t wire_us = ep_timing_wire_us(wait_us, t->queue_us, t->compute_us, t->service_us);
    ep_peer_timing *sums = &frame->peer->timing;
    ep_count(&sums->frames, 1);
    ep_count(&sums->wait_us, wait_us);
    ep_count(&sums->wire_us, wire_us);
    ep_count(&sums->queue_us, t->queue_us);
    ep_count(&sums->compute_us, t->compute_us);
    keep_most(&sums->wait_max_us, wait_us);
    if (wait_us >= call->slowest_wait_us) {
        call->slowest_wait_us = wait_us;
        call->result.wire_us = wire_us;
        call->result.queue_us = t->queue_us;
        call->result.compute_us = t->compute_us;
    }
}

void ep_peer_timing_read(const ep_peer_timing *sums, ep_client_node_waits *out_waits)
{
    out_waits->frames = __atomic_load_n(&sums->frames, __ATOMIC_RELAXED);
    out_waits->wait_us = __atomic_load_n(&sums->wait_us, __ATOMIC_RELAXED);
    out_waits->wire_us = __atomic_load_n(&sums->wire_us, __ATOMIC_RELAXED);
    out_waits->queue_us = __atomic_load_n(&sums->queue_us, __ATOMIC_RELAXED);
    out_waits->compute_us = __atomic_load_n(&sums->compute_us, __ATOMIC_RELAXED);
    out_waits->wait_max_us = __atomic_load_n(&sums->wait_max_us, __ATOMIC_RELAXED);
}
