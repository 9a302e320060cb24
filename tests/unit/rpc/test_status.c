/* SPDX-License-Identifier: Apache-2.0 */
/* ep_error through message Status and back. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "rpc/rpc_status.h"

static ep_error through(uint32_t grpc_code, ep_err code, const ep_error *error)
{
    ep_buffer_pool *pool;
    ep_rpc_status_fields fields;
    uint8_t data[2048];
    ep_error out;
    cr_assert_eq(ep_buffer_pool_create(0, 0, &pool), EP_OK);
    ep_rpc_status_fill(code, error, &fields);
    size_t bytes = expertd__v1__status__pack(&fields.status, data);
    ep_rpc_status_read(pool, grpc_code, data, bytes, &out);
    ep_buffer_pool_destroy(pool);
    return out;
}

Test(rpc_status, every_code_keeps_its_reason)
{
    static const ep_err codes[] = {
#define CODE(name, wire, grpc, broke, other, text) EP_ERR_##name,
        EP_ERR_MAP(CODE)
#undef CODE
    };
    for (size_t i = 1; i < sizeof(codes) / sizeof(codes[0]); i++) {
        ep_error out = through(ep_err_grpc_code(codes[i]), codes[i], NULL);
        cr_assert_eq(out.code, codes[i], "%s became %s", ep_err_name(codes[i]),
                     ep_err_name(out.code));
        cr_assert_str_eq(out.text, ep_err_text(codes[i]));
        cr_assert(out.layer == -1 && out.expert == -1 && out.waited_us == -1 &&
                  out.retry_after_us == 0 && out.current_epoch == 0);
    }
}

Test(rpc_status, details_come_back)
{
    ep_error error;
    ep_error_set(&error, EP_ERR_STALE_EPOCH, "epoch 3 is old");
    error.layer = 0;
    error.expert = 511;
    error.waited_us = 1234567;
    error.retry_after_us = 1;
    error.current_epoch = 9;
    snprintf(error.node, sizeof(error.node), "node-7");
    ep_error out = through(9, error.code, &error);
    cr_assert(out.code == error.code && out.layer == 0 && out.expert == 511 &&
              out.waited_us == 1234567);
    cr_assert(out.retry_after_us == 1 && out.current_epoch == 9);
    cr_assert_str_eq(out.node, "node-7");
    cr_assert_str_eq(out.text, "epoch 3 is old");
}

Test(rpc_status, a_reason_that_contradicts_the_frame_or_is_unknown_gives_the_frames_code)
{
    cr_assert_eq(through(14, EP_OK, NULL).code, EP_ERR_UNAVAILABLE);
    cr_assert_eq(through(8, EP_ERR_NOT_OWNER, NULL).code, EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_eq(through(14, (ep_err)999, NULL).code, EP_ERR_UNAVAILABLE);
}

Test(rpc_status, junk_and_oversized_text_do_no_harm)
{
    ep_buffer_pool *pool;
    ep_error out;
    uint8_t junk[] = {0xff, 0xff, 0xff};
    uint8_t big[6000] = {0x12, 0xec, 0x2e}; /* text of 5,996 bytes */
    memset(big + 3, 'x', sizeof(big) - 3);
    cr_assert_eq(ep_buffer_pool_create(0, 0, &pool), EP_OK);
    ep_rpc_status_read(pool, 5, junk, sizeof(junk), &out);
    cr_assert_eq(out.code, EP_ERR_NOT_FOUND);
    ep_rpc_status_read(pool, 5, big, 3 + 0x176c, &out);
    cr_assert_eq(out.code, EP_ERR_NOT_FOUND);
    cr_assert_eq(strlen(out.text), sizeof(out.text) - 1);
    ep_buffer_pool_destroy(pool);
}
