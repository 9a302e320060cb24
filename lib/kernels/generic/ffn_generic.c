/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel in plain C with fmaf: for processors without a kernel of their own, and as a second
 * reference for the others. */
#include "kernels/generic/ffn_generic.h"

#include "base/numeric.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_int8.h"

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
            const float *x = a + (size_t)ep_ffn_chunk_first_row(&chunks, chunk) * k_count +
                             (size_t)k * chunk_rows;
            for (uint32_t r = 0; r < chunk_rows; r++, to += EP_FFN_PANEL) {
                for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                    to[o] = fmaf(w[o], x[r], to[o]);
                }
            }
        }
    }
}

void ep_ffn_generic_widen_codes(ep_ffn_family family, ep_weight_format format, const uint8_t *codes,
                                uint32_t k, float *w)
{
    const ep_weight_codes kind = ep_weight_format_codes(format);
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        w[o] = ep_ffn_read_code(kind, codes, ep_ffn_code_slot(family, format, k, o));
    }
}

void ep_ffn_generic_scales(ep_weight_format format, const uint8_t *group, const float *factors,
                           float *scales, float *offsets)
{
    const ep_weight_scales kind = ep_weight_format_scales(format);
    const ep_weight_offsets offset_kind = ep_weight_format_offsets(format);
    const uint8_t *from = group + ep_ffn_group_code_bytes(format);
    const uint8_t *offset_codes = from + ep_weight_scale_bytes(kind) * EP_FFN_PANEL;
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        scales[o] = ep_ffn_read_scale(kind, from, o);
        if (ep_weight_scales_have_levels(kind)) {
            scales[o] *= factors[o];
        }
        if (offset_kind != EP_OFFSETS_NONE) {
            const float factor =
                offset_kind == EP_OFFSETS_MINIMUM ? factors[EP_FFN_PANEL + o] : 0.0f;
            offsets[o] = ep_ffn_join_offset(offset_kind, scales[o], offset_codes[o], factor);
        }
    }
}

/* One group for one chunk: n lines, then adds the scaled chain to c. */
static void group_chunk(ep_weight_format format, const float *x, uint32_t rows,
                        const uint8_t *block, const float *factors, uint32_t n, float *c)
{
    const bool has_offsets = ep_weight_format_offsets(format) != EP_OFFSETS_NONE;
    float acc[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL] = {0.0f};
    float sums[EP_FFN_CHUNK_ROWS] = {0.0f};
    float w[EP_FFN_PANEL];
    float scales[EP_FFN_PANEL];
    float offsets[EP_FFN_PANEL];
    ep_ffn_generic_scales(format, block, factors, scales, offsets);
    for (uint32_t k = 0; k < n; k++, x += rows) {
        ep_ffn_generic_widen_codes(EP_FFN_FAMILY_PORTABLE, format, block, k, w);
        for (uint32_t r = 0; r < rows; r++) {
            sums[r] += x[r];
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                acc[r * EP_FFN_PANEL + o] = fmaf(w[o], x[r], acc[r * EP_FFN_PANEL + o]);
            }
        }
    }
    for (uint32_t r = 0; r < rows; r++, c += EP_FFN_PANEL) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            c[o] = fmaf(scales[o], acc[r * EP_FFN_PANEL + o], c[o]);
            if (has_offsets) {
                c[o] = fmaf(-offsets[o], sums[r], c[o]);
            }
        }
    }
}

void ep_ffn_generic_groups(ep_ffn_generic_group do_chunk, ep_ffn_family family,
                           ep_weight_format format, const float *a, uint32_t rows,
                           const uint8_t *panel, uint32_t k_count, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t lines = ep_ffn_lines(family, k_count);
    const uint32_t group = ep_weight_group_columns(format);
    const uint32_t groups = ep_ffn_groups(format, k_count);
    const uint8_t *block = panel;
    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    for (uint32_t k = 0; k < k_count; k += group, block += ep_ffn_group_bytes(format)) {
        const uint32_t n = k_count - k < group ? k_count - k : group;
        const float *factors = ep_ffn_factors_of(format, panel, groups, k);
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            do_chunk(format, a + first_row * lines + (size_t)ep_ffn_lines(family, k) * chunk_rows,
                     chunk_rows, block, factors, n, c + first_row * EP_FFN_PANEL);
        }
    }
}

void ep_ffn_generic_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                                const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                                float *c)
{
    (void)next;
    ep_ffn_generic_groups(group_chunk, EP_FFN_FAMILY_PORTABLE, format, a, rows, panel, k_count, c);
}

static void int8_sums(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t quads,
                      int32_t *sums)
{
    memset(sums, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*sums));
    for (uint32_t q = 0; q < quads; q++, a += 4 * (size_t)rows, panel += 4 * EP_FFN_PANEL) {
        for (uint32_t r = 0; r < rows; r++) {
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                int32_t sum = 0;
                for (uint32_t j = 0; j < 4; j++) {
                    sum += (int32_t)(int8_t)panel[4 * o + j] * (int32_t)a[4 * r + j];
                }
                sums[r * EP_FFN_PANEL + o] += sum;
            }
        }
    }
}

void ep_ffn_generic_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel,
                               uint32_t k_count, const float *row_scales, const uint8_t *next,
                               float *c)
{
    (void)next;
    ep_ffn_int8_panel_of(int8_sums, a, rows, panel, k_count, row_scales, c);
}

const ep_ffn_kernel ep_ffn_kernel_generic = {
    .name = "generic",
    .panel = generic_panel,
    .group_panel = ep_ffn_generic_group_panel,
    .int8_rows = ep_ffn_int8_rows,
    .int8_panel = ep_ffn_generic_int8_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
};
