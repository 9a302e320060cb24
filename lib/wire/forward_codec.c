/* SPDX-License-Identifier: Apache-2.0 */
/* Packs a chunk of a plan into one buffer, and checks such a buffer at the receiver. */
#include "wire/forward_codec.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/path_count.h"
#include "moe/convert.h"
#include "moe/quantize.h"
#include "moe/row_stream.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the wire format is little endian and rows are copied as they are");
_Static_assert(sizeof(ep_wire_slot) == 8, "a slot on the wire is two u32");

#define STREAM_BYTES_MIN ((size_t)128 << 10)

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

/* Appends a part of count elements at the next multiple of 64 after *end; false on overflow. */
static bool add_part(size_t count, size_t element_bytes, size_t *end, size_t *out_offset)
{
    size_t bytes;
    if (*end > SIZE_MAX - EP_BUFFER_ALIGN || !ep_mul_size(count, element_bytes, &bytes)) {
        return false;
    }
    *out_offset = ep_align_up(*end, EP_BUFFER_ALIGN);
    return bytes == 0 || ep_add_size(*out_offset, bytes, end);
}

bool ep_forward_layout_make(uint32_t rows, uint32_t slots, uint32_t hidden, ep_dtype x_dtype,
                            bool has_slot_scales, ep_forward_layout *out_layout)
{
    ep_forward_layout layout;
    size_t row_bytes;
    size_t end = 0;
    if (!ep_mul_size(hidden, ep_dtype_bytes(x_dtype), &row_bytes) ||
        !add_part(rows, row_bytes, &end, &layout.x_offset) ||
        !add_part(rows, ep_sent_row_scales(x_dtype, hidden) * sizeof(float), &end,
                  &layout.row_scales_offset) ||
        !add_part(slots, sizeof(ep_wire_slot), &end, &layout.slots_offset) ||
        !add_part(has_slot_scales ? slots : 0, sizeof(float), &end, &layout.slot_scales_offset)) {
        return false;
    }
    layout.total_bytes = end;
    layout.slot_places_offset = end;
    *out_layout = layout;
    return true;
}

bool ep_forward_layout_add_places(ep_forward_layout *layout, uint32_t slots)
{
    return add_part(slots, sizeof(uint16_t), &layout->total_bytes, &layout->slot_places_offset);
}

static void pack_row(const ep_batch *batch, uint32_t row, uint32_t token, uint32_t slot,
                     uint32_t expert, const ep_forward_layout *layout, uint8_t *tensors)
{
    ep_dtype sent = ep_batch_sent_dtype(batch);
    uint8_t *x = tensors + layout->x_offset + (size_t)row * batch->hidden * ep_dtype_bytes(sent);
    float *scales = (float *)(tensors + layout->row_scales_offset) +
                    (size_t)row * ep_sent_row_scales(sent, batch->hidden);
    ep_batch_send_row(batch, token, slot, expert, x, scales);
}

