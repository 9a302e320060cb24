/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tensor section of ForwardRequest (proto/expert.proto): rows and slots, gathered from a batch
 * straight into the outgoing buffer, and the checked view of it at the receiver.
 *
 *     x [rows,H] x_dtype
 *     row_scales f32, [rows] for i8, [rows,ceil(H/128)] for f8e4m3
 *     slots [slots] {u32 row, u32 expert}
 *     slot_scales [slots] f32 (weight_on_input, node_sum)
 *     slot_places [slots] u16 (node_sum)
 *
 * Each part begins at the next multiple of 64 from the section's start. Little endian.
 */
#ifndef EP_WIRE_FORWARD_CODEC_H
#define EP_WIRE_FORWARD_CODEC_H

#include "base/buffer.h"
#include "expert.pb-c.h"
#include "moe/batch.h"
#include "moe/routing_plan.h"

typedef struct ep_wire_slot {
    uint32_t row;
    uint32_t expert;
} ep_wire_slot;

/* Offsets of the parts and the total length; false on overflow. */
typedef struct ep_forward_layout {
    size_t x_offset;
    size_t row_scales_offset;
    size_t slots_offset;
    size_t slot_scales_offset;
    size_t slot_places_offset; /* equal to total_bytes unless node_sum */
    size_t total_bytes;
} ep_forward_layout;
bool ep_forward_layout_make(uint32_t rows, uint32_t slots, uint32_t hidden, ep_dtype x_dtype,
                            bool has_slot_scales, ep_forward_layout *out_layout);
/* Adds slot_places to a layout that has slot_scales; false on overflow. */
bool ep_forward_layout_add_places(ep_forward_layout *layout, uint32_t slots);

/* Fills a new buffer for one chunk of a plan, and quantises rows when the batch asks for it. Sets
 * in out_header rows, slots, hidden, x_dtype, reply_dtype, reply_quant, weight_on_input, node_sum.
 * Errors: RESOURCE_EXHAUSTED, NO_MEMORY. */
ep_err ep_forward_pack(const ep_batch *batch, const ep_routing_plan *plan, uint32_t chunk_index,
                       uint32_t slots_per_token, ep_buffer_pool *pool,
                       Expertd__V1__ForwardRequest *out_header, ep_buffer **out_tensors);

/* A checked request. Pointers point into the frame. */
typedef struct ep_forward_view {
    uint32_t rows;
    uint32_t slots;
    /* how many of the first slots the receiver computes; with relay parts the caller lowers it */
    uint32_t own_slots;
    uint32_t hidden;
    ep_dtype x_dtype;
    ep_dtype reply_dtype;
    ep_combine_quant reply_quant;
    bool weight_on_input;
    bool node_sum;
    const uint8_t *x;
    size_t x_row_bytes;
    const float *row_scales;   /* [rows,row_scales_count]; NULL unless i8 or f8e4m3 */
    uint32_t row_scales_count; /* per row */
    const ep_wire_slot *wire_slots;
    const float *slot_scales;    /* NULL unless weight_on_input or node_sum */
    const uint16_t *slot_places; /* NULL unless node_sum; may have any values */
} ep_forward_view;

/* Checks counts, types, lengths and every slot (row < rows, expert < experts_total); tensors must
 * be 64-byte aligned.
 * Errors: INVALID_ARGUMENT naming field, value, allowed range. */
ep_err ep_forward_view_make(const Expertd__V1__ForwardRequest *header, const uint8_t *tensors,
                            size_t tensor_bytes, const ep_layer_shape *shape,
                            ep_forward_view *out_view, ep_error *out_error);

/*
 * The tensor section of ForwardReply (proto/expert.proto): a row per slot, in the request's order.
 *
 *   plain    [slots,H] of reply_dtype
 *   int8     [slots,H] i8 | scales [slots,ceil(H/8)] of reply_dtype, at the next multiple of 64;
 *            zeros between
 */
typedef struct ep_reply_layout {
    size_t row_bytes;
    size_t scale_row_bytes; /* 0: plain */
    size_t scales_offset;
    size_t total_bytes;
} ep_reply_layout;

/* slots up to EP_TOKENS_MAX * 2 * EP_TOP_K_MAX, hidden up to EP_HIDDEN_MAX: fits 64 bits. */
void ep_reply_layout_make(uint32_t slots, uint32_t hidden, ep_dtype reply_dtype,
                          ep_combine_quant quant, ep_reply_layout *out_layout);

#endif
