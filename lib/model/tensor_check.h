/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks types and shapes of tensors; errors name file, tensor, what it is and what is allowed.
 *
 * Threads  pure.
 */
#ifndef EP_MODEL_TENSOR_CHECK_H
#define EP_MODEL_TENSOR_CHECK_H

#include "model/checkpoint_private.h"

/* Dimensions and their number, as two arguments; EP_DIMS_NONE for a tensor without dimensions. */
#define EP_DIMS(...)                                                                               \
    ((const uint64_t[]){__VA_ARGS__}), sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)
#define EP_DIMS_NONE ((const uint64_t *)NULL), 0

/* type: as in the file, "F8_E4M3". */
bool ep_tensor_has_type(const ep_checkpoint_entry *entry, const char *type);
bool ep_tensor_has_shape(const ep_checkpoint_entry *entry, const uint64_t *dims, size_t rank);
/* BAD_FILE. */
ep_err ep_tensor_shape_error(const ep_checkpoint_entry *entry, const uint64_t *dims, size_t rank,
                             ep_error *out_error);
ep_err ep_tensor_check_shape(const ep_checkpoint_entry *entry, const uint64_t *dims, size_t rank,
                             ep_error *out_error);
ep_err ep_tensor_type_error(const ep_checkpoint_entry *entry, const char *allowed,
                            ep_error *out_error);
/* dtype: bf16, f16 or f32; NONE: any of them. */
ep_err ep_tensor_check_float(const ep_checkpoint_entry *entry, ep_dtype dtype, ep_error *out_error);
/* The same, and the shape. rows 0: a vector, stored as [columns] or [1,columns]. */
ep_err ep_tensor_check_plain(const ep_checkpoint_entry *entry, uint64_t rows, uint64_t columns,
                             ep_dtype dtype, ep_error *out_error);

#endif
