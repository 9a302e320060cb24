/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster/call_timing.h"

uint64_t ep_timing_wire_us(const ep_frame_timing *timing)
{
    uint64_t told = timing->queue_us + timing->compute_us;
    told = told < timing->queue_us ? UINT64_MAX : told;
    uint64_t node_us = timing->service_us > told ? timing->service_us : told;
    return node_us < timing->wait_us ? timing->wait_us - node_us : 0;
}

static void add(uint64_t *sum, uint64_t amount)
{
    __atomic_fetch_add(sum, amount, __ATOMIC_RELAXED);
}

void ep_peer_timing_add(ep_peer_timing *sums, const ep_frame_timing *timing)
{
    add(&sums->frames, 1);
    add(&sums->wait_us, timing->wait_us);
    add(&sums->wire_us, ep_timing_wire_us(timing));
    add(&sums->queue_us, timing->queue_us);
    add(&sums->compute_us, timing->compute_us);
    uint64_t most = __atomic_load_n(&sums->wait_max_us, __ATOMIC_RELAXED);
    while (timing->wait_us > most &&
           !__atomic_compare_exchange_n(&sums->wait_max_us, &most, timing->wait_us, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
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
