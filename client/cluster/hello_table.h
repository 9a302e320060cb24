/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes a routing table of the nodes' Hellos, for clients without a coordinator. Pure.
 */
#ifndef EP_CLIENT_HELLO_TABLE_H
#define EP_CLIENT_HELLO_TABLE_H

#include "common.pb-c.h"
#include "moe/routing_table.h"

typedef struct ep_hello_source {
    const char *url;
    const Expertd__V1__Hello *hello;
} ep_hello_source;

/*
 * Nodes have the order of sources, models the order of their first appearance. The table is
 * checked. Errors: FAILED_PRECONDITION (two nodes, named, differ in a layer or a model's config),
 * INVALID_ARGUMENT, NO_MEMORY.
 */
ep_err ep_hello_table_build(const ep_hello_source *sources, uint32_t sources_count, ep_epoch epoch,
                            ep_routing_table **out_table, ep_error *out_error);

#endif
