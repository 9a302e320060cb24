/* SPDX-License-Identifier: Apache-2.0 */
/* Quantises a float matrix as a node with weight_quant does, written from the rules alone. */
#ifndef TESTS_REFERENCE_REF_QUANT_H
#define TESTS_REFERENCE_REF_QUANT_H

#include "reference_layer.h"

enum ref_quant { REF_QUANT_NONE, REF_QUANT_INT8, REF_QUANT_INT4, REF_QUANT_MXFP4, REF_QUANT_Q4_K };

/* Quantises a row: per 32 values a scale and, for Q4_K, an offset (else 0); per value its code's
 * value. */
void ref_quant_row(enum ref_quant quant, const float *values, size_t n, float *out_scales,
                   float *out_offsets, float *out_codes);
/* Quantises a layer's experts in bf16, f16 or f32, also shared ones, and sets the family. */
void ref_layer_quantize(struct ref_layer *layer, enum ref_quant quant, enum ref_family family);

#endif
