/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few inner loops that exist for each instruction set and numerics family. Everything around
 * them (stages, packing of weights) is shared. All kernels of a family give equal bits: they
 * vectorise across outputs and rows, never along k.
 *
 * A line is what the inner loop takes at once: one k in family `portable`, two in the others (an
 * odd last one is filled up with zeros). Each activation of a line takes 4 bytes: a float, or two
 * bf16, the even k in the low half. Family w4a8 has ten lines for a group of 32 columns: 8 quads of
 * int8, the scale (f32), and -8 times the sum of the int8 (i32); zeros after the last column.
 *
 * Packed activations
 *     Chunks of 1..EP_FFN_CHUNK_ROWS rows, one after the other; chunk c is [line][rows of c].
 *     For w8a8 they are int8: [ceil(k/4)][rows of c][4].
 * Packed panels
 *     [k][EP_FFN_PANEL] weights of their own type. bf16: within each group of 32 outputs, output j
 *     is at 2j and output j + 16 at 2j + 1, so that a 32-bit lane widens to both by a shift and a
 *     mask. f16 and f32: in order. bf16 for families of pairs: [line][EP_FFN_PANEL][2].
 * Panels of formats with groups
 *     One block per group of columns, the last one padded with zeros to a whole block: the codes of
 *     its columns, then for 64 outputs the scales or their parts, then the bytes of offsets, as
 *     wide as in the format. After all blocks, for each EP_SCALE_BLOCK columns: 64 floats that
 *     parts are multiplied by, then 64 for the minima.
 *     Codes of a byte: a column is 64 bytes in order. For families of pairs, columns k, k + 1 are
 *     128 bytes; 32-bit word i of either half has outputs i and i+16 (i+32 and i+48) of k, then of
 *     k + 1. Codes of 4 bits: columns k, k + 1 share 64 bytes; 32-bit word i has outputs i, i+16,
 *     i+32, i+48 of k in its lower four nibbles and of k + 1 in the upper four. So shifts and table
 *     look-ups widen 16 outputs or pairs at a time.
 *     Family w4a8: columns 8 p..8 p + 7 of outputs 16 j..16 j + 15 share 64 bytes, ordered by p,
 *     then j; 32-bit word i has the codes of output 16 j + i, in byte b those of columns 8 p + b
 *     (lower nibble) and 8 p + 4 + b.
 * Panels of w8a8
 *     [ceil(k/4)][64][4] bytes, then 64 scales in f32, then for each output -128 times the sum of
 *     its weights, i32 modulo 2^32. Adding it corrects the sum where rows are stored as q + 128.
 *
 * Threads  pure functions of their arguments.
 */
#ifndef EP_KERNELS_FFN_KERNEL_H
#define EP_KERNELS_FFN_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/expert_form.h"
#include "kernels/expert_ffn.h"
#include "expertd/tensor.h"

#define EP_FFN_PANEL 64      /* outputs of a panel */
#define EP_FFN_HALF_PANEL 32 /* gate outputs of a gate-up panel; as many up outputs follow */
/* lines of a panel that are used for all chunks before the next ones */
#define EP_FFN_K_BLOCK 128
/* rows of a register tile: 6 x 4 accumulators of 16 floats fill AVX-512 */
#define EP_FFN_CHUNK_ROWS 6
#define EP_FFN_W4A8_LINES 10u /* lines of a group in family w4a8 */

