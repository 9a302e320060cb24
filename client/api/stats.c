/* SPDX-License-Identifier: Apache-2.0 */
/* Counters since creation. */
#include "call/client_core.h"
#include "base/struct_size.h"

static uint64_t read_counter(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

void ep_client_read_stats(ep_client *client, ep_client_stats *out_stats)
{
    ep_buffer_pool_stats pool;
    ep_client_stats stats = {.struct_bytes = sizeof(stats)};
    if (ep_client_enter(client, NULL) != EP_OK) {
        ep_struct_out(out_stats, &stats, sizeof(stats));
        return;
    }
    const ep_client_counters *c = &client->counters;
    stats.calls = read_counter(&c->calls);
    stats.calls_failed = read_counter(&c->calls_failed);
    stats.frames_sent = read_counter(&c->frames_sent);
    stats.frames_rerouted = read_counter(&c->frames_rerouted);
    stats.hedged_frames = read_counter(&c->frames_hedged);
    stats.late_replies = read_counter(&c->late_replies);
    stats.nonfinite_rows = read_counter(&c->nonfinite_rows);
    stats.bytes_sent = read_counter(&c->bytes_sent);
    stats.bytes_received = read_counter(&c->bytes_received);
    ep_buffer_pool_read_stats(client->pool, &pool);
    stats.buffer_bytes_lent = pool.lent_bytes;
    stats.buffer_bytes_peak = pool.lent_bytes_peak;
    stats.buffer_allocations = pool.system_allocations;
    ep_client_leave(client);
    ep_struct_out(out_stats, &stats, sizeof(stats));
}
