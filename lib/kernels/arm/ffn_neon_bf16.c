/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel of family `bf16odd` for processors with BFDOT and BFMMLA. For one row, and for a last
 * single line: BFDOT, a pair for 4 outputs per instruction. For more rows: BFMMLA, two pairs for 2
 * rows x 2 outputs, twice the work per instruction. Both compute the same steps in the same order.
 */
#include <arm_neon.h>
#include <string.h>

#include "kernels/arm/ffn_arm.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_tile.h"
#include "kernels/generic/ffn_generic.h"

#define LINE_BYTES 256u /* of a panel: 64 outputs, a pair each */
#define LINES_BLOCK 64u /* used for all chunks before the next block: 16 KiB; even */

INLINE bfloat16x8_t load_weights(const uint8_t *from)
{
    return vreinterpretq_bf16_u8(vld1q_u8(from));
}

/* n lines of 4 * vectors outputs, from output first on. rows and vectors are constants wherever
 * this is inlined. */
INLINE void dot_tile(const int rows, const int vectors, prefetch ahead, const float *a,
                     const uint8_t *b, uint32_t n, bool fresh, int first, float *c)
{
    float32x4_t acc[EP_FFN_CHUNK_ROWS][EP_FFN_PANEL / 4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            acc[r][v] = fresh ? vdupq_n_f32(0.0f) : vld1q_f32(c + r * EP_FFN_PANEL + first + 4 * v);
        }
    }
    for (uint32_t line = 0; line < n; line++, a += rows, b += LINE_BYTES) {
        bfloat16x8_t x[EP_FFN_CHUNK_ROWS];
        __builtin_prefetch(ahead.next, 0, 2);
        ahead.next += ahead.step;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            x[r] = vreinterpretq_bf16_f32(vdupq_n_f32(a[r]));
        }
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            const bfloat16x8_t w = load_weights(b + 4 * first + 16 * v);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                acc[r][v] = vbfdotq_f32(acc[r][v], w, x[r]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            vst1q_f32(c + r * EP_FFN_PANEL + first + 4 * v, acc[r][v]);
        }
    }
}

/* Both pairs of rows 2 * p and 2 * p + 1 of two lines; zeros for a row after the last. */
INLINE bfloat16x8_t load_rows(const int rows, const float *a, const int p)
{
    float32x4_t x;
    if (2 * p + 1 < rows) {
        x = vzip1q_f32(vcombine_f32(vld1_f32(a + 2 * p), vdup_n_f32(0.0f)),
                       vcombine_f32(vld1_f32(a + rows + 2 * p), vdup_n_f32(0.0f)));
    } else {
        x = (float32x4_t){a[2 * p], a[rows + 2 * p], 0.0f, 0.0f};
    }
    return vreinterpretq_bf16_f32(x);
}

/*
 * 2 * n lines of 4 * vectors outputs, from output first on. acc[p][j]: outputs 2j, 2j + 1 of row
 * 2p, then of row 2p + 1. rows and vectors are constants wherever this is inlined.
 */
INLINE void matrix_tile(const int rows, const int vectors, prefetch ahead, const float *a,
                        const uint8_t *b, uint32_t n, bool fresh, int first, float *c)
{
    const int pairs = (rows + 1) / 2;
    float32x4_t acc[EP_FFN_CHUNK_ROWS / 2][EP_FFN_PANEL / 2];
#pragma GCC unroll 3
    for (int p = 0; p < pairs; p++) {
#pragma GCC unroll 32
        for (int j = 0; j < 2 * vectors; j++) {
            const float *from = c + 2 * p * EP_FFN_PANEL + first + 2 * j;
            const float32x2_t upper = fresh ? vdup_n_f32(0.0f) : vld1_f32(from);
            const float32x2_t lower =
                fresh || 2 * p + 1 >= rows ? vdup_n_f32(0.0f) : vld1_f32(from + EP_FFN_PANEL);
            acc[p][j] = vcombine_f32(upper, lower);
        }
    }
    for (uint32_t i = 0; i < n; i++, a += 2 * rows, b += 2 * LINE_BYTES) {
        bfloat16x8_t x[EP_FFN_CHUNK_ROWS / 2];
        __builtin_prefetch(ahead.next, 0, 2);
        __builtin_prefetch(ahead.next + ahead.step, 0, 2);
        ahead.next += 2 * ahead.step;
#pragma GCC unroll 3
        for (int p = 0; p < pairs; p++) {
            x[p] = load_rows(rows, a, p);
        }
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            const uint32x4_t even = vreinterpretq_u32_u8(vld1q_u8(b + 4 * first + 16 * v));
            const uint32x4_t odd =
                vreinterpretq_u32_u8(vld1q_u8(b + LINE_BYTES + 4 * first + 16 * v));
            const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(even, odd));
            const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(even, odd));
#pragma GCC unroll 3
            for (int p = 0; p < pairs; p++) {
                acc[p][2 * v] = vbfmmlaq_f32(acc[p][2 * v], x[p], low);
                acc[p][2 * v + 1] = vbfmmlaq_f32(acc[p][2 * v + 1], x[p], high);
            }
        }
    }
