/* SPDX-License-Identifier: Apache-2.0 */
/* How batches are cut: modes, windows, frames. */
#include <criterion/criterion.h>

#include "flow.h"

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
}

Test(flow, the_default_window_gives_each_expert_64_rows)
{
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &limits).window_tokens, 64 * 256 / 8);
    cr_assert_eq(pick(EP_MODE_PREFILL, 65536, 64, &limits).windows_count, 32);
    cr_assert_eq(pick(EP_MODE_PREFILL, 100, 64, &limits).windows_count, 1);
    cr_assert_eq(pick(EP_MODE_PREFILL, 0, 64, &limits).windows_count, 1);
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

Test(flow, a_frame_and_its_reply_stay_below_the_limit)
{
    static const ep_dtype types[] = {EP_DTYPE_BF16, EP_DTYPE_F32, EP_DTYPE_I8};
    for (size_t x = 0; x < 3; x++) {
        for (size_t w = 0; w < 2; w++) {
            ep_batch batch = batch_of(1024, 4096);
            ep_flow flow;
            batch.x.dtype = types[x];
            batch.wire_dtype = types[w];
            ep_flow_pick(&limits, EP_MODE_PREFILL, &batch, &shape, &flow);
            uint64_t slots = ep_flow_frame_slots(&flow, &batch, 0);
            cr_assert_leq(slots * 4096 * ep_dtype_bytes(types[w]) + EP_FLOW_FRAME_OVERHEAD_BYTES,
                          limits.chunk_bytes_max);
            cr_assert_leq(slots * (4096 * ep_dtype_bytes(types[x]) + 16) + EP_FLOW_FRAME_OVERHEAD_BYTES,
                          limits.chunk_bytes_max);
            cr_assert_geq(slots, 1u);
        }
    }
}

Test(flow, a_peers_smaller_limit_counts_and_one_row_always_travels)
{
    ep_batch batch = batch_of(16, 4096);
    ep_flow flow;
    ep_flow_pick(&limits, EP_MODE_DECODE, &batch, &shape, &flow);
    uint32_t own = ep_flow_frame_slots(&flow, &batch, 0);
    cr_assert_lt(ep_flow_frame_slots(&flow, &batch, 65536), own);
    cr_assert_eq(ep_flow_frame_slots(&flow, &batch, (uint64_t)1 << 40), own);
    cr_assert_eq(ep_flow_frame_slots(&flow, &batch, 100), 1);
    cr_assert_eq(ep_flow_frames_max(&flow, &batch, 5, 100), 5);
    cr_assert_eq(ep_flow_frames_max(&flow, &batch, 128, 6), 6);
}

Test(flow, a_claim_covers_the_size_classes_of_every_split)
{
    ep_batch batch = batch_of(64, 64); /* rows of 128 bytes: a frame of one slot still takes a whole class */
    ep_flow flow = pick(EP_MODE_DECODE, 64, 64, &limits);
    cr_assert_geq(ep_flow_claim_bytes(&flow, &batch, 8, 8), 8 * 4096);
    cr_assert_geq(ep_flow_claim_bytes(&flow, &batch, 512, 1), 128 * 1024); /* 64 KiB of rows and a header */
}
