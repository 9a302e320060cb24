/* SPDX-License-Identifier: Apache-2.0 */
/* Counters of a server never go back, also when a connection ends while they are read: a scraper
 * would take that for a restart. */
#include <sched.h>

#include "raw_peer.h"
#include "rpc_fixture.h"
#include "support/check.h"

#define PEERS 4 /* the reader has a reference to two at a time */

typedef struct ep_rpc_link ep_rpc_link;
void __real_ep_rpc_link_unref(ep_rpc_link *link);
void __wrap_ep_rpc_link_unref(ep_rpc_link *link);

static fixture f;
static raw_peer peers[PEERS];
static __thread bool is_reading;

/* Where the reader lets go of the server's lock: the oldest connection, to which it has not come
 * yet, ends. */
void __wrap_ep_rpc_link_unref(ep_rpc_link *link)
{
    if (is_reading) {
        ep_rpc_server_stats stats;
        is_reading = false;
        raw_peer_fini(&peers[0]);
        do {
            sched_yield();
            ep_rpc_server_read_stats(f.server, &stats);
        } while (stats.connections == PEERS);
    }
    __real_ep_rpc_link_unref(link);
}

int main(void)
{
    ep_rpc_server_stats before;
    ep_rpc_server_stats during;
    fixture_init(&f, &(fixture_options){.url = "loopback://stats", .no_channel = true});
    for (int i = 0; i < PEERS; i++) {
        raw_peer_meet(&peers[i], f.url);
    }
    ep_rpc_server_read_stats(f.server, &before);
    is_reading = true;
    ep_rpc_server_read_stats(f.server, &during);
    CHECK(!is_reading, "the reader let go of no connection");
    CHECK(during.bytes_received >= before.bytes_received, "%llu bytes after %llu",
          (unsigned long long)during.bytes_received, (unsigned long long)before.bytes_received);
    for (int i = 1; i < PEERS; i++) {
        raw_peer_fini(&peers[i]);
    }
    fixture_fini(&f);
    return 0;
}
