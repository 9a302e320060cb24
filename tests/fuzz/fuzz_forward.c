/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of token rows, in every form of both ways. An input is a flag byte, then either a seed
 * (8 bytes: a random batch is planned, packed and must read back), or the bytes of a hostile
 * request: header length (2), ForwardRequest, tensor section. Whatever is accepted is read whole.
 */
#include <stdlib.h>
#include <string.h>

#include "expertd/slot_groups.h"
#include "fuzz.h"
#include "moe/node_sum.h"
#include "proto_mutator.h"
#include "unit/moe/random_batch.h"
#include "wire/forward_codec.h"
#include "support/plan_whole.h"

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
    size_t now = proto_mutate(&expertd__v1__forward_request__descriptor, header, header_bytes,
                              sizeof(header), random);
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

enum { TYPES = 5, FORMS = 6, HOSTILE_SEEDS = 3 * TYPES * FORMS, PACK_SEEDS = 48 };

size_t fuzz_seed(size_t index, uint8_t *out)
{
    static const ep_dtype types[TYPES] = {EP_DTYPE_BF16, EP_DTYPE_F16, EP_DTYPE_F32, EP_DTYPE_I8,
                                          EP_DTYPE_F8E4M3};
    size_t shape = index % 3, type = index / 3 % TYPES, form = index / 3 / TYPES % FORMS;
    ep_forward_layout layout;
    if (index >= HOSTILE_SEEDS + PACK_SEEDS) {
        return 0;
    }
    if (index >= HOSTILE_SEEDS) { /* pack a random batch */
        out[0] = 0;
        memset(out + 1, (int)(index * 5), 8);
        return 9;
    }
    Expertd__V1__RelayPart relay = EXPERTD__V1__RELAY_PART__INIT;
    Expertd__V1__RelayPart *relays[] = {&relay};
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    header.rows = 3;
    header.slots = 4;
    header.hidden = shapes[shape].hidden;
    header.x_dtype = types[type];
    header.reply_dtype = EP_DTYPE_BF16;
    header.weight_on_input = form == 1;
    header.node_sum = form == 2 || form == 4;
    header.reply_quant = form == 3 || form == 4 ? EP_COMBINE_INT8 : EP_COMBINE_PLAIN;
    header.step_group = form == 4 ? 7 : 0;
    header.step_group_size = form == 4 ? 2 : 0;
    header.n_relay = form == 5;
    header.relay = relays;
    FUZZ_CHECK(ep_forward_layout_make(3, 4, header.hidden, types[type],
                                      form == 1 || header.node_sum, &layout));
    FUZZ_CHECK(!header.node_sum || ep_forward_layout_add_places(&layout, 4));
    size_t count = expertd__v1__forward_request__get_packed_size(&header);
    out[0] = (uint8_t)(1 + shape);
    out[1] = (uint8_t)count;
    out[2] = 0;
    expertd__v1__forward_request__pack(&header, out + 3);
    memset(out + 3 + count, 0, layout.total_bytes);
    return 3 + count + layout.total_bytes;
}

/* Gives the batch one of the other forms. */
static void choose_form(random_batch *rb)
{
    ep_batch *batch = &rb->batch;
    const uint32_t form = random_below(&rb->state, 16);
    batch->node_sum = form % 2 != 0 && batch->weight_on == EP_WEIGHT_ON_OUTPUT &&
                      batch->form != EP_RESULT_UNCOMBINED;
    batch->combine_quant = form / 2 % 2 != 0 ? EP_COMBINE_INT8 : EP_COMBINE_PLAIN;
    if (batch->x.dtype == EP_DTYPE_I8 || form < 4) {
        return;
    }
    batch->dispatch_quant = form < 8 ? EP_DISPATCH_FP8 : EP_DISPATCH_INT8;
    if (form >= 12) {
        size_t count = (size_t)(rb->shape.shared_experts + rb->shape.experts) * batch->hidden;
        float *smooth = random_batch_alloc(rb, count * sizeof(*smooth));
        for (size_t i = 0; i < count; i++) {
            smooth[i] = random_float(&rb->state);
        }
        batch->smooth = (ep_rows){smooth, (int64_t)(batch->hidden * sizeof(*smooth)), EP_DTYPE_F32};
        batch->smooth_first = rb->shape.shared_experts;
    }
}