static void pack_rows(const ep_batch *batch, const ep_routing_plan *plan,
                      const ep_plan_chunk *chunk, uint32_t slots_per_token,
                      const ep_forward_layout *layout, uint8_t *tensors)
{
    const uint32_t *row_tokens = plan->row_tokens + chunk->rows_begin;
    const ep_plan_slot *slots = plan->slots + chunk->slots_begin;
    ep_path_count(EP_PATH_PACKED, (uint64_t)chunk->rows_count * batch->hidden *
                                      ep_dtype_bytes(ep_batch_sent_dtype(batch)));
    if (ep_batch_row_per_slot(batch)) {
        for (uint32_t i = 0; i < chunk->slots_count; i++) {
            pack_row(batch, slots[i].row, slots[i].slot_number / slots_per_token,
                     slots[i].slot_number % slots_per_token, slots[i].expert, layout, tensors);
        }
        return;
    }
    /* Rows are written past the caches if they travel unchanged, in a chunk so large that it leaves
     * the nearer caches before it is sent. */
    size_t row_bytes = batch->hidden * ep_dtype_bytes(batch->x.dtype);
    bool as_is = ep_batch_sent_dtype(batch) == batch->x.dtype && batch->x.dtype != EP_DTYPE_I8 &&
                 (batch->nan_policy == EP_NAN_PASS || batch->nan_policy == EP_NAN_REJECT);
    if (as_is && chunk->rows_count * row_bytes >= STREAM_BYTES_MIN) {
        const void *from = ep_rows_at(&batch->x, row_tokens[0]);
        for (uint32_t row = 0; row < chunk->rows_count; row++) {
            const void *next =
                row + 1 < chunk->rows_count ? ep_rows_at(&batch->x, row_tokens[row + 1]) : NULL;
            ep_row_stream(tensors + layout->x_offset + row * row_bytes, from, row_bytes, next);
            from = next;
        }
        ep_row_stream_end();
        return;
    }
    for (uint32_t row = 0; row < chunk->rows_count; row++) {
        pack_row(batch, row, row_tokens[row], 0, EP_NO_EXPERT, layout, tensors);
    }
}

static bool has_slot_scales(const ep_batch *batch)
{
    return batch->weight_on == EP_WEIGHT_ON_INPUT || batch->node_sum;
}

/* Slots of shared experts have the scale 1: they get x, and add their row, unchanged. */
static void pack_slots(const ep_batch *batch, const ep_plan_slot *slots, uint32_t slots_count,
                       uint32_t slots_per_token, const ep_forward_layout *layout, uint8_t *tensors)
{
    ep_wire_slot *wire_slots = (ep_wire_slot *)(tensors + layout->slots_offset);
    float *slot_scales = (float *)(tensors + layout->slot_scales_offset);
    uint16_t *slot_places = (uint16_t *)(tensors + layout->slot_places_offset);
    for (uint32_t i = 0; i < slots_count; i++) {
        uint32_t k = slots[i].slot_number % slots_per_token;
        wire_slots[i] = (ep_wire_slot){slots[i].row, slots[i].expert};
        if (has_slot_scales(batch)) {
            uint32_t token = slots[i].slot_number / slots_per_token;
            slot_scales[i] = k < batch->top_k ? ep_batch_scale(batch, token, k) : 1.0f;
        }
        if (batch->node_sum) {
            slot_places[i] = (uint16_t)k;
        }
    }
}

/* Clears the bytes between parts: they are sent, and must not show what the buffer held before. */
static void clear_gaps(const ep_forward_layout *layout, uint32_t rows, uint32_t slots,
                       uint32_t hidden, ep_dtype sent, uint8_t *tensors)
{
    size_t x_end = layout->x_offset + (size_t)rows * hidden * ep_dtype_bytes(sent);
    size_t row_scales_end =
        layout->row_scales_offset + (size_t)rows * ep_sent_row_scales(sent, hidden) * sizeof(float);
    size_t slots_end = layout->slots_offset + slots * sizeof(ep_wire_slot);
    memset(tensors + x_end, 0, layout->row_scales_offset - x_end);
    memset(tensors + row_scales_end, 0, layout->slots_offset - row_scales_end);
    if (layout->slot_scales_offset < layout->total_bytes) {
        size_t scales_end = layout->slot_scales_offset + slots * sizeof(float);
        memset(tensors + slots_end, 0, layout->slot_scales_offset - slots_end);
        memset(tensors + scales_end, 0, layout->slot_places_offset - scales_end);
    }
}

