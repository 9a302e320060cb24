/* SPDX-License-Identifier: Apache-2.0 */
/* Unpacking within a budget. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator.pb-c.h"
#include "rpc/rpc_budget.h"
#include "support/expect.h"

#define MIB ((size_t)1 << 20)

static ep_err unpack(ep_buffer_pool *pool, size_t budget_bytes,
                     const ProtobufCMessageDescriptor *type, const uint8_t *data, size_t bytes,
                     ep_error *error)
{
    ep_rpc_budget budget;
    ProtobufCMessage *message = NULL;
    ep_rpc_budget_init(&budget, pool, budget_bytes);
    ep_err err = ep_rpc_unpack(&budget, type, data, bytes, &message, error);
    cr_assert_eq(err == EP_OK, message != NULL);
    ep_rpc_budget_fini(&budget);
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(pool, &stats);
    cr_assert_eq(stats.lent_bytes, 0);
    return err;
}

Test(rpc_budget, a_message_of_every_size_comes_back_equal)
{
    ep_buffer_pool *pool;
    cr_assert_eq(ep_buffer_pool_create(0, MIB, &pool), EP_OK);
    for (size_t n = 0; n < 3000; n = n * 2 + 1) {
        Expertd__V1__NodeAssignment in = EXPERTD__V1__NODE_ASSIGNMENT__INIT;
        in.model = (char *)(uintptr_t) "a model";
        in.layer = 7;
        in.n_experts = n;
        in.experts = calloc(n + 1, sizeof(uint32_t));
        for (size_t i = 0; i < n; i++) {
            in.experts[i] = (uint32_t)(i * 2654435761u);
        }
        size_t bytes = expertd__v1__node_assignment__get_packed_size(&in);
        uint8_t *data = malloc(bytes);
        expertd__v1__node_assignment__pack(&in, data);
        ep_rpc_budget budget;
        ProtobufCMessage *message;
        ep_rpc_budget_init(&budget, pool, MIB);
        cr_assert_eq(ep_rpc_unpack(&budget, &expertd__v1__node_assignment__descriptor, data, bytes,
                                   &message, NULL),
                     EP_OK);
        const Expertd__V1__NodeAssignment *out = (const Expertd__V1__NodeAssignment *)message;
        cr_assert_str_eq(out->model, "a model");
        cr_assert(out->layer == 7 && out->n_experts == n);
        cr_assert(n == 0 || memcmp(out->experts, in.experts, n * sizeof(uint32_t)) == 0);
        ep_rpc_budget_fini(&budget);
        free(data);
        free(in.experts);
    }
    ep_buffer_pool_destroy(pool);
}

Test(rpc_budget, a_crafted_mebibyte_is_refused_within_its_budget)
{
    ep_buffer_pool *pool;
    ep_error error;
    ep_buffer_pool_stats stats;
    uint8_t *bomb = calloc(1, MIB);
    cr_assert_eq(ep_buffer_pool_create(0, 0, &pool), EP_OK);
    for (size_t i = 0; i < MIB; i += 2) {
        bomb[i] = 0x1a; /* field 3 of PlacementSnapshot: an empty NodeEntry, 80 bytes unpacked for 2
                           on the wire */
    }
    ASSERT_FAILS(unpack(pool, MIB, &expertd__v1__placement_snapshot__descriptor, bomb, MIB, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "unpack_bytes_max 1048576");
    ep_buffer_pool_read_stats(pool, &stats);
    cr_assert_leq(stats.lent_bytes_peak, 3 * MIB); /* the pool rounds up to powers of two */
    free(bomb);
    ep_buffer_pool_destroy(pool);
}

Test(rpc_budget, broken_and_cut_messages_are_refused)
{
    ep_buffer_pool *pool;
    ep_error error;
    Expertd__V1__Hello hello = EXPERTD__V1__HELLO__INIT;
    uint8_t data[256];
    cr_assert_eq(ep_buffer_pool_create(0, MIB, &pool), EP_OK);
    hello.token = (char *)(uintptr_t) "0123456789";
    size_t bytes = expertd__v1__hello__pack(&hello, data);
    cr_assert_eq(unpack(pool, MIB, &expertd__v1__hello__descriptor, data, bytes, &error), EP_OK);
    ASSERT_FAILS(unpack(pool, MIB, &expertd__v1__hello__descriptor, data, bytes - 1, &error),
                 EP_ERR_INVALID_ARGUMENT, error, "expertd.v1.Hello");
    ep_buffer_pool_destroy(pool);
}

Test(rpc_budget, a_full_pool_is_told_from_a_bad_message)
{
    ep_buffer_pool *pool;
    ep_error error;
    uint8_t data[] = {0x08, 1};
    cr_assert_eq(ep_buffer_pool_create(1, 0, &pool), EP_OK); /* may lend nothing */
    cr_assert_eq(unpack(pool, MIB, &expertd__v1__hello__descriptor, data, sizeof(data), &error),
                 EP_ERR_RESOURCE_EXHAUSTED);
    ep_buffer_pool_destroy(pool);
}
