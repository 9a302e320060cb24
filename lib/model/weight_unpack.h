/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A matrix's numbers from the bytes of its tensors into the form it has in memory
 * (base/expert_form.h).
 *
 * raw: the bytes of each of the plan's runs.
 * Threads  pure.
 */
#ifndef EP_MODEL_WEIGHT_UNPACK_H
#define EP_MODEL_WEIGHT_UNPACK_H

#include "model/expert_plan.h"

/* Whether values, scales and bias are used where their runs were read. */
bool ep_weight_is_in_place(const ep_plan_matrix *matrix);
/*
 * Numbers that would spoil every result they touch: a NaN code among f8 values, a scale that is not
 * finite; and those that the form cannot hold. Errors: BAD_FILE, UNIMPLEMENTED (file, tensor,
 * element).
 */
ep_err ep_weight_check_numbers(const ep_expert_plan *plan, const ep_plan_matrix *matrix,
                               uint8_t *const *raw, ep_error *out_error);
/* The matrix's rows, row after row. */
void ep_weight_unpack_values(const ep_plan_matrix *matrix, const uint8_t *from, uint8_t *to);
/* Of EP_PACKING_BLOCKS: rows and the block of scales. */
void ep_weight_unpack_blocks(const ep_plan_matrix *matrix, const uint8_t *from, uint8_t *values,
                             uint8_t *scales);
/* Errors: BAD_FILE. */
ep_err ep_weight_check_blocks(const ep_plan_matrix *matrix, const ep_plan_run *run,
                              const uint8_t *from, ep_error *out_error);
/* The block of its scales; of formats that have them. */
void ep_weight_unpack_scales(const ep_plan_matrix *matrix, uint8_t *const *raw, uint8_t *to);
/* Elements of a vector beside the matrix, whose tensor has as many as the run or as the matrix has
 * rows. */
void ep_weight_unpack_bias(const ep_expert_plan *plan, const ep_plan_matrix *matrix,
                           const uint8_t *from, uint8_t *to);

#endif
