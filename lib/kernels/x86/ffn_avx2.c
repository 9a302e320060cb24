/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2 + FMA + F16C kernel: 16 registers hold tiles of up to 6 rows x 16 outputs, four strips to a
 * panel. */
#include <immintrin.h>

#include "base/numeric.h"
#include "kernels/ffn_activation.h"
#include "kernels/x86/ffn_x86.h"

#define INLINE static inline __attribute__((always_inline))
#define STRIPS 4
#define PREFETCH_BYTES 2048

/*
 * A strip is outputs first..first+7 and first+16..first+23: what eight 32-bit lanes of a bf16 panel
 * widen to. dtype is a constant wherever this is inlined.
 */
INLINE uint32_t strip_first(uint32_t strip)
{
    return (strip >> 1) * 32 + (strip & 1) * 8;
}

INLINE void load_strip(ep_dtype dtype, const uint8_t *line, uint32_t first, __m256 w[2])
{
    if (dtype == EP_DTYPE_BF16) {
        const uint32_t slot = (first & ~31u) + 2 * (first & 15u);
        __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)(line + 2 * slot));
        w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        w[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
    } else if (dtype == EP_DTYPE_F16) {
        w[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(line + 2 * first)));
        w[1] = _mm256_cvtph_ps(
            _mm_loadu_si128((const __m128i *)(const void *)(line + 2 * first + 32)));
    } else {
        w[0] = _mm256_loadu_ps((const float *)(const void *)line + first);
        w[1] = _mm256_loadu_ps((const float *)(const void *)line + first + 16);
    }
}

/* One register tile over n lines of one strip. fresh: c is not read. */
INLINE void tile(const int rows, const ep_dtype dtype, const float *a, const uint8_t *b, uint32_t n,
                 bool fresh, uint32_t first, float *c)
{
    const int line_bytes = dtype == EP_DTYPE_F32 ? 256 : 128;
    __m256 acc[EP_FFN_CHUNK_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        acc[r][0] = fresh ? _mm256_setzero_ps() : _mm256_load_ps(c + r * EP_FFN_PANEL + first);
        acc[r][1] = fresh ? _mm256_setzero_ps() : _mm256_load_ps(c + r * EP_FFN_PANEL + first + 16);
    }
    for (uint32_t k = 0; k < n; k++) {
        __m256 w[2];
        load_strip(dtype, b, first, w);
        _mm_prefetch((const char *)b + PREFETCH_BYTES, _MM_HINT_T1);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m256 x = _mm256_broadcast_ss(a + r);
            acc[r][0] = _mm256_fmadd_ps(w[0], x, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(w[1], x, acc[r][1]);
        }
        a += rows;
        b += line_bytes;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        _mm256_store_ps(c + r * EP_FFN_PANEL + first, acc[r][0]);
        _mm256_store_ps(c + r * EP_FFN_PANEL + first + 16, acc[r][1]);
    }
}

typedef void (*tile_func)(const float *a, const uint8_t *b, uint32_t n, bool fresh, float *c);

#define TILE(name, dtype, rows)                                                                    \
    static void tile_##name##_##rows(const float *a, const uint8_t *b, uint32_t n, bool fresh,     \
                                     float *c)                                                     \
    {                                                                                              \
        for (uint32_t strip = 0; strip < STRIPS; strip++) {                                        \
            tile(rows, dtype, a, b, n, fresh, strip_first(strip), c);                              \
        }                                                                                          \
    }
#define TILES(name, dtype)                                                                         \
    TILE(name, dtype, 1)                                                                           \
    TILE(name, dtype, 2)                                                                           \
    TILE(name, dtype, 3)                                                                           \
    TILE(name, dtype, 4)                                                                           \
    TILE(name, dtype, 5)                                                                           \
    TILE(name, dtype, 6)                                                                           \
    static const tile_func tiles_##name[EP_FFN_CHUNK_ROWS] = {tile_##name##_1, tile_##name##_2,    \
                                                              tile_##name##_3, tile_##name##_4,    \
                                                              tile_##name##_5, tile_##name##_6};

TILES(bf16, EP_DTYPE_BF16)
TILES(f16, EP_DTYPE_F16)
TILES(f32, EP_DTYPE_F32)

static void avx2_panel(ep_dtype dtype, const float *a, uint32_t rows, const uint8_t *panel,
                       uint32_t k_count, const uint8_t *next, float *c)
{
    (void)next;
    const tile_func *tiles = dtype == EP_DTYPE_BF16  ? tiles_bf16
                             : dtype == EP_DTYPE_F16 ? tiles_f16
                                                     : tiles_f32;
    const size_t line_bytes = EP_FFN_PANEL * ep_dtype_bytes(dtype);
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t block = EP_FFN_K_BLOCK;

    for (uint32_t k = 0; k < k_count; k += block) {
        const uint32_t n = k_count - k < block ? k_count - k : block;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const uint32_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            const float *x = a + (size_t)first_row * k_count + (size_t)k * chunk_rows;
            tiles[chunk_rows - 1](x, panel + k * line_bytes, n, k == 0,
                                  c + (size_t)first_row * EP_FFN_PANEL);
        }
    }
}

const ep_ffn_kernel ep_ffn_kernel_avx2 = {
    .name = "avx2",
    .panel = avx2_panel,
    .group_panel = ep_ffn_avx2_group_panel,
    .int8_rows = ep_ffn_avx2_int8_rows,
    .int8_panel = ep_ffn_avx2_int8_panel,
    .activate = ep_act_rows,
    .exp16 = ep_act_exp16,
};
