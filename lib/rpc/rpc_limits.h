/* SPDX-License-Identifier: Apache-2.0 */
/* Checks and copies the configuration of servers and channels. */
#ifndef EP_RPC_RPC_LIMITS_H
#define EP_RPC_RPC_LIMITS_H

#include "rpc/rpc.h"

/* Errors: INVALID_ARGUMENT naming the limit, its value and the allowed range. */
ep_err ep_rpc_limits_check(const ep_rpc_limits *limits, ep_error *out_error);

/* A Hello request holds only a token and a few names, so raising header_bytes_max for routing
 * tables does not change this. */
#define EP_RPC_HELLO_REQUEST_BYTES_MAX 65536

/* The lane's limit until Hello is agreed. accepted: the peer dialled us. */
size_t ep_rpc_first_frame_bytes_max(const ep_rpc_limits *limits, bool accepted);

/* Checks common and copies it with its strings; ep_rpc_common_free releases the copy. Errors:
 * INVALID_ARGUMENT, NO_MEMORY. */
ep_err ep_rpc_common_copy(const ep_rpc_common *common, ep_rpc_common *out_copy,
                          ep_error *out_error);
void ep_rpc_common_free(ep_rpc_common *copy);

#endif
