/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far a backend's rows may be from the reference kernels' when every step between matrices is
 * rounded to the type of the weights, as accelerators do: x, gate and up rows, the activated row,
 * the result. u is that type's unit roundoff (2^-8 bf16, 2^-11 f16). A bound from the values at
 * hand, not a tolerance that was tried out:
 *     gate, up    u sum|w||x| for x rounded, the f32 sums, u of the result
 *     biases      rounded to what the device adds: f32 for bf16 weights, f16 for f16, bf16 for w8a8
 *     activated   no activation of the gate is steeper than 1.13, of up than 1: 1.13 e_gate |up| +
 *                 |act| e_up, u of the result
 *     result      sum |w| e_activated, the f32 sums, u of the result, then the output type's own on
 *                 both sides
 *     w8a8        (u is bf16's) x becomes int8 by the same rule on both sides; the activated row
 *                 does on each side from its own values, half a step, max|h| / 254, each
 */
#ifndef EP_TESTS_CONTRACT_BACKEND_EXPERT_BOUND_H
#define EP_TESTS_CONTRACT_BACKEND_EXPERT_BOUND_H

#include "contract/backend/expert_fixture.h"

/* [rows_count][H] of bounds, to be freed. */
double *expert_bound_make(const expert_fixture *fixture);

#endif