static void pack_and_read(uint64_t seed)
{
    random_batch rb;
    ep_routing_plan plan;
    uint32_t offsets[64] = {0}, copies[64] = {0}, chosen[64] = {0};
    random_batch_init(&rb, seed);
    choose_form(&rb);
    uint32_t spt = ep_batch_slots_per_token(&rb.batch, &rb.shape);
    ep_routing_layer layer = {.shape = rb.shape, .offsets = offsets, .copies = copies};
    for (uint32_t e = 0; e < rb.shape.experts + rb.shape.shared_experts && e < 64; e++) {
        chosen[e] = (uint32_t)(seed >> (e % 32)) % NODES;
    }
    uint64_t room[NODES];
    for (uint32_t n = 0; n < NODES; n++) {
        room[n] = (seed >> (8 * n)) & 1023;
    }
    ep_plan_cut cut = {
        .row_bytes = 100, .slot_bytes = 8, .reply_slot_bytes = 70, .room_bytes = room};
    ep_routing_plan_init(&plan);
    FUZZ_CHECK(plan_whole(&plan, &rb.batch, &layer, NODES, chosen, &cut, 0, rb.batch.tokens, NULL,
                          0, NULL) == EP_OK);
    for (uint32_t n = 0; n < plan.chunks_count; n++) {
        Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
        ep_buffer *buffer;
        ep_forward_view view;
        ep_error error;
        FUZZ_CHECK(ep_forward_pack(&rb.batch, &plan, n, spt, pool, &header, &buffer) == EP_OK);
        FUZZ_CHECK(ep_forward_view_make(&header, buffer->data, buffer->bytes, &rb.shape, &view,
                                        &error) == EP_OK);
        for (uint32_t i = 0; i < view.slots; i++) {
            FUZZ_CHECK(view.wire_slots[i].expert ==
                       plan.slots[plan.chunks[n].slots_begin + i].expert);
        }
        ep_buffer_unref(buffer);
    }
    ep_routing_plan_fini(&plan);
    random_batch_fini(&rb);
}

/* What a node does with an accepted request, but for the rows themselves. */
static void use_view(const ep_forward_view *view, uint32_t experts)
{
    ep_slot_shape shape;
    ep_reply_layout reply;
    uint32_t *numbers = malloc(((size_t)view->slots + experts + view->rows + 2) * sizeof(*numbers));
    FUZZ_CHECK(numbers != NULL);
    ep_slot_shape_of(view->wire_slots, view->slots, experts, 2, &shape);
    ep_slot_order(view->wire_slots, view->slots, experts, numbers + view->slots, numbers);
    uint32_t groups = 0, works = 0, run = 0;
    for (uint32_t i = 0; i < view->slots; i++) {
        bool is_new = i == 0 || view->wire_slots[numbers[i]].expert !=
                                    view->wire_slots[numbers[i - 1]].expert;
        run = is_new || run == 2 ? 1 : run + 1;
        groups += is_new;
        works += run == 1;
    }
    FUZZ_CHECK(groups <= shape.experts_max && works <= shape.works_max);
    ep_reply_layout_make(view->node_sum ? view->rows : view->slots, view->hidden, view->reply_dtype,
                         view->reply_quant, &reply);
    FUZZ_CHECK(reply.total_bytes >= (view->node_sum ? view->rows : view->slots) * reply.row_bytes);
    if (view->node_sum) {
        const ep_node_sum_slots slots = {.rows_count = view->rows,
                                         .slots_count = view->slots,
                                         .slot_rows = &view->wire_slots->row,
                                         .slot_stride = 2,
                                         .places = view->slot_places,
                                         .scales = view->slot_scales};
        ep_node_sum_order(&slots, numbers + view->slots, numbers);
        FUZZ_CHECK(numbers[view->slots] == 0 && numbers[view->slots + view->rows] == view->slots);
        for (uint32_t i = 0; i < view->slots; i++) {
            FUZZ_CHECK(numbers[i] < view->slots);
        }
    }
    free(numbers);
}

static void read_hostile(const ep_layer_shape *shape, const uint8_t *data, size_t bytes)
{
    size_t header_bytes = (size_t)data[0] | (size_t)data[1] << 8;
    if (header_bytes > bytes - 2) {
        return;
    }
    Expertd__V1__ForwardRequest *header =
        expertd__v1__forward_request__unpack(NULL, header_bytes, data + 2);
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
        fuzz_touch(view.row_scales, view.row_scales != NULL
                                        ? (size_t)view.rows * view.row_scales_count * sizeof(float)
                                        : 0);
        fuzz_touch(view.slot_scales, view.slot_scales != NULL ? view.slots * sizeof(float) : 0);
        fuzz_touch(view.slot_places, view.slot_places != NULL ? view.slots * sizeof(uint16_t) : 0);
        for (uint32_t i = 0; i < view.slots; i++) {
            FUZZ_CHECK(view.wire_slots[i].row < view.rows);
            FUZZ_CHECK(view.wire_slots[i].expert < shape->experts + shape->shared_experts);
        }
        use_view(&view, shape->experts + shape->shared_experts);
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
