/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Converts rows between element types: widening is exact, narrowing rounds once to nearest even
 * (base/numeric.h).
 *
 * Shapes     rows of n elements. dtype is bf16, f16 or f32 (i8 has its own calls in
 *            moe/quantize.h).
 * Memory     typed rows may have any alignment; float arrays are aligned. Source and result do not
 *            overlap.
 * Threads    pure.
 */
#ifndef EP_MOE_CONVERT_H
#define EP_MOE_CONVERT_H

#include <stdbool.h>
#include <stddef.h>

#include "expertd/tensor.h"

/* bf16, f16 or f32: the types of results, and of rows between client and node. */
bool ep_dtype_is_float(ep_dtype dtype);

void ep_row_widen(const void *row, ep_dtype dtype, size_t n, float *out);
void ep_row_narrow(const float *row, size_t n, ep_dtype dtype, void *out);
void ep_floats_add(const float *row, size_t n, float *acc);
/* acc[i] = acc[i] + weight * row[i], in f32, product and sum rounded separately. */
void ep_floats_add_weighted(const float *row, float weight, size_t n, float *acc);
/* The same for any type. wide: room for n floats. */
void ep_row_add_weighted(const void *row, ep_dtype dtype, float weight, size_t n, float *wide,
                         float *acc);
/* Converts through f32, so rounds once at most; equal types are copied. */
void ep_row_convert(const void *row, ep_dtype dtype, size_t n, ep_dtype out_dtype, void *out);
/* Number of NaN and Inf elements. */
size_t ep_row_count_nonfinite(const void *row, ep_dtype dtype, size_t n);

#endif