ep_err ep_forward_pack(const ep_batch *batch, const ep_routing_plan *plan, uint32_t chunk_index,
                       uint32_t slots_per_token, ep_buffer_pool *pool,
                       Expertd__V1__ForwardRequest *out_header, ep_buffer **out_tensors)
{
    EP_ASSERT(chunk_index < plan->chunks_count);
    const ep_plan_chunk *chunk = &plan->chunks[chunk_index];
    ep_forward_layout layout;
    ep_dtype sent = ep_batch_sent_dtype(batch);
    if (!ep_forward_layout_make(chunk->rows_count, chunk->slots_count, batch->hidden, sent,
                                has_slot_scales(batch), &layout) ||
        (batch->node_sum && !ep_forward_layout_add_places(&layout, chunk->slots_count))) {
        return EP_ERR_RESOURCE_EXHAUSTED;
    }
    ep_buffer *buffer;
    ep_err err = ep_buffer_acquire(pool, layout.total_bytes, &buffer);
    if (err != EP_OK) {
        return err;
    }
    pack_rows(batch, plan, chunk, slots_per_token, &layout, buffer->data);
    pack_slots(batch, plan->slots + chunk->slots_begin, chunk->slots_count, slots_per_token,
               &layout, buffer->data);
    clear_gaps(&layout, chunk->rows_count, chunk->slots_count, batch->hidden, sent, buffer->data);

    out_header->rows = chunk->rows_count;
    out_header->slots = chunk->slots_count;
    out_header->hidden = batch->hidden;
    out_header->x_dtype = sent;
    out_header->reply_dtype = batch->wire_dtype;
    out_header->reply_quant = batch->combine_quant;
    out_header->weight_on_input = batch->weight_on == EP_WEIGHT_ON_INPUT;
    out_header->node_sum = batch->node_sum;
    *out_tensors = buffer;
    return EP_OK;
}

static ep_err check_header(const Expertd__V1__ForwardRequest *header, const ep_layer_shape *shape,
                           ep_error *out_error)
{
    ep_dtype x_dtype = (ep_dtype)header->x_dtype;
    if (header->rows < 1 || header->rows > EP_TOKENS_MAX) {
        return BAD("rows %" PRIu32 ": allowed 1..%d", header->rows, EP_TOKENS_MAX);
    }
    uint64_t slots_max = (uint64_t)header->rows * (EP_TOP_K_MAX + shape->shared_experts);
    if (header->slots < header->rows || header->slots > slots_max) {
        return BAD("slots %" PRIu32 ": allowed %" PRIu32 "..%" PRIu64 " for %" PRIu32 " rows",
                   header->slots, header->rows, slots_max, header->rows);
    }
    if (header->hidden != shape->hidden) {
        return BAD("hidden %" PRIu32 ": layer %" PRIu32 " has %" PRIu32, header->hidden,
                   shape->layer, shape->hidden);
    }
    if (x_dtype != EP_DTYPE_I8 && x_dtype != EP_DTYPE_F8E4M3 && !ep_dtype_is_float(x_dtype)) {
        return BAD("x_dtype %" PRIu32 ": allowed 1 (bf16), 2 (f16), 3 (f32), 4 (i8), 9 (f8e4m3)",
                   header->x_dtype);
    }
    if (!ep_dtype_is_float((ep_dtype)header->reply_dtype)) {
        return BAD("reply_dtype %" PRIu32 ": allowed 1 (bf16), 2 (f16), 3 (f32)",
                   header->reply_dtype);
    }
    if (header->reply_quant != EP_COMBINE_PLAIN && header->reply_quant != EP_COMBINE_INT8) {
        return BAD("reply_quant %" PRIu32 ": allowed 0 (none), 2 (int8 per 8 elements)",
                   header->reply_quant);
    }
    if (header->node_sum && header->weight_on_input) {
        return BAD("node_sum and weight_on_input are both set: allowed is one of them");
    }
    return EP_OK;
}

static ep_err check_slots(const ep_wire_slot *slots, uint32_t slots_count, uint32_t rows,
                          const ep_layer_shape *shape, ep_error *out_error)
{
    uint32_t experts = shape->experts + shape->shared_experts;
    for (uint32_t i = 0; i < slots_count; i++) {
        if (slots[i].row >= rows) {
            return BAD("row %" PRIu32 " in slot %" PRIu32 ": allowed 0..%" PRIu32, slots[i].row, i,
                       rows - 1);
        }
        if (slots[i].expert >= experts) {
            return BAD("expert %" PRIu32 " in slot %" PRIu32 ": layer %" PRIu32
                       " allows 0..%" PRIu32,
                       slots[i].expert, i, shape->layer, experts - 1);
        }
    }
    return EP_OK;
}

