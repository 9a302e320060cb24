/* SPDX-License-Identifier: Apache-2.0 */
/* What goes on to a neighbour is what it would have got straight; wrong parts are named. */
#include "support/expect.h"
#include "wire/relay_codec.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "unit/moe/random_batch.h"
#include "support/plan_whole.h"

/* Slot by slot: the same row bytes, scales and expert; rows ascending, none unused. */
static void check_part(const ep_forward_view *whole, uint32_t begin, uint32_t count,
                       const ep_layer_shape *shape, ep_buffer_pool *pool)
{
    Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
    ep_buffer *tensors;
    ep_forward_view part;
    ep_error error;
    cr_assert_eq(ep_relay_pack(whole, begin, count, pool, &header, &tensors), EP_OK);
    ASSERT_OK(ep_forward_view_make(&header, tensors->data, tensors->bytes, shape, &part, &error),
              error);
    cr_assert(part.slots == count && part.reply_dtype == whole->reply_dtype && !part.node_sum);
    uint32_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        ep_wire_slot from = whole->wire_slots[begin + i];
        ep_wire_slot to = part.wire_slots[i];
        cr_assert_eq(from.expert, to.expert);
        cr_assert_eq(memcmp(whole->x + from.row * whole->x_row_bytes,
                            part.x + to.row * part.x_row_bytes, part.x_row_bytes),
                     0);
        size_t n = whole->row_scales_count;
        cr_assert_eq(part.row_scales_count, n);
        cr_assert(whole->row_scales == NULL ||
                  memcmp(&whole->row_scales[from.row * n], &part.row_scales[to.row * n],
                         n * sizeof(float)) == 0);
        cr_assert_eq(part.slot_scales != NULL, whole->weight_on_input);
        cr_assert(part.slot_scales == NULL ||
                  memcmp(&whole->slot_scales[begin + i], &part.slot_scales[i], 4) == 0);
        bool is_new = true;
        for (uint32_t j = 0; j < i; j++) {
            ep_wire_slot other = whole->wire_slots[begin + j];
            is_new &= other.row != from.row;
            cr_assert_eq(other.row < from.row, part.wire_slots[j].row < to.row);
        }
        used += is_new;
    }
    cr_assert_eq(used, part.rows, "a row that nobody uses travelled");
    uint32_t rows_max;
    uint64_t bytes_max;
    ep_relay_bound(whole, count, &rows_max, &bytes_max);
    cr_assert(rows_max >= part.rows && rows_max <= count);
    cr_assert_geq(bytes_max, tensors->bytes + (uint64_t)count * whole->hidden *
                                                  ep_dtype_bytes(whole->reply_dtype));
    ep_buffer_unref(tensors);
}

Test(relay_codec, a_part_is_what_its_owner_would_get)
{
    ep_buffer_pool *pool;
    unsigned parts = 0;
    cr_assert_eq(ep_buffer_pool_create(0, 1 << 20, &pool), EP_OK);
    for (uint64_t seed = 0; seed < 2000; seed++) {
        random_batch rb;
        ep_routing_plan plan;
        Expertd__V1__ForwardRequest header = EXPERTD__V1__FORWARD_REQUEST__INIT;
        ep_buffer *tensors;
        ep_forward_view view;
        uint32_t chosen[32] = {0};
        random_batch_init(&rb, seed);
        rb.batch.node_sum = seed % 2 == 0 && rb.batch.weight_on == EP_WEIGHT_ON_OUTPUT &&
                            rb.batch.form != EP_RESULT_UNCOMBINED;
        const ep_routing_layer layer = {.shape = rb.shape};
        ep_routing_plan_init(&plan);
        cr_assert_eq(plan_whole(&plan, &rb.batch, &layer, 1, chosen, NULL, 0, rb.batch.tokens, NULL,
                                0, NULL),
                     EP_OK);
        if (plan.chunks_count > 0) {
            cr_assert_eq(ep_forward_pack(&rb.batch, &plan, 0,
                                         ep_batch_slots_per_token(&rb.batch, &rb.shape), pool,
                                         &header, &tensors),
                         EP_OK);
            cr_assert_eq(ep_forward_view_make(&header, tensors->data, tensors->bytes, &rb.shape,
                                              &view, NULL),
                         EP_OK);
            for (uint32_t begin = 0, count; begin < view.slots; begin += count, parts++) {
                count = 1 + random_below(&rb.state, view.slots - begin);
                check_part(&view, begin, count, &rb.shape, pool);
            }
            ep_buffer_unref(tensors);
        }
        ep_routing_plan_fini(&plan);
        random_batch_fini(&rb);
    }
    cr_assert_gt(parts, 2000u);
    ep_buffer_pool_destroy(pool);
}

