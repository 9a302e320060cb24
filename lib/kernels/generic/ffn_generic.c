/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel in plain C with fmaf: for processors without a kernel of their own, and the second judge of
 * those with one. */
#include "kernels/generic/ffn_generic.h"

#include "base/numeric.h"
#include "kernels/ffn_element.h"

static void widen_line(ep_dtype dtype, const uint8_t *line, float *w)
{
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        w[o] = ep_ffn_read_float(line, dtype, ep_ffn_panel_slot(dtype, o));
    }
}

static void generic_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                          uint32_t k_count, const uint8_t *next, float *c)
{
    (void)next;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const size_t line_bytes = EP_FFN_PANEL * ep_dtype_bytes(dtype);
    float w[EP_FFN_PANEL];

    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    for (uint32_t k = 0; k < k_count; k++) {
        widen_line(dtype, panel + k * line_bytes, w);
        float *to = c;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const float *x =
                a + (size_t)ep_ffn_chunk_first_row(&chunks, chunk) * k_count + (size_t)k * chunk_rows;
            for (uint32_t r = 0; r < chunk_rows; r++, to += EP_FFN_PANEL) {
                for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                    to[o] = fmaf(w[o], x[r], to[o]);
                }
            }
        }
    }
}

static void generic_silu_mul(const float *c, float *h)
{
    for (uint32_t i = 0; i < EP_FFN_HALF_PANEL; i++) {
        h[i] = ep_siluf(c[i]) * c[EP_FFN_HALF_PANEL + i];
    }
}

static void generic_exp16(const float *x, float *out)
{
    for (uint32_t i = 0; i < 16; i++) {
        out[i] = ep_expf(x[i]);
    }
}

const ep_ffn_kernel ep_ffn_kernel_generic = {
    .name = "generic",
    .panel = generic_panel,
    .silu_mul = generic_silu_mul,
    .exp16 = generic_exp16,
};
