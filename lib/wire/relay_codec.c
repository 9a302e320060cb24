/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/relay_codec.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define NO_ROW UINT32_MAX
#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err check_part(const Expertd__V1__ForwardRequest *header, size_t index, uint32_t begin,
                         ep_error *out_error)
{
    const Expertd__V1__RelayPart *part = header->relay[index];
    if (part->node[0] == 0 || strlen(part->node) >= EP_NODE_NAME_BYTES ||
        strlen(part->url) >= EP_URL_BYTES) {
        return BAD(
            "relay part %zu has a name of %zu and a url of %zu characters: allowed 1..%d and 0..%d",
            index, strlen(part->node), strlen(part->url), EP_NODE_NAME_BYTES - 1, EP_URL_BYTES - 1);
    }
    for (size_t i = 0; i < index; i++) {
        if (strcmp(header->relay[i]->node, part->node) == 0) {
            return BAD("relay parts %zu and %zu are both for node %s", i, index, part->node);
        }
    }
    if (part->slots_begin != begin || part->slots_count < 1 ||
        part->slots_count > header->slots - begin) {
        return BAD("relay part %zu has slots %" PRIu32 "+%" PRIu32 ": allowed %" PRIu32
                   "+1..%" PRIu32,
                   index, part->slots_begin, part->slots_count, begin, header->slots - begin);
    }
    return EP_OK;
}

ep_err ep_relay_check(const Expertd__V1__ForwardRequest *header, const char *self,
                      ep_error *out_error)
{
    uint32_t end = 0;
    if (header->n_relay < 2 || header->n_relay > EP_RELAY_PARTS_MAX) {
        return BAD("%zu relay parts: allowed 0, 2..%d", header->n_relay, EP_RELAY_PARTS_MAX);
    }
    for (size_t i = 0; i < header->n_relay; i++) {
        ep_err err = check_part(header, i, end, out_error);
        if (err != EP_OK) {
            return err;
        }
        end += header->relay[i]->slots_count;
    }
    if (end != header->slots) {
        return BAD("relay parts have %" PRIu32 " slots, the request has %" PRIu32, end,
                   header->slots);
    }
    if (strcmp(header->relay[0]->node, self) != 0) {
        return BAD("the first relay part is for node %.63s: allowed %s, who got the request",
                   header->relay[0]->node, self);
    }
    return EP_OK;
}

/* Numbers the rows that a part needs, ascending; NO_ROW for the others. */
static uint32_t number_rows(const ep_forward_view *view, uint32_t begin, uint32_t count,
                            uint32_t *numbers)
{
    uint32_t rows = 0;
    for (uint32_t r = 0; r < view->rows; r++) {
        numbers[r] = NO_ROW;
    }
    for (uint32_t i = begin; i < begin + count; i++) {
        numbers[view->wire_slots[i].row] = 0;
    }
    for (uint32_t r = 0; r < view->rows; r++) {
        if (numbers[r] != NO_ROW) {
            numbers[r] = rows++;
        }
    }
    return rows;
}

static void pack(const ep_forward_view *view, uint32_t begin, uint32_t count,
                 const uint32_t *numbers, const ep_forward_layout *layout, uint8_t *tensors)
{
    ep_wire_slot *slots = (ep_wire_slot *)(void *)(tensors + layout->slots_offset);
    float *row_scales = (float *)(void *)(tensors + layout->row_scales_offset);
    for (uint32_t r = 0; r < view->rows; r++) {
        if (numbers[r] == NO_ROW) {
            continue;
        }
        memcpy(tensors + layout->x_offset + numbers[r] * view->x_row_bytes,
               view->x + r * view->x_row_bytes, view->x_row_bytes);
        if (view->row_scales != NULL) {
            memcpy(row_scales + (size_t)numbers[r] * view->row_scales_count,
                   view->row_scales + (size_t)r * view->row_scales_count,
                   view->row_scales_count * sizeof(float));
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        ep_wire_slot slot = view->wire_slots[begin + i];
        slots[i] = (ep_wire_slot){numbers[slot.row], slot.expert};
    }
    if (view->weight_on_input) {
        memcpy(tensors + layout->slot_scales_offset, view->slot_scales + begin,
               count * sizeof(float));
    }
}

ep_err ep_relay_pack(const ep_forward_view *view, uint32_t begin, uint32_t count,
                     ep_buffer_pool *pool, Expertd__V1__ForwardRequest *out_header,
                     ep_buffer **out_tensors)
{
    ep_forward_layout layout;
    ep_buffer *numbers = NULL;
    ep_buffer *tensors = NULL;
    EP_ASSERT(count > 0 && begin + count <= view->slots);
    ep_err err = ep_buffer_acquire(pool, view->rows * sizeof(uint32_t), &numbers);
    if (err != EP_OK) {
        return err;
    }
    uint32_t *numbers_data = (uint32_t *)(void *)numbers->data;
    uint32_t rows = number_rows(view, begin, count, numbers_data);
    bool fits = ep_forward_layout_make(rows, count, view->hidden, view->x_dtype,
                                       view->weight_on_input, &layout);
    EP_ASSERT(fits); /* it is part of a request that fits */
    err = ep_buffer_acquire(pool, layout.total_bytes, &tensors);
    if (err == EP_OK) {
        memset(tensors->data, 0, layout.total_bytes); /* the gaps between the parts are sent too */
        pack(view, begin, count, numbers_data, &layout, tensors->data);
        out_header->rows = rows;
        out_header->slots = count;
        out_header->hidden = view->hidden;
        out_header->x_dtype = (uint32_t)view->x_dtype;
        out_header->reply_dtype = (uint32_t)view->reply_dtype;
        out_header->weight_on_input = view->weight_on_input;
        *out_tensors = tensors;
    }
    ep_buffer_unref(numbers);
    return err;
}

void ep_relay_bound(const ep_forward_view *view, uint32_t count, uint32_t *out_rows,
                    uint64_t *out_bytes)
{
    ep_forward_layout layout;
    const uint32_t rows = count < view->rows ? count : view->rows;
    bool fits = ep_forward_layout_make(rows, count, view->hidden, view->x_dtype,
                                       view->weight_on_input, &layout);
    EP_ASSERT(fits); /* it is part of a request that fits */
    *out_rows = rows;
    *out_bytes =
        layout.total_bytes + (uint64_t)count * view->hidden * ep_dtype_bytes(view->reply_dtype);
}
