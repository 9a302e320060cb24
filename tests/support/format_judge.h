/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An expert in double precision, from the formulas and the C library's functions alone, and how far a result may be from
 * it. narrows: of family `bf16dp`, which narrows inner rows to bf16 (and x, that must be exact in bf16); else of `portable`.
 */
#ifndef EP_TESTS_SUPPORT_FORMAT_JUDGE_H
#define EP_TESTS_SUPPORT_FORMAT_JUDGE_H

#include "base/expert_form.h"

/* y[H] and bound[H] for one row x[H] of f32. */
void ep_format_judge(const ep_expert_source *source, bool narrows, const float *x, double *y, double *bound);

#endif
