/* SPDX-License-Identifier: Apache-2.0 */
/* Experts over ranks: equal shares, and one more on the first ranks where it does not divide. */
#include "group/group_layout.h"

#include <inttypes.h>
#include <stdio.h>

ep_group_layout ep_group_layout_of(const ep_group_call *call)
{
    return (ep_group_layout){.ranks = (uint32_t)call->ranks,
                             .shared_ranks = (uint32_t)call->shared_ranks,
                             .shared_experts = (uint32_t)call->shared_experts,
                             .experts = (uint32_t)call->moe_experts};
}

static uint32_t share_begin(uint32_t items, uint32_t holders, uint32_t holder)
{
    uint32_t more = items % holders;
    return holder * (items / holders) + (holder < more ? holder : more);
}

static uint32_t share_holder(uint32_t items, uint32_t holders, uint32_t item)
{
    uint32_t each = items / holders;
    uint32_t more = items % holders;
    uint32_t larger = more * (each + 1); /* items on the ranks that have one more */
    return item < larger ? item / (each + 1) : more + (item - larger) / each;
}

uint32_t ep_group_first_bucket(const ep_group_layout *layout, uint32_t rank)
{
    uint32_t shared = layout->shared_ranks;
    return rank < shared
               ? rank
               : shared + share_begin(layout->experts, layout->ranks - shared, rank - shared);
}

uint32_t ep_group_local_experts(const ep_group_layout *layout, uint32_t rank)
{
    return ep_group_first_bucket(layout, rank + 1) - ep_group_first_bucket(layout, rank);
}

uint32_t ep_group_bucket_rank(const ep_group_layout *layout, uint32_t bucket)
{
    uint32_t shared = layout->shared_ranks;
    return bucket < shared
               ? bucket
               : shared + share_holder(layout->experts, layout->ranks - shared, bucket - shared);
}

uint32_t ep_group_shared_rank(const ep_group_layout *layout, uint32_t shared, uint32_t source)
{
    uint32_t begin = share_begin(layout->shared_ranks, layout->shared_experts, shared);
    uint32_t end = share_begin(layout->shared_ranks, layout->shared_experts, shared + 1);
    return begin + source % (end - begin);
}

/* How many ranks share this shared rank's expert; with n, it serves every n-th rank. */
static uint32_t peers_of_shared_rank(const ep_group_layout *layout, uint32_t rank)
{
    uint32_t shared = share_holder(layout->shared_ranks, layout->shared_experts, rank);
    return share_begin(layout->shared_ranks, layout->shared_experts, shared + 1) -
           share_begin(layout->shared_ranks, layout->shared_experts, shared);
}

int64_t ep_group_capacity(const ep_group_call *call, uint32_t rank, char *out_formula,
                          size_t formula_bytes)
{
    ep_group_layout layout = ep_group_layout_of(call);
    int64_t world = layout.ranks;
    int64_t batch = call->global_bs != 0 ? call->global_bs / call->world_size : call->tokens;
    const char *name = call->global_bs != 0 ? "global_bs/W" : "BS";
    if (rank < layout.shared_ranks) {
        int64_t peers = peers_of_shared_rank(&layout, rank);
        snprintf(out_formula, formula_bytes,
                 "A = %s * ceil(W / (shared_expert_rank_num / shared_expert_num)) = %" PRId64
                 " * ceil(%" PRId64 " / %" PRId64 ")",
                 name, batch, world, peers);
        return batch * ((world + peers - 1) / peers);
    }
    int64_t local = ep_group_local_experts(&layout, rank);
    int64_t slots = call->top_k;
    int64_t most = local < slots && call->allow_duplicates == 0 ? local : slots;
    snprintf(out_formula, formula_bytes,
             "A = %s * W * min(local experts, K) = %" PRId64 " * %" PRId64 " * min(%" PRId64
             ", %" PRId64 ")",
             name, batch, world, local, slots);
    return local == 0 ? 0 : batch * world * most;
}

#define BAD(...) ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, __VA_ARGS__)

static ep_err read_tables(const int32_t *info, uint32_t world, uint32_t ranks,
                          uint32_t *out_members, ep_error *out_error)
{
    const int32_t *local_of = info + 4;
    const int32_t *rank_of = info + 4 + world;
    uint32_t members = 0;
    for (uint32_t r = 0; r < world; r++) {
        if (local_of[r] == -1) {
            continue;
        }
        if (local_of[r] < 0 || (uint32_t)local_of[r] >= ranks) {
            return BAD("elastic_info table1[%" PRIu32 "] is %" PRId32 ": allowed -1..%" PRIu32, r,
                       local_of[r], ranks - 1);
        }
        members++;
    }
    if (members != ranks) {
        return BAD("elastic_info names %" PRIu32
                   " ranks in table1, its new rank number is %" PRIu32,
                   members, ranks);
    }
    for (uint32_t i = 0; i < ranks; i++) {
        if (rank_of[i] < 0 || (uint32_t)rank_of[i] >= world || local_of[rank_of[i]] != (int32_t)i) {
            return BAD("elastic_info table2[%" PRIu32 "] is %" PRId32
                       ": allowed the rank whose table1 entry is %" PRIu32,
                       i, rank_of[i], i);
        }
        out_members[i] = (uint32_t)rank_of[i];
    }
    return EP_OK;
}

ep_err ep_group_elastic_read(const int32_t *info, uint32_t world, uint32_t rank,
                             ep_group_call *call, uint32_t *out_members, ep_error *out_error)
{
    if (info[0] != 0 && info[0] != 1) {
        return BAD("elastic_info is_scaled_down is %" PRId32 ": allowed 0, 1", info[0]);
    }
    if (info[0] == 0) {
        for (uint32_t r = 0; r < world; r++) {
            out_members[r] = r;
        }
        return EP_OK;
    }
    if (call->moe_experts < 1 || call->moe_experts > INT32_MAX) {
        return BAD("moe_expert_num is %" PRId64 ": allowed 1..%d", call->moe_experts, INT32_MAX);
    }
    if (info[1] < 1 || (uint32_t)info[1] > world) {
        return BAD("elastic_info new rank number is %" PRId32 ": allowed 1..%" PRIu32, info[1],
                   world);
    }
    ep_err err = read_tables(info, world, (uint32_t)info[1], out_members, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (info[4 + rank] < 0) {
        return BAD("elastic_info leaves out rank %" PRIu32
                   ", which makes this call: such a rank makes none",
                   rank);
    }
    /* FNV-1a over the whole tensor, so that equal tensors have equal digests. 0 means "without". */
    uint64_t digest = 0xcbf29ce484222325ull;
    for (uint32_t i = 0; i < 4 + 2 * world; i++) {
        digest = (digest ^ (uint32_t)(i >= 4 + world + (uint32_t)info[1] ? 0 : info[i])) *
                 0x100000001b3ull;
    }
    call->elastic_digest = (int64_t)(digest == 0 ? 1 : digest);
    call->ranks = info[1];
    call->shared_ranks = info[2];
    call->gone_experts = call->moe_experts > info[3] ? call->moe_experts - info[3] : 0;
    call->moe_experts = info[3];
    call->local_rank = info[4 + rank];
    return EP_OK;
}
