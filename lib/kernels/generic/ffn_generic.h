/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_KERNELS_GENERIC_FFN_GENERIC_H
#define EP_KERNELS_GENERIC_FFN_GENERIC_H

#include "kernels/ffn_kernel.h"

extern const ep_ffn_kernel ep_ffn_kernel_generic;
extern const ep_ffn_kernel ep_ffn_kernel_bf16dp_generic;
extern const ep_ffn_kernel ep_ffn_kernel_bf16odd_generic;
extern const ep_ffn_kernel ep_ffn_kernel_w4a8_generic;

/* For kernels without their own. */
void ep_ffn_generic_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c);
void ep_ffn_generic_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel,
                               uint32_t k_count, const float *row_scales, const uint8_t *next,
                               float *c);
/* group_panel from what does one group for one chunk: n columns onto c. */
typedef void (*ep_ffn_generic_group)(ep_weight_format format, const float *x, uint32_t rows,
                                     const uint8_t *block, const float *factors, uint32_t n,
                                     float *c);
void ep_ffn_generic_groups(ep_ffn_generic_group do_chunk, ep_ffn_family family,
                           ep_weight_format format, const float *a, uint32_t rows,
                           const uint8_t *panel, uint32_t k_count, float *c);
/* Column k of a packed group's codes, exactly: one value per output. codes: of the whole group. */
void ep_ffn_generic_widen_codes(ep_ffn_family family, ep_weight_format format, const uint8_t *codes,
                                uint32_t k, float *w);
/* The scales of a packed group [EP_FFN_PANEL], and its offsets where the format has them. group:
 * where it begins; factors: its own. */
void ep_ffn_generic_scales(ep_weight_format format, const uint8_t *group, const float *factors,
                           float *scales, float *offsets);
/* Line `line` of a packed group as family bf16dp has it: one pair per output, the codes' values or,
 * of MX formats, the weights. */
void ep_ffn_generic_widen_pairs(ep_weight_format format, const uint8_t *group, uint32_t line,
                                uint32_t *pairs);
/* pack_rows and lay of the families of pairs. */
void ep_ffn_generic_pack_pairs(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                               uint32_t hidden, float *a);
void ep_ffn_generic_lay_pairs(const float *h, uint32_t rows, uint32_t count, float *a);

#endif
