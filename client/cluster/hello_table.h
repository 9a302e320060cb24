/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A routing table made of what the nodes themselves say in Hello: for clients that know their nodes
 * and no coordinator. Pure.
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
 * Nodes keep the order of sources; models come in the order in which they are first named. The
 * table is checked. Errors: FAILED_PRECONDITION (two nodes disagree about a layer or a model's
 * config; named), INVALID_ARGUMENT, NO_MEMORY.
 */
ep_err ep_hello_table_build(const ep_hello_source *sources, uint32_t sources_count, ep_epoch epoch,
                            ep_routing_table **out_table, ep_error *out_error);

#endif
