/* SPDX-License-Identifier: Apache-2.0 */
/* Frames as they leave, and the checks on payloads that arrive. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "expert.pb-c.h"
#include "rpc/rpc_frame_io.h"
#include "support/expect.h"

static ep_buffer_pool *new_pool(void)
{
    ep_buffer_pool *pool;
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
    return pool;
}

/* The gather list as the receiver gets it. */
static uint8_t *gather(const ep_rpc_out *out)
{
    uint8_t *bytes = aligned_alloc(EP_FRAME_ALIGN, ep_align_up(out->frame_bytes, EP_FRAME_ALIGN));
    size_t at = 0;
    for (uint32_t i = 0; i < out->send.parts_count; i++) {
        memcpy(bytes + at, out->send.parts[i].data, out->send.parts[i].bytes);
        at += out->send.parts[i].bytes;
    }
    cr_assert_eq(at, out->frame_bytes);
    return bytes;
}

static ep_rpc_out *request(ep_buffer_pool *pool, size_t tensor_bytes,
                           const ep_rpc_metadata *metadata, size_t count)
{
    Expertd__V1__ForwardRequest message = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_buffer *tensors = NULL;
    ep_rpc_out *out;
    message.model = (char *)(uintptr_t) "m";
    message.rows = 12;
    if (tensor_bytes > 0) {
        cr_assert_eq(ep_buffer_acquire(pool, tensor_bytes, &tensors), EP_OK);
        memset(tensors->data, 0xab, tensor_bytes);
    }
    size_t want = ep_rpc_request_header_bytes(metadata, count, &message.base);
    cr_assert_eq(
        ep_rpc_out_create_request(pool, want, metadata, count, &message.base, tensors, &out),
        EP_OK);
    cr_assert_eq(out->frame.header_bytes, want);
    out->frame.kind = EP_FRAME_REQUEST;
    out->frame.method_id = 0x0101;
    return out;
}

Test(rpc_frame_io, a_request_is_read_back_with_its_metadata)
{
    ep_buffer_pool *pool = new_pool();
    char *value = calloc(1, 301);
    memset(value, 'v', 300); /* a length of two varint bytes */
    ep_rpc_metadata metadata[] = {{"a", "1"}, {"", ""}, {"long", value}};
    for (size_t count = 0; count <= 3; count++) {
        ep_rpc_out *out = request(pool, 100, metadata, count);
        ep_rpc_out_seal(out, true);
        uint8_t *bytes = gather(out);
        ep_frame frame;
        size_t frame_bytes;
        ep_error error;
        Expertd__V1__CallHeader *header;
        ProtobufCMessage *message;
        ep_rpc_budget budget;
        ASSERT_OK(ep_frame_decode(bytes, 1 << 20, 1 << 16, &frame, &frame_bytes, &error), error);
        cr_assert_eq(frame_bytes, out->frame_bytes);
        ASSERT_OK(ep_rpc_payload_check(&frame, bytes, true, &error), error);
        ep_rpc_budget_init(&budget, pool, 1 << 16);
        ASSERT_OK(ep_rpc_request_unpack(&budget, &expertd__v1__forward_request__descriptor,
                                        bytes + 64, frame.header_bytes, &header, &message, &error),
                  error);
        cr_assert_eq(header->n_metadata, count);
        for (size_t i = 0; i < count; i++) {
            cr_assert_str_eq(header->metadata[i]->key, metadata[i].key);
            cr_assert_str_eq(header->metadata[i]->value, metadata[i].value);
        }
        cr_assert_eq(((Expertd__V1__ForwardRequest *)message)->rows, 12);
        cr_assert_eq(bytes[frame.tensor_offset + 99], 0xab);
        ep_rpc_budget_fini(&budget);
        ep_rpc_out_destroy(out);
        free(bytes);
    }
    free(value);
    ep_buffer_pool_stats stats;
    ep_buffer_pool_read_stats(pool, &stats);
    cr_assert_eq(stats.lent_bytes, 0);
    ep_buffer_pool_destroy(pool);
}

Test(rpc_frame_io, every_damaged_payload_byte_is_found)
{
    ep_buffer_pool *pool = new_pool();
    ep_rpc_out *out = request(pool, 77, NULL, 0);
    ep_rpc_out_seal(out, true);
    uint8_t *bytes = gather(out);
    ep_frame frame;
    cr_assert_eq(ep_frame_decode(bytes, 1 << 20, 1 << 16, &frame, NULL, NULL), EP_OK);
    for (size_t i = 64; i < out->frame_bytes; i++) {
        bytes[i] ^= 0x10;
        cr_assert_eq(ep_rpc_payload_check(&frame, bytes, true, NULL), EP_ERR_DATA_LOSS);
        bytes[i] ^= 0x10;
    }
    cr_assert_eq(ep_rpc_payload_check(&frame, bytes, true, NULL), EP_OK);
    cr_assert_eq(ep_rpc_payload_check(&frame, bytes, false, NULL), EP_ERR_PROTOCOL); /* a CRC though
                                                                                        it is off */
    ep_rpc_out_seal(out, false);
    cr_assert_eq(out->frame.payload_crc, 0);
    frame.payload_crc = 0;
    cr_assert_eq(ep_rpc_payload_check(&frame, bytes, false, NULL), EP_OK);
    bytes[frame.tensor_offset - 1] = 1;
    cr_assert_eq(ep_rpc_payload_check(&frame, bytes, false, NULL), EP_ERR_PROTOCOL);
    ep_rpc_out_destroy(out);
    free(bytes);
    ep_buffer_pool_destroy(pool);
}

Test(rpc_frame_io, header_sections_that_lie_about_their_length_are_refused)
{
    ep_buffer_pool *pool = new_pool();
    ep_error error;
    uint8_t section[8] = {0};
    ep_rpc_budget budget;
    Expertd__V1__CallHeader *header;
    ProtobufCMessage *message;
    ep_rpc_budget_init(&budget, pool, 1 << 16);
    for (size_t bytes = 0; bytes < 4; bytes++) {
        cr_assert_eq(ep_rpc_request_unpack(&budget, &expertd__v1__empty__descriptor, section, bytes,
                                           &header, &message, &error),
                     EP_ERR_INVALID_ARGUMENT);
    }
    cr_assert_eq(ep_rpc_request_unpack(&budget, &expertd__v1__empty__descriptor, section, 4,
                                       &header, &message, &error),
                 EP_OK);
    section[0] = 1;
    cr_assert_eq(ep_rpc_request_unpack(&budget, &expertd__v1__empty__descriptor, section, 4,
                                       &header, &message, &error),
                 EP_ERR_INVALID_ARGUMENT);
    memset(section, 0xff, 4);
    cr_assert_eq(ep_rpc_request_unpack(&budget, &expertd__v1__empty__descriptor, section, 8,
                                       &header, &message, &error),
                 EP_ERR_INVALID_ARGUMENT);
    ep_rpc_budget_fini(&budget);
    ep_buffer_pool_destroy(pool);
}

Test(rpc_frame_io, a_small_frame_is_one_buffer)
{
    ep_buffer_pool *pool = new_pool();
    ep_buffer_pool_stats stats;
    ep_rpc_out *out = request(pool, 0, NULL, 0);
    ep_buffer_pool_read_stats(pool, &stats);
    cr_assert_eq(stats.acquires, 1);
    cr_assert_eq(out->memory_bytes, 4096);
    ep_rpc_out_destroy(out);
    ep_buffer_pool_destroy(pool);
}
