/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NEON kernel: 32 registers of 4 floats hold tiles of up to 24 accumulators. The fewer rows, the
 * more outputs a tile spans: 1 x 64, 2..3 x 32, 4..6 x 16, so that there are always enough
 * independent sums.
 */
#include <arm_neon.h>

#include "kernels/arm/ffn_arm.h"
#include "kernels/ffn_activation.h"
#include "kernels/ffn_int8.h"
#include "kernels/ffn_tile.h"
#include "kernels/generic/ffn_generic.h"

#define UNITS 8 /* of a panel */

/*
 * A unit is outputs o..o+3 and o+16..o+19, which are what four 32-bit lanes of a bf16 panel widen
 * to. rows, dtype and units are constants wherever this is inlined.
 */
INLINE uint32_t unit_output(uint32_t unit)
{
    return unit / 4 * 32 + unit % 4 * 4;
}

INLINE void load_unit(ep_dtype dtype, const uint8_t *line, uint32_t unit, float32x4_t w[2])
{
    const uint32_t o = unit_output(unit);
    if (dtype == EP_DTYPE_BF16) {
        uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(line + 16 * unit));
        w[0] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
        w[1] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
    } else if (dtype == EP_DTYPE_F16) {
        w[0] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(line + 2 * o)));
        w[1] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(line + 2 * o + 32)));
    } else {
        w[0] = vreinterpretq_f32_u8(vld1q_u8(line + 4 * o));
        w[1] = vreinterpretq_f32_u8(vld1q_u8(line + 4 * o + 64));
    }
}

/* The inputs of one k in as few registers as possible: with 24 sums and 4 weights they fill all. */
typedef struct {
    float32x4_t four;
    float32x2_t two;
    float one[3];
} inputs;

INLINE inputs load_inputs(const int rows, const float *a)
{
    inputs x;
    if (rows >= 4) {
        x.four = vld1q_f32(a);
    }
    if (rows == 2 || rows == 6) {
        x.two = vld1_f32(a + rows - 2);
    }
    if (rows == 5) {
        x.one[0] = a[4];
    } else if (rows == 1 || rows == 3) {
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            x.one[r] = a[r];
        }
    }
    return x;
}

INLINE float input_at(const int rows, const inputs *x, const int r)
{
    if (rows == 1 || rows == 3) {
        return x->one[r];
    }
    if (rows == 2) {
        return x->two[r];
    }
    return r < 4 ? x->four[r] : rows == 5 ? x->one[0] : x->two[r - 4];
}

/* One register tile over n lines of `units` units from unit first on. fresh: c is not read. */
INLINE void tile(const int rows, const ep_dtype dtype, const uint32_t units, const int lines,
                 prefetch ahead, const float *a, const uint8_t *b, uint32_t n, bool fresh,
                 uint32_t first, float *c)
{
    const int line_bytes = dtype == EP_DTYPE_F32 ? 256 : 128;
    float32x4_t acc[EP_FFN_CHUNK_ROWS][UNITS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (uint32_t u = 0; u < units; u++) {
            const float *from = c + r * EP_FFN_PANEL + unit_output(first + u);
            acc[r][u][0] = fresh ? vdupq_n_f32(0.0f) : vld1q_f32(from);
            acc[r][u][1] = fresh ? vdupq_n_f32(0.0f) : vld1q_f32(from + 16);
        }
    }
    for (uint32_t k = 0; k < n; k++) {
#pragma GCC unroll 4
        for (int q = 0; q < lines; q++) {
            __builtin_prefetch(ahead.next + 64 * q, 0, 2);
        }
        ahead.next += ahead.step;
        const inputs x = load_inputs(rows, a);
#pragma GCC unroll 8
        for (uint32_t u = 0; u < units; u++) {
            float32x4_t w[2];
            load_unit(dtype, b, first + u, w);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                acc[r][u][0] = vfmaq_n_f32(acc[r][u][0], w[0], input_at(rows, &x, r));
                acc[r][u][1] = vfmaq_n_f32(acc[r][u][1], w[1], input_at(rows, &x, r));
            }
        }
        a += rows;
        b += line_bytes;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (uint32_t u = 0; u < units; u++) {
            float *to = c + r * EP_FFN_PANEL + unit_output(first + u);
            vst1q_f32(to, acc[r][u][0]);
            vst1q_f32(to + 16, acc[r][u][1]);
        }
    }
}

typedef void (*tile_func)(const float *a, const uint8_t *b, uint32_t n, bool fresh, prefetch ahead,
                          float *c);

/* All outputs of a panel; each tile fetches its part of what `ahead` names. */
#define TILE(rows, name, dtype)                                                                    \
    static void name##_##rows(const float *a, const uint8_t *b, uint32_t n, bool fresh,            \
                              prefetch ahead, float *c)                                            \
    {                                                                                              \
        const uint32_t units = (rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2;                              \
        const uint32_t tiles = UNITS / units;                                                      \
        const int line_cache_lines = (dtype) == EP_DTYPE_F32 ? 4 : 2;                              \
        const int lines = tiles > 2 ? 1 : line_cache_lines / (int)tiles;                           \
        ahead.step = (ahead.step + tiles - 1) / tiles;                                             \
        for (uint32_t unit = 0; unit < UNITS; unit += units) {                                     \
            tile(rows, dtype, units, lines, ahead, a, b, n, fresh, unit, c);                       \
            ahead.next += n * ahead.step;                                                          \
        }                                                                                          \
    }

EP_FFN_BY_ROWS(tile_func, tiles_bf16, TILE, EP_DTYPE_BF16)
EP_FFN_BY_ROWS(tile_func, tiles_f16, TILE, EP_DTYPE_F16)
EP_FFN_BY_ROWS(tile_func, tiles_f32, TILE, EP_DTYPE_F32)

/*
 * Blocks of k, all chunks per block. While a block is used from the nearest cache, every tile
 * fetches an equal share of what follows, so that loading overlaps arithmetic: the next block, or
 * the next panel.
 */
void ep_ffn_neon_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                       uint32_t k_count, const uint8_t *next, float *c)
{
    const tile_func *tiles = dtype == EP_DTYPE_BF16  ? tiles_bf16
                             : dtype == EP_DTYPE_F16 ? tiles_f16
                                                     : tiles_f32;
    const size_t line_bytes = EP_FFN_PANEL * ep_dtype_bytes(dtype);
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const size_t share = (line_bytes + chunks.count - 1) / chunks.count;

    for (uint32_t k = 0; k < k_count; k += EP_FFN_K_BLOCK) {
        const uint32_t n = k_count - k < EP_FFN_K_BLOCK ? k_count - k : EP_FFN_K_BLOCK;
        const uint8_t *b = panel + k * line_bytes;
        const uint8_t *behind = k + n < k_count ? b + n * line_bytes : next;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + (size_t)first_row * k_count + (size_t)k * chunk_rows;
            prefetch ahead = {.next = b, .step = 0};
            if (behind != NULL) {
                ahead = (prefetch){.next = behind + (size_t)chunk * n * share, .step = share};
            }
            tiles[chunk_rows - 1](x, b, n, k == 0, ahead, c + (size_t)first_row * EP_FFN_PANEL);
        }
    }
}

const ep_ffn_kernel ep_ffn_kernel_neon = {
    .name = "neon",
    .panel = ep_ffn_neon_panel,
    .group_panel = ep_ffn_generic_group_panel,
    .int8_rows = ep_ffn_int8_rows,
    .int8_panel = ep_ffn_generic_int8_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
};
