/* SPDX-License-Identifier: Apache-2.0 */
/* How batches are cut: modes, windows, frames. */
#include <criterion/criterion.h>

#include "base/random.h"
#include "call/flow.h"
#include "wire/forward_codec.h"
#include "support/plan_whole.h"

static const ep_flow_limits limits = {.frame_bytes_max = 16u << 20,
                                      .chunk_bytes_max = 1u << 20,
                                      .window_bytes_max = 128u << 20,
                                      .window_tokens = 0};
static const ep_layer_shape shape = {.hidden = 4096, .experts = 256};

static ep_batch batch_of(uint32_t tokens, uint32_t hidden)
{
    return (ep_batch){.tokens = tokens,
                      .top_k = 8,
                      .hidden = hidden,
                      .x = {.dtype = EP_DTYPE_BF16},
                      .wire_dtype = EP_DTYPE_BF16,
                      .shared_source = EP_SHARED_NONE};
}

static ep_flow pick(ep_mode mode, uint32_t tokens, uint32_t hidden, const ep_flow_limits *l)
{
    ep_flow flow;
    ep_batch batch = batch_of(tokens, hidden);
    ep_flow_pick(l, mode, &batch, &shape, &flow);
    return flow;
}

Test(flow, auto_follows_the_tables_threshold)
{
    ep_flow_limits l = limits;
    cr_assert(!pick(EP_MODE_AUTO, 256, 64, &l).prefill);
    cr_assert(pick(EP_MODE_AUTO, 257, 64, &l).prefill);
    l.decode_tokens_max = 16;
    cr_assert(!pick(EP_MODE_AUTO, 16, 64, &l).prefill);
    cr_assert(pick(EP_MODE_AUTO, 17, 64, &l).prefill);
    cr_assert(pick(EP_MODE_PREFILL, 1, 64, &l).prefill);
    cr_assert(!pick(EP_MODE_DECODE, 65536, 64, &l).prefill);
    l.has_few_nodes = true;
    cr_assert(pick(EP_MODE_AUTO, 1, 64, &l).prefill);
    cr_assert(!pick(EP_MODE_DECODE, 1, 64, &l).prefill, "the caller's own mode goes first");
}

Test(flow, the_default_window_gives_each_expert_32_rows)
{
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &limits).window_tokens, 32 * 256 / 8);
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &limits).windows_count, 64);
    cr_assert_eq(pick(EP_MODE_PREFILL, 100, 64, &limits).windows_count, 1);
    cr_assert_eq(pick(EP_MODE_PREFILL, 0, 64, &limits).windows_count, 1);
}

Test(flow, a_streamed_call_begins_with_small_windows)
{
    ep_flow_limits l = limits;
    l.is_streamed = true;
    for (uint32_t tokens = 1; tokens <= 65536; tokens += 1 + tokens / 7) {
        ep_flow flow = pick(EP_MODE_PREFILL, tokens, 64, &l);
        uint32_t begin = 0, windows = 0;
        do { /* as they are sent */
            uint32_t n = ep_flow_window_at(&flow, begin);
            cr_assert(n >= 1 && n <= flow.window_tokens);
            begin += n;
            windows++;
            cr_assert(windows > EP_FLOW_WINDOWS || tokens < 2048 || begin <= tokens / 8);
        } while (begin < tokens);
        cr_assert_eq(windows, flow.windows_count, "%u tokens", tokens);
        cr_assert(flow.is_piecewise);
    }
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &l).first_tokens, 1024 / 8);
    cr_assert_eq(pick(EP_MODE_PREFILL, 4096, 64, &l).first_tokens, 4096 / 64);
    cr_assert_eq(pick(EP_MODE_PREFILL, 300, 64, &l).first_tokens, 32);
    cr_assert_eq(pick(EP_MODE_DECODE, 200, 64, &l).windows_count, 1);
    cr_assert(pick(EP_MODE_DECODE, 200, 64, &l).is_piecewise);
    l.window_tokens = 1024; /* who says how long windows are means all of them */
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &l).first_tokens, 1024);
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &limits).first_tokens, 1024);
}

Test(flow, a_windows_reply_rows_are_bounded_in_both_modes)
{
    for (int mode = EP_MODE_DECODE; mode <= EP_MODE_PREFILL; mode++) {
        ep_flow flow = pick((ep_mode)mode, 65536, 4096, &limits);
        cr_assert_leq((uint64_t)flow.window_tokens * 8 * 4096 * 2, limits.window_bytes_max);
        cr_assert_geq((uint64_t)flow.window_tokens * flow.windows_count, 65536u);
    }
    ep_flow_limits tiny = limits;
    tiny.window_bytes_max = 1;
    cr_assert_eq(pick(EP_MODE_DECODE, 3, 4096, &tiny).window_tokens, 1);
}

