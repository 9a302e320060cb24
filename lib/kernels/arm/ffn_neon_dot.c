/* SPDX-License-Identifier: Apache-2.0 */
/* NEON kernel for processors with dot products of int8: w8a8 sums four products per instruction.
 * Integer sums are exact, so the bits equal those of every other kernel. */
#include <arm_neon.h>
#include <string.h>

#include "kernels/arm/ffn_arm.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_int8.h"
#include "kernels/ffn_tile.h"
#include "kernels/generic/ffn_generic.h"

#define VECTORS 16 /* of 4 outputs: one panel line */

/*
 * Outputs from 4 * first on in `vectors` vectors, for all of a chunk's rows. rows and vectors are
 * constants wherever this is inlined; their product is at most 24, the number of free registers.
 */
INLINE void tile(const int rows, const int vectors, const int8_t *a, const uint8_t *panel,
                 uint32_t quads, int first, int32_t *sums)
{
    int32x4_t acc[EP_FFN_CHUNK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            acc[r][v] = vdupq_n_s32(0);
        }
    }
    for (uint32_t q = 0; q < quads; q++, a += 4 * rows, panel += 4 * EP_FFN_PANEL) {
        int8x16_t x[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t quad;
            memcpy(&quad, a + 4 * r, sizeof(quad));
            x[r] = vreinterpretq_s8_s32(vdupq_n_s32(quad));
        }
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            const int8x16_t w = vreinterpretq_s8_u8(vld1q_u8(panel + 16 * (first + v)));
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                acc[r][v] = vdotq_s32(acc[r][v], w, x[r]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            vst1q_s32(sums + r * EP_FFN_PANEL + 4 * (first + v), acc[r][v]);
        }
    }
}

typedef void (*tile_func)(const int8_t *a, const uint8_t *panel, uint32_t quads, int32_t *sums);

#define TILE(rows, name)                                                                           \
    static void name##_##rows(const int8_t *a, const uint8_t *panel, uint32_t quads,               \
                              int32_t *sums)                                                       \
    {                                                                                              \
        const int vectors = (rows) == 1 ? 16 : (rows) <= 3 ? 8 : 4;                                \
        for (int first = 0; first < VECTORS; first += vectors) {                                   \
            tile(rows, vectors, a, panel, quads, first, sums);                                     \
        }                                                                                          \
    }
EP_FFN_BY_ROWS(tile_func, tiles, TILE)

static void dot_sums(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t quads,
                     int32_t *sums)
{
    tiles[rows - 1](a, panel, quads, sums);
}

static void dot_int8_panel(const int8_t *a, uint32_t rows, const uint8_t *panel, uint32_t k_count,
                           const float *row_scales, const uint8_t *next, float *c)
{
    (void)next;
    ep_ffn_int8_panel_of(dot_sums, a, rows, panel, k_count, row_scales, c);
}

const ep_ffn_kernel ep_ffn_kernel_neon_dot = {
    .name = "neon_dot",
    .panel = ep_ffn_neon_panel,
    .group_panel = ep_ffn_generic_group_panel,
    .int8_rows = ep_ffn_int8_rows,
    .int8_panel = dot_int8_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
};