ep_err ep_forward_view_make(const Expertd__V1__ForwardRequest *header, const uint8_t *tensors,
                            size_t tensor_bytes, const ep_layer_shape *shape,
                            ep_forward_view *out_view, ep_error *out_error)
{
    ep_err err = check_header(header, shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    ep_dtype x_dtype = (ep_dtype)header->x_dtype;
    bool weight_on_input = header->weight_on_input != 0;
    bool node_sum = header->node_sum != 0;
    ep_forward_layout layout;
    if (!ep_forward_layout_make(header->rows, header->slots, header->hidden, x_dtype,
                                weight_on_input || node_sum, &layout) ||
        (node_sum && !ep_forward_layout_add_places(&layout, header->slots))) {
        return BAD("%" PRIu32 " rows and %" PRIu32 " slots do not fit the address space",
                   header->rows, header->slots);
    }
    if (tensor_bytes != layout.total_bytes) {
        return BAD("tensor section has %zu bytes: %" PRIu32 " rows and %" PRIu32 " slots need %zu",
                   tensor_bytes, header->rows, header->slots, layout.total_bytes);
    }
    if ((uintptr_t)tensors % EP_BUFFER_ALIGN != 0) {
        return ep_error_set(out_error, EP_ERR_INTERNAL,
                            "tensor section landed at an address that is no multiple of %d",
                            EP_BUFFER_ALIGN);
    }
    const ep_wire_slot *slots = (const ep_wire_slot *)(tensors + layout.slots_offset);
    err = check_slots(slots, header->slots, header->rows, shape, out_error);
    if (err != EP_OK) {
        return err;
    }
    uint32_t row_scales = ep_sent_row_scales(x_dtype, header->hidden);
    *out_view = (ep_forward_view){
        .rows = header->rows,
        .slots = header->slots,
        .own_slots = header->slots,
        .hidden = header->hidden,
        .x_dtype = x_dtype,
        .reply_dtype = (ep_dtype)header->reply_dtype,
        .reply_quant = (ep_combine_quant)header->reply_quant,
        .weight_on_input = weight_on_input,
        .node_sum = node_sum,
        .x = tensors + layout.x_offset,
        .x_row_bytes = header->hidden * ep_dtype_bytes(x_dtype),
        .row_scales = row_scales > 0 ? (const float *)(tensors + layout.row_scales_offset) : NULL,
        .row_scales_count = row_scales,
        .wire_slots = slots,
        .slot_scales = weight_on_input || node_sum
                           ? (const float *)(tensors + layout.slot_scales_offset)
                           : NULL,
        .slot_places = node_sum ? (const uint16_t *)(tensors + layout.slot_places_offset) : NULL,
    };
    return EP_OK;
}

void ep_reply_layout_make(uint32_t slots, uint32_t hidden, ep_dtype reply_dtype,
                          ep_combine_quant quant, ep_reply_layout *out_layout)
{
    size_t element = ep_dtype_bytes(reply_dtype);
    ep_reply_layout layout = {.row_bytes = hidden * element};
    if (quant == EP_COMBINE_INT8) {
        layout.row_bytes = hidden;
        layout.scale_row_bytes = ep_quant_blocks(hidden, EP_QUANT_BLOCK_I8) * element;
        layout.scales_offset = ep_align_up(slots * layout.row_bytes, EP_BUFFER_ALIGN);
    }
    layout.total_bytes = layout.scale_row_bytes > 0
                             ? layout.scales_offset + slots * layout.scale_row_bytes
                             : slots * layout.row_bytes;
    *out_layout = layout;
}
