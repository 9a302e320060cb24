/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of bf16 pairs for AVX-512 BF16: up to 6 rows x 64 outputs, two k per step. Included only by
 * files with instruction set flags. */
#ifndef EP_KERNELS_X86_FFN_AVX512BF16_H
#define EP_KERNELS_X86_FFN_AVX512BF16_H

#include "kernels/x86/ffn_vector_avx512.h"

#define LINE_BYTES 256u /* of a panel */
#define LINE_PARTS 1
#define LINE_INPUTS 1
#define line_bytes(dtype) LINE_BYTES
#define load_line(dtype, part, line, strip, w) ((void)(dtype), vector_load_words(line, w))

/* w and x are pairs. */
INLINE vector vector_step(vector acc, vector w, vector x)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_castps_si512(x),
                            (__m512bh)_mm512_castps_si512(w));
}

#endif