/* Chunks of a random plan, with the parts' alignment and all, as forward_codec lays them out. */
Test(flow, a_frame_and_its_reply_stay_below_the_limit)
{
    enum { TOKENS = 512, TOP_K = 8 };
    static const ep_dtype types[] = {EP_DTYPE_BF16, EP_DTYPE_F32, EP_DTYPE_I8};
    static int32_t ids[TOKENS * TOP_K];
    uint32_t chosen[256];
    uint64_t state = 1;
    for (uint32_t i = 0; i < TOKENS * TOP_K; i++) {
        ids[i] = (int32_t)(ep_splitmix64(&state) % 256);
    }
    for (uint32_t e = 0; e < 256; e++) {
        chosen[e] = e % 3;
    }
    for (size_t i = 0; i < 48; i++) {
        ep_batch batch = batch_of(TOKENS, 4096);
        ep_flow flow;
        ep_flow_limits l = limits;
        ep_routing_plan plan;
        ep_routing_layer layer = {.shape = shape};
        batch.ids = (ep_rows){ids, sizeof(ids[0]) * TOP_K, EP_DTYPE_I32};
        batch.x.dtype = types[i % 3];
        batch.wire_dtype = types[i / 3 % 2];
        batch.weight_on = i / 6 % 2 ? EP_WEIGHT_ON_INPUT : EP_WEIGHT_ON_OUTPUT;
        batch.node_sum = i / 24 == 1 && batch.weight_on == EP_WEIGHT_ON_OUTPUT;
        if (i / 12 % 2 == 1) { /* one row, or little more, fits */
            l.chunk_bytes_max = 4096 * 4 + EP_FLOW_FRAME_OVERHEAD_BYTES + 14;
        }
        ep_flow_pick(&l, EP_MODE_PREFILL, &batch, &shape, &flow);
        cr_assert_eq(ep_flow_check(&flow, NULL), EP_OK);
        uint64_t room[3] = {ep_flow_room_bytes(&flow, 0), ep_flow_room_bytes(&flow, 0),
                            ep_flow_room_bytes(&flow, 0)};
        ep_plan_cut cut = flow.cut;
        cut.room_bytes = room;
        ep_routing_plan_init(&plan);
        cr_assert_eq(plan_whole(&plan, &batch, &layer, 3, chosen, &cut, 0, TOKENS, NULL, 0, NULL),
                     EP_OK);
        for (uint32_t c = 0; c < plan.chunks_count; c++) {
            const ep_plan_chunk *chunk = &plan.chunks[c];
            ep_forward_layout layout;
            cr_assert(ep_forward_layout_make(
                chunk->rows_count, chunk->slots_count, 4096, batch.x.dtype,
                batch.weight_on == EP_WEIGHT_ON_INPUT || batch.node_sum, &layout));
            cr_assert(!batch.node_sum || ep_forward_layout_add_places(&layout, chunk->slots_count));
            uint32_t reply_rows = batch.node_sum ? chunk->rows_count : chunk->slots_count;
            /* leaving room for the fixed part and the protobuf header */
            cr_assert_leq(layout.total_bytes + EP_FLOW_FRAME_OVERHEAD_BYTES / 2, l.chunk_bytes_max);
            cr_assert_leq((uint64_t)reply_rows * 4096 * ep_dtype_bytes(batch.wire_dtype) +
                              EP_FLOW_FRAME_OVERHEAD_BYTES,
                          l.chunk_bytes_max);
        }
        cr_assert_leq(plan.chunks_count, ep_flow_frames_max(&flow, TOKENS * TOP_K, 3));
        ep_routing_plan_fini(&plan);
    }
}

Test(flow, a_row_above_the_limit_is_refused_by_name)
{
    ep_error error;
    ep_flow flow;
    ep_flow_limits l = limits;
    ep_batch batch = batch_of(16, 4096);
    l.chunk_bytes_max = 12 * 1024;
    ep_flow_pick(&l, EP_MODE_PREFILL, &batch, &shape, &flow);
    cr_assert_eq(ep_flow_check(&flow, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_str_eq(error.text, "chunk_bytes_max is 12288: a frame of one row needs 12296 bytes "
                                 "(the row of 8200 and 4096 for what goes with it)");
    l.chunk_bytes_max = 12296;
    ep_flow_pick(&l, EP_MODE_PREFILL, &batch, &shape, &flow);
    cr_assert_eq(ep_flow_check(&flow, NULL), EP_OK);
    ep_flow_pick(&l, EP_MODE_DECODE, &batch, &shape, &flow);
    cr_assert_eq(ep_flow_check(&flow, NULL), EP_OK);
}

Test(flow, a_peers_smaller_limit_counts)
{
    ep_batch batch = batch_of(16, 4096);
    ep_flow flow;
    ep_flow_pick(&limits, EP_MODE_DECODE, &batch, &shape, &flow);
    uint64_t own = ep_flow_room_bytes(&flow, 0);
    cr_assert_lt(ep_flow_room_bytes(&flow, 65536), own);
    cr_assert_eq(ep_flow_room_bytes(&flow, (uint64_t)1 << 40), own);
    cr_assert_eq(ep_flow_room_bytes(&flow, 100), 0);
    cr_assert_eq(ep_flow_frames_max(&flow, 5, 100), 5);
    cr_assert_eq(ep_flow_frames_max(&flow, 128, 6), 6);
}

Test(flow, a_claim_covers_the_size_classes_of_every_split)
{
    /* rows of 128 bytes: a frame of one slot still takes a whole class */
    ep_flow flow = pick(EP_MODE_DECODE, 64, 64, &limits);
    cr_assert_geq(ep_flow_claim_bytes(&flow, 8, 8), 8 * 4096);
    /* 64 KiB of rows and a header */
    cr_assert_geq(ep_flow_claim_bytes(&flow, 512, 1), 128 * 1024);
}
