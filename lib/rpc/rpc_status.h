/* SPDX-License-Identifier: Apache-2.0 */
/* Converts between message Status and ep_error. */
#ifndef EP_RPC_RPC_STATUS_H
#define EP_RPC_RPC_STATUS_H

#include <stdint.h>

#include "base/error.h"
#include "common.pb-c.h"
#include "rpc/rpc_budget.h"

/* Room for a Status on the stack. status points into it and into error, which must outlive it. */
typedef struct ep_rpc_status_fields {
    Expertd__V1__Status status;
    Expertd__V1__Epoch epoch;
} ep_rpc_status_fields;

/* Message fields are char *, but packing only reads them. */
static inline char *ep_rpc_unconst(const char *text)
{
    return (char *)(uintptr_t)text;
}

/* error may be NULL: then only the code and its fixed sentence are filled in. */
void ep_rpc_status_fill(ep_err code, const ep_error *error, ep_rpc_status_fields *out_fields);

/* Reads a packed Status. Never fails: bytes that cannot be decoded give the frame's gRPC code. code
 * is never EP_OK when grpc_code is not 0. */
void ep_rpc_status_read(ep_buffer_pool *pool, uint32_t grpc_code, const uint8_t *data, size_t bytes,
                        ep_error *out_error);

#endif
