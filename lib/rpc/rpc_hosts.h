/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits the memory of clients by address. All connections of one address together may take three
 * quarters of the clients' share, so that no address can take all. The rest is kept for the others:
 * a quarter, but at least two frames of the largest size, and at most half of the share. IPv6
 * addresses are not grouped by network.
 *
 * Threads  under the server's lock; the pools may be used by any thread.
 */
#ifndef EP_RPC_HOSTS_H
#define EP_RPC_HOSTS_H

#include "rpc/rpc.h"

typedef struct ep_rpc_host ep_rpc_host;

typedef struct ep_rpc_hosts {
    ep_buffer_pool *share; /* of all clients; borrowed: outlives the hosts */
    size_t limit_bytes;    /* of one address; 0: none */
    ep_rpc_host *first;
    uint64_t refusals; /* of addresses that have left */
} ep_rpc_hosts;

/* frame_bytes: the largest frame. */
void ep_rpc_hosts_init(ep_rpc_hosts *hosts, ep_buffer_pool *share, size_t frame_bytes);
/* Adds a connection of peer, "host:port" or a name without colon. *out_pool is lent until leave;
 * buffers may be given back later. NULL: no memory. */
ep_rpc_host *ep_rpc_hosts_enter(ep_rpc_hosts *hosts, const char *peer, ep_buffer_pool **out_pool);
void ep_rpc_hosts_leave(ep_rpc_hosts *hosts, ep_rpc_host *host);
/* lent_bytes is that of the address that holds most now; refusals are those of all addresses. */
void ep_rpc_hosts_read(const ep_rpc_hosts *hosts, ep_rpc_share *out_share);

#endif
