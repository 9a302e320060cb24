/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense memory that stands for a call's tensors whose elements have gaps between them, run
 * backwards or repeat: gathered before the operator reads it, spread after it has written.
 *
 * Use      zeroed first; then, for each set of tensors: begin, add each, place. It keeps its memory
 *          for the next set.
 */
#ifndef EP_CLIENT_GROUP_STRIDED_H
#define EP_CLIENT_GROUP_STRIDED_H

#include "common/device_stage.h"

typedef struct ep_strided_part {
    ep_tensor *tensor; /* until it is placed */
    ep_tensor sparse;  /* the caller's */
    uint32_t ways;     /* EP_STAGE_ */
    size_t offset;     /* in memory */
} ep_strided_part;

typedef struct ep_strided {
    uint8_t *memory;
    size_t memory_bytes;
    ep_strided_part parts[EP_STAGE_PARTS_MAX];
    uint32_t parts_count;
} ep_strided;

void ep_strided_begin(ep_strided *strided);
/* A host tensor, which is left as it is when it is dense inside a row, or not in order: that is
 * for who checks it. Errors: INVALID_ARGUMENT (a result whose elements overlap). */
ep_err ep_strided_add(ep_strided *strided, const char *name, ep_tensor *tensor, uint32_t ways,
                      ep_error *out_error);
/* Makes dense tensors of those that were added. Errors: NO_MEMORY. */
ep_err ep_strided_place(ep_strided *strided, ep_error *out_error);
/* Copies those of a way: inputs to the dense memory, EP_STAGE_OUT back; of parts with EP_STAGE_ROWS
 * the first rows_max rows. With inputs go results of one dimension, of which the operator may write
 * a part. */
void ep_strided_copy(const ep_strided *strided, uint32_t way, size_t rows_max);
void ep_strided_fini(ep_strided *strided);

#endif
