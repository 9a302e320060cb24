/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of family `portable` over panels of bf16, f16 and f32, whose weights are widened in
 * registers. Included only by files with the vectors of their instruction set. */
#ifndef EP_KERNELS_X86_FFN_PORTABLE_H
#define EP_KERNELS_X86_FFN_PORTABLE_H

#define vector_step(acc, w, x) vector_fma(w, x, acc)
#define LINE_PARTS 1
#define LINE_INPUTS 1

INLINE uint32_t line_bytes(ep_dtype dtype)
{
    return dtype == EP_DTYPE_F32 ? 4 * EP_FFN_PANEL : 2 * EP_FFN_PANEL;
}

INLINE void load_line(ep_dtype dtype, int part, const uint8_t *line, uint32_t strip,
                      vector w[VECTORS])
{
    (void)part;
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        const uint32_t o = vector_output(strip, j);
        if (dtype == EP_DTYPE_F16) {
            w[j] = vector_of_f16(line + 2 * o);
        } else if (dtype == EP_DTYPE_F32) {
            w[j] = vector_load_any(line + 4 * o);
        } else if (j % 2 == 0) { /* words of outputs o and o + 16 */
            const vector words = vector_load_any(line + 2 * ep_ffn_panel_slot(EP_DTYPE_BF16, o));
            w[j] = vector_low_halves(words);
            w[j + 1] = vector_high_halves(words);
        }
    }
}

#include "kernels/x86/ffn_lines.h"

#endif
