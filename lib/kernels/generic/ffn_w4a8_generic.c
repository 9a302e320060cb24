/* SPDX-License-Identifier: Apache-2.0 */
/* Family `w4a8` in plain C: for processors without a kernel of their own, and as a second reference
 * for the others. */
#include "kernels/ffn_w4a8.h"

#include "kernels/ffn_activation.h"
#include "kernels/generic/ffn_generic.h"

/* A panel's group: integers [column][output], scales, and for q4_k eighths of offsets. */
typedef struct {
    int8_t w[EP_MX_GROUP][EP_FFN_PANEL];
    float scales[EP_FFN_PANEL];
    float eighths[EP_FFN_PANEL];
} wide_group;

static void widen_group(ep_weight_format format, const uint8_t *block, const float *factors,
                        wide_group *to)
{
    for (uint32_t k = 0; k < EP_MX_GROUP; k++) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            const size_t slot = ep_ffn_code_slot(EP_FFN_FAMILY_W4A8, format, k, o);
            to->w[k][o] =
                ep_ffn_w4a8_integer(format, (uint32_t)block[slot / 2] >> (4 * (slot & 1u)));
        }
    }
    if (format == EP_WEIGHTS_Q4_K) {
        ep_ffn_generic_scales(format, block, factors, to->scales, to->eighths);
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            to->eighths[o] *= 0.125f;
        }
        return;
    }
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        to->scales[o] = ep_ffn_w4a8_scale(format, block + EP_FFN_W4A8_CODE_BYTES, o);
    }
}

/* One group for one chunk. x: the group's lines. */
static void group_chunk(ep_weight_format format, const float *x, uint32_t rows,
                        const uint8_t *block, const float *factors, uint32_t n, float *c)
{
    (void)n; /* zeros behind it */
    wide_group group;
    widen_group(format, block, factors, &group);
    for (uint32_t r = 0; r < rows; r++, c += EP_FFN_PANEL) {
        int32_t sums[EP_FFN_PANEL] = {0};
        for (uint32_t k = 0; k < EP_MX_GROUP; k++) {
            const uint32_t quad = ep_f32_bits(x[k / 4 * rows + r]);
            const int32_t q = (int8_t)(quad >> (8 * (k % 4)) & 0xffu);
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                sums[o] += group.w[k][o] * q;
            }
        }
        const float input_scale = x[EP_FFN_W4A8_SCALE_LINE * rows + r];
        const int32_t start = (int32_t)ep_f32_bits(x[EP_FFN_W4A8_START_LINE * rows + r]);
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            c[o] = format == EP_WEIGHTS_Q4_K
                       ? ep_ffn_w4a8_add_q4_k(c[o], sums[o], start, input_scale, group.scales[o],
                                              group.eighths[o])
                       : ep_ffn_w4a8_add_group(c[o], sums[o], input_scale, group.scales[o]);
        }
    }
}

static void w4a8_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    (void)next;
    ep_ffn_generic_groups(group_chunk, EP_FFN_FAMILY_W4A8, format, a, rows, panel, k_count, c);
}

const ep_ffn_kernel ep_ffn_kernel_w4a8_generic = {
    .name = "generic-w4a8",
    .family = EP_FFN_FAMILY_W4A8,
    .group_panel = w4a8_group_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_w4a8_pack_rows,
    .lay = ep_ffn_w4a8_lay,
};
