/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of flow.h. */
#include "call/flow.h"

#include <inttypes.h>

#include "base/buffer.h"
#include "wire/forward_codec.h"

/* Sets the bytes of rows, slots and replies, with all that goes with each. */
static void count_bytes(const ep_batch *batch, ep_flow *flow)
{
    ep_dtype sent = ep_batch_sent_dtype(batch);
    bool has_slot_scale = batch->weight_on == EP_WEIGHT_ON_INPUT || batch->node_sum;
    ep_reply_layout reply;
    ep_reply_layout_make(1, batch->hidden, batch->wire_dtype, batch->combine_quant, &reply);
    flow->reply_row_bytes = reply.row_bytes + reply.scale_row_bytes;
    ep_plan_cut *cut = &flow->cut;
    *cut = (ep_plan_cut){.row_bytes = (uint64_t)batch->hidden * ep_dtype_bytes(sent) +
                                      ep_sent_row_scales(sent, batch->hidden) * sizeof(float),
                         .slot_bytes = sizeof(ep_wire_slot) + (has_slot_scale ? sizeof(float) : 0) +
                                       (batch->node_sum ? sizeof(uint16_t) : 0),
                         .reply_slot_bytes = flow->reply_row_bytes};
    flow->row_bytes = cut->row_bytes;
    /* the reply has a row for each row of the request, so the larger one counts */
    if (batch->node_sum) {
        cut->row_bytes =
            cut->row_bytes > cut->reply_slot_bytes ? cut->row_bytes : cut->reply_slot_bytes;
        cut->reply_slot_bytes = 0;
    }
    uint64_t request = cut->row_bytes + cut->slot_bytes;
    flow->one_slot_bytes = request > cut->reply_slot_bytes ? request : cut->reply_slot_bytes;
}

static uint32_t default_window(const ep_batch *batch, const ep_layer_shape *shape)
{
    uint64_t tokens = (uint64_t)32 * shape->experts / (batch->top_k > 0 ? batch->top_k : 1);
    tokens = tokens < EP_FLOW_WINDOW_TOKENS_MIN ? EP_FLOW_WINDOW_TOKENS_MIN : tokens;
    return tokens > EP_TOKENS_MAX ? EP_TOKENS_MAX : (uint32_t)tokens;
}

uint32_t ep_flow_window_at(const ep_flow *flow, uint32_t begin)
{
    uint32_t tokens = begin > flow->first_tokens ? begin : flow->first_tokens;
    return tokens < flow->window_tokens ? tokens : flow->window_tokens;
}

static uint32_t streamed_first(uint32_t window_tokens, uint32_t tokens)
{
    uint32_t first = tokens / EP_FLOW_FIRST_TOKENS_PART;
    uint32_t max = window_tokens / EP_FLOW_FIRST_WINDOW_PART;
    first = first > EP_FLOW_FIRST_TOKENS_MIN ? first : EP_FLOW_FIRST_TOKENS_MIN;
    first = first < max ? first : max;
    return first > 0 ? first : 1;
}

/* Sets first_tokens and windows_count from window_tokens. */
static void cut_windows(ep_flow *flow, uint32_t tokens, bool grows)
{
    uint32_t begin = 0;
    flow->first_tokens = grows ? streamed_first(flow->window_tokens, tokens) : flow->window_tokens;
    flow->windows_count = 1;
    for (uint32_t n; begin < tokens && (n = ep_flow_window_at(flow, begin)) < tokens - begin;
         begin += n) {
        flow->windows_count++;
    }
}

void ep_flow_pick(const ep_flow_limits *limits, ep_mode mode, const ep_batch *batch,
                  const ep_layer_shape *shape, ep_flow *out_flow)
{
    uint32_t decode_max =
        limits->decode_tokens_max != 0 ? limits->decode_tokens_max : EP_FLOW_DECODE_TOKENS_DEFAULT;
    const bool is_large = batch->tokens > decode_max || limits->has_few_nodes;
    ep_flow flow = {.prefill = mode == EP_MODE_PREFILL || (mode == EP_MODE_AUTO && is_large),
                    .window_tokens = batch->tokens > 0 ? batch->tokens : 1,
                    .frame_bytes = limits->frame_bytes_max};
    if (flow.prefill) {
        uint32_t window =
            limits->window_tokens != 0 ? limits->window_tokens : default_window(batch, shape);
        flow.window_tokens = window < flow.window_tokens ? window : flow.window_tokens;
        flow.frame_bytes =
            limits->chunk_bytes_max < flow.frame_bytes ? limits->chunk_bytes_max : flow.frame_bytes;
    }
    count_bytes(batch, &flow);
    uint64_t token_bytes = flow.reply_row_bytes * ep_batch_slots_per_token(batch, shape);
    bool is_one = flow.window_tokens >= batch->tokens &&
                  batch->tokens * token_bytes <= limits->window_bytes_max;
    uint64_t bytes_max =
        is_one ? limits->window_bytes_max : limits->window_bytes_max / EP_FLOW_WINDOWS;
    uint64_t fitting = token_bytes > 0 ? bytes_max / token_bytes : flow.window_tokens;
    if (fitting < flow.window_tokens) {
        flow.window_tokens = fitting > 0 ? (uint32_t)fitting : 1;
    }
    cut_windows(&flow, batch->tokens,
                flow.prefill && limits->is_streamed && limits->window_tokens == 0);
    flow.is_aside = !limits->is_streamed && (flow.prefill || flow.windows_count > 1);
    flow.is_piecewise = limits->is_streamed || flow.is_aside;
    *out_flow = flow;
}

uint64_t ep_flow_room_bytes(const ep_flow *flow, uint64_t peer_frame_bytes_max)
{
    uint64_t frame = flow->frame_bytes;
    if (peer_frame_bytes_max != 0 && peer_frame_bytes_max < frame) {
        frame = peer_frame_bytes_max;
    }
    return frame > EP_FLOW_FRAME_OVERHEAD_BYTES ? frame - EP_FLOW_FRAME_OVERHEAD_BYTES : 0;
}

ep_err ep_flow_check(const ep_flow *flow, ep_error *out_error)
{
    uint64_t needed = flow->one_slot_bytes;
    if (needed > ep_flow_room_bytes(flow, 0)) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%s is %zu: a frame of one row needs %" PRIu64
                            " bytes (the row of %" PRIu64 " and %u for what goes with it)",
                            flow->prefill ? "chunk_bytes_max" : "frame_bytes_max",
                            flow->frame_bytes, needed + EP_FLOW_FRAME_OVERHEAD_BYTES, needed,
                            EP_FLOW_FRAME_OVERHEAD_BYTES);
    }
    return EP_OK;
}

uint32_t ep_flow_frames_max(const ep_flow *flow, uint64_t slots, uint32_t nodes)
{
    uint64_t room = ep_flow_room_bytes(flow, 0) / flow->one_slot_bytes;
    /* rows of one frame if each slot has a row of its own */
    room = room > EP_TOKENS_MAX ? EP_TOKENS_MAX : room;
    uint64_t frames = ep_plan_chunks_max(slots, room, nodes);
    return frames > UINT32_MAX ? UINT32_MAX : (uint32_t)frames;
}

uint64_t ep_flow_claim_bytes(const ep_flow *flow, uint64_t slots, uint32_t nodes)
{
    uint64_t frames = ep_flow_frames_max(flow, slots, nodes);
    return frames * ep_buffer_class_bytes(1) + 2 * slots * flow->reply_row_bytes;
}
