/* SPDX-License-Identifier: Apache-2.0 */
/* Makes Gateway.Forward's header and tensor section of a batch. */
#ifndef EP_CLI_GATEWAY_REQUEST_H
#define EP_CLI_GATEWAY_REQUEST_H

#include "base/buffer.h"
#include "expertd/client.h"
#include "wire/gateway_codec.h"

/* Must not be moved, since it has pointers into itself; also borrows the caller's texts. */
typedef struct ep_cli_gateway_request {
    Expertd__V1__GatewayForwardRequest header;
    Expertd__V1__GateConfig gate;
    ep_gateway_layout layout;
    ep_buffer *tensors; /* NULL without tensors */
} ep_cli_gateway_request;

/*
 * gate NULL: uses ids and scales of args, else logits. Errors: INVALID_ARGUMENT, NO_MEMORY; there
 * is nothing to free then.
 */
ep_err ep_cli_gateway_request_make(const ep_moe_args *args, const ep_gate_config *gate,
                                   const ep_tensor *logits, ep_dtype out_dtype,
                                   ep_buffer_pool *pool, ep_cli_gateway_request *out_request,
                                   ep_error *out_error);
void ep_cli_gateway_request_fini(ep_cli_gateway_request *request);

#endif
