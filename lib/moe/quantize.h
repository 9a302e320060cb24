/* SPDX-License-Identifier: Apache-2.0 */
/*
 * int8 rows with one scale per row (DESIGN 3, int8 rows), used on the wire and by 8-bit compute alike:
 *     d = 127.0f / amax;  q = round-half-even(x * d);  scale = 1.0f / d;  each step rounded in f32.
 *     amax = 0 or d not finite: q = 0, scale = 0.  Any element not finite: q = 0, scale = NaN, so only that row suffers.
 * With smooth scales every element is first multiplied by its channel's scale, rounded in f32.
 *
 * Threads    pure.
 */
#ifndef EP_MOE_QUANTIZE_H
#define EP_MOE_QUANTIZE_H

#include <stddef.h>
#include <stdint.h>

/* row [n], smooth [n] or NULL; writes out [n] and returns the row's scale. */
float ep_row_quantize_i8(const float *row, const float *smooth, size_t n, int8_t *out);

/* out[i] = q[i] * scale, rounded once in f32. */
void ep_row_dequantize_i8(const int8_t *row, float scale, size_t n, float *out);

#endif
