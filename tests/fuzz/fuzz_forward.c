/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of token rows. An input is a flag byte, then either a seed (8 bytes: a random batch is planned, packed and must read back),
 * or the bytes of a hostile request: header length (2), ForwardRequest, tensor section. Whatever is accepted is read whole.
 */
#include <string.h>

#include "fuzz.h"
#include "proto_mutator.h"
#include "unit/moe/random_batch.h"
#include "wire/forward_codec.h"

#define NODES 4

static ep_buffer_pool *pool;
static const ep_layer_shape shapes[] = {
    {.layer = 1, .hidden = 8, .inner = 16, .experts = 8, .top_k = 2},
    {.layer = 3, .hidden = 1, .inner = 3, .experts = 1, .top_k = 1, .shared_experts = 1},
    {.layer = 0, .hidden = 64, .inner = 5, .experts = 256, .top_k = 8, .shared_experts = 2},
};

/* The header's shape is made to fit the section often enough that the slots are looked at. */
static size_t mutate(uint8_t *data, size_t bytes, size_t bytes_max, uint32_t random)
{
    if (bytes < 4 || random % 4 == 0) {
        return fuzz_mutate_bytes(data, bytes, bytes_max);
    }
    size_t header_bytes = (size_t)data[1] | (size_t)data[2] << 8;
    if (header_bytes > bytes - 3) {
        header_bytes = bytes - 3;
    }
    uint8_t header[4096];
    if (header_bytes > sizeof(header) / 2) {
        return fuzz_mutate_bytes(data, bytes, bytes_max);
    }
    memcpy(header, data + 3, header_bytes);
    size_t now = proto_mutate(&expertd__v1__forward_request__descriptor, header, header_bytes, sizeof(header), random);
    if (bytes - header_bytes + now > bytes_max) {
        return bytes;
    }
    memmove(data + 3 + now, data + 3 + header_bytes, bytes - 3 - header_bytes);
    memcpy(data + 3, header, now);
    data[1] = (uint8_t)now;
    data[2] = (uint8_t)(now >> 8);
    return bytes - header_bytes + now;
}

size_t (*const fuzz_mutate)(uint8_t *, size_t, size_t, uint32_t) = mutate;

void fuzz_start(void)
{
    FUZZ_CHECK(ep_buffer_pool_create(0, 1 << 20, &pool) == EP_OK);
}

size_t fuzz_seed(size_t index, uint8_t *out)
{
    static const ep_dtype types[] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8};
    size_t shape = index % 3, type = index / 3 % 4;
    bool on_input = index / 12 % 2 != 0;
    ep_forward_layout layout;
    if (index >= 48) {
        return 0;
    }
    if (index >= 24) { /* pack a random batch */
        out[0] = 0;
        memset(out + 1, (int)index, 8);
        return 9;
    }
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    header.rows = 3;
    header.slots = 4;
    header.hidden = shapes[shape].hidden;
    header.x_dtype = types[type];
    header.reply_dtype = EP_DTYPE_BF16;
    header.weight_on_input = on_input;
    FUZZ_CHECK(ep_forward_layout_make(3, 4, header.hidden, types[type], on_input, &layout));
    size_t count = expertd__v1__forward_request__get_packed_size(&header);
    out[0] = (uint8_t)(1 + shape);
    out[1] = (uint8_t)count;
    out[2] = 0;
    expertd__v1__forward_request__pack(&header, out + 3);
    memset(out + 3 + count, 0, layout.total_bytes);
    return 3 + count + layout.total_bytes;
}

static void pack_and_read(uint64_t seed)
{
    random_batch rb;
    ep_routing_plan plan;
    uint32_t offsets[64] = {0}, copies[64] = {0}, chosen[64] = {0};
    random_batch_init(&rb, seed);
    uint32_t spt = ep_batch_slots_per_token(&rb.batch, &rb.shape);
    ep_routing_layer layer = {.shape = rb.shape, .offsets = offsets, .copies = copies};
    for (uint32_t e = 0; e < rb.shape.experts + rb.shape.shared_experts && e < 64; e++) {
        chosen[e] = (uint32_t)(seed >> (e % 32)) % NODES;
    }
    uint64_t room[NODES];
    for (uint32_t n = 0; n < NODES; n++) {
        room[n] = (seed >> (8 * n)) & 1023;
    }
    ep_plan_cut cut = {.row_bytes = 100, .slot_bytes = 8, .reply_slot_bytes = 70, .room_bytes = room};
    ep_routing_plan_init(&plan);
    FUZZ_CHECK(ep_routing_plan_build(&plan, &rb.batch, &layer, NODES, chosen, &cut, 0, rb.batch.tokens, NULL, 0, NULL) == EP_OK);
    for (uint32_t n = 0; n < plan.chunks_count; n++) {
        Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
        ep_buffer *buffer;
        ep_forward_view view;
        ep_error error;
        FUZZ_CHECK(ep_forward_pack(&rb.batch, &plan, n, spt, pool, &header, &buffer) == EP_OK);
        FUZZ_CHECK(ep_forward_view_make(&header, buffer->data, buffer->bytes, &rb.shape, &view, &error) == EP_OK);
        for (uint32_t i = 0; i < view.slots; i++) {
            FUZZ_CHECK(view.wire_slots[i].expert == plan.slots[plan.chunks[n].slots_begin + i].expert);
        }
        ep_buffer_unref(buffer);
    }
    ep_routing_plan_fini(&plan);
    random_batch_fini(&rb);
}

static void read_hostile(const ep_layer_shape *shape, const uint8_t *data, size_t bytes)
{
    size_t header_bytes = (size_t)data[0] | (size_t)data[1] << 8;
    if (header_bytes > bytes - 2) {
        return;
    }
    Expertd__V1__ForwardRequest *header = expertd__v1__forward_request__unpack(NULL, header_bytes, data + 2);
    if (header == NULL) {
        return;
    }
    size_t tensor_bytes = bytes - 2 - header_bytes;
    ep_buffer *buffer;
    ep_forward_view view;
    ep_error error;
    FUZZ_CHECK(ep_buffer_acquire(pool, tensor_bytes + 1, &buffer) == EP_OK);
    memcpy(buffer->data, data + 2 + header_bytes, tensor_bytes);
    ep_err err = ep_forward_view_make(header, buffer->data, tensor_bytes, shape, &view, &error);
    if (err == EP_OK) {
        FUZZ_CHECK(view.x + view.rows * view.x_row_bytes <= buffer->data + tensor_bytes);
        fuzz_touch(view.x, view.rows * view.x_row_bytes);
        fuzz_touch(view.row_scales, view.row_scales != NULL ? view.rows * sizeof(float) : 0);
        fuzz_touch(view.slot_scales, view.slot_scales != NULL ? view.slots * sizeof(float) : 0);
        for (uint32_t i = 0; i < view.slots; i++) {
            FUZZ_CHECK(view.wire_slots[i].row < view.rows);
            FUZZ_CHECK(view.wire_slots[i].expert < shape->experts + shape->shared_experts);
        }
    } else {
        FUZZ_CHECK(error.text[0] != 0);
    }
    ep_buffer_unref(buffer);
    expertd__v1__forward_request__free_unpacked(header, NULL);
}

void fuzz_one(const uint8_t *data, size_t bytes)
{
    uint64_t seed;
    if (bytes < 9) {
        return;
    }
    if (data[0] % 4 == 0) {
        memcpy(&seed, data + 1, sizeof(seed));
        pack_and_read(seed);
        return;
    }
    read_hostile(&shapes[data[0] % 4 - 1], data + 1, bytes - 1);
}
