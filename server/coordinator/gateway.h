/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gateway.Forward: whole token batches of clients that do not route. An ep_client inside this
 * process watches this coordinator's own placement and talks to the nodes as any other client does,
 * so a result has the same bits.
 *
 * A call's deadline, cancel, traceparent and tenant pass through. Its inputs are read where they
 * landed; its result is written into the reply's buffer.
 *
 * Threads    handlers run on lane threads and do not wait for nodes; completions come on the
 *            client's threads.
 */
#ifndef EP_COORDINATOR_GATEWAY_H
#define EP_COORDINATOR_GATEWAY_H

#include "common/metrics.h"
#include "coordinator/load_sums.h"
#include "expertd/client.h"
#include "gateway.pb-c.h"
#include "moe/routing_table.h"
#include "rpc/rpc.h"

typedef struct ep_gateway ep_gateway;

typedef struct ep_gateway_config {
    bool enabled;           /* false: every call gets UNIMPLEMENTED */
    uint32_t calls_max;     /* in flight; beyond it RESOURCE_EXHAUSTED with retry_after_us */
    size_t reply_bytes_max; /* of one result */
    uint32_t nodes_wanted;  /* before the first table; for the error that says what is waited for */
    uint32_t (*nodes_listed)(void *arg); /* how many there are; any thread */
    void *arg;
    ep_metrics *metrics; /* borrowed */
    ep_load_sums *loads; /* borrowed; gets the probabilities of logits. NULL allowed */
} ep_gateway_config;

/* Errors: NO_MEMORY. */
ep_err ep_gateway_create(const ep_gateway_config *config, ep_gateway **out_gateway,
                         ep_error *out_error);
/* For ep_rpc_server_add_service. */
ProtobufCService *ep_gateway_rpc(ep_gateway *gateway);
/* Connects to the placement it routes by. client: coordinator_url, token, TLS, buffer_bytes_max,
 * payload_crc; calls_max is set here. Not when disabled. Called again, the client made then takes
 * the place of the one there is at a tick, once it has a table. Errors: as ep_client_create. */
ep_err ep_gateway_connect(ep_gateway *gateway, const ep_client_config *client, ep_error *out_error);
/*
 * A client keeps the numerics id it chose first, and a user of the gateway who names none does not
 * care which it is. True when no node of that id holds anything of a model any more, in this table
 * (NULL: none yet), and no other client is on its way: connect again.
 */
bool ep_gateway_is_stranded(ep_gateway *gateway, const ep_routing_table *table);
/* Puts a client that is on its way into its place; closes the one before, when its calls have
 * ended. With connect and stop on one thread. */
void ep_gateway_tick(ep_gateway *gateway);
/* The token for connections made from now on. "" none. Any time. */
void ep_gateway_set_token(ep_gateway *gateway, const char *token);
/* New calls get DRAINING. */
void ep_gateway_drain(ep_gateway *gateway);
uint32_t ep_gateway_in_flight(ep_gateway *gateway);
/* Ends calls in flight, with DRAINING, and the client. Before the rpc server is destroyed. NULL
 * allowed. */
void ep_gateway_stop(ep_gateway *gateway);
/* After the rpc server is destroyed. NULL allowed. */
void ep_gateway_destroy(ep_gateway *gateway);
/* Sets the gauges; for ep_metrics_on_collect. */
void ep_gateway_collect(ep_gateway *gateway);

#endif
