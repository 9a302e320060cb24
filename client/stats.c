/* SPDX-License-Identifier: Apache-2.0 */
/* Counters since creation. */
#include "client_core.h"

static uint64_t read_counter(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

void ep_client_read_stats(ep_client *client, ep_client_stats *out_stats)
{
    ep_buffer_pool_stats pool;
    *out_stats = (ep_client_stats){.struct_bytes = sizeof(*out_stats)};
    if (ep_client_enter(client, NULL) != EP_OK) {
        return;
    }
    const ep_client_counters *c = &client->counters;
    out_stats->calls = read_counter(&c->calls);
    out_stats->calls_failed = read_counter(&c->calls_failed);
    out_stats->frames_sent = read_counter(&c->frames_sent);
    out_stats->frames_rerouted = read_counter(&c->frames_rerouted);
    out_stats->late_replies = read_counter(&c->late_replies);
    out_stats->nonfinite_rows = read_counter(&c->nonfinite_rows);
    out_stats->bytes_sent = read_counter(&c->bytes_sent);
    out_stats->bytes_received = read_counter(&c->bytes_received);
    ep_buffer_pool_read_stats(client->pool, &pool);
    out_stats->buffer_bytes_lent = pool.lent_bytes;
    out_stats->buffer_allocations = pool.system_allocations;
    ep_client_leave(client);
}
