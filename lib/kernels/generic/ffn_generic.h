/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_KERNELS_GENERIC_FFN_GENERIC_H
#define EP_KERNELS_GENERIC_FFN_GENERIC_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_generic;
extern const ep_ffn_kernel ep_ffn_kernel_bf16dp_generic;

/* For kernels without their own. */
void ep_ffn_generic_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                                uint32_t k_count, const uint8_t *next, float *c);
void ep_ffn_generic_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t quads, bool first,
                               int32_t *sums);

#endif
