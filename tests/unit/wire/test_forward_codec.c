/* SPDX-License-Identifier: Apache-2.0 */
/* Requests packed from random batches read back as what was planned; damaged ones are refused or
 * harmless. */
#include "wire/forward_codec.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe/convert.h"
#include "unit/moe/random_batch.h"
#include "support/plan_whole.h"

#define NODES 4

typedef struct {
    random_batch rb;
    ep_routing_layer layer;
    uint32_t offsets[32];
    uint32_t copies[32];
    uint32_t chosen[32];
    ep_routing_plan plan;
    uint32_t spt;
} planned;

static void plan(planned *p, uint32_t nodes, uint64_t room)
{
    const uint64_t rooms[NODES] = {room, room * 2, room / 2, room};
    ep_plan_cut cut = {.row_bytes = 1, .slot_bytes = 1, .reply_slot_bytes = 1, .room_bytes = rooms};
    cr_assert_eq(plan_whole(&p->plan, &p->rb.batch, &p->layer, nodes, p->chosen, &cut, 0,
                            p->rb.batch.tokens, NULL, 0, NULL),
                 EP_OK);
}

static void planned_init(planned *p, uint64_t seed)
{
    memset(p, 0, sizeof(*p));
    random_batch_init(&p->rb, seed);
    p->rb.batch.node_sum = seed % 2 == 0 && p->rb.batch.weight_on == EP_WEIGHT_ON_OUTPUT &&
                           p->rb.batch.form != EP_RESULT_UNCOMBINED;
    uint32_t experts = p->rb.shape.experts + p->rb.shape.shared_experts;
    p->layer = (ep_routing_layer){.shape = p->rb.shape, .offsets = p->offsets, .copies = p->copies};
    for (uint32_t e = 0; e < experts; e++) {
        p->chosen[e] = random_below(&p->rb.state, NODES);
    }
    p->spt = ep_batch_slots_per_token(&p->rb.batch, &p->rb.shape);
    ep_routing_plan_init(&p->plan);
    plan(p, NODES, UINT32_MAX);
}

static void planned_fini(planned *p)
{
    ep_routing_plan_fini(&p->plan);
    random_batch_fini(&p->rb);
}

static void check_view(const planned *p, const ep_plan_chunk *chunk, const ep_forward_view *view)
{
    const ep_batch *b = &p->rb.batch;
    const ep_plan_slot *slots = p->plan.slots + chunk->slots_begin;
    uint8_t sent[64 * 4];
    float sent_scale;
    uint32_t highest = 0;
    for (uint32_t i = 0; i < view->slots; i++) {
        const ep_plan_slot *slot = &slots[i];
        uint32_t token = slot->slot_number / p->spt;
        uint32_t k = slot->slot_number % p->spt;
        uint32_t row = view->wire_slots[i].row;
        cr_assert_eq(view->wire_slots[i].expert, slot->expert);
        cr_assert_lt(row, view->rows);
        ep_batch_send_row(b, token, k, slot->expert, sent, &sent_scale);
        cr_assert_eq(memcmp(view->x + row * view->x_row_bytes, sent, view->x_row_bytes), 0);
        if (view->row_scales != NULL) {
            cr_assert_eq(memcmp(&view->row_scales[row], &b->x_scales[token], 4), 0);
        }
        if (view->slot_scales != NULL) {
            float scale = k < b->top_k ? ep_batch_scale(b, token, k) : 1.0f;
            cr_assert_eq(memcmp(&view->slot_scales[i], &scale, 4), 0);
        }
        cr_assert(!b->node_sum || view->slot_places[i] == k);
        highest = row > highest ? row : highest;
        for (uint32_t j = 0; j < i; j++) { /* same token, same row; rows in order of token */
            uint32_t other = slots[j].slot_number / p->spt;
            cr_assert_eq(other == token, view->wire_slots[j].row == row);
            cr_assert_eq(other < token, view->wire_slots[j].row < row);
        }
    }
    cr_assert_eq(highest + 1, view->rows, "a row that nobody uses travelled");
}