/* ---- wrong parts ---- */

static Expertd__V1__RelayPart parts[EP_RELAY_PARTS_MAX + 1];
static Expertd__V1__RelayPart *list[EP_RELAY_PARTS_MAX + 1];
static char names[EP_RELAY_PARTS_MAX + 1][8];
static char longest[400];

/* Three parts of 2, 3 and 1 slots. */
static Expertd__V1__ForwardRequest good(void)
{
    static const uint32_t counts[] = {2, 3, 1};
    Expertd__V1__ForwardRequest h = EXPERTD__V1__FORWARD_REQUEST__INIT;
    memset(longest, 'x', sizeof(longest) - 1);
    for (uint32_t i = 0; i <= EP_RELAY_PARTS_MAX; i++) {
        snprintf(names[i], sizeof(names[i]), "n%u", i);
        expertd__v1__relay_part__init(&parts[i]);
        parts[i].node = names[i];
        parts[i].slots_count = i < 3 ? counts[i] : 1;
        parts[i].slots_begin = i > 0 ? parts[i - 1].slots_begin + parts[i - 1].slots_count : 0;
        list[i] = &parts[i];
    }
    h.slots = 6;
    h.relay = list;
    h.n_relay = 3;
    return h;
}

Test(relay_codec, names_every_wrong_part)
{
    ep_error error;
    Expertd__V1__ForwardRequest h = good();
    ASSERT_OK(ep_relay_check(&h, "n0", &error), error);
#define REFUSED(change, message)                                                                   \
    h = good();                                                                                    \
    change;                                                                                        \
    cr_assert_eq(ep_relay_check(&h, "n0", &error), EP_ERR_INVALID_ARGUMENT);                       \
    cr_assert_str_eq(error.text, message)
    REFUSED(h.n_relay = 1, "1 relay parts: allowed 0, 2..8");
    REFUSED(h.n_relay = 9, "9 relay parts: allowed 0, 2..8");
    REFUSED(h.n_relay = 2, "relay parts have 5 slots, the request has 6");
    REFUSED(parts[1].slots_count = 0, "relay part 1 has slots 2+0: allowed 2+1..4");
    REFUSED(parts[1].slots_count = 5, "relay part 1 has slots 2+5: allowed 2+1..4");
    REFUSED(parts[2].slots_begin = 4, "relay part 2 has slots 4+1: allowed 5+1..1");
    REFUSED(parts[2].slots_count = UINT32_MAX,
            "relay part 2 has slots 5+4294967295: allowed 5+1..1");
    REFUSED(parts[2].node = names[0], "relay parts 0 and 2 are both for node n0");
    REFUSED(parts[0].node = names[5],
            "the first relay part is for node n5: allowed n0, who got the request");
    REFUSED(parts[1].node = longest,
            "relay part 1 has a name of 399 and a url of 0 characters: allowed 1..63 and 0..255");
    REFUSED(parts[1].url = longest,
            "relay part 1 has a name of 2 and a url of 399 characters: allowed 1..63 and 0..255");
#undef REFUSED
}
