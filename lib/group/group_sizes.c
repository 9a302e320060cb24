/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group_sizes.h"

#include "group/group_frame.h"
#include "group/group_host_rows.h"
#include "group/group_profile.h"

#define MIB ((uint64_t)1 << 20)

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The most rows that one token may have on one MoE rank. */
static uint64_t rows_per_token(const ep_group_call *call)
{
    uint64_t local = (uint64_t)ep_group_most_local_experts(call);
    return call->allow_duplicates == 0 && local < (uint64_t)call->top_k ? local
                                                                        : (uint64_t)call->top_k;
}

/* ---- our frames ---- */

static uint64_t host_frame_bytes(const ep_group_call *call, uint64_t tokens, size_t row_bytes)
{
    const ep_group_host_shape shape = {
        .ranks = (uint32_t)call->ranks,
        .experts = (uint32_t)(call->moe_experts + call->shared_ranks),
        .slots = (uint32_t)(tokens * (uint64_t)(call->top_k + call->shared_experts)),
        .rows = (uint32_t)tokens,
        .quantised = true,
        .weights = true,
        .row_bytes = row_bytes};
    return ep_group_host_parts_of(&shape).bytes;
}

uint64_t ep_group_worst_frame_bytes(const ep_group_call *call, int64_t max_bs)
{
    const ep_dtype dtype = (ep_dtype)call->dtype;
    const uint64_t tokens = (uint64_t)max_bs;
    const uint32_t rows = (uint32_t)(tokens * rows_per_token(call));
    const size_t row = (size_t)call->hidden * ep_dtype_bytes(dtype);
    const size_t back = larger(row, ep_group_quant_row_bytes((uint32_t)call->hidden, dtype));
    uint64_t bytes = ep_group_dispatch_parts_of((uint32_t)ep_group_most_local_experts(call), rows,
                                                row, true, true)
                         .bytes;
    bytes = larger(bytes, ep_group_combine_parts_of(rows, back).bytes);
    if (call->comm == EP_GROUP_HIERARCHY) {
        bytes = larger(bytes, host_frame_bytes(call, tokens, row));
    }
    /* a frame may hold all that a rank received, with its counts and scales */
    if (call->tp_world_size > 1) {
        uint64_t received = (uint64_t)call->ranks * rows;
        uint64_t counts = (uint64_t)call->ranks * (uint64_t)ep_group_most_local_experts(call);
        bytes = larger(bytes, 3 * (uint64_t)64 + 4 * counts + received * (row + 4));
    }
    return EP_GROUP_BODY_OFFSET + bytes;
}

/* ---- the vendor's buffers ---- */

static uint64_t align(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* A row in the vendor's window: with fullmesh_v2, 480 of each 512 bytes are data. */
static uint64_t window_row(const ep_group_call *call)
{
    uint64_t bytes = align(2 * (uint64_t)call->hidden, 32) + 64;
    return call->comm == EP_GROUP_FULLMESH_V2 ? (bytes + 479) / 480 * 512 : align(bytes, 512);
}

static uint64_t a2_bytes(const ep_group_call *call, uint64_t max_bs)
{
    uint64_t world = (uint64_t)call->ranks;
    uint64_t hidden = (uint64_t)call->hidden;
    if (call->comm == EP_GROUP_HIERARCHY) {
        uint64_t token = hidden * 2 + 16 * align((uint64_t)call->top_k, 8);
        return ((uint64_t)call->moe_experts + world / 4) * align(max_bs * token, 512) + 8 * MIB;
    }
    return 2 * (max_bs * world * rows_per_token(call) * hidden * 2 + 2 * MIB);
}

static uint64_t a3_bytes(const ep_group_call *call, uint64_t max_bs)
{
    uint64_t hidden = (uint64_t)call->hidden;
    uint64_t slots = (uint64_t)call->top_k;
    if (call->comm == EP_GROUP_HIERARCHY) {
        return (uint64_t)call->moe_experts * max_bs * (hidden * 2 + 16 * align(slots, 8)) +
               404 * MIB;
    }
    return 2 * ((uint64_t)ep_group_most_local_experts(call) * max_bs * (uint64_t)call->ranks *
                    window_row(call) +
                (slots + (uint64_t)call->shared_experts) * max_bs * align(2 * hidden, 512));
}

uint64_t ep_group_vendor_bytes(const ep_group_call *call, int64_t max_bs)
{
    switch (call->profile) {
    case EP_GROUP_A2:
        return a2_bytes(call, (uint64_t)max_bs);
    case EP_GROUP_A3:
        return a3_bytes(call, (uint64_t)max_bs);
    default:
        return 0;
    }
}

uint64_t ep_group_vendor_tp_bytes(const ep_group_call *call, int64_t max_bs)
{
    if (call->profile != EP_GROUP_A3 || call->tp_world_size < 2) {
        return 0;
    }
    uint64_t rows = (uint64_t)max_bs * (uint64_t)call->ranks * rows_per_token(call);
    uint64_t width = 2 * (uint64_t)call->hidden;
    return 2 * rows * (align(align(width, 32) + 44, 512) + align(width, 512));
}