typedef struct ep_ffn_kernel {
    const char *name; /* "avx512bf16", "avx512vnni", "avx512f", "avx2", "generic" */
    ep_ffn_family family;
    /*
     * For one panel and all rows: c[r][o] = chain over the lines, ascending, of fmaf(weight[k][o],
     * a[k][r], .) in family portable, else of ep_bf16dp_step or ep_bf16odd_step.
     * dtype bf16, f16 or f32; panel and c 64-byte aligned; c [rows][EP_FFN_PANEL]. NULL: w4a8.
     * next: the panel that this thread computes after this one; its first lines are fetched
     * meanwhile. NULL: unknown. It is only a hint: any address will do, it is never read.
     */
    void (*panel)(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                  uint32_t lines, const uint8_t *next, float *c);
    /* Not in bf16odd. The same for a format with groups: a chain per group, scaled, summed
     * (expert_ffn.h, bf16dp.h, ffn_w4a8.h). */
    void (*group_panel)(ep_weight_format format, const float *a, uint32_t rows,
                        const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c);
    /*
     * portable only, w8a8. Widens one chunk of the batch's rows, from first_row on, and rounds it
     * to int8 with scales [rows]. a [ceil(k_count/4)][rows][4], zeros after k_count, in the form
     * that int8_panel takes.
     */
    void (*int8_rows)(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows,
                      uint32_t k_count, int8_t *a, float *scales);
    /*
     * portable only, w8a8. For one panel and all rows: c[r][o] = (sum to f32 * weight scale[o]) *
     * row_scales[r]. a has the chunks one after the other; next and c as above.
     */
    void (*int8_panel)(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                       const float *row_scales, const uint8_t *next, float *c);
    /*
     * The activation for rows of a gate-up panel's products c [rows][EP_FFN_PANEL]: with a gate
     * h[r][i] = activation(c[r][i], c[r][EP_FFN_HALF_PANEL + i]), i < EP_FFN_HALF_PANEL, else
     * activation(c[r][i]), i < EP_FFN_PANEL. Row r begins at h + r * stride, where stride is a
     * multiple of 16. c and h are 64-byte aligned and do not overlap.
     */
    void (*activate)(ep_activation activation, const ep_activation_numbers *numbers, const float *c,
                     uint32_t rows, float *h, size_t stride);
    /* out[i] = ep_expf(x[i]) for 16 values, as in activations; for the tests. Any alignment. */
    void (*exp16)(const float *x, float *out);
    /* The slots below may be NULL: then the plain loops of ffn_pass.c are used, which support only
     * family `portable`. */
    /* Packs one chunk from the batch's rows from first_row on: widened, and narrowed for pairs. */
    void (*pack_rows)(const ep_ffn_batch *batch, uint32_t first_row, uint32_t rows, uint32_t hidden,
                      float *a);
    /* Writes the first count (1..EP_FFN_PANEL) inner values of a chunk's rows, h
     * [rows][EP_FFN_PANEL], 64-byte aligned, to the chunk's lines, which begin at a. */
    void (*lay)(const float *h, uint32_t rows, uint32_t count, float *a);
    /* out[first + i] = y[i] rounded once, i < count (1..EP_FFN_PANEL); y 64-byte aligned. */
    void (*write_row)(const float *y, uint32_t count, ep_dtype dtype, void *out, uint32_t first);
    /*
     * `panel` for all rows of the batch, then write_row of each to its out. A chunk's rows are
     * written when they are complete, so that fetching their cache lines overlaps the arithmetic of
     * the next chunk. NULL: panel, then write_row.
     */
    void (*panel_to_rows)(ep_dtype dtype, const float *a, const ep_ffn_batch *batch,
                          const uint8_t *panel, uint32_t lines, const uint8_t *next, uint32_t first,
                          uint32_t count, float *c);
    /* The same for int8_panel; NULL: int8_panel, then write_row. */
    void (*int8_panel_to_rows)(const int8_t *a, const ep_ffn_batch *batch, const uint8_t *panel,
                               uint32_t k_count, const float *row_scales, const uint8_t *next,
                               uint32_t first, uint32_t count, float *c);
} ep_ffn_kernel;

/* Kernel number index of those that this CPU can run, of all families, the fastest of a family
 * first; NULL past the end. */
const ep_ffn_kernel *ep_ffn_kernel_at(size_t index);
/* The fastest kernel of a family that this CPU can run. Never NULL: each family has plain loops. */
const ep_ffn_kernel *ep_ffn_kernel_of(ep_ffn_family family);
/* The family in which this CPU computes weights of this format fastest. wide_inputs: only families
 * that do not round inputs to int8. */
ep_ffn_family ep_ffn_family_fastest(ep_weight_format format, bool wide_inputs);

/* Number of lines over k_count inputs. */
static inline uint32_t ep_ffn_lines(ep_ffn_family family, uint32_t k_count)
{
    if (family == EP_FFN_FAMILY_W4A8) {
        return ep_ffn_w4a8_groups(k_count) * EP_FFN_W4A8_LINES;
    }
    return ep_ffn_family_has_pairs(family) ? k_count / 2 + k_count % 2 : k_count;
}

/* How `rows` rows are cut into chunks: as few as possible, whose sizes differ by at most one, the
 * longer ones first. */
typedef struct ep_ffn_chunks {
    uint32_t count;
    uint32_t base;   /* rows of a short chunk */
    uint32_t longer; /* how many of the first chunks have base + 1 rows */
} ep_ffn_chunks;

static inline ep_ffn_chunks ep_ffn_chunks_of(uint32_t rows)
{
    ep_ffn_chunks chunks;
    chunks.count = (rows + EP_FFN_CHUNK_ROWS - 1) / EP_FFN_CHUNK_ROWS;
    chunks.base = rows / chunks.count;
    chunks.longer = rows % chunks.count;
    return chunks;
}

static inline uint32_t ep_ffn_chunk_rows(const ep_ffn_chunks *chunks, uint32_t index)
{
    return chunks->base + (index < chunks->longer ? 1 : 0);
}

