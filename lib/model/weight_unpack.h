/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Converts a matrix's numbers from the bytes of its tensors to the form in memory
 * (base/expert_form.h). raw: the bytes of each of the plan's runs.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_WEIGHT_UNPACK_H
#define EP_MODEL_WEIGHT_UNPACK_H

#include "model/expert_plan.h"

/* Whether values, scales and bias can be used as they were read. */
bool ep_weight_is_in_place(const ep_plan_matrix *matrix);
/*
 * Refuses numbers that would spoil every result they touch (a NaN code among f8 values, a scale
 * that is not finite), and numbers that the form cannot hold. Errors: BAD_FILE, UNIMPLEMENTED
 * (file, tensor, element).
 */
ep_err ep_weight_check_numbers(const ep_expert_plan *plan, const ep_plan_matrix *matrix,
                               uint8_t *const *raw, ep_error *out_error);
/* Writes the matrix row by row. */
void ep_weight_unpack_values(const ep_plan_matrix *matrix, const uint8_t *from, uint8_t *to);
/* For EP_PACKING_BLOCKS: writes the rows and the block of scales. */
void ep_weight_unpack_blocks(const ep_plan_matrix *matrix, const uint8_t *from, uint8_t *values,
                             uint8_t *scales);
/* Checks the numbers of EP_PACKING_BLOCKS. Errors: BAD_FILE. */
ep_err ep_weight_check_blocks(const ep_plan_matrix *matrix, const ep_plan_run *run,
                              const uint8_t *from, ep_error *out_error);
/* Writes the block of scales; only for formats that have scales. */
void ep_weight_unpack_scales(const ep_plan_matrix *matrix, uint8_t *const *raw, uint8_t *to);
/* Writes the elements of a vector beside the matrix; its tensor has an element for each row of the
 * run or of the matrix. */
void ep_weight_unpack_bias(const ep_expert_plan *plan, const ep_plan_matrix *matrix,
                           const uint8_t *from, uint8_t *to);

#endif
