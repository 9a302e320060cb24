/* SPDX-License-Identifier: Apache-2.0 */
/* The stream of routing tables from the coordinator. It restarts by itself; while the coordinator
 * is away, the tables in use stay. */
#ifndef EP_CLIENT_WATCH_H
#define EP_CLIENT_WATCH_H

#include "moe/routing_table.h"
#include "rpc/rpc.h"

typedef struct ep_watch ep_watch;

typedef struct ep_watch_config {
    const ep_rpc_common *common;
    const ep_lane_address *coordinator;
    /* Takes ownership of the table in any case. */
    ep_err (*install)(void *arg, ep_routing_table *taken_table, ep_error *out_error);
    /* of the table in use */
    ep_epoch (*epoch)(void *arg);
    void (*report)(void *arg, const ep_error *error);
    void *arg;
} ep_watch_config;

/* common and coordinator are borrowed for the call. */
ep_err ep_watch_create(const ep_watch_config *config, ep_watch **out_watch, ep_error *out_error);
/* Not from a callback. NULL allowed. */
void ep_watch_destroy(ep_watch *watch);

#endif
