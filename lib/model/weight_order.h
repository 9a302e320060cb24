/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantisers may put columns into groups in an order of their own, and store the group of each
 * column. In memory, columns are sorted by group (stably), so that each group is contiguous. What
 * is multiplied by these columns is put into the same order: rows of gate and up for down's
 * columns, and the inputs for the columns of gate and up.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_WEIGHT_ORDER_H
#define EP_MODEL_WEIGHT_ORDER_H

#include "model/expert_plan.h"

/* For each matrix: which column of the file is at each place; NULL: the file's order. */
typedef struct ep_weight_orders {
    uint32_t *columns[EP_MATRIX_COUNT];
} ep_weight_orders;

/*
 * Reads and checks the stored orders. Errors: BAD_FILE (a group that does not exist, or has more
 * columns than others; groups out of order where the config rules that out), UNIMPLEMENTED (the
 * orders of gate and up differ), NO_MEMORY. Call fini in any case.
 */
ep_err ep_weight_orders_init(ep_weight_orders *orders, const ep_expert_plan *plan,
                             uint8_t *const *raw, ep_error *out_error);
void ep_weight_orders_fini(ep_weight_orders *orders);
/* Reorders a matrix's rows and columns, and its bias; each may be NULL. NO_MEMORY. */
ep_err ep_weight_orders_apply(const ep_weight_orders *orders, const ep_expert_plan *plan,
                              ep_matrix which, uint8_t *values, uint8_t *scales, uint8_t *bias,
                              ep_error *out_error);
/* out[i]: the place of input i. */
void ep_weight_orders_places(const ep_weight_orders *orders, uint32_t count, uint8_t *out);

#endif
