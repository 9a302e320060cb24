/* SPDX-License-Identifier: Apache-2.0 */
#include "rpc/rpc_hosts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/lane_accept.h"

struct ep_rpc_host {
    ep_rpc_host *next;
    char name[EP_ADDRESS_BYTES]; /* its address without port */
    uint32_t connections;
    ep_buffer_pool *pool;
};

void ep_rpc_hosts_init(ep_rpc_hosts *hosts, ep_buffer_pool *share, size_t frame_bytes)
{
    size_t all = ep_buffer_pool_limit(share);
    size_t least = 2 * ep_buffer_class_bytes(frame_bytes);
    size_t others = all / 4 > least ? all / 4 : least;
    size_t most = all - (others < all / 2 ? others : all / 2);
    most = most > least ? most : least;
    *hosts = (ep_rpc_hosts){.share = share, .limit_bytes = most < all ? most : all};
}

ep_rpc_host *ep_rpc_hosts_enter(ep_rpc_hosts *hosts, const char *peer, ep_buffer_pool **out_pool)
{
    size_t bytes = ep_accept_host_bytes(peer);
    ep_rpc_host *host = hosts->first;
    while (host != NULL && (strncmp(host->name, peer, bytes) != 0 || host->name[bytes] != 0)) {
        host = host->next;
    }
    if (host == NULL) {
        host = calloc(1, sizeof(*host));
        if (host == NULL ||
            ep_buffer_pool_create_child(hosts->share, hosts->limit_bytes, &host->pool) != EP_OK) {
            free(host);
            return NULL;
        }
        snprintf(host->name, sizeof(host->name), "%.*s", (int)bytes, peer);
        host->next = hosts->first;
        hosts->first = host;
    }
    host->connections++;
    *out_pool = host->pool;
    return host;
}

void ep_rpc_hosts_leave(ep_rpc_hosts *hosts, ep_rpc_host *host)
{
    ep_rpc_host **at = &hosts->first;
    ep_buffer_pool_stats stats;
    if (--host->connections > 0) {
        return;
    }
    while (*at != host) {
        at = &(*at)->next;
    }
    *at = host->next;
    ep_buffer_pool_read_stats(host->pool, &stats);
    hosts->refusals += stats.refusals;
    ep_buffer_pool_destroy(host->pool); /* frames in use still hold a reference */
    free(host);
}

void ep_rpc_hosts_read(const ep_rpc_hosts *hosts, ep_rpc_share *out_share)
{
    *out_share = (ep_rpc_share){
        .name = "client_address", .limit_bytes = hosts->limit_bytes, .refusals = hosts->refusals};
    for (const ep_rpc_host *host = hosts->first; host != NULL; host = host->next) {
        ep_buffer_pool_stats stats;
        ep_buffer_pool_read_stats(host->pool, &stats);
        out_share->refusals += stats.refusals;
        if (stats.lent_bytes > out_share->lent_bytes) {
            out_share->lent_bytes = stats.lent_bytes;
            snprintf(out_share->address, sizeof(out_share->address), "%s", host->name);
        }
    }
}
