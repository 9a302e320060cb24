/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Family `w4a8` on AVX2: tiles of up to 6 rows x 8 outputs. Weights are moved up as in the AVX-512
 * VNNI form; the sum of four products of two is below 2^15 in size, so half a group is summed in 16
 * bits.
 */
#include <immintrin.h>

#include "kernels/ffn_activation.h"
#include "kernels/ffn_tile.h"
#include "kernels/ffn_w4a8.h"
#include "kernels/x86/ffn_x86.h"

#define STRIPS 8 /* of 8 outputs: a panel */
#define AHEAD_BYTES 4096u
#define BLOCK_GROUPS 16u /* stay near while all chunks pass */

/* The lower nibbles of 32 bytes as unsigned weights. */
INLINE __m256i widen(ep_weight_format format, __m256i nibbles)
{
    if (format != EP_WEIGHTS_MXFP4) {
        return nibbles;
    }
    const __m256i e2m1 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
    return _mm256_shuffle_epi8(e2m1, nibbles);
}

/* One pair of quads in 16 bits. rows is a constant. */
INLINE void add_pair(const int rows, const ep_weight_format format, __m256i codes, const float *a,
                     __m256i sums[])
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m256i nibbles = half == 0 ? codes : _mm256_srli_epi16(codes, 4);
        const __m256i w = widen(format, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m256i x = _mm256_castps_si256(_mm256_broadcast_ss(a + half * rows + r));
            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(w, x));
        }
    }
}

/* Scales of a group, and of q4_k eighths of its offsets. */
typedef struct {
    _Alignas(32) float scales[EP_FFN_PANEL];
    _Alignas(32) float eighths[EP_FFN_PANEL];
} group_ends;

INLINE void load_ends(const ep_weight_format format, const uint8_t *group, const float *factors,
                      group_ends *to)
{
    const uint8_t *scales = group + EP_FFN_W4A8_CODE_BYTES;
    if (format == EP_WEIGHTS_INT4_F16) {
        for (uint32_t o = 0; o < EP_FFN_PANEL; o += 8) {
            const __m128i halves = _mm_load_si128((const __m128i *)(const void *)(scales + 2 * o));
            _mm256_store_ps(to->scales + o, _mm256_cvtph_ps(halves));
        }
        return;
    }
    for (uint32_t o = 0; o < EP_FFN_PANEL; o++) {
        if (format == EP_WEIGHTS_Q4_K) {
            to->scales[o] = (float)scales[o] * factors[o];
            to->eighths[o] = (float)scales[EP_FFN_PANEL + o] * factors[EP_FFN_PANEL + o] * 0.125f;
        } else {
            to->scales[o] = ep_ffn_w4a8_scale(format, scales, o);
        }
    }
}

/* Strip s of one group. a: the group's lines. rows and format are constants. */
INLINE void strip_tile(const int rows, const ep_weight_format format, const uint8_t *group,
                       uint32_t s, const group_ends *by, const float *a, float *c)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m256i eight =
            _mm256_castps_si256(_mm256_broadcast_ss(a + (int)EP_FFN_W4A8_START_LINE * rows + r));
        acc[r] = format == EP_WEIGHTS_Q4_K    ? _mm256_setzero_si256()
                 : format == EP_WEIGHTS_MXFP4 ? _mm256_add_epi32(eight, eight)
                                              : eight;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i sums[EP_FFN_CHUNK_ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            sums[r] = _mm256_setzero_si256();
        }
#pragma GCC unroll 2
        for (int p = 2 * half; p < 2 * half + 2; p++) {
            const uint8_t *codes = group + p * (int)EP_FFN_W4A8_PAIR_BYTES + 32 * s;
            add_pair(rows, format, _mm256_load_si256((const __m256i *)(const void *)codes),
                     a + 2 * p * rows, sums);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(sums[r], ones));
        }
    }
    const __m256 weight_scale = _mm256_load_ps(by->scales + 8 * s);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        float *to = c + r * EP_FFN_PANEL + 8 * s;
        const __m256 sum = _mm256_cvtepi32_ps(acc[r]);
        const __m256 input_scale = _mm256_broadcast_ss(a + (int)EP_FFN_W4A8_SCALE_LINE * rows + r);
        const __m256 total = _mm256_load_ps(to);
        if (format == EP_WEIGHTS_Q4_K) {
            const __m256 start = _mm256_cvtepi32_ps(_mm256_castps_si256(
                _mm256_broadcast_ss(a + (int)EP_FFN_W4A8_START_LINE * rows + r)));
            const __m256 less = _mm256_mul_ps(_mm256_load_ps(by->eighths + 8 * s), start);
            const __m256 scaled = _mm256_fmadd_ps(sum, weight_scale, less);
            _mm256_store_ps(to, _mm256_fmadd_ps(scaled, input_scale, total));
        } else {
            const __m256 scaled = _mm256_mul_ps(sum, input_scale);
            _mm256_store_ps(to, _mm256_fmadd_ps(scaled, weight_scale, total));
        }
    }
}