static void check_chunk(const planned *p, uint32_t n, ep_buffer_pool *pool)
{
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    const ep_batch *b = &p->rb.batch;
    ep_buffer *buffer;
    ep_forward_view view;
    ep_error error = {0};
    cr_assert_eq(ep_forward_pack(b, &p->plan, n, p->spt, pool, &header, &buffer), EP_OK);
    cr_assert_eq(
        ep_forward_view_make(&header, buffer->data, buffer->bytes, &p->rb.shape, &view, &error),
        EP_OK, "%s", error.text);
    cr_assert_eq(view.slots, p->plan.chunks[n].slots_count);
    cr_assert_eq(view.hidden, b->hidden);
    cr_assert_eq(view.x_dtype, b->x.dtype);
    cr_assert_eq(view.reply_dtype, b->wire_dtype);
    cr_assert_eq(view.weight_on_input, b->weight_on == EP_WEIGHT_ON_INPUT);
    cr_assert_eq(view.row_scales != NULL, b->x.dtype == EP_DTYPE_I8);
    cr_assert_eq(view.node_sum, b->node_sum);
    cr_assert_eq(view.slot_scales != NULL, view.weight_on_input || b->node_sum);
    cr_assert_eq(view.slot_places != NULL, b->node_sum);
    check_view(p, &p->plan.chunks[n], &view);
    ep_buffer_unref(buffer);
}

Test(forward_codec, what_was_planned_is_what_arrives)
{
    ep_buffer_pool *pool;
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
    unsigned chunks = 0;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        planned p;
        planned_init(&p, seed);
        for (int round = 0; round < 2; round++) { /* a chunk for each node, then small ones */
            for (uint32_t n = 0; n < p.plan.chunks_count; n++, chunks++) {
                check_chunk(&p, n, pool);
            }
            plan(&p, NODES, 1 + random_below(&p.rb.state, 20));
        }
        planned_fini(&p);
    }
    cr_assert_gt(chunks, 8000u);
    ep_buffer_pool_destroy(pool);
}

Test(forward_codec, chunks_of_one_node_number_their_own_rows)
{
    enum { TOKENS = 1000 };
    static uint16_t x[TOKENS];
    static int32_t ids[TOKENS * 2];
    static float scales[TOKENS * 2];
    for (int t = 0; t < TOKENS; t++) {
        x[t] = (uint16_t)t;
        ids[2 * t] = t % 3 == 0 ? 1 : -1;
        ids[2 * t + 1] = 0;
    }
    planned p = {.rb.shape = {.hidden = 1, .inner = 1, .experts = 2, .top_k = 2}};
    p.rb.batch = (ep_batch){.tokens = TOKENS,
                            .top_k = 2,
                            .hidden = 1,
                            .x = {x, 2, EP_DTYPE_BF16},
                            .ids = {ids, 8, EP_DTYPE_I32},
                            .scales = {scales, 8, EP_DTYPE_F32},
                            .shared_source = EP_SHARED_NONE,
                            .wire_dtype = EP_DTYPE_BF16,
                            .out_dtype = EP_DTYPE_BF16};
    p.layer.shape = p.rb.shape;
    p.spt = 2;
    ep_routing_plan_init(&p.plan);
    plan(&p, 1, 300);
    cr_assert_eq(p.plan.slots_count, 1334);
    cr_assert_eq(p.plan.rows_count, TOKENS, "no row travels twice");
    cr_assert_gt(p.plan.chunks_count, 5u);
    ep_buffer_pool *pool;
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
    for (uint32_t n = 0; n < p.plan.chunks_count; n++) {
        check_chunk(&p, n, pool);
    }
    ep_buffer_pool_destroy(pool);
    ep_routing_plan_fini(&p.plan);
}

