/* SPDX-License-Identifier: Apache-2.0 */
/* Rows in 8 bits: scales and special cases. The loops are in quantize_loops.c. */
#include "moe/quantize.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/numeric.h"
#include "moe/convert.h"

#define INFINITY_BITS 0x7f800000u

float ep_row_scale_i8(uint32_t amax_bits, float *out_d)
{
    float d = 127.0f / ep_f32_from_bits(amax_bits);
    *out_d = d;
    return amax_bits >= INFINITY_BITS ? NAN : isfinite(d) ? 1.0f / d : 0.0f;
}

float ep_row_quantize_i8(const void *row, ep_dtype dtype, const float *smooth, size_t n,
                         int8_t *out)
{
    const ep_quant_kernel *kernel = ep_quant_kernel_best();
    EP_ASSERT(ep_dtype_is_float(dtype));
    if (n == 0) {
        return 0.0f;
    }
    float d;
    float scale = ep_row_scale_i8(kernel->amax_bits(row, dtype, smooth, n), &d);
    if (scale > 0.0f) {
        kernel->to_i8(row, dtype, smooth, n, d, out);
    } else {
        memset(out, 0, n);
    }
    return scale;
}

void ep_row_dequantize_i8(const int8_t *row, float scale, size_t n, float *out)
{
    ep_quant_kernel_best()->from_i8(row, scale, n, out);
}

void ep_row_quantize_i8_blocks(const void *row, ep_dtype wire_dtype, size_t n, int8_t *out,
                               void *scales)
{
    EP_ASSERT(ep_dtype_is_float(wire_dtype));
    ep_quant_kernel_best()->to_i8_blocks(row, wire_dtype, n, out, scales);
}

void ep_row_dequantize_i8_blocks(const int8_t *row, const void *scales, ep_dtype wire_dtype,
                                 size_t n, float *out)
{
    EP_ASSERT(ep_dtype_is_float(wire_dtype));
    ep_quant_kernel_best()->from_i8_blocks(row, scales, wire_dtype, n, out);
}

void ep_row_quantize_f8(const void *row, ep_dtype dtype, size_t n, uint8_t *out, float *scales)
{
    const ep_quant_kernel *kernel = ep_quant_kernel_best();
    size_t element = ep_dtype_bytes(dtype);
    EP_ASSERT(ep_dtype_is_float(dtype));
    for (size_t done = 0; done < n; done += EP_QUANT_BLOCK_F8) {
        size_t count = n - done < EP_QUANT_BLOCK_F8 ? n - done : EP_QUANT_BLOCK_F8;
        const uint8_t *block = (const uint8_t *)row + done * element;
        uint32_t amax_bits = kernel->amax_bits(block, dtype, NULL, count);
        float scale =
            amax_bits >= INFINITY_BITS ? NAN : ep_f32_from_bits(amax_bits) / EP_F8E4M3_MAX;
        scales[done / EP_QUANT_BLOCK_F8] = scale;
        if (scale > 0.0f) {
            kernel->to_f8(block, dtype, count, scale, out + done);
        } else {
            memset(out + done, 0, count);
        }
    }
}
