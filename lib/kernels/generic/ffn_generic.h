/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_KERNELS_GENERIC_FFN_GENERIC_H
#define EP_KERNELS_GENERIC_FFN_GENERIC_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_generic;
extern const ep_ffn_kernel ep_ffn_kernel_bf16dp_generic;
extern const ep_ffn_kernel ep_ffn_kernel_bf16odd_generic;
extern const ep_ffn_kernel ep_ffn_kernel_w4a8_generic;

/* group_panel in plain C, for kernels without one of their own. */
void ep_ffn_generic_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c);
void ep_ffn_generic_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel,
                               uint32_t k_count, const float *row_scales, const uint8_t *next,
                               float *c);
/* Computes one group for one chunk, n columns, and adds it to c; group_panel is made of these. */
typedef void (*ep_ffn_generic_group)(ep_weight_format format, const float *x, uint32_t rows,
                                     const uint8_t *block, const float *factors, uint32_t n,
                                     float *c);
void ep_ffn_generic_groups(ep_ffn_generic_group do_chunk, ep_ffn_family family,
                           ep_weight_format format, const float *a, uint32_t rows,
                           const uint8_t *panel, uint32_t k_count, float *c);
/* The exact values of column k of a packed group's codes, one per output. codes: of the whole
 * group. */
void ep_ffn_generic_widen_codes(ep_ffn_family family, ep_weight_format format, const uint8_t *codes,
                                uint32_t k, float *w);
/* The scales of a packed group [EP_FFN_PANEL], and its offsets if the format has them. group: its
 * begin; factors: those of this group. */
void ep_ffn_generic_scales(ep_weight_format format, const uint8_t *group, const float *factors,
                           float *scales, float *offsets);
/* Line `line` of a packed group in family bf16dp: one pair per output, of the codes' values, or of
 * the weights for MX formats. */
void ep_ffn_generic_widen_pairs(ep_weight_format format, const uint8_t *group, uint32_t line,
                                uint32_t *pairs);
/* pack_rows and lay for families of pairs. */
void ep_ffn_generic_pack_pairs(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                               uint32_t hidden, float *a);
void ep_ffn_generic_lay_pairs(const float *h, uint32_t rows, uint32_t count, float *a);

#endif
