/* SPDX-License-Identifier: Apache-2.0 */
/*
 * assist_info_for_combine: i32 [ints]. Triples (source rank, token, slot) of the n rows received
 * come first, as the vendor's kernel writes them; the last 16 ints say which dispatch wrote it and
 * for what, so that a combine can tell its own from another's.
 *
 * Threads    pure.
 */
#ifndef EP_GROUP_ASSIST_H
#define EP_GROUP_ASSIST_H

#include "moe/batch.h"

#define EP_GROUP_ASSIST_TAIL_INTS 16
#define EP_GROUP_ASSIST_INTS_PER_ROW 128

typedef struct ep_group_assist {
    uint64_t membership;    /* of the group */
    uint64_t number;        /* of the dispatch in it */
    uint32_t rows;          /* n */
    uint32_t ids_digest;    /* of expert_ids and x_active_mask */
    uint32_t counts_digest; /* of ep_recv_counts */
} ep_group_assist;

/* CRC32C over shape, ids and mask of a checked batch. */
uint32_t ep_group_ids_digest(const ep_batch *batch);
uint32_t ep_group_counts_digest(const int32_t *counts, size_t count);

/* ints >= 3*rows + EP_GROUP_ASSIST_TAIL_INTS; the triples are there already. */
void ep_group_assist_seal(const ep_group_assist *assist, int32_t *info, size_t ints);
/*
 * Reads and checks against what the combine brings: expected.membership, ids_digest, counts_digest.
 * Errors: FAILED_PRECONDITION saying what does not belong together; INVALID_ARGUMENT (not written
 * by a dispatch, or altered since).
 */
ep_err ep_group_assist_open(const int32_t *info, size_t ints, const ep_group_assist *expected,
                            ep_group_assist *out_assist, ep_error *out_error);

#endif
