/* SPDX-License-Identifier: Apache-2.0 */
/* Families `bf16dp` and `bf16odd` in plain C: for processors without their instructions, and as a
 * second reference for those with them. */
#include "kernels/bf16odd.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_widen.h"
#include "kernels/generic/ffn_generic.h"

/* step is a constant wherever this is inlined. */
static inline __attribute__((always_inline)) void
pairs_panel(float (*step)(float acc, uint32_t w, uint32_t x), const float *a, uint32_t rows,
            const uint8_t *panel, uint32_t lines, float *c)
{
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    for (uint32_t line = 0; line < lines; line++) {
        uint32_t w[EP_FFN_PANEL];
        memcpy(w, panel + (size_t)line * sizeof(w), sizeof(w));
        float *to = c;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const float *x = a + (size_t)ep_ffn_chunk_first_row(&chunks, chunk) * lines +
                             (size_t)line * chunk_rows;
            for (uint32_t r = 0; r < chunk_rows; r++, to += EP_FFN_PANEL) {
                for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                    to[o] = step(to[o], w[o], ep_f32_bits(x[r]));
                }
            }
        }
    }
}

static void bf16dp_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                         uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    (void)next;
    pairs_panel(ep_bf16dp_step, a, rows, panel, lines, c);
}

static void bf16odd_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                          uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    (void)next;
    pairs_panel(ep_bf16odd_step, a, rows, panel, lines, c);
}

void ep_ffn_generic_widen_pairs(ep_weight_format format, const uint8_t *group, uint32_t line,
                                uint32_t *pairs)
{
    const bool is_mx = ep_weight_format_is_mx(format);
    float scales[EP_FFN_PANEL];
    float even[EP_FFN_PANEL];
    float odd[EP_FFN_PANEL];
    if (is_mx) {
        ep_ffn_generic_scales(format, group, NULL, scales, NULL);
    }
    ep_ffn_generic_widen_codes(EP_FFN_FAMILY_BF16DP, format, group, 2 * line, even);
    /* the block is padded */
    ep_ffn_generic_widen_codes(EP_FFN_FAMILY_BF16DP, format, group, 2 * line + 1, odd);
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        pairs[o] = is_mx ? ep_bf16dp_mx_weight(even[o], scales[o]) |
                               (uint32_t)ep_bf16dp_mx_weight(odd[o], scales[o]) << 16
                         : ep_f32_bits(even[o]) >> 16 | (ep_f32_bits(odd[o]) & 0xffff0000u);
    }
}

/* One group for one chunk: adds the pairs of n columns to c; in formats other than MX as a chain of
 * its own, scaled. */
static void group_chunk(ep_weight_format format, const float *x, uint32_t rows,
                        const uint8_t *block, const float *factors, uint32_t n, float *c)
{
    const uint32_t ones = 0x3f803f80u;
    const bool has_offsets = ep_weight_format_offsets(format) != EP_OFFSETS_NONE;
    float chain[EP_FFN_CHUNK_ROWS * EP_FFN_PANEL] = {0.0f};
    float sums[EP_FFN_CHUNK_ROWS] = {0.0f};
    float *acc = ep_weight_format_is_mx(format) ? c : chain;
    uint32_t pairs[EP_FFN_PANEL];
    float scales[EP_FFN_PANEL];
    float offsets[EP_FFN_PANEL];
    for (uint32_t k = 0; k < n; k += 2, x += rows) {
        ep_ffn_generic_widen_pairs(format, block, k / 2, pairs);
        for (uint32_t r = 0; r < rows; r++) {
            sums[r] = has_offsets ? ep_bf16dp_step(sums[r], ones, ep_f32_bits(x[r])) : 0.0f;
            for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
                acc[r * EP_FFN_PANEL + o] =
                    ep_bf16dp_step(acc[r * EP_FFN_PANEL + o], pairs[o], ep_f32_bits(x[r]));
            }
        }
    }
    if (acc == chain) {
        ep_ffn_generic_scales(format, block, factors, scales, offsets);
    }
    for (uint32_t r = 0; acc == chain && r < rows; r++, c += EP_FFN_PANEL) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
            c[o] = ep_bf16dp_add_group(c[o], chain[r * EP_FFN_PANEL + o], scales[o]);
            if (has_offsets) {
                c[o] = ep_bf16dp_take_offset(c[o], sums[r], offsets[o]);
            }
        }
    }
}

static void bf16dp_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                               const uint8_t *panel, uint32_t k_count, const uint8_t *next,
                               float *c)
{
    (void)next;
    ep_ffn_generic_groups(group_chunk, EP_FFN_FAMILY_BF16DP, format, a, rows, panel, k_count, c);
}

static uint32_t pair_of(const float *x, uint32_t count, uint32_t i)
{
    uint32_t odd = i + 1 < count ? ep_bf16dp_narrow(x[i + 1]) : 0;
    return ep_bf16dp_narrow(x[i]) | odd << 16;
}

void ep_ffn_generic_pack_pairs(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                               uint32_t hidden, float *a)
{
    enum { BLOCK = 64 };
    float wide[BLOCK];
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t k = 0; k < hidden; k += BLOCK) {
            const uint32_t count = hidden - k < BLOCK ? hidden - k : BLOCK;
            ep_ffn_widen(batch, &batch->rows[first_row + r], k, count, wide);
            for (uint32_t i = 0; i < count; i += 2) {
                a[(size_t)(k + i) / 2 * rows + r] = ep_f32_from_bits(pair_of(wide, count, i));
            }
        }
    }
}

void ep_ffn_generic_lay_pairs(const float *h, uint32_t rows, uint32_t count, float *a)
{
    for (uint32_t r = 0; r < rows; r++, h += EP_FFN_PANEL) {
        for (uint32_t i = 0; i < count; i += 2) {
            a[(size_t)i / 2 * rows + r] = ep_f32_from_bits(pair_of(h, count, i));
        }
    }
}

const ep_ffn_kernel ep_ffn_kernel_bf16dp_generic = {
    .name = "generic-bf16dp",
    .family = EP_FFN_FAMILY_BF16DP,
    .panel = bf16dp_panel,
    .group_panel = bf16dp_group_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_generic_pack_pairs,
    .lay = ep_ffn_generic_lay_pairs,
};

const ep_ffn_kernel ep_ffn_kernel_bf16odd_generic = {
    .name = "generic-bf16odd",
    .family = EP_FFN_FAMILY_BF16ODD,
    .panel = bf16odd_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_generic_pack_pairs,
    .lay = ep_ffn_generic_lay_pairs,
};
