/* SPDX-License-Identifier: Apache-2.0 */
/* Widens part of an input row to f32. Inline, so that each kernel's file compiles it with its own
 * instruction set flags. */
#ifndef EP_KERNELS_FFN_WIDEN_H
#define EP_KERNELS_FFN_WIDEN_H

#include "kernels/ffn_element.h"

/* Inputs first..first + count - 1. The type is tested once per call, not per element. */
static inline void ep_ffn_widen(const ep_ffn_batch *batch, const ep_ffn_row *row, uint32_t first,
                                uint32_t count, float *x)
{
    if (batch->x_dtype == EP_DTYPE_I8) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_i8(row->x, row->x_scale, first + i);
        }
    } else if (batch->x_dtype == EP_DTYPE_F8E4M3) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_f8(row->x, row->x_scales, first + i);
        }
    } else if (batch->x_dtype == EP_DTYPE_BF16) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_float(row->x, EP_DTYPE_BF16, first + i);
        }
    } else if (batch->x_dtype == EP_DTYPE_F16) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_float(row->x, EP_DTYPE_F16, first + i);
        }
    } else {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = ep_ffn_read_float(row->x, EP_DTYPE_F32, first + i);
        }
    }
    if (batch->weight_on_input) {
        for (uint32_t i = 0; i < count; i++) {
            x[i] = row->input_weight * x[i];
        }
    }
}

#endif
