/* SPDX-License-Identifier: Apache-2.0 */
/*
 * assist_info_for_combine: i32 [ints]. First come triples (source rank, token, slot) of the n rows
 * received, as the vendor's kernel writes them. The last 16 ints, the seal, say which dispatch
 * wrote it and for what, so that a combine can detect that of another dispatch.
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
    uint64_t number;        /* of the dispatch within that membership */
    uint32_t rows;          /* n */
    uint32_t ids_digest;    /* of expert_ids and x_active_mask */
    uint32_t counts_digest; /* of ep_recv_counts */
} ep_group_assist;

/* CRC32C over shape, ids and mask of a checked batch. */
uint32_t ep_group_ids_digest(const ep_batch *batch);
uint32_t ep_group_counts_digest(const int32_t *counts, size_t count);

/* Writes the last ints. ints >= 3*rows + EP_GROUP_ASSIST_TAIL_INTS; the triples must be there. */
void ep_group_assist_seal(const ep_group_assist *assist, int32_t *info, size_t ints);
/*
 * Reads the seal and compares it with the combine's membership, ids_digest and counts_digest in
 * expected. Errors: FAILED_PRECONDITION saying what does not belong together; INVALID_ARGUMENT (not
 * written by a dispatch, or changed since).
 */
ep_err ep_group_assist_open(const int32_t *info, size_t ints, const ep_group_assist *expected,
                            ep_group_assist *out_assist, ep_error *out_error);

#endif