#pragma GCC unroll 3
    for (int p = 0; p < pairs; p++) {
#pragma GCC unroll 32
        for (int j = 0; j < 2 * vectors; j++) {
            float *to = c + 2 * p * EP_FFN_PANEL + first + 2 * j;
            vst1_f32(to, vget_low_f32(acc[p][j]));
            if (2 * p + 1 < rows) {
                vst1_f32(to + EP_FFN_PANEL, vget_high_f32(acc[p][j]));
            }
        }
    }
}

typedef void (*tile_func)(prefetch ahead, const float *a, const uint8_t *b, uint32_t n, bool fresh,
                          float *c);

/* All outputs of n lines (of 2 * n), in tiles of as many outputs as there are registers for; each
 * fetches its part. */
#define DOT(rows, vectors)                                                                         \
    static void dot_##rows(prefetch ahead, const float *a, const uint8_t *b, uint32_t n,           \
                           bool fresh, float *c)                                                   \
    {                                                                                              \
        ahead.step = (ahead.step * 4 * (vectors) + EP_FFN_PANEL - 1) / EP_FFN_PANEL;               \
        for (int first = 0; first < EP_FFN_PANEL; first += 4 * (vectors)) {                        \
            dot_tile(rows, vectors, ahead, a, b, n, fresh, first, c);                              \
            ahead.next += n * ahead.step;                                                          \
        }                                                                                          \
    }
#define MATRIX(rows, vectors)                                                                      \
    static void matrix_##rows(prefetch ahead, const float *a, const uint8_t *b, uint32_t n,        \
                              bool fresh, float *c)                                                \
    {                                                                                              \
        ahead.step = (ahead.step * 4 * (vectors) + EP_FFN_PANEL - 1) / EP_FFN_PANEL;               \
        for (int first = 0; first < EP_FFN_PANEL; first += 4 * (vectors)) {                        \
            matrix_tile(rows, vectors, ahead, a, b, n, fresh, first, c);                           \
            ahead.next += 2 * n * ahead.step;                                                      \
        }                                                                                          \
    }
DOT(1, 16)
DOT(2, 8)
DOT(3, 8)
DOT(4, 4)
DOT(5, 4)
DOT(6, 4)
MATRIX(2, 8)
MATRIX(3, 4)
MATRIX(4, 4)
MATRIX(5, 4)
MATRIX(6, 4)
static const tile_func dots[EP_FFN_CHUNK_ROWS] = {dot_1, dot_2, dot_3, dot_4, dot_5, dot_6};
static const tile_func matrices[EP_FFN_CHUNK_ROWS] = {NULL,     matrix_2, matrix_3,
                                                      matrix_4, matrix_5, matrix_6};

/* n lines for one chunk. */
static void chunk_lines(uint32_t rows, prefetch ahead, const float *a, const uint8_t *b, uint32_t n,
                        bool fresh, float *c)
{
    if (rows == 1) {
        dots[0](ahead, a, b, n, fresh, c);
        return;
    }
    const uint32_t even = n & ~1u;
    if (even > 0) {
        matrices[rows - 1](ahead, a, b, even / 2, fresh, c);
    }
    if (even < n) {
        const prefetch nothing = {.next = b, .step = 0};
        dots[rows - 1](nothing, a + (size_t)even * rows, b + (size_t)even * LINE_BYTES, 1,
                       fresh && even == 0, c);
    }
}

/*
 * Blocks of lines, all chunks per block. While a block is used from the nearest cache, every tile
 * fetches an equal share of what follows, so that loading overlaps arithmetic: the next block, or
 * the next panel.
 */
static void bf16_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                       uint32_t lines, const uint8_t *next, float *c)
{
    (void)dtype;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const size_t share = (LINE_BYTES + chunks.count - 1) / chunks.count;
    for (uint32_t line = 0; line < lines; line += LINES_BLOCK) {
        const uint32_t n = lines - line < LINES_BLOCK ? lines - line : LINES_BLOCK;
        const uint8_t *b = panel + (size_t)line * LINE_BYTES;
        const uint8_t *behind = line + n < lines ? b + (size_t)n * LINE_BYTES : next;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + (size_t)first_row * lines + (size_t)line * chunk_rows;
            prefetch ahead = {.next = b, .step = 0};
            if (behind != NULL) {
                ahead = (prefetch){.next = behind + (size_t)chunk * n * share, .step = share};
            }
            chunk_lines(chunk_rows, ahead, x, b, n, line == 0,
                        c + (size_t)first_row * EP_FFN_PANEL);
        }
    }
}

const ep_ffn_kernel ep_ffn_kernel_neon_bf16 = {
    .name = "neon_bf16",
    .family = EP_FFN_FAMILY_BF16ODD,
    .panel = bf16_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_generic_pack_pairs,
    .lay = ep_ffn_generic_lay_pairs,
};
