/* SPDX-License-Identifier: Apache-2.0 */
/* The seal at the end of assist_info_for_combine. */
#include "group/group_assist.h"

#include <inttypes.h>
#include <string.h>

#include "wire/frame.h"

#define MAGIC 0x31415045u /* "EPA1" */

typedef struct tail {
    uint32_t magic;
    uint32_t rows;
    uint64_t membership;
    uint64_t number;
    uint32_t ids_digest;
    uint32_t counts_digest;
    uint32_t triples_crc;
    uint32_t zero[6];
    uint32_t crc; /* of all bytes before it */
} tail;
_Static_assert(sizeof(tail) == EP_GROUP_ASSIST_TAIL_INTS * sizeof(int32_t), "tail");

uint32_t ep_group_ids_digest(const ep_batch *batch)
{
    uint32_t shape[2] = {batch->tokens, batch->top_k};
    uint32_t crc = ep_crc32c(0, shape, sizeof(shape));
    size_t row_bytes = batch->top_k * ep_dtype_bytes(batch->ids.dtype);
    for (uint32_t t = 0; t < batch->tokens; t++) {
        crc = ep_crc32c(crc, ep_rows_at(&batch->ids, t), row_bytes);
        if (batch->mask_slots.data != NULL) {
            crc = ep_crc32c(crc, ep_rows_at(&batch->mask_slots, t), batch->top_k);
        }
    }
    return batch->mask_tokens != NULL ? ep_crc32c(crc, batch->mask_tokens, batch->tokens) : crc;
}

uint32_t ep_group_counts_digest(const int32_t *counts, size_t count)
{
    return ep_crc32c(0, counts, count * sizeof(*counts));
}

static uint32_t triples_crc(const int32_t *info, uint32_t rows)
{
    return ep_crc32c(0, info, (size_t)rows * 3 * sizeof(*info));
}

void ep_group_assist_seal(const ep_group_assist *assist, int32_t *info, size_t ints)
{
    tail t = {.magic = MAGIC,
              .rows = assist->rows,
              .membership = assist->membership,
              .number = assist->number,
              .ids_digest = assist->ids_digest,
              .counts_digest = assist->counts_digest,
              .triples_crc = triples_crc(info, assist->rows)};
    t.crc = ep_crc32c(0, &t, offsetof(tail, crc));
    memcpy(info + ints - EP_GROUP_ASSIST_TAIL_INTS, &t, sizeof(t));
}

ep_err ep_group_assist_open(const int32_t *info, size_t ints, const ep_group_assist *expected,
                            ep_group_assist *out_assist, ep_error *out_error)
{
    tail t;
    memcpy(&t, info + ints - EP_GROUP_ASSIST_TAIL_INTS, sizeof(t));
    if (t.magic != MAGIC || t.crc != ep_crc32c(0, &t, offsetof(tail, crc))) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "assist_info_for_combine was not written by a dispatch: its last 16 "
                            "ints are not a seal (its length must be "
                            "that of the dispatch's output)");
    }
    if (t.membership != expected->membership) {
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "assist_info_for_combine is of membership %016" PRIx64 ", this group's is %016" PRIx64
            ": it was written by a dispatch in another group, or before the group was made anew",
            t.membership, expected->membership);
    }
    if ((size_t)t.rows * 3 > ints - EP_GROUP_ASSIST_TAIL_INTS ||
        t.triples_crc != triples_crc(info, t.rows)) {
        return ep_error_set(
            out_error, EP_ERR_INVALID_ARGUMENT,
            "assist_info_for_combine was altered since dispatch %" PRIu64 " wrote it", t.number);
    }
    if (t.ids_digest != expected->ids_digest) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "assist_info_for_combine is of another dispatch (number %" PRIu64
                            "): expert_ids or x_active_mask are not those "
                            "it was given",
                            t.number);
    }
    if (t.counts_digest != expected->counts_digest) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "assist_info_for_combine is of another dispatch (number %" PRIu64
                            "): ep_send_counts are not its ep_recv_counts",
                            t.number);
    }
    *out_assist = (ep_group_assist){.membership = t.membership,
                                    .number = t.number,
                                    .rows = t.rows,
                                    .ids_digest = t.ids_digest,
                                    .counts_digest = t.counts_digest};
    return EP_OK;
}
