/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows in 8 bits, for the wire and for 8-bit compute. Every step is rounded in f32 unless said
 * otherwise.
 *
 *   int8 per row
 *     amax over the row; d = 127.0f / amax; q = round-half-even(x * d); scale = 1.0f / d. Back: q *
 *     scale. amax = 0 or d not finite: q = 0, scale = 0. A non-finite element: q = 0, scale = NaN.
 *     With smooth scales every element is first multiplied by its channel's scale.
 *   int8 per block of 8, for the way back (the vendor's comm_quant_mode 2)
 *     s = amax * (1.0f / 127); wire scale = s rounded to the wire type;
 *     q = round-half-even(x / s rounded to f16), limited to -127..127.
 *     s = 0: q = 0, wire scale = 0. A non-finite element: the block's q = 0, wire scale = NaN.
 *     Back: q * wire scale, then rounded to the wire type.
 *   fp8 e4m3 per block of 128
 *     scale = amax / 448; q = e4m3(x / scale), nearest even, limited to -448..448. Back: q * scale.
 *     scale = 0: q = 0. A non-finite element: the block's q = 0, scale = NaN.
 *
 * So a non-finite element spoils only what shares its scale: its row, or its block. Zeros of the
 * int8 forms come back as +0. In the block form a wire scale may round to 0 (f16) where s does not;
 * such a block comes back as zeros. x / s can exceed 127 only where s is subnormal, since amax * (1
 * / 127) has lost its lower bits there. The last block of a row is short when H is no multiple of
 * the block.
 *
 * Memory     typed rows (bf16, f16, f32) and scales of the wire type at any alignment; float arrays
 *            aligned. Nothing overlaps.
 * Threads    pure.
 */
#ifndef EP_MOE_QUANTIZE_H
#define EP_MOE_QUANTIZE_H

#include <stddef.h>
#include <stdint.h>

#include "expertd/tensor.h"

#define EP_QUANT_BLOCK_I8 8u   /* elements per scale, int8 on the way back */
#define EP_QUANT_BLOCK_F8 128u /* elements per scale, fp8 */

/* Number of scales of a row of n elements in blocks of `block`. */
static inline size_t ep_quant_blocks(size_t n, size_t block)
{
    return (n + block - 1) / block;
}

/* row [n] of dtype, smooth [n] or NULL; writes out [n] and returns the row's scale. */
float ep_row_quantize_i8(const void *row, ep_dtype dtype, const float *smooth, size_t n,
                         int8_t *out);
/* The scale of a row, and d, from the bits of its greatest magnitude; a scale that is not above 0
 * means that all codes are 0. */
float ep_row_scale_i8(uint32_t amax_bits, float *out_d);
/* out[i] = q[i] * scale, rounded once in f32. */
void ep_row_dequantize_i8(const int8_t *row, float scale, size_t n, float *out);

/* row [n] of wire_dtype; writes out [n] and scales [ep_quant_blocks(n, EP_QUANT_BLOCK_I8)] of
 * wire_dtype. */
void ep_row_quantize_i8_blocks(const void *row, ep_dtype wire_dtype, size_t n, int8_t *out,
                               void *scales);
/* out [n]: values of wire_dtype, in f32. */
void ep_row_dequantize_i8_blocks(const int8_t *row, const void *scales, ep_dtype wire_dtype,
                                 size_t n, float *out);

/* row [n] of dtype; writes out [n] codes and scales [ep_quant_blocks(n, EP_QUANT_BLOCK_F8)]. */
void ep_row_quantize_f8(const void *row, ep_dtype dtype, size_t n, uint8_t *out, float *scales);

/* ---- the loops for each instruction set; all give the same bits ---- */

typedef struct ep_quant_kernel {
    const char *name; /* "avx2", "generic" */
    /* Greatest |x * smooth| as the bits of an f32; 0x7f800000 or more if one is not finite. */
    uint32_t (*amax_bits)(const void *row, ep_dtype dtype, const float *smooth, size_t n);
    void (*to_i8)(const void *row, ep_dtype dtype, const float *smooth, size_t n, float d,
                  int8_t *out);
    void (*from_i8)(const int8_t *row, float scale, size_t n, float *out);
    void (*to_i8_blocks)(const void *row, ep_dtype dtype, size_t n, int8_t *out, void *scales);
    void (*from_i8_blocks)(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                           float *out);
    /* One block; scale is finite and above 0. */
    void (*to_f8)(const void *row, ep_dtype dtype, size_t n, float scale, uint8_t *out);
} ep_quant_kernel;

/* The kernels that this CPU can run, fastest first; NULL past the last. */
const ep_quant_kernel *ep_quant_kernel_at(size_t index);
const ep_quant_kernel *ep_quant_kernel_best(void);

#endif
