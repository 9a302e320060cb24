/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gateway.Forward: takes whole token batches from clients that do not route. An ep_client in this
 * process watches this coordinator's placement and calls the nodes as any client does, so results
 * have the same bits.
 *
 * A call's deadline, cancel, traceparent and tenant are passed on. Inputs are read in the received
 * buffer, and the result is written into the reply's buffer.
 *
 * Threads    handlers run on lane threads and do not wait for nodes; completions run on the
 *            client's.
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
    bool enabled; /* false: every call gets UNIMPLEMENTED */
    /* the most in flight; more get RESOURCE_EXHAUSTED with retry_after_us */
    uint32_t calls_max;
    size_t reply_bytes_max;              /* of one result */
    uint32_t nodes_wanted;               /* for the error before the first table */
    uint32_t (*nodes_listed)(void *arg); /* for the same error; any thread */
    void *arg;
    ep_metrics *metrics; /* borrowed */
    ep_load_sums *loads; /* borrowed; gets gate probabilities of calls with logits. NULL allowed */
} ep_gateway_config;

/* Errors: NO_MEMORY. */
ep_err ep_gateway_create(const ep_gateway_config *config, ep_gateway **out_gateway,
                         ep_error *out_error);
/* For ep_rpc_server_add_service. */
ProtobufCService *ep_gateway_rpc(ep_gateway *gateway);
/* Makes the client that the gateway routes with; not when disabled. client: coordinator_url, token,
 * TLS, buffer_bytes_max, payload_crc; calls_max is set here. On a second call the new client
 * replaces the present one at a tick, once it has a table. Errors: as ep_client_create. */
ep_err ep_gateway_connect(ep_gateway *gateway, const ep_client_config *client, ep_error *out_error);
/*
 * Whether to connect again: in this table (NULL: none yet) no node with the numerics id that the
 * client has pinned for a model has copies of it any more, while others have, and no new client is
 * on its way. Callers that name no id do not mind another one.
 */
bool ep_gateway_is_stranded(ep_gateway *gateway, const ep_routing_table *table);
/* Makes a new client the present one once it has a table, and closes the former one once its calls
 * have ended. On the same thread as connect and stop. */
void ep_gateway_tick(ep_gateway *gateway);
/* Sets the token for new connections; "": none. Any time. */
void ep_gateway_set_token(ep_gateway *gateway, const char *token);
/* New calls get DRAINING. */
void ep_gateway_drain(ep_gateway *gateway);
uint32_t ep_gateway_in_flight(ep_gateway *gateway);
/* Ends calls in flight with DRAINING, and the client. Call it before the rpc server is destroyed.
 * NULL allowed. */
void ep_gateway_stop(ep_gateway *gateway);
/* After the rpc server is destroyed. NULL allowed. */
void ep_gateway_destroy(ep_gateway *gateway);
/* Sets the gauges; for ep_metrics_on_collect. */
void ep_gateway_collect(ep_gateway *gateway);

#endif
