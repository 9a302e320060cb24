/* SPDX-License-Identifier: Apache-2.0 */
/* What a node that is told weight_quant makes of a float matrix, from the rules alone. */
#ifndef TESTS_REFERENCE_REF_QUANT_H
#define TESTS_REFERENCE_REF_QUANT_H

#include "reference_layer.h"

enum ref_quant { REF_QUANT_NONE, REF_QUANT_INT8, REF_QUANT_INT4, REF_QUANT_MXFP4, REF_QUANT_Q4_K };

/* values [n] of a row: for each 32 the scale, and for Q4_K the offset, else 0; and the value of
 * each code. */
void ref_quant_row(enum ref_quant quant, const float *values, size_t n, float *out_scales,
                   float *out_offsets, float *out_codes);
/* All experts of a layer in bf16, f16 or f32, shared ones too; family as ref_layer_set_family. */
void ref_layer_quantize(struct ref_layer *layer, enum ref_quant quant, enum ref_family family);

#endif