Test(forward_codec, large_chunks_are_streamed_with_the_same_bytes)
{
    enum { TOKENS = 200, HIDDEN = 2048 };
    static uint16_t x[TOKENS * HIDDEN];
    static int32_t ids[TOKENS];
    static float scales[TOKENS];
    uint64_t state = 1;
    for (size_t i = 0; i < TOKENS * HIDDEN; i++) {
        /* Inf among them */
        x[i] = (uint16_t)(random_below(&state, 16) == 0 ? 0x7f80 : random_below(&state, 0x7f80));
    }
    for (int policy = EP_NAN_PASS; policy <= EP_NAN_MEAN; policy++) { /* two of them change rows */
        planned p = {.rb.shape = {.hidden = HIDDEN, .inner = 1, .experts = 1, .top_k = 1}};
        p.rb.batch = (ep_batch){.tokens = TOKENS,
                                .top_k = 1,
                                .hidden = HIDDEN,
                                .x = {x, HIDDEN * 2, EP_DTYPE_BF16},
                                .ids = {ids, 4, EP_DTYPE_I32},
                                .scales = {scales, 4, EP_DTYPE_F32},
                                .nan_policy = (ep_nan_policy)policy,
                                .shared_source = EP_SHARED_NONE,
                                .wire_dtype = EP_DTYPE_BF16,
                                .out_dtype = EP_DTYPE_BF16};
        p.layer.shape = p.rb.shape;
        p.spt = 1;
        ep_routing_plan_init(&p.plan);
        plan(&p, 1, UINT32_MAX);
        ep_buffer_pool *pool;
        Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
        ep_buffer *buffer;
        cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
        cr_assert_eq(ep_forward_pack(&p.rb.batch, &p.plan, 0, 1, pool, &header, &buffer), EP_OK);
        cr_assert_eq(header.rows, TOKENS);
        for (uint32_t t = 0; t < TOKENS; t++) {
            static uint16_t row[HIDDEN];
            ep_batch_send_row(&p.rb.batch, t, 0, 0, row, NULL);
            cr_assert_eq(memcmp(buffer->data + t * sizeof(row), row, sizeof(row)), 0,
                         "policy %d, row %u", policy, t);
        }
        ep_buffer_unref(buffer);
        ep_buffer_pool_destroy(pool);
        ep_routing_plan_fini(&p.plan);
    }
}

Test(forward_codec, layout_follows_the_documented_offsets_and_refuses_overflow)
{
    ep_forward_layout l;
    cr_assert(ep_forward_layout_make(3, 5, 10, EP_DTYPE_BF16, false, &l));
    cr_assert(l.x_offset == 0 && l.slots_offset == 64 && l.total_bytes == 64 + 40);
    cr_assert(ep_forward_layout_make(3, 5, 10, EP_DTYPE_I8, true, &l));
    cr_assert(l.row_scales_offset == 64 && l.slots_offset == 128 && l.slot_scales_offset == 192 &&
              l.total_bytes == 192 + 20);
    cr_assert(ep_forward_layout_make(UINT32_MAX, UINT32_MAX, 65536, EP_DTYPE_F32, true, &l),
              "fits 64 bits");
    cr_assert(!ep_forward_layout_make(UINT32_MAX, 1, UINT32_MAX, EP_DTYPE_F32, false, &l));
}

Test(forward_codec, the_gaps_between_parts_are_zero)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        planned p;
        planned_init(&p, seed);
        ep_buffer_pool *pool;
        cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
        for (uint32_t n = 0; n < p.plan.chunks_count; n++) {
            Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
            ep_buffer *buffer;
            uint8_t *copies[2];
            size_t bytes = 0;
            for (int i = 0; i < 2; i++) { /* the same request over two different old contents */
                cr_assert_eq(ep_buffer_acquire(pool, 4096, &buffer), EP_OK);
                memset(buffer->data, i == 0 ? 0xff : 0x11, buffer->capacity_bytes);
                ep_buffer_unref(buffer);
                cr_assert_eq(
                    ep_forward_pack(&p.rb.batch, &p.plan, n, p.spt, pool, &header, &buffer), EP_OK);
                memset(buffer->data + buffer->bytes, 0, buffer->capacity_bytes - buffer->bytes);
                cr_assert_leq(buffer->bytes, 4096, "the buffer must be the one filled before");
                copies[i] = malloc(buffer->bytes);
                bytes = buffer->bytes;
                memcpy(copies[i], buffer->data, bytes);
                ep_buffer_unref(buffer);
            }
            cr_assert_eq(memcmp(copies[0], copies[1], bytes), 0);
            free(copies[0]);
            free(copies[1]);
        }
        ep_buffer_pool_destroy(pool);
        planned_fini(&p);
    }
}

