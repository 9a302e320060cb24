/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantisers may put columns into groups in an order of their own, and say the group of each
 * column. In memory groups follow each other: columns are sorted by group, those of a group as they
 * stood. What meets these columns is put into the same order: rows of gate and up for down's
 * columns, the inputs for those of gate and up.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_WEIGHT_ORDER_H
#define EP_MODEL_WEIGHT_ORDER_H

#include "model/expert_plan.h"

/* By matrix: the column of the file that stands at each place; NULL: all as they are. */
typedef struct ep_weight_orders {
    uint32_t *columns[EP_MATRIX_COUNT];
} ep_weight_orders;

/*
 * Reads and checks the orders there are. Errors: BAD_FILE (a group that does not exist, or has more
 * columns than others; groups out of order where the config says that they are not), UNIMPLEMENTED
 * (gate and up differ), NO_MEMORY. fini in any case.
 */
ep_err ep_weight_orders_init(ep_weight_orders *orders, const ep_expert_plan *plan,
                             uint8_t *const *raw, ep_error *out_error);
void ep_weight_orders_fini(ep_weight_orders *orders);
/* Puts a matrix's rows and columns in their places, and its bias; each may be NULL. NO_MEMORY. */
ep_err ep_weight_orders_apply(const ep_weight_orders *orders, const ep_expert_plan *plan,
                              ep_matrix which, uint8_t *values, uint8_t *scales, uint8_t *bias,
                              ep_error *out_error);
/* out[i]: the place of input i. */
void ep_weight_orders_places(const ep_weight_orders *orders, uint32_t count, uint8_t *out);

#endif
