/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An expert in double precision, from the formulas and the C library's functions alone, and how far
 * a result of a family may be from it. Families of pairs narrow inner rows to bf16, and x, which
 * must be exact in bf16. Where a format or family rounds rows to int8, those of x are rounded here
 * too, bit for bit: the bound is that of the arithmetic, not of the rounding.
 */
#ifndef EP_TESTS_SUPPORT_FORMAT_JUDGE_H
#define EP_TESTS_SUPPORT_FORMAT_JUDGE_H

#include "base/expert_form.h"
#include "kernels/expert_ffn.h"

/* y[H] and bound[H] for one row x[H] of f32. */
void ep_format_judge(const ep_expert_source *source, ep_ffn_family family, const float *x,
                     double *y, double *bound);

#endif
