/* SPDX-License-Identifier: Apache-2.0 */
/* Panels of formats with groups, AVX-512F: codes widened in registers, a chain per group, one scaled add per group. */
#include <immintrin.h>

#include "kernels/x86/ffn_x86.h"

#define INLINE static inline __attribute__((always_inline))
#define VECTORS 4 /* of 16 floats: one panel line */
#define STREAM_BYTES 2048

/* Exact values of 4-bit codes, by code. */
INLINE __m512 nibble_table(ep_weight_format format)
{
    return format == EP_WEIGHTS_MXFP4
               ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
                                -4.0f, -6.0f)
               : _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f,
                                6.0f, 7.0f);
}

/* One line of f8e4m3: exponent and mantissa moved to their places, then a power of two for the exponents' biases. */
INLINE void load_f8(const uint8_t *line, __m512 w[VECTORS])
{
    const __m512i keep = _mm512_set1_epi32((int)0x87f00000u);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(line + 16 * j)));
        __m512i bits = _mm512_and_si512(_mm512_slli_epi32(codes, 20), keep);
        w[j] = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
    }
}

INLINE void load_scales(ep_weight_format format, const uint8_t *scales, __m512 s[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        if (format == EP_WEIGHTS_INT4) {
            __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(scales + 32 * j)));
            s[j] = _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
        } else if (format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_MXFP8) {
            __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(scales + 16 * j)));
            __mmask16 least = _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512());
            __m512i bits = _mm512_slli_epi32(codes, 23);
            s[j] = _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, least, _mm512_set1_epi32(0x00400000)));
        } else {
            s[j] = _mm512_loadu_ps(scales + 64 * j);
        }
    }
}

INLINE void add_line(const int rows, const __m512 w[VECTORS], const float *a, __m512 acc[][VECTORS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        __m512 x = _mm512_set1_ps(a[r]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = _mm512_fmadd_ps(w[j], x, acc[r][j]);
        }
    }
}

/* Line 0 or 1 of a pair of lines of 4-bit codes. */
INLINE void load_nibbles(__m512 table, __m512i codes, const int line, __m512 w[VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        w[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, (unsigned)(16 * line + 4 * j)), table);
    }
}

/* One group of one chunk: n lines, then c = fma(scale, chain, c). rows and format are constants where this is inlined. */
INLINE void tile(const int rows, const ep_weight_format format, const float *a, const uint8_t *b, uint32_t n,
                 bool first, float *c)
{
    const bool nibbles = format == EP_WEIGHTS_MXFP4 || format == EP_WEIGHTS_INT4;
    const uint32_t group = ep_weight_group_columns(format);
    const uint8_t *scales = b + (nibbles ? group / 2 : group) * EP_FFN_PANEL;
    __m512 acc[EP_FFN_CHUNK_ROWS][VECTORS];
    __m512 w[VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            acc[r][j] = _mm512_setzero_ps();
        }
    }
    if (nibbles) {
        const __m512 table = nibble_table(format);
        for (uint32_t k = 0; k + 1 < n; k += 2, b += 64, a += 2 * rows) {
            const __m512i codes = _mm512_loadu_si512(b);
            _mm_prefetch((const char *)b + STREAM_BYTES, _MM_HINT_T1);
            load_nibbles(table, codes, 0, w);
            add_line(rows, w, a, acc);
            load_nibbles(table, codes, 1, w);
            add_line(rows, w, a + rows, acc);
        }
        if ((n & 1u) != 0) {
            load_nibbles(table, _mm512_loadu_si512(b), 0, w);
            add_line(rows, w, a, acc);
        }
    } else {
        for (uint32_t k = 0; k < n; k++, b += EP_FFN_PANEL, a += rows) {
            load_f8(b, w);
            _mm_prefetch((const char *)b + STREAM_BYTES, _MM_HINT_T1);
            add_line(rows, w, a, acc);
        }
    }
    load_scales(format, scales, w);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *to = c + r * EP_FFN_PANEL + 16 * j;
            __m512 total = first ? _mm512_setzero_ps() : _mm512_load_ps(to);
            _mm512_store_ps(to, _mm512_fmadd_ps(w[j], acc[r][j], total));
        }
    }
}

typedef void (*tile_func)(const float *a, const uint8_t *b, uint32_t n, bool first, float *c);

#define TILE(name, format, rows)                                                                             \
    static void tile_##name##_##rows(const float *a, const uint8_t *b, uint32_t n, bool first, float *c)     \
    {                                                                                                        \
        tile(rows, format, a, b, n, first, c);                                                               \
    }
#define TILES(name, format)                                                                                  \
    TILE(name, format, 1)                                                                                    \
    TILE(name, format, 2)                                                                                    \
    TILE(name, format, 3)                                                                                    \
    TILE(name, format, 4)                                                                                    \
    TILE(name, format, 5)                                                                                    \
    TILE(name, format, 6)                                                                                    \
    static const tile_func tiles_##name[EP_FFN_CHUNK_ROWS] = {tile_##name##_1, tile_##name##_2,              \
                                                              tile_##name##_3, tile_##name##_4,              \
                                                              tile_##name##_5, tile_##name##_6};

TILES(f8, EP_WEIGHTS_F8_BLOCK)
TILES(mxfp4, EP_WEIGHTS_MXFP4)
TILES(mxfp8, EP_WEIGHTS_MXFP8)
TILES(int4, EP_WEIGHTS_INT4)

void ep_ffn_avx512f_group_panel(ep_weight_format format, const float *a, uint32_t rows, const uint8_t *panel,
                                uint32_t k_count, const uint8_t *next, float *c)
{
    const tile_func *tiles = format == EP_WEIGHTS_MXFP4   ? tiles_mxfp4
                             : format == EP_WEIGHTS_MXFP8 ? tiles_mxfp8
                             : format == EP_WEIGHTS_INT4  ? tiles_int4
                                                          : tiles_f8;
    const ep_ffn_chunks chunks = ep_ffn_chunks_of(rows);
    const uint32_t group = ep_weight_group_columns(format);
    (void)next; /* fetching runs over the panel's end, and the next panel mostly begins there */
    for (uint32_t k = 0; k < k_count; k += group, panel += ep_ffn_group_bytes(format)) {
        const uint32_t n = k_count - k < group ? k_count - k : group;
        for (uint32_t chunk = 0; chunk < chunks.count; chunk++) {
            const uint32_t chunk_rows = ep_ffn_chunk_rows(&chunks, chunk);
            const size_t first_row = ep_ffn_chunk_first_row(&chunks, chunk);
            tiles[chunk_rows - 1](a + first_row * k_count + (size_t)k * chunk_rows, panel, n, k == 0,
                                  c + first_row * EP_FFN_PANEL);
        }
    }
}
