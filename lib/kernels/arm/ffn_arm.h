/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for 64-bit Arm. Call them only when cpu_features.h allows it: only their files are
 * compiled with the instruction set flags. */
#ifndef EP_KERNELS_ARM_FFN_ARM_H
#define EP_KERNELS_ARM_FFN_ARM_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_neon_bf16; /* family bf16odd: BFDOT, BFMMLA */
extern const ep_ffn_kernel ep_ffn_kernel_neon_dot;  /* dot products of int8 */
extern const ep_ffn_kernel ep_ffn_kernel_neon;      /* Armv8.0 */

/* `panel` of ep_ffn_kernel_neon. */
void ep_ffn_neon_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                       uint32_t k_count, const uint8_t *next, float *c);

#endif
