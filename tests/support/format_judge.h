/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Computes an expert in double precision, from the formulas and the C library's functions alone,
 * and how far a result of a family may be from it. Families of pairs narrow inner rows to bf16, and
 * also x, which must be exact in bf16. Where a format or family rounds rows to int8, x is rounded
 * here too, bit for bit, so that the bound covers only the arithmetic.
 */
#ifndef EP_TESTS_SUPPORT_FORMAT_JUDGE_H
#define EP_TESTS_SUPPORT_FORMAT_JUDGE_H

#include "base/expert_form.h"
#include "kernels/expert_ffn.h"

/* Computes y[H] and bound[H] for one row x[H] of f32. */
void ep_format_judge(const ep_expert_source *source, ep_ffn_family family, const float *x,
                     double *y, double *bound);

#endif
