/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for x86-64. Call them only when cpu_features.h says so: their files alone get the instruction set
 * flags. */
#ifndef EP_KERNELS_X86_FFN_X86_H
#define EP_KERNELS_X86_FFN_X86_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_avx512bf16; /* family bf16dp: AVX-512 F, BW, DQ, VL, BF16 */
extern const ep_ffn_kernel ep_ffn_kernel_avx512f;    /* AVX-512F only */
extern const ep_ffn_kernel ep_ffn_kernel_avx2;       /* AVX2, FMA, F16C */

#endif