static inline uint32_t ep_ffn_chunk_first_row(const ep_ffn_chunks *chunks, uint32_t index)
{
    return chunks->base * index + (index < chunks->longer ? index : chunks->longer);
}

/* Bytes of the codes of one group of a panel. */
static inline size_t ep_ffn_group_code_bytes(ep_weight_format format)
{
    const bool is_nibbles = ep_weight_codes_are_nibbles(ep_weight_format_codes(format));
    return (size_t)ep_weight_group_columns(format) * EP_FFN_PANEL / (is_nibbles ? 2 : 1);
}

/* Bytes of one group of a panel: its codes, then its scales, then its offsets. */
static inline size_t ep_ffn_group_bytes(ep_weight_format format)
{
    const size_t scale_bytes = ep_weight_scale_bytes(ep_weight_format_scales(format));
    const size_t offset_bytes = ep_weight_format_offsets(format) == EP_OFFSETS_NONE ? 0 : 1;
    return ep_ffn_group_code_bytes(format) + (scale_bytes + offset_bytes) * EP_FFN_PANEL;
}

static inline uint32_t ep_ffn_groups(ep_weight_format format, uint32_t k_count)
{
    const uint32_t group = ep_weight_group_columns(format);
    return k_count / group + (k_count % group != 0 ? 1 : 0);
}

/* Number of floats after the groups of a panel, for each EP_SCALE_BLOCK columns. */
static inline size_t ep_ffn_block_factors(ep_weight_format format)
{
    return ep_weight_scales_have_levels(ep_weight_format_scales(format))
               ? EP_FFN_PANEL * (ep_weight_format_offsets(format) == EP_OFFSETS_MINIMUM ? 2 : 1)
               : 0;
}

/* Those for the group that begins at column k. groups: number of groups of the panel. */
static inline const float *ep_ffn_factors_of(ep_weight_format format, const uint8_t *panel,
                                             uint32_t groups, uint32_t k)
{
    const float *all = (const float *)(const void *)(panel + groups * ep_ffn_group_bytes(format));
    return all + k / EP_SCALE_BLOCK * ep_ffn_block_factors(format);
}

static inline uint32_t ep_ffn_quads(uint32_t k_count)
{
    return (k_count + 3) / 4;
}

/* Bytes of a packed panel over k_count inputs; a multiple of 64. */
static inline size_t ep_ffn_panel_bytes(ep_ffn_family family, ep_weight_format format,
                                        uint32_t k_count)
{
    if (ep_weight_format_is_float(format)) {
        if (ep_ffn_family_has_pairs(family)) {
            return (size_t)ep_ffn_lines(family, k_count) * EP_FFN_PANEL * 4;
        }
        return (size_t)k_count * EP_FFN_PANEL * ep_dtype_bytes(ep_weight_format_dtype(format));
    }
    if (format == EP_WEIGHTS_W8A8) {
        return (size_t)ep_ffn_quads(k_count) * 4 * EP_FFN_PANEL + 8 * EP_FFN_PANEL;
    }
    const size_t blocks = ((size_t)k_count + EP_SCALE_BLOCK - 1) / EP_SCALE_BLOCK;
    return ep_ffn_groups(format, k_count) * ep_ffn_group_bytes(format) +
           blocks * ep_ffn_block_factors(format) * sizeof(float);
}

/* The position of the code for output o, column k of a group: a byte, or a nibble for 4-bit codes,
 * the lower nibble of a byte first. */
static inline size_t ep_ffn_code_slot(ep_ffn_family family, ep_weight_format format, uint32_t k,
                                      uint32_t o)
{
    if (family == EP_FFN_FAMILY_W4A8) {
        return (size_t)k / 8 * 512 + o / 16 * 128 + 8 * (o % 16) + 2 * (k % 4) + k / 4 % 2;
    }
    if (ep_weight_codes_are_nibbles(ep_weight_format_codes(format))) {
        return (size_t)k / 2 * 128 + 8 * (o % 16) + 4 * (k & 1u) + o / 16;
    }
    if (ep_ffn_family_has_pairs(family)) {
        return (size_t)k / 2 * 128 + o / 32 * 64 + 4 * (o % 16) + 2 * (k & 1u) + o / 16 % 2;
    }
    return (size_t)k * EP_FFN_PANEL + o;
}

/* Position of output o within a line of a packed panel of family `portable`. */
static inline uint32_t ep_ffn_panel_slot(ep_dtype dtype, uint32_t o)
{
    if (dtype != EP_DTYPE_BF16) {
        return o;
    }
    uint32_t group = o & ~31u;
    uint32_t lane = o & 15u;
    return group + 2 * lane + ((o >> 4) & 1u);
}

#endif