Test(forward_codec, a_pool_at_its_limit_is_reported_and_nothing_is_written)
{
    planned p;
    uint64_t seed = 0;
    do {
        planned_init(&p, seed++);
        if (p.plan.chunks_count == 0) {
            planned_fini(&p);
        }
    } while (p.plan.chunks_count == 0);
    ep_buffer_pool *pool;
    cr_assert_eq(ep_buffer_pool_create(1, 0, &pool), EP_OK);
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_buffer *buffer = NULL;
    cr_assert_eq(ep_forward_pack(&p.rb.batch, &p.plan, 0, p.spt, pool, &header, &buffer),
                 EP_ERR_RESOURCE_EXHAUSTED);
    cr_assert_null(buffer);
    cr_assert_eq(header.slots, 0);
    ep_buffer_pool_destroy(pool);
    planned_fini(&p);
}

/* ---- the other side ---- */

static const ep_layer_shape shape = {
    .layer = 3, .hidden = 8, .inner = 4, .experts = 4, .shared_experts = 1, .top_k = 2};

/* 2 rows, 3 slots, bf16: x at 0..32, slots at 64..88. */
static uint8_t good_tensors[88] __attribute__((aligned(64)));

static Expertd__V1__ForwardRequest good_header(void)
{
    Expertd__V1__ForwardRequest h = EXPERTD__V1__FORWARD_REQUEST__INIT;
    const uint32_t slots[] = {0, 0, 1, 3, 0, 4};
    memset(good_tensors, 0, sizeof(good_tensors));
    memcpy(good_tensors + 64, slots, sizeof(slots));
    h.rows = 2;
    h.slots = 3;
    h.hidden = 8;
    h.x_dtype = EP_DTYPE_BF16;
    h.reply_dtype = EP_DTYPE_BF16;
    return h;
}

static void expect_refused(const Expertd__V1__ForwardRequest *h, size_t bytes, const char *text)
{
    ep_error error;
    ep_forward_view view;
    cr_assert_eq(ep_forward_view_make(h, good_tensors, bytes, &shape, &view, &error),
                 EP_ERR_INVALID_ARGUMENT, "accepted: %s", text);
    cr_assert_str_eq(error.text, text);
}

