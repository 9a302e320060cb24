/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every message of every method, with the budget that the services use. First byte: which message
 * (all inputs, then all outputs, then Hello, CallHeader, Status). What is accepted, packed again
 * and unpacked, packs to the same bytes. Unknown fields are dropped first: protobuf-c keeps some
 * that it cannot read again.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "proto_mutator.h"
#include "rpc/rpc.h"
#include "rpc/rpc_budget.h"

#define EXTRA 3
#define BUDGET_BYTES ((size_t)1 << 20)

static ep_buffer_pool *pool;

static size_t types_count(void)
{
    size_t rows;
    ep_rpc_methods(&rows);
    return 2 * rows + EXTRA;
}

static const ProtobufCMessageDescriptor *type_of(uint8_t byte)
{
    size_t rows;
    const ep_rpc_method *methods = ep_rpc_methods(&rows);
    size_t index = byte % types_count();
    if (index < rows) {
        return methods[index].method->input;
    }
    if (index < 2 * rows) {
        return methods[index - rows].method->output;
    }
    const ProtobufCMessageDescriptor *const extra[EXTRA] = {&expertd__v1__hello__descriptor,
                                                            &expertd__v1__call_header__descriptor,
                                                            &expertd__v1__status__descriptor};
    return extra[index - 2 * rows];
}

static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    if (bytes == 0 || random % 16 == 0) {
        data[0] = (uint8_t)(random >> 4);
        return bytes + (bytes == 0);
    }
    return 1 + proto_mutate(type_of(data[0]), data + 1, bytes - 1, bytes_max - 1, random >> 4);
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

void fuzz_start(void)
{
    FUZZ_CHECK(ep_buffer_pool_create(0, 1 << 20, &pool) == EP_OK);
}

size_t fuzz_seed(size_t index, uint8_t *out)
{
    if (index >= types_count() * 4) {
        return 0;
    }
    size_t bytes = 1;
    out[0] = (uint8_t)(index / 4);
    for (uint32_t i = 0; i < 4; i++) {
        bytes = 1 + proto_mutate(type_of(out[0]), out + 1, bytes - 1, 4096,
                                 (uint32_t)(index * 7919 + i * 104729 + 1));
    }
    return bytes;
}

/* Not kept on the message, and not freed here: the budget owns them. */
static void drop_unknown(ProtobufCMessage *message)
{
    message->n_unknown_fields = 0;
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        if (field->type != PROTOBUF_C_TYPE_MESSAGE) {
            continue;
        }
        char *at = (char *)message + field->offset;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t count = *(size_t *)(void *)((char *)message + field->quantifier_offset);
            ProtobufCMessage **items = *(ProtobufCMessage ***)(void *)at;
            for (size_t k = 0; k < count; k++) {
                drop_unknown(items[k]);
            }
        } else if (*(ProtobufCMessage **)(void *)at != NULL) {
            drop_unknown(*(ProtobufCMessage **)(void *)at);
        }
    }
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    ep_rpc_budget budget, second;
    ProtobufCMessage *message, *again;
    ep_error error;
    if (bytes == 0) {
        return;
    }
    const ProtobufCMessageDescriptor *type = type_of(data[0]);
    ep_rpc_budget_init(&budget, pool, BUDGET_BYTES);
    ep_rpc_budget_init(&second, pool, BUDGET_BYTES * 4);
    if (ep_rpc_unpack(&budget, type, data + 1, bytes - 1, &message, &error) == EP_OK) {
        drop_unknown(message);
        size_t packed_bytes = protobuf_c_message_get_packed_size(message);
        uint8_t *packed = malloc(packed_bytes + 1), *packed_again = malloc(packed_bytes + 1);
        FUZZ_CHECK(packed != NULL && packed_again != NULL);
        FUZZ_CHECK(protobuf_c_message_pack(message, packed) == packed_bytes);
        FUZZ_CHECK(ep_rpc_unpack(&second, type, packed, packed_bytes, &again, &error) == EP_OK);
        FUZZ_CHECK(protobuf_c_message_get_packed_size(again) == packed_bytes);
        protobuf_c_message_pack(again, packed_again);
        FUZZ_CHECK(memcmp(packed, packed_again, packed_bytes) == 0);
        free(packed);
        free(packed_again);
    } else {
        FUZZ_CHECK(error.text[0] != 0);
    }
    ep_rpc_budget_fini(&budget);
    ep_rpc_budget_fini(&second);
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(pool, &stats);
    FUZZ_CHECK(stats.lent_bytes == 0);
}
