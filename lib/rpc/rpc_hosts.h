/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The clients' memory by address: those of one, of whatever ports and connections, have half of the clients' share together, so
 * that one machine that sends much or holds much leaves the others theirs.
 *
 * Threads  under the server's lock, but for a pool, which is used by any.
 */
#ifndef EP_RPC_HOSTS_H
#define EP_RPC_HOSTS_H

#include "rpc/rpc.h"

typedef struct ep_rpc_host ep_rpc_host;

typedef struct ep_rpc_hosts {
    ep_buffer_pool *share; /* of all clients; borrowed */
    size_t limit_bytes;    /* of one address; 0: none */
    ep_rpc_host *first;
    uint64_t refusals;     /* of those that left */
} ep_rpc_hosts;

/* frame_bytes: a frame of so many and its reply fit each address's share. share is borrowed until the last host has left. */
void ep_rpc_hosts_init(ep_rpc_hosts *hosts, ep_buffer_pool *share, size_t frame_bytes);
/* One more connection of peer ("host:port"). *out_pool lives until it leaves. NULL: no memory. */
ep_rpc_host *ep_rpc_hosts_enter(ep_rpc_hosts *hosts, const char *peer, ep_buffer_pool **out_pool);
void ep_rpc_hosts_leave(ep_rpc_hosts *hosts, ep_rpc_host *host);
/* Of the address that holds most now; refusals of all. */
void ep_rpc_hosts_read(const ep_rpc_hosts *hosts, ep_rpc_share *out_share);

#endif