Test(forward_codec, names_every_wrong_field)
{
    ep_forward_view view;
    Expertd__V1__ForwardRequest h = good_header();
    cr_assert_eq(ep_forward_view_make(&h, good_tensors, 88, &shape, &view, NULL), EP_OK);
#define REFUSED(change, text)                                                                      \
    h = good_header();                                                                             \
    change;                                                                                        \
    expect_refused(&h, 88, text)
    REFUSED(h.rows = 0, "rows 0: allowed 1..65536");
    REFUSED(h.rows = 65537, "rows 65537: allowed 1..65536");
    REFUSED(h.slots = 1, "slots 1: allowed 2..130 for 2 rows");
    REFUSED(h.slots = UINT32_MAX, "slots 4294967295: allowed 2..130 for 2 rows");
    REFUSED(h.hidden = 7, "hidden 7: layer 3 has 8");
    REFUSED(h.x_dtype = 0, "x_dtype 0: allowed 1 (bf16), 2 (f16), 3 (f32), 4 (i8), 9 (f8e4m3)");
    REFUSED(h.x_dtype = 77, "x_dtype 77: allowed 1 (bf16), 2 (f16), 3 (f32), 4 (i8), 9 (f8e4m3)");
    REFUSED(h.reply_dtype = 4, "reply_dtype 4: allowed 1 (bf16), 2 (f16), 3 (f32)");
    REFUSED(h.weight_on_input = 1, "tensor section has 88 bytes: 2 rows and 3 slots need 140");
    REFUSED(h.node_sum = 1, "tensor section has 88 bytes: 2 rows and 3 slots need 198");
    REFUSED(h.node_sum = h.weight_on_input = 1,
            "node_sum and weight_on_input are both set: allowed is one of them");
    REFUSED(good_tensors[72] = 2, "row 2 in slot 1: allowed 0..1");
    REFUSED(good_tensors[87] = 0xff, "expert 4278190084 in slot 2: layer 3 allows 0..4");
    REFUSED(good_tensors[84] = 5, "expert 5 in slot 2: layer 3 allows 0..4");
#undef REFUSED
    h = good_header();
    for (size_t bytes = 0; bytes < 200; bytes++) {
        if (bytes != 88) {
            char text[128];
            snprintf(text, sizeof(text), "tensor section has %zu bytes: 2 rows and 3 slots need 88",
                     bytes);
            expect_refused(&h, bytes, text);
        }
    }
    static uint8_t shifted[128] __attribute__((aligned(64)));
    cr_assert_eq(ep_forward_view_make(&h, shifted + 4, 88, &shape, &view, NULL), EP_ERR_INTERNAL);
}

/* Everything a server would read of an accepted view; the sanitizers watch. */
static uint64_t touch_view(const ep_forward_view *v)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < v->slots; i++) {
        const uint8_t *row = v->x + (size_t)v->wire_slots[i].row * v->x_row_bytes;
        cr_assert_lt(v->wire_slots[i].expert, shape.experts + shape.shared_experts);
        sum += row[0] + row[v->x_row_bytes - 1];
        sum += v->row_scales == NULL ? 0 : (v->row_scales[v->wire_slots[i].row] == 1.0f);
        sum += v->slot_scales == NULL ? 0 : (v->slot_scales[i] == 1.0f);
        sum += v->slot_places == NULL ? 0 : v->slot_places[i];
    }
    return sum;
}

Test(forward_codec, random_damage_is_refused_or_harmless)
{
    uint64_t state = 42;
    unsigned accepted = 0;
    uint64_t sum = 0;
    for (int round = 0; round < 200000; round++) {
        Expertd__V1__ForwardRequest h = good_header();
        uint32_t *const fields[] = {&h.rows, &h.slots, &h.hidden, &h.x_dtype, &h.reply_dtype};
        for (uint32_t i = random_below(&state, 3); i > 0; i--) {
            *fields[random_below(&state, 5)] =
                random_below(&state, random_below(&state, 4) == 0 ? UINT32_MAX : 6);
        }
        h.weight_on_input = random_below(&state, 4) == 0;
        h.node_sum = random_below(&state, 4) == 0;
        for (uint32_t i = random_below(&state, 3); i > 0; i--) {
            good_tensors[random_below(&state, 88)] = (uint8_t)random_below(&state, 5);
        }
        size_t bytes = random_below(&state, 3) ? 88 : random_below(&state, 300);
        uint8_t *exact = aligned_alloc(64, bytes == 0 ? 64 : (bytes + 63) & ~(size_t)63);
        memset(exact, 0, bytes);
        memcpy(exact, good_tensors, bytes < 88 ? bytes : 88);
        ep_forward_view view;
        ep_error error;
        ep_err err = ep_forward_view_make(&h, exact, bytes, &shape, &view, &error);
        if (err == EP_OK) {
            sum += touch_view(&view);
            accepted++;
        } else {
            cr_assert_eq(err, EP_ERR_INVALID_ARGUMENT);
            cr_assert(error.text[0] != '\0');
        }
        free(exact);
    }
    cr_assert_gt(accepted, 1000u, "the damage must leave some requests readable");
    cr_assert_gt(sum, 0u);
}
