/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which rank holds which expert, and how many rows a rank may receive. Ranks here are those after
 * elastic_info.
 *
 * Buckets    the destinations of rows, in the order of the ranks: bucket r < SR is shared rank r,
 *            bucket SR + e is MoE expert e. The buckets of a rank are adjacent.
 * Threads    pure.
 */
#ifndef EP_GROUP_LAYOUT_H
#define EP_GROUP_LAYOUT_H

#include "group/group_call.h"

typedef struct ep_group_layout {
    uint32_t ranks;          /* W */
    uint32_t shared_ranks;   /* SR < W */
    uint32_t shared_experts; /* S <= SR; 0 if and only if SR is 0 */
    uint32_t experts;        /* M >= 1 */
} ep_group_layout;

/* call must have passed ep_group_profile_check. */
ep_group_layout ep_group_layout_of(const ep_group_call *call);

static inline uint32_t ep_group_buckets(const ep_group_layout *layout)
{
    return layout->shared_ranks + layout->experts;
}

/* The most MoE experts that a rank has. */
static inline int64_t ep_group_most_local_experts(const ep_group_call *call)
{
    const int64_t holders = call->ranks - call->shared_ranks;
    return (call->moe_experts + holders - 1) / holders;
}

/* First bucket of a rank; for rank == ranks their number. A rank's buckets are its local
 * experts. */
uint32_t ep_group_first_bucket(const ep_group_layout *layout, uint32_t rank);
/* L of a rank; 1 on a shared rank. */
uint32_t ep_group_local_experts(const ep_group_layout *layout, uint32_t rank);
uint32_t ep_group_bucket_rank(const ep_group_layout *layout, uint32_t bucket);
/* The shared rank that serves shared expert s for tokens of rank source. */
uint32_t ep_group_shared_rank(const ep_group_layout *layout, uint32_t shared, uint32_t source);

/* A of a rank, in rows; *out_formula (NULL, with 0 bytes: not wanted) is its formula with numbers.
 */
int64_t ep_group_capacity(const ep_group_call *call, uint32_t rank, char *out_formula,
                          size_t formula_bytes);

/*
 * Reads elastic_info: i32 [4+2*world]. Members are the group's ranks in local order. Errors:
 * INVALID_ARGUMENT naming what does not fit. With is_scaled_down 0 all ranks are members, and call
 * keeps its numbers.
 */
ep_err ep_group_elastic_read(const int32_t *info, uint32_t world, uint32_t rank,
                             ep_group_call *call, uint32_t *out_members, ep_error *out_error);

#endif