/* One chunk over n groups, of whose blocks of columns factors are. rows and format are constants.
 */
INLINE void tile(const int rows, const ep_weight_format format, const uint8_t *group, uint32_t n,
                 const float *factors, const float *a, float *c)
{
    const size_t group_bytes = ep_ffn_group_bytes(format);
    for (uint32_t g = 0; g < n; g++, group += group_bytes, a += (int)EP_FFN_W4A8_LINES * rows) {
        group_ends by;
        load_ends(format, group,
                  factors + g * EP_MX_GROUP / EP_SCALE_BLOCK * ep_ffn_block_factors(format), &by);
        for (uint32_t s = 0; s < STRIPS; s++) {
            _mm_prefetch((const char *)group + AHEAD_BYTES + s * (group_bytes / STRIPS),
                         _MM_HINT_T1);
            _mm_prefetch((const char *)group + AHEAD_BYTES + s * (group_bytes / STRIPS) + 64,
                         _MM_HINT_T1);
            strip_tile(rows, format, group, s, &by, a, c);
        }
    }
}

typedef void (*tile_func)(const uint8_t *group, uint32_t n, const float *factors, const float *a,
                          float *c);

#define TILE(rows, name, format)                                                                   \
    static void name##_##rows(const uint8_t *group, uint32_t n, const float *factors,              \
                              const float *a, float *c)                                            \
    {                                                                                              \
        tile(rows, format, group, n, factors, a, c);                                               \
    }

EP_FFN_BY_ROWS(tile_func, mxfp4, TILE, EP_WEIGHTS_MXFP4)
EP_FFN_BY_ROWS(tile_func, int4, TILE, EP_WEIGHTS_INT4)
EP_FFN_BY_ROWS(tile_func, int4_f16, TILE, EP_WEIGHTS_INT4_F16)
EP_FFN_BY_ROWS(tile_func, q4_k, TILE, EP_WEIGHTS_Q4_K)

static const tile_func *const tiles_of[EP_WEIGHTS_COUNT] = {[EP_WEIGHTS_MXFP4] = mxfp4,
                                                            [EP_WEIGHTS_INT4] = int4,
                                                            [EP_WEIGHTS_INT4_F16] = int4_f16,
                                                            [EP_WEIGHTS_Q4_K] = q4_k};

static void w4a8_group_panel(ep_weight_format format, const float *a, uint32_t rows,
                             const uint8_t *panel, uint32_t k_count, const uint8_t *next, float *c)
{
    const tile_func *tiles = tiles_of[format];
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t groups = ep_ffn_w4a8_groups(k_count);
    const uint8_t *group = panel;
    (void)next;
    memset(c, 0, (size_t)rows * EP_FFN_PANEL * sizeof(*c));
    for (uint32_t g = 0; g < groups;
         g += BLOCK_GROUPS, group += BLOCK_GROUPS * ep_ffn_group_bytes(format)) {
        const uint32_t n = groups - g < BLOCK_GROUPS ? groups - g : BLOCK_GROUPS;
        const float *factors = ep_ffn_factors_of(format, panel, groups, g * EP_MX_GROUP);
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            tiles[chunk_rows - 1](group, n, factors,
                                  a + EP_FFN_W4A8_LINES *
                                          (first_row * groups + (size_t)g * chunk_rows),
                                  c + first_row * EP_FFN_PANEL);
        }
    }
}

const ep_ffn_kernel ep_ffn_kernel_w4a8_avx2 = {
    .name = "avx2-w4a8",
    .family = EP_FFN_FAMILY_W4A8,
    .group_panel = w4a8_group_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
    .pack_rows = ep_ffn_w4a8_pack_rows,
    .lay = ep_ffn_w4a8_lay,
};
