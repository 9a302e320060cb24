/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for x86-64. Call them only when cpu_features.h allows it: only their files are compiled
 * with the instruction set flags. */
#ifndef EP_KERNELS_X86_FFN_X86_H
#define EP_KERNELS_X86_FFN_X86_H

#include "kernels/ffn_kernel.h"

/* family bf16dp: AVX-512 F, BW, DQ, VL, BF16 */
extern const ep_ffn_kernel ep_ffn_kernel_avx512bf16;
extern const ep_ffn_kernel ep_ffn_kernel_bf16dp_avx512f; /* family bf16dp: AVX-512F only */
extern const ep_ffn_kernel ep_ffn_kernel_bf16dp_avx2;    /* family bf16dp: AVX2, FMA */
/* AVX-512 F, BW, DQ, VL, VNNI: differs from avx512f only for w8a8 */
extern const ep_ffn_kernel ep_ffn_kernel_avx512vnni;
/* family w4a8: AVX-512 F, BW, DQ, VL, VNNI */
extern const ep_ffn_kernel ep_ffn_kernel_w4a8_avx512vnni;
extern const ep_ffn_kernel ep_ffn_kernel_w4a8_avx2; /* family w4a8: AVX2, FMA */
extern const ep_ffn_kernel ep_ffn_kernel_avx512f;   /* AVX-512F only */
extern const ep_ffn_kernel ep_ffn_kernel_avx2;      /* AVX2, FMA, F16C */

/* Parts of the kernels above: their group_panel, int8_rows and int8_panel. */
void ep_ffn_avx512bf16_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                   const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                   float *c);
/* The same for MX formats only, which the function above calls. few: for one chunk; false: c may
 * not have the family's bits. */
void ep_ffn_avx512bf16_mx_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c);
bool ep_ffn_avx512bf16_mx_few(ep_weight_format format, const float *a, uint32_t rows,
                              const uint8_t *panel, uint32_t lines, const uint8_t *next, float *c);
void ep_ffn_avx512f_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c);
void ep_ffn_avx2_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c);
void ep_ffn_avx2_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                           uint32_t k_count, int8_t *a, float *scales);
void ep_ffn_avx2_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                            const float *row_scales, const uint8_t *next, float *c);
void ep_ffn_avx512vnni_int8_rows(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                                 uint32_t k_count, int8_t *a, float *scales);
void ep_ffn_avx512vnni_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel,
                                  uint32_t k_count, const float *row_scales, const uint8_t *next,
                                  float *c);
void ep_ffn_avx512vnni_int8_panel_to_rows(const int8_t *a, const ep_ffn_batch *batch,
                                          const uint8_t *panel, uint32_t k_count,
                                          const float *row_scales, const uint8_t *next,
                                          uint32_t first, uint32_t count, float *c);

#endif
