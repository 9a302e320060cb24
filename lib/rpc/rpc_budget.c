/* SPDX-License-Identifier: Apache-2.0 */
/* A bump arena over pool buffers with a hard limit, as a protobuf-c allocator. */
#include "rpc/rpc_budget.h"

#include <string.h>

#include "base/check.h"

#define ARENA_ALIGN 16
#define CHUNK_BYTES_MIN 4096
#define LINK_BYTES ARENA_ALIGN /* room for the pointer to the previous chunk */

static void *budget_alloc(void *arg, size_t bytes)
{
    ep_rpc_budget *budget = arg;
    if (bytes > budget->left_bytes || ep_align_up(bytes, ARENA_ALIGN) > budget->left_bytes) {
        budget->refused = EP_ERR_INVALID_ARGUMENT;
        return NULL;
    }
    size_t need = ep_align_up(bytes == 0 ? 1 : bytes, ARENA_ALIGN);
    if (need > budget->room_bytes) {
        size_t want = need + LINK_BYTES < CHUNK_BYTES_MIN ? CHUNK_BYTES_MIN : need + LINK_BYTES;
        ep_buffer *chunk;
        ep_err err = ep_buffer_acquire(budget->pool, want, &chunk);
        if (err != EP_OK) {
            budget->refused = err;
            return NULL;
        }
        memcpy(chunk->data, &budget->newest, sizeof(budget->newest));
        budget->newest = chunk;
        budget->at = chunk->data + LINK_BYTES;
        budget->room_bytes = chunk->capacity_bytes - LINK_BYTES;
    }
    void *at = budget->at;
    budget->at += need;
    budget->room_bytes -= need;
    budget->left_bytes -= need < budget->left_bytes ? need : budget->left_bytes;
    return at;
}

static void budget_free(void *arg, void *pointer)
{
    (void)arg;
    (void)pointer; /* freed all at once by fini */
}

void ep_rpc_budget_init(ep_rpc_budget *budget, ep_buffer_pool *pool, size_t bytes_max)
{
    *budget = (ep_rpc_budget){.pool = pool, .left_bytes = bytes_max, .bytes_max = bytes_max};
    budget->allocator =
        (ProtobufCAllocator){.alloc = budget_alloc, .free = budget_free, .allocator_data = budget};
}

void ep_rpc_budget_fini(ep_rpc_budget *budget)
{
    while (budget->newest != NULL) {
        ep_buffer *chunk = budget->newest;
        memcpy(&budget->newest, chunk->data, sizeof(budget->newest));
        ep_buffer_unref(chunk);
    }
    budget->room_bytes = 0;
}

ep_err ep_rpc_unpack(ep_rpc_budget *budget, const ProtobufCMessageDescriptor *type,
                     const uint8_t *data, size_t bytes, ProtobufCMessage **out_message,
                     ep_error *out_error)
{
    budget->refused = EP_OK;
    ProtobufCMessage *message = protobuf_c_message_unpack(type, &budget->allocator, bytes, data);
    if (message != NULL) {
        *out_message = message;
        return EP_OK;
    }
    switch (budget->refused) {
    case EP_OK:
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%zu header bytes are not a %s message", bytes, type->name);
    case EP_ERR_INVALID_ARGUMENT:
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "%s message of %zu bytes needs more memory to unpack than unpack_bytes_max %zu",
            type->name, bytes, budget->bytes_max);
    default:
        return ep_error_set(out_error, budget->refused,
                            "no memory to unpack a %s message of %zu bytes", type->name, bytes);
    }
}
