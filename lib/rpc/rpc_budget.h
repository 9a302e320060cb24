/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Unpacks a peer's protobuf header within a budget. protobuf-c allocates up to 76 times the bytes
 * that it is given. Here every allocation comes from an arena that refuses once bytes_max is spent,
 * so a crafted header fails early and cheaply.
 *
 * Ownership  messages live in the arena until ep_rpc_budget_fini; never call
 *            protobuf_c_message_free_unpacked on them. The budget must not be moved in memory
 *            between init and fini.
 * Threads    one thread at a time for a budget.
 */
#ifndef EP_RPC_RPC_BUDGET_H
#define EP_RPC_RPC_BUDGET_H

#include <protobuf-c/protobuf-c.h>

#include "base/buffer.h"
#include "base/error.h"

typedef struct ep_rpc_budget {
    ep_buffer_pool *pool;
    /* private */
    ProtobufCAllocator allocator;
    ep_buffer *newest; /* chunks, linked by the pointer at the start of their data */
    uint8_t *at;
    size_t room_bytes; /* left in the newest chunk */
    size_t left_bytes; /* left of bytes_max */
    size_t bytes_max;
    ep_err refused; /* why an allocation was refused; EP_OK when none was */
} ep_rpc_budget;

/* Allocates nothing. */
void ep_rpc_budget_init(ep_rpc_budget *budget, ep_buffer_pool *pool, size_t bytes_max);
void ep_rpc_budget_fini(ep_rpc_budget *budget);

/* Errors: INVALID_ARGUMENT (cannot be decoded, or above the budget), RESOURCE_EXHAUSTED or
 * NO_MEMORY (the pool). */
ep_err ep_rpc_unpack(ep_rpc_budget *budget, const ProtobufCMessageDescriptor *type,
                     const uint8_t *data, size_t bytes, ProtobufCMessage **out_message,
                     ep_error *out_error);

#endif
