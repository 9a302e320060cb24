/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copy and constant experts, evaluated by the client: r in f32, neither rounded to the wire type
 * nor weighted here.
 *     copy              r = x
 *     constant, kernel  (p1, p2) = softmax(dot(alpha1, x), dot(alpha2, x)); r = p1*x + p2*v,
 *                       products rounded, then the sum
 *     constant, linear  r = alpha1*x + alpha2*v, element by element
 * Source of the kernel rule: the Ascend A3 combine kernel; of the linear one: its documentation.
 */
#ifndef EP_MOE_SPECIAL_EXPERTS_H
#define EP_MOE_SPECIAL_EXPERTS_H

#include "moe/batch.h"

/* x [H] widened; work [2*H]; writes out [H]. index is the constant expert's, 0..const_count-1. out
 * may not overlap the others. */
void ep_const_expert(const ep_special_experts *special, uint32_t index, uint32_t hidden,
                     const float *x, float *work, float *out);

#endif
