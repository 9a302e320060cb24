/* SPDX-License-Identifier: Apache-2.0 */
/*
 * combine_at = NODE_SUM: a node answers with one weighted sum per row of x, and the caller adds
 * these partial sums.
 *
 * Partial    acc = 0 in f32; over the row's slots of the frame in ascending place: acc = acc +
 *            scale * row, multiply and add rounded separately, where row is the expert's output
 *            already rounded to the wire type; then one rounding to the wire type. A shared
 *            expert's slot has the scale 1, which changes nothing.
 * Caller     acc = 0 in f32; over the token's slots in order: a partial sum is added at the first
 *            of its slots, copy and constant experts at theirs (ep_combine).
 * So the result depends on which slots a frame carries together. The same placement and the same
 * frames repeat it.
 *
 * Threads    pure.
 */
#ifndef EP_MOE_NODE_SUM_H
#define EP_MOE_NODE_SUM_H

#include <stddef.h>
#include <stdint.h>

#include "expertd/tensor.h"

/* The slots of a frame: slot i belongs to row slot_rows[i * slot_stride] (below rows_count), is at
 * places[i] among its token's slots and has the weight scales[i]. */
typedef struct ep_node_sum_slots {
    uint32_t rows_count;
    uint32_t slots_count;
    const uint32_t *slot_rows;
    size_t slot_stride;
    const uint16_t *places;
    const float *scales;
} ep_node_sum_slots;

/* row_begins [rows_count + 1], order [slots_count]: slot indexes by row, then place; equal places
 * keep their order. */
void ep_node_sum_order(const ep_node_sum_slots *slots, uint32_t *row_begins, uint32_t *order);
/* rows [slots_count,H] and out [rows_count,H] of dtype (bf16, f16, f32), which do not overlap;
 * scratch [2 * H] floats. */
void ep_node_sum(const ep_node_sum_slots *slots, const uint32_t *row_begins, const uint32_t *order,
                 const void *rows, ep_dtype dtype, size_t hidden, float *scratch, void *out);

/* Marks in ep_combine's rows a slot that is part of another slot's partial sum. */
extern const char ep_row_covered[];

/*
 * Puts a frame's partial sums into ep_combine's rows. slot_numbers: the frame's slots in any order.
 * partials [rows,row_bytes]: one for each of their tokens, ascending. Returns the number of tokens,
 * which is the number of partials needed.
 */
uint32_t ep_partials_place(const uint32_t *slot_numbers, uint32_t slots_count,
                           uint32_t slots_per_token, const uint8_t *partials, size_t row_bytes,
                           const void **rows);

#endif
