/* SPDX-License-Identifier: Apache-2.0 */
/* int8 per block of 8 (quantize.h): one block in plain C, and whole rows for x86. Private to
 * lib/moe. */
#ifndef EP_MOE_QUANTIZE_BLOCK_H
#define EP_MOE_QUANTIZE_BLOCK_H

#include "moe/quantize.h"

/* Block b of a row of n elements; out and scales are the row's. */
void ep_quant_block_to_i8(const void *row, ep_dtype dtype, size_t n, size_t b, int8_t *out,
                          void *scales);
void ep_quant_block_from_i8(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                            size_t b, float *out);

/* Only where base/cpu_features.h says avx2_fma_f16c. */
void ep_quant_to_i8_blocks_avx2(const void *row, ep_dtype dtype, size_t n, int8_t *out,
                                void *scales);
void ep_quant_from_i8_blocks_avx2(const int8_t *row, const void *scales, ep_dtype dtype, size_t n,
                                  float *out);

#endif
