/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One frame for all ranks of a host (comm_alg = hierarchy): the row of each token once, and which
 * rows belong to the frame of which rank. The rank that receives it makes, for each rank of its
 * host, exactly the frame that a fullmesh would have sent (group_rows.h).
 *
 * Body (little endian; parts at multiples of 64 bytes; D ranks, E local experts of all of them, N
 * slots, U rows):
 *     u32 D, E, N, U, flags (1 scales, 2 weights), 0 | u64 bytes of a row, in 64 bytes
 *     {u32 rank of the group, u32 local experts, u32 slots} [D] | counts u32 [E]
 *     row of each slot u32 [N] | slots u32 [N] | weights f32 [N] if sent
 *     tokens u32 [U] | scales f32 [U] if quantised | rows
 *
 * Threads    pure.
 */
#ifndef EP_GROUP_HOST_ROWS_H
#define EP_GROUP_HOST_ROWS_H

#include "group/group_call.h"
#include "group/group_rows.h"

typedef struct ep_group_host_shape {
    uint32_t ranks;   /* D */
    uint32_t experts; /* E */
    uint32_t slots;   /* N */
    uint32_t rows;    /* U */
    bool quantised;
    bool weights;
    size_t row_bytes;
} ep_group_host_shape;

typedef struct ep_group_host_parts {
    size_t ranks; /* byte offsets in the body */
    size_t counts;
    size_t row_of;
    size_t slots;
    size_t weights;
    size_t tokens;
    size_t scales;
    size_t rows;
    size_t bytes;
} ep_group_host_parts;

/* Counts <= INT32_MAX, row_bytes <= 2^30. */
ep_group_host_parts ep_group_host_parts_of(const ep_group_host_shape *shape);

/* ---- on the sending rank ---- */

typedef struct ep_group_host_sender {
    /* without smooth scales, which would make a row differ from expert to expert */
    const ep_group_packer *packer;
    const ep_group_layout *layout;
    const uint32_t *offsets; /* from ep_group_sort, like order */
    const uint32_t *order;
    const uint32_t *members; /* [count] members on the host */
    const uint32_t *ranks;   /* rank in the group, indexed by member */
    uint32_t count;
    bool weights;           /* they are sent too */
    uint32_t *row_of_token; /* scratch [T]; must be kept from plan to fill */
} ep_group_host_sender;

/* Which tokens go to the host, in order of first use. */
ep_group_host_shape ep_group_host_plan(const ep_group_host_sender *sender);
/* Fills the body of ep_group_host_parts_of(shape).bytes. */
void ep_group_host_fill(const ep_group_host_sender *sender, const ep_group_host_shape *shape,
                        uint8_t *body);
/* Bytes of the largest frame body that the host makes of it for one of its ranks. */
size_t ep_group_host_largest(const ep_group_host_sender *sender, const ep_group_host_shape *shape);

/* ---- on the receiving rank ---- */

/* The part of a body for one rank. */
typedef struct ep_group_host_part {
    uint32_t rank;
    uint32_t local_experts;
    uint32_t slots;
    uint32_t first_count; /* index in the body's counts */
    uint32_t first_slot;
} ep_group_host_part;

typedef struct ep_group_host_body {
    const uint8_t *data;
    ep_group_host_shape shape;
    ep_group_host_parts parts;
} ep_group_host_body;

/*
 * Checks lengths, sums and row numbers. Also checks that a sender whose call is `told` can have
 * this many rows and slots of this length: what is made of a body for one rank has at most (top_k +
 * shared_experts) times the body's rows. Does not check ranks, tokens and slots.
 * Errors: PROTOCOL.
 */
ep_err ep_group_host_open(const ep_group_call *told, const uint8_t *data, size_t bytes,
                          ep_group_host_body *out_body, ep_error *out_error);
/* Reads the first part (index 0), or the next one; false: there is none. */
bool ep_group_host_next(const ep_group_host_body *body, uint32_t index,
                        ep_group_host_part *inout_part);
/* The size of the dispatch frame's body for a part; the next function writes it. */
size_t ep_group_host_part_bytes(const ep_group_host_body *body, const ep_group_host_part *part);
void ep_group_host_part_fill(const ep_group_host_body *body, const ep_group_host_part *part,
                             uint8_t *out);

#endif
