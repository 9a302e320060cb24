/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thin client: sends whole batches to the coordinator's gateway.
 *
 * Threads  one at a time.
 */
#ifndef EP_CLI_GATEWAY_CALL_H
#define EP_CLI_GATEWAY_CALL_H

#include "base/buffer.h"
#include "connect.h"
#include "expertd/client.h"
#include "wire/gateway_codec.h"

typedef struct ep_cli_gateway ep_cli_gateway;

/* is_asked: --gateway is given. Ends the program if other options conflict with it. */
void ep_cli_gateway_check(struct argp_state *state, bool is_asked);

/* connect (with a coordinator) is borrowed until _close. Errors: NO_MEMORY; those of dialling. */
ep_err ep_cli_gateway_open(const ep_cli_connect *connect, ep_cli_gateway **out_gateway,
                           ep_error *out_error);
void ep_cli_gateway_close(ep_cli_gateway *gateway);

/*
 * As ep_moe_forward; with gate, which may be NULL, as ep_moe_forward_logits. out is contiguous and
 * written only on success. args->missing_slots must be NULL. Bytes in the result count only the
 * connection to the gateway.
 */
ep_err ep_cli_gateway_forward(ep_cli_gateway *gateway, const ep_moe_args *args,
                              const ep_gate_config *gate, const ep_tensor *logits,
                              const ep_tensor *out, ep_moe_result *out_result);

/* ---- the request alone ---- */

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
