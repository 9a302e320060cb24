/* SPDX-License-Identifier: Apache-2.0 */
/* The two rules of constant experts. */
#include "moe/special_experts.h"

#include "base/numeric.h"
#include "moe/convert.h"

static void kernel_rule(uint32_t hidden, const float *x, const float *alpha1, const float *alpha2,
                        float *out_p1, float *out_p2)
{
    float a1 = ep_dotf(alpha1, x, hidden);
    float a2 = ep_dotf(alpha2, x, hidden);
    float max = a1 > a2 ? a1 : a2;
    float e1 = ep_expf(a1 - max);
    float e2 = ep_expf(a2 - max);
    float sum = e1 + e2;
    *out_p1 = e1 / sum;
    *out_p2 = e2 / sum;
}

void ep_const_expert(const ep_special_experts *special, uint32_t index, uint32_t hidden,
                     const float *x, float *work, float *out)
{
    float *alpha1 = work;
    float *alpha2 = work + hidden;
    ep_row_widen(ep_rows_at(&special->const_alpha1, index), special->const_alpha1.dtype, hidden,
                 alpha1);
    ep_row_widen(ep_rows_at(&special->const_alpha2, index), special->const_alpha2.dtype, hidden,
                 alpha2);

    if (special->const_rule == EP_CONST_LINEAR) {
        ep_row_widen(ep_rows_at(&special->const_v, index), special->const_v.dtype, hidden, out);
        for (uint32_t i = 0; i < hidden; i++) {
            out[i] = alpha1[i] * x[i] + alpha2[i] * out[i];
        }
        return;
    }
    float p1;
    float p2;
    kernel_rule(hidden, x, alpha1, alpha2, &p1, &p2);
    ep_row_widen(ep_rows_at(&special->const_v, index), special->const_v.dtype, hidden, out);
    for (uint32_t i = 0; i < hidden; i++) {
        out[i] = p1 * x[i] + p2 * out[i];
    }
}
