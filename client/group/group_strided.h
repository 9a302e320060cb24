/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensors of the group API with any strides (group.h). Those whose elements have gaps, run
 * backwards or repeat are replaced by dense memory: gathered before the operator reads it,
 * scattered after the operator has written it.
 *
 * Use        zero it first, and parts_count before each set of tensors; add each, place, then
 *            copy. Memory is kept for the next set; fini frees it.
 * Threads    one at a time.
 */
#ifndef EP_CLIENT_GROUP_STRIDED_H
#define EP_CLIENT_GROUP_STRIDED_H

#include "common/device_stage.h"

typedef struct ep_strided_part {
    ep_tensor *tensor; /* replaced in ep_strided_place; NULL afterwards */
    ep_tensor sparse;  /* the caller's */
    uint32_t ways;     /* EP_STAGE_IN, _OUT, _ROWS (common/device_stage.h) */
    size_t offset;     /* in memory */
} ep_strided_part;

typedef struct ep_strided {
    uint8_t *memory;
    size_t memory_bytes;
    ep_strided_part parts[EP_STAGE_PARTS_MAX];
    uint32_t parts_count;
} ep_strided;

/* Adds a host tensor. One with dense rows is left as it is, and so is an invalid one, which
 * ep_tensor_check reports later. Errors: INVALID_ARGUMENT (a result whose elements overlap). */
ep_err ep_strided_add(ep_strided *strided, const char *name, ep_tensor *tensor, uint32_t ways,
                      ep_error *out_error);
/* Replaces the added tensors by dense ones. Errors: NO_MEMORY. */
ep_err ep_strided_place(ep_strided *strided, ep_error *out_error);
/* way EP_STAGE_IN: gathers inputs, and results of one dimension, of which the operator may write
 * only a part. EP_STAGE_OUT: scatters results. Of parts with EP_STAGE_ROWS only the first rows_max
 * rows. */
void ep_strided_copy(const ep_strided *strided, uint32_t way, size_t rows_max);
void ep_strided_fini(ep_strided *strided);

#endif
